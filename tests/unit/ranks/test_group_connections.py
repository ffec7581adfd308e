"""Test which connections are cut: those of process groups, and no others of the script."""

from __future__ import annotations

import os
import socket

from elastic_resume.ranks.group_connections import GroupConnections


def connect() -> tuple[socket.socket, socket.socket]:
    """Return both ends of a TCP connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        one = socket.create_connection(listener.getsockname())
        return one, listener.accept()[0]


def is_cut(end: socket.socket) -> bool:
    """Return whether the connection has ended."""
    end.setblocking(False)
    try:
        return end.recv(1) == b""
    except BlockingIOError:
        return False


def test_only_recorded_connections_are_cut() -> None:
    """Not those that the script has made before and afterwards, and not a listening socket."""
    connections = GroupConnections()
    before = connect()
    with connections.record():
        recorded, listener = connect(), socket.create_server(("127.0.0.1", 0))
    after = connect()
    connections.cut()
    assert [is_cut(end) for _, end in (before, recorded, after)] == [False, True, False]
    socket.create_connection(listener.getsockname()).close()
    for each in (*before, *recorded, *after, listener):
        each.close()


def test_reused_descriptor_is_not_cut() -> None:
    """A recorded connection was closed, and the script's next one has its descriptor."""
    connections = GroupConnections()
    with connections.record():
        recorded = connect()
    own = connect()
    os.dup2(own[0].fileno(), recorded[0].fileno())
    recorded[1].close()
    connections.cut()
    assert not is_cut(own[1])
    for each in (*recorded, *own):
        each.close()


def test_connection_opened_while_cutting_is_cut() -> None:
    """The world has ended while its groups are made."""
    connections = GroupConnections()
    with connections.record():
        connections.cut()
        recorded = connect()
    assert is_cut(recorded[1])
    for each in recorded:
        each.close()
