"""Test the transfer of a state's blocks between nodes, over real sockets."""

from __future__ import annotations

import contextlib
import logging
import random
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterator
from functools import partial
from typing import Any

import pytest
import xxhash

from elastic_resume import constants, failpoints
from elastic_resume.errors import CorruptError, MachineError, PeerFailedError, UnreadableError
from elastic_resume.restore import transfer
from elastic_resume.restore.streaming import BackgroundTask, LocalWatermark, StreamingBuffer
from elastic_resume.restore.transfer import BlockSender, BlockServer, BlockTable, SharedReading, receive
from elastic_resume.slots import slot_memory
from tests.support.processes import wait_for

BLOCK = 1000
STATE = b"".join(xxhash.xxh3_128_digest(bytes([i])) for i in range(256)) * 5 + b"the last block is shorter"
COUNT = -(-len(STATE) // BLOCK)
HOST = "127.0.0.1"


class AskedBuffer(StreamingBuffer):
    """A buffer that counts how often a server waited for its bytes."""

    asked = 0

    def wait_at_most(self, timeout_s: float, is_there: Callable[[], bool]) -> None:
        """See base class."""
        self.asked += 1
        super().wait_at_most(timeout_s, is_there)


class Proxy:
    """Forwards connections to a server; ``allowed`` bytes of each go back, then it does ``at_limit``.

    That is cut, stall, or drip: go on with one byte at a time.
    """

    def __init__(self, source: BlockSender, allowed: list[int], at_limit: str) -> None:
        self._target = (source.host, source.port)
        self._allowed = allowed  # for each connection in turn; the last entry is for all further ones
        self._at_limit = at_limit
        self._listener = socket.create_server((HOST, 0))
        self._sockets: list[socket.socket] = [self._listener]
        port = self._listener.getsockname()[1]
        self.sender = BlockSender(source.node, HOST, port, source.key)
        self.connections = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """Close all sockets."""
        for each in self._sockets:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection(self._target)
                self._sockets += [near, far]
                allowed = self._allowed[min(self.connections, len(self._allowed) - 1)]
                self.connections += 1
                threading.Thread(target=self._forward, args=(near, far, 1 << 60), daemon=True).start()
                threading.Thread(target=self._forward, args=(far, near, allowed), daemon=True).start()

    def _forward(self, source: socket.socket, target: socket.socket, allowed: int) -> None:
        with contextlib.suppress(OSError):
            while allowed and (data := source.recv(min(allowed, 1 << 16))):
                target.sendall(data)
                allowed -= len(data)
            if not allowed and self._at_limit == "stall":
                return
            while self._at_limit == "drip" and (data := source.recv(1)):
                target.sendall(data)
                time.sleep(0.05)
            for each in (source, target):
                each.shutdown(socket.SHUT_RDWR)


Serve = Callable[..., BlockServer]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Serve a state under a node's name; the whole state by default."""
    servers = []

    def start(node: str, buffer: StreamingBuffer | None = None) -> BlockServer:
        complete = buffer or StreamingBuffer.from_complete(memoryview(bytearray(STATE)))
        servers.append(BlockServer(BlockTable(complete, BLOCK), node, HOST))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


def empty_table() -> BlockTable:
    """A table of a buffer in which nothing has arrived."""
    return BlockTable(AskedBuffer(memoryview(bytearray(len(STATE))), LocalWatermark()), BLOCK)


def arm(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """Arm failpoints in this process."""
    monkeypatch.setattr(failpoints, "_failpoints_by_name", failpoints._parse(text))


def assert_received(table: BlockTable) -> None:
    """All bytes are there, and the watermark has passed them."""
    assert bytes(table.buffer.memory) == STATE
    assert table.buffer.available_bytes() == len(STATE)
    for index in range(COUNT):
        assert table._digests[index] == xxhash.xxh3_128_digest(STATE[index * BLOCK : (index + 1) * BLOCK])


def test_receive_fills_buffer_from_one_holder(serve: Serve) -> None:
    """The last block is shorter; the holder sends each block once."""
    holder, table = serve("a"), empty_table()
    receive(table, [holder.sender], 1)
    assert_received(table)
    assert holder.sent_bytes == len(STATE)


def test_receive_shares_work_between_holders(serve: Serve) -> None:
    """Each holder sends while the other waits for its disk."""
    buffers = [AskedBuffer(memoryview(bytearray(STATE)), LocalWatermark()) for _ in range(2)]
    holders = [serve(node, buffer) for node, buffer in zip("ab", buffers, strict=True)]
    table = empty_table()
    task = BackgroundTask("test", lambda: receive(table, [h.sender for h in holders], 2))
    wait_for(lambda: all(buffer.asked for buffer in buffers), "a request to each")
    for buffer in buffers:
        buffer.advance(len(STATE))
    assert task.join() is None
    assert_received(table)
    assert all(holder.sent_bytes for holder in holders)
    assert sum(holder.sent_bytes for holder in holders) == len(STATE)


def test_receivers_form_chain_while_holder_reads_its_disk(serve: Serve) -> None:
    """Each of three passes on what it has; the holder sends the state once."""
    arriving = AskedBuffer(memoryview(bytearray(STATE)), LocalWatermark())
    servers = [serve("holder", arriving)]
    tables, tasks = [], []
    for node in ("a", "b", "c"):
        tables.append(empty_table())
        source = servers[-1].sender
        tasks.append(BackgroundTask("test", lambda t=tables[-1], s=source: receive(t, [s], 1)))  # type: ignore[misc]
        servers.append(serve(node, tables[-1].buffer))
    wait_for(lambda: arriving.asked, "a request")
    for count in range(0, len(STATE), 333):
        arriving.advance(count)
    arriving.advance(len(STATE))
    assert [task.join() for task in tasks] == [None] * 3
    for table in tables:
        assert_received(table)
    assert [server.sent_bytes for server in servers] == [len(STATE)] * 3 + [0]


def test_receive_takes_damaged_block_from_other_holder(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The node that sent it is named, and is not asked again."""
    arm(monkeypatch, "transfer.block=flip@1")
    holders, table = [serve("a"), serve("b")], empty_table()
    with caplog.at_level(logging.WARNING):
        receive(table, [holder.sender for holder in holders], 2)
    assert_received(table)
    (record,) = caplog.records
    assert "of the state arrived damaged" in record.message
    blamed = [h for h in holders if str(h.sender) in record.message]
    assert len(blamed) == 1


def test_block_that_changed_after_its_verification_is_not_taken(serve: Serve) -> None:
    """A holder's memory may be bad: it sends the digests of the checkpoint's manifest."""
    holder, memory = serve("a"), bytearray(STATE)
    blocks = [STATE[start : start + BLOCK] for start in range(0, len(STATE), BLOCK)]
    digests = [xxhash.xxh3_128_hexdigest(block) for block in blocks]
    memory[-1] ^= 1
    holder.table = BlockTable(StreamingBuffer.from_complete(memoryview(memory)), BLOCK, digests)
    with pytest.raises(PeerFailedError, match="arrived damaged"):
        receive(empty_table(), [holder.sender], 1)


def test_receive_fails_if_only_holder_sends_damaged_block(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No damaged byte is below the watermark."""
    arm(monkeypatch, "transfer.block=flip@3")
    table = empty_table()
    with pytest.raises(PeerFailedError, match=r"a at 127\.0\.0\.1:\d+: bytes \d+ to \d+ .* arrived damaged"):
        receive(table, [serve("a").sender], 1)
    count = table.buffer.available_bytes()
    assert bytes(table.buffer.memory[:count]) == STATE[:count]
    assert count < len(STATE)


def test_receive_resumes_after_connection_is_cut_amid_block(serve: Serve) -> None:
    """Blocks that had arrived are not sent again."""
    holder, table = serve("a"), empty_table()
    proxy = Proxy(holder.sender, [3 * BLOCK + 500, 7 * BLOCK, 1 << 60], "cut")
    receive(table, [proxy.sender], 1)
    assert_received(table)
    assert proxy.connections > 2
    assert holder.sent_bytes <= len(STATE) + 4 * BLOCK
    proxy.close()


def test_receive_replaces_holder_that_stalls(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """The connection stays open, amid a block."""
    monkeypatch.setattr(transfer, "SILENCE_TIMEOUT_S", 0.2)
    stalling, other, table = serve("a"), serve("b"), empty_table()
    proxy = Proxy(stalling.sender, [2 * BLOCK + 500], "stall")
    receive(table, [proxy.sender, other.sender], 1)
    assert_received(table)
    assert other.sent_bytes > 0
    proxy.close()


def test_receive_replaces_holder_whose_link_is_slow(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes arrive more often than the silence that is allowed, so only the time for the block ends it."""
    monkeypatch.setattr(transfer, "BLOCK_TIMEOUT_S", 0.3)
    monkeypatch.setattr(transfer, "SILENCE_TIMEOUT_S", 0.2)
    slow, other, table = serve("a"), serve("b"), empty_table()
    proxy = Proxy(slow.sender, [500], "drip")
    receive(table, [proxy.sender, other.sender], 1)
    assert_received(table)
    with pytest.raises(PeerFailedError, match=rf"it sent \d+ of {BLOCK} bytes in 0\.3 s"):
        receive(empty_table(), [proxy.sender], 1)
    proxy.close()


def test_receive_waits_for_holder_that_is_slow(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """It says so each interval, so it is not silent, though no byte comes for longer than that."""
    monkeypatch.setattr(transfer, "SILENCE_TIMEOUT_S", 0.3)
    monkeypatch.setattr(transfer, "ALIVE_INTERVAL_S", 0.05)
    arriving = AskedBuffer(memoryview(bytearray(STATE)), LocalWatermark())
    holder, other, table = serve("a", arriving), serve("b"), empty_table()
    task = BackgroundTask("test", lambda: receive(table, [holder.sender, other.sender], 1))
    wait_for(lambda: arriving.asked > 40, "40 intervals")  # of two connections
    arriving.advance(len(STATE))
    assert task.join() is None
    assert_received(table)
    assert other.sent_bytes == 0


def test_receive_replaces_holder_whose_copy_fails(serve: Serve) -> None:
    """Its disk fails amid the state; without another holder the receiver fails too."""
    failing = AskedBuffer(memoryview(bytearray(STATE)), LocalWatermark())
    failing.advance(2 * BLOCK)
    failing.fail(CorruptError("the disk is damaged"))
    table = empty_table()
    receive(table, [serve("a", failing).sender, serve("b").sender], 1)
    assert_received(table)
    proxy = Proxy(serve("a", failing).sender, [1 << 60], "cut")
    with pytest.raises(PeerFailedError, match="its own state has failed"):
        receive(empty_table(), [proxy.sender], 1)
    assert proxy.connections <= transfer.MIN_CONNECTIONS  # it is not asked again
    proxy.close()


def test_receive_names_address_that_refuses(serve: Serve) -> None:
    """The message says how to choose another address."""
    holder = serve("a")
    holder.close()
    with pytest.raises(
        PeerFailedError, match=rf"a at {HOST}:{holder.sender.port}: Connection refused.*TRANSFER_ADDR"
    ):
        receive(empty_table(), [holder.sender], 1)
    with pytest.raises(PeerFailedError, match="no node offered it"):
        receive(empty_table(), [], 0)


def test_cancelled_buffer_ends_receive(serve: Serve) -> None:
    """Its connections end too."""
    table = empty_table()
    table.buffer.cancel()
    with pytest.raises(PeerFailedError, match="cancelled"):
        receive(table, [serve("a").sender], 1)


def test_cancelled_buffer_ends_a_thread_that_has_no_block_left(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other thread verifies the first block last, and learns of the end."""
    table = empty_table()
    fetch = transfer._Receiver._fetch_and_verify

    def fetch_first_block_last(receiver: Any, connection: socket.socket, index: int) -> None:
        fetch(receiver, connection, index)
        if index == 0:
            wait_for(lambda: receiver._in_flight == {0} and not receiver._missing, "all other blocks")

    monkeypatch.setattr(transfer._Receiver, "_fetch_and_verify", fetch_first_block_last)
    table.buffer.cancel()
    with pytest.raises(PeerFailedError, match="cancelled"):
        receive(table, [serve("a").sender], 1)


def test_cancelled_buffer_ends_receive_while_holder_waits(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The holder's disk sends nothing, and the holder says so each interval."""
    monkeypatch.setattr(transfer, "ALIVE_INTERVAL_S", 0.05)
    waiting = AskedBuffer(memoryview(bytearray(STATE)), LocalWatermark())
    table, holder = empty_table(), serve("a", waiting)
    task = BackgroundTask("test", lambda: receive(table, [holder.sender], 1))
    wait_for(lambda: waiting.asked, "a request")
    table.buffer.cancel()
    error = task.join()
    assert isinstance(error, PeerFailedError)
    assert "cancelled" in str(error)


def test_receive_without_memory_raises_machine_error(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """No holder is blamed."""

    def refuse(_: memoryview) -> None:
        raise MachineError("no memory")

    monkeypatch.setattr(slot_memory, "populate_pages", refuse)
    with pytest.raises(MachineError, match="no memory"):
        receive(empty_table(), [serve("a").sender], 1)


# ---- strangers ---------------------------------------------------------------------------------------


class Store:
    """A store of the state: it counts which node reads which block, and refuses those in ``broken``."""

    key = "1"

    def __init__(self, broken: Collection[str] = ()) -> None:
        self.reads: list[tuple[str, int]] = []
        self.broken = broken
        self.is_open = threading.Event()
        self.is_open.set()

    def of(self, node: str) -> StoreReader:
        """Return the reader of a node."""
        return StoreReader(self, node)


class StoreReader:
    """What one node reads a `Store` with."""

    key = "1"

    def __init__(self, store: Store, node: str) -> None:
        self._store, self._node = store, node

    def read_block(self, index: int, into: memoryview) -> bytes:
        """See BlockReader."""
        self._store.is_open.wait(20)
        self._store.reads.append((self._node, index))
        if self._node in self._store.broken:
            raise UnreadableError(f"the store refuses {self._node}")
        into[:] = STATE[index * BLOCK : (index + 1) * BLOCK]
        return xxhash.xxh3_128_digest(into)


def read_together(
    serve: Serve,
    store: Store,
    nodes: str,
    without_server: str = "",
    connect: Callable[[BlockSender], BlockSender] = lambda sender: sender,
) -> tuple[dict[str, BlockTable], dict[str, BackgroundTask]]:
    """Let nodes read the store together, the first one as the source; others find no server of some."""
    buffers = {node: StreamingBuffer(memoryview(bytearray(len(STATE))), LocalWatermark()) for node in nodes}
    servers = {node: serve(node, buffer) for node, buffer in buffers.items()}
    for node in without_server:
        servers[node].close()
    tasks = {}
    for node, server in servers.items():
        sharing = tuple(None if other == node else connect(servers[other].sender) for other in nodes)
        others = [sender for sender in sharing if sender is not None]
        shared = SharedReading(store.of(node), sharing)
        read = partial(receive, server.table, others, len(others), shared)
        tasks[node] = BackgroundTask(node, read, server.table.buffer)
    return {node: server.table for node, server in servers.items()}, tasks


@pytest.mark.parametrize("nodes", ["a", "ab", "abc"])
def test_nodes_read_a_store_together_and_each_block_once(serve: Serve, nodes: str) -> None:
    """Each reads its share, and gets those of the others from them."""
    store = Store()
    tables, tasks = read_together(serve, store, nodes)
    assert {node: task.join() for node, task in tasks.items()} == dict.fromkeys(nodes)
    for table in tables.values():
        assert_received(table)
    assert sorted(store.reads) == sorted((nodes[index % len(nodes)], index) for index in range(COUNT))


def test_blocks_that_are_there_are_not_read_again(serve: Serve) -> None:
    """The source has read the header before it knows who helps."""
    buffer = StreamingBuffer(memoryview(bytearray(STATE)), LocalWatermark(2 * BLOCK))
    store, table = Store(), serve("a", buffer).table
    receive(table, [], 0, SharedReading(store.of("a"), (None,)))
    assert bytes(buffer.memory) == STATE
    assert buffer.available_bytes() == len(STATE)
    assert sorted(store.reads) == [("a", index) for index in range(2, COUNT)]


@pytest.mark.parametrize("broken", ["b", "bc"])
def test_source_reads_share_of_node_that_cannot(serve: Serve, broken: str) -> None:
    """A node without credentials, say, costs no attempt: it gets its own share from the source too."""
    store = Store(broken)
    tables, tasks = read_together(serve, store, "abc")
    assert {node: task.join() for node, task in tasks.items()} == dict.fromkeys("abc")
    for table in tables.values():
        assert_received(table)
    good = [(node, index) for node, index in store.reads if node not in broken]
    expected = {index: name if (name := "abc"[index % 3]) not in broken else "a" for index in range(COUNT)}
    assert sorted(good) == sorted((node, index) for index, node in expected.items())


def test_source_reads_share_of_node_that_cannot_be_reached(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And sends it to the third node, which cannot reach that node either."""
    monkeypatch.setattr(transfer, "RECONNECT_PAUSE_S", 0.001)
    store = Store()
    tables, tasks = read_together(serve, store, "abc", without_server="b")
    assert {node: task.join() for node, task in tasks.items()} == dict.fromkeys("abc")
    for table in tables.values():
        assert_received(table)
    assert {("a", index) for index in range(1, COUNT, 3)} <= set(store.reads)


def test_all_nodes_learn_at_once_that_the_source_cannot_read(serve: Serve) -> None:
    """Its own error is that of the store; nobody waits for its share."""
    _, tasks = read_together(serve, Store("a"), "abc")
    errors = {node: task.join() for node, task in tasks.items()}
    assert isinstance(errors["a"], UnreadableError)
    assert str(errors["a"]) == "the store refuses a"
    for node in "bc":
        assert isinstance(errors[node], PeerFailedError)
        assert str(errors[node]).startswith("a at ")


@pytest.mark.parametrize(
    "seed", [*range(6), *(pytest.param(s, marks=pytest.mark.soak) for s in range(6, 200))]
)
def test_shared_reading_ends_whatever_fails(serve: Serve, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Some nodes cannot read, and connections break or stall at random: all get the state, and none waits.

    If the source cannot read, all fail.
    """
    monkeypatch.setattr(transfer, "RECONNECT_PAUSE_S", 0.001)
    monkeypatch.setattr(transfer, "SILENCE_TIMEOUT_S", 0.5)
    monkeypatch.setattr(transfer, "ALIVE_INTERVAL_S", 0.05)
    chance = random.Random(seed)
    nodes = "abcde"[: chance.randint(1, 5)]
    broken = "".join(node for node in nodes if chance.random() < (0.1 if node == "a" else 0.25))
    limits = [chance.choice([100, 1100, 5000, 1 << 40]) for _ in range(3)]
    end = chance.choice(["cut", "stall"])
    with contextlib.ExitStack() as stack:

        def connect(sender: BlockSender) -> BlockSender:
            if chance.random() < 0.7:
                return sender
            return stack.enter_context(contextlib.closing(Proxy(sender, [*limits, 1 << 40], end))).sender

        tables, tasks = read_together(serve, Store(broken), nodes, connect=connect)
        errors = {node: task.join() for node, task in tasks.items()}
    if "a" in broken:
        assert all(errors.values())
    else:
        assert errors == dict.fromkeys(nodes)
        for table in tables.values():
            assert_received(table)


def test_cancelled_reading_ends(serve: Serve) -> None:
    """Threads that wait for the store, for a peer and for a block all end."""
    store = Store()
    store.is_open.clear()
    tables, tasks = read_together(serve, store, "ab")
    for table in tables.values():
        table.buffer.cancel()
    store.is_open.set()
    errors = {node: task.join() for node, task in tasks.items()}
    assert [type(error) for error in errors.values()] == [PeerFailedError, PeerFailedError]
    assert len(store.reads) <= 2 * transfer.MAX_CONNECTIONS


def test_stranger_gets_random_bytes_only(serve: Serve) -> None:
    """A wrong proof, and the proof that the server itself would send, end the connection."""
    holder = serve("a")
    for proof in (bytes(32), b"garbage" * 1000):
        with socket.create_connection((HOST, holder.sender.port)) as stranger:
            stranger.sendall(bytes(32) + proof)
            received = b""
            with contextlib.suppress(ConnectionResetError):  # of bytes that the server did not read
                while data := stranger.recv(4096):
                    received += data
            assert len(received) <= 32
    with pytest.raises(PeerFailedError):
        receive(empty_table(), [BlockSender("a", HOST, holder.sender.port, bytes(32))], 1)
    assert holder.sent_bytes == 0


def test_receiver_takes_nothing_from_server_without_key(serve: Serve) -> None:
    """A program that listens at the holder's address reflects what it gets."""
    holder, table = serve("a"), empty_table()
    listener = socket.create_server((HOST, 0))

    def reflect() -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = listener.accept()
                with connection, contextlib.suppress(OSError):
                    while data := connection.recv(4096):
                        connection.sendall(data)

    BackgroundTask("reflect", reflect)
    fake = BlockSender("fake", HOST, listener.getsockname()[1], holder.sender.key)
    with pytest.raises(PeerFailedError, match="does not hold the key"):
        receive(table, [fake], 1)
    assert table.buffer.available_bytes() == 0
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()


def test_idle_strangers_do_not_keep_receiver_out(serve: Serve) -> None:
    """More than the limit connect and stay; the oldest are dropped."""
    holder, table = serve("a"), empty_table()
    strangers = [
        socket.create_connection((HOST, holder.sender.port)) for _ in range(transfer.MAX_UNAUTHENTICATED + 10)
    ]
    receive(table, [holder.sender], 1)
    assert_received(table)
    wait_for(lambda: len(holder._connections) <= transfer.MAX_UNAUTHENTICATED, "the oldest to go")
    strangers[0].settimeout(transfer.SILENCE_TIMEOUT_S / 2)
    assert strangers[0].recv(1) == b""
    for stranger in strangers:
        stranger.close()


def test_oldest_stranger_goes_and_receiver_stays(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection that has proved the key does not count."""
    monkeypatch.setattr(transfer, "MAX_UNAUTHENTICATED", 2)
    holder = serve("a")
    with contextlib.ExitStack() as stack:
        receiver = stack.enter_context(contextlib.closing(transfer._connect(holder.sender)))
        wait_for(lambda: all(holder._connections.values()), "the proof")
        strangers: list[socket.socket] = []
        for count in (2, 3, 3):
            strangers.append(socket.create_connection((HOST, holder.sender.port)))
            stack.enter_context(strangers[-1])
            wait_for(partial(lambda n: len(holder._connections) == n, count), "the server")
        strangers[0].settimeout(transfer.SILENCE_TIMEOUT_S / 2)
        assert strangers[0].recv(1) == b""
        receiver.sendall(transfer._REQUEST.pack(0))
        assert len(transfer._receive_exactly(receiver, 1 + 16 + BLOCK)) == 17 + BLOCK


def test_closed_server_serves_no_connection_that_it_had_accepted(serve: Serve) -> None:
    """The thread of a connection may start late."""
    holder = serve("a")
    holder.close()
    listener = socket.create_server((HOST, 0))
    with listener, socket.create_connection(listener.getsockname()) as far:
        far.sendall(bytes(32))
        far.shutdown(socket.SHUT_WR)
        with listener.accept()[0] as near:
            holder._serve(near)
        with contextlib.suppress(ConnectionResetError):  # the server did not read the bytes
            assert far.recv(1) == b""


def test_server_whose_state_failed_ends_the_connection(serve: Serve) -> None:
    """After it has said so."""
    failing = StreamingBuffer(memoryview(bytearray(STATE)), LocalWatermark())
    failing.fail(CorruptError("the disk is damaged"))
    with contextlib.closing(transfer._connect(serve("a", failing).sender)) as connection:
        connection.sendall(transfer._REQUEST.pack(0))
        assert transfer._receive_exactly(connection, 1) == transfer._FAILED
        assert connection.recv(1) == b""


def test_idle_receiver_stays_connected_until_server_closes(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may wait for its own memory longer than for a silent server."""
    monkeypatch.setattr(transfer, "SILENCE_TIMEOUT_S", 0.2)
    holder = serve("a")
    with contextlib.closing(transfer._connect(holder.sender)) as connection:
        for _ in range(3):
            with pytest.raises(BlockingIOError):
                connection.recv(1)
        connection.sendall(transfer._REQUEST.pack(0))
        assert len(transfer._receive_exactly(connection, 1 + 16 + BLOCK)) == 17 + BLOCK
        holder.close()
        assert connection.recv(1) == b""


def test_request_beyond_last_block_ends_connection(serve: Serve) -> None:
    """The server answers nothing."""
    with contextlib.closing(transfer._connect(serve("a").sender)) as connection:
        connection.sendall(transfer._REQUEST.pack(COUNT))
        assert connection.recv(1) == b""


# ---- addresses ---------------------------------------------------------------------------------------


def test_source_survives_json() -> None:
    """Its text has brackets around an IPv6 address."""
    source = BlockSender("a", "::1", 4711, bytes(range(32)))
    assert BlockSender.from_json("a", source.to_json()) == source
    assert str(source) == "a at [::1]:4711"


def test_local_host_is_setting_then_agents_then_route_to_master(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the machine of MASTER_ADDR it is that name, which all ranks reach."""
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv(constants.ENV_LOCAL_HOST, "node1")
    assert transfer.choose_local_host("10.0.0.1") == "10.0.0.1"
    assert transfer.choose_local_host(None) == "node1"
    monkeypatch.delenv(constants.ENV_LOCAL_HOST)
    assert transfer.choose_local_host(None) == "localhost"
    monkeypatch.setenv("MASTER_ADDR", "192.0.2.7")  # no packet is sent there
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        route = "192.0.2.7"
        with contextlib.suppress(OSError):  # no route
            probe.connect((route, 1))
            route = probe.getsockname()[0]
    assert transfer.choose_local_host(None) == route


@pytest.mark.parametrize("host", ["::1", "localhost"])
@pytest.mark.parametrize("is_dual", [True, False])
def test_server_listens_on_ipv6_with_and_without_dual_stack(
    monkeypatch: pytest.MonkeyPatch, host: str, is_dual: bool
) -> None:
    """Without it, a name leads to the addresses of IPv4 only."""
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this machine has no IPv6")
    monkeypatch.setattr(socket, "has_dualstack_ipv6", lambda: is_dual)
    table = BlockTable(StreamingBuffer.from_complete(memoryview(bytearray(STATE))), BLOCK)
    server, received = BlockServer(table, "a", host), empty_table()
    receive(received, [server.sender], 1)
    assert_received(received)
    server.close()


def test_server_listens_for_name_at_all_addresses_and_refuses_foreign_one() -> None:
    """A name may lead to another address elsewhere."""
    table = BlockTable(StreamingBuffer.from_complete(memoryview(bytearray(STATE))), BLOCK)
    server = BlockServer(table, "a", "localhost")
    received = empty_table()
    receive(received, [server.sender], 1)
    assert_received(received)
    server.close()
    with pytest.raises(MachineError, match=r"cannot listen at 192\.0\.2\.7"):
        BlockServer(table, "a", "192.0.2.7")
