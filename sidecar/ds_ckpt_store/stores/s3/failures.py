"""boto3's errors as ours: what was being done, where, what was answered, and what to do."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from botocore import exceptions as aws
from botocore.parsers import ResponseParserError
from urllib3.exceptions import HTTPError

from ds_ckpt_store.errors import (
    AccessError,
    AmbiguousError,
    CkptError,
    ExpiredError,
    IdentityError,
    RefusedError,
    StoreError,
    TransientError,
)
from ds_ckpt_store.stores.s3.answers import REMEDIES, RENEWED, kind_of
from ds_ckpt_store.stores.s3.clients import Clients

_NO_CREDENTIALS = (
    aws.NoCredentialsError,
    aws.PartialCredentialsError,
    aws.CredentialRetrievalError,
    aws.TokenRetrievalError,
    aws.SSOError,
)
# boto3 passes on what urllib3 raises while it reads an answer that is no stream, such as a refusal.
_BROKEN_OFF = (aws.HTTPClientError, aws.IncompleteReadError, ResponseParserError, HTTPError)
_NOT_SENT = (aws.EndpointConnectionError, aws.ConnectTimeoutError, aws.ProxyConnectionError)


class Failures:
    """Turns errors of calls to one bucket.

    Args:
        clients: forgotten when their credentials are of no use any more.
        bucket: its name.
        permissions: what the settings need beside the usual, for a message.
    """

    def __init__(self, clients: Clients, bucket: str, permissions: str) -> None:
        self._clients = clients
        self._bucket = bucket
        self._permissions = permissions

    @contextlib.contextmanager
    def turned(self, operation: str, key: str, client: Any, *, write: bool) -> Iterator[None]:
        """Raise our errors for boto3's.

        Args:
            operation: the port's method.
            key: what it is for.
            client: that makes the call.
            write: an answer that is lost leaves open whether it was applied.
        """
        try:
            yield
        except aws.ClientError as error:
            raise self._from_answer(operation, key, client, error, write) from error
        except (aws.BotoCoreError, ResponseParserError, HTTPError) as error:
            raise self._from_failure(operation, key, client, error, write) from error

    def _from_answer(
        self, operation: str, key: str, client: Any, error: aws.ClientError, write: bool
    ) -> StoreError:
        """What an answer of the server means."""
        code = str(error.response.get("Error", {}).get("Code", ""))
        message = str(error.response.get("Error", {}).get("Message", ""))
        status = int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
        text = f"{status} {code}: {message}"
        where = self._clients.where
        kind = kind_of(code, status, write)
        if kind is ExpiredError or code in RENEWED:
            self._clients.forget(client)
        if issubclass(kind, (AccessError, ExpiredError)):
            remedy = REMEDIES.get(code) or REMEDIES["AccessDenied"] + self._permissions
            text = f"{text} (bucket {self._bucket} at {where}); {remedy}"
        elif code == "NoSuchBucket":
            text = (
                f"bucket {self._bucket!r} does not exist at {where}; "
                f"create it or correct the destination"
            )
        elif code in REMEDIES:
            text = f"{text}; {REMEDIES[code]}"
        return kind(operation, key, text)

    def _from_failure(
        self, operation: str, key: str, client: Any, error: Exception, write: bool
    ) -> CkptError:
        """What it means that there is no answer."""
        cause = getattr(error, "kwargs", {}).get("error")
        if isinstance(cause, CkptError):  # the source of a body raised it while it was sent
            return cause
        where = self._clients.where
        if isinstance(error, _NO_CREDENTIALS):
            self._clients.forget(client)
            return IdentityError(operation, key, f"{error}; {REMEDIES['NoCredentials']}")
        if isinstance(error, aws.SSLError) and "CERTIFICATE_VERIFY_FAILED" in str(error):
            remedy = "set DS_CKPT_S3_CA_BUNDLE to a file with its certificate authority"
            return RefusedError(operation, key, f"{where} is not trusted: {error}; {remedy}")
        if isinstance(error, _NOT_SENT):
            return TransientError(operation, key, f"{where} cannot be reached: {error}")
        if isinstance(error, _BROKEN_OFF):
            lost = AmbiguousError if write else TransientError
            return lost(operation, key, f"connection to {where} failed: {error}")
        return RefusedError(operation, key, f"{where}: {error}")
