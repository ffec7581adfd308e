"""Decide from the digests of one computation which rank computes wrongly.

All ranks have computed the same with the same inputs, those in doubt several times. Ranks are compared with
those on devices of the same kind only: others round differently.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum


@dataclass(frozen=True, slots=True)
class RankResult:
    """What one rank has computed: a digest of each time, and the kind of its device."""

    digests: tuple[str, ...]
    device: str = ""

    @property
    def is_stable(self) -> bool:
        """Whether it has computed the same each time."""
        return len(set(self.digests)) == 1


class Outcome(Enum):
    """What a comparison shows."""

    EQUAL = "equal"
    ODD = "odd"
    """Some ranks differ from a strict majority."""
    UNKNOWN = "unknown"
    """Ranks differ, and there is no majority."""
    UNSTABLE = "unstable"
    """Most ranks differ from themselves: the model is not deterministic here."""
    ALL_DIFFERENT = "all different"
    """Three ranks or more, each with its own result: the model depends on the rank."""


@dataclass(frozen=True, slots=True)
class ComputeComparison:
    """The outcome, and the ranks that it concerns: the odd ones, or those without a majority.

    ``majority`` has for each odd rank one with the right result.
    """

    outcome: Outcome
    ranks: tuple[int, ...] = ()
    majority: Mapping[int, int] = field(default_factory=dict)


def needs_repeat(results: Sequence[RankResult]) -> bool:
    """Whether ranks differ that should not, so that all compute again."""
    groups = _group(results)
    return any(len({digest for rank in group for digest in results[rank].digests}) > 1 for group in groups)


def compare(results: Sequence[RankResult], unstable_before: Collection[int] = ()) -> ComputeComparison:
    """Compare the ranks' results.

    ``unstable_before`` are the ranks that were odd and differed from themselves in earlier checks. If such
    ranks change, chance chooses them: the model is rarely deterministic, and no machine is to blame.
    """
    odd: dict[int, int] = {}
    unknown: list[int] = []
    for group in _group(results):
        unstable = [rank for rank in group if not results[rank].is_stable]
        if 2 * len(unstable) > len(group):
            return ComputeComparison(Outcome.UNSTABLE, tuple(unstable))
        counts = Counter(results[rank].digests[0] for rank in group if results[rank].is_stable)
        ((digest, count),) = counts.most_common(1)
        if 2 * count > len(group):
            agreeing = [rank for rank in group if set(results[rank].digests) == {digest}]
            odd |= {rank: agreeing[0] for rank in group if rank not in agreeing}
        elif len(counts) == len(group) > 2:
            return ComputeComparison(Outcome.ALL_DIFFERENT, tuple(group))
        else:
            unknown += group
    if odd:
        unstable = [rank for rank in odd if not results[rank].is_stable]
        if unstable and set(unstable_before) - set(unstable):
            return ComputeComparison(Outcome.UNSTABLE, tuple(unstable))
        return ComputeComparison(Outcome.ODD, tuple(sorted(odd)), odd)
    if unknown:
        return ComputeComparison(Outcome.UNKNOWN, tuple(sorted(unknown)))
    return ComputeComparison(Outcome.EQUAL)


def _group(results: Sequence[RankResult]) -> list[list[int]]:
    """Return the ranks on devices of each kind."""
    groups: dict[str, list[int]] = {}
    for rank, result in enumerate(results):
        groups.setdefault(result.device, []).append(rank)
    return list(groups.values())
