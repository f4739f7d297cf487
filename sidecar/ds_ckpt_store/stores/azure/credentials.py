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
            self.for_sdk = _default()

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
        ends = parse_qs(self.in_use()).get("se", [""])[0]
        try:
            moment = datetime.fromisoformat(ends.replace("Z", "+00:00"))
        except ValueError:
            return None
        if moment.tzinfo is None:
            moment = moment.replace(tzinfo=timezone.utc)
        return ends if moment.timestamp() <= SystemClock().time() else None

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


def _default() -> Any:
    try:
        from azure.identity import DefaultAzureCredential
    except ModuleNotFoundError as error:
        raise MissingExtraError(f"a managed identity ({error.name})", "azure") from None
    return DefaultAzureCredential()
