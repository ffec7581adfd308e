"""Which lines are printed once, and that none is lost or out of its rank's order."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_resume.mechanisms.collapsed_output.line_collapser import (
    MAX_HELD_BYTES,
    MAX_PARTIAL_BYTES,
    PARTIAL_S,
    WINDOW_S,
    LineCollapser,
)

Feeds = list[tuple[int, bytes, float]]
RANKS = 2
LATE = WINDOW_S + 0.01
RED = b"\x1b[31mred\x1b[0m"


def run(feeds: Feeds) -> bytes:
    """Return all that is printed."""
    collapser = LineCollapser(RANKS)
    printed = b"".join(collapser.feed(rank, data, now) for rank, data, now in feeds)
    return printed + collapser.flush()


@pytest.mark.parametrize(
    ("feeds", "printed"),
    [
        ([(0, b"a\n", 0), (1, b"a\n", 0.9)], b"a [2 ranks]\n"),
        ([(0, b"a\n", 0), (1, b"a\n", LATE)], b"a\na\n"),
        ([(0, b"a\nb\n", 0), (1, b"a\nb\n", 0)], b"a [2 ranks]\nb [2 ranks]\n"),
        ([(0, b"own\na\n", 0), (1, b"a\n", 0)], b"own\na [2 ranks]\n"),
        ([(0, b"a\nb\n", 0), (1, b"b\na\n", 0)], b"a\nb [2 ranks]\na\n"),
        ([(0, b"a\na\n", 0), (1, b"a\n", 0)], b"a [2 ranks]\na\n"),
        ([(0, b"a", 0), (0, b"\n", 0.01), (1, b"a\n", 0.02)], b"a [2 ranks]\n"),
        ([(0, b"a\npart", 0), (1, b"a\n", 0.9)], b"a [2 ranks]\npart"),
        ([(0, "grün\n".encode(), 0), (1, "grün\n".encode(), 0)], "grün [2 ranks]\n".encode()),
        ([(0, RED + b"\n", 0), (1, RED + b"\n", 0)], RED + b" [2 ranks]\n"),
    ],
    ids=[
        *("equal", "late", "two", "own-line-first", "other-order", "twice", "end-by-itself", "before-part"),
        *("utf-8", "colour"),
    ],
)  # fmt: skip
def test_equal_lines_are_one(feeds: Feeds, printed: bytes) -> None:
    """All ranks' lines within a second, whatever else a rank prints."""
    assert run(feeds) == printed


@pytest.mark.parametrize(
    "data",
    [
        *(
            b"\r 50%",
            b"50%\r\n",
            b"\x1b[2K50%\n",
            b"\x1b[A50%\n",
            b"a\bb\n",
            b"\xff\xfe\n",
            b"\x1b]0;title\a\n",
        ),
        b"x" * (MAX_PARTIAL_BYTES + 1),
    ],
    ids=["bar", "crlf", "erase", "up", "back", "no-utf-8", "title", "long-part"],
)
def test_what_may_be_a_progress_bar_is_printed_at_once(data: bytes) -> None:
    """It pushes out the lines before it, and is not collapsed even if it is equal."""
    collapser = LineCollapser(RANKS)
    assert collapser.feed(0, b"held\n", 0) == b""
    assert collapser.feed(0, data, 0) == b"held\n" + data
    assert collapser.feed(1, data, 0) == data
    assert collapser.find_deadline() is None


def test_rest_of_a_printed_part_is_printed_at_once() -> None:
    """The line after it is held again."""
    collapser = LineCollapser(RANKS)
    assert collapser.feed(0, b"name: ", 0) == b""
    assert collapser.find_deadline() == PARTIAL_S
    assert collapser.expire(PARTIAL_S) == b"name: "
    assert collapser.feed(0, b"resnet", PARTIAL_S) == b"resnet"
    assert collapser.feed(0, b"\nnext\n", PARTIAL_S) == b"\n"
    assert collapser.find_deadline() == PARTIAL_S + WINDOW_S
    assert collapser.expire(PARTIAL_S + WINDOW_S) == b"next\n"


def test_flood_is_printed_before_its_time() -> None:
    """No rank makes the process hold more than a limit."""
    collapser = LineCollapser(RANKS)
    lines = [b"%d" % number + b"x" * 1000 for number in range(MAX_HELD_BYTES // 1000)]
    printed = b"".join(collapser.feed(0, line + b"\n", 0) for line in lines)
    assert printed.startswith(lines[0] + b"\n")
    assert printed + collapser.flush() == b"\n".join([*lines, b""])


LINES = st.sampled_from([b"a", b"b", b"c", b"", b"d\r", b"\xff"])
PAUSES = st.sampled_from([0.0, 0.3, 0.6, LATE])
STEPS = st.lists(
    st.tuples(st.integers(0, RANKS - 1), st.lists(LINES, min_size=1, max_size=4), PAUSES), max_size=20
)


@given(STEPS)
def test_no_line_is_lost_and_each_rank_keeps_its_order(steps: list[tuple[int, list[bytes], float]]) -> None:
    """Each line comes out as often as it was written, and each rank's lines are a part of what comes out."""
    now, feeds = 0.0, []
    for rank, lines, pause in steps:
        now += pause
        feeds.append((rank, b"".join(line + b"\n" for line in lines), now))
    printed = run(feeds).split(b"\n")[:-1]
    suffix = b" [%d ranks]" % RANKS
    counts = Counter[bytes]()
    for line in printed:
        counts[line.removesuffix(suffix)] += RANKS if line.endswith(suffix) else 1
    assert counts == Counter(line for _, lines, _ in steps for line in lines)
    for rank in range(RANKS):
        left = iter(line.removesuffix(suffix) for line in printed)
        assert all(line in left for of_rank, lines, _ in steps if of_rank == rank for line in lines)


@given(st.lists(st.tuples(st.binary(max_size=6), st.sampled_from([0.0, PARTIAL_S, LATE])), max_size=20))
def test_bytes_of_one_rank_come_out_as_they_are(pieces: list[tuple[bytes, float]]) -> None:
    """Wherever its writes are cut, and whenever; and nothing is held longer than its time."""
    collapser, now, printed = LineCollapser(RANKS), 0.0, b""
    for data, pause in pieces:
        now += pause
        printed += collapser.feed(0, data, now)
        deadline = collapser.find_deadline()
        assert deadline is None or now < deadline <= now + WINDOW_S + PARTIAL_S
    assert printed + collapser.flush() == b"".join(data for data, _ in pieces)
