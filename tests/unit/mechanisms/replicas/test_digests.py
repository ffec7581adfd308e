"""At which steps replicas are compared, and who is wrong when they differ."""

from __future__ import annotations

import math
from itertools import accumulate, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_resume.mechanisms.mechanism import encode_body
from elastic_resume.mechanisms.replicas.description import DivergenceVerdict
from elastic_resume.mechanisms.replicas.judge import (
    MAX_DIGEST_INTERVAL,
    ReplicaComparison,
    StateDigest,
    choose_common_step,
    digest_interval_steps,
    find_diverged_nodes,
    is_digest_due,
)
from elastic_resume.policy.checkpoint_interval import AUTO, MAX_OVERHEAD_SHARE, IntervalSetting
from elastic_resume.rendezvous.facts import Fact, Scope

numbers = st.floats(0, 1e12) | st.just(math.nan) | st.just(math.inf)


# ---- at which steps ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("every", "cost_s", "step_s", "cores", "expected"),
    [
        ("off", 1.0, 1.0, 1, 0),
        ("7", 1.0, 1.0, 1, 7),
        ("7", None, None, 1, 7),
        ("1", 100.0, 1e-3, 1, 1),
        ("auto", None, None, 1, 1),  # nothing measured: the first step is compared
        ("auto", 1.0, None, 1, 1),
        ("auto", None, 1.0, 1, 1),
        ("auto", 0.0, 0.0, 1, 1),
        ("auto", 0.06, 0.0, 1, 1),
        ("auto", 0.001, 1.0, 1, 1),
        ("auto", 0.01, 1.0, 1, 1),  # one per cent to the point
        ("auto", 0.011, 1.0, 1, 2),
        ("auto", 0.06, 0.1, 1, 64),  # 600 MB at 10 GB/s
        ("auto", 0.06, 0.1, 4, 16),
        ("auto", 1e9, 1e-9, 1, MAX_DIGEST_INTERVAL),
        ("auto", math.inf, 1.0, 1, MAX_DIGEST_INTERVAL),
        ("auto", math.nan, 1.0, 1, 1),
    ],
)
def test_a_gap_is_what_was_asked_for_or_fits_the_budget(
    every: str, cost_s: float | None, step_s: float | None, cores: int, expected: int
) -> None:
    """By hand: seconds of one core for each digest, seconds for each step."""
    setting = IntervalSetting.parse(every, allow_off=True)
    assert digest_interval_steps(setting, cost_s=cost_s, step_s=step_s, cores=cores) == expected


@given(numbers, numbers, st.integers(0, 512))
def test_auto_is_the_smallest_power_of_two_within_the_budget(
    cost_s: float, step_s: float, cores: int
) -> None:
    """Whatever was measured."""
    found = digest_interval_steps(AUTO, cost_s=cost_s, step_s=step_s, cores=cores)
    assert 1 <= found <= MAX_DIGEST_INTERVAL
    assert found & (found - 1) == 0
    budget_s = MAX_OVERHEAD_SHARE * step_s * max(1, cores)
    if 0 < cost_s < math.inf and 0 < step_s < math.inf and found < MAX_DIGEST_INTERVAL:
        assert cost_s <= found * budget_s * (1 + 1e-9)
        assert found == 1 or cost_s > found / 2 * budget_s * (1 - 1e-9)


@given(st.integers(0, 12), st.integers(0, 12), st.integers(0, 1 << 20))
def test_nodes_with_different_budgets_meet(one: int, other: int, start: int) -> None:
    """Within the larger gap there is always a step that both digest."""
    larger = 1 << max(one, other)
    steps = range(max(1, start), max(1, start) + larger)
    assert any(is_digest_due(step, 1 << one) and is_digest_due(step, 1 << other) for step in steps)


@pytest.mark.parametrize(
    ("step", "gap", "expected"),
    [(0, 1, False), (1, 1, True), (3, 2, False), (64, 64, True), (5, 0, False), (0, 0, False)],
)
def test_a_step_is_due(step: int, gap: int, *, expected: bool) -> None:
    """Multiples of the gap; never step 0, which nobody has trained, and none where nothing is compared."""
    assert is_digest_due(step, gap) is expected


def told(steps: range, beats: list[int]) -> set[int]:
    """What a node tells of those steps, with a heartbeat before each of ``beats``."""
    found: set[int] = set()
    for since, until in pairwise([steps.start, *sorted(beats), steps.stop]):
        waiting = 0
        for step in range(since, until):
            waiting = choose_common_step(step, waiting)
        found.add(waiting)
    return found


@given(st.lists(st.integers(1, 8), min_size=80, max_size=80), st.integers(1, 1000))
def test_nodes_with_other_heartbeats_tell_of_common_steps(gaps: list[int], start: int) -> None:
    """With at most 8 steps between heartbeats every eighth step is told by all."""
    beats = list(accumulate(gaps, initial=start))
    steps = range(start, beats[-1])
    assert {step for step in steps if step % 8 == 0} <= told(steps, beats[1:-1])


# ---- what is told --------------------------------------------------------------------------------------


def test_what_is_a_digest_and_what_is_not() -> None:
    """32 digits in lower case; nothing else."""
    judge = ReplicaComparison(Scope(1, ("a", "b"), "a", 3.0))
    judge.add("a", Fact("state-digest", 1, encode_body(StateDigest(1, "0f" * 16))), 0.0)
    for text in ("", "0f" * 15, "0F" * 16, "0f" * 16 + "\n"):
        with pytest.raises(ValueError, match="digest"):
            judge.add("a", Fact("state-digest", 1, encode_body(StateDigest(1, text))), 0.0)


# ---- who is wrong --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("camps", "members", "ordered", "wrong"),
    [
        (["a", "b"], 2, ["a", "b"], ""),
        (["ac", "b"], 3, ["ac", "b"], "b"),
        (["a", "bc"], 3, ["bc", "a"], "a"),
        (["a", "b", "c"], 3, ["a", "b", "c"], ""),
        (["ac", "bd"], 4, ["ac", "bd"], ""),
        # Two of five are no majority, though more than anybody else told of.
        (["ab", "c"], 5, ["ab", "c"], ""),
        (["abc", "d"], 5, ["abc", "d"], "d"),
        (["c", "abe", "d"], 5, ["abe", "c", "d"], "cd"),
    ],
)
def test_who_is_wrong(camps: list[str], members: int, ordered: list[str], wrong: str) -> None:
    """By hand; each letter is a node."""
    expected = DivergenceVerdict(8, 4, tuple(map(tuple, ordered)), tuple(wrong))
    assert find_diverged_nodes(list(map(list, camps)), members, step=8, agreed_step=4) == expected


@given(st.lists(st.integers(1, 5), min_size=2, max_size=5), st.integers(0, 9))
def test_only_who_is_outside_of_more_than_half_of_all_is_wrong(sizes: list[int], silent: int) -> None:
    """Nodes that tell nothing count as members and as nothing else."""
    names = iter(range(100))
    camps = [[str(next(names)) for _ in range(size)] for size in sizes]
    members = sum(sizes) + silent
    verdict = find_diverged_nodes(camps, members, step=1)
    assert sorted(verdict.groups) == sorted(map(tuple, camps))
    assert [len(camp) for camp in verdict.groups] == sorted(sizes, reverse=True)
    others = {name for camp in camps for name in camp} - set(verdict.groups[0])
    assert set(verdict.diverged) == (others if 2 * max(sizes) > members else set())
