"""The rules of the bucket, and the exact rule to add or remove."""

from __future__ import annotations

import json
import shlex
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from azure.storage.blob import RetentionPolicy

from ds_ckpt_sidecar.doctor import check_store
from ds_ckpt_sidecar.examine.rules import judge
from ds_ckpt_store.stores import open_store
from ds_ckpt_store.stores.rules import BucketRules, LifecycleRule, Unread
from tests.servers import S3
from tests.servers_azure import Azure
from tests.servers_gcs import GCS
from tests.sidecar.doctor.support import (
    matter,
    only,
)


def rules(**facts: Any) -> BucketRules:
    given: dict[str, Any] = {
        "provider": "s3",
        "bucket": "bkt",
        "prefix": "run/",
        "versioning": False,
        "lifecycle": (LifecycleRule("parts", "abort-uploads", "after 3 days"),),
        "raw": ({"ID": "parts"},),
        "soft_delete_days": 0,
    }
    return BucketRules(**{**given, **facts})


def test_rules_that_do_no_harm_are_well() -> None:
    assert [each.severity for each in judge(rules())] == ["ok"]


@pytest.mark.parametrize(
    ("rule", "severity"),
    [
        (LifecycleRule("R", "delete", "after 9 days"), "error"),
        (LifecycleRule("R", "delete", "after 9 days", ("run/.ds_ckpt/",)), "error"),
        (LifecycleRule("R", "delete", "after 9 days", ("ru",)), "error"),
        (LifecycleRule("R", "delete", "after 9 days", ("other/",)), None),
        (LifecycleRule("R", "delete", "after 9 days", ("",), "the tag k=v"), "warning"),
        (LifecycleRule("R", "archive", "to GLACIER after 9 days"), "error"),
        (LifecycleRule("R", "move", "to STANDARD_IA after 9 days"), "warning"),
        (LifecycleRule("R", "delete-noncurrent", "9 days later"), None),
    ],
)
@pytest.mark.parametrize("provider", ["s3", "gcs"])
def test_a_rule_that_takes_checkpoints_away_is_named(
    provider: str, rule: LifecycleRule, severity: str | None
) -> None:
    parts = LifecycleRule("parts", "abort-uploads", "after 3 days")
    found = list(judge(rules(provider=provider, lifecycle=(parts, rule))))
    if severity is None:
        assert [each.severity for each in found] == ["ok"]
        return
    finding = only(found, severity)
    assert "rule R " in finding.sentence
    assert rule.detail in finding.sentence
    assert "remove rule R" in finding.remedy


@pytest.mark.parametrize(
    ("facts", "severity", "words", "remedy"),
    [
        ({"versioning": True}, "warning", "for ever", '"NoncurrentDays": 7'),
        (
            {"provider": "gcs", "versioning": True},
            "warning",
            "for ever",
            '"daysSinceNoncurrentTime": 7, "matchesPrefix": ["run/"]',
        ),
        (
            {"provider": "azure", "bucket": "acc/con", "versioning": True, "lifecycle": None},
            "warning",
            "could not be read",
            '"prefixMatch": ["con/run/"]',
        ),
        ({"lifecycle": ()}, "warning", "unfinished uploads", '"DaysAfterInitiation": 7'),
        (
            {"provider": "gcs", "lifecycle": (), "raw": ()},
            "warning",
            "unfinished uploads",
            'echo \'{"rule": [{"action": {"type": "AbortIncompleteMultipartUpload"}',
        ),
        (
            {"provider": "gcs", "soft_delete_days": 7},
            "warning",
            "7 days",
            "gs://bkt --clear-soft-delete",
        ),
        (
            {"provider": "azure", "bucket": "acc/con", "soft_delete_days": 9, "lifecycle": None},
            "warning",
            "9 days",
            "--account-name acc",
        ),
        (
            {"provider": "gcs", "retention": "a policy"},
            "error",
            "nothing can be deleted",
            "--clear-retention-period",
        ),
        (
            {"provider": "gcs", "retention": "a policy", "locked": True},
            "error",
            "a policy",
            "nobody can take this one away",
        ),
        (
            {"retention": "locked for 3 days", "retention_hides": True},
            "warning",
            "only hides",
            "put-object-lock-configuration --bucket bkt",
        ),
        (
            {"provider": "azure", "bucket": "acc/con", "retention": "a hold", "lifecycle": None},
            "error",
            "a hold",
            "--container-name con",
        ),
    ],
)
def test_what_costs_or_locks_is_told_with_the_exact_rule(
    facts: dict[str, Any], severity: str, words: str, remedy: str
) -> None:
    finding = only(list(judge(rules(**facts))), severity)
    assert words in finding.sentence
    assert remedy in finding.remedy


def test_versions_that_a_rule_removes_are_well() -> None:
    kept = (
        LifecycleRule("parts", "abort-uploads", "after 3 days"),
        LifecycleRule("versions", "delete-noncurrent", "7 days later"),
    )
    assert [each.severity for each in judge(rules(versioning=True, lifecycle=kept))] == ["ok"]


def test_what_could_not_be_read_is_a_note_and_never_an_error() -> None:
    unread = (Unread("lifecycle", "403 AccessDenied", "allow s3:GetLifecycleConfiguration"),)
    (note,) = judge(rules(lifecycle=None, unread=unread))
    assert note.severity == "note"
    assert "could not be read (403 AccessDenied)" in note.sentence
    assert note.remedy == "allow s3:GetLifecycleConfiguration"


def test_the_rules_that_are_to_be_added_heal_a_real_bucket(seaweed: S3, tmp_path: Path) -> None:
    """Both in one document, as each write of the rules replaces them all."""
    bucket, client = seaweed.bucket(), seaweed.client()
    client.put_bucket_versioning(Bucket=bucket, VersioningConfiguration={"Status": "Enabled"})
    store = seaweed.store(bucket)
    found = [each for each in check_store(store) if each.what == f"s3://{bucket}"]
    assert [each.severity for each in found] == ["warning", "warning"]
    echo, _, put = found[0].remedy.partition(" > rules.json && ")
    assert found[1].remedy == found[0].remedy
    document = json.loads(shlex.split(echo)[1])
    assert put.startswith(f"aws s3api put-bucket-lifecycle-configuration --bucket {bucket} ")
    client.put_bucket_lifecycle_configuration(Bucket=bucket, LifecycleConfiguration=document)
    assert matter(check_store(store)) == []


def test_a_rule_of_a_real_bucket_that_deletes_checkpoints_is_an_error(seaweed: S3) -> None:
    bucket = seaweed.bucket()
    expire = {
        "ID": "tidy-up",
        "Status": "Enabled",
        "Filter": {"Prefix": "ru"},
        "Expiration": {"Days": 30},
    }
    seaweed.client().put_bucket_lifecycle_configuration(
        Bucket=bucket, LifecycleConfiguration={"Rules": [expire]}
    )
    error = only(check_store(seaweed.store(bucket)), "error")
    assert "tidy-up" in error.sentence
    assert "after 30 days" in error.sentence


def tell_bucket(gcs: GCS, bucket: str, **metadata: Any) -> None:
    asked = urllib.request.Request(
        f"{gcs.endpoint}/storage/v1/b/{bucket}",
        data=json.dumps(metadata).encode(),
        headers={"Content-Type": "application/json"},
        method="PATCH",
    )
    urllib.request.urlopen(asked, timeout=30).close()


def test_a_bucket_of_cloud_storage_that_keeps_versions_is_told_both_rules(fake_gcs: GCS) -> None:
    bucket = fake_gcs.bucket()
    tell_bucket(fake_gcs, bucket, versioning={"enabled": True})
    store = open_store(f"gs://{bucket}/run", {"DS_CKPT_GCS_ENDPOINT": fake_gcs.endpoint})
    found = [each for each in check_store(store) if each.what == f"gs://{bucket}"]
    assert [each.severity for each in found] == ["warning", "warning"]
    assert "for ever" in found[1].sentence
    echo, _, write = found[1].remedy.partition(" > rules.json && ")
    document = json.loads(shlex.split(echo)[1])
    assert [rule["action"]["type"] for rule in document["rule"]] == [
        "AbortIncompleteMultipartUpload",
        "Delete",
    ]
    assert {str(rule["condition"]["matchesPrefix"]) for rule in document["rule"]} == {"['run/']"}
    assert write == f"gcloud storage buckets update gs://{bucket} --lifecycle-file=rules.json"


def test_a_bucket_of_cloud_storage_that_holds_what_is_new_is_an_error(fake_gcs: GCS) -> None:
    bucket = fake_gcs.bucket()
    store = open_store(f"gs://{bucket}/run", {"DS_CKPT_GCS_ENDPOINT": fake_gcs.endpoint})
    try:
        tell_bucket(fake_gcs, bucket, defaultEventBasedHold=True)
        error = only(check_store(store), "error")
    finally:
        tell_bucket(fake_gcs, bucket, defaultEventBasedHold=False)
    assert error.what == f"gs://{bucket}"
    assert "event-based hold" in error.sentence
    assert "--no-default-event-based-hold" in error.remedy


def test_an_account_of_azure_that_keeps_what_was_deleted_is_told(azurite: Azure) -> None:
    service = azurite.service()
    before = service.get_service_properties()["delete_retention_policy"]
    service.set_service_properties(delete_retention_policy=RetentionPolicy(True, 9))
    try:
        found = check_store(open_store(f"az://{azurite.container()}/run", azurite.environ))
    finally:
        service.set_service_properties(delete_retention_policy=before)
    warning = only(found, "warning")
    assert "stays for 9 days more" in warning.sentence
    assert warning.remedy == (
        "az storage account blob-service-properties update --account-name "
        f"{azurite.account} --resource-group GROUP --enable-delete-retention false"
    )
