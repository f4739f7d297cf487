"""Values that the chart is rendered with: each kind of workload, plain and with everything set.

A test holds that every value of ``values.yaml`` is set to something else somewhere in here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Values = dict[str, Any]
KINDS = ("Job", "IndexedJob", "JobSet", "PyTorchJob", "TrainJob")
DIGEST = "sha256:" + "0123456789abcdef" * 4


def merged(*parts: Mapping[str, Any]) -> Values:
    """Mappings over each other, as helm does it: the later wins, lists are replaced."""
    result: Values = {}
    for part in parts:
        for key, value in part.items():
            both = isinstance(value, Mapping) and isinstance(result.get(key), dict)
            result[key] = merged(result[key], value) if both else value
    return result


LEAST: Values = {"destination": "s3://bucket/runs/one", "trainer": {"image": "train:1"}}
NONE: Values = {"destination": "s3://bucket/runs/one", "workload": {"kind": "none"}}


def kind(name: str, nodes: int = 1, **workload: Any) -> Values:
    """The least that a workload of a kind needs."""
    return merged(LEAST, {"workload": {"kind": name, "nodes": nodes, **workload}})


AGENT: Values = {
    "keepLast": 3,
    "keepLocal": 0,
    "retentionPause": 1000000,
    "order": "newest",
    "streams": 8,
    "partMib": 16,
    "memoryMib": 64,
    "bandwidth": "500MiB",
    "stallSeconds": 90.5,
    "pageCache": "keep",
    "priority": "low",
    "rescanSeconds": 2,
    "leaseStaleSeconds": 120,
    "abandonSeconds": 3600,
    "allowWeakStore": True,
}

# All but what goes with one kind alone, or with one choice of several.
EVERYTHING: Values = {
    "destination": "s3://bucket/runs/one",
    "runId": "one",
    "agent": AGENT,
    "fullnameOverride": "other",
    "workload": {
        "nodes": 3,
        "processesPerNode": 8,
        "masterPort": 23456,
        "backoffLimit": 2000000,
        "podReplacementPolicy": "TerminatingOrFailed",
        "maxRestarts": 7,
        "activeDeadlineSeconds": 1000000,
        "ttlSecondsAfterFinished": 0,
        "suspend": True,
        "labels": {"kueue.x-k8s.io/queue-name": "gpus"},
        "annotations": {"example.com/owner": "me"},
    },
    "trainer": {
        "image": f"registry.example/train@{DIGEST}",
        "imagePullPolicy": "Always",
        "command": ["torchrun", "train.py"],
        "args": ["--steps", "1000"],
        "workingDir": "/src",
        "env": [
            {"name": "NCCL_DEBUG", "value": "INFO"},
            {"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "hub", "key": "token"}}},
        ],
        "envFrom": [{"configMapRef": {"name": "settings"}}],
        "ports": [{"name": "metrics", "containerPort": 9090}],
        "resources": {"limits": {"nvidia.com/gpu": 8, "memory": "400Gi"}},
        "securityContext": {"runAsUser": 1000650000},
        "volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}],
        "readsStore": True,
    },
    "storeEnv": {"DS_CKPT_S3_ENDPOINT": "https://minio.example:9000", "AWS_MAX_ATTEMPTS": 1000000},
    "volume": {
        "mountPath": "/mnt/ckpt",
        "emptyDir": {"sizeLimit": "600Gi"},
        "fsGroup": 1000650000,
    },
    "restore": {
        "tag": "global_step100",
        "streams": 32,
        "bandwidth": "1GB",
        "resources": {"requests": {"cpu": 1, "memory": "256Mi"}, "limits": {"memory": "1Gi"}},
    },
    "credentials": {
        "secret": "minio",
        "env": [{"name": "AWS_ACCESS_KEY_ID", "secret": "more", "key": "user"}],
        "files": {"secret": "files", "mountPath": "/var/run/keys"},
    },
    "serviceAccount": {
        "name": "trainers",
        "annotations": {"example.com/why": "training"},
        "automountToken": True,
    },
    "kubernetesReports": {"enabled": True},
    "image": {
        "repository": "registry.example:5000/ds-ckpt-sidecar",
        "tag": "1.2.3",
        "digest": DIGEST,
        "pullPolicy": "Always",
    },
    "imagePullSecrets": [{"name": "registry"}],
    "sidecar": {
        "runAsUser": 1000650000,
        "runAsGroup": 1000650000,
        "port": 9484,
        "drainSeconds": 280.5,
        "preStop": False,
        "resources": {
            "requests": {"cpu": "250m", "memory": "256Mi"},
            "limits": {"memory": "1Gi"},
        },
        "startup": {"requireStore": True, "periodSeconds": 3, "failureThreshold": 50},
        "liveness": {"periodSeconds": 20, "timeoutSeconds": 9, "failureThreshold": 5},
        "readiness": {
            "enabled": True,
            "periodSeconds": 15,
            "timeoutSeconds": 8,
            "failureThreshold": 2,
        },
        "extraEnv": [{"name": "HTTPS_PROXY", "value": "http://proxy.example:3128"}],
        "extraVolumeMounts": [{"name": "authorities", "mountPath": "/etc/authorities"}],
    },
    "pod": {
        "terminationGracePeriodSeconds": 300,
        "labels": {"team": "models", "example.com/priority": "1"},
        "annotations": {"kubectl.kubernetes.io/default-container": "ds-ckpt-sidecar"},
        "securityContext": {"supplementalGroups": [1000650000], "fsGroupChangePolicy": "Always"},
        "nodeSelector": {"gpu": "h100"},
        "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}],
        "affinity": {
            "podAntiAffinity": {
                "requiredDuringSchedulingIgnoredDuringExecution": [
                    {"topologyKey": "kubernetes.io/hostname", "labelSelector": {}}
                ]
            }
        },
        "topologySpreadConstraints": [
            {
                "maxSkew": 1,
                "topologyKey": "topology.kubernetes.io/zone",
                "whenUnsatisfiable": "ScheduleAnyway",
            }
        ],
        "priorityClassName": "training",
        "runtimeClassName": "nvidia",
        "schedulerName": "volcano",
        "hostNetwork": True,
        "extraVolumes": [
            {"name": "shm", "emptyDir": {"medium": "Memory"}},
            {"name": "authorities", "configMap": {"name": "authorities"}},
        ],
        "extraInitContainers": [
            {"name": "fetch-data", "image": "busybox:1", "command": ["true"]},
        ],
    },
    "networkPolicy": {
        "enabled": True,
        "ingress": [{"ports": [{"port": 9090}]}],
        "egress": {"restrict": True, "rules": [{"ports": [{"port": 9000, "protocol": "TCP"}]}]},
    },
    "monitoring": {
        "podMonitor": {
            "enabled": True,
            "interval": "15s",
            "labels": {"release": "prometheus"},
            "relabelings": [{"targetLabel": "cluster", "replacement": "one"}],
            "fromNamespace": "monitoring",
        },
        "rules": {
            "enabled": True,
            "labels": {"release": "prometheus"},
            "runbookBase": "https://wiki.example/ds-ckpt/runbooks",
        },
        "dashboard": {
            "enabled": True,
            "labels": {"grafana_dashboard": "yes"},
            "annotations": {"grafana_folder": "Training"},
        },
    },
}


def everything(name: str) -> Values:
    """All that a workload of a kind takes."""
    nodes = 1 if name == "Job" else 3
    values = merged(EVERYTHING, {"workload": {"kind": name, "nodes": nodes}})
    if name == "TrainJob":
        del values["workload"]["ttlSecondsAfterFinished"]
    return values


FAILURE_POLICY: Values = {
    "restartPolicy": "Never",
    "podFailurePolicy": {
        "rules": [
            {
                "action": "Ignore",
                "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}],
            }
        ]
    },
}
CLAIM: Values = {"volume": {"existingClaim": "checkpoints"}}

CASES: dict[str, Values] = {
    **{f"{name}, least": kind(name) for name in KINDS},
    **{f"{name}, everything": everything(name) for name in KINDS},
    **{f"{name} of 4 nodes": kind(name, 4, processesPerNode="auto") for name in KINDS[1:]},
    **{
        f"{name} of 2 nodes on a claim": merged(kind(name, 2), CLAIM)
        for name in ("IndexedJob", "JobSet", "TrainJob")
    },
    **{
        f"{name}, plain container": merged(kind(name), {"sidecar": {"native": False}})
        for name in ("Job", "IndexedJob", "JobSet")
    },
    **{
        f"{name}, failure policy": kind(name, **FAILURE_POLICY)
        for name in ("Job", "IndexedJob", "JobSet", "TrainJob")
    },
    "Job on a folder of a claim": merged(LEAST, CLAIM, {"volume": {"subPath": "runs/one"}}),
    "IndexedJob on folders of a claim": merged(
        kind("IndexedJob", 2), CLAIM, {"volume": {"subPath": "runs/one"}}
    ),
    "no workload": NONE,
    "no workload, rules and dashboard": merged(
        NONE, {"monitoring": {"rules": {"enabled": True}, "dashboard": {"enabled": True}}}
    ),
    "scraped from any namespace": merged(
        LEAST,
        {"monitoring": {"podMonitor": {"enabled": True}}, "networkPolicy": {"enabled": True}},
    ),
    "no workload, reports": merged(NONE, {"kubernetesReports": {"enabled": True}}),
    "plain container, everything": merged(
        everything("Job"), {"sidecar": {"native": False, "trainerGoneSeconds": 60}}
    ),
    "no restore": merged(LEAST, {"restore": {"enabled": False}}),
    "nothing before the trainer": merged(
        LEAST, {"restore": {"enabled": False}, "sidecar": {"native": False}}
    ),
    "no probes": merged(LEAST, {"sidecar": {"liveness": {"enabled": False}, "preStop": False}}),
    "RAM disk": merged(
        LEAST,
        {
            "volume": {"emptyDir": {"medium": "Memory", "sizeLimit": "4Gi"}},
            "restore": {"resources": {"limits": {"memory": "5Gi"}}},
            "trainer": {"resources": {"limits": {"memory": "8Gi"}}},
        },
    ),
    "users by OpenShift": merged(
        LEAST,
        {"volume": {"fsGroup": None}, "sidecar": {"runAsUser": None, "runAsGroup": None}},
    ),
    "users by OpenShift, in words": merged(
        LEAST,
        {"volume": {"fsGroup": ""}, "sidecar": {"runAsUser": "", "runAsGroup": ""}},
    ),
    "files without a group": merged(
        LEAST,
        {
            "volume": {"fsGroup": None},
            "credentials": {"files": {"secret": "files"}},
            "kubernetesReports": {"enabled": True},
        },
    ),
    "sidecar as root": merged(LEAST, {"sidecar": {"runAsUser": 0, "runAsGroup": 0}}),
    "IRSA": merged(LEAST, {"identity": {"awsRoleArn": "arn:aws:iam::123456789012:role/a/b"}}),
    "IRSA in China": merged(
        LEAST, {"identity": {"awsRoleArn": "arn:aws-cn:iam::123456789012:role/x"}}
    ),
    "GKE": merged(
        LEAST,
        {
            "identity": {"gcpServiceAccount": "ckpt@my-project.iam.gserviceaccount.com"},
            "networkPolicy": {"enabled": True, "egress": {"restrict": True}},
        },
    ),
    "Azure": merged(
        LEAST,
        {
            "identity": {"azureClientId": "00000000-1111-2222-3333-444444444444"},
            "pod": {"labels": {"azure.workload.identity/use": "true"}},
        },
    ),
    "existing service account": merged(
        LEAST,
        {
            "serviceAccount": {"create": False, "name": "trainers"},
            "kubernetesReports": {"enabled": True},
        },
    ),
    "the namespace's service account": merged(LEAST, {"serviceAccount": {"create": False}}),
    "reading trainer without credentials": merged(LEAST, {"trainer": {"readsStore": True}}),
    "nothing deleted": merged(LEAST, {"noDelete": True}),
    "no network policy for what goes out": merged(LEAST, {"networkPolicy": {"enabled": True}}),
    "a folder as store": merged(
        LEAST,
        {
            "destination": "file:///mnt/store/runs/one",
            "sidecar": {"extraVolumeMounts": [{"name": "store", "mountPath": "/mnt/store"}]},
            "pod": {
                "extraVolumes": [{"name": "store", "nfs": {"server": "nas.example", "path": "/"}}]
            },
        },
    ),
    "gs": merged(LEAST, {"destination": "gs://bucket/runs/one"}),
    "az": merged(
        LEAST,
        {
            "destination": "az://container/runs/one",
            "storeEnv": {"AZURE_STORAGE_ACCOUNT": "account"},
        },
    ),
    "az by a secret": merged(
        LEAST, {"destination": "az://container/runs/one", "credentials": {"secret": "azure"}}
    ),
    "sftp": merged(LEAST, {"destination": "sftp://host.example/runs/one"}),
    "bytes as numbers": merged(
        LEAST,
        {
            "agent": {"bandwidth": 500000000},
            "restore": {"bandwidth": 500000000},
            "volume": {"emptyDir": {"sizeLimit": 600000000000}},
            "sidecar": {"resources": {"limits": {"memory": 1073741824}}},
        },
    ),
    "an empty list of resources": merged(
        LEAST, {"sidecar": {"resources": {"requests": {}, "limits": {"memory": "128Mi"}}}}
    ),
}
