"""Layout of the shared volume: who writes what, where.

::

    <volume>/.ds_ckpt/
        node.json                      this volume's node id; made once, exclusively
        pieces/<save_id>/<rank>.json   hook: what each rank contributes
        outbox/<save_id>.<node>.json   hook: completed node manifests, and nothing else
        links/<save_id>/...            hook: hard links to the shards of that save
        status/<save_id>.json          sidecar: where that save stands
        status/sidecar.json            sidecar: heartbeat
        status/trainer.json            hook: attempt, step, heartbeat, finished or not
        limits.json                    anyone: bandwidth and requests at a time, while it runs
        restored.json                  restore: which record this volume came from
        restoring/<save_id>/...        restore: shards on their way in
        aside/<save_id or time>/...    resume, restore: what must not be loaded, kept
        trash/<save_id>/...            sidecar: shards renamed before they are compared and unlinked
        cache/...                      hook: pieces of checkpoints that are read from the store
        restore.lock                   restore: one at a time
        cleaning.lock                  held while names in the trainer's folders are taken away
        journal.db, agent.lock         sidecar

Nothing but this module builds such a path.
"""

from __future__ import annotations

import contextlib
import os
import uuid

from ds_ckpt_store.contract import names
from ds_ckpt_store.contract.filesystem import Filesystem
from ds_ckpt_store.contract.manifest import (
    MAX_DOCUMENT_BYTES,
    MAX_LIMITS_BYTES,
    DocumentT,
    NodeIdentity,
    NodeManifest,
    Restored,
    SaveStatus,
    SidecarStatus,
    TrainerStatus,
    TransferLimits,
    parse,
)
from ds_ckpt_store.errors import ManifestError, SettingsError, UnknownSchemaError


class Volume:
    """One shared volume.

    Args:
        path: the folder that the pod's containers share (DeepSpeed's save_dir, or above it).
        fs: the filesystem to use.
    """

    def __init__(self, path: str, fs: Filesystem | None = None) -> None:
        self.path = os.path.abspath(path)
        self.fs = fs or Filesystem()
        self.own = f"{self.path}/{names.VOLUME_DIR}"
        self._identity = f"{self.own}/node.json"
        self.outbox = f"{self.own}/outbox"
        self.pieces = f"{self.own}/pieces"
        self.links = f"{self.own}/links"
        self.status = f"{self.own}/status"
        self.restoring = f"{self.own}/restoring"
        self.aside = f"{self.own}/aside"
        self.trash = f"{self.own}/trash"
        self.cache = f"{self.own}/cache"
        self.journal = f"{self.own}/journal.db"
        self.lock = f"{self.own}/agent.lock"
        self.cleaning_lock = f"{self.own}/cleaning.lock"
        self.restore_lock = f"{self.own}/restore.lock"
        self.limits = f"{self.own}/limits.json"
        self.restored = f"{self.own}/restored.json"

    def prepare(self) -> None:
        """Make the folders of the layout.

        Raises:
            SettingsError: the volume itself does not exist, or a folder of ours is none.
            OSError: a folder cannot be made.
        """
        state = self.fs.stat(self.path)
        if not self.fs.is_folder(self.path):
            if state is not None and state.is_regular:
                raise SettingsError(f"the volume {self.path} is no folder: name one that is")
            raise SettingsError(f"the volume {self.path} does not exist: mount it, or make it")
        self.refuse_links()
        for folder in (self.outbox, self.pieces, self.links, self.status):
            self.fs.make_folder(folder)
        self._share()

    def _share(self) -> None:
        """Let the other container's user at what this one made: also where it was killed at it.

        An earlier version made some of these for its own user alone.
        """
        folders = (self.own, self.outbox, self.pieces, self.links, self.status)
        later = (self.restoring, self.aside, self.trash)
        files = (self._identity, self.lock, self.cleaning_lock, self.restore_lock, self.limits)
        for path in (*folders, *later, *files, self.restored):
            self.fs.let_group_in(path)

    def group(self) -> int:
        """The group that trainer and sidecar have in common, as far as the volume tells; else -1.

        It is that of our own folder, which whoever came first made in the group of the volume.
        """
        state = self.fs.stat(self.own)
        return -1 if state is None else state.gid

    def refuse_links(self) -> None:
        """See that our own folders are folders: through a link we would write and remove elsewhere.

        Raises:
            SettingsError: one is a link, or no folder; names it.
        """
        below = (self.outbox, self.pieces, self.links, self.status)
        for path in (self.own, *below, self.restoring, self.aside, self.trash):
            state = self.fs.stat(path)
            if state is not None and not state.is_folder:
                raise SettingsError(
                    f"{path} must be a folder of its own, and is a link or a file: nothing was "
                    "touched; find out who made it, and remove it"
                )

    def node_id(self, *, durable: bool = True) -> str:
        """This volume's node id; whoever comes first makes it.

        Args:
            durable: False leaves the sync to :meth:`publish`. On the training thread it could take
                as long as writing back the whole checkpoint that was just saved.
        """
        while True:
            known = self.known_node()
            if known:
                return known
            self.fs.make_folder(self.own)
            identity = NodeIdentity(node=self._node_in_outbox() or uuid.uuid4().hex)
            self.fs.create_exclusive(self._identity, identity.to_bytes(), durable=durable)

    def known_node(self) -> str:
        """This volume's node id, or "" if it has none yet.

        Raises:
            ManifestError: what stands there is none.
            UnknownSchemaError: it is newer than this version.
        """
        found = self.read(self._identity, NodeIdentity)
        return "" if found is None else found.node

    def _node_in_outbox(self) -> str:
        """The node that the newest readable manifest names: the id, where its file was lost."""
        for name in reversed(self.manifests()):
            with contextlib.suppress(ManifestError, UnknownSchemaError, OSError):
                return self.manifest(name).node
        return ""

    def drop_damaged_identity(self) -> str:
        """Put a node id that cannot be read aside, so that :meth:`node_id` makes it anew.

        A power cut can leave the file empty: the hook makes it without a sync. Only for the agent
        that holds the lock: of two at it, the later would put the earlier's new one aside.

        Returns:
            What was wrong with it; "" if nothing was.

        Raises:
            UnknownSchemaError: it is newer than this version.
        """
        try:
            self.known_node()
        except ManifestError as error:
            self.fs.rename(self._identity, f"{self._identity}.damaged")
            return str(error)
        return ""

    def read(
        self, path: str, kind: type[DocumentT], limit: int = MAX_DOCUMENT_BYTES
    ) -> DocumentT | None:
        """One document of at most ``limit`` bytes, or None if there is none.

        Raises:
            ManifestError: it breaks a rule of ``kind``.
            UnknownSchemaError: it is newer than this version.
        """
        try:
            return parse(kind, self.fs.read(path, limit))
        except FileNotFoundError:
            return None
        except (ManifestError, UnknownSchemaError) as error:
            raise type(error)(f"{path}: {error}") from None

    # ---- hand-off

    def publish(self, manifest: NodeManifest) -> None:
        """Make a completed node manifest appear in the outbox, whole and durable."""
        self.fs.make_folder(self.outbox)
        self.fs.sync_file(self._identity)  # a manifest is worth nothing without its node
        self.fs.write_atomic(f"{self.outbox}/{manifest.file_name}", manifest.to_bytes())

    def manifests(self) -> list[str]:
        """Names of the files in the outbox, sorted (so by save time); temporary ones left out."""
        return [name for name in self.fs.names(self.outbox) if not name.startswith(".")]

    def manifest(self, name: str) -> NodeManifest:
        """One node manifest from the outbox.

        Raises:
            ManifestError: not a manifest, or not the one that its name says.
            UnknownSchemaError: newer than this version.
            FileNotFoundError: it is gone.
        """
        manifest = parse(NodeManifest, self.fs.read(f"{self.outbox}/{name}", MAX_DOCUMENT_BYTES))
        if manifest.file_name != name:
            raise ManifestError(f"{name} holds the manifest of {manifest.file_name}")
        return manifest

    def link_folder(self, save_id: str) -> str:
        """Where the hard links of one save lie."""
        return f"{self.links}/{save_id}"

    def tag_folder(self, manifest: NodeManifest) -> str:
        """The trainer's own folder of a save, relative to the volume."""
        return manifest.tag if manifest.root == "." else f"{manifest.root}/{manifest.tag}"

    # ---- status

    def save_status(self, save_id: str) -> SaveStatus | None:
        """What the sidecar last said of one save."""
        return self.read(f"{self.status}/{save_id}.json", SaveStatus)

    def write_save_status(self, status: SaveStatus) -> None:
        """Say where a save stands."""
        self.fs.write_atomic(
            f"{self.status}/{status.save_id}.json", status.to_bytes(), durable=False
        )

    def sidecar_status(self) -> SidecarStatus | None:
        """The sidecar's heartbeat."""
        return self.read(f"{self.status}/sidecar.json", SidecarStatus)

    def write_sidecar_status(self, status: SidecarStatus) -> None:
        """The sidecar's heartbeat."""
        self.fs.write_atomic(f"{self.status}/sidecar.json", status.to_bytes(), durable=False)

    def trainer_status(self) -> TrainerStatus | None:
        """The trainer's heartbeat."""
        return self.read(f"{self.status}/trainer.json", TrainerStatus)

    def write_trainer_status(self, status: TrainerStatus) -> None:
        """The trainer's heartbeat; durable once it says finished."""
        self.fs.write_atomic(
            f"{self.status}/trainer.json", status.to_bytes(), durable=status.finished
        )

    def transfer_limits(self) -> TransferLimits | None:
        """What somebody has set while the sidecar runs."""
        return self.read(self.limits, TransferLimits, MAX_LIMITS_BYTES)

    def write_limits(self, limits: TransferLimits) -> None:
        """Set limits while the sidecar runs; it looks once a second."""
        self.fs.make_folder(self.own)
        self.fs.write_atomic(self.limits, limits.to_bytes())

    def restored_from(self) -> Restored | None:
        """Which record this volume was restored from."""
        return self.read(self.restored, Restored)
