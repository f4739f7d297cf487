"""Trainer and sidecar are two users: real processes of those uids, groups and umasks.

What Kubernetes does for a pod with an ``fsGroup`` is done here by hand: the volume is root's, of
that group and mode 2777, and each process has the group among its supplementary ones.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pytest

from ds_ckpt_store.contract.filesystem import Filesystem
from ds_ckpt_store.contract.volume import Volume
from tests.hook.processes import ROOT
from tests.hook.standin import Engine
from tests.hook.workers.user import become
from tests.sidecar.handoff import Trainer as Handoff

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")

G = 2000  # fsGroup
SIDECAR = 65532
PATHS = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
WORKER = "from tests.hook.workers.user import main; main()"


@dataclass(frozen=True)
class User:
    """Who a container runs as, and with what umask."""

    uid: int
    gid: int
    groups: list[int] = field(default_factory=lambda: [G])
    umask: int = 0o022
    capabilities: bool = False

    def __str__(self) -> str:
        drop = "" if self.capabilities else "-dropped"
        return f"{self.uid}-{self.gid}{drop}-umask{self.umask:03o}"


ROOT_077 = User(0, 0, umask=0o077, capabilities=True)
SIDECAR_USER = User(SIDECAR, SIDECAR)
TRAINERS = [
    ROOT_077,
    User(0, 0, umask=0o077),
    User(1000, 1000, umask=0o077),
    User(1000, G, umask=0o022),
]


class Person:
    """A trainer's process of some user."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def __call__(self, name: str, *arguments: Any, **options: Any) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps([name, arguments, options]), file=self._process.stdin, flush=True)
        answer = json.loads(self._process.stdout.readline())
        assert "raised" not in answer, answer["raised"]
        return answer["answer"]


class People:
    """A process for each user, as long as this module's tests."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[subprocess.Popen[str], Person]] = {}

    def __call__(self, user: User) -> Person:
        key = json.dumps(asdict(user))
        if key not in self._known:
            process = subprocess.Popen(
                [sys.executable, "-c", WORKER, key],
                env={**os.environ, "PYTHONPATH": PATHS},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            self._known[key] = (process, Person(process))
            assert process.stdout is not None
            assert process.stdout.readline() == "null\n"
        return self._known[key][1]

    def end(self) -> None:
        for process, _ in self._known.values():
            process.kill()
            process.communicate()


@pytest.fixture(scope="module")
def people() -> Iterator[People]:
    made = People()
    yield made
    made.end()


@dataclass(frozen=True)
class Said:
    """What a command ended with."""

    code: int
    text: str

    def events(self, name: str) -> list[dict[str, Any]]:
        lines = [json.loads(line) for line in self.text.splitlines() if line.startswith("{")]
        return [line for line in lines if line["event"] == name]


class Sidecar:
    """Commands of the sidecar's user."""

    def __init__(self, person: Person) -> None:
        self._person = person

    def __call__(self, *arguments: str) -> Said:
        return Said(*self._person("run", *arguments))

    def agent(self, volume: Path, store: Path, *options: str) -> Said:
        return self(
            "agent",
            *("--volume", str(volume), "--destination", store.as_uri(), "--log-format", "json"),
            *("--run-id", "run", "--once", *options),
        )


@pytest.fixture
def sidecar(people: People) -> Sidecar:
    return Sidecar(people(SIDECAR_USER))


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder that every user can reach: pytest's own is for one user alone."""
    path = Path(tempfile.mkdtemp(prefix="ds-ckpt-modes-"))
    path.chmod(0o755)
    yield path
    shutil.rmtree(path)


def made(path: Path, owner: int = 0, group: int = G, mode: int = 0o2777) -> Path:
    """A volume; by default as the kubelet makes an emptyDir with an ``fsGroup``."""
    path.mkdir()
    os.chown(path, owner, group)
    path.chmod(mode)
    return path


@pytest.fixture
def store(place: Path) -> Path:
    return made(place / "store", SIDECAR, G, 0o2775)


def saved(folder: Path) -> dict[str, str]:
    """What a save's folder held, by path; read as root."""
    return {
        str(path.relative_to(folder)): path.read_text()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


# ---- what must work with an fsGroup


@pytest.mark.parametrize("user", TRAINERS, ids=str)
def test_saved_stored_cleaned_restored_resumed_and_saved_again_by_two_users(
    place: Path, store: Path, people: People, sidecar: Sidecar, user: User
) -> None:
    volume, save_dir, trainer = made(place / "volume"), place / "volume/run", people(user)
    assert sidecar.agent(volume, store).code == 0, "a native sidecar is there first"
    trainer("start", str(volume), str(save_dir))
    for tag in ("a/step1", "step2"):
        _, reason, warnings, protection = trainer("save", tag)
        assert (reason, warnings, protection) == ("", [], "hardlink")
        content = saved(save_dir / tag)
        assert len(content) == 4
        done = sidecar.agent(volume, store)
        assert done.code == 0, done.text
        assert done.events("save.committed")
    assert not (save_dir / "a").exists(), "what is stored leaves the volume, folders too"
    assert not done.events("clean.failed")

    trainer("start", str(volume), str(save_dir))
    assert trainer("resume", store.as_uri()) == ["step2", content]

    # The pod is gone: restored by the sidecar's user, resumed and written over by the trainer.
    fresh = made(place / "fresh")
    done = sidecar("restore", "--from", store.as_uri(), "--to", str(fresh))
    assert done.code == 0, done.text
    trainer("start", str(fresh), str(fresh))
    assert trainer("resume", store.as_uri()) == ["step2", content]
    for tag in ("step2", "step3"):
        _, reason, warnings, _ = trainer("save", tag)
        assert (reason, warnings) == ("", [])
    done = sidecar.agent(fresh, store)
    assert done.code == 0, done.text
    assert len(done.events("save.committed")) == 2
    assert not done.events("clean.failed")
    assert folders_of(fresh) == ["step3"]


def folders_of(volume: Path) -> list[str]:
    """Folders of checkpoints."""
    return sorted(path.name for path in volume.iterdir() if path.is_dir() and path.name[0] != ".")


@pytest.mark.parametrize("user", TRAINERS[:3], ids=str)
def test_each_moves_aside_what_the_other_made(
    place: Path, store: Path, people: People, sidecar: Sidecar, user: User
) -> None:
    volume, fresh, trainer = made(place / "volume"), made(place / "fresh"), people(user)
    trainer("start", str(volume), str(volume))
    for tag in ("step1", "step2"):
        trainer("save", tag)
    content = saved(volume / "step2")
    for each in (volume, fresh):
        assert sidecar.agent(each, store).code == 0

    to_fresh = ("restore", "--from", store.as_uri(), "--to", str(fresh), "--tag")
    older = sidecar(*to_fresh, "step1")
    assert older.code == 0, older.text
    trainer("start", str(fresh), str(fresh))
    trainer("torn", str(fresh), "step9")
    assert trainer("resume", store.as_uri()) == ["step2", content]
    assert {"step1", "step9"} <= {path.name for path in (fresh / ".ds_ckpt/aside").glob("*/*")}
    assert folders_of(fresh) == ["step2"]

    trainer("save", "step2")  # other bytes under the tag of a committed save
    again = sidecar(*to_fresh, "step2")
    assert again.code == 0, again.text
    assert saved(fresh / "step2") == content


def test_copies_where_there_are_no_links_can_be_read_too(
    place: Path, store: Path, people: People, sidecar: Sidecar
) -> None:
    volume, trainer = made(place / "volume"), people(ROOT_077)
    trainer("start", str(volume), str(volume), links=False)
    save_id, reason, warnings, protection = trainer("save", "t")
    assert (reason, warnings, protection) == ("", [], "copy")
    copies = [path for path in (volume / ".ds_ckpt/links" / save_id).rglob("*") if path.is_file()]
    assert len(copies) == 5
    assert all(path.stat().st_mode & 0o060 == 0o060 for path in copies)
    assert not any(path.stat().st_mode & 0o004 for path in copies if path.suffix == ".pt")
    done = sidecar.agent(volume, store)
    assert done.code == 0, done.text


VOLUMES = {
    "of the group, not set-gid": (0, G, 0o777),
    "of a third user": (5000, G, 0o2775),
    "of the sidecar": (SIDECAR, G, 0o2775),
}


@pytest.mark.parametrize("volume", VOLUMES.values(), ids=VOLUMES)
@pytest.mark.parametrize("user", [ROOT_077, User(1000, 1000, umask=0o077)], ids=str)
@pytest.mark.parametrize("first", ["trainer", "sidecar"])
def test_on_volumes_that_the_kubelet_did_not_make(
    place: Path,
    store: Path,
    people: People,
    sidecar: Sidecar,
    user: User,
    volume: tuple[int, int, int],
    first: str,
) -> None:
    shared, trainer = made(place / "volume", *volume), people(user)
    if first == "sidecar":
        prepare(shared, SIDECAR_USER)
    trainer("start", str(shared), str(shared / "deep/er"))
    for tag in ("step1", "step2"):
        _, reason, warnings, _ = trainer("save", tag)
        assert (reason, warnings) == ("", [])
    done = sidecar.agent(shared, store)
    assert done.code == 0, done.text
    assert not done.events("clean.failed")
    assert folders_of(shared / "deep/er") == ["step2"]


def prepare(volume: Path, user: User) -> None:
    """What a sidecar makes on a volume when it starts."""
    pid = os.fork()
    if pid == 0:
        try:
            become(**asdict(user))
            Volume(str(volume)).prepare()
            Volume(str(volume)).node_id()
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_root_hands_over_without_any_fs_group_where_the_sidecar_was_first(
    place: Path, store: Path, people: People
) -> None:
    volume = made(place / "volume", 0, 0, 0o777)
    alone = User(SIDECAR, SIDECAR, groups=[])
    prepare(volume, alone)
    shutil.chown(store, SIDECAR, SIDECAR)
    trainer = people(User(0, 0, groups=[], umask=0o077, capabilities=True))
    trainer("start", str(volume), str(volume))
    for tag in ("step1", "step2"):
        assert trainer("save", tag)[1:3] == ["", []]
    done = Sidecar(people(alone)).agent(volume, store)
    assert done.code == 0, done.text
    assert folders_of(volume) == ["step2"]


# ---- what stays closed


@pytest.mark.parametrize("links", [True, False], ids=["links", "copies"])
def test_modes_stay_as_they_are_where_that_is_asked_for_and_one_user_does_all(
    place: Path, store: Path, people: People, links: bool
) -> None:
    user, volume = User(1000, 1000, umask=0o077), made(place / "volume")
    trainer, sidecar = people(user), Sidecar(people(user))
    os.chown(store, 1000, G)
    trainer("start", str(volume), str(volume / "run"), links=links, widen_modes=False)
    for tag in ("step1", "step2"):
        _, reason, warnings, _ = trainer("save", tag)
        assert (reason, warnings) == ("", [])
    for folder in (volume / "run", volume / ".ds_ckpt/links"):
        shards = list(folder.rglob("*.pt"))
        assert len(shards) == 8
        assert all(path.stat().st_mode & 0o077 == 0 for path in shards)
    assert (volume / "run/step2").stat().st_mode & 0o077 == 0
    done = sidecar.agent(volume, store)
    assert done.code == 0, done.text
    assert folders_of(volume / "run") == ["step2"]


def test_modes_that_stay_as_they_are_are_named_to_the_trainer_of_another_user(
    place: Path, store: Path, people: People, sidecar: Sidecar
) -> None:
    volume, trainer = made(place / "volume"), people(User(1000, 1000, umask=0o077))
    assert sidecar.agent(volume, store).code == 0
    trainer("start", str(volume), str(volume), widen_modes=False)
    (said,) = trainer("save", "t")[2]
    assert "DS_CKPT_WIDEN_MODES=0" in said
    check_told(said, volume / "t/layer_00-model_states.pt", "0600", 1000, SIDECAR)
    delayed, *_ = sidecar.agent(volume, store).events("save.delayed")
    assert "has mode 0600 of uid 1000" in delayed["error"]
    assert "DS_CKPT_WIDEN_MODES" in delayed["error"]


@pytest.mark.parametrize("bit", [0o4000, 0o2000])
def test_a_program_that_runs_as_its_owner_is_never_opened(place: Path, bit: int) -> None:
    program = place / "program"
    program.touch()
    program.chmod(bit | 0o755)
    Filesystem().let_group_in(str(program), G)
    assert program.stat().st_mode & 0o7777 == bit | 0o755
    assert program.stat().st_gid != G


def test_a_link_in_a_checkpoint_opens_nothing(place: Path, people: People) -> None:
    secret, volume = place / "secret", made(place / "volume")
    secret.mkdir(0o700)
    (secret / "key").touch(0o600)
    trainer = people(ROOT_077)
    trainer("start", str(volume), str(volume))
    (volume / "t").mkdir(0o700)
    (volume / "t/global_step_notes.pt").symlink_to(secret / "key")
    (volume / "t/more").symlink_to(secret)
    trainer("save", "t")
    assert (secret / "key").stat().st_mode & 0o777 == 0o600
    assert secret.stat().st_mode & 0o777 == 0o700
    assert (volume / "t").stat().st_mode & 0o7070 == 0o2070


# ---- what was there before


def test_saves_that_an_earlier_version_handed_over_are_opened_to_the_group_at_the_next_start(
    place: Path, store: Path, people: People, sidecar: Sidecar
) -> None:
    volume, trainer = made(place / "volume"), people(TRAINERS[1])
    earlier = Handoff(volume, attempt=f"{0:012x}-{0:016x}")
    for tag in ("a/step1", "step2"):
        earlier.save(tag, {"x": 100, "deep/er/y": 100})
    for folder, _, files in os.walk(volume):
        for name in files:
            if not name.endswith(".json"):
                os.chmod(f"{folder}/{name}", 0o600)
        if not folder.startswith(f"{volume}/.ds_ckpt") and folder != str(volume):
            os.chmod(folder, 0o700)
    Path(earlier.volume.cleaning_lock).touch(0o600)
    trainer("start", str(volume), str(volume))
    trainer("save", "step3")
    done = sidecar.agent(volume, store)
    assert done.code == 0, done.text
    assert len(done.events("save.committed")) == 3
    assert not done.events("clean.failed")
    assert folders_of(volume) == ["step3"]


def test_our_own_folders_are_opened_to_the_group_where_a_kill_left_them_closed(
    place: Path, store: Path, people: People, sidecar: Sidecar
) -> None:
    volume, trainer = made(place / "volume"), people(TRAINERS[2])
    trainer("start", str(volume), str(volume))
    trainer("save", "t")
    for name in (".ds_ckpt", ".ds_ckpt/outbox", ".ds_ckpt/links", ".ds_ckpt/status"):
        (volume / name).chmod(0o700)
    closed = sidecar.agent(volume, store)
    assert closed.code == 2, closed.text
    assert "fsGroup" in closed.text
    trainer("start", str(volume), str(volume))
    trainer("save", "t2")
    done = sidecar.agent(volume, store)
    assert done.code == 0, done.text


# ---- where it cannot work, it says the file, the uid and the remedy


def check_told(text: str, path: Path, mode: str, owner: int, us: int) -> None:
    for fact in (f"{path} has mode {mode} of uid {owner}", f"uid {us}", "fsGroup", "same user"):
        assert fact in text, text


@pytest.mark.parametrize("uid", [0, 1000])
def test_a_trainer_that_may_not_write_what_the_sidecar_made_says_so(
    place: Path, people: People, uid: int
) -> None:
    volume, trainer = made(place / "volume", 0, 0, 0o777), people(User(uid, uid, groups=[]))
    prepare(volume, User(SIDECAR, SIDECAR, groups=[]))
    trainer("start", str(volume), str(volume))
    _, reason, warnings, _ = trainer("save", "t")
    check_told(reason, volume / ".ds_ckpt", "2775", SIDECAR, uid)
    assert warnings, "training goes on, and its log says so"
    tag, raised = trainer("resume", None)
    assert tag is None
    check_told(raised, volume / ".ds_ckpt", "2775", SIDECAR, uid)


def test_a_trainer_whose_files_the_sidecar_cannot_read_says_so_once(
    place: Path, people: People
) -> None:
    volume = made(place / "volume", 0, 0, 0o777)
    trainer = people(User(1000, 1000, groups=[], umask=0o077))
    prepare(volume, User(SIDECAR, SIDECAR, groups=[]))
    for folder, _, _ in os.walk(volume / ".ds_ckpt"):
        os.chmod(folder, 0o777)
    heartbeat = volume / ".ds_ckpt/status/sidecar.json"
    heartbeat.write_text("{}")
    os.chown(heartbeat, SIDECAR, SIDECAR)
    trainer("start", str(volume), str(volume))
    said = trainer("save", "t")[2]
    assert len(said) == 1, said
    check_told(said[0], volume / "t/layer_00-model_states.pt", "0660", 1000, SIDECAR)
    assert len(trainer("save", "t2")[2]) == 1, "once"


def test_a_sidecar_that_may_not_enter_a_folder_names_that_folder(
    place: Path, store: Path, sidecar: Sidecar
) -> None:
    volume = made(place / "volume")
    Handoff(volume).save("t", {"deep/x": 100}, protection="none")
    (volume / "t").chmod(0o700)
    said = sidecar.agent(volume, store)
    assert said.code == 1
    (delayed, *_) = said.events("save.delayed")
    check_told(delayed["error"], volume / "t", "0700", 0, SIDECAR)


def two_saves(volume: Path) -> Handoff:
    """Both will be committed, and the first is to be cleaned then."""
    trainer = Handoff(volume)
    for tag in ("a", "b"):
        trainer.save(tag, {"x": 100}, latest=tag == "b")
        os.chmod(volume / tag, 0o2770)
    return trainer


def test_a_pointer_that_cannot_be_read_keeps_every_save(
    place: Path, store: Path, sidecar: Sidecar
) -> None:
    volume = made(place / "volume")
    two_saves(volume)
    (volume / "latest").write_text("a")
    (volume / "latest").chmod(0o600)
    (failed, *_) = sidecar.agent(volume, store).events("clean.failed")
    check_told(failed["error"], volume / "latest", "0600", 0, SIDECAR)
    assert (volume / "a/x").exists()
    (volume / "latest").chmod(0o640)
    assert not sidecar.agent(volume, store).events("clean.failed")
    assert (volume / "a/x").exists(), "it is what latest names"


def test_while_the_cleaning_lock_cannot_be_opened_nothing_is_removed(
    place: Path, store: Path, sidecar: Sidecar
) -> None:
    volume = made(place / "volume")
    trainer = two_saves(volume)
    lock = Path(trainer.volume.cleaning_lock)
    lock.touch(0o600)
    (failed, *_) = sidecar.agent(volume, store).events("clean.failed")
    check_told(failed["error"], lock, "0600", 0, SIDECAR)
    assert (volume / "a/x").exists()
    trainer.volume.prepare()  # the trainer starts again
    sidecar.agent(volume, store)
    assert not (volume / "a").exists()


@pytest.mark.parametrize(("mode", "also"), [(0o2755, ""), (0o3777, "chmod -t ")])
def test_a_folder_that_may_not_be_changed_is_named_and_its_save_is_kept(
    place: Path, store: Path, sidecar: Sidecar, mode: int, also: str
) -> None:
    volume = made(place / "volume")
    two_saves(volume)
    (volume / "a").chmod(mode)
    (failed, *_) = sidecar.agent(volume, store).events("clean.failed")
    check_told(failed["error"], volume / "a", f"{mode:o}", 0, SIDECAR)
    assert f"{also}{volume / 'a'}" in failed["error"]
    assert (volume / "a/x").exists()


def test_a_restore_that_may_not_move_what_is_there_names_it(
    place: Path, store: Path, sidecar: Sidecar
) -> None:
    volume, target = made(place / "volume"), made(place / "target")
    Handoff(volume).save("t", {"x": 100})
    assert sidecar.agent(volume, store).code == 0
    Engine(0).save_checkpoint(target, "t")
    (target / "t").chmod(0o700)
    said = sidecar("restore", "--from", store.as_uri(), "--to", str(target))
    assert said.code == 1
    check_told(said.text, target / "t", "0700", 0, SIDECAR)
    assert not (target / "t/x").exists()
