"""Test the committer and its server with real memory, real sockets and a failing disk."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from elastic_resume.background import OfferQueue
from elastic_resume.checkpoint.atomic_io import Disk
from elastic_resume.checkpoint.node_dir import NodeDir
from elastic_resume.checkpoint.reader import checkpoint_name, deep_check
from elastic_resume.checkpoint.writer import RetentionPolicy
from elastic_resume.console import ByteProgress
from elastic_resume.errors import MachineError
from elastic_resume.local_socket import send_message
from elastic_resume.slots import committer as committers
from elastic_resume.slots.committer import CheckpointCommitter
from elastic_resume.slots.ipc import MAX_MESSAGE_BYTES, SnapshotClient, SnapshotServer
from elastic_resume.slots.slot_memory import ControlBlock, Slot, encode_snapshot_id
from elastic_resume.slots.slot_pool import SlotPool
from tests.support.snapshot_samples import SLOT_BYTES, write_snapshot


class FailingDisk(Disk):
    """A disk that fails one kind of operation on demand."""

    def __init__(self) -> None:
        self.failing_operation = ""
        self.before_write: Callable[[], None] = lambda: None

    def write(self, descriptor: int, data: bytes | memoryview, path: Path) -> None:
        """Write, unless writing is to fail."""
        self.before_write()
        if self.failing_operation == "write":
            raise MachineError(f"cannot write {path}: No space left on device; free space there.")
        super().write(descriptor, data, path)

    def rename(self, source: Path, target: Path) -> None:
        """Rename, unless renaming is to fail."""
        if self.failing_operation == "rename":
            raise MachineError(f"cannot rename to {target}: Input/output error; look at dmesg.")
        super().rename(source, target)


@dataclass
class CommitterFixture:
    """A committer with the disk, log and events it was given."""

    committer: CheckpointCommitter
    disk: FailingDisk
    node_dir: Path
    caplog: pytest.LogCaptureFixture
    emitted: list[tuple[str, dict[str, Any]]] = field(default_factory=list)

    def slot(self, index: int) -> Slot:
        """Return a slot as the committer has mapped it."""
        return self.committer.slot_pool._owned[index].slot

    def write_requested(self, index: int, step: int, *, share_count: int = 1) -> int:
        """Write a snapshot into a slot and request its commit."""
        snapshot_id = write_snapshot(self.slot(index), step, commit_requested=True, share_count=share_count)
        self.committer.request_commit(snapshot_id)
        return snapshot_id

    def kinds(self) -> list[str]:
        """Return the kinds of all events."""
        return [kind for kind, _ in self.emitted]

    def committed_names(self) -> list[str]:
        """Return the names of all checkpoints on disk after verifying every byte."""
        found = sorted(path for path in self.node_dir.glob("g*-s*"))
        for path in found:
            deep_check(path, "job")
        return [path.name for path in found]


@pytest.fixture
def fixture(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> Iterator[CommitterFixture]:
    """Yield a committer with three slots."""
    with NodeDir.claim(tmp_path, "job", "a") as node_dir:
        disk = FailingDisk()
        caplog.set_level("INFO")
        emitted: list[tuple[str, dict[str, Any]]] = []
        pool = SlotPool(3 * SLOT_BYTES)
        pool.reserve(SLOT_BYTES)
        committer = CheckpointCommitter(
            node_dir.path,
            "job",
            pool,
            emit=lambda kind, **fields: emitted.append((kind, fields)),
            disk=disk,
        )
        committer.start()
        yield CommitterFixture(committer, disk, node_dir.path, caplog, emitted)
        committer.close()


def wait_until(true: Callable[[], bool]) -> None:
    """Wait for a condition that another thread fulfils."""
    limit = time.monotonic() + 60
    while not true():
        assert time.monotonic() < limit
        time.sleep(0.005)


def test_requested_snapshot_is_committed_and_no_other(fixture: CommitterFixture) -> None:
    """The bytes in memory become a safetensors file."""
    write_snapshot(fixture.slot(0), 3)
    snapshot_id = fixture.write_requested(1, 2)
    wait_until(lambda: fixture.slot(1).record.get("committed") == snapshot_id)
    data = (fixture.node_dir / checkpoint_name(1, 2) / "state.safetensors").read_bytes()
    assert data == bytes(fixture.slot(1).image())
    fixture.committer.request_commit(snapshot_id)  # the thread looks at the slots once more
    wait_until(lambda: fixture.committer._incomplete_request is None)
    fixture.committer.close()
    assert fixture.committed_names() == [checkpoint_name(1, 2)]
    assert fixture.kinds() == ["commit"]


def test_progress_is_shown_only_to_caller_that_waits(
    fixture: CommitterFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training goes on during all other commits."""
    shown: list[str] = []

    def show(what: str, total_bytes: int) -> ByteProgress:
        shown.append(what)
        return ByteProgress(what, total_bytes)

    monkeypatch.setattr(committers, "ByteProgress", show)
    fixture.write_requested(0, 1)
    wait_until(lambda: fixture.kinds() == ["commit"])
    fixture.committer.commit(write_snapshot(fixture.slot(1), 2))
    assert shown == ["writing the checkpoint of step 2"]


def test_slow_reader_of_checkpoints_delays_neither_commits_nor_ends(fixture: CommitterFixture) -> None:
    """It may write to a remote archive. Here it takes the first checkpoint, and does not come to an end."""
    taken: list[str] = []
    has_begun, may_end = threading.Event(), threading.Event()

    def archive(path: Path) -> None:
        taken.append(path.name)
        has_begun.set()
        may_end.wait(60)

    archives = OfferQueue("archive", archive)
    archives.start()
    fixture.committer.checkpoint_listeners.append(archives.put)
    fixture.committer.commit(write_snapshot(fixture.slot(0), 1))
    assert has_begun.wait(60)
    for step in (2, 3):
        assert fixture.committer.commit(write_snapshot(fixture.slot(step - 1), step)) is not None
    archives.close(timeout_s=0.01)
    fixture.committer.close()
    assert not may_end.is_set()
    may_end.set()
    archives.close()
    assert taken == [checkpoint_name(1, 1)]


def test_start_reserves_slots_of_newest_checkpoints_size(fixture: CommitterFixture) -> None:
    """The committer of a node without checkpoints waits for the first request."""
    write_snapshot(fixture.slot(0), 1)
    assert fixture.committer.commit() is not None
    control_blocks = {}
    committers_by_node = {}
    for node in ("a", "b"):
        pool, path = SlotPool(1 << 30), fixture.node_dir.parent / node
        control_blocks[node] = pool.control_block
        committers_by_node[node] = CheckpointCommitter(path, "job", pool, emit=lambda *_, **__: None)
        committers_by_node[node].start()
    wait_until(lambda: len(control_blocks["a"].read_slots()) == 3)
    serials = [state.serial for state in control_blocks["a"].read_slots()]
    assert committers_by_node["a"].slot_pool.reserve(SLOT_BYTES) == 3
    assert [state.serial for state in control_blocks["a"].read_slots()] == serials, "they are large enough"
    assert control_blocks["b"].read_slots() == []
    for committer in committers_by_node.values():
        committer.close()


def test_commit_waits_for_all_local_ranks(fixture: CommitterFixture) -> None:
    """Other local ranks may finish their copies later."""
    snapshot_id = fixture.write_requested(0, 1, share_count=2)
    time.sleep(0.05)
    assert fixture.committed_names() == []
    fixture.slot(0).record.set_copied(1, snapshot_id)
    wait_until(lambda: fixture.committed_names() == [checkpoint_name(1, 1)])


def test_snapshot_overwritten_during_write_is_not_committed(fixture: CommitterFixture) -> None:
    """The committer checks again after writing, before the rename."""
    slot = fixture.slot(0)
    snapshot_id = write_snapshot(slot, 1, commit_requested=True)
    fixture.disk.before_write = lambda: slot.record.set("snapshot_id", 0)
    fixture.committer.request_commit(snapshot_id)
    wait_until(lambda: slot.record.get("snapshot_id") == 0 and slot.record.get("pinned") == 0)
    assert fixture.committed_names() == []
    assert list(fixture.node_dir.glob(".tmp-*")) == []


@pytest.mark.parametrize("operation", ["write", "rename"])
def test_failing_disk_costs_one_checkpoint_and_is_retried(
    operation: str, fixture: CommitterFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The failure is logged once, the slot is released, and older checkpoints stay whole."""
    monkeypatch.setattr(committers, "FIRST_RETRY_S", 0.05)
    fixture.committer._retry_s = 0.05
    fixture.write_requested(0, 1)
    wait_until(lambda: fixture.committed_names() == [checkpoint_name(1, 1)])
    fixture.disk.failing_operation = operation
    second = fixture.write_requested(1, 2)
    wait_until(lambda: fixture.slot(1).record.get("committed") == second)
    wait_until(lambda: fixture.kinds().count("commit-failed") >= 2)
    assert fixture.committed_names() == [checkpoint_name(1, 1)]
    assert fixture.committer.last_error
    (message,) = fixture.caplog.messages
    assert "step 2 was not saved" in message
    write_snapshot(fixture.slot(2), 3)
    fixture.disk.failing_operation = ""
    wait_until(lambda: fixture.committed_names() == [checkpoint_name(1, 1), checkpoint_name(1, 3)])
    wait_until(lambda: not fixture.committer.last_error)
    assert "saved again" in fixture.caplog.messages[-1]


def test_internal_error_does_not_stop_committer(fixture: CommitterFixture) -> None:
    """The waiting caller gets the error, an event is emitted, and the next snapshot is committed."""

    def fail_once() -> None:
        fixture.disk.before_write = lambda: None
        raise KeyError("a defect")

    fixture.disk.before_write = fail_once
    with pytest.raises(MachineError, match="a defect"):
        fixture.committer.commit(write_snapshot(fixture.slot(0), 1))
    assert fixture.kinds() == ["committer-failed"]
    assert fixture.committer.commit(write_snapshot(fixture.slot(1), 2)) is not None
    assert fixture.committed_names() == [checkpoint_name(1, 2)]


def test_commit_raises_disk_error_to_its_caller(fixture: CommitterFixture) -> None:
    """After the disk recovered it returns the path."""
    fixture.disk.failing_operation = "write"
    snapshot_id = write_snapshot(fixture.slot(0), 1)
    with pytest.raises(MachineError, match="No space left"):
        fixture.committer.commit(snapshot_id)
    fixture.disk.failing_operation = ""
    assert fixture.committer.commit(snapshot_id) == fixture.node_dir / checkpoint_name(1, 1)
    assert fixture.committer.commit() == fixture.node_dir / checkpoint_name(1, 1)


def test_commit_without_snapshot_returns_none(fixture: CommitterFixture) -> None:
    """As at the end of a job that has taken no step."""
    assert fixture.committer.commit() is None
    fixture.committer.commit_newest()


def test_snapshot_with_damaged_metadata_is_not_committed(fixture: CommitterFixture) -> None:
    """A script that corrupts its own memory must not produce a checkpoint."""
    slot = fixture.slot(0)
    snapshot_id = write_snapshot(slot, 1, commit_requested=True)
    slot.memory[slot.record.get("dynamic_offset")] = 0
    fixture.committer.request_commit(snapshot_id)
    wait_until(lambda: fixture.kinds() == ["snapshot-ignored"])
    assert fixture.committed_names() == []
    assert slot.record.get("committed") == snapshot_id  # the slot is free again


def test_prune_after_commit_keeps_newest_two(fixture: CommitterFixture) -> None:
    """The retention policy of the workers says so."""
    fixture.committer.start_generation(RetentionPolicy(keep=2))
    for step in range(1, 6):
        fixture.committer.commit(write_snapshot(fixture.slot(step % 3), step))
    wait_until(lambda: len(list(fixture.node_dir.glob("g*-s*"))) == 2)  # after the last answer
    assert fixture.committed_names() == [checkpoint_name(1, 4), checkpoint_name(1, 5)]


def test_older_snapshot_of_same_step_does_not_replace_newer_one(fixture: CommitterFixture) -> None:
    """Both snapshots of an epoch's last step have one name on disk."""
    older, newer = write_snapshot(fixture.slot(0), 4), write_snapshot(fixture.slot(1), 4)
    fixture.slot(1).record.set("snapshot_id", newer + 1)  # the epoch is over
    fixture.slot(1).record.set_copied(0, newer + 1)
    assert fixture.committer.commit(newer + 1) is not None
    fixture.slot(0).record.set("commit_requested", older)
    fixture.committer.request_commit(older)
    wait_until(lambda: fixture.slot(0).record.get("committed") == older)
    assert fixture.kinds() == ["commit"]


def test_snapshot_loaded_from_own_disk_is_not_written_again(fixture: CommitterFixture) -> None:
    """A resume filled the slot from this node's checkpoint."""
    fixture.committer.commit(write_snapshot(fixture.slot(0), 4))
    fixture.emitted.clear()
    fixture.committer._last_commit = (0, None)
    duration_s = fixture.committer.last_commit_s
    assert duration_s > 0
    fixture.committer.start_generation(RetentionPolicy(trusted_version=(1, 4)))
    assert fixture.committer.commit() == fixture.node_dir / checkpoint_name(1, 4)
    assert fixture.emitted == []
    assert fixture.committer.last_commit_s == duration_s
    assert fixture.committer.slot_pool.control_block.get("commit_us") == int(duration_s * 1e6)


def test_close_finishes_commit_and_answers_other_callers(fixture: CommitterFixture) -> None:
    """Nobody waits for a thread that has ended."""
    committer, writing, may_write = fixture.committer, threading.Event(), threading.Event()

    def block() -> None:
        writing.set()
        may_write.wait(60)

    fixture.disk.before_write = block
    with ThreadPoolExecutor(4) as executor:
        first = executor.submit(committer.commit, write_snapshot(fixture.slot(0), 1))
        assert writing.wait(60)
        second = executor.submit(committer.commit, encode_snapshot_id(9, 9))
        wait_until(lambda: len(committer._requests) == 2)
        closing = executor.submit(committer.close)
        try:
            with pytest.raises(futures.TimeoutError):
                closing.result(0.2)
            assert executor.submit(committer.commit).result(10) is None
        finally:
            may_write.set()
        closing.result(60)
        assert first.result(60) == fixture.node_dir / checkpoint_name(1, 1)
        assert second.result(60) is None
    with pytest.raises(ValueError, match="closed"):
        committer.slot_pool.control_block.read_slots()
    assert fixture.committed_names() == [checkpoint_name(1, 1)]


def test_idle_committer_waits_but_not_when_it_is_being_closed(
    fixture: CommitterFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is closed just before it would wait for work."""
    committer, called, may_return = fixture.committer, threading.Semaphore(0), threading.Event()

    def process() -> None:
        committer._requests.clear()
        called.release()
        may_return.wait(60)

    monkeypatch.setattr(committer, "_process_next", process)
    committer.commit_newest()
    assert called.acquire(timeout=60)
    with committer._wakeup:
        may_return.set()
        time.sleep(0.1)  # until it waits for the lock: the test passes without, but would miss a defect
        committer._wakeup.notify()
    assert not called.acquire(timeout=0.1), "it polls"
    may_return.clear()
    committer.commit_newest()
    assert called.acquire(timeout=60)
    with committer._wakeup:
        may_return.set()
        time.sleep(0.1)  # likewise
        committer._closing = True
    committer._thread.join(10)
    assert not committer._thread.is_alive()


def test_one_message_lets_all_marked_slots_be_overwritten(fixture: CommitterFixture) -> None:
    """The newest is committed; the message for the other one may be lost with its worker."""
    with fixture.committer._wakeup:  # the thread may just begin, and must not see the first one alone
        ids = [write_snapshot(fixture.slot(step), step, commit_requested=True) for step in (0, 1)]
        fixture.committer.request_commit(ids[1])
    wait_until(lambda: [fixture.slot(index).record.get("committed") for index in (0, 1)] == ids)
    assert fixture.committed_names() == [checkpoint_name(1, 1)]


def test_commit_does_not_wait_for_thread_that_does_not_run(tmp_path: Path) -> None:
    """It may have ended by a defect."""
    committer = CheckpointCommitter(tmp_path, "job", SlotPool(0), emit=lambda *_, **__: None)
    start = time.monotonic()
    assert committer.commit(timeout_s=60) is None
    assert time.monotonic() < start + 30
    committer.close()


def test_commit_returns_none_when_time_is_over(
    fixture: CommitterFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That of ranks which do not finish their copies, after which no thread polls; or the caller's."""
    committer = fixture.committer
    snapshot_id = write_snapshot(fixture.slot(0), 1, share_count=2, commit_requested=True)
    with monkeypatch.context() as patched:
        patched.setattr(committers, "COPY_TIMEOUT_S", 0.05)
        committer.request_commit(snapshot_id)
        assert committer.commit(snapshot_id) is None
        wait_until(lambda: committer._incomplete_request is None)
        assert committer._wait_timeout_s() is None
    assert committer.commit(snapshot_id, timeout_s=0.05) is None
    assert committer._wait_timeout_s() == committers.POLL_S
    assert fixture.committed_names() == fixture.kinds() == []


def test_failing_disk_is_named_again_after_a_minute(
    fixture: CommitterFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At first once; the time to the next try doubles."""
    monkeypatch.setattr(committers, "MAX_RETRY_S", 1e6)
    fixture.committer._retry_s = 1000.0
    fixture.disk.failing_operation = "write"
    for step in (1, 2, 3):
        if step == 3:
            monkeypatch.setattr(committers, "LOG_REPEAT_S", 0.0)
        with pytest.raises(MachineError, match="No space left"):
            fixture.committer.commit(write_snapshot(fixture.slot(0), step))
    assert ["still not saved" in message for message in fixture.caplog.messages] == [False, True]
    assert fixture.committer._retry_s == 8000.0
    timeout_s = fixture.committer._wait_timeout_s()
    assert timeout_s is not None
    assert 3900 < timeout_s <= 4000
    fixture.disk.failing_operation = ""
    fixture.committer.commit(write_snapshot(fixture.slot(0), 4))
    assert fixture.committer._wait_timeout_s() is None


@pytest.mark.parametrize("error", [MachineError("full"), KeyError("a defect")])
def test_slot_dropped_during_commit_is_not_marked_as_committed(
    error: Exception, fixture: CommitterFixture
) -> None:
    """Its record belongs to a new slot, which may get the same snapshot again."""
    record = fixture.slot(0).record

    def fail() -> None:
        record.set("serial", 99)
        raise error

    fixture.disk.before_write = fail
    with pytest.raises(MachineError):
        fixture.committer.commit(write_snapshot(fixture.slot(0), 1))
    assert record.get("committed") == 0


@pytest.mark.parametrize("is_overwritten", [False, True])
def test_damage_of_overwritten_snapshot_is_no_event(
    is_overwritten: bool, fixture: CommitterFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its metadata may be half written by then."""
    read = Slot.read_snapshot

    def read_damaged(slot: Slot, snapshot_id: int) -> Any:
        if is_overwritten:
            slot.record.set("snapshot_id", 0)
        slot.memory[slot.record.get("dynamic_offset")] = 0
        return read(slot, snapshot_id)

    monkeypatch.setattr(Slot, "read_snapshot", read_damaged)
    assert fixture.committer.commit(write_snapshot(fixture.slot(0), 1)) is None
    assert fixture.kinds() == ([] if is_overwritten else ["snapshot-ignored"])


# ---- the server ------------------------------------------------------------------------------------------


@pytest.fixture
def server(fixture: CommitterFixture) -> Iterator[SnapshotServer]:
    """Yield a server for the committer."""
    made = SnapshotServer(fixture.committer)
    made.start()
    yield made
    made.close()


@pytest.fixture
def client(server: SnapshotServer) -> Iterator[SnapshotClient]:
    """Yield a worker's connection to the server."""
    connection = SnapshotClient(server.socket_name)
    yield connection
    connection.close()


def test_worker_maps_committers_memory(fixture: CommitterFixture, client: SnapshotClient) -> None:
    """The committer commits what the worker wrote."""
    control = ControlBlock(client.control_descriptor)
    serial = control.slot_record(0).get("serial")
    answer, descriptor = client.call("slot", index=0, serial=serial)
    slot = Slot(descriptor, answer["capacity"], serial, control.slot_record(0))
    os.close(descriptor)
    snapshot_id = write_snapshot(slot, 3, commit_requested=True)
    client.send("request_commit", snapshot_id=snapshot_id)
    wait_until(lambda: fixture.committed_names() == [checkpoint_name(1, 3)])
    answer, _ = client.call("commit", snapshot_id=snapshot_id)
    assert answer == {"path": str(fixture.node_dir / checkpoint_name(1, 3))}


def test_slot_with_outdated_serial_is_missing(client: SnapshotClient) -> None:
    """Its index may belong to another slot by now."""
    assert client.call("slot", index=0, serial=999) == ({"missing": True}, -1)


@pytest.mark.parametrize(
    "garbage",
    [
        b"",
        b"[]",
        b"{}",
        b'{"operation": "slot"}',
        b'{"operation": "start_generation", "trusted_version": 1, "keep": 2}',
        b'{"operation": "reserve", "bytes": 1e400}',
        b"[" * 50_000,
        b"x" * (MAX_MESSAGE_BYTES + 1),
        b'{"operation": "commit"',
    ],
)
def test_invalid_request_closes_only_its_connection(
    garbage: bytes, server: SnapshotServer, client: SnapshotClient
) -> None:
    """Other connections are served as before."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect("\0" + server.socket_name)
        connection.settimeout(60)
        with contextlib.suppress(BrokenPipeError):
            send_message(connection, garbage)
            connection.shutdown(socket.SHUT_WR)
        with contextlib.suppress(ConnectionResetError):  # it had sent more than was read
            assert connection.recv(100) == b""
    assert client.call("reserve", bytes=100)[0] == {"slots": 3}


def test_worker_waiting_for_commit_delays_no_other_worker(
    fixture: CommitterFixture, server: SnapshotServer, client: SnapshotClient
) -> None:
    """Each connection has its own thread."""
    other = SnapshotClient(server.socket_name)
    with ThreadPoolExecutor(1) as executor:
        snapshot_id = write_snapshot(fixture.slot(0), 1, share_count=2)
        waiting = executor.submit(other.call, "commit", snapshot_id=snapshot_id)
        wait_until(lambda: bool(fixture.committer._requests))
        assert client.call("reserve", bytes=100)[0] == {"slots": 3}
        assert not waiting.done()
        fixture.slot(0).record.set_copied(1, snapshot_id)
        assert waiting.result(60)[0] == {"path": str(fixture.node_dir / checkpoint_name(1, 1))}
    other.close()


def test_reserving_too_much_memory_keeps_existing_slots(
    fixture: CommitterFixture, client: SnapshotClient
) -> None:
    """The answer is that no slot fits."""
    control = fixture.committer.slot_pool.control_block
    before = [state.serial for state in control.read_slots()]
    assert client.call("reserve", bytes=1 << 53)[0] == {"slots": 0}
    assert [state.serial for state in control.read_slots()] == before


def test_request_for_missing_snapshot_does_not_block_others(fixture: CommitterFixture) -> None:
    """Another snapshot is committed meanwhile."""
    missing_id = encode_snapshot_id(9, 9)
    waiting = threading.Thread(target=fixture.committer.commit, args=(missing_id,), daemon=True)
    waiting.start()
    wait_until(lambda: bool(fixture.committer._requests))
    snapshot_id = write_snapshot(fixture.slot(0), 1, commit_requested=True)
    assert fixture.committer.commit(snapshot_id) is not None
    assert waiting.is_alive()


def test_discarded_snapshot_is_not_retried(fixture: CommitterFixture) -> None:
    """Otherwise the thread would look for it thousands of times a second."""
    assert fixture.committer.commit(write_snapshot(fixture.slot(0), 1)) is not None
    fixture.committer._retry_s = 0.05
    fixture.disk.failing_operation = "write"
    with pytest.raises(MachineError):
        fixture.committer.commit(write_snapshot(fixture.slot(1), 2))
    fixture.committer.slot_pool.control_block.slot_record(1).set("snapshot_id", 0)
    wait_until(lambda: fixture.committer._retry_at == 0)
    assert not fixture.committer._has_work()


def test_failing_log_does_not_stop_commits(
    fixture: CommitterFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The log may be on the disk that is full."""

    def refuse(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    fixture.committer._emit = refuse
    monkeypatch.setattr(committers.logger, "warning", refuse)
    fixture.disk.failing_operation = "write"
    snapshot_id = write_snapshot(fixture.slot(0), 1, commit_requested=True)
    with pytest.raises(MachineError):
        fixture.committer.commit(snapshot_id)
    fixture.disk.failing_operation = ""
    snapshot_id = write_snapshot(fixture.slot(0), 2, commit_requested=True)
    wait_until(lambda: fixture.committer.commit(snapshot_id) is not None)


COMMITTER = """
import resource, sys
from pathlib import Path
from elastic_resume.slots.ipc import SnapshotServer
from elastic_resume.slots.committer import CheckpointCommitter
from elastic_resume.checkpoint.node_dir import NodeDir
from elastic_resume.slots.slot_pool import SlotPool
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
with NodeDir.claim(Path(sys.argv[1]), "job", "a") as node_dir:
    pool = SlotPool(1 << 24)
    pool.reserve(1 << 20)
    for index, owned in pool._owned.items():
        owned.slot.memory[:1] = bytes([index + 1])
    committer = CheckpointCommitter(node_dir.path, "job", pool, emit=lambda *_, **__: None)
    server = SnapshotServer(committer)
    server.start()
    print(server.socket_name, flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def limited_server(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Yield a server in its own process, limited to 64 open files, and its socket's name."""
    command = [sys.executable, "-c", COMMITTER, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield process, process.stdout.readline().strip()
        process.kill()


def test_late_answer_is_not_taken_for_another(
    limited_server: tuple[subprocess.Popen[str], str],
) -> None:
    """The server is stopped for longer than the client waits; then it continues."""
    process, name = limited_server
    client = SnapshotClient(name)
    serials = {state.index: state.serial for state in ControlBlock(client.control_descriptor).read_slots()}
    process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
    with pytest.raises(OSError, match="timed out"):
        client.call("slot", timeout_s=0.1, index=0, serial=serials[0])
    process.send_signal(signal.SIGCONT)
    for index in (1, 2, 0):
        _, descriptor = client.call("slot", index=index, serial=serials[index])
        assert os.pread(descriptor, 1, 0) == bytes([index + 1])
        os.close(descriptor)
    client.close()


def test_server_recovers_from_lack_of_descriptors(
    limited_server: tuple[subprocess.Popen[str], str],
) -> None:
    """Otherwise a moment without descriptors would break all later restarts."""
    _, name = limited_server
    crowd = [socket.socket(socket.AF_UNIX) for _ in range(100)]
    for connection in crowd:
        connection.connect("\0" + name)
    with pytest.raises(OSError, match="timed out"), socket.socket(socket.AF_UNIX) as late:
        late.connect("\0" + name)
        late.settimeout(0.5)
        send_message(late, b'{"operation": "reserve", "bytes": 1}')
        late.recv(100)
    for connection in crowd:
        connection.close()
    client = SnapshotClient(name)
    assert client.call("reserve", bytes=1)[0] == {"slots": 3}
    client.close()


def test_checkpoint_quarantined_by_resume_is_written_again(fixture: CommitterFixture) -> None:
    """The node then receives the same step from another node."""
    committer = fixture.committer
    path = committer.commit(write_snapshot(fixture.slot(0), 9))
    assert path is not None
    path.rename(path.with_name("quarantined"))
    committer.commit(write_snapshot(fixture.slot(1), 9))
    assert fixture.committed_names() == [checkpoint_name(1, 9)]
