"""Listening on a port, and finding out who holds one that is taken.

Promise: one port of one address has one listener (SO_REUSEPORT is never set); who asks the holder of a port
for its job is answered in a bounded time, whatever the holder says or leaves unsaid. Does not know what a
candidate is, nor what is said on a connection after the handshake.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import secrets
import socket
import time
from collections.abc import Iterable

from elastic_resume.errors import ConfigError, MachineError
from elastic_resume.rendezvous import wire
from elastic_resume.rendezvous.names import Address

BACKLOG = 1024  # all nodes dial at once when the job starts
ANSWER_S = 5.0
"""How long the holder of a port has to show who it is; as long as `shell.Limits` gives the other side."""
ANYWHERE: tuple[Address, ...] = (ipaddress.IPv6Address("::"), ipaddress.IPv4Address("0.0.0.0"))  # noqa: S104
"""All addresses of this machine: both families by one socket, or IPv4 where the kernel has no IPv6."""
_ABSENT = {errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT, errno.EINVAL}


class TakenError(Exception):
    """A port cannot be had at this moment; the text says why, without a full stop."""


def listen(places: Iterable[Address], port: int) -> socket.socket:
    """Listen at the first of the places that this machine has; 0 lets the kernel choose the port.

    Raises:
        TakenError: the port is held there, and a later place is not tried (two agents would both believe
            that they have it); or the machine has none of the places, yet.
        ConfigError: the port is root's.
        MachineError: the system lets nobody listen.

    """
    absent = "this machine has no address to listen at"
    for place in places:
        listener: socket.socket | None = None
        try:
            listener = open_socket(place, socket.SOCK_STREAM)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if place.version == 6:
                listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, not place.is_unspecified)
            listener.bind(sockaddr(place, port))
            listener.listen(BACKLOG)
            return listener
        except OSError as error:
            if listener is not None:
                listener.close()
            absent = f"this machine cannot listen at {place}, port {port}: {error.strerror}"
            if error.errno == errno.EADDRINUSE:
                raise TakenError(
                    f"port {port} of this machine is held by another program, or by an agent of another job "
                    "or token"
                ) from error
            if error.errno == errno.EACCES:
                raise ConfigError(
                    f"--rdzv-endpoint: only root may listen on port {port}: choose one above 1023."
                ) from error
            if error.errno not in _ABSENT:
                raise MachineError(f"{absent}.") from error
    raise TakenError(absent)


def open_socket(address: Address, kind: socket.SocketKind) -> socket.socket:
    """Open a socket of the address's family."""
    return socket.socket(socket.AF_INET if address.version == 4 else socket.AF_INET6, kind)


def sockaddr(address: Address, port: int) -> tuple[str, int] | tuple[str, int, int, int]:
    """Give an address as `socket` wants it. An address that holds for one link only names the link.

    Raises:
        OSError: this machine has no such link.

    """
    text, _, scope = str(address).partition("%")
    if address.version == 4:
        return text, port
    if not scope or scope.isdigit():
        return text, port, 0, int(scope or 0)
    return text, port, 0, socket.if_nametoindex(scope)


def is_of_this_job(targets: Iterable[Address], port: int, run_id: str, token: bytes) -> bool:
    """Whether one who listens at one of the addresses proves to be an agent of this job."""
    deadline = time.monotonic() + ANSWER_S
    for target in targets:
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            break
        with contextlib.suppress(OSError, wire.WireError), open_socket(target, socket.SOCK_STREAM) as sock:
            sock.settimeout(left_s)
            sock.connect(sockaddr(target, port))
            if _proves_itself(sock, run_id, token, deadline):
                return True
    return False


def _proves_itself(sock: socket.socket, run_id: str, token: bytes, deadline: float) -> bool:
    """Be the dialler of a handshake, to its end: whoever leaves before is told of as a stranger."""
    side = wire.call(token, run_id, secrets.token_hex(32))
    sock.sendall(next(side))
    lines = wire.Lines()
    while (left_s := deadline - time.monotonic()) > 0:
        sock.settimeout(left_s)
        data = sock.recv(4096)
        if not data:
            return False
        for line in lines.feed(data):
            try:
                sock.sendall(side.send(line))
            except StopIteration:
                return True
    return False
