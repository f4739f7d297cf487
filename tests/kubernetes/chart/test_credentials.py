"""Credentials: by workload identity or from a secret, to those who need them, never in clear."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tests.kubernetes.chart.helm import Document, Helm, documents, only, pods
from tests.kubernetes.chart.matrix import LEAST, merged

Rendered = Mapping[str, list[Document]]
OURS = ("ds-ckpt-restore", "ds-ckpt-sidecar")


def containers(found: list[Document]) -> dict[str, dict[str, Any]]:
    """Name to container, of the first pod."""
    spec = pods(found)[0]["spec"]
    return {each["name"]: each for each in (*spec["initContainers"], *spec["containers"])}


def annotations(found: list[Document]) -> dict[str, str]:
    """Of the service account."""
    given: dict[str, str] = only("ServiceAccount", found)["metadata"].get("annotations", {})
    return given


def test_a_workload_identity_stands_on_the_service_account(rendered: Rendered) -> None:
    assert annotations(rendered["IRSA"]) == {
        "eks.amazonaws.com/role-arn": "arn:aws:iam::123456789012:role/a/b"
    }
    assert annotations(rendered["GKE"]) == {
        "iam.gke.io/gcp-service-account": "ckpt@my-project.iam.gserviceaccount.com"
    }
    assert annotations(rendered["Azure"]) == {
        "azure.workload.identity/client-id": "00000000-1111-2222-3333-444444444444"
    }
    labels = pods(rendered["Azure"])[0]["metadata"]["labels"]
    assert labels["azure.workload.identity/use"] == "true"


def test_eks_pod_identity_needs_nothing_but_a_service_account_of_a_known_name(
    rendered: Rendered,
) -> None:
    found = rendered["Job, least"]
    assert annotations(found) == {}
    assert only("ServiceAccount", found)["metadata"]["name"] == "train"
    assert pods(found)[0]["spec"]["serviceAccountName"] == "train"


def test_a_secrets_keys_go_to_sidecar_and_restore_and_not_to_the_trainer(helm: Helm) -> None:
    values = merged(
        LEAST,
        {
            "credentials": {
                "secret": "minio",
                "env": [{"name": "AWS_ACCESS_KEY_ID", "secret": "more", "key": "user"}],
                "files": {"secret": "files"},
            }
        },
    )
    found = containers(documents(helm.render(values)))
    for name in OURS:
        assert found[name]["envFrom"] == [{"secretRef": {"name": "minio"}}]
        assert {
            "name": "AWS_ACCESS_KEY_ID",
            "valueFrom": {"secretKeyRef": {"name": "more", "key": "user"}},
        } in found[name]["env"]
        assert {
            "name": "ds-ckpt-credentials",
            "mountPath": "/var/run/secrets/ds-ckpt",
            "readOnly": True,
        } in found[name]["volumeMounts"]
    assert "minio" not in str(found["trainer"])
    assert "more" not in str(found["trainer"])
    assert "ds-ckpt-credentials" not in str(found["trainer"])


def test_a_trainer_that_reads_the_store_gets_all_that_it_takes(rendered: Rendered) -> None:
    trainer = containers(rendered["Job, everything"])["trainer"]
    names = [each["name"] for each in trainer["env"]]
    assert {"DS_CKPT_DESTINATION", "DS_CKPT_S3_ENDPOINT", "AWS_ACCESS_KEY_ID"} <= set(names)
    assert {"secretRef": {"name": "minio"}} in trainer["envFrom"]
    assert "ds-ckpt-credentials" in [each["name"] for each in trainer["volumeMounts"]]


def test_nobody_gets_a_token_of_the_cluster_unless_asked_and_then_the_sidecar_alone(
    rendered: Rendered,
) -> None:
    for name, found in rendered.items():
        for pod in pods(found):
            automount = pod["spec"]["automountServiceAccountToken"]
            assert automount == ("everything" in name), name
    found = rendered["existing service account"]
    with_token = [
        name
        for name, each in containers(found).items()
        if "ds-ckpt-token" in [mount["name"] for mount in each["volumeMounts"]]
    ]
    assert with_token == ["ds-ckpt-sidecar"]


def test_the_role_has_the_least_that_reports_take(rendered: Rendered) -> None:
    found = rendered["no workload, reports"]
    assert only("Role", found)["rules"] == [
        {"apiGroups": [""], "resources": ["pods"], "verbs": ["patch"]},
        {"apiGroups": ["events.k8s.io"], "resources": ["events"], "verbs": ["create"]},
    ]
    asked = [name for name in rendered if "everything" in name]
    asked += ["no workload, reports", "existing service account", "files without a group"]
    made = [name for name, each in rendered.items() if "Role" in [one["kind"] for one in each]]
    assert sorted(made) == sorted(asked)


def test_no_right_to_delete_means_no_setting_that_deletes(rendered: Rendered) -> None:
    names = [each["name"] for each in containers(rendered["nothing deleted"])[OURS[1]]["env"]]
    assert "DS_CKPT_KEEP_LAST" not in names
