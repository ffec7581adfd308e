"""Find members that this node's workers cannot reach, although both sides reach the leader.

Workers notice a cut link late: gloo and the kernel repeat what they send for minutes. So `PeerProbe` looks
each second for a TCP connection of a worker whose other host does not answer. It then dials the agents of the
other members; once the workers have resumed, only those on that host. It also dials when a worker fails at
its start because it could not connect. In all other cases it dials no node: a firewall may block connections
between agents that training does not need.

The leader ends the generation and leaves out one of the two nodes. After its report the probe continues on
both, and reports again when all nodes answer.
"""

from __future__ import annotations

import contextlib
import re
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil

from elastic_resume.background import BackgroundThread
from elastic_resume.mechanisms.mechanism import AgentContext, AgentPart, encode_body
from elastic_resume.mechanisms.unreachable_peers.judge import UNREACHABLE, UnreachablePeers
from elastic_resume.policy.failure_classification import Failure, make_network_failure
from elastic_resume.rendezvous.client import RendezvousClient
from elastic_resume.rendezvous.core.interface import StartWorkers
from elastic_resume.rendezvous.core.world import Incarnation

MIN_RETRANSMITS = 2
"""Times that the kernel has repeated what is not acknowledged: after 0.6 s, or 3 s for a new connection."""
MAX_PAUSE_S = 60.0
"""Between two rounds of dialling, while all members answer."""
ATTEMPTS = 3
"""Together they take a node timeout. By then the leader has lost a node that nobody reaches."""
MAX_PEERS = 64
MAX_PARALLEL_DIALS = 16
# "unhandled system error" is NCCL's, also for a connection that failed.
_ESTABLISHED, _SYN_SENT = "01", "02"
_FAILED_CONNECT_PATTERN = re.compile(
    r"time(d |-)?out|no route to host|unreachable|unhandled system error", re.IGNORECASE
)


class PeerProbe(AgentPart):
    """Looks for unreachable members in a thread, from `start` to `close`."""

    def __init__(self, context: AgentContext) -> None:
        self._node_timeout_s = context.node_timeout_s
        self._read_evidence = context.read_evidence
        self._client: RendezvousClient | None = None
        self._view: StartWorkers | None = None
        self._unreachable: list[Incarnation] = []
        """The nodes that did not answer: members of this generation, or nodes that it leaves out."""
        self._dial_at = self._pause_s = 0.0
        self._thread = BackgroundThread("peer-probe", self.poll)

    def start(self, client: RendezvousClient) -> None:
        """Begin to look."""
        self._client = client
        self._thread.start()

    def close(self) -> None:
        """Look no more; a dial that is under way is not awaited."""
        self._thread.request_close()

    def find_failures(self) -> tuple[Failure, ...]:
        """Return the failure of a node that cannot reach members of this generation."""
        nodes = self.list_unreachable_nodes()
        return (make_network_failure(self._client.node, nodes),) if nodes and self._client else ()

    def list_unreachable_nodes(self) -> tuple[str, ...]:
        """Return the names of the members of this generation that did not answer, since it began here."""
        members = {member.node for member in self._view.members} if self._view else set()
        return tuple(member.node for member in self._unreachable if member.node in members)

    def begin_generation(self, view: StartWorkers) -> None:
        """Forget what was found about these members, and report the rest; the workers start now."""
        members = {member.node for member in view.members}
        self._dial_at, self._pause_s = 0.0, self._node_timeout_s
        self._view = view
        before = self._unreachable
        self._unreachable = [node for node in before if node.node not in members]
        if before:
            self._report(view.generation, tuple(node.node for node in self._unreachable))

    def handle_failure(self, failure: Failure) -> None:
        """Dial the other members if a worker has failed because it could not connect to one."""
        is_failed_connect = _FAILED_CONNECT_PATTERN.search(f"{failure.type} {failure.message}")
        is_new = self._view and not self.list_unreachable_nodes() and not self._has_resumed()
        if self._view and is_new and is_failed_connect:
            self._dial(self._view, list_peers(self._view))

    def poll(self) -> float:
        """Look once; return the seconds until the next time."""
        view, now, peers = self._view, time.monotonic(), []
        is_due = view and now >= self._dial_at and not self.list_unreachable_nodes()
        if view and is_due and (hosts := find_silent_hosts()):
            self._dial_at, self._pause_s = now + self._pause_s, min(2 * self._pause_s, MAX_PAUSE_S)
            peers = list_peers(view)
            if self._has_resumed():  # the silent host may be a file server, and a firewall between agents
                peers = [peer for peer in peers if not hosts.isdisjoint(_resolve(peer))]
        if view and (peers or self._unreachable):
            self._dial(view, peers)
        return self._node_timeout_s / ATTEMPTS

    def _has_resumed(self) -> bool:
        """Return whether a worker of this generation has come out of `er.resume`."""
        return any(event["event"] == "worker-start" for event in self._read_evidence())

    def _report(self, generation: int, nodes: tuple[str, ...]) -> None:
        if self._client:
            self._client.send_fact(UNREACHABLE.name, generation, encode_body(UnreachablePeers(nodes)))

    def _dial(self, view: StartWorkers, peers: Sequence[Incarnation]) -> None:
        """Dial these members, and the nodes that did not answer before."""
        before = self._unreachable
        unreachable = find_unreachable([*before, *peers], self._node_timeout_s)
        if view is self._view and unreachable != before:
            self._unreachable = unreachable
            self._report(view.generation, tuple(member.node for member in unreachable))


def list_peers(view: StartWorkers) -> list[Incarnation]:
    """Return the other members, those of the nearest ranks first, at most `MAX_PEERS`."""
    size = len(view.members)
    distances = sorted(range(1, size), key=lambda distance: min(distance, size - distance))
    return [view.members[(view.rank + distance) % size] for distance in distances[:MAX_PEERS]]


def find_unreachable(members: Sequence[Incarnation], timeout_s: float) -> list[Incarnation]:
    """Return the members whose hosts answer no attempt; the attempts to one of them take ``timeout_s``."""
    for _ in range(ATTEMPTS):
        with ThreadPoolExecutor(MAX_PARALLEL_DIALS, "peer-probe") as pool:
            answers = list(pool.map(lambda member: _answers(member, timeout_s / ATTEMPTS), members))
        members = [member for member, has_answered in zip(members, answers, strict=True) if not has_answered]
    return list(members)


def _answers(member: Incarnation, timeout_s: float) -> bool:
    """Return whether a member's host answers. A refusal is an answer; an unknown name proves nothing."""
    host, _, port = member.address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout_s).close()
    except (ConnectionRefusedError, socket.gaierror):
        return True
    except OSError:
        return False
    return True


def find_silent_hosts() -> set[str]:
    """Return the IP addresses to which processes below this one send over TCP without an answer."""
    sockets = dict(_list_unanswered_sockets())
    if not sockets:
        return set()
    open_files: set[str] = set()
    for process in psutil.Process().children(recursive=True):
        open_files |= _list_open_files(process.pid)
    return {host for file, host in sockets.items() if file in open_files}


def _list_unanswered_sockets() -> Iterator[tuple[str, str]]:
    """Yield each socket of this network namespace that sends again, with the other IP address.

    The format is that of the kernel's proc_net_tcp.txt; addresses are words in the byte order of the host.
    """
    for name in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):  # no IPv6
            for line in Path(f"/proc/self/net/{name}").read_text().splitlines()[1:]:
                fields = line.split()
                remote, state, retransmits, inode = fields[2], fields[3], fields[6], fields[9]
                if state in (_ESTABLISHED, _SYN_SENT) and int(retransmits, 16) >= MIN_RETRANSMITS:
                    yield f"socket:[{inode}]", _parse_address(remote.partition(":")[0])


def _parse_address(text: str) -> str:
    words = [int(text[at : at + 8], 16).to_bytes(4, sys.byteorder) for at in range(0, len(text), 8)]
    family = socket.AF_INET if len(words) == 1 else socket.AF_INET6
    return socket.inet_ntop(family, b"".join(words)).removeprefix("::ffff:")


def _resolve(member: Incarnation) -> set[str]:
    """Return the IP addresses of a member's agent; none if its name cannot be resolved."""
    host = member.address.rpartition(":")[0].strip("[]")
    with contextlib.suppress(OSError):
        return {str(address[4][0]) for address in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
    return set()


def _list_open_files(pid: int) -> set[str]:
    files = set()
    with contextlib.suppress(OSError):  # the process has ended
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                files.add(str(entry.readlink()))
    return files
