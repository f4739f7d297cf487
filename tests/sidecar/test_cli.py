"""The command line: what it prints, and exit codes 0 done, 1 it failed, 2 wrong use."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from ds_ckpt_sidecar.commands import app
from ds_ckpt_sidecar.settings import misspelt
from ds_ckpt_store.contract.clock import SystemClock
from ds_ckpt_store.contract.manifest import SaveStatus, SidecarStatus, TransferLimits
from ds_ckpt_store.contract.volume import Volume
from tests.sidecar.handoff import Trainer
from tests.sidecar.world import contents

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def no_settings_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("DS_CKPT_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("COLUMNS", "200")


def run(*arguments: str, **environ: str) -> Result:
    return CliRunner().invoke(app, list(arguments), env=environ)


def as_json(*arguments: str) -> Any:
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


class Filled:
    """A file:// store that an agent has filled through the command line."""

    def __init__(self, folder: Path) -> None:
        self.trainer = Trainer(folder / "volume", seed=1)
        self.store = folder / "store"
        self.url = self.store.as_uri()
        self.manifests = {}
        for step, tag in enumerate(("step1", "a/ü 1%", "step3")):
            self.manifests[tag] = self.trainer.save(
                tag, {"mp_rank_00_model_states.pt": 1000, "zero.pt": 50}, step=step, pin=step == 0
            )
        result = run("agent", *self.agent("--once"))
        assert result.exit_code == 0, result.output

    def agent(self, *more: str) -> list[str]:
        return ["--volume", self.trainer.volume.path, "--destination", self.url, *more]

    def object(self, tag: str, path: str) -> Path:
        return self.store / self.manifests[tag].folder / path

    def flip(self, tag: str) -> str:
        path = self.object(tag, "zero.pt")
        data = bytearray(path.read_bytes())
        data[7] ^= 1
        path.write_bytes(data)
        return f"{self.manifests[tag].folder}/zero.pt"


@pytest.fixture
def filled(tmp_path: Path) -> Filled:
    return Filled(tmp_path)


# ---- ls, show


def test_ls_names_every_checkpoint_and_which_is_latest(filled: Filled) -> None:
    document = as_json("ls", filled.url)
    assert [entry["tag"] for entry in document["checkpoints"]] == ["step1", "a/ü 1%", "step3"]
    assert [entry["latest"] for entry in document["checkpoints"]] == [False, False, True]
    assert document["checkpoints"][0]["pin"]
    assert document["checkpoints"][0]["bytes"] == 1050
    assert document["damaged"] == {}
    table = run("ls", filled.url + "/")
    assert table.exit_code == 0
    for word in ("step1", "a/ü 1%", "step3", "latest", "pinned"):
        assert word in table.stdout


def test_a_tag_that_looks_like_markup_is_printed_as_it_is(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path / "volume", seed=1)
    trainer.save("[red]x[/]", {"[bold].pt": 10})
    url = (tmp_path / "store").as_uri()
    assert (
        run("agent", "--volume", trainer.volume.path, "--destination", url, "--once").exit_code == 0
    )
    for arguments in (("ls", url), ("show", url, "[red]x[/]"), ("verify", url)):
        result = run(*arguments)
        assert result.exit_code == 0, result.output
        assert "[red]x[/]" in result.stdout
    assert "[bold].pt" in run("show", url, "[red]x[/]").stdout
    assert "[red]x[/]" in run("status", "--volume", trainer.volume.path).stdout


def test_ls_of_an_empty_prefix_says_so(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    result = run("ls", (tmp_path / "empty").as_uri())
    assert result.exit_code == 0
    assert "no committed checkpoint" in result.stderr
    assert as_json("ls", (tmp_path / "empty").as_uri())["checkpoints"] == []


def test_ls_leaves_a_damaged_record_out_and_names_it(filled: Filled) -> None:
    record = filled.store / f".ds_ckpt/checkpoints/{filled.manifests['step1'].save_id}.json"
    record.write_bytes(b"garbage")
    result = run("ls", filled.url)
    assert result.exit_code == 0
    assert record.name in result.stderr
    assert "step3" in result.stdout
    assert "step1" not in result.stdout
    assert len(as_json("ls", filled.url)["damaged"]) == 1


def test_show_names_every_file_with_its_checksum(filled: Filled) -> None:
    document = as_json("show", filled.url, "a/ü 1%")
    shards = {shard.path: shard.crc32c for shard in filled.manifests["a/ü 1%"].shards}
    assert {entry["path"]: entry["crc32c"] for entry in document["files"]} == shards
    text = run("show", filled.url, "a/ü 1%").stdout
    assert all(crc in text for crc in shards.values())


@pytest.mark.parametrize("command", ["show", "verify"])
def test_an_unknown_tag_is_answered_with_the_known_ones(filled: Filled, command: str) -> None:
    result = run(command, filled.url, "step2")
    assert result.exit_code == 1
    assert "'step2'" in result.stderr
    assert "step1, step3" in result.stderr


# ---- verify


def test_verify_reads_everything(filled: Filled) -> None:
    assert as_json("verify", filled.url)["objects"] == 2
    document = as_json("verify", filled.url, "--all")
    assert (document["objects"], document["bytes"], document["damaged"]) == (6, 3150, {})


def test_verify_names_a_flipped_byte_and_a_missing_object(filled: Filled) -> None:
    flipped = filled.flip("step1")
    filled.object("a/ü 1%", "zero.pt").unlink()
    assert run("verify", filled.url).exit_code == 0, "the newest is whole"
    result = run("verify", filled.url, "--all")
    assert result.exit_code == 1
    assert f"{flipped}: has CRC32C" in result.stderr
    assert "is missing" in result.stderr
    one = run("verify", filled.url, "step1", "--json")
    assert one.exit_code == 1
    assert list(json.loads(one.stdout)["damaged"]) == [flipped]


def test_a_tag_and_all_are_not_both_given(filled: Filled) -> None:
    assert run("verify", filled.url, "step1", "--all").exit_code == 2


# ---- restore


def test_restore_brings_the_newest_back(filled: Filled, tmp_path: Path) -> None:
    before = contents(Path(filled.trainer.folder(filled.manifests["step3"])))
    document = as_json("restore", "--from", filled.url, "--to", str(tmp_path / "new"))
    assert (document["tag"], document["fetched_bytes"]) == ("step3", 1050)
    assert contents(tmp_path / "new/step3") == before
    assert (tmp_path / "new/latest").read_text() == "step3"
    again = as_json("restore", "--from", filled.url, "--to", str(tmp_path / "new"))
    assert (again["fetched_bytes"], again["set_aside"]) == (0, "")


def test_restore_tells_what_it_passed_over(filled: Filled, tmp_path: Path) -> None:
    (record,) = (filled.store / ".ds_ckpt/checkpoints").glob(
        f"{filled.manifests['step3'].save_id}*"
    )
    record.write_text("{bad")
    document = as_json("restore", "--from", filled.url, "--to", str(tmp_path / "new"))
    assert document["tag"] == "a/ü 1%"
    assert list(document["damaged"]) == [f".ds_ckpt/checkpoints/{record.name}"]


def test_restore_takes_a_tag_or_a_save(filled: Filled, tmp_path: Path) -> None:
    to = str(tmp_path / "new")
    assert run("restore", "--from", filled.url, "--to", to, "--tag", "a/ü 1%").exit_code == 0
    assert (tmp_path / "new/latest").read_text() == "a/ü 1%"
    save_id = filled.manifests["step1"].save_id
    assert run("restore", "--from", filled.url, "--to", to, "--save", save_id).exit_code == 0
    assert (tmp_path / "new/latest").read_text() == "step1"


def test_restore_of_a_damaged_checkpoint_names_the_object(filled: Filled, tmp_path: Path) -> None:
    key = filled.flip("step3")
    result = run("restore", "--from", filled.url, "--to", str(tmp_path / "new"))
    assert result.exit_code == 1
    assert key in result.stderr
    assert contents(tmp_path / "new") == {}


def test_restore_of_nothing_says_what_there_is(filled: Filled, tmp_path: Path) -> None:
    to = str(tmp_path / "new")
    result = run("restore", "--from", filled.url, "--to", to, "--tag", "nope")
    assert result.exit_code == 1
    assert "committed tags: a/ü 1%, step1, step3" in result.stderr
    assert not (tmp_path / "new").exists()


def test_a_first_start_finds_nothing_to_restore_and_goes_on(tmp_path: Path) -> None:
    first = ["--from", (tmp_path / "store").as_uri(), "--to", str(tmp_path / "new")]
    assert run("restore", *first).exit_code == 1
    result = run("restore", *first, "--if-any")
    assert result.exit_code == 0, result.output
    assert "holds no committed checkpoint yet: nothing to restore" in result.stdout
    assert as_json("restore", *first, "--if-any") == {"tag": None}
    assert list(tmp_path.iterdir()) == []


def test_restore_if_any_restores_what_there_is(filled: Filled, tmp_path: Path) -> None:
    document = as_json("restore", "--from", filled.url, "--to", str(tmp_path / "new"), "--if-any")
    assert document["tag"] == "step3"


def test_restore_if_any_excuses_nothing_but_a_first_start(filled: Filled, tmp_path: Path) -> None:
    there = ["restore", "--if-any", "--to", str(tmp_path / "new"), "--from"]
    result = run(*there, filled.url, "--tag", "nope")
    assert result.exit_code == 2
    assert "without --tag or --save" in result.stderr
    for record in (filled.store / ".ds_ckpt/checkpoints").iterdir():
        record.write_text("{")
    result = run(*there, filled.url)
    assert result.exit_code == 1
    assert "but for a damaged one" in result.stderr
    result = run(*there, (tmp_path / "no/such/store").as_uri())
    assert result.exit_code != 0
    assert "no/such" in result.stderr
    assert not (tmp_path / "new").exists()


def test_restore_to_nowhere_is_wrong_use(filled: Filled, tmp_path: Path) -> None:
    result = run("restore", "--from", filled.url, "--to", str(tmp_path / "no/such"))
    assert result.exit_code == 2
    assert "does not exist" in result.stderr


# ---- status


@pytest.mark.parametrize("command", ["status", "limit"])
def test_a_volume_that_is_a_file_is_not_said_to_be_missing(tmp_path: Path, command: str) -> None:
    (tmp_path / "file").touch()
    result = run(command, "--volume", str(tmp_path / "file"))
    assert result.exit_code == 2
    assert "is no folder" in result.stderr


def test_a_volume_whose_outbox_is_a_file_is_not_said_to_be_empty(tmp_path: Path) -> None:
    (tmp_path / ".ds_ckpt").mkdir()
    (tmp_path / ".ds_ckpt/outbox").touch()
    result = run("status", "--volume", str(tmp_path))
    assert result.exit_code == 2
    assert "must be a folder of its own" in result.stderr


def test_status_shows_sidecar_trainer_and_saves(filled: Filled) -> None:
    volume = filled.trainer.volume.path
    filled.trainer.say()
    document = as_json("status", "--volume", volume)
    assert document["sidecar"]["state"] == "stopped"
    assert document["sidecar"]["newest_committed_tag"] == "step3"
    assert document["trainer"]["run_id"] == "run"
    assert {save["tag"]: save["state"] for save in document["saves"]} == {
        "step1": "cleaned",
        "a/ü 1%": "cleaned",
        "step3": "committed",
    }
    text = run("status", "--volume", volume).stdout
    assert "step3" in text
    assert "run 'run'" in text
    assert run("status", DS_CKPT_VOLUME=volume).exit_code == 0


def test_what_was_handed_over_since_the_agent_died_is_counted_as_waiting(trainer: Trainer) -> None:
    """Its manifests lie in the outbox, and no status speaks of them."""
    now = SystemClock().time()
    trainer.volume.write_sidecar_status(
        SidecarStatus(time=now - 5_000, pid=1, version="9", state="running", run_id="run")
    )
    told = trainer.save("told", {"x": 30})
    trainer.volume.write_save_status(
        SaveStatus(save_id=told.save_id, tag="told", state="committed", time=now)
    )
    for tag in ("late", "later"):
        trainer.save(tag, {"x": 10, "y": 20})
    Path(trainer.volume.outbox, "rubbish.json").write_text("{")
    view = as_json("status", "--volume", trainer.volume.path)["view"]
    waiting = [save for save in view["saves"] if save["open"]]
    assert [(save["tag"], save["state"]) for save in waiting] == [
        ("later", "discovered"),
        ("late", "discovered"),
    ]
    assert (view["backlog_saves"], view["backlog_shards"]) == (2, 4)
    assert view["backlog_bytes"] == sum(save["bytes_total"] for save in waiting) > 0
    assert view["lag_seconds"] == max(save["age_seconds"] for save in waiting) > 0
    text = run("status", "--volume", trainer.volume.path).stdout
    assert "no agent has looked at it yet" in text
    assert "told" in text


def test_status_of_a_volume_that_nobody_used(tmp_path: Path) -> None:
    result = run("status", "--volume", str(tmp_path))
    assert result.exit_code == 0
    assert "never seen" in result.stdout
    missing = run("status", "--volume", str(tmp_path / "no"))
    assert missing.exit_code == 2
    assert "does not exist" in missing.stderr


def test_status_files_that_are_garbage_are_said_and_hide_nothing_else(filled: Filled) -> None:
    volume = filled.trainer.volume
    for name in ("trainer.json", "sidecar.json"):
        Path(volume.status, name).write_bytes(b"garbage")
    result = run("status", "--volume", volume.path)
    assert result.exit_code == 0
    assert "step3" in result.stdout
    assert "trainer.json" in result.stderr
    assert "sidecar.json" in result.stderr


# ---- wrong use


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("gopher://x", "unknown kind of store 'gopher'"),
        ("no-url", "names no kind of store"),
        ("s3://", "bucket"),
        ("file://host/x", "host"),
        ("file:///x?y=1", "no query"),
    ],
)
def test_a_wrong_url_is_wrong_use(tmp_path: Path, url: str, why: str) -> None:
    volume = str(tmp_path)
    for arguments in (
        ["ls", url],
        ["verify", url],
        ["show", url, "t"],
        ["restore", "--from", url, "--to", volume],
        ["agent", "--volume", volume, "--destination", url, "--once"],
    ):
        result = run(*arguments)
        assert result.exit_code == 2, arguments
        assert why in result.stderr, arguments


def test_what_the_agent_lacks_is_named_with_its_variable(tmp_path: Path) -> None:
    result = run("agent")
    assert result.exit_code == 2
    for name in ("--volume", "DS_CKPT_VOLUME", "--destination", "DS_CKPT_DESTINATION"):
        assert name in result.stderr
    assert "(or DS_CKPT_VOLUME): is missing: set it" in result.stderr


def test_a_setting_is_refused_with_its_value_and_in_plain_words(tmp_path: Path) -> None:
    volume = ["--volume", str(tmp_path), "--destination", tmp_path.as_uri()]
    told = run("agent", *volume, DS_CKPT_PART_MIB="1").stderr
    assert "(or DS_CKPT_PART_MIB): '1' cannot be: input should be greater than or equal" in told
    assert "(or DS_CKPT_BANDWIDTH): 'fast' is no bandwidth" in (
        run("agent", *volume, DS_CKPT_BANDWIDTH="fast").stderr
    )


def test_a_variable_that_resembles_a_setting_is_told(filled: Filled) -> None:
    result = run("agent", *filled.agent("--once"), DS_CKPT_KEEPLAST="1", DS_CKPT_WHEN_FULL="wait")
    assert result.exit_code == 0
    assert "variable=DS_CKPT_KEEPLAST" in result.stderr
    assert "did you mean DS_CKPT_KEEP_LAST?" in result.stderr
    assert "WHEN_FULL" not in result.stderr


def test_no_name_of_the_documents_is_taken_for_a_misspelt_one() -> None:
    texts = [path.read_text() for path in (ROOT / "docs").rglob("*.md")]
    written = set(re.findall("DS_CKPT_[A-Z0-9_]+", "".join(texts)))
    assert len(written) > 50
    assert misspelt(written) == {}


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("DS_CKPT_KEEP_LAST", "0"),
        ("DS_CKPT_KEEP_LAST", "many"),
        ("DS_CKPT_STREAMS", "0"),
        ("DS_CKPT_PART_MIB", "1"),
        ("DS_CKPT_ORDER", "sideways"),
        ("DS_CKPT_DRAIN_SECONDS", "-1"),
        ("DS_CKPT_DRAIN_SECONDS", "inf"),
        ("DS_CKPT_ABANDON_SECONDS", "nan"),
        ("DS_CKPT_RUN_ID", "one\ntwo"),
        ("DS_CKPT_RUN_ID", "r" * 257),
        ("DS_CKPT_RESCAN_SECONDS", "0"),
        ("DS_CKPT_LOG_FORMAT", "xml"),
        ("DS_CKPT_BANDWIDTH", "fast"),
        ("DS_CKPT_MEMORY_MIB", "0"),
        ("DS_CKPT_STALL_SECONDS", "0"),
        ("DS_CKPT_PAGE_CACHE", "flush"),
        ("DS_CKPT_PRIORITY", "high"),
    ],
)
def test_a_setting_that_cannot_work_is_named(tmp_path: Path, variable: str, value: str) -> None:
    volume = ["--volume", str(tmp_path), "--destination", tmp_path.as_uri()]
    result = run("agent", *volume, **{variable: value})
    assert result.exit_code == 2
    assert variable in result.stderr


def test_the_command_line_is_over_the_environment(filled: Filled) -> None:
    result = run("agent", *filled.agent("--once", "--streams", "2"), DS_CKPT_STREAMS="0")
    assert result.exit_code == 0


@pytest.mark.parametrize("below", ["", "/inside"])
def test_a_store_on_the_volume_is_wrong_use(tmp_path: Path, below: str) -> None:
    trainer = Trainer(tmp_path / "volume", seed=1)
    url = (tmp_path / "volume").as_uri() + below
    result = run("agent", "--once", "--volume", trainer.volume.path, "--destination", url)
    assert result.exit_code == 2
    assert "within each other" in result.output
    result = run("restore", "--from", url, "--to", trainer.volume.path)
    assert result.exit_code == 2
    assert "within each other" in result.output


def test_a_volume_that_does_not_exist_is_named(tmp_path: Path) -> None:
    url = (tmp_path / "store").as_uri()
    result = run("agent", "--volume", str(tmp_path / "no"), "--destination", url, "--once")
    assert result.exit_code == 2
    assert "mount it, or make it" in result.stderr


def test_a_destination_whose_parent_does_not_exist_is_named(tmp_path: Path) -> None:
    result = run("ls", (tmp_path / "no/such/store").as_uri())
    assert result.exit_code == 1
    assert "no/such" in result.stderr


ACCOUNT = {"DS_CKPT_AZURE_ACCOUNT": "account"}
SSE_C = {"DS_CKPT_S3_ENCRYPTION": "sse-c"}


@pytest.mark.parametrize(
    ("url", "environ"),
    [
        ("az://container/x?sv=1&sig=SECRET", {}),
        ("https://a.blob.core.windows.net/container/x?sig=SECRET", {}),
        ("s3://bucket/x?X-Amz-Signature=SECRET", {}),
        ("s3://key:SECRET@bucket/x", {}),
        ("sftp://user:SECRET@host/x", {}),
        ("az://container/x", {"DS_CKPT_AZURE_ENDPOINT": "https://u:SECRET@host/account"}),
        ("az://container/x", {"DS_CKPT_AZURE_ENDPOINT": "https://host/account?sig=SECRET"}),
        ("gs://bucket/x", {"DS_CKPT_GCS_ENDPOINT": "https://u:SECRET@host"}),
        ("s3://bucket/x", {"DS_CKPT_S3_ENDPOINT": "https://u:SECRET@host"}),
        # The secret itself, where the name of its file belongs.
        ("az://container/x", {**ACCOUNT, "DS_CKPT_AZURE_SAS_FILE": "sv=1&sig=SECRET"}),
        ("az://container/x", {**ACCOUNT, "DS_CKPT_AZURE_CPK_FILE": "/SECRET+/" * 4 + "SECRETs="}),
        ("s3://bucket/x", {**SSE_C, "DS_CKPT_S3_SSE_C_KEY_FILE": "SECRET/" * 6 + "a="}),
        ("sftp://host/x", {"DS_CKPT_FSSPEC_OPTIONS_FILE": '{"password": "SECRET"}'}),
    ],
)
def test_what_is_refused_for_its_secret_is_named_without_it(
    url: str, environ: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    result = run("ls", url)
    assert result.exit_code == 2
    assert result.stderr
    assert "SECRET" not in result.output


def test_the_version_and_the_help_are_there() -> None:
    assert run("--version").stdout.startswith("ds-ckpt ")
    for command in ("agent", "restore", "ls", "show", "verify", "status", "demo"):
        result = run(command, "--help")
        assert result.exit_code == 0
        assert command in result.stdout


def test_the_module_is_the_command(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "ds_ckpt_sidecar", "ls", "gopher://x"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert done.stderr.startswith("ds-ckpt: ")


# ---- what transfers may use


def test_a_limit_is_set_changed_shown_and_taken_back(tmp_path: Path) -> None:
    volume = ["--volume", str(tmp_path)]
    place = Volume(str(tmp_path))
    result = run("limit", *volume, "--streams", "3")
    assert (result.exit_code, "no volume yet" in result.stderr) == (2, True)
    place.prepare()
    assert "as set" in run("limit", *volume).stdout
    assert place.transfer_limits() is None
    assert "200 MiB/s, streams as set" in run("limit", *volume, "--bandwidth", "200MiB").stdout
    run("limit", *volume, "--streams", "3")
    assert place.transfer_limits() == TransferLimits(bandwidth=200 << 20, streams=3)
    assert "no limit, streams 3" in run("limit", *volume, "--bandwidth", "none").stdout
    assert place.transfer_limits() == TransferLimits(bandwidth=0, streams=3)
    assert "no limit, streams 3" in run("limit", *volume).stdout
    assert run("limit", *volume, "--reset").exit_code == 0
    assert place.transfer_limits() is None


@pytest.mark.parametrize(
    "options",
    [["--bandwidth", "fast"], ["--bandwidth", "1"], ["--streams", "0"], ["--streams", "257"]],
)
def test_a_limit_that_makes_no_sense_is_refused(tmp_path: Path, options: list[str]) -> None:
    result = run("limit", "--volume", str(tmp_path), *options)
    assert result.exit_code == 2
    assert not list(tmp_path.iterdir())


def test_a_limits_file_that_is_broken_is_said_and_replaced(tmp_path: Path) -> None:
    place = Volume(str(tmp_path))
    place.write_limits(TransferLimits(streams=1))
    Path(place.limits).write_bytes(b"{")
    result = run("limit", "--volume", str(tmp_path), "--bandwidth", "1GB")
    assert result.exit_code == 0
    assert "warning" in result.stderr
    assert place.transfer_limits() == TransferLimits(bandwidth=10**9)


@pytest.mark.parametrize("command", ["restore", "verify"])
def test_commands_that_read_a_lot_keep_to_a_bandwidth(
    filled: Filled, tmp_path: Path, command: str
) -> None:
    where = {
        "restore": ["--from", filled.url, "--to", str(tmp_path / "new")],
        "verify": [filled.url],
    }
    options = ["--bandwidth", "64KiB", "--streams", "2", "--stall-seconds", "5"]
    assert run(command, *where[command], *options).exit_code == 0
    refused = run(command, *where[command], "--bandwidth", "1")
    assert refused.exit_code == 2
    assert "--bandwidth" in refused.stderr
    assert run(command, *where[command], DS_CKPT_STALL_SECONDS="never").exit_code == 2
