"""What the error answers of Azure's blob service mean, by code and status.

The codes are those of the REST API's documentation; a proxy in between may answer with none, and
then the status decides. A remedy says what a person can do.
"""

from __future__ import annotations

from ds_ckpt_store.errors import (
    AccessError,
    AmbiguousError,
    CorruptionError,
    IdentityError,
    NotFoundError,
    PreconditionError,
    RefusedError,
    StoreError,
    ThrottledError,
    TransientError,
)

NO_RIGHT = (
    "give the identity the role Storage Blob Data Contributor on this container; a shared access "
    "signature needs the permissions r, a, c, w, d and l, and no address or protocol that "
    "excludes us"
)
WHO_ARE_WE = (
    "set AZURE_STORAGE_CONNECTION_STRING, DS_CKPT_AZURE_SAS_FILE, AZURE_STORAGE_SAS_TOKEN or "
    "AZURE_STORAGE_KEY, or give the pod a managed or workload identity"
)
REMEDIES = {
    "AuthenticationFailed": "check the account's name and key, or the shared access signature, "
    "and this machine's clock",
    "InvalidAuthenticationInfo": "check the identity's tenant and this machine's clock",
    "NoAuthenticationInformation": WHO_ARE_WE,
    "KeyBasedAuthenticationNotPermitted": "the account takes no keys: use a managed or workload "
    "identity",
    "AuthorizationFailure": NO_RIGHT + "; or the account's firewall does not let us in",
    "AccountIsDisabled": "enable the storage account",
    "LeaseIdMissing": "somebody holds a lease on the blob: end it, or choose another prefix",
    "BlobArchived": "move the blob out of the Archive tier first",
    "BlobImmutableDueToPolicy": "the container has a policy of immutability",
    "InvalidBlobOrBlock": "another program has blocks of another kind under this name: choose "
    "another prefix",
}
_BAD_BYTES = ("Crc64Mismatch", "Md5Mismatch", "InvalidBlockList", "InvalidRange")
_UNKNOWN = ("AuthenticationFailed", "InvalidAuthenticationInfo", "NoAuthenticationInformation")
_NO_ACCESS = (
    "KeyBasedAuthenticationNotPermitted",
    "AccountIsDisabled",
)
_LOST = ("BlobAlreadyExists", "ConditionNotMet", "TargetConditionNotMet", "BlobOverwritten")
_REFUSED = (
    "BlobArchived",
    "BlobBeingRehydrated",
    "BlobImmutableDueToPolicy",
    "ContainerBeingDeleted",
    "ContainerDisabled",
    "ContainerNotFound",
    "FeatureNotSupported",
    "InvalidBlobType",
    "PathConflict",
    "PathAlreadyExists",
    "PublicAccessNotPermitted",
    "SnapshotsPresent",
)
_THROTTLED = (
    "ServerBusy",
    "TooManyRequests",
    "IngressExceedsAccountLimit",
    "EgressExceedsAccountLimit",
    "OperationsPerSecondOverAccountLimit",
)


def kind_of(code: str, status: int, write: bool) -> type[StoreError]:
    """Class of the error that an answer stands for."""
    if code in _UNKNOWN or status == 401:
        return IdentityError
    if code in _NO_ACCESS:
        return AccessError
    if code in _BAD_BYTES or status == 416:
        return CorruptionError
    if code in _LOST:
        return PreconditionError
    if code in _REFUSED or code.startswith("LeaseId"):
        return RefusedError
    if status == 412:
        return PreconditionError
    if status == 404:
        return NotFoundError
    if code in _THROTTLED or status == 429:
        return ThrottledError
    if status == 408:
        return TransientError
    if status == 403:
        return AccessError
    if status == 409 or (status >= 500 and status not in (501, 505)):
        return AmbiguousError if write else TransientError
    return RefusedError
