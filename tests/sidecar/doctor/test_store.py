"""What we may do in the store, and what it promises."""

from __future__ import annotations

import json
import random
import socket
import time
from collections.abc import Iterator

import pytest

from ds_ckpt_sidecar.doctor import check_promises, check_store
from ds_ckpt_store.contract.clock import SystemClock
from ds_ckpt_store.errors import AccessError
from ds_ckpt_store.stores import open_store
from ds_ckpt_store.stores.memory import MemoryBucket, MemoryStore
from ds_ckpt_store.stores.port import Store
from ds_ckpt_store.stores.probe import probe
from ds_ckpt_store.stores.s3 import S3Options, S3Store
from tests.faultproxy import HOST, Fault, FaultProxy
from tests.servers import S3
from tests.servers_azure import Azure
from tests.servers_gcs import GCS
from tests.sidecar.doctor.support import (
    matter,
    only,
)

DENIED = "<Error><Code>AccessDenied</Code><Message>no</Message></Error>"
DENIED_JSON = json.dumps({"error": {"message": "no", "errors": [{"reason": "forbidden"}]}})


def s3_through(proxy: FaultProxy, bucket: str) -> S3Store:
    options = S3Options.from_environ({"DS_CKPT_S3_ENDPOINT": proxy.url})
    return S3Store.from_url(f"s3://{bucket}/run", options)


def left_in(store: Store) -> list[str]:
    return [info.key for info in store.list("")] + [each.key for each in store.uploads("")]


@pytest.fixture
def seaweed_proxy(seaweed: S3) -> Iterator[FaultProxy]:
    with FaultProxy(HOST, int(seaweed.endpoint.rpartition(":")[2])) as proxy:
        yield proxy


def test_a_store_where_we_may_do_all_is_well_and_stays_empty(seaweed: S3) -> None:
    store = seaweed.store(seaweed.bucket())
    found = [*check_store(store, run_id="run"), *check_promises(store)]
    assert matter(found) == [("warning", store.url.removesuffix("/run"))], "but for the one rule"
    told = " ".join(each.sentence for each in found)
    assert "listed, written, read, begun, aborted and deleted" in told
    assert "variables (AWS_ACCESS_KEY_ID)" in told
    assert "proof stored-checksum" in told
    assert left_in(store) == []


@pytest.mark.parametrize("kind", ["gs", "az"])
def test_so_it_is_with_each_other_provider(kind: str, fake_gcs: GCS, azurite: Azure) -> None:
    if kind == "gs":
        url, environ = f"gs://{fake_gcs.bucket()}/run", {"DS_CKPT_GCS_ENDPOINT": fake_gcs.endpoint}
    else:
        url = f"az://{azurite.container()}/run"
        environ = {
            "DS_CKPT_AZURE_ENDPOINT": azurite.endpoint,
            "AZURE_STORAGE_SAS_TOKEN": azurite.sas(permission="racwdl"),
        }
    store = open_store(url, environ)
    found = [*check_store(store, run_id="run"), *check_promises(store)]
    assert "error" not in {each.severity for each in found}
    told = " ".join(each.sentence for each in found)
    assert "listed, written, read, begun" in told
    assert "and deleted, with credentials from" in told
    assert left_in(store) == []


OPERATIONS = [
    ("s3:ListBucket", r"GET .*list-type", "error"),
    ("s3:PutObject", r"PUT .*/object", "error"),
    ("s3:GetObject", r"GET .*/object(?!.*-lock)", "error"),
    ("s3:ListBucketMultipartUploads", r"GET .*\?.*uploads", "warning"),
    ("s3:PutObject", r"POST .*\?uploads", "error"),
    ("s3:PutObject", r"PUT .*partNumber", "error"),
    ("s3:PutObject", r"POST .*uploadId", "error"),
    ("s3:ListMultipartUploadParts", r"GET .*uploadId", "error"),
    ("s3:AbortMultipartUpload", r"DELETE .*uploadId", "warning"),
    ("s3:DeleteObject", r"DELETE .*/object", "warning"),
]


@pytest.mark.parametrize(("right", "request_line", "severity"), OPERATIONS)
def test_each_right_that_is_missing_is_named(
    seaweed: S3, seaweed_proxy: FaultProxy, right: str, request_line: str, severity: str
) -> None:
    bucket = seaweed.bucket()
    fault = Fault(request_line, "status", status=403, body=DENIED, times=None)
    seaweed_proxy.add(fault)
    found = check_store(s3_through(seaweed_proxy, bucket))
    assert seaweed_proxy.hits(fault)
    (denied,) = (each for each in found if "we may not" in each.sentence)
    assert denied.severity == severity
    assert f'"Action": "{right}"' in denied.remedy
    resource = json.loads(denied.remedy.partition("policy ")[2])["Resource"]
    assert resource.startswith(f"arn:aws:s3:::{bucket}")
    assert resource.endswith("/run/*") == ("Bucket" not in right)


def test_a_missing_right_to_end_uploads_is_not_taken_for_a_server_without_checksums(
    seaweed: S3, seaweed_proxy: FaultProxy
) -> None:
    seaweed_proxy.add(Fault(r"POST .*uploadId", "status", status=403, body=DENIED, times=None))
    store = s3_through(seaweed_proxy, seaweed.bucket())
    with pytest.raises(AccessError, match="complete"):
        probe(store, random.Random(1))
    assert left_in(store) == []


@pytest.mark.parametrize(
    ("code", "advice"),
    [
        ("SignatureDoesNotMatch", "AWS_SECRET_ACCESS_KEY"),
        ("InvalidAccessKeyId", "AWS_ACCESS_KEY_ID"),
        ("ExpiredToken", "the credentials have expired"),
    ],
)
def test_credentials_that_are_wrong_are_one_finding_and_no_missing_right(
    seaweed: S3, seaweed_proxy: FaultProxy, code: str, advice: str
) -> None:
    body = DENIED.replace("AccessDenied", code)
    seaweed_proxy.add(Fault("", "status", status=403, body=body, times=None))
    found = check_store(s3_through(seaweed_proxy, seaweed.bucket()))
    (error,) = (each for each in found if each.severity == "error")
    assert "does not know who asks" in error.sentence
    assert advice in error.sentence
    assert "credentials" in error.remedy
    assert "policy" not in error.remedy
    assert not any("we may not" in each.sentence for each in found)


def test_without_the_right_to_delete_it_says_what_will_not_work(
    seaweed: S3, seaweed_proxy: FaultProxy
) -> None:
    seaweed_proxy.add(Fault("DELETE ", "status", status=403, body=DENIED, times=None))
    store = s3_through(seaweed_proxy, seaweed.bucket())
    found = [*check_store(store), *check_promises(store)]
    assert "error" not in {each.severity for each in found}
    told = " ".join(each.sentence for each in found if each.severity == "warning")
    for fact in ("DS_CKPT_KEEP_LAST", "ds-ckpt gc", "unfinished upload"):
        assert fact in told


def test_a_signature_without_the_permission_to_delete_is_told_so(azurite: Azure) -> None:
    environ = {
        "DS_CKPT_AZURE_ENDPOINT": azurite.endpoint,
        "AZURE_STORAGE_SAS_TOKEN": azurite.sas(permission="racwl"),
    }
    found = check_store(open_store(f"az://{azurite.container()}/run", environ))
    denied = [each for each in found if "we may not" in each.sentence]
    assert {each.severity for each in denied} == {"warning"}
    assert any("retention" in each.sentence for each in denied)
    assert any(each.remedy.endswith("needs the permissions d") for each in denied)


def test_what_cloud_storage_does_not_allow_is_named_with_the_role(fake_gcs: GCS) -> None:
    bucket = fake_gcs.bucket()
    with FaultProxy(HOST, int(fake_gcs.endpoint.rpartition(":")[2])) as proxy:
        proxy.add(Fault("DELETE ", "status", status=403, body=DENIED_JSON, times=None))
        store = open_store(f"gs://{bucket}/run", {"DS_CKPT_GCS_ENDPOINT": proxy.url})
        found = check_store(store)
    denied = next(each for each in found if "remove anything" in each.sentence)
    assert "storage.objects.delete" in denied.remedy
    assert f"add-iam-policy-binding gs://{bucket}" in denied.remedy


def test_a_bucket_that_is_not_there_is_the_only_thing_said(seaweed: S3) -> None:
    found = check_store(seaweed.store("no-such-bucket"))
    error = only(found, "error")
    assert "does not exist" in error.sentence
    assert "DS_CKPT_DESTINATION" in error.remedy


def test_a_server_that_is_not_there_is_told_soon_with_what_to_look_at() -> None:
    with socket.create_server((HOST, 0)) as taken:
        port = taken.getsockname()[1]
    environ = {"DS_CKPT_S3_ENDPOINT": f"http://{HOST}:{port}"}
    before = time.monotonic()
    error = only(check_store(open_store("s3://bkt/run", environ, stall_seconds=2)), "error")
    assert time.monotonic() - before < 10
    assert f"{HOST}:{port}" in error.sentence
    assert "network policies" in error.remedy


@pytest.mark.parametrize(
    ("code", "status"), [("PermanentRedirect", 301), ("AuthorizationHeaderMalformed", 400)]
)
def test_a_bucket_in_another_region_is_told_with_the_setting(
    aws_credentials: tuple[str, str], code: str, status: int
) -> None:
    body = f"<Error><Code>{code}</Code><Message>expecting 'eu-1'</Message></Error>"
    with FaultProxy(HOST, 1) as proxy:
        where = {"x-amz-bucket-region": "eu-1"}  # boto3 asks for it, and tries there
        proxy.add(Fault("HEAD ", "status", status=200, body="", headers=where, times=None))
        proxy.add(Fault("", "status", status=status, body=body, times=None))
        error = only(check_store(s3_through(proxy, "bkt")), "error")
    assert "DS_CKPT_S3_REGION" in error.remedy


def test_credentials_that_are_wrong_are_told(seaweed: S3, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    found = check_store(seaweed.store(seaweed.bucket()))
    errors = [each for each in found if each.severity == "error"]
    assert errors
    assert all("AWS_SECRET_ACCESS_KEY" in each.sentence for each in errors)


def test_a_store_that_cannot_decide_between_two_writers_is_an_error_unless_allowed() -> None:
    store = MemoryStore(MemoryBucket(SystemClock()), honours_create=False)
    error = only(check_promises(store), "error")
    assert "--allow-weak-store" in error.remedy
    assert only(check_promises(store, allow_weak=True), "warning").remedy.startswith("let one node")


def test_a_store_that_checks_nothing_is_a_warning() -> None:
    bucket = MemoryBucket(SystemClock())
    store = MemoryStore(bucket, refuses_corruption=False)
    assert "checks nothing" in only(check_promises(store), "warning").sentence
