"""The network's names and the credentials go away for a while, in front of a real agent process."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.faultproxy import Fault
from tests.sidecar.handoff import Trainer
from tests.sidecar.world import agent_process, until
from tests.stories.places import MIB, Stage

FILES = {"large.pt": 21 * MIB, "small.pt": 1000}
OPTIONS = ("--part-mib", "5", "--streams", "1")
WITHOUT_KEYS = """
import os
os.environ.pop("AWS_ACCESS_KEY_ID")
os.environ.pop("AWS_SECRET_ACCESS_KEY")
"""


def test_credentials_that_expire_in_mid_upload_are_read_anew_and_the_upload_goes_on(
    stage: Stage, trainer: Trainer, tmp_path: Path
) -> None:
    """A token of an hour: files have a new one when the service says that the old has expired.

    What the files said when a request was made shows in its user agent.
    """
    proxy, wire = stage.place.network
    keys = {
        name: stage.place.environ[name] for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
    }
    environ = {name: value for name, value in stage.place.environ.items() if name not in keys}
    environ["AWS_SHARED_CREDENTIALS_FILE"] = str(tmp_path / "credentials")
    environ["AWS_CONFIG_FILE"] = str(tmp_path / "config")

    def rotate(token: str) -> None:
        lines = ["[default]", *(f"{name.lower()}={value}" for name, value in keys.items()), ""]
        for name, text in (
            ("credentials", "\n".join(lines)),
            ("config", f"[default]\nsdk_ua_app_id={token}\n"),
        ):
            (tmp_path / "new").write_text(text)
            (tmp_path / "new").replace(tmp_path / name)

    rotate("first")
    manifest = trainer.save("t", FILES)
    expired = proxy.add(
        Fault(
            r"^PUT .*large\.pt\?.*partNumber=3",
            "status",
            times=None,
            header="^user-agent: .*app/first",
            then=lambda: rotate("second"),
            **wire.expired,  # type: ignore[arg-type]
        )
    )
    with agent_process(
        tmp_path / "log",
        trainer.volume.path,
        stage.place.url,
        *OPTIONS,
        environ=environ,
        program=WITHOUT_KEYS,
    ) as agent:
        agent.wait_for("save.committed")
        assert agent.end(signal.SIGTERM) == 0
    assert proxy.hits(expired) == 1
    assert len(proxy.lines(r"^POST .*large\.pt\?uploads")) == 1, "the same upload went on"
    for number in (1, 2, 4, 5):
        assert len(proxy.lines(rf"^PUT .*large\.pt\?.*partNumber={number}")) == 1
    assert stage.states() == {"t": "committed"}
    assert stage.looked.head(f"{manifest.folder}/large.pt").size == 21 * MIB
    stage.check_whole()


# ---- names that do not resolve


NO_NAMES = """
import os, socket
resolve = socket.getaddrinfo
def failing(*arguments, **options):
    if os.path.exists({flag!r}):
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
    return resolve(*arguments, **options)
socket.getaddrinfo = failing
"""


@pytest.mark.parametrize(
    ("place", "moment"),
    [
        ("seaweed", "at the start"),
        ("seaweed", "in mid upload"),
        ("azure", "in mid upload"),
        ("gcs", "at the start"),
    ],
    indirect=["place"],
)
def test_a_name_that_does_not_resolve_for_a_while_costs_a_wait(
    stage: Stage, trainer: Trainer, tmp_path: Path, moment: str
) -> None:
    proxy, wire = stage.place.network
    flag = tmp_path / "no-names"
    program = NO_NAMES.format(flag=str(flag))
    parts = wire.part.replace("^PUT ", "^PUT (?!.*/probe/)")  # the doctor tries what agents may

    def lose_names() -> None:
        flag.touch()

    if moment == "at the start":
        flag.touch()
        trainer.save("t", FILES)
    else:  # the connection breaks, and a new one needs the name
        cut = Fault(parts, "reset", after=MIB, skip=2, then=lose_names)
    with agent_process(
        tmp_path / "log",
        trainer.volume.path,
        stage.place.url,
        *OPTIONS,
        environ=stage.place.environ,
        program=program,
    ) as agent:
        if moment == "at the start":
            said = agent.wait_for("store.unavailable")
            assert said["kind"] == "TransientError"
            assert proxy.url in said["error"] or "not known" in said["error"]
            assert said["next_try_seconds"] > 0
        else:
            agent.wait_for("store.probed")
            trainer.save("t", FILES)
            proxy.add(cut)
            until(lambda: proxy.hits(cut))
            agent.wait_for("store.retried")
        flag.unlink()
        agent.wait_for("save.committed")
        assert agent.end(signal.SIGTERM) == 0
    assert stage.states() == {"t": "committed"}
    stage.check_whole()
    if moment == "in mid upload":
        assert len(proxy.lines(parts)) <= 5 + 1, "no part is sent twice but one"


@pytest.mark.parametrize(
    ("place", "skip"),
    [("seaweed", 0), ("seaweed", 3), ("azure", 1), ("gcs", 2)],
    indirect=["place"],
)
def test_a_reset_at_any_part_costs_that_part_and_no_process(
    stage: Stage, trainer: Trainer, skip: int
) -> None:
    proxy, wire = stage.place.network
    trainer.save("t", FILES)
    reset = Fault(wire.part, "reset", after=4 * MIB, skip=skip)
    before = 0

    def begin() -> None:
        nonlocal before
        before = len(proxy.lines(wire.part))
        proxy.add(reset)

    stage.log.then["save.uploading"] = begin
    assert stage.once(trainer.volume.path, part_mib=5) == 0
    assert stage.states() == {"t": "committed"}
    stage.check_whole()
    assert proxy.hits(reset) == 1
    assert len(proxy.lines(wire.part)) - before == 5 + 1
