"""``after_save`` and ``after_save_dir``: what happens on the training thread between two steps.

It lists files, exchanges one message with the other ranks and makes hard links; checksums and
publication follow in the background. Whatever goes wrong is said once as a warning, the save is
not published, and training goes on.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from ds_ckpt_hook import deepspeed_files, links, sources
from ds_ckpt_hook.core import Hook, SaveState, reason_of
from ds_ckpt_hook.errors import NotPublishedError
from ds_ckpt_hook.feedback import Save, wait_for
from ds_ckpt_hook.notices import tell
from ds_ckpt_hook.plan import About, Plan, Report, make_plan
from ds_ckpt_hook.publishing import Job
from ds_ckpt_hook.session import Session, newest_committed_ms
from ds_ckpt_hook.settings import Place
from ds_ckpt_hook.sources import EngineSource, FolderSource, Source
from ds_ckpt_store.contract import names
from ds_ckpt_store.contract.clock import fresh_token
from ds_ckpt_store.contract.manifest import MAX_METRICS, is_identifier
from ds_ckpt_store.errors import CkptError

logger = logging.getLogger("ds_ckpt_hook")

_IDENTIFIER = "1 to 256 characters without control characters"


@dataclass(frozen=True)
class Request:
    """One call of ``after_save`` or ``after_save_dir``, with the step that training had then.

    ``problem`` says why it cannot be known what is meant; the other ranks are told.
    """

    source: Source
    tag: str
    save_dir: str | os.PathLike[str] | None
    about: About
    problem: str = ""


def after_save(
    hook: Hook,
    engine: Any,
    tag: object = None,
    *,
    save_dir: str | os.PathLike[str] | None = None,
    metrics: Mapping[str, float] | None = None,
    kind: str = "checkpoint",
    pin: bool = False,
    wait: bool = False,
    strict: bool = False,
    destination: str | None = None,
) -> Save:
    """See :func:`ds_ckpt_hook.after_save`."""
    step = getattr(engine, "global_steps", None)
    request = Request(
        source=EngineSource(engine),
        tag=f"global_step{step}" if tag is None else str(tag),
        save_dir=save_dir,
        about=_about(step, metrics, kind, pin, destination),
    )
    return _hand_over(hook, request, wait=wait, strict=strict)


def after_save_dir(
    hook: Hook,
    path: str | os.PathLike[str],
    tag: object = None,
    *,
    step: int | None = None,
    metrics: Mapping[str, float] | None = None,
    kind: str = "checkpoint",
    pin: bool = False,
    wait: bool = False,
    strict: bool = False,
) -> Save:
    """See :func:`ds_ckpt_hook.after_save_dir`."""
    save_dir, name, problem = sources.folder_of(path, tag, hook.settings.directory)
    request = Request(
        source=FolderSource(step),
        tag=name,
        save_dir=save_dir,
        about=_about(step, metrics, kind, pin),
        problem=problem,
    )
    return _hand_over(hook, request, wait=wait, strict=strict)


def _hand_over(hook: Hook, request: Request, *, wait: bool, strict: bool) -> Save:
    began = hook.clock.monotonic()
    state = SaveState(tag=request.tag)
    hook.saves.append(state)
    with contextlib.suppress(Exception):  # a word to the user must not cost a save
        tell(hook)
    if request.tag in hook.left_out:
        state.reason = "there was no room for it on the volume"
        if strict:
            raise NotPublishedError(f"tag {state.tag!r}: {state.reason}")
        return Save(hook, state)
    try:
        hook.catch_up()
        if request.source.is_finished():
            _take(hook, request, state)
        else:
            _take_later(hook, request, state)
    except Exception as error:
        _report(hook, state, error)
        if strict:
            raise (
                error
                if isinstance(error, CkptError)
                else NotPublishedError(f"tag {state.tag!r}: {reason_of(error)}")
            ) from error
    finally:
        state.held_seconds += hook.clock.monotonic() - began
        if state.session is not None:
            state.session.note_held(state.held_seconds)
    save = Save(hook, state)
    if wait and not state.reason:
        status = wait_for(hook, [state], None)[0]
        if strict and not status.durable:
            raise NotPublishedError(f"tag {state.tag!r} is {status.state}: {status.reason}")
    return save


def _about(
    step: object,
    metrics: Mapping[str, float] | None,
    kind: str,
    pin: bool,
    destination: str | None = None,
) -> About:
    """The call in plain values; never raises, because every rank must come to the exchange."""
    return About(
        step=step if isinstance(step, int) else None,
        kind=_kind(kind),
        metrics=_numbers(metrics),
        pin=bool(pin),
        destination=destination,
    )


def _kind(kind: Any) -> str:
    word = str(kind)
    if is_identifier(word):
        return word
    logger.warning("kind %.40r is left out: it is %s", word, _IDENTIFIER)
    return "checkpoint"


def _numbers(metrics: Any) -> dict[str, float | None]:
    """What can be kept of metrics; the rest is left out, since it must not cost the save."""
    try:
        given = {str(name): _number(value) for name, value in dict(metrics or {}).items()}
    except Exception as error:  # noqa: BLE001 - whatever it is, it is no mapping
        logger.warning("metrics are left out, they are no mapping of names to numbers: %s", error)
        return {}
    kept = dict([item for item in given.items() if is_identifier(item[0])][:MAX_METRICS])
    left = [f"{name:.40}" for name in given if name not in kept]
    if left:
        logger.warning(
            "metrics %s are left out: a name is %s, and %d metrics are the most",
            left[:8],
            _IDENTIFIER,
            MAX_METRICS,
        )
    return kept


def _number(value: Any) -> float | None:
    try:
        number = float(value)
    except Exception:  # noqa: BLE001 - a tensor of many values, an integer of 400 digits
        return None
    return number if math.isfinite(number) else None


def _report(hook: Hook, state: SaveState, error: Exception) -> None:
    state.reason = reason_of(error)
    if state.session is not None:
        state.session.note_skipped(f"{state.tag}: {state.reason}")
    logger.warning(
        "tag %r is not published: %s",
        state.tag,
        state.reason,
        exc_info=not isinstance(error, (CkptError, OSError)),
    )
    hook.notify("not published", f"tag {state.tag!r} is not published: {state.reason}", state)


def _take_later(hook: Hook, request: Request, state: SaveState) -> None:
    """Remember a save whose files come at the next optimizer step."""
    state.waiting_for_engine = True

    def take() -> bool:
        if not state.waiting_for_engine:
            return True
        if not request.source.is_finished():
            return False
        state.waiting_for_engine = False
        began = hook.clock.monotonic()
        try:
            _take(hook, request, state)
        except Exception as error:  # noqa: BLE001 - training goes on
            _report(hook, state, error)
        held = hook.clock.monotonic() - began
        state.held_seconds += held
        if state.session is not None:
            state.session.note_held(held)
        return True

    hook.unfinished.append(take)
    request.source.call_when_finished(take)


def _take(hook: Hook, request: Request, state: SaveState) -> None:
    """Agree with all ranks, protect this rank's files, and leave the rest to the worker.

    Raises:
        HookError: nobody publishes this save; the same on all ranks.
    """
    place, problem = (None, request.problem) if request.problem else hook.locate(request.save_dir)
    session = hook.session(place, problem)
    state.session = session
    request.source.follow(session)
    session.on_beat = partial(tell, hook)
    session.start_heartbeat()
    if not request.source.is_deepspeeds:  # DeepSpeed's ranks have waited for each other
        hook.exchange.gather("save: written", None, timeout=hook.settings.publish_timeout)
    report = _look(hook, session, place, problem, request)
    reports: list[Report] = hook.exchange.gather("save", report)
    plan = make_plan(reports)
    session.newest_ms = plan.time_ms
    state.save_id = plan.save_id
    state.agreed_at = hook.clock.time()
    session.last_bytes = sum(reports[session.leader].listing.values())
    if place is not None:  # it is: a rank without a place has said so in its report
        hook.worker.submit(_protect(hook, session, place, plan, request, state))


def _look(
    hook: Hook, session: Session, place: Place | None, problem: str, request: Request
) -> Report:
    """What this rank says of the save; never raises, because every rank must say something."""
    facts: dict[str, Any] = {
        "rank": session.rank,
        "node": session.node,
        "host": session.host,
        "newest_ms": session.newest_ms,
        "now_ms": int(hook.clock.time() * 1000),
        "token": fresh_token(hook.rng),
        "about": request.about,
    }
    try:
        facts |= _find(session, place, problem, request)
    except Exception as error:  # noqa: BLE001 - the other ranks wait for this one's report
        facts["error"] = reason_of(error)
    return Report(**facts)


def _find(session: Session, place: Place | None, problem: str, request: Request) -> dict[str, Any]:
    """Tag and files of the save, as fields of a report.

    Raises:
        CkptError, OSError: this rank cannot vouch for its part.
    """
    if place is None:
        raise NotPublishedError(problem)
    tag = names.check_tag(request.tag)
    folder = f"{place.save_dir}/{tag}"
    found = request.source.find(session, place.save_dir, tag)
    facts: dict[str, Any] = {
        "tag": tag,
        "root": place.root,
        "claims": {path: state.size for path, state in found.claims.items()},
    }
    if found.listed is not None:
        if "/" in tag:  # a later save of the tag above it must not take these files too
            for path, state in found.listed.items():
                session.taken[f"{folder}/{path}"] = (tag, state.identity)
        facts["listing"] = {path: state.size for path, state in found.listed.items()}
        facts["old"] = found.old
    if session.is_leader:
        facts["newest_ms"] = max(session.newest_ms, newest_committed_ms(session.volume))
    return facts


def _protect(
    hook: Hook, session: Session, place: Place, plan: Plan, request: Request, state: SaveState
) -> Job:
    """Link this rank's files; a failure goes into its piece, where its node's leader finds it."""
    fs = session.volume.fs
    gid = session.lets_in
    folder = f"{place.save_dir}/{plan.tag}"
    target = session.volume.link_folder(plan.save_id)
    kept: list[links.Kept] = []
    beside: list[links.Kept] = []
    error = ""
    try:
        for path in plan.work_of(session.node, session.rank):
            each = links.keep(fs, folder, path, target, gid)
            kept.append(replace(each, crc32c=hook.seals.of(each.state)))
        if gid is not None:
            for parent in sorted({os.path.dirname(f"{folder}/{each.path}") for each in kept}):
                links.widen(fs, place.volume.path, parent, gid)
            if session.is_leader:  # the sidecar leaves what it names, if it can read it
                fs.let_group_in(f"{place.save_dir}/{names.LATEST}", gid)
        if session.rank == 0 and request.source.is_deepspeeds:
            beside = _companions(session, place, target)
        session.warn_if_unreadable([f"{folder}/{each.path}" for each in kept])
    except (CkptError, OSError) as failure:
        error = reason_of(failure)

    def done(reason: str) -> None:
        state.reason = reason
        state.handed_over = not reason
        if reason:
            hook.notify("not published", f"tag {state.tag!r} is not published: {reason}", state)

    return Job(
        session=session,
        plan=plan,
        root=place.root,
        files=kept,
        companions=beside,
        error=error,
        moves_latest=not request.source.is_deepspeeds,
        done=done,
    )


def _companions(session: Session, place: Place, target: str) -> list[links.Kept]:
    # The next save writes these scripts again in place, so a link would not keep them.
    fs = session.volume.fs
    found = deepspeed_files.companions(fs, place.save_dir, session.younger_than_ns)
    kept = []
    for name in found:
        with contextlib.suppress(CkptError, OSError):
            kept.append(
                links.copy_small(
                    fs,
                    place.save_dir,
                    name,
                    f"{target}/{names.COMPANIONS_DIR}",
                    deepspeed_files.MAX_COMPANION,
                )
            )
    return kept
