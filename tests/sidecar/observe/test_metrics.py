"""What is exposed: every metric of the table, few labels, both formats, the document up to date."""

from __future__ import annotations

import pathlib
import random
import re

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics
from prometheus_client.parser import text_string_to_metric_families as plain

from ds_ckpt_sidecar.observe.metrics import METRICS, PREFIX, Metrics, document
from ds_ckpt_sidecar.observe.tally import Tally, Timing
from ds_ckpt_sidecar.observe.view import View, look
from ds_ckpt_store.contract import names
from ds_ckpt_store.contract.manifest import Restored, SaveStatus, SidecarStatus, TrainerStatus

ROOT = pathlib.Path(__file__).parents[3]
OPENMETRICS = "application/openmetrics-text; version=1.0.0"


def full() -> tuple[View, Tally]:
    """An agent of which everything is known."""
    sidecar = SidecarStatus(
        time=999.0,
        pid=1,
        version="1",
        run_id='a "run"\n\\',
        node="n1",
        state="running",
        destination="sftp://me:secret@host/x",
        newest_committed_ms=900_000,
        newest_committed_tag="t",
        newest_committed_save="s",
        newest_committed_step=4,
        credentials_expiry=2_000.0,
    )
    trainer = TrainerStatus(run_id="r", attempt="a", time=998.0, step=9, started=1.0)
    saves = [
        SaveStatus(save_id="s1", tag="tag/x", state="cleaned", time=1.0, saved_ms=900_000),
        SaveStatus(save_id="s2", tag="tag/y", state="uploading", time=1.0, saved_ms=950_000),
    ]
    restored = Restored(
        source="s3://b",
        run_id="r",
        save_id=names.new_save_id(1_000, random.Random(1)),
        tag="t",
        time_ms=1,
        epoch=1,
        bytes=5,
        seconds=2.0,
    )
    tally = Tally()
    tally.sent(10)
    tally.resumed(2)
    tally.failed("put", "ThrottledError")
    tally.unlike()
    tally.ended("committed")
    tally.committed(Timing(saved=1, published=2, begun=3, sent=4, stored=5, committed=6))
    tally.retained(1, 5)
    return look(sidecar, trainer, saves, 1_000.0, restored), tally


def exposed(accept: str = "") -> str:
    view, tally = full()
    _, body = Metrics(lambda: view, tally).render(accept)
    return body.decode()


def test_every_metric_has_a_sample_once_all_is_known() -> None:
    found = {sample.name for family in plain(exposed()) for sample in family.samples}
    for metric in METRICS:
        expected = metric.full_name + ("_count" if metric.kind == "histogram" else "")
        assert expected in found, metric.name


@pytest.mark.parametrize("parse", [plain, openmetrics], ids=["text", "openmetrics"])
def test_both_formats_can_be_parsed(parse: object) -> None:
    text = exposed(OPENMETRICS if parse is openmetrics else "")
    families = list(parse(text))  # type: ignore[operator]
    assert len(families) > len(METRICS)
    ours = [family for family in families if not family.name.startswith(f"{PREFIX}process")]
    for family in ours:
        for sample in family.samples:
            assert sample.labels["run"] == 'a "run"\n\\', sample


def test_no_label_holds_what_there_is_one_of_for_each_save() -> None:
    allowed = {"run", "state", "outcome", "operation", "kind", "phase", "le"}
    info = {"version", "python", "node", "destination"}
    for family in plain(exposed()):
        for sample in family.samples:
            own = info if sample.name.endswith("_info") else set()
            assert set(sample.labels) <= allowed | own, sample
    assert "tag/x" not in exposed()
    assert "secret" not in exposed()


def test_what_is_not_known_has_no_sample() -> None:
    view = look(None, None, [], 1_000.0)
    _, body = Metrics(lambda: view, Tally()).render("")
    found = {sample.name for family in plain(body.decode()) for sample in family.samples}
    for absent in (
        "newest_committed_timestamp_seconds",
        "exposure_steps",
        "trainer_step",
        "restore_seconds",
        "credentials_expiry_timestamp_seconds",
        "agent_heartbeat_timestamp_seconds",
    ):
        assert PREFIX + absent not in found
    assert f"{PREFIX}upload_lag_seconds" in found


def test_the_split_of_a_save_adds_up() -> None:
    sums = {
        sample.labels["phase"]: sample.value
        for family in plain(exposed())
        for sample in family.samples
        if sample.name == f"{PREFIX}save_phase_seconds_sum"
    }
    assert sums == {"hashing": 1, "waiting": 1, "uploading": 1, "verifying": 1, "nodes": 1}


def test_the_process_tells_of_itself_under_the_same_prefix() -> None:
    assert f"{PREFIX}process_resident_memory_bytes" in exposed()
    assert not re.search(r"^process_", exposed(), re.MULTILINE)


def test_names_follow_the_conventions() -> None:
    full_names = [metric.full_name for metric in METRICS]
    assert len(set(full_names)) == len(full_names)
    for metric in METRICS:
        assert re.fullmatch(r"[a-z][a-z_]*", metric.name)
        assert not metric.name.endswith("_total")
        assert metric.help.endswith((".", ")"))
        assert metric.act


def test_the_document_is_what_the_code_says() -> None:
    assert (ROOT / "docs/metrics.md").read_text() == document(), "run make docs"
