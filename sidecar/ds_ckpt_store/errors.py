"""The error tree of the project, in one place.

::

    CkptError
    |-- InputError                 what was handed in is wrong; trying again does not help
    |   |-- ManifestError          a node manifest breaks a rule: the save is quarantined
    |   |-- UnknownSchemaError     written by a newer version: kept and reported
    |   |-- TagError               a tag that cannot become a folder
    |   `-- SettingsError          a setting, URL or option that cannot work
    |-- MissingExtraError          a library is not installed: names the extra
    |-- ShardError                 a local shard cannot be uploaded
    |   |-- ShardChangedError      its bytes are no longer those of the manifest: superseded
    |   `-- ShardUnreadableError   permissions, I/O error: may heal
    |-- StoreError                 an operation on the store failed: operation, key, answer
    |   |-- NotFoundError          no such object, upload or bucket key
    |   |-- PreconditionError      a conditional write lost: somebody else wrote
    |   |-- CorruptionError        the store refused the bytes, or holds other bytes
    |   |-- TransientError         may heal by itself: retry
    |   |   |-- ThrottledError     the store asks for less: retry slower
    |   |   |-- ExpiredError       credentials expired: they are taken anew for the next call
    |   |   `-- AmbiguousError     the write may have been applied, or may be applied later
    |   |-- AccessError            credentials missing, wrong, expired, or not allowed
    |   |   `-- IdentityError      missing, wrong or expired: the store does not know who asks
    |   |       `-- SkewedClockError  a signature of another time: this machine's clock is wrong
    |   `-- RefusedError           the store cannot do this at all (no bucket, bad request)
    |-- OwnershipError             another run holds the prefix
    |-- WeakStoreError             the store lacks what the protocol needs
    |-- NoRoomError                the volume has too little room; nothing was begun
    |-- DamagedError               a committed checkpoint does not match its record
    |-- NothingCommittedError      there is no committed checkpoint to take
    |-- KeptError                  a checkpoint that must stay was to be deleted
    |-- PausedError                work was asked to stop and can be continued
    `-- DemoError                  the demo did not show what it should

An error says what was being done, to what, what was answered, and what happens next or what to
do. Whoever catches one decides by class, never by text.
"""

from __future__ import annotations

import re

# Headers, up to the end of their line, and parameters of a URL: a server, or a gateway before it,
# may put the request into its answer.
_SECRETS = re.compile(
    r"(?i)\b(authorization|[\w-]*security-token|[\w-]*authorization-token)(['\"]?\s*[:=]\s*)"
    r"[^\r\n<&]+"
    r"|\b(sig|signature|x-amz-signature|x-goog-signature)(=)[^&\s'\"<]+"
)


class CkptError(Exception):
    """Root of every error that this project raises on purpose."""


class InputError(CkptError):
    """What was handed in is wrong; trying again does not help."""


class ManifestError(InputError):
    """A node manifest breaks a rule of the hand-off."""


class UnknownSchemaError(InputError):
    """A document was written by a newer version than this one."""


class TagError(InputError):
    """A tag cannot become a folder in the store."""


class SettingsError(InputError):
    """A setting, URL or option cannot work."""


class MissingExtraError(CkptError):
    """A library is not installed.

    Args:
        what: what needs it, for the message.
        extra: name of the extra of the distribution that brings it.
    """

    def __init__(self, what: str, extra: str) -> None:
        super().__init__(f"{what} needs an extra: pip install 'ds-ckpt-sidecar[{extra}]'")
        self.extra = extra


class ShardError(CkptError):
    """A local shard cannot be uploaded."""


class ShardChangedError(ShardError):
    """A shard's bytes are no longer those that its manifest names."""


class ShardUnreadableError(ShardError):
    """A shard cannot be opened or read; may heal when the cause is removed."""


class StoreError(CkptError):
    """An operation on the store failed.

    Args:
        operation: the port's method, e.g. ``put``.
        key: the key it was for, relative to the store's prefix.
        answer: what the store or the SDK said; credentials in it are left out.
    """

    def __init__(self, operation: str, key: str, answer: str) -> None:
        answer = _SECRETS.sub(
            lambda found: f"{found[1] or found[3]}{found[2] or found[4]}...", answer
        )
        super().__init__(f"{operation} {key!r}: {answer}")
        self.operation = operation
        self.key = key
        self.answer = answer


class NotFoundError(StoreError):
    """There is no such object, or no such upload."""


class PreconditionError(StoreError):
    """A conditional write found another state than it asked for."""


class CorruptionError(StoreError):
    """The store refused the bytes for their checksum, or holds other bytes than it should."""


class TransientError(StoreError):
    """May heal by itself: connection lost, 5xx, timeout of a read."""


class ThrottledError(TransientError):
    """The store asks for fewer requests (503 SlowDown, 429)."""


class ExpiredError(TransientError):
    """The credentials have expired; the store takes them anew before its next call."""


class AmbiguousError(TransientError):
    """A write whose answer was lost: it may have been applied, or may be applied later."""


class AccessError(StoreError):
    """Credentials are missing, wrong, expired, or do not allow the operation."""


class IdentityError(AccessError):
    """The store does not know who asks: credentials are missing, wrong or expired."""


class SkewedClockError(IdentityError):
    """The store refuses requests that are signed with the time of this machine's clock."""


class RefusedError(StoreError):
    """The store cannot do this: no such bucket or folder, bad request, unsupported operation."""


class OwnershipError(CkptError):
    """Another run holds the prefix, or a newer attempt of this run has taken over."""


class WeakStoreError(CkptError):
    """The store lacks something that the protocol needs."""


class NoRoomError(CkptError):
    """The volume has too little room for what was asked; nothing was begun."""


class DamagedError(CkptError):
    """A committed checkpoint does not match its record.

    Args:
        message: what was found.
        objects: keys of the objects that are missing or differ.
    """

    def __init__(self, message: str, objects: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.objects = objects


class NothingCommittedError(CkptError):
    """There is no committed checkpoint under this prefix, or none with this tag."""


class KeptError(CkptError):
    """A checkpoint was to be deleted and must stay: it is pinned, held, the newest or the last."""


class PausedError(CkptError):
    """Work was asked to stop; what is done is kept, and a later call continues."""


class DemoError(CkptError):
    """The demo did not show what it should: a process of it failed, or nothing was loaded."""
