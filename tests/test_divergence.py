"""At which steps replicas are compared, and who is wrong when they differ."""

from __future__ import annotations

import math
from itertools import accumulate, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_resume.policy.cadence import AUTO, LARGEST_SHARE, Every
from elastic_resume.policy.divergence import (
    FIRST,
    LARGEST_GAP,
    MAX_GROUPS,
    Verdict,
    are_groups,
    describe,
    due,
    gap,
    is_digest,
    judge,
    labels,
    rounder,
    span,
)

A, B, C = "a" * 16, "b" * 16, "c" * 16
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
        ("auto", 1e9, 1e-9, 1, LARGEST_GAP),
        ("auto", math.inf, 1.0, 1, LARGEST_GAP),
        ("auto", math.nan, 1.0, 1, 1),
    ],
)
def test_a_gap_is_what_was_asked_for_or_fits_the_budget(
    every: str, cost_s: float | None, step_s: float | None, cores: int, expected: int
) -> None:
    """By hand: seconds of one core for each digest, seconds for each step."""
    setting = Every.parse(every, off=True)
    assert gap(setting, cost_s=cost_s, step_s=step_s, cores=cores) == expected


@given(numbers, numbers, st.integers(0, 512))
def test_auto_is_the_smallest_power_of_two_within_the_budget(
    cost_s: float, step_s: float, cores: int
) -> None:
    """Whatever was measured."""
    found = gap(AUTO, cost_s=cost_s, step_s=step_s, cores=cores)
    assert 1 <= found <= LARGEST_GAP
    assert found & (found - 1) == 0
    budget_s = LARGEST_SHARE * step_s * max(1, cores)
    if 0 < cost_s < math.inf and 0 < step_s < math.inf and found < LARGEST_GAP:
        assert cost_s <= found * budget_s * (1 + 1e-9)
        assert found == 1 or cost_s > found / 2 * budget_s * (1 - 1e-9)


@given(st.integers(0, 12), st.integers(0, 12), st.integers(0, 1 << 20))
def test_nodes_with_different_budgets_meet(one: int, other: int, start: int) -> None:
    """Within the larger gap there is always a step that both digest."""
    larger = 1 << max(one, other)
    steps = range(max(1, start), max(1, start) + larger)
    assert any(due(step, 1 << one) and due(step, 1 << other) for step in steps)


@pytest.mark.parametrize(
    ("step", "gap", "expected"),
    [(0, 1, False), (1, 1, True), (3, 2, False), (64, 64, True), (5, 0, False), (0, 0, False)],
)
def test_a_step_is_due(step: int, gap: int, *, expected: bool) -> None:
    """Multiples of the gap; never step 0, which nobody has trained, and none where nothing is compared."""
    assert due(step, gap) is expected


def told(steps: range, beats: list[int]) -> set[int]:
    """What a node tells of those steps, with a heartbeat before each of ``beats``."""
    found: set[int] = set()
    for since, until in pairwise([steps.start, *sorted(beats), steps.stop]):
        waiting = 0
        for step in range(since, until):
            waiting = rounder(step, waiting)
        found.add(waiting)
    return found


@given(st.lists(st.integers(1, 8), min_size=80, max_size=80), st.integers(1, 1000))
def test_nodes_with_other_heartbeats_tell_of_common_steps(gaps: list[int], start: int) -> None:
    """With at most 8 steps between heartbeats every eighth step is told by all."""
    beats = list(accumulate(gaps, initial=start))
    steps = range(start, beats[-1])
    assert {step for step in steps if step % 8 == 0} <= told(steps, beats[1:-1])


# ---- what is told --------------------------------------------------------------------------------------


@given(st.integers(0, 100_000))
def test_any_number_of_tensors_has_few_digests(tensors: int) -> None:
    """One for each, or for as few neighbours as the bound allows."""
    size = span(tensors)
    assert math.ceil(tensors / size) <= MAX_GROUPS
    assert size == 1 or math.ceil(tensors / (size - 1)) > MAX_GROUPS


def test_what_is_a_digest_and_what_is_not() -> None:
    """Of a state 32 digits, of a tensor 16, in lower case; nothing else."""
    assert is_digest("0f" * 16)
    assert not any(map(is_digest, ["", "0f" * 15, "0F" * 16, "0f" * 16 + "\n", b"0f" * 16, None, 5]))
    assert are_groups([])
    assert are_groups((A, B))
    assert are_groups([A] * MAX_GROUPS)
    assert not any(
        map(are_groups, [[A] * (MAX_GROUPS + 1), [A, 5], ["a" * 15], ["A" * 16], {A}, A, None, [[]]])
    )


# ---- who is wrong --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prints", "members", "expected"),
    [
        ({}, 0, None),
        ({"a": (A, B)}, 3, None),
        ({"a": (A, B), "b": (A, B)}, 0, None),
        ({"a": (A, B), "b": (A, C)}, 0, Verdict((("a",), ("b",)), (), (1,), 1)),
        ({"a": (A,), "b": (B,), "c": (A,)}, 0, Verdict((("a", "c"), ("b",)), ("b",), (0,), 1)),
        ({"a": (B,), "b": (A,), "c": (A,)}, 0, Verdict((("b", "c"), ("a",)), ("a",), (0,), 1)),
        ({"a": (A,), "b": (B,), "c": (C,)}, 0, Verdict((("a",), ("b",), ("c",)), (), (0,), 1)),
        ({"a": (A,), "b": (B,), "c": (A,), "d": (B,)}, 0, Verdict((("a", "c"), ("b", "d")), (), (0,), 1)),
        # Two of five are no majority, though more than anybody else told of.
        ({"a": (A,), "b": (A,), "c": (B,)}, 5, Verdict((("a", "b"), ("c",)), (), (0,), 1)),
        (
            {"a": (A,), "b": (A,), "c": (A,), "d": (B,)},
            5,
            Verdict((("a", "b", "c"), ("d",)), ("d",), (0,), 1),
        ),
        # One that told its digest only, or has other tensors, is wrong; in what is not known.
        ({"a": (A, B), "b": (A, B), "c": ("f" * 32,)}, 0, Verdict((("a", "b"), ("c",)), ("c",))),
        ({"a": (A, B), "b": (A, B), "c": (A,)}, 0, Verdict((("a", "b"), ("c",)), ("c",))),
        ({"a": ("e" * 32,), "b": ("f" * 32,)}, 0, Verdict((("a",), ("b",)))),
        # Of those that can be compared tensor by tensor it is known.
        (
            {"a": (A, B), "b": (A, B), "c": (A, C), "d": ("f" * 32,), "e": (A, B)},
            0,
            Verdict((("a", "b", "e"), ("c",), ("d",)), ("c", "d"), (1,), 1),
        ),
    ],
)
def test_who_is_wrong(prints: dict[str, tuple[str, ...]], members: int, expected: Verdict | None) -> None:
    """By hand."""
    assert judge(prints, members) == expected


@given(
    st.dictionaries(
        st.text("abcdefgh", min_size=1, max_size=2), st.tuples(*[st.sampled_from([A, B])] * 3), max_size=9
    )
)
def test_a_verdict_holds_what_it_says(prints: dict[str, tuple[str, ...]]) -> None:
    """Camps are who agrees, wrong is who is outside of more than half, indices are where any two differ."""
    verdict = judge(prints)
    if verdict is None:
        assert len(set(prints.values())) < 2
        return
    assert sorted(node for camp in verdict.camps for node in camp) == sorted(prints)
    assert all(len({prints[node] for node in camp}) == 1 for camp in verdict.camps)
    assert len({prints[camp[0]] for camp in verdict.camps}) == len(verdict.camps)
    sizes = [len(camp) for camp in verdict.camps]
    assert sizes == sorted(sizes, reverse=True)
    if 2 * sizes[0] > len(prints):
        assert set(verdict.wrong) == set(prints) - set(verdict.camps[0])
    else:
        assert not verdict.wrong
    unequal = [index for index in range(3) if len({one[index] for one in prints.values()}) > 1]
    assert (list(verdict.differing), verdict.count) == (unequal, len(unequal))


def test_of_many_differing_tensors_the_first_are_told() -> None:
    """With their number."""
    verdict = judge({"a": (A,) * 4000, "b": (A, *(B,) * 3999)})
    assert verdict is not None
    assert verdict.differing == tuple(range(1, FIRST + 1))
    assert verdict.count == 3999


# ---- in words ------------------------------------------------------------------------------------------


WEIGHTS = ("fc.weight", "fc.bias", "out.weight", "out.bias", "norm.weight", "norm.bias")


ALONE = """
replicas differ at step 128: node c is not as nodes a and b, the majority, first in fc.bias. Look at what that
machine computes (memory, device), or at what the script does only there (all were equal at step 96). Start
again without it. With --on-divergence resume-from-majority the job goes on by itself. Machines of different
kinds round differently: with --check-replicas off they go on, and one node's values count at each resume.
"""
GOES_ON = """
replicas differ at step 128: nodes c and d are not as nodes a, b and e, the majority, first in fc.weight,
fc.bias, out.weight, out.bias and 5 more. The majority's state counts, and no later copy of the others does
(all were equal at step 96).
"""
NOBODY = """
replicas differ at step 128: node a against node b, which tensors is not known. There is no majority to say
who is wrong (no step of this generation was seen equal). Look for what nodes do not share: random numbers,
samples, a broken device, state that changes between run.step() and optimizer.step() (run.verify_copies finds
it). To go on from an older checkpoint move the newer ones elsewhere. Machines of different kinds round
differently: with --check-replicas off they go on, and one node's values count at each resume.
"""


@pytest.mark.parametrize(
    ("verdict", "agreed", "goes_on", "expected"),
    [
        (Verdict((("a", "b"), ("c",)), ("c",), (1,), 1), 96, False, ALONE),
        (Verdict((("a", "b", "e"), ("c",), ("d",)), ("c", "d"), (0, 1, 2, 3, 4), 9), 96, True, GOES_ON),
        (Verdict((("a",), ("b",))), 0, False, NOBODY),
    ],
)
def test_people_are_told_who_differs_in_what_and_what_to_do(
    verdict: Verdict, agreed: int, expected: str, *, goes_on: bool
) -> None:
    """The whole sentence."""
    told = describe(verdict, WEIGHTS, step=128, agreed=agreed, goes_on=goes_on)
    assert told == " ".join(expected.split())


def test_tensors_are_named_alone_in_groups_or_by_number() -> None:
    """Where many share digests, by the first and the last of them; where names are not known, by place."""
    verdict = Verdict((("a",), ("b",)), (), (0, 3), 2)
    assert labels(verdict, WEIGHTS) == ["fc.weight", "out.bias"]
    assert labels(verdict, ()) == ["tensor 0", "tensor 3"]
    many = [f"layer{number}" for number in range(10_000)]
    assert labels(verdict, many) == ["layer0 … layer2", "layer9 … layer11"]


@given(
    st.lists(st.lists(st.text(max_size=9), max_size=9).map(tuple), max_size=9).map(tuple),
    st.lists(st.text(max_size=9), max_size=9).map(tuple),
    st.lists(st.integers(0, 1 << 60), max_size=9).map(tuple),
    st.integers(0, 1 << 60),
)
def test_whatever_a_peer_calls_a_verdict_can_be_said(
    camps: tuple[tuple[str, ...], ...], wrong: tuple[str, ...], differing: tuple[int, ...], count: int
) -> None:
    """In one line of bounded length."""
    text = describe(Verdict(camps, wrong, differing, count), WEIGHTS, step=1)
    assert text.isprintable()
    assert len(text) < 5000
