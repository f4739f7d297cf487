"""How full the volume is, as the agent sees it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ds_ckpt_sidecar.settings import load
from ds_ckpt_sidecar.usage import Space, Usage
from ds_ckpt_store.contract.filesystem import FileStat, Filesystem
from ds_ckpt_store.contract.filesystem import Space as Disk
from ds_ckpt_store.contract.usage import allocated_below
from ds_ckpt_store.contract.volume import Volume
from ds_ckpt_store.errors import SettingsError
from tests.store.prefix import HandClock

GIB = 1 << 30
MIB = 1 << 20


class Folders(Filesystem):
    """A disk with so much room, on which a look at a file takes so long."""

    def __init__(self, clock: HandClock, total: int = 100 * GIB, free: int = 60 * GIB) -> None:
        self.clock = clock
        self.disk = Disk(total, free)
        self.takes = 0.0
        self.looks = 0
        self.fails = False

    def space(self, path: str) -> Disk:
        if self.fails:
            raise OSError(5, "Input/output error")
        return self.disk

    def stat(self, path: str) -> FileStat | None:
        self.looks += 1
        self.clock.sleep(self.takes)
        return super().stat(path)


@pytest.fixture
def clock() -> HandClock:
    return HandClock()


@pytest.fixture
def fs(clock: HandClock) -> Folders:
    return Folders(clock)


def fill(path: Path, size: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(os.urandom(size))


def usage(tmp_path: Path, fs: Folders, limit: int) -> Usage:
    return Usage(Volume(str(tmp_path), fs), limit, fs.clock)


def test_without_a_limit_the_filesystem_tells_and_nothing_is_walked(
    tmp_path: Path, fs: Folders
) -> None:
    fill(tmp_path / "a", MIB)
    assert usage(tmp_path, fs, 0).look() == Space(60 * GIB, 100 * GIB, 40 * GIB, 40 * GIB, 0)
    assert fs.looks == 0


def test_with_a_limit_what_has_names_is_added_up_once_each(tmp_path: Path, fs: Folders) -> None:
    top = os.lstat(tmp_path).st_blocks * 512
    elsewhere = tmp_path / "elsewhere"
    volume = tmp_path / "volume"
    fill(elsewhere / "large", 8 * MIB)
    fill(volume / "global_step1/a.pt", 3 * MIB)
    os.link(volume / "global_step1/a.pt", volume / "b.pt")
    (volume / "link").symlink_to(elsewhere)
    (volume / "round").symlink_to(volume)
    with open(volume / "sparse", "wb") as file:
        file.truncate(GIB)
    space = usage(volume, fs, GIB).look()
    assert 3 * MIB <= space.used < 4 * MIB + 3 * top
    assert (space.total, space.limit, space.high_water) == (GIB, GIB, space.used)
    assert space.free == GIB - space.used


def test_the_disk_may_be_full_before_the_limit_is_reached(tmp_path: Path, fs: Folders) -> None:
    fs.disk = Disk(100 * GIB, 5)
    assert usage(tmp_path, fs, 10 * GIB).look().free == 5


def test_more_than_the_limit_leaves_nothing_and_not_less(tmp_path: Path, fs: Folders) -> None:
    fill(tmp_path / "a", 2 * MIB)
    assert usage(tmp_path, fs, MIB).look().free == 0


def test_files_are_added_up_every_thirty_seconds_and_the_most_is_remembered(
    tmp_path: Path, fs: Folders
) -> None:
    watched = usage(tmp_path, fs, GIB)
    empty = watched.look().used
    fill(tmp_path / "a", MIB)
    fs.clock.sleep(29)
    assert watched.look().used == empty
    fs.clock.sleep(1)
    full = watched.look().used
    assert full >= empty + MIB
    (tmp_path / "a").unlink()
    fs.clock.sleep(30)
    assert (watched.look().used, watched.look().high_water) == (empty, full)


def test_a_walk_that_takes_long_is_repeated_rarely(tmp_path: Path, fs: Folders) -> None:
    fill(tmp_path / "a", 1)
    fs.takes = 5.0
    watched = usage(tmp_path, fs, GIB)
    watched.look()
    assert fs.looks == 2  # ten seconds of work, so a hundred and ninety of rest
    fs.clock.sleep(189)
    watched.look()
    assert fs.looks == 2
    fs.clock.sleep(1)
    watched.look()
    assert fs.looks == 4


def test_a_disk_that_does_not_answer_leaves_what_was_known(tmp_path: Path, fs: Folders) -> None:
    watched = usage(tmp_path, fs, 0)
    fs.fails = True
    assert watched.look() == Space()
    fs.fails = False
    known = watched.look()
    fs.fails = True
    assert watched.look() == known


def test_what_vanishes_or_may_not_be_looked_at_is_left_out(tmp_path: Path) -> None:
    class Vanishing(Filesystem):
        def names(self, path: str) -> list[str]:
            if path.endswith("closed"):
                raise PermissionError(13, "Permission denied")
            return [*super().names(path), "gone"]

    fill(tmp_path / "closed/a", MIB)
    fill(tmp_path / "b", MIB)
    assert MIB <= allocated_below(Volume(str(tmp_path), Vanishing())) < 2 * MIB
    assert allocated_below(Volume(str(tmp_path / "nowhere"), Vanishing())) == 0


# ---- the setting


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("200Gi", 200 * GIB),
        ("1.5Ti", 1536 * GIB),
        ("500G", 500 * 10**9),
        ("1e9", 10**9),
        ("2.147483648e+09", 2 * GIB),
        ("100M", 100 * 10**6),
        ("5E", 5 * 10**18),
        ("1073741824", GIB),
        ("200GiB", 200 * GIB),
        ("none", 0),
        ("0", 0),
    ],
)
def test_a_limit_is_written_as_in_kubernetes(
    text: str, size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DS_CKPT_VOLUME_LIMIT", text)
    assert load(volume=str(tmp_path), destination="file:///x").volume_limit == size


@pytest.mark.parametrize(
    "text", ["much", "", "-1Gi", "200", "500m", "1e9Gi", "10 Gi B", "1e-3", "9e99", "inf"]
)
def test_a_limit_that_makes_no_sense_is_refused_by_name(text: str, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="DS_CKPT_VOLUME_LIMIT"):
        load(volume=str(tmp_path), destination="file:///x", volume_limit=text)
