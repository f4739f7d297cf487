"""``ds-ckpt status --watch``: what it prints when, and how it ends."""

from __future__ import annotations

import dataclasses
import io
import itertools
import os
import signal
import subprocess
import sys
from pathlib import Path

from rich.console import Console

from ds_ckpt_sidecar import render
from ds_ckpt_sidecar.observe.view import look
from ds_ckpt_store.contract.manifest import SaveStatus, SidecarStatus

COMMAND = [sys.executable, "-m", "ds_ckpt_sidecar", "status", "--watch", "--interval", "0.1"]
AGENT = SidecarStatus(time=1000.0, pid=7, version="1", state="running")


def test_into_a_pipe_it_prints_a_block_and_ends_well_at_ctrl_c(tmp_path: Path) -> None:
    with subprocess.Popen(
        [*COMMAND, "--volume", str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
        # Whoever runs the tests in the background has it ignored.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith(b"-- 2")
        while not process.stdout.readline().startswith(b"trainer   never seen"):
            pass
        process.send_signal(signal.SIGINT)
        rest, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    assert rest == b"", "nothing has changed"
    assert b"Traceback" not in errors


def test_json_is_not_watched(tmp_path: Path) -> None:
    done = subprocess.run(
        [*COMMAND, "--json", "--volume", str(tmp_path)], capture_output=True, check=False
    )
    assert done.returncode == 2
    assert b"--watch prints no JSON" in done.stderr


def test_ages_are_no_change_and_a_state_is() -> None:
    first = look(AGENT, None, [], 1000.0)
    older = look(AGENT, None, [], 1002.0)
    drains = dataclasses.replace(older, state="draining")
    views = iter([first, older, drains])
    found = list(itertools.islice(render.changes(lambda: next(views), 0.0), 2))
    assert found == [first, drains]


def test_what_a_terminal_would_obey_is_not_printed() -> None:
    save = SaveStatus(save_id="1", state="failed", time=1000.0).model_copy(
        update={"tag": "\x1b[2Jx\ud800", "reason": "[red]\x07"}
    )
    out = io.StringIO()
    Console(file=out, width=200, markup=False).print(
        render.status(look(AGENT, None, [save], 1000.0))
    )
    assert "\x1b" not in out.getvalue()
    assert "\x07" not in out.getvalue()
    assert "?[2Jx?" in out.getvalue()
    assert "[red]" in out.getvalue()
    out.getvalue().encode()
