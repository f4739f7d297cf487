"""A sidecar that is killed, and a node that is lost."""

from __future__ import annotations

import pytest

from tests.kubernetes.pods.scene import MIB, RESTORE, SIDECAR, TRAINER, Said, Scene


def test_a_sidecar_that_is_killed_in_mid_upload_is_started_again_and_goes_on_from_there(
    scene: Scene,
) -> None:
    scene.install(["--hidden", "1024"], agent={"streams": 1})
    pod = scene.pod()
    scene.until_logged(pod, "store.probed")
    scene.link.limit(6 * MIB)
    scene.go(2)
    scene.until_logged(pod, "save.uploading", tag="step2")
    scene.until_sent(pod, 20 * MIB)
    pod.kill(SIDECAR)
    pod.until(lambda: pod.containers[SIDECAR].runs == 2, what="a second run")
    scene.link.limit(None)
    scene.go(4)
    scene.end()
    assert pod.wait() == "Succeeded"
    assert [ended.exit_code for ended in pod.containers[SIDECAR].ends] == [137, 0]
    assert pod.containers[TRAINER].runs == 1, "training does not notice"
    assert pod.containers[RESTORE].runs == 1
    (uploaded,) = scene.log(pod, "save.uploaded", tag="step2")
    assert uploaded["resumed_parts"] > 0
    assert scene.check() == ["step2", "step4"]
    assert not scene.check_last_message(pod).not_durable


@pytest.mark.timeout(400)
def test_a_node_of_two_that_is_lost_with_its_half_of_a_save_is_restored_and_both_resume_from_one(
    scene: Scene,
) -> None:
    scene.install(
        ["--steps", "6", "--save-at", "2,4,6"],
        launcher=["torch.distributed.run", "-m"],
        workload={"kind": "IndexedJob", "nodes": 2, "processesPerNode": 1},
    )
    zero, one = scene.pod(0), scene.pod(1)
    scene.go(2)
    for pod in (zero, one):
        scene.until_logged(pod, "save.committed", 120, tag="step2")
    scene.link.limit(MIB // 16)
    scene.go(4)
    for pod in (zero, one):
        scene.until_logged(pod, "save.uploading", tag="step4")
    one.delete(grace=2)
    one.wait()
    assert "step4" in Said.of(one.containers[SIDECAR].last.message).not_durable
    scene.link.limit(None)
    scene.until_logged(zero, "save.stored", tag="step4")
    assert list(scene.committed().values()) == ["step2"], "half of a save is none"
    before = scene.losses(zero)
    scene.go(6)  # which node 0 cannot do alone

    fresh = scene.pod(1)
    assert not list(scene.volume(fresh).glob("step*"))
    scene.end()
    assert zero.wait(150) == "Succeeded"
    assert fresh.wait() == "Succeeded"
    assert fresh.containers[RESTORE].last.exit_code == 0
    assert scene.trained(zero, "resumed") == [None, "step2"]
    assert scene.trained(fresh, "resumed") == ["step2"]
    for step in (3, 4):
        assert scene.losses(fresh)[step] == before[step], "to the last bit"
    assert scene.losses(fresh) == {s: scene.losses(zero)[s] for s in (3, 4, 5, 6)}
    assert scene.check() == ["step2", "step4", "step6"]
    assert scene.log(zero, "save.left_waiting", tag="step4"), "the pod is not held up for it"
