"""Pull the blocks of a state from other nodes over TCP, several connections and nodes at a time.

The local leader of each node that holds or receives the state serves it during a restore attempt
(`BlockServer`). A receiver requests the lowest missing block on each of its connections (`receive`), verifies
it, and serves it in turn. A server waits until its own buffer has a block, so nodes form chains::

    receiver  32 random bytes A
    server    32 random bytes B
    receiver  HMAC(key, "receiver" A B)
    server    HMAC(key, "server" A B)
    receiver  index of a block, 8 bytes; again after each block
    server    WAIT, each second until it has the block; then OK, 16-byte digest, block; or FAILED, REFUSED

The handshake follows that of `rendezvous.net.protocol`. Each server makes a key for one attempt, and the
ranks get the keys in a gather. A digest comes from the checkpoint's manifest. A server computes it for a
snapshot in memory, and a receiver passes on the digest that it has verified.

Several nodes may read the state from a store that all of them reach (`SharedReading`). Each reads its share
of the blocks and takes those of the others from them, so the store is read once. The first of them, the
source, reads the share of a node that refuses, since it cannot read, or that fails.

Invariants:

- The watermark passes no block before its digest was checked.
- A lost connection costs one block at most, which another connection then requests.
- A node that is silent, fails, sends a wrong block, or takes longer than `BLOCK_TIMEOUT_S` for one is
  replaced by another. A node that waits for its own disk is not silent, because it sends WAIT.
- No two nodes wait for the same block of each other: a share is its owner's, or the source's.
- A client that has not proved the key receives only random bytes, and occupies a thread. When there are
  `MAX_UNAUTHENTICATED`, a new one ends the oldest.
"""

from __future__ import annotations

import contextlib
import functools
import heapq
import hmac
import ipaddress
import logging
import os
import secrets
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

import xxhash

from elastic_resume import constants, failpoints
from elastic_resume.background import AcceptThread, listen
from elastic_resume.errors import CheckpointError, MachineError, PeerFailedError
from elastic_resume.restore.streaming import BackgroundTask, StreamingBuffer
from elastic_resume.slots import slot_memory
from elastic_resume.units import format_address

logger = logging.getLogger(__name__)

# A connection that waits for memory, or verifies, leaves the link to another one.
MIN_CONNECTIONS = 2
MAX_CONNECTIONS = 8
MAX_UNAUTHENTICATED = 64  # connections in the handshake, which takes milliseconds
SILENCE_TIMEOUT_S = 5.0
BLOCK_TIMEOUT_S = 60.0  # 16 MiB: a link that loses most packets is not silent, and would take hours
ALIVE_INTERVAL_S = 1.0
MAX_FAILURES = 6  # in a row, of one node, over all connections to it
RECONNECT_PAUSE_S = 0.1
_NONCE_BYTES = _KEY_BYTES = _PROOF_BYTES = 32
_DIGEST_BYTES = 16
_REQUEST = struct.Struct("!Q")
_WAIT, _OK, _FAILED, _REFUSED = b"\1", b"\2", b"\3", b"\4"


class BlockTable:
    """The blocks of the state in a buffer, and their digests as far as they are known."""

    def __init__(self, buffer: StreamingBuffer, block_bytes: int, digests: Sequence[str] = ()) -> None:
        """``digests`` are those of a manifest with the same ``block_bytes``."""
        self.buffer = buffer
        self.count = -(-len(buffer.memory) // block_bytes)
        self._block_bytes = block_bytes
        self._digests = [bytes.fromhex(digest) for digest in digests] or [b""] * self.count
        self._arrived: set[int] = set()  # beside all blocks below the watermark
        self._refused: set[int] = set()

    def start(self, index: int) -> int:
        """Return the offset of a block; for the index after the last one, the size of the state."""
        return min(index * self._block_bytes, len(self.buffer.memory))

    def block(self, index: int) -> memoryview:
        """Return the bytes of a block."""
        return self.buffer.memory[self.start(index) : self.start(index + 1)]

    def get_digest(self, index: int) -> bytes:
        """Return the digest of a block that has arrived."""
        if not self._digests[index]:
            self._digests[index] = xxhash.xxh3_128_digest(self.block(index))
        return self._digests[index]

    def set_digest(self, index: int, digest: bytes) -> None:
        """Record the verified digest of a block."""
        self._digests[index] = digest

    def add(self, index: int) -> None:
        """Note that a block has arrived and is verified; `advance` of the buffer tells those that wait."""
        self._arrived.add(index)

    def refuse(self, indices: Sequence[int]) -> None:
        """Note that this node does not read these blocks; it may receive them."""
        self._refused.update(indices)

    def is_refused(self, index: int) -> bool:
        """Return whether this node does not read a block that it should."""
        return index in self._refused

    def has(self, index: int) -> bool:
        """Return whether a block has arrived."""
        return index in self._arrived or self.buffer.arrived_bytes() >= self.start(index + 1)

    def has_within(self, index: int, timeout_s: float) -> bool:
        """Wait at most ``timeout_s`` for a block; return whether it has arrived.

        Raises the buffer's error. A block that is refused is not waited for.
        """
        self.buffer.wait_at_most(timeout_s, lambda: self.has(index) or index in self._refused)
        return self.has(index)


@dataclass(frozen=True)
class BlockSender:
    """A node that serves the state, and the key of its server."""

    node: str
    host: str
    port: int
    key: bytes

    def __str__(self) -> str:
        return f"{self.node} at {format_address(self.host, self.port)}"

    def to_json(self) -> list[Any]:
        """Return the sender as JSON data; its node is known from the rank that sends it."""
        return [self.host, self.port, self.key.hex()]

    @classmethod
    def from_json(cls, node: str, encoded: Any) -> BlockSender:
        """Return the sender of ``node`` that `to_json` encoded."""
        host, port, key = encoded
        return cls(node, host, port, bytes.fromhex(key))


def choose_local_host(transfer_addr: str | None) -> str:
    """Return the address or name at which other nodes reach this one.

    ``transfer_addr`` is the user's setting. Without it the agent's own address is used, and without an agent
    the address from which this machine reaches MASTER_ADDR.
    """
    host = transfer_addr or os.environ.get(constants.ENV_LOCAL_HOST)
    if host:
        return host
    master = os.environ.get("MASTER_ADDR", "127.0.0.1")
    with contextlib.suppress(OSError):
        family, _, _, _, address = socket.getaddrinfo(master, 1, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)  # sends no packet
            own = str(probe.getsockname()[0])
        if not ipaddress.ip_address(own.partition("%")[0]).is_loopback:
            return own
    return master  # this is its machine, and all ranks reach it


# ---- the serving side --------------------------------------------------------------------------------


class BlockServer:
    """Serves the blocks of a buffer, in a thread per connection, until `close`."""

    def __init__(self, table: BlockTable, node: str, host: str) -> None:
        """Listen at ``host``: an address of this machine, or a name for all of its addresses.

        Raises:
            MachineError: the system refuses to listen there.

        """
        try:
            listener = listen(host)
        except OSError as error:
            raise MachineError(
                f"node {node} cannot listen at {host} to send the state: {error.strerror}. Choose an address "
                "of this machine with ELASTIC_RESUME_TRANSFER_ADDR."
            ) from error
        self.sender = BlockSender(node, host, listener.getsockname()[1], secrets.token_bytes(_KEY_BYTES))
        self.sent_bytes = 0  # with the blocks that are being sent; for the display of progress
        self.table = table
        self._lock = threading.Lock()
        self._connections: dict[socket.socket, bool] = {}  # in order of arrival -> whether it proved its key
        self._accept_thread = AcceptThread("elastic-resume-serve", listener, self._serve)
        self._accept_thread.start()

    def close(self) -> None:
        """End all connections, and accept no more."""
        self._accept_thread.close()
        with self._lock:
            for connection in self._connections:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)

    def _serve(self, connection: socket.socket) -> None:
        with self._lock:
            if self._accept_thread.is_closing:
                return
            unauthenticated = [other for other, is_proved in self._connections.items() if not is_proved]
            if len(unauthenticated) >= MAX_UNAUTHENTICATED:  # they prove the key within milliseconds
                with contextlib.suppress(OSError):
                    unauthenticated[0].shutdown(socket.SHUT_RDWR)
                del self._connections[unauthenticated[0]]
            self._connections[connection] = False
        try:
            with contextlib.suppress(OSError):
                _configure(connection)
                self._authenticate(connection)
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _pack_timeout(0))
                while True:
                    (index,) = _REQUEST.unpack(_receive_exactly(connection, _REQUEST.size))
                    if index >= self.table.count or not self._send_block(connection, index):
                        return
        finally:
            with self._lock:
                self._connections.pop(connection, None)

    def _authenticate(self, connection: socket.socket) -> None:
        own = secrets.token_bytes(_NONCE_BYTES)
        nonces = _receive_exactly(connection, _NONCE_BYTES) + own
        connection.sendall(own)
        _verify_proof(connection, self.sender.key, b"receiver", nonces)
        connection.sendall(_prove(self.sender.key, b"server", nonces))
        with self._lock:
            self._connections[connection] = True

    def _send_block(self, connection: socket.socket, index: int) -> bool:
        """Send a block once it is there; return False if this node's state has failed."""
        buffer = self.table.buffer
        try:
            while not self.table.has_within(index, ALIVE_INTERVAL_S):
                if self.table.is_refused(index):
                    connection.sendall(_REFUSED)
                    return False
                connection.sendall(_WAIT)
        except Exception as error:
            if error is buffer.error:  # this node's own state failed, and its restore attempt reports that
                connection.sendall(_FAILED)
                return False
            raise
        failpoints.hit("transfer.send")
        block = failpoints.mutate("transfer.block", self.table.block(index))
        with self._lock:
            self.sent_bytes += len(block)
        connection.sendall(_OK + self.table.get_digest(index), socket.MSG_MORE)
        connection.sendall(block)
        return True


# ---- the receiving side ------------------------------------------------------------------------------


class BlockReader(Protocol):
    """Reads blocks of a state from a store that several nodes reach."""

    key: str
    """With it another node finds the same state in the store."""

    def read_block(self, index: int, into: memoryview) -> bytes:
        """Read a block, verify it, and return its digest. Raises CheckpointError."""


@dataclass(frozen=True)
class SharedReading:
    """Which nodes read a state from a store: block i is read by node i modulo their number."""

    reader: BlockReader
    nodes: tuple[BlockSender | None, ...]
    """The source's node first; None is this node."""


def receive(
    table: BlockTable, senders: Sequence[BlockSender], used_at_once: int, shared: SharedReading | None = None
) -> None:
    """Fill the buffer of ``table`` with verified blocks from ``senders``, and from a store.

    Args:
        table: of this node's buffer; it may have bytes up to its watermark.
        senders: in the order of preference.
        used_at_once: how many of them are used from the beginning; the others replace those that fail.
        shared: on a node that reads from a store; its other nodes are the first of ``senders``.

    Raises:
        PeerFailedError: no sender can send the rest, or the attempt was cancelled.
        CheckpointError: this node is the source, and cannot read the store.
        MachineError: this node has no memory for the state.

    """
    receiver = _Receiver(table, senders, used_at_once, shared)
    count = min(max(MIN_CONNECTIONS, used_at_once), MAX_CONNECTIONS) if senders or shared is None else 0
    tasks = [BackgroundTask(f"receive-{number}", receiver.run) for number in range(count)]
    if shared is not None:
        read = functools.partial(receiver.read, shared.reader)
        tasks += [BackgroundTask(f"read-{number}", read) for number in range(MAX_CONNECTIONS)]
    errors = [error for task in tasks if (error := task.join()) is not None]
    table.buffer.raise_if_cancelled()
    if not receiver.is_complete:
        raise receiver.error or errors[0]


def warn_that_others_read(error: CheckpointError) -> None:
    """Log why this node does not read its share."""
    logger.warning(f"this node does not help to read the archived state: {error}")


class _SenderFailedError(Exception):
    """A sender cannot send the state, and it is not asked again."""


class _Owner(Enum):
    """Who fetches the blocks of a share, if that is no sender."""

    THIS_NODE = "reads them from the store"
    ANY_SENDER = "sends them"


class _Receiver:
    """What the threads of `receive` share: the missing blocks, and who may have them."""

    def __init__(
        self,
        table: BlockTable,
        senders: Sequence[BlockSender],
        used_at_once: int,
        shared: SharedReading | None,
    ) -> None:
        self._table = table
        self._senders = senders
        self._used_at_once = used_at_once
        self._changed = threading.Condition()
        self._owners: list[BlockSender | _Owner] = (
            [node or _Owner.THIS_NODE for node in shared.nodes] if shared else [_Owner.ANY_SENDER]
        )
        self._is_source = self._owners[0] is _Owner.THIS_NODE
        # Blocks that no thread is fetching, a heap for each share.
        count = len(self._owners)
        missing = [index for index in range(table.count) if not table.has(index)]
        self._missing = [[index for index in missing if index % count == share] for share in range(count)]
        self._in_flight: set[int] = set()
        self._failures: Counter[BlockSender] = Counter()  # since the last block
        self._excluded: set[BlockSender] = set()
        self._users: Counter[BlockSender] = Counter()
        self._reasons: dict[BlockSender, str] = {}
        self.error: CheckpointError | None = None
        """Why the source cannot read the store, or this node not get the source's share."""

    @property
    def is_complete(self) -> bool:
        """Whether all blocks have arrived."""
        with self._changed:
            return not self._in_flight and not any(self._missing)

    def run(self) -> None:
        """Receive blocks until none is missing, from one sender after the other."""
        while not self.is_complete and not self.error:
            sender = self._choose_sender()
            try:
                with contextlib.closing(_connect(sender)) as connection:
                    while (index := self._take_block(sender)) is not None:
                        self._fill_block(index, functools.partial(self._fetch_and_verify, connection, index))
                        with self._changed:
                            self._failures[sender] = 0
            except (OSError, _SenderFailedError) as error:
                self._record_failure(sender, error)
            finally:
                with self._changed:
                    self._users[sender] -= 1

    def read(self, reader: BlockReader) -> None:
        """Read this node's share from the store, and on the source what other nodes cannot read."""
        while (index := self._take_block(_Owner.THIS_NODE)) is not None:
            try:
                self._fill_block(index, functools.partial(self._read_block, reader, index))
            except CheckpointError as error:
                if self._is_source:
                    self._table.buffer.fail(error)  # now, since this node's server tells the others
                with self._changed:
                    is_first = _Owner.THIS_NODE in self._owners
                    self._reassign(_Owner.THIS_NODE, error)
                if self._is_source:
                    return
                if is_first:
                    warn_that_others_read(error)

    def _choose_sender(self) -> BlockSender:
        with self._changed:
            candidates = [sender for sender in self._senders if sender not in self._excluded]
            usable = [sender for sender in candidates if self._failures[sender] < MAX_FAILURES]
            if not usable:
                reasons = "; ".join(f"{sender}: {reason}" for sender, reason in self._reasons.items())
                raise PeerFailedError(
                    f"no node could send the rest of the state ({reasons or 'no node offered it'}). If its "
                    "address cannot be reached, choose another with ELASTIC_RESUME_TRANSFER_ADDR there."
                )
            preferred = self._senders[: self._used_at_once]
            best = min(
                usable,
                key=lambda s: (self._is_served(s), self._failures[s], s not in preferred, self._users[s]),
            )
            self._users[best] += 1
            pause_s = RECONNECT_PAUSE_S * self._failures[best]
        time.sleep(pause_s)
        return best

    def _is_served(self, sender: BlockSender) -> bool:
        """Return False for the owner of a share that no thread asks: nobody else sends it before it fails."""
        return sender not in self._owners or self._users[sender] > 0

    def _record_failure(self, sender: BlockSender, error: Exception) -> None:
        reason = str(error.strerror or error) if isinstance(error, OSError) else str(error)
        with self._changed:
            self._failures[sender] += 1
            if isinstance(error, _SenderFailedError):
                self._excluded.add(sender)
            if sender in self._excluded or self._failures[sender] >= MAX_FAILURES:
                self._reassign(sender, PeerFailedError(f"{sender} sends no more of the state: {reason}"))
            is_first, self._reasons[sender] = sender not in self._reasons, reason
        if is_first:
            logger.warning(f"the transfer of the state from {sender} was interrupted: {reason}.")

    def _reassign(self, owner: BlockSender | _Owner, error: CheckpointError) -> None:
        """Give the shares of an owner that fails to the source. Without the source there is no way on.

        Another node may wait for this one, so the source's share is asked of nobody else.
        """
        source = self._owners[0]
        for share, of_share in enumerate(self._owners):
            if of_share is owner and owner is not source:
                self._owners[share] = source
                if owner is _Owner.THIS_NODE:
                    self._table.refuse(range(share, self._table.count, len(self._owners)))
        if owner is source:
            self.error = self.error or error
        self._changed.notify_all()

    def _find_share(self, fetcher: BlockSender | _Owner) -> list[int] | None:
        """Return the heap with the lowest block that ``fetcher`` may fetch; None if there is none now."""
        owners = {fetcher, _Owner.ANY_SENDER} if isinstance(fetcher, BlockSender) else {fetcher}
        heaps = [heap for heap, owner in zip(self._missing, self._owners, strict=True) if owner in owners]
        return min(filter(None, heaps), default=None)

    def _take_block(self, fetcher: BlockSender | _Owner) -> int | None:
        """Return the lowest missing block that ``fetcher`` has; None when all have arrived, or none will."""
        with self._changed:
            while (heap := self._find_share(fetcher)) is None or self.error or fetcher in self._excluded:
                self._table.buffer.raise_if_cancelled()
                if isinstance(fetcher, BlockSender) and fetcher in self._excluded:
                    raise _SenderFailedError(self._reasons[fetcher])
                if self.error or not (self._in_flight or any(self._missing)):
                    return None
                self._changed.wait()
            self._table.buffer.raise_if_cancelled()
            index = heapq.heappop(heap)
            self._in_flight.add(index)
            return index

    def _fill_block(self, index: int, fill: Callable[[], bytes]) -> None:
        """Let ``fill`` bring a block and return its verified digest; another thread tries if it fails."""
        digest = None
        try:
            digest = fill()
        finally:
            with self._changed:
                self._in_flight.remove(index)
                if digest is not None:
                    self._table.set_digest(index, digest)
                    self._table.add(index)
                else:
                    heapq.heappush(self._missing[index % len(self._owners)], index)
                heaps = filter(None, self._missing)
                lowest = min([*self._in_flight, *(heap[0] for heap in heaps)], default=self._table.count)
                self._changed.notify_all()
                self._table.buffer.advance(self._table.start(lowest))

    def _read_block(self, reader: BlockReader, index: int) -> bytes:
        block = self._table.block(index)
        slot_memory.populate_pages(block)
        return reader.read_block(index, block)

    def _fetch_and_verify(self, connection: socket.socket, index: int) -> bytes:
        block = self._table.block(index)
        connection.sendall(_REQUEST.pack(index))
        slot_memory.populate_pages(block)  # while the first bytes travel
        while (status := _receive_exactly(connection, 1)) == _WAIT:
            self._table.buffer.raise_if_cancelled()
            if self.error:
                raise self.error
        if status == _REFUSED:
            raise _SenderFailedError("it cannot read its share")
        if status != _OK:
            raise _SenderFailedError("its own state has failed")
        digest = _receive_exactly(connection, _DIGEST_BYTES)
        failpoints.hit("transfer.receive")
        _receive_into(connection, block)
        if xxhash.xxh3_128_digest(block) != digest:
            start = self._table.start(index)
            raise _SenderFailedError(f"bytes {start} to {start + len(block)} of the state arrived damaged")
        return digest


# ---- connections -------------------------------------------------------------------------------------


def _connect(sender: BlockSender) -> socket.socket:
    """Connect, and authenticate both sides; raise OSError."""
    connection = socket.create_connection((sender.host, sender.port), SILENCE_TIMEOUT_S)
    try:
        _configure(connection)
        own = secrets.token_bytes(_NONCE_BYTES)
        connection.sendall(own)
        nonces = own + _receive_exactly(connection, _NONCE_BYTES)
        connection.sendall(_prove(sender.key, b"receiver", nonces))
        _verify_proof(connection, sender.key, b"server", nonces)
    except BaseException:
        connection.close()
        raise
    return connection


def _configure(connection: socket.socket) -> None:
    """Limit how long a read may wait for the first byte.

    Python's own timeout would turn each read of a block into many.
    """
    connection.settimeout(None)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _pack_timeout(SILENCE_TIMEOUT_S))


def _pack_timeout(seconds: float) -> bytes:
    """Encode a ``struct timeval``; 0 is no limit."""
    return struct.pack("@ll", int(seconds), int(seconds % 1 * 1e6))


def _prove(key: bytes, role: bytes, nonces: bytes) -> bytes:
    return hmac.digest(key, role + nonces, "sha256")


def _verify_proof(connection: socket.socket, key: bytes, role: bytes, nonces: bytes) -> None:
    if not hmac.compare_digest(_receive_exactly(connection, _PROOF_BYTES), _prove(key, role, nonces)):
        raise ConnectionError("the other side does not hold the key of this restore attempt")


def _receive_exactly(connection: socket.socket, size: int) -> bytes:
    """Receive a few bytes, which arrive in one piece from an authenticated peer."""
    data = bytearray(size)
    _receive_into(connection, memoryview(data))
    return bytes(data)


def _receive_into(connection: socket.socket, target: memoryview) -> None:
    """Fill ``target``; raise OSError if the peer closes, or is silent or slow."""
    received, deadline = 0, time.monotonic() + BLOCK_TIMEOUT_S
    while received < len(target):
        if time.monotonic() > deadline:  # a call waits for at most `SILENCE_TIMEOUT_S` in total
            raise TimeoutError(f"it sent {received} of {len(target)} bytes in {BLOCK_TIMEOUT_S:g} s")
        try:
            count = connection.recv_into(target[received:], 0, socket.MSG_WAITALL)
        except BlockingIOError:
            raise TimeoutError(f"it sent nothing for {SILENCE_TIMEOUT_S:g} s") from None
        if count == 0:
            raise ConnectionError("it closed the connection")
        received += count
