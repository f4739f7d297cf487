"""gc: what nobody will use goes, all of it and nothing else, whoever is at work meanwhile."""

from __future__ import annotations

import copy
import itertools
import random
import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from ds_ckpt_store.catalog import Catalog
from ds_ckpt_store.collect import Collector, Finding
from ds_ckpt_store.contract import names
from ds_ckpt_store.contract.manifest import NodeManifest
from ds_ckpt_store.errors import AccessError, AmbiguousError, PausedError, TransientError
from ds_ckpt_store.records import Intent, Record
from ds_ckpt_store.retention import Retention
from ds_ckpt_store.stores.faulty import FaultyStore, Rule
from ds_ckpt_store.stores.forwarding import Forwarding
from ds_ckpt_store.stores.memory import MemoryBucket, MemoryStore
from ds_ckpt_store.stores.port import BytesSource, Condition, ObjectInfo, Source, Store, Upload
from ds_ckpt_store.stores.swap_by_create import SwapByCreate
from tests.sidecar.world import check_whole
from tests.store.prefix import NODE, OTHER, START_MS, THIRD, Prefix

CLOCKS = ".ds_ckpt/clock/"
DAY = 86400.0
GONE = names.new_save_id(START_MS, random.Random(0))
RECORDS, SAVES, RECEIPTS = (f".ds_ckpt/{name}/" for name in ("checkpoints", "saves", "receipts"))


class Killed(BaseException):
    pass


def die(*_: object) -> Exception:
    raise Killed


class Guard(Forwarding):
    """Stands at the store's door and lets nothing through that no decision allows."""

    def __init__(self, store: Store, reader: Store, run_id: str = "run") -> None:
        super().__init__(store)
        self._catalog = Catalog(reader, random.Random(0))
        self._run_id = run_id

    def _decision(self, key: str) -> Record:
        _, save_id = names.tag_of(key.split("/", 1)[0])
        record = self._catalog.record(save_id)
        assert record is not None, f"{key} goes, and nobody has decided on its save"
        assert record.run_id == self._run_id, f"{key} is of run {record.run_id}"
        return record

    def put(self, key: str, source: Source, *, condition: Condition = None) -> ObjectInfo:
        assert not names.is_data(key), "gc writes no data"
        return self.store.put(key, source, condition=condition)

    def delete(self, key: str) -> None:
        if names.is_data(key):
            assert self._decision(key).state in ("abandoned", "deleted"), key
        else:
            assert key.split("/")[1] in ("probe", "clock", "holds"), key
        self.store.delete(key)

    def abort(self, upload: Upload) -> None:
        if names.is_data(upload.key):
            self._decision(upload.key)
        self.store.abort(upload)


class Place(Prefix):
    """A prefix with hands for what gc meets."""

    def __init__(self, *, swaps: bool = True) -> None:
        super().__init__()
        self.swaps = swaps
        self._connect()

    def plain(self) -> Store:
        """The store as another process sees it."""
        store = MemoryStore(self.bucket, honours_swap=self.swaps)
        return store if self.swaps else SwapByCreate(store)

    def _connect(self) -> None:
        guarded = Guard(MemoryStore(self.bucket, honours_swap=self.swaps), self.plain())
        self.store = FaultyStore(guarded)
        self.catalog = Catalog(self.store if self.swaps else SwapByCreate(self.store), self.rng)
        self.others = self.another()

    def another(self) -> Catalog:
        return Catalog(self.plain(), random.Random(self.rng.random()))

    def fork(self) -> Place:
        """The same once more: what is done to one is not done to the other."""
        twin = copy.copy(self)
        twin.clock = copy.copy(self.clock)
        twin.bucket = MemoryBucket(twin.clock)
        twin.bucket.objects = dict(self.bucket.objects)
        twin.bucket.unfinished = {
            token: copy.copy(upload) for token, upload in self.bucket.unfinished.items()
        }
        twin.rng = random.Random(self.rng.random())
        twin._connect()
        return twin

    # ---- what sidecars do, past the guard

    def put(self, key: str, data: bytes) -> None:
        self.plain().put(key, BytesSource(data))

    def stored_keys(self, prefix: str = "") -> list[str]:
        return [info.key for info in self.plain().list(prefix)]

    def own(self, number: int, node: str = NODE, **options: object) -> None:
        """The n-th attempt takes or renews the lease."""
        self.others.own("run", self.attempt(number), node, **options)  # type: ignore[arg-type]

    def begin(self, key: str) -> Upload:
        """An upload in parts that nobody has completed."""
        store = self.plain()
        upload = store.begin(key, 300, {})
        store.put_part(upload, 1, BytesSource(b"part"))
        return upload

    def intend(self, tag: str, *, epoch: int = 1, **fields: object) -> NodeManifest:
        manifest = self.manifest(tag, **fields)  # type: ignore[arg-type]
        self.others.intend(manifest, epoch)
        return manifest

    def unfinished(self, tag: str, **fields: Any) -> NodeManifest:
        """A save of which one object is stored, and one is under way."""
        manifest = self.intend(tag, **fields)
        self.upload(manifest)
        self.begin(f"{manifest.folder}/large.pt")
        return manifest

    def decided(self, tag: str, state: str, **changes: object) -> Record:
        """A save whose record says so, with its object in the store."""
        manifest = self.intend(tag)
        self.upload(manifest)
        if state == "abandoned":
            return self.others.abandon(self.intent(manifest), "superseded")
        self.others.put_receipt(self.receipt(manifest))
        record = self.others.commit(self.intent(manifest)).record
        assert record is not None
        if state == "committed":
            return record
        deleted = self.others.replace(record, state=state, **changes)
        assert deleted is not None
        return deleted

    def intent(self, manifest: NodeManifest) -> Intent:
        intent = self.another().intent(manifest.save_id)
        assert intent is not None
        return intent

    def complete(self, tag: str) -> NodeManifest:
        """All stored, and nobody has committed it."""
        manifest = self.intend(tag)
        self.upload(manifest)
        self.others.put_receipt(self.receipt(manifest))
        return manifest

    # ---- what is there

    def open_uploads(self) -> set[str]:
        return {upload.key for upload in self.plain().uploads("")}

    def data(self) -> set[str]:
        return {key for key in self.stored_keys() if names.is_data(key)}

    def states(self) -> dict[str, str]:
        return {record.tag: record.state for record in self.another().records()}

    def snapshot(self) -> dict[str, str]:
        """Key to version of all but the clocks."""
        listed = self.plain().list("")
        return {info.key: info.version for info in listed if CLOCKS not in info.key}

    def end(self) -> tuple[object, ...]:
        """All that counts, without what differs from one gc to another."""
        return (
            set(self.snapshot()),
            self.open_uploads(),
            self.states(),
            self.another().latest_text(),
        )

    def check(self) -> None:
        """I1 and I2."""
        committed = self.another().committed()
        for record in committed:
            check_whole(self.plain(), record)
        named = self.another().latest_text()
        assert named is None or named in {record.folder for record in committed}


def collector(place: Place, **options: object) -> Collector:
    return Collector(place.catalog, "run", **options)  # type: ignore[arg-type]


def sweep(place: Place, gc: Collector | None = None, *, dry_run: bool = False) -> list[Finding]:
    """What one sweep finds, but for the clocks of nodes that were silent for long."""
    findings = (gc or collector(place)).sweep(dry_run=dry_run)
    return [each for each in findings if CLOCKS not in each.key]


def found(findings: list[Finding]) -> set[tuple[str, str]]:
    return {(each.kind, each.key) for each in findings}


def tidy(place: Place) -> None:
    """Sweep until there is nothing to do."""
    for _ in range(5):
        if all(each.kind == "unexplained" for each in sweep(place)):
            return
    raise AssertionError("it does not come to an end")


@pytest.fixture(params=[True, False], ids=["swaps", "swaps by creates"])
def place(request: pytest.FixtureRequest) -> Place:
    return Place(swaps=request.param)


def dead(place: Place, tag: str = "dead", **fields: object) -> NodeManifest:
    """A save whose node is gone, two days ago, in an attempt that is over."""
    place.own(0)
    manifest = place.unfinished(tag, **fields)
    place.own(1, OTHER)
    place.clock.sleep(2 * DAY)
    place.own(1, OTHER)
    return manifest


# ---- all of it, and nothing else


class Garden(Place):
    """Everything that gc can meet, with names that say what becomes of it."""

    def __init__(self, *, swaps: bool = True) -> None:
        super().__init__(swaps=swaps)
        self.goes: set[tuple[str, str]] = set()
        self.own(0)
        self._foreign()
        self._over()
        self._strange()
        self.put(".ds_ckpt/probe/gone/create", b"x")
        self.begin(".ds_ckpt/probe/gone/proof")
        self.others.store_time(THIRD)
        self.others.hold(GONE, "killed", seconds=60)
        self.goes |= {
            ("leftover", ".ds_ckpt/probe/gone/create"),
            ("leftover", ".ds_ckpt/probe/gone/proof"),
            ("leftover", ".ds_ckpt/holds/killed.json"),
        }
        self.own(1, OTHER)
        self.clock.sleep(2 * DAY)
        self._alive()

    def _foreign(self) -> None:
        other = self.unfinished("foreign", run_id="other")
        foreign = self.commit("foreign too", run_id="other")
        self.begin(f"{foreign.folder}/again.pt")
        self.begin(f"{other.folder}/more.pt")

    def commit(self, tag: str = "step1", *arguments: object, **fields: object) -> Record:
        manifest = self.intend(tag, **fields)
        self.upload(manifest)
        self.others.put_receipt(self.receipt(manifest))
        record = self.others.commit(self.intent(manifest)).record
        assert record is not None
        return record

    def _over(self) -> None:
        kept = self.commit("kept", companions={"zero_to_fp32.py": b"code"})
        self.begin(f"{kept.folder}/again.pt")
        abandoned = self.decided("abandoned", "abandoned")
        self.begin(f"{abandoned.folder}/late.pt")
        purged = self.decided("purged", "deleted", purged=True)
        forgotten = self.decided("forgotten", "deleted")
        self.held = self.decided("held", "deleted")
        dying = self.unfinished("dying")
        complete = self.complete("complete")
        self.goes |= {
            ("upload", f"{kept.folder}/again.pt"),
            ("upload", f"{abandoned.folder}/late.pt"),
            ("object", f"{abandoned.folder}/shard.pt"),
            ("object", f"{purged.folder}/shard.pt"),
            ("object", f"{forgotten.folder}/shard.pt"),
            ("save", dying.folder),
            ("upload", f"{dying.folder}/large.pt"),
            ("complete", complete.folder),
        }

    def _strange(self) -> None:
        self.put("notes.txt", b"by hand")
        self.put("junk/a/b", b"by hand")
        over = self.decided("over", "abandoned")
        self.plain().delete(f"{over.folder}/shard.pt")
        self.put(over.folder, b"a file with the name of the folder of a save that is over")
        self.put(f"another{over.folder}/x", b"the same save id under another tag")
        nobody = self.manifest("of nobody")
        self.upload(nobody)
        self.begin(f"{self.manifest('upload of nobody').folder}/x")
        beside = self.commit("beside")
        self.put(f"{beside.folder}/notes.txt", b"by hand")
        for tag, text in (("damaged", b"garbage"), ("newer", b'{"schema": 2}')):
            for kind in (SAVES, RECEIPTS, RECORDS):
                manifest = self.unfinished(f"{tag} in {kind.split('/')[1]}")
                place = f"{manifest.save_id}{f'/{NODE}' if kind == RECEIPTS else ''}"
                self.put(f"{kind}{place}.json", text)

    def _alive(self) -> None:
        self.own(1, OTHER)
        self.unfinished("alive", attempt=self.attempt(1), node=OTHER)
        self.decided("given up just now", "deleted")
        self.others.hold(self.held.save_id, "at work")
        self.others.store_time(OTHER)
        self.put(f".ds_ckpt/probe/{OTHER}/create", b"x")
        self.begin(f".ds_ckpt/probe/{OTHER}/proof")


@pytest.mark.parametrize("swaps", [True, False], ids=["swaps", "swaps by creates"])
def test_all_garbage_goes_and_nothing_else_and_a_dry_run_says_so_before(swaps: bool) -> None:
    garden = Garden(swaps=swaps)
    before, data, uploads = garden.snapshot(), garden.data(), garden.open_uploads()
    foreseen = sweep(garden, dry_run=True)
    assert (garden.snapshot(), garden.open_uploads()) == (before, uploads), "it changes nothing"
    done = sweep(garden)
    assert done == foreseen
    assert {key for key in garden.stored_keys() if CLOCKS in key} == {
        f"{CLOCKS}{OTHER}",
        f"{CLOCKS}gc",
    }, "those of silent nodes are gone"
    removed = {each for each in found(done) if each[0] != "unexplained"}
    assert removed == garden.goes

    gone = {key for kind, key in garden.goes if kind == "object"}
    gone |= {f"{key}/shard.pt" for kind, key in garden.goes if kind == "save"}
    assert garden.data() == data - gone
    ended = {key for kind, key in garden.goes if kind in ("upload", "leftover")}
    assert garden.open_uploads() == uploads - ended
    kept = {key for key in before if not names.is_data(key)} - ended
    assert kept <= set(garden.stored_keys())
    assert garden.states()["dying"] == "abandoned"
    assert garden.states()["complete"] == "committed"
    garden.check()
    assert found(sweep(garden)) == {each for each in found(done) if each[0] == "unexplained"}


def test_what_nothing_explains_is_named_once_each_and_never_touched() -> None:
    garden = Garden()
    for _ in range(3):
        strange = [each for each in sweep(garden) if each.kind == "unexplained"]
        garden.clock.sleep(100 * DAY)
    said = {each.key.split("@")[0]: each for each in strange}
    kinds = ("saves", "receipts", "checkpoints")
    documents = {f"{tag} in {kind}" for tag in ("damaged", "newer") for kind in kinds}
    by_hand = {"notes.txt", "junk", "over", "anotherover"}
    by_hand |= {"of nobody", "upload of nobody", "beside"}
    assert set(said) == documents | by_hand
    assert "notes.txt" in said["beside"].reason
    assert "neither an intent nor a record" in said["of nobody"].reason
    assert "1 unfinished" in said["upload of nobody"].reason
    for name in documents:
        folder = said[name].key
        assert f"{folder}/shard.pt" in garden.data()
        assert f"{folder}/large.pt" in garden.open_uploads()


def test_sizes_and_counts_are_told(place: Place) -> None:
    manifest = dead(place, files={"a": b"1234", "b": b"56"})
    (save, upload) = sweep(place)
    assert (save.kind, save.objects, save.size) == ("save", 2, 6)
    assert (upload.kind, upload.size) == ("upload", 4)
    assert save.save_id == upload.save_id == manifest.save_id
    record = place.another().record(manifest.save_id)
    assert record is not None
    assert record.reason == f"gc: {save.reason}"
    assert NODE in save.reason


def test_another_run_is_collected_by_its_own_gc_alone(place: Place) -> None:
    other = place.unfinished("t", run_id="other")
    place.own(0)
    place.clock.sleep(2 * DAY)
    mine = collector(place)
    assert sweep(place, mine) == []
    assert (mine.foreign, mine.left) == (1, [])
    assert place.data() == {f"{other.folder}/shard.pt"}
    theirs = Collector(place.another(), "other")
    assert found(sweep(place, theirs)) == {
        ("save", other.folder),
        ("upload", f"{other.folder}/large.pt"),
    }
    assert place.data() == set()


# ---- alive


def reasons(place: Place, **options: object) -> str:
    """Why all was left; fails if anything was not."""
    gc = collector(place, **options)
    before = place.snapshot(), place.open_uploads()
    assert sweep(place, gc) == []
    assert (place.snapshot(), place.open_uploads()) == before
    return "\n".join(each.reason for each in gc.left)


def test_a_save_of_the_newest_attempt_lives_as_long_as_its_lease_is_renewed(place: Place) -> None:
    place.own(0)
    manifest = place.unfinished("slow")
    for _ in range(4):
        place.clock.sleep(DAY)
        place.own(0)
        place.clock.sleep(500)
        assert "newest" in reasons(place, older_than=0)
    place.clock.sleep(DAY)
    assert ("save", manifest.folder) in found(sweep(place))


def test_what_a_finished_attempt_left_is_dead_a_while_after_its_end(place: Place) -> None:
    """A node that never came owes its part."""
    place.own(0)
    manifest = place.unfinished("t", nodes=[NODE, THIRD])
    place.others.put_receipt(place.receipt(manifest))
    place.clock.sleep(2 * DAY)
    place.own(0, finished=True)
    assert "was written 0 s ago" in reasons(place)
    place.clock.sleep(5)
    hasty = collector(place, older_than=5)
    assert ("save", manifest.folder) in found(sweep(place, hasty, dry_run=True))
    place.clock.sleep(DAY - 6)
    assert reasons(place) != ""
    place.clock.sleep(1)
    assert ("save", manifest.folder) in found(sweep(place))


def test_a_node_that_a_live_attempt_waits_for_may_still_bring_an_older_save(place: Place) -> None:
    """Its pod stands in a queue, and its volume waits for it."""
    place.own(0, OTHER)
    manifest = place.unfinished("t", nodes=[NODE, OTHER])
    for _ in range(3):
        place.clock.sleep(DAY)
        place.own(1, NODE, nodes=[NODE, OTHER])
        place.others.put_receipt(place.receipt(manifest))
        place.clock.sleep(300)
        place.own(1, NODE)
        assert f"node {OTHER}" in reasons(place, older_than=60)


def test_a_slow_upload_of_an_older_attempt_lives_while_its_node_is_heard_of(place: Place) -> None:
    """It cannot renew the lease; it asks for the time, which leaves an object under its name."""
    place.own(0)
    manifest = place.unfinished("slow")
    place.own(1, OTHER)
    for _ in range(4):
        place.clock.sleep(DAY)
        place.own(0)
        place.clock.sleep(500)
        assert f"node {NODE}" in reasons(place, older_than=0)
    place.clock.sleep(DAY)
    assert ("save", manifest.folder) in found(sweep(place))


def test_a_save_that_waits_for_a_node_that_works_on_in_a_newer_attempt_lives(place: Place) -> None:
    place.own(0)
    manifest = place.unfinished("t", nodes=[NODE, OTHER])
    place.others.put_receipt(place.receipt(manifest))
    place.own(1, OTHER)
    for _ in range(3):
        place.clock.sleep(DAY)
        place.own(1, OTHER)
        assert f"node {OTHER}" in reasons(place)
    place.own(1, OTHER, finished=True)
    place.clock.sleep(DAY)
    assert ("save", manifest.folder) in found(sweep(place))


def write_object(place: Place, manifest: NodeManifest) -> None:
    place.put(f"{manifest.folder}/b", b"2")


def write_part(place: Place, manifest: NodeManifest) -> None:
    (upload,) = place.plain().uploads(manifest.folder)
    place.plain().put_part(upload, 2, BytesSource(b"more"))


def write_receipt(place: Place, manifest: NodeManifest) -> None:
    receipt = place.receipt(manifest)
    place.others.put_receipt(receipt.model_copy(update={"node": THIRD}))


def begin_upload(place: Place, manifest: NodeManifest) -> None:
    place.begin(f"{manifest.folder}/new")


@pytest.mark.parametrize("write", [write_object, write_part, write_receipt, begin_upload])
def test_whatever_was_written_of_a_save_keeps_it_for_a_while(
    place: Place, write: Callable[[Place, NodeManifest], None]
) -> None:
    manifest = dead(place, nodes=[NODE, THIRD])
    write(place, manifest)
    place.clock.sleep(DAY - 1)
    place.own(1, OTHER)
    assert "was written 24 h ago" in reasons(place)
    place.clock.sleep(1)
    assert ("save", manifest.folder) in found(sweep(place))


def test_a_run_that_was_taken_over_is_over_when_its_nodes_are_silent(place: Place) -> None:
    place.own(0)
    manifest = place.unfinished("t")
    place.clock.sleep(DAY)
    place.others.own("other", place.attempt(1), OTHER)
    place.others.store_time(NODE)
    assert f"node {NODE}" in reasons(place)
    place.clock.sleep(DAY)
    place.others.own("other", place.attempt(1), OTHER)
    assert ("save", manifest.folder) in found(sweep(place))


@pytest.mark.parametrize("lease", [None, b"garbage", b'{"schema": 2}'])
def test_without_a_lease_that_can_be_read_no_save_is_given_up_and_the_rest_is_collected(
    lease: bytes | None,
) -> None:
    place = Place()
    over = place.decided("over", "abandoned")
    manifest = dead(place)
    place.plain().delete(".ds_ckpt/owner.json")
    if lease is not None:
        place.put(".ds_ckpt/owner.json", lease)
    gc = collector(place)
    assert found(sweep(place, gc)) == {("object", f"{over.folder}/shard.pt")}
    assert [each.save_id for each in gc.left] == [manifest.save_id]


def test_epochs_tell_whether_an_attempt_that_the_lease_never_saw_is_over(place: Place) -> None:
    """Its id is made of some machine's clock, and tells nothing."""
    place.own(0)
    newer = place.unfinished("newer", epoch=2, attempt=place.attempt(4))
    older = place.unfinished("older", epoch=1, attempt=place.attempt(5))
    place.clock.sleep(2 * DAY)
    gc = collector(place)
    assert ("save", older.folder) in found(sweep(place, gc))
    assert [each.key for each in gc.left] == [newer.folder]
    assert "may be newer" in gc.left[0].reason


# ---- readers and retention


def test_what_retention_gave_up_is_left_to_it_and_collected_if_it_never_comes(
    place: Place,
) -> None:
    record = place.decided("t", "deleted")
    place.own(0)
    place.clock.sleep(DAY - 1)
    assert "retention" in reasons(place)
    place.clock.sleep(1)
    assert found(sweep(place)) == {("object", f"{record.folder}/shard.pt")}


@pytest.mark.parametrize("hold", [b"", b'{"schema": 2}'], ids=["renewed", "of a newer version"])
def test_a_restore_that_holds_what_was_given_up_long_ago_keeps_it(hold: bytes) -> None:
    place = Place()
    record = place.decided("t", "deleted")
    place.own(0)
    place.clock.sleep(3 * DAY)
    place.others.hold(record.save_id, "h")
    if hold:
        place.put(".ds_ckpt/holds/h.json", hold)
    assert "hold" in reasons(place)
    place.plain().delete(".ds_ckpt/holds/h.json")
    assert found(sweep(place)) == {("object", f"{record.folder}/shard.pt")}


def test_what_was_put_by_hand_beside_a_deleted_checkpoint_stays(place: Place) -> None:
    record = place.decided("t", "deleted", purged=True)
    place.put(f"{record.folder}/notes.txt", b"by hand")
    assert found(sweep(place)) == {
        ("object", f"{record.folder}/shard.pt"),
        ("unexplained", record.folder),
    }
    assert place.data() == {f"{record.folder}/notes.txt"}


# ---- deaths, lost answers, and others at work


def small_garden() -> Place:
    """One of each that makes gc write."""
    place = Place()
    place.own(0)
    over = place.decided("over", "abandoned")
    place.begin(f"{over.folder}/late.pt")
    place.decided("forgotten", "deleted")
    place.complete("complete")
    place.unfinished("dying", files={"a": b"1", "b": b"2"})
    place.others.hold(GONE, "killed", seconds=60)
    place.own(1, OTHER)
    place.clock.sleep(2 * DAY)
    place.own(1, OTHER)
    place.unfinished("alive", attempt=place.attempt(1), node=OTHER)
    return place


WRITES = ("put", "delete", "abort")


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_sweep_that_dies_at_any_write_is_made_good_by_the_next(when: str) -> None:
    garden = small_garden()
    whole = garden.fork()
    tidy(whole)
    deaths = 0
    for operation in WRITES:
        for number in itertools.count():
            twin = garden.fork()
            rule = {"call": {"action": die}, "fail-after": {"error": die}}
            fault = "call" if when == "before" else "fail-after"
            twin.fault(operation, fault, skip=number, **rule[fault])
            try:
                sweep(twin)
                break
            except Killed:
                deaths += 1
            twin.check()
            tidy(twin)
            assert twin.end() == whole.end(), (operation, number)
    assert deaths >= 12


@pytest.mark.parametrize("fault", ["fail-before", "fail-after", "late"])
@pytest.mark.parametrize("operation", WRITES)
def test_after_an_answer_that_was_lost_nothing_goes_on_a_guess(operation: str, fault: str) -> None:
    garden = small_garden()
    whole = garden.fork()
    tidy(whole)
    for number in itertools.count():
        twin = garden.fork()
        rule = twin.fault(operation, fault, skip=number)
        try:
            sweep(twin)  # the guard sees to it that nothing goes that is not decided by then
        except (TransientError, AmbiguousError):
            twin.check()
        if rule.count == 1:
            break
        twin.store.apply_late()
        twin.check()
        tidy(twin)
        assert twin.end() == whole.end(), number
    assert number > 1


def calls_of(place: Place) -> int:
    twin = place.fork()
    sweep(twin)
    return len(twin.store.calls)


def test_two_at_once_do_what_one_does() -> None:
    garden = small_garden()
    whole = garden.fork()
    tidy(whole)
    for number in range(calls_of(garden)):
        twin = garden.fork()

        def another(twin: Place = twin) -> None:
            Collector(twin.another(), "run").sweep(dry_run=False)

        twin.fault("*", "call", skip=number, action=another)
        sweep(twin)
        twin.check()
        tidy(twin)
        assert twin.end() == whole.end(), number


def come_back(place: Place, manifest: NodeManifest, steps: int) -> None:
    """The node of a save wakes up and goes its way: the protocol's, as far as ``steps``."""
    place.own(0)
    if place.others.record(manifest.save_id) is not None:
        return
    if steps >= 1:
        place.upload(manifest)
    if steps >= 2:
        place.others.put_receipt(place.receipt(manifest))
    if steps >= 3:
        place.others.commit(place.intent(manifest))


@pytest.mark.parametrize("steps", range(4))
def test_a_node_that_wakes_up_in_the_middle_ends_with_a_whole_checkpoint_or_with_none(
    steps: int,
) -> None:
    garden = Place()
    manifest = dead(garden)
    outcomes = set()
    for number in range(calls_of(garden)):
        twin = garden.fork()
        twin.fault(
            "*", "call", skip=number, action=lambda twin=twin: come_back(twin, manifest, steps)
        )
        sweep(twin)
        twin.check()
        twin.clock.sleep(2 * DAY)
        twin.own(1, OTHER)
        tidy(twin)
        twin.check()
        state = twin.states()["dead"]
        outcomes.add(state)
        folder = {key for key in twin.data() if key.startswith(manifest.folder)}
        assert folder == ({f"{manifest.folder}/shard.pt"} if state == "committed" else set())
        assert twin.open_uploads() == set()
        if state == "committed":
            assert twin.another().latest_text() == manifest.folder
    assert outcomes == ({"committed", "abandoned"} if steps >= 2 else {"abandoned"})


def test_a_commit_that_comes_between_the_last_look_and_the_decision_wins(place: Place) -> None:
    manifest = dead(place)
    # SwapByCreate looks for versions before it creates the record.
    place.fault("put", "call", manifest.save_id, action=lambda: come_back(place, manifest, 3))
    assert found(sweep(place)) == {
        ("complete", manifest.folder),
        ("upload", f"{manifest.folder}/large.pt"),
    }
    assert place.states() == {"dead": "committed"}
    place.check()
    assert place.another().latest_text() == manifest.folder


def test_what_a_late_sidecar_stores_in_a_save_that_was_given_up_is_found_again(
    place: Place,
) -> None:
    manifest = dead(place)
    sweep(place)
    assert place.data() == set()
    place.upload(manifest)
    place.begin(f"{manifest.folder}/large.pt")
    place.others.put_receipt(place.receipt(manifest))
    record = place.others.commit(place.intent(manifest)).record
    assert record is not None
    assert record.state == "abandoned"
    assert found(sweep(place)) == {
        ("object", f"{manifest.folder}/shard.pt"),
        ("upload", f"{manifest.folder}/large.pt"),
    }
    assert (place.data(), place.open_uploads()) == (set(), set())


def test_retention_and_gc_together_leave_what_each_would(place: Place) -> None:
    for number in range(4):
        place.decided(f"t{number}", "committed")
    place.own(0)
    lease = place.others.own("run", place.attempt(0), NODE)
    retention = Retention(place.others, "run", keep_last=2, pause=3600)
    retention.apply(lease)
    assert "retention" in reasons(place)
    place.clock.sleep(DAY)
    assert len(sweep(place)) == 2
    lease = place.others.own("run", place.attempt(0), NODE)
    assert len(retention.apply(lease).purged) == 2
    assert sweep(place) == []
    place.check()


def test_latest_is_moved_to_what_a_gc_committed_before_it_was_killed(place: Place) -> None:
    place.decided("old", "committed")
    place.own(0)
    manifest = place.complete("t")
    place.fault("put", "call", "latest", action=die)
    with pytest.raises(Killed):
        sweep(place)
    assert place.another().latest_text() is None
    gc = collector(place)
    assert sweep(place, gc) == []
    assert place.another().latest_text() == manifest.folder
    assert gc.pointed is not None
    assert gc.pointed.folder == manifest.folder


def test_latest_that_names_a_checkpoint_of_a_newer_version_stays() -> None:
    place = Place()
    place.decided("t", "committed")
    newer = place.manifest("newer")
    place.put(f"{RECORDS}{newer.save_id}.json", b'{"schema": 2}')
    place.put("latest", newer.folder.encode())
    place.own(0)
    assert "schema 2" in reasons(place)
    assert place.another().latest_text() == newer.folder


def test_it_stops_when_it_is_told_to_and_goes_on_next_time() -> None:
    garden = small_garden()
    whole = garden.fork()
    tidy(whole)
    for allowed in itertools.count():
        countdown = iter(range(allowed))

        def check(countdown: Iterator[int] = countdown) -> None:
            if next(countdown, None) is None:
                raise PausedError("told to stop")

        twin = garden.fork()
        try:
            collector(twin).sweep(dry_run=False, check=check)
            break
        except PausedError:
            tidy(twin)
            assert twin.end() == whole.end()
    assert allowed > 10


# ---- what is not allowed


def test_what_may_not_be_removed_is_named_and_keeps_nothing_else_from_going(place: Place) -> None:
    over = place.decided("over", "abandoned")
    place.put(f"{over.folder}/locked", b"x")
    place.begin(f"{over.folder}/late.pt")
    place.own(0)
    place.fault("delete", "fail-before", "locked", error=AccessError, count=None)
    place.fault("abort", "fail-before", error=AccessError, count=None)
    gc = collector(place)
    assert found(sweep(place, gc)) == {("object", f"{over.folder}/shard.pt")}
    assert {(each.key, each.failed) for each in gc.left} == {
        (f"{over.folder}/locked", True),
        (f"{over.folder}/late.pt", True),
    }


def test_without_leave_to_list_uploads_the_objects_go_all_the_same(place: Place) -> None:
    over = place.decided("over", "abandoned")
    place.own(0)
    place.fault("uploads", "fail-before", error=AccessError, count=None)
    gc = collector(place)
    assert found(sweep(place, gc)) == {("object", f"{over.folder}/shard.pt")}
    assert [each.failed for each in gc.left] == [True]


def test_a_dry_run_that_may_not_write_says_that_it_does_not_know_the_time(place: Place) -> None:
    manifest = dead(place)
    place.fault("put", "fail-before", error=AccessError, count=None)
    gc = collector(place)
    assert ("save", manifest.folder) in found(sweep(place, gc, dry_run=True))
    assert not gc.dated
    with pytest.raises(AccessError):
        gc.sweep(dry_run=False)
    assert place.states() == {}


class Timeless(Forwarding):
    """A store whose puts tell no time, as S3."""

    def put(self, key: str, source: Source, *, condition: Condition = None) -> ObjectInfo:
        info = self.store.put(key, source, condition=condition)
        return ObjectInfo(key, info.size, info.version)


def test_a_clock_that_gc_takes_for_a_leftover_just_now_is_written_again(place: Place) -> None:
    key = f".ds_ckpt/clock/{NODE}"
    gone = Rule("head", "call", key, action=lambda: place.plain().delete(key))
    faulty = FaultyStore(Timeless(place.plain()), [gone])
    assert Catalog(faulty, random.Random(1)).store_time(NODE) == place.clock.now
    assert len(faulty.asked("put", key)) == 2


# ---- size


class Vast(Forwarding):
    """A store whose listing has a folder of very many objects."""

    def __init__(self, store: Store, folder: str, count: int) -> None:
        super().__init__(store)
        self._folder = folder
        self._count = count

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        if not f"{self._folder}/".startswith(prefix):
            yield from self.store.list(prefix)
            return
        for number in range(self._count):
            yield ObjectInfo(f"{self._folder}/{number:09d}", 1, "v", 1.0)


def test_a_hundred_thousand_objects_are_not_held_in_memory() -> None:
    place = Place()
    manifest = place.intend("t", run_id="other")
    vast = Vast(place.plain(), manifest.folder, 100_000)
    gc = Collector(Catalog(vast, random.Random(1)), "run")
    tracemalloc.start()
    try:
        assert gc.sweep(dry_run=False) == []
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert gc.foreign == 1
    assert peak < 1 << 20
