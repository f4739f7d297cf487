"""PromQL of the dashboard: the selection by the variables, and what several panels ask alike.

The labels ``namespace`` and ``pod`` come from a scrape in Kubernetes and are missing elsewhere. A
variable's "All" is ``.*``, which a missing label matches, and an agent is called by its pod, or
else by its ``instance``.
"""

from __future__ import annotations

SELECTED = 'namespace=~"$namespace",run=~"$run",pod=~"$pod"'
RUN = "namespace, run"
AGENT = "namespace, run, pod, instance"


def one(name: str, more: str = "") -> str:
    """A metric of the selected agents; ``more`` are further matchers."""
    return f"ds_ckpt_{name}{{{SELECTED}{',' if more else ''}{more}}}"


def rate(name: str, more: str = "") -> str:
    """Its growth, in units per second."""
    return f"rate({one(name, more)}[$__rate_interval])"


def grown(name: str, window: str) -> str:
    """How much a counter grew, the first value of a series that began meanwhile included."""
    counter = one(name)
    return f"(({counter} unless {counter} offset {window}) or increase({counter}[{window}]))"


def of_process(name: str, window: str = "") -> str:
    """A figure of the agents' processes, or its growth; their library knows of no runs."""
    series = f'ds_ckpt_process_{name}{{namespace=~"$namespace",pod=~"$pod"}}'
    figure = f"rate({series}[{window}])" if window else series
    runs = f"(max by ({AGENT}) ({one('agent_ready')}) >= bool 0)"
    return f"{figure} * on (namespace, pod, instance) group_left (run) {runs}"


def by_run(operation: str, expression: str) -> str:
    """One series for each run."""
    return f"{operation} by ({RUN}) ({expression})"


def by_agent(expression: str, labels: str = AGENT) -> str:
    """One series for each agent, whose name is in the label ``agent``."""
    series = f"max by ({labels}) ({expression})"
    by_instance = f'label_replace({series}, "agent", "$1", "instance", "(.*)")'
    return f'label_replace({by_instance}, "agent", "$1", "pod", "(.+)")'


def apart(expression: str) -> str:
    """The difference between the agents of a run that are furthest apart."""
    return f"{by_run('max', expression)} - {by_run('min', expression)}"


def quantile(share: float, histogram: str, window: str) -> str:
    """A quantile of what a histogram has counted within a window."""
    buckets = f"sum by (le) (increase({one(f'{histogram}_bucket')}[{window}]))"
    return f"histogram_quantile({share}, {buckets})"


def mean_by(label: str, histogram: str, window: str) -> str:
    """The mean of what a histogram has counted within a window; no sample if it counted nothing."""
    total, count = (
        f"sum by ({label}) (increase({one(f'{histogram}_{suffix}')}[{window}]))"
        for suffix in ("sum", "count")
    )
    return f"{total} / ({count} > 0)"
