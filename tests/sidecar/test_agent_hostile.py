"""The outbox is hostile input: whatever lies there is refused with a reason, and work goes on."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ds_ckpt_store.contract import names
from ds_ckpt_store.contract.manifest import MAX_DOCUMENT_BYTES, MAX_SHARDS, NodeManifest
from tests.sidecar.handoff import START_MS, Trainer
from tests.sidecar.world import World, status

SECRET = b"root:x:0:0"


def put(trainer: Trainer, name: str | bytes, data: bytes) -> None:
    folder = os.fsencode(trainer.volume.outbox)
    with open(os.path.join(folder, os.fsencode(name)), "wb") as file:
        file.write(data)


def forge(trainer: Trainer, change: Callable[[dict[str, Any]], None]) -> str:
    """Hand over a good save whose manifest was changed by hand; its save id."""
    manifest = trainer.save("evil", {"x": 100}, publish=False, latest=False)
    document = json.loads(manifest.to_bytes())
    change(document)
    put(trainer, manifest.file_name, json.dumps(document).encode())
    return manifest.save_id


def check_refused(world: World, trainer: Trainer, save_id: str, state: str = "quarantined") -> str:
    """One pass over the bad save and a good one that came after it: only the good one is stored."""
    good = trainer.save("good", {"y": b"fine"})
    assert world.once(trainer.volume.path) == 1
    assert world.states() == {"good": "committed"}
    said = status(trainer.volume.path, save_id)
    assert said.state == state
    assert said.reason
    assert [line for line in world.log.of(f"save.{state}") if line["reason"] in said.reason]
    outbox = os.listdir(trainer.volume.outbox)
    assert good.file_name in outbox
    assert any(name.startswith(save_id) for name in outbox), "it is kept"
    assert all(SECRET not in item.data for item in world.bucket.objects.values())
    before = len(world.log.lines)
    world.once(trainer.volume.path)
    assert world.states() == {"good": "committed"}
    assert len(world.log.lines) > before
    return said.reason


def path_to(path: str) -> Callable[[dict[str, Any]], None]:
    def change(document: dict[str, Any]) -> None:
        document["shards"][0]["path"] = path

    return change


@pytest.mark.parametrize(
    "path",
    [
        "/etc/passwd",
        "../../secret",
        "a/../../../secret",
        ".ds_ckpt/node.json",
        "x\x00y",
        "x\ny",
        "\ud800",
        "",
        ".",
        "x" * 2000,
    ],
)
def test_a_path_that_leads_away_is_quarantined(world: World, trainer: Trainer, path: str) -> None:
    check_refused(world, trainer, forge(trainer, path_to(path)))


def change(**fields: Any) -> Callable[[dict[str, Any]], None]:
    return lambda document: document.update(fields)


@pytest.mark.parametrize(
    "fields",
    [
        {"tag": "../up"},
        {"tag": "/abs"},
        {"tag": ".ds_ckpt"},
        {"root": "../.."},
        {"root": "/etc"},
        {"shards": []},
        {"shards": "x"},
        {"nodes": []},
        {"world_size": 10**30},
        {"time_ms": -5},
        {"time_ms": 10**18},
        {"save_id": "018bcfe56800-0000000000000009"},
        {"metrics": {"x": "NaN" * 1000}},
        {"run_id": "\ud800"},
    ],
    ids=lambda fields: ",".join(fields),
)
def test_a_field_that_breaks_a_rule_is_quarantined(
    world: World, trainer: Trainer, fields: dict[str, Any]
) -> None:
    check_refused(world, trainer, forge(trainer, change(**fields)))


def test_duplicates_are_quarantined(world: World, trainer: Trainer) -> None:
    reason = check_refused(
        world,
        trainer,
        forge(trainer, lambda document: document["shards"].extend(document["shards"])),
    )
    assert "twice" in reason


def test_a_million_entries_are_quarantined(world: World, trainer: Trainer) -> None:
    manifest = trainer.save("evil", {"x": 1}, publish=False, latest=False)
    entry = manifest.shards[0].model_dump_json()
    head, tail = manifest.to_bytes().split(entry.encode())
    put(trainer, manifest.file_name, head + b",".join([entry.encode()] * 1_000_000) + tail)
    reason = check_refused(world, trainer, manifest.save_id)
    assert str(MAX_DOCUMENT_BYTES) in reason


def test_more_entries_than_a_checkpoint_has_are_quarantined(world: World, trainer: Trainer) -> None:
    manifest = trainer.save("evil", {"x": 1}, publish=False, latest=False)
    entry = manifest.shards[0].model_dump_json()
    head, tail = manifest.to_bytes().split(entry.encode())
    unsealed = tail[: tail.rindex(b',"checksum"')] + b"}"
    data = head + b",".join([entry.encode()] * (MAX_SHARDS + 1)) + unsealed
    assert len(data) < MAX_DOCUMENT_BYTES
    put(trainer, manifest.file_name, data)
    assert "at most" in check_refused(world, trainer, manifest.save_id)


@pytest.mark.parametrize("data", [b"", b"{", b"\x80\x04\x95", b"null", b"[" * 100_000, b"\xff\xff"])
def test_what_is_not_json_is_quarantined(world: World, trainer: Trainer, data: bytes) -> None:
    save_id = names.new_save_id(START_MS, random.Random(3))
    put(trainer, f"{save_id}.{trainer.node}.json", data)
    check_refused(world, trainer, save_id)


def test_a_manifest_of_another_node_is_quarantined(world: World, trainer: Trainer) -> None:
    manifest = trainer.save("evil", {"x": 1}, publish=False, latest=False)
    stranger = manifest.model_copy(update={"node": "e" * 32, "nodes": ["e" * 32]})
    put(trainer, stranger.file_name, stranger.to_bytes())
    assert "this volume is node" in check_refused(world, trainer, manifest.save_id)


def test_a_newer_schema_is_kept_and_reported(world: World, trainer: Trainer) -> None:
    save_id = forge(trainer, change(schema=2, shards={"in": "another form"}))
    assert "upgrade" in check_refused(world, trainer, save_id, "held")


# ---- names in the outbox


@pytest.mark.parametrize(
    "name",
    [b"\xff\xfe.json", b"sidecar.json", b"trainer.json", b"a b\n.json", b"x" * 250, b"%s{}"],
)
def test_a_file_with_any_name_is_refused_and_overwrites_no_status(
    world: World, trainer: Trainer, name: bytes
) -> None:
    trainer.say()
    put(trainer, name, b"garbage")
    trainer.save("good", {"y": b"fine"})
    assert world.once(trainer.volume.path) == 1
    assert world.states() == {"good": "committed"}
    assert len(world.log.of("save.quarantined")) == 1
    sidecar, said = trainer.volume.sidecar_status(), trainer.volume.trainer_status()
    assert sidecar is not None
    assert said is not None
    assert (sidecar.state, said.attempt) == ("stopped", trainer.attempt)


def test_a_bad_file_that_borrows_a_good_saves_id_does_not_speak_for_it(
    world: World, trainer: Trainer
) -> None:
    good = trainer.save("good", {"y": b"fine"})
    put(trainer, f"{good.save_id}.{'e' * 32}.json", b"garbage")
    world.once(trainer.volume.path)
    assert status(trainer.volume.path, good.save_id).state == "committed"
    assert world.log.of("save.quarantined")


@pytest.mark.parametrize("kind", ["folder", "fifo", "link", "dangling", "device"])
def test_what_is_no_regular_file_in_the_outbox_is_refused(
    world: World, trainer: Trainer, tmp_path: Path, kind: str
) -> None:
    save_id = names.new_save_id(START_MS, random.Random(3))
    path = Path(trainer.volume.outbox) / f"{save_id}.{trainer.node}.json"
    if kind == "folder":
        path.mkdir()
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        target = tmp_path / "manifest"
        if kind == "link":
            target.write_bytes(trainer.save("evil", {"x": 1}, publish=False).to_bytes())
        path.symlink_to(target)
    check_refused(world, trainer, save_id)


# ---- files that are not what the manifest says


def replaced(
    trainer: Trainer, make: Callable[[Path], None], protection: str = "none"
) -> NodeManifest:
    """A save one of whose shards was exchanged for something else."""
    manifest = trainer.save(
        "evil",
        {"deep/x": b"1" * len(SECRET), "y": 10},
        protection=protection,  # type: ignore[arg-type]
        latest=False,
    )
    path = Path(trainer.folder(manifest)) / "deep/x"
    path.unlink()
    make(path)
    return manifest


def test_a_link_out_of_the_volume_is_quarantined(
    world: World, trainer: Trainer, tmp_path: Path
) -> None:
    (tmp_path / "secret").write_bytes(SECRET)
    manifest = replaced(trainer, lambda path: path.symlink_to(tmp_path / "secret"))
    assert "link" in check_refused(world, trainer, manifest.save_id)


def test_a_folder_that_became_a_link_is_quarantined(
    world: World, trainer: Trainer, tmp_path: Path
) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside/x").write_bytes(SECRET)

    def link_folder(path: Path) -> None:
        path.parent.rmdir()
        path.parent.symlink_to(tmp_path / "outside")

    manifest = replaced(trainer, link_folder)
    assert "link" in check_refused(world, trainer, manifest.save_id)
    assert (tmp_path / "outside/x").read_bytes() == SECRET


def test_a_link_among_our_own_links_is_quarantined(
    world: World, trainer: Trainer, tmp_path: Path
) -> None:
    (tmp_path / "secret").write_bytes(SECRET)
    manifest = trainer.save("evil", {"x": b"1" * len(SECRET)}, latest=False)
    link = Path(trainer.volume.link_folder(manifest.save_id)) / "x"
    link.unlink()
    link.symlink_to(tmp_path / "secret")
    check_refused(world, trainer, manifest.save_id)


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir], ids=["fifo", "folder"])
def test_what_is_no_regular_file_is_quarantined_and_not_waited_for(
    world: World, trainer: Trainer, make: Callable[[Path], None]
) -> None:
    check_refused(world, trainer, replaced(trainer, make).save_id)


def test_a_shard_that_is_missing_is_quarantined_and_nothing_is_deleted(
    world: World, trainer: Trainer
) -> None:
    manifest = replaced(trainer, lambda path: None)
    assert "not on the volume" in check_refused(world, trainer, manifest.save_id)
    assert (Path(trainer.folder(manifest)) / "y").exists()


@pytest.mark.parametrize("size", [0, 99, 101, 1 << 62])
def test_a_wrong_size_is_quarantined(world: World, trainer: Trainer, size: int) -> None:
    def lie(document: dict[str, Any]) -> None:
        document["shards"][0]["size"] = size

    assert "the manifest is wrong" in check_refused(world, trainer, forge(trainer, lie))


def test_a_destination_of_the_trainers_own_choice_is_held(world: World, trainer: Trainer) -> None:
    manifest = trainer.save("evil", {"x": 1}, destination="s3://attacker/bucket", latest=False)
    reason = check_refused(world, trainer, manifest.save_id, "held")
    assert "s3://attacker/bucket" in reason


def test_a_save_of_another_run_is_held_and_reported(
    world: World, trainer: Trainer, tmp_path: Path
) -> None:
    foreign = Trainer(trainer.volume.path, run_id="foreign", time_ms=START_MS - 10**6, seed=9)
    manifest = foreign.save("theirs", {"x": 1}, latest=False)
    trainer.say()
    reason = check_refused(world, trainer, manifest.save_id, "held")
    assert "--run-id foreign" in reason
    assert (Path(foreign.folder(manifest)) / "x").exists()


def test_every_bad_one_at_once_does_not_hold_up_the_good_one(
    world: World, trainer: Trainer, tmp_path: Path
) -> None:
    for number, bad in enumerate([path_to("/abs"), path_to("../x"), change(schema=7)]):
        forge(trainer, bad)
        put(trainer, f"{number}", b"garbage")
    replaced(trainer, os.mkfifo)
    trainer.save("good", {"y": b"fine"})
    world.once(trainer.volume.path)
    assert world.states() == {"good": "committed"}
    assert world.latest() == "good"


def test_a_heartbeat_that_is_garbage_stops_nothing(world: World, trainer: Trainer) -> None:
    trainer.save("good", {"y": b"fine"})
    Path(trainer.volume.status, "trainer.json").write_bytes(b"\x00garbage")
    assert world.once(trainer.volume.path) == 0
    assert world.states() == {"good": "committed"}
    assert world.log.of("trainer.unreadable")
