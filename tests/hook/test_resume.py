"""``agree_on_resume``: all ranks resume from one save, or none does."""

from __future__ import annotations

import os
import random
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import ds_ckpt_hook
from ds_ckpt_hook import local
from ds_ckpt_hook.errors import AgreementError
from ds_ckpt_hook.local import Held
from ds_ckpt_hook.remote import Committed
from ds_ckpt_hook.resume import rank_options
from ds_ckpt_store.catalog import Catalog
from ds_ckpt_store.contract.manifest import NodeManifest, SidecarStatus
from ds_ckpt_store.contract.volume import Volume
from ds_ckpt_store.records import Receipt, StoredFile
from ds_ckpt_store.stores import open_store
from ds_ckpt_store.stores.port import BytesSource
from tests.hook.standin import Job, manifests

Folders = Callable[[int], list[Path]]
MODEL = "mp_rank_00_model_states.pt"


def optimizer(rank: int) -> str:
    return f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"


def commit(url: str, folders: list[Path], save_id: str) -> None:
    """Store one save and commit it, as the sidecars of all nodes would."""
    store = open_store(url)
    catalog = Catalog(store, random.Random(1))
    found: list[tuple[Path, NodeManifest]] = [
        (folder, manifest)
        for folder in folders
        for manifest in manifests(folder)
        if manifest.save_id == save_id
    ]
    for folder, manifest in found:
        intent = catalog.intend(manifest, 1)
        files = []
        for shard in manifest.shards:
            link = folder / ".ds_ckpt/links" / save_id / shard.path
            store.put(f"{manifest.folder}/{shard.path}", BytesSource(link.read_bytes()))
            files.append(
                StoredFile(
                    path=shard.path, size=shard.size, crc32c=shard.crc32c, node=manifest.node
                )
            )
        catalog.put_receipt(
            Receipt(save_id=save_id, node=manifest.node, files=files, proof="read-back")
        )
    assert catalog.commit(intent).record is not None
    store.close()


def pointers(folders: list[Path]) -> list[str | None]:
    return [
        (folder / "latest").read_text() if (folder / "latest").exists() else None
        for folder in folders
    ]


def aside(folder: Path) -> list[str]:
    """Files that were set aside, relative to where they lie."""
    root = folder / ".ds_ckpt/aside"
    return sorted("/".join(p.relative_to(root).parts[1:]) for p in root.rglob("*") if p.is_file())


def test_a_fresh_run_starts_from_scratch_on_all_ranks(tmp_path: Path) -> None:
    volumes = [tmp_path / "new0", tmp_path / "new1"]
    assert Job(volumes).resume() == [None, None]
    assert pointers(volumes) == [None, None]


def test_both_nodes_hold_the_newest_save(folders: Folders) -> None:
    volumes = folders(2)
    before = Job(volumes)
    before.save("one")
    before.save("two")
    (volumes[1] / "latest").unlink()
    job = Job(volumes)
    assert job.resume() == ["two", "two"]
    assert pointers(volumes) == ["two", "two"]
    job.save("three")
    newest = manifests(volumes[0])[-1]
    assert newest.parent == manifests(volumes[0])[1].save_id
    assert newest.time_ms > manifests(volumes[0])[1].time_ms


def test_a_replaced_pod_without_a_store_means_none_for_all(folders: Folders) -> None:
    volumes = folders(2)
    Job(volumes).save("one")
    shutil.rmtree(volumes[1])
    volumes[1].mkdir()
    assert Job(volumes).resume() == [None, None]
    assert pointers(volumes) == [None, None]
    assert f"one/{MODEL}" in aside(volumes[0])


def test_a_replaced_pod_restores_and_the_other_one_goes_back_to_the_same_save(
    folders: Folders, tmp_path: Path
) -> None:
    volumes = folders(2)
    url = f"file://{tmp_path}/store"
    before = Job(volumes)
    (save_id, _) = (save.save_id for save in before.save("one"))
    commit(url, volumes, save_id)
    before.save("two")  # complete on both, never uploaded
    shutil.rmtree(volumes[1])
    volumes[1].mkdir()
    job = Job(volumes)
    assert job.resume(destination=url) == ["one", "one"]
    assert pointers(volumes) == ["one", "one"]
    for name in (MODEL, optimizer(0), optimizer(1)):
        assert (volumes[1] / "one" / name).exists()
    assert "shared" in (volumes[1] / "one" / MODEL).read_text()
    assert not (volumes[0] / "two").exists()
    assert f"two/{MODEL}" in aside(volumes[0])
    again = Job(volumes)
    assert again.resume() == ["one", "one"]  # by restored.json, without the store


def test_restored_files_are_no_part_of_the_next_save_of_their_tag(
    folders: Folders, tmp_path: Path
) -> None:
    volumes = folders(2)
    url = f"file://{tmp_path}/store"
    before = Job(volumes)
    before.engines[1].save_non_zero_checkpoint = False  # only rank 0 writes the model
    commit(url, volumes, before.save("last")[0].save_id)
    shutil.rmtree(volumes[1])
    volumes[1].mkdir()
    after = Job(volumes)
    after.engines[1].save_non_zero_checkpoint = False
    assert after.resume(destination=url) == ["last", "last"]
    after.save("last", "trained on")
    (newest,) = manifests(volumes[1])
    assert [shard.path for shard in newest.shards] == [optimizer(1)]
    assert newest.replicas == []
    assert newest.elsewhere == [MODEL, optimizer(0)]
    # Never the old model beside the new optimizer.
    assert Job(volumes, start_fresh=True).resume() == [None, None]


def test_a_newer_local_save_of_all_nodes_goes_before_the_newest_committed_one(
    folders: Folders, tmp_path: Path
) -> None:
    volumes = folders(2)
    url = f"file://{tmp_path}/store"
    before = Job(volumes)
    commit(url, volumes, before.save("one")[0].save_id)
    before.save("two")
    assert Job(volumes).resume(destination=url) == ["two", "two"]


@pytest.mark.parametrize("damage", ["flip", "cut", "remove"])
def test_a_torn_newest_save_on_one_node_means_the_older_one_for_all(
    folders: Folders, damage: str
) -> None:
    volumes = folders(2)
    before = Job(volumes)
    before.save("one")
    before.save("two")
    shard = volumes[1] / "two" / optimizer(1)
    data = bytearray(shard.read_bytes())
    data[3] ^= 1
    if damage == "remove":
        shard.unlink()
    else:
        shard.write_bytes(data if damage == "flip" else data[:-1])
    assert Job(volumes).resume() == ["one", "one"]
    assert pointers(volumes) == ["one", "one"]
    for volume in volumes:
        assert not (volume / "two").exists()
        assert f"two/{MODEL}" in aside(volume)
        assert (volume / "one" / MODEL).exists()


def test_a_torn_committed_save_is_restored_in_place(folders: Folders, tmp_path: Path) -> None:
    volumes = folders(2)
    url = f"file://{tmp_path}/store"
    commit(url, volumes, Job(volumes).save("one")[0].save_id)
    good = (volumes[1] / "one" / optimizer(1)).read_bytes()
    (volumes[1] / "one" / optimizer(1)).unlink()
    (volumes[1] / "one" / optimizer(1)).write_bytes(b"x" * len(good))
    assert Job(volumes).resume(destination=url) == ["one", "one"]
    assert (volumes[1] / "one" / optimizer(1)).read_bytes() == good


def test_a_damaged_store_object_means_the_older_save_and_says_so(
    folders: Folders, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    volumes = folders(2)
    url = f"file://{tmp_path}/store"
    before = Job(volumes)
    commit(url, volumes, before.save("one")[0].save_id)
    newest = before.save("two")[0].save_id
    commit(url, volumes, newest)
    (tmp_path / "store" / f"two@{newest}" / optimizer(0)).write_bytes(b"?")
    shutil.rmtree(volumes[0])
    volumes[0].mkdir()
    assert Job(volumes).resume(destination=url) == ["one", "one"]
    assert "cannot resume from 'two'" in caplog.text
    assert not (volumes[1] / "two").exists()


def test_records_of_which_none_can_be_read_are_no_reason_to_start_from_scratch(
    folders: Folders, tmp_path: Path
) -> None:
    volumes = folders(2)
    url = f"file://{tmp_path}/store"
    save_id = Job(volumes).save("one")[0].save_id
    commit(url, volumes, save_id)
    (tmp_path / "store/.ds_ckpt/checkpoints" / f"{save_id}.json").write_text("{")
    for volume in volumes:
        shutil.rmtree(volume)
        volume.mkdir()
    with pytest.raises(AgreementError, match="cannot be read"):
        Job(volumes).resume(destination=url)


def test_a_save_that_died_before_its_manifest_is_set_aside(folders: Folders) -> None:
    volumes = folders(2)
    before = Job(volumes)
    before.save("one")
    for engine in before.engines:
        engine.save_checkpoint(volumes[engine.rank], "two")
    (volumes[0] / "notes").mkdir()
    (volumes[0] / "notes" / "readme.txt").write_text("mine")
    assert Job(volumes).resume() == ["one", "one"]
    assert pointers(volumes) == ["one", "one"]
    assert f"two/{MODEL}" in aside(volumes[0])
    assert (volumes[0] / "notes" / "readme.txt").exists()


def test_checkpoints_from_before_the_hook_are_left_to_the_user(folders: Folders) -> None:
    volumes = folders(1)
    job = Job(volumes)
    job.engines[0].save_checkpoint(volumes[0], "old")
    time.sleep(0.02)  # filesystems stamp files by the kernel's tick
    with pytest.raises(AgreementError, match="before the hook"):
        job.resume()
    assert (volumes[0] / "old" / MODEL).exists()
    assert pointers(volumes) == ["old"]
    job = Job(volumes)
    job.save("new")
    assert Job(volumes).resume() == ["new"]
    assert (volumes[0] / "old" / MODEL).exists()


def test_setting_a_tag_aside_leaves_the_agreed_tag_below_it(folders: Folders) -> None:
    (volume,) = folders(1)
    job = Job([volume])
    job.save("a/b")
    job.engines[0].save_checkpoint(volume, "a")
    assert Job([volume]).resume() == ["a/b"]
    assert (volume / "a/b" / MODEL).exists()
    assert not (volume / "a" / MODEL).exists()
    assert f"a/{MODEL}" in aside(volume)


def test_a_known_checkpoint_that_cannot_be_had_is_no_start_from_scratch(
    folders: Folders,
) -> None:
    volumes = folders(2)
    job = Job(volumes)
    job.save("one")
    status = SidecarStatus(
        time=0.0,
        pid=1,
        version="0",
        run_id="run",
        destination="s3://bucket/run",
        state="running",
        newest_committed_ms=1,
        newest_committed_tag="one",
    )
    Volume(str(volumes[0])).write_sidecar_status(status)
    shutil.rmtree(volumes[1])
    volumes[1].mkdir()
    with pytest.raises(AgreementError, match="DS_CKPT_DESTINATION"):
        Job(volumes).resume()
    assert (volumes[0] / "one" / MODEL).exists(), "nothing was moved"
    assert Job(volumes, start_fresh=True).resume() == [None, None]


def test_ranks_that_changed_nodes_do_not_take_each_others_shards(folders: Folders) -> None:
    first, second = folders(2)
    Job([first, second]).save("one")
    assert Job([second, first]).resume() == [None, None]


def test_a_volume_that_holds_the_whole_save_serves_another_world_size(folders: Folders) -> None:
    (volume,) = folders(1)
    Job([volume, volume]).save("one")
    assert Job([volume]).resume() == ["one"]


def test_saves_of_another_run_on_a_reused_volume_are_not_taken(folders: Folders) -> None:
    (volume,) = folders(1)
    Job([volume]).save("one")
    job = Job([volume])
    for hook in job.hooks:
        hook.settings = hook.settings.__class__(run_id="another")
    assert job.resume() == [None]
    assert f"one/{MODEL}" in aside(volume)


def test_the_sidecar_takes_nothing_away_from_the_first_look_until_latest_names_the_choice(
    folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    volumes = folders(2)
    Job(volumes).save("one")
    locks = [Volume(str(folder)) for folder in volumes]
    seen: list[tuple[str, object]] = []
    for name in ("is_whole", "set_aside", "point"):
        real = getattr(local, name)

        def watched(*arguments: Any, name: str = name, real: Any = real) -> Any:
            seen.extend((name, v.fs.try_lock(v.cleaning_lock)) for v in locks)
            return real(*arguments)

        monkeypatch.setattr(local, name, watched)
    assert Job(volumes).resume() == ["one", "one"]
    assert {name for name, _ in seen} == {"is_whole", "set_aside", "point"}
    assert {lock for _, lock in seen} == {None}
    for volume in locks:
        free = volume.fs.try_lock(volume.cleaning_lock)
        assert free is not None
        os.close(free)


def test_a_resume_waits_for_a_sidecar_that_is_removing_and_not_for_ever(
    folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    volumes = folders(1)
    Job(volumes).save("one")
    volume = Volume(str(volumes[0]))
    lock = volume.fs.try_lock(volume.cleaning_lock)
    assert lock is not None
    threading.Timer(0.5, os.close, [lock]).start()
    assert Job(volumes).resume() == ["one"]
    monkeypatch.setattr(local, "_CLEANING_SECONDS", 0.3)
    lock = volume.fs.try_lock(volume.cleaning_lock)
    assert lock is not None
    with pytest.raises(AgreementError, match=r"has been removing saves .*cleaning\.lock"):
        Job(volumes).resume()
    os.close(lock)


def test_a_run_goes_on_from_its_own_checkpoint_though_another_has_used_the_prefix(
    folders: Folders, tmp_path: Path
) -> None:
    own, other = folders(2)
    url = f"file://{tmp_path}/store"
    mine = Job([own])
    save = mine.save("mine")[0]
    commit(url, [own], str(save.save_id))
    theirs = Job([other], run="other")
    save = theirs.save("theirs")[0]
    commit(url, [other], str(save.save_id))
    shutil.rmtree(own)
    own.mkdir()
    assert Job([own], destination=url).resume() == ["mine"]
    shutil.rmtree(own)
    own.mkdir()
    assert Job([own], run="third", destination=url).resume() == ["theirs"]


def test_an_unreadable_store_with_nothing_on_the_volumes_stops_the_start(folders: Folders) -> None:
    volumes = folders(2)
    with pytest.raises(AgreementError, match="scratch"):
        Job(volumes).resume(destination="s3://")


def test_an_unreadable_store_does_not_matter_if_all_nodes_hold_a_save(
    folders: Folders, caplog: pytest.LogCaptureFixture
) -> None:
    volumes = folders(2)
    Job(volumes).save("one")
    assert Job(volumes).resume(destination="nonsense://x") == ["one", "one"]
    assert "only the volumes count" in caplog.text


def test_a_store_whose_checkpoints_cannot_be_restored_stops_the_start(
    folders: Folders, tmp_path: Path
) -> None:
    volumes = folders(2)
    url = f"file://{tmp_path}/store"
    save_id = Job(volumes).save("one")[0].save_id
    commit(url, volumes, save_id)
    os.unlink(tmp_path / "store" / f"one@{save_id}" / optimizer(0))
    for volume in volumes:
        shutil.rmtree(volume)
        volume.mkdir()
    with pytest.raises(AgreementError, match="could be brought to every node"):
        Job(volumes).resume(destination=url)


def test_a_rank_that_cannot_use_its_volume_stops_all(folders: Folders, tmp_path: Path) -> None:
    (volume,) = folders(1)
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    job = Job([volume, blocked])
    with pytest.raises(AgreementError, match="rank 1"):
        job.resume()


def test_newest_is_by_epoch_then_time_and_never_by_the_tag() -> None:
    def held(save_id: str, time_ms: int, attempt: str) -> Held:
        return Held(save_id, f"tag {save_id}", time_ms, attempt)

    committed = [
        Committed("a", "z99", time_ms=50, epoch=1, attempt="old", run_id="run"),
        Committed("b", "a01", time_ms=40, epoch=2, attempt="new", run_id="run"),
    ]
    old = held("c", 60, "old")
    new = held("d", 45, "new")
    unknown = held("e", 70, "?")
    only_here = held("f", 90, "new")
    node0 = {save.save_id: save for save in (old, new, unknown, only_here)}
    node1 = {save.save_id: save for save in (old, new, unknown)}
    order = [option.save_id for option in rank_options([node0, node1], committed)]
    assert order == ["e", "d", "b", "c", "a"]


def test_what_was_deleted_by_name_is_not_resumed_from_though_all_volumes_hold_it(
    folders: Folders, tmp_path: Path
) -> None:
    """The loss had exploded in it: it must not come back from where it was saved."""
    volumes = folders(2)
    url = f"file://{tmp_path}/store"
    job = Job(volumes)
    for tag in ("good", "bad"):
        commit(url, volumes, str(job.save(tag)[0].save_id))
    ds_ckpt_hook.history(url).delete("bad", even_newest=True)
    assert Job(volumes).resume(destination=url) == ["good", "good"]
    assert pointers(volumes) == ["good", "good"]
    assert f"bad/{MODEL}" in aside(volumes[0])
