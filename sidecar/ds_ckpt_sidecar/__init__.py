"""The sidecar: one process that makes saves durable, and the ``ds-ckpt`` command."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("ds-ckpt-sidecar")
except PackageNotFoundError:  # run from a tree that was never installed
    __version__ = "0"
