"""The virtual network: real namespaces, real sockets inside them, and links that drop packets.

A socket belongs to the network in which it was made. So a process on a node makes each socket and sends it to
the test, which holds both ends of a connection.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil
import pytest

from elastic_resume.errors import MachineError, UsageError
from elastic_resume.testing import Cluster
from elastic_resume.testing.virtual_network import INTERFACE, VirtualNetwork, unavailable_reason
from tests.support.processes import is_alive, wait_for

pytestmark = pytest.mark.cluster

PORT = 29400
ESTABLISHED, SYN_SENT = 1, 2
PATIENCE_S = 60.0
MAKE_SOCKET = """
import socket, sys
with socket.socket(socket.AF_INET, int(sys.argv[2])) as made, socket.socket(fileno=int(sys.argv[1])) as way:
    socket.send_fds(way, [b"."], [made.fileno()])
"""
OWNER = """
import ctypes, signal, subprocess, sys
from elastic_resume.testing.virtual_network import VirtualNetwork
hosts = VirtualNetwork(2)
die = lambda: ctypes.CDLL(None).prctl(1, int(signal.SIGKILL), 0, 0, 0)
bound = subprocess.Popen(hosts.wrap_command(0, ["sleep", "600"]), preexec_fn=die)
print(bound.pid, flush=True)
signal.pause()
"""

Pairs = set[tuple[int, int]]


def open_socket(hosts: VirtualNetwork, index: int, kind: int = socket.SOCK_STREAM) -> socket.socket:
    """Return a socket of a node's network."""
    here, there = socket.socketpair()
    with here, there:
        python = [sys.executable, "-S", "-c", MAKE_SOCKET, str(there.fileno()), str(int(kind))]
        subprocess.run(hosts.wrap_command(index, python), pass_fds=[there.fileno()], check=True)
        made = socket.socket(fileno=socket.recv_fds(here, 1, 1)[1][0])
    made.settimeout(PATIENCE_S)
    return made


def connect(hosts: VirtualNetwork, client: int, server: int) -> tuple[socket.socket, socket.socket]:
    """Connect two nodes; return the ends of client and server. The server sends keep-alive probes."""
    with open_socket(hosts, server) as listener:
        listener.bind((hosts.address(server), PORT))
        listener.listen()
        near = open_socket(hosts, client)
        near.connect((hosts.address(server), PORT))
        far, _ = listener.accept()
    far.settimeout(PATIENCE_S)
    far.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    far.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 1)
    far.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
    far.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 100)
    return near, far


def tcp(connection: socket.socket) -> tuple[int, int, int]:
    """Return state, unanswered retransmissions and probes of a connection (tcp_info in linux/tcp.h)."""
    state, _, retransmits, probes = struct.unpack(
        "4B", connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 4)
    )
    return state, retransmits, probes


def is_silent(connection: socket.socket, state: int = ESTABLISHED) -> bool:
    """Return whether nothing was received, no error is pending, and the state is unchanged."""
    readable, _, _ = select.select([connection], [], [], 0)
    error = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    return not readable and error == 0 and tcp(connection)[0] == state


def open_namespaces() -> set[str]:
    """Return the network namespaces that descriptors of this process keep alive."""
    found = set()
    for each in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # the descriptor that lists them
            found.add(str(each.readlink()))
    return {name for name in found if name.startswith("net:")}


class Shouts:
    """A datagram socket on every node; `heard` returns which node reached which at each shout."""

    def __init__(self, hosts: VirtualNetwork) -> None:
        self.hosts = hosts
        self.sockets = [open_socket(hosts, index, socket.SOCK_DGRAM) for index in range(len(hosts))]
        for index, each in enumerate(self.sockets):
            each.bind((hosts.address(index), PORT))

    def shout(self, word: str) -> None:
        """Send the word from every node to every other."""
        for sender, each in enumerate(self.sockets):
            for receiver in range(len(self.sockets)):
                if receiver != sender:
                    each.sendto(f"{word} {sender}".encode(), (self.hosts.address(receiver), PORT))

    def heard(self) -> dict[str, Pairs]:
        """Heal the network, send "roll" and receive up to it; return the pairs that were reached, by word."""
        self.hosts.heal()
        self.shout("roll")
        found: dict[str, Pairs] = {}
        for receiver, each in enumerate(self.sockets):
            rest = set(range(len(self.sockets))) - {receiver}
            while rest:
                word, sender = each.recv(100).decode().split()
                found.setdefault(word, set()).add((int(sender), receiver))
                rest -= {int(sender)} if word == "roll" else set()
        return found

    def close(self) -> None:
        """Close the sockets."""
        for each in self.sockets:
            each.close()


def within(*groups: set[int]) -> Pairs:
    """Return the pairs of nodes that are in one group."""
    return {(a, b) for group in groups for a in group for b in group if a != b}


@pytest.fixture(autouse=True)
def possible() -> None:
    """Skip where namespaces are not available; in CI that is a failure."""
    why = unavailable_reason()
    if why and "CI" not in os.environ:
        pytest.skip(why)
    assert not why


@pytest.fixture
def five() -> Iterator[VirtualNetwork]:
    """Yield a network of five nodes."""
    with VirtualNetwork(5) as hosts:
        yield hosts


@pytest.fixture
def shouts(five: VirtualNetwork) -> Iterator[Shouts]:
    """Yield sockets on five nodes."""
    with contextlib.closing(Shouts(five)) as made:
        yield made


@pytest.fixture
def pair(five: VirtualNetwork) -> Iterator[tuple[socket.socket, socket.socket]]:
    """Yield a connection from node 0 to node 1."""
    near, far = connect(five, 0, 1)
    with near, far:
        yield near, far


# ---- links -------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("lost", [0, 1])
def test_cut_keeps_connection_until_link_is_restored(
    five: VirtualNetwork, pair: tuple[socket.socket, socket.socket], lost: int
) -> None:
    """Neither end gets a reset or an error, and data sent meanwhile arrives."""
    near, far = pair
    five.cut(lost)
    near.sendall(b"sent into silence")
    wait_for(lambda: tcp(near)[1] >= 3, "retransmissions")
    wait_for(lambda: tcp(far)[2] >= 2, "keep-alive probes")
    assert is_silent(near)
    assert is_silent(far)
    five.restore_link(lost)
    assert far.recv(100) == b"sent into silence"
    far.sendall(b"and back")
    assert near.recv(100) == b"and back"


@pytest.mark.slow
def test_reset_of_cut_node_does_not_arrive(
    five: VirtualNetwork, pair: tuple[socket.socket, socket.socket]
) -> None:
    """After the cut the peer gets a reset when it sends a probe."""
    near, far = pair
    five.cut(0)
    near.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    near.close()
    wait_for(lambda: tcp(far)[2] >= 2, "keep-alive probes")
    assert is_silent(far)
    five.restore_link(0)
    with pytest.raises(ConnectionResetError):
        far.recv(1)


def test_cut_link_one_way_drops_one_direction(five: VirtualNetwork, shouts: Shouts) -> None:
    """All other links work."""
    five.cut_link(0, 1, one_way=True)
    shouts.shout("one")
    five.cut_link(1, 0, one_way=True)
    shouts.shout("both")
    five.restore_link(1)
    five.cut_link(3, 2)
    shouts.shout("another")
    heard = shouts.heard()
    everybody = within({0, 1, 2, 3, 4})
    assert everybody - heard["one"] == {(0, 1)}
    assert everybody - heard["both"] == {(0, 1), (1, 0)}
    assert everybody - heard["another"] == {(2, 3), (3, 2)}


def test_silence_links_twice_needs_both_to_be_undone(five: VirtualNetwork, shouts: Shouts) -> None:
    """`restore_link` does not undo them."""
    one = five.silence_links({(1, 0), (1, 2)})
    other = five.silence_links({(1, 2), (3, 2)})
    five.restore_link(1)
    one()
    shouts.shout("one")
    five.cut(3)
    other()
    other()
    shouts.shout("cut")
    heard = shouts.heard()
    everybody = within({0, 1, 2, 3, 4})
    assert everybody - heard["one"] == {(1, 2), (3, 2)}
    assert heard["cut"] == within({0, 1, 2, 4})


@pytest.mark.parametrize("groups", [[{0, 1}, {2, 3, 4}], [{0, 3}, {1, 4}, {2}], [{0}, {1}, {2}, {3}, {4}]])
def test_partition_separates_groups(five: VirtualNetwork, shouts: Shouts, groups: Sequence[set[int]]) -> None:
    """Nodes reach all nodes of their group and no other, and all nodes after `heal`."""
    five.partition([{0, 1, 2}, {3, 4}])  # which the next one replaces
    five.partition(groups)
    shouts.shout("parted")
    heard = shouts.heard()
    assert heard.get("parted", set()) == within(*groups)
    assert heard["roll"] == within({0, 1, 2, 3, 4})


def test_cluster_uses_given_network(five: VirtualNetwork, shouts: Shouts, tmp_path: Path) -> None:
    """Its nodes have the network's addresses, and its cuts and partitions act on the network."""
    with Cluster(tmp_path, nodes=5, hosts=five) as cluster:
        assert [node.address for node in cluster.nodes] == [five.address(index) for index in range(5)]
        cluster.network.partition([{0, 1}, {2, 3, 4}])
        cluster.network.cut(4)
        shouts.shout("cut")
        cluster.network.restore_link(4)
        shouts.shout("parted")
        cluster.network.heal()
        shouts.shout("healed")
    heard = shouts.heard()
    assert heard["cut"] == within({0, 1}, {2, 3})
    assert heard["parted"] == within({0, 1}, {2, 3, 4})
    assert heard["healed"] == heard["roll"]


# ---- processes ---------------------------------------------------------------------------------------


def test_wrap_command_keeps_process_id_and_environment(five: VirtualNetwork, tmp_path: Path) -> None:
    """Process id, directory and environment are unchanged; the network is the node's."""
    script = "import os, socket; print(os.getpid(), os.getcwd(), os.environ['WORD'], socket.if_nameindex())"
    with subprocess.Popen(
        five.wrap_command(3, [sys.executable, "-S", "-c", script]),
        stdout=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "WORD": "kept"},
    ) as process:
        said, _ = process.communicate()
    pid, folder, word, interfaces = said.split(maxsplit=3)
    assert (int(pid), folder, word) == (process.pid, str(tmp_path), "kept")
    assert INTERFACE in interfaces
    assert INTERFACE not in dict(psutil.net_if_addrs())


def test_killed_owner_takes_processes_and_links_along() -> None:
    """The kernel ends the processes bound to the owner, and the network."""
    with subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        bound = psutil.Process(int(owner.stdout.readline()))
        wait_for(lambda: bound.name() == "sleep", "the command")
        kept = os.open(f"/proc/{bound.pid}/ns/net", os.O_RDONLY)
        network = f"--net=/proc/{os.getpid()}/fd/{kept}"
        look = ["nsenter", network, "ip", "link", "show", INTERFACE]
        try:
            assert subprocess.run(look, capture_output=True, check=False).returncode == 0
            owner.kill()
            wait_for(lambda: not is_alive(bound.pid), "its end")
            # The namespace itself is held here; the other end of its link was held by the owner alone.
            wait_for(lambda: subprocess.run(look, capture_output=True, check=False).returncode, "its link")
        finally:
            os.close(kept)


def test_close_kills_all_processes_inside() -> None:
    """Also processes that were not started here; a second close does nothing."""
    hosts = VirtualNetwork(2)
    shell = ["sh", "-c", "setsid sleep 600 & echo $!; exec sleep 600"]
    with subprocess.Popen(hosts.wrap_command(1, shell), stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        started = psutil.Process(int(process.stdout.readline()))
        hosts.close()
        assert process.wait() == -signal.SIGKILL
        # It has left its network, which may be a moment before it is seen to have ended.
        wait_for(lambda: not is_alive(started.pid), "its end")
    hosts.close()
    with pytest.raises(UsageError, match="closed"):
        hosts.wrap_command(0, ["true"])


def test_network_leaves_no_trace_on_host() -> None:
    """No mount, name or interface exists on the host, and no namespace stays open afterwards."""
    with VirtualNetwork(2) as hosts:
        inside = subprocess.check_output(hosts.wrap_command(0, ["readlink", "/proc/self/ns/net"]), text=True)
        assert inside.strip() not in Path("/proc/self/mountinfo").read_text()
        assert inside.strip() in open_namespaces()
        links = [str(each.address) for found in psutil.net_if_addrs().values() for each in found]
        assert not [address for address in links if address.startswith("02:65:72:")]
        assert hosts.address(0) not in links
    assert inside.strip() not in open_namespaces()


# ---- what cannot be ----------------------------------------------------------------------------------


def test_missing_tools_are_named_with_packages(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """`unavailable_reason` and the error name the tool and the package."""
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "nsenter" in unavailable_reason()
    assert "apt-get install" in unavailable_reason()
    assert "util-linux" in unavailable_reason()
    with pytest.raises(MachineError, match="util-linux"):
        VirtualNetwork(2)


def test_missing_capabilities_are_named() -> None:
    """Root without capabilities, as in a container."""
    script = (
        "from elastic_resume.testing.virtual_network import unavailable_reason; print(unavailable_reason())"
    )
    bare = ["setpriv", "--bounding-set=-all", "--inh-caps=-all", sys.executable, "-c", script]
    said = subprocess.run(bare, capture_output=True, text=True, check=True).stdout
    assert "CAP_NET_ADMIN" in said
    assert "unshare" in said


def test_wrong_use_is_refused(five: VirtualNetwork, tmp_path: Path) -> None:
    """A partition names each node once; indices, and the number of nodes, have bounds."""
    for groups in ([{0, 1}, {2, 3}], [{0, 1, 2}, {2, 3, 4}], [{0, 1, 2, 3, 4, 5}], []):
        with pytest.raises(UsageError, match="each once"):
            five.partition(groups)
    for wrong, message in (
        (lambda: five.cut(-1), "0 to 4"),
        (lambda: five.cut_link(0, 5), "0 to 4"),
        (lambda: VirtualNetwork(0), "1 to 250"),
        (lambda: Cluster(tmp_path, nodes=6, hosts=five), "0 to 4"),
        (lambda: Cluster(tmp_path).network.cut(0), 'hosts="namespaces", which takes'),
    ):
        with pytest.raises(UsageError, match=message):
            wrong()
