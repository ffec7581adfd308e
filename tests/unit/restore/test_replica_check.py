"""The comparison of ranks names the first difference, on all ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from elastic_resume.data.rank_values import exchange, per_rank
from elastic_resume.errors import DivergenceError, UntrackableError
from elastic_resume.ranks.rank_context import RankContext
from elastic_resume.restore import replica_check
from elastic_resume.restore.replica_check import FirstStepsCheck, describe_groups, find_first_difference
from elastic_resume.state.state_dict import TrackedTensors
from elastic_resume.training.rank0_buffers import Rank0Buffers
from tests.support.state_image import Box
from tests.support.thread_ranks import ThreadCollectives, run_ranks

named = st.dictionaries(st.sampled_from("abcdefg"), st.sampled_from("xyz"), max_size=7)


SHARDS = [{"v@0of2": "x", "w@0of2": "x"}, {"v@1of2": "y", "w@1of2": "y"}]


def make_context(collectives: ThreadCollectives, nodes: str, *, is_off: bool = False) -> RankContext:
    """Return the context of a rank; ``nodes`` has one letter per rank."""
    settings: Any = SimpleNamespace(
        node_name=nodes[collectives.rank],
        ckpt_dir=Path(),
        run_id="job",
        check_replicas=SimpleNamespace(is_off=is_off),
    )
    events: Any = None
    return RankContext(collectives, settings, events)


def compare(values: list[dict[str, str]], nodes: str) -> list[replica_check.RankDifference | None]:
    """Let each rank compare its values; return what each found."""

    def compare_on(collectives: ThreadCollectives) -> replica_check.RankDifference | None:
        return find_first_difference(make_context(collectives, nodes), lambda: values[collectives.rank])

    return run_ranks(len(values), compare_on)


@pytest.mark.slow
@given(st.lists(named, min_size=2, max_size=3))
def test_find_first_difference_agrees_on_all_ranks(values: list[dict[str, str]]) -> None:
    """None if and only if names, order and values are equal."""
    found = compare(values, "aaa")
    assert len(set(found)) == 1
    items = [list(rank_values.items()) for rank_values in values]
    first = found[0]
    if first is None:
        assert all(rank_items == items[0] for rank_items in items)
        return
    assert any(rank_items != items[0] for rank_items in items)
    indices = [list(rank_values).index(first.name) for rank_values in values if first.name in rank_values]
    held = {rank_values.get(first.name) for rank_values in values}
    assert len(held) > 1 or len(set(indices)) > 1
    assert all(rank_items[: min(indices)] == items[0][: min(indices)] for rank_items in items)
    assert len(set(first.digest_by_rank)) == len({str(rank_items) for rank_items in items})


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ([{"w": "x"}, {}, {"w": "x"}], "w: rank 0, 2 against rank 1"),
        ([{}, {}, {"w": "x"}], "w: rank 0, 1 against rank 2"),
        ([{"v": "x", "w": "y"}, {"w": "y", "v": "x"}, {"v": "x", "w": "y"}], "w: rank 0, 2 against rank 1"),
        ([*SHARDS, *SHARDS], None),
        (
            [SHARDS[0], {"v@1of2": "x", "w@1of2": "y"}, SHARDS[0], {"v@1of2": "x", "w@1of2": "z"}],
            "w@1of2: rank 1 against rank 3",
        ),
    ],
)
def test_missing_names_their_order_and_shards_are_compared(
    values: list[dict[str, str]], text: str | None
) -> None:
    """A shard is, with that of the same local rank on the other node."""
    found = compare(values, "aabb")
    assert [one and f"{one.name}: {one.ranks_text}" for one in found] == [text] * len(values)


def test_describe_groups_limits_named_groups_and_ranks() -> None:
    """Ranks with equal values form a group."""
    assert describe_groups(["a", "b", "a"]) == "rank 0, 2 against rank 1"
    assert describe_groups([*"a" * 8, "b"]) == "rank 0, 1, 2, 3, 4, 5, 6, 7 against rank 8"
    assert describe_groups([*"a" * 9, "b"]) == "rank 0, 1, 2, 3, 4, 5, 6, 7 and 1 more against rank 9"
    assert describe_groups([*range(4)]).endswith("against rank 3")
    assert describe_groups([*range(1000)]).endswith("against rank 3 and 996 other values")


class World:
    """The tracked objects of one rank, after a step; every rank makes the same."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        self.model = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 2))
        self.model.register_parameter("empty", nn.Parameter(torch.zeros(0, 3)))
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        for parameter in self.model.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator)
            parameter.grad = torch.ones_like(parameter)
        self.optimizer.step()
        self.averaged = nn.Linear(1, 1)
        nn.init.zeros_(self.averaged.weight)
        nn.init.zeros_(self.averaged.bias)
        self.ema, self.own, self.box = (torch.zeros(2) for _ in range(3))

    @property
    def tracked(self) -> dict[str, Any]:
        """Return the objects by name."""
        return {
            "model": self.model,
            "optimizer": self.optimizer,
            "ema": TrackedTensors("ema", [self.ema]),
            "ema.model": self.averaged,
            "own": TrackedTensors("own", [self.own]),
            "box": Box(self.box),
        }


def flip(tensor: Tensor) -> None:
    """Flip one bit of the first element."""
    tensor.detach().view(torch.int32).view(-1)[0] ^= 1


CHANGES: dict[str, Callable[[World], object]] = {
    "model/1.running_mean": lambda world: flip(world.model.get_buffer("1.running_mean")),
    "model/2.weight": lambda world: flip(world.model.get_parameter("2.weight")),
    "optimizer/state/2/exp_avg": lambda world: flip(
        world.optimizer.state[world.model.get_parameter("0.bias")]["exp_avg"]
    ),
    "optimizer/param_groups/0/lr": lambda world: world.optimizer.param_groups[0].update(lr=0.2),
    "optimizer/state/0/step": lambda world: world.optimizer.state.clear(),
    "ema/0": lambda world: flip(world.ema),
    "ema.model/weight": lambda world: flip(world.averaged.weight),
    "own/0": lambda world: flip(world.own),
    "box/value": lambda world: flip(world.box),
}


@pytest.mark.parametrize("name", CHANGES)
def test_first_value_that_differs_on_one_rank_is_named_on_all(name: str) -> None:
    """In a whole comparison, and in that of the first steps. Each rank may have values of its own."""
    compared = {*CHANGES} - {"own/0", "box/value"}
    sampled = compared - {"model/1.running_mean", "ema/0", "ema.model/weight"}

    def check(collectives: ThreadCollectives) -> None:
        context, world = make_context(collectives, "abc"), World()
        if collectives.rank == 1:
            CHANGES[name](world)
        actions: list[tuple[bool, Callable[[], None]]] = [
            (name in compared, lambda: replica_check.require_equal(context, world.tracked, 7)),
            (name in sampled, lambda: FirstStepsCheck(context, world.tracked).after_step(7, has_ddp=True)),
        ]
        for is_found, action in actions:
            if not is_found:
                action()
                continue
            text = f"of '{name}' after step 7 (rank 0, 2 against rank 1). Look for"
            with pytest.raises(DivergenceError) as raised:
                action()
            assert text in str(raised.value)

    run_ranks(3, check)


@pytest.mark.parametrize(
    ("is_off", "differs_from", "found_at"),
    [(False, 1, 1), (False, 2, 2), (False, 3, 4), (False, 5, None), (True, 1, None)],
)
def test_ranks_are_compared_after_first_second_and_fourth_step(
    is_off: bool, differs_from: int, found_at: int | None
) -> None:
    """Of a generation, unless the comparison is off."""

    def train(collectives: ThreadCollectives) -> str | None:
        weight = nn.Linear(1, 1)
        nn.init.zeros_(weight.weight)
        nn.init.zeros_(weight.bias)
        context = make_context(collectives, "ab", is_off=is_off)
        check = FirstStepsCheck(context, {"model": weight})
        for step in range(1, 7):
            if step == differs_from and collectives.rank:
                nn.init.ones_(weight.weight)
            try:
                check.after_step(100 + step, has_ddp=False)
            except DivergenceError as error:
                return str(error)
        return None

    for text in run_ranks(2, train):
        assert (text is None) == (found_at is None)
        assert text is None or f"after step 10{found_at} (rank 0 against rank 1). No tracked model is" in text


@pytest.mark.parametrize(
    ("differs", "name"),
    [("reader", "reader/value"), ("counts", "counts/0"), ("box.a", "box.a/value")],
)
def test_state_of_each_rank_is_warned_about_once(
    differs: str, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A resume would give rank 0's to all; a loader with a position of its own repeats or skips samples."""

    def train(collectives: ThreadCollectives) -> None:
        own = {differs: collectives.rank}
        tracked: dict[str, Any] = {
            "model": nn.Identity(),
            "reader": Box(own.get("reader", 0)),
            "counts": TrackedTensors("counts", [torch.tensor(own.get("counts", 0))]),
            "box.a": Box(own.get("box.a", 0)),
            "scheduler": Box(collectives.rank),
            "ema.shadow": Box(collectives.rank),
            "rows": per_rank(Box(collectives.rank)),
        }
        exchange([tracked["rows"]], collectives)
        check = FirstStepsCheck(make_context(collectives, "ab"), tracked)
        for step in range(1, 5):
            check.after_step(step, has_ddp=True)

    run_ranks(2, train)
    (text,) = caplog.messages
    assert f"different values of {name!r} after step 1 (rank 0 against rank 1), and er.resume() gives" in text
    assert f'write track={{"{differs}": er.per_rank(...)}}' in text


def test_rank_that_is_alone_flattens_nothing() -> None:
    """A state of many GB takes seconds."""

    def check(collectives: ThreadCollectives) -> None:
        context, tracked = make_context(collectives, "a"), {"box": Box(print)}
        replica_check.require_equal(context, tracked, 1)
        FirstStepsCheck(context, tracked).after_step(1, has_ddp=True)

    run_ranks(1, check)


@pytest.mark.parametrize(
    ("name", "is_sharded", "cause"),
    [("w@1of2", True, "run.replicate"), ("w", True, "does not shard"), ("w", False, "in no_sync")],
)
def test_likely_cause_follows_from_the_name_and_sharding(name: str, is_sharded: bool, cause: str) -> None:
    """Shards differ where nothing averages over the nodes."""
    difference = replica_check.RankDifference(name, "rank 0 against rank 1", ("x", "y"))
    assert cause in str(replica_check._describe_difference(difference, 1, is_sharded=is_sharded))


def test_error_of_one_rank_is_raised_on_all() -> None:
    """A value that cannot be stored; a buffer of another shape."""

    def check(collectives: ThreadCollectives) -> None:
        context, is_odd = make_context(collectives, "abc"), collectives.rank == 1
        with pytest.raises(UntrackableError if is_odd else Exception, match="builtin_function_or") as raised:
            replica_check.require_equal(context, {"box": Box(print if is_odd else None)}, 1)
        assert ("rank 1 on node b" in str(raised.value)) == (not is_odd)
        model = nn.Module()
        model.register_buffer("seen", torch.zeros(1 + is_odd))
        with pytest.raises(DivergenceError, match=r"'model/seen' has another .* on rank 0, 2 against rank 1"):
            Rank0Buffers(context, {"model": model}).receive()

    run_ranks(3, check)
