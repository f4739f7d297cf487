"""OpenStack Swift and its S3 interface: an S3 of another family, which stores no checksums.

It checks CRC32C on objects and parts, keeps none, returns none, accepts a wrong one of a whole
multipart upload, answers 501 to If-Match, and lets two creates win that come at once. ``make
servers`` installs it; here it runs as four processes on loopback with one copy of everything.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

from ds_ckpt_sidecar.demo.s3_server import HOST, free_ports
from ds_ckpt_store.contract.clock import system_random
from tests.servers import REGION, S3, installed, wait_for_buckets

PARTS = ("account", "container", "object")
# One partition map for each of three servers that have one disk; Swift's own tool takes seconds.
RINGS = """
import sys
from swift.common.ring import RingBuilder
for name, port in zip(("account", "container", "object"), sys.argv[1:]):
    builder = RingBuilder(4, 1, 1)
    builder.add_dev({"id": 0, "region": 1, "zone": 1, "ip": "127.0.0.1", "port": int(port),
                     "device": "disk", "weight": 1.0})
    builder.rebalance()
    builder.get_ring().save(name + ".ring.gz")
"""
# A listing shows each write at once only if nobody gives up waiting for the container's server.
STORAGE = """
[DEFAULT]
bind_ip = 127.0.0.1
bind_port = {port}
workers = 0
user = {user}
swift_dir = {folder}
devices = {folder}/devices
mount_check = false
disable_fallocate = true
db_preallocation = false
log_address = /dev/null
conn_timeout = 20
node_timeout = 60
container_update_timeout = 60
[pipeline:main]
pipeline = {part}-server
[app:{part}-server]
use = egg:swift#{part}
"""
# What is known of accounts and buckets, in the place of memcached: the proxy is one process.
CACHE = """
import json

class Cache:
    def __init__(self):
        self.kept = {}
    def set(self, key, value, serialize=True, time=0, **_):
        self.kept[key] = json.dumps(value)
    def get(self, key, **_):
        return json.loads(self.kept[key]) if key in self.kept else None
    def delete(self, key, **_):
        self.kept.pop(key, None)

def factory(configuration, **_):
    cache = Cache()
    def wrap(app):
        def call(environ, start_response):
            environ["swift.cache"] = cache
            return app(environ, start_response)
        return call
    return wrap
"""
PROXY = """
[DEFAULT]
bind_ip = 127.0.0.1
bind_port = {port}
workers = 0
user = {user}
swift_dir = {folder}
log_address = /dev/null
[pipeline:main]
pipeline = catch_errors cache s3api tempauth slo dlo versioned_writes symlink proxy-server
[app:proxy-server]
use = egg:swift#proxy
account_autocreate = true
conn_timeout = 20
node_timeout = 60
[filter:catch_errors]
use = egg:swift#catch_errors
[filter:cache]
paste.filter_factory = test_cache:factory
[filter:s3api]
use = egg:swift#s3api
location = {region}
max_bucket_listing = 50
[filter:tempauth]
use = egg:swift#tempauth
user_{user_of_account} = {secret_key} .admin
[filter:slo]
use = egg:swift#slo
[filter:dlo]
use = egg:swift#dlo
[filter:versioned_writes]
use = egg:swift#versioned_writes
allow_object_versioning = true
[filter:symlink]
use = egg:swift#symlink
"""
HASHES = """
[swift-hash]
swift_hash_path_suffix = suffix
swift_hash_path_prefix = prefix
[storage-policy:0]
name = one
default = yes
"""


@contextlib.contextmanager
def swift(folder: Path, access_key: str, secret_key: str) -> Iterator[S3]:
    """Start it; its keys are of the form ``account:user``."""
    bin_folder = installed("venv/bin/swift-proxy-server").parent
    (folder / "devices" / "disk").mkdir(parents=True)
    (folder / "swift.conf").write_text(HASHES)
    (folder / "test_cache.py").write_text(CACHE)
    *ports, port = free_ports(4, system_random())
    subprocess.run([bin_folder / "python", "-c", RINGS, *map(str, ports)], cwd=folder, check=True)
    known = {"user": getpass.getuser(), "folder": folder, "region": REGION}
    with contextlib.ExitStack() as stack:
        for part, each in zip(PARTS, ports, strict=True):
            text = STORAGE.format(part=part, port=each, **known)
            stack.enter_context(_running(bin_folder, folder, part, text))
        user_of_account = access_key.replace(":", "_")
        text = PROXY.format(
            port=port, user_of_account=user_of_account, secret_key=secret_key, **known
        )
        process = stack.enter_context(_running(bin_folder, folder, "proxy", text))
        server = S3(f"http://{HOST}:{port}", access_key, secret_key)
        wait_for_buckets(server, process)
        yield server


@contextlib.contextmanager
def _running(
    programs: Path, folder: Path, part: str, configuration: str
) -> Iterator[subprocess.Popen[bytes]]:
    """One of its processes."""
    file = folder / f"{part}.conf"
    file.write_text(configuration)
    with (folder / f"{part}.log").open("wb") as log:
        process = subprocess.Popen(
            [programs / f"swift-{part}-server", file],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={**os.environ, "PYTHONPATH": str(folder)},
            start_new_session=True,
        )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # its data is thrown away
        process.wait()
