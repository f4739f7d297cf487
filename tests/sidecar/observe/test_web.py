"""The status page and its JSON, whatever the view holds."""

from __future__ import annotations

import io
import json
import subprocess
import sys

import pytest
from rich.console import Console

from ds_ckpt_sidecar import render
from ds_ckpt_sidecar.observe.view import View, look
from ds_ckpt_sidecar.observe.web import (
    MOST_LISTED,
    MOST_SAVES,
    Web,
    document,
    headline,
    lag,
    page,
    span,
)
from ds_ckpt_store.contract.manifest import SaveState, SaveStatus, SidecarStatus, TrainerStatus

NOW = 1_800_000_000.0


def agent(**values: object) -> SidecarStatus:
    base: dict[str, object] = {"time": NOW, "pid": 7, "version": "1", "state": "running"}
    return SidecarStatus.model_validate(base | values)


def save(number: int, state: SaveState = "uploading", **values: object) -> SaveStatus:
    base: dict[str, object] = {
        "save_id": f"{number:020d}",
        "tag": f"step{number}",
        "state": state,
        "time": NOW,
        "saved_ms": int(NOW * 1000) - 60_000,
        "bytes_total": 1000,
        "bytes_done": 250,
    }
    return SaveStatus.model_validate(base | values)


def trainer(**values: object) -> TrainerStatus:
    base: dict[str, object] = {"run_id": "run", "attempt": "a", "time": NOW, "step": 120}
    return TrainerStatus.model_validate(base | values)


def shown(view: View) -> tuple[str, dict[str, object]]:
    web = Web(lambda: view)
    kind, html = web.html("")
    assert kind == "text/html; charset=utf-8"
    kind, text = web.json("")
    assert kind == "application/json"
    return html.decode(), json.loads(text)


def test_a_volume_that_nobody_used() -> None:
    html, values = shown(look(None, None, [], NOW))
    assert "Nothing to lose yet" in html
    assert "None on this volume yet" in html
    assert values["ready"] is False


@pytest.mark.parametrize("state", ["starting", "standby", "refused", "stopped"])
def test_an_agent_that_cannot_store_is_not_ready(state: str) -> None:
    html, values = shown(look(agent(state=state), None, [], NOW))
    assert f"the agent is {state}" in html
    assert values["ready"] is False


def test_a_draining_agent_is_ready_and_says_that_it_drains() -> None:
    html, values = shown(look(agent(state="draining"), trainer(), [save(1)], NOW))
    assert "draining" in html
    assert values["ready"] is True


def test_the_top_says_what_would_be_lost_and_why_it_is_not_ready() -> None:
    said = agent(
        newest_committed_save="1",
        newest_committed_tag="step100",
        newest_committed_step=100,
        newest_committed_ms=int((NOW - 500) * 1000),
        unready="the store is away",
        last_error="no answer",
        last_error_kind="TransientError",
        last_error_time=NOW - 20,
    )
    view = look(
        said, trainer(), [save(1), save(2, waiting_for=["n-a"], waiting_since=NOW - 90)], NOW
    )
    html, _ = shown(view)
    assert headline(view) == "8 min 20 s of training (20 steps) would be lost."
    top = html[: html.index("</header>")]
    for part in (headline(view), "step100", "the store is away", view.remedy):
        assert part in top
    assert "1 min 30 s for node\nn-a" in html


@pytest.mark.parametrize(
    "tag", ["<script>alert(1)</script>", '"><img src=x>', "ü 模型 \u202e", "{{ view }}", "\ud800"]
)
def test_a_hostile_tag_is_text(tag: str) -> None:
    view = look(agent(), None, [save(1).model_copy(update={"tag": tag, "reason": tag})], NOW)
    html, values = shown(view)
    assert "<script" not in html
    assert "<img" not in html
    assert values["saves"][0]["tag"] == tag  # type: ignore[index]


@pytest.mark.parametrize(
    "sign", [*"\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069", "\x07"]
)
def test_a_name_turns_nothing_round_on_the_page(sign: str) -> None:
    """No sign of direction is in any of its texts; people are to see that something was there."""
    name = f"a{sign}b\nc"
    said = agent().model_copy(
        update=dict.fromkeys(
            (
                *("run_id", "node", "unready", "last_error", "version"),
                *("newest_committed_save", "newest_committed_tag"),
            ),
            name,
        )
    )
    at_work = save(1).model_copy(update={"tag": name, "reason": name, "waiting_for": [name]})
    view = look(said, trainer().model_copy(update={"error": name}), [at_work], NOW)
    html, values = shown(view)
    assert sign not in html
    assert html.count("a?b c") == 10
    assert values["error"] == name


def test_of_files_that_go_in_one_request_each_it_is_told_how_many_are_stored() -> None:
    """Bytes count once a request has ended, so one large part under way is 0 %."""
    under_way = save(1, bytes_done=0, shards_total=8, shards_done=3)
    for view in (
        look(agent(), None, [under_way], NOW),
        look(agent(), None, [under_way, save(2, shards_total=0)], NOW),
    ):
        out = io.StringIO()
        Console(file=out, width=200).print(render.status(view))
        for text in (" ".join(shown(view)[0].split()), out.getvalue()):
            assert "3 of 8 files" in text
            assert "of 0 files" not in text


def test_many_saves_are_counted_by_state_and_all_stand_in_the_json() -> None:
    saves = [save(n, "committed" if n % 2 else "superseded") for n in range(10_000)]
    html, values = shown(look(agent(), None, saves, NOW))
    assert html.count("<tr role") == MOST_SAVES + 1
    assert "4975 committed" in html
    assert "4975 superseded" in html
    assert html.index("step9999") < html.index("step9998")
    assert len(values["saves"]) == MOST_LISTED  # type: ignore[arg-type]


def test_no_secret_of_a_url_is_shown() -> None:
    url = "https://user:PASSWORD@host/box?sv=1&sig=SIGNATURE"
    said = agent(destination=url, last_error=f"PUT {url}: 403", unready=f"'{url}' is away")
    held = save(1, "failed", reason=f"cannot reach {url}")
    html, values = shown(look(said, trainer(error=f"at {url}"), [held], NOW))
    for text in (html, json.dumps(values)):
        assert "PASSWORD" not in text
        assert "SIGNATURE" not in text
        assert "https://host/box" in text


def test_what_is_no_number_is_null() -> None:
    view = look(agent(rate=float("nan"), last_error="x", last_error_time=1e300), None, [], NOW)
    assert document(view)["rate"] is None
    assert Web(lambda: view).json("")


def test_the_page_refreshes_itself_and_holds_nothing_from_elsewhere() -> None:
    html = page(look(agent(), trainer(), [save(1)], NOW))
    assert '<meta http-equiv="refresh" content="5">' in html
    for part in ("<script", "src=", "url(", "<form", "<link", "//"):
        assert part not in html


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "unknown"),
        (float("inf"), "unknown"),
        (-3, "0 s"),
        (59.6, "1 min"),
        (200, "3 min 20 s"),
        (7500, "2 h 5 min"),
        (86400, "1 d"),
    ],
)
def test_a_length_of_time_for_people(seconds: float | None, text: str) -> None:
    assert span(seconds) == text


def test_a_page_that_nobody_looks_at_costs_no_template_engine() -> None:
    code = "import sys, ds_ckpt_sidecar.observe.web; sys.exit('jinja2' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_save_that_is_lost_is_not_passed_over_in_silence() -> None:
    older, newer = save(1, "superseded"), save(9, "superseded")
    newest = {
        "newest_committed_save": f"{5:020d}",
        "newest_committed_tag": "step5",
        "newest_committed_ms": 1,
    }
    assert lag(look(agent(**newest), trainer(), [older], NOW)) == "none: every save is durable"
    view = look(agent(**newest), trainer(), [older, newer], NOW)
    html, values = shown(view)
    assert values["lost_saves"] == 1
    assert "1 save will not become durable by itself" in html
    assert "every save is durable" not in html
    assert "var(--bad)" in html.partition("border-left")[2][:40]
    waiting = look(agent(**newest), trainer(), [newer, save(8), save(7, "quarantined")], NOW)
    assert lag(waiting) == (
        "1 min: 1 save not durable yet; 2 saves will not become durable by themselves"
    )


def test_what_is_counted_reads_well() -> None:
    saves = [save(1, "quarantined", tag="")]
    view = look(agent(refused_manifests=1, backlog_saves=1), trainer(step=None), saves, NOW)
    html, _ = shown(view)
    assert "1 manifest in the outbox" in html
    assert "idle,\nno limit" in html
    out = io.StringIO()
    Console(file=out, width=200).print(render.status(view))
    assert "step unknown, seen" in out.getvalue()
    assert f"{1:020d}" in out.getvalue()
    assert "backlog 0 saves" in out.getvalue()
