"""Test the end of a job whose archive fails or does not answer: the node ends when it must."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from elastic_resume import constants
from elastic_resume.archive.archive import Archive
from elastic_resume.checkpoint.catalog import Catalog
from elastic_resume.errors import ArchiveError, ArchiveErrorKind
from elastic_resume.mechanisms.archive import last_upload, pinned_checkpoint
from elastic_resume.mechanisms.archive import writer as writers
from elastic_resume.mechanisms.archive.judge import ArchivedVersion
from elastic_resume.mechanisms.archive.last_upload import LastUpload
from elastic_resume.milestone import Milestone
from elastic_resume.policy.reasons import JobFinished
from tests.support.checkpoint_samples import RUN, SMALL_BLOCK
from tests.support.processes import wait_for
from tests.unit.mechanisms.archive.test_uploader import Job, Node

STEP = 50
AGAIN = "start the same command again to archive"


def make_node(path: Path) -> Node:
    """Return the first node of a job that has finished, with a last checkpoint."""
    (node,) = Job(path, "a").nodes
    node.commit(STEP)
    node.part.begin_generation(SimpleNamespace(rank=0))  # type: ignore[arg-type]
    node.job_end = SimpleNamespace(reason=JobFinished())
    return node


@pytest.fixture
def tries(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Have each attempt fail with the kind that is put first; the list grows."""
    found: list[str] = ["forbidden"]

    def fail(*_: object) -> None:
        found.append("try")
        raise ArchiveError("s3://b: cannot list: access denied.", kind=ArchiveErrorKind(found[0]))

    monkeypatch.setattr(Archive, "begin", fail)
    return found


@pytest.fixture
def hang(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Have a request take until the test is over; the event says that it is under way."""
    is_under_way, is_over = threading.Event(), threading.Event()

    def wait(*_: object) -> None:
        is_under_way.set()
        is_over.wait()
        raise ArchiveError("too late: nobody reads this.")

    monkeypatch.setattr(Archive, "begin", wait)
    yield is_under_way
    is_over.set()


def close_in_thread(node: Node) -> threading.Thread:
    """Have the node end, and go on."""
    thread = threading.Thread(target=node.close, daemon=True)
    thread.start()
    return thread


def test_request_under_way_does_not_outlive_the_grace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, hang: threading.Event
) -> None:
    """The signal comes within the last upload. The thread is a daemon, so the process can end."""
    monkeypatch.setenv(constants.ENV_GRACE, "1")
    node = make_node(tmp_path)
    closing = close_in_thread(node)
    assert hang.wait(30)
    node.part.begin_stop()
    closing.join(30)
    assert not closing.is_alive()
    assert node.part._thread._thread.is_alive()
    assert node.part._thread._thread.daemon
    assert f"not archived: step {STEP}. Its upload took too long" in caplog.messages[-1]
    assert [event["event"] for event in node.events] == ["archive-failed"]


def test_other_node_does_not_wait_for_its_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, hang: threading.Event
) -> None:
    """The first node archives the last checkpoint; this one puts its events only."""
    monkeypatch.setattr(Archive, "put_events", Archive.begin)
    node = make_node(tmp_path)
    (node.directory / constants.EVENTS_FILE).write_text("{}\n")
    node.part.begin_generation(SimpleNamespace(rank=1))  # type: ignore[arg-type]
    closing = close_in_thread(node)
    assert hang.wait(30)
    closing.join(30)
    assert not closing.is_alive()
    assert not caplog.messages


def test_finished_job_does_not_wait_for_a_store_that_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, hang: threading.Event
) -> None:
    """GPUs wait. What is put meanwhile counts: a slow upload may take long."""
    monkeypatch.setattr(last_upload, "STALL_S", 2.0)
    closing = close_in_thread(make_node(tmp_path))
    assert hang.wait(30)
    closing.join(30)
    assert not closing.is_alive()
    assert f"not archived: step {STEP}. Its upload took too long" in caplog.messages[-1]


@pytest.mark.parametrize("is_last", [True, False])
def test_slow_link_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_last: bool) -> None:
    """A part of 64 MiB takes 134 s at 0.5 MB/s. It may be of an upload that was under way before."""
    clock, polled, real_put, real_find = [1000.0], threading.Event(), Archive.put_part, LastUpload.find_left_s
    slow_puts: list[float] = []
    monkeypatch.setattr(last_upload, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr(writers, "MIN_BYTES_PER_S", SMALL_BLOCK / 100)
    monkeypatch.setattr(pinned_checkpoint, "choose_part_bytes", lambda *_: SMALL_BLOCK)
    node = make_node(tmp_path)

    def find_left_s(last: LastUpload) -> float | None:
        polled.set()
        return real_find(last)

    def put_part(archive: Archive, attempt: str, index: int, data: memoryview) -> None:
        if not slow_puts:
            slow_puts.append(clock[0])
            for _ in range(2):  # the main thread looks how long it has waited
                polled.clear()
                polled.wait(30 if clock[0] == 1000.0 else 10)
                clock[0] = 1000.0 + last_upload.STALL_S + 50.0
        real_put(archive, attempt, index, data)

    monkeypatch.setattr(LastUpload, "find_left_s", find_left_s)
    monkeypatch.setattr(Archive, "put_part", put_part)
    if is_last:
        node.close()
    else:
        node._job.request()
        node.commit(node.words["commit_step"])
        node.part._thread.start()
        wait_for(lambda: bool(slow_puts), "a part under way")
        node.part.close()
    assert clock[0] > 1000.0
    assert {event["event"] for event in node.events} == {"archived"}
    assert node.events[-1]["step"] == STEP


def test_signal_ends_the_pause_before_the_next_try(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tries: list[str]
) -> None:
    """An outage may pass, so the node tries again and again; after a signal there is no time for that."""
    tries[0] = "unavailable"
    monkeypatch.setattr(last_upload, "find_pause_s", lambda *_: 600.0 if len(tries) > 3 else 0.0)
    node = make_node(tmp_path)
    closing = close_in_thread(node)
    deadline = time.monotonic() + 30
    while len(tries) < 4 and time.monotonic() < deadline:
        time.sleep(0.01)
    node.part.begin_stop()
    closing.join(30)
    assert not closing.is_alive()
    assert f"not archived: step {STEP}." in caplog.messages[-1]
    assert not any("Training continues" in message for message in caplog.messages)


@pytest.mark.parametrize("case", [("forbidden", 2), ("credentials", 2), ("unavailable", 6)])
def test_what_waiting_does_not_mend_is_tried_twice(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    tries: list[str],
    case: tuple[str, int],
) -> None:
    """GPUs wait meanwhile. An outage is waited for, for a limited time."""
    tries[0], count = case
    monkeypatch.setattr(last_upload, "find_pause_s", lambda failures, _: 0.0 if failures < 6 else 600.0)
    node = make_node(tmp_path)
    node.close()
    assert tries.count("try") == count
    refused = "s3://b: cannot list: access denied."
    assert caplog.messages == [
        f"{refused} This node tries again for a time before it ends.",
        f"not archived: step {STEP}. {refused} It is in {node.directory}: {AGAIN} it.",
    ]


def test_checkpoints_that_are_not_archived_are_named_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tries: list[str]
) -> None:
    """What the archive refused for the first is not tried for the second; waiting does not mend it."""
    monkeypatch.setattr(last_upload, "find_pause_s", lambda *_: 0.0)
    node = make_node(tmp_path)
    Catalog(node.directory, RUN).add_milestone(node.directory / f"g000001-s{STEP:010d}", Milestone("best"))
    node.commit(STEP + 10)
    node.part._writer.archived = ArchivedVersion(1, STEP - 10)
    node.close()
    assert tries.count("try") == 2
    (line,) = [message for message in caplog.messages if "not archived" in message]
    assert line.startswith(
        f"not archived: steps {STEP} (best) and {STEP + 10}; the newest archived is step {STEP - 10}. s3:"
    )
    assert line.endswith(f" They are in {node.directory}: {AGAIN} them.")
    assert [event["error_kind"] for event in node.events] == ["not-archived"]


def test_result_of_last_upload_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Also if it is there already."""
    caplog.set_level("INFO")
    make_node(tmp_path / "one").close()
    assert f"step {STEP} is archived in " in caplog.messages[-1]
    node = make_node(tmp_path / "one" / "again")
    writer = node.part._writer
    assert writer
    writer.archive = Job(tmp_path / "one", "b").archive
    node.close()
    assert caplog.messages[-1] == f"step {STEP} is archived already."


def test_start_that_failed_before_training_archives_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As with a wrong --resume-from: what is on the disk is of an earlier start."""
    node = make_node(tmp_path)
    node.part._held.has_committed = False
    node.job_end = SimpleNamespace(reason="failure")
    node.close()
    assert not caplog.messages
    assert not (tmp_path / "store").exists() or not node._job.archive.list_numbers()
