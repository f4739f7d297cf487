"""How requests are made ready: signed by botocore's own signature version 4, and sent at once.

boto3 signs with awscrt where that is installed. Of a body whose hash is to be signed awscrt asks
for a few KiB at a time, on one thread for all, which costs three times what hashing does; and it
costs a fifth of a small request's time without a body. So botocore's own signer is chosen, as for
those who have no awscrt, with one addition: a body may know its own hash.

boto3 also asks the server's leave (``Expect: 100-continue``) before each body: one round trip for
each part and each small shard. It is of use where a server redirects or refuses, which the probe
has found out before the first shard. A server that refuses later, and resets the connection in the
middle of a body, says why to the next call that has none: the uploader looks before it goes on.
"""

from __future__ import annotations

from typing import Any

from botocore import auth, handlers

SIGNATURE = "ds-ckpt-s3v4"
_REPLACED = ("s3v4", "v4")


class Signer(auth.S3SigV4Auth):
    """Signature version 4 for S3; takes the hash of a body that knows it."""

    def payload(self, request: Any) -> str:
        """What is signed for the body: its SHA-256 in hexadecimal, or that it is not signed."""
        known = getattr(request.body, "sha256", None)
        return str(known or super().payload(request))


def prepare(client: Any) -> None:
    """Let an S3 client sign and send as described above."""
    auth.AUTH_TYPE_MAPS.setdefault(SIGNATURE, Signer)
    client.meta.events.register("choose-signer.s3", _choose)
    client.meta.events.unregister("before-call.s3", handlers.add_expect_header)


def _choose(signature_version: object, **_: object) -> str | None:
    return SIGNATURE if signature_version in _REPLACED else None
