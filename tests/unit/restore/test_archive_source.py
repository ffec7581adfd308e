"""Test what a start lists in the archive, and what follows from entries that cannot be read."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import pytest

from elastic_resume import constants
from elastic_resume.archive import archive as archive_module
from elastic_resume.archive.archive import Archive, open_archive
from elastic_resume.archive.directory_store import DirectoryStore
from elastic_resume.archive.entries import MAX_ENTRY_BYTES, MAX_LINE_BYTES
from elastic_resume.archive.store import StoredName
from elastic_resume.config import Settings
from elastic_resume.errors import (
    ArchiveError,
    ArchiveOutageError,
    ConfigError,
    CorruptError,
    NoValidCheckpointError,
    TornError,
)
from elastic_resume.events import EventLog
from elastic_resume.milestone import Milestone
from elastic_resume.policy import going_back, resume_plan
from elastic_resume.policy.going_back import parse_request
from elastic_resume.policy.resume_plan import ARCHIVE, DISK, Inventory, ResumePlan
from elastic_resume.ranks import rank_context
from elastic_resume.ranks.collectives import Collectives
from elastic_resume.ranks.rank_context import RankContext
from elastic_resume.restore import coordinator
from elastic_resume.restore import sources as sources_module
from elastic_resume.restore.sources import (
    ArchiveSource,
    list_sources,
    take_further_inventory,
    take_inventory,
)
from elastic_resume.restore.transfer import BlockTable, SharedReading, receive
from elastic_resume.slots.progress_page import ProgressPage
from tests.support.archives import archive_step
from tests.support.checkpoint_samples import RUN, SMALL_BLOCK, save_checkpoint


@pytest.fixture
def archive(tmp_path: Path) -> Archive:
    """An archive with the steps 1 and 2 of generation 3."""
    (tmp_path / "store").mkdir()
    archive = open_archive(str(tmp_path / "store"), RUN)
    archive_step(archive, 1, generation=3)
    archive_step(archive, 2, generation=3)
    return archive


def make_context(tmp_path: Path, mode: str = "auto") -> RankContext:
    """Return the context of rank 0 of a world of one, on an empty node."""
    settings = Settings.for_worker(
        {"ELASTIC_RESUME_ARCHIVE": str(tmp_path / "store")},
        "train.py",
        ckpt_dir=tmp_path,
        run_id=RUN,
        node_name="x",
        resume=mode,
    )
    (tmp_path / RUN / "x").mkdir(parents=True, exist_ok=True)
    events = EventLog(tmp_path / RUN / "x" / constants.EVENTS_FILE, node="x")
    return RankContext(Collectives(0, 1, None), settings, events)


def plan_resume(tmp_path: Path, mode: str = "auto") -> ResumePlan:
    """Return the plan of that node."""
    context = make_context(tmp_path, mode)
    page = ProgressPage(context.node_dir / constants.PROGRESS_FILE)
    inventory = take_inventory(context, list_sources(context, None), page, 0)
    return resume_plan.choose_resume_plan([inventory], mode)


def find_entry(tmp_path: Path, number: int) -> Path:
    """Return the file of an entry."""
    return tmp_path / "store" / RUN / "log" / f"{number:08d}"


def test_empty_node_resumes_newest_archived_checkpoint(tmp_path: Path, archive: Archive) -> None:
    """Its bytes are those that were archived."""
    plan = plan_resume(tmp_path)
    assert (plan.version, plan.source_tier, plan.generation) == ((3, 2), ARCHIVE, 4)
    state = plan.saved_state_for("x")
    assert state
    source = ArchiveSource(make_context(tmp_path), None)
    opened = source.open(state)
    image = bytes(archive.read_image(archive.read_entry(2)))
    assert opened.buffer.layout.total_bytes == len(image)
    assert opened.reader
    table = BlockTable(opened.buffer, SMALL_BLOCK)
    receive(table, [], 0, SharedReading(opened.reader, (None,)))
    assert bytes(opened.buffer.memory) == image
    other = ArchiveSource(make_context(tmp_path), None).find_reader(opened.reader.key)
    assert other
    block = memoryview(bytearray(SMALL_BLOCK))
    assert other.read_block(1, block) == table.get_digest(1)
    assert bytes(block) == image[SMALL_BLOCK : 2 * SMALL_BLOCK]
    assert source.find_reader(opened.reader.key[:-1]) is None, "another state has that number there"


def test_resume_never_counts_archived_generations_only(tmp_path: Path, archive: Archive) -> None:
    """The new run is newer than what is archived, and must not be mistaken for it."""
    del archive
    plan = plan_resume(tmp_path, "never")
    assert (plan.kind, plan.generation) == ("cold", 4)


@pytest.mark.parametrize(("step", "tier"), [(1, ARCHIVE), (2, DISK), (3, DISK)])
def test_nodes_state_is_preferred_unless_archived_one_is_newer(
    tmp_path: Path, archive: Archive, step: int, tier: str
) -> None:
    """The bucket is not read for what a node holds."""
    del archive
    (tmp_path / RUN / "x").mkdir(parents=True)
    save_checkpoint(tmp_path / RUN / "x", 3, step)
    plan = plan_resume(tmp_path)
    assert (plan.step, plan.source_tier) == (max(step, 2), tier)


@pytest.mark.parametrize("is_mounted", [True, False])
def test_archive_that_cannot_be_read_never_starts_job_over(tmp_path: Path, is_mounted: bool) -> None:
    """A job with a state goes on; the plan of one without is an error, should its start not have waited."""
    if is_mounted:
        break_archive(tmp_path)
    with pytest.raises(NoValidCheckpointError, match="none can be loaded") as caught:
        plan_resume(tmp_path)
    assert not caught.value.is_deterministic
    save_checkpoint(tmp_path / RUN / "x", 3, 1)
    assert plan_resume(tmp_path).version == (3, 1)


def break_archive(tmp_path: Path) -> Path:
    """Make the log of entries a loop of links; return it."""
    log = tmp_path / "store" / RUN / "log"
    log.parent.mkdir(parents=True)
    log.symlink_to("log")
    return log


def await_archive(tmp_path: Path, *, has_restarted: bool = False) -> list[Inventory]:
    """Return the inventories with which a start goes on."""
    context = make_context(tmp_path)
    sources = list_sources(context, None)
    page = ProgressPage(context.node_dir / constants.PROGRESS_FILE)
    own = replace(take_inventory(context, sources, page, 0), has_restarted=has_restarted)
    return coordinator._await_archive(context, sources, [own], coordinator._ArchiveWait(context))


def test_start_without_a_state_waits_while_the_archive_is_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It goes on by itself, says why it waits, and tries again with growing pauses."""
    log = break_archive(tmp_path)
    pauses: list[float] = []

    def sleep(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 3:
            log.unlink()
            archive_step(open_archive(str(tmp_path / "store"), RUN), 2, generation=3)

    monkeypatch.setattr("elastic_resume.restore.coordinator.time.sleep", sleep)
    caplog.set_level("INFO", "elastic_resume")
    (own,) = await_archive(tmp_path)
    assert pauses == [1, 2, 4]
    assert [state.version for state in own.saved_states] == [(3, 2)]
    assert own.rejected == ()
    (waits,) = [record.getMessage() for record in caplog.records if "archive" in record.getMessage()]
    assert "waiting for the archive, 10 min at most, because a newer state may be there: file:///" in waits
    assert "check that the file system is mounted" in waits


def test_start_ends_once_it_has_waited_long_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its end says so, and never what `--resume never` would lose."""
    break_archive(tmp_path)
    monkeypatch.setattr(coordinator, "ARCHIVE_PATIENCE_S", 0.0)
    with pytest.raises(ArchiveOutageError, match=r"could not be read for 0 min: .*mounted.*command again"):
        await_archive(tmp_path)


def test_restart_with_a_state_does_not_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It says what it could not look at."""
    break_archive(tmp_path)
    (tmp_path / RUN / "x").mkdir(parents=True)
    save_checkpoint(tmp_path / RUN / "x", 3, 1)
    monkeypatch.setattr("elastic_resume.restore.coordinator.time.sleep", pytest.fail)
    (own,) = await_archive(tmp_path, has_restarted=True)
    assert [state.version for state in own.saved_states] == [(3, 1)]
    assert "the archive cannot be read, so only what nodes hold is resumed: " in caplog.text


def test_start_waits_while_the_newest_entry_cannot_be_read(
    tmp_path: Path, archive: Archive, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The log can be listed, and an older entry be read. The newest may have a newer state."""
    del archive
    newest = find_entry(tmp_path, 2)
    newest.rename(tmp_path / "entry")
    newest.symlink_to(newest.name)
    pauses: list[float] = []

    def sleep(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 2:
            newest.unlink()
            (tmp_path / "entry").rename(newest)

    monkeypatch.setattr("elastic_resume.restore.coordinator.time.sleep", sleep)
    (own,) = await_archive(tmp_path)
    assert pauses == [1, 2]
    assert max(state.version for state in own.saved_states) == (3, 2)


def test_request_to_go_back_waits_for_the_archive_though_a_node_has_that_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in a job that has trained: the archived state of that name may be another one."""
    break_archive(tmp_path)
    (tmp_path / RUN / "x").mkdir(parents=True)
    save_checkpoint(tmp_path / RUN / "x", 3, 1)
    context = make_context(tmp_path)
    sources = list_sources(context, None)
    page = ProgressPage(context.node_dir / constants.PROGRESS_FILE)
    own = replace(take_inventory(context, sources, page, 0), has_restarted=True, resume_from="1")
    monkeypatch.setattr(coordinator, "ARCHIVE_PATIENCE_S", 0.0)
    wait = coordinator._ArchiveWait(context)
    with pytest.raises(ArchiveOutageError, match="may hold a newer state than the nodes"):
        coordinator._list_all_that_counts(context, sources, [own], wait)
    (listed,) = coordinator._list_all_that_counts(context, sources, [replace(own, resume_from="")], wait)
    assert [state.version for state in listed.saved_states] == [(3, 1)]


def test_start_refuses_the_address_of_a_run(tmp_path: Path, archive: Archive) -> None:
    """It is what the log shows; the job would find nothing there, and start over."""
    del archive
    (tmp_path / "store").rename(tmp_path / "stored")
    (tmp_path / "stored" / RUN).rename(tmp_path / "store")
    with pytest.raises(ArchiveError, match=r"store is the address of one run of an archive: give --archive"):
        await_archive(tmp_path)


def test_start_says_that_the_archive_has_nothing_of_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A wrong run id or address looks like a new job otherwise."""
    (tmp_path / "store" / "trian").mkdir(parents=True)
    caplog.set_level("INFO", "elastic_resume")
    await_archive(tmp_path)
    expected = f"the archive {tmp_path}/store has nothing of a run {RUN!r} yet. It has: trian."
    assert expected in [record.getMessage() for record in caplog.records]


def test_first_start_waits_though_an_old_disk_has_a_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The archive may hold a newer one, whose generation would be used again."""
    break_archive(tmp_path)
    (tmp_path / RUN / "x").mkdir(parents=True)
    save_checkpoint(tmp_path / RUN / "x", 3, 1)
    monkeypatch.setattr(coordinator, "ARCHIVE_PATIENCE_S", 0.0)
    with pytest.raises(ArchiveOutageError, match="may hold a newer state than the nodes"):
        await_archive(tmp_path)


@pytest.mark.parametrize("is_restart", [True, False])
def test_restart_does_not_wait_for_a_store_that_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, *, is_restart: bool
) -> None:
    """The first generation of a start does."""
    (tmp_path / "store").mkdir()
    (tmp_path / RUN / "x").mkdir(parents=True)
    save_checkpoint(tmp_path / RUN / "x", 3, 1)
    answer = threading.Event()

    def hang(_: object) -> None:
        if is_restart:
            answer.wait(60)

    monkeypatch.setattr(archive_module.Archive, "find_newest", hang)
    monkeypatch.setattr(sources_module, "MAX_QUERY_S", 0.0)
    launcher = rank_context.launcher_id() if is_restart else "an earlier start"
    monkeypatch.setattr("elastic_resume.checkpoint.node_dir.read_script_arguments", lambda _: (launcher, ()))
    context = make_context(tmp_path)
    page = ProgressPage(context.node_dir / constants.PROGRESS_FILE)
    own = take_inventory(context, list_sources(context, None), page, 0)
    answer.set()
    assert [state.version for state in own.saved_states] == [(3, 1)]
    assert ("does not answer within" in caplog.text) == is_restart


@pytest.mark.parametrize(
    ("archives", "problem"),
    [
        (["", ""], ""),
        (["s3://b/x", "s3://b/x"], ""),
        (["", "s3://b/x"], "--archive differs between nodes (n0: off; n1: s3://b/x)."),
        (["s3://b/x", "s3://b/y"], "--archive differs between nodes (n0: s3://b/x; n1: s3://b/y)."),
    ],
)
def test_start_needs_one_archive(
    tmp_path: Path, archives: list[str], problem: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Rank 0's node alone reads it, and would start over without a word; a running job goes on."""
    nodes = [Inventory(f"n{rank}", rank, archive=archive) for rank, archive in enumerate(archives)]
    context = make_context(tmp_path)
    if problem:
        with pytest.raises(ConfigError, match=re.escape(problem)):
            coordinator._check_archives(context, nodes)
    running = [replace(node, has_restarted=True) for node in nodes]
    coordinator._check_archives(context, running)
    assert problem in caplog.text
    assert ("The job has trained with it, and goes on." in caplog.text) == bool(problem)


def test_node_says_which_archive_it_was_given(tmp_path: Path) -> None:
    """The nodes compare it."""
    context = make_context(tmp_path)
    page = ProgressPage(context.node_dir / constants.PROGRESS_FILE)
    assert take_inventory(context, {}, page, 0).archive == context.settings.archive != ""


class CountingStore(DirectoryStore):
    """A directory that notes each request."""

    requests: ClassVar[list[str]] = []

    def get_range(self, name: str, start: int, size: int) -> memoryview | None:
        """Read, and note the name and the most bytes."""
        self.requests.append(f"get {name} {size}")
        return super().get_range(name, start, size)

    def list(self, prefix: str) -> list[StoredName]:
        """List, and note it."""
        self.requests.append(f"list {prefix}")
        return super().list(prefix)


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The requests of readers that are opened from now on."""
    monkeypatch.setattr(archive_module, "DirectoryStore", CountingStore)
    CountingStore.requests.clear()
    return CountingStore.requests


@pytest.fixture
def few_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A start lists two entries."""
    monkeypatch.setattr(sources_module, "MAX_LISTED_STATES", 2)


GLANCE = [f"list {RUN}/log", f"get {RUN}/log/00000002 {MAX_LINE_BYTES}"]
WHOLE = [f"get {RUN}/log/0000000{number} {MAX_ENTRY_BYTES + 1}" for number in (1, 2)]


@pytest.mark.parametrize(
    ("held", "mode", "expected"),
    [
        ((3, 2), "auto", GLANCE),  # as after a worker's failure: this node holds the newest
        ((4, 1), "auto", GLANCE),
        (None, "never", GLANCE),
        ((3, 1), "auto", [*GLANCE, GLANCE[0], *WHOLE]),
        (None, "auto", [*GLANCE, GLANCE[0], *WHOLE]),
    ],
)
@pytest.mark.usefixtures("archive")
def test_start_asks_two_requests_unless_archive_has_something_newer(
    tmp_path: Path, requests: list[str], held: tuple[int, int] | None, mode: str, expected: list[str]
) -> None:
    """A restart takes a third of a second, and one request of an object store a tenth."""
    (tmp_path / RUN / "x").mkdir(parents=True)
    if held:
        save_checkpoint(tmp_path / RUN / "x", *held)
    assert plan_resume(tmp_path, mode).generation == max(3, (held or (0,))[0]) + 1
    assert sorted(requests) == sorted(expected)


def test_newest_state_is_found_though_a_late_entry_is_older(
    tmp_path: Path, archive: Archive, requests: list[str]
) -> None:
    """The greatest number is not always the newest state."""
    archive_step(archive, 9, generation=2)
    (tmp_path / RUN / "x").mkdir(parents=True)
    save_checkpoint(tmp_path / RUN / "x", 3, 1)
    assert plan_resume(tmp_path).version == (3, 2)
    requests.clear()
    save_checkpoint(tmp_path / RUN / "x", 3, 2)
    assert plan_resume(tmp_path).source_tier == DISK
    assert len(requests) == 2


def test_archive_is_listed_when_what_was_held_fails(tmp_path: Path, archive: Archive) -> None:
    """The two requests at the start have named no state to fall back to."""
    archive_step(archive, 3, generation=3)
    (tmp_path / RUN / "x").mkdir(parents=True)
    save_checkpoint(tmp_path / RUN / "x", 3, 4)
    context = make_context(tmp_path)
    sources = list_sources(context, None)
    page = ProgressPage(context.node_dir / constants.PROGRESS_FILE)
    own = take_inventory(context, sources, page, 0)
    assert [state.tier for state in own.saved_states] == [DISK]
    (failed,) = own.saved_states
    own = resume_plan.reject_saved_state(own, failed, "g3-s4", "damaged")
    more = take_further_inventory(context, sources, "")
    plan = resume_plan.choose_resume_plan([resume_plan.add_states(own, more)], "auto")
    assert (plan.version, plan.source_tier) == ((3, 3), ARCHIVE)
    assert take_further_inventory(context, sources, "").saved_states == ()


@pytest.mark.parametrize(
    ("request_text", "version"),
    [("best", (3, 1)), ("latest", (3, 2)), ("1", (3, 1)), ("g3-s1", (3, 1)), ("good", (3, 2))],
)
@pytest.mark.usefixtures("few_are_listed")
def test_request_to_go_back_finds_old_archived_state(
    tmp_path: Path, archive: Archive, requests: list[str], request_text: str, version: tuple[int, int]
) -> None:
    """It is beyond the newest entries; whole entries are read of what may be meant only."""
    archive.add_milestones((3, 1), "1" * 16, [Milestone("best", 2.0)])
    archive.add_milestones((3, 2), "1" * 16, [Milestone("best", 1.0), Milestone("good")])
    for step in range(3, 7):
        archive_step(archive, step, generation=3)
    context = make_context(tmp_path)
    sources = list_sources(context, None)
    page = ProgressPage(context.node_dir / constants.PROGRESS_FILE)
    own = replace(take_inventory(context, sources, page, 0), resume_from=parse_request(request_text) or "")
    assert [state.step for state in own.saved_states] == [6, 5]
    due = going_back.find_due_request([own], "auto")
    own = resume_plan.add_states(own, take_further_inventory(context, sources, due))
    plan = going_back.plan_with_request([own], "auto")
    assert (plan.version, plan.source_tier, plan.given_up_steps) == (version, ARCHIVE, 6 - version[1])
    assert len([name for name in requests if name.endswith(f" {MAX_ENTRY_BYTES + 1}")]) <= 4
    done = replace(own.saved_states[0], ways_back=plan.ways_back, generation=4)
    assert going_back.find_due_request([replace(own, saved_states=(done,))], "auto") == ""
    assert sources[ARCHIVE].open(plan.saved_state_for("x")).manifest  # type: ignore[arg-type]


def _tear(content: bytes) -> bytes:
    return content[:-40]


def _make_newer(content: bytes) -> bytes:
    return content.replace(b'"format":1', b'"format":9', 1)


def _make_unknown(content: bytes) -> bytes:
    return _make_newer(content).replace(b'"attempt"', b'"attempts"', 1)


def test_torn_entry_leads_to_older_step_with_message(tmp_path: Path, archive: Archive) -> None:
    """It stays where it is."""
    del archive
    entry = find_entry(tmp_path, 2)
    entry.write_bytes(_tear(entry.read_bytes()))
    plan = plan_resume(tmp_path)
    assert plan.version == (3, 1)
    assert [(each.name, each.version) for each in plan.rejected] == [("entry 2 of the archive", (3, 2))]
    assert entry.exists()


@pytest.mark.parametrize("change", [_make_newer, _make_unknown])
def test_entry_of_newer_format_never_leads_to_older_step(
    tmp_path: Path, archive: Archive, change: Callable[[bytes], bytes]
) -> None:
    """An upgrade can read it."""
    del archive
    entry = find_entry(tmp_path, 2)
    entry.write_bytes(change(entry.read_bytes()))
    with pytest.raises(NoValidCheckpointError, match="Upgrade elastic_resume"):
        plan_resume(tmp_path)


def test_damaged_and_deleted_checkpoints_fail_to_open(tmp_path: Path, archive: Archive) -> None:
    """The restore then tries the next older one."""
    state = plan_resume(tmp_path).saved_state_for("x")
    assert state
    source = ArchiveSource(make_context(tmp_path), None)
    part = next((tmp_path / "store" / RUN / "parts").glob("g000003-s0000000002-*/00000"))
    content = bytearray(part.read_bytes())
    content[100] ^= 1
    part.write_bytes(content)
    with pytest.raises(CorruptError, match="do not match their digest"):
        source.open(state)
    source.give_up(state, "damaged")
    assert part.exists()
    with pytest.raises(TornError, match="is not there any more"):
        source.open(replace(state, step=9))
    del archive
