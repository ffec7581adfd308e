"""The ledger of checkpoints: every copy that the run's events tell of, by node, step and tier.

A copy in memory is known only where a generation began with it; one on disk from its commit to the moment
when it was pruned, set aside, or lost with its node's disk. What lies on disk now, where somebody has looked
(`checkpoints.Item`), wins over what events say. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePath

from elastic_resume.report.checkpoints import Item
from elastic_resume.report.incidents import Report
from elastic_resume.report.timeline import Seen, Timeline
from elastic_resume.store.checkpoint import parse_name

MEMORY, DISK = "memory", "disk"
COMMITTED, PRUNED, QUARANTINED, LOST, VALID, BAD, USED = (
    "committed",
    "pruned",
    "quarantined",
    "lost",
    "valid",
    "bad",
    "used",
)


@dataclass(frozen=True)
class Copy:
    """One copy of the state.

    ``state``: committed (as events tell; nobody has looked), valid or bad (somebody has), pruned,
    quarantined, lost (with its node's disk), or used (a snapshot in memory that a generation began with).
    ``verified``: a generation read its every byte, or has made it from verified ones. ``loaded_by`` are the
    generations that began with it. ``t``: when it was there; ``gone``: when not any more.
    """

    node: str
    generation: int
    step: int
    tier: str
    state: str
    verified: bool
    loaded_by: tuple[int, ...] = ()
    t: float | None = None
    gone: float | None = None
    bytes: int | None = None
    seconds: float | None = None
    reason: str = ""


def of(line: Timeline, report: Report, items: Sequence[Item] = ()) -> tuple[Copy, ...]:
    """All copies, by generation, step, node and tier. ``items``: what lies on disk now."""
    copies: dict[tuple[str, int, int, str], Copy] = {}
    for one in line.of_kind("commit", "prune", "quarantine"):
        if one.kind == "commit":
            _commit(copies, one)
        else:
            _gone(copies, one)
    _loaded(copies, line, report)
    _look(copies, items)
    return tuple(sorted(copies.values(), key=lambda copy: (copy.generation, copy.step, copy.node, copy.tier)))


def _commit(copies: dict[tuple[str, int, int, str], Copy], one: Seen) -> None:
    if one.generation is None or one.step is None:
        return
    copies[one.node, one.generation, one.step, DISK] = Copy(
        one.node,
        one.generation,
        one.step,
        DISK,
        COMMITTED,
        verified=False,
        t=one.t,
        bytes=one.count("bytes"),
        seconds=one.seconds("seconds"),
    )


def _gone(copies: dict[tuple[str, int, int, str], Copy], one: Seen) -> None:
    """Pruned, or set aside; a second one of the same name in quarantine is NAME.1."""
    order = parse_name(PurePath(one.text("path")).name.partition(".")[0])
    if order is None:
        return
    key = (one.node, *order, DISK)
    known = copies.get(key, Copy(one.node, *order, DISK, COMMITTED, verified=False))
    state = PRUNED if one.kind == "prune" else QUARANTINED
    copies[key] = replace(known, state=state, gone=one.t, reason=one.text("reason"))


def _loaded(copies: dict[tuple[str, int, int, str], Copy], line: Timeline, report: Report) -> None:
    resumes = {one.generation: one for one in line.of_kind("resume")}
    for row in report.generations:
        one = resumes.get(row.number)
        if one is None or not row.source_node or row.source_generation is None or row.start_step is None:
            continue
        tier = one.text("source_tier")
        if row.resumed != "checkpoint" or tier not in {MEMORY, DISK}:
            continue
        key = (row.source_node, row.source_generation, row.start_step, tier)
        made = Copy(*key, USED if tier == MEMORY else COMMITTED, verified=True, t=one.t)
        known = copies.get(key, made)
        copies[key] = replace(known, verified=True, loaded_by=(*known.loaded_by, row.number))


def _look(copies: dict[tuple[str, int, int, str], Copy], items: Iterable[Item]) -> None:
    seen = set()
    looked = set()
    for item in items:
        looked.add(item.node)
        if item.generation is None or item.step is None:
            continue
        key = (item.node, item.generation, item.step, DISK)
        if key in seen and item.state == QUARANTINED:  # what has taken its place is there
            key = (*key[:3], f"{DISK}, {item.path.name} set aside")
        made = Copy(*key[:3], DISK, COMMITTED, verified=False, t=item.written_at, bytes=item.bytes)
        known = copies.get(key, made)
        copies[key] = replace(known, state=item.state, reason=item.reason, bytes=known.bytes or item.bytes)
        seen.add(key)
    for key, copy in copies.items():
        if copy.node in looked and copy.tier == DISK and copy.state == COMMITTED and key not in seen:
            copies[key] = replace(copy, state=LOST, reason="it is not on the disk any more")
