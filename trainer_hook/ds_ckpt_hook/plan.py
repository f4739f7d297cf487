"""From what every rank says it wrote to who uploads what: pure, and equal on all ranks.

Every rank computes the same plan from the same reports, so nothing further needs to be said. One
rank's error, or two tags, and there is no plan: a checkpoint that lacks a shard is none.

With node-local storage the same path stands on several nodes with different bytes
(``mp_rank_00_model_states.pt``: only global rank 0's is complete), so a path belongs to the node
of the lowest global rank that wrote it, and is a replica everywhere else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ds_ckpt_hook.errors import NotPublishedError


@dataclass(frozen=True)
class About:
    """What the trainer says of a save; see :func:`ds_ckpt_hook.after_save`."""

    step: int | None = None
    kind: str = "checkpoint"
    metrics: Mapping[str, float | None] = field(default_factory=dict)
    pin: bool = False
    destination: str | None = None


@dataclass(frozen=True)
class Report:
    """What one rank says of one save.

    Attributes:
        rank: global rank.
        node: id of its volume.
        host: name of its machine.
        tag: as DeepSpeed turned it into a folder.
        root: save_dir relative to the volume.
        error: why this rank cannot vouch for its part; empty if it can.
        claims: path to size in bytes, of the files that this rank itself wrote.
        listing: path to size, of all files of this save that this rank sees; by the node's leader,
            or by one rank of each machine, which surely sees what its own ranks have written.
        old: those of ``listing`` that were there before this attempt wrote anything.
        newest_ms: the newest save time that this rank knows of, in milliseconds.
        now_ms: its clock.
        token: 16 hexadecimal digits; rank 0's become the save's.
        about: what the trainer said of the save; rank 0's counts for all nodes.
    """

    rank: int
    node: str
    host: str = ""
    tag: str = ""
    root: str = "."
    error: str = ""
    claims: Mapping[str, int] = field(default_factory=dict)
    listing: Mapping[str, int] = field(default_factory=dict)
    old: frozenset[str] = frozenset()
    newest_ms: int = 0
    now_ms: int = 0
    token: str = ""
    about: About = field(default_factory=About)


@dataclass(frozen=True)
class Plan:
    """Who uploads and who hashes what in one save.

    Attributes:
        save_id: of this save.
        tag: of this save.
        time_ms: its time; later than any that a rank knows of.
        owners: path to the node that uploads it.
        hashers: node to path to the rank that protects and hashes that node's copy.
        about: what the trainer said of the save, the same for all nodes.
    """

    save_id: str
    tag: str
    time_ms: int
    owners: Mapping[str, str]
    hashers: Mapping[str, Mapping[str, int]]
    about: About

    @property
    def nodes(self) -> list[str]:
        """Nodes that upload at least one file, sorted."""
        return sorted(set(self.owners.values()))

    def work_of(self, node: str, rank: int) -> list[str]:
        """Paths that one rank protects and hashes, sorted."""
        return sorted(path for path, by in self.hashers.get(node, {}).items() if by == rank)

    def elsewhere(self, node: str) -> list[str]:
        """Paths that only other nodes hold, sorted."""
        held = self.hashers.get(node, {})
        return sorted(path for path in self.owners if path not in held)


def make_plan(reports: Sequence[Report]) -> Plan:
    """The plan of one save; ``reports`` in order of rank.

    Raises:
        NotPublishedError: a rank failed, tags differ, or there are no files.
    """
    problems = [f"rank {report.rank}: {report.error}" for report in reports if report.error]
    if not problems:
        problems = _disagreements(reports)
    if problems:
        raise NotPublishedError("; ".join(problems[:8]) + (" ..." if len(problems) > 8 else ""))

    by_node: dict[str, list[Report]] = {}
    for report in reports:
        by_node.setdefault(report.node, []).append(report)
    # An old file counts only if nobody wrote it anew: it may be what a node was restored with.
    anew = {path for report in reports for path in report.listing if path not in report.old}
    hashers: dict[str, dict[str, int]] = {}
    candidates: dict[str, list[tuple[bool, int, str]]] = {}
    for node, members in by_node.items():
        claimed: dict[str, int] = {}
        for report in members:
            for path in report.claims:
                claimed.setdefault(path, report.rank)
        for path, rank in claimed.items():
            candidates.setdefault(path, []).append((False, rank, node))
        hashers[node] = claimed
        for report in members:
            unclaimed = {
                path: size
                for path, size in report.listing.items()
                if path not in claimed and not (path in report.old and path in anew)
            }
            for path in unclaimed:
                candidates.setdefault(path, []).append((True, report.rank, node))
            claimed |= _share_out(unclaimed, report.host, members)
    if not candidates:
        raise NotPublishedError(
            f"no file of tag {reports[0].tag!r} was found: pass the save_dir that "
            "save_checkpoint was given, or the folder that was written"
        )
    time_ms = max(reports[0].now_ms, *(report.newest_ms + 1 for report in reports))
    return Plan(
        save_id=f"{time_ms:012x}-{reports[0].token}",
        tag=reports[0].tag,
        time_ms=time_ms,
        owners={path: min(held)[2] for path, held in candidates.items()},
        hashers=hashers,
        about=reports[0].about,
    )


def _disagreements(reports: Sequence[Report]) -> list[str]:
    tags: dict[str, list[int]] = {}
    roots: dict[str, set[str]] = {}
    for report in reports:
        tags.setdefault(report.tag, []).append(report.rank)
        roots.setdefault(report.node, set()).add(report.root)
    if len(tags) > 1:
        said = ", ".join(f"{tag!r} on ranks {ranks[:8]}" for tag, ranks in list(tags.items())[:8])
        return [f"the ranks saved under different tags: {said}"]
    return [
        f"the ranks of node {node} saved into different folders: {sorted(found)}"
        for node, found in roots.items()
        if len(found) > 1
    ]


def _share_out(paths: Mapping[str, int], host: str, members: Sequence[Report]) -> dict[str, int]:
    """Spread files that no rank claims over the machine whose rank lists them, largest first.

    Only that machine: on a network filesystem another one may not see a fresh file yet.
    """
    load = {report.rank: 0 for report in members if report.host == host}
    for report in members:
        if report.rank in load:
            load[report.rank] = sum(report.claims.values())
    shares: dict[str, int] = {}
    for path, size in sorted(paths.items(), key=lambda item: (-item[1], item[0])):
        rank = min(load, key=lambda candidate: (load[candidate], candidate))
        shares[path] = rank
        load[rank] += size
    return shares
