"""What a bucket does to objects by itself: versions, lifecycle, soft delete, retention.

A store may have two methods beside the port: ``rules()``, which reads them, and ``credentials()``,
which says what kind of credentials it found. Both are for ``ds-ckpt doctor`` alone; no save depends
on them. A rule that may not be read is left out and named in :attr:`BucketRules.unread`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

from ds_ckpt_store.stores.forwarding import Forwarding
from ds_ckpt_store.stores.port import Store

Provider = Literal["s3", "gcs", "azure"]
Action = Literal["delete", "archive", "move", "delete-noncurrent", "abort-uploads"]


@dataclass(frozen=True)
class LifecycleRule:
    """One thing that a rule does.

    Attributes:
        name: the rule's id, or what it is called by where it has none.
        action: ``delete``: live objects; ``archive``: to where they cannot be read at once;
            ``move``: to a class where they can; ``delete-noncurrent``: versions that were replaced
            or deleted; ``abort-uploads``: unfinished uploads.
        detail: when, and where to.
        prefixes: names that it is for begin with one of these; ``("",)``: all.
        only: what else an object must have, in words; empty if nothing.
    """

    name: str
    action: Action
    detail: str
    prefixes: tuple[str, ...] = ("",)
    only: str = ""

    def covers(self, prefix: str) -> bool:
        """Whether it is for all that begins with a prefix, whatever it is."""
        return not self.only and any(prefix.startswith(each) for each in self.prefixes)

    def touches(self, prefix: str) -> bool:
        """Whether it is for anything that begins with a prefix."""
        return any(each.startswith(prefix) or prefix.startswith(each) for each in self.prefixes)


@dataclass(frozen=True)
class Unread:
    """Something that could not be read.

    Attributes:
        what: the rules, in words.
        reason: what was answered.
        right: what would allow to read them, or how else to look.
    """

    what: str
    reason: str
    right: str


@dataclass(frozen=True)
class BucketRules:
    """What a bucket does to objects by itself, as far as it could be read.

    Attributes:
        provider: whose.
        bucket: its name; a container's is ``account/container``.
        prefix: of the store, with a slash at its end; empty for the whole bucket.
        versioning: whether what is replaced or deleted stays as a version; None: not known.
        lifecycle: None: not known.
        soft_delete_days: how long deleted objects stay; 0: not at all; None: not known.
        retention: why nothing may be deleted or replaced, in words; empty if nothing is known to.
        retention_hides: with that, a delete hides and an overwrite adds a version, and both work.
        locked: nobody can take the retention away.
        unread: what could not be read.
        raw: the lifecycle rules as the provider has them, to be written back with one more.
    """

    provider: Provider
    bucket: str
    prefix: str
    versioning: bool | None = None
    lifecycle: tuple[LifecycleRule, ...] | None = None
    soft_delete_days: float | None = None
    retention: str = ""
    retention_hides: bool = False
    locked: bool = False
    unread: tuple[Unread, ...] = ()
    raw: tuple[Mapping[str, Any], ...] = field(default=(), repr=False)


@runtime_checkable
class HasRules(Protocol):
    """A store whose bucket has rules."""

    def rules(self) -> BucketRules:
        """Read them.

        Raises:
            StoreError: none of them could be asked for.
        """


@runtime_checkable
class HasCredentials(Protocol):
    """A store that signs what it asks."""

    def credentials(self) -> str:
        """What kind of credentials it has found, and where; never a secret.

        Raises:
            StoreError: none were found.
        """


def bucket_rules(store: Store) -> BucketRules | None:
    """The rules of a store's bucket; None if this kind of store has none.

    Raises:
        StoreError: none of them could be asked for.
    """
    inner = _inner(store)
    return inner.rules() if isinstance(inner, HasRules) else None


def credentials_of(store: Store) -> str:
    """What kind of credentials a store has found; empty if this kind of store needs none.

    Raises:
        StoreError: none were found.
    """
    inner = _inner(store)
    return inner.credentials() if isinstance(inner, HasCredentials) else ""


def _inner(store: Store) -> Store:
    while isinstance(store, Forwarding):
        store = store.store
    return store
