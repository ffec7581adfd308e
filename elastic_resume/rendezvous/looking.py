"""Asks an agent how its job stands: dial, prove that we hold the key for looking, read one line.

For processes that are no agents. It promises to end within ``patience_s`` whatever the other side does, and
to hold no more than `MAX_ANSWER_BYTES` of it. Changes nothing; does not know what the line says.
"""

from __future__ import annotations

import secrets
import socket
import time
from collections.abc import Iterator

from elastic_resume.rendezvous import wire
from elastic_resume.rendezvous.address import Resolve, lookup

MAX_ANSWER_BYTES = 16 << 20  # of a job of 10,000 nodes


def ask(
    address: str, run_id: str, key: bytes, *, patience_s: float = 5.0, resolve: Resolve = lookup
) -> bytes:
    """Ask the agent at ``host:port``; give its line. ``key`` is a `wire.look_key`.

    Raises:
        WireError: it is no agent of that job, or does not hold that key; or it hung up on us.
        OSError: not reached, or not answered in time.
        ValueError: not an address.

    """
    until = time.monotonic() + patience_s
    host, _, port = address.rpartition(":")
    error: OSError = OSError(f"{address} has no address")
    for found in resolve(host.strip("[]")):
        try:
            connection = socket.create_connection((found, int(port)), timeout=_left(until))
        except OSError as reason:
            error = reason
            continue
        with connection:
            return _converse(connection, run_id, key, until)
    raise error


def _converse(connection: socket.socket, run_id: str, key: bytes, until: float) -> bytes:
    side = wire.call(key, run_id, secrets.token_hex(32), looks=True)
    lines = wire.Lines()
    coming = _lines(connection, lines, until)
    connection.sendall(next(side))
    try:
        while True:
            connection.sendall(side.send(_next(coming)))
    except StopIteration as stop:
        proof: wire.Proof = stop.value
    lines.limit = MAX_ANSWER_BYTES
    connection.sendall(proof.last)
    return proof.hears.check(_next(coming))


def _next(coming: Iterator[bytes]) -> bytes:
    line = next(coming, None)
    if line is None:
        raise wire.WireError("it hung up: it belongs to another job, or another program listens there")
    return line


def _lines(connection: socket.socket, lines: wire.Lines, until: float) -> Iterator[bytes]:
    while True:
        connection.settimeout(_left(until))
        data = connection.recv(1 << 16)
        if not data:
            return
        yield from lines.feed(data)


def _left(until: float) -> float:
    left = until - time.monotonic()
    if left <= 0:
        raise TimeoutError("no answer in time")
    return left
