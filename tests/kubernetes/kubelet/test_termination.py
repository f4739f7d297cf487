"""How pods end: completion, deletion, eviction; who gets how many seconds, and in which order."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.kubernetes.kubelet.pod import Pod
from tests.kubernetes.kubelet.shells import (
    HEEDS,
    IGNORES,
    answers,
    lasts,
    server,
    shell,
    sidecar,
    waits,
)

Runs = Callable[..., Pod]


def running(pod: Pod) -> Pod:
    """The pod, when all its containers run, and know what to do at SIGTERM."""
    pod.until(lambda: pod.ready, what="all run")
    heed = [name for name, each in pod.containers.items() if "TERM" in each.spec["command"][2]]
    pod.until(lambda: all(pod.heeds(name) for name in heed), what="all heed SIGTERM")
    return pod


def grace(pod: Pod, name: str) -> str:
    return pod.timeline.only("SIGTERM", container=name).detail


def seconds(pod: Pod, name: str) -> int:
    return int(grace(pod, name).removesuffix(" s of grace"))


def at(pod: Pod, what: str, name: str) -> float:
    return pod.timeline.only(what, container=name).at


def test_a_sidecar_ends_after_all_main_containers_and_after_the_sidecars_behind_it(
    run: Runs,
) -> None:
    def after(own: str, other: str, then: str) -> str:
        """Ends when the other has been told to end too."""
        return f"trap 'touch /v/{own}; {waits(f'/v/{other}')}; {then}' TERM; sleep 1000 & wait"

    mounts = {"volumeMounts": [{"name": "v", "mountPath": "/v"}]}
    pod = running(
        run(
            [
                shell("quick", after("quick", "slow", "exit 0"), **mounts),
                shell("slow", after("slow", "quick", "sleep 1.5; exit 0"), **mounts),
            ],
            [sidecar("outer", HEEDS), sidecar("inner", lasts(1.2))],
            terminationGracePeriodSeconds=60,
            volumes=[{"name": "v", "emptyDir": {}}],
        )
    )
    began = pod.timeline.now()
    pod.delete()
    pod.wait()
    codes = {name: each.last.exit_code for name, each in pod.containers.items()}
    assert codes == dict.fromkeys(codes, 0), "the main containers were told at once"
    assert at(pod, "SIGTERM", "inner") - began >= 1.5
    assert at(pod, "SIGTERM", "outer") - at(pod, "SIGTERM", "inner") >= 1.2
    assert grace(pod, "slow") == "60 s of grace"
    assert seconds(pod, "inner") <= 59, "what was waited, in whole seconds, is off"
    assert seconds(pod, "outer") <= 58
    for name in ("inner", "outer"):
        assert 60 - seconds(pod, name) <= at(pod, "SIGTERM", name) - began, "and no more"


def test_a_main_container_that_uses_all_of_the_grace_leaves_the_sidecar_two_seconds(
    run: Runs,
) -> None:
    pod = running(
        run(
            [shell("main", IGNORES)],
            [sidecar("side", lasts(60))],
            terminationGracePeriodSeconds=3,
        )
    )
    began = pod.timeline.now()
    pod.delete()
    assert pod.wait() == "Failed"
    assert pod.containers["main"].last.exit_code == 137
    assert at(pod, "SIGKILL", "main") - at(pod, "SIGTERM", "main") >= 3
    assert grace(pod, "side") == "2 s of grace"
    assert at(pod, "SIGTERM", "side") - began >= 3
    assert at(pod, "SIGKILL", "side") - at(pod, "SIGTERM", "side") >= 2
    assert at(pod, "SIGKILL", "side") - began < 50
    assert pod.containers["side"].last.exit_code == 137


def test_the_hooks_of_all_containers_run_at_once_and_eat_of_their_grace(run: Runs) -> None:
    def hook(script: str) -> dict[str, object]:
        return {"preStop": {"exec": {"command": ["/bin/sh", "-c", script]}}}

    pod = running(
        run(
            [shell("main", HEEDS, lifecycle=hook("sleep 5; echo main > /proc/1/fd/1"))],
            [
                sidecar("side", HEEDS, lifecycle=hook("echo side > /proc/1/fd/1; sleep 0.2")),
                sidecar("hangs", HEEDS, lifecycle=hook("sleep 1000")),
                sidecar("fails", HEEDS, lifecycle=hook("exit 3")),
                sidecar("sleeps", HEEDS, lifecycle={"preStop": {"sleep": {"seconds": 1}}}),
            ],
            terminationGracePeriodSeconds=12,
        )
    )
    began = pod.timeline.now()
    pod.delete()
    pod.wait()
    first = min(at(pod, "SIGTERM", name) for name in pod.containers)
    for name in pod.containers:
        assert at(pod, "preStop", name) < first, "the only notice before SIGTERM"
    assert at(pod, "SIGTERM", "main") - began >= 5
    assert 2 <= seconds(pod, "main") <= 7
    assert pod.output("main") == "main\n"
    assert pod.output("side") == "side\n"
    assert pod.timeline.only("preStop failed", container="fails").detail == "exit code 3"
    assert pod.timeline.only("preStop failed", container="hangs").detail == "timed out"
    assert grace(pod, "hangs") == "2 s of grace"
    assert at(pod, "SIGTERM", "hangs") - began >= 12
    assert grace(pod, "side") == "2 s of grace", "it waited for the one that hung"


def test_a_hook_by_http_is_sent_from_the_node_and_the_container_goes_on(run: Runs) -> None:
    get = {"httpGet": {"path": "/200/prestop", "port": "page"}}
    side = {**server(8080, lifecycle={"preStop": get}), "restartPolicy": "Always"}
    inits = [{**side, "startupProbe": answers("/204")}]
    pod = running(run([shell("main", lasts(1))], inits, terminationGracePeriodSeconds=60))
    pod.delete()
    pod.wait()
    assert at(pod, "preStop", "server") < at(pod, "SIGTERM", "server")
    assert at(pod, "SIGTERM", "server") - at(pod, "SIGTERM", "main") >= 1
    assert "/200/prestop" in pod.output("server")
    assert not pod.timeline.of("preStop failed")
    assert pod.containers["server"].last.exit_code == 0


def test_an_evicted_pod_has_two_seconds_whatever_it_asked_for(run: Runs) -> None:
    pod = running(
        run(
            [shell("main", lasts(60))],
            [sidecar("side", lasts(60))],
            terminationGracePeriodSeconds=600,
        )
    )
    began = pod.timeline.now()
    pod.evict()
    assert pod.wait() == "Failed"
    assert pod.reason == "Evicted"
    assert grace(pod, "main") == grace(pod, "side") == "2 s of grace"
    assert at(pod, "SIGTERM", "side") - began >= 1, "waits while it may"
    assert pod.timeline.only("gone").at - began < 60


def test_a_deletion_can_shorten_the_grace(run: Runs) -> None:
    pod = running(run([shell("main", IGNORES)], terminationGracePeriodSeconds=600))
    began = pod.timeline.now()
    pod.delete(grace=3)
    pod.wait()
    assert grace(pod, "main") == "3 s of grace"
    assert pod.timeline.only("gone").at - began < 60


@pytest.mark.parametrize("code", [0, 1])
def test_when_the_work_is_done_sidecars_get_all_of_the_grace_and_their_exit_codes_do_not_count(
    run: Runs, code: int
) -> None:
    pod = running(
        run(
            [shell("main", f"{waits('/go')}; exit {code}")],
            [sidecar("side", lasts(3, code=1 - code))],
            terminationGracePeriodSeconds=60,
        )
    )
    pod.execute("main", "touch", "/go")
    assert pod.wait() == ("Succeeded" if code == 0 else "Failed")
    assert grace(pod, "side") == "60 s of grace"
    assert pod.containers["side"].last.exit_code == 1 - code
    assert at(pod, "ended", "side") - at(pod, "SIGTERM", "side") >= 3


def test_a_plain_container_keeps_a_pod_from_being_done_until_it_exits_by_itself(
    run: Runs,
) -> None:
    pod = run([shell("main", "true"), shell("beside", waits("/go"))], restartPolicy="OnFailure")
    pod.until(lambda: pod.containers["main"].ends, what="main has ended")
    assert pod.phase == "Running"
    assert not pod.gone.is_set()
    pod.execute("beside", "touch", "/go")
    assert pod.wait() == "Succeeded"
    assert not pod.timeline.of("SIGTERM")


def test_a_pod_that_is_deleted_while_it_starts_ends_what_runs_and_starts_no_more(
    run: Runs,
) -> None:
    pod = run([shell("main", "true")], [sidecar("side", HEEDS), shell("init", lasts(0.1))])
    pod.until(lambda: pod.containers["init"].running, what="init runs")
    pod.delete()
    assert pod.wait() == "Failed"
    assert not pod.containers["main"].runs
    assert not pod.containers["side"].running


def test_the_termination_message_is_read_after_the_end_and_cut_off(run: Runs) -> None:
    log = "/dev/termination-log"
    pod = run(
        [
            shell("says", f"echo early > {log}; sleep 1; echo late > {log}"),
            shell("killed", f"echo early > {log}; {IGNORES}"),
            shell("long", f"head -c 5000 /dev/zero | tr '\\0' x > {log}"),
            shell("elsewhere", "echo here > /tmp/log", terminationMessagePath="/tmp/log"),
            shell(
                "falls-back",
                "echo reason; exit 1",
                terminationMessagePolicy="FallbackToLogsOnError",
            ),
            shell("silent", "echo reason; exit 1"),
        ]
    )
    pod.until(lambda: pod.message("killed") == "early\n", what="readable while it runs")
    pod.until(lambda: pod.containers["says"].ends, what="says has ended")
    pod.kill("killed")
    pod.wait()
    assert pod.message("says") == "late\n"
    assert pod.message("killed") == "early\n"
    assert pod.message("long") == "x" * 4096
    assert pod.message("elsewhere") == "here\n"
    assert pod.message("falls-back") == "reason\n"
    assert pod.message("silent") == ""
