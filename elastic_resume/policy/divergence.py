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

from elastic_resume.policy.checkpoint_interval import MAX_OVERHEAD_SHARE, IntervalSetting
from elastic_resume.policy.failure_classification import to_printable

STOP, RESUME_FROM_MAJORITY = "stop", "resume-from-majority"
"""What ``--on-divergence`` may be."""
MAX_DIGEST_INTERVAL = 1 << 30
MIXED_HARDWARE_HINT = (
    "Machines of different kinds round differently: with --check-replicas off they go on, and one node's "
    "values count at each resume."
)
MAX_NAMED = 4
"""So many nodes of one side are named in a sentence."""
_MAX_NAME = 200

Digest = NewType("Digest", str)
"""Of a node's whole state: 128 bits in hexadecimal, lower case."""

_DIGEST_PATTERN = re.compile(r"[0-9a-f]{32}")


def digest_interval_steps(
    setting: IntervalSetting, *, cost_s: float | None, step_s: float | None, cores: float = 1.0
) -> int:
    """Give the steps between two digests; 0: none are made.

    Args:
        every: the setting. A number of steps is given back: it means its multiples.
        cost_s: CPU seconds that one digest takes; None before one was made.
        step_s: seconds that a step takes; None before one was measured.
        cores: that this node may use.

    ``auto`` is the smallest power of two with which digesting takes at most `LARGEST_SHARE` of the cores'
    time. Before anything is measured that is 1: nodes that begin unequal are found at their first step.

    """
    if setting.is_off:
        return 0
    if setting.steps is not None:
        return setting.steps
    if cost_s is None or step_s is None or not (cost_s > 0 and step_s > 0):
        return 1
    budget_s = MAX_OVERHEAD_SHARE * step_s * max(1.0, cores)
    if not cost_s < MAX_DIGEST_INTERVAL * budget_s:
        return MAX_DIGEST_INTERVAL
    return 1 << max(0, math.ceil(cost_s / budget_s) - 1).bit_length()


def is_digest_due(step: int, interval_steps: int) -> bool:
    """Whether the copy of that step is to be digested."""
    return interval_steps > 0 and step > 0 and step % interval_steps == 0


def choose_common_step(first: int, second: int) -> int:
    """Of two steps the one that more nodes tell of: the rounder in binary, else the newer."""
    return max(first, second, key=lambda step: (step & -step, step))


def is_digest(value: Any) -> bool:
    """Whether that is a `Digest`."""
    return isinstance(value, str) and _DIGEST_PATTERN.fullmatch(value) is not None


@dataclass(frozen=True, slots=True)
class DivergenceVerdict:
    """How the digests of one step differ.

    ``camps`` are the nodes that hold the same, the largest camp first. ``wrong`` are those outside a strict
    majority; none where there is no such majority. ``agreed_step`` is the newest step at which all were
    equal, 0 where none was.
    """

    step: int
    agreed_step: int
    groups: tuple[tuple[str, ...], ...]
    diverged: tuple[str, ...] = ()


def find_diverged_nodes(
    groups: Collection[Sequence[str]], num_nodes: int, *, step: int, agreed_step: int = 0
) -> DivergenceVerdict:
    """Name who is wrong. ``camps`` hold the same each, and ``members`` is how many nodes there are in all."""
    ordered = sorted(map(tuple, groups), key=len, reverse=True)
    strict = 2 * len(ordered[0]) > num_nodes
    wrong = tuple(name for camp in ordered[1:] for name in camp) if strict else ()
    return DivergenceVerdict(step, agreed_step, tuple(ordered), wrong)


def summarize_divergence(verdict: DivergenceVerdict) -> str:
    """Say who differs from whom, in one clause."""
    if verdict.diverged:
        verb = "is" if len(verdict.diverged) == 1 else "are"
        told = f"{_format_nodes(verdict.diverged)} {verb} not as {_format_nodes(next(iter(verdict.groups), ()))}, the majority"
    else:
        told = " against ".join(_format_nodes(camp) for camp in verdict.groups[:MAX_NAMED])
    return f"replicas differ at step {verdict.step}: {told}"


def describe_divergence(verdict: DivergenceVerdict, *, continues: bool = False) -> str:
    """Say to people who differs from whom, and what happens next (``goes_on``) or is to be done."""
    agreed = verdict.agreed_step
    since = f"all were equal at step {agreed}" if agreed else "no step of this generation was seen equal"
    if continues:
        then = f"The majority's state counts, and no later copy of the others does ({since})."
    elif verdict.diverged:
        then = (
            f"Look at what that machine computes (memory, device), or at what the script does only there "
            f"({since}). Start again without it. With --on-divergence {RESUME_FROM_MAJORITY} the job goes on by itself. "
            f"{MIXED_HARDWARE_HINT}"
        )
    else:
        then = (
            f"There is no majority to say who is wrong ({since}). Look for what nodes do not share: random "
            "numbers, samples, a broken device, state that changes between run.step() and optimizer.step() "
            "(run.verify_copies finds it). To go on from an older checkpoint move the newer ones elsewhere. "
            f"{MIXED_HARDWARE_HINT}"
        )
    tensors = "" if continues else " `elastic-resume diff` of two nodes' checkpoints names the tensors."
    return f"{summarize_divergence(verdict)}. {then}{tensors}"


def _format_nodes(names: Sequence[str]) -> str:
    words = [to_printable(name, _MAX_NAME) for name in names[:MAX_NAMED]]
    words += [f"{len(names) - MAX_NAMED} more"] if len(names) > MAX_NAMED else []
    listed = " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)
    return ("node " if len(names) == 1 else "nodes ") + listed
