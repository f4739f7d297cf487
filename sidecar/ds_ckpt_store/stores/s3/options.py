"""Where an S3 is, and how objects are stored there: ``DS_CKPT_S3_*``."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from ds_ckpt_store.errors import SettingsError

_TRUE = ("1", "true", "yes", "on")
_FALSE = ("0", "false", "no", "off")


@dataclass(frozen=True)
class S3Options:
    """Where an S3 is; who we are is left to boto3's own chain of credentials.

    Attributes:
        endpoint_url: ``http(s)://host[:port]``; None: boto3's own (``AWS_ENDPOINT_URL``, else AWS).
        region: None: boto3's own.
        path_style: bucket in the path (True) or in the host name (False); None: in the path if an
            endpoint is set.
        ca_bundle: file of certificates to trust; None: boto3's own.
    """

    endpoint_url: str | None = None
    region: str | None = None
    path_style: bool | None = None
    ca_bundle: str | None = None

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> S3Options:
        """Read ``DS_CKPT_S3_ENDPOINT``, ``_REGION``, ``_PATH_STYLE`` and ``_CA_BUNDLE``.

        Raises:
            SettingsError: a value cannot work.
        """
        endpoint = environ.get("DS_CKPT_S3_ENDPOINT") or None
        if endpoint is not None and not re.fullmatch(r"https?://[^/?#]+/?", endpoint):
            raise SettingsError(f"DS_CKPT_S3_ENDPOINT={endpoint!r}: write http(s)://host[:port]")
        style = environ.get("DS_CKPT_S3_PATH_STYLE", "").strip().lower()
        if style and style not in _TRUE + _FALSE:
            raise SettingsError(f"DS_CKPT_S3_PATH_STYLE={style!r}: write true or false")
        bundle = environ.get("DS_CKPT_S3_CA_BUNDLE") or None
        if bundle is not None and not os.path.exists(bundle):
            raise SettingsError(f"DS_CKPT_S3_CA_BUNDLE={bundle!r}: there is no such file")
        return cls(
            endpoint_url=endpoint,
            region=environ.get("DS_CKPT_S3_REGION") or None,
            path_style=style in _TRUE if style else None,
            ca_bundle=bundle,
        )
