"""Whether ranks hold the same: who compares finds the first difference, with few and short messages."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_resume.restore.replica_check import Difference, describe_groups, find_first_difference
from tests.support import launch_ranks
from tests.support.paths import SCRIPTS

pytestmark = pytest.mark.slow

SCRIPT = SCRIPTS / "unequal.py"
named = st.dictionaries(st.sampled_from("abcdefg"), st.sampled_from("xyz"), max_size=7)


class Threads:
    """The ranks of a world as threads that meet; what they tell each other is counted."""

    def __init__(self, size: int) -> None:
        self.characters = self.rounds = 0
        self._told: list[Any] = [None] * size
        self._meet = threading.Barrier(size, timeout=60)

    def run(self, values: list[dict[str, str]]) -> list[Difference | None]:
        """Let each rank compare its values; give what each found."""
        found: list[Any] = ["nothing"] * len(values)

        def one(rank: int) -> None:
            found[rank] = find_first_difference(_Rank(self, rank), values[rank])

        threads = [threading.Thread(target=one, args=(rank,)) for rank in range(len(values))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return found

    def exchange(self, rank: int, value: Any) -> list[Any]:
        """Give every rank every rank's value."""
        self._told[rank] = json.dumps(value)
        self._meet.wait()
        told = [json.loads(one) for one in self._told]
        if self._meet.wait() == 0:
            self.rounds += 1
            self.characters += sum(map(len, self._told))
        self._meet.wait()
        return told


class _Rank:
    def __init__(self, world: Threads, rank: int) -> None:
        self._world, self._rank = world, rank

    def gather(self, value: Any) -> list[Any]:
        """As World.gather."""
        return self._world.exchange(self._rank, value)


@given(st.lists(named, min_size=2, max_size=3))
def test_find_first_difference_agrees_on_all_ranks(values: list[dict[str, str]]) -> None:
    """None if and only if names, order and values are equal."""
    found = Threads(len(values)).run(values)
    assert len(set(found)) == 1
    lines = [list(one.items()) for one in values]
    first = found[0]
    if first is None:
        assert all(one == lines[0] for one in lines)
        return
    assert any(one != lines[0] for one in lines)
    stands = [list(one).index(first.name) if first.name in one else -1 for one in values]
    held = [one.get(first.name) for one in values]
    assert len(set(held)) > 1 or len(set(stands)) > 1
    before = min(stand for stand in stands if stand >= 0)
    assert all(one[:before] == lines[0][:before] for one in lines), "an earlier one differs"
    assert len(set(first.digest_by_rank)) == len({str(one) for one in lines})


def test_find_first_difference_sends_few_digests() -> None:
    """Two of twenty thousand values differ: fewer than a hundredth of the digests is sent."""
    many = {f"model/layer{number}.weight": "0" * 32 for number in range(20_000)}
    other = {**many, "model/layer12345.weight": "1" * 32, "model/layer19999.weight": "1" * 32}
    world = Threads(2)
    assert [one and (one.name, one.ranks_text) for one in world.run([many, other])] == [
        ("model/layer12345.weight", "rank 0 against rank 1")
    ] * 2
    assert world.rounds < 20
    assert world.characters < 5000
    same = Threads(2)
    assert same.run([many, many]) == [None, None]
    assert same.rounds == 1


def test_describe_groups_limits_named_groups_and_ranks() -> None:
    """Ranks with equal values form a group."""
    assert describe_groups(["a", "b", "a"]) == "rank 0, 2 against rank 1"
    assert describe_groups([*"a" * 9, "b"]) == "rank 0, 1, 2, 3, 4, 5, 6, 7 and 1 more against rank 9"
    assert describe_groups([*range(1000)]).endswith("against rank 3 and 996 other values")


@pytest.mark.cluster
def test_assert_ranks_equal_names_difference_on_all_ranks(tmp_path: Path) -> None:
    """One bit of a weight, of the optimizer, of an average; a learning rate; and no difference."""
    env = [{"ELASTIC_RESUME_CKPT_DIR": str(tmp_path), "ELASTIC_RESUME_NODE_NAME": f"n{i}"} for i in range(3)]
    ended = launch_ranks.run_ranks(3, SCRIPT, env=env)
    assert [done.returncode for done in ended] == [0] * 3, ended[0].stderr
    told = [json.loads(done.stdout) for done in ended]
    expected = {
        "buffers": "'model/1.running_mean' after step 2 (rank 0 against rank 1 against rank 2)",
        "weight": "'model/2.weight' after step 2 (rank 0, 2 against rank 1)",
        "optimizer": "'optimizer/state/1/exp_avg' after step 2 (rank 0 against rank 1, 2)",
        "ema": "'ema/shadow/1' after step 2 (rank 0, 1 against rank 2)",
        "learning rate": "'optimizer/param_groups/0/lr' after step 2 (rank 0 against rank 1 against rank 2)",
        "fewer tensors": "'optimizer/state/0/step' after step 2 (rank 0, 2 against rank 1)",
    }
    for rank, said in enumerate(told):
        refused = said.pop("not to be stored")
        assert "builtin_function_or_method" in refused
        assert ("rank 1 on node n1" in refused) == (rank != 1)
        assert list(said) == list(expected), "equal ranks were told to differ, or the other way round"
        for what, text in expected.items():
            assert said[what].startswith(f"DivergenceError: ranks hold different values of {text}. ")


@pytest.mark.cluster
def test_assert_ranks_equal_passes_for_single_rank(tmp_path: Path) -> None:
    """Plain python has no second rank."""
    env = [{"ELASTIC_RESUME_CKPT_DIR": str(tmp_path)}]
    done = launch_ranks.run_ranks(1, SCRIPT, env=env)[0]
    assert (done.returncode, done.stdout.strip()) == (0, "{}"), done.stderr
