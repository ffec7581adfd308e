"""Choose the steps at which nodes hash their state, and find replicas that have diverged.

The hash of a node's state is its *digest*. Nodes have different budgets and must send digests of common
steps. So intervals are powers of two: an interval divides every larger one. If a heartbeat can carry only one
of several steps, it carries the one that is divisible by the highest power of two (`choose_common_step`).

A difference proves that a node is wrong, but not which. A strict majority of all members with equal digests
is right; every other node is wrong. Without a strict majority no node is named. The job ends in either case,
because the wrong node's gradients are in every node's average.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, NewType

from elastic_resume.policy.checkpoint_interval import MAX_OVERHEAD_SHARE, IntervalSetting

MAX_DIGEST_INTERVAL = 1 << 30

Digest = NewType("Digest", str)  # hash of a node's whole state: 128 bits in lower-case hexadecimal
_DIGEST_PATTERN = re.compile(r"[0-9a-f]{32}")


def digest_interval_steps(
    setting: IntervalSetting, *, cost_s: float | None, step_s: float | None, cores: float = 1.0
) -> int:
    """Return the steps between two digests for check-replicas; 0 means none.

    ``cost_s`` is processor seconds per digest and ``step_s`` seconds per step, None before they are measured.
    ``auto`` is the smallest power of two at which digests take at most `MAX_OVERHEAD_SHARE` of the time of
    the ``cores``. Before anything is measured it is 1, so different initial states are found at once.
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
    """Whether the snapshot of that step is digested."""
    return interval_steps > 0 and step > 0 and step % interval_steps == 0


def choose_common_step(first: int, second: int) -> int:
    """Return the step that more nodes send: the one divisible by the higher power of two, else the newer."""
    return max(first, second, key=lambda step: (step & -step, step))


def is_digest(value: Any) -> bool:
    """Whether the text is a `Digest`."""
    return isinstance(value, str) and _DIGEST_PATTERN.fullmatch(value) is not None


@dataclass(frozen=True, slots=True)
class DivergenceVerdict:
    """How the digests of one step differ.

    Each group holds the nodes with one digest, the largest group first. Without a strict majority no node is
    ``diverged``. ``agreed_step`` is the newest step at which all were equal, 0 if there was none.
    """

    step: int
    agreed_step: int
    groups: tuple[tuple[str, ...], ...]
    diverged: tuple[str, ...] = ()


def find_diverged_nodes(
    groups: Collection[Sequence[str]], num_nodes: int, *, step: int, agreed_step: int = 0
) -> DivergenceVerdict:
    """Find the nodes outside a strict majority of all ``num_nodes`` members."""
    ordered = sorted(map(tuple, groups), key=len, reverse=True)
    has_majority = 2 * len(ordered[0]) > num_nodes
    diverged = tuple(name for group in ordered[1:] for name in group) if has_majority else ()
    return DivergenceVerdict(step, agreed_step, tuple(ordered), diverged)
