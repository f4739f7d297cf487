"""The rules of an S3 bucket: versioning, lifecycle, object lock."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from botocore.exceptions import ClientError

from ds_ckpt_store.stores.rules import Action, BucketRules, LifecycleRule, Unread
from ds_ckpt_store.stores.s3.clients import Clients
from ds_ckpt_store.stores.s3.failures import Failures

_ARCHIVES = ("GLACIER", "DEEP_ARCHIVE")


class Reader:
    """Reads the rules of one bucket.

    Args:
        clients: of the store.
        failures: of the store.
        bucket: its name.
        root: prefix of the store, with a slash; may be empty.
    """

    def __init__(self, clients: Clients, failures: Failures, bucket: str, root: str) -> None:
        self._clients = clients
        self._failures = failures
        self._bucket = bucket
        self._root = root
        self._unread: list[Unread] = []

    def read(self) -> BucketRules:
        """Three requests, each of which may be refused."""
        versioning = self._ask("versioning", "get_bucket_versioning", "s3:GetBucketVersioning")
        lifecycle = self._ask(
            "lifecycle", "get_bucket_lifecycle_configuration", "s3:GetLifecycleConfiguration"
        )
        lock = self._ask(
            "object lock",
            "get_object_lock_configuration",
            "s3:GetBucketObjectLockConfiguration",
        )
        raw = tuple(lifecycle.get("Rules", ())) if lifecycle is not None else ()
        kept = (lock or {}).get("ObjectLockConfiguration", {}).get("Rule", {})
        kept = kept.get("DefaultRetention", {})
        return BucketRules(
            provider="s3",
            bucket=self._bucket,
            prefix=self._root,
            versioning=None if versioning is None else versioning.get("Status") == "Enabled",
            lifecycle=None
            if lifecycle is None
            else tuple(each for rule in raw for each in _actions(rule)),
            soft_delete_days=0,
            retention=_retention(kept),
            retention_hides=True,
            locked=kept.get("Mode") == "COMPLIANCE",
            unread=tuple(self._unread),
            raw=raw,
        )

    def _ask(self, what: str, call: str, right: str) -> Mapping[str, Any] | None:
        """One answer; empty if the bucket has none of it, None if it cannot be read."""
        client = self._clients.get()
        with self._failures.turned("rules", "", client, write=False):
            try:
                answer: Mapping[str, Any] = getattr(client, call)(Bucket=self._bucket)
            except ClientError as error:
                code = str(error.response.get("Error", {}).get("Code", ""))
                status = int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
                if status == 404 and code != "NoSuchBucket":
                    return {}
                if status not in (400, 403, 405, 501):
                    raise
                self._unread.append(Unread(what, f"{status} {code}".strip(), f"allow {right}"))
                return None
        return answer


def _retention(kept: Mapping[str, Any]) -> str:
    if not kept:
        return ""
    days = f"{kept['Years']} years" if kept.get("Years") else f"{kept.get('Days')} days"
    return f"each version is locked for {days} ({str(kept.get('Mode', '')).lower()})"


def _actions(rule: Mapping[str, Any]) -> Iterator[LifecycleRule]:
    if rule.get("Status") != "Enabled":
        return
    name = str(rule.get("ID") or "without an id")
    prefix, only = _filter(rule)

    def does(action: Action, detail: str) -> LifecycleRule:
        return LifecycleRule(name, action, detail, (prefix,), only)

    ends = rule.get("Expiration", {})
    if ends.get("Days") is not None or ends.get("Date") is not None:
        yield does("delete", _when(ends))
    for moves in rule.get("Transitions", ()):
        kind = str(moves.get("StorageClass", ""))
        yield does("archive" if kind in _ARCHIVES else "move", f"to {kind} {_when(moves)}")
    old = rule.get("NoncurrentVersionExpiration", {})
    if old:
        yield does("delete-noncurrent", f"{old.get('NoncurrentDays')} days later")
    parts = rule.get("AbortIncompleteMultipartUpload", {})
    if parts:
        yield does("abort-uploads", f"after {parts.get('DaysAfterInitiation')} days")


def _when(ends: Mapping[str, Any]) -> str:
    if ends.get("Date") is not None:
        return f"on {ends['Date']:%Y-%m-%d}"
    return f"after {ends.get('Days')} days"


def _filter(rule: Mapping[str, Any]) -> tuple[str, str]:
    """The prefix that a rule is for, and what else it asks for, in words."""
    given = rule.get("Filter") or {}
    both = {**given, **(given.get("And") or {})}
    tags = [*both.get("Tags", ()), *([both["Tag"]] if both.get("Tag") else [])]
    only = [f"the tag {tag.get('Key')}={tag.get('Value')}" for tag in tags]
    if both.get("ObjectSizeGreaterThan") is not None:
        only.append(f"more than {both['ObjectSizeGreaterThan']} bytes")
    if both.get("ObjectSizeLessThan") is not None:
        only.append(f"less than {both['ObjectSizeLessThan']} bytes")
    return str(both.get("Prefix") or rule.get("Prefix") or ""), " and ".join(only)
