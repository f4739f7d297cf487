"""boto3's clients of one store: made when needed, shared by all threads, and made anew when what
they hold has expired.

A client takes its credentials when it is made and, unless they come with a way to refresh them
(a role, a web identity), keeps them: a file or a variable that was renewed since is not looked at
again. So when the server says that credentials are expired or unknown, the clients are forgotten
(:meth:`Clients.forget`), and the next call makes one from a new session, which looks everywhere
again. Calls under way keep theirs, whose connections close with the last of them.
"""

from __future__ import annotations

import threading
from datetime import datetime
from typing import Any

import boto3
from botocore import exceptions as aws
from botocore.config import Config

from ds_ckpt_store.errors import SettingsError
from ds_ckpt_store.stores import shown
from ds_ckpt_store.stores.port import Proof
from ds_ckpt_store.stores.s3.options import S3Options
from ds_ckpt_store.stores.s3.signing import prepare

CONNECTIONS = 64
# Where credentials come from, by what botocore calls it.
_SOURCES = {
    "env": "variables (AWS_ACCESS_KEY_ID)",
    "shared-credentials-file": "the file of credentials",
    "config-file": "the configuration file",
    "assume-role": "a role that a profile names",
    "assume-role-with-web-identity": "a web identity (IRSA)",
    "container-role": "the container's role (EKS Pod Identity, ECS)",
    "iam-role": "the instance's role",
}


class Clients:
    """The clients of one store; safe to use from any thread.

    Args:
        url: of the store, for messages.
        options: where the server is.
        stall_seconds: a connection on which nothing moves for so long is given up.
    """

    def __init__(self, url: str, options: S3Options, stall_seconds: float) -> None:
        self._url = url
        self._options = options
        self._stall_seconds = stall_seconds
        self._lock = threading.Lock()
        self._clients: dict[bool, Any] = {}
        # One for all clients: each reads the description of S3 anew, which takes 13 MiB and 0.2 s.
        self._session: Any = None
        self._where = options.endpoint_url or "AWS"

    @property
    def where(self) -> str:
        """The endpoint, for messages."""
        return self._where

    def get(self, proof: Proof = Proof.READ_BACK) -> Any:
        """The client whose bodies are signed, or the one whose bodies are not."""
        signed = proof is Proof.SIGNED_PAYLOAD
        with self._lock:
            if signed not in self._clients:
                self._clients[signed] = self.new(proof)
            return self._clients[signed]

    def forget(self, client: Any) -> None:
        """Take credentials anew for the next call, unless another thread has seen to that."""
        with self._lock:
            if client in self._clients.values():
                self._clients.clear()
                self._session = None

    def source(self) -> str:
        """Where the credentials come from, in words; empty if there are none."""
        self.get()
        with self._lock:
            found = self._session.get_credentials() if self._session is not None else None
        method = str(getattr(found, "method", "") or "")
        return _SOURCES.get(method, method)

    def expiry(self) -> float | None:
        """When the credentials in use end, in seconds since the epoch; None: not known.

        They stand in private attributes: what is public looks for credentials that are not there
        yet, or renews them, and both ask a server.
        """
        session = getattr(self._session, "_session", None)
        credentials = getattr(session, "_credentials", None)
        moment = getattr(credentials, "_expiry_time", None)
        return moment.timestamp() if isinstance(moment, datetime) else None

    def close(self) -> None:
        """Close the pools of connections."""
        with self._lock:
            for client in self._clients.values():
                client.close()
            self._clients.clear()

    def new(self, proof: Proof) -> Any:
        """A client of one's own, to be closed.

        Raises:
            SettingsError: boto3 can make none of these settings, or a key would go in the clear.
        """
        s3: Any = {"payload_signing_enabled": proof is Proof.SIGNED_PAYLOAD}
        if self._options.path_style is not None:
            s3["addressing_style"] = "path" if self._options.path_style else "virtual"
        config: Any = Config(
            s3=s3,
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
            retries={"mode": "standard", "total_max_attempts": 1},
            max_pool_connections=CONNECTIONS,
            # urllib3 gives this one also to the sending of one piece.
            connect_timeout=self._stall_seconds,
            read_timeout=self._stall_seconds,
            tcp_keepalive=True,
            parameter_validation=False,  # ours are made by this package alone
            user_agent_extra="ds-ckpt-sidecar",
        )
        try:
            session = self._session = self._session or boto3.session.Session()
            client = session.client(
                "s3",
                endpoint_url=self._options.endpoint_url,
                region_name=self._options.region,
                verify=self._options.ca_bundle,
                config=config,
            )
        except (aws.BotoCoreError, ValueError) as error:
            raise SettingsError(f"{self._url}: boto3 cannot make a client: {error}") from error
        self._where = shown(str(client.meta.endpoint_url))
        self._options.check_endpoint(self._where)
        prepare(client)
        return client
