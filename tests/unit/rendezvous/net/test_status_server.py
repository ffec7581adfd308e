"""Status clients: limited in number, and without effect on the view."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from elastic_resume.rendezvous.core.follower import Follower
from elastic_resume.rendezvous.core.interface import RendezvousSettings
from elastic_resume.rendezvous.core.leader import Leader
from elastic_resume.rendezvous.core.messages import (
    Hello,
    JoinSpec,
    StartView,
    Welcome,
    Workers,
    WorkersStatus,
)
from elastic_resume.rendezvous.core.node import RendezvousNode
from elastic_resume.rendezvous.core.peers import Link, Peer
from elastic_resume.rendezvous.core.world import NO_VIEW, Ballot, Incarnation, View
from elastic_resume.rendezvous.net import protocol, status_server
from elastic_resume.rendezvous.net.connection import ConnectionLimits
from elastic_resume.rendezvous.net.protocol import ProtocolError
from elastic_resume.rendezvous.net.status_server import RendezvousStatus, build_status
from tests.support.processes import wait_for
from tests.support.rendezvous_nodes import (
    RUN,
    TIMEOUT_S,
    TOKEN,
    EndlessSender,
    RendezvousNodes,
    SocketNode,
    authenticate,
    check_undisturbed,
    connect,
    count_open_descriptors,
    is_disconnected,
    listener_address,
    on_event_loop,
    read_line,
    send_messages,
)
from tests.support.rendezvous_shell import Shell, SlowRenderer, count_timers, dial, ends, serve, wait_on_loop

pytestmark = pytest.mark.slow

STATUS_KEY = protocol.derive_status_key(TOKEN)
A = Incarnation("a", "1", 1, "a:1")


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[SocketNode]]:
    """Give two nodes in a view, which no test may disturb."""
    nodes = RendezvousNodes(
        tmp_path_factory.mktemp("pair"), ConnectionLimits(handshake_timeout_s=TIMEOUT_S, max_status_clients=3)
    )
    built = nodes.build(2)
    for one in built:
        one.worlds.get(timeout=30)
    yield built
    nodes.stop()


def shorten_handshake(node: SocketNode, patch: pytest.MonkeyPatch) -> None:
    """Let handshakes take a second from now on."""
    server = node.thread._server
    assert server is not None
    patch.setattr(server, "_limits", replace(server._limits, handshake_timeout_s=1.0))


def test_status_needs_the_status_key(pair: list[SocketNode]) -> None:
    """Leader and follower reply with their own status; the state machine does not see the client."""
    links = [one.link_count for one in pair]
    replies = [json.loads(status_server.query_agent(one.address, RUN, STATUS_KEY)) for one in pair]
    assert [one["leads"] for one in replies] == [True, False]
    assert all(one["nodes"] == ["n0", "n1"] for one in replies)
    with pytest.raises(ProtocolError, match="does not hold the run's token"):
        status_server.query_agent(pair[0].address, RUN, protocol.derive_status_key(b"another"))
    with pytest.raises(ProtocolError, match="does not hold the run's token"):
        status_server.query_agent(pair[0].address, RUN, TOKEN)  # the token is not the status key
    with pytest.raises(ProtocolError, match="it belongs to another job"):
        status_server.query_agent(pair[0].address, "other", STATUS_KEY)
    with pytest.raises(OSError, match="refused"):
        status_server.query_agent("127.0.0.1:1", RUN, STATUS_KEY)
    check_undisturbed(pair)
    assert [one.link_count for one in pair] == links


def test_status_key_does_not_admit_a_member(pair: list[SocketNode], monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not the token; and a status client may send no message."""
    with monkeypatch.context() as patch:
        shorten_handshake(pair[0], patch)
        with connect(pair[0].address) as peer:
            with contextlib.suppress(ProtocolError):
                authenticate(peer, STATUS_KEY)
            assert is_disconnected(peer)
    with status_client(pair[0].address) as peer:
        send_messages(peer, Hello(A, NO_VIEW, Ballot(), 99))
        assert is_disconnected(peer)
    check_undisturbed(pair)


def test_injected_status_is_refused() -> None:
    """The client accepts only lines that an agent signed."""

    def answer(listener: socket.socket) -> None:
        with listener.accept()[0] as conn:
            side = protocol.accept(TOKEN, RUN, "1" * 64)
            next(side)
            try:
                while True:
                    conn.sendall(side.send(read_line(conn)))
            except StopIteration as stop:
                conn.sendall(stop.value.final_line + b'{"leads":true}\n')

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=answer, args=[listener])
        thread.start()
        with pytest.raises(ProtocolError, match="wrong digest"):
            status_server.query_agent(listener_address(listener), RUN, STATUS_KEY)
        thread.join()


def test_status_clients_that_do_not_read_are_disconnected(pair: list[SocketNode]) -> None:
    """At most three are connected; the oldest is disconnected first, and others get a reply."""
    check_undisturbed(pair)
    before = count_open_descriptors()
    with contextlib.ExitStack() as stack:
        for _ in range(20):
            stack.enter_context(status_client(pair[0].address))
        assert json.loads(status_server.query_agent(pair[0].address, RUN, STATUS_KEY))["leads"]
        held = [stack.enter_context(status_client(pair[0].address)) for _ in range(3)]
        for one in held:
            assert is_disconnected(one), "the server disconnects it"
    wait_for(lambda: count_open_descriptors() <= before, "all their descriptors are closed")
    check_undisturbed(pair)


def test_status_client_with_an_incomplete_greeting_is_dropped(
    pair: list[SocketNode], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The handshake's timeout ends it."""
    shorten_handshake(pair[0], monkeypatch)
    with connect(pair[0].address) as peer:
        peer.sendall(protocol.encode_greeting(RUN, "0" * 64, status_only=True)[:20])
        assert is_disconnected(peer)
    check_undisturbed(pair)


@contextlib.contextmanager
def status_client(address: str) -> Iterator[socket.socket]:
    """Finish the handshake as a status client, and read nothing."""
    with connect(address) as peer:
        authenticate(peer, STATUS_KEY, status_only=True)
        yield peer


# ---- one server ------------------------------------------------------------------------------------------


def query(shell: Shell) -> dict[str, Any]:
    """Ask for the status; return the reply."""
    reply: dict[str, Any] = json.loads(status_server.query_agent(shell.address, RUN, STATUS_KEY))
    return reply


@on_event_loop
async def test_agent_without_a_status_says_so(tmp_path: Path) -> None:
    """Clients that have got their reply do not count, and leave no timer."""
    limits = ConnectionLimits(max_status_clients=2)
    async with serve(tmp_path, limits) as shell:
        timers = count_timers()
        for _ in range(5):
            reply = await asyncio.to_thread(query, shell)
            assert reply == {"error": "this agent has no status to show"}
        await wait_on_loop(lambda: not shell.server._open_connections)
        assert count_timers() == timers


@on_event_loop
async def test_defect_while_rendering_costs_one_reply_only(tmp_path: Path) -> None:
    """The client gets the error."""

    def render(_: RendezvousStatus) -> bytes:
        raise KeyError("a defect")

    async with serve(tmp_path, render_status=render) as shell:
        for _ in range(2):
            assert "KeyError('a defect')" in (await asyncio.to_thread(query, shell))["error"]


@contextlib.asynccontextmanager
async def serve_slowly(directory: Path) -> AsyncIterator[tuple[Shell, SlowRenderer]]:
    """Serve at most three clients, with a renderer that waits."""
    renderer = SlowRenderer()
    limits = ConnectionLimits(max_status_clients=3, handshake_timeout_s=TIMEOUT_S)
    async with serve(directory, limits, render_status=renderer) as shell:
        try:
            yield shell, renderer
        finally:
            renderer.allowed.set()


@on_event_loop
async def test_clients_that_have_left_are_not_rendered_for(tmp_path: Path) -> None:
    """Else a script that asks each second would fill the queue of a slow machine."""
    async with serve_slowly(tmp_path) as (shell, renderer):
        first = asyncio.ensure_future(asyncio.to_thread(query, shell))
        await wait_on_loop(lambda: renderer.count == 1)
        for _ in range(5):
            with dial(shell) as client:
                await asyncio.to_thread(authenticate, client, STATUS_KEY, status_only=True)
                await wait_on_loop(lambda: len(shell.server._status_server._clients) == 2)
            await wait_on_loop(lambda: len(shell.server._open_connections) == 1)
        renderer.allowed.set()
        assert await first == {}
        assert await asyncio.to_thread(query, shell) == {}
        assert renderer.count == 2


@on_event_loop
async def test_oldest_of_too_many_clients_is_disconnected(tmp_path: Path) -> None:
    """The others get their replies."""
    async with serve_slowly(tmp_path) as (shell, renderer):
        with dial(shell) as oldest:
            await asyncio.to_thread(authenticate, oldest, STATUS_KEY, status_only=True)
            await wait_on_loop(lambda: renderer.count == 1)
            others = [asyncio.ensure_future(asyncio.to_thread(query, shell)) for _ in range(3)]
            assert await ends(oldest)
        renderer.allowed.set()
        assert await asyncio.gather(*others) == [{}] * 3


@pytest.mark.parametrize(
    ("answer", "match"),
    [
        (b"220 mail.test ESMTP", "it closed the connection"),
        (b"x" * (protocol.MAX_GREETING_BYTES + 1), "a line of more than 4096 bytes"),
        (b"HTTP/1.1 400 Bad Request\r\n", "not JSON"),
    ],
    ids=["half a line", "a long line", "a web server"],
)
def test_other_program_at_the_address_is_reported(answer: bytes, match: str) -> None:
    """The client does not collect what it sends."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def reply() -> None:
            with listener.accept()[0] as taken:
                read_line(taken)
                taken.sendall(answer)

        thread = threading.Thread(target=reply)
        thread.start()
        with pytest.raises(ProtocolError, match=match):
            status_server.query_agent(listener_address(listener), RUN, STATUS_KEY)
        thread.join()


def test_client_does_not_wait_for_a_program_that_sends_a_byte_now_and_then() -> None:
    """Else a line could take hours."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def drip() -> None:
            with listener.accept()[0] as taken:
                sender = EndlessSender(taken, b"x", pause_s=0.01)
                sender.start()
                sender.join()

        thread = threading.Thread(target=drip)
        thread.start()
        with pytest.raises(TimeoutError, match="timed out"):
            status_server.query_agent(listener_address(listener), RUN, STATUS_KEY, timeout_s=0.1)
        thread.join()


@pytest.mark.parametrize("timeout_s", [0.0, 0.02])
def test_client_does_not_wait_beyond_its_deadline(timeout_s: float) -> None:
    """The time may be over when the last bytes arrive, or while the peer is silent."""
    near, far = socket.socketpair()
    with near, far:
        far.sendall(b"half a line")
        with pytest.raises(TimeoutError, match="timed out"):
            status_server._receive_line(near, protocol.LineReader(), timeout_s)


# ---- the status of a state machine -----------------------------------------------------------------------

B, C = Incarnation("b", "2", 1, "b:1"), Incarnation("c", "3", 1, "c:1")
VIEW = View(7, (A, B), A)


def joined(join: JoinSpec) -> WorkersStatus:
    """Return the status of a node that has joined."""
    return WorkersStatus(Workers.JOINED, join=join)


def make_leader() -> tuple[RendezvousNode, Leader]:
    """Return a leader of the view of two nodes whose follower is absent; a third one is here and prepares."""
    node = RendezvousNode(RendezvousSettings(("a:1", "b:1"), min_nodes=2, max_nodes=3), A, None, 0.0)
    node.state.adopt_view(VIEW)
    node.role = role = Leader(node.state, {})
    role.peers.add(Peer(C, Link(-1, peer=C), joined(JoinSpec("c:1", 1, is_preparing=True))))
    node.state.status = joined(JoinSpec("a:1", 1))
    return node, role


def test_status_of_a_leader_that_waits() -> None:
    """It names the nodes that are here, those that prepare, and those that are missing."""
    node, _ = make_leader()
    status = build_status(node)
    assert (status.is_leader, status.leader, status.view, status.generation) == (True, A, None, 7)
    assert (status.others, status.preparing, status.missing) == ((A, C), ("c",), ("b",))
    assert status.waiting_reason
    assert not status.end_reason


def test_status_of_a_leader_with_a_view() -> None:
    """A member whose workers have finished may be gone; nobody waits for it."""
    node, role = make_leader()
    role.active_view = VIEW
    status = build_status(node)
    assert (status.view, status.others, status.missing, status.waiting_reason) == (VIEW, (C,), (), "")


def test_status_of_a_follower() -> None:
    """It knows its leader, its view, and why it waits: only while it waits for a view."""
    node = RendezvousNode(RendezvousSettings(("a:1", "b:1"), max_nodes=2), B, None, 0.0)
    assert build_status(node).leader is None
    node.role = Follower(node.state, Link(1, "a:1", A), Welcome(A, VIEW))
    assert build_status(node).leader == A
    assert not build_status(node).waiting_reason, "it has not asked for a view"
    node.state.status = joined(JoinSpec("b:1", 1))
    assert "a" in build_status(node).waiting_reason.split()
    node.state.start_workers(VIEW, StartView(7, "a:1", (1, 1)), 1.0)
    assert (build_status(node).view, build_status(node).waiting_reason) == (VIEW, "")
