"""Test which rank is named for its digests, by a table."""

from __future__ import annotations

import pytest

from elastic_resume.mechanisms.compute_check.judge import (
    ComputeComparison,
    Outcome,
    RankResult,
    compare,
    needs_repeat,
)


def results(text: str) -> list[RankResult]:
    """Return a result for each word: a letter is a digest, what follows a colon the device."""
    pairs = (word.partition(":") for word in text.split())
    return [RankResult(tuple(digests), device) for digests, _, device in pairs]


EQUAL = ComputeComparison(Outcome.EQUAL)


def odd(**majority: int) -> ComputeComparison:
    """Return a comparison that names ranks, each with a rank of the majority."""
    pairs = {int(name[1:]): right for name, right in majority.items()}
    return ComputeComparison(Outcome.ODD, tuple(pairs), pairs)


CASES = [
    ("all equal", "a a a", EQUAL),
    ("a rank alone, twice the same", "aa", EQUAL),
    ("one of three differs each time alike", "aaa bbb aaa", odd(r1=0)),
    ("one of three differs from itself too", "abc ddd ddd", odd(r0=1)),
    ("one of three was wrong once", "dad ddd ddd", odd(r0=1)),
    ("two of five differ", "aaa bbb aaa ccc aaa", odd(r1=0, r3=0)),
    ("two that differ", "aaa bbb", ComputeComparison(Outcome.UNKNOWN, (0, 1))),
    ("two, one of which differs from itself", "aaa aba", ComputeComparison(Outcome.UNKNOWN, (0, 1))),
    ("no majority of four", "aaa aaa bbb bbb", ComputeComparison(Outcome.UNKNOWN, (0, 1, 2, 3))),
    ("each of three differs from itself", "abc bca cab", ComputeComparison(Outcome.UNSTABLE, (0, 1, 2))),
    ("most of three differ from themselves", "aaa aab aac", ComputeComparison(Outcome.UNSTABLE, (1, 2))),
    ("a rank alone differs from itself", "aab", ComputeComparison(Outcome.UNSTABLE, (0,))),
    ("each of three has its own", "aaa bbb ccc", ComputeComparison(Outcome.ALL_DIFFERENT, (0, 1, 2))),
    ("other devices differ", "a:x a:x a:x b:y b:y", EQUAL),
    ("one of three on one device differs", "aa:x aa:x bb:x bb:y bb:y", odd(r2=0)),
    (
        "one of two on one device differs",
        "aa:x aa:x aa:x aa:y bb:y",
        ComputeComparison(Outcome.UNKNOWN, (3, 4)),
    ),
]


@pytest.mark.parametrize(("text", "expected"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_rank_outside_the_majority_of_its_devices_is_named(text: str, expected: ComputeComparison) -> None:
    """Without a strict majority none is; a model that differs from itself on most ranks is no evidence."""
    assert compare(results(text)) == expected
    assert needs_repeat(results(text)) is (expected != EQUAL)


def test_changing_ranks_that_differ_from_themselves_are_no_fault() -> None:
    """Chance chooses them, since the model is rarely deterministic. The same rank again is named again."""
    assert compare(results("abb bbb bbb"), {0}) == odd(r0=1)
    assert compare(results("abb bbb bbb"), {2}) == ComputeComparison(Outcome.UNSTABLE, (0,))
    assert compare(results("aaa bbb bbb"), {2}) == odd(r0=1)
