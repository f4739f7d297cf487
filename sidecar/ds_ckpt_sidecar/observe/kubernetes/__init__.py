"""Reports to the cluster: events about the own pod, and annotations on it.

They are for people and dashboards, and nothing depends on them: what is durable stands in the
store. So a report never waits, never fails and never costs the agent more than a little memory;
one that cannot be sent is left out.
"""

from ds_ckpt_sidecar.observe.kubernetes.reporter import PodReporter

__all__ = ["PodReporter"]
