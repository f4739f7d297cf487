"""Events and annotations: what is sent, and what becomes of it when the API server is unwell."""

from __future__ import annotations

import contextlib
import os
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ds_ckpt_sidecar.observe.kubernetes import PodReporter, events
from ds_ckpt_sidecar.observe.kubernetes.api import Server, surroundings
from ds_ckpt_sidecar.observe.kubernetes.events import Commit, Pod
from ds_ckpt_sidecar.observe.kubernetes.pending import MOST_FAILING, Pace, Pending
from ds_ckpt_sidecar.observe.kubernetes.reporter import CONFLICTS, LASTING, Patience
from ds_ckpt_store.errors import SettingsError
from tests.apiserver import NAMESPACE, POD, UID, ApiServer, Trouble
from tests.sidecar.handoff import START_MS
from tests.sidecar.world import Lines, until

QUICK = Patience(answer=5.0, first=0.02, longest=0.1, refused=0.1, end=0.02)
FREELY = Pace(burst=1000, annotation_seconds=0.0)
FOREVER = 3600.0
COMMITTED, FAILING, LEFT = (
    "CheckpointCommitted",
    "CheckpointUploadFailing",
    "CheckpointNotDurableAtExit",
)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[ApiServer]:
    with ApiServer(tmp_path / "cluster") as server:
        yield server


@contextlib.contextmanager
def reporting(
    cluster: ApiServer, *, pace: Pace = FREELY, patience: Patience = QUICK
) -> Iterator[tuple[PodReporter, Lines]]:
    log = Lines()
    server, pod = surroundings(cluster.environ, os.fspath(cluster.account))
    reporter = PodReporter(server, pod, log, pace=pace, patience=patience)
    try:
        yield reporter, log
    finally:
        cluster.over.set()
        reporter.close(0.5)


def annotation(cluster: ApiServer) -> str | None:
    return cluster.annotations[POD].get("ds-ckpt.io/last-committed")


# ---- what is sent


def test_a_durable_save_is_an_event_of_the_pod_and_an_annotation_on_it(cluster: ApiServer) -> None:
    with reporting(cluster) as (reports, _):
        reports.committed("global_step10", "global_step10.0abc", START_MS)
        until(lambda: cluster.events and annotation(cluster))
    (event,) = cluster.events
    assert event["type"] == "Normal"
    assert event["reason"] == COMMITTED
    assert event["note"] == (
        "global_step10 is durable as global_step10.0abc, saved 2023-11-14T22:13:20Z"
    )
    assert event["reportingController"] == "ds-ckpt.io/sidecar"
    assert event["reportingInstance"] == POD
    assert event["regarding"] == {
        "apiVersion": "v1",
        "kind": "Pod",
        "name": POD,
        "namespace": NAMESPACE,
        "uid": UID,
    }
    assert cluster.annotations[POD] == {
        "ds-ckpt.io/last-committed": "global_step10",
        "ds-ckpt.io/last-committed-at": "2023-11-14T22:13:20Z",
    }


def test_an_older_save_that_becomes_durable_later_does_not_replace_the_newer_one(
    cluster: ApiServer,
) -> None:
    with reporting(cluster) as (reports, _):
        reports.committed("new", "new.1", START_MS + 1000)
        until(lambda: annotation(cluster) == "new" and len(cluster.events) == 1)
        reports.committed("old", "old.0", START_MS)
        until(lambda: len(cluster.events) == 2)
    assert annotation(cluster) == "new"


def test_what_is_not_durable_at_the_end_is_said_before_close_returns(cluster: ApiServer) -> None:
    with reporting(cluster) as (reports, _):
        reports.not_durable_at_exit(["a: uploading, 3 of 5 shards", "b: discovered"])
        reports.not_durable_at_exit(["a: uploading, 3 of 5 shards", "b: discovered"])
        reports.close(10.0)
        assert cluster.notes(LEFT) == [
            "the agent ends, and this is not durable: a: uploading, 3 of 5 shards; b: discovered"
        ]
    assert cluster.events[0]["type"] == "Warning"


def test_a_failure_is_said_once_and_then_counted() -> None:
    pending, clock = paced()
    pending.failing("a: no such bucket")
    said = send_all(pending)
    for _ in range(4):
        clock.now += 100
        pending.failing("a: no such bucket")
    assert send_all(pending) == []
    clock.now += 300
    pending.failing("a: no such bucket")
    (again,) = send_all(pending)
    assert "series" not in said[0]
    assert again["series"]["count"] == 5
    assert again["note"] == "a: no such bucket"


@pytest.mark.parametrize(
    "name", ["p", "p" * 253, ("a." * 125) + "abc", "a" * 234 + "-.-" + "b" * 9]
)
@pytest.mark.parametrize(
    "text", ["x", "é" * 2000, "two\nlines\x00\udcff" * 200, "\U0001f600" * 400]
)
def test_no_tag_or_pod_name_breaks_the_limits_of_an_event(
    cluster: ApiServer, name: str, text: str
) -> None:
    cluster.pods = {name: UID}
    cluster.annotations = {name: {}}
    log = Lines()
    server = Server(cluster.url, os.fspath(cluster.account))
    reports = PodReporter(server, Pod(name, NAMESPACE, UID), log, pace=FREELY, patience=QUICK)
    reports.committed(text, text, START_MS)
    reports.failing(text)
    reports.not_durable_at_exit([text, text])
    reports.close(10.0)
    assert sorted(cluster.reasons()) == sorted([COMMITTED, FAILING, LEFT])
    assert len(cluster.annotations[name]) == 2
    assert log.lines == []


def test_saves_for_which_there_is_no_room_in_the_note_are_counted() -> None:
    sentences = [f"global_step{number}: uploading, 3 of 5 shards" for number in range(100)]
    note = events.not_durable_at_exit(sentences)[3]
    kept = note.count("global_step")
    assert 10 < kept < 100
    assert note.endswith(f"(and {100 - kept} more)")
    assert len(note) <= events.NOTE_BYTES


def test_failures_that_differ_by_an_id_are_equal() -> None:
    pending, _ = paced()
    pending.failing("begin 'probe/adb37ef78cc9bbb0-proof': refused (request 4KD9ZQ0XJW2M1B8T)")
    pending.failing("begin 'probe/4c883a1dd28f74a5-proof': refused (request 9XJW2M1B8T4KD9ZQ)")
    pending.failing("begin 'other/4c883a1dd28f74a5-proof': refused (request 9XJW2M1B8T4KD9ZQ)")
    assert len(pending.waiting()) == 2


# ---- how much is sent, on a clock of its own


class Moment:
    def __init__(self) -> None:
        self.now = 1000.0

    def time(self) -> float:
        return START_MS / 1000 + self.now

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def paced(pace: Pace | None = None) -> tuple[Pending, Moment]:
    clock = Moment()
    pod = Pod(POD, NAMESPACE, UID)
    return Pending(pod, pace or Pace(), clock, random.Random(1)), clock


def send_all(pending: Pending) -> list[dict[str, Any]]:
    sent = []
    for report in pending.waiting():
        if pending.due(report) <= 0:
            pending.begun(report)
            pending.over(report)
            sent.append(report.document)
    return sent


def test_a_storm_of_commits_is_a_few_events_and_the_newest_stands_for_the_rest() -> None:
    pending, clock = paced(Pace(burst=3, refill_seconds=32, annotation_seconds=10))
    sent = []
    for number in range(60):
        pending.committed(Commit(f"step{number}", f"step{number}.x", START_MS + number))
        sent += send_all(pending)
        clock.now += 1
    told = [one for one in sent if "reason" in one]
    patched = [one for one in sent if "reason" not in one]
    assert len(told) == 4
    assert len(patched) == 6
    assert "(29 more became durable since the last report)" in told[-1]["note"]
    assert "step32 is durable" in told[-1]["note"]


def test_failures_that_all_differ_are_bounded_and_do_not_hold_up_the_end() -> None:
    pending, _ = paced(Pace(burst=2))
    for number in range(1000):
        pending.failing(f"shard {number}: reset")
    assert len(pending.waiting()) == MOST_FAILING
    last = pending.waiting()[-1].document["note"]
    assert last.startswith("shard 999: reset (and 992 more")
    assert len(send_all(pending)) == 2
    pending.not_durable_at_exit(["a: uploading"])
    assert [one["reason"] for one in send_all(pending)] == [LEFT]


def test_a_commit_that_is_being_told_is_not_counted_among_those_that_were_not() -> None:
    pending, _ = paced()
    pending.committed(Commit("a", "a.0", START_MS))
    (told,) = (report for report in pending.waiting() if report.right == "events")
    pending.begun(told)
    pending.committed(Commit("b", "b.0", START_MS + 1))
    pending.committed(Commit("c", "c.0", START_MS + 2))
    pending.over(told)
    notes = [one["note"] for one in send_all(pending) if "note" in one]
    assert notes == [
        "c is durable as c.0, saved 2023-11-14T22:13:20Z "
        "(1 more became durable since the last report)"
    ]


def test_trying_again_costs_no_more_than_trying() -> None:
    pending, _ = paced(Pace(burst=2))
    pending.failing("a")
    (report,) = pending.waiting()
    for _ in range(10):
        assert pending.due(report) <= 0
        pending.begun(report)
    pending.over(report)
    pending.failing("b")
    assert len(send_all(pending)) == 1


# ---- an API server that is unwell


def test_a_token_that_was_replaced_is_read_again(cluster: ApiServer) -> None:
    with reporting(cluster) as (reports, log):
        reports.committed("a", "a.0", START_MS)
        until(lambda: annotation(cluster) == "a")
        cluster.tokens = {"second"}
        asked = len(cluster.asked)
        reports.committed("b", "b.0", START_MS + 1)
        until(lambda: len(cluster.asked) > asked)
        cluster.give_token("second")
        until(lambda: annotation(cluster) == "b" and COMMITTED in cluster.reasons()[-1:])
    assert not [line for line in log.of("kubernetes.unsent") if "401" not in line["reason"]]


def test_an_authority_that_was_replaced_is_read_again(cluster: ApiServer) -> None:
    with reporting(cluster) as (reports, _):
        reports.committed("a", "a.0", START_MS)
        until(lambda: annotation(cluster) == "a")
        cluster.new_authority()
        reports.committed("b", "b.0", START_MS + 1)
        until(lambda: annotation(cluster) == "b")


def test_certificates_that_are_not_to_the_letter_of_the_standard_are_taken(
    cluster: ApiServer,
) -> None:
    """Python 3.13 refuses such as have no identifiers of keys, and clusters have them."""
    cluster.new_authority(strict=False)
    with reporting(cluster) as (reports, _):
        reports.committed("a", "a.0", START_MS)
        until(lambda: annotation(cluster) == "a")


def test_a_server_of_another_authority_is_not_talked_to(cluster: ApiServer) -> None:
    trusted = (cluster.account / "ca.crt").read_bytes()
    cluster.new_authority()
    (cluster.account / "ca.crt").write_bytes(trusted)
    with reporting(cluster) as (reports, log):
        reports.committed("a", "a.0", START_MS)
        until(lambda: log.of("kubernetes.unsent"))
        assert "CERTIFICATE_VERIFY_FAILED" in log.of("kubernetes.unsent")[0]["reason"]
    assert cluster.asked == []


def test_a_missing_right_is_named_once_and_does_not_touch_the_other_one(
    cluster: ApiServer,
) -> None:
    cluster.rights = {"annotations"}
    with reporting(cluster) as (reports, log):
        for number, tag in enumerate(["a", "b", "c"]):
            reports.committed(tag, f"{tag}.0", START_MS + number)
            until(lambda tag=tag: annotation(cluster) == tag)
        until(lambda: cluster.asked.count(COMMITTED) >= 3)  # it looks again from time to time
        (line,) = log.of("kubernetes.unsent")
        assert line["reason"].startswith('403: User "sa" cannot do that: events')
        assert line["remedy"] == (
            'add to the Role of the pod\'s service account: apiGroups: ["events.k8s.io"], '
            "resources: [events], verbs: [create]; or leave DS_CKPT_KUBERNETES out"
        )
        cluster.rights = {"events"}
        until(lambda: "c is durable" in " ".join(cluster.notes(COMMITTED)))
        reports.committed("d", "d.0", START_MS + 9)
        until(lambda: len(log.of("kubernetes.unsent")) == 2)
        assert "resources: [pods], verbs: [patch]" in log.of("kubernetes.unsent")[1]["remedy"]


def test_without_any_right_the_end_does_not_wait(cluster: ApiServer) -> None:
    cluster.rights = set()
    with reporting(cluster, patience=Patience()) as (reports, log):
        reports.committed("a", "a.0", START_MS)
        until(lambda: len(log.of("kubernetes.unsent")) == 2)
        asked = len(cluster.asked)
        reports.not_durable_at_exit(["b: uploading"])
        reports.close(FOREVER)
    assert len(cluster.asked) == asked


def test_a_namespace_that_is_being_deleted_is_no_missing_right(cluster: ApiServer) -> None:
    cluster.ending = True
    with reporting(cluster) as (reports, log):
        reports.committed("a", "a.0", START_MS)
        until(lambda: log.of("kubernetes.unsent"))
        assert log.of("kubernetes.unsent")[0]["remedy"] == (
            "the namespace is being deleted; nothing to do"
        )


def test_a_pod_that_is_gone_gets_no_more_annotations(cluster: ApiServer) -> None:
    cluster.pods = {}
    with reporting(cluster) as (reports, log):
        reports.committed("a", "a.0", START_MS)
        until(lambda: cluster.events and log.of("kubernetes.unsent"))
        assert log.of("kubernetes.unsent")[0]["reason"] == f'404: pods "{POD}" not found'


def test_another_pod_that_got_the_name_is_left_alone(cluster: ApiServer) -> None:
    cluster.pods = {POD: "another"}
    with reporting(cluster) as (reports, log):
        reports.committed("a", "a.0", START_MS)
        until(lambda: log.of("kubernetes.unsent"))
        assert "Precondition failed" in log.of("kubernetes.unsent")[0]["reason"]
    assert annotation(cluster) is None
    assert cluster.asked.count("annotations") == CONFLICTS


def test_an_event_whose_answer_was_lost_is_there_once(cluster: ApiServer) -> None:
    cluster.script.append(Trouble(do="lose", right="events"))
    with reporting(cluster) as (reports, _):
        reports.failing("a: no such bucket")
        until(lambda: cluster.asked.count(FAILING) == 2)
    assert len(cluster.events) == 1


@pytest.mark.parametrize("status", [400, 413, 415, 422])
def test_what_is_refused_for_good_is_given_up_and_said_once(
    cluster: ApiServer, status: int
) -> None:
    cluster.script += [Trouble(status, "not like this", right="events")] * 2
    with reporting(cluster) as (reports, log):
        reports.failing("a")
        reports.failing("b")
        reports.failing("c")
        until(lambda: cluster.notes(FAILING) == ["c"])
        (line,) = log.of("kubernetes.unsent")
        assert line["reason"] == f"{status}: not like this"


def test_410_rests_and_comes_back(cluster: ApiServer) -> None:
    cluster.script.append(Trouble(410, "gone", right="events"))
    with reporting(cluster) as (reports, log):
        reports.failing("a")
        until(lambda: cluster.events)
        assert len(log.of("kubernetes.unsent")) == 1


@pytest.mark.parametrize("status", [408, 429, 500, 502, 503, 504])
def test_trouble_that_lasts_is_said_once_and_so_is_its_end(cluster: ApiServer, status: int) -> None:
    cluster.script += [Trouble(status)] * (LASTING + 2)
    with reporting(cluster) as (reports, log):
        reports.failing("a")
        until(lambda: cluster.events and log.of("kubernetes.back"))
        assert [event for _, event, _ in log.lines] == ["kubernetes.unsent", "kubernetes.back"]
        assert log.of("kubernetes.unsent")[0]["reason"] == f"{status}: scripted"


def test_short_trouble_is_not_worth_a_line(cluster: ApiServer) -> None:
    cluster.script += [Trouble(500), Trouble(do="lose")]
    with reporting(cluster) as (reports, log):
        reports.failing("a")
        until(lambda: cluster.events)
    assert log.lines == []


def test_a_server_that_asks_to_wait_is_given_that_time(cluster: ApiServer) -> None:
    cluster.script.append(Trouble(429, headers={"Retry-After": "1"}))
    with reporting(cluster) as (reports, _):
        reports.failing("a")
        until(lambda: cluster.asked)
        began = time.monotonic()
        until(lambda: cluster.events)
        assert time.monotonic() - began > 0.9


def test_a_server_that_is_away_is_told_the_newest_when_it_comes(cluster: ApiServer) -> None:
    cluster.away()
    with reporting(cluster) as (reports, log):
        for number in range(200):
            reports.committed(f"step{number}", f"step{number}.x", START_MS + number)
        until(lambda: log.of("kubernetes.unsent"))
        cluster.back()
        until(lambda: annotation(cluster) == "step199" and "step199" in str(cluster.events))
    *before, last = cluster.notes(COMMITTED)
    assert last.startswith("step199 is durable as step199.x")
    assert f"({199 - len(before)} more became durable since the last report)" in last
    assert len(before) <= 1, "one that was under way when the next came"


def test_an_answer_that_never_comes_holds_up_neither_agent_nor_end(cluster: ApiServer) -> None:
    cluster.script.append(Trouble(do="stall"))
    with reporting(cluster, patience=Patience(answer=FOREVER)) as (reports, _):
        reports.committed("a", "a.0", START_MS)
        until(lambda: cluster.asked)
        reports.failing("b: no such bucket")  # while the thread waits for that answer
        reports.not_durable_at_exit(["b: uploading"])
        reports.close(10.0)
        assert cluster.reasons() == [LEFT, FAILING, COMMITTED]
        assert annotation(cluster) == "a"


def test_a_server_that_stalls_all_the_time_costs_the_end_its_time_and_no_more(
    cluster: ApiServer,
) -> None:
    cluster.script += [Trouble(do="stall")] * 10
    with reporting(cluster, patience=Patience(answer=FOREVER)) as (reports, _):
        reports.not_durable_at_exit(["b: uploading"])
        until(lambda: cluster.asked)
        began = time.monotonic()
        reports.close(0.5)
        assert time.monotonic() - began < 30


def test_at_the_end_what_matters_most_comes_first(cluster: ApiServer) -> None:
    cluster.script.append(Trouble(503, headers={"Retry-After": "600"}))
    with reporting(cluster, patience=Patience(answer=30.0)) as (reports, _):
        reports.failing("a: no such bucket")
        until(lambda: cluster.asked)
        reports.committed("a", "a.0", START_MS)
        reports.not_durable_at_exit(["b: uploading"])
        reports.close(20.0)
        assert cluster.asked[1:] == [LEFT, "annotations", FAILING, COMMITTED]


def test_the_last_report_is_tried_again_while_there_is_time(cluster: ApiServer) -> None:
    cluster.script += [Trouble(500), Trouble(401), Trouble(do="lose")]
    with reporting(cluster) as (reports, _):
        reports.not_durable_at_exit(["b: uploading"])
        reports.close(20.0)
        assert cluster.reasons() == [LEFT]


def test_what_could_not_be_said_at_the_end_stands_in_the_log(cluster: ApiServer) -> None:
    cluster.away()
    with reporting(cluster) as (reports, log):
        reports.not_durable_at_exit(["b: uploading"])
        reports.close(0.3)
        until(lambda: [line for line in log.of("kubernetes.unsent") if line["reports"] == [LEFT]])


# ---- where it runs


@pytest.mark.parametrize(
    ("without", "sentence"),
    [
        ("KUBERNETES_SERVICE_HOST", "so this is no pod of a cluster: leave the setting out here"),
        ("KUBERNETES_SERVICE_PORT", "so this is no pod of a cluster: leave the setting out here"),
        ("POD_NAME", "set POD_NAME from fieldPath metadata.name (valueFrom.fieldRef)"),
        ("POD_UID", "set POD_UID from fieldPath metadata.uid (valueFrom.fieldRef)"),
        ("token", "token: No such file or directory, as uid "),
        ("ca.crt", "ca.crt: No such file or directory, as uid "),
    ],
)
def test_what_the_pod_lacks_is_named_with_its_remedy(
    cluster: ApiServer, without: str, sentence: str
) -> None:
    environ = {name: value for name, value in cluster.environ.items() if name != without}
    with contextlib.suppress(FileNotFoundError):
        (cluster.account / without).unlink()
    with pytest.raises(SettingsError) as caught:
        surroundings(environ, os.fspath(cluster.account))
    assert sentence in str(caught.value)
    assert str(caught.value).startswith("--kubernetes (or DS_CKPT_KUBERNETES): ")


def test_an_empty_token_is_named(cluster: ApiServer) -> None:
    cluster.give_token("")
    with pytest.raises(SettingsError, match="token is empty"):
        surroundings(cluster.environ, os.fspath(cluster.account))


def test_an_api_server_may_have_an_address_of_ipv6(cluster: ApiServer) -> None:
    environ = {**cluster.environ, "KUBERNETES_SERVICE_HOST": "fd00::1"}
    server, _ = surroundings(environ, os.fspath(cluster.account))
    assert server.url == f"https://[fd00::1]:{cluster.port}"
