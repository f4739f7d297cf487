"""As much of a cluster as pods see: other objects of their namespace, names, and one node."""

from __future__ import annotations

import dataclasses
import random
import string
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tests.kubernetes.kubelet.network import Network
from tests.kubernetes.kubelet.pod import Meta, Place, Pod
from tests.kubernetes.kubelet.runtime import Podman
from tests.kubernetes.kubelet.timeline import Timeline
from tests.kubernetes.kubelet.volumes import KINDS

Document = Mapping[str, Any]
DOMAIN = "svc.cluster.local"


class Cluster:
    """Exists from ``__enter__`` to ``__exit__``, and leaves no container, mount or network.

    Args:
        podman: the runtime.
        folder: for volumes and outputs.
        namespace: of everything in it.
        backoff: seconds before the second restart of a container; a real one waits 10.

    Attributes:
        names: further host names that pods know, with their addresses.
        claims: the folder behind each PersistentVolumeClaim.
        services: variables that tell every container of services, such as the API server's.
        token: of every service account.
        timeline: of all its pods.
        network: of the node.
    """

    def __init__(
        self,
        podman: Podman,
        folder: Path,
        *,
        namespace: str = "default",
        backoff: float = 0.5,
    ) -> None:
        self.podman = podman
        self._folder = folder
        self._namespace = namespace
        self.names: dict[str, str] = {}
        self.claims: dict[str, Path] = {}
        self.services: dict[str, str] = {}
        self.token = "a token of no cluster"
        self._backoff = backoff
        self._documents: dict[tuple[str, str], Document] = {}
        self._services: dict[str, Document] = {}
        self._pods: list[Pod] = []
        self._lock = threading.Lock()
        self.timeline = Timeline()
        self.network = Network()

    def __enter__(self) -> Cluster:
        self._folder.mkdir(exist_ok=True)
        self.network.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        try:
            for pod in reversed(self._pods):
                pod.remove()
        finally:
            self.network.__exit__()

    def apply(self, documents: Iterable[Document | None]) -> None:
        """Take what a chart has rendered; what is no pod, secret, config map or service is left."""
        for document in documents:
            if document is None:
                continue
            name = document["metadata"]["name"]
            if document["kind"] in KINDS:
                self._documents[document["kind"], name] = document
            elif document["kind"] == "Service":
                self._services[name] = document
        self._name_pods()

    def secret(self, name: str, **values: str) -> None:
        """Make a Secret that a chart expects to be there."""
        self.apply([{"kind": "Secret", "metadata": {"name": name}, "stringData": values}])

    def pod(self, meta: Meta, spec: Mapping[str, Any]) -> Pod:
        """Run a pod; see :class:`Pod` for what it raises."""
        netns, address = self.network.attach()
        hosts = self._folder / f"{netns}.hosts"
        _write_names(hosts, meta, address, [])
        place = Place(
            podman=self.podman,
            folder=self._folder / f"{meta.name}.{netns}",
            netns=netns,
            address=address,
            node_address=self.network.address,
            hosts=hosts,
            services=self.services,
            token=self.token,
            documents=self._documents,
            claims=self.claims,
            backoff=self._backoff,
            changed=self._name_pods,
        )
        pod = Pod(meta, spec, place, self.timeline)
        self._pods.append(pod)
        self._name_pods()
        return pod

    def job(self, document: Document, index: int = 0) -> Pod:
        """A pod of a Job, as its controller makes it; once more after one has gone.

        Args:
            document: the Job, as rendered.
            index: of an Indexed Job.
        """
        template, job = document["spec"]["template"], document["metadata"]["name"]
        letters = "".join(random.choices(string.ascii_lowercase, k=5))
        metadata = template.get("metadata") or {}
        labels = {
            **(metadata.get("labels") or {}),
            "batch.kubernetes.io/job-name": job,
            "job-name": job,
        }
        meta = Meta(
            f"{job}-{letters}",
            self._namespace,
            labels,
            metadata.get("annotations") or {},
        )
        if document["spec"].get("completionMode") == "Indexed":
            key = "batch.kubernetes.io/job-completion-index"
            meta = dataclasses.replace(
                meta,
                name=f"{job}-{index}-{letters}",
                hostname=f"{job}-{index}",
                labels={**labels, key: str(index)},
                annotations={**meta.annotations, key: str(index)},
                environ={"JOB_COMPLETION_INDEX": str(index)},
            )
        return self.pod(meta, template["spec"])

    # ---- names

    def _name_pods(self) -> None:
        """Write what the cluster's DNS answers now, into the file that each pod has for it."""
        with self._lock:
            lines = [f"{address} {name}" for name, address in self.names.items()]
            for name, service in self._services.items():
                lines += self._published(name, service["spec"])
            for pod in self._alive():
                _write_names(pod.hosts, pod.meta, pod.address, lines)

    def _published(self, name: str, spec: Mapping[str, Any]) -> list[str]:
        """The names of a headless service and of its pods, with their addresses."""
        suffixes = ["", f".{self._namespace}", f".{self._namespace}.svc"]
        suffixes += [f".{self._namespace}.{DOMAIN}"]
        wanted = dict(spec.get("selector") or {})
        lines = []
        for pod in self._alive():
            if not wanted.items() <= dict(pod.meta.labels).items():
                continue
            if not (pod.ready or spec.get("publishNotReadyAddresses")):
                continue
            hosts = [name]
            if pod.meta.hostname and pod.spec.get("subdomain") == name:
                hosts.append(f"{pod.meta.hostname}.{name}")
            lines += [f"{pod.address} {host}{suffix}" for host in hosts for suffix in suffixes]
        return lines

    def _alive(self) -> list[Pod]:
        return [pod for pod in list(self._pods) if not pod.gone.is_set()]


def _write_names(hosts: Path, meta: Meta, address: str, more: list[str]) -> None:
    """In place, since it is mounted into containers; a pod always knows its own host name."""
    own = ["127.0.0.1 localhost", f"{address} {meta.hostname or meta.name}"]
    with hosts.open("r+" if hosts.exists() else "w") as file:
        file.write("\n".join([*own, *more, ""]))
        file.truncate()


def find(documents: Iterable[Document | None], kind: str, name: str = "") -> Document:
    """The one rendered document of a kind (and name)."""
    found = [
        each
        for each in documents
        if each and each["kind"] == kind and (not name or each["metadata"]["name"] == name)
    ]
    assert len(found) == 1, f"{len(found)} documents of kind {kind} {name}"
    return found[0]
