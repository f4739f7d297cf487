"""torch's distributed checkpoints and folders of safetensors, in one process."""

from __future__ import annotations

import errno
import json
import os
import struct
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save
from torch.distributed.checkpoint import CheckpointException, DefaultSavePlanner

import ds_ckpt_hook
from ds_ckpt_hook.sealing import SummedFile
from ds_ckpt_store.contract import digest
from ds_ckpt_store.errors import DamagedError, NothingCommittedError, SettingsError, TagError
from tests.hook.reading.stored import PART, Shelf
from tests.hook.standin import Job, manifests

TENSORS = {
    "bf16": torch.randn(70, 3).to(torch.bfloat16),
    "f8": torch.randn(16).to(torch.float8_e4m3fn),
    "bool": torch.tensor([True, False, True]),
    "scalar": torch.tensor(3.5, dtype=torch.float64),
    "none": torch.zeros(0, 4),
    "int": torch.arange(-5, 5),
}
BIG = {"large": torch.randn(2 * PART // 4), "after": torch.randn(3, 4)}


def zeros(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: torch.zeros_like(each) for name, each in tensors.items()}


def load(url: str, state: dict[str, Any]) -> dict[str, Any]:
    reader = ds_ckpt_hook.dcp.Reader(url)
    try:
        dcp.load(state, storage_reader=reader)
    finally:
        reader.close()
    return state


def same(found: dict[str, Any], expected: dict[str, torch.Tensor]) -> bool:
    return found.keys() == expected.keys() and all(
        torch.equal(found[name].view(torch.uint8), each.view(torch.uint8))
        if each.dim()
        else found[name] == each
        for name, each in expected.items()
    )


def saved(folder: Path, state: dict[str, Any]) -> dict[str, bytes]:
    """The files that torch makes of a state."""
    dcp.save(state, storage_writer=ds_ckpt_hook.dcp.Writer(folder, "t"))
    return {path.name: path.read_bytes() for path in (folder / "t").iterdir()}


def test_a_folder_of_safetensors_loads_like_a_distributed_checkpoint(
    shelf: Shelf,
) -> None:
    files = {"model-1.safetensors": save(TENSORS), "model-2.safetensors": save(BIG)}
    url = shelf.save("hf", {**files, "config.json": b"{}", "model.safetensors.index.json": b"{}"})
    assert same(load(url, zeros({**TENSORS, **BIG})), {**TENSORS, **BIG})
    shelf.forget()
    shelf.empty_cache()
    assert same(load(url, zeros({"after": BIG["after"]})), {"after": BIG["after"]})
    read = {(path, offset) for path, offset, _ in shelf.ranges}
    headers = {("model-1.safetensors", 0), ("model-2.safetensors", 0)}
    assert read - headers in ({("model-2.safetensors", 2 * PART)}, set())


def test_a_folder_below_and_a_tensor_in_several_files(shelf: Shelf) -> None:
    whole = torch.arange(24.0).reshape(4, 6)
    files = {}
    for number, (row, column) in enumerate(((0, 0), (0, 4), (2, 0), (2, 4))):
        piece = whole[row : row + 2, column : column + (4 if column == 0 else 2)].contiguous()
        info = {"w": {"saved_offsets": [row, column]}}
        notes = {"format": "pt", "DCP_SHARDING_INFO": json.dumps(info)}
        files[f"below/shard-{number}.safetensors"] = save({"w": piece}, notes)
    url = shelf.save("hf", files)
    assert same(load(f"{url}/below", {"w": torch.zeros(4, 6)}), {"w": whole})
    with pytest.raises(CheckpointException, match=r"has no file '\.metadata'"):
        load(url, {"w": torch.zeros(4, 6)})


HOSTILE = {
    "short": b"\x01",
    "endless": struct.pack("<Q", 1 << 62) + b"{}",
    "no json": struct.pack("<Q", 2) + b"{]",
    "a list": struct.pack("<Q", 2) + b"[]",
    "outside": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]},
    "before": {"dtype": "F32", "shape": [1], "data_offsets": [-4, 0]},
    "other size": {"dtype": "F32", "shape": [3], "data_offsets": [0, 4]},
    "negative": {"dtype": "F32", "shape": [-1, -1], "data_offsets": [0, 4]},
    "unknown type": {"dtype": "F3", "shape": [1], "data_offsets": [0, 4]},
    "no shape": {"dtype": "F32", "data_offsets": [0, 4]},
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_file_that_is_none_is_refused(tmp_path: Path, name: str) -> None:
    from ds_ckpt_hook import safetensors_files

    data = HOSTILE[name]
    if isinstance(data, dict):
        header = json.dumps({"w": data}).encode()
        data = struct.pack("<Q", len(header)) + header + bytes(8)
    (tmp_path / "file").write_bytes(data)
    with (
        (tmp_path / "file").open("rb") as file,
        pytest.raises(DamagedError, match="file is no safetensors file"),
    ):
        safetensors_files.tensors_of(file, "file")


def test_torch_gets_an_error_and_no_wrong_number_where_bits_flipped(
    shelf: Shelf, tmp_path: Path
) -> None:
    files = saved(tmp_path, dict(BIG))
    url = shelf.save("t", files)
    assert same(load(url, zeros(BIG)), BIG)
    shelf.empty_cache()
    shelf.flip(url, "__0_0.distcp", PART + 100)
    with pytest.raises(CheckpointException, match=r"__0_0.distcp has CRC32C"):
        load(url, zeros(BIG))


def test_a_checkpoint_that_is_deleted_before_its_data_is_read(shelf: Shelf, tmp_path: Path) -> None:
    url = shelf.save("t", saved(tmp_path, dict(BIG)))
    reader = ds_ckpt_hook.dcp.Reader(url)
    shelf.save("t2", {"file": b""}, "--keep-last", "1", "--retention-pause", "0")
    with pytest.raises(CheckpointException, match="is deleted as t@"):
        dcp.load(zeros(BIG), storage_reader=reader)
    reader.close()
    with pytest.raises(NothingCommittedError, match="is deleted as t@"):
        ds_ckpt_hook.dcp.Reader(url)


def test_a_reader_is_given_another_checkpoint_by_torch(shelf: Shelf, tmp_path: Path) -> None:
    one = shelf.save("t1", saved(tmp_path / "1", {"w": torch.ones(3)}))
    two = shelf.save("t2", saved(tmp_path / "2", {"w": torch.zeros(3)}))
    reader = ds_ckpt_hook.dcp.Reader(one)
    assert reader.validate_checkpoint_id(two)
    assert not reader.validate_checkpoint_id("/a/folder")
    state = {"w": torch.full((3,), 5.0)}
    dcp.load(state, checkpoint_id=two, storage_reader=reader)
    assert same(state, {"w": torch.zeros(3)})
    reader.close()


def test_what_a_writer_wrote_is_handed_over_whole_with_the_sums_of_the_writing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Job([tmp_path])
    monkeypatch.setitem(ds_ckpt_hook._process, "hook", job.hooks[0])
    writer = ds_ckpt_hook.dcp.Writer(tmp_path, "run/step-1", thread_count=2)
    dcp.save(dict(BIG), storage_writer=writer)
    assert manifests(tmp_path) == [], "a trainer that dies here has handed over nothing"
    flipped = tmp_path / "run/step-1/__0_0.distcp"
    data = bytearray(flipped.read_bytes())
    before = digest.to_hex(digest.crc32c(data))
    state = flipped.stat()
    data[50] ^= 1
    with flipped.open("r+b") as file:
        file.write(data)
    os.utime(flipped, ns=(state.st_atime_ns, state.st_mtime_ns))
    save = writer.hand_over(step=1, metrics={"loss": 0.5}, kind="epoch", pin=True, strict=True)
    job.drain()
    (manifest,) = manifests(tmp_path)
    assert (manifest.tag, manifest.step, manifest.kind, manifest.pin) == (
        "run/step-1",
        1,
        "epoch",
        True,
    )
    assert manifest.save_id == save.save_id
    shards = {shard.path: shard for shard in manifest.shards}
    assert set(shards) == {".metadata", "__0_0.distcp", "__0_1.distcp"}
    assert shards["__0_0.distcp"].crc32c == before, "the flipped bit will not match it"


def test_a_disk_that_is_full_for_one_of_torchs_threads_fails_the_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = SummedFile.write

    def full(file: SummedFile, data: Any) -> int:
        if threading.current_thread() is not threading.main_thread():
            raise OSError(errno.ENOSPC, "no space left")
        return write(file, data)

    # It is the thread that torch starts that gets the file, whichever comes first.
    started = threading.Event()
    resolve = DefaultSavePlanner.resolve_data

    def late(planner: Any, item: Any) -> Any:
        if threading.current_thread() is threading.main_thread():
            started.wait(20)
        else:
            started.set()
        return resolve(planner, item)

    monkeypatch.setattr(SummedFile, "write", full)
    monkeypatch.setattr(DefaultSavePlanner, "resolve_data", late)
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    writer = ds_ckpt_hook.dcp.Writer(tmp_path, "t", thread_count=2)
    with pytest.raises(CheckpointException, match="no space left"):
        dcp.save(dict(BIG), storage_writer=writer)
    assert not (tmp_path / "t/.metadata").exists()


def test_a_writer_never_writes_over_a_save_or_elsewhere(tmp_path: Path) -> None:
    state = {"w": torch.ones(3)}
    saved(tmp_path, state)
    with pytest.raises(CheckpointException, match="already exists"):
        dcp.save(state, storage_writer=ds_ckpt_hook.dcp.Writer(tmp_path, "t"))
    writer = ds_ckpt_hook.dcp.Writer(tmp_path, "other")
    with pytest.raises(SettingsError, match="make a writer for each save"):
        dcp.save(state, checkpoint_id=str(tmp_path / "elsewhere"), storage_writer=writer)
    with pytest.raises(TagError):
        ds_ckpt_hook.dcp.Writer(tmp_path, "../t")
