"""Conditions for a store that has none: look, then write. For one writer alone.

The protocol decides by conditional writes. A weak store refuses or ignores them, and may be used
only by explicit leave and by one node (``probe.fit``). Here a condition is judged by looking just
before the write. Between the two another writer can come, and one of both writes is lost without
a word: that is the weaker promise. Against what one node does in sequence it holds: a decision
that was taken is not taken again, whoever took it.
"""

from __future__ import annotations

from ds_ckpt_store.errors import NotFoundError, PreconditionError
from ds_ckpt_store.stores.forwarding import Forwarding
from ds_ckpt_store.stores.port import Condition, IfAbsent, ObjectInfo, Source


class CheckThenPut(Forwarding):
    """A store whose conditions are judged before the write; it claims no more than the one within.

    Args:
        store: a store that only this process writes to.
    """

    def put(self, key: str, source: Source, *, condition: Condition = None) -> ObjectInfo:
        """Write plainly, if what is there fulfils the condition.

        Raises:
            PreconditionError: it does not.
        """
        if condition is not None:
            self._judge(key, condition)
        return self.store.put(key, source)

    def _judge(self, key: str, condition: Condition) -> None:
        try:
            version = self.store.head(key).version
        except NotFoundError:
            if isinstance(condition, IfAbsent):
                return
            raise PreconditionError("put", key, "is not there any more") from None
        if isinstance(condition, IfAbsent):
            raise PreconditionError("put", key, "exists")
        if condition is not None and version != condition.version:
            raise PreconditionError("put", key, f"has version {version!r}")
