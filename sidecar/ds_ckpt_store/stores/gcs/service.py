"""Who we are, how we connect, and what it means when a call fails.

One session of requests serves the SDK and our own requests. Credentials are Application Default
Credentials. A token that is about to expire is refreshed by google-auth; one that the service
refuses although it worked before is dropped with all that was cached, and the next call finds
credentials anew: the caller gets :class:`ExpiredError` and repeats. If no credentials ever worked,
that is said at once.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any, Literal

import google.auth
import requests
import urllib3
from google.api_core import exceptions as api
from google.auth import exceptions as auth
from google.auth.credentials import AnonymousCredentials
from google.auth.transport.requests import AuthorizedSession
from google.cloud import storage
from requests.adapters import HTTPAdapter

from ds_ckpt_store.errors import (
    AccessError,
    AmbiguousError,
    ExpiredError,
    IdentityError,
    NotFoundError,
    RefusedError,
    SettingsError,
    StoreError,
    TransientError,
)
from ds_ckpt_store.stores.gcs.answers import (
    REMEDIES,
    ROLE,
    Answer,
    AnsweredError,
    answer_of,
    kind_of,
)
from ds_ckpt_store.stores.gcs.options import GCSOptions

CONNECTIONS = 64
SCOPES = ("https://www.googleapis.com/auth/devstorage.read_write",)
ERROR_BYTES = 64 << 10  # of an answer that is read to find out what it says

_NOT_SENT = (urllib3.exceptions.NewConnectionError, urllib3.exceptions.ConnectTimeoutError)
Missing = Literal["object", "bucket", "upload"]


@dataclass(eq=False)
class Link:
    """One set of credentials, and what works with it.

    Attributes:
        session: of requests; adds the token.
        client: of google-cloud-storage.
        bucket: the client's handle of our bucket.
        url: the endpoint.
    """

    session: Any
    client: Any
    bucket: Any
    url: str


class Service:
    """The bucket's service.

    Args:
        bucket: its name.
        options: where the service is.
        stall_seconds: a connection on which nothing moves for so long is given up.
    """

    def __init__(self, bucket: str, options: GCSOptions, stall_seconds: float) -> None:
        self.bucket = bucket
        self.options = options
        self.stall_seconds = stall_seconds
        self._lock = threading.Lock()
        self._link: Link | None = None
        self._let_in = False
        self._bucket_seen = False

    def credentials_expiry(self) -> float | None:
        """When the token in use ends, in seconds since the epoch; None: not known, or it never."""
        link = self._link  # without the lock, which is held while credentials are looked for
        moment = getattr(link.session.credentials, "expiry", None) if link is not None else None
        if not isinstance(moment, datetime):
            return None
        return (moment if moment.tzinfo else moment.replace(tzinfo=timezone.utc)).timestamp()

    def close(self) -> None:
        """Close the pool of connections."""
        with self._lock:
            link, self._link = self._link, None
        if link is not None:
            link.session.close()

    @contextlib.contextmanager
    def asking(
        self, operation: str, key: str, *, write: bool = False, missing: Missing = "object"
    ) -> Iterator[Link]:
        """Lend the link for one call, and turn what goes wrong into our errors.

        Args:
            operation: the port's method, for the message.
            key: relative to the prefix, for the message.
            write: a lost answer is ambiguous.
            missing: what a 404 says is not there, as far as the answer does not tell.
        """
        link = self._connected(operation, key)
        try:
            yield link
        except api.GoogleAPICallError as error:
            answer = _api_answer(error)
            raise self._answered(operation, key, answer, link, write, missing) from error
        except AnsweredError as error:
            answer = error.answer
            raise self._answered(operation, key, answer, link, write, missing) from error
        except auth.GoogleAuthError as error:
            raise self._unknown(operation, key, error, link) from error
        except (requests.RequestException, urllib3.exceptions.HTTPError) as error:
            raise self._failed(operation, key, error, write) from error
        else:
            self._let_in = self._bucket_seen = True

    def send(
        self,
        link: Link,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
        body: Any = None,
        patience: float = 1,
    ) -> Any:
        """One request of our own; the answer is a success, and its body is not yet read.

        Args:
            link: as lent by :meth:`asking`, within which this is called.
            method: of HTTP.
            path: quoted, from the root of the endpoint.
            query: parameters, not quoted.
            headers: beside those of the session.
            body: bytes, or a reader with a length.
            patience: factor on the time that the answer may take.

        Raises:
            AnsweredError: the answer is no success.
        """
        response = link.session.request(
            method,
            f"{link.url}{path}",
            params=query,
            headers=dict(headers or {}),
            data=body,
            # The first of the two is also for the sending of one piece.
            timeout=(self.stall_seconds, self.stall_seconds * patience),
            allow_redirects=False,
            stream=True,
        )
        if not 200 <= response.status_code < 300:
            with contextlib.closing(response):
                told = response.raw.read(ERROR_BYTES, decode_content=True)
            raise AnsweredError(answer_of(response.status_code, told))
        return response

    # ---- credentials

    def _connected(self, operation: str, key: str) -> Link:
        with self._lock:
            if self._link is None:
                try:
                    self._link = self._connect()
                except auth.TransportError as error:
                    text = f"credentials cannot be had now: {error}"
                    raise TransientError(operation, key, text) from error
                except (auth.GoogleAuthError, OSError) as error:
                    text = f"{error}; {REMEDIES['NoCredentials']}"
                    raise IdentityError(operation, key, text) from error
            return self._link

    def _connect(self) -> Link:
        options = self.options
        if options.anonymous:
            credentials: Any = AnonymousCredentials()
        else:
            credentials, _ = google.auth.default(scopes=SCOPES)
        session: Any = AuthorizedSession(credentials, refresh_status_codes=())
        session.headers["User-Agent"] = "ds-ckpt-sidecar"
        for scheme in ("https://", "http://"):
            session.mount(scheme, HTTPAdapter(pool_connections=4, pool_maxsize=CONNECTIONS))
        if options.ca_bundle is not None:
            # With each request: REQUESTS_CA_BUNDLE would win over what the session says.
            session.request = functools.partial(session.request, verify=options.ca_bundle)
        universe = credentials.universe_domain
        where = {"universe_domain": universe}
        url = options.endpoint or f"https://storage.{universe}"
        where["api_endpoint"] = url
        try:
            client: Any = storage.Client(
                project="none",  # only whoever makes or lists buckets needs one
                credentials=credentials,
                client_options=where,
                _http=session,
            )
        except ValueError as error:
            raise SettingsError(f"gs://{self.bucket}: the SDK refuses {url}: {error}") from error
        # For traces, which nobody asked for, the SDK would fetch the bucket's metadata in a thread:
        # a right that we do not need, and a request that says nothing of who pays.
        client._bucket_metadata_cache = None
        bucket = client.bucket(self.bucket, user_project=options.user_project)
        return Link(session, client, bucket, url)

    def _drop(self, link: Link) -> None:
        """Let the next call find credentials anew; calls that have the link may end with it."""
        with self._lock:
            if self._link is link:
                self._link = None

    # ---- what failures mean

    def _answered(
        self, operation: str, key: str, answer: Answer, link: Link, write: bool, missing: Missing
    ) -> StoreError:
        """What an answer of the server means."""
        if answer.status == 401:
            return self._not_let_in(operation, key, str(answer), link)
        self._let_in = True
        kind = kind_of(answer, write)
        text = str(answer)
        if kind is AccessError:
            remedy = REMEDIES.get(answer.code, ROLE)
            return AccessError(operation, key, f"{text} ({self._where(link)}); {remedy}")
        if (
            kind is NotFoundError
            and not answer.code.startswith("NoSuch")
            and (missing == "bucket" or (missing == "object" and self._bucket_is_missing(link)))
        ):
            answer = Answer(answer.status, "NoSuchBucket", answer.message)
        if answer.code == "NoSuchBucket":
            return RefusedError(
                operation,
                key,
                f"bucket {self.bucket!r} does not exist at {link.url}; "
                f"create it or correct the destination",
            )
        return kind(operation, key, text)

    def _bucket_is_missing(self, link: Link) -> bool:
        """Whether a 404 is for the bucket: the JSON API gives both the same code."""
        if self._bucket_seen:
            return False
        query = {"maxResults": "1", "fields": "nextPageToken"}
        if self.options.user_project is not None:
            query["userProject"] = self.options.user_project
        try:
            self.send(link, "GET", f"/storage/v1/b/{self.bucket}/o", query=query).close()
        except AnsweredError as error:
            return error.answer.status == 404
        except (auth.GoogleAuthError, requests.RequestException, urllib3.exceptions.HTTPError):
            return False
        self._bucket_seen = True
        return False

    def _not_let_in(self, operation: str, key: str, told: str, link: Link) -> StoreError:
        self._drop(link)
        if self._let_in and not self.options.anonymous:
            return ExpiredError(
                operation,
                key,
                f"{told} ({self._where(link)}): the credentials have expired; they are taken anew "
                f"for the next call, and if this goes on, renew them",
            )
        return IdentityError(
            operation, key, f"{told} ({self._where(link)}); {REMEDIES['NoCredentials']}, and {ROLE}"
        )

    def _unknown(
        self, operation: str, key: str, error: auth.GoogleAuthError, link: Link
    ) -> StoreError:
        """What it means that a token cannot be had."""
        if error.retryable or isinstance(error, auth.TransportError):
            text = f"credentials cannot be refreshed now: {error}"
            return TransientError(operation, key, text)
        return self._not_let_in(operation, key, f"credentials cannot be refreshed: {error}", link)

    def _failed(self, operation: str, key: str, error: Exception, write: bool) -> StoreError:
        """What it means that there is no answer."""
        where = self.options.endpoint or "storage.googleapis.com"
        reason = error.args[0] if error.args else error
        reason = getattr(reason, "reason", reason)  # of what urllib3 gave up
        if isinstance(error, requests.exceptions.SSLError) and "CERTIFICATE_VERIFY" in str(error):
            remedy = "set DS_CKPT_GCS_CA_BUNDLE to a file with its certificate authority"
            return RefusedError(operation, key, f"{where} is not trusted: {error}; {remedy}")
        if isinstance(error, requests.exceptions.ConnectTimeout) or isinstance(reason, _NOT_SENT):
            return TransientError(operation, key, f"{where} cannot be reached: {error}")
        lost = AmbiguousError if write else TransientError
        return lost(operation, key, f"connection to {where} failed: {error}")

    def _where(self, link: Link) -> str:
        return f"bucket {self.bucket} at {link.url}"


def _api_answer(error: api.GoogleAPICallError) -> Answer:
    """Of an exception of the SDK."""
    errors = error.errors or ()
    reason = next((str(each.get("reason", "")) for each in errors if isinstance(each, dict)), "")
    return Answer(int(error.code or 0), reason, str(error.message))
