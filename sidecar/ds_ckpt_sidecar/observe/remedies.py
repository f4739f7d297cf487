"""What to do about an error, by its class: for the page, the status and the runbooks."""

from __future__ import annotations

_STORE = "if it goes on, look at the store and at the network to it; uploads go on by themselves"
_REMEDIES = {
    "AccessError": "give the agent working credentials with the rights that docs/policies lists; "
    "ds-ckpt doctor says which is missing",
    "AmbiguousError": f"an answer was lost and the call is made again; {_STORE}",
    "CorruptionError": "bytes arrived changed and were sent again; if it comes again, suspect the "
    "network path, a proxy, or the store's disk",
    "DamagedError": "run ds-ckpt verify: it names the objects; resume from the checkpoint before",
    "ExpiredError": "renew the credentials, or let a workload identity do it; the agent takes new "
    "ones by itself",
    "IdentityError": "the store does not know who asks: set, correct or renew the agent's "
    "credentials; ds-ckpt doctor tries them",
    "ManifestError": "the file in the outbox is none of ours, or was cut: the trainer's log of "
    "that save says more; the save is kept",
    "NoRoomError": "make room on the volume, or make it larger",
    "NotFoundError": "look whether the bucket exists and nothing else removes objects from it "
    "(lifecycle rules); the agent stores what is missing again",
    "OwnershipError": "another run uses this prefix: give each run one of its own, or wait until "
    "the other's lease is stale",
    "PreconditionError": "another writer came first; if it goes on, look who else writes there",
    "RefusedError": "the store refuses the request: look at the destination, the region and the "
    "endpoint; ds-ckpt doctor tries each operation",
    "ShardChangedError": "something changed a shard after it was saved: save each tag once, and "
    "remove folders only when they are durable",
    "ShardUnreadableError": "let the agent read the trainer's files: the same user, or a common "
    "group; ds-ckpt doctor names the file",
    "SkewedClockError": "this node's clock is wrong, and the store refuses what is signed by it: "
    "set it (NTP); the credentials are not at fault",
    "ThrottledError": "the store asks for less: fewer streams, or a higher quota",
    "TransientError": f"the call is made again; {_STORE}",
    "UnknownSchemaError": "the trainer's hook is newer than the agent: upgrade the agent; the save "
    "is kept until then",
    "WeakStoreError": "use a store with conditional writes, or --allow-weak-store for one node",
    "OSError": "look at the volume's disk: no room, no permission, or a fault",
}


def remedy(kind: str) -> str:
    """A sentence for the error class of that name; empty if there is nothing to say."""
    if kind in _REMEDIES:
        return _REMEDIES[kind]
    return _REMEDIES["OSError"] if kind.endswith("Error") and kind in _OF_THE_SYSTEM else ""


_OF_THE_SYSTEM = {
    "BlockingIOError",
    "FileNotFoundError",
    "IsADirectoryError",
    "NotADirectoryError",
    "PermissionError",
    "TimeoutError",
}
