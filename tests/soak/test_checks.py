"""The checks of the soak see what they are there for: each is broken here on purpose.

The soak itself takes minutes and stands outside of the tests: ``make soak``.
"""

from __future__ import annotations

import copy
import json
import os
import random
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ds_ckpt_sidecar.commands import app
from ds_ckpt_store.catalog import Catalog
from ds_ckpt_store.stores.file import FileStore
from ds_ckpt_store.stores.port import BytesSource
from tests.sidecar.handoff import Trainer
from tests.soak.checks import (
    Checker,
    check_counts,
    check_ends,
    check_log,
    check_restored,
)
from tests.soak.commands import Answer
from tests.soak.ledger import Ledger
from tests.soak.nodes import End
from tests.soak.shards import Mark, content, sha256_of

MODEL, OPTIMIZER = "mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt"
KEEP_LAST = 2


@pytest.fixture(autouse=True)
def no_settings_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("DS_CKPT_")]:
        monkeypatch.delenv(name)


one_at_a_time = threading.Lock()


def ds_ckpt(*arguments: str) -> Answer:
    with one_at_a_time:  # it takes over the standard streams
        result = CliRunner().invoke(app, list(arguments))
    return Answer(result.exit_code, result.stdout, result.stderr)


class Scene:
    """Three saves, of which the first tag was saved again, and what was said of them.

    Args:
        folder: holds ``store``, where an agent has put them.
        ids: of the saves.
        ledger: what was said.
    """

    def __init__(self, folder: Path, ids: list[str], ledger: Ledger) -> None:
        self.folder = folder
        self.ids = ids
        self.ledger = ledger
        self.url = (folder / "store").as_uri()
        self.store = FileStore.from_url(self.url)
        self.catalog = Catalog(self.store, random.Random(1))
        self.run: Callable[..., Answer] = ds_ckpt

    @property
    def checker(self) -> Checker:
        (self.folder / "work").mkdir(exist_ok=True)
        return Checker(
            self.ledger,
            self.url,
            store=self.store,
            run=lambda *arguments: self.run(*arguments),
            work=self.folder / "work",
            keep_last=KEEP_LAST,
        )

    def object(self, number: int, path: str) -> Path:
        record = self.catalog.record(self.ids[number])
        assert record is not None
        return self.folder / "store" / record.folder / path

    def restored(self, number: int = 2) -> Path:
        folder = self.folder / f"restored{number}"
        where = ["--from", self.url, "--to", str(folder)]
        assert ds_ckpt("restore", *where, "--save", self.ids[number]).code == 0
        return folder

    def replace(self, number: int, **changes: object) -> None:
        record = self.catalog.record(self.ids[number])
        assert record is not None
        assert self.catalog.replace(record, **changes) is not None

    def answer(self, command: str, **changes: object) -> None:
        """Let a command say something else than what is so."""

        def run(*arguments: str) -> Answer:
            answer = ds_ckpt(*arguments)
            if arguments[0] != command:
                return answer
            return Answer(answer.code, json.dumps(json.loads(answer.output) | changes), "")

        self.run = run


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Scene:
    folder = tmp_path_factory.mktemp("filled")
    trainer, ledger = Trainer(folder / "volume", run_id="soak", seed=1), Ledger()
    ids = []
    for number, tag in enumerate(("a", "a", "b"), 1):
        name = f"1.{number}"
        marks = [Mark(name, path, 0, number) for path in (MODEL, OPTIMIZER)]
        files = {mark.path: content(mark, 3000) for mark in marks}
        manifest = trainer.save(tag, files, pin=number == 1)
        written = {path: sha256_of(folder / "volume" / tag / path) for path in files}
        facts = {"attempt": 1, "rank": 0, "save": name, "tag": tag}
        ledger.take({"event": "wrote", **facts, "step": number, "files": written})
        ledger.take({"event": "saved", **facts, "save_id": manifest.save_id})
        ids.append(manifest.save_id)
        where = ["--volume", trainer.volume.path, "--destination", (folder / "store").as_uri()]
        assert ds_ckpt("agent", "--once", *where).code == 0
    ledger.watch([Path(trainer.volume.path)])
    assert set(ledger.claims) == set(ids)
    return Scene(folder, ids, ledger)


@pytest.fixture
def scene(filled: Scene, tmp_path: Path) -> Scene:
    """A copy, to be broken."""
    shutil.copytree(filled.folder / "store", tmp_path / "store")
    return Scene(tmp_path, filled.ids, copy.deepcopy(filled.ledger))


def flip(path: Path, offset: int = -1) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


def test_a_store_in_which_all_is_right_has_no_problem_and_each_save_comes_back(
    scene: Scene,
) -> None:
    checker = scene.checker
    assert checker.everything() == []
    assert checker.found.restored == 3 + 1 + 1, "each by its id, the tag of two, and the newest"
    assert checker.found.verified == 6


# ---- what was restored


def test_a_flipped_byte_in_a_restored_file_is_seen(scene: Scene) -> None:
    folder = scene.restored()
    assert check_restored(scene.ledger, folder, scene.ids[2], "it") == []
    flip(folder / "b" / OPTIMIZER)
    assert check_restored(scene.ledger, folder, scene.ids[2], "it") == [
        f"it: {OPTIMIZER} has other bytes than were written"
    ]


def test_a_checkpoint_of_two_saves_is_seen(scene: Scene) -> None:
    folder = scene.restored()
    shutil.copy(scene.object(1, MODEL), folder / "b" / MODEL)
    assert check_restored(scene.ledger, folder, None, "it") == [
        "it is torn: its files are of ['1.2', '1.3']"
    ]


def test_another_save_than_was_asked_for_is_seen(scene: Scene) -> None:
    (problem,) = check_restored(scene.ledger, scene.restored(1), scene.ids[0], "it")
    assert "is of save 1.2, its trainers called it 1.1" in problem


@pytest.mark.parametrize("what", ["missing", "more"])
def test_a_file_that_is_missing_or_too_many_is_seen(scene: Scene, what: str) -> None:
    folder = scene.restored()
    if what == "missing":
        (folder / "b" / MODEL).unlink()
    else:
        shutil.copy(folder / "b" / MODEL, folder / "b" / "more.pt")
    (problem,) = check_restored(scene.ledger, folder, None, "it")
    assert "were written" in problem


def test_files_that_no_trainer_wrote_are_seen(scene: Scene) -> None:
    folder = scene.restored()
    del scene.ledger.written["1.3"]
    (problem,) = check_restored(scene.ledger, folder, None, "it")
    assert "nobody wrote" in problem


# ---- the store


def test_a_byte_that_changed_in_the_store_is_seen_by_restore_and_verify(scene: Scene) -> None:
    flip(scene.object(0, MODEL))
    checker = scene.checker
    (restore,) = checker.restores()
    (verify,) = checker.verify()
    assert scene.ids[0] in restore
    assert MODEL in verify


def test_a_record_that_is_lost_is_seen(scene: Scene) -> None:
    scene.store.delete(f".ds_ckpt/checkpoints/{scene.ids[0]}.json")
    (problem,) = scene.checker.decisions()
    assert f"save {scene.ids[0]} has no record" in problem


def test_a_record_that_cannot_be_read_is_seen(scene: Scene) -> None:
    scene.store.put(f".ds_ckpt/checkpoints/{scene.ids[0]}.json", BytesSource(b"{"))
    assert "is damaged" in scene.checker.decisions()[0]


def test_a_committed_save_that_is_given_up_is_seen(scene: Scene) -> None:
    scene.replace(0, state="abandoned", reason="a mistake")
    (problem,) = scene.checker.decisions()
    assert "a mistake" in problem


@pytest.mark.parametrize(("number", "why"), [(1, "one of the last 2"), (0, "pinned")])
def test_retention_that_goes_too_far_is_seen(scene: Scene, number: int, why: str) -> None:
    scene.replace(number, state="deleted")
    (problem,) = scene.checker.decisions()
    assert why in problem


def test_a_pointer_that_does_not_name_the_newest_is_seen(scene: Scene) -> None:
    record = scene.catalog.record(scene.ids[1])
    assert record is not None
    scene.store.put("latest", BytesSource(record.folder.encode()))
    (problem,) = scene.checker.pointer()
    assert record.folder in problem


def test_a_store_without_any_checkpoint_is_seen(scene: Scene) -> None:
    for number in range(3):
        scene.replace(number, state="abandoned")
    assert scene.checker.restores() == ["nothing is committed"]


def test_a_verify_that_looks_at_less_is_seen(scene: Scene) -> None:
    scene.answer("verify", objects=5)
    assert scene.checker.verify() == ["verify looked at 5 objects of 6"]


def test_garbage_that_gc_does_not_find_is_seen(scene: Scene) -> None:
    record = scene.catalog.record(scene.ids[2])
    assert record is not None
    scene.store.put("somebody/else's", BytesSource(b"x"))
    scene.store.put(f"{record.folder}/more", BytesSource(b"x"))
    upload = scene.store.begin(f"{record.folder}/half", 10, {})
    scene.run = lambda *arguments: Answer(0, '{"findings": []}', "")
    problems = scene.checker.garbage()
    for key in ("somebody/else's", f"{record.folder}/more", upload.key):
        assert any(key in problem for problem in problems), key


def test_a_second_gc_that_finds_something_is_seen(scene: Scene) -> None:
    scene.answer("gc", findings=[{"kind": "object"}])
    (problem,) = scene.checker.garbage()
    assert "a second gc still finds" in problem


@pytest.mark.parametrize("command", ["restore", "verify", "gc"])
def test_a_command_that_fails_is_seen(scene: Scene, command: str) -> None:
    scene.run = lambda *arguments: (
        Answer(1, "", "no") if arguments[0] == command else ds_ckpt(*arguments)
    )
    assert any("exit code 1: no" in problem for problem in scene.checker.everything())


# ---- what was said


def resumed(ledger: Ledger, rank: int, tag: str | None, **files: str) -> None:
    told = {path.replace("_pt", ".pt"): word for path, word in files.items()}
    ledger.take({"event": "resumed", "attempt": 2, "rank": rank, "tag": tag, "files": told})


@pytest.fixture
def ledger() -> Ledger:
    """Two saves of two ranks on two nodes."""
    ledger = Ledger()
    for rank in (0, 1):
        for name in ("1.1", "1.2"):
            files = {"model.pt": f"m{name}{rank}", f"zero{rank}.pt": f"z{name}"}
            line = {"event": "wrote", "attempt": 1, "rank": rank, "save": name, "tag": name}
            ledger.take({**line, "step": 1, "files": files})
    return ledger


def test_ranks_that_resume_from_one_save_are_no_problem(ledger: Ledger) -> None:
    resumed(ledger, 0, "1.1", model_pt="1.1:m1.10", zero0_pt="1.1:z1.1")
    resumed(ledger, 1, "1.1", model_pt="1.1:m1.11", zero1_pt="1.1:z1.1")
    assert ledger.problems == []
    assert ledger.resumes() == 1


def test_ranks_that_resume_from_different_saves_are_seen(ledger: Ledger) -> None:
    resumed(ledger, 0, "1.1", model_pt="1.1:m1.10")
    resumed(ledger, 1, "1.1", zero1_pt="1.2:z1.2")
    (problem,) = ledger.problems
    assert "several saves at once" in problem


def test_a_rank_that_starts_from_scratch_beside_one_that_resumes_is_seen(ledger: Ledger) -> None:
    resumed(ledger, 0, "1.1", model_pt="1.1:m1.10")
    resumed(ledger, 1, None)
    assert "several saves at once" in ledger.problems[0]


def test_a_rank_that_loads_what_nobody_wrote_is_seen(ledger: Ledger) -> None:
    resumed(ledger, 0, "1.1", model_pt="1.1:m1.2")
    assert "nobody wrote" in ledger.problems[0]


def test_of_several_copies_that_of_the_lowest_rank_is_to_be_stored(ledger: Ledger) -> None:
    assert ledger.written["1.1"].stored() == {
        "model.pt": "m1.10",
        "zero0.pt": "z1.1",
        "zero1.pt": "z1.1",
    }


def test_one_id_for_two_saves_is_seen(ledger: Ledger) -> None:
    for name in ("1.1", "1.2"):
        line = {"event": "saved", "attempt": 1, "rank": 0, "save": name, "save_id": "x"}
        ledger.take(line)
    assert "is both 1.1 and 1.2" in ledger.problems[0]


def test_a_line_that_a_killed_rank_was_writing_is_no_word_until_it_is_whole(tmp_path: Path) -> None:
    ledger = Ledger()
    report = tmp_path / "report"
    line = json.dumps({"event": "durable", "attempt": 1, "rank": 0, "save_id": "x", "tag": "t"})
    report.write_text(line)
    ledger.read([report])
    assert ledger.claims == {}
    report.write_text(line + "\n")
    ledger.read([report])
    ledger.read([report])
    assert list(ledger.claims) == ["x"]
    assert ledger.counts["durable"] == 1


def test_what_an_agent_says_in_its_log_counts_too(tmp_path: Path) -> None:
    ledger = Ledger()
    committed = {"event": "save.committed", "save_id": "x", "tag": "t"}
    ledger.hear("agent-1", [{"event": "save.stored", "save_id": "y"}, committed])
    assert list(ledger.claims) == ["x"]


# ---- processes and faults


def test_a_process_that_ended_by_itself_is_seen() -> None:
    ends = [End("one", -9, True, Path("one.log")), End("other", 0, False, Path("other.log"))]
    (problem,) = check_ends(ends)
    assert "other ended with code 0, and nobody had made it" in problem


def test_an_agent_that_asks_for_a_person_is_seen() -> None:
    lines = [{"event": "save.committed"}, {"event": "save.quarantined", "reason": "why"}]
    (problem,) = check_log("agent-1", lines, last=False)
    assert "why" in problem


@pytest.mark.parametrize("lines", [[], [{"event": "agent.stopped", "left": 1}]])
def test_a_last_agent_that_leaves_something_is_seen(lines: list[dict[str, object]]) -> None:
    assert check_log("agent-1", lines, last=False) == []
    (problem,) = check_log("agent-1", lines, last=True)
    assert "left to do" in problem


def test_a_kind_of_fault_that_never_happened_is_seen() -> None:
    assert check_counts({"a": 1, "b": 0}, ["a", "b", "c"]) == [
        "'b' never happened",
        "'c' never happened",
    ]
