"""The remote layout of one prefix, and the decisions that are taken in it.

::

    latest                              pointer: the folder of the newest committed checkpoint
    <folder>/<shard path>               folder = <encoded tag>@<save_id>
    <folder>/.companions/<name>         small files that belong beside the tag folder
    .ds_ckpt/owner.json                 lease
    .ds_ckpt/saves/<save_id>.json       intent
    .ds_ckpt/receipts/<save_id>/<node>.json
    .ds_ckpt/checkpoints/<save_id>.json record: the one decision on that save
    .ds_ckpt/holds/<id>.json            a restore in progress
    .ds_ckpt/clock/<id>                 written to learn the store's own time

Nothing else knows a key under ``.ds_ckpt/``. A decision is one conditional write. After a write
whose answer was lost, or that lost its condition, the object is read and the decision taken
anew; nothing is cleaned up on a guess. Mutable documents carry a fresh nonce in each version, so
that a version token never returns; ``latest`` moves forward, which gives the same, and where it is
put back it ends with a random number of empty lines.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from pydantic import ValidationError

from ds_ckpt_store.contract import names
from ds_ckpt_store.contract.clock import fresh_token
from ds_ckpt_store.contract.manifest import (
    MAX_DOCUMENT_BYTES,
    Document,
    NodeManifest,
    SaveInfo,
    parse,
)
from ds_ckpt_store.errors import (
    AmbiguousError,
    DamagedError,
    InputError,
    ManifestError,
    NotFoundError,
    NothingCommittedError,
    OwnershipError,
    PreconditionError,
    TagError,
    TransientError,
    UnknownSchemaError,
)
from ds_ckpt_store.records import Hold, Intent, Owner, Receipt, Record
from ds_ckpt_store.stores.port import BytesSource, IfAbsent, IfVersion, ObjectInfo, Store
from ds_ckpt_store.stores.probe import PROBE

_OWN = names.VOLUME_DIR
_OWNER = f"{_OWN}/owner.json"
_SAVES = f"{_OWN}/saves/"
_RECEIPTS = f"{_OWN}/receipts/"
_RECORDS = f"{_OWN}/checkpoints/"
_HOLDS = f"{_OWN}/holds/"
_CLOCK = f"{_OWN}/clock/"
_REMEMBERED_ATTEMPTS = 1000
_STEP = 2  # between two epochs: one is left for attempts that no sidecar saw while they ran
_MOST_BLANKS = 100  # at the end of a pointer that was put back; shells and readers strip them
_BEGAN_SLACK = 2.0  # seconds that a look at the store's clock may take
_BEGAN_NOISE = _BEGAN_SLACK + 1.0  # seconds; stores tell their time in whole ones
STALE_AFTER = 600.0
HOLD_SECONDS = 3600
MAX_HOLD_BYTES = 4096
DECIDING_ROUNDS = 10


@dataclass(frozen=True)
class Lease:
    """What :meth:`Catalog.own` found: our epoch, and whether a newer attempt has taken over."""

    epoch: int
    newest: bool
    store_time: float
    took_over: str = ""


@dataclass(frozen=True)
class Commit:
    """What :meth:`Catalog.commit` found: the record, or what is still missing."""

    record: Record | None
    missing_nodes: tuple[str, ...] = ()
    missing_objects: tuple[str, ...] = ()


DocumentT = TypeVar("DocumentT", bound=Document)
StoredT = TypeVar("StoredT", Receipt, Record)


class Catalog:
    """The documents of one prefix.

    Args:
        store: a store that honours conditional creates and swaps (see ``stores.probe.fit``).
        rng: source of nonces.

    Attributes:
        damaged: keys of records and intents that :meth:`records` and :meth:`undecided` could not
            read when they were last called, with the reason.
    """

    def __init__(self, store: Store, rng: random.Random) -> None:
        self.store = store
        self._rng = rng
        self._cache: dict[str, tuple[str, Record]] = {}
        self.damaged: dict[str, str] = {}

    # ---- lease

    def own(
        self,
        run_id: str,
        attempt: str,
        node: str,
        *,
        nodes: Collection[str] = (),
        finished: bool = False,
        stale_after: float = STALE_AFTER,
        age: Callable[[], float] | None = None,
        left_over: bool = False,
    ) -> Lease:
        """Take or renew the lease for one attempt of a run.

        Which of two attempts is the newer one is told by when they began, on the store's clock:
        attempt ids are made of some machine's clock, and a job that comes back on another machine
        may have a slower one.

        Args:
            run_id: the run.
            attempt: the attempt that this node works for.
            node: this node's id.
            nodes: all nodes of the attempt, as far as known.
            finished: this node's trainer is finished and all its saves are decided.
            stale_after: seconds, by the store's clock, after which another run's lease is dead.
            age: tells how many seconds ago the attempt began; None if this node cannot say.
            left_over: a later attempt has begun on this node, so this one is not the newest.

        Raises:
            OwnershipError: another run holds a live lease; nothing was touched.
        """
        rounds = self._rounds("own", _OWNER)
        while True:
            next(rounds)
            current = self._read(_OWNER, Owner)
            if current is None:
                epoch = _STEP + max((record.epoch for record in self.records()), default=0)
                owner = _owner(
                    Owner(
                        run_id=run_id,
                        attempt=attempt,
                        epoch=epoch,
                        attempts={},
                        began=_at(attempt, self._began(node, age)),
                        unfinished=sorted(set(nodes) | {node}),
                        stale_seconds=stale_after,
                        nonce=fresh_token(self._rng),
                    ),
                    node,
                    finished=finished,
                )
                if self._write(_OWNER, owner, IfAbsent()) is not None:
                    return Lease(epoch, True, self.store_time(node))
                continue
            owner_now, info = current
            took_over, leader = "", attempt
            began: dict[str, float] = owner_now.began
            attempts = owner_now.attempts
            since: float | None = None
            if owner_now.run_id != run_id:
                now = self.store_time(node)
                silent = now - info.modified
                if owner_now.unfinished and silent <= stale_after:
                    raise OwnershipError(
                        f"{self.store.url} belongs to run {owner_now.run_id!r}, whose sidecar was "
                        f"there {silent:.0f} s ago: this is run {run_id!r}; use another prefix, or "
                        f"wait until that run has finished or has been silent for "
                        f"{stale_after:.0f} s"
                    )
                took_over = owner_now.run_id
                epoch, unfinished = owner_now.epoch + _STEP, set(nodes) | {node}
                since = self._began(node, age)
                leader = self._leader(run_id, attempt, since, owner_now)
                began = {**began, **_at(attempt, since)} if leader == attempt else began
            elif attempt in owner_now.attempts:
                epoch = owner_now.attempts[attempt]
                if epoch != owner_now.epoch:
                    return Lease(epoch, False, self.store_time(node))
                unfinished = set(owner_now.unfinished) | {node}
            else:
                since = self._began(node, age)
                if left_over or _is_earlier(attempt, since, owner_now):
                    # A save that an earlier attempt left behind: it must not outrank later ones.
                    earlier = _epoch_before(attempt, since, owner_now)
                    return Lease(earlier, False, self.store_time(node))
                epoch, unfinished = owner_now.epoch + _STEP, set(nodes) | {node}
                began = {**began, **_at(attempt, since)}
            owner = _owner(
                Owner(
                    run_id=run_id,
                    attempt=leader,
                    epoch=epoch,
                    attempts=attempts,
                    began=began,
                    unfinished=sorted(unfinished),
                    stale_seconds=stale_after,
                    nonce=fresh_token(self._rng),
                ),
                node,
                finished=finished,
            )
            if self._write(_OWNER, owner, IfVersion(info.version)) is not None:
                if leader != attempt:
                    epoch = attempts.get(attempt) or _epoch_before(attempt, since, owner)
                return Lease(epoch, leader == attempt, self.store_time(node), took_over)

    def _leader(self, run_id: str, attempt: str, began: float | None, owner: Owner) -> str:
        """Which attempt of a run leads when the run comes back to a prefix: this one, or a later.

        Another run has used the prefix meanwhile; whoever of ours comes first may be a node that
        was away since an attempt long past. The newest record tells of the last one.
        """
        own = [record.attempt for record in self.records() if record.run_id == run_id]
        if not own or own[-1] == attempt:
            return attempt
        last = own[-1]
        known = owner.attempts
        if attempt in known and last in known:
            return attempt if known[attempt] > known[last] else last
        is_past = _is_earlier(attempt, began, owner.model_copy(update={"attempt": last}))
        return last if is_past else attempt

    def _began(self, node: str, age: Callable[[], float] | None) -> float | None:
        """When an attempt began, on the store's clock; None if that cannot be told.

        A look at that clock may take minutes, with all retries; then it is looked at again.
        """
        if age is None:
            return None
        for _ in range(DECIDING_ROUNDS):
            before = age()
            now = self.store_time(node)
            after = age()
            if after - before <= _BEGAN_SLACK:
                return now - after
        return None

    def owner(self) -> Owner | None:
        """The lease as it stands, or None."""
        found = self._read(_OWNER, Owner)
        return found[0] if found else None

    def store_time(self, name: str) -> float:
        """Seconds since the epoch by the store's own clock, from an object written just now.

        A node's object is its sign of life, too: :meth:`own` writes it each time.
        """
        key = f"{_CLOCK}{name}"
        rounds = self._rounds("store_time", key)
        while True:
            next(rounds)
            info = self.store.put(key, BytesSource(fresh_token(self._rng).encode()))
            with contextlib.suppress(NotFoundError):  # gc took the one before for a leftover
                return info.modified or self.store.head(key).modified

    # ---- one save

    def intend(self, manifest: NodeManifest, epoch: int) -> Intent:
        """Create the intent if there is none; what is read back counts."""
        key = f"{_SAVES}{manifest.save_id}.json"
        fields = manifest.model_dump(include=set(SaveInfo.model_fields))
        intent = Intent(**fields, epoch=epoch)
        rounds = self._rounds("intend", key)
        while True:
            next(rounds)
            found = self._read(key, Intent)
            if found is not None:
                return found[0]
            if self._write(key, intent, IfAbsent()) is not None:
                return intent

    def undecided(self) -> list[Intent]:
        """Intents without a record, oldest first; unreadable ones are in :attr:`damaged`."""
        decided = {key[len(_RECORDS) :] for key in self._keys(_RECORDS)}
        self._forget_damaged(_SAVES)
        return [
            found[0]
            for key in self._keys(_SAVES)
            if key[len(_SAVES) :] not in decided and (found := self._read_or_note(key, Intent))
        ]

    def put_receipt(self, receipt: Receipt) -> None:
        """Say what this node has stored; but for sums of parts, the same however often it is."""
        key = f"{_RECEIPTS}{receipt.save_id}/{receipt.node}.json"
        self.store.put(key, BytesSource(_within_bounds(receipt).to_bytes()))

    def receipt_nodes(self, save_id: str) -> set[str]:
        """Ids of the nodes whose receipt is there."""
        prefix = f"{_RECEIPTS}{save_id}/"
        return {key[len(prefix) : -len(".json")] for key in self._keys(prefix)}

    def commit(self, intent: Intent) -> Commit:
        """Decide a save as committed if its receipts are complete and its objects are there.

        Returns:
            The record, whoever made it and whatever it says; or what is missing.
        """
        found = self.record(intent.save_id)
        if found is not None:
            return Commit(found)
        gathered = self._gather(intent)
        return gathered if isinstance(gathered, Commit) else Commit(self._decide(gathered))

    def _gather(self, intent: Intent) -> Record | Commit:
        """The record as it is to be, or what is missing."""
        there = self.receipt_nodes(intent.save_id)
        missing = tuple(node for node in intent.nodes if node not in there)
        if missing:
            return Commit(None, missing_nodes=missing)
        receipts = [
            self._need(f"{_RECEIPTS}{intent.save_id}/{node}.json", Receipt) for node in intent.nodes
        ]
        fields = intent.model_dump(include={*SaveInfo.model_fields, "epoch"})
        try:
            record = Record(
                **fields,
                state="committed",
                files=sorted((f for r in receipts for f in r.files), key=lambda f: f.path),
                companions=sorted(
                    (f for r in receipts for f in r.companions), key=lambda f: f.path
                ),
                nonce=fresh_token(self._rng),
            )
        except ValidationError as error:
            raise DamagedError(
                f"{intent.folder}: what its receipts say together is no record: "
                f"{error.errors(include_url=False, include_input=False)[0]['msg']}; the save "
                "cannot be committed and its local copies are kept"
            ) from None
        sizes = {info.key: info.size for info in self.store.list(f"{record.folder}/")}
        objects = record.objects()
        if len({key for key, _ in objects}) != len(objects):
            raise DamagedError(
                f"{record.folder}: two nodes' receipts name the same path; the save cannot be "
                "committed and its local copies are kept"
            )
        wrong = tuple(key for key, entry in objects if sizes.get(key) != entry.size)
        if wrong:
            return Commit(None, missing_objects=wrong)
        record = _within_bounds(record)
        size = len(record.to_bytes())
        if size > MAX_DOCUMENT_BYTES:
            raise DamagedError(
                f"{record.folder}: its record of {len(objects)} files has {size} bytes, and "
                f"{MAX_DOCUMENT_BYTES} is the most that is read: it is not committed, since nobody "
                "could restore it, and its local copies are kept"
            )
        return record

    def abandon(self, intent: Intent, reason: str) -> Record:
        """Decide that a save is over, unless it can be, or was, committed."""
        done = self.commit(intent)
        if done.record is not None:
            return done.record
        fields = intent.model_dump(include={*SaveInfo.model_fields, "epoch"})
        nonce = fresh_token(self._rng)
        return self._decide(Record(**fields, state="abandoned", reason=reason, nonce=nonce))

    def _decide(self, record: Record) -> Record:
        key = f"{_RECORDS}{record.save_id}.json"
        rounds = self._rounds("decide", key)
        while True:
            next(rounds)
            self._write(key, record, IfAbsent())
            found = self.record(record.save_id)
            if found is not None:
                return found

    # ---- records

    def record(self, save_id: str) -> Record | None:
        """The decision on one save, read now."""
        found = self._read(f"{_RECORDS}{save_id}.json", Record)
        return found[0] if found else None

    def records(self) -> list[Record]:
        """Every record, committed or tombstone, oldest first by :attr:`Record.order`.

        One that cannot be read as a record, or is of a newer version, is left out and named in
        :attr:`damaged`, so that it does not stand between a user and every other checkpoint.
        """
        found = []
        seen = {}
        self._forget_damaged(_RECORDS)
        for info in self.store.list(_RECORDS):
            cached = self._cache.get(info.key)
            if cached is None or not info.version or cached[0] != info.version:
                if info.size > MAX_DOCUMENT_BYTES:
                    self.damaged[info.key] = f"{self.store.url}/{info.key} has {info.size} bytes"
                    continue
                read = self._read_or_note(info.key, Record)
                if read is None:
                    continue
                cached = (info.version, read[0])
            seen[info.key] = cached
            found.append(cached[1])
        self._cache = seen
        return sorted(found, key=lambda record: record.order)

    def committed(self) -> list[Record]:
        """Committed records, oldest first by :attr:`Record.order`."""
        return [record for record in self.records() if record.state == "committed"]

    def find(self, tag: str | None = None, save_id: str | None = None) -> Record:
        """The newest committed record, or the newest with a tag, or the one of a save.

        Raises:
            NothingCommittedError: there is none; names what there is.
        """
        every = self.committed()
        fitting = [
            record
            for record in every
            if (tag is None or record.tag == tag) and (save_id is None or record.save_id == save_id)
        ]
        if fitting:
            return fitting[-1]
        what = f" with tag {tag!r}" if tag is not None else ""
        what += f" of save {save_id}" if save_id is not None else ""
        known = ", ".join(sorted({record.tag for record in every})[:10])
        raise NothingCommittedError(
            f"{self.store.url} holds no committed checkpoint{what}"
            + (f"; committed tags: {known}" if known else "; it holds none at all")
            + "".join(f"; but for a damaged one: {each}" for each in self.damaged.values())
        )

    def replace(self, record: Record, **changes: object) -> Record | None:
        """Swap a record for a changed one; None if it is not (any more) as given.

        After an answer was lost, the record is read again and judged by its nonce.
        """
        key = f"{_RECORDS}{record.save_id}.json"
        found = self._read(key, Record)
        if found is None or found[0] != record:
            return None
        changed = record.model_copy(update={**changes, "nonce": fresh_token(self._rng)})
        if self._write(key, changed, IfVersion(found[1].version)) is not None:
            return changed
        return None

    # ---- pointer

    def latest(self) -> Record | None:
        """The committed record that ``latest`` names; None if it names nothing that we can read."""
        text = self.latest_text()
        with contextlib.suppress(UnknownSchemaError):
            return self._named_by(text) if text is not None else None
        return None

    def latest_text(self) -> str | None:
        """What ``latest`` says, or None if there is no such object."""
        with contextlib.suppress(NotFoundError):
            return self.store.get(names.LATEST)[0][:4096].decode(errors="replace").strip()
        return None

    def point(self, record: Record) -> bool:
        """Move ``latest`` to a committed record if it is later than what it names.

        Returns:
            Whether ``latest`` was moved.

        Raises:
            UnknownSchemaError: it names a record of a newer version than ours; it stays.
        """
        rounds = self._rounds("point", names.LATEST)
        while True:
            next(rounds)
            try:
                raw, info = self.store.get(names.LATEST)
            except NotFoundError:
                condition: IfAbsent | IfVersion = IfAbsent()
                text = record.folder
            else:
                said = raw[:4096].decode(errors="replace").strip()
                named = self._named_by(said)
                if named is None and self.latest_text() != said:
                    continue  # it was changed on its way, or just now
                if named is not None and named.order >= record.order:
                    return False
                condition = IfVersion(info.version)
                # Over what is no checkpoint (any more) it may go back to what it said before. A
                # token that is a hash of the content must not come back with that.
                blanks = 0 if named is not None else self._rng.randint(1, _MOST_BLANKS)
                text = record.folder + "\n" * blanks
            now = self.record(record.save_id)
            if now is None or now.state != "committed":
                return False
            with contextlib.suppress(PreconditionError, AmbiguousError):
                self.store.put(names.LATEST, BytesSource(text.encode()), condition=condition)
                return True

    def _named_by(self, folder: str) -> Record | None:
        try:
            _, save_id = names.tag_of(folder)
        except TagError:
            return None
        try:
            record = self.record(save_id)
        except DamagedError:
            return None
        if record is None or record.state != "committed" or record.folder != folder:
            return None
        return record

    # ---- holds

    def hold(self, save_id: str, hold_id: str, seconds: int = HOLD_SECONDS) -> None:
        """Protect a record from retention for ``seconds`` from now; repeat to renew."""
        document = Hold(save_id=save_id, seconds=seconds, nonce=fresh_token(self._rng))
        self.store.put(f"{_HOLDS}{hold_id}.json", BytesSource(document.to_bytes()))

    def release(self, hold_id: str) -> None:
        """End a hold."""
        self.store.delete(f"{_HOLDS}{hold_id}.json")

    def held(self, store_time: float) -> set[str]:
        """Save ids that a live hold protects, by the store's own clock.

        A hold that has been over for as long again, left by a restore that was killed, is removed.
        """
        protected = set()
        for info in self.store.list(_HOLDS):
            with contextlib.suppress(NotFoundError, InputError):
                document = self._read_hold(info)
                if info.modified + document.seconds > store_time:
                    protected.add(document.save_id)
                elif info.modified + 2 * document.seconds <= store_time:
                    self.store.delete(info.key)
        return protected

    # ---- objects

    def delete_objects(self, keys: Iterable[str]) -> int:
        """Delete exactly these keys; returns how many."""
        count = 0
        for key in keys:
            self.store.delete(key)
            count += 1
        return count

    def record_modified(self, save_id: str) -> float:
        """When a record was last written, by the store's own clock."""
        return self.store.head(f"{_RECORDS}{save_id}.json").modified

    # ---- what gc judges by; all of it only reads

    def lease(self) -> tuple[Owner, float] | None:
        """The lease as it stands and when it was last renewed, by the store's own clock."""
        found = self._read(_OWNER, Owner)
        return (found[0], found[1].modified) if found else None

    def intent(self, save_id: str) -> Intent | None:
        """What was intended for one save, read now."""
        found = self._read(f"{_SAVES}{save_id}.json", Intent)
        return found[0] if found else None

    def foresee(self, intent: Intent) -> Commit:
        """What :meth:`commit` would find or make."""
        found = self.record(intent.save_id)
        if found is not None:
            return Commit(found)
        gathered = self._gather(intent)
        return gathered if isinstance(gathered, Commit) else Commit(gathered)

    def last_said(self, save_id: str) -> float:
        """When a save's intent or any of its receipts was last written; 0 if there is none."""
        said = [info.modified for info in self.store.list(f"{_RECEIPTS}{save_id}/")]
        with contextlib.suppress(NotFoundError):
            said.append(self.store.head(f"{_SAVES}{save_id}.json").modified)
        return max(said, default=0.0)

    def last_seen(self, node: str) -> float:
        """When a node last came for the lease, whether it got it or not; 0 if it never did."""
        with contextlib.suppress(NotFoundError):
            return self.store.head(f"{_CLOCK}{node}").modified
        return 0.0

    def newest_write(self) -> float:
        """The latest time of any of our own documents: the store's clock has come that far."""
        return max((info.modified for info in self.store.list(f"{_OWN}/")), default=0.0)

    def holds(self, store_time: float) -> tuple[set[str], bool]:
        """Save ids that a live hold protects, and whether one that cannot be read may be live."""
        protected, unknown = set(), False
        for info in self.store.list(_HOLDS):
            with contextlib.suppress(NotFoundError):
                try:
                    document = self._read_hold(info)
                except InputError:
                    unknown = True
                else:
                    if info.modified + document.seconds > store_time:
                        protected.add(document.save_id)
        return protected, unknown

    def leftovers(self, store_time: float, older_than: float) -> Iterator[tuple[ObjectInfo, str]]:
        """Small objects of our own that nobody comes back for, each with a reason.

        Args:
            store_time: now, by the store's own clock.
            older_than: seconds since an object was last written.
        """
        for prefix, what in (
            (PROBE, "a probe that was killed left it"),
            (_CLOCK, "nobody has asked for the time under this name since"),
            (_HOLDS, "the hold is over; its restore was killed"),
        ):
            for info in self.store.list(prefix):
                if store_time - info.modified >= older_than and (
                    prefix != _HOLDS or self._is_over(info, store_time)
                ):
                    yield info, what

    def _is_over(self, info: ObjectInfo, store_time: float) -> bool:
        """Whether a hold has been over for as long again as it held; not one that is unreadable."""
        with contextlib.suppress(NotFoundError, InputError):
            return info.modified + 2 * self._read_hold(info).seconds <= store_time
        return False

    def _read_hold(self, info: ObjectInfo) -> Hold:
        """A hold. Who only reads checkpoints may write these: nothing large is even fetched."""
        if info.size > MAX_HOLD_BYTES:
            raise ManifestError(f"{info.key} has {info.size} bytes: {MAX_HOLD_BYTES} is the most")
        return parse(Hold, self.store.get(info.key)[0])

    # ---- documents

    @staticmethod
    def _rounds(operation: str, key: str) -> Iterator[int]:
        """Rounds of reading and deciding; ends with an error, so that the caller waits and asks.

        Raises:
            TransientError: after the last round; nothing is known to have been done.
        """
        yield from range(DECIDING_ROUNDS)
        raise TransientError(
            operation,
            key,
            f"lost to other writers, or without an answer, {DECIDING_ROUNDS} times in a row",
        )

    def _keys(self, prefix: str) -> list[str]:
        return [info.key for info in self.store.list(prefix) if info.key.endswith(".json")]

    def _read(self, key: str, kind: type[DocumentT]) -> tuple[DocumentT, ObjectInfo] | None:
        """A document, or None; one that looks bad is read again: a byte may change on its way."""
        found = self._read_once(key, kind)
        if isinstance(found, ManifestError):
            found = self._read_once(key, kind)
        if isinstance(found, ManifestError):
            raise DamagedError(
                f"{self.store.url}/{key} is not what it should be: {found}; nothing is decided "
                "from it; put it right or move it away by hand",
                (key,),
            )
        return found

    def _read_once(
        self, key: str, kind: type[DocumentT]
    ) -> tuple[DocumentT, ObjectInfo] | ManifestError | None:
        try:
            data, info = self.store.get(key)
        except NotFoundError:
            return None
        try:
            document = parse(kind, data)
            _check_place(key, document)
        except ManifestError as error:
            return error
        return document, info

    def _read_or_note(self, key: str, kind: type[DocumentT]) -> tuple[DocumentT, ObjectInfo] | None:
        """As :meth:`_read`; one that is bad, or newer than we are, must not hide the others."""
        try:
            return self._read(key, kind)
        except (DamagedError, UnknownSchemaError) as error:
            self.damaged[key] = str(error)
            return None

    def _forget_damaged(self, prefix: str) -> None:
        self.damaged = {k: v for k, v in self.damaged.items() if not k.startswith(prefix)}

    def _need(self, key: str, kind: type[DocumentT]) -> DocumentT:
        found = self._read(key, kind)
        if found is None:
            raise DamagedError(f"{self.store.url}/{key} was listed and cannot be read", (key,))
        return found[0]

    def _write(
        self, key: str, document: Document, condition: IfAbsent | IfVersion
    ) -> ObjectInfo | None:
        """A conditional write; None if it lost, or if it may have: read and decide again.

        A write whose answer was lost, or that an SDK repeated, shows by its nonce.
        """
        data = document.to_bytes()
        try:
            return self.store.put(key, BytesSource(data), condition=condition)
        except (PreconditionError, AmbiguousError):
            try:
                stored, info = self.store.get(key)
            except NotFoundError:
                return None
            return info if stored == data else None


def _within_bounds(document: StoredT) -> StoredT:
    """The document, without the sums of parts if these make it too large to be read."""
    if len(document.to_bytes()) <= MAX_DOCUMENT_BYTES:
        return document
    bare = [entry.model_copy(update={"parts": None}) for entry in document.files]
    return document.model_copy(update={"files": bare})


def _check_place(key: str, document: Document) -> None:
    """A document about a save lies under that save's name: a copied one decides nothing."""
    if isinstance(document, SaveInfo):
        name = f"/{document.save_id}.json"
    elif isinstance(document, Receipt):
        name = f"/{document.save_id}/{document.node}.json"
    else:
        return
    if not key.endswith(name):
        raise ManifestError(f"it is about save {document.save_id}")


def _owner(owner: Owner, node: str, *, finished: bool) -> Owner:
    """The lease with its own attempt among those known, and without a node that is finished."""
    known = sorted({**owner.attempts, owner.attempt: owner.epoch}.items(), key=lambda item: item[1])
    attempts = dict(known[-_REMEMBERED_ATTEMPTS:])
    return owner.model_copy(
        update={
            "attempts": attempts,
            "began": {each: when for each, when in owner.began.items() if each in attempts},
            "unfinished": [each for each in owner.unfinished if not finished or each != node],
        }
    )


def _at(attempt: str, began: float | None) -> dict[str, float]:
    return {} if began is None else {attempt: began}


def _is_earlier(attempt: str, began: float | None, owner: Owner) -> bool:
    """Whether an unknown attempt began before the newest known one.

    Where nobody could tell, ids decide; they have the form of save ids.
    """
    newest = owner.began.get(owner.attempt)
    if _can_tell(began, newest):
        return _precedes(attempt, began, owner.attempt, newest)
    formed = names.is_save_id(attempt) and names.is_save_id(owner.attempt)
    return formed and attempt < owner.attempt


def _can_tell(began: float | None, other: float | None) -> bool:
    """Whether these times are further apart than they may be wrong."""
    return began is not None and other is not None and abs(began - other) > _BEGAN_NOISE


def _precedes(attempt: str, began: float | None, other: str, other_began: float | None) -> bool:
    """Whether one attempt came before another, by their times or else by their ids."""
    if began is not None and other_began is not None and _can_tell(began, other_began):
        return began < other_began
    return attempt < other


def _epoch_before(attempt: str, began: float | None, owner: Owner) -> int:
    """The epoch of an attempt that nobody registered while it ran: right after its predecessor's.

    Below that of its successor, and so of the newest, whatever clocks say.
    """
    before = [
        epoch
        for known, epoch in owner.attempts.items()
        if _precedes(known, owner.began.get(known), attempt, began)
    ]
    epochs = {*owner.attempts.values(), owner.epoch}
    passed = [epoch for epoch in before if epoch < owner.epoch]
    after = max(passed, default=min(epochs) - _STEP)
    return min(after + 1, *(epoch - 1 for epoch in epochs if epoch > after))
