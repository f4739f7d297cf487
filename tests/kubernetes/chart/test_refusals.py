"""Values that cannot work are refused before a cluster sees them, with a sentence that helps."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.kubernetes.chart.helm import Helm, RefusedError
from tests.kubernetes.chart.matrix import AGENT, CASES, CLAIM, LEAST, NONE, Values, kind, merged


def set_to(path: str, value: Any, over: Values = LEAST) -> Values:
    """Values with one of them set: ``workload.kind``."""
    for name in reversed(path.split(".")):
        value = {name: value}
    return merged(over, value)


def agent(**values: Any) -> Values:
    """Settings of the agent."""
    return merged(LEAST, {"agent": values})


RAM: Values = merged(
    LEAST,
    {
        "volume": {"emptyDir": {"medium": "Memory", "sizeLimit": "4Gi"}},
        "restore": {"resources": {"limits": {"memory": "5Gi"}}},
    },
)
PLAIN: Values = {"sidecar": {"native": False}}
POLICY: Values = {"rules": [{"action": "Ignore", "onExitCodes": {}}]}

# By the templates: what does not go together, or needs an example. The whole sentence, or its
# beginning.
SENTENCES: list[tuple[Values, str]] = [
    # what must be given
    ({}, "destination is missing: set it to where this run's checkpoints go"),
    (
        {"destination": "s3://bucket/x"},
        "trainer.image is missing: set it to the image that trains, or set workload.kind=none",
    ),
    (set_to("destination", "bucket/x"), 'destination "bucket/x" is no URL: write s3://bucket/'),
    (
        set_to("destination", "https://me:secret@nas.example/x"),
        "destination holds a password, which would be shown wherever the destination is",
    ),
    (
        set_to("destination", "s3://c/x?sig=abc"),
        "destination has a query, and a signature there would be shown wherever",
    ),
    (
        set_to("destination", "file:///mnt/store/x"),
        "destination file:///mnt/store/x: the sidecar mounts nothing there. Add the volume to",
    ),
    (
        set_to("destination", "s3://bucket/x "),
        'destination "s3://bucket/x " begins or ends with a space: take it out',
    ),
    (
        set_to("destination", "s3://bucket/$(RUN)"),
        "destination s3://bucket/$(RUN): Kubernetes would put a variable in place of $(...). Write "
        "it out, with helm's or your own means",
    ),
    (
        set_to("destination", "gs:///bucket/x"),
        "destination gs:///bucket/x names no bucket: write it after two slashes, as "
        "gs://bucket/prefix",
    ),
    (
        set_to("destination", "file:///mnt/store/../x"),
        "destination file:///mnt/store/../x: write the folder without . and ..",
    ),
    (
        set_to("destination", "memory://x"),
        "destination memory://x is the sidecar's own memory, and ends with it: write s3://",
    ),
    (
        set_to("destination", "s3://bucket/x\ny"),
        'destination is "s3://bucket/x\\ny": take the line break, or what else cannot be printed',
    ),
    (
        set_to("destination", "az://container/x"),
        "destination az://container/x names a container, and nothing names its account: set "
        "storeEnv.AZURE_STORAGE_ACCOUNT, or name a secret in credentials that holds "
        "AZURE_STORAGE_CONNECTION_STRING",
    ),
    (
        set_to("trainer.readsStore", True, CASES["a folder as store"]),
        "trainer.readsStore: the trainer mounts nothing at file:///mnt/store/runs/one. Give "
        "trainer.volumeMounts the same mount as sidecar.extraVolumeMounts",
    ),
    # the workload
    (
        set_to("workload.nodes", 2),
        "workload.nodes is 2 and workload.kind is Job, which is one pod: set workload.kind=Indexed",
    ),
    (
        kind("Job", podFailurePolicy=POLICY),
        "workload.podFailurePolicy needs workload.restartPolicy=Never: Kubernetes accepts it with",
    ),
    (
        kind(
            "Job",
            podFailurePolicy=POLICY,
            restartPolicy="Never",
            podReplacementPolicy="TerminatingOrFailed",
        ),
        "workload.podFailurePolicy needs workload.podReplacementPolicy=Failed: Kubernetes accepts",
    ),
    (
        kind("PyTorchJob", podFailurePolicy=POLICY, restartPolicy="Never"),
        "workload.podFailurePolicy: a PyTorchJob has none. Leave it out, or use another",
    ),
    (
        kind("TrainJob", processesPerNode="gpu"),
        "workload.processesPerNode: a TrainJob takes a number, or auto",
    ),
    (
        kind("TrainJob", ttlSecondsAfterFinished=0),
        "workload.ttlSecondsAfterFinished: a TrainJob has none. Leave it out",
    ),
    (
        merged(kind("PyTorchJob"), PLAIN),
        "sidecar.native=false: a PyTorchJob is finished when its pods are",
    ),
    (
        merged(kind("Job", restartPolicy="Never"), PLAIN),
        "sidecar.native=false needs workload.restartPolicy=OnFailure: with Never a sidecar that",
    ),
    # time
    (
        set_to("pod.terminationGracePeriodSeconds", 12),
        "pod.terminationGracePeriodSeconds is 12, of which the sidecar needs 10 beside its drain",
    ),
    (
        set_to("sidecar.drainSeconds", 115),
        "sidecar.drainSeconds is 115 and pod.terminationGracePeriodSeconds 120: the agent ends up "
        "to 5 s after its drain, so the grace must be at least 125. Raise it, or lower",
    ),
    # memory
    (
        set_to("sidecar.resources.limits.memory", "100Mi"),
        "sidecar.resources.limits.memory is 100Mi; at least 128Mi are needed: 96 MiB and "
        "agent.memoryMib (32)",
    ),
    (
        agent(memoryMib=256),
        "sidecar.resources.limits.memory is 256Mi; at least 352Mi are needed: 96 MiB and "
        "agent.memoryMib (256)",
    ),
    (
        set_to("restore.resources.limits.memory", "64Mi"),
        "restore.resources.limits.memory is 64Mi; at least 128Mi are needed",
    ),
    (
        set_to("sidecar.resources.limits.ephemeral-storage", "1Gi"),
        "sidecar.resources.limits: leave ephemeral-storage out. The whole pod is evicted when",
    ),
    (
        set_to("volume.emptyDir.medium", "Memory"),
        "volume.emptyDir.medium is Memory: set volume.emptyDir.sizeLimit too",
    ),
    (
        set_to("restore.resources.limits.memory", "4Gi", RAM),
        "restore.resources.limits.memory is 4Gi; at least 4224Mi are needed: 96 MiB and "
        "agent.memoryMib (32), and what it restores to a volume in memory",
    ),
    (
        set_to("trainer.resources.limits.memory", "4Gi", RAM),
        "trainer.resources.limits.memory is 4Gi, and what the trainer writes to the volume counts",
    ),
    (
        set_to("sidecar.resources.requests.memory", "1Gi"),
        "sidecar.resources.requests.memory is 1Gi, and sidecar.resources.limits.memory is 256Mi: "
        "Kubernetes accepts no request above its limit. Raise the limit",
    ),
    (
        set_to("sidecar.resources.limits.cpu", "50m"),
        "sidecar.resources.requests.cpu is 100m, and sidecar.resources.limits.cpu is 50m: "
        "Kubernetes accepts no request above its limit. Raise the limit",
    ),
    (
        set_to("restore.resources", {"requests": {"cpu": 1.5}, "limits": {"cpu": 1}}),
        "restore.resources.requests.cpu is 1.5, and restore.resources.limits.cpu is 1: Kubernetes",
    ),
    # the volume
    (
        set_to("volume.mountPath", "/opt/ds-ckpt"),
        "volume.mountPath is /opt/ds-ckpt: a volume there hides the program that the sidecar runs. "
        "Choose another, for instance /checkpoints",
    ),
    (
        set_to("credentials.files", {"secret": "keys", "mountPath": "/checkpoints"}),
        "credentials.files.mountPath: /checkpoints is volume.mountPath already. Choose another",
    ),
    (
        merged(
            LEAST,
            {
                "credentials": {"files": {"secret": "keys", "mountPath": "/keys"}},
                "sidecar": {"extraVolumeMounts": [{"name": "ds-ckpt", "mountPath": "/keys/"}]},
            },
        ),
        "sidecar.extraVolumeMounts: /keys is in credentials.files.mountPath already. Mount one of "
        "them elsewhere",
    ),
    (
        set_to("trainer.volumeMounts", [{"name": "ds-ckpt", "mountPath": "/x"}] * 2),
        "trainer.volumeMounts: /x is in trainer.volumeMounts already. Mount one of them elsewhere",
    ),
    (
        merged(LEAST, CLAIM, {"volume": {"emptyDir": {"sizeLimit": "1Gi"}}}),
        "volume.existingClaim and volume.emptyDir are both set: leave one of them out",
    ),
    (
        set_to("volume.subPath", "runs"),
        "volume.subPath is a folder of volume.existingClaim, which is not set",
    ),
    (
        set_to("volume.subPath", "../runs", merged(LEAST, CLAIM)),
        'volume.subPath is "../runs": write a path below the claim\'s root',
    ),
    (
        merged(kind("PyTorchJob", 2), CLAIM),
        "volume.existingClaim: each node needs a volume of its own, and the pods of a PyTorchJob",
    ),
    (
        merged(NONE, CLAIM, {"workload": {"nodes": 2}}),
        "volume.existingClaim: each node needs a volume of its own, and with workload.kind=none "
        "this chart does not know how your pods are numbered. Use an emptyDir, or leave it empty "
        "and write a volume named ds-ckpt for each pod in place of ds-ckpt-sidecar.volumes",
    ),
    (
        set_to("volume.mountPath", "checkpoints"),
        'volume.mountPath is "checkpoints": write an absolute path without a slash at its end',
    ),
    (
        set_to("volume.mountPath", "/checkpoints/"),
        'volume.mountPath is "/checkpoints/": write an absolute path without a slash at its end',
    ),
    (
        set_to("volume.emptyDir.sizeLimit", "100GB"),
        'volume.emptyDir.sizeLimit is "100GB": write bytes as Kubernetes does, for instance 512Mi',
    ),
    (
        set_to("trainer.volumeMounts", [{"name": "data", "mountPath": "/data"}]),
        "trainer.volumeMounts: there is no volume data. Add it to pod.extraVolumes",
    ),
    (
        set_to("sidecar.extraVolumeMounts", [{"name": "ds-ckpt", "mountPath": "/checkpoints"}]),
        "sidecar.extraVolumeMounts: /checkpoints is volume.mountPath already. Mount ds-ckpt else",
    ),
    (
        set_to("pod.extraVolumes", [{"name": "ds-ckpt", "emptyDir": {}}]),
        "pod.extraVolumes: ds-ckpt is a volume of the chart's. Give yours another name",
    ),
    (
        set_to("pod.extraVolumes", [{"name": "a", "emptyDir": {}}] * 2),
        "pod.extraVolumes: a is there twice. Take one of them out",
    ),
    # who one is
    (
        set_to("identity.awsRoleArn", "checkpoints"),
        'identity.awsRoleArn is "checkpoints": write arn:aws:iam::ACCOUNT:role/NAME',
    ),
    (
        set_to("identity.gcpServiceAccount", "ckpt@project"),
        'identity.gcpServiceAccount is "ckpt@project": write NAME@PROJECT.iam.gserviceaccount.com',
    ),
    (
        set_to("identity.azureClientId", "ckpt"),
        'identity.azureClientId is "ckpt": write the client\'s id, as 00000000-0000-',
    ),
    (
        merged(
            LEAST,
            {
                "identity": {"awsRoleArn": "arn:aws:iam::123456789012:role/x"},
                "serviceAccount": {"create": False},
            },
        ),
        "identity stands on the service account, and serviceAccount.create is false: annotate that",
    ),
    (
        merged(
            LEAST,
            {"kubernetesReports": {"enabled": True}, "serviceAccount": {"create": False}},
        ),
        "kubernetesReports.enabled would give its rights to the namespace's default service",
    ),
    (
        set_to("credentials.secret", "My_Secret"),
        'credentials.secret is "My_Secret", which cannot be a name in Kubernetes: only a-z, 0-9',
    ),
    (
        set_to("fullnameOverride", "Run 7"),
        'fullnameOverride is "Run 7", which cannot be a name in Kubernetes',
    ),
    # what is left out
    (
        merged(LEAST, {"noDelete": True, "agent": {"keepLast": 3}}),
        "noDelete and agent.keepLast contradict each other: keeping the last N deletes the others",
    ),
    (agent(bandwidth="fast"), 'agent.bandwidth is "fast": write bytes per second, for instance'),
    (
        set_to("restore.bandwidth", "1 TBit"),
        'restore.bandwidth is "1 TBit": write bytes per second, for instance 500MiB, 2GB or none',
    ),
    # names of variables, ports, labels
    (
        set_to("sidecar.extraEnv", [{"name": "DS_CKPT_VOLUME", "value": "/x"}]),
        "sidecar.extraEnv: DS_CKPT_VOLUME is set by the chart, from volume.mountPath. Take it out",
    ),
    (
        set_to("sidecar.extraEnv", [{"name": "DS_CKPT_KEEP_LAST", "value": "3"}]),
        "sidecar.extraEnv: DS_CKPT_KEEP_LAST is set by the chart, from agent.keepLast. Take it",
    ),
    (
        set_to("storeEnv", {"DS_CKPT_DESTINATION": "s3://x/y"}),
        "storeEnv: DS_CKPT_DESTINATION is set by the chart, from destination. Take it out there",
    ),
    (
        set_to("trainer.env", [{"name": "DS_CKPT_DIR", "value": "/x"}]),
        "trainer.env: DS_CKPT_DIR is set by the chart, from volume.mountPath. Take it out there",
    ),
    (
        set_to("trainer.env", [{"name": "PET_NNODES", "value": "3"}], kind("IndexedJob", 2)),
        "trainer.env: PET_NNODES is set by the chart, from workload.nodes. Take it out there",
    ),
    (
        set_to("trainer.env", [{"name": "A", "value": "1"}, {"name": "A", "value": "2"}]),
        "trainer.env: A is set in trainer.env already. Take one of them out",
    ),
    (
        merged(
            LEAST,
            {
                "storeEnv": {"AWS_REGION": "a"},
                "sidecar": {"extraEnv": [{"name": "AWS_REGION", "value": "b"}]},
            },
        ),
        "sidecar.extraEnv: AWS_REGION is set in storeEnv already. Take one of them out",
    ),
    (
        merged(kind("IndexedJob", 2, masterPort=8484)),
        "sidecar.port and workload.masterPort are both 8484, and the containers of a pod share",
    ),
    (
        set_to("trainer.ports", [{"containerPort": 8484}]),
        "trainer.ports: 8484 is sidecar.port, and the containers of a pod share its ports",
    ),
    (
        set_to("pod.labels", {"app.kubernetes.io/name": "mine"}),
        "pod.labels: app.kubernetes.io/name is what this release's pods are found by. Take it out",
    ),
    (
        set_to("pod.annotations", {"ds-ckpt.io/run-id": "mine"}),
        "pod.annotations: ds-ckpt.io/run-id is set by the chart. Take it out",
    ),
    (
        set_to("pod.securityContext", {"fsGroup": 0}),
        "pod.securityContext.fsGroup: set volume.fsGroup instead",
    ),
    (
        set_to("pod.extraInitContainers", [{"name": "ds-ckpt-restore", "image": "x"}]),
        "pod.extraInitContainers: ds-ckpt-restore is a container of the chart's. Give yours",
    ),
    (
        set_to("pod.extraInitContainers", [{"name": "a", "image": "x"}] * 2),
        "pod.extraInitContainers: a is there twice. Take one of them out",
    ),
    # for pods that are another chart's
    (
        set_to("pod.nodeSelector", {"gpu": "h100"}, NONE),
        "pod.nodeSelector: with workload.kind=none the pod is your own chart's. Set it there",
    ),
    (
        set_to("trainer.image", "train:1", NONE),
        "trainer.image: with workload.kind=none the container is your own chart's. Set it there",
    ),
    (
        set_to("networkPolicy.enabled", True, NONE),
        "networkPolicy.enabled: with workload.kind=none this chart does not know your pods' labels",
    ),
    (
        set_to("enabled", True),
        "enabled is for a chart that has this one as a dependency with a condition: take it out",
    ),
    # forms
    (
        set_to("image.repository", "registry:5000/ds-ckpt-sidecar:0.1.0"),
        'image.repository is "registry:5000/ds-ckpt-sidecar:0.1.0", which has a tag: put that into '
        "image.tag",
    ),
    (
        set_to("image.digest", "sha256:abc"),
        'image.digest is "sha256:abc": write sha256: and 64 hexadecimal digits, as podman inspect',
    ),
    (
        set_to("volume.emptyDir.sizeLimit", 10),
        "volume.emptyDir.sizeLimit is 10 bytes, which is too little for a volume: is a unit like "
        "Gi missing?",
    ),
    (
        set_to("sidecar.runAsUser", "me"),
        'sidecar.runAsUser is "me": write a number, for instance 1000, which id NAME tells',
    ),
    (set_to("sidecar.runAsGroup", "1e3"), 'sidecar.runAsGroup is "1e3": write a number'),
    (set_to("volume.fsGroup", "users"), 'volume.fsGroup is "users": write a number'),
    (
        set_to("trainer.command", "torchrun train.py"),
        'trainer.command is "torchrun train.py": write a list of words, as --set '
        "trainer.command='{torchrun,train.py}' does",
    ),
    (set_to("trainer.args", "--fast"), 'trainer.args is "--fast": write a list of words'),
    (
        set_to("monitoring.podMonitor.interval", "often"),
        'monitoring.podMonitor.interval is "often": write a time as Prometheus does, for instance '
        "15s",
    ),
    (
        set_to("runId", "one\ntwo"),
        'runId is "one\\ntwo": take the line break, or what else cannot be printed, out',
    ),
    (
        set_to("restore.tag", "../../x"),
        'restore.tag is "../../x", which no checkpoint can have: write a tag as the trainer saved',
    ),
    (
        set_to(
            "identity",
            {
                "awsRoleArn": "arn:aws:iam::123456789012:role/x",
                "gcpServiceAccount": "a@b.iam.gserviceaccount.com",
            },
        ),
        "identity.awsRoleArn and identity.gcpServiceAccount are both set, and a pod runs in one",
    ),
]

# Wherever a credential may stand, whatever it is called.
MONITORED: list[tuple[Values, str]] = [
    (
        set_to("monitoring.podMonitor.enabled", True, NONE),
        "monitoring.podMonitor.enabled: with workload.kind=none this release has no pods to select",
    ),
    (
        set_to("monitoring.podMonitor.fromNamespace", "monitoring"),
        "monitoring.podMonitor.fromNamespace is whom networkPolicy lets in, and does nothing",
    ),
    (
        set_to("monitoring.dashboard.labels", {"app.kubernetes.io/name": "x"}),
        "monitoring.dashboard.labels: app.kubernetes.io/name is set by the chart. Take it out",
    ),
]

CLEAR: list[tuple[str, Any]] = [
    ("storeEnv", {"AWS_SECRET_ACCESS_KEY": "x"}),
    ("storeEnv", {"AWS_ACCESS_KEY_ID": "x"}),
    ("storeEnv", {"AWS_SESSION_TOKEN": "x"}),
    ("storeEnv", {"AZURE_STORAGE_CONNECTION_STRING": "x"}),
    ("storeEnv", {"AZURE_STORAGE_KEY": "x"}),
    ("storeEnv", {"DS_CKPT_AZURE_SAS_TOKEN": "x"}),
    ("storeEnv", {"ANYTHING": "DefaultEndpointsProtocol=https;AccountName=a;AccountKey=b"}),
    ("storeEnv", {"ANYTHING": "AKIAABCDEFGHIJKLMNOP"}),
    ("storeEnv", {"DS_CKPT_FSSPEC_OPTIONS": '{"host": "h", "password": "x"}'}),
    ("storeEnv", {"PROXY": "http://me:secret@proxy.example"}),
    ("trainer.env", [{"name": "WANDB_API_KEY", "value": "x"}]),
    ("trainer.env", [{"name": "HF_TOKEN", "value": "x"}]),
    *(
        ("trainer.env", [{"name": name, "value": "x"}])
        for name in (
            "DB_PASSWORD",
            "DB_PASS",
            "PGPASSWORD",
            "SSH_KEY_PASSPHRASE",
            "TOKEN",
            "WANDB_TOKEN",
            "OPENAI_API_TOKEN",
            "MLFLOW_TRACKING_TOKEN",
            "NGC_CLI_API_KEY",
            "SECRET_KEY",
            "OPENAI_KEY",
        )
    ),
    ("sidecar.extraEnv", [{"name": "KEY", "value": "-----BEGIN RSA PRIVATE KEY-----"}]),
]

# What ends like a credential, or begins like one, and is none.
NO_CREDENTIALS = [
    "TOKENIZERS_PARALLELISM",
    "MAX_TOKENS",
    "EOS_TOKEN",
    "PAD_TOKEN",
    "IMAGE_TOKEN",
    "PASSES",
    "FORWARD_PASS",
    "BYPASS",
    "KEYBOARD",
    "DATA_KEY",
    "SORT_KEY",
    "PARTITION_KEY",
    "PRIMARY_KEY",
    "TEXT_KEY",
    "GOOGLE_APPLICATION_CREDENTIALS",
    "DS_CKPT_GCS_KMS_KEY",
    "DS_CKPT_S3_KMS_BUCKET_KEY",
]

# By the schema: the value, where it is wrong, as both helms write it.
BY_SCHEMA: list[tuple[str, Any, str]] = [
    ("trainer.imag", "train:1", "imag"),
    ("worklod", {}, "worklod"),
    ("agent.keeplast", 3, "keeplast"),
    ("sidecar.resources.limit", {}, "limit"),
    ("volume.emptyDir.sizelimit", "1Gi", "sizelimit"),
    ("networkPolicy.egress.restricted", True, "restricted"),
    ("workload.kind", "Deployment", "IndexedJob"),
    ("workload.nodes", 0, "1"),
    ("workload.nodes", "two", "integer"),
    ("workload.processesPerNode", "all", "auto|gpu|cpu"),
    ("workload.restartPolicy", "Always", "OnFailure"),
    ("workload.podReplacementPolicy", "Later", "TerminatingOrFailed"),
    ("trainer.imagePullPolicy", "Sometimes", "IfNotPresent"),
    ("trainer.args", [{"steps": 1}], "string"),
    ("trainer.env", {"A": "b"}, "array"),
    ("trainer.env", [{"name": "A", "value": 1}], "string"),
    ("trainer.env", [{"name": "A", "valu": "1"}], "valu"),
    ("agent.order", "random", "newest"),
    ("agent.streams", 0, "1"),
    ("agent.streams", 1000, "256"),
    ("agent.partMib", 1, "5"),
    ("agent.keepLast", 0, "1"),
    ("agent.stallSeconds", 0.5, "1"),
    ("agent.pageCache", "flush", "keep"),
    ("agent.allowWeakStore", "yes", "boolean"),
    ("storeEnv", {"DS-CKPT": "x"}, "A-Za-z_"),
    ("volume.emptyDir.medium", "RAM", "Memory"),
    ("credentials.env", [{"name": "A", "value": "b"}], "value"),
    ("credentials.env", [{"name": "A", "secret": "b"}], "key"),
    ("image.repository", "", "1"),
    ("image.pullPolicy", "IfMissing", "IfNotPresent"),
    ("imagePullSecrets", ["registry"], "object"),
    ("sidecar.port", 80, "24"),
    ("sidecar.native", "yes", "boolean"),
    ("sidecar.resources.requests.cpu", "1 core", "0-9"),
    ("sidecar.startup.periodSeconds", 0, "1"),
    ("pod.labels", {"a": 1}, "string"),
    ("pod.terminationGracePeriodSeconds", 0, "1"),
    ("pod.tolerations", {}, "array"),
    ("restore.enabled", "no", "boolean"),
    ("kubernetesReports.enabled", "on", "boolean"),
]

# What a template reads without asking whether it is there.
NO_NULL = [
    "workload",
    "workload.kind",
    "workload.nodes",
    "workload.backoffLimit",
    "workload.masterPort",
    "trainer",
    "agent",
    "storeEnv",
    "volume",
    "volume.mountPath",
    "volume.emptyDir",
    "restore",
    "restore.enabled",
    "restore.resources",
    "identity",
    "credentials",
    "credentials.secret",
    "credentials.files",
    "credentials.files.mountPath",
    "serviceAccount",
    "serviceAccount.create",
    "kubernetesReports.enabled",
    "image",
    "image.repository",
    "sidecar",
    "sidecar.native",
    "sidecar.port",
    "sidecar.resources",
    "sidecar.liveness.periodSeconds",
    "pod",
    "pod.terminationGracePeriodSeconds",
    "networkPolicy",
    "networkPolicy.egress",
]


def refusal(helm: Helm, values: Values, **options: Any) -> str:
    """What helm said, which must not render."""
    with pytest.raises(RefusedError) as refused:
        helm.render(values, **options)
    return str(refused.value)


def test_what_does_not_go_together_is_refused_with_a_sentence(helm: Helm) -> None:
    for values, sentence in (*SENTENCES, *MONITORED):
        assert sentence in refusal(helm, values), values


def test_a_credential_in_clear_is_refused_and_not_repeated(helm: Helm) -> None:
    for path, value in CLEAR:
        said = refusal(helm, set_to(path, value))
        name = value[0]["name"] if isinstance(value, list) else next(iter(value))
        assert f"{path}: {name} holds a credential in clear" in said
        assert "in credentials, or by valueFrom.secretKeyRef; better, use a workload" in said
        assert not re.search("AccountKey|AKIA|me:secret", said)


def test_what_only_sounds_like_a_credential_is_taken(helm: Helm) -> None:
    names = [{"name": name, "value": "x"} for name in NO_CREDENTIALS]
    assert "EOS_TOKEN" in helm.render(set_to("trainer.env", names))
    assert "DATA_KEY" in helm.render(set_to("storeEnv", dict.fromkeys(NO_CREDENTIALS, "x")))


def test_what_the_schema_refuses_names_the_value_and_what_is_allowed(helm: Helm) -> None:
    for path, value, expected in BY_SCHEMA:
        said = refusal(helm, set_to(path, value))
        parent = path.rpartition(".")[0]
        places = (
            path,
            "/" + path.replace(".", "/"),
            parent or "(root)",
            "/" + parent.replace(".", "/"),
        )
        assert "specifications of the schema" in said, said
        assert any(place in said for place in places), (path, said)
        assert expected in said, (path, said)


def test_null_is_refused_by_name_where_it_would_be_no_value(helm: Helm) -> None:
    for path in NO_NULL:
        said = refusal(helm, set_to(path, None))
        parent, _, name = path.rpartition(".")
        places = (f"{parent or '(root)'}: {name} is required", f"missing property '{name}'")
        assert any(place in said for place in places), (path, said)
        assert parent.replace(".", "/") in said.replace(".", "/"), (path, said)


def test_a_setting_of_the_agent_is_given_in_one_place_only(helm: Helm) -> None:
    for name in AGENT:
        variable = "DS_CKPT_" + re.sub("([A-Z])", r"_\1", name).upper()
        said = refusal(helm, set_to("sidecar.extraEnv", [{"name": variable, "value": "1"}]))
        assert f"sidecar.extraEnv: {variable} is set by the chart, from agent.{name}." in said


@pytest.mark.parametrize("version", ["1.28", "v1.28.15-eks-1234567", "1.25"])
def test_a_native_sidecar_is_refused_before_1_29(helm: Helm, version: str) -> None:
    said = refusal(helm, LEAST, version=version)
    assert "has no native sidecars: set sidecar.native=false, or use 1.29 or newer" in said


def test_a_cluster_before_1_25_is_refused(helm: Helm) -> None:
    assert ">=1.25.0-0" in refusal(helm, merged(LEAST, PLAIN), version="1.24")
