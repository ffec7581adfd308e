"""Unauthenticated and misbehaving peers over real sockets must not disturb a running view of three nodes.

One view lives through all tests with the fixture ``node``, which checks the view after each test.
"""

from __future__ import annotations

import contextlib
import gc
import secrets
import socket
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from elastic_resume.policy.reasons import NameTaken, SettingDiffers, Signalled, ViewEnd, Wait
from elastic_resume.policy.restart import GaveUp, NoProgress
from elastic_resume.rendezvous.core.messages import (
    Decided,
    EndView,
    FailJob,
    Header,
    Heartbeat,
    Hello,
    JoinSpec,
    LeaderAnnouncement,
    LeaveNotice,
    Message,
    Propose,
    Redirect,
    Refused,
    RequestVote,
    StartView,
    Waiting,
    Welcome,
    Workers,
    WorkersStatus,
)
from elastic_resume.rendezvous.core.world import (
    NO_VIEW,
    Ballot,
    Incarnation,
    JobEnd,
    Proposal,
    ProposalAck,
    View,
    Vote,
)
from elastic_resume.rendezvous.net import protocol
from elastic_resume.rendezvous.net.connection import ConnectionLimits, HandshakeLimiter, LogThrottle
from tests.support.processes import wait_for
from tests.support.rendezvous_nodes import (
    NODE_TIMEOUT_S,
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
    receive_message,
    send_messages,
)

pytestmark = pytest.mark.slow  # each test waits until all leases are renewed
LIMITS = ConnectionLimits(
    max_unauthenticated=64, handshake_timeout_s=TIMEOUT_S, max_queued_bytes=1 << 18, log_interval_s=0.01
)
NONCE = "0" * 64
MIB = 1 << 20


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[SocketNode]]:
    """Give three nodes in a view."""
    nodes = RendezvousNodes(tmp_path_factory.mktemp("nodes"), LIMITS)
    built = nodes.build(3)
    for one in built:
        one.worlds.get(timeout=30)
    yield built
    nodes.stop()
    lines = [repr(entry) for one in built for entry in one.logs]
    assert not [text for text in lines if TOKEN.decode() in text], "the token is in a log"


@pytest.fixture(params=["leader", "member"])
def node(request: pytest.FixtureRequest, running: list[SocketNode]) -> Iterator[SocketNode]:
    """Give the node to be abused; afterwards view and open descriptors are unchanged."""
    before, links = count_open_descriptors(), [one.link_count for one in running]
    chosen = [one for one in running if one.is_leader == (request.param == "leader")][-1]
    yield chosen
    check_undisturbed(running)
    wait_for(lambda: count_open_descriptors() <= before, "all connections are closed")
    pairs = list(zip(running, links, strict=True))
    wait_for(
        lambda: all(one.link_count <= then for one, then in pairs), "the state machine has forgotten them"
    )


def make_hello(
    node: SocketNode,
    incarnation: Incarnation,
    *,
    node_timeout_s: float = NODE_TIMEOUT_S,
    max_nodes: int = 3,
) -> Hello:
    """Return the first message of a node of the same job as ``node``."""
    return Hello(
        incarnation,
        NO_VIEW,
        Ballot(),
        0,
        node_timeout_s=node_timeout_s,
        min_nodes=1,
        max_nodes=max_nodes,
        candidates=node.candidates,
    )


def record_handshake() -> bytes:
    """Return a dialler's lines of an earlier, valid handshake."""
    return protocol.encode_greeting(RUN, NONCE) + protocol.encode_proof(
        TOKEN, "dialler", RUN, (NONCE, "1" * 64)
    )


UNAUTHENTICATED = {
    "random bytes": (secrets.token_bytes(5000) + b"\n", "a line"),
    "zeros": (bytes(100_000), "more than 4096 bytes"),
    "a line without an end": (b"x" * 100_000, "more than 4096 bytes"),
    "a browser": (b"GET / HTTP/1.1\r\nHost: here\r\n\r\n", "not JSON"),
    "TLS": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\n", "not JSON"),
    "another job": (protocol.encode_greeting("another", NONCE), "belongs to job 'another'"),
    "another version": (b'{"elastic_resume":99,"run":"job","nonce":"00"}\n', "protocol version '99'"),
    "a bad nonce": (
        b'{"elastic_resume":%d,"run":"job","nonce":"00","status_only":false}\n' % protocol.VERSION,
        "nonce",
    ),
    "deep JSON": (b"[" * 4000 + b"\n", "not JSON"),
    "a large number": (b'{"elastic_resume":' + b"9" * 4000 + b"}\n", "protocol version"),
    "no proof": (protocol.encode_greeting(RUN, NONCE) + b"{}\n", "the fields proof"),
    "a wrong proof": (
        protocol.encode_greeting(RUN, NONCE) + b'{"proof":"' + b"0" * 64 + b'","view":""}\n',
        "token",
    ),
    "a replayed handshake": (record_handshake(), "token"),
    "escape codes in a name": (protocol.encode_greeting("\x1b[2J\n" * 100, NONCE), r"'\x1b[2J\n"),
}


def wait_for_log(node: SocketNode, text: str, since: int) -> str:
    """Wait for a log line about a dropped connection after the first ``since`` lines; return it."""
    lines: list[str] = []

    def find() -> bool:
        lines[:] = [line for line in node.log_lines("unauthenticated")[since:] if text in line]
        return bool(lines)

    wait_for(find, f"the log has {text!r}")
    return lines[-1]


def test_unauthenticated_peer_is_dropped_and_logged(node: SocketNode) -> None:
    """The log line has the address and the reason, and no control characters."""
    for kind, (data, reason) in UNAUTHENTICATED.items():
        since = len(node.log_lines("unauthenticated"))
        with connect(node.address) as peer:
            with contextlib.suppress(ConnectionError):
                peer.sendall(data)
            assert is_disconnected(peer), kind
            host = peer.getsockname()[0]
        line = wait_for_log(node, reason, since)
        assert host in line
        assert line.isprintable(), "a peer's bytes must not reach the terminal"


@pytest.mark.parametrize("greeting", [b"", protocol.encode_greeting(RUN, NONCE)], ids=["greeting", "proof"])
def test_handshake_has_a_timeout_as_a_whole(tmp_path: Path, greeting: bytes) -> None:
    """A peer that sends a byte now and then is dropped before its line is complete."""
    nodes = RendezvousNodes(tmp_path, ConnectionLimits(handshake_timeout_s=0.5, log_interval_s=0.01))
    (alone,) = nodes.build(1)
    try:
        with connect(alone.address) as peer:
            with contextlib.suppress(ConnectionError):
                peer.sendall(greeting)
            sender = EndlessSender(peer, b" ", pause_s=0.05)  # a line of 4096 bytes would take minutes
            sender.start()
            assert is_disconnected(peer)
        sender.join()
        wait_for(lambda: bool(alone.log_lines("unauthenticated", "more than 0.5 s")), "it is logged")
    finally:
        nodes.stop()


def test_connection_closed_in_a_line_leaves_nothing(node: SocketNode) -> None:
    """The fixture counts connections and open descriptors."""
    for size in (1, 20, 90):
        with connect(node.address) as peer:
            peer.sendall(protocol.encode_greeting(RUN, NONCE)[:size])
    with connect(node.address) as peer:
        authenticate(peer)
        peer.sendall(b'{"header":[1,0,0],"type":"He')


def test_idle_connections_do_not_lock_members_out(node: SocketNode) -> None:
    """500 connections send nothing, and as many as may wait send a greeting and then nothing."""
    with contextlib.ExitStack() as held:
        for _ in range(500):
            held.enter_context(connect(node.address))
        for _ in range(LIMITS.max_unauthenticated):
            held.enter_context(connect(node.address)).sendall(protocol.encode_greeting(RUN, NONCE))
        with connect(node.address) as peer:
            authenticate(peer)
            send_messages(peer, make_hello(node, Incarnation("late", "x"), node_timeout_s=1.0))
            assert isinstance(receive_message(peer), (Refused, Redirect)), (
                "a peer with the token gets an answer"
            )


def test_memory_for_unauthenticated_peers_is_bounded(node: SocketNode) -> None:
    """40 connections send as much as they may, and 40 send without end."""
    gc.collect()
    tracemalloc.start()
    try:
        with contextlib.ExitStack() as held:
            for _ in range(40):
                held.enter_context(connect(node.address)).sendall(b"x" * 4000)
            for _ in range(40):
                peer = held.enter_context(connect(node.address))
                sender = EndlessSender(peer, b"y" * MIB)
                sender.start()
                sender.join()
            assert tracemalloc.get_traced_memory()[1] < 8 * MIB
    finally:
        tracemalloc.stop()


HEARTBEAT = protocol.encode(Header(1, 0, 7), Heartbeat())
WRONG_LINES: dict[str, tuple[Callable[[protocol.LineAuthenticator], bytes], str]] = {
    "no JSON": (lambda signer: signer.sign(b"garbage\n"), "not JSON"),
    "another type": (
        lambda signer: signer.sign(b'{"header":[1,0,0],"type":"Reboot","body":[]}\n'),
        "there is no message 'Reboot'",
    ),
    "no digest": ((lambda _: HEARTBEAT), "wrong digest"),
    "less than a digest": ((lambda _: b"\n"), "wrong digest"),
    "another key": ((lambda _: protocol.LineAuthenticator(b"another").sign(HEARTBEAT)), "wrong digest"),
    "a repeated line": (lambda signer: signer.sign(HEARTBEAT) * 2, "wrong digest"),
}
"""The tests of the protocol have more."""


def test_wrong_line_ends_the_connection(node: SocketNode) -> None:
    """Lines that are no messages, and lines that an attacker injects, are logged."""
    for kind, (make_line, reason) in WRONG_LINES.items():
        since = len(node.log_lines("unauthenticated"))
        with connect(node.address) as peer:
            peer.sendall(make_line(authenticate(peer).signer))
            assert is_disconnected(peer), kind
        wait_for_log(node, reason, since)


def test_line_beyond_the_limit_drops_an_authenticated_peer(node: SocketNode) -> None:
    """8 MiB are accepted, one byte more is not, and nothing is kept."""
    for _ in range(3):
        with connect(node.address) as peer:
            authenticate(peer)
            with contextlib.suppress(ConnectionError):
                peer.sendall(b"[" + b" " * protocol.MAX_LINE_BYTES)
            assert is_disconnected(peer)
    wait_for_log(node, f"more than {protocol.MAX_LINE_BYTES} bytes", 0)


def test_queue_for_a_peer_that_never_reads_is_bounded(node: SocketNode) -> None:
    """The peer sends requests and reads no answer, until it is dropped."""
    host, _, port = node.address.rpartition(":")
    with socket.socket() as peer:
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        peer.connect((host, int(port)))
        proof = authenticate(peer)
        question = make_hello(node, Incarnation("late", "x"), node_timeout_s=1.0)
        line = protocol.encode(Header(1, 0), question)
        sender = EndlessSender(peer, lambda: b"".join(proof.signer.sign(line) for _ in range(100)))
        sender.start()
        wait_for_log(node, "has not read", 0)
    sender.join()


FAILURE = GaveUp("unauthenticated", NoProgress(None, 1, 0))


def all_messages() -> list[Message]:
    """Return a message of every type, from a peer that is neither leader nor member."""
    impostor = Incarnation("unauthenticated", "x", 1, "127.0.0.1:1")
    world = View(10**6, (impostor,), impostor)
    ballot = Ballot(10**6, "x", 1)
    proposal = Proposal(ballot, world)
    return [
        Welcome(impostor, world),
        Redirect("127.0.0.1:1"),
        Refused(SettingDiffers("--nnodes", "1:2", "1:4")),
        WorkersStatus(Workers.JOINED, 10**6, JoinSpec("127.0.0.1:1", 1)),
        Heartbeat(),
        RequestVote(1, ballot),
        Vote(1, ballot, proposal),
        Propose(1, proposal),
        ProposalAck(1, ballot, is_accepted=True),
        StartView(10**6, "127.0.0.1:1", (1,)),
        Decided(world),
        EndView(1, ViewEnd.PAUSED),
        Waiting(Wait.LINK_BROKEN),
        FailJob(FAILURE),
        WorkersStatus(Workers.FINISHED, 1),
        JobEnd(10**6, FAILURE),
        LeaveNotice(Signalled("SIGTERM")),
        LeaderAnnouncement(impostor, 0, 0, 0, 9),
    ]


def test_messages_of_a_role_that_the_peer_lacks_change_nothing(node: SocketNode) -> None:
    """A peer that has not been admitted cannot change the view."""
    with connect(node.address) as peer:
        authenticate(peer)
        send_messages(peer, *all_messages())
        assert isinstance(receive_message(peer), (LeaderAnnouncement, Redirect)), (
            "an announcement of lower priority is answered"
        )


def test_peer_with_other_settings_is_refused(node: SocketNode) -> None:
    """The leader refuses it; a member redirects it to the leader."""
    ours = make_hello(node, Incarnation("late", "x", 1, "127.0.0.1:1"))
    for other in (
        replace(ours, node_timeout_s=99.0),
        replace(ours, candidates=ours.candidates[:2]),
        replace(ours, max_nodes=4),
        replace(ours, is_strict=True),
    ):
        with connect(node.address) as peer:
            authenticate(peer)
            send_messages(peer, other)
            assert isinstance(receive_message(peer), Refused if node.is_leader else Redirect)


def test_peer_with_the_name_of_a_live_node_is_refused(node: SocketNode) -> None:
    """The first agent of that name keeps its membership."""
    with connect(node.address) as peer:
        authenticate(peer)
        send_messages(peer, make_hello(node, Incarnation("n1", "another disk", 1, "127.0.0.1:1")))
        answer = receive_message(peer)
    assert isinstance(answer, Redirect) or (isinstance(answer, Refused) and answer.refusal == NameTaken("n1"))


def test_unreachable_spares_are_dropped_without_a_view_change(tmp_path: Path) -> None:
    """Their connections stay open; missing heartbeats end them, after an answer or none to the welcome."""
    nodes = RendezvousNodes(tmp_path, LIMITS)
    (alone,) = nodes.build(1, node_timeout_s=3.0)  # a busy machine must not pause the leader for that long
    try:
        alone.worlds.get(timeout=30)
        with connect(alone.address) as answering, connect(alone.address) as silent:
            for name, peer in (("answering", answering), ("silent", silent)):
                authenticate(peer)
                late = Incarnation(name, "x", 1, "127.0.0.1:1")
                send_messages(peer, make_hello(alone, late, node_timeout_s=3.0, max_nodes=1))
                assert isinstance(receive_message(peer), Welcome)
            send_messages(answering, Heartbeat())
            assert is_disconnected(answering)
            assert is_disconnected(silent)
        wait_for(lambda: bool(alone.log_lines("lost", "answering is unreachable")), "the leader logs it")
        check_undisturbed([alone])
    finally:
        nodes.stop()


def test_stolen_identity_costs_one_view_change_at_most(tmp_path: Path) -> None:
    """A peer with the token can end a view. The three nodes are in the next one."""
    nodes = RendezvousNodes(tmp_path, LIMITS)
    built = nodes.build(3, node_timeout_s=1.0)

    def steal_identity() -> bool:
        leads = [one.is_leader for one in built]
        if sum(leads) != 1:  # a view change is under way
            return False
        leader, victim = built[leads.index(True)], built[leads.index(False)]
        with connect(leader.address) as peer:
            authenticate(peer)
            send_messages(peer, make_hello(leader, victim.incarnation, node_timeout_s=1.0))
            admitted = isinstance(receive_message(peer), Welcome)
            send_messages(peer, Heartbeat())
            # The real node replaces it in the end.
            return admitted and is_disconnected(peer)

    try:
        for one in built:
            one.worlds.get(timeout=30)
        wait_for(steal_identity, "it is admitted, and dropped")
        worlds = [one.worlds.get(timeout=30) for one in built]
        while len({world.generation for world in worlds}) > 1 or len(worlds[0].members) < 3:
            oldest = min(range(3), key=lambda index: worlds[index].generation)
            worlds[oldest] = built[oldest].worlds.get(timeout=30)
        assert {str(member) for member in worlds[0].members} == {"n0", "n1", "n2"}
    finally:
        nodes.stop()


def test_authenticated_peer_that_sends_nothing_is_dropped(tmp_path: Path) -> None:
    """Otherwise each crash of a host that had connected would leave a connection forever."""
    nodes = RendezvousNodes(tmp_path, ConnectionLimits(idle_timeout_s=1.0, log_interval_s=0.01))
    built = nodes.build(2, node_timeout_s=0.5)
    try:
        for one in built:
            one.worlds.get(timeout=30)
        with connect(built[0].address) as peer:
            authenticate(peer)
            assert is_disconnected(peer)
        wait_for(lambda: bool(built[0].log_lines("unauthenticated", "has sent nothing")), "it is logged")
    finally:
        nodes.stop()


def test_connections_beyond_the_limit_do_not_push_members_out(tmp_path: Path) -> None:
    """Later connections do not replace members, even with the token."""
    nodes = RendezvousNodes(tmp_path, ConnectionLimits(max_connections=20, log_interval_s=0.01))
    built = nodes.build(3)
    try:
        for one in built:
            one.worlds.get(timeout=30)
        leader = next(one for one in built if one.is_leader)
        with contextlib.ExitStack() as held:
            for _ in range(16):
                authenticate(held.enter_context(connect(leader.address)))
            for _ in range(10):
                with contextlib.suppress(ConnectionError, protocol.ProtocolError):
                    authenticate(held.enter_context(connect(leader.address)))
            wait_for(lambda: bool(leader.log_lines("unauthenticated", "are open already")), "it is logged")
            check_undisturbed(built)
    finally:
        nodes.stop()


# ---- LogThrottle and HandshakeLimiter --------------------------------------------------------------------


class Clock:
    """Keeps calls for later."""

    def __init__(self) -> None:
        self.due: list[tuple[float, object]] = []
        self.lines: list[str] = []

    def call_later(self, delay_s: float, call: object) -> None:
        """Keep it."""
        self.due.append((delay_s, call))

    def advance(self) -> float:
        """End the next pause; return its length."""
        delay_s, call = self.due.pop(0)
        assert callable(call)
        call()
        return delay_s


def test_log_throttle_logs_the_first_drop_and_sums_up_the_rest() -> None:
    """The pauses grow while drops continue."""
    clock = Clock()
    throttle = LogThrottle(10.0, clock.lines.append, clock.call_later)
    throttle.add("10.0.0.1:5", "not JSON")
    assert clock.lines == ["10.0.0.1:5: not JSON"]
    for host in range(40):
        throttle.add(f"10.0.0.{host}:5", "no token")
    assert len(clock.lines) == 1
    assert clock.advance() == 10.0
    assert clock.lines[1] == "40 more in the last 10 s; the last: 10.0.0.39:5: no token"
    throttle.add("10.0.0.1:5", "again")
    assert clock.advance() == 20.0
    assert len(clock.lines) == 3
    assert clock.advance() == 40.0
    assert (len(clock.lines), clock.due) == (3, []), "without drops nothing is logged, and no timer is left"
    throttle.add("10.0.0.1:5", "much later")
    assert clock.lines[3] == "10.0.0.1:5: much later"


class FakeConnection:
    """A connection in the handshake."""

    def __init__(self, *, greeted: bool) -> None:
        self.has_greeted = greeted
        self.why = ""

    def drop(self, why: str) -> None:
        """Keep the reason."""
        self.why = why


def test_handshake_limiter_drops_the_oldest_that_has_not_greeted() -> None:
    """The newest connection is not dropped either."""
    limiter = HandshakeLimiter(2)
    old, silent, new = (
        FakeConnection(greeted=True),
        FakeConnection(greeted=False),
        FakeConnection(greeted=False),
    )
    for one in (old, silent, new):
        limiter.add(one)  # type: ignore[arg-type]
    assert (old.why, bool(silent.why), new.why) == ("", True, "")


def test_handshake_limiter_prefers_the_newest_to_the_oldest_that_has_greeted() -> None:
    """It had no time yet to send a greeting."""
    limiter = HandshakeLimiter(1)
    old, new = FakeConnection(greeted=True), FakeConnection(greeted=False)
    for one in (old, new):
        limiter.add(one)  # type: ignore[arg-type]
    assert (bool(old.why), new.why) == (True, "")
