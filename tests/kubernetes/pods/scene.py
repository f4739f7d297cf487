"""A release of the chart, its pods, and the store that they reach: what a scenario plays with."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import yaml

from tests import servers
from tests.kubernetes.kubelet.cluster import Cluster, Document, find
from tests.kubernetes.kubelet.pod import Pod
from tests.kubernetes.pods.link import Link
from tests.kubernetes.tools import machine

CHART = machine.ROOT / "helm" / "ds-ckpt-sidecar"
SIDECAR, RESTORE, TRAINER = "ds-ckpt-sidecar", "ds-ckpt-restore", "trainer"
STORE = "store.test"
SECRET = "keys"
NAMESPACE = "training"
MIB = 1 << 20
UNTOLD = {"event", "timestamp", "time", "level", "save_id", "node", "rank", "shards"}


@dataclass(frozen=True)
class Parts:
    """What the pods are made of.

    Attributes:
        image: the sidecar's.
        trainer_image: the trainer's.
        lent: folders of this machine that the trainer's container needs.
        python: the interpreter in there.
    """

    image: str
    trainer_image: str
    lent: Sequence[str]
    python: str


@dataclass(frozen=True)
class Said:
    """A termination message.

    Attributes:
        durable: folder of the newest checkpoint; empty if it names none.
        not_durable: tag to what is said of it.
    """

    durable: str
    not_durable: Mapping[str, str]

    @classmethod
    def of(cls, message: str) -> Said:
        durable, lost = "", {}
        for line in message.splitlines():
            if line.startswith("durable: ") and "(" in line:
                durable = line.split("(", 1)[1].split(", saved ", 1)[0]
            elif line.startswith("not durable: "):
                tag, why = line.removeprefix("not durable: ").split(": ", 1)
                lost[tag] = why
        return cls(durable, lost)


class Scene:
    """One release named ``train``, in an empty bucket.

    Args:
        cluster: where its pods run.
        link: on which they reach the store.
        server: the store, as this process reaches it.
        parts: what pods are made of.
        folder: for what the trainers are led by, and for restored checkpoints.
    """

    def __init__(
        self, cluster: Cluster, link: Link, server: servers.S3, parts: Parts, folder: Path
    ) -> None:
        self.cluster, self.link = cluster, link
        self.timeline = cluster.timeline
        self.gate = folder / "gate"
        (self.gate / "saved").mkdir(parents=True)
        (self.gate / "saved").chmod(0o777)  # trainers are of any user
        self._server, self._parts, self._folder = server, parts, folder
        self.url = f"s3://{server.bucket()}/run"
        self._job: Document = {}
        self.pods: list[Pod] = []
        cluster.names[STORE] = cluster.network.address
        cluster.secret(
            SECRET,
            AWS_ACCESS_KEY_ID=server.access_key,
            AWS_SECRET_ACCESS_KEY=server.secret_key,
        )

    # ---- what a platform engineer does

    def install(
        self, arguments: Sequence[str] = (), *, launcher: Sequence[str] = (), **values: Any
    ) -> None:
        """``helm template`` and ``kubectl apply``.

        Args:
            arguments: further ones of the trainer.
            launcher: module that starts it, and its arguments.
            values: of the chart, over those that all scenarios have in common.
        """
        file = self._folder / "values.json"
        file.write_text(json.dumps(merged(self._common(launcher, arguments), values)))
        command = [machine.tool("helm4"), "template", "train", CHART, "--values", file]
        command += ["--namespace", NAMESPACE]
        ran = subprocess.run([*map(str, command)], capture_output=True, text=True)
        assert ran.returncode == 0, ran.stderr
        documents = [each for each in yaml.safe_load_all(ran.stdout) if each]
        self.cluster.apply(documents)
        self._job = find(documents, "Job")

    def pod(self, index: int = 0) -> Pod:
        """The next pod that the Job's controller makes."""
        pod = self.cluster.job(self._job, index)
        self.pods.append(pod)
        return pod

    def _common(self, launcher: Sequence[str], arguments: Sequence[str]) -> dict[str, Any]:
        lent = {f"lent-{number}": path for number, path in enumerate(self._parts.lent)}
        lent["gate"] = str(self.gate)
        program = [self._parts.python, "-m", *launcher, "tests.kubernetes.pods.trainer"]
        program += ["--gate", str(self.gate)]
        name, _, tag = self._parts.image.rpartition(":")
        return {
            "destination": self.url,
            "storeEnv": {
                "DS_CKPT_S3_ENDPOINT": f"http://{STORE}:{self.link.port}",
                "AWS_DEFAULT_REGION": servers.REGION,
            },
            "credentials": {"secret": SECRET},
            "image": {"repository": name, "tag": tag, "pullPolicy": "Never"},
            "agent": {"partMib": 5, "rescanSeconds": 1},
            "trainer": {
                "image": self._parts.trainer_image,
                "command": [*program, *arguments],
                "workingDir": str(machine.ROOT),
                "env": [
                    {"name": "DS_ACCELERATOR", "value": "cpu"},
                    {"name": "OMP_NUM_THREADS", "value": "1"},
                    {"name": "HOME", "value": "/tmp"},
                    {"name": "PYTHONDONTWRITEBYTECODE", "value": "1"},
                ],
                "volumeMounts": [
                    {"name": name, "mountPath": path, "readOnly": name != "gate"}
                    for name, path in lent.items()
                ],
            },
            "pod": {
                "extraVolumes": [
                    {"name": name, "hostPath": {"path": path}} for name, path in lent.items()
                ]
            },
        }

    # ---- leading the trainers

    def go(self, steps: int) -> None:
        """Let trainers go up to this step."""
        part = self.gate / ".steps"
        part.write_text(str(steps))
        part.rename(self.gate / "steps")

    def end(self) -> None:
        """Let trainers end, once they have made all their steps."""
        (self.gate / "end").touch()

    # ---- what pods say

    @staticmethod
    def log(pod: Pod, event: str = "", **values: object) -> list[dict[str, Any]]:
        """The lines of a pod's sidecar, or those of an event that hold such values."""
        return [
            line
            for line in lines_of(pod, SIDECAR)
            if event in ("", line.get("event"))
            and all(line.get(key) == value for key, value in values.items())
        ]

    def until_logged(self, pod: Pod, event: str, seconds: float = 60, **values: object) -> None:
        """Wait until a pod's sidecar has said this."""
        pod.until(lambda: self.log(pod, event, **values), seconds, f"{event} {values}")

    def until_sent(self, pod: Pod, count: int, seconds: float = 60) -> None:
        """Wait until so many more bytes were sent to the store."""
        before = self.link.sent
        pod.until(lambda: self.link.sent >= before + count, seconds, f"{count} more bytes")

    @staticmethod
    def trained(pod: Pod, key: str) -> list[Any]:
        """What a pod's trainer has said under a key, in order."""
        return [line[key] for line in lines_of(pod, TRAINER) if key in line]

    def losses(self, pod: Pod) -> dict[int, str]:
        """Step to loss, to the last bit; of a step made twice, the last."""
        said = lines_of(pod, TRAINER)
        return {line["step"]: line["loss"] for line in said if "loss" in line}

    def when(self, pod: Pod, event: str, **values: object) -> float:
        """When a pod's sidecar said this first, on the timeline."""
        return self.timeline.at(seconds_of(self.log(pod, event, **values)[0]))

    def volume(self, pod: Pod) -> Path:
        """The volume that trainer and sidecar share."""
        return pod.volumes.paths["ds-ckpt"]

    # ---- the store

    def committed(self) -> dict[str, str]:
        """Save id to tag of each checkpoint in the store, oldest first."""
        listed = json.loads(self.ds_ckpt("ls", self.url, "--json"))
        assert not listed["damaged"]
        found = {each["save_id"]: each["tag"] for each in listed["checkpoints"]}
        assert listed["latest"] == (list(found)[-1] if found else None)
        return found

    def check(self) -> list[str]:
        """Judge what was said and stored; the tags of what is stored, oldest first.

        Whatever the store calls a checkpoint restores bit for bit as the trainer wrote it, and
        whatever anybody was told to be durable is among it.
        """
        committed = self.committed()
        for save_id, tag in committed.items():
            self._check_restored(save_id, tag)
        for pod in self.pods:
            for line in self.log(pod, "save.committed"):
                assert line["save_id"] in committed, f"{line['tag']} was said to be durable"
            for tags in self.trained(pod, "durable"):
                assert set(tags) <= set(committed.values()), "the trainer was told so"
            for ended in pod.containers[SIDECAR].ends:
                said = Said.of(ended.message).durable.rpartition("@")[2]
                assert not said or said in committed, f"{pod.story()}\n{ended.message}"
        return list(committed.values())

    def check_last_message(self, pod: Pod) -> Said:
        """The termination message of a pod's sidecar, after its end, which must be true."""
        said = Said.of(pod.containers[SIDECAR].last.message)
        committed = self.committed()
        newest = list(committed)[-1] if committed else ""
        assert said.durable.rpartition("@")[2] == newest, pod.story()
        saved = [tag for tag in self.trained(pod, "saved") if tag not in committed.values()]
        assert sorted(said.not_durable) == sorted(saved), pod.story()
        return said

    def _check_restored(self, save_id: str, tag: str) -> None:
        fresh = self._folder / f"restored-{save_id}"
        if fresh.exists():
            return
        self.ds_ckpt("restore", "--from", self.url, "--to", str(fresh), "--save", save_id)
        restored = digests(fresh / tag)
        assert restored == self.written(save_id), tag
        assert (fresh / "latest").read_text() == tag

    def written(self, save_id: str) -> dict[str, str]:
        """What the ranks wrote for a save: path to checksum."""
        files: dict[str, str] = {}
        for path in (self.gate / "saved").glob(f"{save_id}.*.json"):
            files |= json.loads(path.read_text())["files"]
        return files

    def ds_ckpt(self, *arguments: str) -> str:
        """Run the command on this machine; what it wrote."""
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("AWS_", "DS_CKPT_"))}
        ran = subprocess.run(
            [sys.executable, "-m", "ds_ckpt_sidecar", *arguments],
            capture_output=True,
            text=True,
            env={**kept, **self._server.environ},
            timeout=120,
        )
        assert ran.returncode == 0, f"{arguments}: {ran.stdout}{ran.stderr}"
        return ran.stdout

    # ---- for people

    def note_what_was_said(self) -> None:
        """Add to the timeline what sidecars and trainers said."""
        for pod in self.pods:
            for name in (SIDECAR, TRAINER):
                for line in lines_of(pod, name):
                    said = dict(line)
                    at = seconds_of(said)
                    what = said.pop("event", None) or "says"
                    skip = ("timestamp", "time", "level", "save_id", "node", "rank", "shards")
                    told = {k: v for k, v in said.items() if k not in skip}
                    detail = " ".join(f"{key}={value}" for key, value in told.items())
                    self.timeline.note(
                        what, detail[:160], pod=pod.name, container=name, since_epoch=at
                    )


def lines_of(pod: Pod, name: str) -> list[dict[str, Any]]:
    """The lines of a container's output that are JSON objects with a time."""
    found = []
    for line in pod.output(name).splitlines():
        if line.startswith("{") and line.endswith("}"):
            said = json.loads(line)
            if "timestamp" in said or "time" in said:
                found.append(said)
    return found


def seconds_of(line: Mapping[str, Any]) -> float:
    """When a line was written, since the epoch."""
    if "timestamp" in line:
        return datetime.fromisoformat(line["timestamp"].replace("Z", "+00:00")).timestamp()
    return float(line["time"])


def digests(folder: Path) -> dict[str, str]:
    """Path to checksum of each file below a folder."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.rglob("*")
        if path.is_file()
    }


def merged(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """Values over values, as helm merges them."""
    made = dict(one)
    for key, value in other.items():
        both = isinstance(value, Mapping) and isinstance(made.get(key), Mapping)
        made[key] = merged(made[key], value) if both else value
    return made


def lent(arguments: Iterable[str]) -> list[str]:
    """The folders in podman's ``--volume=PATH:PATH:ro``."""
    found = []
    for argument in arguments:
        source, target, options = argument.removeprefix("--volume=").split(":")
        assert source == target, argument
        assert options == "ro", argument
        found.append(source)
    return found
