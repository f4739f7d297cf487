"""Errors of any library become ours: decided by class, number and status, never by text."""

from __future__ import annotations

import asyncio
import errno
import ftplib

import aiohttp
import pytest
from azure.core import exceptions as azure
from fsspec.exceptions import FSTimeoutError

from ds_ckpt_store.errors import (
    AccessError,
    AmbiguousError,
    IdentityError,
    NotFoundError,
    RefusedError,
    StoreError,
    ThrottledError,
    TransientError,
)
from ds_ckpt_store.stores.fsspec.answers import kind_of


def azure_answer(status: int) -> azure.HttpResponseError:
    error = azure.HttpResponseError("said so")
    error.status_code = status
    return error


class Answer:
    """As requests and httpx hang it on their errors."""

    def __init__(self, status: int) -> None:
        self.status_code = status


class LibraryError(Exception):
    def __init__(self, status: int) -> None:
        super().__init__("said so")
        self.response = Answer(status)


def aiohttp_answer(status: int) -> aiohttp.ClientResponseError:
    return aiohttp.ClientResponseError(None, (), status=status)  # type: ignore[arg-type]


def made_of(outer: Exception, inner: Exception) -> Exception:
    try:
        raise outer from inner
    except Exception as error:
        return error


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (FileNotFoundError(errno.ENOENT, "no"), NotFoundError),
        (NotADirectoryError(errno.ENOTDIR, "no"), NotFoundError),
        (IsADirectoryError(errno.EISDIR, "no"), NotFoundError),
        (PermissionError(errno.EACCES, "no"), AccessError),
        (OSError(errno.EROFS, "no"), AccessError),
        (OSError(errno.ENOSPC, "no"), TransientError),
        (OSError(errno.EIO, "no"), TransientError),
        (OSError("no number"), TransientError),
        (OSError(errno.ENAMETOOLONG, "no"), RefusedError),
        (NotImplementedError(), RefusedError),
        (FileExistsError("no"), RefusedError),
        (ValueError("odd"), RefusedError),
        (ConnectionResetError(errno.ECONNRESET, "no"), TransientError),
        (TimeoutError("no"), TransientError),
        (asyncio.TimeoutError(), TransientError),
        (FSTimeoutError(), TransientError),
        (EOFError(), TransientError),
        (aiohttp.ServerDisconnectedError(), TransientError),
        (aiohttp.ClientPayloadError(), TransientError),
        (azure.ServiceRequestError("no"), TransientError),
        (azure.ServiceResponseError("no"), TransientError),
        (azure.ClientAuthenticationError("no"), IdentityError),
        (ftplib.error_perm("530 Login incorrect."), IdentityError),
        (ftplib.error_perm("550 No."), NotFoundError),
        (ftplib.error_perm("552 Full."), TransientError),
        (ftplib.error_perm("502 Unknown."), RefusedError),
        (ftplib.error_temp("421 Too many."), TransientError),
        *((make(401), IdentityError) for make in (azure_answer, aiohttp_answer, LibraryError)),
        *((make(403), AccessError) for make in (azure_answer, aiohttp_answer, LibraryError)),
        *((make(404), NotFoundError) for make in (azure_answer, aiohttp_answer, LibraryError)),
        *((make(429), ThrottledError) for make in (azure_answer, aiohttp_answer, LibraryError)),
        *((make(503), ThrottledError) for make in (azure_answer, aiohttp_answer, LibraryError)),
        *((make(500), TransientError) for make in (azure_answer, aiohttp_answer, LibraryError)),
        *((make(400), RefusedError) for make in (azure_answer, aiohttp_answer, LibraryError)),
        (made_of(RuntimeError("block"), azure_answer(403)), AccessError),
        (made_of(RuntimeError("block"), azure.ServiceRequestError("no")), TransientError),
        (made_of(FileNotFoundError("x"), ConnectionResetError()), TransientError),
        (made_of(FileNotFoundError("x"), ftplib.error_temp("425 No.")), TransientError),
    ],
    ids=repr,
)
def test_an_error_of_a_library_has_one_meaning(
    error: BaseException, kind: type[StoreError]
) -> None:
    assert kind_of(error) is kind


@pytest.mark.parametrize("error", [ConnectionResetError(), EOFError(), azure_answer(500)], ids=repr)
def test_a_write_whose_answer_was_lost_is_ambiguous(error: BaseException) -> None:
    assert kind_of(error, write=True) is AmbiguousError


def test_what_was_handled_meanwhile_does_not_count() -> None:
    """The caller looks whether a write was applied, after its connection broke."""

    def look() -> None:
        try:
            raise AmbiguousError("put", "k", "lost") from ConnectionResetError()
        except AmbiguousError:
            raise FileNotFoundError("k")  # noqa: B904

    with pytest.raises(FileNotFoundError) as caught:
        look()
    assert kind_of(caught.value) is NotFoundError
