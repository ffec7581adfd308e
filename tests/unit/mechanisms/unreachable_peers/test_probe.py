"""Which members an agent dials, when, and what it reports.

A listener whose queue is full drops a call without an answer.
"""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from unittest.mock import Mock

import pytest

from elastic_resume.mechanisms.mechanism import decode_body
from elastic_resume.mechanisms.unreachable_peers import probe as peer_probe
from elastic_resume.mechanisms.unreachable_peers.judge import UNREACHABLE, UnreachablePeers
from elastic_resume.mechanisms.unreachable_peers.probe import (
    MAX_PEERS,
    PeerProbe,
    find_unreachable,
    list_peers,
)
from elastic_resume.policy.failure_classification import EXCEPTION, SIGNAL, Failure, WorkerEnd
from elastic_resume.rendezvous.core.interface import StartWorkers
from elastic_resume.rendezvous.core.world import Incarnation
from elastic_resume.rendezvous.facts import FactBody
from tests.support.agent_parts import make_agent_context
from tests.support.processes import wait_for

CONNECT_TIMEOUT = "Gloo connectFullMesh failed with [transport/tcp/pair.h:311] Connect timeout [none]"
NO_ROUTE = "[enforce fail at socket.cc:142] rv != -1. -1 vs -1. connect: No route to host"
NCCL = "NCCL error in: x.cpp:77, unhandled system error (run with NCCL_DEBUG=INFO for details)"
CLOSED = "Connection closed by peer [10.0.0.2]:29400"


def start(rank: int, nodes: str, generation: int = 1) -> StartWorkers:
    """Return a view with this node at a rank."""
    members = tuple(Incarnation(node, node, 1, f"{node}:1") for node in nodes)
    return StartWorkers(generation, rank, members, "a:2", (1,) * len(members))


@contextlib.contextmanager
def listen(*, drops_calls: bool) -> Iterator[str]:
    """Listen; with `drops_calls` the queue is full."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        if drops_calls:
            stack.enter_context(socket.create_connection(listener.getsockname()))
        yield f"127.0.0.1:{listener.getsockname()[1]}"


@dataclass
class Network:
    """The nodes that do not answer, the dialled and the reported ones."""

    cut_off: str = ""
    has_sign: bool = True
    has_resumed: bool = False
    dialled: list[str] = field(default_factory=list)
    reports: list[tuple[int, tuple[str, ...]]] = field(default_factory=list)

    def keep_fact(self, topic: str, generation: int, body: FactBody) -> None:
        """Stand for the client."""
        assert topic == UNREACHABLE.name
        self.reports.append((generation, decode_body(UnreachablePeers, body).nodes))

    def find(self, members: list[Incarnation], _: float) -> tuple[Incarnation, ...]:
        """Stand for `find_unreachable`."""
        self.dialled.append("".join(member.node for member in members))
        return tuple(member for member in members if member.node in self.cut_off)


@pytest.fixture
def network(monkeypatch: pytest.MonkeyPatch) -> Network:
    """A network in the place of sockets."""
    made = Network()
    monkeypatch.setattr(peer_probe, "find_unreachable", made.find)
    monkeypatch.setattr(peer_probe, "find_silent_hosts", lambda: {"10.0.0.4"} if made.has_sign else set())
    monkeypatch.setattr(peer_probe, "_resolve", lambda member: {f"10.0.0.{'abcd'.index(member.node) + 1}"})
    return made


@pytest.fixture
def probe(network: Network, monkeypatch: pytest.MonkeyPatch) -> PeerProbe:
    """A probe on rank 1 of four nodes, which looks at each poll."""
    made = PeerProbe(
        make_agent_context(read_evidence=lambda: [{"event": "worker-start"}] * network.has_resumed)
    )
    monkeypatch.setattr(made._thread, "start", lambda: None)
    made.start(Mock(node="b", send_fact=network.keep_fact))
    made.begin_generation(start(1, "abcd"))
    return made


def test_peers_of_the_nearest_ranks_are_dialled_first() -> None:
    """At most `MAX_PEERS`; a single node has none."""
    assert [peer.node for peer in list_peers(start(0, "abcdef"))] == list("bfced")
    assert [peer.node for peer in list_peers(start(5, "abcdef"))] == list("aebdc")
    assert list_peers(start(0, "a")) == []
    assert len(list_peers(start(0, "a" * 200))) == MAX_PEERS


def test_only_a_host_that_does_not_answer_is_unreachable() -> None:
    """The leader learns of dead processes by itself, and a name that is unknown here proves nothing."""
    with listen(drops_calls=False) as alive, listen(drops_calls=True) as silent:
        with socket.create_server(("127.0.0.1", 0)) as ended:
            refused = f"127.0.0.1:{ended.getsockname()[1]}"
        members = [
            Incarnation(name, name, 1, address)
            for name, address in (("a", alive), ("b", silent), ("c", refused), ("d", "no.such.invalid:1"))
        ]
        assert [member.node for member in find_unreachable(members, 0.6)] == ["b"]


def test_connection_of_a_worker_without_an_answer_is_a_sign() -> None:
    """A connection of another process on the machine is none; nor is one that has been answered."""
    code = "import socket, sys; host, port = sys.argv[1].split(':'); socket.create_connection((host, port))"
    with listen(drops_calls=True) as silent:
        assert not peer_probe.find_silent_hosts()
        with subprocess.Popen([sys.executable, "-I", "-S", "-c", code, silent]) as worker:
            assert wait_for(peer_probe.find_silent_hosts, "the worker's call") == {"127.0.0.1"}
            worker.kill()
        assert not peer_probe.find_silent_hosts()


def test_unreachable_members_are_reported_once_and_again_when_they_answer(
    network: Network, probe: PeerProbe
) -> None:
    """After the report only those are dialled."""
    network.cut_off = "d"
    for _ in range(3):
        probe.poll()
    assert network.dialled == ["cad", "d", "d"]
    assert network.reports == [(1, ("d",))]
    assert probe.list_unreachable_nodes() == ("d",)
    network.cut_off = ""
    probe.poll()
    assert network.reports == [(1, ("d",)), (1, ())]
    assert probe.list_unreachable_nodes() == ()


def test_nobody_is_dialled_without_a_sign(network: Network, probe: PeerProbe) -> None:
    """Nor on a single node."""
    network.has_sign = False
    probe.poll()
    assert network.dialled == []
    network.has_sign = True
    probe.begin_generation(start(0, "a", 2))
    probe.poll()
    assert network.dialled == []


def test_only_members_on_the_silent_host_are_dialled_after_a_resume(
    network: Network, probe: PeerProbe
) -> None:
    """Nor is anybody after a failure: it may have waited for any reason."""
    network.has_resumed = True
    probe.handle_failure(Failure(EXCEPTION, "b", 1, WorkerEnd(), "RuntimeError", CONNECT_TIMEOUT))
    probe.poll()
    assert network.dialled == ["d"]


@pytest.mark.parametrize(
    ("failure", "dialled"),
    [
        (Failure(EXCEPTION, "b", 1, WorkerEnd(), "RuntimeError", CONNECT_TIMEOUT), ["cad"]),
        (Failure(EXCEPTION, "b", 1, WorkerEnd(), "RuntimeError", NO_ROUTE), ["cad"]),
        (Failure(EXCEPTION, "b", 1, WorkerEnd(), "DistBackendError", NCCL), ["cad"]),
        (Failure(EXCEPTION, "b", 1, WorkerEnd(), "RuntimeError", CLOSED), []),
        (Failure(EXCEPTION, "b", 1, WorkerEnd(), "ValueError", "wrong"), []),
        (Failure(SIGNAL, "b", 1, WorkerEnd(signal="SIGKILL")), []),
    ],
)
def test_failed_connection_of_a_worker_is_a_sign(
    network: Network, probe: PeerProbe, failure: Failure, dialled: list[str]
) -> None:
    """Messages of gloo and NCCL. A connection that a peer closed was possible."""
    probe.handle_failure(failure)
    assert network.dialled == dialled


def test_node_that_is_left_out_is_dialled_until_it_answers(network: Network, probe: PeerProbe) -> None:
    """It may not know of the pair. It is no cause of a failure in the generation without it."""
    network.cut_off = "d"
    probe.poll()
    probe.begin_generation(start(1, "abc", 2))
    assert probe.list_unreachable_nodes() == ()
    network.has_sign, network.cut_off = False, ""
    probe.poll()
    assert network.reports == [(1, ("d",)), (2, ("d",)), (2, ())]


def test_new_generation_with_a_node_forgets_what_was_found(network: Network, probe: PeerProbe) -> None:
    """Its workers try again."""
    network.cut_off = "d"
    probe.poll()
    probe.begin_generation(start(1, "abcd", 2))
    network.has_sign = False
    probe.poll()
    assert network.reports == [(1, ("d",)), (2, ())]
