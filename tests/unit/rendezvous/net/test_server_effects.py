"""The server as a shell: effects of a scripted state machine, real sockets, and peers that misbehave."""

from __future__ import annotations

import asyncio
import contextlib
import math
import resource
import socket
import threading
from pathlib import Path

import pytest

from elastic_resume.rendezvous.core.interface import (
    Connect,
    Disconnect,
    Effect,
    JoinRequest,
    MessageReceived,
    PeerConnected,
    PeerDisconnected,
    Send,
    Tick,
)
from elastic_resume.rendezvous.core.messages import Header, Heartbeat, JoinSpec, Redirect
from elastic_resume.rendezvous.net import protocol, server
from elastic_resume.rendezvous.net.connection import ConnectionLimits
from elastic_resume.rendezvous.net.server import RendezvousServer, RendezvousThread, raise_descriptor_limit
from tests.support.processes import wait_for
from tests.support.rendezvous_nodes import (
    TIMEOUT_S,
    TOKEN,
    authenticate,
    on_event_loop,
    read_line,
)
from tests.support.rendezvous_shell import (
    Shell,
    SlowRenderer,
    count_timers,
    dial,
    ends,
    join,
    serve,
    wait_on_loop,
)

STATUS_KEY = protocol.derive_status_key(TOKEN)
HEADER = Header(1, 0)
KIB = Redirect("x" * 1024)
QUEUED_KIB = 2048
"""More than kernels queue."""


def send_much(conn_id: int) -> list[Effect]:
    """Return effects that send more than kernels queue."""
    return [Send(conn_id, HEADER, KIB)] * QUEUED_KIB


def count_lines(peer: socket.socket) -> int:
    """Read until the end of the connection; return how many lines there were."""
    return sum(data.count(b"\n") for data in iter(lambda: peer.recv(1 << 20), b""))


# ---- effects ---------------------------------------------------------------------------------------------


@on_event_loop
async def test_earlier_deadline_replaces_the_timer(tmp_path: Path) -> None:
    """A timer that stays would start another one each time it fires. A node that has left needs none."""
    async with serve(tmp_path) as shell:
        now = server.read_boottime_s()
        for left_s in (30, 20, 10, 20, 10, 5):
            shell.core.next_deadline = now + left_s
            shell.carry_out()
            assert count_timers(shell.server._on_timer) == 1
        shell.core.events.clear()
        shell.core.next_deadline = now
        shell.carry_out()
        await wait_on_loop(lambda: len(shell.core.events) > 1)
        shell.core.next_deadline = math.inf
        await wait_on_loop(lambda: shell.server._timer is None)
        assert count_timers(shell.server._on_timer) == 0


@on_event_loop
async def test_disconnected_peer_gets_what_is_queued_and_is_not_reported(tmp_path: Path) -> None:
    """What the state machine sends to it afterwards is ignored."""
    async with serve(tmp_path) as shell:
        with dial(shell) as peer:
            conn_id = await join(shell, peer)
            shell.carry_out(*send_much(conn_id), Disconnect(conn_id), Send(conn_id, HEADER, KIB))
            assert await asyncio.to_thread(count_lines, peer) == QUEUED_KIB
        await wait_on_loop(lambda: not shell.server._open_connections)
        assert not shell.find(PeerDisconnected)
        assert not shell.effects


@on_event_loop
async def test_disconnect_ends_an_attempt_to_connect(tmp_path: Path) -> None:
    """The name server may never answer."""
    released = threading.Event()

    def resolve(_: str) -> list[str]:
        released.wait()
        return ["127.0.0.1"]

    try:
        async with serve(tmp_path, resolve=resolve) as shell:
            tasks = len(asyncio.all_tasks())
            shell.carry_out(Connect(1, "head.test:1"))
            assert len(asyncio.all_tasks()) == tasks + 1
            await wait_on_loop(lambda: bool(shell.server._dial_tasks))
            shell.carry_out(Disconnect(1))
            await wait_on_loop(lambda: len(asyncio.all_tasks()) == tasks)
            assert not shell.find(PeerDisconnected)
    finally:
        released.set()


@on_event_loop
async def test_attempt_that_takes_too_long_is_reported_and_not_logged(tmp_path: Path) -> None:
    """No peer did anything wrong."""
    released = threading.Event()

    def resolve(_: str) -> list[str]:
        released.wait()
        return ["127.0.0.1"]

    try:
        limits = ConnectionLimits(handshake_timeout_s=0.02)
        async with serve(tmp_path, limits, resolve=resolve) as shell:
            tasks = len(asyncio.all_tasks())
            shell.carry_out(Connect(1, "head.test:1"))
            await wait_on_loop(lambda: bool(shell.find(PeerDisconnected)))
            (end,) = shell.find(PeerDisconnected)
            assert (end.conn_id, end.refused) == (1, False)
            assert not shell.effects
            await wait_on_loop(lambda: len(asyncio.all_tasks()) == tasks)
    finally:
        released.set()


@on_event_loop
async def test_peer_that_does_not_read_is_dropped(tmp_path: Path) -> None:
    """It may have as much queued as the limit permits."""
    limits = ConnectionLimits(max_queued_bytes=3 << 20, log_interval_s=0.01)
    async with serve(tmp_path, limits) as shell:
        with dial(shell) as peer:
            conn_id = await join(shell, peer)
            shell.carry_out(*send_much(conn_id))
            await asyncio.sleep(0)
            assert not shell.find(PeerDisconnected)
            shell.carry_out(*send_much(conn_id), *send_much(conn_id))
            await wait_on_loop(lambda: bool(shell.find(PeerDisconnected)))
        assert shell.find(PeerDisconnected)[0].reason.startswith("it has not read")
        assert len(shell.log_lines) == 1


# ---- limits of peers -------------------------------------------------------------------------------------


@on_event_loop
async def test_connections_that_have_ended_do_not_count_as_waiting(tmp_path: Path) -> None:
    """Of three that wait, the first is dropped where two may wait; members do not wait."""
    limits = ConnectionLimits(max_unauthenticated=2, handshake_timeout_s=TIMEOUT_S)
    async with serve(tmp_path, limits) as shell:
        with contextlib.ExitStack() as stack:
            members = [stack.enter_context(dial(shell)) for _ in range(2)]
            for member in members:
                await join(shell, member)
            for _ in range(4):
                with dial(shell):
                    await wait_on_loop(lambda: len(shell.server._open_connections) == 3)
                await wait_on_loop(lambda: len(shell.server._open_connections) == 2)
            silent = [stack.enter_context(dial(shell)) for _ in range(3)]
            assert await ends(silent[0])
            await asyncio.to_thread(authenticate, silent[1])
            await join(shell, silent[2])
            assert not shell.find(PeerDisconnected), "a peer is reported once it is authenticated"


@on_event_loop
async def test_limit_of_connections_is_for_those_that_others_open(tmp_path: Path) -> None:
    """The agent itself still connects to its leader."""
    limits = ConnectionLimits(max_connections=2, handshake_timeout_s=TIMEOUT_S, log_interval_s=0.01)
    async with serve(tmp_path, limits) as shell, serve(tmp_path) as leader:
        with dial(shell) as first, dial(shell) as second:
            await join(shell, first)
            await join(shell, second)
            with dial(shell) as third:
                assert await ends(third)
            assert "2 connections are open already" in shell.log_lines[0]
            shell.carry_out(Connect(7, leader.address))
            await wait_on_loop(lambda: shell.find(PeerConnected)[-1].conn_id == 7)
            assert len(shell.log_lines) == 1


@on_event_loop
async def test_state_machine_learns_of_members_only(tmp_path: Path) -> None:
    """It does not learn of status clients, nor of peers without the token."""
    renderer = SlowRenderer()  # the client has no reply yet
    async with serve(tmp_path, render_status=renderer) as shell:
        with dial(shell) as stranger:
            stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
            assert await ends(stranger)
        with dial(shell) as client:
            proof = await asyncio.to_thread(authenticate, client, STATUS_KEY, status_only=True)
            client.sendall(proof.signer.sign(protocol.encode(HEADER, Heartbeat())))
            assert await ends(client)
        renderer.allowed.set()
        await wait_on_loop(lambda: "a status client sent a message" in "".join(shell.log_lines))
        assert {type(event) for event in shell.core.events} == {Tick}
        with dial(shell) as member:
            conn_id = await join(shell, member)
        await wait_on_loop(lambda: bool(shell.find(PeerDisconnected)))
        assert [type(event) for event in shell.core.events] == [Tick, PeerConnected, PeerDisconnected]
        assert shell.core.events[-1] == PeerDisconnected(conn_id, "closed")


@on_event_loop
async def test_idle_peers_are_dropped_but_not_a_leader_that_was_dialled(tmp_path: Path) -> None:
    """Three sweeps without data end a connection that the peer has opened."""
    async with serve(tmp_path) as shell, serve(tmp_path) as leader:
        shell.carry_out(Connect(7, leader.address))
        with dial(shell) as silent, dial(shell) as alive:
            silent_id = await join(shell, silent)
            proof = await asyncio.to_thread(authenticate, alive)
            await wait_on_loop(lambda: len(shell.find(PeerConnected)) == 3)
            for _ in range(server.MAX_IDLE_SWEEPS):
                shell.server._drop_idle()
            alive.sendall(proof.signer.sign(protocol.encode(HEADER, Heartbeat())))
            await wait_on_loop(lambda: bool(shell.find(MessageReceived)))
            assert not shell.find(PeerDisconnected)
            shell.server._drop_idle()
            assert [end.conn_id for end in shell.find(PeerDisconnected)] == [silent_id]
            assert "has sent nothing" in shell.find(PeerDisconnected)[0].reason


# ---- the end ---------------------------------------------------------------------------------------------


@on_event_loop
async def test_after_an_internal_error_nothing_reaches_the_state_machine(tmp_path: Path) -> None:
    """Peers that call are disconnected unheard, and nothing is logged about them."""
    async with serve(tmp_path) as shell:
        with dial(shell) as member, dial(shell) as stranger:
            await join(shell, member)
            shell.core.error = KeyError("a defect")
            shell.server.handle_event(Tick())
            assert shell.server.failure.result() is shell.core.error
            shell.core.events.clear()
            shell.server.handle_event(Tick())
            with dial(shell) as late:
                assert await asyncio.to_thread(read_line, late) == b""
            stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
            assert await ends(stranger)
        await wait_on_loop(lambda: not shell.server._open_connections)
        assert not shell.core.events
        assert not shell.effects


@on_event_loop
async def test_close_waits_for_peers_that_read(tmp_path: Path) -> None:
    """Connections that ended earlier, or that end at once, do not cut the last message of another."""
    shell = Shell(tmp_path, ConnectionLimits())
    await shell.server.open()
    with dial(shell):
        await wait_on_loop(lambda: len(shell.server._open_connections) == 1)
    await wait_on_loop(lambda: not shell.server._open_connections)
    with dial(shell) as reader, dial(shell) as other:
        await join(shell, other)
        shell.carry_out(*send_much(await join(shell, reader)))
        closing = asyncio.ensure_future(shell.server.close(TIMEOUT_S))
        assert await ends(other)
        assert await asyncio.to_thread(count_lines, reader) == QUEUED_KIB
        await closing
    assert not [event for event in shell.core.events if isinstance(event, PeerDisconnected)]


@on_event_loop
async def test_close_does_not_wait_for_a_peer_that_does_not_read(tmp_path: Path) -> None:
    """No socket, thread or timer is left."""
    tasks = asyncio.all_tasks()
    shell = Shell(tmp_path, ConnectionLimits())
    await shell.server.open()
    with dial(shell) as peer:
        shell.carry_out(*send_much(await join(shell, peer)))
        await shell.server.close(0.01)
        assert not shell.server._open_connections
    assert asyncio.all_tasks() == tasks
    assert count_timers(shell.server._on_timer) + count_timers(shell.server._drop_idle) == 0


def test_events_before_the_start_are_kept(tmp_path: Path) -> None:
    """The agent may ask for a view before the thread has made its server."""
    shells: list[Shell] = []

    def make_server() -> RendezvousServer:
        shells.append(Shell(tmp_path, ConnectionLimits()))
        return shells[0].server

    thread = RendezvousThread(make_server)
    request = JoinRequest(JoinSpec("a:1", 1))
    thread.submit(request)
    thread.start()
    wait_for(lambda: bool(shells) and len(shells[0].core.events) == 2, "both events are handled")
    thread.stop()
    assert not thread.is_alive
    assert shells[0].core.events == [Tick(), request]


@pytest.mark.parametrize(
    ("soft", "hard", "needed", "expected"),
    [
        (1024, 4096, 2048, (2048, 4096)),
        (1024, 4096, 9999, (4096, 4096)),
        (1024, resource.RLIM_INFINITY, 9999, (9999, resource.RLIM_INFINITY)),
        (1024, 4096, 1000, None),
        (resource.RLIM_INFINITY, resource.RLIM_INFINITY, 9999, None),
    ],
)
def test_descriptor_limit_is_raised_as_far_as_permitted(
    monkeypatch: pytest.MonkeyPatch, soft: int, hard: int, needed: int, expected: tuple[int, int] | None
) -> None:
    """It is never lowered."""
    limits: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda _, limit: limits.append(limit))
    raise_descriptor_limit(needed)
    assert limits == ([expected] if expected else [])
