"""Find the first value that differs between ranks, without sending tensors.

Ranks first gather one digest of all values. If those differ, a binary search over prefixes of the names finds
the first difference: about twenty short messages for a million tensors. The callers decide what a difference
means.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from torch.optim import Optimizer

from elastic_resume.checkpoint import json_codec
from elastic_resume.checkpoint.json_codec import TensorRef
from elastic_resume.errors import DivergenceError
from elastic_resume.restore.rank_context import RankContext
from elastic_resume.state import state_dict
from elastic_resume.state.state_dict import BUFFER, EMA_NAME, REPLICATED, SCRIPT_OWNED, Leaf

MAX_NAMED_GROUPS, MAX_NAMED_RANKS = 4, 8  # in a message; a thousand different ranks still make one line


class Gatherer(Protocol):
    """The part of `Collectives` that the search needs."""

    def gather(self, value: Any) -> list[Any]:
        """Return every rank's value, by rank. Every rank calls it at the same time."""


@dataclass(frozen=True)
class Difference:
    """The first name under which ranks hold different values."""

    name: str
    ranks_text: str  # as "rank 0, 2 against rank 1"
    digest_by_rank: tuple[str, ...]  # each rank's digest of all values


def find_first_difference(collectives: Gatherer, values: Mapping[str, str]) -> Difference | None:
    """Compare named values (digests, say) over all ranks; return None if names, order and values are equal.

    Every rank calls it at the same time, and all get the same answer.
    """
    names = list(values)
    summaries = collectives.gather([len(names), _digest_prefix(len(names), names, values)])
    if all(summary == summaries[0] for summary in summaries):
        return None
    digests = tuple(str(digest) for _, digest in summaries)
    equal, unequal = 0, max(int(length) for length, _ in summaries)
    while (
        unequal - equal > 1
    ):  # prefixes of length `equal` are equal on all ranks, those of `unequal` are not
        middle = (equal + unequal) // 2
        same = len(set(collectives.gather(_digest_prefix(middle, names, values)))) == 1
        equal, unequal = (middle, unequal) if same else (equal, middle)
    name_by_rank = collectives.gather(names[equal] if equal < len(names) else None)
    candidates = list(dict.fromkeys(name for name in name_by_rank if name is not None))
    values_by_rank = collectives.gather([values.get(name) for name in candidates])
    for index, name in enumerate(candidates):
        value_by_rank = [rank_values[index] for rank_values in values_by_rank]
        if len(set(value_by_rank)) > 1:
            return Difference(name, describe_groups(value_by_rank), digests)
    # The values are equal, and the order of the names differs.
    return Difference(candidates[0], describe_groups(name_by_rank), digests)


def _digest_prefix(count: int, names: list[str], values: Mapping[str, str]) -> str:
    """Digest the first ``count`` names and values. A rank with fewer names equals no rank with more."""
    digest = hashlib.sha256(b"" if count <= len(names) else b"the end ")
    for name in names[:count]:
        digest.update(f"{len(name)} {name} {len(values[name])} {values[name]} ".encode())
    return digest.hexdigest()


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


# ---- `Run.assert_ranks_equal` ------------------------------------------------------------------------


def require_equal(context: RankContext, tracked: Mapping[str, Any], step: int, *, buffers: bool) -> None:
    """Raise on all ranks unless all hold the same state; see `Run.assert_ranks_equal`."""
    if context.collectives.size == 1:
        return
    values = context.run_on_all_ranks(lambda: digest_replicated_state(tracked, buffers=buffers))
    difference = find_first_difference(context.collectives, values)
    if difference is not None:
        raise DivergenceError(
            f"ranks hold different values of {difference.name!r} after step {step} "
            f"({difference.ranks_text}). Look for something that one rank alone does: weights changed "
            "outside optimizer.step(), a backward pass that bypasses the DDP module or stays in no_sync(), a "
            "scheduler that follows a rank's own loss."
        )


def digest_replicated_state(tracked: Mapping[str, Any], *, buffers: bool) -> dict[str, str]:
    """Digest, by name, the state that data-parallel training keeps equal on all ranks.

    Hyperparameters belong to it: a different learning rate makes different weights one step later.
    """
    flat = state_dict.flatten(tracked)
    values = state_dict.digest_leaves(leaf for leaf in flat.leaves if _is_compared(leaf, buffers=buffers))
    for name, item in tracked.items():
        if isinstance(item, Optimizer):
            values.update(_digest_plain_values(name, json_codec.decode(flat.skeleton[name])))
    return values


def _is_compared(leaf: Leaf, *, buffers: bool) -> bool:
    if leaf.kind == SCRIPT_OWNED:  # an average of equal weights is equal, in whatever object it is
        return leaf.name.split("/")[0].split(".")[0] == EMA_NAME
    return leaf.kind == REPLICATED or (buffers and leaf.kind == BUFFER)


def _digest_plain_values(path: str, value_tree: Any) -> Iterator[tuple[str, str]]:
    """Digest the values in an optimizer's state dict that are not tensors."""
    if isinstance(value_tree, dict):
        for key, value in value_tree.items():
            yield from _digest_plain_values(f"{path}/{key}", value)
    elif isinstance(value_tree, list) and any(isinstance(value, dict) for value in value_tree):
        for index, value in enumerate(value_tree):
            yield from _digest_plain_values(f"{path}/{index}", value)
    elif not isinstance(value_tree, TensorRef):
        yield path, state_dict.combine_digests({"": json_codec.encode(value_tree)})
