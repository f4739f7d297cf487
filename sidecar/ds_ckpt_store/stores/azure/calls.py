"""Calls of azure-storage-blob: one client, what goes with each call, and what errors mean."""

from __future__ import annotations

import base64
import contextlib
import hashlib
from collections.abc import Iterator
from typing import Any

from azure.core import MatchConditions
from azure.core.exceptions import (
    AzureError,
    ClientAuthenticationError,
    HttpResponseError,
    ServiceRequestTimeoutError,
)
from azure.core.pipeline.transport import RequestsTransport
from azure.storage.blob import (
    BlobClient,
    BlobServiceClient,
    ContainerClient,
    CustomerProvidedEncryptionKey,
    StandardBlobTier,
)
from urllib3.exceptions import ConnectTimeoutError, HTTPError, NewConnectionError

from ds_ckpt_store.contract import names
from ds_ckpt_store.contract.digest import CHUNK
from ds_ckpt_store.errors import (
    AccessError,
    AmbiguousError,
    ExpiredError,
    IdentityError,
    RefusedError,
    SettingsError,
    StoreError,
    TransientError,
)
from ds_ckpt_store.stores.azure.answers import NO_RIGHT, REMEDIES, WHO_ARE_WE, kind_of
from ds_ckpt_store.stores.azure.credentials import Credentials, without_signatures
from ds_ckpt_store.stores.azure.options import AzureOptions
from ds_ckpt_store.stores.port import Condition, IfAbsent, IfVersion

CONNECTIONS = 64
# What the SDK sends in one request it wants as bytes; more is sent as one block, and streamed.
WHOLE_IN_MEMORY = 1 << 20

_NOT_SENT = (ConnectTimeoutError, NewConnectionError)


class Calls:
    """The SDK's client for one container.

    Args:
        options: where it is, who we are, how objects are stored.
        stall_seconds: a connection on which nothing moves for so long is given up.

    Raises:
        SettingsError: the SDK cannot work with the options.
    """

    def __init__(self, options: AzureOptions, stall_seconds: float) -> None:
        self._options = options
        self._credentials = Credentials(options)
        self._admitted = False  # a call has succeeded, so we were who we are
        self._stall_seconds = stall_seconds
        self.container = _container(options, self._credentials, stall_seconds)

    @property
    def credentials(self) -> Credentials:
        """Who we are."""
        return self._credentials

    def service(self) -> BlobServiceClient:
        """A client for the account's service, to be closed."""
        return BlobServiceClient(
            self._options.endpoint,
            credential=self._credentials.for_sdk,
            user_agent="ds-ckpt-sidecar",
            retry_total=0,
            **_timeouts(self._options, self._stall_seconds),
            **_version(self._options),
        )

    def blob(self, name: str) -> BlobClient:
        """The client for one blob, on the same connections."""
        return self.container.get_blob_client(name)

    def with_key(self) -> dict[str, Any]:
        """What every call on a blob's content or properties needs if a customer's key is used."""
        key = self._options.customer_key
        if key is None:
            return {}
        digest_of_key = hashlib.sha256(key).digest()
        return {
            "cpk": CustomerProvidedEncryptionKey(
                base64.b64encode(key).decode(), base64.b64encode(digest_of_key).decode()
            )
        }

    def encryption(self) -> dict[str, Any]:
        """What every write needs."""
        if self._options.encryption_scope is not None:
            return {"encryption_scope": self._options.encryption_scope}
        return self.with_key()

    def making(self, key: str) -> dict[str, Any]:
        """What a write that makes an object needs; tiers are for the shards."""
        how = self.encryption()
        if self._options.tier is not None and names.is_data(key):
            how["standard_blob_tier"] = StandardBlobTier(self._options.tier)
        return how

    @contextlib.contextmanager
    def errors(self, operation: str, key: str, *, write: bool = False) -> Iterator[None]:
        """Turn the SDK's errors into ours.

        Args:
            operation: the port's method.
            key: what it is for.
            write: the call changes something, so a lost answer is ambiguous.
        """
        used = self._credentials.in_use()
        try:
            yield
        except HttpResponseError as error:
            raise self._from_answer(operation, key, error, write, used) from error
        except (AzureError, HTTPError) as error:
            raise self._from_failure(operation, key, error, write) from error
        self._admitted = True

    def _from_answer(
        self, operation: str, key: str, error: HttpResponseError, write: bool, used: str
    ) -> StoreError:
        """What an answer of the server means."""
        status = error.status_code or 0
        if error.response is None or status < 400:
            return self._from_failure(operation, key, error, write)
        given = getattr(error, "error_code", None)
        code = str(getattr(given, "value", given) or "")
        message = str(error.message).partition("\n")[0].strip()
        request = error.response.headers.get("x-ms-request-id", "none")
        text = without_signatures(f"{status} {code}: {message} (request {request})")
        kind = kind_of(code, status, write)
        if issubclass(kind, AccessError):
            return self._no_access(kind, operation, key, code, status, text, used)
        if code == "ContainerNotFound":
            text = (
                f"container {self._options.container!r} does not exist at "
                f"{self._options.endpoint}; create it or correct the destination"
            )
        elif code in REMEDIES:
            text = f"{text}; {REMEDIES[code]}"
        return kind(operation, key, text)

    def _no_access(
        self,
        kind: type[AccessError],
        operation: str,
        key: str,
        code: str,
        status: int,
        text: str,
        used: str,
    ) -> StoreError:
        mine = self._credentials
        text = f"{text} (container {self._options.container} at {self._options.endpoint})"
        renewed = mine.renewed(used)
        if renewed is not None:
            return ExpiredError(operation, key, f"{text} as {mine.source}; {renewed}")
        ended = mine.expired()
        if ended is not None:
            text = f"{text}; {mine.source} expired at {ended}: renew it"
            return (ExpiredError if mine.may_change else IdentityError)(operation, key, text)
        if status == 401 and mine.renews_itself and self._admitted:
            return ExpiredError(operation, key, f"{text}; a new token will be asked for")
        remedy = REMEDIES.get(code, NO_RIGHT)
        return kind(operation, key, f"{text} as {mine.source}; {remedy}")

    def _from_failure(self, operation: str, key: str, error: Exception, write: bool) -> StoreError:
        """What it means that there is no answer."""
        where = self._options.endpoint
        text = without_signatures(str(error))
        if isinstance(error, ClientAuthenticationError):  # no token: nothing was sent
            if self._admitted:
                return ExpiredError(operation, key, f"the token could not be renewed: {text}")
            return IdentityError(operation, key, f"{text}; {WHO_ARE_WE}")
        if "CERTIFICATE_VERIFY_FAILED" in text:
            remedy = "set DS_CKPT_AZURE_CA_BUNDLE to a file with its certificate authority"
            return RefusedError(operation, key, f"{where} is not trusted: {text}; {remedy}")
        cause = getattr(error, "inner_exception", None)
        if isinstance(error, ServiceRequestTimeoutError) or isinstance(cause, _NOT_SENT):
            return TransientError(operation, key, f"{where} cannot be reached: {text}")
        lost = AmbiguousError if write else TransientError
        return lost(operation, key, f"connection to {where} failed: {text}")


def _container(
    options: AzureOptions, credentials: Credentials, stall_seconds: float
) -> ContainerClient:
    timeouts = _timeouts(options, stall_seconds)
    transport = RequestsTransport(connection_data_block_size=CHUNK, **timeouts)
    transport.open()
    for adapter in transport.session.adapters.values():
        adapter.init_poolmanager(CONNECTIONS, CONNECTIONS)
    try:
        return ContainerClient(
            options.endpoint,
            options.container,
            credential=credentials.for_sdk,
            transport=transport,
            user_agent="ds-ckpt-sidecar",
            retry_total=0,
            retry_connect=0,
            retry_read=0,
            retry_status=0,
            max_single_put_size=WHOLE_IN_MEMORY,
            max_single_get_size=1 << 50,  # a range is one request
            **_version(options),
        )
    except ValueError as error:
        raise SettingsError(f"{options.url}: the SDK cannot make a client: {error}") from error


def _timeouts(options: AzureOptions, stall_seconds: float) -> dict[str, Any]:
    found: dict[str, Any] = {
        # urllib3 gives this one also to the sending of one piece.
        "connection_timeout": stall_seconds,
        "read_timeout": stall_seconds,
    }
    if options.ca_bundle is not None:
        found["connection_verify"] = options.ca_bundle
    return found


def _version(options: AzureOptions) -> dict[str, Any]:
    return {"api_version": options.api_version} if options.api_version else {}


def matching(condition: Condition) -> dict[str, Any]:
    """A condition, as arguments of a call."""
    if isinstance(condition, IfAbsent):
        return {"match_condition": MatchConditions.IfMissing}
    if isinstance(condition, IfVersion):
        return {"etag": condition.version, "match_condition": MatchConditions.IfNotModified}
    return {}
