"""What is read decides, so a byte that changes on its way must not: it is read again."""

from __future__ import annotations

import random

import pytest

from ds_ckpt_store.catalog import Catalog
from tests.store.prefix import NODE, Prefix


@pytest.fixture
def prefix() -> Prefix:
    return Prefix()


@pytest.mark.parametrize("skip", range(3))
def test_a_byte_changed_on_its_way_hides_no_checkpoint(prefix: Prefix, skip: int) -> None:
    records = [prefix.commit(tag) for tag in ("a", "b", "c")]
    fault = prefix.fault("get", "corrupt", key="checkpoints/", skip=skip)
    catalog = Catalog(prefix.store, random.Random(1))
    assert catalog.committed() == records
    assert catalog.damaged == {}
    assert fault.count is not None
    assert fault.count <= 0, "it happened"


@pytest.mark.parametrize("what", ["owner", "saves/", "receipts/", "checkpoints/"])
def test_a_save_is_committed_in_spite_of_it(prefix: Prefix, what: str) -> None:
    manifest = prefix.manifest()
    prefix.catalog.own("run", prefix.attempt(), NODE)
    intent = prefix.store_all(manifest)
    fault = prefix.fault("get", "corrupt", key=what)
    prefix.catalog.own("run", prefix.attempt(), NODE)
    assert prefix.catalog.intend(manifest, 1) == intent
    record = prefix.catalog.commit(intent).record
    assert record is not None
    assert record == prefix.another().record(manifest.save_id)
    assert fault.count is not None
    assert fault.count <= 0, "it happened"


def test_latest_is_not_moved_back_for_a_byte_that_changed_on_its_way(prefix: Prefix) -> None:
    older, newer = prefix.commit("older"), prefix.commit("newer")
    prefix.catalog.point(newer)
    fault = prefix.fault("get", "corrupt", key="^latest$")
    assert not prefix.catalog.point(older)
    assert fault.count is not None
    assert fault.count < 0, "it happened, and was looked at again"
    assert prefix.text("latest") == newer.folder
