"""Completion, deletion, eviction: what the sidecar makes durable, and that it says the truth."""

from __future__ import annotations

from tests.kubernetes.kubelet.pod import Pod
from tests.kubernetes.pods.scene import MIB, RESTORE, SECRET, SIDECAR, TRAINER, Scene

SLOW = MIB  # bytes per second: a save takes some eight seconds
CRAWL = MIB // 16  # it takes minutes


def one_durable_and_one_under_way(scene: Scene, rate: float) -> Pod:
    """A pod with ``step2`` in the store, and ``step4`` on its way there at so many bytes/s."""
    pod = scene.pod()
    scene.go(2)
    scene.until_logged(pod, "save.committed", tag="step2")
    scene.link.limit(rate)
    scene.go(4)
    scene.until_logged(pod, "save.uploading", tag="step4")
    scene.until_sent(pod, MIB // 4)
    return pod


def test_a_pod_succeeds_when_training_is_done_and_all_that_was_saved_is_durable(
    scene: Scene,
) -> None:
    scene.install(["--finalize-timeout", "0.5"])
    pod = scene.pod()
    scene.go(4)
    pod.until(lambda: scene.trained(pod, "saved") == ["step2", "step4"], what="two saves")
    scene.link.limit(4 * SLOW)
    scene.end()
    assert pod.wait() == "Succeeded"
    assert pod.containers[RESTORE].last.exit_code == 0, "a first start finds nothing"
    assert pod.containers[SIDECAR].last.exit_code == 0
    assert scene.check() == ["step2", "step4"]
    assert not scene.check_last_message(pod).not_durable


def test_a_plain_container_ends_by_itself_when_training_is_done_and_all_is_durable(
    scene: Scene,
) -> None:
    scene.install(["--finalize-timeout", "0.5"], sidecar={"native": False})
    pod = scene.pod()
    scene.go(4)
    pod.until(lambda: scene.trained(pod, "saved") == ["step2", "step4"], what="two saves")
    scene.link.limit(4 * SLOW)
    scene.end()
    assert pod.wait() == "Succeeded"
    assert not scene.timeline.of("SIGTERM"), "nobody asked it to"
    assert pod.containers[SIDECAR].last.exit_code == 0
    assert scene.check() == ["step2", "step4"]
    assert not scene.check_last_message(pod).not_durable


def test_a_pod_that_is_deleted_in_mid_upload_makes_it_durable_within_its_grace(
    scene: Scene,
) -> None:
    single = [
        {"name": name, "secret": SECRET, "key": name}
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
    ]
    scene.install(
        credentials={"secret": "", "env": single}, pod={"terminationGracePeriodSeconds": 300}
    )
    pod = one_durable_and_one_under_way(scene, CRAWL)
    pod.delete()
    pod.until(lambda: scene.timeline.of("SIGTERM", container=SIDECAR), what="it is told to end")
    scene.link.limit(SLOW)
    pod.wait(120)
    assert pod.containers[TRAINER].last.exit_code == 143
    assert pod.containers[SIDECAR].last.exit_code == 0
    sigterm = scene.timeline.only("SIGTERM", container=SIDECAR)
    assert sigterm.at < scene.when(pod, "save.committed", tag="step4")
    assert scene.check() == ["step2", "step4"]
    assert not scene.check_last_message(pod).not_durable


def test_a_trainer_that_uses_all_of_a_short_grace_leaves_two_seconds_and_a_true_message(
    scene: Scene,
) -> None:
    scene.install(["--on-term", "nothing"], pod={"terminationGracePeriodSeconds": 15})
    pod = one_durable_and_one_under_way(scene, CRAWL)
    pod.delete()
    assert pod.wait() == "Failed"
    assert scene.timeline.only("SIGKILL", container=TRAINER)
    assert scene.timeline.only("SIGTERM", container=SIDECAR).detail == "2 s of grace"
    assert scene.check() == ["step2"]
    assert "step4" in scene.check_last_message(pod).not_durable


def test_what_an_evicted_pod_had_stored_is_what_its_successor_resumes_from(scene: Scene) -> None:
    scene.install(["--on-term", "nothing"], workload={"restartPolicy": "Never"})
    first = one_durable_and_one_under_way(scene, CRAWL)
    first.evict()
    assert first.wait() == "Failed"
    assert first.reason == "Evicted"
    assert scene.timeline.only("gone").at - scene.timeline.only("terminating").at < 60
    assert scene.check() == ["step2"]
    assert "step4" in scene.check_last_message(first).not_durable

    scene.link.limit(None)
    second = scene.pod()
    scene.end()
    assert second.wait() == "Succeeded"
    assert scene.trained(second, "resumed") == ["step2"]
    before, after = scene.losses(first), scene.losses(second)
    assert list(after) == [3, 4]
    assert [after[step] for step in after] == [before[step] for step in after], "to the last bit"
    assert scene.check() == ["step2", "step4"]


def test_a_notice_by_pre_stop_hurries_the_sidecar_while_the_trainer_has_its_grace(
    scene: Scene,
) -> None:
    scene.install(
        ["--on-term", "save", "--save-at", "2"],
        agent={"bandwidth": "100KiB"},
        pod={"terminationGracePeriodSeconds": 60},
    )
    pod = scene.pod()
    scene.go(2)
    scene.until_logged(pod, "save.uploading", tag="step2")
    pod.delete()
    scene.until_logged(pod, "save.committed", tag="last-words")
    scene.until_logged(pod, "save.committed", tag="step2")
    assert pod.containers[TRAINER].running
    scene.go(4)
    scene.end()
    pod.wait()
    assert scene.trained(pod, "durable") == [["step2", "last-words"]]
    sigterm = scene.timeline.only("SIGTERM", container=SIDECAR)
    assert scene.when(pod, "agent.noticed") < scene.when(pod, "save.committed") < sigterm.at
    assert scene.check() == ["step2", "last-words"]
    assert not scene.check_last_message(pod).not_durable


def test_a_plain_container_that_is_told_to_end_first_waits_for_the_trainers_last_save(
    scene: Scene,
) -> None:
    scene.install(
        ["--on-term", "save", "--save-at", "2"],
        sidecar={"native": False, "preStop": False},
        pod={"terminationGracePeriodSeconds": 60},
    )
    pod = scene.pod()
    scene.go(2)
    scene.until_logged(pod, "save.committed", tag="step2")
    pod.delete()
    scene.until_logged(pod, "save.committed", tag="last-words")
    scene.go(4)
    scene.end()
    pod.wait()
    assert pod.containers[SIDECAR].last.exit_code == 0
    assert scene.timeline.only("SIGTERM", container=SIDECAR).at < scene.when(
        pod, "save.discovered", tag="last-words"
    )
    assert scene.check() == ["step2", "last-words"]
    assert not scene.check_last_message(pod).not_durable
