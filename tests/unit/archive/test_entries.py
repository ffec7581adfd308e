"""`archive.entries`: what an entry is, and which checkpoints are pruned."""

from __future__ import annotations

import json
import re
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
OTHER_STEP = entries.make_attempt_id((1, 6), "0" * 8)
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
    ("change", "error", "words"),
    [
        ({"kind": "other"}, ForeignError, "not one of an archive"),
        ({"format": 2}, NewerFormatError, "format 2; this elastic_resume reads up to 1"),
        ({"format": 2, "attempt": None, "unknown": 1}, NewerFormatError, "format 2"),
        ({"format": 0}, CorruptError, "impossible format 0"),
        ({"format": True}, CorruptError, "impossible format True"),
        ({"attempt": "../../other"}, CorruptError, "attempt is '../../other', not an id"),
        ({"attempt": 5}, CorruptError, "attempt is 5, not an id"),
        ({"attempt": OTHER_STEP}, CorruptError, "of another step than the attempt"),
        (
            {"attempt": OTHER_STEP, "parts": OTHER_STEP, "newest": [1, 6, 0]},
            CorruptError,
            "not of the attempt",
        ),
        ({"part_bytes": 0}, CorruptError, "part_bytes is 0"),
        ({"part_bytes": PART_BYTES + 1}, CorruptError, "are no whole blocks"),
        ({"part_bytes": True}, CorruptError, "part_bytes is True"),
        ({"part_bytes": "8"}, CorruptError, "part_bytes is '8'"),
        ({"parts": "../../other"}, CorruptError, "parts is '../../other', not an id"),
        ({"parts": OTHER_STEP}, CorruptError, "of another step than the attempt"),
        ({"epoch": 1, "newest": [1, 5, 1]}, CorruptError, "its epoch is 1, and its manifest's 0"),
        ({"epoch": -1}, CorruptError, "epoch is -1"),
        ({"epoch": 1 << 53}, CorruptError, f"epoch is {1 << 53}, not a number"),
        ({"epoch": None}, CorruptError, "epoch is None"),
        ({"newest": [1, 4, 0]}, CorruptError, "not that of a log with this entry"),
        ({"newest": [1, 5]}, CorruptError, "not that of a log with this entry"),
        ({"newest": [1, 5, 0, 0]}, CorruptError, "not that of a log with this entry"),
        ({"newest": [1, 5, "0"]}, CorruptError, "not that of a log with this entry"),
        ({"newest": "new"}, CorruptError, "not that of a log with this entry"),
        ({"newest": 5}, CorruptError, "not that of a log with this entry"),
        ({"history": "good 1-5"}, CorruptError, "and its manifest's another one"),
        ({"history": "g" * (entries.MAX_HISTORY_CHARS + 1)}, CorruptError, "not a request and a step"),
        ({"history": 1}, CorruptError, "history is 1"),
        ({"milestones": ["best"]}, CorruptError, "of a wrong type"),
        ({"milestones": {"a/b": None}}, CorruptError, "a milestone is 'a/b'"),
        ({"milestones": {"a" * 65: None}}, CorruptError, "not a name"),
        ({"milestones": {"a": "1"}}, CorruptError, "a metric is '1'"),
        ({"milestones": {str(n): None for n in range(40)}}, CorruptError, "not a name"),
        ({"milestones": {f"m{n}": None for n in range(40)}}, CorruptError, "more than 32 milestones"),
        ({"unknown": 1}, CorruptError, "missing, unknown or of a wrong type"),
    ],
)
def test_wrong_member_is_refused(change: dict[str, object], error: type[CheckpointError], words: str) -> None:
    """Each with the class that says what to do, and the member."""
    line, _, rest = ENTRY.partition(b"\n")
    changed = json.dumps({**json.loads(line), **change}).encode() + b"\n" + rest
    with pytest.raises(error, match=re.escape(words)):
        entries.parse_entry(7, memoryview(changed), RUN)


def test_metric_that_is_not_finite_is_neither_read_nor_written() -> None:
    """JSON has no infinity, but a number may be too large for a float."""
    changed = ENTRY.replace(b'"best":-0.25', b'"best":1e999')
    assert changed != ENTRY
    with pytest.raises(CorruptError, match="a metric is inf"):
        entries.parse_entry(7, memoryview(changed), RUN)
    with pytest.raises(ValueError, match="a metric is inf"):
        entries.encode_header(replace(HEADER, milestones=(Milestone("a", float("inf")),)))


def test_entry_of_any_run_is_read_if_none_is_asked_for_and_a_huge_one_never() -> None:
    """Commands list an archive whose run they do not know."""
    assert entries.parse_entry(7, memoryview(ENTRY), None).header == HEADER
    with pytest.raises(CorruptError, match="more than the limit"):
        entries.parse_entry(7, memoryview(bytes(entries.MAX_ENTRY_BYTES + 1)), RUN)


def test_what_is_no_entry_or_id_has_no_version() -> None:
    """What another version of elastic_resume wrote is told from what is anybody's."""
    assert entries.begins_as_entry(ENTRY)
    assert not entries.begins_as_entry(b"{}")
    assert entries.find_version(ENTRY) == (1, 5)
    assert entries.find_version(b'{"attempt": 5}\n') is None
    assert replace(HEADER, attempt="other").version == (0, 0)
    assert not entries.is_outdated("other", ATTEMPT)
    with pytest.raises(ValueError, match="is not 8 to 32 hexadecimal digits"):
        entries.make_attempt_id((1, 5), "nonce")


def test_names_that_are_no_milestones_are_not_merged() -> None:
    """An entry with one could not be read."""
    assert entries.merge_milestones([BEST], [Milestone("a/b"), GOOD]) == (BEST, GOOD)


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


def test_part_is_a_block_at_least() -> None:
    """Even if one is greater than a store takes: its put fails, and nothing loops over parts of no bytes."""
    block_bytes = entries.MAX_PART_BYTES + 1
    assert entries.choose_part_bytes(1, block_bytes) == block_bytes


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
        ([(1,), (2,), (3, A)], 1, [1]),
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
