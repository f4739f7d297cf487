"""A sidecar that is killed, and a node that is lost."""

from __future__ import annotations

import pytest

from tests.kubernetes.pods.scene import MIB, RESTORE, SIDECAR, TRAINER, Scene


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
def test_a_node_of_two_that_is_lost_is_restored_and_both_resume_from_one_save(
    scene: Scene,
) -> None:
    scene.install(
        launcher=["torch.distributed.run", "-m"],
        workload={"kind": "IndexedJob", "nodes": 2, "processesPerNode": 1},
    )
    zero, one = scene.pod(0), scene.pod(1)
    scene.go(3)
    for pod in (zero, one):
        pod.until(lambda: 3 in scene.losses(pod), 120, "step 3")  # noqa: B023
    zero.until(lambda: list(scene.committed().values()) == ["step2"], what="step2 is durable")
    before = scene.losses(zero)
    one.delete()
    one.wait()
    scene.go(4)  # which node 0 cannot make alone

    fresh = scene.pod(1)
    assert not list(scene.volume(fresh).glob("step*"))
    scene.end()
    assert zero.wait(150) == "Succeeded"
    assert fresh.wait() == "Succeeded"
    assert fresh.containers[RESTORE].last.exit_code == 0
    assert scene.trained(zero, "resumed") == [None, "step2"]
    assert scene.trained(fresh, "resumed") == ["step2"]
    for pod in (zero, fresh):
        assert scene.losses(pod)[3] == before[3], "to the last bit"
    assert scene.losses(zero)[4] == scene.losses(fresh)[4]
    assert scene.check() == ["step2", "step4"]
    for pod in (zero, fresh):
        assert not scene.check_last_message(pod).not_durable
