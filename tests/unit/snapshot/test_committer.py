"""The keeper and its desk: real memory, real sockets, a real disk that fails."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from elastic_resume.checkpoint.atomic_io import Disk
from elastic_resume.checkpoint.node_dir import NodeDir
from elastic_resume.checkpoint.reader import checkpoint_name, deep_check
from elastic_resume.checkpoint.writer import RetentionPolicy
from elastic_resume.errors import MachineError
from elastic_resume.snapshot import committer as keepers
from elastic_resume.snapshot import slots
from elastic_resume.snapshot.committer import CheckpointCommitter
from elastic_resume.snapshot.ipc import MAX_MESSAGE_BYTES, SnapshotClient, SnapshotServer
from elastic_resume.snapshot.slot_pool import SlotPool
from elastic_resume.snapshot.slots import ControlBlock, Slot, encode_snapshot_id
from tests.support.snapshot_samples import SLOT_BYTES, write_snapshot


class Moody(Disk):
    """A disk that refuses while it is told to, at the operation of that name."""

    def __init__(self) -> None:
        self.refuse = ""
        self.before: Callable[[], None] = lambda: None

    def write(self, descriptor: int, data: bytes | memoryview, path: Path) -> None:
        """Write, if not told otherwise."""
        self.before()
        if self.refuse == "write":
            raise MachineError(f"cannot write {path}: No space left on device; free space there.")
        super().write(descriptor, data, path)

    def rename(self, source: Path, target: Path) -> None:
        """Rename, if not told otherwise."""
        if self.refuse == "rename":
            raise MachineError(f"cannot rename to {target}: Input/output error; look at dmesg.")
        super().rename(source, target)


@dataclass
class Setting:
    """A keeper with what it was given."""

    keeper: CheckpointCommitter
    disk: Moody
    node_dir: Path
    said: list[str] = field(default_factory=list)
    told: list[tuple[str, dict[str, Any]]] = field(default_factory=list)

    def slot(self, index: int) -> Slot:
        """That slot, as the keeper has mapped it."""
        return self.keeper.slot_pool._owned[index].slot

    def copies(self) -> list[str]:
        """What lies on disk, every byte verified."""
        found = sorted(path for path in self.node_dir.glob("g*-s*"))
        for path in found:
            deep_check(path, "job")
        return [path.name for path in found]


@pytest.fixture
def setting(tmp_path: Path) -> Iterator[Setting]:
    """A keeper of three slots."""
    with NodeDir.claim(tmp_path, "job", "a") as node_dir:
        disk, said, told = Moody(), [], []  # type: ignore[var-annotated]
        rack = SlotPool(3 * SLOT_BYTES, log=said.append)
        rack.reserve(SLOT_BYTES)
        rack._create_slots(SLOT_BYTES)
        keeper = CheckpointCommitter(
            node_dir.path,
            "job",
            rack,
            log=said.append,
            emit=lambda kind, **fields: told.append((kind, fields)),
            disk=disk,
        )
        keeper.start()
        yield Setting(keeper, disk, node_dir.path, said, told)
        keeper.close()


def until(true: Callable[[], bool]) -> None:
    """Wait for something that a thread does."""
    limit = time.monotonic() + 60
    while not true():
        assert time.monotonic() < limit
        time.sleep(0.005)


def test_what_is_wanted_goes_to_disk_and_nothing_else(setting: Setting) -> None:
    """The bytes in memory become a checkpoint that any reader of safetensors opens."""
    write_snapshot(setting.slot(0), 1)
    mark = write_snapshot(setting.slot(1), 2, commit_requested=True)
    setting.keeper.request_commit(mark)
    until(lambda: setting.slot(1).record.get("committed") == mark)
    assert setting.copies() == [checkpoint_name(1, 2)]
    data = (setting.node_dir / checkpoint_name(1, 2) / "state.safetensors").read_bytes()
    assert data == bytes(setting.slot(1).image())
    assert [kind for kind, _ in setting.told] == ["commit"]


def test_an_agent_that_starts_again_takes_memory_before_it_is_asked_to(setting: Setting) -> None:
    """What its disk holds tells how large slots have to be; the keeper of an empty node waits to hear it."""
    write_snapshot(setting.slot(0), 1)
    assert setting.keeper.commit() is not None
    rack = SlotPool(1 << 30, log=print)
    empty = CheckpointCommitter(
        setting.node_dir.parent / "b", "job", rack, log=print, emit=lambda *_, **__: None
    )
    empty.start()
    assert rack.control_block.read_slots() == []
    empty.close()
    rack = SlotPool(1 << 30, log=print)
    later = CheckpointCommitter(setting.node_dir, "job", rack, log=print, emit=lambda *_, **__: None)
    later.start()
    until(lambda: len(rack.control_block.read_slots()) == 3)
    serials = [state.serial for state in rack.control_block.read_slots()]
    assert rack.reserve(SLOT_BYTES) == 3
    assert [state.serial for state in rack.control_block.read_slots()] == serials, "they are large enough"
    later.close()


def test_one_that_is_still_being_copied_is_waited_for(setting: Setting) -> None:
    """Other local ranks may be a moment later."""
    mark = write_snapshot(setting.slot(0), 1, commit_requested=True, parts=2)
    setting.keeper.request_commit(mark)
    time.sleep(0.05)
    assert setting.copies() == []
    setting.slot(0).record.set_copied(1, mark)
    until(lambda: setting.copies() == [checkpoint_name(1, 1)])


def test_one_that_is_overwritten_meanwhile_is_not_committed(setting: Setting) -> None:
    """The keeper looks again when it has written, and before the rename."""
    slot = setting.slot(0)
    mark = write_snapshot(slot, 1, commit_requested=True)
    setting.disk.before = lambda: slot.record.set("target", 0)
    setting.keeper.request_commit(mark)
    until(lambda: slot.record.get("target") == 0 and slot.record.get("pinned") == 0)
    assert setting.copies() == []
    assert list(setting.node_dir.glob(".tmp-*")) == []


@pytest.mark.parametrize("operation", ["write", "rename"])
def test_a_disk_that_refuses_costs_a_copy_and_is_tried_again(
    operation: str, setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is said once, the slot is free, older copies are whole, and the newest snapshot goes when it can."""
    monkeypatch.setattr(keepers, "FIRST_RETRY_S", 0.05)
    setting.keeper._retry_s = 0.05
    first = write_snapshot(setting.slot(0), 1, commit_requested=True)
    setting.keeper.request_commit(first)
    until(lambda: setting.copies() == [checkpoint_name(1, 1)])
    setting.disk.refuse = operation
    second = write_snapshot(setting.slot(1), 2, commit_requested=True)
    setting.keeper.request_commit(second)
    until(lambda: setting.slot(1).record.get("committed") == second)
    until(lambda: sum(kind == "commit-failed" for kind, _ in setting.told) >= 2)
    assert setting.copies() == [checkpoint_name(1, 1)]
    assert setting.keeper.last_error
    assert len(setting.said) == 2  # the line of the budget, and this
    assert "step 2 was not saved" in setting.said[1]
    write_snapshot(setting.slot(2), 3)
    setting.disk.refuse = ""
    until(lambda: setting.copies() == [checkpoint_name(1, 1), checkpoint_name(1, 3)])
    until(lambda: not setting.keeper.last_error)
    assert "saved again" in setting.said[-1]


def test_a_fault_of_ours_does_not_end_the_keeper(setting: Setting) -> None:
    """Who waits hears of it, it is told, and the next snapshot is committed."""

    def stumble() -> None:
        setting.disk.before = lambda: None
        raise KeyError("a fault of ours")

    setting.disk.before = stumble
    with pytest.raises(MachineError, match="a fault of ours"):
        setting.keeper.commit(write_snapshot(setting.slot(0), 1))
    assert [kind for kind, _ in setting.told] == ["committer-failed"]
    assert setting.keeper.commit(write_snapshot(setting.slot(1), 2)) == setting.node_dir / checkpoint_name(
        1, 2
    )
    assert setting.copies() == [checkpoint_name(1, 2)]


def test_who_waits_for_a_commit_hears_of_its_failure(setting: Setting) -> None:
    """And of where it lies when it has gone well."""
    setting.disk.refuse = "write"
    mark = write_snapshot(setting.slot(0), 1)
    with pytest.raises(MachineError, match="No space left"):
        setting.keeper.commit(mark)
    setting.disk.refuse = ""
    assert setting.keeper.commit(mark) == setting.node_dir / checkpoint_name(1, 1)
    assert setting.keeper.commit() == setting.node_dir / checkpoint_name(1, 1)


def test_nothing_there_is_no_commit(setting: Setting) -> None:
    """As at the end of a job that has taken no step."""
    assert setting.keeper.commit() is None
    setting.keeper.commit_newest()


def test_words_that_cannot_be_true_are_not_committed(setting: Setting) -> None:
    """A script that scribbles over its memory must not make a checkpoint of it."""
    slot = setting.slot(0)
    mark = write_snapshot(slot, 1, commit_requested=True)
    slot.memory[slot.record.get("dynamic_offset")] = 0
    setting.keeper.request_commit(mark)
    until(lambda: [kind for kind, _ in setting.told] == ["snapshot-ignored"])
    assert setting.copies() == []
    assert slot.record.get("committed") == mark  # the slot is free again


def test_older_copies_go_and_two_stay(setting: Setting) -> None:
    """As the workers agreed."""
    setting.keeper.start_generation(RetentionPolicy(keep=2))
    for step in range(1, 6):
        setting.keeper.commit(write_snapshot(setting.slot(step % 3), step))
    until(lambda: len(list(setting.node_dir.glob("g*-s*"))) == 2)  # after who waited was answered
    assert setting.copies() == [checkpoint_name(1, 4), checkpoint_name(1, 5)]


def test_an_older_snapshot_never_takes_the_place_of_a_newer_one(setting: Setting) -> None:
    """Both of an epoch's last step have one name; the first may be wanted when the second is on disk."""
    older, newer = write_snapshot(setting.slot(0), 4), write_snapshot(setting.slot(1), 4)
    setting.slot(1).record.set("target", newer + 1)  # the epoch is over
    setting.slot(1).record.set_copied(0, newer + 1)
    assert setting.keeper.commit(newer + 1) is not None
    setting.slot(0).record.set("commit_requested", older)
    setting.keeper.request_commit(older)
    until(lambda: setting.slot(0).record.get("committed") == older)
    assert [kind for kind, _ in setting.told] == ["commit"]


def test_a_copy_that_came_from_disk_is_not_written_again(setting: Setting) -> None:
    """A slot that a resume has filled from this node's own disk is there already."""
    setting.keeper.commit(write_snapshot(setting.slot(0), 4))
    setting.told.clear()
    setting.keeper._last_commit = {}
    setting.keeper.start_generation(RetentionPolicy(trusted_version=(1, 4)))
    assert setting.keeper.commit() == setting.node_dir / checkpoint_name(1, 4)
    assert setting.told == []


# ---- the desk ------------------------------------------------------------------------------------------


@pytest.fixture
def desk(setting: Setting) -> Iterator[SnapshotServer]:
    """The keeper, reachable."""
    made = SnapshotServer(setting.keeper)
    made.start()
    yield made
    made.close()


def test_a_worker_gets_the_very_memory(setting: Setting, desk: SnapshotServer) -> None:
    """What it writes, the keeper commits."""
    line = SnapshotClient(desk.socket_name)
    control = ControlBlock(line.control_descriptor)
    serial = control.slot_record(0).get("serial")
    answer, descriptor = line.call("slot", expect_descriptor=True, index=0, serial=serial)
    mine = Slot(descriptor, answer["capacity"], serial, control.slot_record(0))
    os.close(descriptor)
    mark = write_snapshot(mine, 3, commit_requested=True)
    line.send("request_commit", snapshot_id=mark)
    until(lambda: setting.copies() == [checkpoint_name(1, 3)])
    answer, _ = line.call("commit", snapshot_id=mark)
    assert answer == {"path": str(setting.node_dir / checkpoint_name(1, 3))}
    line.close()


def test_a_slot_that_is_gone_is_not_handed_over(desk: SnapshotServer) -> None:
    """Its number may be another slot's by now."""
    line = SnapshotClient(desk.socket_name)
    assert line.call("slot", expect_descriptor=True, index=0, serial=999) == ({"missing": True}, -1)
    line.close()


@pytest.mark.parametrize(
    "garbage",
    [
        b"\n",
        b"[]\n",
        b"{}\n",
        b'{"operation": "slot"}\n',
        b'{"operation": "slot", "index": -1, "serial": 1}\n',
        b'{"operation": "reserve", "bytes": 1e400}\n',
        b'{"operation": "reserve", "bytes": true}\n',
        b'{"operation": "reserve", "bytes": 99999999999999999999999}\n',
        b'{"operation": "start_generation", "floor": 0, "keep": 0}\n',
        b'{"operation": "start_generation", "floor": 0, "keep": 2, "trusted": [1]}\n',
        b'{"operation": "start_generation", "floor": 0, "keep": 2, "trusted": {"a": 1}}\n',
        b"[" * 50_000 + b"\n",
        b"x" * (MAX_MESSAGE_BYTES + 1) + b"\n",
        b'{"operation": "commit"',
    ],
)
def test_garbage_costs_only_who_sends_it(garbage: bytes, desk: SnapshotServer) -> None:
    """The line is closed; others are served as before."""
    with socket.socket(socket.AF_UNIX) as rude:
        rude.connect("\0" + desk.socket_name)
        rude.settimeout(60)
        rude.sendall(garbage)
        rude.shutdown(socket.SHUT_WR)
        with contextlib.suppress(ConnectionResetError):  # it had sent more than was read
            assert rude.recv(100) == b""
    line = SnapshotClient(desk.socket_name)
    assert json.dumps(line.call("reserve", bytes=100)[0]) == '{"slots": 3}'
    line.close()


def test_workers_ask_at_once(desk: SnapshotServer) -> None:
    """A slow commit of one holds up nobody."""
    answers: list[int] = []

    def work() -> None:
        line = SnapshotClient(desk.socket_name)
        answers.extend(int(line.call("reserve", bytes=100)[0]["slots"]) for _ in range(20))
        line.close()

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert answers == [3] * 160


def test_more_memory_than_there_is_costs_nobody_what_there_is(desk: SnapshotServer) -> None:
    """Who asks for it hears that there is none."""
    line = SnapshotClient(desk.socket_name)
    before = [state.serial for state in ControlBlock(line.control_descriptor).read_slots()]
    assert line.call("reserve", bytes=1 << 53)[0] == {"slots": 0}
    assert [state.serial for state in ControlBlock(line.control_descriptor).read_slots()] == before
    line.close()


def test_a_wish_that_cannot_be_granted_holds_up_no_other(setting: Setting) -> None:
    """Somebody waits for a snapshot that does not come; what is there goes to disk meanwhile."""
    vain = threading.Thread(target=lambda: setting.keeper.commit(encode_snapshot_id(9, 9)), daemon=True)
    vain.start()
    until(lambda: bool(setting.keeper._requests))
    mark = write_snapshot(setting.slot(0), 1, commit_requested=True)
    assert setting.keeper.commit(mark) is not None
    assert vain.is_alive()


def test_what_could_not_be_saved_and_is_discarded_is_tried_no_more(setting: Setting) -> None:
    """Else the thread would look for it thousands of times a second."""
    assert setting.keeper.commit(write_snapshot(setting.slot(0), 1)) is not None
    setting.keeper._retry_s = 0.05
    setting.disk.refuse = "write"
    with pytest.raises(MachineError):
        setting.keeper.commit(write_snapshot(setting.slot(1), 2))
    setting.keeper.slot_pool.discard(1)
    until(lambda: setting.keeper._retry_at == 0)
    assert not setting.keeper._has_work()


def test_a_log_that_cannot_be_written_ends_no_checkpoints(setting: Setting) -> None:
    """The disk that is full may be the one that the log lies on."""

    def refuse(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    setting.keeper._log = setting.keeper._emit = refuse
    setting.disk.refuse = "write"
    mark = write_snapshot(setting.slot(0), 1, commit_requested=True)
    with pytest.raises(MachineError):
        setting.keeper.commit(mark)
    setting.disk.refuse = ""
    mark = write_snapshot(setting.slot(0), 2, commit_requested=True)
    until(lambda: setting.keeper.commit(mark) is not None)


COMMITTER = """
import resource, sys
from pathlib import Path
from elastic_resume.snapshot.ipc import SnapshotServer
from elastic_resume.snapshot.committer import CheckpointCommitter
from elastic_resume.checkpoint.node_dir import NodeDir
from elastic_resume.snapshot.slot_pool import SlotPool
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
with NodeDir.claim(Path(sys.argv[1]), "job", "a") as node_dir:
    pool = SlotPool(1 << 24, log=lambda _: None)
    pool.reserve(1 << 20)
    for index, owned in pool._owned.items():
        owned.slot.memory[:1] = bytes([index + 1])
    committer = CheckpointCommitter(node_dir.path, "job", pool, log=print, emit=lambda *_, **__: None)
    server = SnapshotServer(committer)
    server.start()
    print(server.socket_name, flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def other(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A keeper in a process of its own, and the name of its desk. It may open 64 files."""
    command = [sys.executable, "-c", COMMITTER, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield process, process.stdout.readline().strip()
        process.kill()


def test_an_answer_that_comes_too_late_is_not_taken_for_another(
    other: tuple[subprocess.Popen[str], str],
) -> None:
    """The keeper is stopped for longer than anybody waits; then it goes on."""
    process, name = other
    line = SnapshotClient(name)
    serials = {state.index: state.serial for state in ControlBlock(line.control_descriptor).read_slots()}
    process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
    with pytest.raises(OSError, match="timed out"):
        line.call("slot", expect_descriptor=True, timeout_s=0.1, index=0, serial=serials[0])
    process.send_signal(signal.SIGCONT)
    for index in (1, 2, 0):
        _, descriptor = line.call("slot", expect_descriptor=True, index=index, serial=serials[index])
        assert os.pread(descriptor, 1, 0) == bytes([index + 1])
        os.close(descriptor)
    line.close()


def test_a_keeper_that_was_out_of_descriptors_answers_again(
    other: tuple[subprocess.Popen[str], str],
) -> None:
    """A moment without any must not cost the node all restarts that follow."""
    _, name = other
    crowd = [socket.socket(socket.AF_UNIX) for _ in range(100)]
    for one in crowd:
        one.connect("\0" + name)
    with pytest.raises(OSError, match="timed out"), socket.socket(socket.AF_UNIX) as late:
        late.connect("\0" + name)
        late.settimeout(0.5)
        late.sendall(b'{"operation": "reserve", "bytes": 1}\n')
        late.recv(100)
    for one in crowd:
        one.close()
    line = SnapshotClient(name)
    assert line.call("reserve", bytes=1)[0] == {"slots": 3}
    line.close()


def test_a_node_that_was_found_wrong_saves_again_when_it_has_resumed(setting: Setting) -> None:
    """Also the majority's copy of that very step, which took the place of its own."""
    keeper = setting.keeper
    mark = write_snapshot(setting.slot(0), 9, commit_requested=True)
    assert keeper.commit(mark) is not None
    keeper.distrust_after(1, 4)
    assert setting.copies() == []
    write_snapshot(setting.slot(1), 9, commit_requested=True)
    keeper.request_commit(mark)
    time.sleep(0.02)
    assert setting.copies() == []  # nobody has said yet that it is another's
    keeper.start_generation(RetentionPolicy())
    until(lambda: not any(state.needs_commit for state in keeper.slot_pool.control_block.read_slots()))
    assert setting.copies() == [checkpoint_name(1, 9)]


def test_what_workers_still_made_of_a_wrong_state_does_not_count_when_they_are_gone(setting: Setting) -> None:
    """They live a moment longer than it takes to hear that this node is wrong."""
    keeper = setting.keeper
    keeper.distrust_after(1, 4)
    write_snapshot(setting.slot(0), 10)
    write_snapshot(setting.slot(1), 4)
    keeper.commit_newest()
    newest = slots.newest_complete(keeper.slot_pool.control_block.read_slots())
    assert newest is not None
    assert slots.decode_snapshot_id(newest.target) == (1, 4)


def test_a_copy_that_a_resume_has_set_aside_is_written_again(setting: Setting) -> None:
    """What the node then gets from another is of the same step, and is on no disk of its own."""
    keeper = setting.keeper
    path = keeper.commit(write_snapshot(setting.slot(0), 9))
    assert path is not None
    path.rename(path.with_name("quarantined"))
    keeper.commit(write_snapshot(setting.slot(1), 9))
    assert setting.copies() == [checkpoint_name(1, 9)]
