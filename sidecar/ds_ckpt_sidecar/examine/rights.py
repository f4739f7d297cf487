"""What this process may do in the store: each right tried for real, under ``.ds_ckpt/probe/``."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial

from ds_ckpt_sidecar.examine.finding import Finding, Severity
from ds_ckpt_store.contract.clock import SystemClock, fresh_token, system_random
from ds_ckpt_store.errors import (
    AccessError,
    CkptError,
    ExpiredError,
    IdentityError,
    NotFoundError,
    RefusedError,
    StoreError,
    TransientError,
)
from ds_ckpt_store.stores.port import BytesSource, Part, Store, Upload
from ds_ckpt_store.stores.probe import PROBE
from ds_ckpt_store.stores.rules import credentials_of

SKEW_SECONDS = 60.0

# Of each right: what it is called where, by the scheme of the URL.
_CALLED = {
    "put": ("s3:PutObject", "storage.objects.create", "c, w"),
    "get": ("s3:GetObject", "storage.objects.get", "r"),
    "list": ("s3:ListBucket", "storage.objects.list", "l"),
    "delete": ("s3:DeleteObject", "storage.objects.delete", "d"),
    "begin": ("s3:PutObject", "storage.multipartUploads.create", "c, w"),
    "put_part": ("s3:PutObject", "storage.multipartUploads.create", "c, w"),
    "complete": ("s3:PutObject", "storage.multipartUploads.create", "c, w"),
    "parts": ("s3:ListMultipartUploadParts", "storage.multipartUploads.listParts", "r"),
    "abort": ("s3:AbortMultipartUpload", "storage.multipartUploads.abort", "d"),
    "uploads": ("s3:ListBucketMultipartUploads", "storage.multipartUploads.list", "l"),
}
_PURPOSE = {
    "put": "store anything",
    "get": "read back what decides a save",
    "list": "find what is stored",
    "delete": "remove anything: retention (DS_CKPT_KEEP_LAST) and `ds-ckpt gc` do not work, and "
    "what the agent itself leaves (probes, holds) stays",
    "begin": "begin an upload in parts",
    "put_part": "send parts",
    "complete": "end an upload in parts: no large file becomes an object",
    "parts": "go on with an upload that was interrupted",
    "abort": "drop an unfinished upload: those stay and cost, unless a rule of the bucket removes "
    "them",
    "uploads": "find unfinished uploads: those of pods that are gone stay and cost, unless a rule "
    "of the bucket removes them",
}
_OPTIONAL = ("delete", "abort", "uploads")  # an agent that keeps all works without
_ELSEWHERE = ("PermanentRedirect", "AuthorizationHeaderMalformed", "IllegalLocationConstraint")


@dataclass
class Tried:
    """What came of it.

    Attributes:
        answered: the store can be asked further things.
        skew: seconds that the store's clock is ahead of this machine's; None if it does not tell.
        store_time: by its own clock, in seconds since the epoch; 0 if it does not tell.
    """

    answered: bool = True
    skew: float | None = None
    store_time: float = 0.0


class Rights:
    """Tries each call that the agent makes, once.

    Args:
        store: the store.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._key = f"{PROBE}doctor-{fresh_token(system_random())}"
        self._refused: list[str] = []
        self._may: list[str] = []
        self.tried = Tried()

    def look(self) -> Iterator[Finding]:
        """Try all; ends early when the store cannot be used at all."""
        store, key = self._store, f"{self._key}/object"
        body = BytesSource(b"written by ds-ckpt doctor\n")
        yield from self._try("list", lambda: list(store.list(f"{self._key}/")))
        if self.tried.answered:
            yield from self._try("put", lambda: store.put(key, body))
        if not self.tried.answered:
            return
        if "put" in self._may:
            yield from self._try("get", lambda: store.get(key))
            yield from self._clock(key)
        if store.capabilities.parts:
            yield from self._parts(f"{self._key}/upload", body)
        if "put" in self._may:
            written = (key, f"{self._key}/upload") if "complete" in self._may else (key,)
            yield from self._try("delete", partial(self._remove, written))
        who = _credentials(store)
        if not self._refused and self.tried.answered:
            yield Finding("ok", store.url, f"objects and uploads can be {_listed(self._may)}{who}")
        elif who:
            yield Finding("note", store.url, f"it was asked{who}")

    def _parts(self, key: str, body: BytesSource) -> Iterator[Finding]:
        store = self._store
        begun: list[Upload] = []
        yield from self._try("uploads", lambda: list(store.uploads(f"{self._key}/")))
        if "put" not in self._may:
            return
        yield from self._try("begin", lambda: begun.append(store.begin(key, body.size, {})))
        for upload in begun:
            part = partial(store.put_part, upload, 1, body)
            sent: list[Part] = []
            yield from self._try("put_part", lambda: sent.append(part()))  # noqa: B023
            yield from self._try("parts", partial(store.parts, upload))
            if sent:
                yield from self._try("complete", partial(store.complete, upload, sent))
            if "complete" in self._may:
                yield from self._try("abort", lambda: store.abort(store.begin(key, body.size, {})))
            else:
                yield from self._try("abort", partial(store.abort, upload))

    def _remove(self, keys: Iterable[str]) -> None:
        for key in keys:
            self._store.delete(key)

    def _try(self, right: str, call: Callable[[], object]) -> Iterator[Finding]:
        if not self.tried.answered:
            return
        try:
            call()
        except (IdentityError, ExpiredError) as error:  # so each further call would be answered
            self.tried.answered = False
            yield Finding(
                "error",
                self._store.url,
                f"it does not know who asks ({error.answer})",
                "set, correct or renew the credentials, as it says: no right is missing so far",
            )
        except AccessError as error:
            self._refused.append(right)
            yield self._denied(right, error)
        except NotFoundError as error:
            yield Finding("warning", self._store.url, f"what was just written is gone: {error}")
        except (CkptError, OSError) as error:
            self.tried.answered = False
            yield self._failed(error)
        else:
            self._may.append(right)

    def _denied(self, right: str, error: AccessError) -> Finding:
        severity: Severity = "warning" if right in _OPTIONAL else "error"
        sentence = f"we may not {_PURPOSE[right]} ({error.answer})"
        return Finding(severity, self._store.url, sentence, self._grant(right))

    def _grant(self, right: str) -> str:
        scheme, _, rest = self._store.url.partition("://")
        aws, google, azure = _CALLED[right]
        bucket, _, prefix = rest.partition("/")
        if scheme == "s3":
            on_bucket = right in ("list", "uploads")
            resource = bucket if on_bucket else f"{bucket}/{prefix}/*".replace("//", "/")
            return (
                "add to the role's policy "
                f'{{"Effect": "Allow", "Action": "{aws}", "Resource": "arn:aws:s3:::{resource}"}}'
            )
        if scheme == "gs":
            return (
                f"grant {google}: gcloud storage buckets add-iam-policy-binding gs://{bucket} "
                "--member=serviceAccount:ACCOUNT --role=roles/storage.objectUser"
            )
        if scheme in ("az", "https"):
            return (
                "give the identity the role: az role assignment create --role 'Storage Blob Data "
                "Contributor' --assignee IDENTITY --scope ID_OF_THE_CONTAINER; a shared access "
                f"signature needs the permissions {azure}"
            )
        return "let this user read and write there"

    def _failed(self, error: Exception) -> Finding:
        text = str(error)
        remedy = "do what it says"
        if any(word in text for word in _ELSEWHERE):
            remedy = (
                "the bucket is in another region: set DS_CKPT_S3_REGION to what `aws s3api "
                "get-bucket-location --bucket BUCKET` says, and take DS_CKPT_S3_ENDPOINT away "
                "unless the server is not AWS'"
            )
        elif isinstance(error, TransientError):
            remedy = (
                "look at the endpoint's name and port, at DNS, proxies and network policies, and "
                "whether the server runs"
            )
        elif isinstance(error, RefusedError) and "does not exist" in text:
            remedy = "create it, or correct DS_CKPT_DESTINATION"
        return Finding("error", self._store.url, f"it cannot be used: {text}", remedy)

    def _clock(self, key: str) -> Iterator[Finding]:
        now = SystemClock().time()
        with contextlib.suppress(StoreError):
            self.tried.store_time = self._store.head(key).modified
        if not self.tried.store_time:
            return
        skew = self.tried.skew = self.tried.store_time - now
        if abs(skew) > SKEW_SECONDS:
            yield Finding(
                "warning",
                self._store.url,
                f"its clock is {abs(skew):.0f} s {'ahead of' if skew > 0 else 'behind'} this "
                "machine's: signatures are refused from some minutes on",
                "set this machine's clock by NTP",
            )


def _credentials(store: Store) -> str:
    try:
        found = credentials_of(store)
    except CkptError:
        return ""
    return f", with credentials from {found}" if found else ""


_DONE = {
    "put": "written",
    "get": "read",
    "list": "listed",
    "begin": "begun",
    "abort": "aborted",
    "delete": "deleted",
}


def _listed(rights: list[str]) -> str:
    words = [_DONE[right] for right in rights if right in _DONE]
    return ", ".join(words[:-1]) + f" and {words[-1]}" if len(words) > 1 else "".join(words)
