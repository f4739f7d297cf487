"""Where a container is, who we are there, and how objects are stored: ``DS_CKPT_AZURE_*``."""

from __future__ import annotations

import base64
import binascii
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from ds_ckpt_store.errors import SettingsError
from ds_ckpt_store.stores import shown, shown_path

PUBLIC_CLOUD = "blob.core.windows.net"
TIERS = ("Hot", "Cool", "Cold")

_ACCOUNT = re.compile(r"[a-z0-9]{3,24}")
_CONTAINER = re.compile(r"\$root|[a-z0-9](?:-?[a-z0-9]){2,62}")
_ENDPOINT = re.compile(r"https?://[^/?#@]+(?:/[a-z0-9]+)?/?")
_BLOB_HOST = re.compile(
    r"(?P<account>[a-z0-9]{3,24})(?:-ipv6|-dualstack)?(?:\.z[0-9]+)?(?:\.privatelink)?\.blob\..+"
)


@dataclass(frozen=True)
class AzureOptions:
    """Where a container is, who we are there, and how objects are stored.

    Attributes:
        url: as the store was opened, without slashes at its end.
        endpoint: ``http(s)://host[:port][/account]`` of the blob service.
        account: its name, if it is known.
        container: name of the container.
        prefix: without slashes at its ends; may be empty.
        key: the account's key; None: another way.
        sas: shared access signature; None: another way.
        sas_file: file that holds one, and is read again when that one has expired.
        tier: access tier of the shards; None: the account's.
        customer_key: 32 bytes that the service encrypts with and forgets.
        encryption_scope: name of the scope to encrypt with; None: the container's.
        ca_bundle: file of certificates to trust; None: the system's way.
        api_version: of the REST API; None: the SDK's newest.
    """

    url: str
    endpoint: str
    account: str
    container: str
    prefix: str
    key: str | None = field(default=None, repr=False)
    sas: str | None = field(default=None, repr=False)
    sas_file: str | None = None
    tier: str | None = None
    customer_key: bytes | None = field(default=None, repr=False)
    encryption_scope: str | None = None
    ca_bundle: str | None = None
    api_version: str | None = None

    @classmethod
    def read(cls, url: str, environ: Mapping[str, str]) -> AzureOptions:
        """Read a URL and the environment.

        Raises:
            SettingsError: something is missing, or cannot work; it is named.
        """
        parts = urlsplit(url)
        if "@" in parts.netloc:
            raise SettingsError(f"{parts.scheme}://...@...: credentials do not belong into a URL")
        connection = _connection(environ.get("AZURE_STORAGE_CONNECTION_STRING", ""))
        if parts.scheme == "https":
            endpoint, account = _of_url(url, environ)
            container, _, prefix = parts.path.strip("/").partition("/")
        else:
            endpoint, account = _of_settings(environ, connection)
            container, prefix = parts.netloc, parts.path
        _check_container(url, container)
        known = connection.get("accountname")
        if known and account and known != account:
            raise SettingsError(
                f"AZURE_STORAGE_CONNECTION_STRING is of the account {known!r}, and the destination "
                f"of {account!r}"
            )
        key, sas, sas_file = _credentials(environ, connection)
        options = cls(
            url=url.rstrip("/"),
            endpoint=endpoint.rstrip("/"),
            account=account,
            container=container,
            prefix=prefix.strip("/"),
            key=key,
            sas=sas,
            sas_file=sas_file,
            tier=_tier(environ),
            customer_key=_customer_key(environ),
            encryption_scope=environ.get("DS_CKPT_AZURE_ENCRYPTION_SCOPE") or None,
            ca_bundle=_file(environ, "DS_CKPT_AZURE_CA_BUNDLE"),
            api_version=environ.get("DS_CKPT_AZURE_API_VERSION") or None,
        )
        options._check()
        return options

    def _check(self) -> None:
        if self.customer_key and self.encryption_scope:
            raise SettingsError(
                "DS_CKPT_AZURE_CPK_FILE and DS_CKPT_AZURE_ENCRYPTION_SCOPE exclude each other"
            )
        if self.key and not self.account:
            raise SettingsError(
                f"{self.endpoint}: an account's key needs its name: set DS_CKPT_AZURE_ACCOUNT"
            )
        if self.endpoint.startswith("https:"):
            return
        if self.customer_key:
            raise SettingsError(f"DS_CKPT_AZURE_CPK_FILE needs https, and not {self.endpoint}")
        if not (self.key or self.sas or self.sas_file):
            raise SettingsError(
                f"{self.endpoint}: managed and workload identities need https; over http set "
                "AZURE_STORAGE_KEY or a shared access signature"
            )


def _of_url(url: str, environ: Mapping[str, str]) -> tuple[str, str]:
    parts = urlsplit(url)
    host = _BLOB_HOST.fullmatch(parts.hostname or "")
    if host is None:
        raise SettingsError(
            f"{url!r}: is no address of Azure's blob service; write "
            f"https://ACCOUNT.{PUBLIC_CLOUD}/container/prefix, or az://container/prefix and "
            "DS_CKPT_AZURE_ENDPOINT"
        )
    endpoint = f"https://{parts.netloc}"
    other = environ.get("DS_CKPT_AZURE_ENDPOINT", "").rstrip("/")
    if other and other != endpoint:
        raise SettingsError(
            f"DS_CKPT_AZURE_ENDPOINT={shown(other)}: the destination names its endpoint itself, as "
            f"{endpoint}; write az://container/prefix, or take the setting away"
        )
    return endpoint, host["account"]


def _of_settings(environ: Mapping[str, str], connection: Mapping[str, str]) -> tuple[str, str]:
    account = (
        environ.get("DS_CKPT_AZURE_ACCOUNT")
        or connection.get("accountname")
        or environ.get("AZURE_STORAGE_ACCOUNT")
        or ""
    )
    if account and not _ACCOUNT.fullmatch(account):
        raise SettingsError(f"{account!r} is no name of a storage account: 3 to 24 of a-z and 0-9")
    endpoint = environ.get("DS_CKPT_AZURE_ENDPOINT") or connection.get("blobendpoint")
    if endpoint:
        if not _ENDPOINT.fullmatch(endpoint):
            raise SettingsError(
                f"DS_CKPT_AZURE_ENDPOINT={shown(endpoint)}: write http(s)://host[:port][/account]"
            )
        return endpoint, account or _account_of(endpoint)
    if account:
        scheme = connection.get("defaultendpointsprotocol", "https")
        suffix = connection.get("endpointsuffix")
        return f"{scheme}://{account}.{'blob.' + suffix if suffix else PUBLIC_CLOUD}", account
    raise SettingsError(
        "az://: which storage account? Set DS_CKPT_AZURE_ACCOUNT, or DS_CKPT_AZURE_ENDPOINT, or "
        f"write https://ACCOUNT.{PUBLIC_CLOUD}/container/prefix"
    )


def _account_of(endpoint: str) -> str:
    parts = urlsplit(endpoint)
    host = _BLOB_HOST.fullmatch(parts.hostname or "")
    return host["account"] if host else parts.path.strip("/")


def _check_container(url: str, container: str) -> None:
    if not container:
        raise SettingsError(f"{url!r}: names no container")
    if not _CONTAINER.fullmatch(container):
        raise SettingsError(
            f"{container!r} is no name of a container: 3 to 63 of a-z, 0-9 and single hyphens"
        )


def _connection(text: str) -> Mapping[str, str]:
    """The fields of a connection string, names in lower case."""
    if not text:
        return {}
    pairs = [field.partition("=") for field in text.strip().strip(";").split(";")]
    fields = {name.strip().lower(): value.strip() for name, _, value in pairs}
    if "usedevelopmentstorage" in fields:
        raise SettingsError(
            "AZURE_STORAGE_CONNECTION_STRING: for an emulator set DS_CKPT_AZURE_ENDPOINT and "
            "AZURE_STORAGE_KEY"
        )
    if not fields.get("accountname") and not fields.get("blobendpoint"):
        raise SettingsError(
            "AZURE_STORAGE_CONNECTION_STRING has neither AccountName nor BlobEndpoint"
        )
    return fields


def _credentials(
    environ: Mapping[str, str], connection: Mapping[str, str]
) -> tuple[str | None, str | None, str | None]:
    """Key, SAS, file with a SAS: the first that is set, the others None."""
    if connection.get("accountkey"):
        return _key("AZURE_STORAGE_CONNECTION_STRING", connection["accountkey"]), None, None
    if connection.get("sharedaccesssignature"):
        sas = check_sas("AZURE_STORAGE_CONNECTION_STRING", connection["sharedaccesssignature"])
        return None, sas, None
    path = _file(environ, "DS_CKPT_AZURE_SAS_FILE")
    if path is not None:
        return None, None, path
    for name in ("DS_CKPT_AZURE_SAS_TOKEN", "AZURE_STORAGE_SAS_TOKEN"):
        if environ.get(name):
            return None, check_sas(name, environ[name]), None
    if environ.get("AZURE_STORAGE_KEY"):
        return _key("AZURE_STORAGE_KEY", environ["AZURE_STORAGE_KEY"]), None, None
    return None, None, None


def check_sas(name: str, text: str) -> str:
    """A shared access signature as the SDK wants it.

    Raises:
        SettingsError: it is none; the message holds the setting's name and not its value.
    """
    sas = text.strip().removeprefix("?")
    if "sig=" not in sas or any(character.isspace() for character in sas):
        raise SettingsError(f"{name} holds no shared access signature: sv=...&sig=...")
    return sas


def _key(name: str, text: str) -> str:
    try:
        base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise SettingsError(f"{name}: the account's key is not base64") from None
    return text


def _file(environ: Mapping[str, str], name: str) -> str | None:
    path = environ.get(name) or None
    if path is not None and not os.path.exists(path):
        raise SettingsError(f"{name}={shown_path(path)}: there is no such file")
    return path


def _tier(environ: Mapping[str, str]) -> str | None:
    tier = environ.get("DS_CKPT_AZURE_TIER", "").strip().capitalize()
    if tier and tier not in TIERS:
        raise SettingsError(
            f"DS_CKPT_AZURE_TIER={tier!r}: write {', '.join(TIERS)}; from Archive nothing can be "
            "restored at once"
        )
    return tier or None


def _customer_key(environ: Mapping[str, str]) -> bytes | None:
    name = "DS_CKPT_AZURE_CPK_FILE"
    path = _file(environ, name)
    if path is None:
        return None
    try:
        with open(path, "rb") as file:
            content = file.read(4096)
        key = content if len(content) == 32 else base64.b64decode(content.strip(), validate=True)
    except (OSError, ValueError) as error:
        raise SettingsError(f"{name}={path!r}: cannot be read as a key: {error}") from error
    if len(key) != 32:
        raise SettingsError(f"{name}={path!r}: a key has 32 bytes, or their base64")
    return key
