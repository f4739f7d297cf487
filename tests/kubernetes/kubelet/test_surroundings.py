"""What a container finds: volumes, variables, its user and rights, its memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.kubernetes.kubelet.cluster import Cluster
from tests.kubernetes.kubelet.pod import Meta, Pod
from tests.kubernetes.kubelet.shells import HEEDS, shell, sidecar
from tests.kubernetes.kubelet.spec import ConfigError, NotEmulated, quantity

Runs = Callable[..., Pod]


def mount(name: str, path: str, **fields: Any) -> dict[str, Any]:
    return {"name": name, "mountPath": path, **fields}


def said(pod: Pod, name: str = "main") -> dict[str, str]:
    """The lines ``key=value`` that a container wrote."""
    pod.wait()
    return dict(line.split("=", 1) for line in pod.output(name).splitlines() if "=" in line)


def test_an_empty_dir_belongs_to_the_group_and_is_shared_by_all_containers(run: Runs) -> None:
    script = "stat -c 'mode=%a %u:%g' /v; touch /v/made && stat -c 'made=%u:%g' /v/made; ls /v/in"
    pod = run(
        [shell("main", script, volumeMounts=[mount("v", "/v")])],
        [
            shell(
                "init",
                "mkdir /other/in; touch /other/in/file",
                volumeMounts=[mount("v", "/other")],
                securityContext={"runAsUser": 1001},
            )
        ],
        volumes=[{"name": "v", "emptyDir": {}}],
        securityContext={"fsGroup": 2000, "runAsUser": 1000, "runAsGroup": 1000},
    )
    assert said(pod) == {"mode": "2777 0:2000", "made": "1000:2000"}
    assert "file" in pod.output("main")


def test_an_empty_dir_without_a_group_is_open_to_all_and_one_in_memory_has_its_size(
    run: Runs,
) -> None:
    script = "stat -c 'mode=%a' /v; df -m /m | awk 'END {print \"size=\" $2}'; stat -fc 'is=%T' /m"
    mounts = [mount("v", "/v"), mount("m", "/m")]
    volumes = [
        {"name": "v", "emptyDir": {}},
        {"name": "m", "emptyDir": {"medium": "Memory", "sizeLimit": "24Mi"}},
    ]
    pod = run([shell("main", script, volumeMounts=mounts)], volumes=volumes)
    assert said(pod) == {"mode": "777", "size": "24", "is": "tmpfs"}


def test_a_volume_in_memory_counts_against_the_memory_of_the_container(run: Runs) -> None:
    pod = run(
        [
            shell(
                "main",
                "exec head -c 64M /dev/zero > /m/file",
                volumeMounts=[mount("m", "/m")],
                resources={"limits": {"memory": "32Mi"}},
            )
        ],
        volumes=[{"name": "m", "emptyDir": {"medium": "Memory"}}],
    )
    pod.wait()
    assert pod.containers["main"].last.exit_code in (1, 137)  # no space left, or killed


def test_a_claim_keeps_what_is_on_it_and_gives_it_to_the_group(
    run: Runs, cluster: Cluster, tmp_path: Path
) -> None:
    (tmp_path / "claimed").mkdir()
    (tmp_path / "claimed" / "shard").write_text("kept")
    (tmp_path / "claimed" / "shard").chmod(0o600)
    cluster.claims["data"] = tmp_path / "claimed"
    pod = run(
        [shell("main", "stat -c 'shard=%a %g' /v/shard", volumeMounts=[mount("v", "/v")])],
        volumes=[{"name": "v", "persistentVolumeClaim": {"claimName": "data"}}],
        securityContext={"fsGroup": 2000},
    )
    assert said(pod) == {"shard": "660 2000"}
    pod.remove()
    assert (tmp_path / "claimed" / "shard").read_text() == "kept"


def test_secrets_and_config_maps_are_variables_and_files(run: Runs, cluster: Cluster) -> None:
    cluster.secret("keys", id="an id", secret="a secret")
    cluster.apply(
        [{"kind": "ConfigMap", "metadata": {"name": "conf"}, "data": {"a.json": "{}", "B": "b"}}]
    )
    env = [
        {"name": "ID", "valueFrom": {"secretKeyRef": {"name": "keys", "key": "id"}}},
        {
            "name": "NONE",
            "valueFrom": {"secretKeyRef": {"name": "none", "key": "id", "optional": True}},
        },
        {"name": "SUM", "value": "$(ID)-$(PRE_B)-$(UNKNOWN)-$$(ID)"},
    ]
    source = [{"prefix": "PRE_", "configMapRef": {"name": "conf"}}]
    script = (
        'echo "sum=$SUM"; echo "none=${NONE-unset}"; echo "secret=$(cat /keys/secret)"; '
        'echo "all=$(ls /keys)"; stat -Lc "mode=%a %g" /keys/secret; echo "conf=$(cat /conf/a)"; '
        'echo "p=$(cat /p/token-id)"; touch /conf/a || echo "write=no"; echo "arg=$0"'
    )
    main = shell("main", script, env=env, envFrom=source)
    main["args"] = ["$(ID)"]
    main["volumeMounts"] = [
        mount("keys", "/keys", readOnly=True),
        mount("conf", "/conf/a", subPath="a.json", readOnly=True),
        mount("p", "/p", readOnly=True),
    ]
    pod = run(
        [main],
        volumes=[
            {
                "name": "keys",
                "secret": {
                    "secretName": "keys",
                    "defaultMode": 0o400,
                    "items": [{"key": "secret", "path": "secret"}],
                },
            },
            {"name": "conf", "configMap": {"name": "conf"}},
            {
                "name": "p",
                "projected": {
                    "sources": [
                        {
                            "secret": {
                                "name": "keys",
                                "items": [{"key": "id", "path": "token-id"}],
                            }
                        },
                        {"serviceAccountToken": {"path": "token"}},
                    ]
                },
            },
        ],
        securityContext={"fsGroup": 2000, "runAsUser": 1000},
    )
    assert said(pod) == {
        "sum": "an id-b-$(UNKNOWN)-$(ID)",
        "none": "unset",
        "secret": "a secret",
        "all": "secret",
        "mode": "440 2000",
        "conf": "{}",
        "p": "an id",
        "write": "no",
        "arg": "an id",
    }


def test_what_a_container_refers_to_must_be_there(run: Runs, cluster: Cluster) -> None:
    cluster.secret("keys", id="an id")
    wrong: list[dict[str, Any]] = [
        {"env": [{"name": "A", "valueFrom": {"secretKeyRef": {"name": "no", "key": "id"}}}]},
        {"env": [{"name": "A", "valueFrom": {"secretKeyRef": {"name": "keys", "key": "no"}}}]},
        {"envFrom": [{"configMapRef": {"name": "keys"}}]},
        {"volumeMounts": [mount("no", "/v")]},
    ]
    for fields in wrong:
        pod = run([shell("main", "true", **fields)])
        with pytest.raises(ConfigError, match="no"):
            pod.until(lambda: pod.containers["main"].runs, what="never")  # noqa: B023
    with pytest.raises(ConfigError, match="not found"):
        run([shell("main", "true")], volumes=[{"name": "v", "secret": {"secretName": "no"}}])


def test_a_pod_tells_its_containers_who_they_are(run: Runs) -> None:
    paths = [
        "metadata.name",
        "metadata.namespace",
        "metadata.uid",
        "metadata.labels['app']",
        "metadata.annotations['a/b']",
        "spec.nodeName",
        "spec.serviceAccountName",
        "status.podIP",
        "status.hostIP",
    ]
    env: list[dict[str, Any]] = [
        {"name": f"F{number}", "valueFrom": {"fieldRef": {"fieldPath": path}}}
        for number, path in enumerate(paths)
    ]
    limit = {"resource": "limits.memory", "divisor": "1Mi"}
    env.append({"name": "LIMIT", "valueFrom": {"resourceFieldRef": limit}})
    item = {"path": "labels", "fieldRef": {"fieldPath": "metadata.labels"}}
    meta = Meta("pod-7", "training", {"app": "it"}, {"a/b": "c d"})
    script = "env; echo hostname=$(hostname); echo own=$(getent hosts pod-7); cat /d/labels"
    pod = run(
        [
            shell(
                "main",
                script,
                env=env,
                resources={"limits": {"memory": "64Mi"}},
                volumeMounts=[mount("d", "/d")],
            )
        ],
        meta=meta,
        serviceAccountName="trainer",
        volumes=[{"name": "d", "downwardAPI": {"items": [item]}}],
    )
    found = said(pod)
    values = ["pod-7", "training", meta.uid, "it", "c d", "node-of-tests", "trainer", pod.address]
    assert [found[f"F{number}"] for number in range(8)] == values
    assert found["F8"].startswith("198.18.")
    assert (found["LIMIT"], found["hostname"], found["app"]) == ("64", "pod-7", '"it"')
    assert found["own"].split() == [pod.address, "pod-7"]


def test_a_container_has_the_user_and_the_rights_that_it_was_given(run: Runs) -> None:
    script = (
        "echo $(id -u) $(id -g) $(id -G); "
        "grep -E 'Cap(Eff|Bnd)|NoNewPrivs|Seccomp:' /proc/self/status; "
        "touch /here || echo read-only; touch /tmp/here || echo tmp-read-only"
    )
    locked = {
        "readOnlyRootFilesystem": True,
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"], "add": ["DAC_READ_SEARCH"]},
        "runAsNonRoot": True,
    }
    as_root = {"runAsUser": 0, "runAsNonRoot": False}
    pod = run(
        [
            shell("locked", script, securityContext=locked),
            shell("root", script, securityContext={**locked, **as_root}),
            shell("open", script, securityContext={"runAsUser": 0}),
        ],
        securityContext={
            "runAsUser": 1000,
            "runAsGroup": 1001,
            "fsGroup": 2000,
            "supplementalGroups": [3000],
            "seccompProfile": {"type": "RuntimeDefault"},
        },
    )
    pod.wait()
    locked_said, root, opened = map(pod.output, ("locked", "root", "open"))
    assert locked_said.startswith("1000 1001 1001 2000 3000\n")
    assert "CapEff:\t0000000000000000" in locked_said, "an added one reaches root alone"
    assert "CapEff:\t0000000000000004" in root
    assert "NoNewPrivs:\t1" in locked_said
    assert "Seccomp:\t2" in locked_said
    for each in (locked_said, root):
        assert "\nread-only" in each
        assert "tmp-read-only" in each
    assert "read-only" not in opened


@pytest.mark.parametrize("uid", [None, 0])
def test_a_container_that_must_not_run_as_root_is_not_started_as_root(
    run: Runs, uid: int | None
) -> None:
    context: dict[str, Any] = {"runAsNonRoot": True}
    if uid is not None:
        context["runAsUser"] = uid
    pod = run([shell("main", "true", securityContext=context)])
    with pytest.raises(ConfigError, match="would run as root"):
        pod.until(lambda: pod.containers["main"].runs, what="never")


def test_a_container_that_takes_too_much_memory_is_killed(run: Runs) -> None:
    limits = {"limits": {"memory": "32Mi"}}
    hungry = "exec python3 -c 'x = b\"1\" * (1 << 27)'"
    pod = run([shell("main", hungry, resources=limits)], [sidecar("side", HEEDS)])
    assert pod.wait() == "Failed"
    assert pod.containers["main"].last.exit_code == 137
    assert pod.containers["side"].last.exit_code == 0


@pytest.mark.parametrize(
    ("text", "value"),
    [("100m", "0.1"), ("2", "2"), ("1.5Gi", str(3 << 29)), ("3k", "3000"), ("1M", "1000000")],
)
def test_quantities_are_read_as_kubernetes_writes_them(text: str, value: str) -> None:
    assert str(quantity(text).normalize() - quantity(value)) in ("0", "0.0")


@pytest.mark.parametrize(
    "fields",
    [
        {"hostNetwork": True},
        {"shareProcessNamespace": True},
        {"mistyped": 1},
        {"securityContext": {"mistyped": 1}},
        {"volumes": [{"name": "v", "nfs": {}}]},
    ],
)
def test_what_is_not_emulated_is_refused(run: Runs, fields: dict[str, Any]) -> None:
    with pytest.raises(NotEmulated):
        run([shell("main", "true")], **fields)


@pytest.mark.parametrize(
    "fields",
    [
        {"mistyped": 1},
        {"restartPolicy": "Always"},
        {"lifecycle": {"postStart": {}}},
        {"lifecycle": {"preStop": {"mistyped": {}}}},
        {"livenessProbe": {"grpc": {}}},
        {"securityContext": {"privileged": True}},
        {"volumeMounts": [{"name": "v", "mountPath": "/v", "mountPropagation": "Bidirectional"}]},
    ],
)
def test_what_is_not_emulated_of_a_container_is_refused(run: Runs, fields: dict[str, Any]) -> None:
    with pytest.raises(NotEmulated):
        run([shell("main", "true", **fields)])
