"""Find the first value that differs between ranks, without sending tensors.

Ranks gather one digest of all their values. Only if those differ, rank 0 broadcasts its names and digests,
and every rank reports the first that it holds differently. The callers decide what a difference means.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from torch.optim import Optimizer

from elastic_resume.checkpoint import json_codec
from elastic_resume.checkpoint.json_codec import TensorRef
from elastic_resume.errors import DivergenceError
from elastic_resume.ranks.rank_context import RankContext
from elastic_resume.state import state_dict
from elastic_resume.state.open_checkpoint import iter_leaves
from elastic_resume.state.state_dict import BUFFER, EMA_NAME, REPLICATED, SCRIPT_OWNED, Leaf

MAX_NAMED_GROUPS, MAX_NAMED_RANKS = 4, 8  # limits in a message, so that a thousand ranks make one line


@dataclass(frozen=True)
class RankDifference:
    """The first name under which ranks hold different values."""

    name: str
    ranks_text: str  # for example "rank 0, 2 against rank 1"
    digest_by_rank: tuple[str, ...]  # each rank's digest of all values


def find_first_difference(
    context: RankContext, compute: Callable[[], Mapping[str, str]]
) -> RankDifference | None:
    """Compare named values (digests, say) over all ranks; return None if names, order and values are equal.

    Every rank calls it at the same time, and all get the same answer. If ``compute`` fails on one rank, all
    raise.
    """
    collectives = context.collectives

    def combine() -> tuple[Mapping[str, str], str]:
        own = compute()
        return own, state_dict.combine_digests({"": list(own.items())})

    values, digests = context.run_and_gather(combine)
    if len(set(digests)) == 1:
        return None
    items_of_rank_0 = collectives.broadcast_json(list(values.items()), 0)
    first_by_rank = collectives.gather(_first_difference_from(items_of_rank_0, values))
    _, name = min(first for first in first_by_rank if first is not None)
    value_by_rank = collectives.gather(values.get(name))
    if len(set(value_by_rank)) == 1:  # the order of the names differs
        value_by_rank = digests
    return RankDifference(name, describe_groups(value_by_rank), tuple(digests))


def _first_difference_from(reference: list[list[str]], values: Mapping[str, str]) -> tuple[int, str] | None:
    """Return the index and name of the first value that ``reference`` lacks or holds differently."""
    for index, (theirs, own) in enumerate(zip_longest(reference, values.items())):
        if theirs is not None and values.get(theirs[0]) != theirs[1]:
            return index, theirs[0]
        if theirs is None or own[0] != theirs[0]:
            return index, own[0]
    return None


def describe_groups(value_by_rank: list[Any]) -> str:
    """Return the groups of ranks with equal values, as ``rank 0, 2 against rank 1``."""
    groups: dict[Any, list[int]] = {}
    for rank, value in enumerate(value_by_rank):
        groups.setdefault(value, []).append(rank)
    more = f" and {len(groups) - MAX_NAMED_GROUPS} other values" if len(groups) > MAX_NAMED_GROUPS else ""
    named = list(groups.values())[:MAX_NAMED_GROUPS]
    return " against ".join(_describe_ranks(ranks) for ranks in named) + more


def _describe_ranks(ranks: list[int]) -> str:
    more = f" and {len(ranks) - MAX_NAMED_RANKS} more" if len(ranks) > MAX_NAMED_RANKS else ""
    return f"rank {', '.join(map(str, ranks[:MAX_NAMED_RANKS]))}{more}"


def require_equal(context: RankContext, tracked: Mapping[str, Any], step: int) -> None:
    """Raise on all ranks unless all hold the same state; see `Run.assert_ranks_equal`."""
    if context.collectives.size == 1:
        return
    difference = find_first_difference(context, lambda: _digest_replicated_state(tracked))
    if difference is not None:
        raise DivergenceError(
            f"ranks hold different values of {difference.name!r} after step {step} "
            f"({difference.ranks_text}). Look for something that one rank alone does: weights changed "
            "outside optimizer.step(), a backward pass that bypasses the DDP module or stays in no_sync(), a "
            "scheduler that follows a rank's own loss."
        )


def _digest_replicated_state(tracked: Mapping[str, Any]) -> dict[str, str]:
    """Digest, by name, the state that data-parallel training keeps equal on all ranks.

    Hyperparameters belong to it: a different learning rate makes different weights one step later.
    """
    flat = state_dict.flatten(tracked)
    values = state_dict.digest_leaves(leaf for leaf in flat.leaves if _is_compared(leaf))
    for name, item in tracked.items():
        if isinstance(item, Optimizer):
            for path, value in iter_leaves(json_codec.decode(flat.structure[name]), name):
                if not isinstance(value, TensorRef):
                    values[path] = state_dict.combine_digests({"": json_codec.encode(value)})
    return values


def _is_compared(leaf: Leaf) -> bool:
    if leaf.kind == SCRIPT_OWNED:  # an average of equal weights is equal, in whatever object it is
        return leaf.name.split("/")[0].split(".")[0] == EMA_NAME
    return leaf.kind in {REPLICATED, BUFFER}
