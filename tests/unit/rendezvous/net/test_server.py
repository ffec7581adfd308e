"""The rendezvous server over real sockets and a real disk: views form, nodes die and disks fail."""

from __future__ import annotations

import asyncio
import errno
import gc
import secrets
import socket
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from elastic_resume.checkpoint.atomic_io import Disk, translate_os_errors
from elastic_resume.rendezvous.core.follower import Follower
from elastic_resume.rendezvous.core.interface import Effect, StartWorkers
from elastic_resume.rendezvous.core.node import RendezvousNode
from elastic_resume.rendezvous.net import connection, protocol, server, view_delta
from elastic_resume.rendezvous.net.connection import ConnectionLimits
from elastic_resume.rendezvous.net.durable_state import RENDEZVOUS_STATE_FILE, DurableStateFile
from tests.support.processes import wait_for
from tests.support.rendezvous_nodes import (
    RUN,
    TOKEN,
    RendezvousNodes,
    SocketNode,
    count_open_descriptors,
)

pytestmark = pytest.mark.slow


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[RendezvousNodes]:
    """Give what builds nodes; stop them at the end."""
    built = RendezvousNodes(tmp_path, ConnectionLimits())
    yield built
    built.stop()


def member_names(world: StartWorkers) -> list[str]:
    """Return the nodes of a view by rank."""
    return [str(member) for member in world.members]


class FailingDisk(Disk):
    """A disk that is full while ``full`` is set."""

    full = True
    failures = 0

    def write_atomic(self, path: Path, data: bytes) -> None:
        """Write, or fail with ENOSPC."""
        if not self.full:
            super().write_atomic(path, data)
            return
        self.failures += 1
        with translate_os_errors("write", path):
            raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("is_large", [False, True], ids=["whole views", "differences"])
def test_view_forms_again_after_the_loss_of_its_leader_and_of_a_member(
    nodes: RendezvousNodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_large: bool
) -> None:
    """Of four nodes the leader stops, then another; ranks keep their order and generations grow.

    With ``is_large`` views travel as if they had a thousand members: as differences to what the peer has.
    """
    restored: list[str] = []
    if is_large:
        original = view_delta.restore

        def restore(value: dict[str, Any], base: view_delta.Base) -> Any:
            result = original(value, base)
            restored.extend([result] if isinstance(result, str) else [])
            return result

        monkeypatch.setattr(view_delta, "restore", restore)
        monkeypatch.setattr(view_delta, "MIN_CHARS", 0)
    built = nodes.build(4)
    first = [one.worlds.get(timeout=30) for one in built]
    assert {tuple(member_names(world)) for world in first} == {("n0", "n1", "n2", "n3")}
    assert [world.rank for world in first] == [0, 1, 2, 3]
    built[0].thread.stop()
    second = [one.worlds.get(timeout=30) for one in built[1:]]
    assert {tuple(member_names(world)) for world in second} == {("n1", "n2", "n3")}
    built[2].thread.stop()
    third = [built[index].worlds.get(timeout=30) for index in (1, 3)]
    assert {tuple(member_names(world)) for world in third} == {("n1", "n3")}
    generations = [worlds[0].generation for worlds in (first, second, third)]
    assert generations == sorted(set(generations))
    of_views = {int(text.partition(";")[0]) for text in restored}
    assert of_views >= ({*generations[:2]} if is_large else set()), (
        "followers tell a new leader by the digest"
    )
    assert (generations[2] in of_views) == is_large, "the proposal to a follower is a difference"
    for name in ("n1", "n3"):
        kept = DurableStateFile(tmp_path / name).state
        assert kept is not None
        known = [kept.view, *([kept.accepted.view] if kept.accepted else [])]
        assert generations[-1] in {view.generation for view in known}, (
            "a voter has the view on disk before its workers start"
        )


def test_lease_is_a_time_of_clock_boottime(nodes: RendezvousNodes) -> None:
    """The clock runs through a suspend of the machine."""
    (one, *_) = nodes.build(2)
    one.worlds.get(timeout=30)
    wait_for(lambda: one.lease_expires_at > float("-inf"), "the lease is set")
    left_s = one.lease_expires_at - time.clock_gettime(time.CLOCK_BOOTTIME)
    assert abs(left_s) < 600, "the machine may be slow, but the clocks differ by a day"


class Broken(SocketNode):
    """A node whose event loop fails when `is_broken` is set."""

    is_broken = False

    def watch(self, agent: RendezvousNode) -> None:
        """Fail, as a defect of this program would."""
        super().watch(agent)
        if self.is_broken:
            raise KeyError(str(agent))

    def close_listener(self) -> None:
        """Do what the end of the process would do."""
        assert self.thread._server is not None
        self.thread._server._listener.close()


class Following(SocketNode):
    """A node that exposes its connection to the leader."""

    conn = 0

    def watch(self, agent: RendezvousNode) -> None:
        """Keep the number of the open connection; 0 while there is none."""
        super().watch(agent)
        role = agent.role
        self.conn = role.link.conn_id if isinstance(role, Follower) and not role.is_disconnected else 0


def test_reconnect_does_not_need_the_name_server(nodes: RendezvousNodes) -> None:
    """The follower connects to the IP address at which the leader answered before."""
    silent, released = threading.Event(), threading.Event()

    def resolve(name: str) -> list[str]:
        assert name == "head.test"
        if silent.is_set():
            released.wait()
        return ["127.0.0.1"]

    built = nodes.build(2, node_class=Following, host="head.test", resolve=resolve)
    follower = next(one for one in built if one.worlds.get(timeout=30).rank == 1)
    assert isinstance(follower, Following)
    before = follower.conn
    silent.set()
    try:
        for one in list(follower.thread._server._connections.values()):  # type: ignore[union-attr]
            follower.thread._loop.call_soon_threadsafe(one._transport.abort)
        wait_for(lambda: follower.conn not in (0, before), "the follower reconnects")
        assert not [end for one in built for end in one.stop_effects], "no view ended"
    finally:
        released.set()


class Caller:
    """Handles one connection, and waits for its end."""

    def __init__(self) -> None:
        self.over = asyncio.Event()

    def on_connected(self, one: connection.Connection) -> None:
        """Ignore it."""

    def on_ended(self, one: connection.Connection, reason: str) -> None:
        """Note the end."""
        del one, reason
        self.over.set()

    def on_socket_closed(self, one: connection.Connection) -> None:
        """Ignore it."""


async def call(address: str) -> connection.Connection:
    """Connect to a peer that does not finish the handshake, and wait for the end."""
    caller = Caller()
    handshake = protocol.dial(TOKEN, RUN, secrets.token_hex(32))
    built = connection.Connection(cast("connection.ConnectionHandler", caller), handshake, 30.0, 1)
    try:
        await connection.connect(built, address)
    except OSError as error:
        built.on_dial_failed(error)
    await asyncio.wait_for(caller.over.wait(), 30)
    return built


@pytest.mark.parametrize("answers", [False, True], ids=["nobody listens", "the call is reset"])
def test_only_a_refused_connection_is_reported_as_refused(*, answers: bool) -> None:
    """A reset after the connection was accepted may come from a middlebox and proves nothing."""

    def reset_one(listener: socket.socket) -> None:
        taken, _ = listener.accept()
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        taken.close()

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))  # the port refuses connections while the socket does not listen
        if answers:
            listener.listen()
            threading.Thread(target=reset_one, args=(listener,), daemon=True).start()
        built = asyncio.run(call(f"127.0.0.1:{listener.getsockname()[1]}"))
    assert built.was_refused is not answers


def test_failed_write_is_retried_and_logged_once(
    nodes: RendezvousNodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No view is installed before each member has it on disk; the log has file and reason."""
    monkeypatch.setattr(server, "DISK_RETRY_S", 0.01)
    disk = FailingDisk()
    built = nodes.build(
        2, record=lambda place: DurableStateFile(place, disk if place.name == "n1" else Disk())
    )
    wait_for(lambda: disk.failures > 3, "the write is retried")
    assert all(one.worlds.empty() for one in built)
    disk.full = False
    for one in built:
        assert member_names(one.worlds.get(timeout=30)) == ["n0", "n1"]
    (line,) = built[1].log_lines("disk")
    assert RENDEZVOUS_STATE_FILE in line
    assert "No space left on device" in line
    assert line.endswith("; trying again")
    assert not built[0].log_lines("disk")


def test_stop_does_not_wait_for_a_failing_disk(nodes: RendezvousNodes) -> None:
    """The disk stays full."""
    disk = FailingDisk()
    (alone,) = nodes.build(1, record=lambda place: DurableStateFile(place, disk))
    wait_for(lambda: disk.failures > 0, "a write failed")
    alone.thread.stop()
    wait_for(lambda: not alone.thread.is_alive, "the thread has ended")


def test_stop_closes_all_sockets(nodes: RendezvousNodes) -> None:
    """No socket listens or is connected."""
    before = count_open_descriptors()
    built = nodes.build(3)
    for one in built:
        one.worlds.get(timeout=30)
    assert count_open_descriptors() > before
    nodes.stop()
    wait_for(lambda: count_open_descriptors() <= before, "all sockets are closed")


def test_on_core_change_precedes_the_effects(nodes: RendezvousNodes) -> None:
    """The lease moves before the agent learns of a view."""
    running: list[bool] = []
    seen: list[bool] = []

    class Watching(SocketNode):
        def watch(self, agent: RendezvousNode) -> None:
            running.append(agent.running_view is not None)

        def carry_out(self, effect: Effect) -> None:
            if isinstance(effect, StartWorkers):
                seen.append(running[-1])
            super().carry_out(effect)

    (alone,) = nodes.build(1, node_class=Watching)
    alone.worlds.get(timeout=30)
    assert seen == [True]


def test_internal_error_ends_the_thread_and_is_reported(
    nodes: RendezvousNodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`is_alive` is false and threading.excepthook gets the error."""
    errors: list[threading.ExceptHookArgs] = []
    monkeypatch.setattr(threading, "excepthook", errors.append)
    (alone,) = cast("list[Broken]", nodes.build(1, node_class=Broken))
    alone.is_broken = True
    wait_for(lambda: not alone.thread.is_alive, "the thread ended")
    assert [args.exc_type for args in errors] == [KeyError]
    alone.close_listener()


@pytest.mark.parametrize("broken", [0, 1], ids=["leader", "follower"])
def test_internal_error_is_not_taken_for_a_death(
    nodes: RendezvousNodes, monkeypatch: pytest.MonkeyPatch, broken: int
) -> None:
    """The process lives, and its workers may run until their lease expires: it refuses no call."""
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    built = cast("list[Broken]", nodes.build(2, node_class=Broken, node_timeout_s=3.0))
    for node in built:
        node.worlds.get(timeout=30)
    other = built[1 - broken]
    built[broken].is_broken = True
    wait_for(lambda: not built[broken].thread.is_alive, "the thread ended")
    kind = "lost" if broken else "leader-lost"
    wait_for(lambda: bool(other.log_lines(kind)), "the other has noticed")
    assert [text.rpartition(" is ")[2] for text in other.log_lines(kind)] == ["unreachable"]
    built[broken].close_listener()


@pytest.mark.slow
@pytest.mark.parametrize("odd", ["here:99999", "no port", ":1", "\x00:1", "a" * 300 + ":1", "localhost:1"])
def test_candidate_that_is_not_an_address_is_skipped(nodes: RendezvousNodes, odd: str) -> None:
    """The attempt to connect fails, and the next candidate is tried."""
    for one in nodes.build(2, first_candidates=(odd,)):
        one.worlds.get(timeout=30)


def test_lookups_run_in_daemon_threads() -> None:
    """The interpreter waits at exit for an executor's threads, as long as DNS does not answer."""
    daemons = []

    def resolve(host: str) -> list[str]:
        daemons.append(threading.current_thread().daemon)
        raise OSError(errno.EAGAIN, host)

    with pytest.raises(OSError, match="nobody"):
        asyncio.run(
            connection.connect(connection.Connection.__new__(connection.Connection), "nobody:1", resolve)
        )
    assert daemons == [True]


def test_lookup_that_fails_after_cancellation_logs_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The name server may answer after the attempt to connect was given up."""
    released = threading.Event()

    def resolve(_: str) -> list[str]:
        released.wait()
        raise OSError("no such name")

    async def give_up() -> None:
        asking = asyncio.ensure_future(connection._resolve_shared("nobody.test", resolve))
        await asyncio.sleep(0)  # the lookup starts
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        under_way = connection._pending_lookups[asyncio.get_running_loop(), "nobody.test"]
        released.set()
        await asyncio.wait([under_way])

    asyncio.run(give_up())
    gc.collect(1)  # the exception and its traceback are young; a whole collection takes long
    assert "never retrieved" not in caplog.text
