"""The ``ds-ckpt`` command. Exit codes: 0 done, 1 it failed, 2 wrong use.

This module imports nothing that the bare installation lacks, so that it can say what is missing.
"""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line."""
    try:
        from ds_ckpt_sidecar.commands import app
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0].startswith("ds_ckpt"):
            raise
        print(
            f"ds-ckpt: the command line needs {error.name}: pip install 'ds-ckpt-sidecar[cli]' "
            "(and [s3] for s3://; [sidecar] is both)",
            file=sys.stderr,
        )
        sys.exit(1)
    app(prog_name="ds-ckpt")
