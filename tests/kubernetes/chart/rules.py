"""What Kubernetes refuses, or starts and then never runs, and no schema sees.

Each rule looks at the documents of one release and yields sentences. The API server's own checks
are the pattern; beyond them, what this chart promises: no credential in clear, no capability, no
reference to what is not there.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from tests.kubernetes.chart.helm import Document, pods

Pod = dict[str, Any]
QUANTITY = re.compile(r"[+-]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([numkMGTPE]|[KMGTPE]i|[eE][+-]?[0-9]+)?")
FACTORS = {"m": 1e-3, "": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
FACTORS.update({f"{letter}i": 1024.0 ** (n + 1) for n, letter in enumerate("KMGTP")})
DNS_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
LABEL_KEY = re.compile(r"([a-z0-9.-]{1,253}/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")
LABEL_VALUE = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?")
PORT_NAME = re.compile(r"(?=.*[a-z])(?!.*--)[a-z0-9]([-a-z0-9]{0,13}[a-z0-9])?")
VARIABLE = re.compile(r"\$\(([A-Za-z_][A-Za-z0-9_]*)\)")
FIELD = re.compile(
    r"metadata\.(name|namespace|uid|(labels|annotations)\['[^']+'\])"
    r"|spec\.(nodeName|serviceAccountName)|status\.(hostIP|hostIPs|podIP|podIPs)"
)
SECRET = re.compile(r"(?i)(passw(or)?d|secret|token|(access|account|api|private|storage)_?key)")
OURS = ("ds-ckpt-sidecar", "ds-ckpt-restore")
# Of a hash or an index that a controller puts behind a name.
POD_SUFFIX = {"Job": "-99-xxxxx", "JobSet": "-node-0-9999-xxxxx", "TrainJob": "-node-0-9999-xxxxx"}

ENUMS: dict[str, set[str]] = {
    "imagePullPolicy": {"Always", "IfNotPresent", "Never"},
    "terminationMessagePolicy": {"File", "FallbackToLogsOnError"},
    "protocol": {"TCP", "UDP", "SCTP"},
    "dnsPolicy": {"ClusterFirst", "ClusterFirstWithHostNet", "Default", "None"},
    "fsGroupChangePolicy": {"OnRootMismatch", "Always"},
    "medium": {"", "Memory", "HugePages"},
    "completionMode": {"Indexed", "NonIndexed"},
    "podReplacementPolicy": {"Failed", "TerminatingOrFailed"},
    "cleanPodPolicy": {"All", "Running", "None"},
    "whenUnsatisfiable": {"DoNotSchedule", "ScheduleAnyway"},
    "effect": {"NoSchedule", "PreferNoSchedule", "NoExecute"},
    "operator": {"Exists", "Equal", "Lt", "Gt", "In", "NotIn", "DoesNotExist"},
}


def faults(found: Sequence[Document]) -> list[str]:
    """All that is wrong with one release."""
    wrong = [each for rule in RULES for each in rule(found)]
    for pod in pods(found):
        wrong += [each for rule in POD_RULES for each in rule(pod)]
    return wrong


# ---- all documents


def enums(found: Sequence[Document]) -> Iterator[str]:
    """Words that are not among those that Kubernetes knows."""
    for place, key, value in _scalars(found):
        if key in ENUMS and value not in ENUMS[key]:
            yield f"{place} is {value!r}: none of {sorted(ENUMS[key])}"


def names(found: Sequence[Document]) -> Iterator[str]:
    """Names and labels that are too long or of other letters; two things of one name."""
    for document in found:
        kind, name = document["kind"], document["metadata"]["name"]
        if not DNS_LABEL.fullmatch(name):
            yield f"{kind} {name!r} is no name"
        if kind in ("Service", "JobSet", "PyTorchJob", "TrainJob") and not name[0].isalpha():
            yield f"{kind} {name!r} does not begin with a letter"
        if not DNS_LABEL.fullmatch(name + POD_SUFFIX.get(kind, "")):
            yield f"{kind} {name!r} is too long: its pods' names would have more than 63 letters"
    for labels in _all(found, "labels"):
        for key, value in labels.items():
            if not LABEL_KEY.fullmatch(key) or not LABEL_VALUE.fullmatch(str(value)):
                yield f"label {key}={value} is none"
    for texts in (*_all(found, "labels"), *_all(found, "annotations")):
        yield from (f"{key} is no text" for key, value in texts.items() if type(value) is not str)
    for twice in _twice((each["kind"], each["metadata"]["name"]) for each in found):
        yield f"{twice} is there twice"


def references(found: Sequence[Document]) -> Iterator[str]:
    """Roles, accounts and pods that something names and nothing makes."""
    there = {(each["kind"], each["metadata"]["name"]) for each in found}
    made = {name for kind, name in there if kind == "ServiceAccount"}
    for document in found:
        if document["kind"] == "RoleBinding":
            if ("Role", document["roleRef"]["name"]) not in there:
                yield f"RoleBinding: there is no role {document['roleRef']['name']}"
            for subject in document["subjects"]:
                if subject["namespace"] != document["metadata"]["namespace"]:
                    yield "RoleBinding: the account is in another namespace"
                made = made or {subject["name"]}
                if subject["name"] not in made:
                    yield f"RoleBinding: there is no account {subject['name']}"
        selector = document.get("spec", {}).get("selector") or document.get("spec", {}).get(
            "podSelector", {}
        ).get("matchLabels")
        if document["kind"] in ("Service", "NetworkPolicy"):
            for pod in pods(found):
                if not selector.items() <= pod["metadata"]["labels"].items():
                    yield f"{document['kind']} does not select the pods"
        if document["kind"] == "TrainJob":
            runtime = document["spec"]["runtimeRef"]
            if (runtime["kind"], runtime["name"]) not in there:
                yield f"TrainJob: there is no runtime {runtime['name']}"
    for pod in pods(found):
        account = pod["spec"]["serviceAccountName"]
        if made and account not in made:
            yield f"the pod's account is {account}, and {sorted(made)} is made"
        subdomain = pod["spec"].get("subdomain")
        if subdomain and ("Service", subdomain) not in there:
            yield f"there is no headless service {subdomain}"


def jobs(found: Sequence[Document]) -> Iterator[str]:
    """Rules of Jobs, also of those in a JobSet."""
    for spec in _jobs(found):
        pod = spec["template"]["spec"]
        if pod["restartPolicy"] not in ("OnFailure", "Never"):
            yield f"a Job's restartPolicy is {pod['restartPolicy']}"
        if "podFailurePolicy" in spec:
            if pod["restartPolicy"] != "Never":
                yield "podFailurePolicy needs restartPolicy Never"
            if spec.get("podReplacementPolicy", "Failed") != "Failed":
                yield "podFailurePolicy needs podReplacementPolicy Failed"
        if spec.get("completionMode") == "Indexed" and spec["completions"] != spec["parallelism"]:
            yield "not all nodes would run at a time"
        masters = {
            each["value"]
            for container in pod["containers"]
            for each in container["env"]
            if each["name"] in ("MASTER_ADDR", "PET_MASTER_ADDR")
        }
        if len(masters) > 1:
            yield f"two masters: {masters}"


# ---- a pod


def containers(pod: Pod) -> Iterator[str]:
    """Names, restart policies, and what only some kinds of containers may have."""
    spec = pod["spec"]
    init = spec.get("initContainers", [])
    every = _containers(pod)
    for twice in _twice(each["name"] for each in every):
        yield f"container {twice} is there twice"
    for each in every:
        if not DNS_LABEL.fullmatch(each["name"]):
            yield f"container {each['name']!r} is no name"
        if not each.get("image") or re.search(r"\s|:$|^:", each["image"]):
            yield f"{each['name']}: image is {each.get('image')!r}"
        native = each.get("restartPolicy") == "Always"
        if "restartPolicy" in each and (each not in init or not native):
            yield f"{each['name']}: restartPolicy is for init containers, and Always"
        probes = {"startupProbe", "livenessProbe", "readinessProbe", "lifecycle"} & set(each)
        if each in init and probes and not native:
            yield f"{each['name']}: an init container that ends cannot have {sorted(probes)}"
    policy = spec.get("restartPolicy", "Always")
    if policy not in ("Always", "OnFailure", "Never"):
        yield f"restartPolicy is {policy}"


def variables(pod: Pod) -> Iterator[str]:
    """Variables that stand twice, have a value in clear that is secret, or name no field."""
    for container in _containers(pod):
        name = container["name"]
        given = container.get("env", [])
        for twice in _twice(each["name"] for each in given):
            yield f"{name}: {twice} is set twice"
        for each in given:
            value, source = each.get("value"), each.get("valueFrom", {})
            if value is not None and type(value) is not str:
                yield f"{name}: {each['name']} is no text"
            secret = SECRET.search(each["name"]) or re.search(r"://[^/]*:[^/]*@", str(value))
            if value is not None and secret:
                yield f"{name}: {each['name']} is a secret in clear"
            if len(source) > 1 or (source and value):
                yield f"{name}: {each['name']} has two sources"
            field = source.get("fieldRef", {}).get("fieldPath")
            if field and not FIELD.fullmatch(field):
                yield f"{name}: {each['name']}: there is no field {field}"
        texts = [*container.get("command", []), *container.get("args", [])]
        texts += [str(each.get("value", "")) for each in given]
        texts += [mount.get("subPathExpr", "") for mount in container.get("volumeMounts", [])]
        for variable in VARIABLE.findall(" ".join(texts)):
            if variable not in {each["name"] for each in given}:
                yield f"{name}: $({variable}) is not set"


def readable(pod: Pod) -> Iterator[str]:
    """Files that Kubernetes writes as root, and a container of ours cannot read."""
    grouped = "fsGroup" in pod["spec"]["securityContext"]
    for volume in pod["spec"].get("volumes", []):
        source = volume.get("secret") or volume.get("projected") or {}
        needed = 0o040 if grouped else 0o004
        if not source.get("defaultMode", 0o644) & needed:
            yield f"volume {volume['name']}: only root reads it"


def mounts(pod: Pod) -> Iterator[str]:
    """Mounts of what is not there, two in one place, volumes that nothing mounts."""
    volumes = pod["spec"].get("volumes", [])
    for twice in _twice(each["name"] for each in volumes):
        yield f"volume {twice} is there twice"
    there, used = {each["name"] for each in volumes}, set()
    for volume in volumes:
        if len(volume) != 2:
            yield f"volume {volume['name']} is of {len(volume) - 1} kinds"
        if not DNS_LABEL.fullmatch(volume["name"]):
            yield f"volume {volume['name']!r} is no name"
    for container in _containers(pod):
        own = container.get("volumeMounts", [])
        for mount in own:
            used.add(mount["name"])
            if mount["name"] not in there:
                yield f"{container['name']}: there is no volume {mount['name']}"
            if not mount["mountPath"].startswith("/") or ":" in mount["mountPath"]:
                yield f"{container['name']}: {mount['mountPath']} is no place for a mount"
            if "subPath" in mount and "subPathExpr" in mount:
                yield f"{container['name']}: {mount['name']} has subPath and subPathExpr"
            below = mount.get("subPath", mount.get("subPathExpr", "x"))
            if not below or below.startswith("/") or ".." in below.split("/"):
                yield f"{container['name']}: {below!r} is no path below a volume"
        for twice in _twice(mount["mountPath"].rstrip("/") for mount in own):
            yield f"{container['name']}: two mounts at {twice}"
    yield from (f"volume {name} is mounted nowhere" for name in sorted(there - used))


def ports(pod: Pod) -> Iterator[str]:
    """Ports that two want, and probes on ports that are not there."""
    taken: Counter[tuple[int, str]] = Counter()
    for container in _containers(pod):
        own = container.get("ports", [])
        for twice in _twice(each["name"] for each in own if "name" in each):
            yield f"{container['name']}: port {twice} is there twice"
        for each in own:
            taken[each["containerPort"], each.get("protocol", "TCP")] += 1
            if not 0 < each["containerPort"] < 65536:
                yield f"{container['name']}: port {each['containerPort']} is none"
            if not PORT_NAME.fullmatch(each.get("name", "x")):
                yield f"{container['name']}: port {each['name']!r} is no name"
        named = {each.get("name") for each in own} | {each["containerPort"] for each in own}
        lifecycle = container.get("lifecycle", {})
        handlers = [
            container.get(f"{kind}Probe", {}) for kind in ("startup", "liveness", "readiness")
        ]
        for handler in (*handlers, *lifecycle.values()):
            port = handler.get("httpGet", {}).get("port")
            if port is not None and port not in named:
                yield f"{container['name']}: a probe on port {port}, which it has not"
        for probe in handlers:
            for key in ("periodSeconds", "timeoutSeconds", "failureThreshold", "successThreshold"):
                if probe.get(key, 1) < 1:
                    yield f"{container['name']}: {key} is {probe[key]}"
    yield from (f"two containers listen on {port}" for port, count in taken.items() if count > 1)


def resources(pod: Pod) -> Iterator[str]:
    """Quantities that are none, requests beyond limits, limits that evict the whole pod."""
    for container in _containers(pod):
        name, given = container["name"], container.get("resources", {})
        requests, limits = given.get("requests") or {}, given.get("limits") or {}
        for key, value in (*requests.items(), *limits.items()):
            if not QUANTITY.fullmatch(str(value)):
                yield f"{name}: {key} is {value!r}, no quantity"
        for key in requests.keys() & limits.keys():
            asked, most = amount(requests[key]), amount(limits[key])
            if asked is not None and most is not None and asked > most:
                yield f"{name}: {key}: more is requested than the limit allows"
        if name in OURS and "ephemeral-storage" in limits:
            yield f"{name}: a limit of ephemeral-storage evicts the pod when the trainer fills it"
        if name in OURS and "memory" not in limits:
            yield f"{name}: no limit of memory"
    for volume in pod["spec"].get("volumes", []):
        size = (volume.get("emptyDir") or {}).get("sizeLimit", "1")
        if not QUANTITY.fullmatch(str(size)):
            yield f"volume {volume['name']}: sizeLimit is {size!r}, no quantity"


def security(pod: Pod) -> Iterator[str]:
    """What our containers may never have, and the token that only the sidecar gets."""
    spec = pod["spec"]
    if spec["securityContext"].get("seccompProfile") != {"type": "RuntimeDefault"}:
        yield "the pod has no seccomp profile"
    for container in _containers(pod):
        if container["name"] in OURS:
            context = container["securityContext"]
            wanted = {
                "readOnlyRootFilesystem": True,
                "allowPrivilegeEscalation": False,
                "privileged": False,
                "capabilities": {"drop": ["ALL"]},
                "seccompProfile": {"type": "RuntimeDefault"},
                "runAsNonRoot": context.get("runAsUser") != 0,
            }
            if {key: context.get(key) for key in wanted} != wanted:
                yield f"{container['name']}: {context}"
        token = [
            each for each in container.get("volumeMounts", []) if each["name"] == "ds-ckpt-token"
        ]
        if token and container["name"] != "ds-ckpt-sidecar":
            yield f"{container['name']} has the sidecar's token"
    for key in ("hostPID", "hostIPC", "shareProcessNamespace"):
        if spec.get(key):
            yield f"the pod has {key}"


def times(pod: Pod) -> Iterator[str]:
    """A drain that the grace cuts off."""
    for container in _containers(pod):
        for each in container.get("env", []):
            if each["name"] == "DS_CKPT_DRAIN_SECONDS":
                drain, grace = float(each["value"]), pod["spec"]["terminationGracePeriodSeconds"]
                if not 0 < drain <= grace - 10:
                    yield f"a drain of {drain} s in a grace of {grace} s"


RULES: tuple[Callable[[Sequence[Document]], Iterator[str]], ...] = (enums, names, references, jobs)
POD_RULES: tuple[Callable[[Pod], Iterator[str]], ...] = (
    containers,
    variables,
    mounts,
    ports,
    resources,
    security,
    readable,
    times,
)


def amount(quantity: object) -> float | None:
    """A quantity as a number; None if it is none."""
    found = re.fullmatch(r"([0-9.]+)([a-zA-Z]*)", str(quantity))
    return float(found[1]) * FACTORS[found[2]] if found and found[2] in FACTORS else None


def _containers(pod: Pod) -> list[dict[str, Any]]:
    return [*pod["spec"].get("initContainers", []), *pod["spec"]["containers"]]


def _jobs(found: Sequence[Document]) -> Iterator[dict[str, Any]]:
    for document in found:
        spec = document.get("spec", {})
        if document["kind"] == "Job":
            yield spec
        inner = (
            spec.get("template", {}).get("spec", {})
            if document["kind"] == "TrainingRuntime"
            else spec
        )
        for each in inner.get("replicatedJobs", []):
            yield each["template"]["spec"]


def _twice(values: Any) -> list[Any]:
    return [value for value, count in Counter(values).items() if count > 1]


def _scalars(value: Any, place: str = "", key: str = "") -> Iterator[tuple[str, str, Any]]:
    if isinstance(value, dict):
        for name, each in value.items():
            if name not in ("labels", "annotations", "matchLabels"):
                yield from _scalars(each, f"{place}.{name}".lstrip("."), name)
    elif isinstance(value, list):
        for number, each in enumerate(value):
            yield from _scalars(each, f"{place}[{number}]", key)
    else:
        yield place, key, value


def _all(value: Any, wanted: str) -> Iterator[dict[str, Any]]:
    if isinstance(value, dict):
        for name, each in value.items():
            if name == wanted and isinstance(each, dict):
                yield each
            else:
                yield from _all(each, wanted)
    elif isinstance(value, list):
        for each in value:
            yield from _all(each, wanted)
