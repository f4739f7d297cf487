"""A Kubernetes API server with as much as reports need: pods that are patched, and events.

It speaks HTTPS on a free port of loopback, wants a token and a right for each request, and refuses
what a real one refuses: the rules are those of ``ValidateEventCreate`` of Kubernetes, and a field
that no event has is refused too. What it should do instead of answering is scripted::

    with ApiServer(tmp_path) as cluster:
        cluster.script.append(Trouble(429, headers={"Retry-After": "1"}))
"""

from __future__ import annotations

import contextlib
import json
import re
import ssl
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Literal

from tests import certificates

HOST = "127.0.0.1"
NAMESPACE = "training"
POD, UID = "llama-0", "6f0c7a3e-0000-4000-8000-000000000001"
EVENTS = f"/apis/events.k8s.io/v1/namespaces/{NAMESPACE}/events"
PODS = f"/api/v1/namespaces/{NAMESPACE}/pods/"
QUALIFIED = re.compile(r"([a-z0-9.-]{1,253}/)?[A-Za-z0-9][A-Za-z0-9_.-]{0,62}")
SUBDOMAIN = re.compile(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?(\.[a-z0-9]([a-z0-9-]*[a-z0-9])?)*")
FIELDS = {
    *("apiVersion", "kind", "metadata", "type", "reason", "action", "note", "eventTime"),
    *("reportingController", "reportingInstance", "regarding", "related", "series"),
}


@dataclass(frozen=True)
class Trouble:
    """What happens to one request.

    Attributes:
        status: the answer, and nothing is done.
        message: in it.
        headers: of it.
        cause: in its details.
        do: ``stall`` answers nothing until the server ends; ``lose`` does it all, and hangs up.
        right: only requests that need this right.
    """

    status: int = 0
    message: str = "scripted"
    headers: Mapping[str, str] = field(default_factory=dict)
    cause: str = ""
    do: Literal["", "stall", "lose"] = ""
    right: str = ""


class _RefusedError(Exception):
    def __init__(self, status: int, message: str, cause: str = "") -> None:
        super().__init__(message)
        self.status, self.message, self.cause = status, message, cause


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        self._serve("events")

    def do_PATCH(self) -> None:
        self._serve("annotations")

    def _serve(self, right: str) -> None:
        api = self.server.api
        body = self.rfile.read(int(self.headers["Content-Length"]))
        with api.lock:
            trouble = next((one for one in api.script if one.right in ("", right)), Trouble())
            if trouble in api.script:
                api.script.remove(trouble)
            document = json.loads(body)
            api.asked.append(document.get("reason", right))
        if trouble.do == "stall":
            api.over.wait()
            return
        if trouble.status:
            self._say(trouble.status, _status(trouble), trouble.headers)
            return
        try:
            with api.lock:
                code, answer = api.apply(right, self.path, self.headers, document)
        except _RefusedError as refused:
            code = refused.status
            answer = _status(Trouble(code, refused.message, cause=refused.cause))
        if trouble.do == "lose":
            self.close_connection = True
            return
        self._say(code, answer, {})

    def _say(self, code: int, answer: Any, headers: Mapping[str, str]) -> None:
        body = json.dumps(answer).encode()
        self.send_response(code)
        for name, value in {"Content-Type": "application/json", **headers}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def __init__(self, port: int, api: ApiServer) -> None:
        self.api = api
        super().__init__((HOST, port), _Handler)

    def finish_request(self, request: Any, client_address: Any) -> None:
        with self.api.context.wrap_socket(request, server_side=True) as secured:
            super().finish_request(secured, client_address)  # type: ignore[arg-type]

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass  # clients that hang up


class ApiServer:
    """Listens from ``__enter__`` to ``__exit__``, and while it is not :meth:`away`.

    Args:
        folder: for certificates and the service account's files.
        addresses: under which clients reach it, beside loopback's.

    Attributes:
        account: the folder with ``token`` and ``ca.crt`` that a pod would see.
        tokens: that it takes.
        rights: ``events`` to create events, ``annotations`` to patch pods.
        pods: name to uid.
        annotations: of pods, by name.
        events: in the order of their creation.
        asked: a word for each request, also of those that were refused.
        script: what to do with the next requests.
        ending: the namespace is being deleted.
    """

    def __init__(self, folder: Path, addresses: Sequence[str] = ()) -> None:
        self._folder = folder
        self._addresses = addresses
        self.account = folder / "serviceaccount"
        self.tokens = {"first"}
        self.rights = {"events", "annotations"}
        self.pods = {POD: UID}
        self.annotations: dict[str, dict[str, str]] = {POD: {}}
        self.events: list[dict[str, Any]] = []
        self.asked: list[str] = []
        self.script: list[Trouble] = []
        self.ending = False
        self.lock = threading.RLock()
        self.over = threading.Event()
        self.port = 0
        self.context: ssl.SSLContext
        self._server: _Server | None = None
        self._authorities = 0

    def __enter__(self) -> ApiServer:
        self.account.mkdir(parents=True)
        self.give_token("first")
        self.new_authority()
        self.back()
        return self

    def __exit__(self, *_: object) -> None:
        self.over.set()
        self.away()

    @property
    def url(self) -> str:
        return f"https://{HOST}:{self.port}"

    @property
    def environ(self) -> dict[str, str]:
        """What the kubelet and the downward API set in the own pod."""
        return {
            "KUBERNETES_SERVICE_HOST": HOST,
            "KUBERNETES_SERVICE_PORT": str(self.port),
            "POD_NAME": POD,
            "POD_NAMESPACE": NAMESPACE,
            "POD_UID": UID,
        }

    def away(self) -> None:
        """Nothing listens any more."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None

    def back(self) -> None:
        """Listen, on the port that it had."""
        self._server = _Server(self.port, self)
        self.port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, args=[0.02], daemon=True).start()

    def give_token(self, token: str) -> None:
        """Put another one in the pod, as the kubelet does."""
        self._put("token", token.encode())

    def new_authority(self, *, strict: bool = True) -> None:
        """A certificate by another authority, and that one's in the pod."""
        self._authorities += 1
        folder = self._folder / f"authority{self._authorities}"
        folder.mkdir()
        made = certificates.make(folder, strict=strict, addresses=self._addresses)
        self.context = made.context()
        self._put("ca.crt", made.authority.read_bytes())

    def _put(self, name: str, content: bytes) -> None:
        fresh = self.account / f".{name}"
        fresh.write_bytes(content)
        fresh.rename(self.account / name)

    def reasons(self) -> list[str]:
        with self.lock:
            return [event["reason"] for event in self.events]

    def notes(self, reason: str) -> list[str]:
        with self.lock:
            return [event["note"] for event in self.events if event["reason"] == reason]

    # ---- what it does

    def apply(
        self, right: str, path: str, headers: Mapping[str, str], document: dict[str, Any]
    ) -> tuple[int, Any]:
        kind, _, token = (headers.get("Authorization") or "").partition(" ")
        if kind != "Bearer" or token not in self.tokens:
            raise _RefusedError(401, "Unauthorized")
        if right not in self.rights:
            raise _RefusedError(403, f'User "sa" cannot do that: {right} in "{NAMESPACE}"')
        path = path.partition("?")[0]
        if right == "events" and path == EVENTS:
            return 201, self._create(document)
        if right == "annotations" and path.startswith(PODS):
            content = headers.get("Content-Type")
            if content != "application/merge-patch+json":
                raise _RefusedError(415, f"{content}: no merge patch")
            return 200, self._patch(path[len(PODS) :], document)
        raise _RefusedError(404, "the server could not find the requested resource")

    def _patch(self, name: str, document: dict[str, Any]) -> Any:
        if name not in self.pods:
            raise _RefusedError(404, f'pods "{name}" not found')
        if document["metadata"].get("uid", self.pods[name]) != self.pods[name]:
            raise _RefusedError(409, "Precondition failed: UID in precondition")
        assert set(document) == {"metadata"}
        assert set(document["metadata"]) <= {"uid", "annotations"}
        for key, value in document["metadata"]["annotations"].items():
            if not QUALIFIED.fullmatch(key) or not isinstance(value, str):
                raise _RefusedError(422, f"metadata.annotations: Invalid value: {key}")
            self.annotations[name][key] = value
        return {"metadata": {"name": name, "uid": self.pods[name]}}

    def _create(self, event: dict[str, Any]) -> Any:
        name = event["metadata"]["name"]
        if self.ending:
            message = f"unable to create new content in namespace {NAMESPACE}"
            raise _RefusedError(403, message, "NamespaceTerminating")
        if wrong := list(_wrong_in(event)):
            raise _RefusedError(422, f'Event "{name}" is invalid: {wrong}')
        if any(other["metadata"]["name"] == name for other in self.events):
            raise _RefusedError(409, f'events "{name}" already exists')
        self.events.append(event)
        return {"metadata": event["metadata"]}


def _wrong_in(event: dict[str, Any]) -> Iterator[str]:
    """The fields that Kubernetes would refuse."""
    if set(event) - FIELDS or event["apiVersion"] != "events.k8s.io/v1":
        yield "apiVersion, or an unknown field"
    name = event["metadata"]["name"]
    if len(name) > 253 or not SUBDOMAIN.fullmatch(name):
        yield "metadata.name"
    if not (event["metadata"]["namespace"] == event["regarding"]["namespace"] == NAMESPACE):
        yield "regarding.namespace"
    if not QUALIFIED.fullmatch(event["reportingController"]):
        yield "reportingController"
    for key in ("reportingInstance", "action", "reason"):
        if not 0 < len(event[key].encode()) <= 128:
            yield key
    if len(event["note"].encode()) > 1024:
        yield "note"
    if event["type"] not in ("Normal", "Warning"):
        yield "type"
    series = event.get("series")
    if series is not None and series["count"] < 2:
        yield "series.count"
    for moment in (event["eventTime"], series and series["lastObservedTime"]):
        with contextlib.suppress(ValueError):
            if moment is not None:
                datetime.strptime(moment, "%Y-%m-%dT%H:%M:%S.%fZ")
            continue
        yield f"time {moment}"


def _status(trouble: Trouble) -> dict[str, Any]:
    causes = [{"reason": trouble.cause}] if trouble.cause else []
    return {
        "kind": "Status",
        "apiVersion": "v1",
        "status": "Failure",
        "message": trouble.message,
        "code": trouble.status,
        "details": {"causes": causes},
    }
