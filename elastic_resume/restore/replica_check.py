"""Find the first value that differs between ranks, without sending tensors.

Ranks gather two digests: of the values that every rank holds, and of its shards. Only if one differs, the
first rank that should hold the same broadcasts its names and values, and each of the others reports the first
that it holds differently. The callers decide what a difference means.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from elastic_resume.checkpoint import json_codec
from elastic_resume.checkpoint.json_codec import TensorRef
from elastic_resume.checkpoint.shards import shard_index
from elastic_resume.errors import DivergenceError
from elastic_resume.ranks.rank_context import RankContext
from elastic_resume.state import dtensors, load_objects, state_dict
from elastic_resume.state.open_checkpoint import iter_leaves
from elastic_resume.state.state_dict import BUFFER, EMA_NAME, REPLICATED, SCRIPT_OWNED, Leaf

logger = logging.getLogger(__name__)

# Of er.resume(): rank 0 alone may have loaded these from elsewhere.
_ARGUMENTS = {"model", "optimizer", "scheduler", "scaler", EMA_NAME, "data"}
MAX_SAMPLED_ELEMENTS = 4096
MAX_NAMED_GROUPS, MAX_NAMED_RANKS = 4, 8  # limits in a message, so that a thousand ranks make one line
WHOLE, SHARDS = 0, 1  # a rank's values are those that every rank holds, and its shards


@dataclass(frozen=True)
class RankDifference:
    """The first name under which ranks hold different values."""

    name: str
    ranks_text: str  # for example "rank 0, 2 against rank 1"
    digest_by_rank: tuple[str, ...]  # each rank's digest of all its values, its own shards included


def find_first_difference(
    context: RankContext, compute: Callable[[], Mapping[str, str]]
) -> RankDifference | None:
    """Compare named values (digests, say) over all ranks; return None if names, order and values are equal.

    Shards are compared between the ranks that hold the same ones: those of equal local rank. Every rank calls
    it at the same time, and all get the same answer. If ``compute`` fails on one rank, all raise.
    """
    collectives = context.collectives

    def digest_parts() -> tuple[list[dict[str, str]], list[str]]:
        parts: list[dict[str, str]] = [{}, {}]
        for name, value in compute().items():
            parts[WHOLE if shard_index(name) is None else SHARDS][name] = value
        return parts, [state_dict.combine_digests({"": list(part.items())}) for part in parts]

    parts, digests = context.run_and_gather(digest_parts)
    ranks_by_local_rank: dict[int, list[int]] = {}
    for rank, local_rank in enumerate(context.local_rank_by_rank):
        ranks_by_local_rank.setdefault(local_rank, []).append(rank)
    compared = [(WHOLE, list(range(collectives.size)))]
    compared += [(SHARDS, ranks) for ranks in ranks_by_local_rank.values()]
    for kind, ranks in compared:
        if len({digests[rank][kind] for rank in ranks}) > 1:
            break
    else:
        return None
    own = parts[kind]
    reference = collectives.broadcast_json(list(own.items()), ranks[0])
    is_compared = collectives.rank in ranks
    first_by_rank = collectives.gather(_first_difference_from(reference, own) if is_compared else None)
    _, name = min(first for first in first_by_rank if first is not None)
    gathered = collectives.gather(own.get(name))
    found = [gathered[rank] for rank in ranks]
    if len(set(found)) == 1:  # the order of the names differs
        found = [digests[rank][kind] for rank in ranks]
    return RankDifference(name, describe_groups(found, ranks), tuple("".join(each) for each in digests))


def _first_difference_from(reference: list[list[str]], values: Mapping[str, str]) -> tuple[int, str] | None:
    """Return the index and name of the first value that ``reference`` lacks or holds differently."""
    for index, (theirs, own) in enumerate(zip_longest(reference, values.items())):
        if theirs is not None and values.get(theirs[0]) != theirs[1]:
            return index, theirs[0]
        if theirs is None or own[0] != theirs[0]:
            return index, own[0]
    return None


def describe_groups(values: Sequence[Any], ranks: Sequence[int] | None = None) -> str:
    """Return the groups of ranks with equal values, as ``rank 0, 2 against rank 1``.

    ``ranks`` are the ranks that hold the ``values``; by default 0, 1, 2 …
    """
    groups: dict[Any, list[int]] = {}
    for rank, value in zip(ranks or range(len(values)), values, strict=True):
        groups.setdefault(value, []).append(rank)
    more = f" and {len(groups) - MAX_NAMED_GROUPS} other values" if len(groups) > MAX_NAMED_GROUPS else ""
    named = list(groups.values())[:MAX_NAMED_GROUPS]
    return " against ".join(_describe_ranks(ranks) for ranks in named) + more


def _describe_ranks(ranks: list[int]) -> str:
    more = f" and {len(ranks) - MAX_NAMED_RANKS} more" if len(ranks) > MAX_NAMED_RANKS else ""
    return f"rank {', '.join(map(str, ranks[:MAX_NAMED_RANKS]))}{more}"


def may_differ(context: RankContext) -> bool:
    """Return whether ranks may hold different values: machines of different kinds round differently."""
    return context.settings.check_replicas.is_off


def require_equal(context: RankContext, tracked: Mapping[str, Any], step: int) -> None:
    """Raise on all ranks unless all hold the same state; see `Run.assert_ranks_equal`."""
    if context.collectives.size == 1:
        return
    difference = find_first_difference(context, lambda: _digest_replicated_state(tracked))
    if difference is not None:
        raise _describe_difference(difference, step)


class FirstStepsCheck:
    """Compares all ranks after the first steps of a generation, to find a model that DDP does not wrap.

    It finds other state of which each rank has its own, too.

    Without DDP each rank trains a model of its own, on one node without any sign. A sample of each tensor
    shows it. Several steps are compared, since a learning rate may be zero in the first.
    """

    def __init__(self, context: RankContext, tracked: Mapping[str, Any]) -> None:
        self._context, self._tracked = context, tracked
        is_off = context.collectives.size == 1 or may_differ(context)
        self._steps_to_compare = set() if is_off else {1, 2, 4}
        self._finished_steps = 0
        self._is_difference_logged = False

    def after_step(self, step: int, *, has_ddp: bool) -> None:
        """Compare if it is time to. Every rank calls it after each step.

        ``has_ddp``: whether a tracked model is known to be in DDP.

        Raises:
            DivergenceError: on all ranks; the text names the first value that differs, and the likely cause.

        """
        self._finished_steps += 1
        if self._finished_steps not in self._steps_to_compare:
            return
        difference = find_first_difference(
            self._context, lambda: _digest_replicated_state(self._tracked, sample=True)
        )
        if difference is not None:
            tensors = load_objects.iter_live_tensors(self._tracked)
            is_sharded = any(dtensors.is_dtensor(tensor) for _, tensor in tensors)
            raise _describe_difference(difference, step, has_ddp=has_ddp, is_sharded=is_sharded)
        if not self._is_difference_logged:
            self._check_script_state(step)

    def _check_script_state(self, step: int) -> None:
        """Warn once of state of which each rank seems to have its own, since a resume does not keep it."""

        def digest() -> dict[str, str]:
            own = {name: item for name, item in self._tracked.items() if not isinstance(item, nn.Module)}
            flat = state_dict.flatten(own)
            tensors = [
                replace(leaf, tensor=_take_sample(leaf.tensor))
                for leaf in flat.leaves
                if _is_script_state(name := leaf.name.split("/")[0], own[name])
            ]
            return {**digest_script_state(own, flat.structure), **state_dict.digest_leaves(tensors)}

        difference = find_first_difference(self._context, digest)
        if difference is not None:
            self._is_difference_logged = True
            log_own_state(self._context, difference, f"after step {step}")


def log_own_state(context: RankContext, difference: RankDifference, when: str) -> None:
    """Warn of state of which each rank has its own."""
    if context.collectives.rank == 0:
        name = difference.name.split("/")[0]
        logger.warning(
            f"WARNING: ranks hold different values of {difference.name!r} {when} "
            f"({difference.ranks_text}), and er.resume() gives all ranks the same. Keep it equal; or, if "
            f'each rank needs its own, write track={{"{name}": er.per_rank(...)}}, or er.RankValues(...) for '
            "a tensor."
        )


def digest_script_state(tracked: Mapping[str, Any], structure: Mapping[str, Any]) -> dict[str, str]:
    """Digest, by name, the values in ``structure`` of the objects in ``track=``; tensors are none."""
    return {
        path: state_dict.combine_digests({"": json_codec.encode(value)})
        for name, item in tracked.items()
        if _is_script_state(name, item)
        for path, value in iter_leaves(json_codec.decode(structure[name]), name)
        if not isinstance(value, TensorRef)
    }


def _is_script_state(name: str, item: Any) -> bool:
    """Whether the object ``name`` is the script's own. The objects of a library's integration are not."""
    return not (
        name.partition(".")[0] in _ARGUMENTS
        or name.startswith(state_dict.RESERVED_PREFIX)
        or isinstance(item, (nn.Module, Optimizer))
        or type(item).__module__.startswith("elastic_resume.integrations")
    )


def _describe_difference(
    difference: RankDifference, step: int, *, has_ddp: bool = True, is_sharded: bool = False
) -> DivergenceError:
    cause = (
        "Look for something that one rank alone does: weights changed outside optimizer.step(), parameters "
        "outside of the module in DDP, whose gradients nothing averages, a backward pass that bypasses the "
        "DDP module or stays in no_sync(), "
        "a scheduler that follows a rank's own loss."
    )
    if shard_index(difference.name) is not None:
        cause = (
            "The model is sharded, and each node trains a model of its own: call run.replicate(model) after "
            "er.resume(), unless its mesh has a dimension for the nodes."
        )
    elif is_sharded:
        cause = (
            "FSDP averages no gradients of parameters that it does not shard. If this is one, call "
            "fully_shard() on the whole model too, without ignored_params. If not, look for something that "
            "one rank alone does, such as a scheduler that follows a rank's own loss."
        )
    elif not has_ddp:
        cause = (
            "No tracked model is in DDP, so each rank trains its own: write model = run.ddp(model) after "
            "er.resume(), or wrap it in DistributedDataParallel before, and call what that returns. If you "
            "average gradients yourself, some are missing, or one rank alone changes weights."
        )
    return DivergenceError(
        f"ranks hold different values of {difference.name!r} after step {step} ({difference.ranks_text}). "
        f"{cause}"
    )


def _digest_replicated_state(tracked: Mapping[str, Any], *, sample: bool = False) -> dict[str, str]:
    """Digest, by name, the state that data-parallel training keeps equal on all ranks.

    Hyperparameters belong to it: a different learning rate makes different weights one step later. With
    ``sample`` digest at most `MAX_SAMPLED_ELEMENTS` of each parameter and optimizer state.
    """
    flat = state_dict.flatten(tracked)
    compared = [leaf for leaf in flat.leaves if _is_compared(leaf)]
    if sample:
        # An average may be rank 0's alone, or include buffers of before they were made equal.
        trained = [leaf for leaf in compared if leaf.kind == REPLICATED and _object_name(leaf) != EMA_NAME]
        compared = [replace(leaf, tensor=_take_sample(leaf.tensor)) for leaf in trained]
    values = state_dict.digest_leaves(compared)
    for name, item in tracked.items():
        if isinstance(item, Optimizer):
            for path, value in iter_leaves(json_codec.decode(flat.structure[name]), name):
                if not isinstance(value, TensorRef):
                    values[path] = state_dict.combine_digests({"": json_codec.encode(value)})
    return values


def _take_sample(tensor: Tensor) -> Tensor:
    stride = -(-tensor.numel() // MAX_SAMPLED_ELEMENTS)
    return tensor.flatten()[:: max(1, stride)]


def _object_name(leaf: Leaf) -> str:
    return leaf.name.split("/")[0].split(".")[0]


def _is_compared(leaf: Leaf) -> bool:
    if leaf.kind == SCRIPT_OWNED:  # an average of equal weights is equal, in whatever object it is
        return _object_name(leaf) == EMA_NAME
    return leaf.kind in {REPLICATED, BUFFER}
