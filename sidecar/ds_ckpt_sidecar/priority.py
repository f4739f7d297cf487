"""Stand back for training: low CPU and I/O priority, as far as the system lets us."""

from __future__ import annotations

import os

import psutil

from ds_ckpt_sidecar.observe.log import Log

NICE = 10


def stand_back(log: Log) -> None:
    """Lower this process's priority; its threads begin later and inherit it.

    The idle class means that the disk serves us when nobody else asks; schedulers other than BFQ
    may take no notice of it.
    """
    try:
        os.nice(NICE)
        psutil.Process().ionice(psutil.IOPRIO_CLASS_IDLE)
    except (OSError, psutil.Error) as error:
        log.warning("priority.not_lowered", error=str(error), reason="going on as it is")
