"""Servers that speak S3 in their own way: they refuse headers, or give ETags that are no MD5."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faultproxy import Fault
from tests.sidecar.handoff import Trainer
from tests.stories.places import MIB, Stage

FILES = {"large.pt": b"3" * (11 * MIB), "small.pt": b"s" * 1000, "empty.pt": b""}
REFUSALS = {
    "501": (
        501,
        "<Error><Code>NotImplemented</Code><Message>A header you provided implies "
        "functionality that is not implemented.</Message></Error>",
    ),
    "400": (400, "<Error><Code>InvalidArgument</Code><Message>Unknown checksum.</Message></Error>"),
    "403": (403, "<Error><Code>SignatureDoesNotMatch</Code><Message>No.</Message></Error>"),
}


@pytest.mark.parametrize("refusal", REFUSALS)
def test_a_server_that_refuses_checksum_headers_is_used_with_another_proof(
    stage: Stage, trainer: Trainer, tmp_path: Path, refusal: str
) -> None:
    """An SDK's new default must not break servers that never heard of it."""
    proxy, _ = stage.place.network
    status, body = REFUSALS[refusal]
    refused = proxy.add(
        Fault(
            "^(PUT|POST)",
            "status",
            status=status,
            body=body,
            times=None,
            header="^x-amz-(sdk-)?checksum",
        )
    )
    trainer.save("t", FILES)
    assert stage.once(trainer.volume.path) == 0, stage.log.text()
    assert proxy.hits(refused) >= 1
    (found,) = stage.log.of("store.probed")
    assert "stored-checksum proves nothing here" in found["findings"]
    assert stage.log.of("store.weak_proof")
    assert stage.states() == {"t": "committed"}
    stage.check_whole()
    assert stage.restored(tmp_path / "new") == FILES
    sent = [seen.headers for seen in proxy.seen if ".pt" in seen.line and "PUT" in seen.line]
    assert sent
    for headers in sent:
        assert not {"x-amz-trailer", "x-amz-checksum-crc32c", "x-amz-checksum-crc32"} & {*headers}
        assert "aws-chunked" not in headers.get("content-encoding", "")


@pytest.mark.parametrize("place", ["seaweed", "seaweed:content-md5", "swift"], indirect=True)
def test_etags_that_are_no_md5_are_taken_for_versions_and_for_nothing_else(
    stage: Stage, trainer: Trainer, tmp_path: Path
) -> None:
    """Of encrypted objects, and of those made of three parts: the answers say anything."""
    proxy, wire = stage.place.network
    completed = (
        "<CompleteMultipartUploadResult><Key>k</Key><ETag>&quot;no-md5-at-all-3&quot;</ETag>"
        "</CompleteMultipartUploadResult>"
    )
    faults = [
        Fault(
            stage.place.putting(r"small\.pt"),
            "swap_response",
            status=200,
            body="",
            headers={"ETag": '"of-a-customers-key"'},
        ),
        Fault(wire.complete, "swap_response", status=200, body=completed),
    ]
    trainer.save("t", FILES)
    stage.at("save.uploading", *faults)
    assert stage.once(trainer.volume.path, part_mib=5) == 0, stage.log.text()
    assert [proxy.hits(fault) for fault in faults] == [1, 1]
    assert len(proxy.lines(stage.place.putting(r"small\.pt"))) == 1, "not sent again for that"
    stage.check_whole()
    assert stage.restored(tmp_path / "new") == FILES
    # A second start knows the objects by what the store really says of them.
    before = proxy.lines(r"^PUT .*\.pt")
    assert stage.once(trainer.volume.path, part_mib=5) == 0
    assert proxy.lines(r"^PUT .*\.pt") == before
