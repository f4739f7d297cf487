"""What the hook can raise: only from ``agree_on_resume``, and elsewhere only with ``strict=True``.

::

    CkptError
    `-- HookError
        |-- ExchangeError        the ranks could not talk, or were not doing the same thing
        |-- NotPublishedError    a save will not be uploaded; says which ranks, and why
        `-- AgreementError       no checkpoint could be agreed on safely: do not start training
"""

from __future__ import annotations

from ds_ckpt_store.errors import CkptError


class HookError(CkptError):
    """Root of what the hook itself raises."""


class ExchangeError(HookError):
    """The ranks could not talk to each other, or were in different calls of the hook."""


class NotPublishedError(HookError):
    """A save will not be uploaded."""


class AgreementError(HookError):
    """The ranks could not agree on what to resume from.

    Training must not start: half of the ranks might continue from another state than the rest.
    """
