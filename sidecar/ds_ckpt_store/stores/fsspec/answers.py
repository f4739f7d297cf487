"""What the errors of file systems mean. There are as many kinds as there are libraries.

Decided by class, by ``errno`` and by the status of an HTTP answer, of the error or of one that it
was made from. Classes of libraries that may not be installed are known by their full names.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import errno
import ftplib
import ssl
from collections.abc import Iterator

from ds_ckpt_store.errors import (
    AccessError,
    AmbiguousError,
    CkptError,
    IdentityError,
    NotFoundError,
    RefusedError,
    StoreError,
    ThrottledError,
    TransientError,
)

_FULL = (errno.ENOSPC, errno.EDQUOT)
_DENIED = (errno.EACCES, errno.EPERM, errno.EROFS)
_NO_OBJECT = (FileNotFoundError, NotADirectoryError, IsADirectoryError)
_LOST = (
    ConnectionError,
    TimeoutError,
    asyncio.TimeoutError,
    concurrent.futures.TimeoutError,
    EOFError,
    ssl.SSLError,
)
# Connections that broke, by the full name of a class or of one of its bases.
_LOST_NAMES = {
    "aiohttp.client_exceptions.ClientConnectionError",
    "aiohttp.client_exceptions.ClientPayloadError",
    "azure.core.exceptions.ServiceRequestError",
    "azure.core.exceptions.ServiceResponseError",
    "azure.core.exceptions.IncompleteReadError",
    "botocore.exceptions.HTTPClientError",
    "httpcore.NetworkError",
    "httpcore.TimeoutException",
    "httpx.TransportError",
    "oci.exceptions.RequestException",
    "paramiko.ssh_exception.SSHException",
    "requests.exceptions.ConnectionError",
    "requests.exceptions.Timeout",
    "requests.exceptions.ChunkedEncodingError",
    "urllib3.exceptions.HTTPError",
    "smbprotocol.exceptions.SMBConnectionClosed",
}
_IDENTITY_NAMES = {
    "azure.core.exceptions.ClientAuthenticationError",
    "botocore.exceptions.NoCredentialsError",
    "google.auth.exceptions.GoogleAuthError",
    "paramiko.ssh_exception.AuthenticationException",
    "paramiko.ssh_exception.BadHostKeyException",
}
_LOGIN = "check the name and the password or key in DS_CKPT_FSSPEC_OPTIONS, and its rights there"


def translate(
    operation: str, key: str, error: BaseException, text: str, *, write: bool
) -> StoreError:
    """The error of ours for one of a file system.

    Args:
        operation: the port's method.
        key: the key it was for.
        error: what the file system raised.
        text: what it says, with nothing secret in it.
        write: whether the call may have changed something.
    """
    kind = kind_of(error, write=write)
    if issubclass(kind, AccessError):
        text = f"{text}; {_LOGIN}"
    return kind(operation, key, text)


def kind_of(error: BaseException, *, write: bool = False) -> type[StoreError]:
    """Which error of ours it is; the first of the chain that tells decides."""
    lost = AmbiguousError if write else TransientError
    chain = list(_chain(error))
    # Some libraries say "no such file" of whatever failed: look at what they made that from.
    for each in chain[1:]:
        if isinstance(each, (ftplib.error_temp, *_LOST)):
            return lost
    for each in chain:
        found = _kind_of_one(each, lost)
        if found is not None:
            return found
    return TransientError if isinstance(error, OSError) else RefusedError


def _kind_of_one(error: BaseException, lost: type[StoreError]) -> type[StoreError] | None:
    names = {f"{each.__module__}.{each.__qualname__}" for each in type(error).__mro__}
    if isinstance(error, _NO_OBJECT):
        return NotFoundError
    if names & _IDENTITY_NAMES:
        return IdentityError
    if isinstance(error, PermissionError):
        return AccessError
    if isinstance(error, ftplib.Error):
        return _kind_of_ftp(error)
    if isinstance(error, _LOST) or names & _LOST_NAMES:
        return lost
    if isinstance(error, (NotImplementedError, FileExistsError)):
        return RefusedError
    status = _status(error)
    if status is not None:
        return _kind_of_status(status, lost)
    if isinstance(error, OSError) and error.errno is not None:
        return _kind_of_errno(error.errno)
    return None


def _kind_of_ftp(error: ftplib.Error) -> type[StoreError]:
    """By the class of the answer: 4yz may heal, and of 5yz the number tells."""
    code = str(error)[:3]
    if code in ("530", "532"):
        return IdentityError
    if code == "550":
        return NotFoundError
    if isinstance(error, ftplib.error_temp) or code == "552":  # over the space that it was given
        return TransientError
    return RefusedError


def _kind_of_status(status: int, lost: type[StoreError]) -> type[StoreError]:
    if status in (401, 407):
        return IdentityError
    if status == 403:
        return AccessError
    if status in (404, 410):
        return NotFoundError
    if status in (429, 503):
        return ThrottledError
    if status in (408, 409, 423, 425, 507):
        return TransientError
    return lost if status >= 500 else RefusedError


def _kind_of_errno(number: int) -> type[StoreError]:
    if number in _DENIED:
        return AccessError
    if number in _FULL:
        return TransientError
    if number in (errno.ENAMETOOLONG, errno.EINVAL, errno.ELOOP, errno.ENOTSUP, errno.ENOSYS):
        return RefusedError
    return TransientError


def _status(error: BaseException) -> int | None:
    """Status of the HTTP answer that an error of any library stands for."""
    for holder in (error, getattr(error, "response", None)):
        for name in ("status_code", "status"):
            value = getattr(holder, name, None)
            if isinstance(value, int) and 400 <= value < 600:
                return value
    return None


def _chain(error: BaseException) -> Iterator[BaseException]:
    """An error and what it was made from, the outermost first.

    It ends before an error of ours: what is handled while this one happened is no part of it.
    """
    seen: set[int] = set()
    each: BaseException | None = error
    while each is not None and id(each) not in seen and not isinstance(each, CkptError):
        seen.add(id(each))
        yield each
        each = each.__cause__ or (None if each.__suppress_context__ else each.__context__)
