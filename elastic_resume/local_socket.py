"""Frame messages on unix sockets, with descriptors beside them, and tell whose process is at the other end.

A message is its length (4 bytes, big-endian), then its bytes. Descriptors travel with the length.

The launcher shim imports this module without the package, so it imports little: `socket` would cost 5 ms.
"""

import _socket
import os
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

LENGTH_BYTES = 4
INFINITY = float("inf")


def send_message(connection: "_socket.socket", data: bytes, descriptors: "Sequence[int]" = ()) -> None:
    """Send a message; raise OSError if the other side has closed."""
    ancillary = [encode_descriptors(descriptors)] if descriptors else []
    connection.sendmsg([len(data).to_bytes(LENGTH_BYTES, "big")], ancillary)
    connection.sendall(data)


def encode_descriptors(descriptors: "Sequence[int]") -> "tuple[int, int, bytes]":
    """Return the ancillary data that sends these descriptors."""
    numbers = b"".join(number.to_bytes(4, sys.byteorder) for number in descriptors)
    return _socket.SOL_SOCKET, _socket.SCM_RIGHTS, numbers


def receive_message(
    connection: "_socket.socket", max_bytes: int, descriptors: int = 0, *, timeout_s: float = INFINITY
) -> "tuple[bytes, list[int]]":
    """Receive a message of at most ``max_bytes`` within ``timeout_s``, with so many descriptors or none.

    Raises:
        OSError: it is empty, too long, incomplete or late, or the other side has closed.

    """
    limit = time.monotonic() + timeout_s
    space = _socket.CMSG_SPACE(4 * descriptors) if descriptors else 0
    header, ancillary, _, _ = connection.recvmsg(LENGTH_BYTES, space)
    received = [
        int.from_bytes(numbers[at : at + 4], sys.byteorder)
        for _, _, numbers in ancillary  # descriptors only: no socket here asks for anything else
        for at in range(0, len(numbers) - 3, 4)
    ]
    try:
        if not header:
            raise ConnectionError("it closed the connection")  # noqa: TRY301
        size = int.from_bytes(header, "big") if len(header) == LENGTH_BYTES else 0
        is_valid, data = 0 < size <= max_bytes and len(received) in {0, descriptors}, bytearray()
        while len(data) < size and is_valid:
            part = connection.recv(min(1 << 20, size - len(data)))
            data += part
            is_valid = bool(part) and time.monotonic() <= limit
        if not is_valid:
            raise ConnectionError("it sent no whole message")  # noqa: TRY301
    except BaseException:
        for descriptor in received:
            os.close(descriptor)
        raise
    return bytes(data), received


def is_same_user(connection: "_socket.socket") -> bool:
    """Return whether the other side runs as our user."""
    return read_peer(connection)[1] == os.getuid()


def read_peer(connection: "_socket.socket") -> "tuple[int, int]":
    """Return process and user of the other side: of a listener, those that called listen(2)."""
    peer = connection.getsockopt(_socket.SOL_SOCKET, _socket.SO_PEERCRED, 12)  # struct ucred: pid, uid, gid
    return int.from_bytes(peer[:4], sys.byteorder), int.from_bytes(peer[4:8], sys.byteorder)
