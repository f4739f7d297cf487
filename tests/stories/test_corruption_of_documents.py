"""A document of the protocol changes on its way or in the store: it decides nothing wrong."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from ds_ckpt_store.contract.manifest import parse
from ds_ckpt_store.errors import CkptError, InputError
from ds_ckpt_store.records import Receipt, Record
from ds_ckpt_store.stores.port import BytesSource
from tests.sidecar.handoff import Trainer, save_together
from tests.sidecar.world import contents
from tests.store.prefix import Prefix
from tests.stories.places import Stage

KINDS = {
    "lease": r"owner\.json$",
    "intent": r"saves/",
    "receipt": r"receipts/",
    "record": r"checkpoints/",
}


@pytest.mark.parametrize("kind", [Receipt, Record])
def test_no_bit_of_a_document_changes_unseen(kind: type[Receipt] | type[Record]) -> None:
    prefix = Prefix()
    record = prefix.commit("t", {"x": b"1" * 100, "y": b"2"}, companions={"z.py": b"#"})
    under = "receipts" if kind is Receipt else "checkpoints"
    (key,) = prefix.stored_keys(f".ds_ckpt/{under}/")
    data = prefix.store.get(key)[0]
    written = parse(kind, data)
    assert record.save_id in key
    for position in range(len(data)):
        for bit in range(8):
            changed = bytearray(data)
            changed[position] ^= 1 << bit
            try:
                read = parse(kind, bytes(changed))
            except InputError:
                continue
            assert read == written, (position, bit)
    for length in range(len(data)):
        with pytest.raises(InputError):
            parse(kind, data[:length])


def change_a_checksum(data: bytes) -> bytes:
    """As valid as before, and wrong: a digit of the first shard's CRC32C is another one."""
    at = data.index(b'"crc32c":"') + len(b'"crc32c":"')
    digit = b"0" if data[at : at + 1] != b"0" else b"1"
    return data[:at] + digit + data[at + 1 :]


@pytest.mark.parametrize("where", ["in the store", "on its way"])
@pytest.mark.parametrize("place", ["memory", "file", "seaweed"], indirect=True)
@pytest.mark.usefixtures("one_try")
def test_a_receipt_that_was_changed_makes_no_record_and_the_next_start_mends_it(
    stage: Stage, tmp_path: Path, where: str
) -> None:
    """Whoever commits trusts the receipts of the other nodes, whose shards it cannot read."""
    nodes = [Trainer(tmp_path / name, seed=n) for n, name in enumerate("ab")]
    (manifest, _) = save_together(nodes, "t", [{"rank0.pt": 100}, {"rank1.pt": 100}])
    assert stage.once(nodes[1].volume.path) == 0
    (key,) = stage.keys(".ds_ckpt/receipts/")
    good = stage.looked.get(key)[0]
    if where == "in the store":
        stage.looked.put(key, BytesSource(change_a_checksum(good)))
    else:
        stage.fault("get", "corrupt", KINDS["receipt"])
    code = stage.once(nodes[0].volume.path)
    if where == "in the store":
        assert code == 1
        assert stage.states() == {}
        (said,) = stage.log.of("save.delayed")
        assert key in said["error"]
        assert "changed after it was written" in said["error"]
        assert stage.once(nodes[1].volume.path) == 0, "its own receipt, put anew"
    assert stage.once(nodes[0].volume.path) == 0
    assert stage.states() == {"t": "committed"}
    stage.check_whole()
    assert len(stage.catalog.committed()[0].files) == 2
    assert manifest.save_id == stage.catalog.committed()[0].save_id


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("place", ["memory", "file", "seaweed:read-back", "azure"], indirect=True)
def test_a_document_that_is_changed_on_its_way_to_the_store_decides_nothing(
    stage: Stage, trainer: Trainer, tmp_path: Path, kind: str
) -> None:
    """A store that checks refuses it; on one that does not, it is read again and put right."""
    files = {"x": random.Random(1).randbytes(100)}
    trainer.save("t", files)
    stage.log.then["store.probed"] = lambda: stage.fault("put", "corrupt", KINDS[kind])
    for _ in range(2):
        assert stage.once(trainer.volume.path) == 0, stage.log.text()
    assert stage.states() == {"t": "committed"}
    assert stage.catalog.undecided() == []
    assert stage.catalog.damaged == {}
    stage.check_whole()
    assert stage.restored(tmp_path / "new") == files


def test_a_record_that_was_changed_in_the_store_is_named_and_restores_nothing(
    stage: Stage, trainer: Trainer, tmp_path: Path
) -> None:
    trainer.save("t", {"x": 100})
    assert stage.once(trainer.volume.path) == 0
    (key,) = stage.keys(".ds_ckpt/checkpoints/")
    stage.looked.put(key, BytesSource(change_a_checksum(stage.looked.get(key)[0])))
    with pytest.raises(CkptError, match="changed after it was written") as caught:
        stage.restored(tmp_path / "new")
    assert key in str(caught.value)
    assert not (tmp_path / "new").exists() or contents(tmp_path / "new") == {}
