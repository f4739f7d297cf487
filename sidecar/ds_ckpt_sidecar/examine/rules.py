"""What the rules of a bucket do to checkpoints: deleted, archived, kept too long, kept for ever."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from ds_ckpt_sidecar.examine.finding import Finding
from ds_ckpt_store.stores.rules import BucketRules, LifecycleRule

ABORT_DAYS = 7
NONCURRENT_DAYS = 7


def judge(rules: BucketRules) -> Iterator[Finding]:
    """What a person should know of them, and the exact rule to add or remove."""
    what = _URLS[rules.provider].format(bucket=rules.bucket)
    found = [
        *_lifecycle(rules, what),
        *_uploads(rules, what),
        *_versions(rules, what),
        *_soft_delete(rules, what),
        *_retention(rules, what),
    ]
    yield from found
    for unread in rules.unread:
        yield Finding(
            "note", what, f"{unread.what} could not be read ({unread.reason})", unread.right
        )
    if not found and not rules.unread:
        yield Finding("ok", what, "no rule of it deletes, moves, keeps or locks checkpoints")


def _under(rules: BucketRules) -> str:
    return f"objects under {rules.prefix}" if rules.prefix else "all objects"


def _lifecycle(rules: BucketRules, what: str) -> Iterator[Finding]:
    for rule in rules.lifecycle or ():
        if not rule.touches(rules.prefix):
            continue
        if rule.action == "delete":
            yield Finding(
                "warning" if rule.only else "error",
                what,
                f"lifecycle rule {rule.name} deletes {_which(rules, rule)} {rule.detail}: "
                "committed checkpoints vanish in part, and their records say that they are whole",
                _take_away(rules, rule),
            )
        elif rule.action == "archive":
            yield Finding(
                "warning" if rule.only else "error",
                what,
                f"lifecycle rule {rule.name} moves {_which(rules, rule)} {rule.detail}, where "
                "nothing can be read before it is brought back: neither a checkpoint to be "
                "restored, nor the records that every start reads",
                _take_away(rules, rule),
            )
        elif rule.action == "move":
            yield Finding(
                "warning",
                what,
                f"lifecycle rule {rule.name} moves {_which(rules, rule)} {rule.detail}: all can be "
                "read there, but reading and early deletion cost extra, and small objects are "
                "billed as larger ones",
                _take_away(rules, rule),
            )


def _which(rules: BucketRules, rule: LifecycleRule) -> str:
    return f"{_under(rules)} that have {rule.only}" if rule.only else _under(rules)


def _uploads(rules: BucketRules, what: str) -> Iterator[Finding]:
    if _lacks_abort(rules):
        yield Finding(
            "warning",
            what,
            "no lifecycle rule drops unfinished uploads: what a pod that is gone had begun costs "
            "as much as what it holds, until `ds-ckpt gc` or somebody else drops it",
            _add(rules, _abort_rule(rules)),
        )


def _versions(rules: BucketRules, what: str) -> Iterator[Finding]:
    if not rules.versioning:
        return
    if not _lacks_noncurrent(rules):
        yield Finding("ok", what, "versions are kept, and a lifecycle rule removes the old ones")
        return
    unknown = " (its lifecycle rules could not be read)" if rules.lifecycle is None else ""
    yield Finding(
        "warning",
        what,
        "versioning is on, and no lifecycle rule removes old versions: each checkpoint that "
        f"retention deletes stays, and costs, for ever{unknown}",
        _add(rules, _noncurrent_rule(rules)),
    )


def _soft_delete(rules: BucketRules, what: str) -> Iterator[Finding]:
    days = rules.soft_delete_days
    if days:
        yield Finding(
            "warning",
            what,
            f"soft delete is on: what retention deletes, and each lease that is written over, "
            f"stays for {days:g} days more, and costs",
            _SOFT_DELETE_OFF[rules.provider].format(**_names(rules)),
        )


def _retention(rules: BucketRules, what: str) -> Iterator[Finding]:
    if not rules.retention:
        return
    if rules.retention_hides:
        yield Finding(
            "warning",
            what,
            f"{rules.retention}: a delete only hides, so that nothing that retention deletes frees "
            "anything before that, and each small object that is written over stays too",
            _retention_off(rules),
        )
    else:
        yield Finding(
            "error",
            what,
            f"{rules.retention}: nothing can be deleted, and no lease, record or pointer written "
            "over, which every save needs",
            _retention_off(rules),
        )


# ---- remedies, as each provider wants them

_URLS = {"s3": "s3://{bucket}", "gcs": "gs://{bucket}", "azure": "az://{bucket}"}
_SOFT_DELETE_OFF = {
    "s3": "",
    "gcs": "gcloud storage buckets update gs://{bucket} --clear-soft-delete",
    "azure": "az storage account blob-service-properties update --account-name {account} "
    "--resource-group GROUP --enable-delete-retention false",
}
_RETENTION_OFF = {
    "s3": "aws s3api put-object-lock-configuration --bucket {bucket} --object-lock-configuration "
    '\'{{"ObjectLockEnabled": "Enabled"}}\', and lock shards alone by DS_CKPT_S3_OBJECT_LOCK',
    "gcs": "gcloud storage buckets update gs://{bucket} --clear-retention-period "
    "--no-default-event-based-hold",
    "azure": "az storage container legal-hold show, az storage container immutability-policy show, "
    "each with --account-name {account} --container-name {container}; then clear or delete what "
    "is there",
}


def _names(rules: BucketRules) -> dict[str, str]:
    account, _, container = rules.bucket.partition("/")
    return {"bucket": rules.bucket, "account": account, "container": container}


def _retention_off(rules: BucketRules) -> str:
    another = "use a bucket without it"
    if rules.locked:
        return f"{another}: nobody can take this one away"
    return f"{another}, or: {_RETENTION_OFF[rules.provider].format(**_names(rules))}"


def _abort_rule(rules: BucketRules) -> Mapping[str, Any]:
    if rules.provider == "s3":
        return {
            "ID": "ds-ckpt-abort",
            "Status": "Enabled",
            "Filter": {"Prefix": rules.prefix},
            "AbortIncompleteMultipartUpload": {"DaysAfterInitiation": ABORT_DAYS},
        }
    return {
        "action": {"type": "AbortIncompleteMultipartUpload"},
        "condition": {"age": ABORT_DAYS, **_matching(rules)},
    }


def _noncurrent_rule(rules: BucketRules) -> Mapping[str, Any]:
    if rules.provider == "s3":
        return {
            "ID": "ds-ckpt-noncurrent",
            "Status": "Enabled",
            "Filter": {"Prefix": rules.prefix},
            "NoncurrentVersionExpiration": {"NoncurrentDays": NONCURRENT_DAYS},
            "Expiration": {"ExpiredObjectDeleteMarker": True},
        }
    if rules.provider == "gcs":
        return {
            "action": {"type": "Delete"},
            "condition": {"daysSinceNoncurrentTime": NONCURRENT_DAYS, **_matching(rules)},
        }
    return {
        "enabled": True,
        "name": "ds-ckpt-versions",
        "type": "Lifecycle",
        "definition": {
            "actions": {"version": {"delete": {"daysAfterCreationGreaterThan": NONCURRENT_DAYS}}},
            "filters": {
                "blobTypes": ["blockBlob"],
                "prefixMatch": [f"{_names(rules)['container']}/{rules.prefix}"],
            },
        },
    }


def _matching(rules: BucketRules) -> Mapping[str, Any]:
    return {"matchesPrefix": [rules.prefix]} if rules.prefix else {}


def _write(rules: BucketRules) -> tuple[str, str, str]:
    """How the rules are read, and written back; and where in that document they stand."""
    bucket = rules.bucket
    if rules.provider == "s3":
        return (
            f"aws s3api get-bucket-lifecycle-configuration --bucket {bucket} > rules.json",
            f"aws s3api put-bucket-lifecycle-configuration --bucket {bucket} "
            "--lifecycle-configuration file://rules.json",
            '"Rules"',
        )
    if rules.provider == "gcs":
        return (
            f"gcloud storage buckets describe gs://{bucket} --raw --format='json(lifecycle)' "
            "> rules.json",
            f"gcloud storage buckets update gs://{bucket} --lifecycle-file=rules.json",
            '"rule"',
        )
    account = f"--account-name {_names(rules)['account']} --resource-group GROUP"
    return (
        f"az storage account management-policy show {account} --query policy > rules.json",
        f"az storage account management-policy create {account} --policy @rules.json",
        '"rules"',
    )


def _lacks_abort(rules: BucketRules) -> bool:
    """Azure drops blocks of unfinished uploads by itself, after a week."""
    return (
        rules.lifecycle is not None
        and rules.provider != "azure"
        and not any(
            rule.action == "abort-uploads" and rule.covers(rules.prefix) for rule in rules.lifecycle
        )
    )


def _lacks_noncurrent(rules: BucketRules) -> bool:
    return bool(rules.versioning) and not any(
        rule.action == "delete-noncurrent" and rule.covers(rules.prefix)
        for rule in rules.lifecycle or ()
    )


def _add(rules: BucketRules, rule: Mapping[str, Any]) -> str:
    """The exact rule, and how to add it to those that are there: they are written as a whole.

    Where there are none, what is written holds all that is lacking, so that one command does it.
    """
    read, write, where = _write(rules)
    if rules.lifecycle is None or rules.raw:
        return f"{read}; add {json.dumps(rule)} to {where} in it; {write}"
    lacking = [_abort_rule(rules)] if _lacks_abort(rules) else []
    lacking += [_noncurrent_rule(rules)] if _lacks_noncurrent(rules) else []
    name = "Rules" if rules.provider == "s3" else "rule"
    return f"echo '{json.dumps({name: lacking})}' > rules.json && {write}"


def _take_away(rules: BucketRules, rule: LifecycleRule) -> str:
    read, write, where = _write(rules)
    return (
        f"use a prefix or a bucket that it is not for, or: {read}; remove rule {rule.name} from "
        f"{where} in it, or limit it to other prefixes; {write}. To keep fewer checkpoints, set "
        "DS_CKPT_KEEP_LAST"
    )
