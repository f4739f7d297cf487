"""``agree_on_resume``: one checkpoint for all ranks, or none for all.

Half of the ranks on another checkpoint than the rest is the worst failure there is: ZeRO-1 loads
it without an error. DeepSpeed's ``latest`` cannot prevent it: it is a file of each volume, written
before the other ranks are done. So the ranks tell each other what their volumes hold and take the
newest save that all can have, byte for byte; what is newer or torn is moved out of sight.

Elsewhere the hook never raises into training. Here it does: if the ranks cannot agree safely,
training must not start, and the pods are restarted to try again.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from ds_ckpt_hook import local
from ds_ckpt_hook.core import Hook, reason_of
from ds_ckpt_hook.errors import AgreementError
from ds_ckpt_hook.local import Held
from ds_ckpt_hook.session import Session
from ds_ckpt_hook.settings import Place
from ds_ckpt_store.contract.clock import fresh_token
from ds_ckpt_store.contract.volume import Volume
from ds_ckpt_store.errors import CkptError

if TYPE_CHECKING:
    from ds_ckpt_hook.remote import Committed

logger = logging.getLogger("ds_ckpt_hook")


@dataclass(frozen=True)
class Offer:
    """What one rank knows: a leader, what its volume holds; rank 0, what the store holds.

    ``unwanted`` are saves that people deleted from the store by name.
    """

    held: Mapping[str, Held] = field(default_factory=dict)
    unmanaged: Sequence[str] = ()
    durable: str = ""
    start_fresh: bool = False
    committed: Sequence[Committed] = ()
    unwanted: Collection[str] = ()
    error: str = ""
    store_error: str = ""


@dataclass(frozen=True)
class Option:
    """A save that every node holds, or that is committed in the store."""

    epoch: int
    time_ms: int
    save_id: str
    tag: str
    is_committed: bool

    @property
    def held(self) -> Held:
        """As what it stands on a volume."""
        return Held(self.save_id, self.tag, self.time_ms, "")


def agree_on_resume(
    hook: Hook,
    save_dir: str | os.PathLike[str] | None = None,
    *,
    destination: str | None = None,
    timeout: float | None = None,
    folders: str | None = None,
    tag: str | None = None,
) -> str | None:
    """See :func:`ds_ckpt_hook.agree_on_resume`.

    With a ``tag`` the newest save of that tag, and never from scratch.
    """
    patience = hook.settings.resume_timeout if timeout is None else timeout
    url = destination or hook.settings.destination
    place, problem = hook.locate(save_dir)
    try:
        session = hook.session(place, problem)
        if place is None:
            raise AgreementError(problem)  # noqa: TRY301 - the handshake has told all ranks
        return _agree(hook, session, place, url, patience, folders, tag)
    except AgreementError:
        raise
    except CkptError as error:
        raise AgreementError(
            f"the ranks could not agree on what to resume from: {error}. Nothing was loaded; "
            "training must not start. Restart all ranks to try again"
        ) from error


def _agree(
    hook: Hook,
    session: Session,
    place: Place,
    url: str | None,
    patience: float,
    folders: str | None,
    tag: str | None,
) -> str | None:
    with contextlib.ExitStack() as stack:  # the sidecar takes nothing away meanwhile
        return _agree_undisturbed(hook, session, place, url, patience, folders, tag, stack)


def _agree_undisturbed(
    hook: Hook,
    session: Session,
    place: Place,
    url: str | None,
    patience: float,
    folders: str | None,
    tag: str | None,
    stack: contextlib.ExitStack,
) -> str | None:
    offer, own = _offer(hook, session, place, url, folders, stack)
    offers: list[Offer] = hook.exchange.gather("resume: what is there", offer, timeout=patience)
    problems = [f"rank {rank}: {offer.error}" for rank, offer in enumerate(offers) if offer.error]
    if problems:
        raise AgreementError("; ".join(problems[:8]))
    store_error = offers[0].store_error
    if store_error:
        logger.warning("the store cannot be read, only the volumes count: %s", store_error)
    options = rank_options(
        [offers[rank].held for rank in session.leaders.values()],
        offers[0].committed,
        offers[0].unwanted,
    )
    if tag is not None:
        options = [option for option in options if option.tag == tag]
    failures: list[str] = []
    agreed: Option | None = None
    for option in options:
        failed = _try(hook, session, place, url, option, own, patience)
        if not failed:
            agreed = option
            break
        failures.append(f"{option.tag!r}: {'; '.join(failed[:4])}")
        logger.error("cannot resume from %s", failures[-1])
    if agreed is None and tag is not None:
        why = " | ".join(failures[:4]) or "no node's volume and no committed checkpoint has it"
        raise AgreementError(f"tag {tag!r} cannot be loaded on every node: {why}")
    if agreed is None and not offers[0].start_fresh:
        _refuse_scratch(offers, url, failures)
    _settle(hook, session, place, agreed, patience, folders)
    times = [record.time_ms for record in offers[0].committed]
    session.newest_ms = max(session.newest_ms, *times, agreed.time_ms if agreed else 0)
    session.parent = agreed.save_id if agreed else None
    session.start_heartbeat()
    if agreed is None:
        logger.info("nothing to resume from: training starts from scratch on all ranks")
        return None
    logger.info("all ranks resume from %r (save %s)", agreed.tag, agreed.save_id)
    return agreed.tag


def _refuse_scratch(offers: Sequence[Offer], url: str | None, failures: Sequence[str]) -> None:
    """Do not start from scratch in silence while something tells of a checkpoint.

    Raises:
        AgreementError: says what is known, and what to do.
    """
    choice = "to start from scratch all the same, set DS_CKPT_START_FRESH=1 this once"
    if offers[0].store_error:
        raise AgreementError(
            f"the store cannot be read ({offers[0].store_error}), and the volumes alone hold "
            f"nothing that all nodes share; {choice}"
        )
    if offers[0].committed:
        raise AgreementError(
            f"{url} holds {len(offers[0].committed)} committed checkpoints, and none could be "
            f"brought to every node: {' | '.join(failures[:4])}; {choice}"
        )
    told = [f"rank {rank}: {offer.durable}" for rank, offer in enumerate(offers) if offer.durable]
    if told and url is None:
        raise AgreementError(
            f"the volumes hold nothing that all nodes share, but a committed checkpoint is known "
            f"({'; '.join(told[:4])}): set DS_CKPT_DESTINATION for the trainer, so that nodes can "
            f"restore what they lack, or run ds-ckpt restore on every node; {choice}"
        )
    found = sorted({tag for offer in offers for tag in offer.unmanaged})
    if found:
        raise AgreementError(
            f"save_dir holds checkpoints from before the hook was first used ({found[:8]}), and "
            "nothing tells whether they are whole on all nodes. To go on from one, load it, as by "
            "engine.load_checkpoint(save_dir, tag), without agree_on_resume this once, and save; "
            f"{choice}"
        )


def _offer(
    hook: Hook,
    session: Session,
    place: Place,
    url: str | None,
    folders: str | None,
    stack: contextlib.ExitStack,
) -> tuple[Offer, Mapping[str, Held]]:
    """What this rank tells the others, and what its volume holds with the manifests."""
    held: Mapping[str, Held] = {}
    unmanaged: Sequence[str] = ()
    durable = ""
    committed: Sequence[Committed] = ()
    unwanted: Collection[str] = ()
    store_error = ""
    if session.is_leader:
        try:
            stack.callback(os.close, local.keep_from_cleaning(session.volume, hook.clock))
            held = local.held_saves(session, place)
            unmanaged = local.unmanaged(session, place, folders)
            durable = local.known_durable(session, place)
        except (CkptError, OSError) as error:
            why = reason_of(error)
            return Offer(error=f"{place.volume.path} cannot be looked through: {why}"), {}
    if session.rank == 0 and url:
        try:
            from ds_ckpt_hook import remote

            every, unwanted = remote.decided(url, hook.clock, hook.rng)
            committed = _of_this_run(session, every)
        except (CkptError, OSError, ImportError) as error:
            store_error = f"{url}: {reason_of(error)}"
    # Manifests may be large, and no other rank needs them.
    told = {save_id: replace(save, manifest=None) for save_id, save in held.items()}
    offer = Offer(
        held=told,
        unmanaged=unmanaged,
        durable=durable,
        start_fresh=hook.settings.start_fresh,
        committed=committed,
        unwanted=unwanted,
        store_error=store_error,
    )
    return offer, held


def _of_this_run(session: Session, committed: Sequence[Committed]) -> Sequence[Committed]:
    """Checkpoints of this run; those of another only if this one has none.

    Another run may have used the prefix meanwhile, and its checkpoints sort after ours. A run that
    begins on a prefix which holds only another's goes on from there, and says so.
    """
    own = [record for record in committed if record.run_id == session.run_id]
    if committed and not own:
        runs = sorted({record.run_id for record in committed})
        logger.warning("run %r has no checkpoint yet, %s has", session.run_id, ", ".join(runs))
    return own or committed


def rank_options(
    held_by_node: Sequence[Mapping[str, Held]],
    committed: Sequence[Committed],
    unwanted: Collection[str] = (),
) -> list[Option]:
    """All saves that every node can have, newest first, but for those that nobody wants back.

    Newest is by (epoch, time, id), as everywhere. A save that is not committed has the epoch that
    its attempt is known by, or else the newest: times never run backwards within a run.
    """
    by_id = {record.save_id: record for record in committed}
    epochs = {record.attempt: record.epoch for record in committed}
    newest_epoch = max((record.epoch for record in committed), default=0)
    common = set.intersection(*(set(held) for held in held_by_node)) if held_by_node else set()
    options = [
        Option(record.epoch, record.time_ms, record.save_id, record.tag, is_committed=True)
        for record in committed
    ]
    for save_id in common - set(by_id) - set(unwanted):
        save = held_by_node[0][save_id]
        epoch = epochs.get(save.attempt, newest_epoch)
        options.append(Option(epoch, save.time_ms, save_id, save.tag, is_committed=False))
    return sorted(options, key=lambda o: (o.epoch, o.time_ms, o.save_id), reverse=True)


def _try(
    hook: Hook,
    session: Session,
    place: Place,
    url: str | None,
    option: Option,
    held: Mapping[str, Held],
    patience: float,
) -> list[str]:
    """Have one save on every node, verified; returns why not, the same on all ranks."""
    error = ""
    if session.is_leader:
        try:
            error = _obtain(hook, place, url, option, held)
        except Exception as failure:  # noqa: BLE001 - the other ranks wait for this one's answer
            error = reason_of(failure)
    answers: list[str] = hook.exchange.gather(f"resume: {option.save_id}", error, timeout=patience)
    return [f"rank {rank}: {answer}" for rank, answer in enumerate(answers) if answer]


def _obtain(
    hook: Hook, place: Place, url: str | None, option: Option, held: Mapping[str, Held]
) -> str:
    mine = held.get(option.save_id)
    if mine is not None and local.is_whole(place, mine):
        return ""
    if not option.is_committed or url is None:
        return f"the files on {place.volume.path} are not those of its manifest"
    from ds_ckpt_hook import remote

    logger.info("restoring %r from %s", option.tag, url)
    volume = Volume(place.save_dir, place.volume.fs)
    volume.fs.make_folder(volume.path)
    remote.restore(url, volume, option.save_id, hook.clock, hook.rng)
    return ""


def _settle(
    hook: Hook,
    session: Session,
    place: Place,
    agreed: Option | None,
    patience: float,
    folders: str | None,
) -> None:
    """Leave on every volume what the ranks agreed on, and nothing else to load by mistake."""
    error = ""
    try:
        if session.is_leader:
            now_ms = int(hook.clock.time() * 1000)
            held = agreed.held if agreed is not None else None
            for sentence in local.set_aside(session, place, held, now_ms, folders):
                logger.warning("%s", sentence)
            if agreed is not None:
                local.point(place, agreed.tag)
        # What was restored just now is young, and yet no part of what is saved next.
        session.forget_what_is_there(fresh_token(hook.rng))
    except (CkptError, OSError) as failure:
        error = f"{place.save_dir} cannot be made ready: {reason_of(failure)}"
    answers: list[str] = hook.exchange.gather("resume: ready", error, timeout=patience)
    problems = [f"rank {rank}: {answer}" for rank, answer in enumerate(answers) if answer]
    if problems:
        raise AgreementError("; ".join(problems[:8]))
