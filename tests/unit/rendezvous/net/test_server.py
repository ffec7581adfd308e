"""The shell over real sockets and a real disk: worlds form, nodes die, disks refuse and strangers knock."""

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
from typing import cast

import pytest

from elastic_resume.checkpoint.atomic_io import Disk, translate_os_errors
from elastic_resume.errors import NodeFileError
from elastic_resume.rendezvous.core.events import Effect, StartWorkers
from elastic_resume.rendezvous.core.follower import Follower
from elastic_resume.rendezvous.core.node import RendezvousNode
from elastic_resume.rendezvous.net import connection, protocol, server
from elastic_resume.rendezvous.net.connection import ConnectionLimits
from elastic_resume.rendezvous.net.durable_state import RENDEZVOUS_STATE_FILE, DurableStateFile
from tests.support.rendezvous_nodes import (
    RUN,
    TOKEN,
    RendezvousNodes,
    SocketNode,
    count_open_descriptors,
    read_line,
    wait_until,
)

pytestmark = pytest.mark.slow


@pytest.fixture
def stations(tmp_path: Path) -> Iterator[RendezvousNodes]:
    """Build some; they are stopped in the end."""
    made = RendezvousNodes(tmp_path, ConnectionLimits())
    yield made
    made.stop()


def names(world: StartWorkers) -> list[str]:
    """The members of a world by rank."""
    return [str(member) for member in world.members]


class Refusing(Disk):
    """A disk that is full, as long as somebody says so."""

    full = True
    refusals = 0

    def write_atomic(self, path: Path, data: bytes) -> None:
        """Write, or say why not."""
        if not self.full:
            super().write_atomic(path, data)
            return
        self.refusals += 1
        with translate_os_errors("write", path):
            raise OSError(errno.ENOSPC, "No space left on device")


def test_a_world_forms_and_goes_on_without_its_leader_and_without_a_member(
    stations: RendezvousNodes, tmp_path: Path
) -> None:
    """Four nodes; the leader's process ends, then another's: ranks keep their order, generations grow."""
    made = stations.build(4)
    first = [one.worlds.get(timeout=30) for one in made]
    assert {tuple(names(world)) for world in first} == {("n0", "n1", "n2", "n3")}
    assert [world.rank for world in first] == [0, 1, 2, 3]
    made[0].shell.stop()
    second = [one.worlds.get(timeout=30) for one in made[1:]]
    assert {tuple(names(world)) for world in second} == {("n1", "n2", "n3")}
    made[2].shell.stop()
    third = [made[index].worlds.get(timeout=30) for index in (1, 3)]
    assert {tuple(names(world)) for world in third} == {("n1", "n3")}
    generations = [worlds[0].generation for worlds in (first, second, third)]
    assert generations == sorted(set(generations))
    kept = DurableStateFile(tmp_path / "n1").state
    assert kept is not None
    assert kept.max_generation == generations[-1], "a member has it on disk before the world begins"


def test_fence_is_a_time_of_the_clock_that_goes_on_through_a_suspend(stations: RendezvousNodes) -> None:
    """Workers may run for at most a node timeout more, by CLOCK_BOOTTIME (see test_fence.py)."""
    (one, *_) = stations.build(2)
    one.worlds.get(timeout=30)
    wait_until(lambda: one.lease_expires_at > float("-inf"), "the fence is set")
    left_s = one.lease_expires_at - time.clock_gettime(time.CLOCK_BOOTTIME)
    assert abs(left_s) < 600, "the machine may be slow, but the clocks differ by a day"


class Following(SocketNode):
    """A node that tells on which connection it follows its leader."""

    conn = 0

    def watch(self, agent: RendezvousNode) -> None:
        """Keep the number of the connection that stands; 0 while there is none."""
        super().watch(agent)
        role = agent.role
        self.conn = role.link.conn_id if isinstance(role, Follower) and not role.is_disconnected else 0


def test_broken_connection_is_made_again_while_the_name_server_is_silent(stations: RendezvousNodes) -> None:
    """The leader is called at the IP address where it answered before; its name is not looked up again."""
    silent, released = threading.Event(), threading.Event()

    def resolve(name: str) -> list[str]:
        assert name == "head.test"
        if silent.is_set():
            released.wait()
        return ["127.0.0.1"]

    made = stations.build(2, node_class=Following, host="head.test", resolve=resolve)
    follower = next(one for one in made if one.worlds.get(timeout=30).rank == 1)
    assert isinstance(follower, Following)
    before = follower.conn
    silent.set()
    try:
        for one in list(follower.shell._server._connections.values()):  # type: ignore[union-attr]
            follower.shell._loop.call_soon_threadsafe(one._transport.abort)
        wait_until(lambda: follower.conn not in (0, before), "the connection is made again")
        assert not [end for one in made for end in one.stop_effects], "no world ended"
    finally:
        released.set()


class Caller:
    """Owns one connection, and waits for its end."""

    def __init__(self) -> None:
        self.over = asyncio.Event()

    def on_connected(self, one: connection.Connection) -> None:
        """Somebody answered."""

    def on_ended(self, one: connection.Connection, *, by_peer: bool, reason: str) -> None:
        """The connection is over, and not by our own doing."""
        assert by_peer, f"{one.peer_address}: {reason}"
        self.over.set()

    def on_socket_closed(self, one: connection.Connection) -> None:
        """Its socket is closed."""


async def call(address: str) -> connection.Connection:
    """Call somebody who will not go through the handshake, and wait until the call is over."""
    caller = Caller()
    nonce = secrets.token_hex(32)
    handshake, parting = protocol.dial(TOKEN, RUN, nonce), protocol.encode_abort(TOKEN, RUN, nonce)
    made = connection.Connection(cast("connection.ConnectionHandler", caller), handshake, 30.0, 1, parting)
    try:
        await connection.connect(made, address)
    except OSError as error:
        made.on_dial_failed(error)
    await asyncio.wait_for(caller.over.wait(), 30)
    return made


@pytest.mark.parametrize("answers", [False, True], ids=["nobody listens", "the call is reset"])
def test_only_a_refused_call_is_told_as_refused(*, answers: bool) -> None:
    """A call that is reset after the host took it may be a middlebox's doing: it proves nothing."""

    def reset_one(listener: socket.socket) -> None:
        taken, _ = listener.accept()
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        taken.close()

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))  # the port is taken, and refuses calls as long as nobody listens
        if answers:
            listener.listen()
            threading.Thread(target=reset_one, args=(listener,), daemon=True).start()
        made = asyncio.run(call(f"127.0.0.1:{listener.getsockname()[1]}"))
    assert made.was_refused is not answers


def test_acceptor_that_ends_before_its_proof_is_not_told_of_as_a_stranger() -> None:
    """A peer that is killed in the handshake had said nothing that proves anything: it is no intruder."""

    def begin_and_end(listener: socket.socket) -> None:
        taken, _ = listener.accept()
        side = protocol.accept(TOKEN, RUN, secrets.token_hex(32))
        next(side)
        taken.sendall(side.send(read_line(taken)))
        taken.close()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=begin_and_end, args=(listener,), daemon=True).start()
        made = asyncio.run(call(f"127.0.0.1:{listener.getsockname()[1]}"))
    assert not made.has_greeted, "`Node.ended` tells of whoever greeted and proved nothing"


def test_a_disk_that_refuses_is_tried_again_and_told_of_once(
    stations: RendezvousNodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No world begins before every member has it on disk; the log names file and reason; then it goes on."""
    monkeypatch.setattr(server, "DISK_RETRY_S", 0.01)
    disk = Refusing()
    made = stations.build(
        2, record=lambda place: DurableStateFile(place, disk if place.name == "n1" else Disk())
    )
    wait_until(lambda: disk.refusals > 3, "the disk was asked again and again")
    assert all(one.worlds.empty() for one in made)
    disk.full = False
    for one in made:
        assert names(one.worlds.get(timeout=30)) == ["n0", "n1"]
    (line,) = made[1].log_lines("disk")
    assert RENDEZVOUS_STATE_FILE in line
    assert "No space left on device" in line
    assert line.endswith("; trying again")
    assert not made[0].log_lines("disk")


def test_a_shell_whose_disk_refuses_can_be_stopped(stations: RendezvousNodes) -> None:
    """Stopping waits for no disk."""
    disk = Refusing()
    (alone,) = stations.build(1, record=lambda place: DurableStateFile(place, disk))
    wait_until(lambda: disk.refusals > 0, "the disk was asked")
    alone.shell.stop()
    wait_until(lambda: not alone.shell.is_alive, "it has ended, and the disk is full as ever")


def test_a_stopped_shell_leaves_no_socket(stations: RendezvousNodes) -> None:
    """Neither listening nor connected."""
    before = count_open_descriptors()
    made = stations.build(3)
    for one in made:
        one.worlds.get(timeout=30)
    assert count_open_descriptors() > before
    stations.stop()
    wait_until(lambda: count_open_descriptors() <= before, "all is closed")


def test_the_owner_is_shown_the_core_before_effects_are_carried_out(stations: RendezvousNodes) -> None:
    """A fence moves before anybody hears of a world."""
    running: list[bool] = []
    seen: list[bool] = []

    class Watching(SocketNode):
        def watch(self, agent: RendezvousNode) -> None:
            running.append(agent.running_view is not None)

        def carry_out(self, effect: Effect) -> None:
            if isinstance(effect, StartWorkers):
                seen.append(running[-1])
            super().carry_out(effect)

    (alone,) = stations.build(1, node_class=Watching)
    alone.worlds.get(timeout=30)
    assert seen == [True]


def test_an_error_of_our_own_ends_the_thread_and_is_told(
    stations: RendezvousNodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half a core must not go on: its owner sees that the shell lives no more."""
    told: list[threading.ExceptHookArgs] = []
    monkeypatch.setattr(threading, "excepthook", told.append)

    class Broken(SocketNode):
        def watch(self, agent: RendezvousNode) -> None:
            raise KeyError(str(agent))

    (alone,) = stations.build(1, node_class=Broken)
    wait_until(lambda: not alone.shell.is_alive, "the thread ended")
    assert [args.exc_type for args in told] == [KeyError]


@pytest.mark.slow
@pytest.mark.parametrize("odd", ["here:99999", "no port", ":1", "\x00:1", "a" * 300 + ":1", "localhost:1"])
def test_a_candidate_that_is_no_address_does_not_stop_the_search(stations: RendezvousNodes, odd: str) -> None:
    """A call to it fails, and the next one is made."""
    for one in stations.build(2, first_candidates=(odd,)):
        one.worlds.get(timeout=30)


def test_a_record_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    """It holds what the quorum rests on: never taken for nothing."""
    assert DurableStateFile(tmp_path).state is None
    for text in ("", "{}", '{"memory": [], "digest": "x"}', "[" * 100_000):
        (tmp_path / RENDEZVOUS_STATE_FILE).write_text(text)
        with pytest.raises(NodeFileError, match="remove the file"):
            DurableStateFile(tmp_path)


def test_an_agents_end_waits_for_no_name_server() -> None:
    """Python waits for an executor's threads; a pod would be killed while its resolver is silent."""
    daemons = []

    def resolve(host: str) -> list[str]:
        daemons.append(threading.current_thread().daemon)
        raise OSError(errno.EAGAIN, host)

    with pytest.raises(OSError, match="nobody"):
        asyncio.run(
            connection.connect(connection.Connection.__new__(connection.Connection), "nobody:1", resolve)
        )
    assert daemons == [True]


def test_look_up_that_fails_after_its_call_was_given_up_prints_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A name server may answer late that there is no such name, and nobody waits any more."""
    released = threading.Event()

    def resolve(_: str) -> list[str]:
        released.wait()
        raise OSError("no such name")

    async def give_up() -> None:
        asking = asyncio.ensure_future(connection._resolve_shared("nobody.test", resolve))
        await asyncio.sleep(0)  # it asks
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        (under_way,) = connection._pending_lookups.values()
        released.set()
        await asyncio.wait([under_way])

    asyncio.run(give_up())
    gc.collect()
    assert "never retrieved" not in caplog.text
