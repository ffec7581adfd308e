"""Each rank's own values in the state of all ranks."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from elastic_resume.data.rank_values import MAX_NUMBERS, RankState, RankValues, exchange, per_rank
from elastic_resume.errors import ConfigError, MismatchError, UntrackableError


class FixedRanks:
    """Gathers the values of ranks that are given, over JSON as real ones."""

    rank, size = 0, 2

    def __init__(self, *others: RankState) -> None:
        self._others = others

    def gather(self, value: Any) -> list[Any]:
        """Return ``value`` and those of the others."""
        rows = [value, *([other.read_own()] for other in self._others)]
        return list(json.loads(json.dumps(rows)))


def enter_world(monkeypatch: pytest.MonkeyPatch, rank: int, world_size: int) -> None:
    """Be that rank."""
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setenv("WORLD_SIZE", str(world_size))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "1")


def save(first: list[float], second: list[float]) -> dict[str, Any]:
    """Return the state of two ranks."""
    values = RankValues(torch.tensor(first))
    exchange([values], FixedRanks(RankValues(torch.tensor(second))))
    return values.state_dict()


def test_several_values_are_exchanged_in_one_collective() -> None:
    """Each gets its own rows."""
    calls: list[Any] = []

    class Ranks:
        rank, size = 0, 2

        def gather(self, value: Any) -> list[Any]:
            calls.append(value)
            return [value, [["0x1.0p+1"], ["0x1.0p+2"]]]

    values = [RankValues(torch.tensor([number])) for number in (1.0, 8.0)]
    exchange(values, Ranks())
    exchange([], Ranks())
    assert len(calls) == 1
    rows = [[float.fromhex(row[0]) for row in one.state_dict()["values"]] for one in values]
    assert rows == [[1.0, 2.0], [8.0, 4.0]]


@given(st.floats(width=32), st.floats(width=32))
def test_world_of_same_size_gets_its_own_values(first: float, second: float) -> None:
    """Bit for bit, infinity and NaN too."""
    state = json.loads(json.dumps(save([first], [second])))
    with pytest.MonkeyPatch.context() as monkeypatch:
        for rank, expected in enumerate((first, second)):
            enter_world(monkeypatch, rank, 2)
            tensor = torch.zeros(1)
            RankValues(tensor).load_state_dict(state)
            assert tensor.item() == expected or (math.isnan(tensor.item()) and math.isnan(expected))


@pytest.mark.parametrize(
    ("across_worlds", "rank", "expected"),
    [("mean", 0, [2.0, 4.0]), ("mean", 2, [2.0, 4.0]), ("sum", 0, [4.0, 8.0]), ("sum", 1, [0.0, 0.0])],
)
def test_other_world_gets_mean_or_sum(
    across_worlds: Any, rank: int, expected: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sum stays the same over all ranks."""
    enter_world(monkeypatch, rank, 3)
    tensor = torch.zeros(2)
    RankValues(tensor, across_worlds).load_state_dict(save([1.0, 2.0], [3.0, 6.0]))
    assert tensor.tolist() == expected


@pytest.mark.parametrize(
    ("tensor", "across_worlds"),
    [(torch.zeros(MAX_NUMBERS + 1), "mean"), (torch.zeros(1, dtype=torch.int64), "mean"), (1.0, "mean")],
)
def test_what_cannot_be_gathered_is_refused(tensor: Any, across_worlds: Any) -> None:
    """Large tensors, integers and plain numbers."""
    with pytest.raises(ConfigError, match="floating-point"):
        RankValues(tensor, across_worlds)
    with pytest.raises(ConfigError, match="across_worlds is 'max'"):
        RankValues(torch.zeros(1), "max")  # type: ignore[arg-type]


class Reader:
    """A loader of a script, with a position in this rank's part of the files."""

    def __init__(self, position: Any) -> None:
        self.position = position

    def state_dict(self) -> dict[str, Any]:
        """Return the position."""
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set the position."""
        self.position = state["position"]


def save_readers(*positions: Any) -> dict[str, Any]:
    """Return the state of two ranks' readers."""
    first, second = (per_rank(Reader(position)) for position in positions)
    exchange([first], FixedRanks(second))
    return dict(json.loads(json.dumps(first.state_dict())))


def test_each_rank_gets_its_own_state_of_an_object(monkeypatch: pytest.MonkeyPatch) -> None:
    """Types and bits are kept."""
    positions = [(1, -0.0), {"shard": 7, 3: None}]
    state = save_readers(*positions)
    for rank, expected in enumerate(positions):
        enter_world(monkeypatch, rank, 2)
        reader = Reader(None)
        tracked = per_rank(reader)
        tracked.load_state_dict(state)
        assert repr(reader.position) == repr(expected)
        assert tracked.state_dict() == state


def test_states_of_another_number_of_ranks_need_a_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the script can know what they mean."""
    state = save_readers(4, 6)
    enter_world(monkeypatch, 0, 1)
    with pytest.raises(MismatchError, match=r"per_rank\(Reader\): the saved .* 2 ranks, and there are 1 now"):
        per_rank(Reader(0)).load_state_dict(state)
    reader = Reader(0)
    per_rank(reader, lambda states: {"position": min(one["position"] for one in states)}).load_state_dict(
        state
    )
    assert reader.position == 4


def test_object_that_is_too_large_or_has_no_state_is_refused() -> None:
    """All ranks send it at every step."""
    with pytest.raises(UntrackableError, match=r"per_rank\(Reader\): its state has .* as JSON"):
        per_rank(Reader("x" * 5000)).read_own()
    with pytest.raises(UntrackableError, match="Tensor"):
        per_rank(Reader(torch.zeros(1))).read_own()
    with pytest.raises(ConfigError, match="float has no state_dict"):
        per_rank(1.0)


def test_tensor_of_another_size_is_refused() -> None:
    """The checkpoint belongs to another script."""
    with pytest.raises(MismatchError, match="2 numbers here, and 1 in the checkpoint"):
        RankValues(torch.zeros(2)).load_state_dict(save([1.0], [2.0]))


def test_state_that_was_loaded_is_saved_again_before_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """A job that resumes at its end saves once more; also in a world of another size."""
    state = save([1.0], [2.0])
    for world_size in (2, 3):
        enter_world(monkeypatch, 1, world_size)
        values = RankValues(torch.zeros(1))
        values.load_state_dict(state)
        assert values.state_dict() == state
