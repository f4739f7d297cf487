"""What must come of an upload, a download and a commit when the network or the store fails.

One set of stories for every provider. A provider joins with a fixture ``cloud`` that returns a
:class:`Cloud`, and classes in its own test file::

    class TestFaults(FaultStories): ...
    class TestExpiry(ExpiryStories): ...

Each story runs what the agent runs (``RetryStore``, ``Uploader``, ``Downloader``, ``Catalog``)
through a proxy that makes the fault, and asserts that the fault happened. It ends well when the
bytes in the store, read past the proxy, are right; or when nothing is there and the message says
why.
"""

from __future__ import annotations

import os
import random
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from ds_ckpt_store.contract.clock import SystemClock
from ds_ckpt_store.contract.digest import crc32c
from ds_ckpt_store.contract.filesystem import Filesystem
from ds_ckpt_store.errors import (
    CorruptionError,
    DamagedError,
    ExpiredError,
    NotFoundError,
    StoreError,
    ThrottledError,
    TransientError,
)
from ds_ckpt_store.stores.port import BytesSource, Store
from ds_ckpt_store.stores.retry import Retry, RetryPolicy, RetryStore
from ds_ckpt_store.transfer.budget import Budget
from ds_ckpt_store.transfer.download import Downloader, RemoteShard
from ds_ckpt_store.transfer.upload import LocalShard, MemoryUploadLog, Stored, Uploader
from tests.faultproxy import Fault, FaultProxy
from tests.store.prefix import Prefix

STALL_SECONDS = 1.0  # open the store with this, so that a stall costs no more
POLICY = RetryPolicy(tries=6, base=0.01, longest=0.1)
HASTY = RetryPolicy(tries=3, deadline=2.0, base=0.01, longest=0.1)


@dataclass(frozen=True)
class Wire:
    """How a provider's calls look on the wire.

    Attributes:
        put: pattern of the request line that stores a small object whole.
        part: of the one that sends a part's bytes, of any part.
        complete: of the one that makes the object of its parts.
        read: of the one that reads an object or a range.
        list: of the one that lists objects.
        throttled: further arguments of the :class:`Fault` whose status is 503 or 429.
        expired: arguments of the ``status`` fault that says that the credentials have expired.
    """

    put: str
    part: str
    complete: str
    read: str
    list: str
    throttled: Mapping[str, object] = field(default_factory=dict)
    expired: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True)
class Cloud:
    """A store, and a way to it through the proxy.

    Attributes:
        proxy: in front of the server.
        wire: how its calls look.
        store: through the proxy, opened with :data:`STALL_SECONDS`, writing with the proof that
            is to be tried.
        direct: the same prefix past the proxy, to look at what is there.
        part_size: bytes; a shard of more is sent in parts of this size.
        folder: for files.
    """

    proxy: FaultProxy
    wire: Wire
    store: Store
    direct: Store
    part_size: int
    folder: Path
    retries: list[Retry] = field(default_factory=list)

    def retrying(self, policy: RetryPolicy = POLICY) -> RetryStore:
        """As the agent decorates it, with shorter waits."""
        return RetryStore(
            self.store,
            SystemClock(),
            random.Random(1),
            policy=policy,
            on_retry=self.retries.append,
        )

    def shard(self, key: str, size: int) -> LocalShard:
        """A file of random bytes."""
        path = self.folder / key
        data = random.Random(key).randbytes(size)
        path.write_bytes(data)
        return LocalShard(key, size, crc32c(data), lambda: os.open(path, os.O_RDONLY))

    def large(self) -> LocalShard:
        """A shard of three parts, the last one short."""
        return self.shard("large", 2 * self.part_size + 777)

    def large_begun(self, log: MemoryUploadLog) -> LocalShard:
        """The same, its first part already sent past all faults, as the log knows."""
        shard = self.large()
        upload = self.direct.begin(shard.key, shard.size, {"part_size": str(self.part_size)})
        first = BytesSource(self.bytes_of(shard)[: self.part_size])
        log.begin(shard.key, upload, self.part_size)
        log.add_part(shard.key, self.direct.put_part(upload, 1, first))
        return shard

    def small(self) -> LocalShard:
        """A shard that is sent whole."""
        return self.shard("small", 300_000)

    def upload(
        self,
        *shards: LocalShard,
        policy: RetryPolicy = POLICY,
        log: MemoryUploadLog | None = None,
        streams: int = 3,
    ) -> list[Stored]:
        """One start of the process that uploads."""
        with ThreadPoolExecutor(streams) as executor:
            uploader = Uploader(
                self.retrying(policy),
                executor,
                budget=Budget(SystemClock(), streams=streams),
                part_size=self.part_size,
                clock=SystemClock(),
            )
            return uploader.upload(
                shards,
                log or MemoryUploadLog(),
                check=_nothing,
                progress=_nothing,
                stored=_nothing,
            )

    def download(self, shard: LocalShard) -> bytes:
        """One start of the process that downloads; what it wrote."""
        path = self.folder / f"{shard.key}.restored"
        with ThreadPoolExecutor(3) as executor:
            Downloader(
                self.retrying(),
                executor,
                budget=Budget(SystemClock(), streams=3),
                part_size=self.part_size,
                fs=Filesystem(),
                clock=SystemClock(),
            ).fetch(
                [RemoteShard(shard.key, shard.size, shard.crc32c, str(path))],
                check=_nothing,
                progress=_nothing,
                done=_nothing,
            )
        return path.read_bytes()

    def bytes_of(self, shard: LocalShard) -> bytes:
        """What the file has."""
        return (self.folder / shard.key).read_bytes()

    def assert_stored(self, shard: LocalShard) -> None:
        """The store holds the shard's bytes, and no unfinished upload."""
        assert self.direct.get(shard.key)[0] == self.bytes_of(shard)
        assert list(self.direct.uploads("")) == []

    def assert_absent(self, shard: LocalShard) -> None:
        """The store holds no object of that name."""
        with pytest.raises(NotFoundError):
            self.direct.head(shard.key)


def _nothing(*_: object) -> None:
    """A callback that does nothing."""


# What befalls a request that sends bytes; `after` lies within the smallest part and small object.
SENDING = {
    "reset before": {"do": "reset"},
    "reset within": {"do": "reset", "after": 200_000, "times": 2},
    "stall before": {"do": "stall"},
    "stall within": {"do": "stall", "after": 200_000},
    "503": {"do": "status", "status": 503, "times": 3},
    "429": {"do": "status", "status": 429, "times": 3},
    "500": {"do": "status", "status": 500, "body": "", "times": 2},
    "flip first": {"do": "flip", "after": 0, "times": 2},
    "flip within": {"do": "flip", "after": 123_456, "times": 2},
    "applied, reset": {"do": "drop_response", "times": 2},
    "applied, silence": {"do": "stall_response"},
    "applied, 500": {"do": "swap_response", "status": 500, "body": "", "times": 2},
}
# What befalls a request with little or nothing to send.
ASKING = {
    "reset": {"do": "reset", "times": 2},
    "stall": {"do": "stall"},
    "503": {"do": "status", "status": 503, "times": 3},
    "429": {"do": "status", "status": 429, "times": 3},
    "500": {"do": "status", "status": 500, "body": "", "times": 2},
    "cut within": {"do": "cut_response", "after": 20},
    "silence within": {"do": "stall_response", "after": 20},
}
APPLIED = {
    "applied, reset": {"do": "drop_response"},
    "applied, silence": {"do": "stall_response"},
    "applied, 500": {"do": "swap_response", "status": 500, "body": ""},
}
READING = {
    **ASKING,
    "cut": {"do": "cut_response", "after": 100_000, "times": 2},
    "silence within": {"do": "stall_response", "after": 100_000},
    "flip": {"do": "flip_response", "after": 100_000, "times": 1},
}
# What does not end by itself, and what the message must say of it.
FOR_EVER = {
    "reset": ({"do": "reset", "after": 1000}, TransientError, r"connection|reset|aborted"),
    "503": ({"do": "status", "status": 503}, ThrottledError, r"503|SlowDown|[Bb]usy"),
    "429": ({"do": "status", "status": 429}, ThrottledError, r"429"),
    "flip": ({"do": "flip", "after": 1000}, CorruptionError, r"(?i)digest|checksum|crc|md5|match"),
}


def _fault(cloud: Cloud, pattern: str, arguments: Mapping[str, object]) -> Fault:
    if arguments.get("status") in (503, 429):
        arguments = {**arguments, **cloud.wire.throttled}
    return cloud.proxy.add(Fault(pattern, **arguments))  # type: ignore[arg-type]


def _happened(cloud: Cloud, fault: Fault) -> bool:
    return cloud.proxy.hits(fault) == fault.times


class FaultStories:
    """See the module."""

    @pytest.mark.parametrize(
        "what", ["reset within", "stall within", "503", "flip first", "applied, reset"]
    )
    def test_a_small_shard_arrives_in_spite_of(self, cloud: Cloud, what: str) -> None:
        shard = cloud.small()
        fault = _fault(cloud, cloud.wire.put, SENDING[what])
        cloud.upload(shard)
        assert _happened(cloud, fault)
        cloud.assert_stored(shard)

    @pytest.mark.parametrize("what", SENDING)
    def test_a_large_shard_arrives_though_a_part_meets(self, cloud: Cloud, what: str) -> None:
        shard = cloud.large()
        fault = _fault(cloud, cloud.wire.part, {**SENDING[what], "skip": 1})
        cloud.upload(shard, streams=1)
        assert _happened(cloud, fault)
        cloud.assert_stored(shard)

    def test_a_large_shard_arrives_though_all_parts_meet_it_at_once(self, cloud: Cloud) -> None:
        shard = cloud.large()
        faults = [
            _fault(cloud, cloud.wire.part, {**SENDING[what], "times": 1})
            for what in ("503", "reset before", "flip first", "applied, reset")
        ]
        cloud.upload(shard)
        assert all(_happened(cloud, fault) for fault in faults)
        cloud.assert_stored(shard)

    @pytest.mark.parametrize("what", [*ASKING, *APPLIED])
    def test_a_large_shard_arrives_though_its_completion_meets(
        self, cloud: Cloud, what: str
    ) -> None:
        shard = cloud.large()
        fault = _fault(cloud, cloud.wire.complete, {**ASKING, **APPLIED}[what])
        cloud.upload(shard)
        assert _happened(cloud, fault)
        cloud.assert_stored(shard)

    @pytest.mark.parametrize("after", [0, 60, 150])
    def test_a_completion_changed_on_its_way_makes_no_wrong_object(
        self, cloud: Cloud, after: int
    ) -> None:
        shard = cloud.large()
        fault = _fault(cloud, cloud.wire.complete, {"do": "flip", "after": after})
        failed: StoreError | None = None
        try:
            cloud.upload(shard)
        except StoreError as error:
            failed = error
        assert _happened(cloud, fault)
        if failed is not None:
            assert str(failed).startswith("complete 'large': ")
            cloud.assert_absent(shard)
            cloud.upload(shard)  # the agent's next pass
        assert cloud.direct.get(shard.key)[0] == cloud.bytes_of(shard)

    @pytest.mark.parametrize("what", FOR_EVER)
    @pytest.mark.parametrize("size", ["small", "large"])
    def test_what_does_not_end_is_told_and_leaves_no_object(
        self, cloud: Cloud, size: str, what: str
    ) -> None:
        arguments, kind, words = FOR_EVER[what]
        shard = cloud.small() if size == "small" else cloud.large()
        pattern = cloud.wire.put if size == "small" else cloud.wire.part
        fault = _fault(cloud, pattern, {**arguments, "times": None})
        with pytest.raises(kind, match=words) as raised:
            cloud.upload(shard, policy=HASTY)
        assert cloud.proxy.hits(fault) >= HASTY.tries
        assert shard.key in str(raised.value), "the message names the object"
        cloud.assert_absent(shard)

    @pytest.mark.parametrize("what", READING)
    def test_a_download_is_right_in_spite_of(self, cloud: Cloud, what: str) -> None:
        shard = cloud.shard("object", 3 * cloud.part_size)
        cloud.direct.put(shard.key, BytesSource(cloud.bytes_of(shard)))
        fault = _fault(cloud, cloud.wire.read, READING[what])
        damage: DamagedError | None = None
        try:
            restored = cloud.download(shard)
        except DamagedError as error:
            damage = error
        assert _happened(cloud, fault)
        if damage is not None:
            assert what == "flip", "only changed bytes look like damage"
            assert damage.objects == (shard.key,)
            restored = cloud.download(shard)
        assert restored == cloud.bytes_of(shard)

    @pytest.mark.parametrize("what", ASKING)
    def test_what_is_not_there_is_told_in_spite_of(self, cloud: Cloud, what: str) -> None:
        """A refusal is read in another way than an object, and may break off as well."""
        fault = _fault(cloud, cloud.wire.read, ASKING[what])
        with pytest.raises(NotFoundError):
            cloud.retrying().get("absent")
        assert _happened(cloud, fault)

    @pytest.mark.parametrize("what", ASKING)
    def test_a_listing_is_whole_in_spite_of(self, cloud: Cloud, what: str) -> None:
        names = [f"folder/{number}" for number in range(5)]
        for name in names:
            cloud.direct.put(name, BytesSource(b"x"))
        fault = _fault(cloud, cloud.wire.list, ASKING[what])
        assert [info.key for info in cloud.retrying().list("folder/")] == names
        assert _happened(cloud, fault)

    @pytest.mark.parametrize(
        ("what", "skip"),
        [*(("applied, reset", skip) for skip in range(5)), *((what, 3) for what in APPLIED)],
    )
    def test_a_save_is_committed_once_though_an_answer_is_lost(
        self, cloud: Cloud, what: str, skip: int
    ) -> None:
        """Each write of the protocol in turn: intent, shard, receipt, record, pointer."""
        prefix = Prefix(cloud.retrying())
        fault = _fault(cloud, cloud.wire.put, {**APPLIED[what], "skip": skip})
        record = prefix.commit("t", {"a.pt": b"bytes"})
        prefix.catalog.point(record)
        assert _happened(cloud, fault)
        outside = Prefix(cloud.direct)
        assert [found.save_id for found in outside.catalog.committed()] == [record.save_id]
        assert outside.catalog.latest() == record
        assert cloud.direct.get(f"{record.folder}/a.pt")[0] == b"bytes"


class ExpiryStories:
    """Credentials expire while an upload goes on; ``wire.expired`` is how the store says so."""

    def test_an_upload_goes_on_with_credentials_taken_anew(self, cloud: Cloud) -> None:
        shard = cloud.large()
        log = MemoryUploadLog()
        fault = cloud.proxy.add(
            Fault(cloud.wire.part, "status", skip=1, times=2, **cloud.wire.expired)  # type: ignore[arg-type]
        )
        cloud.upload(shard, log=log)
        assert _happened(cloud, fault)
        assert any(isinstance(retry.error, ExpiredError) for retry in cloud.retries)
        cloud.assert_stored(shard)

    def test_credentials_that_nobody_renews_are_told(self, cloud: Cloud) -> None:
        shard = cloud.large()
        fault = cloud.proxy.add(
            Fault(cloud.wire.part, "status", times=None, **cloud.wire.expired)  # type: ignore[arg-type]
        )
        with pytest.raises(ExpiredError, match=r"(?i)expired.*renew") as raised:
            cloud.upload(shard, policy=HASTY)
        assert cloud.proxy.hits(fault) >= HASTY.tries
        assert "put_part 'large'" in str(raised.value)
        cloud.assert_absent(shard)
