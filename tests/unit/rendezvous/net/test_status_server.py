"""Status clients: limited in number, and without effect on the view."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Iterator
from dataclasses import replace

import pytest

from elastic_resume.rendezvous.core.messages import Hello
from elastic_resume.rendezvous.core.world import NO_VIEW, Ballot, Incarnation
from elastic_resume.rendezvous.net import protocol, status_server
from elastic_resume.rendezvous.net.connection import ConnectionLimits
from elastic_resume.rendezvous.net.protocol import ProtocolError
from tests.support.rendezvous_nodes import (
    RUN,
    TIMEOUT_S,
    TOKEN,
    RendezvousNodes,
    SocketNode,
    authenticate,
    check_undisturbed,
    connect,
    count_open_descriptors,
    is_disconnected,
    listener_address,
    read_line,
    send_messages,
    wait_until,
)

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
        send_messages(peer, Hello(A, NO_VIEW, Ballot(), 99, has_followed_another=False))
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
    wait_until(lambda: count_open_descriptors() <= before, "all their descriptors are closed")
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
