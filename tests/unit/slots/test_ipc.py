"""Test both ends of the connection to the snapshot server, also with processes of another user."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from elastic_resume.checkpoint.manifest import Position
from elastic_resume.checkpoint.node_dir import NodeDir
from elastic_resume.checkpoint.writer import RetentionPolicy
from elastic_resume.errors import ElasticResumeError
from elastic_resume.local_socket import receive_message, send_message
from elastic_resume.slots import ipc, slot_memory
from elastic_resume.slots.committer import CheckpointCommitter
from elastic_resume.slots.ipc import MAX_MESSAGE_BYTES, SlotClient, SnapshotClient, SnapshotServer
from elastic_resume.slots.slot_memory import decode_snapshot_id, encode_snapshot_id
from elastic_resume.slots.slot_pool import SlotPool
from tests.support.processes import wait_for
from tests.support.snapshot_samples import SLOT_BYTES, read_newest, write_snapshot

OTHER_USER = 65534
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can start a process of another user")
BEGIN = "import os, socket, sys; os.setuid(int(sys.argv[2])); peer = socket.socket(socket.AF_UNIX)\n"
CLIENT = f"""{BEGIN}
peer.connect("\\0" + sys.argv[1])
try:
    peer.sendall((22).to_bytes(4, "big") + b'{{"operation": "hello"}}')
    _, descriptors, _, _ = socket.recv_fds(peer, 4, 1)
    print(peer.recv(100), len(descriptors))
except (ConnectionResetError, BrokenPipeError):
    print(b"", 0)
"""
LISTENER = f"""{BEGIN}
peer.bind("\\0" + sys.argv[1])
peer.listen()
print(flush=True)
connection, _ = peer.accept()
if connection.recv(100):
    socket.send_fds(connection, [b"\\0\\0\\0\\2{{}}"], [0])
    sys.stdin.read()
"""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[SnapshotServer]:
    """Yield a running snapshot server."""
    with NodeDir.claim(tmp_path, "job", "a") as node_dir:
        pool = SlotPool(3 * SLOT_BYTES)
        committer = CheckpointCommitter(node_dir.path, "job", pool, emit=lambda *_, **__: None)
        committer.start()
        server = SnapshotServer(committer)
        server.start()
        yield server
        server.close()
        committer.close()


@needs_root
@pytest.mark.parametrize(("user", "answer"), [(0, "b'{}' 1\n"), (OTHER_USER, "b'' 0\n")])
def test_server_answers_its_own_user_only(user: int, answer: str, server: SnapshotServer) -> None:
    """Another user would get the descriptor of the control block, and then those of all slots."""
    command = [sys.executable, "-I", "-c", CLIENT, server.socket_name, str(user)]
    assert subprocess.run(command, capture_output=True, check=True, text=True).stdout == answer


@needs_root
@pytest.mark.parametrize("user", [0, OTHER_USER])
def test_client_accepts_server_of_its_own_user_only(user: int) -> None:
    """Any user may bind the name of a socket after its server has ended."""
    name = f"elastic_resume-test-{secrets.token_hex(8)}"
    command = [sys.executable, "-I", "-c", LISTENER, name, str(user)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as listener:
        assert listener.stdout is not None
        listener.stdout.readline()
        if user == 0:
            SnapshotClient(name).close()
        else:
            with pytest.raises(ElasticResumeError, match="belongs to another user"):
                SnapshotClient(name)


@pytest.mark.parametrize("trusted", [None, (3, 120)])
def test_server_carries_out_requests_without_answer(
    trusted: tuple[int, int] | None, server: SnapshotServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An answered request behind them shows that they were handled."""
    compared: list[tuple[int, int]] = []
    monkeypatch.setattr(server._committer, "offer_snapshot", lambda *request: compared.append(request))
    client = SnapshotClient(server.socket_name)
    client.send("start_generation", trusted_version=trusted, keep=7)
    client.send("offer", snapshot_id=5, generation=2)
    client.call("reserve", bytes=1)
    assert server._committer._writer._retention == RetentionPolicy(trusted, 7)
    assert server._committer._writer._trusted_versions == ({trusted} if trusted else set())
    assert compared == [(5, 2)]
    client.close()


def test_closed_server_accepts_no_connection(server: SnapshotServer) -> None:
    """A worker that starts too late learns it at once."""
    server.close()
    with pytest.raises(ElasticResumeError, match="does not answer"):
        SnapshotClient(server.socket_name)


@contextlib.contextmanager
def serving(answer: Callable[[socket.socket], object]) -> Iterator[str]:
    """Serve one connection in a thread; yield the socket's name."""
    name = f"elastic_resume-test-{secrets.token_hex(8)}"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("\0" + name)
        listener.listen()
        listener.settimeout(60)

        def serve() -> None:
            with listener.accept()[0] as connection:
                answer(connection)

        thread = threading.Thread(target=serve)
        thread.start()
        yield name
        thread.join()


def test_client_without_descriptor_closes_its_connection() -> None:
    """The server sees the end, though the error keeps the client's frame alive."""
    received: list[bytes] = []

    def answer_without_descriptor(connection: socket.socket) -> None:
        connection.settimeout(60)
        received.append(receive_message(connection, 100)[0])
        send_message(connection, b"{}")
        received.append(connection.recv(100))

    with (
        serving(answer_without_descriptor) as name,
        pytest.raises(ElasticResumeError, match="it sent no descriptor") as error,
    ):
        SnapshotClient(name)
    assert received == [b'{"operation": "hello"}', b""]
    del error


def answer_hello(connection: socket.socket) -> None:
    """Answer the first request, with a descriptor; receive the second."""
    receive_message(connection, MAX_MESSAGE_BYTES)
    send_message(connection, b"{}", [0])
    receive_message(connection, MAX_MESSAGE_BYTES)


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (b"", "closed the connection"),
        (b"\xff" * 4, "no whole message"),
        (None, "timed out"),
    ],
)
def test_call_ends_when_answer_is_missing_late_or_too_long(answer: bytes | None, error: str) -> None:
    """The connection is not used again: a late answer would be taken for the next one."""
    has_ended = threading.Event()

    def answer_badly(connection: socket.socket) -> None:
        answer_hello(connection)
        if answer is not None:
            connection.sendall(answer)
        if answer != b"":
            has_ended.wait(60)

    with serving(answer_badly) as name:
        client = SnapshotClient(name)
        with pytest.raises(OSError, match=error):
            client.call("reserve", timeout_s=0.5)
        has_ended.set()
        assert client._socket is None
        client.close()


def test_close_wakes_thread_that_waits_for_an_answer() -> None:
    """Else a process would wait for a committer that hangs."""
    is_waiting, has_ended = threading.Event(), threading.Event()

    def answer_never(connection: socket.socket) -> None:
        answer_hello(connection)
        is_waiting.set()
        has_ended.wait(60)

    def call(client: SnapshotClient) -> None:
        with pytest.raises(OSError):  # noqa: PT011 - closed or shut down, by the moment
            client.call("reserve", timeout_s=None)

    with serving(answer_never) as name:
        client = SnapshotClient(name)
        descriptor = client.control_descriptor
        thread = threading.Thread(target=call, args=(client,), daemon=True)
        thread.start()
        is_waiting.wait(60)
        time.sleep(0.1)  # until it receives: the test passes without, but would miss a defect
        client.close()
        thread.join(10)
        has_ended.set()
        assert not thread.is_alive()
        assert not Path(f"/proc/self/fd/{descriptor}").exists()


def test_slot_client_maps_slots_that_exist_and_finds_snapshots(server: SnapshotServer) -> None:
    """Small slots need no thread. A mapping keeps one descriptor, and not that which was received."""
    client = SlotClient(server.socket_name, 0, is_local_leader=True)
    assert client.reserve(SLOT_BYTES) == 3
    descriptors = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    states = client.list_writable(SLOT_BYTES)
    assert (len(states), client._prepare_thread) == (3, None)
    assert len(os.listdir("/proc/self/fd")) == descriptors + 3  # noqa: PTH208
    assert client.list_writable(max(state.capacity for state in states) + 1) == []
    assert client.map_slot(0, states[0].serial + 1) is None
    slot = client.map_slot(1)
    assert slot is not None
    assert slot is client.map_slot(1, states[1].serial)
    assert read_newest(client) is None
    snapshot_id = write_snapshot(slot, 3)
    assert client.find_slot(snapshot_id) is slot
    assert client.find_slot(snapshot_id + 1) is None
    newest = read_newest(client)
    assert newest is not None
    assert (newest.snapshot_id, newest.manifest.version) == (snapshot_id, (1, 3))
    client.close()


def test_slot_client_prepares_again_only_what_is_missing(
    server: SnapshotServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread prepares large slots; more may fit after a moment, when smaller ones are gone."""
    monkeypatch.setattr(slot_memory, "SMALL_SLOT_BYTES", 0)
    prepared: list[int] = []
    client = SlotClient(server.socket_name, 0, is_local_leader=True)
    client.reserve(SLOT_BYTES)
    assert client.list_writable(SLOT_BYTES) == []
    assert client._prepare_thread is not None
    client._prepare_thread.join()
    monkeypatch.setattr(client, "prepare_slots", lambda nbytes, **_: prepared.append(nbytes))
    assert len(client.list_writable(SLOT_BYTES)) == 3
    client.slot_count = 4
    assert len(client.list_writable(SLOT_BYTES)) == 3
    assert prepared == []
    monkeypatch.setattr(ipc, "RESERVE_RETRY_S", -1.0)
    assert len(client.list_writable(SLOT_BYTES)) == 3
    assert len(prepared) == 1
    client.close()


def test_only_local_leader_reserves_and_estimate_is_not_recorded(server: SnapshotServer) -> None:
    """Another local rank maps what exists. It prepares again when its thread has ended."""
    leader, other = (SlotClient(server.socket_name, r, is_local_leader=r == 0) for r in (0, 1))
    other.prepare_slots(SLOT_BYTES)
    assert other._prepare_thread is not None
    other._prepare_thread.join()
    assert other.control_block.read_slots() == []
    assert leader.reserve(2 * SLOT_BYTES, is_estimate=True) == 1
    assert (leader.slot_count, leader.reserved_bytes) == (3, 0)
    assert leader.reserve(2 * SLOT_BYTES) == 1
    assert (leader.slot_count, leader.reserved_bytes) == (1, 2 * SLOT_BYTES)
    for nbytes, populated in ((3 * SLOT_BYTES, set()), (SLOT_BYTES, {(0, 1)})):
        other.prepare_slots(nbytes)
        other._prepare_thread.join()
        assert other._populated == populated
    assert leader.reserve(3 * SLOT_BYTES) == 1
    assert other.map_slot(0) is not None
    assert (set(other._slots), other._populated) == ({(0, 2)}, set()), "it unmaps what was dropped"
    for client in (leader, other):
        client.close()


def test_large_slot_that_is_not_populated_is_not_writable(
    server: SnapshotServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread prepares it again; a slot that exists no more is skipped."""
    client = SlotClient(server.socket_name, 0, is_local_leader=True)
    client.reserve(SLOT_BYTES)
    (first, *_) = client.control_block.read_slots()
    client._map_and_populate(replace(first, serial=9))
    assert client._populated == set()
    client._map_and_populate(first)
    slot = client.map_slot(first.index)
    assert slot is not None
    monkeypatch.setattr(slot, "capacity", 1 << 60)  # a second time, it would populate this
    client._map_and_populate(first)
    prepared: list[int] = []
    monkeypatch.setattr(client, "prepare_slots", lambda nbytes, **_: prepared.append(nbytes))
    monkeypatch.setattr(slot_memory, "SMALL_SLOT_BYTES", 0)
    assert [state.index for state in client.list_writable(1)] == [first.index]
    assert prepared == [first.capacity]
    client.close()


def test_restored_image_is_committed_unless_it_was_loaded_from_this_disk(server: SnapshotServer) -> None:
    """No slot is taken that is too small, in use, or holds what is digested under the same id."""
    client, pool = SlotClient(server.socket_name, 0, is_local_leader=True), server._committer.slot_pool
    client.reserve(SLOT_BYTES)
    slots = [client.map_slot(index) for index in range(3)]
    assert slots[0] is not None
    write_snapshot(slots[0], 1)
    newest = read_newest(client)
    assert newest is not None
    assert client.acquire_slot(replace(newest.manifest, file_bytes=1 << 40)) is None
    for step, on_disk in ((2, True), (3, False)):
        manifest = replace(newest.manifest, position=Position(0, step, step, step))
        slot = client.acquire_slot(manifest)
        assert slot is not None
        assert slot is not newest.slot, "the newest stays until this one is complete"
        slot.memory[: len(newest.image)] = newest.image
        client.finish_fill(slot, manifest, on_disk=on_disk)
        assert slot.record.get("commit_requested") == (0 if on_disk else encode_snapshot_id(1, step))
        state = slot.record.read_state()
        assert not on_disk or state.committed == state.snapshot_id
        newest = read_newest(client)
        assert newest is not None
    record = newest.slot.record
    wait_for(lambda: record.get("committed") == encode_snapshot_id(1, 3), "the commit")
    by_step = {decode_snapshot_id(s.snapshot_id)[1]: s for s in client.control_block.read_slots()}
    with pool.pin(by_step[1]):
        with pool.pin(by_step[2], hard=False):
            again = replace(manifest, position=Position(0, 2, 2, 2))
            assert client.acquire_slot(again) is None
        with pool.pin(by_step[3]):
            client.discard(by_step[2].index)
            assert client.acquire_slot(manifest) is not None
    client.close()


def test_restore_takes_no_slot_that_is_too_small_or_cannot_be_mapped(server: SnapshotServer) -> None:
    """An older snapshot stays in a small slot while the only large one holds the newest."""
    client = SlotClient(server.socket_name, 0, is_local_leader=True)
    client.reserve(SLOT_BYTES)
    small = client.map_slot(0)
    assert small is not None
    write_snapshot(small, 1)
    newest = read_newest(client)
    assert newest is not None
    manifest = replace(newest.manifest, file_bytes=SLOT_BYTES, position=Position(0, 2, 2, 2))
    large = client.acquire_slot(manifest)
    assert large is not None
    assert large.capacity > SLOT_BYTES
    write_snapshot(large, 2)
    assert client.acquire_slot(replace(manifest, position=Position(0, 3, 3, 3))) is None
    client.close()
    late = SlotClient(server.socket_name, 0, is_local_leader=True)
    server.close()
    late._client.close()
    assert read_newest(late) is None
