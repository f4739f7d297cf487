"""What each kind of workload is: its pods, its nodes, its containers, its end."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from tests.kubernetes.chart.helm import Document, Helm, documents, only, pods
from tests.kubernetes.chart.matrix import KINDS, kind, merged
from tests.kubernetes.chart.rules import faults

Rendered = Mapping[str, list[Document]]


def names(each: list[dict[str, Any]]) -> list[str]:
    """Of containers, volumes, variables."""
    return [one["name"] for one in each]


def value(container: Mapping[str, Any], name: str) -> Any:
    """What a container's variable says, or where it is from."""
    (one,) = [each for each in container["env"] if each["name"] == name]
    return one.get("value", one.get("valueFrom"))


@pytest.mark.parametrize("name", KINDS)
def test_restore_comes_first_then_the_sidecar_then_the_trainer(
    rendered: Rendered, name: str
) -> None:
    for pod in pods(rendered[f"{name}, least"]):
        spec = pod["spec"]
        assert names(spec["initContainers"]) == ["ds-ckpt-restore", "ds-ckpt-sidecar"]
        assert spec["initContainers"][1]["restartPolicy"] == "Always"
        assert len(spec["containers"]) == 1
        mounts = [each["volumeMounts"] for each in (*spec["initContainers"], *spec["containers"])]
        assert mounts == [[{"name": "ds-ckpt", "mountPath": "/checkpoints"}]] * 3
        assert spec["volumes"] == [{"name": "ds-ckpt", "emptyDir": {}}]


def test_each_controller_finds_the_container_that_trains_under_the_name_that_it_wants(
    rendered: Rendered,
) -> None:
    found = {
        name: {each["spec"]["containers"][0]["name"] for each in pods(rendered[f"{name}, least"])}
        for name in KINDS
    }
    assert found == {
        "Job": {"trainer"},
        "IndexedJob": {"trainer"},
        "JobSet": {"trainer"},
        "PyTorchJob": {"pytorch"},
        "TrainJob": {"node"},
    }


def test_the_sidecar_of_before_1_29_is_a_container_that_ends_by_itself(
    rendered: Rendered,
) -> None:
    (pod,) = pods(rendered["Job, plain container"])
    sidecar = pod["spec"]["containers"][1]
    assert names(pod["spec"]["initContainers"]) == ["ds-ckpt-restore"]
    assert names(pod["spec"]["containers"]) == ["trainer", "ds-ckpt-sidecar"]
    assert "restartPolicy" not in sidecar
    assert value(sidecar, "DS_CKPT_EXIT_WHEN_FINISHED") == "1"
    assert value(sidecar, "DS_CKPT_TRAINER_GONE_SECONDS") == "300"
    assert pod["spec"]["restartPolicy"] == "OnFailure"


def test_the_nodes_of_an_indexed_job_find_each_other_by_torchruns_own_variables(
    rendered: Rendered,
) -> None:
    found = rendered["IndexedJob of 4 nodes"]
    job, service = only("Job", found), only("Service", found)
    (pod,) = pods([job])
    trainer = pod["spec"]["containers"][0]
    assert job["spec"]["completionMode"] == "Indexed"
    assert (job["spec"]["completions"], job["spec"]["parallelism"]) == (4, 4)
    # A pod's host name is its Job's name and its index; its domain is the headless service.
    first = f"{job['metadata']['name']}-0.{service['metadata']['name']}"
    assert pod["spec"]["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["publishNotReadyAddresses"] is True
    index = {
        "fieldRef": {
            "fieldPath": "metadata.annotations['batch.kubernetes.io/job-completion-index']"
        }
    }
    for prefix in ("", "PET_"):
        assert value(trainer, f"{prefix}MASTER_ADDR") == first
        assert value(trainer, f"{prefix}MASTER_PORT") == "29500"
        assert value(trainer, f"{prefix}NNODES") == "4"
        assert value(trainer, f"{prefix}NODE_RANK") == index
    assert value(trainer, "PET_NPROC_PER_NODE") == "auto"


def test_the_first_pod_of_a_jobset_has_the_name_that_the_others_call(rendered: Rendered) -> None:
    jobset = only("JobSet", rendered["JobSet of 4 nodes"])
    (pod,) = pods([jobset])
    (job,) = jobset["spec"]["replicatedJobs"]
    name = jobset["metadata"]["name"]
    assert jobset["spec"]["network"]["enableDNSHostnames"] is True
    first = f"{name}-{job['name']}-0-0.{name}"
    assert value(pod["spec"]["containers"][0], "PET_MASTER_ADDR") == first


def test_a_pytorchjob_has_a_master_and_the_rest_as_workers(rendered: Rendered) -> None:
    replicas = only("PyTorchJob", rendered["PyTorchJob of 4 nodes"])["spec"]["pytorchReplicaSpecs"]
    assert {name: each["replicas"] for name, each in replicas.items()} == {"Master": 1, "Worker": 3}
    assert replicas["Master"]["template"] == replicas["Worker"]["template"]
    alone = only("PyTorchJob", rendered["PyTorchJob, least"])["spec"]["pytorchReplicaSpecs"]
    assert list(alone) == ["Master"]


def test_a_trainjob_gets_a_runtime_of_its_own_and_helm_makes_that_first(
    texts: Mapping[str, Mapping[str, str]], rendered: Rendered
) -> None:
    found = rendered["TrainJob of 4 nodes"]
    train, runtime = only("TrainJob", found), only("TrainingRuntime", found)
    assert train["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"]
    assert train["spec"]["trainer"] == {"numNodes": 4}
    for text in texts.values():
        written = text["TrainJob of 4 nodes"]
        assert written.index("kind: List") < written.index("kind: TrainJob")


def test_several_nodes_on_one_claim_have_a_folder_each(rendered: Rendered) -> None:
    for name in ("IndexedJob", "JobSet", "TrainJob"):
        (pod,) = pods(rendered[f"{name} of 2 nodes on a claim"])
        spec = pod["spec"]
        for container in (*spec["initContainers"], *spec["containers"]):
            assert container["volumeMounts"][0]["subPathExpr"] == "node-$(NODE_RANK)"
            assert value(container, "NODE_RANK")
    (pod,) = pods(rendered["IndexedJob on folders of a claim"])
    mount = pod["spec"]["containers"][0]["volumeMounts"][0]
    assert mount["subPathExpr"] == "runs/one/node-$(NODE_RANK)"


def test_a_pod_takes_the_place_of_another_only_when_that_has_drained(rendered: Rendered) -> None:
    job = only("Job", rendered["Job, least"])["spec"]
    jobset = only("JobSet", rendered["JobSet, least"])["spec"]["replicatedJobs"][0]
    assert job["podReplacementPolicy"] == "Failed"
    assert jobset["template"]["spec"]["podReplacementPolicy"] == "Failed"


def test_long_names_stay_apart_and_fit(helm: Helm) -> None:
    """53 letters are what helm allows; JobSet's pods have the longest names."""
    seen = set()
    for name in KINDS:
        for last in "ab":
            values = kind(name, 1 if name == "Job" else 1000)
            found = documents(helm.render(values, release="r" * 52 + last))
            assert faults(found) == [], name
            seen |= {(each["kind"], each["metadata"]["name"]) for each in found}
    accounts = [each for each in seen if each[0] == "ServiceAccount"]
    assert len(accounts) == 2


@pytest.mark.parametrize("release", ["run.7", "7b", "7" * 53])
def test_a_release_may_have_dots_in_its_name_or_begin_with_a_digit(
    helm: Helm, release: str
) -> None:
    for name in KINDS:
        assert faults(documents(helm.render(kind(name), release=release))) == []


def test_nothing_is_in_the_cluster_but_what_was_asked_for(rendered: Rendered) -> None:
    kinds = {name: sorted(each["kind"] for each in found) for name, found in rendered.items()}
    assert kinds["no workload"] == ["ServiceAccount"]
    assert kinds["Job, least"] == ["Job", "ServiceAccount"]
    assert kinds["IndexedJob, least"] == ["Job", "Service", "ServiceAccount"]
    assert kinds["the namespace's service account"] == ["Job"]
    assert kinds["files without a group"] == ["Job", "Role", "RoleBinding", "ServiceAccount"]
    assert kinds["existing service account"] == ["Job", "Role", "RoleBinding"]
    assert kinds["TrainJob, everything"] == [
        "ConfigMap",
        "NetworkPolicy",
        "PodMonitor",
        "PrometheusRule",
        "Role",
        "RoleBinding",
        "ServiceAccount",
        "TrainJob",
        "TrainingRuntime",
    ]


def test_everything_lies_in_the_releases_namespace(rendered: Rendered) -> None:
    for found in rendered.values():
        assert {each["metadata"]["namespace"] for each in found} <= {"training"}


def test_the_network_is_open_unless_asked_and_then_open_for_the_ranks(rendered: Rendered) -> None:
    policy = only("NetworkPolicy", rendered["no network policy for what goes out"])["spec"]
    assert policy["policyTypes"] == ["Ingress"]
    assert policy["ingress"] == [{"from": [{"podSelector": policy["podSelector"]}]}]
    bounded = only("NetworkPolicy", rendered["Job, everything"])["spec"]
    assert bounded["policyTypes"] == ["Ingress", "Egress"]
    assert [each["port"] for rule in bounded["egress"] for each in rule.get("ports", [])] == [
        53,
        53,
        443,
        9000,
    ]
    google = only("NetworkPolicy", rendered["GKE"])["spec"]["egress"]
    assert "169.254.169.254/32" in str(google)


def test_what_the_user_sets_wins_over_what_the_chart_sets(rendered: Rendered) -> None:
    (pod,) = pods(rendered["Job, everything"])
    chosen = pod["metadata"]["annotations"]["kubectl.kubernetes.io/default-container"]
    assert chosen == "ds-ckpt-sidecar"
    assert pod["spec"]["securityContext"] == {
        "fsGroup": 1000650000,
        "fsGroupChangePolicy": "Always",
        "seccompProfile": {"type": "RuntimeDefault"},
        "supplementalGroups": [1000650000],
    }


def test_a_commands_words_may_be_numbers(helm: Helm) -> None:
    values = merged(kind("Job"), {"trainer": {"args": [1000000, 0.5, True, "010", "", "1e-5"]}})
    command = "trainer.command={torchrun,--nproc-per-node,8,train.py}"
    (pod,) = pods(documents(helm.render(values, "--set", command)))
    trainer = pod["spec"]["containers"][0]
    assert trainer["command"] == ["torchrun", "--nproc-per-node", "8", "train.py"]
    assert trainer["args"] == ["1000000", "0.5", "true", "010", "", "1e-5"]


def test_openshift_gives_users_and_groups_by_itself(rendered: Rendered) -> None:
    for case in ("users by OpenShift", "users by OpenShift, in words"):
        (pod,) = pods(rendered[case])
        assert "fsGroup" not in pod["spec"]["securityContext"]
        for container in pod["spec"]["initContainers"]:
            assert not {"runAsUser", "runAsGroup"} & set(container["securityContext"])
            assert container["securityContext"]["runAsNonRoot"] is True
