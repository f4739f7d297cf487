"""What goes wrong with Azure says what, where, and what to do; against Azurite, and by codes."""

from __future__ import annotations

import base64
import os
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from azure.core.credentials import AccessToken
from azure.core.exceptions import ClientAuthenticationError

from ds_ckpt_store.errors import (
    AccessError,
    AmbiguousError,
    CorruptionError,
    ExpiredError,
    IdentityError,
    NotFoundError,
    PausedError,
    PreconditionError,
    RefusedError,
    SettingsError,
    StoreError,
    ThrottledError,
    TransientError,
)
from ds_ckpt_store.stores import open_store
from ds_ckpt_store.stores.azure import AzureOptions, AzureStore, credentials
from ds_ckpt_store.stores.azure.answers import kind_of
from ds_ckpt_store.stores.port import BytesSource, IfAbsent, IfVersion, Part, Upload
from tests.faultproxy import Fault, FaultProxy
from tests.servers_azure import Azure

KEY = base64.b64encode(bytes(64)).decode()
SAS = "sv=2024-11-04&ss=b&srt=co&sp=rl&se=2099-01-01T00:00:00Z&sig=c2VjcmV0c2VjcmV0"
HERE = {"DS_CKPT_AZURE_ACCOUNT": "myaccount", "AZURE_STORAGE_KEY": KEY}
CALLS = {
    "put": lambda store: store.put("k", BytesSource(b"data")),
    "get": lambda store: store.get("k"),
    "read": lambda store: store.read("k", 0, 1, bytearray().extend),
    "head": lambda store: store.head("k"),
    "list": lambda store: list(store.list("")),
    "delete": lambda store: store.delete("k"),
    "begin": lambda store: store.begin("k", 1, {}),
    "uploads": lambda store: list(store.uploads("")),
}
WRITES = ("put", "delete", "begin")


@pytest.fixture
def store(azurite: Azure) -> AzureStore:
    return azurite.store(azurite.container())


# ---- answers


@pytest.mark.parametrize("call", [call for call in CALLS if call not in ("head", "delete")])
def test_a_container_that_does_not_exist_is_named(azurite: Azure, call: str) -> None:
    words = r"container 'no-such-container' does not exist at http.*create it"
    with pytest.raises(RefusedError, match=words):
        CALLS[call](azurite.store("no-such-container"))


@pytest.mark.parametrize("call", CALLS)
def test_a_wrong_key_says_what_to_check_and_is_not_told(azurite: Azure, call: str) -> None:
    environ = {**azurite.environ, "AZURE_STORAGE_KEY": KEY}
    with pytest.raises(AccessError, match=r"ctr at http.*the account's key; ") as raised:
        CALLS[call](azurite.store("ctr", environ=environ))
    assert KEY not in str(raised.value)


def test_a_signature_that_does_not_allow_it_names_the_role(azurite: Azure) -> None:
    container = azurite.container()
    environ = {
        "DS_CKPT_AZURE_ENDPOINT": azurite.endpoint,
        "AZURE_STORAGE_SAS_TOKEN": "?" + azurite.sas(permission="rl"),
    }
    store = azurite.store(container, environ=environ)
    assert list(store.list("")) == []
    with pytest.raises(AccessError, match="permissions r, a, c, w, d and l") as raised:
        store.put("k", BytesSource(b"data"))
    assert "sig=" not in str(raised.value)


def test_an_expired_signature_from_the_environment_says_when(azurite: Azure) -> None:
    environ = {
        "DS_CKPT_AZURE_ENDPOINT": azurite.endpoint,
        "DS_CKPT_AZURE_SAS_TOKEN": azurite.sas(-60),
    }
    with pytest.raises(AccessError, match=r"expired at 20\d\d-.*Z: renew it"):
        azurite.store("ctr", environ=environ).get("k")


def test_a_file_that_is_being_written_is_not_taken_for_a_signature(
    azurite: Azure, tmp_path: Path
) -> None:
    file = tmp_path / "sas"
    file.write_text(azurite.sas(-60))
    environ = {"DS_CKPT_AZURE_ENDPOINT": azurite.endpoint, "DS_CKPT_AZURE_SAS_FILE": str(file)}
    store = azurite.store(azurite.container(), environ=environ)
    for content in ("", "sv=2024", None):
        if content is None:
            file.unlink()
        else:
            file.write_text(content)
        with pytest.raises(ExpiredError, match="perhaps somebody is writing it"):
            store.get("k")
    file.write_text(azurite.sas() + "\n")
    with pytest.raises(ExpiredError, match="read anew"):
        store.get("k")
    with pytest.raises(NotFoundError):
        store.get("k")


def test_conditions_that_do_not_hold_are_preconditions(store: AzureStore) -> None:
    for size in (5, 2 << 20):
        key, body = f"k{size}", BytesSource(bytes(size))
        with pytest.raises(PreconditionError):
            store.put(key, body, condition=IfVersion('"0x8DDDDDDDDDDDDDD"'))
        info = store.put(key, body, condition=IfAbsent())
        with pytest.raises(PreconditionError):
            store.put(key, body, condition=IfAbsent())
        with pytest.raises(PreconditionError):
            store.put(key, body, condition=IfVersion('"0x8DDDDDDDDDDDDDD"'))
        store.put(key, body, condition=IfVersion(info.version))


def test_a_lease_of_somebody_else_is_no_lost_race(azurite: Azure) -> None:
    container = azurite.container()
    store = azurite.store(container)
    store.put("k", BytesSource(b"1"))
    azurite.client(container).get_blob_client("run/k").acquire_lease(60)
    with pytest.raises(RefusedError, match="somebody holds a lease"):
        store.put("k", BytesSource(b"2"))


@pytest.mark.parametrize(
    ("code", "status", "read", "write"),
    [
        ("AuthenticationFailed", 403, IdentityError, IdentityError),
        ("InvalidAuthenticationInfo", 401, IdentityError, IdentityError),
        ("AuthorizationPermissionMismatch", 403, AccessError, AccessError),
        ("KeyBasedAuthenticationNotPermitted", 403, AccessError, AccessError),
        ("", 403, AccessError, AccessError),
        ("ContainerNotFound", 404, RefusedError, RefusedError),
        ("ContainerBeingDeleted", 409, RefusedError, RefusedError),
        ("BlobNotFound", 404, NotFoundError, NotFoundError),
        ("", 404, NotFoundError, NotFoundError),
        ("BlobAlreadyExists", 409, PreconditionError, PreconditionError),
        ("ConditionNotMet", 412, PreconditionError, PreconditionError),
        ("LeaseIdMissing", 412, RefusedError, RefusedError),
        ("BlobImmutableDueToPolicy", 409, RefusedError, RefusedError),
        ("Crc64Mismatch", 400, CorruptionError, CorruptionError),
        ("Md5Mismatch", 400, CorruptionError, CorruptionError),
        ("InvalidRange", 416, CorruptionError, CorruptionError),
        ("ServerBusy", 503, ThrottledError, ThrottledError),
        ("", 429, ThrottledError, ThrottledError),
        ("OperationTimedOut", 500, TransientError, AmbiguousError),
        ("InternalError", 500, TransientError, AmbiguousError),
        ("", 502, TransientError, AmbiguousError),
        ("", 501, RefusedError, RefusedError),
        ("InvalidInput", 400, RefusedError, RefusedError),
    ],
)
def test_codes_and_statuses_mean(
    code: str, status: int, read: type[StoreError], write: type[StoreError]
) -> None:
    assert kind_of(code, status, write=False) is read
    assert kind_of(code, status, write=True) is write


# ---- no answers


@pytest.mark.parametrize("call", CALLS)
def test_a_server_that_is_down_may_come_back(azurite: Azure, call: str) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        gone = azurite.through(f"http://127.0.0.1:{unused.getsockname()[1]}")
        with pytest.raises(TransientError, match=f"{gone.endpoint} cannot be reached") as raised:
            CALLS[call](gone.store("ctr"))
    assert not isinstance(raised.value, AmbiguousError), "nothing was sent"


@pytest.fixture
def hangs_up(azurite: Azure) -> Iterator[AzureStore]:
    """A server that reads a request and then closes the connection without an answer."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                with connection:
                    connection.recv(1 << 16)

        threading.Thread(target=serve, daemon=True).start()
        yield azurite.through(f"http://127.0.0.1:{server.getsockname()[1]}").store("ctr")
        server.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize("call", CALLS)
def test_only_a_write_whose_answer_is_lost_is_ambiguous(hangs_up: AzureStore, call: str) -> None:
    with pytest.raises(TransientError) as raised:
        CALLS[call](hangs_up)
    assert isinstance(raised.value, AmbiguousError) == (call in WRITES)


@pytest.mark.parametrize("size", [4, 2 << 20])
def test_what_a_source_raises_while_it_is_sent_comes_through(store: AzureStore, size: int) -> None:
    class Stopped(BytesSource):
        opened = 0

        def open(self):
            reader = super().open()
            self.opened += 1
            if self.opened == 1:  # for the checksums
                return reader

            class Reader:
                def read(self, _=-1):
                    raise PausedError("asked to stop")

                seek, tell, close = reader.seek, reader.tell, reader.close

            return Reader()

    with pytest.raises(PausedError):
        store.put("k", Stopped(bytes(size)))
    assert list(store.list("")) == []


def test_no_identity_at_all_says_how_to_give_one(monkeypatch) -> None:
    """Nothing is sent: the address is a name that is never given to anybody."""
    for name in [name for name in os.environ if name.startswith(("AZURE_", "MSI_", "IDENTITY_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AZURE_TOKEN_CREDENTIALS", "EnvironmentCredential")
    store = open_store("az://ctr/run", {"DS_CKPT_AZURE_ENDPOINT": "https://storage.invalid"})
    with pytest.raises(AccessError, match="give the pod a managed or workload identity"):
        store.get("k")


# ---- settings


@pytest.mark.parametrize(
    ("url", "environ", "endpoint", "account", "container", "prefix"),
    [
        (
            "az://ctr/a/b/",
            HERE,
            "https://myaccount.blob.core.windows.net",
            "myaccount",
            "ctr",
            "a/b",
        ),
        (
            "https://myaccount.blob.core.usgovcloudapi.net/ctr/a",
            {"AZURE_STORAGE_KEY": KEY},
            "https://myaccount.blob.core.usgovcloudapi.net",
            "myaccount",
            "ctr",
            "a",
        ),
        (
            "https://myaccount.privatelink.blob.core.windows.net/ctr",
            {"AZURE_STORAGE_KEY": KEY},
            "https://myaccount.privatelink.blob.core.windows.net",
            "myaccount",
            "ctr",
            "",
        ),
        (
            "az://ctr",
            {"DS_CKPT_AZURE_ENDPOINT": "http://azurite:10000/acct", "AZURE_STORAGE_KEY": KEY},
            "http://azurite:10000/acct",
            "acct",
            "ctr",
            "",
        ),
        (
            "az://ctr/p",
            {
                "AZURE_STORAGE_CONNECTION_STRING": "DefaultEndpointsProtocol=https;AccountName="
                f"myaccount;AccountKey={KEY};EndpointSuffix=core.chinacloudapi.cn"
            },
            "https://myaccount.blob.core.chinacloudapi.cn",
            "myaccount",
            "ctr",
            "p",
        ),
        (
            "az://ctr/p",
            {
                "AZURE_STORAGE_CONNECTION_STRING": "BlobEndpoint=https://blobs.example.com;"
                f"SharedAccessSignature={SAS}"
            },
            "https://blobs.example.com",
            "",
            "ctr",
            "p",
        ),
    ],
)
def test_where_it_is(
    url: str, environ: Mapping[str, str], endpoint: str, account: str, container: str, prefix: str
) -> None:
    found = AzureOptions.read(url, environ)
    assert (found.endpoint, found.account) == (endpoint, account)
    assert (found.container, found.prefix) == (container, prefix)
    store = open_store(url, environ)
    assert store.url == url.rstrip("/")
    store.close()


def test_credentials_are_looked_for_in_order_and_never_shown(tmp_path: Path) -> None:
    file = tmp_path / "sas"
    file.write_text(SAS)
    environ = {
        **HERE,
        "AZURE_STORAGE_CONNECTION_STRING": f"AccountName=myaccount;AccountKey={KEY}",
        "DS_CKPT_AZURE_SAS_FILE": str(file),
        "AZURE_STORAGE_SAS_TOKEN": SAS,
    }
    expected = [(KEY, None, None), (None, None, str(file)), (None, SAS, None), (KEY, None, None)]
    names = [name for name in environ if name != "DS_CKPT_AZURE_ACCOUNT"]
    names = names[1:] + names[:1]
    for name, kinds in zip(names, expected, strict=True):
        found = AzureOptions.read("az://ctr", environ)
        assert (found.key, found.sas, found.sas_file) == kinds
        assert KEY not in repr(found)
        assert SAS not in repr(found)
        del environ[name]
    found = AzureOptions.read("az://ctr", environ)
    assert (found.key, found.sas, found.sas_file) == (None, None, None)


@pytest.mark.parametrize(
    ("url", "environ", "words"),
    [
        ("az://ctr/run", {}, "which storage account"),
        ("az://ctr/run", {"DS_CKPT_AZURE_ACCOUNT": "No_Such"}, "no name of a storage account"),
        ("az:///run", HERE, "names no container"),
        ("az://UPPER/run", HERE, "no name of a container"),
        ("az://a--b/run", HERE, "no name of a container"),
        ("az://user:pw@ctr/run", HERE, "credentials do not belong into a URL"),
        ("https://myaccount.blob.core.windows.net/", {}, "names no container"),
        ("https://myaccount.dfs.core.windows.net/ctr", {}, "no address of Azure's blob service"),
        ("https://example.com/ctr", {}, "no address of Azure's blob service"),
        ("https://myaccount.blob.core.windows.net/ctr?sv=1&sig=x", {}, "no query"),
        (
            "https://myaccount.blob.core.windows.net/ctr",
            {"DS_CKPT_AZURE_ENDPOINT": "https://other.blob.core.windows.net"},
            "names its endpoint itself",
        ),
        (
            "https://myaccount.blob.core.windows.net/ctr",
            {"AZURE_STORAGE_CONNECTION_STRING": f"AccountName=other;AccountKey={KEY}"},
            "of the account 'other'",
        ),
        ("az://ctr", {"DS_CKPT_AZURE_ENDPOINT": "ftp://x"}, "DS_CKPT_AZURE_ENDPOINT"),
        ("az://ctr", {"DS_CKPT_AZURE_ENDPOINT": "http://x/acct"}, "need https"),
        ("az://ctr", {**HERE, "AZURE_STORAGE_KEY": "not base64!"}, "AZURE_STORAGE_KEY"),
        ("az://ctr", {**HERE, "DS_CKPT_AZURE_SAS_TOKEN": "token"}, "DS_CKPT_AZURE_SAS_TOKEN"),
        ("az://ctr", {**HERE, "DS_CKPT_AZURE_SAS_FILE": "/no/file"}, "DS_CKPT_AZURE_SAS_FILE"),
        ("az://ctr", {**HERE, "DS_CKPT_AZURE_SAS_FILE": os.devnull}, "DS_CKPT_AZURE_SAS_FILE"),
        ("az://ctr", {**HERE, "DS_CKPT_AZURE_TIER": "Archive"}, "DS_CKPT_AZURE_TIER"),
        ("az://ctr", {**HERE, "DS_CKPT_AZURE_CPK_FILE": os.devnull}, "DS_CKPT_AZURE_CPK_FILE"),
        ("az://ctr", {**HERE, "DS_CKPT_AZURE_CA_BUNDLE": "/no/file"}, "DS_CKPT_AZURE_CA_BUNDLE"),
        ("az://ctr", {**HERE, "DS_CKPT_AZURE_API_VERSION": "1999"}, "Unsupported API version"),
        ("az://ctr", {"AZURE_STORAGE_CONNECTION_STRING": "nonsense"}, "neither AccountName"),
        (
            "az://ctr",
            {"AZURE_STORAGE_CONNECTION_STRING": "UseDevelopmentStorage=true"},
            "DS_CKPT_AZURE_ENDPOINT",
        ),
    ],
)
def test_what_cannot_work_is_refused_at_start(
    url: str, environ: Mapping[str, str], words: str
) -> None:
    with pytest.raises(SettingsError, match=words):
        open_store(url, environ)


def test_settings_that_exclude_each_other(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_bytes(bytes(32))
    environ = {**HERE, "DS_CKPT_AZURE_CPK_FILE": str(file)}
    assert AzureOptions.read("az://ctr", environ).customer_key == bytes(32)
    file.write_text(base64.b64encode(bytes(32)).decode() + "\n")
    assert AzureOptions.read("az://ctr", environ).customer_key == bytes(32)
    with pytest.raises(SettingsError, match="exclude each other"):
        AzureOptions.read("az://ctr", {**environ, "DS_CKPT_AZURE_ENCRYPTION_SCOPE": "scope"})
    with pytest.raises(SettingsError, match="needs https"):
        AzureOptions.read(
            "az://ctr", {**environ, "DS_CKPT_AZURE_ENDPOINT": "http://127.0.0.1:1/acct"}
        )


def test_the_tier_is_for_shards_only(azurite: Azure) -> None:
    container = azurite.container()
    environ = {**azurite.environ, "DS_CKPT_AZURE_TIER": "cool"}
    store = azurite.store(container, environ=environ)
    for key in ("latest", ".ds_ckpt/records/1", "tag@1/small"):
        store.put(key, BytesSource(b"x"))
    store.put("tag@1/block", BytesSource(bytes(2 << 20)))
    upload = store.begin("tag@1/parts", 1, {})
    store.complete(upload, [store.put_part(upload, 1, BytesSource(b"x"))])
    found = {blob.name[4:]: blob.blob_tier for blob in azurite.client(container).list_blobs()}
    assert {key for key, tier in found.items() if tier == "Cool"} == {
        "tag@1/small",
        "tag@1/block",
        "tag@1/parts",
    }


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """For loopback, signed by itself, and its key."""
    folder = tmp_path_factory.mktemp("certificate")
    paths = folder / "cert.pem", folder / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"]
    command += ["-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"]
    command += ["-out", str(paths[0]), "-keyout", str(paths[1])]
    subprocess.run(command, check=True, capture_output=True)
    return paths


def test_a_customers_key_and_a_scope_go_with_each_call_over_tls(
    azurite: Azure, certificate: tuple[Path, Path], tmp_path: Path
) -> None:
    """Azurite encrypts nothing; what is seen here is that every call that needs them has them."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*certificate)
    key = tmp_path / "key"
    key.write_bytes(bytes(range(32)))
    host, _, port = azurite.origin.removeprefix("http://").partition(":")
    container = azurite.container()
    extras = {
        "x-ms-encryption-key": {"DS_CKPT_AZURE_CPK_FILE": str(key)},
        "x-ms-encryption-scope": {"DS_CKPT_AZURE_ENCRYPTION_SCOPE": "scope"},
    }
    with FaultProxy(host, int(port), tls=context) as proxy:
        far = azurite.through(proxy.url)
        untrusted = far.store(container)
        with pytest.raises(RefusedError, match=r"not trusted.*DS_CKPT_AZURE_CA_BUNDLE"):
            untrusted.get("k")
        for header, settings in extras.items():
            environ = {**far.environ, "DS_CKPT_AZURE_CA_BUNDLE": str(certificate[0]), **settings}
            store = far.store(container, environ=environ)
            before = len(proxy.seen)
            store.put("k", BytesSource(b"data"))
            upload = store.begin("big", 1, {})
            store.complete(upload, [store.put_part(upload, 1, BytesSource(b"data"))])
            assert store.get("big")[0] == b"data"
            store.head("big")
            seen = proxy.seen[before:]
            needed = [
                each
                for each in seen
                if each.line.startswith("PUT") or header == "x-ms-encryption-key"
            ]
            assert len(needed) >= 4
            assert all(header in each.headers for each in needed)
            if header == "x-ms-encryption-key":
                given = {each.headers[header] for each in needed}
                assert given == {base64.b64encode(bytes(range(32))).decode()}


class Identity:
    """Tokens as azure-identity gives them, without a service that could give real ones."""

    def __init__(self) -> None:
        self.gone = False
        self.asked = 0

    def get_token(self, *scopes: str, **_: object) -> AccessToken:
        assert scopes == ("https://storage.azure.com/.default",)
        self.asked += 1
        if self.gone:
            raise ClientAuthenticationError("the identity endpoint does not answer")
        return AccessToken(f"token{self.asked}", int(time.time()) + 3600)


def test_a_token_that_the_service_takes_no_more_is_asked_for_anew(
    azurite: Azure, certificate: tuple[Path, Path], monkeypatch
) -> None:
    identity = Identity()
    monkeypatch.setattr(credentials, "_default", lambda: identity)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*certificate)
    expired = {
        "status": 401,
        "body": "<Error><Code>InvalidAuthenticationInfo</Code><Message>Lifetime validation failed."
        "</Message></Error>",
        "headers": {"Content-Type": "application/xml"},
    }
    with FaultProxy("127.0.0.1", 1, tls=context) as proxy:
        environ = {
            "DS_CKPT_AZURE_ENDPOINT": proxy.url,
            "DS_CKPT_AZURE_CA_BUNDLE": str(certificate[0]),
        }
        store = open_store("az://ctr/run", environ)
        proxy.add(Fault("PUT .*/refused", "status", times=None, **expired))
        created = {"ETag": '"0x1"', "Last-Modified": "Mon, 30 Nov 2026 20:00:00 GMT"}
        proxy.add(Fault("PUT", "status", status=201, body="", headers=created, times=None))
        with pytest.raises(AccessError, match="DefaultAzureCredential"):
            store.put("refused", BytesSource(b"data"))
        store.put("k", BytesSource(b"data"))
        assert proxy.seen[-1].headers["authorization"].startswith("Bearer token")
        with pytest.raises(ExpiredError, match="a new token will be asked for") as raised:
            store.put("refused", BytesSource(b"data"))
        assert "Bearer" not in str(raised.value)
        asked = identity.asked
        store.put("k", BytesSource(b"data"))
        assert identity.asked == asked + 1
        identity.gone = True
        again = open_store("az://ctr/run", environ)
        with pytest.raises(AccessError, match="give the pod a managed or workload identity"):
            again.put("k", BytesSource(b"data"))


def test_nothing_of_an_identity_is_imported_while_a_key_is_used() -> None:
    code = (
        "import sys\n"
        "from ds_ckpt_store.stores import open_store\n"
        "import os\n"
        "open_store('az://ctr/run')\n"
        "print([name for name in sys.modules if name.startswith(('azure.identity', 'msal'))])"
    )
    found = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **HERE}, capture_output=True, text=True
    )
    assert (found.stdout, found.stderr) == ("[]\n", "")


def test_an_upload_that_is_gone_is_not_found(store: AzureStore) -> None:
    upload = Upload("k", "0123456789abcdef")
    for call in (
        lambda: store.parts(upload),
        lambda: store.put_part(upload, 1, BytesSource(b"x")),
        lambda: store.complete(upload, []),
        lambda: store.complete(upload, [Part(1, 1, 0, "0123456789abcdef-00001-c-00000000")]),
    ):
        with pytest.raises(NotFoundError):
            call()
    assert list(store.uploads("")) == []
    assert list(store.list("")) == []
