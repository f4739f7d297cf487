"""The rules of a container, as far as the data plane tells them.

Lifecycle management and versioning are settings of the account that only the management plane
shows, for which a sidecar has no credentials. That versions are kept shows in any blob.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import TypeVar

from ds_ckpt_store.errors import AccessError, CorruptionError, NotFoundError, RefusedError
from ds_ckpt_store.stores.azure.calls import Calls
from ds_ckpt_store.stores.azure.options import AzureOptions
from ds_ckpt_store.stores.rules import BucketRules, Unread

T = TypeVar("T")
_MANAGED = "is told by the management plane alone, for which a sidecar has no credentials"
_LOOKED_AT = 20


class Reader:
    """Reads the rules of one container.

    Args:
        options: where it is.
        calls: of the store.
    """

    def __init__(self, options: AzureOptions, calls: Calls) -> None:
        self._options = options
        self._calls = calls
        self._root = options.prefix + "/" if options.prefix else ""
        self._unread: list[Unread] = []

    def read(self) -> BucketRules:
        """Three requests, each of which may be refused."""
        account = self._options.account or "ACCOUNT"
        retention, hides = self._retention()
        versioning = self._versioning()
        show = f"--account-name {account} --resource-group GROUP"
        self._unread.append(
            Unread(
                "lifecycle",
                f"the account's policy {_MANAGED}",
                f"look yourself: az storage account management-policy show {show}",
            )
        )
        if versioning is None:
            self._unread.append(
                Unread(
                    "versioning",
                    f"nothing is stored that would show it, and it {_MANAGED}",
                    f"look yourself: az storage account blob-service-properties show {show}",
                )
            )
        return BucketRules(
            provider="azure",
            bucket=f"{account}/{self._options.container}",
            prefix=self._root,
            versioning=versioning,
            soft_delete_days=self._soft_delete(),
            retention=retention,
            retention_hides=hides,
            unread=tuple(self._unread),
        )

    def _ask(self, what: str, right: str, call: Callable[[], T]) -> T | None:
        try:
            with self._calls.errors("rules", ""):
                return call()
        except (AccessError, RefusedError, NotFoundError, CorruptionError) as error:
            reason = error.answer.partition(" (request")[0]
            self._unread.append(Unread(what, reason, right))
            return None

    def _soft_delete(self) -> float | None:
        def ask() -> float:
            with self._calls.service() as service:
                policy = service.get_service_properties()["delete_retention_policy"]
            return float(policy.days or 0) if policy is not None and policy.enabled else 0.0

        return self._ask(
            "soft delete",
            "allow Microsoft.Storage/storageAccounts/blobServices/read, or a shared access "
            "signature of the account for the service (ss=b, srt=s, sp=r)",
            ask,
        )

    def _retention(self) -> tuple[str, bool]:
        found = self._ask(
            "legal hold and immutability",
            "allow Microsoft.Storage/storageAccounts/blobServices/containers/read, or a signature "
            "with the permission r on the container",
            self._calls.container.get_container_properties,
        )
        if found is None:
            return "", False
        if found.has_legal_hold:
            return "the container is under a legal hold", False
        if found.has_immutability_policy:
            return "the container has a policy of immutability", False
        if found.immutable_storage_with_versioning_enabled:
            return "versions in the container can be made immutable", True
        return "", False

    def _versioning(self) -> bool | None:
        """Whether blobs have versions; None if there is none to look at."""

        def ask() -> bool | None:
            listed = self._calls.container.list_blobs(
                name_starts_with=self._root, include=["versions"], results_per_page=_LOOKED_AT
            )
            for blob in itertools.islice(listed, _LOOKED_AT):
                return bool(blob.version_id)
            return None

        return self._ask("versioning", "allow to list blobs and versions", ask)
