"""Test uploads of several nodes in one process, against a real directory: `work` is what their threads do."""

from __future__ import annotations

import errno
import secrets
import time
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from elastic_resume import constants
from elastic_resume.archive.archive import Archive, open_archive
from elastic_resume.archive.entries import ArchivedCheckpoint
from elastic_resume.checkpoint.atomic_io import Disk, translate_os_errors
from elastic_resume.checkpoint.catalog import Catalog
from elastic_resume.checkpoint.reader import checkpoint_name
from elastic_resume.errors import ArchiveError, ArchiveErrorKind, UnreadableError
from elastic_resume.mechanisms.archive import UPLOADS, failures, pinned_checkpoint
from elastic_resume.mechanisms.archive.description import ALERTS
from elastic_resume.mechanisms.archive.judge import HOLD_WAIT_S, ArchiveJudge, Upload
from elastic_resume.mechanisms.archive.uploader import ArchiveUploader
from elastic_resume.milestone import Milestone
from elastic_resume.policy.checkpoint_interval import IntervalSetting
from elastic_resume.policy.reasons import JobFinished
from elastic_resume.rendezvous.facts import Fact, FactBody, Scope
from tests.support.agent_parts import make_agent_context
from tests.support.archives import archive_step, put_parts
from tests.support.checkpoint_samples import RUN, SMALL_BLOCK, flip_bits, make_image, save_checkpoint

STEP = 14  # which the leader requests when nodes are at step 12 of 10 s


class Node:
    """An uploader, and the client and the slots that it uses."""

    def __init__(self, job: Job, name: str, store: Path) -> None:
        self.name, self._job = name, job
        self.directory = job.path / "disks" / RUN / name
        self.directory.mkdir(parents=True)
        self.job_end: Any = None
        self.sent = 0  # facts
        self.words: dict[str, int] = {}
        self.events: list[dict[str, Any]] = []
        pool = SimpleNamespace(control_block=SimpleNamespace(set=self.words.__setitem__))
        committer = SimpleNamespace(checkpoint_listeners=[], slot_pool=pool, last_commit_s=0.0)
        settings = {
            "archive": str(store),
            "archive_every": IntervalSetting(seconds=60.0),
            "archive_keep": 1,
        }
        context = make_agent_context(
            node_dir=self.directory, emit=self._emit, settings=settings, committer=committer
        )
        self.part = ArchiveUploader(context)
        self.part._client = self  # type: ignore[assignment]  # `start` would start the thread
        self.part._rate.step, self.part._rate.step_s = 12, 10.0

    def _emit(self, kind: str, **fields: object) -> None:
        self.events.append({"event": kind, **fields})

    @property
    def node(self) -> str:
        """The client's name."""
        return self.name

    @property
    def verdicts(self) -> dict[str, Fact]:
        """What the leader has said last."""
        return {UPLOADS.name: Fact(UPLOADS.name, 0, self._job.body)} if self._job.body else {}

    def send_fact(self, topic: str, generation: int, body: FactBody) -> None:
        """Hand a fact to the leader, and take its verdict."""
        self.sent += 1
        self._job.judge.add(self.name, Fact(topic, generation, body), self._job.now)
        self._job.body = self._job.judge.judge(self._job.now).body

    def commit(self, step: int, generation: int = 1) -> Path:
        """Commit a step, as the committer would."""
        path = save_checkpoint(self.directory, generation, step)
        self.part._held.note_commit(path)
        return path

    def close(self) -> None:
        """End as the agent does, whose thread does the last uploads."""
        self.part._thread.start()
        self.part.close()

    def work(self) -> None:
        """Do what the thread does, until it has nothing to do."""
        while not self.part._work():
            pass


class Job:
    """The nodes of a job, their leader and its clock."""

    def __init__(self, path: Path, *names: str, store: Path | None = None) -> None:
        self.path, self.store = path, store or path / "store"
        self.store.mkdir(parents=True, exist_ok=True)
        self.now, self.body = 1000.0, FactBody("")
        self.judge = ArchiveJudge(Scope(0, (), names[0], 3.0))
        self.judge.start_view(1, names)
        self.nodes = [Node(self, name, self.store) for name in names]

    @property
    def archive(self) -> Archive:
        """The archive, as a reader sees it."""
        return open_archive(str(self.store), RUN)

    def request(self) -> None:
        """Have all nodes report, and learn which step the leader requests."""
        for _ in range(3):
            for node in self.nodes:
                node.work()
        assert {node.words["commit_step"] for node in self.nodes} == {STEP}

    def work(self, rounds: int = 6) -> None:
        """Have the leader look, which it does from time to time, and all nodes work."""
        for _ in range(rounds):
            self.body = self.judge.judge(self.now).body
            for node in self.nodes:
                node.work()

    def find_upload(self) -> Upload:
        """Return the upload under way."""
        self.nodes[0].work()
        upload = self.nodes[0].part._verdict.upload
        assert upload
        return upload


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of one block each: the samples have several."""
    monkeypatch.setattr(pinned_checkpoint, "choose_part_bytes", lambda *_: SMALL_BLOCK)


def read_versions(archive: Archive) -> list[tuple[int, int]]:
    """Return what is archived, newest first, after its bytes were verified."""
    found = []
    for entry in archive.list_checkpoints(9):
        assert isinstance(entry, ArchivedCheckpoint)
        archive.read_image(entry)
        found.append(entry.version)
    return found


def test_nodes_share_parts_of_requested_step_and_one_puts_entry(tmp_path: Path) -> None:
    """Each part is put once; events of all nodes follow."""
    job = Job(tmp_path, "a", "b", "c")
    job.request()
    for node in job.nodes:
        (node.directory / constants.EVENTS_FILE).write_text("{}\n")
        node.commit(STEP)
    job.work()
    assert read_versions(job.archive) == [(1, STEP)]
    put = [node.part._share.put for node in job.nodes]
    assert set().union(*put) == set(range(len(list((job.store / RUN / "parts").glob("*/*")))))
    assert sum(map(len, put)) == len(set().union(*put))
    assert [event["step"] for node in job.nodes for event in node.events] == [STEP]
    assert sorted(job.archive.read_events()) == ["a", "b", "c"]


def name(job: Job, step: int, *labels: Milestone) -> None:
    """Commit a step on all nodes if need be, and name it there, as a worker does."""
    for node in job.nodes:
        path = node.directory / checkpoint_name(1, step)
        if not path.exists():
            node.commit(step)
        for label in labels:
            Catalog(node.directory, RUN).add_milestone(path, label)
        node.part.observe({"event": "milestone", "path": str(path)})


def read_names(job: Job) -> dict[int, set[str]]:
    """Return the names of each archived step."""
    found = job.archive.list_milestones()
    return {step: {label.name for label in labels} for (_, step), labels in found.items()}


def test_milestones_are_archived_at_once_and_never_deleted(tmp_path: Path) -> None:
    """Also when they follow quickly, and when a newer checkpoint is archived. Of one name the best counts."""
    job = Job(tmp_path, "a", "b")
    job.request()
    for node in job.nodes:
        node.commit(STEP)
    job.work()
    name(job, 3, Milestone("good"))
    name(job, 5, Milestone("best", 0.9), Milestone("other"))
    name(job, 7, Milestone("best", 0.5))
    name(job, 8, Milestone("best", 1.0))
    for node in job.nodes:
        for step in (20, 21, 22):
            node.commit(step)
    job.work(rounds=40)
    assert read_names(job) == {3: {"good"}, 5: {"best", "other"}, 8: {"best"}, STEP: set()}
    job.now += 1000.0
    for node in job.nodes:
        node.part._rate.step = 30
    job.work()
    for node in job.nodes:
        node.commit(node.words["commit_step"])
    job.work()
    assert sorted(read_names(job))[:3] == [3, 5, 8]
    assert len(read_versions(job.archive)) == 4, "--archive-keep 1 counts others only"
    job.work(rounds=40)
    assert len(job.archive.list_numbers()) == 4, "nothing is archived twice"


def test_name_of_archived_checkpoint_reaches_archive_without_its_parts(tmp_path: Path) -> None:
    """A script evaluates, and names the checkpoint when its upload is over."""
    job = Job(tmp_path, "a", "b")
    job.request()
    for node in job.nodes:
        node.commit(STEP)
    job.work()
    attempts = job.archive.list_attempts()
    name(job, STEP, Milestone("best", 0.5))
    job.work(rounds=20)
    name(job, STEP, Milestone("good"))
    job.work(rounds=20)
    assert job.archive.list_milestones() == {(1, STEP): (Milestone("best", 0.5), Milestone("good"))}
    assert job.archive.list_attempts() == attempts
    assert job.archive.list_numbers() == [3, 2, 1]
    assert read_versions(job.archive) == [(1, STEP)]


def test_name_that_comes_within_the_upload_is_in_the_entry(tmp_path: Path) -> None:
    """So one entry suffices."""
    job = Job(tmp_path, "a")
    job.request()
    job.nodes[0].commit(STEP)
    while not job.archive.list_attempts():
        job.nodes[0].part._work()
    name(job, STEP, Milestone("good"))
    job.work(rounds=20)
    assert read_names(job) == {STEP: {"good"}}
    assert job.archive.list_numbers() == [1]


def test_milestones_of_an_earlier_start_are_archived(tmp_path: Path) -> None:
    """The agent may have ended before; and the last ones are archived at the end of the job."""
    job = Job(tmp_path, "a")
    (node,) = job.nodes
    Catalog(node.directory, RUN).add_milestone(save_checkpoint(node.directory, 1, 3), Milestone("good"))
    job.work(rounds=20)
    assert read_names(job) == {3: {"good"}}
    name(job, 5, Milestone("other"))
    node.commit(9)
    node.part.begin_generation(SimpleNamespace(rank=0))  # type: ignore[arg-type]
    node.job_end = SimpleNamespace(reason=JobFinished())
    node.close()
    assert read_names(job) == {3: {"good"}, 5: {"other"}, 9: set()}


def test_milestone_of_a_node_that_differs_is_no_other_jobs_after_a_restart(tmp_path: Path) -> None:
    """A script's own objects may differ between ranks. The one that was archived gets the name."""
    before = Job(tmp_path / "1", "a")
    before.request()
    before.nodes[0].commit(STEP)
    before.work()
    again = Job(tmp_path / "2", "b", store=before.store)
    (node,) = again.nodes
    path = save_checkpoint(node.directory, 1, STEP, seed=STEP + 1, node="node-b")
    Catalog(node.directory, RUN).add_milestone(path, Milestone("good"))
    again.work(rounds=20)
    assert read_names(again) == {STEP: {"good"}}
    assert not node.part._writer.refusal
    assert len(again.archive.list_attempts()) == 1


def test_steps_go_to_the_leader_only_when_it_asks(tmp_path: Path) -> None:
    """A thousand nodes would send it a thousand facts a second."""
    job = Job(tmp_path, "a")
    (node,) = job.nodes
    archive_next(job, 12)

    def count_facts(steps: Iterable[int]) -> int:
        """Return how many facts follow from these steps."""
        before = node.sent
        for step in steps:
            node.part._rate.step, node.part._rate.step_s = step, 1.0 / (step + 1)
            job.work(rounds=1)
        return node.sent - before

    assert count_facts(range(12, 100)) == 0, "nothing is due"
    job.now += 1000.0
    assert count_facts([100] * 4) <= 3
    requested = node.words["commit_step"]
    assert requested > 120
    assert count_facts(range(101, requested)) == 0, "the request is still to come"
    assert count_facts(range(requested, requested + 50)) == 1
    assert count_facts(range(40, 60)) <= 4, "the job went back, so it is due again"
    assert 60 < node.words["commit_step"] < 150


def test_node_with_damaged_disk_puts_nothing_of_it(tmp_path: Path) -> None:
    """The others put its share, so that what is archived is what was committed."""
    job = Job(tmp_path, "a", "b")
    job.request()
    flip_bits(job.nodes[0].commit(STEP) / constants.STATE_FILE, 100)
    job.nodes[1].commit(STEP)
    job.work(rounds=10)
    assert read_versions(job.archive) == [(1, STEP)]
    assert not job.nodes[0].part._held.offered


def damage(node: Node, step: int) -> None:
    """Flip bits of a node's checkpoint."""
    flip_bits(node.directory / checkpoint_name(1, step) / constants.STATE_FILE, 100)


def test_damaged_milestone_is_archived_from_another_node(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The node with the damaged copy says so once, and puts its shares of other checkpoints."""
    job = Job(tmp_path, "a", "b")
    name(job, 5, Milestone("good"))
    damage(job.nodes[0], 5)
    job.work(rounds=20)
    assert read_names(job) == {5: {"good"}}
    assert [event["event"] for event in job.nodes[0].events] == ["archive-damaged"]
    (line,) = caplog.messages
    assert line.startswith("this node uploads no part of step 5: ")
    name(job, 7, Milestone("other"))
    job.work(rounds=20)
    assert read_versions(job.archive) == [(1, 7), (1, 5)]
    assert all(node.part._share.put for node in job.nodes)
    assert caplog.messages == [line]


def test_milestone_without_good_copy_stops_no_other_upload(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It is given up. Before, it was tried five times a second until the job's end."""
    job = Job(tmp_path, "a", "b")
    name(job, 5, Milestone("good"))
    for node in job.nodes:
        damage(node, 5)
    job.work(rounds=20)
    name(job, 7, Milestone("other"))
    job.now += HOLD_WAIT_S
    job.work(rounds=40)
    assert read_names(job) == {7: {"other"}}
    for node in job.nodes:
        assert [event["event"] for event in node.events].count("archive-damaged") == 1
    assert len(caplog.messages) == 2
    job.nodes[0].part.begin_generation(SimpleNamespace(rank=0))  # type: ignore[arg-type]
    job.nodes[0].job_end = SimpleNamespace(reason=JobFinished())
    job.nodes[0].close()
    assert len(caplog.messages) == 2, "and not once more at the end of the job"


def test_archive_that_fails_while_a_name_is_added_damages_no_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request is repeated. An entry that cannot be read ends the tries."""
    monkeypatch.setattr(failures, "FIRST_PAUSE_S", 0.0)
    job = Job(tmp_path, "a")
    job.request()
    job.nodes[0].commit(STEP)
    job.work()
    with monkeypatch.context() as patch:

        def fail(*_: object) -> None:
            raise UnreadableError("the store cannot be reached.")

        patch.setattr(Archive, "add_milestones", fail)
        name(job, STEP, Milestone("good"))
        job.work()
        assert job.nodes[0].events[-1]["event"] == "archive-failed"
    job.work()
    assert read_names(job) == {STEP: {"good"}}
    entry = job.store / RUN / "log" / "00000002"
    flip_bits(entry, entry.stat().st_size - 3)
    name(job, STEP, Milestone("best", 1.0))
    job.work()
    assert job.nodes[0].events[-1]["event"] == "archive-damaged"
    job.now += HOLD_WAIT_S
    name(job, 20, Milestone("other"))
    job.work(rounds=20)
    assert read_names(job)[20] == {"other"}


@pytest.fixture
def capacity(monkeypatch: pytest.MonkeyPatch) -> dict[Path, int]:
    """Return how many bytes fit below a directory, for the test to set."""
    limits: dict[Path, int] = {}
    real = Disk.write_file

    def write_file(disk: Disk, path: Path, data: bytes | memoryview) -> None:
        for root in limits.keys() & {*path.parents}:
            used = sum(file.stat().st_size for file in root.rglob("*") if file.is_file())
            if used + len(data) > limits[root]:
                with translate_os_errors("write", path):
                    raise OSError(errno.ENOSPC, "No space left on device")
        real(disk, path, data)

    monkeypatch.setattr(Disk, "write_file", write_file)
    return limits


def leave_attempts(archive: Archive, steps: range, generation: int = 1, writer: str = "") -> list[str]:
    """Leave unfinished attempts, of a random writer or of this one; return their ids."""
    attempts = []
    for step in steps:
        attempt = archive.begin((generation, step), (writer or secrets.token_hex(8)) + secrets.token_hex(8))
        assert attempt is not None
        put_parts(archive, attempt, make_image(step))
        attempts.append(attempt.id)
    return attempts


@pytest.mark.parametrize("is_at_end", [False, True])
@pytest.mark.parametrize("leftover", ["own", "older", "entries"])
def test_full_archive_gets_room_from_what_is_not_needed(
    tmp_path: Path, capacity: dict[Path, int], leftover: str, is_at_end: bool
) -> None:
    """No upload could succeed any more, and only a success deleted anything."""
    job = Job(tmp_path, "a")
    job.request()
    (node,) = job.nodes
    if leftover == "entries":  # --archive-keep was greater before
        for step in (1, 2, 3):
            archive_step(job.archive, step, generation=0)
    else:
        writer = node.part._verdict.writer if leftover == "own" else ""
        leave_attempts(job.archive, range(1, 4), 1 if leftover == "own" else 0, writer)
    capacity[job.store] = sum(file.stat().st_size for file in job.store.rglob("*") if file.is_file()) + 5000
    node.commit(STEP)
    if is_at_end:
        node.part.begin_generation(SimpleNamespace(rank=0))  # type: ignore[arg-type]
        node.job_end = SimpleNamespace(reason=JobFinished())
        node.close()
    else:
        job.work()
    assert [event["event"] for event in node.events] == ["archived"]
    assert read_versions(job.archive) == [(1, STEP)]
    assert len(job.archive.list_attempts()) == 1


def test_full_archive_keeps_attempts_of_others(
    tmp_path: Path, capacity: dict[Path, int], caplog: pytest.LogCaptureFixture
) -> None:
    """They may be under way: one of a second job, and one of this job that began later."""
    job = Job(tmp_path, "a")
    job.request()
    (node,) = job.nodes
    others = leave_attempts(job.archive, range(1, 3))
    node.commit(STEP)
    while not node.part._begun:
        node.part._work()
    others += leave_attempts(job.archive, range(3, 4), writer=node.part._verdict.writer)
    capacity[job.store] = sum(file.stat().st_size for file in job.store.rglob("*") if file.is_file())
    job.work()
    assert [event["event"] for event in node.events] == ["archive-failed"]
    assert "No space left on device; free space there, or set --archive-keep." in caplog.messages[0]
    assert set(job.archive.list_attempts()) >= set(others)


def test_parts_in_another_directory_are_missed_before_the_entry(tmp_path: Path) -> None:
    """A directory may be on each node's own disk, though it has the same name."""
    job = Job(tmp_path, "a")
    (tmp_path / "other").mkdir()
    job.nodes.append(Node(job, "b", tmp_path / "other"))
    job.request()
    for node in job.nodes:
        node.commit(STEP)
    job.work()
    assert read_versions(job.archive) == []
    series = job.nodes[0].part._failures.series
    assert series
    assert "that other nodes have put are not there" in series.text


def test_pruned_checkpoint_is_uploaded_to_its_end(tmp_path: Path) -> None:
    """Its descriptor is open."""
    job = Job(tmp_path, "a")
    job.request()
    path = job.nodes[0].commit(STEP)
    job.nodes[0].part._work()
    for file in path.iterdir():
        file.unlink()
    job.work()
    assert read_versions(job.archive) == [(1, STEP)]


def archive_next(job: Job, step: int) -> None:
    """Have a job archive a step after ``step``."""
    job.now += 1000.0
    for node in job.nodes:
        node.part._rate.step = step
    job.work()
    for node in job.nodes:
        node.commit(node.words["commit_step"])
    job.work(rounds=10)


def test_one_of_two_jobs_that_alternate_is_refused(tmp_path: Path) -> None:
    """The second one's next leader knows what the first one has found in the log."""
    first = Job(tmp_path / "1", "a", "b")
    second = Job(tmp_path / "2", "a", "b", store=first.store)
    archive_next(first, 12)
    archive_next(second, 12)
    assert read_versions(first.archive) == [(1, STEP)], "the same content is archived already"
    second.judge = ArchiveJudge(Scope(0, (), "b", 3.0, second.body))
    second.judge.start_view(2, ("b", "a"))
    for node in second.nodes:
        node.part._sent_body = ""  # all goes to a new leader
    second.work()
    archive_next(first, 22)
    archive_next(second, 32)
    assert read_versions(first.archive)[0] == (1, 24), "and --archive-keep 1 has deleted the one before"
    refusals = [job.nodes[0].part._verdict.refusal for job in (first, second)]
    assert not refusals[0]
    assert "under this run id too (entry 2, g1-s24)" in refusals[1]


def test_object_in_place_of_the_entry_ends_the_attempt_only(tmp_path: Path) -> None:
    """Nobody knows whose it is. The next attempt has the next number, and the job archives on."""
    job = Job(tmp_path, "a")
    job.request()
    (node,) = job.nodes
    node.commit(STEP)
    while not job.archive.list_attempts():
        node.part._work()
    log = job.store / RUN / "log"
    log.mkdir()
    (log / "00000001").write_bytes(b"not ours")
    job.work()
    archive_next(job, 22)
    entries = job.archive.list_checkpoints(9)
    assert [entry.version for entry in entries] == [(1, 24), None], node.events
    assert not node.part._writer.refusal


def test_error_is_logged_and_tried_again_with_growing_pauses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The clock decides when. `status` has the reason meanwhile."""
    job, clock = Job(tmp_path, "a"), [5000.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    job.request()
    (node,) = job.nodes
    node.commit(STEP)
    node.work()
    with monkeypatch.context() as patch:

        def refuse(*_: object) -> None:
            raise ArchiveError(
                "the archive refuses: give the job the permission.", kind=ArchiveErrorKind.FORBIDDEN
            )

        patch.setattr(Archive, "put_part", refuse)
        pauses = []
        for _ in range(12):
            node.work()
            series = node.part._failures.series
            assert series
            pauses.append(series.retry_at - clock[0])
            clock[0] = series.retry_at
        assert pauses[:4] == [2.0, 4.0, 8.0, 16.0]
        assert pauses[-1] == failures.MAX_PAUSE_S
        monkeypatch.setattr(node.part._rate, "update", lambda: None)
        status = node.part.update(node)  # type: ignore[arg-type]
        assert status
        assert "give the job the permission" in status.problem
        assert (status.failing_s, status.retry_s) == (round(sum(pauses), 3), 0.0)
    texts = [record.message for record in caplog.records]
    assert texts[0] == (
        "the archive refuses: give the job the permission. Training continues, and this node tries again."
    )
    assert 5 < len(texts) < 12, "one a minute"
    assert [event["event"] for event in node.events] == ["archive-failed"]
    node.work()
    assert read_versions(job.archive) == [(1, STEP)]
    assert node.part._failures.series is None
    assert caplog.messages[-1] == "uploads to the archive work again."
    assert [event["event"] for event in node.events] == ["archive-failed", "archive-recovered", "archived"]


@pytest.mark.parametrize("generation", [1, 0])
def test_second_writer_ends_archiving_unless_it_is_older(tmp_path: Path, generation: int) -> None:
    """It takes the number between begin and commit. A job of an older generation gives way."""
    job = Job(tmp_path, "a")
    job.request()
    (node,) = job.nodes
    node.commit(STEP)
    while not job.archive.list_attempts():
        node.part._work()
    archive_step(job.archive, 99, generation=generation)
    job.work()
    if generation:
        (event,) = node.events
        alert = next(alert for alert in ALERTS if alert.kind == event["event"] == "archive-refused")
        assert "node node-a of another job archives under this run id too (entry 1, g1-s99)." in str(
            event["error"]
        )
        assert alert.describe(event).count("archives no more") == 1
        assert job.nodes[0].part._verdict.refusal
        assert read_versions(job.archive) == [(1, 99)]
        return
    assert not node.part._verdict.refusal
    assert read_versions(job.archive)[0] == (1, STEP), "it is due again at once"


@pytest.mark.parametrize(
    ("rank", "grace_s", "expected"), [(0, None, 50), (1, None, STEP), (0, 1000, 50), (0, 0, STEP)]
)
def test_first_node_archives_last_checkpoint_if_there_is_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: int, grace_s: int | None, expected: int
) -> None:
    """After a signal, which comes with a grace here, the measured speed decides."""
    monkeypatch.setenv(constants.ENV_GRACE, str(grace_s))
    job = Job(tmp_path, "a")
    job.request()
    (node,) = job.nodes
    node.commit(STEP)
    job.work()
    node.commit(50)
    node.part.begin_generation(SimpleNamespace(rank=rank))  # type: ignore[arg-type]
    if grace_s is not None:
        node.part.begin_stop()
    else:
        node.job_end = SimpleNamespace(reason=JobFinished())
    node.close()
    assert read_versions(job.archive)[0] == (1, expected)
    assert len(job.archive.list_attempts()) == 1, "with --archive-keep 1 nothing older stays"
