"""What the hook can raise: from ``agree_on_resume`` and ``subcheckpoints``, else with ``strict``.

::

    CkptError
    `-- HookError
        |-- ExchangeError        the ranks could not talk, or were not doing the same thing
        |-- NotPublishedError    a save will not be uploaded; says which ranks, and why
        |-- SubcheckpointError   sub-checkpoints were not saved or loaded; says which ranks, and why
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


class SubcheckpointError(HookError):
    """The sub-checkpoints of an engine were not saved whole, or were not loaded."""


class AgreementError(HookError):
    """The ranks could not agree on what to resume from.

    Training must not start: half of the ranks might continue from another state than the rest.
    """
