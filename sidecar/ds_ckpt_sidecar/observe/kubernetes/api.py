"""Requests to the API server by the official client; the only module that knows it.

Of that library only the part that speaks HTTP is used: its typed half costs another 22 MiB of
memory and half a second of start. Each request reads the token file and the authority's
certificate anew and uses a connection of its own: the kubelet replaces both files while the pod
runs, a connection that was idle for minutes may be dead without saying so, and there are few
requests.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ds_ckpt_sidecar.observe.kubernetes.events import Pod, short
from ds_ckpt_sidecar.observe.kubernetes.pending import Report
from ds_ckpt_store.errors import MissingExtraError, SettingsError

ACCOUNT = "/var/run/secrets/kubernetes.io/serviceaccount"
SETTING = "--kubernetes (or DS_CKPT_KUBERNETES)"

_ANSWER_BYTES = 16 << 10
_MESSAGE_BYTES = 300
_ACCEPT = "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1,application/json"
_DOWNWARD = {
    "POD_NAME": "metadata.name",
    "POD_NAMESPACE": "metadata.namespace",
    "POD_UID": "metadata.uid",
}


@dataclass(frozen=True)
class Answer:
    """What the server said.

    Attributes:
        status: of HTTP; 0 if there was no answer.
        message: in words.
        retry_after: seconds that it asks to wait, 0 if it says nothing.
        ending: the namespace is being deleted, so nothing can be made in it.
    """

    status: int
    message: str = ""
    retry_after: float = 0.0
    ending: bool = False


@dataclass(frozen=True)
class Server:
    """Where the API server is, and the folder with token and certificate."""

    url: str
    account: str = ACCOUNT

    @property
    def token(self) -> str:
        """Path of the token."""
        return os.path.join(self.account, "token")

    @property
    def authority(self) -> str:
        """Path of the certificate of the authority."""
        return os.path.join(self.account, "ca.crt")


def surroundings(environ: Mapping[str, str], account: str = ACCOUNT) -> tuple[Server, Pod]:
    """The API server and the own pod.

    Raises:
        SettingsError: this is no pod, or it lacks what reports need.
        MissingExtraError: the client is not installed.
    """
    host, port = environ.get("KUBERNETES_SERVICE_HOST"), environ.get("KUBERNETES_SERVICE_PORT")
    if not host or not port:
        raise SettingsError(
            f"{SETTING}: KUBERNETES_SERVICE_HOST and KUBERNETES_SERVICE_PORT are not set, so this "
            "is no pod of a cluster: leave the setting out here"
        )
    missing = [name for name in _DOWNWARD if not environ.get(name)]
    if missing:
        how = ", ".join(f"{name} from fieldPath {_DOWNWARD[name]}" for name in missing)
        raise SettingsError(
            f"{SETTING}: {' and '.join(missing)} not set, so the own pod is not known: set {how} "
            "(valueFrom.fieldRef) in the container's env"
        )
    server = Server(f"https://{f'[{host}]' if ':' in host else host}:{port}", account)
    for path in (server.token, server.authority):
        try:
            with open(path, "rb") as file:
                empty = not file.read(1)
        except OSError as error:
            raise SettingsError(
                f"{SETTING}: {path}: {error.strerror}, as uid {os.geteuid()}: give the pod its "
                "service account's token (automountServiceAccountToken: true, or a projected "
                "volume there), or leave the setting out"
            ) from None
        if empty:
            raise SettingsError(f"{SETTING}: {path} is empty: see what is mounted there")
    if importlib.util.find_spec("kubernetes") is None:
        raise MissingExtraError(SETTING, "kubernetes")
    return server, Pod(*(environ[name] for name in _DOWNWARD))


def send(server: Server, pod: Pod, report: Report, seconds: float) -> Answer:
    """Make the request; never raises.

    Args:
        server: where.
        pod: the own pod.
        report: what.
        seconds: for the connection, and for each silence after it.
    """
    try:
        return _send(server, pod, report, seconds)
    except Exception as error:  # noqa: BLE001 - reports cost nobody anything, whatever fails
        reason = getattr(error, "reason", None) or error
        return Answer(0, short(f"{type(error).__name__}: {reason}", _MESSAGE_BYTES))


def load() -> None:
    """Import the client, so that the last report of a process does not wait for it."""
    import kubernetes.client.rest  # noqa: F401


def _send(server: Server, pod: Pod, report: Report, seconds: float) -> Answer:
    from kubernetes.client.configuration import Configuration
    from kubernetes.client.rest import RESTClientObject

    with open(server.token, encoding="ascii") as file:
        token = file.read().strip()
    if report.right == "events":
        method, kind = "POST", "application/json"
        path = f"/apis/events.k8s.io/v1/namespaces/{pod.namespace}/events"
    else:
        method, kind = "PATCH", "application/merge-patch+json"
        path = f"/api/v1/namespaces/{pod.namespace}/pods/{pod.name}"
    configuration = Configuration(host=server.url, ssl_ca_cert=server.authority, retries=False)
    client = RESTClientObject(configuration)
    with contextlib.closing(client):
        answer = client.request(
            method,
            f"{server.url}{path}?fieldManager=ds-ckpt-sidecar",
            headers={
                "Accept": _ACCEPT,
                "Authorization": f"Bearer {token}",
                "Content-Type": kind,
                "User-Agent": "ds-ckpt-sidecar",
            },
            body=report.document,
            _request_timeout=(seconds, seconds),
        ).response
        with contextlib.closing(answer):
            if 200 <= answer.status < 300:
                return Answer(answer.status)
            return _refusal(answer.status, answer.headers, answer.read(_ANSWER_BYTES))


def _refusal(status: int, headers: Mapping[str, str], body: bytes) -> Answer:
    """What a ``Status`` document says, or the text that some proxy sent instead."""
    text, ending = body.decode(errors="replace"), False
    with contextlib.suppress(ValueError, AttributeError, TypeError):
        document: dict[str, Any] = json.loads(text)
        text = str(document.get("message") or text)
        causes = (document.get("details") or {}).get("causes") or []
        ending = any(cause.get("reason") == "NamespaceTerminating" for cause in causes)
    wait = headers.get("Retry-After", "")
    return Answer(
        status,
        short(f"{status}: {text.strip()}", _MESSAGE_BYTES),
        float(wait) if re.fullmatch(r"[0-9]{1,6}", wait) else 0.0,
        ending,
    )
