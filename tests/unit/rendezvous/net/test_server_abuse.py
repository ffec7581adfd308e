"""Strangers, and peers that misbehave, over real sockets: the running world of three goes on undisturbed.

One world lives through all tests that are given a ``node`` of it; each of them ends with a look at it.
"""

from __future__ import annotations

import contextlib
import gc
import json
import secrets
import socket
import threading
import tracemalloc
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from elastic_resume.rendezvous.core.messages import (
    EndView,
    FailJob,
    Header,
    Heartbeat,
    Hello,
    InstallView,
    JobEnd,
    JoinRequest,
    JoinSpec,
    LeaderAnnouncement,
    LeaveNotice,
    Message,
    NodeFinished,
    ProposalAck,
    ProposeView,
    Redirect,
    Refused,
    WaitReason,
    Welcome,
)
from elastic_resume.rendezvous.core.quorum import Incarnation, QuorumState, View
from elastic_resume.rendezvous.net import protocol
from elastic_resume.rendezvous.net.connection import ConnectionLimits, HandshakeLimiter, LogThrottle
from tests.support.rendezvous_nodes import (
    NODE_TIMEOUT_S,
    RUN,
    TIMEOUT_S,
    TOKEN,
    EndlessSender,
    RendezvousNodes,
    SocketNode,
    authenticate,
    connect,
    count_open_descriptors,
    is_disconnected,
    read_line,
    receive_message,
    send_messages,
    wait_until,
)

pytestmark = pytest.mark.slow  # after each test somebody waits until all leases are renewed
LIMITS = ConnectionLimits(
    max_unauthenticated=64, handshake_timeout_s=TIMEOUT_S, max_queued_bytes=1 << 18, log_interval_s=0.01
)
NONCE = "0" * 64
KNOWN = QuorumState(3)
MEGABYTE = 1 << 20


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[SocketNode]]:
    """Three nodes in a world."""
    stations = RendezvousNodes(tmp_path_factory.mktemp("nodes"), LIMITS)
    made = stations.build(3)
    for one in made:
        one.worlds.get(timeout=30)
    yield made
    stations.stop()
    told = [entry.text for one in made for entry in one.logs]
    assert not [text for text in told if TOKEN.decode() in text], "the token is in a log"


@pytest.fixture(params=["leader", "member"])
def node(request: pytest.FixtureRequest, running: list[SocketNode]) -> Iterator[SocketNode]:
    """One of them, which is to be abused; after it, the world is as it was, and so are the open files."""
    before, links = count_open_descriptors(), [one.link_count for one in running]
    chosen = [one for one in running if one.is_leader == (request.param == "leader")][-1]
    yield chosen
    undisturbed(running)
    wait_until(lambda: count_open_descriptors() <= before, "all connections are closed")
    pairs = list(zip(running, links, strict=True))
    wait_until(lambda: all(one.link_count <= then for one, then in pairs), "the core has forgotten them")


def hello(who: Incarnation, node_timeout_s: float = NODE_TIMEOUT_S) -> Hello:
    """What a node of this job says first."""
    return Hello(who, KNOWN, 0, node_timeout_s=node_timeout_s, min_nodes=1, max_nodes=3)


def undisturbed(running: list[SocketNode]) -> None:
    """Leases are renewed on all nodes, and no world has ended or begun."""
    fences = [one.lease_expires_at for one in running]
    wait_until(
        lambda: all(one.lease_expires_at > old for one, old in zip(running, fences, strict=True)),
        "leases go on",
    )
    assert not [end for one in running for end in one.stop_effects], "the world was disturbed"
    assert all(one.worlds.empty() and one.shell.is_alive for one in running)


def recorded() -> bytes:
    """A dialler's side of a handshake that was good once."""
    return protocol.encode_greeting(RUN, NONCE) + protocol.encode_proof(
        TOKEN, "dialler", RUN, (NONCE, "1" * 64)
    )


STRANGERS = {
    "random bytes": (secrets.token_bytes(5000) + b"\n", "a line"),
    "zeros": (bytes(100_000), "more than 4096 bytes"),
    "a line without an end": (b"x" * 100_000, "more than 4096 bytes"),
    "a browser": (b"GET / HTTP/1.1\r\nHost: here\r\n\r\n", "not JSON"),
    "TLS": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\n", "not JSON"),
    "another job": (protocol.encode_greeting("another", NONCE), "belongs to job 'another'"),
    "another version": (b'{"elastic_resume":99,"run":"job","nonce":"00"}\n', "protocol version '99'"),
    "a bad nonce": (b'{"elastic_resume":4,"run":"job","nonce":"00","status_only":false}\n', "nonce"),
    "deep JSON": (b"[" * 4000 + b"\n", "not JSON"),
    "a large number": (b'{"elastic_resume":' + b"9" * 4000 + b"}\n", "a line"),
    "no proof": (protocol.encode_greeting(RUN, NONCE) + b"{}\n", "the fields proof"),
    "a wrong proof": (protocol.encode_greeting(RUN, NONCE) + b'{"proof":"' + b"0" * 64 + b'"}\n', "token"),
    "a replayed handshake": (recorded(), "token"),
    "escape codes in a name": (protocol.encode_greeting("\x1b[2J\n" * 100, NONCE), r"'\x1b[2J\n"),
}


def test_who_listens_on_or_talks_on_has_dropped_nobody() -> None:
    """What the tests below ask can be answered with no."""
    here, there = socket.socketpair()
    with here, there:
        assert not is_disconnected(here, timeout_s=0.05)
        talking = threading.Event()

        def talk() -> None:
            with contextlib.suppress(OSError):
                while not talking.is_set():
                    there.sendall(b"x" * 1000)

        thread = threading.Thread(target=talk)
        thread.start()
        assert not is_disconnected(here, timeout_s=0.05)
        talking.set()
        there.shutdown(socket.SHUT_RDWR)
        thread.join()
        assert is_disconnected(here)


@pytest.mark.parametrize("kind", STRANGERS)
def test_a_stranger_is_dropped_and_told_of(node: SocketNode, kind: str) -> None:
    """Whatever it says first, the connection is closed, and a line says who it was and why."""
    data, why = STRANGERS[kind]
    with connect(node.address) as stranger:
        with contextlib.suppress(ConnectionError):
            stranger.sendall(data)
        assert is_disconnected(stranger)
        host = stranger.getsockname()[0]
    wait_until(lambda: bool(node.log_lines("unauthenticated", why)), f"a line says {why!r}")
    line = node.log_lines("unauthenticated", why)[-1]
    assert host in line
    assert line.isprintable(), "what strangers send does not reach the terminal"


def test_a_stranger_hears_a_nonce_and_no_proof(node: SocketNode) -> None:
    """Nothing that is made from the token is said to one who has not proved that it holds it."""
    with connect(node.address) as stranger:
        stranger.sendall(protocol.encode_greeting(RUN, NONCE))
        answer = json.loads(read_line(stranger))
        assert answer.keys() == {"elastic_resume", "nonce"}
        stranger.sendall(protocol.encode_proof(b"another", "dialler", RUN, (NONCE, answer["nonce"])))
        assert read_line(stranger) == b'{"proof":""}'
        assert read_line(stranger) == b""


def test_a_peer_with_another_token_is_refused_by_both_sides(node: SocketNode) -> None:
    """The node sees it first and says so to people, and lets the dialler know why it is dropped."""
    before = len(node.log_lines("unauthenticated"))
    with (
        connect(node.address) as stranger,
        pytest.raises(protocol.ProtocolError, match="does not hold the run's token"),
    ):
        authenticate(stranger, b"another")
    wait_until(
        lambda: "does not hold the run's token" in "".join(node.log_lines("unauthenticated")[before:]),
        "a line says so",
    )


def test_a_peer_that_changes_its_mind_is_no_stranger(node: SocketNode) -> None:
    """It proves that it is one; who only says so, and has heard a proof for that, is told of."""
    before = len(node.log_lines("unauthenticated"))
    with connect(node.address) as peer:
        its = "{}:{}: ".format(*peer.getsockname())
        peer.sendall(protocol.encode_greeting(RUN, NONCE) + protocol.encode_abort(TOKEN, RUN, NONCE))
        assert is_disconnected(peer)
    with connect(node.address) as stranger:
        stranger.sendall(protocol.encode_greeting(RUN, NONCE) + protocol.encode_abort(b"another", RUN, NONCE))
        assert is_disconnected(stranger)
    wait_until(
        lambda: "the fields proof" in "".join(node.log_lines("unauthenticated")[before:]),
        "a line says so of the other",
    )
    assert its not in "".join(node.log_lines("unauthenticated"))


@pytest.mark.parametrize("greeting", [b"", protocol.encode_greeting(RUN, NONCE)], ids=["greeting", "proof"])
def test_the_handshake_as_a_whole_has_a_time_limit(tmp_path: Path, greeting: bytes) -> None:
    """Whoever sends a byte now and then is dropped before the line is complete."""
    stations = RendezvousNodes(tmp_path, ConnectionLimits(handshake_timeout_s=0.5, log_interval_s=0.01))
    (alone,) = stations.build(1)
    try:
        with connect(alone.address) as stranger:
            with contextlib.suppress(ConnectionError):
                stranger.sendall(greeting)
            babbler = EndlessSender(stranger, b" ", pause_s=0.05)  # a line of 4096 bytes would take minutes
            babbler.start()
            assert is_disconnected(stranger)
        babbler.join()
        wait_until(lambda: bool(alone.log_lines("unauthenticated", "more than 0.5 s")), "a line says so")
    finally:
        stations.stop()


def test_half_a_handshake_and_half_a_message(node: SocketNode) -> None:
    """Whoever closes in the middle of a line leaves nothing behind."""
    for size in (1, 20, 90):
        with connect(node.address) as stranger:
            stranger.sendall(protocol.encode_greeting(RUN, NONCE)[:size])
    with connect(node.address) as stranger:
        authenticate(stranger)
        stranger.sendall(b'{"header":[1,0,0,0.0],"type":"He')


def test_idle_connections_do_not_keep_members_out(node: SocketNode) -> None:
    """Five hundred that say nothing, and as many as may wait that greet and then say nothing."""
    with contextlib.ExitStack() as held:
        for _ in range(500):
            held.enter_context(connect(node.address))
        for _ in range(LIMITS.max_unauthenticated):
            held.enter_context(connect(node.address)).sendall(protocol.encode_greeting(RUN, NONCE))
        with connect(node.address) as peer:
            authenticate(peer)
            send_messages(peer, hello(Incarnation("late", "x"), node_timeout_s=1.0))
            assert isinstance(receive_message(peer), (Refused, Redirect)), (
                "somebody who holds the token is answered"
            )


def test_a_flood_of_connections_leaves_nothing(node: SocketNode) -> None:
    """A thousand that come and go; the fixture counts open files."""
    for _ in range(1000):
        with connect(node.address):
            pass


def test_memory_is_bounded_whatever_strangers_send(node: SocketNode) -> None:
    """Forty connections with as much as an unproven one may send, and forty that send no end."""
    gc.collect()
    tracemalloc.start()
    try:
        with contextlib.ExitStack() as held:
            for _ in range(40):
                held.enter_context(connect(node.address)).sendall(b"x" * 4000)
            for _ in range(40):
                stranger = held.enter_context(connect(node.address))
                babbler = EndlessSender(stranger, b"y" * MEGABYTE)
                babbler.start()
                babbler.join()
            assert tracemalloc.get_traced_memory()[1] < 8 * MEGABYTE
    finally:
        tracemalloc.stop()


GARBAGE = {
    "no JSON": (b"garbage\n", "not JSON"),
    "another type": (
        b'{"header":[1,0,0,0.0],"type":"Reboot","body":[]}\n',
        "there is no message 'Reboot'",
    ),
    "a stamp too short": (b'{"header":[1],"type":"Heartbeat","body":[]}\n', "header"),
    "a number out of range": (b'{"header":[1,0,0,0.0],"type":"ProposalAck","body":[-1]}\n', "ProposalAck"),
}


@pytest.mark.parametrize("kind", GARBAGE)
def test_a_proven_peer_that_sends_garbage_is_dropped(node: SocketNode, kind: str) -> None:
    """The token does not make up for a line that is no message."""
    data, why = GARBAGE[kind]
    with connect(node.address) as peer:
        peer.sendall(authenticate(peer).signer.sign(data))
        assert is_disconnected(peer)
    wait_until(lambda: bool(node.log_lines("unauthenticated", why)), f"a line says {why!r}")


HEARTBEAT = protocol.encode(Header(1, 0, 7, 0.5), Heartbeat())
INJECTED: dict[str, Callable[[protocol.LineAuthenticator], bytes]] = {
    "binary": lambda _: bytes(range(256)),
    "less than a digest": lambda _: b"\n",
    "no digest": lambda _: HEARTBEAT,
    "a sum that anybody can make": lambda _: b"%b%08x\n" % (HEARTBEAT[:-1], zlib.crc32(HEARTBEAT[:-1])),
    "a key that anybody can make": lambda _: protocol.LineAuthenticator(b"another").sign(HEARTBEAT),
    "a bit that has flipped": lambda seal: seal.sign(HEARTBEAT).replace(b"7", b"6", 1),
    "a line that was said before": lambda seal: seal.sign(HEARTBEAT) * 2,
    "a line without the one before": lambda seal: (seal.sign(HEARTBEAT), seal.sign(HEARTBEAT))[1],
}


@pytest.mark.parametrize("kind", INJECTED)
def test_what_is_written_into_a_proven_connection_ends_it(node: SocketNode, kind: str) -> None:
    """By somebody between two nodes, who has seen the handshake and each line, and has no token."""
    before = len(node.log_lines("unauthenticated"))
    with connect(node.address) as peer:
        peer.sendall(INJECTED[kind](authenticate(peer).signer))
        assert is_disconnected(peer)
    wait_until(
        lambda: "wrong digest" in "".join(node.log_lines("unauthenticated")[before:]), "a line says so"
    )


def test_a_proven_peer_is_held_to_the_longest_line(node: SocketNode) -> None:
    """Eight MiB are taken, one byte more is not, and none of it is kept."""
    for _ in range(3):
        with connect(node.address) as peer:
            authenticate(peer)
            with contextlib.suppress(ConnectionError):
                peer.sendall(b"[" + b" " * protocol.MAX_LINE_BYTES)
            assert is_disconnected(peer)
    wait_until(
        lambda: bool(node.log_lines("unauthenticated", f"more than {protocol.MAX_LINE_BYTES} bytes")),
        "a line says so",
    )


def test_what_waits_for_a_peer_that_never_reads_is_bounded(node: SocketNode) -> None:
    """It asks and asks and takes no answer: the backlog's limit ends it."""
    host, _, port = node.address.rpartition(":")
    with socket.socket() as peer:
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        peer.connect((host, int(port)))
        proof = authenticate(peer)
        question = hello(Incarnation("late", "x"), node_timeout_s=1.0)
        line = protocol.encode(Header(1, 0), question)
        babbler = EndlessSender(peer, lambda: b"".join(proof.signer.sign(line) for _ in range(100)))
        babbler.start()
        wait_until(
            lambda: bool(node.log_lines("unauthenticated", "has not read")),
            "it is dropped, and a line says so",
        )
    babbler.join()


def messages_of_others() -> list[Message]:
    """Every type of message, as from somebody who holds the token and is neither leader nor member."""
    who = Incarnation("unauthenticated", "x", "127.0.0.1:1", None)
    world = View(10**6, (who,), who)
    known = QuorumState(3, world, (), frozenset())
    return [
        Welcome(who, known, resumes_view=True),
        Redirect("127.0.0.1:1"),
        Refused("gone", is_permanent=True),
        JoinRequest(JoinSpec("127.0.0.1:1", 1)),
        Heartbeat(),
        ProposeView(world, known),
        ProposalAck(1),
        InstallView(10**6, "127.0.0.1:1", (1,)),
        EndView(1, "says a stranger", known),
        WaitReason("says a stranger"),
        FailJob("says a stranger"),
        NodeFinished(1),
        JobEnd(10**6, "says a stranger"),
        LeaveNotice("says a stranger", known),
        LeaderAnnouncement(who, 0, 0, 9),
    ]


def test_messages_of_a_role_that_the_peer_does_not_have_change_nothing(node: SocketNode) -> None:
    """Who has not been taken in is neither obeyed nor heeded, whatever it knows to say."""
    with connect(node.address) as peer:
        authenticate(peer)
        send_messages(peer, *messages_of_others())
        assert isinstance(receive_message(peer), (LeaderAnnouncement, Redirect)), "a lesser claim is answered"


@pytest.mark.parametrize(
    "settings", ["another timeout", "another list of candidates", "another number of nodes"]
)
def test_a_peer_with_other_settings_is_refused(node: SocketNode, settings: str) -> None:
    """By whoever leads; a member says who does."""
    who = Incarnation("late", "x", "127.0.0.1:1", None)
    ours = hello(who)
    other = {
        "another timeout": replace(ours, node_timeout_s=99.0),
        "another list of candidates": replace(ours, quorum_state=QuorumState(5)),
        "another number of nodes": replace(ours, max_nodes=4),
    }
    with connect(node.address) as peer:
        authenticate(peer)
        send_messages(peer, other[settings])
        answer = receive_message(peer)
    assert isinstance(answer, Refused if node.is_leader else Redirect)


def test_a_peer_that_takes_the_name_of_a_live_node_is_refused(node: SocketNode) -> None:
    """A second agent on one host, or one that pretends: the first keeps its place."""
    with connect(node.address) as peer:
        authenticate(peer)
        send_messages(peer, hello(Incarnation("n1", "another life", "127.0.0.1:1")))
        answer = receive_message(peer)
    assert isinstance(answer, Redirect) or (isinstance(answer, Refused) and "called n" in answer.reason)


@pytest.mark.parametrize("answers", [True, False], ids=["after an answer", "after its welcome"])
def test_a_spare_that_falls_silent_is_lost_and_nobody_else_minds(tmp_path: Path, *, answers: bool) -> None:
    """Its connection stands, half open: heartbeats end it."""
    stations = RendezvousNodes(tmp_path, LIMITS)
    (alone,) = stations.build(1, node_timeout_s=1.0)  # whose world no silence ends
    try:
        alone.worlds.get(timeout=30)
        with connect(alone.address) as peer:
            authenticate(peer)
            late = Incarnation("late", "x", "127.0.0.1:1")
            send_messages(peer, Hello(late, QuorumState(1), 0, node_timeout_s=1.0, min_nodes=1, max_nodes=1))
            assert isinstance(receive_message(peer), Welcome)
            if answers:
                send_messages(peer, Heartbeat())
            assert is_disconnected(peer)
        if answers:
            wait_until(lambda: bool(alone.log_lines("lost", "late is silent")), "the leader says so")
        undisturbed([alone])
    finally:
        stations.stop()


def test_a_thief_of_an_identity_costs_one_restart_at_most(tmp_path: Path) -> None:
    """Who holds the token is trusted with the job: it can end a world. The three are in the next one."""
    stations = RendezvousNodes(tmp_path, LIMITS)
    made = stations.build(3, node_timeout_s=1.0)

    def robs() -> bool:
        leads = [one.is_leader for one in made]
        if sum(leads) != 1:  # by the way, a processor was waited for
            return False
        leader, victim = made[leads.index(True)], made[leads.index(False)]
        with connect(leader.address) as peer:
            authenticate(peer)
            send_messages(peer, hello(victim.incarnation, node_timeout_s=1.0))
            taken_in = isinstance(receive_message(peer), Welcome)
            send_messages(peer, Heartbeat())
            # The one it pretended to be has its place back in the end.
            return taken_in and is_disconnected(peer)

    try:
        for one in made:
            one.worlds.get(timeout=30)
        wait_until(robs, "it is taken in, and dropped")
        worlds = [one.worlds.get(timeout=30) for one in made]
        while len({world.generation for world in worlds}) > 1 or len(worlds[0].members) < 3:
            oldest = min(range(3), key=lambda index: worlds[index].generation)
            worlds[oldest] = made[oldest].worlds.get(timeout=30)
        assert {str(member) for member in worlds[0].members} == {"n0", "n1", "n2"}
    finally:
        stations.stop()


def test_a_proven_peer_that_never_says_anything_is_dropped(tmp_path: Path) -> None:
    """Else each crash of a host that called would leave a connection for good."""
    stations = RendezvousNodes(tmp_path, ConnectionLimits(idle_timeout_s=1.0, log_interval_s=0.01))
    made = stations.build(2, node_timeout_s=0.5)
    try:
        for one in made:
            one.worlds.get(timeout=30)
        with connect(made[0].address) as peer:
            authenticate(peer)
            assert is_disconnected(peer)
        wait_until(lambda: bool(made[0].log_lines("unauthenticated", "has sent nothing")), "a line says so")
    finally:
        stations.stop()


def test_connections_beyond_the_limit_are_dropped_and_the_members_stay(tmp_path: Path) -> None:
    """Who is in is not pushed out by who comes later, even with the token."""
    stations = RendezvousNodes(tmp_path, ConnectionLimits(max_connections=20, log_interval_s=0.01))
    made = stations.build(3)
    try:
        for one in made:
            one.worlds.get(timeout=30)
        leader = next(one for one in made if one.is_leader)
        with contextlib.ExitStack() as held:
            for _ in range(16):
                authenticate(held.enter_context(connect(leader.address)))
            for _ in range(10):
                with contextlib.suppress(ConnectionError, protocol.ProtocolError):
                    authenticate(held.enter_context(connect(leader.address)))
            wait_until(
                lambda: bool(leader.log_lines("unauthenticated", "are open already")), "a line says so"
            )
            undisturbed(made)
    finally:
        stations.stop()


# ---- what is told of strangers, and who is sent away ---------------------------------------------------


class Clock:
    """Keeps what is to be called later."""

    def __init__(self) -> None:
        self.due: list[tuple[float, object]] = []
        self.told: list[str] = []

    def call_later(self, delay_s: float, call: object) -> None:
        """Keep it."""
        self.due.append((delay_s, call))

    def advance(self) -> float:
        """Let the next pause be over; give its length."""
        delay_s, call = self.due.pop(0)
        assert callable(call)
        call()
        return delay_s


def test_one_line_tells_of_one_stranger_and_one_of_all_who_follow() -> None:
    """A flood fills no log: the first is told at once, the rest are counted, and the pauses grow."""
    clock = Clock()
    notices = LogThrottle(10.0, clock.told.append, clock.call_later)
    notices.add("10.0.0.1:5", "not JSON")
    assert clock.told == ["10.0.0.1:5: not JSON"]
    for host in range(20):
        notices.add(f"10.0.0.{host}:5", "no token")
        notices.add(f"10.0.0.{host}:6", "not JSON")
    assert len(clock.told) == 1
    assert clock.advance() == 10.0
    assert clock.told[1].startswith("40 more in the last 10 s: 10.0.0.0 (2 times, last: not JSON); ")
    assert clock.told[1].endswith("; other hosts (30 times)")
    notices.add("10.0.0.1:5", "again")
    assert clock.advance() == 20.0
    assert len(clock.told) == 3
    assert clock.advance() == 40.0
    assert (len(clock.told), clock.due) == (3, []), "nobody came: nothing is told, and no timer is left"
    notices.add("10.0.0.1:5", "much later")
    assert clock.told[3] == "10.0.0.1:5: much later"


class Caller:
    """A connection at the door."""

    def __init__(self, *, greeted: bool) -> None:
        self.has_greeted = greeted
        self.why = ""

    def drop(self, why: str) -> None:
        """Keep the reason."""
        self.why = why


def test_the_silent_go_before_those_who_greeted_and_the_oldest_first() -> None:
    """A member greets at once, so a flood of the silent does not push it out; nor is the newest sent away."""
    door = HandshakeLimiter(2)
    old, silent, new = Caller(greeted=True), Caller(greeted=False), Caller(greeted=False)
    for one in (old, silent, new):
        door.add(one)  # type: ignore[arg-type]
    assert (old.why, bool(silent.why), new.why) == ("", True, "")
