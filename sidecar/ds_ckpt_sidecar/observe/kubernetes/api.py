"""Requests to the API server: one to make an event, one to patch the own pod.

They are made by urllib3 alone. The official client would add 20 MiB to the agent's memory, 126 MB
to the image and nothing to these two requests, and it refuses the certificates of some clusters.
Each request reads the token file and the authority's certificate anew and uses a connection of its
own: the kubelet replaces both files while the pod runs, a connection that was idle for minutes may
be dead without saying so, and there are few requests. No proxy is asked: the server stands in the
cluster.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import ssl
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
        MissingExtraError: urllib3 is not installed.
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
    try:
        import urllib3  # noqa: F401
    except ImportError:
        raise MissingExtraError(SETTING, "kubernetes") from None
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


def _send(server: Server, pod: Pod, report: Report, seconds: float) -> Answer:
    import urllib3

    with open(server.token, encoding="ascii") as file:
        token = file.read().strip()
    if report.right == "events":
        method, kind = "POST", "application/json"
        path = f"/apis/events.k8s.io/v1/namespaces/{pod.namespace}/events"
    else:
        method, kind = "PATCH", "application/merge-patch+json"
        path = f"/api/v1/namespaces/{pod.namespace}/pods/{pod.name}"
    with urllib3.PoolManager(ssl_context=_trust(server.authority), retries=False) as manager:
        answer = manager.request(
            method,
            f"{server.url}{path}?fieldManager=ds-ckpt-sidecar",
            headers={
                "Accept": _ACCEPT,
                "Authorization": f"Bearer {token}",
                "Content-Type": kind,
                "User-Agent": "ds-ckpt-sidecar",
            },
            body=json.dumps(report.document).encode(),
            timeout=urllib3.Timeout(connect=seconds, read=seconds),
            preload_content=False,
            redirect=False,
        )
        with contextlib.closing(answer):
            if 200 <= answer.status < 300:
                return Answer(answer.status)
            return _refusal(answer.status, answer.headers, answer.read(_ANSWER_BYTES))


def _trust(authority: str) -> ssl.SSLContext:
    """One authority and no other.

    Some clusters have certificates without the identifiers of keys that RFC 5280 asks for (EKS, and
    such as were made years ago), which Python refuses from 3.13 on: kubernetes-client/python#2394.
    """
    context = ssl.create_default_context(cafile=authority)
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT
    return context


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
