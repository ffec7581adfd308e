"""What an archive passes over or refuses, each alone: foreign names, entries that are gone, wrong stores."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from elastic_resume.archive import entries
from elastic_resume.archive.archive import Archive, list_names, open_archive, try_store
from elastic_resume.archive.directory_store import DirectoryStore
from elastic_resume.archive.entries import ArchivedCheckpoint
from elastic_resume.archive.store import StoredName
from elastic_resume.errors import ArchiveError, ArchiveErrorKind, SecondWriterError, TornError
from elastic_resume.milestone import Milestone
from tests.support.archives import archive_step, begin, commit, put_parts
from tests.support.checkpoint_samples import RUN, make_image


@pytest.fixture
def archive(tmp_path: Path) -> Archive:
    """An empty archive."""
    return open_archive(str(tmp_path), RUN)


def test_sweep_keeps_parts_of_an_entry_that_another_node_has_put_meanwhile(
    archive: Archive, tmp_path: Path
) -> None:
    """This node remembers an entry of that number, which a person has removed."""
    other = open_archive(str(tmp_path), RUN)
    archive_step(archive, 1)
    assert archive.find_numbers(lambda _: True) == [1]
    (tmp_path / RUN / "log" / "00000001").unlink()
    attempt = begin(other, 2)
    put_parts(other, attempt, make_image(2))
    commit(other, attempt)
    assert archive.sweep([attempt.id]) == []
    assert other.list_parts(attempt.id)


def test_number_that_another_job_has_taken_is_noticed_before_the_parts_are_stored(
    archive: Archive, tmp_path: Path
) -> None:
    """The error has the number and the other attempt, also if that one cannot be read."""
    ours, theirs = begin(archive, 5), begin(open_archive(str(tmp_path), RUN), 6)
    archive.check_number(ours)
    put_parts(archive, theirs, make_image(6))
    commit(open_archive(str(tmp_path), RUN), theirs)
    with pytest.raises(SecondWriterError) as caught:
        archive.check_number(ours)
    assert (caught.value.number, caught.value.attempt) == (1, theirs.id)
    (tmp_path / RUN / "log" / "00000001").write_bytes(
        b'{"kind":"elastic_resume archived checkpoint","format":9}\n'
    )
    with pytest.raises(SecondWriterError) as caught:
        open_archive(str(tmp_path), RUN).check_number(ours)
    assert caught.value.attempt == ""


def test_entry_that_is_gone_when_it_is_read_is_none(
    archive: Archive, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A listing may be older than a deletion."""
    attempt = begin(archive, 5)
    monkeypatch.setattr(archive, "list_numbers", lambda: [7])
    archive.check_number(attempt)
    assert archive.list_milestones() == {}


def test_entry_that_is_gone_when_it_is_read_stops_no_sweep(
    archive: Archive, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that cannot be read may name any parts; one that is gone names none."""
    archive_step(archive, 1)
    dead = begin(archive, 2)
    put_parts(archive, dead, make_image(2))
    monkeypatch.setattr(archive, "list_numbers", lambda: [7, 1])
    assert archive.sweep([dead.id]) == [dead.id]


def test_milestone_of_an_entry_that_is_pruned_meanwhile_is_refused(
    archive: Archive, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its header was read, and the whole entry is gone."""
    archive_step(archive, 1)
    real = DirectoryStore.get_range

    def get_range(store: DirectoryStore, name: str, start: int, size: int) -> memoryview | None:
        return None if size > entries.MAX_LINE_BYTES and "/log/" in name else real(store, name, start, size)

    monkeypatch.setattr(DirectoryStore, "get_range", get_range)
    with pytest.raises(TornError, match="does not exist any more"):
        archive.add_milestones((1, 1), "1" * 32, [Milestone("a")])


def test_of_two_entries_of_one_checkpoint_the_newer_is_found(archive: Archive) -> None:
    """The second has a milestone more."""
    archive_step(archive, 1)
    archive.add_milestones((1, 1), "1" * 32, [Milestone("a")])
    assert archive.list_numbers() == [2, 1]
    assert archive.find_numbers(lambda _: True) == [2]


def test_entry_that_cannot_be_read_has_no_milestones(archive: Archive, tmp_path: Path) -> None:
    """Those of the others are listed."""
    archive_step(archive, 1, milestones=[Milestone("a")])
    (tmp_path / RUN / "log" / "00000002").write_bytes(b"damaged")
    assert {
        version: [each.name for each in found] for version, found in archive.list_milestones().items()
    } == {(1, 1): ["a"]}


def test_image_needs_a_buffer_of_its_size(archive: Archive) -> None:
    """Neither a shorter one nor a longer one is filled."""
    size = len(archive_step(archive, 1))
    (entry,) = archive.list_checkpoints(1)
    assert isinstance(entry, ArchivedCheckpoint)
    for wrong in (size - 1, size + 1):
        with pytest.raises(ValueError, match=f"a buffer of {wrong} bytes"):
            archive.read_image(entry, memoryview(bytearray(wrong)))


def test_foreign_names_are_passed_over(archive: Archive, tmp_path: Path) -> None:
    """People and tools leave files beside parts and events; an id that is a file is no attempt."""
    archive_step(archive, 1)
    (attempt,) = archive.list_attempts()
    parts = tmp_path / RUN / "parts"
    (parts / "notes").mkdir()
    (parts / attempt.replace(attempt[-1], "0" if attempt[-1] != "0" else "1")).write_bytes(b"")
    (parts / attempt / "README").write_bytes(b"")
    assert archive.list_attempts() == [attempt]
    assert archive.list_parts(attempt) == {0, 1, 2}
    archive.put_events("n0", b"{}\n")
    for name in ("n0.txt", "a b.jsonl"):
        (tmp_path / RUN / "events" / name).write_bytes(b"")
    assert {node: bytes(data) for node, data in archive.read_events().items()} == {"n0": b"{}\n"}


def test_events_that_are_gone_when_they_are_read_are_left_out(
    archive: Archive, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process has deleted them."""
    archive.put_events("n0", b"{}\n")
    monkeypatch.setattr(DirectoryStore, "get_range", lambda *_: None)
    assert archive.read_events() == {}


def test_names_beside_a_run_are_listed(archive: Archive, tmp_path: Path) -> None:
    """Files are no runs, and the address of one run is no archive."""
    archive_step(archive, 1)
    archive_step(open_archive(str(tmp_path), "other"), 1)
    (tmp_path / "README").write_bytes(b"")
    assert archive.list_other_names() == ["other"]
    with pytest.raises(ArchiveError, match="address of one run") as caught:
        list_names(DirectoryStore(tmp_path / RUN))
    assert caught.value.kind == ArchiveErrorKind.MISPLACED


def refuse(*_: object) -> bool:
    """Refuse a request."""
    raise ArchiveError("no", kind=ArchiveErrorKind.FORBIDDEN)


def test_entry_that_the_store_refuses_is_not_put_in_another_way(
    archive: Archive, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only a store that cannot create gets a plain put, which replaces."""
    attempt = begin(archive, 1)
    put_parts(archive, attempt, make_image(1))
    monkeypatch.setattr(DirectoryStore, "put_if_absent", refuse)
    with pytest.raises(ArchiveError) as caught:
        commit(archive, attempt)
    assert caught.value.kind == ArchiveErrorKind.FORBIDDEN
    assert archive.list_numbers() == []


@pytest.mark.parametrize(
    ("method", "answer", "error"),
    [
        ("put_if_absent", refuse, "no"),
        ("get_range", lambda *_: None, "other bytes"),
        ("list", lambda *_: [StoredName("other", False)], "does not list"),
        ("put_if_absent", lambda *_: True, "replaces an object"),
    ],
)
def test_store_that_fails_a_trial_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, answer: Callable[..., Any], error: str
) -> None:
    """And the trial's object is deleted."""
    store = DirectoryStore(tmp_path)
    assert try_store(store)
    monkeypatch.setattr(DirectoryStore, method, answer)
    with pytest.raises(ArchiveError, match=error):
        try_store(store)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
