"""An address to listen on, as people write it."""

from __future__ import annotations

import contextlib
import ipaddress


def split(listen: str) -> tuple[str, int]:
    """Host (empty: all addresses) and port of ``:8484``, ``127.0.0.1:8484``, ``[::1]:8484``.

    Raises:
        ValueError: it is none.
    """
    host, colon, port = listen.rpartition(":")
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    fits = port.isascii() and port.isdigit() and int(port) < 65536
    if not colon or not fits or (":" in bare and bare == host):
        raise ValueError(
            f"{listen!r} is no address to listen on: write :8484 or 127.0.0.1:8484 or [::1]:8484"
        )
    if bare:
        with contextlib.suppress(ValueError):
            bare = str(ipaddress.ip_address(bare))
    return bare, int(port)
