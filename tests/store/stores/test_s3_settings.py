"""How objects are stored in S3: what each setting sends, for which objects, and what it refuses."""

from __future__ import annotations

import base64
import datetime
import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from botocore.exceptions import ClientError

from ds_ckpt_store.errors import SettingsError, StoreError
from ds_ckpt_store.stores import open_store
from ds_ckpt_store.stores.port import BytesSource, Part, Proof, Store
from ds_ckpt_store.stores.s3 import S3Options
from ds_ckpt_store.stores.s3.store import PROOFS
from tests import certificates
from tests.faultproxy import HOST, Fault, FaultProxy
from tests.servers import S3

MIB = 1 << 20
KEY = bytes(range(32))
SHARD, RECORD, POINTER = "step1@018f-00/shard.pt", ".ds_ckpt/checkpoints/x.json", "latest"

LOCKED = {"OBJECT_LOCK": "governance", "OBJECT_LOCK_DAYS": "30", "LEGAL_HOLD": "true"}


def settings(values: Mapping[str, str]) -> dict[str, str]:
    return {f"DS_CKPT_S3_{name}": value for name, value in values.items()}


# ---- what is sent; no server here knows them all


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> certificates.Certificates:
    return certificates.make(tmp_path_factory.mktemp("tls"))


@pytest.fixture
def answering(files: certificates.Certificates, aws_credentials) -> Iterator[FaultProxy]:
    """Answers well to everything that a store asks, without looking at it."""
    begun = "<R><UploadId>u</UploadId></R>"
    listed = "<R><IsTruncated>false</IsTruncated></R>"
    stored = {"ETag": '"1"', "Last-Modified": "Mon, 30 Nov 2026 00:00:00 GMT"}
    with FaultProxy(HOST, 1, tls=files.context()) as proxy:
        for pattern, body, headers in (
            (r"^POST .*\?uploads", begun, {}),
            (r"^POST ", "<R><ETag>1</ETag></R>", {}),
            (r"^GET .*(list-type|uploads|uploadId)", listed, {}),
            ("", "", stored),
        ):
            proxy.add(Fault(pattern, "status", status=200, body=body, headers=headers, times=None))
        yield proxy


@pytest.fixture
def store_with(answering: FaultProxy, files: certificates.Certificates):
    def opened(values: Mapping[str, str]) -> Store:
        common = {"ENDPOINT": answering.url, "CA_BUNDLE": str(files.authority)}
        return open_store("s3://bkt/run", settings({**common, **values}))

    return opened


def sent(proxy: FaultProxy, store: Store, key: str) -> dict[str, dict[str, str]]:
    """The ``x-amz-`` headers of each call of the port that concerns a key."""
    upload = store.begin(key, 1, {})
    part = Part(1, 1, 0, "1")
    calls = {
        "put": lambda: store.put(key, BytesSource(b"x")),
        "get": lambda: store.get(key),
        "head": lambda: store.head(key),
        "list": lambda: list(store.list("")),
        "delete": lambda: store.delete(key),
        "begin": lambda: store.begin(key, 1, {}),
        "put_part": lambda: store.put_part(upload, 1, BytesSource(b"x")),
        "parts": lambda: store.parts(upload),
        "complete": lambda: store.complete(upload, [part]),
        "abort": lambda: store.abort(upload),
        "uploads": lambda: list(store.uploads("")),
    }
    found = {}
    for name, call in calls.items():
        before = len(proxy.seen)
        call()
        assert len(proxy.seen) == before + 1
        found[name] = {
            header.removeprefix("x-amz-"): value
            for header, value in proxy.seen[-1].headers.items()
            if header.startswith(("x-amz-", "content-md5"))
        }
    return found


def having(calls: dict[str, dict[str, str]], header: str) -> set[str]:
    return {name for name, headers in calls.items() if header in headers}


CREATING = {"put", "begin"}
BYTES = {"put", "get", "head", "begin", "put_part", "parts", "complete"}


@pytest.mark.parametrize("key", [SHARD, RECORD, POINTER])
def test_who_pays_is_said_with_every_call(answering, store_with, key: str) -> None:
    calls = sent(answering, store_with({"REQUEST_PAYER": "requester"}), key)
    assert {headers["request-payer"] for headers in calls.values()} == {"requester"}


@pytest.mark.parametrize("key", [SHARD, RECORD, POINTER])
@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"ENCRYPTION": "sse-s3"}, {"server-side-encryption": "AES256"}),
        (
            {
                "ENCRYPTION": "sse-kms",
                "KMS_KEY_ID": "arn:aws:kms:eu-1:1:key/k",
                "KMS_CONTEXT": '{"team": "a"}',
                "KMS_BUCKET_KEY": "true",
            },
            {
                "server-side-encryption": "aws:kms",
                "server-side-encryption-aws-kms-key-id": "arn:aws:kms:eu-1:1:key/k",
                "server-side-encryption-context": base64.b64encode(b'{"team": "a"}').decode(),
                "server-side-encryption-bucket-key-enabled": "true",
            },
        ),
        ({"ACL": "bucket-owner-full-control"}, {"acl": "bucket-owner-full-control"}),
    ],
)
def test_every_object_is_created_as_the_settings_say(
    answering, store_with, key: str, values: dict[str, str], expected: dict[str, str]
) -> None:
    calls = sent(answering, store_with(values), key)
    for name in CREATING:
        assert calls[name].items() >= expected.items()
    for header in expected:
        assert having(calls, header) == CREATING


@pytest.mark.parametrize("key", [SHARD, RECORD])
def test_a_customers_key_goes_with_all_that_touches_bytes(
    answering, store_with, tmp_path: Path, key: str
) -> None:
    file = tmp_path / "key"
    file.write_bytes(KEY)
    store = store_with({"ENCRYPTION": "sse-c", "SSE_C_KEY_FILE": str(file)})
    calls = sent(answering, store, key)
    md5 = base64.b64encode(hashlib.md5(KEY).digest()).decode()
    prefix = "server-side-encryption-customer-"
    expected = {
        f"{prefix}algorithm": "AES256",
        f"{prefix}key": base64.b64encode(KEY).decode(),
        f"{prefix}key-md5": md5,
    }
    for header in expected:
        assert having(calls, header) == BYTES
    assert all(calls[name].items() >= expected.items() for name in BYTES)


@pytest.mark.parametrize("key", [SHARD, RECORD, POINTER])
def test_class_tags_and_locks_are_for_data_alone(answering, store_with, key: str) -> None:
    values = {"STORAGE_CLASS": "STANDARD_IA", "TAGS": "team=a&note=b%20c", **LOCKED}
    calls = sent(answering, store_with(values), key)
    expected = {
        "storage-class": "STANDARD_IA",
        "tagging": "team=a&note=b+c",
        "object-lock-mode": "GOVERNANCE",
        "object-lock-legal-hold": "ON",
    }
    where = CREATING if key == SHARD else set()
    for header in [*expected, "object-lock-retain-until-date"]:
        assert having(calls, header) == where
    for name in where:
        assert calls[name].items() >= expected.items()
        until = calls[name]["object-lock-retain-until-date"].replace("Z", "+00:00")
        left = datetime.datetime.fromisoformat(until) - datetime.datetime.now(datetime.timezone.utc)
        assert left == pytest.approx(datetime.timedelta(days=30), abs=datetime.timedelta(hours=1))


@pytest.mark.parametrize("values", [{"LEGAL_HOLD": "true"}, LOCKED])
@pytest.mark.parametrize("proof", PROOFS)
def test_what_is_locked_always_comes_with_a_checksum(
    answering, store_with, values: dict[str, str], proof: Proof
) -> None:
    store = store_with(values)
    store.use_proof(proof)
    calls = sent(answering, store, SHARD)
    header = "sdk-checksum-algorithm" if proof is Proof.STORED_CHECKSUM else "content-md5"
    assert {"put", "put_part"} <= having(calls, header)
    if proof is Proof.STORED_CHECKSUM:
        assert having(calls, "checksum-crc32c") >= {"put", "put_part"}


def test_without_settings_nothing_of_this_is_sent(answering, store_with) -> None:
    calls = sent(answering, store_with({}), SHARD)
    allowed = (
        "date",
        "content-sha256",
        "checksum",
        "sdk-",
        "meta-",
        "mp-object-size",
        "content-md5",
    )
    for headers in calls.values():
        assert not [header for header in headers if not header.startswith(allowed)]


@pytest.mark.parametrize("proof", PROOFS)
def test_no_body_is_ever_sent_in_aws_chunks(answering, store_with, proof: Proof) -> None:
    """A server that does not know that framing would store it as content."""
    store = store_with({})
    store.use_proof(proof)
    sent(answering, store, SHARD)
    for seen in answering.seen:
        assert "aws-chunked" not in seen.headers.get("content-encoding", "")
        assert "x-amz-trailer" not in seen.headers
        assert "x-amz-decoded-content-length" not in seen.headers
        assert "transfer-encoding" not in seen.headers
        assert "STREAMING" not in seen.headers.get("x-amz-content-sha256", "")


# ---- what a real server makes of them


def test_a_customers_key_opens_what_it_has_closed(seaweed: S3, tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text(KEY.hex() + "\n")
    server = seaweed.https
    assert server is not None
    bucket = server.bucket()
    store = server.store(bucket, encryption="sse-c", sse_c_key_file=str(file))
    bodies = [BytesSource(bytes(5 * MIB)), BytesSource(b"the end")]
    upload = store.begin(SHARD, 5 * MIB + 7, {})
    parts = [store.put_part(upload, number, body) for number, body in enumerate(bodies, 1)]
    store.complete(upload, parts)
    assert store.head(SHARD).size == 5 * MIB + 7
    found = bytearray()
    store.read(SHARD, 5 * MIB - 1, 8, found.extend)
    assert bytes(found) == b"\0the end"
    store.put(RECORD, BytesSource(b"{}"))
    assert store.get(RECORD)[0] == b"{}"
    for key in (SHARD, RECORD):
        with pytest.raises(StoreError):
            server.store(bucket).get(key)
        with pytest.raises(ClientError):
            server.client().get_object(Bucket=bucket, Key=f"run/{key}")


def test_class_and_tags_are_stored(seaweed: S3) -> None:
    bucket = seaweed.bucket()
    store = seaweed.store(bucket, storage_class="STANDARD_IA", tags="team=a&note=b%20c")
    store.put(SHARD, BytesSource(b"x"))
    store.put(RECORD, BytesSource(b"{}"))
    client = seaweed.client()
    found = client.get_object_tagging(Bucket=bucket, Key=f"run/{SHARD}")["TagSet"]
    assert {tag["Key"]: tag["Value"] for tag in found} == {"team": "a", "note": "b c"}
    assert client.get_object_tagging(Bucket=bucket, Key=f"run/{RECORD}")["TagSet"] == []
    head = client.head_object(Bucket=bucket, Key=f"run/{SHARD}")
    assert head["StorageClass"] == "STANDARD_IA"
    assert "StorageClass" not in client.head_object(Bucket=bucket, Key=f"run/{RECORD}")


def test_what_is_locked_cannot_be_removed_for_good(seaweed: S3) -> None:
    bucket = f"{seaweed.bucket()}-locked"
    client = seaweed.client()
    client.create_bucket(Bucket=bucket, ObjectLockEnabledForBucket=True)
    store = seaweed.store(bucket, object_lock="governance", object_lock_days="1")
    store.put(SHARD, BytesSource(b"x"))
    store.put(RECORD, BytesSource(b"{}"))
    for key, locked in ((SHARD, True), (RECORD, False)):
        versions = client.list_object_versions(Bucket=bucket, Prefix=f"run/{key}")["Versions"]
        (version,) = (each["VersionId"] for each in versions)
        if locked:
            with pytest.raises(ClientError):
                client.delete_object(Bucket=bucket, Key=f"run/{key}", VersionId=version)
        else:
            client.delete_object(Bucket=bucket, Key=f"run/{key}", VersionId=version)
    store.delete(SHARD)
    assert list(store.list("")) == [], "a delete without a version hides it, as retention needs"


# ---- what cannot work


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"REQUEST_PAYER": "owner"}, "REQUEST_PAYER"),
        ({"ACL": "public-read"}, "ACL"),
        ({"ENCRYPTION": "AES256"}, "ENCRYPTION"),
        ({"KMS_KEY_ID": "k"}, "KMS_KEY_ID"),
        ({"KMS_KEY_ID": "k", "ENCRYPTION": "sse-s3"}, "KMS_KEY_ID"),
        ({"KMS_CONTEXT": "{}"}, "KMS_CONTEXT"),
        ({"KMS_CONTEXT": "team=a", "ENCRYPTION": "sse-kms"}, "KMS_CONTEXT"),
        ({"KMS_CONTEXT": '{"a": 1}', "ENCRYPTION": "sse-kms"}, "KMS_CONTEXT"),
        ({"KMS_BUCKET_KEY": "true"}, "KMS_BUCKET_KEY"),
        ({"KMS_BUCKET_KEY": "perhaps", "ENCRYPTION": "sse-kms"}, "KMS_BUCKET_KEY"),
        ({"ENCRYPTION": "sse-c"}, "SSE_C_KEY_FILE"),
        ({"SSE_C_KEY_FILE": __file__}, "SSE_C_KEY_FILE"),
        ({"SSE_C_KEY_FILE": "/no/such", "ENCRYPTION": "sse-c"}, "SSE_C_KEY_FILE"),
        ({"SSE_C_KEY_FILE": __file__, "ENCRYPTION": "sse-c"}, "SSE_C_KEY_FILE"),
        ({"STORAGE_CLASS": "standard ia"}, "STORAGE_CLASS"),
        ({"STORAGE_CLASS": "GLACIER"}, "STORAGE_CLASS"),
        ({"STORAGE_CLASS": "DEEP_ARCHIVE"}, "STORAGE_CLASS"),
        ({"TAGS": "team"}, "TAGS"),
        ({"TAGS": "a=1&a=2"}, "TAGS"),
        ({"TAGS": "=1"}, "TAGS"),
        ({"TAGS": "aws:a=1"}, "TAGS"),
        ({"TAGS": "&".join(f"k{number}=v" for number in range(11))}, "TAGS"),
        ({"TAGS": f"k={'v' * 257}"}, "TAGS"),
        ({"OBJECT_LOCK": "governance"}, "OBJECT_LOCK_DAYS"),
        ({"OBJECT_LOCK_DAYS": "3"}, "OBJECT_LOCK"),
        ({"OBJECT_LOCK": "forever", "OBJECT_LOCK_DAYS": "3"}, "OBJECT_LOCK"),
        ({"OBJECT_LOCK": "governance", "OBJECT_LOCK_DAYS": "0"}, "OBJECT_LOCK_DAYS"),
        ({"OBJECT_LOCK": "governance", "OBJECT_LOCK_DAYS": "many"}, "OBJECT_LOCK_DAYS"),
        ({"LEGAL_HOLD": "perhaps"}, "LEGAL_HOLD"),
    ],
)
def test_settings_that_cannot_work_are_named(values: dict[str, str], named: str) -> None:
    with pytest.raises(SettingsError, match=f"DS_CKPT_S3_{named}"):
        open_store("s3://bkt/run", settings(values))


def test_a_customers_key_never_goes_in_the_clear(seaweed: S3, tmp_path: Path, monkeypatch) -> None:
    file = tmp_path / "key"
    file.write_bytes(KEY)
    values = settings({"ENCRYPTION": "sse-c", "SSE_C_KEY_FILE": str(file)})
    with pytest.raises(SettingsError, match="in the clear"):
        open_store("s3://bkt/run", {**values, "DS_CKPT_S3_ENDPOINT": seaweed.endpoint})
    monkeypatch.setenv("AWS_ENDPOINT_URL", seaweed.endpoint)  # boto3's own
    with pytest.raises(SettingsError, match="in the clear"):
        open_store("s3://bkt/run", values).get("k")


@pytest.mark.parametrize(
    "text", [KEY, KEY.hex().encode(), base64.b64encode(KEY), base64.b64encode(KEY) + b"\n"]
)
def test_a_customers_key_is_read_from_its_file_and_shown_nowhere(
    tmp_path: Path, text: bytes
) -> None:
    file = tmp_path / "key"
    file.write_bytes(text)
    values = {"ENCRYPTION": "sse-c", "SSE_C_KEY_FILE": str(file)}
    options = S3Options.from_environ(settings(values))
    assert options.customer_key == KEY
    assert "customer_key" not in repr(options)
