"""Packet loss and rate limits of simulated nodes' links, measured with real packets."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest

from elastic_resume.errors import MachineError, UsageError
from elastic_resume.testing.virtual_network import VirtualNetwork

pytestmark = pytest.mark.slow

PACKETS = 3000
MB = 1 << 20

COUNT = """
import socket
door = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
door.setsockopt(socket.SOL_SOCKET, 33, 8 << 20)  # SO_RCVBUFFORCE: room for all
door.bind(("0.0.0.0", 9000))
print("ready", flush=True)
got = 0
while (word := door.recv(100)) != b"end":
    got += word != b"end"
print(got)
"""
SEND = """
import socket, sys
line = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
there = (sys.argv[1], 9000)
for number in range(int(sys.argv[2])):
    line.sendto(b"packet", there)
for _ in range(200):
    line.sendto(b"end", there)  # one of them arrives
"""
TAKE = """
import socket, time
door = socket.create_server(("0.0.0.0", 9001))
print("ready", flush=True)
line, _ = door.accept()
began, got = time.monotonic(), 0
line.sendall(b".")  # nothing is on its way before that, not even if this process stood still
while data := line.recv(1 << 16):
    got += len(data)
print(round(got / (time.monotonic() - began)))
"""
GIVE = """
import socket, sys
with socket.create_connection((sys.argv[1], 9001)) as line:
    line.recv(1)
    line.sendall(bytes(int(sys.argv[2])))
"""


@pytest.fixture(scope="module")
def hosts() -> Iterator[VirtualNetwork]:
    """Yield three nodes for all tests; each test undoes its faults."""
    with VirtualNetwork(3) as made:
        yield made


def carried(hosts: VirtualNetwork, sender: int, receiver: int, programs: tuple[str, str], size: int) -> int:
    """Run two programs, one on each node; return the number that the receiving program prints."""
    there = hosts.wrap_command(receiver, [sys.executable, "-I", "-S", "-c", programs[1]])
    here = hosts.wrap_command(sender, [sys.executable, "-I", "-S", "-c", programs[0]])
    with subprocess.Popen(there, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        subprocess.run([*here, hosts.address(receiver), str(size)], check=True, timeout=60)
        return int(process.stdout.read())


def lost(hosts: VirtualNetwork, sender: int, receiver: int) -> float:
    """Return the share of the packets that did not arrive."""
    return 1 - carried(hosts, sender, receiver, (SEND, COUNT), PACKETS) / PACKETS


def rate(hosts: VirtualNetwork, sender: int, receiver: int, size: int) -> int:
    """Return the bytes per second of a TCP connection."""
    return carried(hosts, sender, receiver, (GIVE, TAKE), size)


def test_lose_packets_drops_this_share_both_ways(hosts: VirtualNetwork) -> None:
    """Other links lose no packet, and the link loses none after `heal`."""
    hosts.lose_packets(0, 30)
    assert lost(hosts, 0, 1) == pytest.approx(0.3, abs=0.05)
    assert lost(hosts, 1, 0) == pytest.approx(0.3, abs=0.05)
    assert lost(hosts, 1, 2) == 0
    hosts.heal()
    assert lost(hosts, 0, 1) == 0


def test_limit_rate_bounds_bytes_per_second_both_ways(hosts: VirtualNetwork) -> None:
    """The link is never faster than its limit, and other links are."""
    hosts.limit_rate(0, 100_000)
    assert 0 < rate(hosts, 0, 1, 50_000) < 120_000
    assert 0 < rate(hosts, 1, 0, 50_000) < 120_000
    assert rate(hosts, 1, 2, 10 * MB) > 1_000_000
    hosts.heal()
    assert rate(hosts, 0, 1, 10 * MB) > 1_000_000


def test_link_fault_out_of_range_is_refused(hosts: VirtualNetwork, monkeypatch: pytest.MonkeyPatch) -> None:
    """A missing tool is named with its package."""
    with pytest.raises(UsageError, match="0 to 100 percent"):
        hosts.lose_packets(0, 101)
    with pytest.raises(UsageError, match="0 for no limit"):
        hosts.limit_rate(0, -1)
    monkeypatch.setattr("shutil.which", lambda name, **_: None if name == "nft" else f"/usr/sbin/{name}")
    with pytest.raises(MachineError, match="apt-get install nftables"):
        hosts.lose_packets(0, 1)
    monkeypatch.undo()
    hosts.heal()
