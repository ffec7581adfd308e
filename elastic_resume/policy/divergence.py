"""Replicas that must be equal: at which steps they are compared, and who is wrong when they differ. Pure.

Each node digests its own copy of some steps, and a heartbeat carries one digest at most. Nodes have different
budgets and heartbeats, and yet must tell of common steps, so everything prefers powers of two: a gap that
`gap` gives divides every larger one, and of the steps that wait for the same heartbeat `rounder` keeps the
one that is divisible by the highest power of two. So if no heartbeat has to choose among steps further apart
than 2**k, every multiple of 2**k is told by all.

**Who is wrong.** Copies that differ prove that somebody is wrong, and not who. A strict majority that holds
the same bytes has not failed alike by chance; whoever differs from it is wrong. Two nodes, or two halves,
name nobody. What one replica computed wrongly has been in everybody's averaged gradients since: the majority
is equal and can go on, which does not make it what an undisturbed run would have come to.

Does not know how a state is digested, nor how nodes talk (`rendezvous.comparing`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NewType

from elastic_resume.policy.cadence import LARGEST_SHARE, Every
from elastic_resume.policy.failures import plain

STOP, RESUME = "stop", "resume-from-majority"
"""What ``--on-divergence`` may be."""
LARGEST_GAP = 1 << 30
MAX_GROUPS = 4096
"""Digests with which a node explains its state: 64 kB. Beyond so many tensors, neighbours share one."""
FIRST = 8
"""So many differing tensors are told of."""
UNLIKE_MACHINES = (
    "Machines of different kinds round differently: with --check-replicas off they go on, and one node's "
    "values count at each resume."
)
NAMED = 4
"""So many tensors, and nodes of one side, are named in a sentence."""
_MAX_NAME = 200

Digest = NewType("Digest", str)
"""Of a node's whole state: 128 bits in hexadecimal, lower case."""
Groups = NewType("Groups", tuple[str, ...])
"""Of a state's tensors in their order, or of groups of them (`span`): 64 bits each; empty: not known."""

_DIGEST = re.compile(r"[0-9a-f]{32}")
_GROUP_DIGITS = 16
_HEX = frozenset("0123456789abcdef")


# ---- at which steps ------------------------------------------------------------------------------------


def gap(every: Every, *, cost_s: float | None, step_s: float | None, cores: float = 1.0) -> int:
    """Give the steps between two digests; 0: none are made.

    Args:
        every: the setting. A number of steps is given back: it means its multiples.
        cost_s: CPU seconds that one digest takes; None before one was made.
        step_s: seconds that a step takes; None before one was measured.
        cores: that this node may use.

    ``auto`` is the smallest power of two with which digesting takes at most `LARGEST_SHARE` of the cores'
    time. Before anything is measured that is 1: nodes that begin unequal are found at their first step.

    """
    if every.off:
        return 0
    if every.steps is not None:
        return every.steps
    if cost_s is None or step_s is None or not (cost_s > 0 and step_s > 0):
        return 1
    budget_s = LARGEST_SHARE * step_s * max(1.0, cores)
    if not cost_s < LARGEST_GAP * budget_s:
        return LARGEST_GAP
    return 1 << max(0, math.ceil(cost_s / budget_s) - 1).bit_length()


def due(step: int, gap: int) -> bool:
    """Whether the copy of that step is to be digested."""
    return gap > 0 and step > 0 and step % gap == 0


def rounder(one: int, other: int) -> int:
    """Of two steps the one that more nodes tell of: the rounder in binary, else the newer."""
    return max(one, other, key=lambda step: (step & -step, step))


# ---- what is told --------------------------------------------------------------------------------------


def span(tensors: int) -> int:
    """How many neighbouring tensors share one digest, where there are so many of them."""
    return max(1, -(-tensors // MAX_GROUPS))


def is_digest(value: Any) -> bool:
    """Whether that is a `Digest`."""
    return isinstance(value, str) and _DIGEST.fullmatch(value) is not None


def are_groups(value: Any) -> bool:
    """Whether that is a sequence of what makes `Groups`."""
    if not isinstance(value, (list, tuple)) or len(value) > MAX_GROUPS:
        return False
    if any(not isinstance(one, str) or len(one) != _GROUP_DIGITS for one in value):
        return False
    return _HEX.issuperset("".join(value))


# ---- who is wrong --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Verdict:
    """How nodes differ.

    ``camps`` are the nodes that hold the same, the largest camp first. ``wrong`` are those outside a strict
    majority; none where there is no such majority. ``differing`` are the first indices of tensors (or of
    groups) in which not all are equal, ``count`` is how many there are; 0: not known.
    """

    camps: tuple[tuple[str, ...], ...]
    wrong: tuple[str, ...] = ()
    differing: tuple[int, ...] = ()
    count: int = 0


def judge(prints: Mapping[str, tuple[str, ...]], members: int = 0) -> Verdict | None:
    """Compare what nodes tell of one step; None: all is equal.

    Each tells its groups, or where those are not known nothing but its digest. ``members`` is how many nodes
    there are, if more than tell: a majority is one of all.
    """
    found: dict[tuple[str, ...], list[str]] = {}
    for node, told in prints.items():
        found.setdefault(told, []).append(node)
    if len(found) < 2:
        return None
    camps = sorted(found.items(), key=lambda camp: -len(camp[1]))
    nodes = tuple(tuple(names) for _, names in camps)
    strict = 2 * len(nodes[0]) > max(members, len(prints))
    wrong = tuple(name for camp in nodes[1:] for name in camp) if strict else ()
    differing = _differing([told for told, _ in camps])
    return Verdict(nodes, wrong, tuple(differing[:FIRST]), len(differing))


def _differing(told: Sequence[tuple[str, ...]]) -> list[int]:
    """Compare groups of those that tell of equally many: of as many as any two of them do."""
    told = [one for one in told if are_groups(one)]
    lengths = [len(one) for one in told]
    shared = max((length for length in lengths if lengths.count(length) > 1), default=0)
    alike = [one for one in told if len(one) == shared]
    return [index for index, column in enumerate(zip(*alike, strict=True)) if len(set(column)) > 1]


# ---- in words ------------------------------------------------------------------------------------------


def labels(verdict: Verdict, names: Sequence[str]) -> list[str]:
    """Name the first differing tensors; ``names`` are all of them, in the order of the digests."""
    size = span(len(names))
    return [_label(index, names[index * size : (index + 1) * size]) for index in verdict.differing]


def _label(index: int, names: Sequence[str]) -> str:
    if not names:
        return f"tensor {index}"
    first, last = plain(names[0], _MAX_NAME), plain(names[-1], _MAX_NAME)
    return first if len(names) == 1 else f"{first} … {last}"


def summary(verdict: Verdict, step: int) -> str:
    """Say who differs from whom, in one clause."""
    if verdict.wrong:
        verb = "is" if len(verdict.wrong) == 1 else "are"
        told = f"{_nodes(verdict.wrong)} {verb} not as {_nodes(next(iter(verdict.camps), ()))}, the majority"
    else:
        told = " against ".join(_nodes(camp) for camp in verdict.camps[:NAMED])
    return f"replicas differ at step {step}: {told}"


def describe(
    verdict: Verdict, names: Sequence[str] = (), *, step: int, agreed: int = 0, goes_on: bool = False
) -> str:
    """Say to people who differs from whom, in what, and what happens next or is to be done.

    ``agreed`` is the newest step at which all were equal (0: none of this generation); ``goes_on``: the wrong
    ones take the majority's state.
    """
    told = labels(verdict, names)[:NAMED]
    more = max(0, verdict.count - len(told))
    where = ", which tensors is not known" if not told else f", first in {_listed(told, more)}"
    return f"{summary(verdict, step)}{where}. {_next(verdict, agreed, goes_on=goes_on)}"


def _next(verdict: Verdict, agreed: int, *, goes_on: bool) -> str:
    since = f"all were equal at step {agreed}" if agreed else "no step of this generation was seen equal"
    if goes_on:
        return f"The majority's state counts, and no later copy of the others does ({since})."
    if verdict.wrong:
        return (
            f"Look at what that machine computes (memory, device), or at what the script does only there "
            f"({since}). Start again without it. With --on-divergence {RESUME} the job goes on by itself. "
            f"{UNLIKE_MACHINES}"
        )
    return (
        f"There is no majority to say who is wrong ({since}). Look for what nodes do not share: random "
        "numbers, samples, a broken device, state that changes between run.step() and optimizer.step() "
        f"(run.verify_copies finds it). To go on from an older checkpoint move the newer ones elsewhere. "
        f"{UNLIKE_MACHINES}"
    )


def _nodes(names: Sequence[str]) -> str:
    told = [plain(name, _MAX_NAME) for name in names[:NAMED]]
    return ("node " if len(names) == 1 else "nodes ") + _listed(told, len(names) - len(told))


def _listed(told: Sequence[str], more: int) -> str:
    words = [*told, *([f"{more} more"] if more else [])]
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)
