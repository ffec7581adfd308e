"""Test the files of logged values: what a kill has cut, and which generations count."""

from __future__ import annotations

from pathlib import Path

from elastic_resume.mechanisms.curves import journal
from elastic_resume.mechanisms.curves.journal import Moment

NOTHING = Moment(-1, -1)


def write(node_dir: Path, generation: int, data: bytes) -> None:
    """Write the file of a generation."""
    path = journal.record_path(node_dir, generation)
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(data)


def make(begin: int, source: int, steps: range, *, goes_back: bool = False, scale: float = 1.0) -> bytes:
    """Return the bytes of a file with a point for each step."""
    lines = [journal.format_begin(Moment(begin, 0), source, goes_back=goes_back)]
    lines += [journal.format_line([step, 0, 5.0, {"loss": scale * step}]) for step in steps]
    return b"".join(lines)


def test_cut_line_is_not_read(tmp_path: Path) -> None:
    """At whichever byte: the step of the line before it is the newest whose values are there."""
    whole = make(0, 0, range(1, 4))
    third = whole.index(b"[3,")
    for size in range(third, len(whole)):
        write(tmp_path, 1, whole[:size])
        found = journal.read_records(tmp_path, 1)
        head = journal.read_head(tmp_path, 1)
        assert found is not None
        assert head is not None
        assert found.closed == head.closed == journal.read_closed(tmp_path)[1] == Moment(2, 0)
        assert [moment.step for moment, _, _ in found.lines] == [1, 2]
    write(tmp_path, 1, whole)
    assert journal.read_closed(tmp_path) == {1: Moment(3, 0)}


def test_file_without_its_first_line_counts_for_nothing(tmp_path: Path) -> None:
    """The worker died before it had written that."""
    for data in (b"", b'{"step":0,"epo', b"\n", b"[1,0,2.0,{}]\n"):
        write(tmp_path, 1, data)
        assert journal.read_records(tmp_path, 1) is None
        assert journal.read_closed(tmp_path) == {}


def test_begin_counts_as_closed(tmp_path: Path) -> None:
    """The values up to it are in the files of other generations."""
    write(tmp_path, 7, make(40, 6, range(0)))
    assert journal.read_closed(tmp_path) == {7: Moment(40, 0)}


def test_step_without_values_is_closed_and_no_point(tmp_path: Path) -> None:
    """A script need not log in each step."""
    write(tmp_path, 1, make(0, 0, range(1, 2)) + journal.format_line([2, 0, 6.0, {}]))
    found = journal.read_records(tmp_path, 1)
    assert found is not None
    assert found.closed == Moment(2, 0)
    assert len(found.lines) == 1


def test_points_follow_the_states_that_were_resumed(tmp_path: Path) -> None:
    """Generation 2 went on from step 3 of the first one, and generation 4 from step 4 of the second."""
    write(tmp_path, 1, make(0, 0, range(1, 7)))
    write(tmp_path, 2, make(3, 1, range(4, 6), scale=10))
    write(tmp_path, 3, make(3, 1, range(4, 9), scale=100))  # no state of it was resumed
    write(tmp_path, 4, make(4, 2, range(5, 8), scale=1000))
    heads = {n: head for n in range(1, 5) if (head := journal.read_head(tmp_path, n))}
    chain = journal.follow_chain(4, heads)
    assert chain == journal.Chain((4, 2, 1), (), has_origin=True)
    records = {n: found for n in chain.generations if (found := journal.read_records(tmp_path, n))}
    points = journal.collect_points(chain, records)
    assert [point.values["loss"] for point in points.values()] == [1, 2, 3, 40, 5000, 6000, 7000]


def test_missing_values_are_a_gap(tmp_path: Path) -> None:
    """The job goes on from step 5 of a generation, of which this node has three."""
    write(tmp_path, 1, make(0, 0, range(1, 4)))
    write(tmp_path, 2, make(5, 1, range(6, 8)))
    heads = {n: head for n in (1, 2) if (head := journal.read_head(tmp_path, n))}
    assert journal.follow_chain(2, heads).gaps == ((1, Moment(3, 0), Moment(5, 0)),)
    assert journal.follow_chain(2, {2: heads[2]}) == journal.Chain((2,), (), has_origin=False)


def test_values_of_an_evaluation_join_their_step(tmp_path: Path) -> None:
    """They come after the step, in the next epoch, and in another generation once more."""
    evaluation = journal.format_line([2, 1, 6.0, {"eval": 9.0}])
    write(tmp_path, 1, make(0, 0, range(1, 3)) + evaluation)
    write(tmp_path, 2, journal.format_begin(Moment(2, 0), 1, goes_back=False) + evaluation)
    records = {n: found for n in (1, 2) if (found := journal.read_records(tmp_path, n))}
    points = journal.collect_points(journal.follow_chain(2, records), records)
    assert points[2].values == {"loss": 2.0, "eval": 9.0}


def test_way_back_ends_what_earlier_writers_knew(tmp_path: Path) -> None:
    """What a tracker had before it is of a history that the job has left."""
    write(tmp_path, 1, make(0, 0, range(1, 9)))
    write(tmp_path, 2, make(4, 1, range(5, 6), goes_back=True))
    write(tmp_path, 3, make(5, 2, range(6, 7)))
    journal.written_path(tmp_path, 1).write_bytes(b'{"csv:a":8}\n')
    journal.written_path(tmp_path, 3).write_bytes(b'{"csv:a":5}\n{"csv:a":6}\n{"csv')
    records = {n: found for n in (1, 2, 3) if (found := journal.read_records(tmp_path, n))}
    chain = journal.follow_chain(3, records)
    since = journal.list_since_way_back(chain, records)
    assert since == (3, 2)
    assert journal.read_written(tmp_path, since) == {"csv:a": 6}
    assert journal.read_written(tmp_path, chain.generations) == {"csv:a": 8}
