"""``after_save_dir``: folders that anybody wrote, over several ranks and nodes."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ds_ckpt_hook import resume, saving
from ds_ckpt_hook.core import Hook
from ds_ckpt_hook.errors import AgreementError, NotPublishedError
from ds_ckpt_hook.plan import Report, make_plan
from ds_ckpt_store.contract import digest
from tests.hook.processes import PYTHONPATH
from tests.hook.standin import Job, ThreadExchange, manifests
from tests.hook.test_resume import aside, commit, pointers
from tests.hook.test_saving import final_status

Folders = Callable[[int], list[Path]]


def write(folder: Path, **files: str) -> Path:
    """A folder with these files; ``__`` in a name stands for a slash."""
    for name, text in files.items():
        path = folder / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def hand_over(job: Job, tag: str, **options: Any) -> list[Any]:
    saves = job.all_ranks(
        lambda rank, hook: saving.after_save_dir(hook, job.volumes[rank] / tag, **options)
    )
    job.drain()
    return saves


def paths(folder: Path) -> list[str]:
    (manifest,) = manifests(folder)
    return [shard.path for shard in manifest.shards]


def test_all_that_is_in_the_folder_belongs_to_the_save_whichever_rank_wrote_it(
    folders: Folders,
) -> None:
    (volume,) = folders(1)
    write(volume / "checkpoint-4", a="1", global_step4__b="22", global_step4__deep__c="")
    write(volume, beside="no part of it", script__py="")
    job = Job([volume, volume])
    saves = hand_over(job, "checkpoint-4", step=4, metrics={"loss": 0.5})
    (manifest,) = manifests(volume)
    assert (manifest.tag, manifest.root, manifest.step) == ("checkpoint-4", ".", 4)
    assert (manifest.metrics, manifest.companions) == ({"loss": 0.5}, [])
    assert saves[0].save_id == saves[1].save_id == manifest.save_id
    found = {shard.path: shard for shard in manifest.shards}
    assert set(found) == {"a", "global_step4/b", "global_step4/deep/c"}
    assert {shard.rank for shard in manifest.shards} == {0, 1}
    for path, shard in found.items():
        data = (volume / "checkpoint-4" / path).read_bytes()
        assert (shard.size, shard.crc32c) == (len(data), digest.to_hex(digest.crc32c(data)))
    assert final_status(job).step == 4


def test_a_rank_that_is_done_waits_for_one_that_still_writes(folders: Folders) -> None:
    (volume,) = folders(1)
    job = Job([volume, volume])
    write(volume / "one", a="1")
    hand_over(job, "one")
    write(volume / "two", a="1")

    def call(rank: int, hook: Hook) -> None:
        if rank == 1:
            while not hook.exchange._meeting.barrier.n_waiting:  # type: ignore[attr-defined]
                time.sleep(0.01)
            write(volume / "two", late="by rank 1")
        saving.after_save_dir(hook, volume / "two")

    job.all_ranks(call)
    job.drain()
    assert {shard.path for shard in manifests(volume)[1].shards} == {"a", "late"}


def test_a_rank_that_fails_while_it_writes_takes_the_save_with_it_and_hangs_nobody(
    folders: Folders,
) -> None:
    volumes = folders(2)
    for volume in volumes:
        write(volume / "step1", a="1")
    job = Job(volumes, publish_timeout=0.3)
    hand_over(job, "step1")
    for volume in volumes:
        write(volume / "step2", a="2")
    save = saving.after_save_dir(job.hooks[0], volumes[0] / "step2")  # rank 1 has raised instead
    assert "not every rank came" in save.status().reason
    assert [manifest.tag for manifest in manifests(volumes[0])] == ["step1"]

    def agree(rank: int, hook: Hook) -> str | None:
        return resume.agree_on_resume(hook, volumes[rank], folders="step*")

    assert Job(volumes).all_ranks(agree) == ["step1", "step1"]
    assert [aside(volume) for volume in volumes] == [["step2/a"], ["step2/a"]]


def test_writing_may_take_longer_than_an_exchange_between_ranks(
    folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    (volume,) = folders(1)
    patience: dict[str, float | None] = {}
    gather = ThreadExchange.gather

    def told(self: ThreadExchange, step: str, value: Any, *, timeout: float | None = None) -> Any:
        patience[step] = timeout
        return gather(self, step, value, timeout=timeout)

    monkeypatch.setattr(ThreadExchange, "gather", told)
    write(volume / "t", a="1")
    hand_over(Job([volume, volume], exchange_timeout=7.0, publish_timeout=77.0), "t")
    assert (patience["save: written"], patience["save"]) == (77.0, None)


def test_a_folder_that_one_node_alone_wrote_can_be_had_by_all(
    folders: Folders, tmp_path: Path
) -> None:
    volumes = folders(2)
    write(volumes[0] / "t", model="weights")
    job = Job(volumes)
    (save, _) = hand_over(job, "t")
    one, two = manifests(volumes[0])[0], manifests(volumes[1])[0]
    assert (len(one.shards), two.shards, two.replicas) == (1, [], [])
    assert one.nodes == two.nodes == [one.node]
    assert two.elsewhere == ["model"]
    assert Job(volumes, start_fresh=True).resume() == [None, None]
    url = f"file://{tmp_path}/store"
    shutil.rmtree(volumes[0])
    write(volumes[0] / "t", model="weights")
    save = hand_over(Job([volumes[0]]), "t")[0]
    commit(url, [volumes[0]], save.save_id)
    assert Job(volumes).resume(destination=url) == ["t", "t"]
    assert (volumes[1] / "t/model").read_text() == "weights"


def test_a_tag_may_be_more_than_one_component(folders: Folders) -> None:
    (volume,) = folders(1)
    write(volume / "checkpoints/checkpoint_0", a="1")
    job = Job([volume])
    tag = "checkpoints/checkpoint_0"
    job.all_ranks(lambda rank, hook: saving.after_save_dir(hook, volume / tag, tag))
    job.drain()
    (manifest,) = manifests(volume)
    assert (manifest.tag, manifest.root) == ("checkpoints/checkpoint_0", ".")


def test_the_save_dir_keeps_its_place_in_the_volume(folders: Folders) -> None:
    (volume,) = folders(1)
    write(volume / "out/checkpoint-1", a="1")
    job = Job([volume / "out"], directory=str(volume))
    hand_over(job, "checkpoint-1")
    (manifest,) = manifests(volume)
    assert (manifest.tag, manifest.root) == ("checkpoint-1", "out")
    assert Job([volume / "out"], directory=str(volume)).resume() == ["checkpoint-1"]


def test_a_file_with_a_time_of_long_ago_is_part_of_the_folder(folders: Folders) -> None:
    (volume,) = folders(1)
    write(volume / "t", tokenizer="copied with its time", model="1")
    os.utime(volume / "t/tokenizer", (1_000_000_000, 1_000_000_000))
    hand_over(Job([volume]), "t")
    assert paths(volume) == ["model", "tokenizer"]


def test_what_a_node_was_restored_with_is_never_mixed_with_what_another_wrote_anew(
    folders: Folders, tmp_path: Path
) -> None:
    volumes = folders(2)
    url = f"file://{tmp_path}/store"
    for rank, volume in enumerate(volumes):
        write(volume / "last", **{f"shard{rank}": "first"})
    commit(url, volumes, hand_over(Job(volumes), "last")[0].save_id)
    for volume in volumes:
        shutil.rmtree(volume)
        volume.mkdir()
    job = Job(volumes)
    assert job.resume(destination=url) == ["last", "last"]
    for rank, volume in enumerate(volumes):
        assert (volume / f"last/shard{1 - rank}").read_text() == "first"
        write(volume / "last", **{f"shard{rank}": "second"})
    hand_over(job, "last")
    assert [paths(volume) for volume in volumes] == [["shard0"], ["shard1"]]
    assert [manifests(volume)[0].elsewhere for volume in volumes] == [["shard1"], ["shard0"]]
    assert [manifests(volume)[0].replicas for volume in volumes] == [[], []]


def test_files_are_listed_and_read_on_the_machine_that_wrote_them() -> None:
    def report(rank: int, host: str, **listing: int) -> Report:
        return Report(rank, "a" * 32, host, "t", token="0" * 16, listing=listing)

    plan = make_plan(
        [report(0, "x", seen=1), Report(1, "a" * 32, "x", "t"), report(2, "y", seen=1, fresh=9)]
    )
    assert plan.work_of("a" * 32, 2) == ["fresh"]
    assert plan.work_of("a" * 32, 0) + plan.work_of("a" * 32, 1) == ["seen"]


def test_a_folder_written_again_is_a_save_of_its_own(folders: Folders) -> None:
    (volume,) = folders(1)
    job = Job([volume])
    for text in ("first", "second"):
        write(volume / "last", model=text)
        hand_over(job, "last")
    one, two = manifests(volume)
    assert one.shards[0].crc32c != two.shards[0].crc32c
    assert one.time_ms < two.time_ms


def test_rotation_leaves_the_links(folders: Folders) -> None:
    (volume,) = folders(1)
    hand_over(Job([write(volume / "t", a__b="kept").parent]), "t")
    shutil.rmtree(volume / "t")
    (manifest,) = manifests(volume)
    assert (volume / ".ds_ckpt/links" / manifest.save_id / "a/b").read_text() == "kept"


def _link(folder: Path) -> None:
    (folder / "x").symlink_to("a")


def _link_inside(folder: Path) -> None:
    (folder / "sub").mkdir()
    (folder / "sub" / "x").symlink_to("/etc/hostname")


def _socket(folder: Path) -> None:
    here = os.getcwd()
    os.chdir(folder)  # a socket's path is short
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind("x")
    finally:
        os.chdir(here)


def _pipe(folder: Path) -> None:
    os.mkfifo(folder / "x")


def _gone(folder: Path) -> None:
    shutil.rmtree(folder)


def _empty(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.mkdir()


def _file(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.write_text("a checkpoint in one file")


def _is_link(folder: Path) -> None:
    folder.rename(folder.parent / "elsewhere")
    folder.symlink_to("elsewhere")


def _volume_inside(folder: Path) -> None:
    write(folder, **{".ds_ckpt__node.json": "{}"})


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (_link, "t/x is a link, and only files can be stored"),
        (_link_inside, "t/sub/x is a link"),
        (_socket, "t/x is a device, pipe or socket"),
        (_pipe, "t/x is a device, pipe or socket"),
        (_gone, "no file of tag 't' was found"),
        (_empty, "no file of tag 't' was found"),
        (_file, "t is a file: give each checkpoint a folder"),
        (_is_link, "t is a link: give each checkpoint a folder"),
        (_volume_inside, "lies in a folder that is reserved"),
    ],
)
def test_a_folder_that_cannot_be_stored_whole_is_not_published_and_training_goes_on(
    folders: Folders, caplog: pytest.LogCaptureFixture, spoil: Callable[[Path], None], words: str
) -> None:
    (volume,) = folders(1)
    spoil(write(volume / "t", a="1"))
    job = Job([volume, volume])
    saves = hand_over(job, "t")
    assert all(words in save.status().reason for save in saves)
    assert caplog.text.count(words) == 2
    assert manifests(volume) == []
    write(volume / "next", a="1")
    hand_over(job, "next")
    assert paths(volume) == ["a"]


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize(
    ("path", "tag", "words"),
    [
        (7, None, "a folder's path is needed, and not 7"),
        ("/", None, "'' is not"),
        ("{volume}/t", "u", "must be how its path ends, and 'u' is not"),
        ("{volume}/xt", "t", "must be how its path ends"),
        ("{volume}", None, "is the volume: write each checkpoint into a folder in it"),
    ],
)
def test_a_path_that_says_nothing_on_one_rank_is_told_to_all(
    folders: Folders, first: bool, path: Any, tag: str | None, words: str
) -> None:
    (volume,) = folders(1)
    write(volume / "t", a="1")
    job = Job([volume, volume], directory=str(volume))
    if not first:
        hand_over(job, "t")
    spoilt = path.format(volume=volume) if isinstance(path, str) else path
    good = (volume / "t", None)

    def call(rank: int, hook: Hook) -> str:
        arguments = (spoilt, tag) if rank == 1 else good
        save = saving.after_save_dir(hook, *arguments)
        with pytest.raises(NotPublishedError):
            saving.after_save_dir(hook, *arguments, strict=True)
        return save.status().reason

    for reason in job.all_ranks(call):
        assert "rank 1: " in reason
        assert words in reason
    assert len(manifests(volume)) == (0 if first else 1)


def test_what_deepspeed_keeps_within_a_known_folder_stays_there(folders: Folders) -> None:
    (volume,) = folders(1)
    nested = {"global_step4__mp_rank_00_model_states.pt": "m", "latest": "global_step4"}
    hand_over(Job([write(volume / "checkpoint-4", **nested).parent]), "checkpoint-4")
    assert Job([volume]).resume() == ["checkpoint-4"]
    assert (volume / "checkpoint-4/global_step4/mp_rank_00_model_states.pt").exists()
    assert aside(volume) == []


def test_restored_folders_stay_whole_at_the_next_start(folders: Folders, tmp_path: Path) -> None:
    (volume,) = folders(1)
    url = f"file://{tmp_path}/store"
    nested = {"global_step4__mp_rank_00_model_states.pt": "m"}
    save = hand_over(Job([write(volume / "checkpoint-4", **nested).parent]), "checkpoint-4")[0]
    commit(url, [volume], save.save_id)
    shutil.rmtree(volume)
    volume.mkdir()
    for _ in range(2):
        assert Job([volume]).resume(destination=url) == ["checkpoint-4"]
        assert (volume / "checkpoint-4/global_step4/mp_rank_00_model_states.pt").exists()


def test_a_newer_folder_that_one_node_lacks_is_moved_out_of_sight(folders: Folders) -> None:
    volumes = folders(2)
    job = Job(volumes)
    for tag in ("one", "two"):
        for volume in volumes:
            write(volume / tag, model=tag)
        hand_over(job, tag)
    (volumes[1] / "two/model").unlink()
    assert Job(volumes).resume() == ["one", "one"]
    assert pointers(volumes) == ["one", "one"]
    assert aside(volumes[0]) == ["two/model"]
    assert not (volumes[0] / "two").exists()


def test_a_folder_that_was_never_handed_over_is_moved_if_it_is_known_by_its_name(
    folders: Folders,
) -> None:
    (volume,) = folders(1)
    write(volume / "checkpoint-1", a="1")
    hand_over(Job([volume]), "checkpoint-1")
    write(volume / "checkpoint-2", global_step2__mp_rank_00_model_states_pt="torn")
    write(volume / "runs", log="mine")
    write(volume / "x/checkpoint-3", a="mine")

    def agree(rank: int, hook: Hook) -> str | None:
        return resume.agree_on_resume(hook, volume, folders="checkpoint-*")

    assert Job([volume]).all_ranks(agree) == ["checkpoint-1"]
    assert aside(volume) == ["checkpoint-2/global_step2/mp_rank_00_model_states_pt"]
    assert (volume / "runs/log").exists()
    assert (volume / "x/checkpoint-3/a").exists()


def test_folders_from_before_the_hook_are_left_to_the_user(folders: Folders) -> None:
    (volume,) = folders(1)
    write(volume / "checkpoint-1", a="old")
    time.sleep(0.02)  # filesystems stamp files by the kernel's tick

    def agree(rank: int, hook: Hook) -> str | None:
        return resume.agree_on_resume(hook, volume, folders="checkpoint-*")

    with pytest.raises(AgreementError, match="before the hook"):
        Job([volume]).all_ranks(agree)
    assert (volume / "checkpoint-1/a").exists()


def test_latest_follows_where_there_is_one_and_only_there(folders: Folders) -> None:
    (volume,) = folders(1)
    job = Job([volume])
    hand_over(Job([write(volume / "one", a="1").parent]), "one")
    assert not (volume / "latest").exists()
    assert Job([volume]).resume() == ["one"]
    assert (volume / "latest").read_text() == "one"
    write(volume / "two", a="2")
    job = Job([volume])
    hand_over(job, "two")
    assert (volume / "latest").read_text() == "two"
    (volume / "latest").unlink()
    (volume / "latest").symlink_to("two")
    write(volume / "three", a="3")
    hand_over(job, "three")
    assert (volume / "latest").is_symlink()


SCRIPT = """
import json, sys, torch, ds_ckpt_hook
save_dir, destination, steps = sys.argv[1], sys.argv[2], int(sys.argv[3])
tag = ds_ckpt_hook.agree_on_resume(save_dir, destination=destination, folders="step*")
weights, velocity, step = torch.ones(4), torch.zeros(4), 0
if tag is not None:
    weights, velocity, step = torch.load(f"{save_dir}/{tag}/state.pt").values()
while step < steps:
    data = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
    error = data @ weights - 2 * data.sum(-1)
    loss = error.square().mean()
    velocity = 0.9 * velocity + data.T @ error / 4
    weights = weights - 0.1 * velocity
    step += 1
    print(json.dumps([tag, step, loss.item().hex()]))
    if step % 2 == 0:
        import os
        os.makedirs(f"{save_dir}/step{step}")
        state = {"weights": weights, "velocity": velocity, "step": step}
        torch.save(state, f"{save_dir}/step{step}/state.pt")
        ds_ckpt_hook.after_save_dir(f"{save_dir}/step{step}", step=step, strict=True)
ds_ckpt_hook.finalize(0.1)
"""


def test_a_trainer_without_torch_distributed_loses_everything_and_loses_nothing(
    tmp_path: Path,
) -> None:
    url = f"file://{tmp_path}/store"
    environ = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    environ["PYTHONPATH"] = PYTHONPATH

    def python(*arguments: str) -> str:
        return subprocess.run(
            [sys.executable, *arguments],
            env=environ,
            capture_output=True,
            text=True,
            check=True,
            timeout=120,
        ).stdout

    def train(volume: str, steps: int) -> list[list[Any]]:
        said = python("-c", SCRIPT, str(tmp_path / volume), url, str(steps))
        return [json.loads(line) for line in said.splitlines()]

    first = train("first", 5)
    python(*f"-m ds_ckpt_sidecar agent --once --volume {tmp_path}/first --destination".split(), url)
    shutil.rmtree(tmp_path / "first")
    second = train("second", 5)
    assert [line[0] for line in first] == [None] * 5
    assert second == [["step4", *first[4][1:]]]
