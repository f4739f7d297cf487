"""The history of a store in the user's hands: listed, compared, pinned and deleted."""

from __future__ import annotations

import pickle
import random
from dataclasses import FrozenInstanceError, replace
from datetime import datetime, timezone
from pathlib import Path

import pytest

import ds_ckpt_hook
from ds_ckpt_hook import Checkpoint, checkpoints, remote
from ds_ckpt_store.catalog import Catalog, Lease
from ds_ckpt_store.contract.clock import system_random
from ds_ckpt_store.errors import (
    AccessError,
    InputError,
    KeptError,
    NothingCommittedError,
    SettingsError,
    TransientError,
    WeakStoreError,
)
from ds_ckpt_store.records import Record
from ds_ckpt_store.retention import Retention
from ds_ckpt_store.stores import open_store
from ds_ckpt_store.stores.memory import MemoryStore
from ds_ckpt_store.stores.probe import for_reading
from ds_ckpt_store.stores.swap_by_create import SwapByCreate
from tests.hook.standin import Job
from tests.servers import S3
from tests.sidecar.world import World
from tests.store.prefix import NODE, HandClock, Prefix

URL = "memory://bucket/run"


@pytest.fixture
def prefix(monkeypatch: pytest.MonkeyPatch) -> Prefix:
    """What every store opened by the hook shows; time passes only when it waits."""
    prefix = Prefix()
    monkeypatch.setattr(remote, "open_store", lambda url: prefix.store)
    monkeypatch.setattr(checkpoints, "SystemClock", HandClock)
    return prefix


def states(prefix: Prefix) -> dict[str, str]:
    return {each.tag: each.state for each in ds_ckpt_hook.history(URL, every=True)}


def measured(prefix: Prefix, *losses: float | None) -> list[Record]:
    return [
        prefix.commit(f"t{number}", metrics={"loss": loss, "accuracy": number / 10})
        for number, loss in enumerate(losses)
    ]


# ---- what is listed


def test_it_tells_what_is_stored_oldest_first(prefix: Prefix) -> None:
    record = prefix.commit(
        "a/b", {"x": b"12345"}, step=7, kind="epoch", metrics={"loss": 0.5}, pin=True
    )
    prefix.commit("next")
    history = ds_ckpt_hook.history(URL)
    assert [each.tag for each in history] == ["a/b", "next"]
    assert history[0] == Checkpoint(
        tag="a/b",
        save_id=record.save_id,
        step=7,
        saved=datetime.fromtimestamp(record.time_ms / 1000, timezone.utc),
        kind="epoch",
        metrics={"loss": 0.5},
        bytes=5,
        pinned=True,
        state="committed",
        run_id="run",
        url=f"{URL}/{record.folder}",
    )
    assert (len(history), history[-1], history[1:]) == (2, history[1], (history[1],))
    assert history.newest() == history[1]
    assert (history[1].step, history[1].metrics, history[1].bytes) == (None, {}, 100)


def test_entries_can_be_kept_sent_to_other_ranks_and_not_changed(prefix: Prefix) -> None:
    prefix.commit("t", metrics={"loss": 1.0})
    history = ds_ckpt_hook.history(URL)
    (entry,) = history
    with pytest.raises(FrozenInstanceError):
        entry.pinned = True  # type: ignore[misc]
    assert pickle.loads(pickle.dumps(entry)) == entry
    assert list(pickle.loads(pickle.dumps(history))) == [entry]
    assert entry in {entry}
    assert replace(entry, tag="u") not in history


def test_newest_is_by_epoch_and_time_and_never_by_the_tag(prefix: Prefix) -> None:
    prefix.commit("t9", epoch=2)
    prefix.commit("t10", epoch=1)
    assert ds_ckpt_hook.history(URL).newest().tag == "t9"


def test_every_save_shows_with_its_state_if_that_is_asked_for(prefix: Prefix) -> None:
    gone, _ = prefix.commit("gone", {"x": b"123"}), prefix.commit("kept")
    prefix.catalog.intend(prefix.manifest("way", step=9), 1)
    prefix.catalog.abandon(prefix.catalog.intend(prefix.manifest("over"), 1), "no")
    history = ds_ckpt_hook.history(URL)
    assert [each.tag for each in history] == ["gone", "kept"]
    history.delete(gone.save_id)
    every = ds_ckpt_hook.history(URL, every=True)
    assert {each.tag: (each.state, each.bytes) for each in every} == {
        "gone": ("deleted", 3),
        "kept": ("committed", 100),
        "over": ("abandoned", 0),
        "way": ("storing", 0),
    }
    assert every.newest().tag == "kept"
    history.delete(gone.save_id, at_once=True)
    assert ds_ckpt_hook.history(URL, every=True)[0].bytes == 0


def test_a_damaged_record_is_named_and_hides_none_of_the_others(
    prefix: Prefix, caplog: pytest.LogCaptureFixture
) -> None:
    good, bad = measured(prefix, 1.0, 0.5)
    key = f".ds_ckpt/checkpoints/{bad.save_id}.json"
    prefix.put(key, b'{"schema": 1, "torn')
    history = ds_ckpt_hook.history(URL)
    assert [each.save_id for each in history] == [good.save_id]
    assert list(history.damaged) == [key]
    assert key in caplog.text
    assert history.best("loss").tag == "t0"
    prefix.put(f".ds_ckpt/checkpoints/{good.save_id}.json", b"{}")
    with pytest.raises(NothingCommittedError, match=f"but for a damaged one: .*{bad.save_id}"):
        ds_ckpt_hook.history(URL).newest()


def test_a_foreign_run_on_the_prefix_is_told_apart(prefix: Prefix) -> None:
    (own,) = measured(prefix, 1.0)
    foreign = prefix.commit("t0", run_id="other", metrics={"loss": 0.1})
    both = ds_ckpt_hook.history(URL)
    assert [(each.run_id, each.tag) for each in both] == [("run", "t0"), ("other", "t0")]
    assert both.best("loss").run_id == "other"
    ours = ds_ckpt_hook.history(URL, "run")
    assert [each.save_id for each in ours] == [own.save_id]
    assert ours.best("loss").run_id == "run"
    ours.pin("t0")
    assert [each.pinned for each in ds_ckpt_hook.history(URL)] == [True, False]
    with pytest.raises(InputError, match=f"2 saves.*{own.save_id}.*{foreign.save_id}"):
        both.pin("t0")
    with pytest.raises(NothingCommittedError, match="no committed checkpoint of run 'third'"):
        ds_ckpt_hook.history(URL, "third").newest()


def test_it_can_be_called_again_and_again(prefix: Prefix) -> None:
    """A module of that name would take the function's place once it is imported."""
    prefix.commit("t")
    assert len(ds_ckpt_hook.history(URL)) == len(ds_ckpt_hook.history(URL)) == 1


def test_looking_writes_nothing(prefix: Prefix) -> None:
    prefix.commit("t")
    before = prefix.stored_keys()
    prefix.store.calls.clear()
    ds_ckpt_hook.history(URL, every=True)
    assert {call.operation for call in prefix.store.calls} == {"list", "get"}
    assert prefix.stored_keys() == before


def test_a_store_that_swaps_by_creates_is_read_and_written_as_agents_do(
    prefix: Prefix, monkeypatch: pytest.MonkeyPatch
) -> None:
    bare = MemoryStore(prefix.bucket, honours_swap=False)
    there = Prefix(SwapByCreate(bare))
    there.commit("old"), there.commit("new")
    monkeypatch.setattr(remote, "open_store", lambda url: bare)
    history = ds_ckpt_hook.history(URL)
    history.pin("old")
    assert [record.pin for record in there.another().committed()] == [True, False]
    history.unpin("old")
    history.delete("old")
    assert [record.tag for record in there.another().committed()] == ["new"]
    assert for_reading(bare) is not bare


# ---- the best


def test_the_best_is_the_least_or_the_greatest(prefix: Prefix) -> None:
    measured(prefix, 3.0, 1.0, 2.0)
    history = ds_ckpt_hook.history(URL)
    assert history.best("loss").tag == "t1"
    assert history.best("loss", "max").tag == "t0"
    assert history.best("accuracy", mode="max").tag == "t2"


def test_of_equal_ones_the_newest_is_the_best(prefix: Prefix) -> None:
    measured(prefix, 1.0, 2.0, 1.0, 2.0)
    history = ds_ckpt_hook.history(URL)
    assert (history.best("loss").tag, history.best("loss", "max").tag) == ("t2", "t3")


def test_what_has_no_finite_value_is_passed_over(prefix: Prefix) -> None:
    measured(prefix, float("nan"), 4.0, None, float("-inf"))
    prefix.commit("bare")
    history = ds_ckpt_hook.history(URL)
    assert history.best("loss").tag == history.best("loss", "max").tag == "t1"
    assert history[0].metrics["loss"] is None


def test_a_metric_that_is_not_there_is_answered_with_those_that_are(prefix: Prefix) -> None:
    record = prefix.commit("t", metrics={"eval_loss": 1.0, "bleu": None})
    history = ds_ckpt_hook.history(URL)
    with pytest.raises(InputError, match="has a metric 'loss'; there are 'bleu', 'eval"):
        history.best("loss")
    with pytest.raises(InputError, match="'bleu' was not finite in any checkpoint"):
        history.best("bleu")
    with pytest.raises(InputError, match="write 'min' for the least value"):
        history.best("eval_loss", "lowest")  # type: ignore[arg-type]
    prefix.commit("bare")
    history.delete(record.save_id)
    with pytest.raises(InputError, match="after_save was told of no metrics"):
        ds_ckpt_hook.history(URL).best("loss")


def test_where_nothing_is_stored_that_is_said(prefix: Prefix) -> None:
    history = ds_ckpt_hook.history(URL)
    assert (len(history), list(history)) == (0, [])
    for call in (history.newest, lambda: history.best("loss")):
        with pytest.raises(NothingCommittedError, match=f"{URL} holds no committed checkpoint"):
            call()


# ---- pins and deletions


def test_a_save_is_named_by_entry_id_or_tag(prefix: Prefix) -> None:
    for tag in ("a", "b", "c", "twice", "twice", "new"):
        prefix.commit(tag)
    history = ds_ckpt_hook.history(URL)
    history.pin(history[0], history[1].save_id, "c")
    assert [each.tag for each in ds_ckpt_hook.history(URL) if each.pinned] == ["a", "b", "c"]
    assert not history[0].pinned, "a snapshot stays what it was"
    history.unpin("a", history[2])
    assert [each.tag for each in ds_ckpt_hook.history(URL) if each.pinned] == ["b"]
    for call in (history.pin, history.unpin, history.delete):
        with pytest.raises(InputError, match=f"'twice' names 2 saves.*{history[3].save_id}"):
            call("a", "twice")
        with pytest.raises(NothingCommittedError, match="no checkpoint 'd'; committed tags: 'a'"):
            call("a", "d")
        for name in ("../x", "", "latest", "a@" + history[0].save_id):
            with pytest.raises(NothingCommittedError, match="holds no checkpoint"):
                call("a", name)
    assert set(states(prefix).values()) == {"committed"}
    done = history.delete("a", history[3], history[4].save_id, at_once=True)
    assert [(each.tag, each.objects) for each in done] == [("a", 1), ("twice", 1), ("twice", 1)]
    assert [each.tag for each in ds_ckpt_hook.history(URL)] == ["b", "c", "new"]


def test_nothing_named_is_nothing_done_and_asks_no_store(prefix: Prefix) -> None:
    history = ds_ckpt_hook.history(URL)
    prefix.store.calls.clear()
    history.pin(), history.unpin()
    assert history.delete() == []
    assert prefix.store.calls == []


def test_a_deletion_that_died_is_repeated_by_the_same_tag(prefix: Prefix) -> None:
    prefix.commit("old", {"a": b"1", "b": b"2"}), prefix.commit("new")
    history = ds_ckpt_hook.history(URL)
    prefix.fault("delete", "fail-before", "old@.*/b", error=AccessError)
    with pytest.raises(AccessError, match=f"the store is {URL}"):
        history.delete("old", at_once=True)
    assert [key[-2:] for key in prefix.stored_keys() if key.startswith("old@")] == ["/b"]
    assert [each.tag for each in ds_ckpt_hook.history(URL)] == ["new"]
    (done,) = history.delete("old", at_once=True)
    assert (done.objects, done.left) == (2, "")
    assert not [key for key in prefix.stored_keys() if key.startswith("old@")]


def test_what_must_stay_is_refused_by_name(prefix: Prefix) -> None:
    prefix.commit("pinned", pin=True), prefix.commit("held"), prefix.commit("new")
    history = ds_ckpt_hook.history(URL)
    prefix.catalog.hold(history[1].save_id, "h")
    for entry, why in zip(history, ("pinned", "a restore holds it", "even_newest"), strict=True):
        with pytest.raises(KeptError, match=f"'{entry.tag}'.*{why}"):
            history.delete(entry)
    history.delete("new", even_newest=True)
    assert ds_ckpt_hook.history(URL).newest().tag == "held"


def test_a_pin_and_retention_at_the_same_time(prefix: Prefix) -> None:
    old, _ = prefix.commit("old"), prefix.commit("new")
    history = ds_ckpt_hook.history(URL)
    prefix.fault("put", "call", f"checkpoints/{old.save_id}", action=lambda: history.pin("old"))
    catalog = Catalog(prefix.store, random.Random(5))
    Retention(catalog, "run", 1, 0.0).apply(Lease(1, True, prefix.clock.now))
    assert states(prefix) == {"old": "committed", "new": "committed"}
    assert ds_ckpt_hook.history(URL)[0].pinned


# ---- a store in trouble


def test_a_store_that_cannot_be_reached_is_named(prefix: Prefix) -> None:
    prefix.fault("*", "fail-before", count=None, error=TransientError)
    with pytest.raises(TransientError, match=f"given up after 8 tries.*the store is {URL}"):
        ds_ckpt_hook.history(URL)


def test_a_store_that_hiccups_is_asked_again(prefix: Prefix) -> None:
    prefix.commit("t"), prefix.commit("u")
    for operation in ("list", "get", "put", "delete"):
        prefix.fault(operation, "fail-before", count=2)
    ds_ckpt_hook.history(URL).delete("t", at_once=True)
    assert [each.tag for each in ds_ckpt_hook.history(URL)] == ["u"]


def test_a_url_that_cannot_work_is_said_at_once() -> None:
    with pytest.raises(SettingsError, match="names no kind of store"):
        ds_ckpt_hook.history("bucket/run")


def test_who_may_only_read_is_refused_by_the_store(prefix: Prefix) -> None:
    prefix.commit("t")
    history = ds_ckpt_hook.history(URL)
    prefix.fault("put", "fail-before", count=None, error=AccessError)
    with pytest.raises(AccessError, match=f"the store is {URL}"):
        history.pin("t")


def test_on_a_store_without_conditions_nobody_decides_beside_an_agent(
    prefix: Prefix, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefix.commit("old"), prefix.commit("new")
    weak = MemoryStore(prefix.bucket, honours_create=False, honours_swap=False)
    monkeypatch.setattr(remote, "open_store", lambda url: weak)
    history = ds_ckpt_hook.history(URL)
    prefix.catalog.own("run", prefix.attempt(), NODE, stale_after=700)
    prefix.clock.sleep(650)
    for call in (history.pin, history.delete):
        with pytest.raises(WeakStoreError, match="an agent was at work there 650 s ago"):
            call("old")
    prefix.clock.sleep(60)
    history.pin("old")
    assert [each.pinned for each in ds_ckpt_hook.history(URL)] == [True, False]


# ---- for real


def train(folder: Path, url: str, saves: dict[str, dict[str, float]]) -> None:
    """A trainer's saves on one node, handed over by the real hook and stored by a real agent."""
    folder.mkdir()
    job = Job([folder])
    for tag, metrics in saves.items():
        job.save(tag, metrics=metrics, kind="epoch")
    store = open_store(url)
    assert World().once(str(folder), store=store) == 0
    store.close()


def test_what_trainer_and_agent_stored_in_a_folder(tmp_path: Path) -> None:
    url = (tmp_path / "store").as_uri()
    check_story(tmp_path, url)
    assert not list((tmp_path / "store").glob("step2@*/*"))


def test_what_trainer_and_agent_stored_on_s3(
    tmp_path: Path, seaweed: S3, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DS_CKPT_S3_ENDPOINT", seaweed.endpoint)
    bucket = seaweed.bucket()
    check_story(tmp_path, f"s3://{bucket}/run")
    listed = seaweed.client().list_objects_v2(Bucket=bucket, Prefix="run/")["Contents"]
    keys = [each["Key"] for each in listed]
    assert not [key for key in keys if "step2@" in key]
    assert not [key for key in keys if "/probe/" in key]


def test_an_agent_that_retains_leaves_what_was_pinned(tmp_path: Path) -> None:
    url = (tmp_path / "store").as_uri()
    folder = tmp_path / "node"
    train(folder, url, {"step1": {"loss": 0.1}, "step2": {"loss": 0.4}})
    history = ds_ckpt_hook.history(url)
    history.pin(history.best("loss"))
    job = Job([folder])
    for tag in ("step3", "step4"):
        job.save(tag)
    store = open_store(url)
    assert World().once(folder, store=store, keep_last=1, retention_pause=0) == 0
    store.close()
    assert [each.tag for each in ds_ckpt_hook.history(url)] == ["step1", "step4"]


def check_story(tmp_path: Path, url: str) -> None:
    """Train, take the best, keep it, throw others away, restore it."""
    losses = {"step1": 0.5, "step2": 0.9, "step3": 0.7}
    train(tmp_path / "node", url, {tag: {"loss": loss} for tag, loss in losses.items()})
    history = ds_ckpt_hook.history(url)
    assert [(each.tag, each.step, each.kind) for each in history] == [
        ("step1", 1, "epoch"),
        ("step2", 2, "epoch"),
        ("step3", 3, "epoch"),
    ]
    assert all(each.bytes > 0 for each in history)
    best = history.best("loss")
    assert (best.tag, best.metrics) == ("step1", {"loss": 0.5})
    history.pin(best)
    (done,) = history.delete("step2", at_once=True)
    assert (done.objects > 0, done.left) == (True, "")
    left = ds_ckpt_hook.history(url)
    assert [(each.tag, each.pinned) for each in left] == [("step1", True), ("step3", False)]
    with pytest.raises(KeptError):
        left.delete(left.newest())
    left.delete(left.newest(), even_newest=True)
    store = open_store(url)
    pointed = Catalog(store, system_random()).latest()
    store.close()
    assert pointed is not None
    assert (pointed.tag, pointed.pin) == ("step1", True)
    clock, rng = checkpoints.SystemClock(), system_random()
    new = tmp_path / "new"
    new.mkdir()
    remote.restore(url, remote.Volume(str(new)), best.save_id, clock, rng)
    assert (new / "latest").read_text() == "step1"
    assert (new / "step1/mp_rank_00_model_states.pt").read_bytes().startswith(b"model step1")
