"""One upload or download by a Python library that is no command; run by the peers' own Python.

    worker.py LIBRARY upload|download JOB

JOB is a JSON document: ``url``, ``bucket``, ``prefix``, ``authority``, ``folder`` and for a
download ``keys``, with sizes. Uploads every file of the folder, or downloads the keys into it.
Nothing here imports this project: the peers live in an environment of their own.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

MIB = 1 << 20
PART = 16 * MIB
STREAMS = 16


def files_at_a_time(size: int) -> int:
    """Where a library has no queue over files: parts of a large one go in parallel already."""
    return 4 if size > PART else STREAMS


class Job:
    def __init__(self, text: str) -> None:
        job = json.loads(text)
        self.url, self.bucket, self.prefix = job["url"], job["bucket"], job["prefix"]
        self.authority, self.folder = job["authority"], Path(job["folder"])
        self.secure = self.url.startswith("https:")
        self.sizes: dict[str, int] = job.get("keys", {})

    @property
    def largest(self) -> int:
        return max([*self.sizes.values(), *(path.stat().st_size for path, _ in self.files())])

    def files(self) -> list[tuple[Path, str]]:
        return [(path, f"{self.prefix}/{path.name}") for path in sorted(self.folder.iterdir())]

    def targets(self) -> list[tuple[str, Path, int]]:
        return [(key, self.folder / Path(key).name, size) for key, size in self.sizes.items()]


def boto3(job: Job, way: str, *, tuned: bool) -> None:
    import boto3
    from boto3.s3.transfer import TransferConfig, create_transfer_manager
    from botocore.config import Config

    s3 = {"addressing_style": "path"}
    transfer = TransferConfig(preferred_transfer_client="classic")
    pool = 10
    if tuned:
        s3["payload_signing_enabled"] = False
        pool = STREAMS + 4
        transfer = TransferConfig(
            preferred_transfer_client="classic",
            multipart_chunksize=PART,
            multipart_threshold=PART,
            max_concurrency=STREAMS,
        )
    client = boto3.client(
        "s3",
        endpoint_url=job.url,
        verify=job.authority if job.secure else None,
        config=Config(s3=s3, max_pool_connections=pool),
    )
    with create_transfer_manager(client, transfer) as manager:
        if way == "upload":
            futures = [manager.upload(str(path), job.bucket, key) for path, key in job.files()]
        else:
            futures = [
                manager.download(job.bucket, key, str(path)) for key, path, _ in job.targets()
            ]
        for future in futures:
            future.result()


def obstore(job: Job, way: str, *, checksum: bool) -> None:
    import obstore
    from obstore.store import S3Store

    options = {} if checksum else {"unsigned_payload": True}
    store = S3Store(
        job.bucket,
        endpoint=job.url,
        virtual_hosted_style_request=False,
        client_options={"allow_http": True},  # for certificates it heeds SSL_CERT_FILE
        **options,
    )

    async def uploads() -> None:
        gate = asyncio.Semaphore(files_at_a_time(job.largest))

        async def one(path: Path, key: str) -> None:
            async with gate:
                await obstore.put_async(store, key, path, chunk_size=PART, max_concurrency=STREAMS)

        await asyncio.gather(*(one(path, key) for path, key in job.files()))

    async def downloads() -> None:
        gate = asyncio.Semaphore(STREAMS)

        async def piece(key: str, fd: int, start: int, end: int) -> None:
            async with gate:
                data = await obstore.get_range_async(store, key, start=start, end=end)
                os.pwrite(fd, memoryview(data), start)

        async def one(key: str, path: Path, size: int) -> None:
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            try:
                os.ftruncate(fd, size)
                pieces = (
                    piece(key, fd, start, min(start + PART, size)) for start in range(0, size, PART)
                )
                await asyncio.gather(*pieces)
            finally:
                os.close(fd)

        # A queue over all files: no more of them open than there are streams.
        todo = iter(job.targets())

        async def lane() -> None:
            for key, path, size in todo:
                await one(key, path, size)

        await asyncio.gather(*(lane() for _ in range(STREAMS)))

    asyncio.run(uploads() if way == "upload" else downloads())


def s3torchconnector(job: Job, way: str) -> None:
    from s3torchconnector import S3Checkpoint, S3ClientConfig

    config = S3ClientConfig(throughput_target_gbps=10.0, part_size=PART, force_path_style=True)
    store = S3Checkpoint(os.environ["AWS_REGION"], endpoint=job.url, s3client_config=config)

    def upload(path: Path, key: str) -> None:
        buffer = bytearray(PART)
        view = memoryview(buffer)
        with (
            path.open("rb", buffering=0) as file,
            store.writer(f"s3://{job.bucket}/{key}") as writer,
        ):
            while count := file.readinto(buffer):
                writer.write(view[:count].tobytes())

    def download(key: str, path: Path) -> None:
        with (
            store.reader(f"s3://{job.bucket}/{key}") as reader,
            path.open("wb", buffering=0) as file,
        ):
            while data := reader.read(PART):
                file.write(data)

    with ThreadPoolExecutor(files_at_a_time(job.largest)) as pool:
        if way == "upload":
            futures = [pool.submit(upload, path, key) for path, key in job.files()]
        else:
            futures = [pool.submit(download, key, path) for key, path, _ in job.targets()]
        for future in futures:
            future.result()


LIBRARIES = {
    "boto3": lambda job, way: boto3(job, way, tuned=True),
    "boto3-default": lambda job, way: boto3(job, way, tuned=False),
    "obstore": lambda job, way: obstore(job, way, checksum=True),
    "obstore-nochecksum": lambda job, way: obstore(job, way, checksum=False),
    "s3torchconnector": s3torchconnector,
}


def main() -> None:
    library, way, job = sys.argv[1:]
    LIBRARIES[library](Job(Path(job).read_text()), way)
    sys.stdout.flush()
    os._exit(0)  # threads of native libraries are not waited for; what they had to do is done


if __name__ == "__main__":
    main()
