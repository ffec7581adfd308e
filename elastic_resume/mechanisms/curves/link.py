"""Copy the files of one node's values to the agents of other nodes while they grow.

Each agent listens. At a restore the workers tell their agent where rank 0's agent listens, and some connect
(`notes.name_copier`). Both sides of a connection tell which files they have, in bytes, and send what the
other lacks. So rank 0's agent gets what former nodes of rank 0 have recorded, and the others get each new
line at once. Files only grow and are prefixes of one another (`journal`), so there is nothing to merge.

Both sides prove a key that rank 0's agent has made and its worker has shared in the restore. The handshake
and the signed lines are those of `rendezvous.net.protocol`.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from elastic_resume.background import AcceptThread, BackgroundThread, listen
from elastic_resume.mechanisms.curves import journal
from elastic_resume.rendezvous.net import protocol
from elastic_resume.rendezvous.net.codec import dump_json

logger = logging.getLogger(__name__)

CHUNK_BYTES = 1 << 16
MAX_LINE_BYTES = 1 << 22
MAX_CONNECTIONS = 256
HANDSHAKE_TIMEOUT_S = 5.0
RECONNECT_S = 0.2
RESCAN_S = 1.0
Endpoint = tuple[str, int, str]
"""Host, port and key."""


class Replicator:
    """One node's files, the connections of other agents, and the connection to rank 0's."""

    def __init__(self, node_dir: Path, run_id: str, host: str, on_change: Callable[[], None]) -> None:
        """Listen at ``host``. ``on_change`` is called when another node's data has arrived.

        Raises:
            OSError: the system refuses to listen there.

        """
        self._node_dir, self._run_id, self._on_change = node_dir, run_id, on_change
        self.own_generation = 0
        """The generation whose file this node's worker writes; nothing is received for it."""
        self._key = secrets.token_hex(32)
        listener = listen(host)
        self.endpoint: Endpoint = (host, listener.getsockname()[1], self._key)
        self._lock = threading.Lock()
        self._links: set[_Link] = set()
        self._source: Endpoint | None = None
        self._source_link: _Link | None = None
        self._has_source = threading.Event()
        self._accept_thread = AcceptThread("curves-serve", listener, self._serve)
        self._follow_thread = BackgroundThread("curves-follow", self._follow, retry_s=RECONNECT_S)
        self._accept_thread.start()
        self._follow_thread.start()

    def follow(self, source: Endpoint | None) -> None:
        """Copy from another agent, or from none."""
        with self._lock:
            if source == self._source:
                return
            self._source, link = source, self._source_link
            if source is not None:
                self._has_source.set()
            else:
                self._has_source.clear()
        if link is not None:
            link.close()

    def announce(self) -> None:
        """Send what is new in this node's files."""
        with self._lock:
            links = list(self._links)
        for link in links:
            link.announce()

    def close(self) -> None:
        """End all connections."""
        self._follow_thread.request_close()
        self.follow(None)
        self._has_source.set()
        self._accept_thread.close()
        with self._lock:
            links = list(self._links)
        for link in links:
            link.close()

    # ---- connections -----------------------------------------------------------------------------------

    def _serve(self, connection: socket.socket) -> None:
        with self._lock:
            if len(self._links) >= MAX_CONNECTIONS:
                return
        handshake = protocol.accept(self._key.encode(), self._run_id, secrets.token_hex(32))
        self._run_link(connection, handshake)

    def _follow(self) -> float:
        self._has_source.wait()
        with self._lock:
            source = self._source
        if source is None:
            return RECONNECT_S
        host, port, key = source
        with (
            contextlib.suppress(OSError),
            socket.create_connection((host, port), HANDSHAKE_TIMEOUT_S) as connection,
        ):
            handshake = protocol.dial(key.encode(), self._run_id, secrets.token_hex(32))
            self._run_link(connection, handshake, source)
        return RECONNECT_S

    def _run_link(
        self, connection: socket.socket, handshake: protocol.Handshake, source: Endpoint | None = None
    ) -> None:
        with contextlib.suppress(OSError, protocol.ProtocolError):
            link = _Link(connection, handshake, self)
            with self._lock:
                self._links.add(link)
                if source is not None:
                    if source != self._source:
                        link.close()
                    self._source_link = link
            try:
                link.run()
            finally:
                link.close()
                with self._lock:
                    self._links.discard(link)

    # ---- files -----------------------------------------------------------------------------------------

    def list_files(self) -> dict[str, int]:
        """Return this node's files and their sizes."""
        return journal.list_files(self._node_dir)

    def read(self, name: str, at: int) -> bytes:
        """Return a part of a file."""
        with open(self._node_dir / journal.DIRECTORY / name, "rb") as file:
            file.seek(at)
            return file.read(CHUNK_BYTES)

    def receive(self, name: str, at: int, data: bytes) -> None:
        """Add what another node has sent, if this node's file does not have it."""
        match = journal.FILE_NAME.fullmatch(name)
        if match is None:
            raise protocol.ProtocolError(f"there is no file {name[:64]!r}")
        if int(match[1]) == self.own_generation:
            return
        path = self._node_dir / journal.DIRECTORY / name
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            size = os.fstat(descriptor).st_size
            if size < at:
                raise protocol.ProtocolError(f"a part of {name} is missing")
            # A worker of this node may write the same first line at the same time: the bytes are equal.
            os.pwrite(descriptor, data[size - at :], size)
        finally:
            os.close(descriptor)
        self._on_change()


class _Link:
    """One connection, authenticated, with a thread that sends."""

    def __init__(
        self, connection: socket.socket, handshake: protocol.Handshake, replicator: Replicator
    ) -> None:
        """Run the handshake. Raises ProtocolError and OSError."""
        self._connection, self._replicator = connection, replicator
        self._reader = protocol.LineReader()
        connection.settimeout(HANDSHAKE_TIMEOUT_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self._lines = self._read_lines()
        result = self._shake_hands(handshake)
        self._signer, self._verifier = result.signer, result.verifier
        self._reader.max_line_bytes = MAX_LINE_BYTES
        connection.settimeout(None)
        self._condition = threading.Condition()
        self._peer: dict[str, int] | None = None
        """The files of the other side, in bytes; None until it has told."""
        self._is_due = self._is_closed = False

    def announce(self) -> None:
        """Look at the files now."""
        with self._condition:
            self._is_due = True
            self._condition.notify()

    def close(self) -> None:
        """End the connection."""
        with self._condition:
            self._is_closed = True
            self._condition.notify()
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)

    def run(self) -> None:
        """Receive until the connection ends."""
        self._send({"have": self._replicator.list_files()})
        threading.Thread(target=self._run_sender, name="curves-send", daemon=True).start()
        for line in self._lines:
            message = json.loads(self._verifier.verify(line))
            if "have" in message:
                with self._condition:
                    self._peer = {str(name): int(size) for name, size in message["have"].items()}
                self.announce()
                continue
            name, at, data = str(message["file"]), int(message["at"]), str(message["data"]).encode()
            self._replicator.receive(name, at, data)
            with self._condition:
                if self._peer is not None:  # nothing is sent back
                    self._peer[name] = max(self._peer.get(name, 0), at + len(data))

    def _run_sender(self) -> None:
        with contextlib.suppress(OSError):
            while not self._is_closed:
                with self._condition:
                    self._condition.wait_for(lambda: self._is_due or self._is_closed, RESCAN_S)
                    self._is_due, peer = False, dict(self._peer) if self._peer is not None else None
                if peer is not None:
                    for name, size in sorted(self._replicator.list_files().items()):
                        self._send_rest(name, peer.get(name, 0), size)
        self.close()

    def _send_rest(self, name: str, at: int, size: int) -> None:
        while at < size and (data := self._replicator.read(name, at)):
            self._send({"file": name, "at": at, "data": data.decode("ascii", "replace")})
            at += len(data)
            with self._condition:
                if self._peer is not None:
                    self._peer[name] = max(self._peer.get(name, 0), at)

    def _send(self, message: Any) -> None:
        self._connection.sendall(self._signer.sign(dump_json(message) + b"\n"))

    def _shake_hands(self, handshake: protocol.Handshake) -> protocol.HandshakeResult:
        if greeting := next(handshake):
            self._connection.sendall(greeting)
        for line in self._lines:
            try:
                self._connection.sendall(handshake.send(line))
            except StopIteration as stop:
                result: protocol.HandshakeResult = stop.value
                self._connection.sendall(result.final_line)
                return result
        raise protocol.ProtocolError("the connection ended in the handshake")

    def _read_lines(self) -> Iterator[bytes]:
        while data := self._connection.recv(CHUNK_BYTES):
            yield from self._reader.feed(data)
