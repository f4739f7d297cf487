"""Committed checkpoints read where they lie: only what is needed, verified, or an error."""

from __future__ import annotations

import io
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

import ds_ckpt_hook
from ds_ckpt_hook import opening
from ds_ckpt_hook.cache import Cache
from ds_ckpt_hook.opening import StoredCheckpoint, cache_of
from ds_ckpt_store.contract.volume import Volume
from ds_ckpt_store.errors import DamagedError, NothingCommittedError, SettingsError
from ds_ckpt_store.records import PartSums, Record
from ds_ckpt_store.stores.faulty import Rule
from tests.hook.reading.stored import MIB, PART, Shelf, some
from tests.hook.test_feedback import sidecar

SIZE = 2 * PART + 100
BIG = some(SIZE)
FILES = {"big": BIG, "deep/small": b"small", "empty": b""}


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """What an agent has stored, and the name of its folder."""
    folder = tmp_path_factory.mktemp("template")
    with pytest.MonkeyPatch.context() as patch:
        url = Shelf(folder, patch).save("step1", FILES)
    return folder, url.rpartition("/")[2]


@pytest.fixture
def url(shelf: Shelf, template: tuple[Path, str]) -> str:
    folder, name = template
    shutil.copytree(folder / "store", shelf.folder / "store")
    return f"{shelf.url}/{name}"


def read(url: str, offset: int, length: int) -> bytes:
    with ds_ckpt_hook.open(url) as file:
        file.seek(offset)
        return file.read(length)


def test_a_file_reads_as_it_was_saved(url: str) -> None:
    for path, data in FILES.items():
        with ds_ckpt_hook.open(f"{url}/{path}") as file:
            assert file.read() == data
    with ds_ckpt_hook.open(f"{url}/big") as file:
        assert (file.readable(), file.seekable(), file.writable()) == (True, True, False)
        for offset in (PART - 3, 0, 4 * MIB - 1, 2 * PART - 1, SIZE - 2):
            file.seek(offset)
            assert (file.read(7), file.tell()) == (BIG[offset : offset + 7], min(offset + 7, SIZE))
        assert (file.seek(-1, io.SEEK_END), file.read(), file.read(1)) == (SIZE - 1, BIG[-1:], b"")
        assert (file.seek(SIZE + 5), file.read(1)) == (SIZE + 5, b"")
        with pytest.raises(ValueError, match="negative"):
            file.seek(-1)


def test_only_the_parts_that_are_read_are_fetched_and_once_for_all(shelf: Shelf, url: str) -> None:
    assert read(f"{url}/big", PART + 1000, 10) == BIG[PART + 1000 : PART + 1010]
    assert shelf.ranges == [("big", PART, PART)]
    assert read(f"{url}/big", 2 * PART - 5, 10) == BIG[2 * PART - 5 : 2 * PART + 5]
    assert shelf.ranges == [("big", PART, PART), ("big", 2 * PART, 100)]
    assert read(f"{url}/big", 0, SIZE) == BIG
    assert shelf.ranges[2:] == [("big", 0, PART)]
    assert read(f"{url}/big", 0, SIZE) == BIG
    assert len(shelf.ranges) == 3, "the next process finds all of it"


def test_torch_and_safetensors_read_from_it(shelf: Shelf, tmp_path: Path) -> None:
    from safetensors.torch import load, save

    state = {"weights": torch.randn(1_500_000), "step": torch.tensor(7)}
    torch.save(state, tmp_path / "model.pt")
    files = {"model.pt": (tmp_path / "model.pt").read_bytes(), "model.safetensors": save(state)}
    url = shelf.save("step1", files)
    with ds_ckpt_hook.open(f"{url}/model.pt") as file:
        loaded = torch.load(file, weights_only=True)
    with ds_ckpt_hook.open(f"{url}/model.safetensors") as file:
        again = load(file.read())
    for found in (loaded, again):
        assert all(torch.equal(found[name], state[name]) for name in state)


@pytest.mark.parametrize("cached", [True, False])
def test_bits_flipped_in_the_store_are_never_handed_out(
    shelf: Shelf, url: str, monkeypatch: pytest.MonkeyPatch, cached: bool
) -> None:
    if not cached:
        monkeypatch.setenv("DS_CKPT_CACHE_MIB", "0")
    shelf.flip(url, "big", PART + 17)
    with ds_ckpt_hook.open(f"{url}/big") as file:
        assert file.read(PART) == BIG[:PART]
        for offset in (PART, 2 * PART - 1):
            file.seek(offset)
            with pytest.raises(DamagedError, match=r"step1@.*/big.*(CRC32C|other bytes)"):
                file.read(1)
        file.seek(2 * PART)
        assert file.read() == BIG[2 * PART :]


@pytest.mark.parametrize("cached", [True, False])
def test_a_bit_flipped_on_its_way_is_no_bit_handed_out(
    shelf: Shelf, url: str, monkeypatch: pytest.MonkeyPatch, cached: bool
) -> None:
    if not cached:
        monkeypatch.setenv("DS_CKPT_CACHE_MIB", "0")
    shelf.script.append(Rule("read", "corrupt", "big", count=1))
    if cached:
        assert read(f"{url}/big", 0, 10) == BIG[:10]
        assert len(shelf.ranges) == 2, "fetched again"
    else:
        with pytest.raises(DamagedError):
            read(f"{url}/big", 0, 10)
        assert read(f"{url}/big", 0, 10) == BIG[:10]


def test_a_bit_flipped_on_the_second_way_is_found_where_there_is_no_cache(
    shelf: Shelf, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DS_CKPT_CACHE_MIB", "0")
    shelf.script.append(Rule("read", "corrupt", "big", skip=2, count=1))
    with pytest.raises(DamagedError, match="differently"):
        read(f"{url}/big", 0, 10)


def test_without_a_cache_it_reads_the_same_and_a_connection_that_breaks_is_gone_on_with(
    shelf: Shelf, url: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("DS_CKPT_CACHE_MIB", "0")
    shelf.script.append(Rule("read", "truncate", "big", count=2))
    with ds_ckpt_hook.open(f"{url}/big") as file:
        assert file.read() == BIG
        file.seek(PART - 5)
        assert file.read(10) == BIG[PART - 5 : PART + 5]
    assert caplog.text.count("cannot hold all") == 1
    assert not list((shelf.folder / "cache").glob("*-*"))


def test_a_cache_entry_that_goes_bad_while_it_is_read_is_no_matter(shelf: Shelf, url: str) -> None:
    with ds_ckpt_hook.open(f"{url}/big") as file:
        assert file.read(1) == BIG[:1]
        (entry,) = (shelf.folder / "cache").glob("*-*")
        with entry.open("r+b") as raw:
            raw.seek(4 * MIB + 1)
            raw.write(b"harm")
        file.seek(4 * MIB)
        assert file.read(10) == BIG[4 * MIB : 4 * MIB + 10]
    assert not entry.exists()


@pytest.mark.parametrize("cached", [True, False])
def test_a_checkpoint_that_is_deleted_meanwhile_is_told_from_a_damaged_one(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch, cached: bool
) -> None:
    if not cached:
        monkeypatch.setenv("DS_CKPT_CACHE_MIB", "0")
    url = shelf.save("step1", FILES)
    with ds_ckpt_hook.open(f"{url}/big") as file:
        assert file.read(10) == BIG[:10]
        shelf.save("step2", {"file": b""}, "--keep-last", "1", "--retention-pause", "0")
        assert not shelf.object(url, "big").exists()
        file.seek(PART)
        with pytest.raises(NothingCommittedError, match="is deleted as step1@"):
            file.read(10)
        file.seek(0)
        if cached:
            assert file.read(10) == BIG[:10], "what is here can be read"
    with pytest.raises(NothingCommittedError, match="deleted"):
        ds_ckpt_hook.open(f"{url}/big")


def test_a_missing_object_of_a_committed_checkpoint_is_damage(shelf: Shelf, url: str) -> None:
    shelf.object(url, "big").unlink()
    with pytest.raises(DamagedError, match="is missing"):
        read(f"{url}/big", 0, 1)


def change(record: Path, **parts: Any) -> None:
    """Rewrite the sums of parts in a record, as a careful hand would."""
    found = Record.model_validate_json(record.read_bytes())
    files = [
        each.model_copy(update={"parts": PartSums(**parts) if parts else None})
        if each.path == "big"
        else each
        for each in found.files
    ]
    record.write_bytes(found.model_copy(update={"files": files}).to_bytes())


WRONG = [
    {},
    {"size": PART, "crc32c": "0" * 24},
    {"size": PART, "crc32c": "0" * 8},
    {"size": 0, "crc32c": ""},
    {"size": 1, "crc32c": "zz"},
    {"size": SIZE, "crc32c": "+1234567"},
]


@pytest.mark.parametrize("parts", WRONG, ids=str)
def test_sums_of_parts_that_are_absent_or_wrong_make_the_whole_file_one_piece(
    shelf: Shelf, url: str, parts: dict[str, Any]
) -> None:
    change(shelf.record(url), **parts)
    assert read(f"{url}/big", PART, 10) == BIG[PART : PART + 10]
    assert shelf.ranges == [("big", 0, SIZE)]
    shelf.flip(url, "big", 0)
    shelf.empty_cache()
    with pytest.raises(DamagedError):
        read(f"{url}/big", PART, 10)


def test_a_record_of_parts_is_one_that_an_older_reader_takes(shelf: Shelf, url: str) -> None:
    entry = next(
        each for each in json.loads(shelf.record(url).read_text())["files"] if each["path"] == "big"
    )
    parts = entry.pop("parts")
    assert (parts["size"], len(parts["crc32c"])) == (PART, 3 * 8)
    assert set(entry) == {"path", "size", "crc32c", "node", "rank", "sha256"}, "nothing else is new"


def test_what_is_asked_for_wrongly_is_said(shelf: Shelf, url: str) -> None:
    with pytest.raises(FileNotFoundError, match="has no file 'bug'; it has big, deep/small"):
        ds_ckpt_hook.open(f"{url}/bug")
    with pytest.raises(SettingsError, match="no file of it"):
        ds_ckpt_hook.open(url)
    with pytest.raises(SettingsError, match="names no checkpoint"):
        ds_ckpt_hook.open(f"{shelf.url}/step1/big")
    with pytest.raises(SettingsError, match="more than a checkpoint's folder"):
        StoredCheckpoint(f"{url}/big")
    with pytest.raises(NothingCommittedError, match="no committed checkpoint 'step9'"):
        ds_ckpt_hook.open(f"{shelf.url}/step9@0123456789ab-0123456789abcdef/big")
    with pytest.raises(SettingsError, match="no kind of store"):
        ds_ckpt_hook.open("run/step1@0123456789ab-0123456789abcdef/big")


def test_what_the_history_tells_can_be_opened_also_with_a_slash_in_its_tag(shelf: Shelf) -> None:
    first = shelf.save("a/b", {"file": b"1"})
    second = shelf.save("step2", {"file": b"2"})
    assert "/a%2Fb@" in first
    assert ds_ckpt_hook.history(f"{shelf.url}/").newest().url == second
    assert read(f"{first}/file", 0, 1) == b"1"


def test_many_threads_may_read_one_checkpoint(url: str) -> None:
    from concurrent.futures import ThreadPoolExecutor

    with StoredCheckpoint(url) as checkpoint, ThreadPoolExecutor(8) as executor:
        assert checkpoint.files == ["big", "deep/small", "empty"]

        def one(number: int) -> bool:
            offset = number * 700_001
            with checkpoint.open("big") as file:
                file.seek(offset)
                return file.read(50_000) == BIG[offset : offset + 50_000]

        assert all(executor.map(one, range(SIZE // 700_001)))


# ---- where the cache lies


def test_the_cache_lies_on_the_volume_within_the_limit_of_the_pod(tmp_path: Path) -> None:
    sidecar(tmp_path, "running", limit_bytes=1000 * MIB)
    cache = cache_of({"DS_CKPT_DIR": str(tmp_path)})
    assert cache.folder == Volume(str(tmp_path)).cache
    assert 990 * MIB < cache._free() < 1000 * MIB
    elsewhere = cache_of(
        {"DS_CKPT_DIR": str(tmp_path), "DS_CKPT_CACHE": "/x", "DS_CKPT_CACHE_MIB": "3"}
    )
    assert (elsewhere.folder, elsewhere._limit) == ("/x", 3 * MIB)


def test_without_a_volume_it_lies_in_a_temporary_folder_of_ones_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    cache: Cache = cache_of({})
    assert cache.folder == f"{tmp_path}/ds_ckpt-cache-{os.getuid()}"
    assert os.stat(cache.folder).st_mode & 0o777 == 0o700
    os.rmdir(cache.folder)
    os.symlink(tmp_path, cache.folder)
    with pytest.raises(SettingsError, match="belongs to somebody else"):
        cache_of({})
    with pytest.raises(SettingsError, match="whole number"):
        cache_of({"DS_CKPT_CACHE_MIB": "1.5"})


def test_opening_needs_no_torch() -> None:
    assert "torch" not in vars(opening)
