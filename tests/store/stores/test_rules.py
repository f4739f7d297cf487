"""What is read of the rules of real buckets, and of answers that no server here gives."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from azure.storage.blob import RetentionPolicy
from botocore.exceptions import ClientError

from ds_ckpt_store.contract.clock import SystemClock, system_random
from ds_ckpt_store.errors import RefusedError, StoreError, TransientError
from ds_ckpt_store.stores import open_store
from ds_ckpt_store.stores.file import FileStore
from ds_ckpt_store.stores.gcs import GCSOptions, GCSStore
from ds_ckpt_store.stores.memory import MemoryBucket, MemoryStore
from ds_ckpt_store.stores.port import BytesSource
from ds_ckpt_store.stores.retry import RetryStore
from ds_ckpt_store.stores.rules import BucketRules, LifecycleRule, bucket_rules, credentials_of
from ds_ckpt_store.stores.s3 import S3Options, S3Store
from ds_ckpt_store.stores.swap_by_create import SwapByCreate
from tests.faultproxy import HOST, Fault, FaultProxy
from tests.servers import S3
from tests.servers_azure import Azure
from tests.servers_gcs import GCS

ROOT = "run/"
DENIED = "<Error><Code>AccessDenied</Code><Message>no</Message></Error>"


@pytest.fixture
def proxy() -> Iterator[FaultProxy]:
    """Stands for a server that answers as it is told to, and to nothing else."""
    with FaultProxy(HOST, 1) as proxy:
        yield proxy


def answer(proxy: FaultProxy, match: str, body: str, status: int = 200, **headers: str) -> None:
    given = {name.replace("_", "-"): value for name, value in headers.items()}
    fault = Fault(match, "status", status=status, body=body, headers=given, times=None)
    proxy.add(fault)


def done(rules: BucketRules) -> dict[str, str]:
    """Of each lifecycle rule what it does."""
    assert rules.lifecycle is not None
    return {rule.name: f"{rule.action} {rule.detail}" for rule in rules.lifecycle}


def test_a_store_whose_kind_has_no_rules_has_none(tmp_path: Path) -> None:
    for store in (FileStore(str(tmp_path / "x")), MemoryStore(MemoryBucket(SystemClock()))):
        assert bucket_rules(store) is None
        assert credentials_of(store) == ""


# ---- S3: a real server


def test_the_rules_of_a_new_bucket_are_none(seaweed: S3) -> None:
    bucket = seaweed.bucket()
    rules = bucket_rules(seaweed.store(bucket))
    assert rules is not None
    assert (rules.provider, rules.bucket, rules.prefix) == ("s3", bucket, ROOT)
    assert (rules.versioning, rules.lifecycle, rules.retention) == (False, (), "")
    assert rules.unread == ()


def test_what_a_real_bucket_was_told_is_read(seaweed: S3) -> None:
    bucket, client = seaweed.bucket(), seaweed.client()
    client.put_bucket_versioning(Bucket=bucket, VersioningConfiguration={"Status": "Enabled"})
    client.put_bucket_lifecycle_configuration(
        Bucket=bucket,
        LifecycleConfiguration={
            "Rules": [
                {
                    "ID": "short",
                    "Status": "Enabled",
                    "Filter": {"Prefix": ROOT},
                    "Expiration": {"Days": 30},
                },
            ]
        },
    )
    rules = bucket_rules(seaweed.store(bucket))
    assert rules is not None
    assert rules.versioning
    assert done(rules) == {"short": "delete after 30 days"}
    assert rules.lifecycle is not None
    assert rules.lifecycle[0].prefixes == (ROOT,)
    assert [rule["ID"] for rule in rules.raw] == ["short"]


def test_a_real_bucket_with_a_default_lock_tells_it(seaweed: S3) -> None:
    bucket, client = f"lock-{time.monotonic_ns()}", seaweed.client()
    client.create_bucket(Bucket=bucket, ObjectLockEnabledForBucket=True)
    client.put_object_lock_configuration(
        Bucket=bucket,
        ObjectLockConfiguration={
            "ObjectLockEnabled": "Enabled",
            "Rule": {"DefaultRetention": {"Mode": "GOVERNANCE", "Days": 3}},
        },
    )
    rules = bucket_rules(seaweed.store(bucket))
    assert rules is not None
    assert rules.retention == "each version is locked for 3 days (governance)"
    assert (rules.retention_hides, rules.locked) == (True, False)


def test_decorators_do_not_hide_the_rules(seaweed: S3) -> None:
    store = SwapByCreate(
        RetryStore(seaweed.store(seaweed.bucket()), SystemClock(), system_random())
    )
    assert bucket_rules(store) is not None
    assert credentials_of(store) == "variables (AWS_ACCESS_KEY_ID)"


def test_a_bucket_that_is_not_there_is_an_error(seaweed: S3) -> None:
    with pytest.raises(RefusedError, match="does not exist"):
        bucket_rules(seaweed.store("no-such-bucket"))


# ---- S3: answers that no server here gives


@pytest.fixture
def s3(proxy: FaultProxy, aws_credentials: tuple[str, str]) -> S3Store:
    options = S3Options.from_environ({"DS_CKPT_S3_ENDPOINT": proxy.url})
    return S3Store.from_url("s3://bkt/run", options)


VERSIONED = "<VersioningConfiguration><Status>Enabled</Status></VersioningConfiguration>"
LIFECYCLE = """<LifecycleConfiguration>
<Rule><ID>old-style</ID><Prefix>run/</Prefix><Status>Enabled</Status>
  <Expiration><Days>9</Days></Expiration></Rule>
<Rule><ID>off</ID><Filter><Prefix></Prefix></Filter><Status>Disabled</Status>
  <Expiration><Days>1</Days></Expiration></Rule>
<Rule><ID>tagged</ID><Status>Enabled</Status>
  <Filter><And><Prefix>run/</Prefix><Tag><Key>k</Key><Value>v</Value></Tag>
    <ObjectSizeGreaterThan>5</ObjectSizeGreaterThan></And></Filter>
  <Expiration><Date>2030-01-02T00:00:00Z</Date></Expiration></Rule>
<Rule><ID>deep</ID><Filter></Filter><Status>Enabled</Status>
  <Transition><Days>90</Days><StorageClass>DEEP_ARCHIVE</StorageClass></Transition></Rule>
<Rule><ID>warm</ID><Filter><Prefix>a</Prefix></Filter><Status>Enabled</Status>
  <Transition><Days>30</Days><StorageClass>STANDARD_IA</StorageClass></Transition></Rule>
<Rule><ID>versions</ID><Filter><Prefix></Prefix></Filter><Status>Enabled</Status>
  <NoncurrentVersionExpiration><NoncurrentDays>7</NoncurrentDays></NoncurrentVersionExpiration>
  <Expiration><ExpiredObjectDeleteMarker>true</ExpiredObjectDeleteMarker></Expiration></Rule>
<Rule><ID>parts</ID><Filter><Prefix></Prefix></Filter><Status>Enabled</Status>
  <AbortIncompleteMultipartUpload><DaysAfterInitiation>3</DaysAfterInitiation>
  </AbortIncompleteMultipartUpload></Rule>
</LifecycleConfiguration>"""
LOCK = """<ObjectLockConfiguration><ObjectLockEnabled>Enabled</ObjectLockEnabled>
<Rule><DefaultRetention><Mode>COMPLIANCE</Mode><Years>2</Years></DefaultRetention></Rule>
</ObjectLockConfiguration>"""


def test_every_kind_of_rule_that_s3_knows_is_told_apart(proxy: FaultProxy, s3: S3Store) -> None:
    answer(proxy, r"\?versioning", VERSIONED)
    answer(proxy, r"\?lifecycle", LIFECYCLE)
    answer(proxy, r"\?object-lock", LOCK)
    rules = s3.rules()
    assert rules.versioning
    assert done(rules) == {
        "old-style": "delete after 9 days",
        "tagged": "delete on 2030-01-02",
        "deep": "archive to DEEP_ARCHIVE after 90 days",
        "warm": "move to STANDARD_IA after 30 days",
        "versions": "delete-noncurrent 7 days later",
        "parts": "abort-uploads after 3 days",
    }
    assert rules.lifecycle is not None
    tagged = next(rule for rule in rules.lifecycle if rule.name == "tagged")
    assert (tagged.prefixes, tagged.only) == ((ROOT,), "the tag k=v and more than 5 bytes")
    assert rules.retention == "each version is locked for 2 years (compliance)"
    assert rules.locked


@pytest.mark.parametrize("status", [400, 403, 405, 501])
def test_what_s3_does_not_let_us_read_is_named_and_hides_nothing_else(
    proxy: FaultProxy, s3: S3Store, status: int
) -> None:
    answer(proxy, r"\?versioning", VERSIONED)
    answer(proxy, r"\?lifecycle", DENIED, status)
    answer(proxy, r"\?object-lock", DENIED, status)
    rules = s3.rules()
    assert rules.versioning
    assert rules.lifecycle is None
    assert [(each.what, each.reason) for each in rules.unread] == [
        ("lifecycle", f"{status} AccessDenied"),
        ("object lock", f"{status} AccessDenied"),
    ]
    assert rules.unread[0].right == "allow s3:GetLifecycleConfiguration"


def test_a_server_that_does_not_answer_is_an_error_of_ours(proxy: FaultProxy, s3: S3Store) -> None:
    answer(proxy, "", "", 500)
    with pytest.raises(TransientError):
        s3.rules()


def test_no_credentials_is_an_error_of_ours(
    proxy: FaultProxy, s3: S3Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with pytest.raises(StoreError, match="AWS_ACCESS_KEY_ID"):
        s3.rules()
    assert s3.credentials() == ""
    assert not issubclass(ClientError, StoreError)


# ---- Cloud Storage


def test_the_rules_of_a_real_bucket_of_an_emulator_are_read(fake_gcs: GCS) -> None:
    bucket = fake_gcs.bucket()
    rules = bucket_rules(fake_gcs.store(bucket))
    assert rules is not None
    assert (rules.provider, rules.bucket, rules.prefix) == ("gcs", bucket, ROOT)
    assert (rules.versioning, rules.lifecycle, rules.unread) == (False, (), ())
    assert credentials_of(fake_gcs.store(bucket)) == "nowhere: it is asked anonymously"


def test_a_bucket_that_is_not_there_is_an_error_of_cloud_storage(fake_gcs: GCS) -> None:
    with pytest.raises(RefusedError, match="does not exist"):
        bucket_rules(fake_gcs.store("no-such-bucket"))


@pytest.fixture
def gcs(proxy: FaultProxy) -> GCSStore:
    options = GCSOptions.from_environ({"DS_CKPT_GCS_ENDPOINT": proxy.url})
    return GCSStore.from_url("gs://bkt/run", options)


METADATA = {
    "versioning": {"enabled": True},
    "softDeletePolicy": {"retentionDurationSeconds": "604800"},
    "retentionPolicy": {"retentionPeriod": "172800", "isLocked": True},
    "lifecycle": {
        "rule": [
            {"action": {"type": "Delete"}, "condition": {"age": 30, "matchesPrefix": ["run/"]}},
            {"action": {"type": "Delete"}, "condition": {"numNewerVersions": 1}},
            {"action": {"type": "Delete"}, "condition": {"age": 3, "isLive": False}},
            {"action": {"type": "Delete"}, "condition": {"daysSinceCustomTime": 1}},
            {
                "action": {"type": "SetStorageClass", "storageClass": "ARCHIVE"},
                "condition": {"age": 9, "matchesSuffix": [".pt"], "matchesStorageClass": ["X"]},
            },
            {"action": {"type": "AbortIncompleteMultipartUpload"}, "condition": {"age": 7}},
        ]
    },
}


def test_every_kind_of_rule_that_cloud_storage_knows_is_told_apart(
    proxy: FaultProxy, gcs: GCSStore
) -> None:
    answer(proxy, r"GET /storage/v1/b/bkt\?", json.dumps(METADATA))
    rules = gcs.rules()
    assert rules.versioning
    assert rules.soft_delete_days == 7
    assert rules.retention == "a retention policy keeps each object for 2 days"
    assert (rules.retention_hides, rules.locked) == (False, True)
    assert rules.lifecycle is not None
    assert [(rule.name.partition(" (")[0], rule.action) for rule in rules.lifecycle] == [
        ("number 1", "delete"),
        ("number 2", "delete-noncurrent"),
        ("number 3", "delete-noncurrent"),
        ("number 5", "move"),
        ("number 6", "abort-uploads"),
    ]
    assert rules.lifecycle[0].name == "number 1 (Delete: age 30)"
    assert rules.lifecycle[0].prefixes == (ROOT,)
    assert rules.lifecycle[3].only == "a name that ends in .pt and the class X"


def test_a_default_hold_is_a_retention(proxy: FaultProxy, gcs: GCSStore) -> None:
    answer(proxy, r"GET /storage/v1/b/bkt\?", json.dumps({"defaultEventBasedHold": True}))
    assert gcs.rules().retention == "each new object is put under an event-based hold"


def test_metadata_that_may_not_be_read_are_named_with_the_right(
    proxy: FaultProxy, gcs: GCSStore
) -> None:
    told = json.dumps({"error": {"message": "no", "errors": [{"reason": "forbidden"}]}})
    answer(proxy, r"GET /storage/v1/b/bkt\?", told, 403)
    rules = gcs.rules()
    assert (rules.versioning, rules.lifecycle, rules.soft_delete_days) == (None, None, None)
    (unread,) = rules.unread
    assert unread.reason == "403 forbidden"
    assert "storage.buckets.get" in unread.right


# ---- Azure


def test_the_rules_of_a_real_container_are_read(azurite: Azure) -> None:
    service = azurite.service()
    before = service.get_service_properties()["delete_retention_policy"]
    service.set_service_properties(delete_retention_policy=RetentionPolicy(True, 9))
    try:
        store = azurite.store(azurite.container())
        store.put("x", BytesSource(b"x"))
        rules = bucket_rules(store)
    finally:
        service.set_service_properties(delete_retention_policy=before)
    assert rules is not None
    assert rules.provider == "azure"
    assert rules.bucket.startswith(f"{azurite.account}/c-")
    assert rules.soft_delete_days == 9
    assert (rules.versioning, rules.retention) == (False, "")
    assert [each.what for each in rules.unread] == ["lifecycle"]
    assert "management-policy show" in rules.unread[0].right
    assert credentials_of(store) == "the account's key"


def test_a_container_without_a_blob_does_not_tell_of_versions(azurite: Azure) -> None:
    rules = bucket_rules(azurite.store(azurite.container()))
    assert rules is not None
    assert rules.versioning is None
    assert rules.soft_delete_days == 0
    assert [each.what for each in rules.unread] == ["lifecycle", "versioning"]


def test_a_signature_for_the_container_alone_leaves_the_accounts_rules_unread(
    azurite: Azure,
) -> None:
    container = azurite.container()
    environ = {
        "DS_CKPT_AZURE_ENDPOINT": azurite.endpoint,
        "AZURE_STORAGE_SAS_TOKEN": azurite.sas(),  # for containers and objects, not the service
    }
    rules = bucket_rules(open_store(f"az://{container}/run", environ))
    assert rules is not None
    assert rules.soft_delete_days is None
    (unread,) = (each for each in rules.unread if each.what == "soft delete")
    assert unread.reason.startswith("403")
    assert "blobServices/read" in unread.right


@pytest.mark.parametrize(
    ("header", "retention", "hides"),
    [
        ("x-ms-has-legal-hold", "the container is under a legal hold", False),
        ("x-ms-has-immutability-policy", "the container has a policy of immutability", False),
        (
            "x-ms-immutable-storage-with-versioning-enabled",
            "versions in the container can be made immutable",
            True,
        ),
    ],
)
def test_what_makes_a_container_immutable_is_read(
    azurite: Azure, header: str, retention: str, hides: bool
) -> None:
    container = azurite.container()
    port = int(azurite.origin.rpartition(":")[2])
    with FaultProxy(HOST, port) as proxy:
        given = {
            header: "true",
            "ETag": '"0x1"',
            "Last-Modified": "Mon, 30 Nov 2026 00:00:00 GMT",
        }
        swap = Fault(
            rf"GET /{azurite.account}/{container}\?restype=container(?!.*comp=)",
            "swap_response",
            status=200,
            body="",
            headers=given,
            times=None,
        )
        proxy.add(swap)
        store = azurite.through(proxy.url).store(container)
        rules = bucket_rules(store)
        assert proxy.hits(swap) == 1
    assert rules is not None
    assert (rules.retention, rules.retention_hides) == (retention, hides)


# ---- prefixes


@pytest.mark.parametrize(
    ("prefixes", "only", "covers", "touches"),
    [
        (("",), "", True, True),
        (("run/",), "", True, True),
        (("run",), "", True, True),
        (("run/step",), "", False, True),  # some of ours
        (("other/",), "", False, False),
        (("other/", "run/"), "", True, True),
        (("",), "the tag k=v", False, True),
    ],
)
def test_a_rule_covers_a_prefix_or_touches_it(
    prefixes: tuple[str, ...], only: str, covers: bool, touches: bool
) -> None:
    rule = LifecycleRule("r", "delete", "after 1 days", prefixes, only)
    assert (rule.covers(ROOT), rule.touches(ROOT)) == (covers, touches)
