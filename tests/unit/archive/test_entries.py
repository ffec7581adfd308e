"""`archive.entries`: what an entry is, and which checkpoints are pruned."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_resume.archive import entries
from elastic_resume.archive.entries import EntryHeader
from elastic_resume.errors import CheckpointError, CorruptError, ForeignError, NewerFormatError, TornError
from elastic_resume.milestone import Milestone, WayBack
from tests.support.archives import PART_BYTES, make_whole_manifest
from tests.support.checkpoint_samples import RUN, make_image

ATTEMPT = entries.make_attempt_id((1, 5), "0123456789abcdef")
BEST, GOOD = Milestone("best", -0.25), Milestone("good")
HEADER = EntryHeader(ATTEMPT, PART_BYTES, ATTEMPT, 0, (1, 5, 0), (BEST, GOOD))
MANIFEST = make_whole_manifest(make_image(), 1, 5)
ENTRY = entries.encode_header(HEADER) + MANIFEST.to_bytes()


def test_entry_is_read_as_it_was_written() -> None:
    """The manifest stays byte for byte."""
    archived = entries.parse_entry(7, memoryview(ENTRY), RUN)
    assert (archived.number, archived.header, archived.version) == (7, HEADER, (1, 5))
    assert archived.manifest == MANIFEST
    assert ENTRY.endswith(MANIFEST.to_bytes())


@given(st.integers(0, len(ENTRY) - 1))
def test_cut_entry_is_refused(length: int) -> None:
    """Not one prefix is taken for an entry."""
    with pytest.raises(CheckpointError):
        entries.parse_entry(7, memoryview(ENTRY[:length]), RUN)


@given(st.integers(0, len(ENTRY) - 1), st.integers(0, 7))
def test_flipped_bit_never_changes_what_is_read(offset: int, bit: int) -> None:
    """The first line has no digest: a changed milestone at most; the bytes are checked by theirs."""
    data = bytearray(ENTRY)
    data[offset] ^= 1 << bit
    try:
        archived = entries.parse_entry(7, memoryview(data), RUN)
    except CheckpointError:
        return
    assert offset < len(entries.encode_header(HEADER))
    assert archived.manifest == MANIFEST


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"kind": "other"}, ForeignError),
        ({"format": 2}, NewerFormatError),
        ({"format": 2, "attempt": None, "unknown": 1}, NewerFormatError),
        ({"format": 0}, CorruptError),
        ({"format": True}, CorruptError),
        ({"attempt": "../../other"}, CorruptError),
        ({"attempt": entries.make_attempt_id((1, 6), "0" * 8)}, CorruptError),
        ({"part_bytes": 0}, CorruptError),
        ({"part_bytes": PART_BYTES + 1}, CorruptError),
        ({"part_bytes": True}, CorruptError),
        ({"parts": "../../other"}, CorruptError),
        ({"parts": entries.make_attempt_id((1, 6), "0" * 8)}, CorruptError),
        ({"epoch": 1}, CorruptError),
        ({"epoch": -1}, CorruptError),
        ({"epoch": None}, CorruptError),
        ({"newest": [1, 4, 0]}, CorruptError),
        ({"newest": [1, 5]}, CorruptError),
        ({"newest": [1, 5, "0"]}, CorruptError),
        ({"newest": "new"}, CorruptError),
        ({"history": "good 1-5"}, CorruptError),
        ({"history": 1}, CorruptError),
        ({"milestones": ["best"]}, CorruptError),
        ({"milestones": {"a/b": None}}, CorruptError),
        ({"milestones": {"a" * 65: None}}, CorruptError),
        ({"milestones": {"a": "1"}}, CorruptError),
        ({"milestones": {str(n): None for n in range(40)}}, CorruptError),
        ({"milestones": {f"m{n}": None for n in range(40)}}, CorruptError),
        ({"unknown": 1}, CorruptError),
    ],
)
def test_wrong_member_is_refused(change: dict[str, object], error: type[CheckpointError]) -> None:
    """Each with the class that says what to do."""
    line, _, rest = ENTRY.partition(b"\n")
    changed = json.dumps({**json.loads(line), **change}).encode() + b"\n" + rest
    with pytest.raises(error):
        entries.parse_entry(7, memoryview(changed), RUN)


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (b"", TornError),
        (b"{" * 5000, TornError),
        (b"[" * 4000 + b"\n", CorruptError),
        (b"[]\n", ForeignError),
        (b'{"kind": NaN}\n', CorruptError),
        (b"\xff\n", CorruptError),
    ],
)
def test_other_object_is_refused(data: bytes, error: type[CheckpointError]) -> None:
    """Somebody may put anything into a bucket."""
    with pytest.raises(error):
        entries.parse_header(data)


def test_entry_of_another_run_is_refused() -> None:
    """It was copied by hand."""
    with pytest.raises(ForeignError, match="belongs to the run"):
        entries.parse_entry(7, memoryview(ENTRY), "other")


@given(st.integers(0, 1 << 53), st.sampled_from([1, 3, 2048, 16 << 20, 100 << 20]))
def test_parts_are_whole_blocks_within_limits(file_bytes: int, block_bytes: int) -> None:
    """The puts of a state of terabytes are as large as a store takes, and never more than that."""
    part_bytes = entries.choose_part_bytes(file_bytes, block_bytes)
    assert part_bytes % block_bytes == 0
    assert part_bytes <= entries.MAX_PART_BYTES
    assert part_bytes >= min(entries.MIN_PART_BYTES, entries.MAX_PART_BYTES)
    if file_bytes <= entries.MAX_PARTS * (entries.MAX_PART_BYTES - block_bytes):
        assert -(-file_bytes // part_bytes) <= entries.MAX_PARTS


def test_entry_has_room_for_the_most_milestones() -> None:
    """The first ones stay; a longer line could not be read."""
    labels = [Milestone(f"{number:064d}a"[1:], -1.0 / 3 * 10**-300) for number in range(40)]
    merged = entries.merge_milestones([BEST], [*labels, Milestone("best", 9.0), Milestone("?")])
    assert (merged[0], len(merged)) == (BEST, entries.MAX_MILESTONES)
    header = replace(HEADER, milestones=merged, newest=(10**15, 10**15, 10**15))
    assert entries.parse_header(entries.encode_header(header))[0] == header


def make_header(step: int, *labels: Milestone, parts: str = "00000000") -> EntryHeader:
    """Return the header of an entry of a step."""
    version = (1, step)
    stored = entries.make_attempt_id(version, parts)
    return EntryHeader(entries.make_attempt_id(version, "0" * 8), 1, stored, 0, None, labels)


A = Milestone("a")


def best(metric: float, name: str = "best") -> Milestone:
    """Return a milestone with a metric."""
    return Milestone(name, metric)


@pytest.mark.parametrize(
    ("log", "keep", "pruned"),
    [
        ([], 1, []),
        ([(1,), (2,), (3,)], 2, [1]),
        ([(1,), (2,), (3,)], 1, [1, 2]),
        # Milestones stay, and do not count.
        ([(1, A), (2, A), (3,), (4,), (5,)], 2, [3]),
        # The best of a name stays; the others are like any.
        ([(1, best(0.1)), (2, best(0.9)), (3, best(0.5)), (4,)], 1, [1, 3]),
        ([(1, best(0.5)), (2, best(0.5)), (3,)], 1, [1]),
        ([(1, best(-2.0, "a")), (2, best(-3.0, "b")), (3,), (4,)], 1, [3]),
        # Of two names one is enough.
        ([(1, best(0.1), A), (2, best(0.9)), (3,), (4,)], 1, [3]),
        # The greatest number stays in any case: the next one follows from it.
        ([(8, best(0.9)), (9, best(0.1))], 1, []),
        ([(8,), (9, best(0.9)), (10, best(0.1))], 1, [8]),
    ],
)
def test_prune_keeps_newest_and_milestones(log: list[tuple[Any, ...]], keep: int, pruned: list[int]) -> None:
    """One case a line: number, and milestones."""
    headers = [(number, make_header(number, *labels)) for number, *labels in reversed(log)]
    assert entries.choose_pruned(headers, keep) == pruned
    with pytest.raises(ValueError, match="the newest checkpoint must stay"):
        entries.choose_pruned(headers, 0)


def test_histories_that_went_back_to_the_same_state_at_different_times_differ() -> None:
    """At most as many characters as an entry's first line takes, also for the longest names and numbers."""
    assert entries.describe_history(MANIFEST) == ""
    ways = [WayBack("best", 1, 5, 2), WayBack("best", 1, 5, 3), WayBack("b" * 64, *[1 << 53] * 3)]
    found = [entries.describe_history(replace(MANIFEST, ways_back=(way,))) for way in ways]
    assert found[:2] == ["best 1-5 2", "best 1-5 3"]
    assert len(found[2]) <= entries.MAX_HISTORY_CHARS


def test_late_entry_of_older_generation_pushes_out_nothing_newer() -> None:
    """Its number is greater, and must stay, because the next one follows it."""
    stored = entries.make_attempt_id((3, 100), "0" * 8)
    newer = EntryHeader(stored, 1, stored, 0, None, ())
    assert entries.choose_pruned([(1, make_header(5)), (2, newer), (3, make_header(10))], 1) == [1]


def test_best_of_a_history_that_was_left_outdoes_no_other() -> None:
    """It may have come from a spike of the metric."""
    log = [(1, make_header(1, best(0.9))), (2, make_header(2, best(0.1))), (3, make_header(3, best(0.2)))]
    log = [*log[:1], *[(number, replace(header, history="good 1-1")) for number, header in log[1:]]]
    assert entries.choose_pruned([*log, (4, make_header(4)), (5, make_header(5))], 1) == [2, 4]


def test_prune_counts_entries_of_one_checkpoint_once() -> None:
    """The newest has the names of all; the number to keep is one of checkpoints."""
    log = [(1, make_header(1)), (2, make_header(2)), (3, make_header(1, A)), (4, make_header(3))]
    assert entries.choose_pruned(log, 2) == [1]
    assert entries.choose_pruned(log, 1) == [1, 2]


@pytest.mark.parametrize(
    ("generation", "nonce", "expected"),
    [
        (2, "a" * 16 + "1" * 16, True),  # this job's, of a former leader
        (3, "a" * 16 + "1" * 16, True),
        (1, "b" * 16 + "1" * 16, True),  # a job that was replaced
        (2, "b" * 16 + "1" * 16, False),
        (3, "b" * 16 + "1" * 16, False),
    ],
)
def test_job_gives_way_to_another_one_of_its_generation_or_a_newer(
    generation: int, nonce: str, expected: bool
) -> None:
    """Of two jobs with one run id one goes on. An unknown winner is another job."""
    own = entries.make_attempt_id((2, 20), "a" * 32)
    assert entries.is_outdated(own, entries.make_attempt_id((generation, 30), nonce)) == expected
    assert not entries.is_outdated(own, "")
