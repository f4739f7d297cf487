"""Judges manifests by the schemas of Kubernetes and of Kubeflow.

Runs in the virtual environment of the tools, not in the tests': reads from stdin a JSON object of
name to documents, and writes a JSON list of what is wrong.

What strict schemas see: misspelt and misplaced fields, wrong types, what is missing. What they do
not see is looked for in ``rules.py``. JobSet and TrainJob have no schema but the models that
Kubeflow makes of them, which drop what they do not know: so what comes back is compared. Of a
PyTorchJob, whose models are gone, the fields are listed here. The pods in all of them are judged
as the pods that they are.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

import kubeflow_trainer_api.models as kubeflow
import kubernetes_validate

MODELS = {
    "JobSet": kubeflow.JobsetV1alpha2JobSet,
    "TrainJob": kubeflow.TrainerV1alpha1TrainJob,
    "TrainingRuntime": kubeflow.TrainerV1alpha1TrainingRuntime,
}
# Of monitoring.coreos.com/v1, of what the operator takes; True: anything. Models of it that can be
# had take unknown fields.
METADATA = {"name": True, "namespace": True, "labels": True, "annotations": True}
PROMETHEUS = {
    "PodMonitor": {
        "apiVersion": True,
        "kind": True,
        "metadata": METADATA,
        "spec": {
            "selector": {"matchLabels": True, "matchExpressions": True},
            "namespaceSelector": {"any": True, "matchNames": True},
            "jobLabel": True,
            "podTargetLabels": True,
            "podMetricsEndpoints": [
                {
                    "port": True,
                    "path": True,
                    "interval": True,
                    "scrapeTimeout": True,
                    "honorLabels": True,
                    "relabelings": [
                        {
                            "sourceLabels": True,
                            "separator": True,
                            "targetLabel": True,
                            "regex": True,
                            "replacement": True,
                            "action": True,
                        }
                    ],
                }
            ],
        },
    },
    "PrometheusRule": {
        "apiVersion": True,
        "kind": True,
        "metadata": METADATA,
        "spec": {
            "groups": [
                {
                    "name": True,
                    "interval": True,
                    "rules": [
                        {
                            "alert": True,
                            "record": True,
                            "expr": True,
                            "for": True,
                            "keep_firing_for": True,
                            "labels": True,
                            "annotations": True,
                        }
                    ],
                }
            ]
        },
    },
}
# Of kubeflow.org/v1; True: anything.
REPLICA = {"replicas": True, "restartPolicy": True, "template": True}
PYTORCH_JOB = {
    "apiVersion": True,
    "kind": True,
    "metadata": True,
    "spec": {
        "nprocPerNode": True,
        "elasticPolicy": True,
        "runPolicy": {
            "activeDeadlineSeconds": True,
            "backoffLimit": True,
            "cleanPodPolicy": True,
            "managedBy": True,
            "schedulingPolicy": True,
            "suspend": True,
            "ttlSecondsAfterFinished": True,
        },
        "pytorchReplicaSpecs": {"Master": REPLICA, "Worker": REPLICA},
    },
}


def main() -> None:
    """Judge what comes."""
    judged: dict[str, list[str]] = {}
    wrong = []
    for name, case in json.load(sys.stdin).items():
        for document in case["documents"]:
            key = json.dumps([document, case["versions"]], sort_keys=True)
            if key not in judged:
                judged[key] = list(complaints(document, case["versions"]))
            wrong += [f"{name}: {document['kind']}: {each}" for each in judged[key]]
    json.dump(wrong, sys.stdout)


def complaints(document: dict[str, Any], versions: list[str]) -> Iterator[str]:
    """What is wrong with one document, for one of these versions of Kubernetes."""
    kind = document["kind"]
    if kind in MODELS:
        known = MODELS[kind].from_dict(document)
        yield from differences(document, known.to_dict(), kind)
    elif kind == "PyTorchJob":
        yield from unknown(document, PYTORCH_JOB, kind)
    elif kind in PROMETHEUS:
        yield from unknown(document, PROMETHEUS[kind], kind)
        if document["apiVersion"] != "monitoring.coreos.com/v1":
            yield f"{document['apiVersion']} has no {kind}"
        return
    else:
        for version in versions:
            yield from by_schema(document, version)
        return
    for place, template in templates(document, kind):
        pod = {"apiVersion": "v1", "kind": "PodTemplate", "template": template}
        for version in versions:
            yield from (f"{place}: {each}" for each in by_schema(pod, version))


def by_schema(document: dict[str, Any], version: str) -> Iterator[str]:
    """What the strict schema of a version refuses."""
    try:
        used = kubernetes_validate.validate(document, version, strict=True)
    except kubernetes_validate.ValidationError as error:
        yield f"{version}: {'.'.join(map(str, error.path))}: {error.message[:300]}"
    else:
        if used != version:
            yield f"there is no schema of {version}"


def differences(given: Any, known: Any, place: str) -> Iterator[str]:
    """What a model did not know, and so left out."""
    if isinstance(given, dict) and isinstance(known, dict):
        for key, value in given.items():
            if key not in known:
                yield f"{place}.{key} is not known"
            else:
                yield from differences(value, known[key], f"{place}.{key}")
    elif isinstance(given, list) and isinstance(known, list) and len(given) == len(known):
        for number, value in enumerate(given):
            yield from differences(value, known[number], f"{place}[{number}]")
    elif given != known:
        yield f"{place} is {given!r}, and is read as {known!r}"


def unknown(given: Any, known: Any, place: str) -> Iterator[str]:
    """Fields that are not listed."""
    if isinstance(known, list):
        for number, each in enumerate(given):
            yield from unknown(each, known[0], f"{place}[{number}]")
    elif known is not True:
        for key, value in given.items():
            if key not in known:
                yield f"{place}.{key} is not known"
            else:
                yield from unknown(value, known[key], f"{place}.{key}")


def templates(value: Any, place: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """The pod templates in a document."""
    if isinstance(value, dict):
        if "containers" in value.get("spec", {}):
            yield place, value
            return
        for key, each in value.items():
            yield from templates(each, f"{place}.{key}")
    elif isinstance(value, list):
        for number, each in enumerate(value):
            yield from templates(each, f"{place}[{number}]")


if __name__ == "__main__":
    main()
