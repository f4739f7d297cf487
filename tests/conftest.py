"""Servers that several folders of tests use; each starts once per process, when first asked for."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import pytest

from tests import servers, servers_azure, servers_ftp, servers_gcs, servers_sftp, servers_swift


@pytest.fixture(scope="session")
def aws_credentials() -> Iterator[tuple[str, str]]:
    """Keys that every test server knows, where boto3 finds them; nothing of the user's own."""
    keys = f"test:key{uuid.uuid4().hex[:12]}", uuid.uuid4().hex
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ACCESS_KEY_ID", keys[0])
        patch.setenv("AWS_SECRET_ACCESS_KEY", keys[1])
        patch.setenv("AWS_DEFAULT_REGION", servers.REGION)
        patch.setenv("AWS_CONFIG_FILE", "/nonexistent")
        patch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nonexistent")
        patch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        for name in ("AWS_SESSION_TOKEN", "AWS_PROFILE", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"):
            patch.delenv(name, raising=False)
        yield keys


@pytest.fixture(scope="session")
def seaweed(
    tmp_path_factory: pytest.TempPathFactory, aws_credentials: tuple[str, str]
) -> Iterator[servers.S3]:
    """An S3 that refuses wrong checksums and honours conditions."""
    with servers.seaweed(tmp_path_factory.mktemp("seaweed"), *aws_credentials) as server:
        yield server


@pytest.fixture(scope="session")
def juicefs(
    tmp_path_factory: pytest.TempPathFactory, aws_credentials: tuple[str, str]
) -> Iterator[servers.S3]:
    """An S3 that accepts wrong checksums and ignores conditions."""
    with servers.juicefs(tmp_path_factory.mktemp("juicefs"), *aws_credentials) as server:
        yield server


@pytest.fixture(scope="session")
def swift(
    tmp_path_factory: pytest.TempPathFactory, aws_credentials: tuple[str, str]
) -> Iterator[servers.S3]:
    """An S3 that keeps no checksums and cannot swap."""
    with servers_swift.swift(tmp_path_factory.mktemp("swift"), *aws_credentials) as server:
        yield server


@pytest.fixture(scope="session")
def ftp(tmp_path_factory: pytest.TempPathFactory) -> Iterator[servers_ftp.Ftp]:
    """A server with one connection for each of its clients."""
    with servers_ftp.ftp_server(tmp_path_factory.mktemp("ftp")) as server:
        yield server


@pytest.fixture(scope="session")
def fake_gcs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[servers_gcs.GCS]:
    """A Cloud Storage that honours generations and accepts any checksum."""
    with servers_gcs.fake_gcs(tmp_path_factory.mktemp("fake-gcs")) as server:
        yield server


@pytest.fixture(scope="session")
def gcp_emulator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[servers_gcs.GCS]:
    """A Cloud Storage that refuses wrong checksums and ignores generations."""
    with servers_gcs.gcp_emulator(tmp_path_factory.mktemp("gcp-emulator")) as server:
        yield server


@pytest.fixture(scope="session")
def azurite(tmp_path_factory: pytest.TempPathFactory) -> Iterator[servers_azure.Azure]:
    """A blob service that checks CRC64 and MD5, and honours conditions."""
    with servers_azure.azurite(tmp_path_factory.mktemp("azurite")) as server:
        yield server


@pytest.fixture(scope="session")
def sftp(tmp_path_factory: pytest.TempPathFactory) -> Iterator[servers_sftp.Sftp]:
    """A server of files over SSH."""
    with servers_sftp.sftp_server(tmp_path_factory.mktemp("sftp")) as server:
        yield server


@pytest.fixture(scope="session")
def anonymous_seaweed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[servers.S3Server]:
    """An S3 for whoever signs nothing: it knows Google's XML API for multipart uploads."""
    with servers_gcs.anonymous_seaweed(tmp_path_factory.mktemp("anonymous")) as server:
        yield server
