"""The trainer is root with umask 077, and the sidecar is another user: the common case."""

from __future__ import annotations

import json

import pytest

from tests.kubernetes.pods.scene import SIDECAR, TRAINER, Scene


def modes(scene: Scene) -> set[str]:
    """The modes that the trainer gave to what it saved."""
    truths = (scene.gate / "saved").glob("*.json")
    return {mode for truth in truths for mode in json.loads(truth.read_text())["modes"]}


@pytest.mark.parametrize("uid", [0, 1000])
def test_files_that_only_their_owner_may_read_are_stored_by_a_sidecar_of_another_user(
    scene: Scene, uid: int
) -> None:
    scene.install(
        ["--umask", "077"], trainer={"securityContext": {"runAsUser": uid, "runAsGroup": uid}}
    )
    pod = scene.pod()
    scene.go(4)
    scene.end()
    assert pod.wait() == "Succeeded"
    assert modes(scene) == {"0o600"}
    assert scene.log(pod, "agent.started", uid=65532)
    assert scene.check() == ["step2", "step4"]
    assert not scene.check_last_message(pod).not_durable


def test_if_nobody_widens_the_modes_everyone_is_told_the_file_the_users_and_the_remedy(
    scene: Scene,
) -> None:
    scene.install(
        ["--umask", "077", "--no-widening", "--finalize-timeout", "3"],
        pod={"terminationGracePeriodSeconds": 15},
    )
    pod = scene.pod()
    scene.go(2)
    pod.until(lambda: tells(pod.output(SIDECAR)), what="the sidecar says it")
    assert tells(pod.execute(SIDECAR, "ds-ckpt", "doctor", code=1))
    scene.go(4)
    scene.end()
    assert pod.wait() == "Succeeded"
    assert tells(pod.output(TRAINER))
    assert tells(pod.containers[SIDECAR].last.message)
    assert scene.check() == []
    assert set(scene.check_last_message(pod).not_durable) == {"step2", "step4"}


def tells(text: str) -> bool:
    return all(word in text for word in ("uid 0", "uid 65532", "fsGroup", "/checkpoints/"))
