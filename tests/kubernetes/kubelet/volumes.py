"""The volumes of a pod, as the kubelet lays them out on its node."""

from __future__ import annotations

import base64
import os
import shutil
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tests.kubernetes.kubelet.spec import ConfigError, NotEmulated, check, expand, quantity

KINDS = ("Secret", "ConfigMap")
Documents = Mapping[tuple[str, str], Mapping[str, Any]]
"""Secrets and config maps, by kind and name."""


def data_of(document: Mapping[str, Any]) -> dict[str, bytes]:
    """The keys of a Secret or a ConfigMap."""
    data = document.get("data") or {}
    if document["kind"] == "Secret":
        found = {key: base64.b64decode(value) for key, value in data.items()}
        more = document.get("stringData") or {}
    else:
        found = {k: base64.b64decode(v) for k, v in (document.get("binaryData") or {}).items()}
        more = data
    return {**found, **{key: str(value).encode() for key, value in more.items()}}


def lookup(documents: Documents, kind: str, name: str, *, optional: bool) -> dict[str, bytes]:
    """The keys of one that the pod names.

    Raises:
        ConfigError: there is none, and it is not optional.
    """
    document = documents.get((kind, name))
    if document is None:
        if optional:
            return {}
        raise ConfigError(f'{kind.lower()} "{name}" not found')
    return data_of(document)


class Volumes:
    """Makes the volumes of one pod under a folder, and removes them with it.

    Args:
        pod: its spec.
        folder: new; for this pod alone.
        documents: the Secrets and ConfigMaps of its namespace.
        claims: the folder behind each PersistentVolumeClaim.
        field: the value of a field of the pod, by its path.
        token: of its service account.
        memory: bytes that the pod may use, the most of a volume in memory; None: no limit.
    """

    def __init__(
        self,
        pod: Mapping[str, Any],
        folder: Path,
        *,
        documents: Documents,
        claims: Mapping[str, Path],
        field: Callable[[str], str],
        token: str,
        memory: int | None,
    ) -> None:
        self._folder = folder
        self._documents = documents
        self._field = field
        self._token = token
        self._memory = memory
        self._fs_group: int | None = (pod.get("securityContext") or {}).get("fsGroup")
        self._mounted: list[Path] = []
        self.paths: dict[str, Path] = {}
        folder.mkdir(parents=True)
        for volume in pod.get("volumes", []):
            name = volume["name"]
            if "hostPath" in volume:
                self.paths[name] = Path(volume["hostPath"]["path"])
            elif "persistentVolumeClaim" in volume:
                self.paths[name] = path = claims[volume["persistentVolumeClaim"]["claimName"]]
                for inner in (path, *path.rglob("*")):
                    self._give_to_group(inner)
            else:
                self.paths[name] = path = folder / name
                path.mkdir()
                self._fill(volume, path)

    def _fill(self, volume: Mapping[str, Any], path: Path) -> None:
        if "emptyDir" in volume:
            self._empty(volume["emptyDir"] or {}, path)
            return
        (kind,) = set(volume) - {"name"}
        source = volume[kind]
        mode = source.get("defaultMode", 0o644)
        for each in source["sources"] if kind == "projected" else [{kind: source}]:
            for name, (value, own_mode) in self._files(each).items():
                file = path / name
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_bytes(value)
                file.chmod(mode if own_mode is None else own_mode)
                if self._fs_group is not None:
                    os.chown(file, 0, self._fs_group)
                    file.chmod(file.stat().st_mode & 0o7777 | 0o440)

    def _files(self, source: Mapping[str, Any]) -> dict[str, tuple[bytes, int | None]]:
        """What one source of files holds: path to content and mode."""
        if "serviceAccountToken" in source:
            return {source["serviceAccountToken"]["path"]: (self._token.encode(), 0o600)}
        (kind,) = source
        given = source[kind]
        if kind == "downwardAPI":
            return {
                item["path"]: (self._field(item["fieldRef"]["fieldPath"]).encode(), None)
                for item in given["items"]
            }
        kinds = {"secret": "Secret", "configMap": "ConfigMap"}
        if kind not in kinds:
            raise NotEmulated(f"volume: {kind}")
        name = given.get("secretName") or given["name"]
        data = lookup(
            self._documents, kinds[kind], name, optional=bool(given.get("optional", False))
        )
        items = given.get("items") or [{"key": key, "path": key} for key in data]
        missing = [item["key"] for item in items if item["key"] not in data]
        if missing and not given.get("optional"):
            raise ConfigError(f"{kind} {name} has no key {', '.join(missing)}")
        return {
            item["path"]: (data[item["key"]], item.get("mode"))
            for item in items
            if item["key"] in data
        }

    def _empty(self, given: Mapping[str, Any], path: Path) -> None:
        medium = given.get("medium", "")
        if medium == "Memory":
            sizes = [self._memory] if self._memory is not None else []
            sizes += [int(quantity(given["sizeLimit"]))] if "sizeLimit" in given else []
            options = ["-o", f"size={min(sizes)}"] if sizes else []
            subprocess.run(["mount", "-t", "tmpfs", *options, "tmpfs", path], check=True)
            self._mounted.append(path)
        elif medium:
            raise NotEmulated(f"emptyDir of medium {medium}")
        path.chmod(0o777)
        self._give_to_group(path)

    def _give_to_group(self, path: Path) -> None:
        """What the kubelet does to each file and folder of a volume for ``fsGroup``."""
        if self._fs_group is None or path.is_symlink():
            return
        os.chown(path, -1, self._fs_group)
        more = 0o2770 if path.is_dir() else 0o660
        path.chmod(path.stat().st_mode & 0o7777 | more)

    def mounts(self, container: Mapping[str, Any]) -> list[str]:
        """Arguments of podman for a container's mounts."""
        arguments = []
        for mount in container.get("volumeMounts", []):
            check("volumeMount", mount)
            if mount["name"] not in self.paths:
                raise ConfigError(f"{container['name']}: there is no volume {mount['name']}")
            path = self.paths[mount["name"]] / mount.get("subPath", "")
            options = "ro" if mount.get("readOnly") else "rw"
            arguments += ["--volume", f"{path}:{mount['mountPath']}:{options}"]
        return arguments

    def remove(self) -> None:
        """All that was made for this pod goes, as with the pod."""
        for path in self._mounted:
            subprocess.run(["umount", "--lazy", path], check=False)
        self._mounted.clear()
        shutil.rmtree(self._folder, ignore_errors=True)


def environment(
    container: Mapping[str, Any],
    *,
    documents: Documents,
    field: Callable[[str], str],
    services: Mapping[str, str],
    extra: Mapping[str, str],
) -> dict[str, str]:
    """The variables of a container.

    Args:
        container: its spec.
        documents: the Secrets and ConfigMaps of its namespace.
        field: the value of a field of the pod, by its path.
        services: what tells of the cluster's services.
        extra: what a controller adds.

    Raises:
        ConfigError: a Secret, a ConfigMap or a key of one is not there.
    """
    found = dict(services)
    for source in container.get("envFrom", []):
        ((kind, given),) = ((k, v) for k, v in source.items() if k != "prefix")
        kinds = {"secretRef": "Secret", "configMapRef": "ConfigMap"}
        optional = bool(given.get("optional", False))
        data = lookup(documents, kinds[kind], given["name"], optional=optional)
        for key, value in data.items():
            found[source.get("prefix", "") + key] = value.decode()
    for entry in (*container.get("env", []), *({"name": k, "value": v} for k, v in extra.items())):
        name = entry["name"]
        if "valueFrom" not in entry:
            found[name] = expand(str(entry.get("value") or ""), found)
            continue
        ((kind, given),) = entry["valueFrom"].items()
        if kind == "fieldRef":
            found[name] = field(given["fieldPath"])
        elif kind == "resourceFieldRef":
            found[name] = _resource(container, given)
        elif kind in ("secretKeyRef", "configMapKeyRef"):
            optional = bool(given.get("optional", False))
            of = "Secret" if kind == "secretKeyRef" else "ConfigMap"
            data = lookup(documents, of, given["name"], optional=optional)
            if given["key"] in data:
                found[name] = data[given["key"]].decode()
            elif not optional:
                raise ConfigError(f"couldn't find key {given['key']} in {of} {given['name']}")
        else:
            raise NotEmulated(f"env: {kind}")
    return found


def _resource(container: Mapping[str, Any], given: Mapping[str, Any]) -> str:
    part, _, resource = given["resource"].partition(".")
    value = ((container.get("resources") or {}).get(part) or {}).get(resource)
    if value is None:
        raise NotEmulated(f"resourceFieldRef to {given['resource']}, which is not set")
    divided = quantity(value) / quantity(given.get("divisor") or 1)
    return str(int(divided.to_integral_value("ROUND_CEILING")))
