"""The commit protocol, sweep and prune of `archive.archive`, in a directory, with all their interleavings."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable
from pathlib import Path

import pytest

from elastic_resume.archive.archive import Archive, open_archive
from elastic_resume.archive.directory_store import DirectoryStore
from elastic_resume.archive.entries import ArchivedCheckpoint, BadEntry
from elastic_resume.errors import (
    ArchiveError,
    ArchiveErrorKind,
    ConfigError,
    CorruptError,
    ForeignError,
    NewerFormatError,
    SecondWriterError,
    TornError,
)
from elastic_resume.milestone import Milestone
from tests.support.archives import ArchivingJob, archive_step, begin, commit, put_parts
from tests.support.checkpoint_samples import RUN, SMALL_BLOCK, flip_bits, make_image

NEWER_ENTRY = b'{"kind":"elastic_resume archived checkpoint","format":9}\n'


@pytest.fixture
def archive(tmp_path: Path) -> Archive:
    """An empty archive."""
    return open_archive(str(tmp_path), RUN)


def steps(archive: Archive) -> list[int]:
    """Return the steps that a reader sees, newest first, each of them read whole."""
    found = archive.list_checkpoints(64)
    assert all(isinstance(entry, ArchivedCheckpoint) for entry in found), found
    entries = [entry for entry in found if isinstance(entry, ArchivedCheckpoint)]
    assert all(archive.read_image(entry) == make_image(entry.version[1]) for entry in entries)
    return [entry.version[1] for entry in entries]


def archive_and_delete_old(archive: Archive, step: int) -> None:
    """Archive a step, and delete what no entry names, as a job does."""
    attempt = begin(archive, step)
    put_parts(archive, attempt, make_image(step))
    candidates = archive.list_attempts()
    commit(archive, attempt)
    archive.sweep(candidates)


def test_archived_bytes_are_read_back(archive: Archive) -> None:
    """Both ways to read return or verify the same bytes, and count them."""
    image = archive_step(archive, 5, milestones=[Milestone("best", 0.5)])
    (entry,) = archive.list_checkpoints(64)
    assert isinstance(entry, ArchivedCheckpoint)
    assert (entry.header.milestones, entry.version) == ((Milestone("best", 0.5),), (1, 5))
    counts: list[int] = []
    assert archive.read_image(entry, on_verified=counts.append) == image
    assert counts == [
        min(end, len(image)) for end in range(SMALL_BLOCK, len(image) + SMALL_BLOCK, SMALL_BLOCK)
    ]
    done: list[int] = []
    archive.verify_image(entry, done.append)
    assert done[-1] == len(image)


def test_step_is_archived_once(archive: Archive) -> None:
    """An attempt of a step that is there begins only if its entry is gone."""
    archive_step(archive, 5)
    archive_step(archive, 6)
    assert archive.begin((1, 5), "0" * 16) is None
    assert begin(archive, 7).number == 3
    assert begin(archive, 5, generation=2).number == 3


def test_further_entry_names_checkpoint_that_is_archived(archive: Archive, tmp_path: Path) -> None:
    """It has all names, and the same parts, which stay when the earlier entry is pruned."""
    image = archive_step(archive, 5, milestones=[Milestone("a")])
    archive_step(archive, 6)
    again = open_archive(str(tmp_path), RUN)
    again.add_milestones((1, 5), "1" * 16, [Milestone("best", 0.5), Milestone("a", 3.0)])
    again.add_milestones((1, 5), "2" * 16, [Milestone("a")])
    assert again.list_numbers() == [3, 2, 1], "nothing new to say is not said"
    assert again.list_milestones() == {(1, 5): (Milestone("a"), Milestone("best", 0.5)), (1, 6): ()}
    assert steps(again) == [5, 6]
    archive_step(archive, 7)
    assert again.prune(1) == [1, 2]
    assert steps(again) == [7, 5]
    assert again.read_image(again.read_entry(3)) == image
    assert again.sweep(again.list_attempts()) == []


def test_second_writer_is_noticed_when_a_name_is_added(
    archive: Archive, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a commit."""
    archive_step(archive, 5)
    theirs = open_archive(str(tmp_path), RUN)

    def put_late(store: DirectoryStore, name: str, data: bytes) -> bool:
        monkeypatch.undo()
        archive_step(theirs, 6)
        return store.put_if_absent(name, data)

    monkeypatch.setattr(DirectoryStore, "put_if_absent", put_late)
    with pytest.raises(SecondWriterError):
        archive.add_milestones((1, 5), "1" * 16, [Milestone("a")])
    assert steps(theirs) == [6, 5]
    assert theirs.list_milestones()[1, 5] == ()


def test_newest_entry_names_the_greatest_of_the_log(archive: Archive, tmp_path: Path) -> None:
    """A late job of an older generation, a milestone, and a new name put entries out of their order."""
    assert archive.find_newest() == (0, 0, 0)
    archive_step(archive, 5, generation=3)
    archive_step(archive, 9, generation=2)
    reader = open_archive(str(tmp_path), RUN)
    assert reader.find_newest() == (3, 5, 0)
    archive.add_milestones((2, 9), "1" * 16, [Milestone("a")])
    assert reader.find_newest() == (3, 5, 0)
    (tmp_path / RUN / "log" / "00000002").write_bytes(NEWER_ENTRY)
    archive_step(open_archive(str(tmp_path), RUN), 10, generation=2)
    assert reader.find_newest() is None, "only all entries together can tell"


def test_absent_directory_is_no_empty_archive(tmp_path: Path) -> None:
    """The file system is not mounted. A job would start over, and archive on the node's own disk."""
    root = tmp_path / "mnt"
    store, absent = DirectoryStore(root), open_archive(str(root), RUN)
    requests: list[Callable[[], object]] = [
        absent.list_numbers,
        absent.find_newest,
        lambda: absent.put_events("a", b"x"),
        lambda: store.put_if_absent("a/b", b"x"),
        lambda: store.get_range("a/b", 0, 1),
        lambda: store.head("a/b"),
        lambda: store.delete("a/b"),
        lambda: archive_step(absent, 5),
    ]
    for request in requests:
        with pytest.raises(
            ArchiveError,
            match=r"^file:///.*/mnt: cannot use it: No such.*; mount .*, or create .* with mkdir",
        ) as caught:
            request()
        assert caught.value.kind == "missing-bucket"
        assert not root.exists()
    root.touch()
    with pytest.raises(ArchiveError, match=r"file:///.*/mnt: cannot use it: Not a directory"):
        absent.list_numbers()
    root.unlink()
    root.mkdir()
    assert absent.list_numbers() == []
    assert store.get_range("a/b", 0, 1) is None


def test_unfinished_attempt_is_invisible_and_does_not_block(archive: Archive) -> None:
    """The job died between parts and entry."""
    archive_step(archive, 5)
    put_parts(archive, begin(archive, 6), make_image(6))
    assert steps(archive) == [5]
    archive_step(archive, 6)
    assert steps(archive) == [6, 5]


def test_commit_again_is_success(archive: Archive) -> None:
    """The answer to the first one was lost."""
    attempt = begin(archive, 5)
    put_parts(archive, attempt, make_image(5))
    commit(archive, attempt)
    commit(archive, attempt)
    assert steps(archive) == [5]


def test_second_writer_is_refused(archive: Archive, tmp_path: Path) -> None:
    """The first one's checkpoint stays, and the error names the entry."""
    ours, theirs = begin(archive, 5), begin(open_archive(str(tmp_path), RUN), 5)
    for attempt in (ours, theirs):
        put_parts(archive, attempt, make_image(5))
    commit(archive, theirs)
    sentence = (
        rf"/{RUN}: node node-a of another job archives under this run id too \(entry 1, g1-s5\)\. This job"
    )
    with pytest.raises(SecondWriterError, match=sentence) as caught:
        commit(archive, ours)
    assert (caught.value.number, caught.value.attempt) == (1, theirs.id)
    assert steps(archive) == [5]


def test_second_writer_is_refused_in_gap_that_pruning_left(archive: Archive, tmp_path: Path) -> None:
    """Its number is free again, but not the newest. It would sweep parts of a live attempt."""
    archive_step(archive, 1)
    late = open_archive(str(tmp_path), RUN)
    stale = begin(late, 2)
    put_parts(late, stale, make_image(2))
    for step in (3, 4, 5):
        archive_step(archive, step)
    archive.prune(1)
    assert archive.list_numbers() == [4]
    with pytest.raises(SecondWriterError):
        commit(late, stale)


@pytest.mark.parametrize("steps_apart", [0, 1])
def test_one_of_two_jobs_that_alternate_is_refused(tmp_path: Path, steps_apart: int) -> None:
    """No attempt overlaps another. Neither job has begun to archive before the other one."""
    jobs = [ArchivingJob(open_archive(str(tmp_path), RUN)) for _ in range(2)]
    jobs[0].archive_step(2)
    with pytest.raises(SecondWriterError, match=r"of another job .* \(entry 1, g1-s2\)"):
        jobs[1].archive_step(2 + steps_apart)
    jobs[0].archive_step(4)
    assert steps(jobs[0].archive) == [4, 2]


@pytest.mark.parametrize(
    ("generations", "refused"),
    [
        ((1, 1), 0),
        ((1, 2), 0),
        ((2, 1), 1),  # the first one is newer: it goes on, and the late one learns that at its next step
    ],
)
def test_job_that_began_later_is_noticed_too(
    tmp_path: Path, generations: tuple[int, int], refused: int
) -> None:
    """Entries that it has found may be those of a job before it; the first job knows better."""
    jobs = [ArchivingJob(open_archive(str(tmp_path), RUN))]
    jobs[0].archive_step(10, generations[0])
    jobs.append(ArchivingJob(open_archive(str(tmp_path), RUN)))
    outcomes: list[list[str]] = [[], []]
    for step in (20, 30, 40):
        for index in (1, 0):
            if "refused" in outcomes[index]:
                continue
            try:
                jobs[index].archive_step(step + index, generations[index])
                outcomes[index].append("archived")
            except SecondWriterError:
                outcomes[index].append("refused")
    assert outcomes[refused][-1] == "refused"
    assert outcomes[1 - refused] == ["archived"] * 3


def test_job_that_starts_again_goes_on(tmp_path: Path) -> None:
    """Its entries before are those of another writer; so is one of a node that was late."""
    archive = open_archive(str(tmp_path), RUN)
    former = ArchivingJob(archive)
    former.archive_step(10)
    again = ArchivingJob(open_archive(str(tmp_path), RUN))
    assert not again.archive_step(10), "the same content is archived already"
    former.archive_step(11)
    assert again.archive_step(20, generation=2)
    assert again.archive_step(30, generation=2)
    assert not again.archive_step(30, generation=2, seed=31), "nodes of one job may differ"
    third = ArchivingJob(open_archive(str(tmp_path), RUN))
    assert not third.archive_step(30, generation=2, seed=31, node="node-b"), "and so may they after a restart"


def test_equal_step_of_other_content_is_of_another_job(tmp_path: Path) -> None:
    """Two jobs that have started afresh; the second one would take the first one's state for its own."""
    archive_step(open_archive(str(tmp_path), RUN), 10)
    job = ArchivingJob(open_archive(str(tmp_path), RUN))
    with pytest.raises(SecondWriterError, match=r"of another job .* \(entry 1, g1-s10\)"):
        job.archive_step(10, seed=11)
    entry = tmp_path / RUN / "log" / "00000001"
    flip_bits(entry, entry.stat().st_size - 3)
    assert not job.archive_step(10, seed=11), "what a damaged entry had is not known"


def test_conflict_is_tried_again(archive: Archive, monkeypatch: pytest.MonkeyPatch) -> None:
    """A 409 says that another request for the name is in progress; it may fail."""
    answers = iter([False, False])
    real = DirectoryStore.put_if_absent

    def put(store: DirectoryStore, name: str, data: bytes) -> bool:
        return next(answers, True) and real(store, name, data)

    monkeypatch.setattr(DirectoryStore, "put_if_absent", put)
    archive_step(archive, 5)
    assert steps(archive) == [5]
    monkeypatch.setattr(DirectoryStore, "put_if_absent", lambda *_: False)
    monkeypatch.setattr("elastic_resume.archive.archive._CONFLICT_PAUSES_S", (0.0, 0.0))
    with pytest.raises(ArchiveError, match="neither there nor accepted"):
        archive_step(archive, 6)


def test_store_without_create_only_warns_once(
    archive: Archive, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A second writer that wrote before is still noticed."""

    def refuse(*_: object) -> bool:
        raise ArchiveError("no", kind=ArchiveErrorKind.UNSUPPORTED)

    monkeypatch.setattr(DirectoryStore, "put_if_absent", refuse)
    with caplog.at_level(logging.WARNING):
        archive_step(archive, 5)
        ours = begin(archive, 6)
        archive_step(open_archive(str(tmp_path), RUN), 7)
        archive_step(archive, 8)
        with pytest.raises(SecondWriterError):
            commit(archive, ours)
    warnings = [record.getMessage() for record in caplog.records]
    assert sum("not surely noticed" in warning for warning in warnings) == 2  # of two jobs
    assert steps(archive) == [8, 7, 5]


# ---- objects that are no entries -----------------------------------------------------------------------


@pytest.mark.parametrize("content", [b"", b"not ours", b'{"kind":"another"}\n'])
@pytest.mark.parametrize("names", [["99999999"], ["00000003", "00000004"], ["00000002", "99999998"]])
def test_object_that_is_no_entry_hides_none(
    archive: Archive, tmp_path: Path, names: list[str], content: bytes
) -> None:
    """Numbers go on behind the last entry, and it is no second writer."""
    log = tmp_path / RUN / "log"
    archive_step(archive, 1)
    attempt = begin(archive, 5)
    for name in names:
        (log / name).write_bytes(content)
    put_parts(archive, attempt, make_image(5))
    if "00000002" in names:
        with pytest.raises(SecondWriterError) as caught:
            commit(archive, attempt)
        assert caught.value.attempt == "", "it is not known whose it is"
    else:
        commit(archive, attempt)
        archive.check_number(begin(archive, 7))
    archive_step(archive, 6)
    found = open_archive(str(tmp_path), RUN).list_checkpoints(64)
    good = [entry.number for entry in found if isinstance(entry, ArchivedCheckpoint)]
    bad = [entry.number for entry in found if isinstance(entry, BadEntry)]
    assert max(good) == {"99999999": 3, "00000003": 5, "00000002": 3}[names[0]]
    assert bad == [int(name) for name in reversed(names)]
    assert open_archive(str(tmp_path), RUN).find_newest() is None, "only all entries together can tell"


def test_directory_in_the_log_is_passed(archive: Archive, tmp_path: Path) -> None:
    """Its name cannot be that of an entry."""
    archive_step(archive, 1)
    (tmp_path / RUN / "log" / "00000002").mkdir()
    archive_step(archive, 2)
    assert archive.list_numbers() == [3, 1]


def test_log_without_a_free_number_is_an_error(archive: Archive, tmp_path: Path) -> None:
    """A greater number would have one digit more, and no reader would find it."""
    archive_step(archive, 1)
    log = tmp_path / RUN / "log"
    (log / "99999999").write_bytes((log / "00000001").read_bytes())
    with pytest.raises(ArchiveError, match="has an entry 99999999, so none can follow it"):
        begin(archive, 2)


def test_unreadable_entry_keeps_the_parts_that_it_may_name(
    archive: Archive, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A job of a newer version has named the step that this one prunes."""
    image = archive_step(archive, 1)
    archive.add_milestones((1, 1), "1" * 16, [Milestone("best")])
    named = tmp_path / RUN / "log" / "00000002"
    content = named.read_bytes()
    named.write_bytes(content.replace(b'"format":1', b'"format":9', 1))
    old = open_archive(str(tmp_path), RUN)
    archive_step(old, 2)
    candidates = old.list_attempts()
    archive_step(old, 3)
    assert old.prune(1) == [1, 3]
    assert old.sweep(candidates) == []
    assert [record.getMessage().count("log/00000002") for record in caplog.records] == [1]
    named.write_bytes(content)
    (kept,) = [entry for entry in archive.list_checkpoints(64) if entry.number == 2]
    assert isinstance(kept, ArchivedCheckpoint)
    assert archive.read_image(kept) == image


# ---- sweep and prune -----------------------------------------------------------------------------------


def test_sweep_deletes_dead_attempts_only(archive: Archive, tmp_path: Path) -> None:
    """Neither those with an entry, nor those that began after the candidates were listed."""
    archive_step(archive, 1)
    dead = begin(archive, 2)
    put_parts(archive, dead, make_image(2))
    (tmp_path / RUN / "parts" / dead.id / ".tmp-00000-1-abc").write_bytes(b"left by a crash")
    ours = begin(archive, 3)
    put_parts(archive, ours, make_image(3))
    candidates = archive.list_attempts()
    assert dead.id in candidates
    commit(archive, ours)
    later = begin(archive, 4)
    put_parts(archive, later, make_image(4))
    assert archive.sweep(candidates) == [dead.id]
    assert not (tmp_path / RUN / "parts" / dead.id).exists()
    commit(archive, later)
    assert steps(archive) == [4, 3, 1]


def test_attempt_that_is_swept_can_never_commit(archive: Archive, tmp_path: Path) -> None:
    """It began before the commit, so its number is taken. This is why the number is fixed at its start."""
    late = open_archive(str(tmp_path), RUN)
    stale = begin(late, 2)
    put_parts(late, stale, make_image(2))
    ours = begin(archive, 3)
    put_parts(archive, ours, make_image(3))
    candidates = archive.list_attempts()
    commit(archive, ours)
    assert archive.sweep(candidates) == [stale.id]
    with pytest.raises(SecondWriterError):
        commit(late, stale)
    assert steps(archive) == [3]


@pytest.mark.parametrize("order", sorted(set(itertools.permutations("AAABBB"))))
def test_two_writers_interleaved_lose_nothing(
    archive: Archive, tmp_path: Path, order: tuple[str, ...]
) -> None:
    """Each begins, commits, and sweeps and prunes, in every order: a success is never undone."""
    jobs = {name: open_archive(str(tmp_path), RUN) for name in "AB"}
    committed = []

    def run(job: Archive, step: int) -> list[Callable[[], object]]:
        state: dict[str, object] = {}

        def start() -> None:
            state["attempt"] = begin(job, step)
            put_parts(job, state["attempt"], make_image(step))  # type: ignore[arg-type]

        def finish() -> None:
            state["candidates"] = job.list_attempts()
            try:
                commit(job, state["attempt"])  # type: ignore[arg-type]
            except SecondWriterError:
                state["refused"] = True
            else:
                committed.append(step)

        def clean() -> None:
            if "refused" not in state:
                job.sweep(state["candidates"])  # type: ignore[arg-type]
                job.prune(2)

        return [start, finish, clean]

    archive_step(archive, 1)
    moves = {"A": iter(run(jobs["A"], 2)), "B": iter(run(jobs["B"], 3))}
    for name in order:
        next(moves[name])()
    assert committed
    assert steps(archive) == sorted([*committed, 1], key=[1, *committed].index, reverse=True)[:2]


def test_unreadable_entry_stops_the_sweep(archive: Archive, tmp_path: Path) -> None:
    """It may name any of the attempts. Pruning never deletes it either."""
    archive_step(archive, 1)
    put_parts(archive, begin(archive, 2), make_image(2))
    candidates = archive.list_attempts()
    archive_step(archive, 3)
    (tmp_path / RUN / "log" / "00000001").write_bytes(NEWER_ENTRY)
    again = open_archive(str(tmp_path), RUN)
    assert again.sweep(candidates) == []
    assert again.prune(1) == []
    assert len(again.list_attempts()) == 3


def test_prune_deletes_entry_before_its_parts(archive: Archive, tmp_path: Path) -> None:
    """A crash in between leaves parts that the next sweep takes."""
    for step in (1, 2, 3):
        archive_step(archive, step)
    assert archive.prune(2) == [1]
    assert steps(archive) == [3, 2]
    assert len(archive.list_attempts()) == 2
    assert sorted(path.name for path in (tmp_path / RUN / "log").iterdir()) == ["00000002", "00000003"]


def test_reader_passes_over_what_is_pruned_meanwhile(
    archive: Archive, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is no bad entry."""
    for step in (1, 2, 3):
        archive_step(archive, step)
    listed = archive.list_numbers()
    archive.prune(2)
    answers = iter([listed])
    real = Archive.list_numbers
    monkeypatch.setattr(Archive, "list_numbers", lambda self: next(answers, None) or real(self))
    assert steps(archive) == [3, 2]


@pytest.mark.parametrize("removed", ["newest", "all"])
def test_parts_of_entry_with_a_number_given_again_stay(tmp_path: Path, removed: str) -> None:
    """A person removes entries while the job trains. The next ones have their numbers, and other parts."""
    archive, other = (open_archive(str(tmp_path), RUN) for _ in range(2))
    for step in (1, 2, 3):
        archive_and_delete_old(archive, step)
    if removed == "newest":
        (tmp_path / RUN / "log" / "00000003").unlink()
    else:
        (tmp_path / RUN).rename(tmp_path / "moved")
    for step in (4, 5, 6):
        archive_and_delete_old(archive, step)
    assert steps(archive) == ([6, 5, 4, 2, 1] if removed == "newest" else [6, 5, 4])
    assert steps(other) == steps(archive)
    assert len(archive.list_attempts()) == len(steps(archive)), "and nothing else stays"


def test_parts_of_entry_that_another_node_gives_the_number_again_stay(tmp_path: Path) -> None:
    """No listing of this node's lacked the number."""
    nodes = [open_archive(str(tmp_path), RUN) for _ in range(2)]
    for step in (1, 2, 3):
        archive_and_delete_old(nodes[0], step)
    (tmp_path / RUN / "log" / "00000003").unlink()
    archive_step(nodes[1], 4)
    assert nodes[1].list_numbers() == [3, 2, 1]
    assert nodes[0].begin((1, 3), "1" * 32) is not None, "step 3 is not archived any more"
    with pytest.raises(TornError, match="does not exist any more"):
        nodes[0].add_milestones((1, 3), "1" * 32, [Milestone("a")])
    archive_and_delete_old(nodes[0], 5)
    assert steps(nodes[0]) == [5, 4, 2, 1]
    nodes[0].find_numbers(lambda _: True)
    (tmp_path / RUN / "log" / "00000004").unlink()
    attempt = begin(nodes[1], 6)
    put_parts(nodes[1], attempt, make_image(6))
    commit(nodes[1], attempt, milestones=[Milestone("good")])
    archive_step(nodes[1], 7)
    assert nodes[0].prune(1) == [1, 2, 3]
    assert steps(nodes[0]) == [7, 6], "the milestone stays, although the entry before it was none"


# ---- damage --------------------------------------------------------------------------------------------


def only_entry(archive: Archive) -> ArchivedCheckpoint:
    """Return the only archived checkpoint."""
    (entry,) = archive.list_checkpoints(64)
    assert isinstance(entry, ArchivedCheckpoint)
    return entry


@pytest.mark.parametrize("read", ["read", "verify"])
def test_damage_names_part_and_bytes(archive: Archive, tmp_path: Path, read: str) -> None:
    """No byte of a part with another digest is returned."""
    archive_step(archive, 5)
    entry = only_entry(archive)
    part = tmp_path / RUN / "parts" / entry.header.attempt / "00001"

    def read_all() -> None:
        if read == "read":
            archive.read_image(entry)
        else:
            archive.verify_image(entry)

    flip_bits(part, SMALL_BLOCK + 7)
    with pytest.raises(
        CorruptError, match=f"part 1 of {entry.header.attempt}: bytes 2048 to .* do not match"
    ):
        read_all()
    part.write_bytes(part.read_bytes()[:100])
    with pytest.raises(TornError, match=r"part 1 of .*: ends at byte 100"):
        read_all()
    part.unlink()
    with pytest.raises(TornError, match=r"part 1 of .*: is missing"):
        read_all()


def test_bad_entry_is_listed_with_its_reason(archive: Archive, tmp_path: Path) -> None:
    """The others are read."""
    for step in (1, 2, 3, 4):
        archive_step(archive, step)
    log = tmp_path / RUN / "log"
    flip_bits(log / "00000001", -20)
    (log / "00000002").write_bytes((log / "00000002").read_bytes()[:-10])
    (log / "00000003").write_bytes(NEWER_ENTRY)
    (log / "00000005").write_bytes(b"{}\n")
    (log / "notes.txt").write_bytes(b"not ours")
    (log / ".tmp-00000006-1-abc").write_bytes(b"left by a crash")
    found = archive.list_checkpoints(64)
    errors = {entry.number: type(entry.error) for entry in found if isinstance(entry, BadEntry)}
    assert errors == {1: CorruptError, 2: TornError, 3: NewerFormatError, 5: ForeignError}
    assert begin(archive, 9).number == 6


@pytest.mark.parametrize("run_id", ["", "../other", "a/b", ".hidden", "a" * 200])
def test_run_id_must_be_a_name(tmp_path: Path, run_id: str) -> None:
    """It becomes part of the objects' names."""
    with pytest.raises(ConfigError, match="cannot be a name"):
        open_archive(str(tmp_path), run_id)


def test_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the command that installs it."""
    monkeypatch.setitem(__import__("sys").modules, "elastic_resume.archive.obstore_store", None)
    with pytest.raises(ConfigError, match=r"pip install '\.\[remote\]' in the clone"):
        open_archive("s3://bucket", RUN)
