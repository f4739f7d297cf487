"""The ``ds-ckpt`` command. Exit codes: 0 done, 1 it failed, 2 wrong use.

This module imports nothing that the bare installation lacks, so that it can say what is missing.
"""

from __future__ import annotations

import gc
import os
import signal
import sys


def main() -> None:
    """Run the command line."""
    is_agent = sys.argv[1:2] == ["agent"]
    if is_agent:
        # Until the agent can heed it. It may be a container's first process, which loses a signal
        # that it does not handle; as any other it would be killed without a word.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    gc.disable()  # of what is imported nothing is garbage, and looking takes a tenth of the start
    try:
        from ds_ckpt_sidecar.commands import app
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0].startswith("ds_ckpt"):
            raise
        print(
            f"ds-ckpt: the command line needs {error.name}: pip install 'ds-ckpt-sidecar[cli]' "
            "(and [s3], [gcs], [azure] or [fsspec] for the store; [sidecar] is all of them)",
            file=sys.stderr,
        )
        sys.exit(1)
    gc.freeze()
    gc.enable()
    try:
        app(prog_name="ds-ckpt")
    except SystemExit as end:
        if not is_agent or not isinstance(end.code, int):
            raise
        # All is closed. Taking the interpreter apart would take a quarter of a second of a drain
        # that may have two, and of a CPU that it shares more.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(end.code)
