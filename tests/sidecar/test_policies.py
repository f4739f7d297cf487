"""The policies in docs/policies suffice for what they are for, and grant nothing beyond it.

Real agents, restores and ``gc`` work on a real S3 server. It knows no such policies, so each
request is judged by the document before it is sent, and answered as AWS answers what is not
allowed.
"""

from __future__ import annotations

import fnmatch
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import boto3.session
import pytest
from botocore.awsrequest import AWSResponse
from typer.testing import CliRunner, Result

import ds_ckpt_hook
from ds_ckpt_sidecar.commands import app
from ds_ckpt_store.errors import AccessError
from tests import servers
from tests.sidecar.handoff import Trainer

POLICIES = Path(__file__).parents[2] / "docs/policies/s3"
PREFIX = "runs/my-run"
MIB = 1 << 20

# Of each operation, what AWS asks the right for.
RIGHTS = {
    "ListObjectsV2": "s3:ListBucket",
    "ListMultipartUploads": "s3:ListBucketMultipartUploads",
    "HeadObject": "s3:GetObject",
    "GetObject": "s3:GetObject",
    "PutObject": "s3:PutObject",
    "CreateMultipartUpload": "s3:PutObject",
    "UploadPart": "s3:PutObject",
    "CompleteMultipartUpload": "s3:PutObject",
    "ListParts": "s3:ListMultipartUploadParts",
    "AbortMultipartUpload": "s3:AbortMultipartUpload",
    "DeleteObject": "s3:DeleteObject",
    "GetBucketVersioning": "s3:GetBucketVersioning",
    "GetBucketLifecycleConfiguration": "s3:GetLifecycleConfiguration",
    "GetObjectLockConfiguration": "s3:GetBucketObjectLockConfiguration",
}
KNOWS_A_PREFIX = "s3:ListBucket"  # s3:ListBucketMultipartUploads has no s3:prefix to ask for


class Raw:
    """The body of an answer."""

    def __init__(self, data: bytes) -> None:
        self.data = data

    def stream(self, *_: Any, **__: Any) -> Iterator[bytes]:
        yield self.data

    def read(self, *_: Any, **__: Any) -> bytes:
        return self.data


class Guard:
    """Judges every request of a process by policies.

    Attributes:
        used: actions that were allowed.
        refused: actions that were not, each with its resource.
        written: keys, in the order in which they were written.
        lose: parts but the first of keys with this in them are not allowed any more.
    """

    def __init__(self, bucket: str, policies: Sequence[str]) -> None:
        self.bucket = bucket
        self.statements: list[dict[str, Any]] = []
        for name in policies:
            text = (POLICIES / f"{name}.json").read_text()
            text = text.replace("BUCKET", bucket).replace("PREFIX", PREFIX)
            self.statements += json.loads(text)["Statement"]
        self.used: set[str] = set()
        self.refused: list[tuple[str, str]] = []
        self.written: list[str] = []
        self.lose = ""

    def granted(self) -> set[str]:
        return {action for each in self.statements for action in listed(each["Action"])}

    def __call__(self, event_name: str, request: Any, **_: Any) -> AWSResponse | None:
        operation = event_name.rpartition(".")[2]
        url = urlsplit(request.url)
        _, bucket, *key = unquote(url.path).split("/", 2)
        assert bucket == self.bucket
        later_part = operation == "UploadPart" and "partNumber=1&" not in f"{url.query}&"
        if later_part and self.lose and self.lose in unquote(url.path):
            return answer(request, 403, "AccessDenied")
        action = RIGHTS[operation]
        resource = f"arn:aws:s3:::{'/'.join([bucket, *filter(None, key)])}"
        (prefix,) = parse_qs(url.query, keep_blank_values=True).get("prefix", [""])
        if not any(self._allows(each, action, resource, prefix) for each in self.statements):
            self.refused.append((action, resource))
            return answer(request, 403, "AccessDenied")
        self.used.add(action)
        if operation in ("PutObject", "CompleteMultipartUpload"):
            self.written.append(key[0])
        return None

    @staticmethod
    def _allows(statement: dict[str, Any], action: str, resource: str, prefix: str) -> bool:
        if action not in listed(statement["Action"]):
            return False
        if not fnmatch.fnmatchcase(resource, statement["Resource"]):
            return False
        pattern = statement.get("Condition", {}).get("StringLike", {}).get("s3:prefix")
        if pattern is None:
            return True
        return action == KNOWS_A_PREFIX and fnmatch.fnmatchcase(prefix, pattern)


def listed(value: str | list[str]) -> list[str]:
    return [value] if isinstance(value, str) else value


def answer(request: Any, status: int, code: str) -> AWSResponse:
    body = f"<Error><Code>{code}</Code><Message>no policy allows it</Message></Error>".encode()
    return AWSResponse(request.url, status, {"content-type": "application/xml"}, Raw(body))


class Place:
    """A bucket, a volume, and what is run on them, each under policies."""

    def __init__(self, server: servers.S3, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.bucket = server.bucket()
        self.url = f"s3://{self.bucket}/{PREFIX}"
        self.trainer = Trainer(folder)
        self.client = server.client()
        self._monkeypatch = monkeypatch
        for name, value in server.environ.items():
            monkeypatch.setenv(name, value)
        self._session = boto3.session.Session

    def under(self, *policies: str) -> Guard:
        guard = Guard(self.bucket, policies)

        def session() -> Any:
            made = self._session()
            made.events.register("before-send.s3", guard)
            return made

        self._monkeypatch.setattr(boto3.session, "Session", session)
        return guard

    def run(self, *arguments: str) -> Result:
        return CliRunner().invoke(app, arguments, env={"COLUMNS": "200"})

    def agent(self, *options: str) -> Result:
        return self.run(
            "agent",
            *("--volume", self.trainer.volume.path, "--destination", self.url),
            *("--run-id", "run", "--once", "--part-mib", "5", "--log-format", "json", *options),
        )

    def objects(self) -> set[str]:
        listing = self.client.list_objects_v2(Bucket=self.bucket).get("Contents", [])
        return {entry["Key"].removeprefix(f"{PREFIX}/") for entry in listing}

    def store_all_ways(self, guard: Guard) -> None:
        """Store a save at once, one that broke off, and give one up that broke off."""
        for tag in ("whole", "broken", "rewritten"):
            guard.lose = "" if tag == "whole" else f"/{tag}@"
            manifest = self.trainer.save(tag, {"large": 11 * MIB, "small": b"x"}, protection="none")
            done = self.agent()
            assert (done.exit_code == 0) == (tag == "whole"), done.output
            guard.lose = ""
            if tag == "rewritten":
                self.trainer.rewrite(manifest, "large", b"y" * (11 * MIB + 1))
            done = self.agent()
            if tag != "rewritten":
                assert done.exit_code == 0, done.output


@pytest.fixture
def place(seaweed: servers.S3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    return Place(seaweed, tmp_path / "volume", monkeypatch)


def test_an_agent_that_keeps_all_uploads_with_the_right_to_upload_alone(place: Place) -> None:
    guard = place.under("upload")
    place.store_all_ways(guard)
    assert guard.used == guard.granted()
    assert {action for action, _ in guard.refused} == {"s3:DeleteObject"}
    assert {key.split("@")[0] for key in place.objects() if "@" in key} >= {"whole", "broken"}
    probes = f"{PREFIX}/.ds_ckpt/probe/"
    left = [key for key in place.objects() if key.startswith(".ds_ckpt/probe/")]
    assert 0 < len(left) <= 4 * 6, "of each of six starts"
    again = {key for key in guard.written if guard.written.count(key) > 1}
    again = {key.removeprefix(f"{PREFIX}/") for key in again if not key.startswith(probes)}
    clock = f".ds_ckpt/clock/{place.trainer.node}"
    assert again == {"latest", ".ds_ckpt/owner.json", clock}, "all that is written over"


def test_retention_and_gc_need_the_right_to_delete_beside_that_to_upload(place: Place) -> None:
    place.store_all_ways(place.under("upload"))
    before = place.objects()
    guard = place.under("upload", "retention")
    done = place.agent("--keep-last", "1", "--retention-pause", "0")
    assert "retention.applied" in done.output, done.output
    gone = {key.split("@")[0] for key in before - place.objects() if "@" in key}
    assert gone == {"whole", "rewritten"}, "what a save that was given up left, too"
    assert place.run("gc", place.url, "--run-id", "run", "--older-than", "1s").exit_code == 0
    assert guard.refused == []
    assert guard.used <= guard.granted()
    assert "s3:DeleteObject" in guard.used


def test_a_restore_reads_with_the_right_to_restore_and_holds_what_it_reads(
    place: Place, tmp_path: Path
) -> None:
    place.store_all_ways(place.under("upload"))
    guard = place.under("restore")
    done = place.run("restore", "--from", place.url, "--to", str(tmp_path))
    assert done.exit_code == 0, done.output
    assert "hold" not in done.output
    assert guard.refused == []
    assert guard.used == guard.granted()
    assert (tmp_path / "broken/large").stat().st_size == 11 * MIB
    for command in (["ls"], ["verify"]):
        assert place.run(*command, place.url).exit_code == 0
    assert guard.refused == []


def test_history_is_looked_at_pinned_and_deleted_from_with_the_rights_of_others(
    place: Place,
) -> None:
    place.store_all_ways(place.under("upload"))
    guard = place.under("restore")
    history = ds_ckpt_hook.history(place.url)
    assert guard.refused == []
    guard = place.under("upload")
    history.pin("whole")
    history.unpin("whole")
    with pytest.raises(AccessError, match="whole@"):
        history.delete("whole", at_once=True)
    assert {action for action, _ in guard.refused} == {"s3:DeleteObject"}
    guard = place.under("upload", "retention")
    assert history.delete("whole", at_once=True)[0].left == ""
    assert guard.refused == []
    assert not [key for key in place.objects() if key.startswith("whole@")]


def test_doctor_reads_the_rules_of_the_bucket_where_it_may(place: Place) -> None:
    guard = place.under("upload", "retention", "doctor")
    said = place.run("doctor", "--volume", place.trainer.volume.path, "--destination", place.url)
    assert guard.refused == [], said.output
    only = place.under("doctor").granted()
    assert only <= guard.used
