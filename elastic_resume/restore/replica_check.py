"""Whether all ranks hold the same values, and which of them is the first that differs.

One digest of everything goes round first. Only where that differs do digests of the first half, quarter and
so on: some twenty short messages for a million tensors, which themselves never leave their rank. What follows
from a difference is for others to say.
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

MAX_NAMED_GROUPS, MAX_NAMED_RANKS = (
    4,
    8,
)  # so many are named: a thousand ranks that all differ make one line too


class Gatherer(Protocol):
    """What of a `World` is needed here: every rank's value, by rank."""

    def gather(self, value: Any) -> list[Any]:
        """Every rank calls it at the same time."""


@dataclass(frozen=True)
class Difference:
    """The first name under which ranks hold different values, and who is on which side."""

    name: str
    ranks_text: str  # in words
    digest_by_rank: tuple[str, ...]  # of all values together, by rank


def find_first_difference(collectives: Gatherer, values: Mapping[str, str]) -> Difference | None:
    """Compare named values (digests, say) between all ranks; None where they are equal, names and order too.

    Every rank calls it at the same time, and all get the same answer.
    """
    names = list(values)
    told = collectives.gather([len(names), _digest_prefix(len(names), names, values)])
    if all(one == told[0] for one in told):
        return None
    digests = tuple(str(digest) for _, digest in told)
    equal, unequal = 0, max(int(length) for length, _ in told)
    while unequal - equal > 1:  # the first `equal` are the same on all ranks, the first `unequal` are not
        middle = (equal + unequal) // 2
        same = len(set(collectives.gather(_digest_prefix(middle, names, values)))) == 1
        equal, unequal = (middle, unequal) if same else (equal, middle)
    stands_here = collectives.gather(names[equal] if equal < len(names) else None)
    candidates = list(dict.fromkeys(name for name in stands_here if name is not None))
    held = collectives.gather([values.get(name) for name in candidates])
    for index, name in enumerate(candidates):
        sides = [one[index] for one in held]
        if len(set(sides)) > 1:
            return Difference(name, describe_groups(sides), digests)
    # Each rank holds the same under each of these names, in another order.
    return Difference(candidates[0], describe_groups(stands_here), digests)


def _digest_prefix(count: int, names: list[str], values: Mapping[str, str]) -> str:
    """Digest the first ``count`` names and values; one that has fewer is like no one that has more."""
    digest = hashlib.sha256(b"" if count <= len(names) else b"the end ")
    for name in names[:count]:
        digest.update(f"{len(name)} {name} {len(values[name])} {values[name]} ".encode())
    return digest.hexdigest()


def describe_groups(value_by_rank: list[Any]) -> str:
    """Say which ranks hold the same and which do not: "rank 0, 2 against rank 1"."""
    sides: dict[Any, list[int]] = {}
    for rank, one in enumerate(value_by_rank):
        sides.setdefault(one, []).append(rank)
    more = f" and {len(sides) - MAX_NAMED_GROUPS} other values" if len(sides) > MAX_NAMED_GROUPS else ""
    return (
        " against ".join(_describe_ranks(ranks) for ranks in list(sides.values())[:MAX_NAMED_GROUPS]) + more
    )


def _describe_ranks(ranks: list[int]) -> str:
    more = f" and {len(ranks) - MAX_NAMED_RANKS} more" if len(ranks) > MAX_NAMED_RANKS else ""
    return f"rank {', '.join(map(str, ranks[:MAX_NAMED_RANKS]))}{more}"


# ---- what a script asks for --------------------------------------------------------------------------


def require_equal(context: RankContext, tracked: Mapping[str, Any], step: int, *, buffers: bool) -> None:
    """Raise on all ranks unless all hold the same; see `Run.assert_ranks_equal`."""
    if context.collectives.size == 1:
        return
    values = context.run_on_all_ranks(lambda: digest_replicated_state(tracked, buffers=buffers))
    found = find_first_difference(context.collectives, values)
    if found is not None:
        raise DivergenceError(
            f"ranks hold different values of {found.name!r} after step {step} ({found.ranks_text}). Look for what "
            "one rank does and others do not: weights changed outside optimizer.step(), a backward pass that "
            "bypasses the DDP module or stays in no_sync(), a scheduler that follows a rank's own loss."
        )


def digest_replicated_state(tracked: Mapping[str, Any], *, buffers: bool) -> dict[str, str]:
    """Digest, by name, what data-parallel training keeps equal on all ranks.

    Hyperparameters are part of it: a learning rate that differs makes weights differ one step later.
    """
    flat = state_dict.flatten(tracked)
    values = state_dict.digest_leaves(leaf for leaf in flat.leaves if _is_compared(leaf, buffers=buffers))
    for name, item in tracked.items():
        if isinstance(item, Optimizer):
            values.update(_digest_plain_values(name, json_codec.decode(flat.skeleton[name])))
    return values


def _is_compared(leaf: Leaf, *, buffers: bool) -> bool:
    if (
        leaf.kind == SCRIPT_OWNED
    ):  # an average of the weights is as equal as they are, whatever object holds it
        return leaf.name.split("/")[0].split(".")[0] == EMA_NAME
    return leaf.kind == REPLICATED or (buffers and leaf.kind == BUFFER)


def _digest_plain_values(path: str, value_tree: Any) -> Iterator[tuple[str, str]]:
    """Digest, piece by piece, what an optimizer's state dict holds beside tensors."""
    if isinstance(value_tree, dict):
        for key, value in value_tree.items():
            yield from _digest_plain_values(f"{path}/{key}", value)
    elif isinstance(value_tree, list) and any(isinstance(value, dict) for value in value_tree):
        for index, value in enumerate(value_tree):
            yield from _digest_plain_values(f"{path}/{index}", value)
    elif not isinstance(value_tree, TensorRef):
        yield path, state_dict.combine_digests({"": json_codec.encode(value_tree)})
