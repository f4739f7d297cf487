"""In which order containers start, and which are started again."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.kubernetes.kubelet.pod import Pod
from tests.kubernetes.kubelet.shells import (
    HEEDS,
    IGNORES,
    UP,
    answers,
    exists,
    server,
    shell,
    sidecar,
)

Runs = Callable[..., Pod]
BACKOFF = 0.2  # of the fixture's cluster
SHARED = {
    "volumes": [{"name": "shared", "emptyDir": {}}],
}
MOUNT = {"volumeMounts": [{"name": "shared", "mountPath": "/shared"}]}


def test_init_containers_come_one_after_the_other_and_a_sidecar_holds_up_the_next(
    run: Runs,
) -> None:
    pod = run(
        [shell("main", "true")],
        [
            shell("first", "sleep 0.5"),
            sidecar("side", f"sleep 1.5; touch /up; {HEEDS}", startupProbe=exists("/up")),
            shell("last", "true"),
        ],
    )
    assert pod.wait() == "Succeeded"
    at = {
        (event.container, event.what): event.at
        for what in ("running", "started", "ended")
        for event in pod.timeline.of(what)
    }
    order = [
        ("first", "running"),
        ("first", "ended"),
        ("side", "running"),
        ("side", "started"),
        ("last", "running"),
        ("last", "ended"),
        ("main", "running"),
        ("main", "ended"),
        ("side", "ended"),
    ]
    assert [at[each] for each in order] == sorted(at[each] for each in order)
    assert at["side", "started"] - at["side", "running"] >= 1.5


@pytest.mark.parametrize("policy", ["Never", "OnFailure"])
def test_an_init_container_that_fails_is_tried_again_unless_the_policy_is_never(
    run: Runs, policy: str
) -> None:
    pod = run(
        [shell("main", "true")],
        [
            sidecar("side", UP, startupProbe=exists("/up")),
            shell("init", "test -e /shared/tried || { touch /shared/tried; exit 3; }", **MOUNT),
        ],
        restartPolicy=policy,
        **SHARED,
    )
    assert pod.wait() == ("Failed" if policy == "Never" else "Succeeded")
    codes = [ended.exit_code for ended in pod.containers["init"].ends]
    assert codes == ([3] if policy == "Never" else [3, 0])
    assert bool(pod.containers["main"].ends) is (policy == "OnFailure")
    assert [ended.exit_code for ended in pod.containers["side"].ends] == [0]


@pytest.mark.parametrize("policy", ["Never", "OnFailure"])
def test_a_main_container_that_fails_is_started_again_by_the_pods_policy(
    run: Runs, policy: str
) -> None:
    fresh = "test ! -e /own || exit 9; touch /own"
    count = "n=$(cat /shared/n || echo 0); echo $((n+1)) > /shared/n"
    pod = run(
        [
            shell(
                "main",
                f"{count}; {fresh}; test $n = 3",
                **MOUNT,
            ),
            shell("well", "true"),
        ],
        restartPolicy=policy,
        **SHARED,
    )
    assert pod.wait() == ("Failed" if policy == "Never" else "Succeeded")
    codes = [ended.exit_code for ended in pod.containers["main"].ends]
    assert codes == ([1] if policy == "Never" else [1, 1, 1, 0]), "the volume outlives a restart"
    assert len(pod.containers["well"].ends) == 1, "what ended well is not started again"
    if policy == "OnFailure":
        starts = [event.at for event in pod.timeline.of("running", container="main")]
        ends = [event.at for event in pod.timeline.of("ended", container="main")]
        pauses = [start - end for start, end in zip(starts[1:], ends, strict=False)]
        assert pauses[1] >= BACKOFF
        assert pauses[2] >= 2 * BACKOFF, "it doubles"


def test_a_sidecar_is_always_started_again_while_the_main_containers_run(run: Runs) -> None:
    pod = run(
        [shell("main", "sleep 1000")],
        [sidecar("side", UP, startupProbe=exists("/up"))],
    )
    for runs in (1, 2, 3):
        pod.until(lambda: pod.containers["side"].runs == runs, what="the sidecar's start")  # noqa: B023
        pod.until_started("side")
        pod.kill("side")
        pod.until(lambda: len(pod.containers["side"].ends) == runs)  # noqa: B023
    pod.until_started("side")
    pod.kill("main")
    assert pod.wait() == "Failed"
    assert [ended.exit_code for ended in pod.containers["side"].ends] == [137, 137, 137, 0]
    assert pod.containers["main"].runs == 1


def test_a_startup_probe_that_never_passes_ends_the_sidecar_and_nothing_comes_after_it(
    run: Runs,
) -> None:
    pod = run(
        [shell("main", "true")],
        [sidecar("side", HEEDS, startupProbe=exists("/never", failureThreshold=2))],
    )
    pod.until(lambda: pod.containers["side"].runs == 2, what="a second try")
    assert pod.timeline.of("SIGTERM", container="side")[0].detail == "5 s of grace"
    assert not pod.containers["main"].runs
    assert pod.phase == "Pending"


def test_a_liveness_probe_that_fails_restarts_the_container_by_way_of_its_pre_stop(
    run: Runs,
) -> None:
    live = answers("/500/live", failureThreshold=2, terminationGracePeriodSeconds=60)
    pod = run(
        [
            server(
                8080,
                startupProbe=answers("/200"),
                livenessProbe=live,
                lifecycle={"preStop": {"httpGet": {"path": "/200/stop", "port": 8080}}},
            )
        ],
        restartPolicy="Always",
    )
    pod.until(lambda: pod.containers["server"].runs == 2, what="a second run")
    assert "status 500" in pod.timeline.of("livenessProbe failed")[0].detail
    seconds = int(pod.timeline.of("SIGTERM")[0].detail.split()[0])
    assert pod.grace < seconds <= 60, "the probe's, less what the hook took"
    assert "/500/live\n/200/stop\n" in pod.output("server")


def test_a_readiness_probe_counts_for_ready_and_restarts_nothing(run: Runs) -> None:
    probe = exists("/ready", failureThreshold=1)
    pod = run([shell("main", IGNORES)], [sidecar("side", HEEDS)])
    pod.until(lambda: pod.ready, what="ready without a probe, once all run")
    pod.remove()
    pod = run([shell("main", IGNORES, readinessProbe=probe)], [sidecar("side", HEEDS)])
    pod.until(lambda: pod.containers["main"].running, what="main")
    assert not pod.ready
    pod.execute("main", "touch", "/ready")
    pod.until(lambda: pod.ready, what="ready when the file is there")
    pod.execute("main", "rm", "/ready")
    pod.until(lambda: not pod.ready, what="no more when it is gone")
    assert pod.containers["main"].runs == 1
