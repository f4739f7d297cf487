"""What a pod's manifest asks for, field by field: a runner that is to judge must not overlook one.

A field that this runner acts on is in ``KNOWN``; one that can change nothing on a single node is in
``IGNORED``; any other raises :class:`NotEmulated`, so that no test passes by what was left out.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from decimal import Decimal
from typing import Any

KNOWN = {
    "pod": {
        "containers",
        "initContainers",
        "volumes",
        "restartPolicy",
        "terminationGracePeriodSeconds",
        "securityContext",
        "serviceAccountName",
        "hostname",
        "subdomain",
    },
    "pod.securityContext": {
        "runAsUser",
        "runAsGroup",
        "runAsNonRoot",
        "fsGroup",
        "fsGroupChangePolicy",
        "supplementalGroups",
        "seccompProfile",
    },
    "container": {
        "name",
        "image",
        "command",
        "args",
        "workingDir",
        "env",
        "envFrom",
        "ports",
        "volumeMounts",
        "restartPolicy",
        "resources",
        "securityContext",
        "startupProbe",
        "livenessProbe",
        "readinessProbe",
        "lifecycle",
        "terminationMessagePath",
        "terminationMessagePolicy",
    },
    "container.securityContext": {
        "runAsUser",
        "runAsGroup",
        "runAsNonRoot",
        "readOnlyRootFilesystem",
        "allowPrivilegeEscalation",
        "privileged",
        "capabilities",
        "seccompProfile",
    },
    "probe": {
        "httpGet",
        "exec",
        "tcpSocket",
        "initialDelaySeconds",
        "periodSeconds",
        "timeoutSeconds",
        "failureThreshold",
        "successThreshold",
        "terminationGracePeriodSeconds",
    },
    "lifecycle": {"preStop"},
    "handler": {"httpGet", "exec", "sleep"},
    "httpGet": {"path", "port", "host", "scheme", "httpHeaders"},
    "volumeMount": {"name", "mountPath", "readOnly", "subPath"},
    "volume": {
        "name",
        "emptyDir",
        "secret",
        "configMap",
        "downwardAPI",
        "projected",
        "hostPath",
        "persistentVolumeClaim",
    },
}
IGNORED = {
    "pod": {
        "affinity",
        "automountServiceAccountToken",
        "dnsPolicy",
        "enableServiceLinks",
        "imagePullSecrets",
        "nodeSelector",
        "priorityClassName",
        "schedulerName",
        "tolerations",
        "topologySpreadConstraints",
    },
    "container": {"imagePullPolicy"},
}


class NotEmulated(Exception):  # noqa: N818
    """The manifest asks for what this runner does not do."""


class ConfigError(Exception):
    """What the kubelet reports as CreateContainerConfigError."""


def check(kind: str, given: Mapping[str, Any] | None) -> None:
    """See that a mapping has only fields that this runner knows.

    Raises:
        NotEmulated: names the others.
    """
    more = set(given or {}) - KNOWN[kind] - IGNORED.get(kind, set())
    if more:
        raise NotEmulated(f"{kind}: {', '.join(sorted(more))}")


def check_pod(spec: Mapping[str, Any]) -> None:
    """See that all of a pod's manifest is emulated.

    Raises:
        NotEmulated: names what is not.
    """
    check("pod", spec)
    check("pod.securityContext", spec.get("securityContext"))
    for volume in spec.get("volumes", []):
        check("volume", volume)
    for container in (*spec.get("initContainers", []), *spec["containers"]):
        check("container", container)
        context = container.get("securityContext") or {}
        check("container.securityContext", context)
        if context.get("privileged"):
            raise NotEmulated(f"{container['name']}: privileged")
        for name in ("startupProbe", "livenessProbe", "readinessProbe"):
            check("probe", container.get(name))
            check("httpGet", (container.get(name) or {}).get("httpGet"))
        lifecycle = container.get("lifecycle") or {}
        check("lifecycle", lifecycle)
        check("handler", lifecycle.get("preStop"))
        check("httpGet", (lifecycle.get("preStop") or {}).get("httpGet"))
        for mount in container.get("volumeMounts", []):
            check("volumeMount", mount)


_UNITS = {"": 0, "k": 1, "M": 2, "G": 3, "T": 4, "P": 5}


def quantity(text: object) -> Decimal:
    """A quantity as Kubernetes writes it: ``100m``, ``512Mi``, ``2G``, ``1.5``."""
    found = re.fullmatch(r"([0-9.]+)(?:(m)|([kKMGTP]?)(i?))", str(text))
    if found is None:
        raise ConfigError(f"{text!r} is no quantity")
    number, milli, unit, binary = found.groups()
    if milli:
        return Decimal(number) / 1000
    return Decimal(number) * (1024 if binary else 1000) ** _UNITS[unit.replace("K", "k")]


def expand(text: str, known: Mapping[str, str]) -> str:
    """``$(NAME)`` becomes its value if that is known, ``$$`` becomes ``$``."""

    def value(match: re.Match[str]) -> str:
        return "$" if match[0] == "$$" else known.get(match[1], match[0])

    return re.sub(r"\$\$|\$\(([-._a-zA-Z0-9]+)\)", value, text)


def security(
    pod: Mapping[str, Any], container: Mapping[str, Any], image_user: str
) -> tuple[list[str], bool]:
    """Arguments of podman for both security contexts, and whether the container runs as root.

    Raises:
        ConfigError: it must not run as root, and would.
    """
    outer = pod.get("securityContext") or {}
    inner = container.get("securityContext") or {}
    uid = inner.get("runAsUser", outer.get("runAsUser"))
    gid = inner.get("runAsGroup", outer.get("runAsGroup"))
    if inner.get("runAsNonRoot", outer.get("runAsNonRoot")):
        user = str(image_user if uid is None else uid)
        if user in ("", "0", "root"):
            raise ConfigError(f"{container['name']}: runAsNonRoot, and it would run as root")
        if not user.isdigit():
            raise ConfigError(f"{container['name']}: runAsNonRoot, and its user {user} is a name")
    arguments: list[str] = []
    if uid is not None:
        arguments += ["--user", f"{uid}:{0 if gid is None else gid}"]
    elif gid is not None:
        arguments += ["--user", f"{image_user or 0}:{gid}"]
    groups: Iterable[int] = outer.get("supplementalGroups", [])
    for group in (*groups, *([outer["fsGroup"]] if "fsGroup" in outer else [])):
        arguments += ["--group-add", str(group)]
    if inner.get("readOnlyRootFilesystem"):  # podman alone would put a tmpfs on /tmp and /run
        arguments += ["--read-only", "--read-only-tmpfs=false"]
    if inner.get("allowPrivilegeEscalation") is False:
        arguments += ["--security-opt", "no-new-privileges"]
    profile = inner.get("seccompProfile", outer.get("seccompProfile")) or {"type": "Unconfined"}
    if profile["type"] == "Unconfined":
        arguments += ["--security-opt", "seccomp=unconfined"]
    elif profile["type"] != "RuntimeDefault":
        raise NotEmulated(f"seccompProfile {profile['type']}")
    is_root = str(image_user if uid is None else uid) in ("", "0", "root")
    capabilities = inner.get("capabilities") or {}
    for name in capabilities.get("drop", []):
        arguments += ["--cap-drop", name]
    for name in capabilities.get("add", []) if is_root else []:
        # One that is added reaches no other user in Kubernetes; podman would make it ambient.
        arguments += ["--cap-add", name]
    return arguments, is_root


def resources(container: Mapping[str, Any]) -> list[str]:
    """Arguments of podman for the limits."""
    limits = (container.get("resources") or {}).get("limits") or {}
    arguments = []
    if "memory" in limits:
        most = str(int(quantity(limits["memory"])))
        arguments += ["--memory", most, "--memory-swap", most]
    if "cpu" in limits:
        arguments += ["--cpus", str(quantity(limits["cpu"]))]
    return arguments
