"""``save_checkpoint("s3://...")``: what one rank cannot do, none begins; and the way back."""

from __future__ import annotations

import dataclasses
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ds_ckpt_hook import methods
from ds_ckpt_hook.core import Hook
from ds_ckpt_hook.errors import AgreementError, NotPublishedError
from ds_ckpt_hook.feedback import Save
from ds_ckpt_hook.resume import agree_on_resume
from ds_ckpt_hook.saving import after_save
from tests.hook.processes import PYTHONPATH, lines_of, run_ranks
from tests.hook.standin import Job, manifests
from tests.hook.test_feedback import sidecar
from tests.hook.test_room import LARGE, Small

Folders = Callable[[int], list[Path]]
URL = "s3://bucket/run"


def attached(job: Job, **settings: Any) -> None:
    """Each rank has its volume at ``DS_CKPT_DIR``, and takes URLs."""
    for rank, hook in enumerate(job.hooks):
        own = {"directory": str(job.volumes[rank]), **settings}
        hook.settings = dataclasses.replace(hook.settings, **own)
        methods.attach(job.engines[rank], hook)


def save(job: Job, *what: tuple[str, str]) -> None:
    """``save_checkpoint(url, tag)`` on all ranks; what each gives if they differ."""

    def call(rank: int, _hook: Hook) -> None:
        url, tag = what[rank] if len(what) > 1 else what[0]
        job.engines[rank].save_checkpoint(url, tag)

    job.all_ranks(call)
    job.drain()


def test_a_url_is_written_to_the_volume_and_handed_over_with_it(folders: Folders) -> None:
    one, two = folders(2)
    job = Job([one, one, two])
    attached(job)
    sidecar(one, "running", destination=f"{URL}/")
    save(job, (f"{URL}/", "a"))
    for volume in (one, two):
        (manifest,) = manifests(volume)
        assert (manifest.tag, manifest.destination) == ("a", URL)
        assert (volume / "a").is_dir()


def test_a_folder_goes_to_deepspeed_as_before(folders: Folders) -> None:
    (volume,) = folders(1)
    job = Job([volume])
    attached(job)
    job.engines[0].save_checkpoint(volume, "a")
    job.engines[0].save_checkpoint(str(volume), "b")
    assert (volume / "a").is_dir()
    assert manifests(volume) == []


def test_to_attach_twice_saves_once(folders: Folders) -> None:
    (volume,) = folders(1)
    job = Job([volume])
    attached(job)
    before = job.engines[0].save_checkpoint
    methods.attach(job.engines[0], job.hooks[0])
    assert job.engines[0].save_checkpoint is before


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ([(URL, "a"), (URL, "b")], "different tags: rank 0: 'a', rank 1: 'b'"),
        ([(URL, "a"), ("gs://other", "a")], "different URLs: rank 0: 's3://bucket/run', rank 1:"),
        ([(URL, "../a"), (URL, "a")], "rank 0: tag '../a' cannot be uploaded"),
    ],
)
def test_ranks_that_differ_all_get_the_same_error_before_a_byte_is_written(
    folders: Folders, what: list[tuple[str, str]], said: str
) -> None:
    one, two = folders(2)
    job = Job([one, two])
    attached(job)
    errors: list[str] = []

    def call(rank: int, _hook: Hook) -> None:
        try:
            job.engines[rank].save_checkpoint(*what[rank])
        except NotPublishedError as error:
            errors.append(str(error))

    job.all_ranks(call)
    assert len(errors) == 2
    assert all(said in each for each in errors)
    assert [path.name for path in (*one.iterdir(), *two.iterdir())] == []


def test_a_sidecar_that_stores_elsewhere_is_told_before_a_byte_is_written(
    folders: Folders,
) -> None:
    (volume,) = folders(1)
    job = Job([volume])
    attached(job)
    sidecar(volume, "running", destination="s3://bucket/another")
    with pytest.raises(NotPublishedError, match=r"stores what lies on .* at s3://bucket/another"):
        save(job, (URL, "a"))
    assert not (volume / "a").exists()


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"directory": None}, "set DS_CKPT_DIR"),
        ({"directory": "/no/such"}, "no such folder is mounted"),
        ({"destination": "gs://other/run"}, "at gs://other/run"),
    ],
)
def test_what_is_missing_is_said(folders: Folders, settings: dict[str, Any], said: str) -> None:
    job = Job(folders(1))
    attached(job, **settings)
    with pytest.raises(NotPublishedError, match=said):
        save(job, (URL, "a"))


def test_a_tag_that_nobody_has_is_not_replaced_by_another(folders: Folders) -> None:
    (volume,) = folders(1)
    Job([volume]).save("a")
    again = Job([volume])
    with pytest.raises(AgreementError, match="tag 'b' cannot be loaded on every node: no node's"):
        again.all_ranks(lambda _rank, hook: agree_on_resume(hook, volume, tag="b"))
    assert (volume / "a").is_dir()
    assert again.all_ranks(lambda _rank, hook: agree_on_resume(hook, volume, tag="a")) == ["a"]


@pytest.mark.parametrize("given", [URL, "folder"])
def test_a_save_for_which_a_node_has_no_room_is_left_out_on_all(
    folders: Folders, caplog: pytest.LogCaptureFixture, given: str
) -> None:
    one, two = folders(2)
    job = Job([one, two])
    job.hooks[1].fs = disk = Small(LARGE)
    job.save("first", "x" * 10_000)
    attached(job, when_full="skip")
    disk.free = 500

    def call(rank: int, hook: Hook) -> tuple[Any, Save]:
        engine, where = job.engines[rank], job.volumes[rank] if given == "folder" else given
        written = engine.save_checkpoint(where, "second")
        return written, after_save(hook, engine, "second", save_dir=job.volumes[rank])

    for written, handle in job.all_ranks(call):
        assert written is False
        assert "no room" in handle.status().reason
    assert "this save is left out on all ranks: rank 1: 0 MiB are left" in caplog.text
    assert not (one / "second").exists()
    disk.free = LARGE
    for written, handle in job.all_ranks(call):
        assert written is not False
        assert handle.status().reason.startswith(("its checksums", "the sidecar"))
    job.hooks[0].left_out.add("third")
    with pytest.raises(NotPublishedError, match="no room"):
        after_save(job.hooks[0], job.engines[0], "third", save_dir=one, strict=True)


@pytest.mark.slow
def test_real_deepspeed_saves_to_a_url_and_loads_from_it_into_an_empty_pod(
    tmp_path: Path,
) -> None:
    volume, store = tmp_path / "volume", tmp_path / "store"
    url = f"{store.as_uri()}/run"
    store.mkdir()

    def ranks(what: str) -> list[dict[str, Any]]:
        volume.mkdir(exist_ok=True)
        run_ranks(
            lambda _rank: ["-m", "tests.hook.workers.by_url", str(tmp_path), what, url],
            environ=lambda _rank: {"DS_CKPT_DIR": str(volume)},
        )
        lines = [lines_of(tmp_path / f"rank{rank}.jsonl") for rank in range(2)]
        return lines[0] + lines[1]

    apart, first, again, _ = ranks("save")
    assert "different URLs" in apart["apart"]
    assert apart == again
    agent = ["agent", "--once", "--volume", str(volume), "--destination", url]
    subprocess.run(
        [sys.executable, "-m", "ds_ckpt_sidecar", *agent],
        env={"PYTHONPATH": PYTHONPATH},
        check=True,
        capture_output=True,
    )
    assert {path.name.partition("@")[0] for path in (store / "run").glob("*@*")} == {"step1"}
    shutil.rmtree(volume)
    newest_and_by_tag_on_both_ranks = ranks("load")
    assert newest_and_by_tag_on_both_ranks == 4 * [
        {"found": True, "epoch": 7, "loss": first["loss"]}
    ]
