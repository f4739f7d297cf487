"""What the error answers of an S3 mean, by code and status (and never by provider).

The codes are those of AWS; other servers use the same ones, or none at all for a HEAD, where the
status decides. A remedy says what a person can do.
"""

from __future__ import annotations

from ds_ckpt_store.errors import (
    AccessError,
    AmbiguousError,
    CorruptionError,
    ExpiredError,
    IdentityError,
    NotFoundError,
    PreconditionError,
    RefusedError,
    SkewedClockError,
    StoreError,
    ThrottledError,
    TransientError,
)

_EXPIRED = ("ExpiredToken", "ExpiredTokenException", "RequestExpired", "TokenRefreshRequired")
_EXPIRED_REMEDY = (
    "the credentials have expired; they are looked for anew before each try: renew them where they "
    "come from (variables, the file of credentials, the role or its token)"
)
# Answers after which other credentials may be there: whoever set the wrong ones may correct them.
RENEWED = ("InvalidAccessKeyId", "InvalidToken", "SignatureDoesNotMatch")
REMEDIES = {
    **dict.fromkeys(_EXPIRED, _EXPIRED_REMEDY),
    "NoCredentials": "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or give the pod a role",
    "InvalidAccessKeyId": "check AWS_ACCESS_KEY_ID and the endpoint",
    "SignatureDoesNotMatch": "check AWS_SECRET_ACCESS_KEY and the region",
    "InvalidToken": "renew the credentials",
    "RequestTimeTooSkewed": "set this node's clock (NTP)",
    "InvalidObjectState": "the object is archived: restore it in S3 first (s3:RestoreObject)",
    "AccessDenied": (
        "allow s3:GetObject, PutObject, DeleteObject, ListBucket, AbortMultipartUpload, "
        "ListMultipartUploadParts and ListBucketMultipartUploads on this bucket and prefix"
    ),
}
_BAD_BYTES = (
    "BadDigest",
    "InvalidDigest",
    "XAmzContentChecksumMismatch",
    "XAmzContentSHA256Mismatch",
    "InvalidPart",
    "InvalidPartOrder",
    "InvalidRange",
)
_THROTTLED = (
    "SlowDown",
    "SlowDownRead",
    "SlowDownWrite",
    "ServiceUnavailable",
    "Throttling",
    "ThrottlingException",
    "RequestLimitExceeded",
    "RequestThrottled",
    "TooManyRequests",
)
_NOT_APPLIED = ("RequestTimeout", "IncompleteBody")


def kind_of(code: str, status: int, write: bool) -> type[StoreError]:
    """Class of the error that an answer stands for."""
    if code in _EXPIRED:
        return ExpiredError
    if code in ("InvalidObjectState", "NoSuchBucket"):
        return RefusedError
    if code == "RequestTimeTooSkewed":
        return SkewedClockError
    if code in RENEWED or status == 401:
        return IdentityError
    if code in REMEDIES:
        return AccessError
    if code in _BAD_BYTES or status == 416:
        return CorruptionError
    if status == 412 or code == "PreconditionFailed":
        return PreconditionError
    if status == 404:
        return NotFoundError
    if code in _THROTTLED or status == 429:
        return ThrottledError
    if code in _NOT_APPLIED or status == 408:
        return TransientError
    if status == 403:
        return AccessError
    if status == 409 or (status >= 500 and status not in (501, 505)):
        return AmbiguousError if write else TransientError
    return RefusedError
