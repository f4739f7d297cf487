"""The rules and the schemas by which manifests are judged do see what is wrong."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from tests.kubernetes.chart.conftest import Judge
from tests.kubernetes.chart.helm import Document, only, pods
from tests.kubernetes.chart.rules import faults

Break = Callable[[list[Document]], Any]


def sidecar(found: list[Document]) -> dict[str, Any]:
    """The agent's container."""
    return dict_of(pods(found)[0], "initContainers", "ds-ckpt-sidecar")


def trainer(found: list[Document]) -> dict[str, Any]:
    """The trainer's container."""
    return dict_of(pods(found)[0], "containers", "trainer")


def dict_of(pod: dict[str, Any], key: str, name: str) -> dict[str, Any]:
    """An item of one of a pod's lists, by its name."""
    found: dict[str, Any] = next(each for each in pod["spec"][key] if each["name"] == name)
    return found


def variable(found: list[Document], name: str) -> dict[str, Any]:
    """One of the trainer's."""
    one: dict[str, Any] = next(each for each in trainer(found)["env"] if each["name"] == name)
    return one


def spec(found: list[Document]) -> dict[str, Any]:
    """The pod's."""
    inner: dict[str, Any] = pods(found)[0]["spec"]
    return inner


# What is done to an Indexed Job with everything set; what is said of it.
BROKEN: dict[str, Break] = {
    "none of ['Always', 'IfNotPresent', 'Never']": lambda f: sidecar(f).update(
        imagePullPolicy="IfMissing"
    ),
    "none of ['', 'HugePages', 'Memory']": lambda f: spec(f)["volumes"][0]["emptyDir"].update(
        medium="RAM"
    ),
    "none of ['DoesNotExist', 'Equal',": lambda f: spec(f)["tolerations"][0].update(
        operator="exists"
    ),
    "restartPolicy is Allways": lambda f: spec(f).update(restartPolicy="Allways"),
    "a Job's restartPolicy is Always": lambda f: spec(f).update(restartPolicy="Always"),
    "podFailurePolicy needs restartPolicy Never": lambda f: only("Job", f)["spec"].update(
        podFailurePolicy={}
    ),
    "not all nodes would run at a time": lambda f: only("Job", f)["spec"].update(parallelism=1),
    "two masters": lambda f: variable(f, "MASTER_ADDR").update(value="elsewhere"),
    "is no name": lambda f: only("Service", f)["metadata"].update(name="Other"),
    "does not begin with a letter": lambda f: only("Service", f)["metadata"].update(name="7b"),
    "volume ds-ckpt-credentials: only root reads it": lambda f: spec(f)["securityContext"].pop(
        "fsGroup"
    ),
    "more than 63 letters": lambda f: only("Job", f)["metadata"].update(name="j" * 60),
    "label a/b/c=d is none": lambda f: pods(f)[0]["metadata"]["labels"].update({"a/b/c": "d"}),
    "label a=-b is none": lambda f: pods(f)[0]["metadata"]["labels"].update({"a": "-b"}),
    "a is no text": lambda f: pods(f)[0]["metadata"]["annotations"].update({"a": 1}),
    "('Role', 'other') is there twice": lambda f: f.append(only("Role", f)),
    "there is no role other": lambda f: only("Role", f)["metadata"].update(name="more"),
    "there is no account nobody": lambda f: only("RoleBinding", f)["subjects"][0].update(
        name="nobody"
    ),
    "the account is in another namespace": lambda f: only("RoleBinding", f)["subjects"][0].update(
        namespace="default"
    ),
    "the pod's account is nobody": lambda f: spec(f).update(serviceAccountName="nobody"),
    "Service does not select the pods": lambda f: only("Service", f)["spec"]["selector"].update(
        a="b"
    ),
    "NetworkPolicy does not select the pods": lambda f: pods(f)[0]["metadata"]["labels"].pop(
        "app.kubernetes.io/component"
    ),
    "there is no headless service elsewhere": lambda f: spec(f).update(subdomain="elsewhere"),
    "container ds-ckpt-sidecar is there twice": lambda f: spec(f)["containers"].append(sidecar(f)),
    "container 'Trainer' is no name": lambda f: trainer(f).update(name="Trainer"),
    "image is 'train:'": lambda f: trainer(f).update(image="train:"),
    "trainer: restartPolicy is for init containers": lambda f: trainer(f).update(
        restartPolicy="Always"
    ),
    "an init container that ends cannot have": lambda f: sidecar(f).pop("restartPolicy"),
    "POD_NAME is set twice": lambda f: sidecar(f)["env"].append(
        {"name": "POD_NAME", "value": "again"}
    ),
    "WANDB_API_KEY is a secret in clear": lambda f: trainer(f)["env"].append(
        {"name": "WANDB_API_KEY", "value": "x"}
    ),
    "PROXY is a secret in clear": lambda f: trainer(f)["env"].append(
        {"name": "PROXY", "value": "http://me:secret@proxy"}
    ),
    "STEPS is no text": lambda f: trainer(f)["env"].append({"name": "STEPS", "value": 3}),
    "there is no field metadata.nam": lambda f: trainer(f)["env"].append(
        {"name": "A", "valueFrom": {"fieldRef": {"fieldPath": "metadata.nam"}}}
    ),
    "$(RANK) is not set": lambda f: trainer(f).update(args=["--rank=$(RANK)"]),
    "volume shm is there twice": lambda f: spec(f)["volumes"].append(
        {"name": "shm", "emptyDir": {}}
    ),
    "there is no volume data": lambda f: trainer(f)["volumeMounts"].append(
        {"name": "data", "mountPath": "/data"}
    ),
    "volume data is mounted nowhere": lambda f: spec(f)["volumes"].append(
        {"name": "data", "emptyDir": {}}
    ),
    "volume shm is of 2 kinds": lambda f: dict_of(pods(f)[0], "volumes", "shm").update(
        hostPath={"path": "/dev/shm"}
    ),
    "two mounts at /dev/shm": lambda f: trainer(f)["volumeMounts"].append(
        {"name": "shm", "mountPath": "/dev/shm/"}
    ),
    "data is no place for a mount": lambda f: trainer(f)["volumeMounts"].append(
        {"name": "shm", "mountPath": "data"}
    ),
    "is no path below a volume": lambda f: trainer(f)["volumeMounts"][0].update(subPath="../x"),
    "a probe on port http": lambda f: sidecar(f)["startupProbe"]["httpGet"].update(port="http"),
    "a probe on port 80": lambda f: sidecar(f)["readinessProbe"]["httpGet"].update(port=80),
    "two containers listen on (9484, 'TCP')": lambda f: trainer(f)["ports"][0].update(
        containerPort=9484
    ),
    "port 'a-name-that-is-too-long' is no name": lambda f: trainer(f)["ports"][0].update(
        name="a-name-that-is-too-long"
    ),
    "periodSeconds is 0": lambda f: sidecar(f)["startupProbe"].update(periodSeconds=0),
    "memory is '1GB', no quantity": lambda f: sidecar(f)["resources"]["limits"].update(
        memory="1GB"
    ),
    "sizeLimit is '600 Gi', no quantity": lambda f: spec(f)["volumes"][0]["emptyDir"].update(
        sizeLimit="600 Gi"
    ),
    "more is requested than the limit allows": lambda f: sidecar(f)["resources"].update(
        requests={"memory": "2Gi"}
    ),
    "a limit of ephemeral-storage evicts": lambda f: sidecar(f)["resources"]["limits"].update(
        {"ephemeral-storage": "1Gi"}
    ),
    "no limit of memory": lambda f: sidecar(f)["resources"].pop("limits"),
    "the pod has no seccomp profile": lambda f: spec(f)["securityContext"].pop("seccompProfile"),
    "'readOnlyRootFilesystem': False": lambda f: sidecar(f)["securityContext"].update(
        readOnlyRootFilesystem=False
    ),
    "'add': ['DAC_READ_SEARCH']": lambda f: sidecar(f)["securityContext"]["capabilities"].update(
        add=["DAC_READ_SEARCH"]
    ),
    "trainer has the sidecar's token": lambda f: trainer(f)["volumeMounts"].append(
        {"name": "ds-ckpt-token", "mountPath": "/token"}
    ),
    "the pod has hostPID": lambda f: spec(f).update(hostPID=True),
    "a drain of 280.5 s in a grace of 285 s": lambda f: spec(f).update(
        terminationGracePeriodSeconds=285
    ),
}

# A case of the matrix, what is done to it, what the schemas say of it.
MISSPELT: list[tuple[str, Break, str]] = [
    (
        "Job, least",
        lambda f: sidecar(f).update(restartPolice="Always"),
        "'restartPolice' was unexpected",
    ),
    (
        "Job, least",
        lambda f: sidecar(f)["env"][0].update(valu="x"),
        "initContainers.1.env.0: Additional properties are not allowed ('valu'",
    ),
    ("Job, least", lambda f: spec(f).update(hostNetwork=1), "1 is not of type 'boolean'"),
    (
        "JobSet, least",
        lambda f: only("JobSet", f)["spec"]["failurePolicy"].update(maxRestart=3),
        "JobSet.spec.failurePolicy.maxRestart is not known",
    ),
    (
        "TrainJob, least",
        lambda f: only("TrainJob", f)["spec"]["trainer"].update(numNode=3),
        "TrainJob.spec.trainer.numNode is not known",
    ),
    (
        "TrainJob, least",
        lambda f: only("TrainingRuntime", f)["spec"]["mlPolicy"].update(numNode=3),
        "TrainingRuntime.spec.mlPolicy.numNode is not known",
    ),
    ("TrainJob, least", lambda f: spec(f).update(subdomains="x"), "'subdomains' was unexpected"),
    (
        "PyTorchJob, least",
        lambda f: only("PyTorchJob", f)["spec"]["runPolicy"].update(backOffLimit=3),
        "PyTorchJob.spec.runPolicy.backOffLimit is not known",
    ),
    (
        "PyTorchJob of 4 nodes",
        lambda f: only("PyTorchJob", f)["spec"]["pytorchReplicaSpecs"].update(Workers={}),
        "PyTorchJob.spec.pytorchReplicaSpecs.Workers is not known",
    ),
]


@pytest.mark.parametrize("said", BROKEN)
def test_a_rule_sees_what_is_broken(said: str, rendered: Mapping[str, list[Document]]) -> None:
    found = copy.deepcopy(rendered["IndexedJob, everything"])
    BROKEN[said](found)
    wrong = faults(found)
    assert any(said in each for each in wrong), wrong


def test_the_schemas_see_what_is_misspelt(
    rendered: Mapping[str, list[Document]], judge: Judge
) -> None:
    cases = {}
    for number, (case, breaking, _) in enumerate(MISSPELT):
        cases[f"case {number}"] = copy.deepcopy(rendered[case])
        breaking(cases[f"case {number}"])
    wrong = judge(cases, ["1.37"])
    for number, (_, _, said) in enumerate(MISSPELT):
        found = [each for each in wrong if each.startswith(f"case {number}:")]
        assert any(said in each for each in found), (said, found)
