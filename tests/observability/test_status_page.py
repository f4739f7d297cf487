"""The status page in Chromium: at a phone's and a desk's width, light and dark.

Chromium's own window cannot be as narrow as a phone, so the page is shown in a frame of that width.
"""

from __future__ import annotations

import html
import json
import re
import subprocess
from pathlib import Path

import pytest

from ds_ckpt_sidecar.observe.view import View, look
from ds_ckpt_sidecar.observe.web import headline, page
from ds_ckpt_store.contract.manifest import SaveStatus, SidecarStatus, TrainerStatus

ROOT = Path(__file__).parents[2] / ".observability"
CHROMIUM = ROOT / "bin/chromium"
PICTURES = ROOT / "screenshots"
NOW = 1_800_000_000.0
GIB = 1 << 30
WIDTHS = {"phone": 390, "desk": 1280}
SCHEMES = {"dark": 0, "light": 1}

pytestmark = pytest.mark.skipif(
    not CHROMIUM.exists(), reason="make observability-tools installs Chromium"
)


def _save(step: int, state: str, ago: float, **values: object) -> SaveStatus:
    base = {
        "save_id": f"{step:020d}",
        "tag": f"global_step{step}",
        "state": state,
        "time": NOW,
        "saved_ms": int((NOW - ago) * 1000),
        "step": step,
        "bytes_total": 56 * GIB,
        "bytes_done": 56 * GIB,
        "shards_total": 24,
        "shards_done": 24,
    }
    return SaveStatus.model_validate(base | values)


def busy() -> View:
    """All that the page can show, and names that are longer than any line."""
    agent = SidecarStatus(
        time=NOW - 2,
        pid=7,
        version="0.1.0",
        run_id="llama-70b-" + "x" * 80,
        node="0f1e2d3c4b5a69788796a5b4c3d2e1f0",
        destination="s3://bucket/" + "runs/" * 20,
        state="running",
        free_bytes=90 * GIB,
        total_bytes=400 * GIB,
        used_bytes=310 * GIB,
        high_water_bytes=350 * GIB,
        limit_bytes=400 * GIB,
        unfreed_bytes=GIB,
        newest_committed_save=f"{1000:020d}",
        newest_committed_tag="global_step1000",
        newest_committed_step=1000,
        newest_committed_ms=int((NOW - 4000) * 1000),
        last_error="put global_step1200/zero_pp_rank_0.pt: no answer from the store in 60 s",
        last_error_kind="TransientError",
        last_error_time=NOW - 40,
        unready="the store has not answered for 2 min",
        failures=3,
        rate=210e6,
        streams=16,
    )
    saves = [
        _save(1300, "uploading", 300, bytes_done=20 * GIB),
        _save(1200, "stored", 1500, waiting_for=["a" * 32, "b" * 32], waiting_since=NOW - 700),
        _save(1100, "quarantined", 2700, reason="shard " + "y" * 120 + " changed after the save"),
        _save(1000, "committed", 4000, durable_since=NOW - 3600),
        *(
            _save(
                n, "cleaned", 5000 + 1300 * (160 - n), durable_since=NOW - 4700 - 1300 * (160 - n)
            )
            for n in range(100, 160)
        ),
    ]
    trainer = TrainerStatus(run_id="run", attempt="a", time=NOW - 3, step=1342, skipped_saves=2)
    return look(agent, trainer, saves, NOW)


def well() -> View:
    """Nothing is wrong."""
    agent = SidecarStatus(
        time=NOW,
        pid=7,
        version="0.1.0",
        run_id="llama",
        destination="s3://bucket/runs/llama",
        state="running",
        total_bytes=400 * GIB,
        free_bytes=300 * GIB,
        newest_committed_save=f"{1000:020d}",
        newest_committed_tag="global_step1000",
        newest_committed_step=1000,
        newest_committed_ms=int((NOW - 400) * 1000),
    )
    trainer = TrainerStatus(run_id="llama", attempt="a", time=NOW, step=1042)
    return look(agent, trainer, [_save(1000, "committed", 400, durable_since=NOW - 340)], NOW)


VIEWS = {"busy": busy(), "well": well(), "empty": look(None, None, [], NOW)}
MEASURE = """
<script>onload = () => {
  const page = document.querySelector("iframe").contentDocument, root = page.documentElement;
  document.querySelector("pre").textContent = JSON.stringify({
    inner: root.clientWidth, needed: root.scrollWidth, text: page.body.innerText,
    back: page.defaultView.getComputedStyle(page.body).backgroundColor});
}</script>"""


def _chromium(tmp_path: Path, scheme: str, *options: str) -> str:
    command = [
        str(CHROMIUM),
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--hide-scrollbars",
        "--disable-dev-shm-usage",
        f"--user-data-dir={tmp_path / 'profile'}",
        f"--blink-settings=preferredColorScheme={SCHEMES[scheme]}",
        *options,
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=90, check=True)
    return done.stdout


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("device", WIDTHS)
@pytest.mark.parametrize("name", VIEWS)
def test_the_page_fits_and_can_be_read(tmp_path: Path, name: str, device: str, scheme: str) -> None:
    width, height = WIDTHS[device], 1900
    framed = tmp_path / "framed.html"
    framed.write_text(
        f'<!doctype html><meta charset="utf-8"><body style="margin:0"><iframe width="{width}" '
        f'height="{height}" style="border:0" srcdoc="{html.escape(page(VIEWS[name]))}"></iframe>'
        f"<pre hidden></pre>{MEASURE}"
    )
    found = _chromium(tmp_path, scheme, "--window-size=1280,1900", "--dump-dom", framed.as_uri())
    written = re.search(r"<pre hidden[^>]*>(\{.*?\})</pre>", found, re.DOTALL)
    assert written is not None
    measured = json.loads(html.unescape(written.group(1)))
    assert measured["inner"] == width
    assert measured["needed"] <= width, "nothing sticks out to the side"
    assert headline(VIEWS[name]) in measured["text"]
    assert (measured["back"] == "rgb(17, 20, 24)") == (scheme == "dark")
    PICTURES.mkdir(parents=True, exist_ok=True)
    picture = PICTURES / f"{name}-{device}-{scheme}.png"
    picture.unlink(missing_ok=True)
    size = f"--window-size={max(width, 500)},{height}"
    _chromium(tmp_path, scheme, size, f"--screenshot={picture}", framed.as_uri())
    assert picture.stat().st_size > 10_000
