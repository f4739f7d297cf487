"""What a store really does, found out at start, under ``.ds_ckpt/probe/``.

Object stores promise what they do not do: some accept a wrong checksum in silence, some ignore
conditions, some answer 412 to every If-Match. The protocol rests on three things, so they are
tried for real before the first save: that changed bytes are refused, that of two creates one
fails, and that a swap fails with a wrong version and succeeds with the right one. Two writers come
one after the other, and then the second overtakes the first, whose body comes slowly: some stores
judge a condition when a request begins, write when it ends, and let both win. :func:`fit` then
makes the store as strong as it can be, or refuses it.
"""

from __future__ import annotations

import contextlib
import io
import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import BinaryIO

from ds_ckpt_store.contract.clock import SystemClock, fresh_token
from ds_ckpt_store.errors import (
    AccessError,
    AmbiguousError,
    NotFoundError,
    PreconditionError,
    RefusedError,
    StoreError,
    WeakStoreError,
)
from ds_ckpt_store.stores.check_then_put import CheckThenPut
from ds_ckpt_store.stores.port import (
    BytesSource,
    Condition,
    IfAbsent,
    IfVersion,
    Proof,
    Source,
    Store,
)
from ds_ckpt_store.stores.reading_back import ReadingBack
from ds_ckpt_store.stores.swap_by_create import SwapByCreate, has_versions

PROBE = ".ds_ckpt/probe/"
LOOKS = 2
HEAD_START = 0.05  # seconds that a request has to reach the store before another one
LONGEST_PAUSE = 2.0  # seconds; stores close a connection on which nothing comes after about 20


@dataclass(frozen=True)
class Findings:
    """What was found.

    Attributes:
        proof: the strongest proof that refused a changed body.
        conditional_create: of two creates one failed, and changed nothing.
        swap: a swap with a wrong version failed and changed nothing, one with the right succeeded,
            and of two with the right one only one did.
        notes: what else a person should know, as sentences.
    """

    proof: Proof
    conditional_create: bool
    swap: bool
    notes: tuple[str, ...] = ()

    def describe(self) -> str:
        """One line for the log."""
        create = "yes" if self.conditional_create else "no"
        swap = "yes" if self.swap else "by numbered versions" if self.conditional_create else "no"
        facts = f"proof {self.proof.value}, conditional create {create}, swap {swap}"
        return "; ".join((facts, *self.notes))

    def doubt(self) -> str | None:
        """What the proof leaves open, as a sentence for a person; None if nothing."""
        return _DOUBTS.get(self.proof)


_DOUBTS = {
    Proof.SIGNED_PAYLOAD: (
        "this store keeps no CRC32C of objects: each body is checked on its way in by the SHA-256 "
        "of its signature (which costs processor time), and of what is stored only the size can "
        "be compared"
    ),
    Proof.CONTENT_MD5: (
        "this store keeps no CRC32C of objects: each body is checked on its way in by its MD5 "
        "(which costs processor time), and of what is stored only the size can be compared"
    ),
    Proof.READ_BACK: (
        "this store checks nothing that it is sent: every object is read back and compared after "
        "its upload, which costs as much traffic again"
    ),
}


def probe(store: Store, rng: random.Random, name: str = "anyone") -> Findings:
    """Try proofs, conditional create and swap. Leaves the store's proof as it was.

    Args:
        store: the store.
        rng: names what is written.
        name: who asks, one path component. What a probe of that name left when it was killed is
            removed first, so two that may run at once need two names.

    Raises:
        StoreError: the store cannot be used at all: not reached, no access, no bucket. Then ask
            again later; nothing is concluded from a failure.
    """
    own = f"{PROBE}{name}/"
    _clear(store, own)
    under = f"{own}{fresh_token(rng)}-"
    notes: list[str] = []
    proof = _strongest(store, under + "proof", notes)
    before = store.proof
    if proof is not before:
        # A server may refuse what comes with a checksum that it does not know. Nor with a hash
        # that is made first: then the whole of a slow body would come before the request.
        store.use_proof(Proof.READ_BACK)
    try:
        create, swap = _conditions(store, under, rng, notes)
    finally:
        store.use_proof(before)
    return Findings(proof, create, swap, tuple(notes))


def _conditions(
    store: Store, under: str, rng: random.Random, notes: list[str]
) -> tuple[bool, bool]:
    """Whether it creates, and whether it swaps."""
    with _removing(store, under + "create"):
        create = store.capabilities.conditional_create and _creates(store, under + "create", rng)
    if create:
        with _removing(store, under + "race"):
            create = _one_wins(store, under + "race", rng, IfAbsent())
        if not create:
            notes.append("of two creates at once both succeeded")
    with _removing(store, under + "swap"):
        swap = store.capabilities.swap and _swaps(store, under + "swap", rng)
    if create and not swap:
        notes.append("swaps are made of creates")
    return create, swap


def _clear(store: Store, under: str) -> None:
    with contextlib.suppress(AccessError, RefusedError):
        for upload in store.uploads(under):
            store.abort(upload)
    with contextlib.suppress(AccessError, RefusedError):
        for info in store.list(under):
            store.delete(info.key)


def fit(store: Store, findings: Findings, *, allow_weak: bool = False) -> Store:
    """The store, made to do what the protocol needs.

    Args:
        store: the store that was probed.
        findings: what the probe found.
        allow_weak: accept a store without conditional create, whose conditions are then judged
            before each write; one node alone may use the prefix.

    Raises:
        WeakStoreError: it has no conditional create, and that was not allowed.
    """
    store.use_proof(findings.proof)
    if findings.proof in (Proof.READ_BACK, Proof.WRITTEN_CHECKSUM):
        store = ReadingBack(store, swaps=findings.swap)
    if not findings.conditional_create:
        if allow_weak:
            return CheckThenPut(store)
        raise WeakStoreError(_weakness(store))
    if findings.swap and not has_versions(store):
        return store
    return SwapByCreate(store)  # also if the server learned to swap after we began with versions


def _weakness(store: Store) -> str:
    """What the protocol misses in a store, and what to do."""
    claims = store.capabilities
    lacks = [
        "has no conditional create: of two puts with If-None-Match both were accepted, so two "
        "sidecars could both decide a save"
        if claims.conditional_create
        else "has no conditional create, so two sidecars could both decide a save"
    ]
    if not claims.parts:
        lacks.append(
            "takes no uploads in parts, so a shard that breaks off in its middle is sent again "
            "from its start"
        )
    if claims.proofs == (Proof.READ_BACK,):
        lacks.append(
            "checks nothing that is sent, so each shard is read back, and what a crash leaves "
            "half written is found only by that"
        )
    return (
        f"{store.url} {'; it '.join(lacks)}. Use a store that honours conditional writes (AWS S3, "
        f"Google Cloud Storage, Azure Blob, Ceph, SeaweedFS, MinIO since 2024, a file:// folder), "
        f"or allow a weak store (--allow-weak-store) if one node alone uses this prefix"
    )


def for_reading(store: Store) -> Store:
    """The store as a reader must see it: through its versions, if somebody swaps by them."""
    return SwapByCreate(store) if has_versions(store) else store


def _strongest(store: Store, key: str, notes: list[str]) -> Proof:
    for proof in store.capabilities.proofs:
        if store.refuses_corruption(proof, key):
            return proof
        notes.append(f"{proof.value} proves nothing here")
    return Proof.READ_BACK


def _creates(store: Store, key: str, rng: random.Random) -> bool:
    first, second = _body(rng), _body(rng)
    with contextlib.suppress(RefusedError, PreconditionError):
        store.put(key, BytesSource(first), condition=IfAbsent())
    if not _holds(store, key, first):  # the condition may be lost to our own earlier try
        return False
    return _fails(lambda: store.put(key, BytesSource(second), condition=IfAbsent())) and _holds(
        store, key, first
    )


def _swaps(store: Store, key: str, rng: random.Random) -> bool:
    first, second, third, fourth = (_body(rng) for _ in range(4))
    store.put(key, BytesSource(first))
    old = store.get(key)[1].version
    store.put(key, BytesSource(second))
    new = store.get(key)[1].version
    if not _fails(lambda: store.put(key, BytesSource(third), condition=IfVersion(old))):
        return False
    if not _holds(store, key, second):
        return False
    # A lost answer is raised: two sidecars must not come to different findings. A condition may be
    # lost to our own earlier try, which the store refused and applied all the same.
    with contextlib.suppress(PreconditionError, RefusedError):
        store.put(key, BytesSource(fourth), condition=IfVersion(new))
    return _holds(store, key, fourth) and _one_wins(
        store, key, rng, IfVersion(store.get(key)[1].version)
    )


def _one_wins(store: Store, key: str, rng: random.Random, condition: Condition) -> bool:
    """Whether of two writers only one wins, if one overtakes the other.

    The first one's body stops in its middle until the second has its answer.
    """
    slow, fast = _SlowSource(_body(rng)), BytesSource(_body(rng))

    def write(source: Source) -> bool:
        try:
            store.put(key, source, condition=condition)
        except (PreconditionError, AmbiguousError, RefusedError):
            return False
        return True

    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(write, slow)
        try:
            slow.begun.wait(LONGEST_PAUSE)
            SystemClock().sleep(HEAD_START)
            second = write(fast)
        finally:
            slow.go_on.set()
        return not (first.result() and second)


class _SlowSource(BytesSource):
    """A body that comes in two pieces, the second one when it may."""

    def __init__(self, data: bytes) -> None:
        super().__init__(data)
        self.begun = threading.Event()
        self.go_on = threading.Event()

    def open(self) -> BinaryIO:
        """A reader."""
        return _SlowReader(super().open().read(), self)


class _SlowReader(io.BytesIO):
    def __init__(self, data: bytes, source: _SlowSource) -> None:
        super().__init__(data)
        self._source = source

    def read(self, amount: int | None = -1) -> bytes:
        if self.tell() == 0:
            return super().read(1)
        self._source.begun.set()
        self._source.go_on.wait(LONGEST_PAUSE)
        return super().read(amount)


def _fails(write: Callable[[], object]) -> bool:
    """Whether a conditional write is refused; 409 for 412 is no difference here."""
    try:
        write()
    except (PreconditionError, AmbiguousError, RefusedError):
        return True
    return False


def _holds(store: Store, key: str, data: bytes) -> bool:
    """Whether an object is this; looked at again before we say no: a byte may change on its way."""
    try:
        return any(store.get(key)[0] == data for _ in range(LOOKS))
    except NotFoundError:
        return False


def _body(rng: random.Random) -> bytes:
    return f"probe of ds-ckpt-sidecar {fresh_token(rng)}\n".encode()


@contextlib.contextmanager
def _removing(store: Store, key: str) -> Iterator[None]:
    try:
        yield
    finally:
        with contextlib.suppress(StoreError):
            store.delete(key)
