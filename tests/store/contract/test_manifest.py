"""Documents of the volume are hostile input: each bad one is refused with a sentence, none passes
and none costs more than its bytes."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_ckpt_store.contract.manifest import (
    MAX_DOCUMENT_BYTES,
    MAX_SHARDS,
    NodeManifest,
    Restored,
    SaveStatus,
    SidecarStatus,
    TrainerStatus,
    parse,
)
from ds_ckpt_store.errors import CkptError, ManifestError, UnknownSchemaError

NODE = "0" * 31 + "1"
OTHER = "0" * 31 + "2"
SHARD = {
    "path": "mp_rank_00_model_states.pt",
    "size": 3,
    "crc32c": "0000abcd",
    "device": 1,
    "inode": 2,
    "mtime_ns": 3,
    "rank": 0,
}


def document(**changes: Any) -> dict[str, Any]:
    good = {
        "schema": 1,
        "run_id": "run",
        "attempt": "a",
        "save_id": "018bcfe56800-0123456789abcdef",
        "tag": "global_step1",
        "time_ms": 1,
        "nodes": [NODE],
        "node": NODE,
        "shards": [SHARD],
    }
    return {**good, **changes}


def read(**changes: Any) -> NodeManifest:
    return parse(NodeManifest, json.dumps(document(**changes)).encode())


def test_a_good_manifest_comes_back_as_it_was_written() -> None:
    manifest = read(metrics={"loss": 0.5}, pin=True, step=7)
    assert parse(NodeManifest, manifest.to_bytes()) == manifest


def test_fields_of_a_later_minor_version_are_left_out() -> None:
    assert read(colour="blue").tag == "global_step1"


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x00\x01",
        b"\xff\xfe",
        b"{",
        b"[]",
        b"null",
        b'"text"',
        b"[" * 200_000,
        b'{"schema":' * 100_000,
        b"9" * 100_000,
        b'{"schema": ' + b"9" * 10_000 + b"}",
    ],
    ids=range(11),
)
def test_what_is_no_json_object_is_refused(data: bytes) -> None:
    with pytest.raises(ManifestError):
        parse(NodeManifest, data)


@pytest.mark.parametrize("half", [b"\\ud800", b"\\uDfFf", b"\xed\xa0\x80"])
def test_half_a_character_is_refused_wherever_it_stands(half: bytes) -> None:
    """It could be read and not be written again, by whoever changes one field of a document."""
    start = b'{"schema":1,"run_id":"r","attempt":"a","time":1,"nodes":["'
    with pytest.raises(ManifestError, match="not JSON"):
        parse(TrainerStatus, start + half + b'"]}')
    whole = parse(TrainerStatus, start + b'\\ud83d\\ude00"]}')
    assert whole.nodes == ["\U0001f600"]


def test_a_document_over_the_bound_is_not_even_read_as_json() -> None:
    with pytest.raises(ManifestError, match="is the most"):
        parse(NodeManifest, b" " * (MAX_DOCUMENT_BYTES + 1))


@pytest.mark.parametrize("schema", [2, 99, 10**30])
def test_a_newer_schema_is_told_apart_from_a_bad_document(schema: int) -> None:
    with pytest.raises(UnknownSchemaError, match="upgrade"):
        read(schema=schema, tag=["in", "a", "form", "of", "its", "own"])


@pytest.mark.parametrize("schema", [0, -1, None, "1", 1.5, [], True])
def test_a_document_without_a_version_is_bad(schema: object) -> None:
    with pytest.raises(ManifestError):
        read(schema=schema)


def test_metrics_that_are_no_numbers_become_none_and_can_be_written_again() -> None:
    raw = json.dumps(document(metrics={"a": float("nan"), "b": float("inf"), "c": 1.0, "d": None}))
    manifest = parse(NodeManifest, raw.encode())
    assert manifest.metrics == {"a": None, "b": None, "c": 1.0, "d": None}
    assert json.loads(manifest.to_bytes())["metrics"]["a"] is None


def shard(**changes: Any) -> dict[str, Any]:
    return {**SHARD, **changes}


@pytest.mark.parametrize(
    "changes",
    [
        {"shards": [shard(path="/etc/passwd")]},
        {"shards": [shard(path="../other")]},
        {"shards": [shard(path="a/../b")]},
        {"shards": [shard(path=".ds_ckpt/node.json")]},
        {"shards": [shard(path="a\nb")]},
        {"shards": [shard(path="\ud800")]},
        {"shards": [shard(path="x" * 300)]},
        {"shards": [shard(size=-1)]},
        {"shards": [shard(size=1 << 63)]},
        {"shards": [shard(crc32c="0000ABCD")]},
        {"shards": [shard(crc32c="0000abcd\n")]},
        {"shards": [shard(), shard()]},
        {"shards": [shard()], "replicas": [shard()]},
        {"shards": [shard(path="a"), shard(path="a/b")]},
        {"shards": []},
        {"shards": [shard()], "nodes": [OTHER]},
        {"shards": [], "nodes": []},
        {"nodes": [NODE, NODE]},
        {"nodes": [NODE, "../x"]},
        {"node": "../x", "nodes": ["../x"]},
        {"root": "../out"},
        {"root": "/abs"},
        {"root": ".ds_ckpt"},
        {"companions": [shard(path="deep/er")]},
        {"companions": [shard(path="x"), shard(path="x")]},
        {"companions": [shard(path="latest")]},
        {"tag": "../x"},
        {"tag": ""},
        {"tag": "x" * 300},
        {"tag": "\ud800"},
        {"save_id": "../../x"},
        {"save_id": "018bcfe56800-0123456789abcdef/.."},
        {"parent": "x"},
        {"run_id": ""},
        {"run_id": "a\nb"},
        {"run_id": "x" * 257},
        {"run_id": "\ud800"},
        {"metrics": {"x" * 257: 1.0}},
        {"metrics": {str(number): 1.0 for number in range(257)}},
        {"world_size": 0},
        {"time_ms": -1},
        {"time_ms": 1e300},
        {"shards": None},
        {"shards": {}},
    ],
    ids=lambda changes: ",".join(changes),
)
def test_a_manifest_that_breaks_a_rule_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ManifestError) as caught:
        read(**changes)
    assert str(caught.value).isprintable()


def test_a_million_entries_are_refused() -> None:
    entries = [shard(path=str(number)) for number in range(MAX_SHARDS + 1)]
    with pytest.raises(ManifestError, match="at most"):
        read(shards=entries)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=6,
)


@settings(max_examples=200)
@given(st.sampled_from(sorted(NodeManifest.model_fields)), JSON)
def test_no_value_of_any_field_raises_anything_but_our_errors(field: str, value: object) -> None:
    raw = json.dumps({**document(), field: value}).encode()
    try:
        manifest = parse(NodeManifest, raw)
    except CkptError:
        return
    assert parse(NodeManifest, manifest.to_bytes()) == manifest


@pytest.mark.parametrize("kind", [SaveStatus, TrainerStatus])
def test_a_status_of_another_kind_is_refused(kind: type[SaveStatus]) -> None:
    with pytest.raises(ManifestError):
        parse(kind, b'{"schema": 1}')


def test_what_was_restored_by_a_version_that_did_not_say_how_fast_is_read() -> None:
    old = {
        "schema": 1,
        "source": "s3://bucket/run",
        "run_id": "run",
        "save_id": "018bcfe56800-0000000000000000",
        "tag": "global_step1",
        "time_ms": 1_700_000_000_000,
        "epoch": 1,
    }
    read = parse(Restored, json.dumps(old).encode())
    assert (read.bytes, read.seconds) == (None, None)
    told = {**old, "bytes": 7, "seconds": 0.5}
    assert parse(Restored, json.dumps(told).encode()).bytes == 7


def test_a_bit_that_flips_anywhere_in_a_document_is_refused() -> None:
    data = SidecarStatus(time=1.0, pid=7, version="1", state="running").to_bytes()
    assert parse(SidecarStatus, data).pid == 7
    for at in range(len(data)):
        flipped = data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
        with pytest.raises(ManifestError):
            parse(SidecarStatus, flipped)


def test_a_document_of_a_person_may_end_with_a_name_and_a_text_as_long_as_a_checksum() -> None:
    text = b'{"schema":1,"time":1.0,"pid":7,"version":"1","state":"running","whatever":"0123abcd"}'
    assert parse(SidecarStatus, text).pid == 7
