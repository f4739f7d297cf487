"""What others are told of durability, and that each hears a thing once."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

from ds_ckpt_sidecar.observe.termination import TerminationMessage
from ds_ckpt_sidecar.telling import FAILING_TRIES, Telling
from tests.sidecar.stage import Reports, staged
from tests.sidecar.test_ending import save
from tests.sidecar.world import Lines


def test_a_save_that_became_durable_is_told_once() -> None:
    reports = Reports()
    telling = Telling(None, reports)
    found = save(1, 100)
    found.state = "uploading"
    telling.heard(found, "")
    assert reports.told == []
    found.state = "committed"
    telling.heard(found, "")
    telling.heard(found, "")
    assert reports.told == [("committed", "t1")]


def test_a_save_that_retention_has_deleted_meanwhile_is_not_told_as_durable() -> None:
    reports = Reports()
    found = save(1, 100)
    found.state = "committed"
    found.record = SimpleNamespace(state="deleted")  # type: ignore[assignment]
    Telling(None, reports).heard(found, "")
    assert reports.told == []


def test_what_fails_is_told_from_the_third_time_on() -> None:
    reports = Reports()
    telling = Telling(None, reports)
    found = save(1, 100)
    for tries in range(1, FAILING_TRIES + 1):
        assert reports.told == []
        found.tries = tries
        telling.heard(found, "no access")
    assert reports.told == [("failing", "t1: no access")]


def test_an_end_with_all_durable_is_told_to_nobody() -> None:
    reports = Reports()
    telling = Telling(None, reports)
    telling.ended()
    assert reports.told == []
    telling.unreached("down", ["t2", "t1"])
    telling.ended()
    assert reports.told == [("not durable", ("t2: discovered, down", "t1: discovered, down"))]


def test_a_manifest_that_is_not_taken_is_told_once(tmp_path: Path) -> None:
    """One of a newer version, say: it stays until the agent is upgraded."""
    with staged(tmp_path) as stage:
        stage.agent()
        newer = Path(stage.path) / ".ds_ckpt/outbox/01a3185a4310-3d2480903547f700.ff.json"
        stage.at(5, lambda: newer.write_bytes(b'{"schema": 99}'))
        stage.play(60)
        (told,) = stage.reports.of("failing")
        assert told.startswith(f"{newer.name}: ")
        assert "99" in told


def test_a_save_that_rests_until_somebody_mends_it_is_told_at_once(tmp_path: Path) -> None:
    with staged(tmp_path) as stage:
        stage.save("a", 300)
        stage.agent(run_id="another")
        stage.play(30)
        (told,) = stage.reports.of("failing")
        assert "is held: it is of run 'run'" in told


def test_a_prefix_of_another_run_is_the_reason_why_a_save_is_not_durable(
    tmp_path: Path,
) -> None:
    with staged(tmp_path) as stage:
        stage.save("a", 9000)
        first = stage.agent(drain_seconds=1.0)
        stage.at(5, first.agent.stop)
        stage.play(20)
        stage.trainer.run_id = "another"
        stage.save("b", 300)
        stage.agent(run_id="another")
        stage.play(40)
        assert "not durable: b: discovered, " in stage.said()
        assert "belongs to run" in stage.said()


def test_a_save_is_not_called_durable_while_the_first_call_for_it_hangs(tmp_path: Path) -> None:
    """The pod may be killed then, and what was told last is all that is left."""
    with staged(tmp_path) as stage:
        stage.agent()
        stage.play(20)
        assert stage.said().endswith("nothing to do: every save that was handed over is durable\n")
        stage.call_seconds = 1000
        stage.save("a", 300)
        stage.play(30)
        assert "not durable: a: discovered, 0 of 1 MiB are stored" in stage.said()


def test_what_is_lost_is_not_promised_by_another_start(tmp_path: Path) -> None:
    with staged(tmp_path) as stage:
        lost = stage.save("a", 300)
        stage.trainer.rewrite(lost, "x0", b"other bytes")
        player = stage.agent(drain_seconds=2.0)
        stage.at(20, player.agent.stop)
        stage.play(40)
        assert "a: superseded" in stage.said()
        assert stage.said().splitlines()[-1].startswith("what to do: these saves are lost")


def test_without_a_message_and_reports_nothing_happens() -> None:
    telling = Telling(None, None)
    telling.heard(save(1, 100), "no access")
    telling.failing("no access", 10)
    telling.unreached("down", ["t1"])
    telling.ended("why")
    assert telling.not_durable == ("t1: discovered, down",)


def test_what_has_to_be_mended_comes_before_another_start(tmp_path: Path) -> None:
    path = tmp_path / "message"
    telling = Telling(TerminationMessage(str(path), Lines()), None)
    telling.unreached("wrong credentials", ["t1"])
    assert path.read_text().splitlines()[-1].startswith("what to do: first mend what the lines")
    telling.unreached("wrong credentials", [])
    assert "mend" not in path.read_text()


def test_without_a_fault_another_start_is_all_it_needs(tmp_path: Path) -> None:
    with staged(tmp_path) as stage:
        stage.save("large", 9000)
        player = stage.agent(drain_seconds=2.0)
        stage.at(5, player.agent.stop)
        stage.play(30)
        assert player.code == 1
        assert stage.said().splitlines()[-1].startswith("what to do: start the agent")
