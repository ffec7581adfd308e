"""Decide at which steps nodes digest their state, and who is wrong when the digests differ. Pure.

Nodes have different budgets and heartbeats and must send digests of common steps, so everything prefers
powers of two: a gap that `gap` gives divides every larger one, and of the steps that wait for one heartbeat
`rounder` keeps the one that is divisible by the highest power of two. If no heartbeat has to choose among
steps further apart than 2**k, every node sends the digests of all multiples of 2**k.

Copies that differ prove that somebody is wrong, and not who. A strict majority of all members that holds the
same bytes has not failed alike by chance; whoever differs from it is wrong. Two nodes, or two halves, name
nobody. What one replica computed wrongly has been in everybody's averaged gradients since: the majority is
equal and can go on, which does not make it what an undisturbed run would have come to.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, NewType

from elastic_resume.policy.checkpoint_interval import LARGEST_SHARE, Every
from elastic_resume.policy.failure_classification import plain

STOP, RESUME = "stop", "resume-from-majority"
"""What ``--on-divergence`` may be."""
LARGEST_GAP = 1 << 30
UNLIKE_MACHINES = (
    "Machines of different kinds round differently: with --check-replicas off they go on, and one node's "
    "values count at each resume."
)
NAMED = 4
"""So many nodes of one side are named in a sentence."""
_MAX_NAME = 200

Digest = NewType("Digest", str)
"""Of a node's whole state: 128 bits in hexadecimal, lower case."""

_DIGEST = re.compile(r"[0-9a-f]{32}")


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


def is_digest(value: Any) -> bool:
    """Whether that is a `Digest`."""
    return isinstance(value, str) and _DIGEST.fullmatch(value) is not None


@dataclass(frozen=True, slots=True)
class Verdict:
    """How the digests of one step differ.

    ``camps`` are the nodes that hold the same, the largest camp first. ``wrong`` are those outside a strict
    majority; none where there is no such majority. ``agreed_step`` is the newest step at which all were
    equal, 0 where none was.
    """

    step: int
    agreed_step: int
    camps: tuple[tuple[str, ...], ...]
    wrong: tuple[str, ...] = ()


def judge(camps: Collection[Sequence[str]], members: int, *, step: int, agreed_step: int = 0) -> Verdict:
    """Name who is wrong. ``camps`` hold the same each, and ``members`` is how many nodes there are in all."""
    ordered = sorted(map(tuple, camps), key=len, reverse=True)
    strict = 2 * len(ordered[0]) > members
    wrong = tuple(name for camp in ordered[1:] for name in camp) if strict else ()
    return Verdict(step, agreed_step, tuple(ordered), wrong)


def summary(verdict: Verdict) -> str:
    """Say who differs from whom, in one clause."""
    if verdict.wrong:
        verb = "is" if len(verdict.wrong) == 1 else "are"
        told = f"{_nodes(verdict.wrong)} {verb} not as {_nodes(next(iter(verdict.camps), ()))}, the majority"
    else:
        told = " against ".join(_nodes(camp) for camp in verdict.camps[:NAMED])
    return f"replicas differ at step {verdict.step}: {told}"


def describe(verdict: Verdict, *, goes_on: bool = False) -> str:
    """Say to people who differs from whom, and what happens next (``goes_on``) or is to be done."""
    agreed = verdict.agreed_step
    since = f"all were equal at step {agreed}" if agreed else "no step of this generation was seen equal"
    if goes_on:
        then = f"The majority's state counts, and no later copy of the others does ({since})."
    elif verdict.wrong:
        then = (
            f"Look at what that machine computes (memory, device), or at what the script does only there "
            f"({since}). Start again without it. With --on-divergence {RESUME} the job goes on by itself. "
            f"{UNLIKE_MACHINES}"
        )
    else:
        then = (
            f"There is no majority to say who is wrong ({since}). Look for what nodes do not share: random "
            "numbers, samples, a broken device, state that changes between run.step() and optimizer.step() "
            "(run.verify_copies finds it). To go on from an older checkpoint move the newer ones elsewhere. "
            f"{UNLIKE_MACHINES}"
        )
    tensors = "" if goes_on else " `elastic-resume diff` of two nodes' checkpoints names the tensors."
    return f"{summary(verdict)}. {then}{tensors}"


def _nodes(names: Sequence[str]) -> str:
    words = [plain(name, _MAX_NAME) for name in names[:NAMED]]
    words += [f"{len(names) - NAMED} more"] if len(names) > NAMED else []
    listed = " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)
    return ("node " if len(names) == 1 else "nodes ") + listed
