"""The rules of a Cloud Storage bucket: all of them stand in its metadata."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

from google.auth.credentials import AnonymousCredentials

from ds_ckpt_store.stores.gcs.answers import AnsweredError
from ds_ckpt_store.stores.gcs.service import Service
from ds_ckpt_store.stores.rules import Action, BucketRules, LifecycleRule, Unread

_DAY = 86400
_MOST = 1 << 20  # bytes of a bucket's metadata
# Conditions that only versions which were replaced or deleted can meet.
_NONCURRENT = ("daysSinceNoncurrentTime", "noncurrentTimeBefore", "numNewerVersions")
# Conditions on a time that somebody must set; nothing of ours has one.
_CUSTOM = ("customTimeBefore", "daysSinceCustomTime")
_FIELDS = "lifecycle,versioning,softDeletePolicy,retentionPolicy,defaultEventBasedHold"
_KINDS = {
    "google.oauth2.service_account": "a service account's key file",
    "google.auth.compute_engine.credentials": (
        "the metadata server (Workload Identity on GKE, or the machine's service account)"
    ),
    "google.auth.identity_pool": "workload identity federation",
    "google.auth.aws": "workload identity federation with AWS",
    "google.oauth2.credentials": "a person's login (gcloud auth application-default login)",
    "google.auth.impersonated_credentials": "an impersonated service account",
}


def read_rules(service: Service, root: str) -> BucketRules:
    """Read the bucket's metadata with one request.

    Args:
        service: of the store.
        root: prefix of the store, with a slash; may be empty.
    """
    query = {"projection": "noAcl", "fields": _FIELDS}
    if service.options.user_project is not None:
        query["userProject"] = service.options.user_project
    with service.asking("rules", "", missing="bucket") as link:
        try:
            path = f"/storage/v1/b/{service.bucket}"
            with contextlib.closing(service.send(link, "GET", path, query=query)) as answer:
                found = json.loads(answer.raw.read(_MOST, decode_content=True))
        except AnsweredError as error:
            if error.answer.status not in (400, 403, 405, 501):
                raise
            reason = f"{error.answer.status} {error.answer.code}".strip()
            unread = Unread(
                "versioning, lifecycle, soft delete and retention",
                reason,
                "grant storage.buckets.get (roles/storage.legacyBucketReader)",
            )
            return BucketRules("gcs", service.bucket, root, unread=(unread,))
        except ValueError as error:
            unread = Unread("its rules", f"the answer is no JSON: {error}", "look at the endpoint")
            return BucketRules("gcs", service.bucket, root, unread=(unread,))
    return _from_metadata(found, service.bucket, root)


def _from_metadata(found: Mapping[str, Any], bucket: str, root: str) -> BucketRules:
    raw = tuple((found.get("lifecycle") or {}).get("rule", ()))
    kept = found.get("retentionPolicy") or {}
    soft = found.get("softDeletePolicy") or {}
    retention = ""
    if int(kept.get("retentionPeriod") or 0):
        days = int(kept["retentionPeriod"]) / _DAY
        retention = f"a retention policy keeps each object for {days:g} days"
    elif found.get("defaultEventBasedHold"):
        retention = "each new object is put under an event-based hold"
    return BucketRules(
        provider="gcs",
        bucket=bucket,
        prefix=root,
        versioning=bool((found.get("versioning") or {}).get("enabled")),
        lifecycle=tuple(each for n, rule in enumerate(raw, 1) for each in _action(n, rule)),
        soft_delete_days=int(soft.get("retentionDurationSeconds") or 0) / _DAY,
        retention=retention,
        locked=bool(kept.get("isLocked")),
        raw=raw,
    )


def _action(number: int, rule: Mapping[str, Any]) -> Iterator[LifecycleRule]:
    action, condition = rule.get("action") or {}, rule.get("condition") or {}
    kind = str(action.get("type", ""))
    told = ", ".join(f"{name} {value}" for name, value in condition.items() if "match" not in name)
    name = f"number {number} ({kind}: {told or 'no condition'})"
    prefixes = tuple(str(each) for each in condition.get("matchesPrefix") or ("",))
    only = []
    if condition.get("matchesSuffix"):
        only.append(f"a name that ends in {' or '.join(condition['matchesSuffix'])}")
    if condition.get("matchesStorageClass"):
        only.append(f"the class {' or '.join(condition['matchesStorageClass'])}")

    def does(what: Action, detail: str) -> LifecycleRule:
        return LifecycleRule(name, what, detail, prefixes, " and ".join(only))

    if kind == "AbortIncompleteMultipartUpload":
        yield does("abort-uploads", f"after {condition.get('age')} days")
    elif any(each in condition for each in _CUSTOM):
        return
    elif kind == "Delete":
        old = any(each in condition for each in _NONCURRENT) or condition.get("isLive") is False
        yield does("delete-noncurrent" if old else "delete", f"({told})")
    elif kind == "SetStorageClass" and condition.get("isLive") is not False:
        yield does("move", f"to {action.get('storageClass')} ({told})")


def describe_credentials(service: Service) -> str:
    """What kind of credentials are in use, and of whom."""
    with service.asking("credentials", "", missing="bucket") as link:
        found = link.session.credentials
    if isinstance(found, AnonymousCredentials):
        return "nowhere: it is asked anonymously"
    kind = _KINDS.get(type(found).__module__, type(found).__name__)
    account = getattr(found, "service_account_email", "") or ""
    return f"{kind}, as {account}" if "@" in account else kind
