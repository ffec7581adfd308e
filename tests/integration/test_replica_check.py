"""The comparison of ranks names the first difference, on all ranks."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_resume.ranks.collectives import Collectives
from elastic_resume.ranks.rank_context import RankContext
from elastic_resume.restore.replica_check import RankDifference, describe_groups, find_first_difference
from tests.support import launch_ranks
from tests.support.paths import SCRIPTS

pytestmark = pytest.mark.slow

SCRIPT = SCRIPTS / "unequal.py"
named = st.dictionaries(st.sampled_from("abcdefg"), st.sampled_from("xyz"), max_size=7)


class ThreadCollectives(Collectives):
    """The collectives of a rank that is a thread; all ranks share ``values`` and ``barrier``."""

    def __init__(self, rank: int, values: list[Any], barrier: threading.Barrier) -> None:
        super().__init__(rank, len(values), None)
        self._values, self._barrier = values, barrier

    def gather(self, value: Any) -> list[Any]:
        """Return every rank's value."""
        self._values[self.rank] = json.dumps(value)
        self._barrier.wait()
        gathered = [json.loads(text) for text in self._values]
        self._barrier.wait()
        return gathered

    def broadcast_json(self, value: Any, source_rank: int) -> Any:
        """Return the value of the source."""
        return self.gather(value)[source_rank]


def compare(values: list[dict[str, str]]) -> list[RankDifference | None]:
    """Let each rank compare its values; return what each found."""
    size = len(values)
    shared: list[Any] = [None] * size
    barrier = threading.Barrier(size, timeout=60)
    settings: Any = SimpleNamespace(node_name="n0", ckpt_dir=Path(), run_id="job")
    events: Any = None

    def compare_on(rank: int) -> RankDifference | None:
        context = RankContext(ThreadCollectives(rank, shared, barrier), settings, events)
        return find_first_difference(context, lambda: values[rank])

    with ThreadPoolExecutor(size) as executor:
        return list(executor.map(compare_on, range(size)))


@given(st.lists(named, min_size=2, max_size=3))
def test_find_first_difference_agrees_on_all_ranks(values: list[dict[str, str]]) -> None:
    """None if and only if names, order and values are equal."""
    found = compare(values)
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


def test_describe_groups_limits_named_groups_and_ranks() -> None:
    """Ranks with equal values form a group."""
    assert describe_groups(["a", "b", "a"]) == "rank 0, 2 against rank 1"
    assert describe_groups([*"a" * 9, "b"]) == "rank 0, 1, 2, 3, 4, 5, 6, 7 and 1 more against rank 9"
    assert describe_groups([*range(1000)]).endswith("against rank 3 and 996 other values")


@pytest.mark.cluster
def test_assert_ranks_equal_names_difference_on_all_ranks(tmp_path: Path) -> None:
    """One bit of a weight, of the optimizer, of an average; a learning rate; and no difference."""
    env = [{"ELASTIC_RESUME_CKPT_DIR": str(tmp_path), "ELASTIC_RESUME_NODE_NAME": f"n{i}"} for i in range(3)]
    finished = launch_ranks.run_ranks(3, SCRIPT, env=env)
    assert [done.returncode for done in finished] == [0] * 3, finished[0].stderr
    expected = {
        "buffer": "'model/1.running_mean' after step 2 (rank 0, 2 against rank 1)",
        "weight": "'model/2.weight' after step 2 (rank 0, 2 against rank 1)",
        "optimizer": "'optimizer/state/1/exp_avg' after step 2 (rank 0 against rank 1, 2)",
        "ema": "'ema/shadow/1' after step 2 (rank 0, 1 against rank 2)",
        "learning rate": "'optimizer/param_groups/0/lr' after step 2 (rank 0 against rank 1 against rank 2)",
        "fewer tensors": "'optimizer/state/0/step' after step 2 (rank 0, 2 against rank 1)",
    }
    for rank, done in enumerate(finished):
        error_by_case = json.loads(done.stdout)
        refused = error_by_case.pop("not to be stored")
        assert "builtin_function_or_method" in refused
        assert ("rank 1 on node n1" in refused) == (rank != 1)
        shape = error_by_case.pop("shape")
        assert (
            "the buffer 'model/seen' has another dtype, shape or device on rank 0, 1 against rank 2" in shape
        )
        assert list(error_by_case) == list(expected), "the cases that raised are not the expected ones"
        for case, text in expected.items():
            assert error_by_case[case].startswith(f"DivergenceError: ranks hold different values of {text}. ")


@pytest.mark.cluster
@pytest.mark.parametrize(
    ("case", "text"),
    [
        ("none", "'model.body/weight' after step 2 (rank 0 against rank 1). No tracked model is in DDP, so"),
        ("outside", "'model.head/weight' after step 2 (rank 0 against rank 1). Look for something that one"),
        ("by-hand", ""),
    ],
)
def test_model_outside_of_ddp_ends_the_job_within_the_first_steps(
    tmp_path: Path, case: str, text: str
) -> None:
    """On one node too, where each rank would train a model of its own to the end."""
    env = {"ELASTIC_RESUME_CKPT_DIR": str(tmp_path), "ELASTIC_RESUME_NODE_NAME": "n0"}
    finished = launch_ranks.run_ranks(2, SCRIPT.with_name("unwrapped.py"), case, env=[env] * 2)
    assert [done.returncode for done in finished] == [int(bool(text))] * 2, finished[0].stderr
    for done in finished:
        assert text in done.stderr
