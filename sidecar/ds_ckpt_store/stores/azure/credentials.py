"""Who we are at Azure: an account's key, a shared access signature, or an identity of Entra's.

A key never changes under a running process. An identity renews its tokens by itself. A shared
access signature ends at a time that stands in it: one from a file is read again when the service
refuses it, so that whoever rotates the file need not restart anything.
"""

from __future__ import annotations

import re
import threading
from datetime import datetime, timezone
from typing import Any
from urllib.parse import parse_qs

from azure.core.credentials import AzureNamedKeyCredential, AzureSasCredential

from ds_ckpt_store.contract.clock import SystemClock
from ds_ckpt_store.errors import MissingExtraError, SettingsError
from ds_ckpt_store.stores.azure.options import AzureOptions, check_sas

_SIGNATURE = re.compile(r"(?i)\b(sig=)[^&\s'\"]+")


class _Noting:
    """An identity's credential, as the SDK takes it, that notes when its last token ends."""

    def __init__(self, credential: Any) -> None:
        self._credential = credential
        self.expires_on: float | None = None

    def get_token(self, *scopes: str, **options: Any) -> Any:
        return self._note(self._credential.get_token(*scopes, **options))

    def _note(self, token: Any) -> Any:
        self.expires_on = float(token.expires_on)
        return token


class _NotingInfo(_Noting):
    """Of a version of azure-identity that says more of a token; the SDK asks for it if it can."""

    def get_token_info(self, *scopes: str, **options: Any) -> Any:
        return self._note(self._credential.get_token_info(*scopes, **options))


def _noting(credential: Any) -> _Noting:
    return (_NotingInfo if hasattr(credential, "get_token_info") else _Noting)(credential)


class Credentials:
    """What is handed to the SDK, and whether it can be had anew.

    Args:
        options: names one kind, or none: then it is ``DefaultAzureCredential``.

    Raises:
        SettingsError: the file holds no shared access signature.
        MissingExtraError: azure-identity is not installed, and it is needed.
    """

    def __init__(self, options: AzureOptions) -> None:
        self._file = options.sas_file
        self._lock = threading.Lock()
        self._sas: AzureSasCredential | None = None
        self.for_sdk: Any
        if options.key is not None:
            self.kind = "the account's key"
            self.for_sdk = AzureNamedKeyCredential(options.account, options.key)
        elif options.sas is not None or self._file is not None:
            self.kind = "a shared access signature"
            self._sas = self.for_sdk = AzureSasCredential(options.sas or self._read())
        else:
            self.kind = "DefaultAzureCredential"
            self.for_sdk = _noting(_default())

    @property
    def renews_itself(self) -> bool:
        """Whether it is an identity, whose tokens the SDK renews."""
        return self.kind == "DefaultAzureCredential"

    @property
    def source(self) -> str:
        """Where it comes from, for messages."""
        return f"{self.kind} from {self._file}" if self._file else self.kind

    def in_use(self) -> str:
        """The shared access signature of calls that begin now; empty for other kinds."""
        return str(self._sas.signature) if self._sas is not None else ""

    def renewed(self, used: str) -> str | None:
        """Take a shared access signature from its file anew, after ``used`` was refused.

        Returns:
            Why another call may have more luck, for a message; None if it has not.
        """
        if self._sas is None or self._file is None:
            return None
        with self._lock:
            try:
                found = self._read()
            except SettingsError as error:
                return f"perhaps somebody is writing it just now: {error}"
            if found != self._sas.signature:
                self._sas.update(found)
        return "it was read anew" if found != used else None

    def expired(self) -> str | None:
        """When the shared access signature ended by its own words and this machine's clock."""
        ends = self._end_of_sas()
        moment = _moment(ends)
        return ends if moment is not None and moment <= SystemClock().time() else None

    def expiry(self) -> float | None:
        """When what is in use ends, in seconds since the epoch; None: not known, or it never."""
        if isinstance(self.for_sdk, _Noting):
            return self.for_sdk.expires_on
        return _moment(self._end_of_sas())

    def _end_of_sas(self) -> str:
        return parse_qs(self.in_use()).get("se", [""])[0]

    @property
    def may_change(self) -> bool:
        """Whether somebody may put a newer one where it comes from."""
        return self._file is not None

    def _read(self) -> str:
        try:
            with open(self._file or "", encoding="utf-8") as file:
                text = file.read(8192)
        except (OSError, UnicodeDecodeError) as error:
            raise SettingsError(f"DS_CKPT_AZURE_SAS_FILE={self._file!r}: {error}") from error
        return check_sas(f"DS_CKPT_AZURE_SAS_FILE={self._file!r}", text)


def without_signatures(text: str) -> str:
    """A text for a person, without the secret part of any URL in it."""
    return _SIGNATURE.sub(r"\1...", text)


def _moment(text: str) -> float | None:
    """A time as Azure writes it, in seconds since the epoch; None: it is none."""
    try:
        moment = datetime.fromisoformat(text.replace("Z", "+00:00"))
        if moment.tzinfo is None:
            moment = moment.replace(tzinfo=timezone.utc)
        return moment.timestamp()
    except ValueError:
        return None


def _default() -> Any:
    try:
        from azure.identity import DefaultAzureCredential
    except ModuleNotFoundError as error:
        raise MissingExtraError(f"a managed identity ({error.name})", "azure") from None
    return DefaultAzureCredential()
