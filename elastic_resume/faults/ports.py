"""Addresses and ports for simulated nodes that share this machine's network.

No two clusters have one address: whoever takes a network holds a socket of that name for as long as it lives,
and the kernel gives it back with its process. Ports are not those that the kernel hands out: whoever asks for
any port, for a connection or to listen at all addresses as torch's stores do, may be given the one that was
free a moment ago, at this address too.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
from pathlib import Path

from elastic_resume.errors import MachineError

_FIRST = 10000
_HANDED_OUT = Path("/proc/sys/net/ipv4/ip_local_port_range")
_TRIES = 200


def claim_network() -> tuple[str, int]:
    """Take a /24 of loopback addresses; give its first three numbers, and the descriptor that holds it.

    Raises:
        MachineError: there is none left.

    """
    for _ in range(_TRIES):
        prefix = f"127.{1 + secrets.randbelow(253)}.{secrets.randbelow(256)}"
        claim = socket.socket(socket.AF_UNIX)
        try:
            claim.bind(f"\0elastic-resume-network-{prefix}")  # abstract: no file
            return prefix, claim.detach()
        except OSError:
            claim.close()
    raise MachineError("no loopback network is free: other simulated clusters have taken them.")


def free_port(address: str) -> int:
    """Find a TCP port that nobody holds at ``address``, nor is given by chance.

    Raises:
        MachineError: there is none.

    """
    try:
        end = int(_HANDED_OUT.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        end = 32768  # Linux' own choice
    for _ in range(_TRIES):
        port = _FIRST + secrets.randbelow(max(1, end - _FIRST))
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((address, port))
            return port
    raise MachineError(f"no port from {_FIRST} to {end} is free at {address}.")
