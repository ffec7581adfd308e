"""Save small tensors that differ between ranks, such as each rank's sum of losses.

A checkpoint is the same on every node, so that any node's suffices. So the ranks gather these values at each
step boundary, and every checkpoint holds all of them. A rank of a world of the same size gets its own value
back, bit for bit. In a world of another size each rank gets the mean, or rank 0 gets the sum and the others
zero.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from elastic_resume.data.batch_size import read_rank_and_world_size
from elastic_resume.errors import ConfigError, MismatchError

MAX_NUMBERS = 64  # all ranks send them at every step


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
