"""Save small state that differs between ranks, such as each rank's sum of losses or its place in its files.

A checkpoint is the same on every node, so that any node's suffices. So the ranks gather these values at each
step boundary, and every checkpoint holds all of them. A rank of a world of the same size gets its own value
back, bit for bit. In a world of another size a tensor becomes the mean, or the sum on rank 0 and zero on
others; of an object's state only the script can know what it means there.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from elastic_resume.checkpoint import json_codec
from elastic_resume.data.batch_size import read_rank_and_world_size
from elastic_resume.errors import ConfigError, MismatchError, UntrackableError
from elastic_resume.units import format_count

MAX_NUMBERS = 64  # all ranks send them at every step
MAX_STATE_CHARS = 4096  # of an object's state as JSON, likewise


class Ranks(Protocol):
    """The connection of the ranks: `elastic_resume.ranks.collectives.Collectives`."""

    rank: int
    size: int

    def gather(self, value: Any) -> list[Any]:
        """Return every rank's ``value``."""


class RankState(ABC):
    """State of which each rank has its own. The ranks exchange it at each step boundary: `exchange`.

    A subclass says what a rank has, as JSON, and what a rank of the next generation takes from all rows.
    """

    def __init__(self) -> None:
        self._rows: list[Any] | None = None  # of all ranks, from the last step boundary

    @abstractmethod
    def read_own(self) -> Any:
        """Return this rank's row; it is JSON without NaN."""

    @abstractmethod
    def load_rows(self, rows: list[Any]) -> None:
        """Take this rank's part of the rows of all ranks that saved."""

    def set_rows(self, rows: list[Any]) -> None:
        """Keep the rows of all ranks for the next save."""
        self._rows = rows

    def state_dict(self) -> dict[str, Any]:
        """Return the rows of all ranks, in the order of ranks."""
        return {"values": [self.read_own()] if self._rows is None else self._rows}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take this rank's part of the state."""
        self._rows = list(state["values"])  # a save may come before the next step
        self.load_rows(self._rows)


def exchange(states: Sequence[RankState], ranks: Ranks) -> None:
    """Exchange the rows of all states in one collective. Every rank calls this at a step boundary."""
    if states:
        gathered = ranks.gather([state.read_own() for state in states])
        for state, *rows in zip(states, *gathered, strict=True):
            state.set_rows(rows)


class RankValues(RankState):
    """Track a tensor of which each rank has its own value: ``track={"loss_sum": er.RankValues(loss_sum)}``.

    Each checkpoint, also one of `Run.save`, stores the values of the last `Run.step` or `Run.end_epoch`.
    All of them together cost one small collective per step. Each holds at most 64 numbers. Change the tensor
    in place, as by ``loss_sum += loss``.
    """

    def __init__(self, tensor: Tensor, across_worlds: Literal["mean", "sum"] = "mean") -> None:
        """Track ``tensor``, of at most `MAX_NUMBERS` floating-point numbers.

        Args:
            tensor: on any device.
            across_worlds: what a rank of a world of another size gets: "mean", the mean over the ranks that
                saved; "sum", their sum on rank 0 and zero on others.

        Raises:
            ConfigError: the tensor is too large or of another kind, or ``across_worlds`` is unknown.

        """
        if not isinstance(tensor, Tensor) or not tensor.is_floating_point() or tensor.numel() > MAX_NUMBERS:
            raise ConfigError(
                f"RankValues takes a tensor of at most {MAX_NUMBERS} floating-point numbers, since all ranks "
                "send them at every step. Reduce larger ones over the ranks yourself, and track the result."
            )
        if across_worlds not in {"mean", "sum"}:
            raise ConfigError(f"across_worlds is {across_worlds!r}: use 'mean' or 'sum'.")
        super().__init__()
        self._tensor = tensor
        self._across_worlds = across_worlds

    def read_own(self) -> list[str]:
        """Return the values as text in which each bit, NaN and infinity survive JSON."""
        return [number.hex() for number in self._tensor.detach().double().flatten().tolist()]

    def load_rows(self, rows: list[Any]) -> None:
        """Set this rank's value. Raise MismatchError if the tensor had another size."""
        numbers = [[float.fromhex(number) for number in row] for row in rows]
        if any(len(row) != self._tensor.numel() for row in numbers):
            raise MismatchError(
                f"a tensor of RankValues has {self._tensor.numel()} numbers here, and "
                f"{len(numbers[0])} in the checkpoint."
            )
        rank, world_size = read_rank_and_world_size()
        values = torch.tensor(numbers, dtype=torch.float64)
        if len(numbers) == world_size:
            own = values[rank]
        elif self._across_worlds == "mean":
            own = values.mean(0)
        else:
            own = values.sum(0) if rank == 0 else torch.zeros_like(values[0])
        with torch.no_grad():
            self._tensor.copy_(own.reshape(self._tensor.shape))


class PerRank(RankState):
    """An object of which each rank keeps its own state. Made by `per_rank`."""

    def __init__(self, item: Any, across_worlds: Callable[[list[Any]], Any] | None) -> None:
        super().__init__()
        self._item, self._across_worlds = item, across_worlds

    def read_own(self) -> str:
        """Return the object's state as JSON. Raise UntrackableError if it is too large, or holds tensors."""
        name = type(self._item).__name__
        text = json.dumps(json_codec.encode(self._item.state_dict(), f"er.per_rank({name})"))
        if len(text) > MAX_STATE_CHARS:
            raise UntrackableError(
                f"er.per_rank({name}): its state has {len(text)} characters as JSON. All ranks send theirs "
                f"at every step, so it may have {MAX_STATE_CHARS}: keep what a resume needs, such as a "
                "position."
            )
        return text

    def load_rows(self, rows: list[Any]) -> None:
        """Load this rank's state. Raise MismatchError if there are more or fewer ranks than states."""
        states = [json_codec.decode(json.loads(row)) for row in rows]
        rank, world_size = read_rank_and_world_size()
        if len(states) == world_size:
            self._item.load_state_dict(states[rank])
        elif self._across_worlds is not None:
            self._item.load_state_dict(self._across_worlds(states))
        else:
            name = type(self._item).__name__
            raise MismatchError(
                f"er.per_rank({name}): the saved state has one part for each of "
                f"{format_count(len(states), 'rank')}, and there are {world_size} now. Start {len(states)} "
                "again, or pass across_worlds=, a function that makes this rank's state from all of them."
            )


def per_rank(item: Any, across_worlds: Callable[[list[Any]], Any] | None = None) -> PerRank:
    """Let each rank keep its own state of ``item``: ``track={"loader": er.per_rank(loader)}``.

    Use it for an object that differs between ranks, such as a loader that keeps a position in this rank's
    files. Without it all ranks get one rank's state after a resume. The state is plain data, without tensors,
    of at most 4096 characters as JSON. All ranks send theirs at each step.

    Args:
        item: has ``state_dict()`` and ``load_state_dict()``.
        across_worlds: is called with the states of all ranks that saved, in their order, where another number
            of ranks resumes. It returns the state of this rank. Without it such a resume fails.

    Raises:
        ConfigError: ``item`` has no such methods.

    """
    if not all(callable(getattr(item, method, None)) for method in ("state_dict", "load_state_dict")):
        raise ConfigError(
            f"er.per_rank: {type(item).__name__} has no state_dict() and load_state_dict(); give it both. A "
            "tensor goes into er.RankValues."
        )
    return PerRank(item, across_worlds)
