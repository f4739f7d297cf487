"""The Grafana dashboard, for one run and for a whole cluster: ``make dashboard`` writes it.

What would be lost comes first, then why: saves, throughput, disk, errors, trainer and agent. Each
panel says what it tells and what to do. The same program always writes the same file.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from grafana_foundation_sdk.builders import dashboard
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import dashboard as models

from observability.panels import PLAIN, RED, SOURCE, YELLOW, Query, Text, figures, lines, rows
from observability.queries import (
    AGENT,
    apart,
    by_agent,
    by_run,
    grown,
    mean_by,
    of_process,
    one,
    quantile,
    rate,
)

FILE = Path(__file__).resolve().parents[1] / "helm/ds-ckpt-sidecar/files/dashboard.json"
RUNBOOKS = "RUNBOOK_BASE"  # the chart puts the address there, as in alerts.yaml

WHOSE = "{{run}} {{agent}}"
WINDOW = "1h"  # saves are rare: less would often hold none
LONG = ((1800.0, YELLOW), (10800.0, RED))
LATE = ((1.0, YELLOW), (2.0, RED))  # in save intervals, as the alert has it
ANY = ((1.0, RED),)

LAG = one("upload_lag_seconds")
EXPOSURE = one("exposure_seconds")
INTERVAL = one("save_interval_seconds")
READY = one("agent_ready")
BACKLOG = one("backlog_bytes")
FREE = one("volume_free_bytes")
TO_FULL = f"{FREE} / (-deriv({FREE}[30m]) > 0)"
TO_DRAIN = f"{BACKLOG} / (rate({one('uploaded_bytes_total')}[15m]) > 0)"
SENT = f"sum(rate({one('sent_bytes_total')}[5m]))"
BEST = f"max_over_time({SENT}[1d:1m])"
"""At whole minutes: what is sent now may be more, and is the best then."""


def lost() -> list[Any]:
    """What would be lost if a pod died now."""
    return [
        figures(
            Text(
                "Exposure, worst",
                "Training that would be lost if the worst pod died now: from its newest durable "
                "save to the last sign of training.",
                "find the run in the table below; look at its lag, then at errors and throughput.",
                "DsCkptExposure",
            ),
            "s",
            [Query(f"max({EXPOSURE})", "seconds")],
            steps=LONG,
        ),
        figures(
            Text(
                "Steps exposed, worst",
                "The same in steps of training.",
                "as for the seconds; none is shown while steps are not known.",
            ),
            "short",
            [Query(f"max({one('exposure_steps')})", "steps")],
            below=PLAIN,
        ),
        figures(
            Text(
                "Lag, worst",
                "Age of the oldest save that is not durable; 0 if all are.",
                "compare it with the save interval: below it uploads keep up.",
                "DsCkptUploadLag",
            ),
            "s",
            [Query(f"max({LAG})", "lag")],
            steps=LONG,
        ),
        figures(
            Text(
                "Lag in save intervals, worst",
                "Lag over the run's own save interval. Above 1 a save is not durable before the "
                "next is made.",
                "above 1 and growing: save less often, or look for what holds uploads up.",
                "DsCkptUploadLag",
            ),
            "none",
            [Query(f"max({LAG} / ({INTERVAL} > 0))", "intervals")],
            steps=LATE,
            decimals=1,
        ),
        figures(
            Text(
                "Backlog",
                "Bytes of saves that are not stored yet, and such saves of all runs.",
                "over the throughput this is what an orderly end of the pods takes: compare it "
                "with their grace.",
            ),
            "bytes",
            [
                Query(f"sum({BACKLOG})", "left"),
                Query(f"sum({by_run('max', one('backlog_saves'))})", "saves", unit="short"),
            ],
            below=PLAIN,
        ),
        figures(
            Text(
                "Agents not ready",
                "Agents that cannot store now. One that does not answer at all is not counted: its "
                "series end.",
                "its pod's readiness and the status page say why.",
                "DsCkptUploadFailing",
            ),
            "none",
            [Query(f"count({READY}) - sum({READY})", "not ready")],
            steps=ANY,
        ),
        rows(
            Text(
                "Runs",
                "Each run by its worst agent, the most exposed first.",
                "pick a run above to see it alone.",
            ),
            {"namespace": "namespace", "run": "run"},
            [
                Query(by_run("max", EXPOSURE), "exposure", "s", levels=LONG),
                Query(by_run("max", one("exposure_steps")), "steps exposed", "short"),
                Query(by_run("max", LAG), "lag", "s", levels=LONG),
                Query(by_run("max", INTERVAL), "save interval", "s"),
                Query(by_run("max", one("backlog_saves")), "saves left", "short"),
                Query(by_run("sum", BACKLOG), "bytes left", "bytes"),
                Query(by_run("sum", one("upload_bytes_per_second")), "speed", "binBps"),
                Query(by_run("max", one("newest_committed_step")), "durable step", "none"),
                Query(
                    "time() - " + by_run("max", one("newest_committed_timestamp_seconds")),
                    "durable since",
                    "s",
                ),
                Query(by_run("sum", READY), "agents ready", "none"),
                Query(by_run("min", one("trainer_finished")), "finished", "bool_yes_no"),
            ],
            worst="exposure",
        ),
        lines(
            Text(
                "Exposure by run",
                "Of each run's worst agent, with its save interval dashed. It climbs while "
                "training goes on, and falls when a save becomes durable: swinging between one and "
                "two intervals is well.",
                "if it only climbs, saves do not become durable, or none are made.",
                "DsCkptExposure",
            ),
            "s",
            [
                Query(by_run("max", EXPOSURE), "{{run}}"),
                Query(by_run("max", INTERVAL), "{{run}} interval", dashed=True),
            ],
            width=12,
        ),
        lines(
            Text(
                "Lag by run",
                "Age of each run's oldest save that is not durable, with its save interval dashed.",
                "peaks above the interval: uploads do not keep up. Look at throughput and errors.",
                "DsCkptUploadLag",
            ),
            "s",
            [
                Query(by_run("max", LAG), "{{run}}"),
                Query(by_run("max", INTERVAL), "{{run}} interval", dashed=True),
            ],
            width=12,
        ),
    ]


def saves() -> list[Any]:
    """What becomes of saves, and how far a run's nodes are apart."""
    return [
        lines(
            Text(
                "From save to commit",
                f"Of the saves committed in the last {WINDOW}.",
                "the upper end is what a lost pod costs beside the interval; the next panel says "
                "which part of the way takes it.",
            ),
            "s",
            [
                Query(quantile(0.5, "save_commit_seconds", WINDOW), "median"),
                Query(quantile(0.95, "save_commit_seconds", WINDOW), "95 of 100"),
            ],
        ),
        lines(
            Text(
                "Where the time goes",
                f"Mean seconds in each phase of the saves committed in the last {WINDOW}; stacked: "
                "the top is the whole.",
                "hashing: the volume is slow; waiting: earlier saves are in the way; uploading: "
                "the network; verifying: the store; nodes: another node is late.",
            ),
            "s",
            [Query(mean_by("phase", "save_phase_seconds", WINDOW), "{{phase}}")],
            stacked=True,
        ),
        lines(
            Text(
                "Saves by state",
                "Saves on the volumes, and the last that left them; each agent counts its part.",
                "quarantined, failed or held: the status page says why.",
            ),
            "short",
            [Query(f"sum by (state) ({one('saves')})", "{{state}}")],
            stacked=True,
        ),
        lines(
            Text(
                "Saves that came to an end",
                f"In the last {WINDOW}, by how they ended.",
                "all but committed are no checkpoints: the agent's log says why.",
                "DsCkptSaveLost",
            ),
            "short",
            [
                Query(
                    f"sum by (state) (increase({one('saves_decided_total')}[{WINDOW}]))",
                    "{{state}}",
                )
            ],
            stacked=True,
        ),
        lines(
            Text(
                "Waiting for other nodes",
                "How long a node's stored save has waited for the parts of others. The node that "
                "does not wait is the late one.",
                "look at that node's pod and errors: it is gone, slow, or cannot store.",
                "DsCkptNodeMissing",
            ),
            "s",
            [Query(by_agent(one("waiting_for_nodes_seconds")), WHOSE)],
        ),
        lines(
            Text(
                "Left to upload by node",
                "Bytes that each node still has to store.",
                "one that lies above the rest: look at its throughput and disk.",
            ),
            "bytes",
            [Query(by_agent(BACKLOG), WHOSE)],
        ),
        lines(
            Text(
                "Files left by node",
                "Shards that each node still has to store.",
                "many small ones cost a request each: bytes fall slowly although the network is "
                "free.",
            ),
            "short",
            [Query(by_agent(one("backlog_shards")), WHOSE)],
        ),
        lines(
            Text(
                "Nodes apart: lag",
                "Between the nodes of a run: the longest lag less the shortest.",
                "near 0 is well; else compare the nodes' throughput and errors.",
            ),
            "s",
            [Query(apart(LAG), "{{run}}")],
        ),
        lines(
            Text(
                "Nodes apart: throughput",
                "Between the nodes of a run: the fastest upload less the slowest.",
                "far apart for long: a slow disk or link on one node holds all of them.",
            ),
            "binBps",
            [Query(apart(rate("uploaded_bytes_total")), "{{run}}")],
        ),
    ]


def throughput() -> list[Any]:
    """Against what the network is worth."""
    return [
        lines(
            Text(
                "Throughput against the network's worth",
                "Bytes that stores took, and all that went onto the network; dashed, the bound "
                "that is set and the best 5 minutes of the last day.",
                "far below the best while there is a backlog: look at errors, streams and the "
                "bound. Sent far above taken: requests are lost.",
            ),
            "binBps",
            [
                Query(f"sum({rate('uploaded_bytes_total')})", "taken"),
                Query(f"sum({rate('sent_bytes_total')})", "sent"),
                Query(
                    f"sum({one('transfer_bandwidth_limit_bytes_per_second')} > 0)",
                    "bound",
                    dashed=True,
                ),
                Query(BEST, "best of the day", dashed=True),
            ],
            width=12,
        ),
        lines(
            Text(
                "Throughput by node",
                "Bytes that the store took from each.",
                "one below the rest while all upload: its disk, its link, or its bound.",
            ),
            "binBps",
            [Query(by_agent(rate("uploaded_bytes_total")), WHOSE)],
            width=12,
        ),
        lines(
            Text(
                "Requests with bytes",
                "Sent, resumed (an earlier start had sent them) and retried.",
                "many retried: look at errors by kind.",
            ),
            "reqps",
            [Query(f"sum by (outcome) ({rate('parts_total')})", "{{outcome}}")],
            stacked=True,
        ),
        lines(
            Text(
                "Network in use",
                "What was sent in 5 minutes, as a share of the best 5 minutes of the last day.",
                "low with a backlog: something else holds uploads up; high and late: the network "
                "is too slow for these saves.",
            ),
            "percentunit",
            [Query(f"clamp_max({SENT} / ({BEST} > 0), 1)", "of the best")],
        ),
        lines(
            Text(
                "Streams",
                "Requests at a time at most, by agent.",
                "lowered by throttling, and by ds-ckpt limit: raise the store's quota, or the "
                "limit.",
            ),
            "short",
            [Query(by_agent(one("transfer_streams_limit")), WHOSE)],
        ),
    ]


def disk() -> list[Any]:
    """Is there room for the next save?"""
    return [
        lines(
            Text(
                "Full before drained?",
                "Predicted from the last half hour: when the volume is full, and dashed when the "
                "backlog is stored. Without a line it does not fill, or nothing is left.",
                "where full lies below drained, save less often or enlarge the volume now.",
                "DsCkptVolumeFilling",
            ),
            "s",
            [
                Query(by_agent(TO_FULL), f"{WHOSE} full"),
                Query(by_agent(TO_DRAIN), f"{WHOSE} drained", dashed=True),
            ],
            width=12,
        ),
        lines(
            Text(
                "Room on the volume",
                "Free bytes by agent; under the volume's limit if it has one.",
                "less than one checkpoint: the next save may fail, or evict the pod.",
                "DsCkptVolumeFilling",
            ),
            "bytes",
            [Query(by_agent(FREE), WHOSE)],
            width=12,
        ),
        lines(
            Text(
                "In use",
                "By agent, with the volume's size dashed.",
                "there should be room for two checkpoints and what is uploaded meanwhile.",
            ),
            "bytes",
            [
                Query(by_agent(one("volume_used_bytes")), WHOSE),
                Query(by_agent(one("volume_size_bytes")), f"{WHOSE} size", dashed=True),
            ],
        ),
        lines(
            Text(
                "High-water mark",
                "The most that was in use since each agent began.",
                "the volume must be at least this large.",
            ),
            "bytes",
            [Query(by_agent(one("volume_high_water_bytes")), WHOSE)],
        ),
        lines(
            Text(
                "Removed and not freed",
                "Removed from the volume, and still held by another process or name.",
                "the trainer keeps files open: close them, or restart it.",
            ),
            "bytes",
            [Query(by_agent(one("volume_unfreed_bytes")), WHOSE)],
        ),
    ]


def errors() -> list[Any]:
    """What fails."""
    expiry = one("credentials_expiry_timestamp_seconds")
    return [
        figures(
            Text(
                "Verify failures",
                "In the time shown: bytes that were other than they should be. Nothing wrong was "
                "committed.",
                "find out where they change: the volume, the path, or the store.",
                "DsCkptVerifyFailed",
            ),
            "none",
            [Query(f"sum(increase({one('verify_failures_total')}[$__range]))", "failures")],
            width=6,
            steps=ANY,
            decimals=0,
        ),
        figures(
            Text(
                "Refused manifests",
                "Files in the outboxes that are damaged, or written by a newer hook.",
                "upgrade the sidecar, or look at the trainer's log; the files are kept.",
                "DsCkptManifestRefused",
            ),
            "none",
            [Query(f"sum({one('manifests_refused')})", "refused")],
            width=6,
            steps=ANY,
        ),
        figures(
            Text(
                "Failures in a row, worst",
                "How often in a row a pass, or a try of the save that fares worst, has failed.",
                "above 3: the last error on the status page says what to do.",
                "DsCkptUploadFailing",
            ),
            "none",
            [Query(f"max({one('consecutive_failures')})", "failures")],
            width=6,
            steps=((1.0, YELLOW), (3.0, RED)),
        ),
        figures(
            Text(
                "Credentials end in",
                "The first of those whose end is known.",
                "if it nears 0, the identity's renewal is broken.",
                "DsCkptCredentialsExpiring",
            ),
            "s",
            [Query(f"min({expiry}) - time()", "left")],
            width=6,
            steps=((3600.0, "green"),),
            below=RED,
            none="no end known",
        ),
        lines(
            Text(
                "Errors by kind and operation",
                "Calls and steps that failed in the last 5 minutes; most are made again.",
                "the runbook goes through the kinds.",
                "DsCkptUploadFailing",
            ),
            "short",
            [
                Query(
                    f"sum by (kind, operation) ({grown('errors_total', '5m')})",
                    "{{kind}} {{operation}}",
                )
            ],
            width=12,
            stacked=True,
        ),
        lines(
            Text(
                "Failures in a row by agent",
                "Of passes, and of tries of the save that fares worst.",
                "one agent: its node or volume; all of them: the store, the network, or the "
                "credentials.",
                "DsCkptUploadFailing",
            ),
            "short",
            [Query(by_agent(one("consecutive_failures")), WHOSE)],
            width=12,
            steps=((3.0, RED),),
        ),
    ]


def agents() -> list[Any]:
    """Trainers and agents themselves."""
    now = "time() - "
    labels = f"{AGENT}, node, destination"
    restored = (f"max by ({AGENT}) ({one(name)})" for name in ("restore_seconds", "restore_bytes"))
    seconds, size = restored
    return [
        lines(
            Text(
                "Step of training",
                "The step that each run is at; dashed, the newest durable one.",
                "the gap is the exposure in steps; a flat line: training stands still.",
            ),
            "none",
            [
                Query(by_run("max", one("trainer_step")), "{{run}}"),
                Query(by_run("max", one("newest_committed_step")), "{{run}} durable", dashed=True),
            ],
        ),
        lines(
            Text(
                "Silence of trainers",
                "Since the last sign of each trainer that has not finished.",
                "above a minute: it hangs, or was killed.",
            ),
            "s",
            [
                Query(
                    by_agent(
                        f"({now}{one('trainer_heartbeat_timestamp_seconds')}) "
                        f"unless ({one('trainer_finished')} == 1)"
                    ),
                    WHOSE,
                )
            ],
            steps=((60.0, RED),),
        ),
        lines(
            Text(
                "Silence of agents",
                "Since the main loop of each agent last wrote its status.",
                "above a minute: it hangs in a call; liveness restarts it.",
                "DsCkptAgentSilent",
            ),
            "s",
            [Query(by_agent(f"{now}{one('agent_heartbeat_timestamp_seconds')}"), WHOSE)],
            steps=((60.0, RED),),
        ),
        lines(
            Text(
                "Training held",
                "Time for which after_save has held the training loop, in all.",
                "milliseconds a save are well; more: the volume is slow.",
            ),
            "s",
            [Query(by_agent(one("trainer_held_seconds")), WHOSE)],
        ),
        lines(
            Text(
                "Saves not handed over",
                "That the hook skipped, in all.",
                "the trainer's log says why: no room, or files in the way.",
            ),
            "short",
            [Query(by_agent(one("trainer_skipped_saves")), WHOSE)],
        ),
        lines(
            Text(
                "Agents by state",
                "How many are starting, running, draining and so on.",
                "refused: another run has the prefix, or the store is too weak.",
            ),
            "short",
            [Query(f"sum by (state) ({one('agent_state')})", "{{state}}")],
            stacked=True,
        ),
        lines(
            Text(
                "Memory of agents",
                "Resident.",
                "near the container's limit: raise it, or lower streams.",
            ),
            "bytes",
            [Query(by_agent(of_process("resident_memory_bytes")), WHOSE)],
        ),
        lines(
            Text(
                "CPU of agents",
                "Cores in use.",
                "at the container's limit while uploading: raise it.",
            ),
            "none",
            [Query(by_agent(of_process("cpu_seconds_total", "$__rate_interval")), WHOSE)],
        ),
        lines(
            Text(
                "Deleted by retention",
                f"Checkpoints, and their objects, in the last {WINDOW}.",
                "none although more are kept than --keep-last says: look at errors of delete.",
            ),
            "short",
            [
                Query(f"sum(increase({one(f'retention_{what}_total')}[{WINDOW}]))", what)
                for what in ("checkpoints", "objects")
            ],
        ),
        rows(
            Text(
                "Agents",
                "Who runs where, with which version, and what the restore before it took.",
                "after an upgrade all should show one version.",
            ),
            {
                "namespace": "namespace",
                "run": "run",
                "pod": "pod",
                "instance": "instance",
                "node": "node",
                "destination": "destination",
                "version": "version",
                "python": "Python",
            },
            [
                Query(f"max by ({labels}) ({one('run_info')})", ""),
                Query(f"max by ({AGENT}, version, python) ({one('build_info')})", ""),
                Query(f"max by ({AGENT}) ({READY})", "ready", "bool_yes_no"),
                Query(seconds, "restore took", "s"),
                Query(size, "restored", "bytes"),
            ],
        ),
    ]


ROWS = (
    ("What would be lost now", lost),
    ("Saves", saves),
    ("Throughput", throughput),
    ("Disk", disk),
    ("Errors", errors),
    ("Trainer and agent", agents),
)


def variables() -> list[Any]:
    """Data source, and the selection; the runbooks' address is the chart's to replace."""
    source = dashboard.DatasourceVariable("datasource").label("Data source").type("prometheus")
    runbooks = dashboard.ConstantVariable("runbooks").value(RUNBOOKS)
    picks = [
        _pick("namespace", ""),
        _pick("run", 'namespace=~"$namespace"'),
        _pick("pod", 'namespace=~"$namespace",run=~"$run"'),
    ]
    return [source, *picks, runbooks]


def _pick(label: str, among: str) -> dashboard.QueryVariable:
    query = f"label_values(ds_ckpt_agent_ready{{{among}}}, {label})"
    return (
        dashboard.QueryVariable(label)
        .label(label.capitalize())
        .datasource(SOURCE)
        .query({"query": query, "refId": label, "qryType": 1})
        .refresh(models.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(models.VariableSort.NATURAL_ASC)
        .multi(True)
        .include_all(True)
        .all_value(".*")
        .current(models.VariableOption(selected=True, text=["All"], value=["$__all"]))
    )


def _checkpoints() -> dict[str, Any]:
    """Marks when the newest checkpoint was saved; the SDK does not know Prometheus' own fields."""
    query = by_run("max", f"1000 * {one('newest_committed_timestamp_seconds')}")
    return {
        "name": "Checkpoints",
        "datasource": {"type": "prometheus", "uid": "${datasource}"},
        "enable": True,
        "iconColor": "green",
        "expr": query,
        "step": "15s",
        "useValueForTime": True,
        "titleFormat": "Durable checkpoint",
        "textFormat": "{{namespace}} {{run}}",
        "tagKeys": "run",
    }


def build() -> dict[str, Any]:
    """The dashboard as Grafana reads it."""
    made = (
        dashboard.Dashboard("DeepSpeed checkpoints")
        .uid("ds-ckpt-sidecar")
        .description(
            "If a pod dies now, how much training is lost, why is the upload late, and what is to "
            "be done? Each panel says what it tells and what to do."
        )
        .tags(["deepspeed", "checkpoints", "ds-ckpt"])
        .time("now-6h", "now")
        .refresh("1m")
        .timezone("browser")
        .tooltip(models.DashboardCursorSync.CROSSHAIR)
        .editable()
        .variables(variables())
    )
    for title, panels in ROWS:
        made.with_row(dashboard.Row(title).collapsed(False))
        for panel in panels():
            made.with_panel(panel)
    built = json.loads(json.dumps(made.build(), cls=JSONEncoder))
    for number, panel in enumerate(built["panels"], start=1):
        panel["id"] = number
        panel.get("options", {}).pop("footer", None)  # newer versions of Grafana have none
    for variable in built["templating"]["list"]:
        variable.pop("auto", None)  # of variables of another type
        variable.pop("auto_count", None)
        variable.pop("auto_min", None)
    built["annotations"] = {"list": [_checkpoints()]}
    return built


def text() -> str:
    """What is in the file."""
    return json.dumps(build(), indent=2, sort_keys=True, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    FILE.parent.mkdir(exist_ok=True)
    FILE.write_text(text(), encoding="utf-8")
