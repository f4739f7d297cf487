"""Names: save ids, tags as folders, relative paths that stay inside.

A folder in the store is ``<encoded tag>@<save_id>``: one path component, never reused. The
encoding is reversible. Its bound of 200 bytes leaves room for ``@`` and the save id within the
255 bytes that filesystems give a component.
"""

from __future__ import annotations

import contextlib
import random
import re
from urllib.parse import unquote

from ds_ckpt_store.contract.clock import fresh_token
from ds_ckpt_store.errors import ManifestError, TagError

MAX_ENCODED_TAG = 200
MAX_PATH = 1024
MAX_COMPONENT = 255
VOLUME_DIR = ".ds_ckpt"
COMPANIONS_DIR = ".companions"
LATEST = "latest"

_SAVE_ID = re.compile(r"[0-9a-f]{12}-[0-9a-f]{16}")
_NODE_ID = re.compile(r"[0-9a-f]{32}")
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")  # Unicode's category Cc


def new_save_id(time_ms: int, rng: random.Random) -> str:
    """A unique id that sorts by time: 48 bits of milliseconds, 64 random bits, in hexadecimal."""
    return f"{time_ms:012x}-{fresh_token(rng)}"


def is_save_id(text: str) -> bool:
    """Whether ``text`` has the form of :func:`new_save_id`."""
    return _SAVE_ID.fullmatch(text) is not None


def is_node_id(text: str) -> bool:
    """Whether ``text`` has the form of a node id (a uuid4's 32 hexadecimal digits)."""
    return _NODE_ID.fullmatch(text) is not None


def check_tag(tag: str) -> str:
    """The tag, if DeepSpeed can save under it inside save_dir and it can become a folder.

    Raises:
        TagError: empty, absolute, with ``.`` or ``..`` components, not UTF-8, with control
            characters, under our own folder or ``latest``, or longer than 200 bytes once encoded.
    """
    try:
        check_relative_path(tag)
    except ManifestError as error:
        raise TagError(f"tag {tag!r} cannot be uploaded: {error}; choose another tag") from None
    if tag.split("/", 1)[0] == LATEST:
        raise TagError(
            f"tag {tag!r} cannot be restored: {LATEST!r} is the name of DeepSpeed's own pointer "
            "beside the tag folders; choose another tag"
        )
    if len(_encode(tag)) > MAX_ENCODED_TAG:
        raise TagError(
            f"tag {tag[:40]!r}... is {len(_encode(tag))} bytes once encoded, and "
            f"{MAX_ENCODED_TAG} is the most: choose a shorter tag"
        )
    return tag


def folder_of(tag: str, save_id: str) -> str:
    """``<encoded tag>@<save_id>``: the store's folder for one save.

    Raises:
        TagError: see :func:`check_tag`.
    """
    return f"{_encode(check_tag(tag))}@{save_id}"


def tag_of(folder: str) -> tuple[str, str]:
    """The inverse of :func:`folder_of`: ``(tag, save_id)``.

    Raises:
        TagError: the text is not the name of such a folder.
    """
    encoded, separator, save_id = folder.rpartition("@")
    if separator and is_save_id(save_id):
        with contextlib.suppress(UnicodeError, TagError):
            tag = unquote(encoded, errors="strict")
            if folder_of(tag, save_id) == folder:
                return tag, save_id
    raise TagError(f"{folder!r} is not a folder of this layout (<tag>@<save id>)")


def _encode(tag: str) -> str:
    return "".join(
        "".join(f"%{byte:02X}" for byte in character.encode())
        if character in "/@%\\" or (index == 0 and character in ". ")
        else character
        for index, character in enumerate(tag)
    )


def is_data(key: str) -> bool:
    """Whether a key of the store is a shard's or a companion's, and none of the protocol's own.

    Storage classes, tiers, tags and locks are for data: pointer and records are written over.

    Args:
        key: relative to the store's prefix.
    """
    return key != LATEST and not key.startswith(VOLUME_DIR + "/")


def check_relative_path(path: str) -> str:
    """The path, if it is relative, normalized and stays inside its root.

    Raises:
        ManifestError: says which rule is broken.
    """
    if not path:
        raise ManifestError("empty path")
    try:
        raw = path.encode()
    except UnicodeEncodeError:
        raise ManifestError(f"path {path!r} is not UTF-8") from None
    if len(raw) > MAX_PATH:
        raise ManifestError(f"path {path[:40]!r}... is longer than {MAX_PATH} bytes")
    if _CONTROL.search(path):
        raise ManifestError(f"path {path!r} has control characters")
    if path.startswith("/"):
        raise ManifestError(f"path {path!r} is absolute")
    for component in path.split("/"):
        if component in ("", ".", ".."):
            raise ManifestError(f"path {path!r} is not normalized (component {component!r})")
        if len(component.encode()) > MAX_COMPONENT:
            raise ManifestError(f"path {path[:40]!r}...: a component is over {MAX_COMPONENT} bytes")
    if path.split("/", 1)[0] in (VOLUME_DIR, COMPANIONS_DIR):
        raise ManifestError(f"path {path!r} lies in a folder that is reserved")
    return path


def parents(path: str) -> list[str]:
    """The folders above a relative path, the nearest last: ``a/b/c`` has ``a`` and ``a/b``."""
    components = path.split("/")
    return ["/".join(components[:count]) for count in range(1, len(components))]
