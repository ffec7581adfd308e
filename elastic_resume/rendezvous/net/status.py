"""Those who only look: each is told how the job stands, in one line of JSON, and the connection is closed.

They have proved that they hold the key for it (`wire.look_key`), and get past nobody: the core never hears of
them. There are `Limits.lookers` at most, the oldest goes first; none stays longer than a handshake may take;
`LOOKS_PER_S` are answered, however many ask; and the line is made in a thread of its own, one at a time, so
no heartbeat waits for it.

Asks an agent how its job stands: dial, prove that we hold the key for looking, read one line.

For processes that are no agents. It promises to end within ``patience_s`` whatever the other side does, and
to hold no more than `MAX_ANSWER_BYTES` of it. Changes nothing; does not know what the line says.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

from elastic_resume.rendezvous.endpoint import ResolveFunction, resolve_name
from elastic_resume.rendezvous.net import protocol
from elastic_resume.rendezvous.net.connection import Connection
from elastic_resume.rendezvous.net.handshake_limiter import ConnectionLimits
from elastic_resume.rendezvous.status_view import RendezvousStatus

MAX_REPLIES_PER_S = 200
"""A look of a leader with a thousand followers takes the loop a third of a millisecond."""


class StatusServer:
    """The lookers of one agent."""

    def __init__(
        self, limits: ConnectionLimits, render_status: Callable[[RendezvousStatus], bytes] | None
    ) -> None:
        """``show`` makes the line; without it there is nothing to be seen."""
        self._limits = limits
        self._render_status = render_status or _render_unavailable
        self._clients: dict[Connection, tuple[asyncio.Task[None], asyncio.TimerHandle]] = {}
        self._executor: ThreadPoolExecutor | None = None
        self._next_reply_at = 0.0

    def add(self, connection: Connection, get_status: Callable[[], RendezvousStatus]) -> None:
        """Answer one that has proved itself, with what ``look`` gives when its turn has come."""
        while len(self._clients) >= self._limits.max_status_clients:
            next(iter(self._clients)).abort()
            self.remove(next(iter(self._clients)))
        loop = asyncio.get_running_loop()
        late = loop.call_later(self._limits.handshake_timeout_s, connection.abort)
        now = loop.time()
        # Those who were sent away gave their turns back: nobody waits longer than for all who are inside.
        longest_s = self._limits.max_status_clients / MAX_REPLIES_PER_S
        self._next_reply_at = min(max(self._next_reply_at + 1 / MAX_REPLIES_PER_S, now), now + longest_s)
        answer = self._reply(connection, get_status, self._next_reply_at - now)
        self._clients[connection] = (loop.create_task(answer), late)

    def remove(self, connection: Connection) -> None:
        """Nothing is left of that connection."""
        task, late = self._clients.pop(connection, (None, None))
        if task is not None and late is not None:
            task.cancel()
            late.cancel()

    async def close(self) -> None:
        """Answer nobody any more."""
        tasks = [task for task, _ in self._clients.values()]
        for channel in list(self._clients):
            channel.abort()
            self.remove(channel)
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._executor is not None:
            self._executor.shutdown(wait=False)

    async def _reply(
        self, connection: Connection, get_status: Callable[[], RendezvousStatus], delay_s: float
    ) -> None:
        await asyncio.sleep(delay_s)
        if self._executor is None:
            self._executor = ThreadPoolExecutor(1, "elastic-resume-status")
        try:
            line = await asyncio.get_running_loop().run_in_executor(
                self._executor, self._render_status, get_status()
            )
        except Exception as error:  # noqa: BLE001  a fault of ours that must cost a look, and nothing else
            line = json.dumps({"error": f"an error of elastic_resume itself: {error!r:.500}"}).encode()
        connection.send(line + b"\n")
        connection.close()


def _render_unavailable(_: RendezvousStatus) -> bytes:
    return json.dumps({"error": "this agent has nothing to show"}).encode()


MAX_REPLY_BYTES = 16 << 20  # of a job of 10,000 nodes


def query_agent(
    address: str,
    run_id: str,
    status_key: bytes,
    *,
    timeout_s: float = 5.0,
    resolve: ResolveFunction = resolve_name,
) -> bytes:
    """Ask the agent at ``host:port``; give its line. ``key`` is a `wire.look_key`.

    Raises:
        WireError: it is no agent of that job, or does not hold that key; or it hung up on us.
        OSError: not reached, or not answered in time.
        ValueError: not an address.

    """
    until = time.monotonic() + timeout_s
    host, _, port = address.rpartition(":")
    error: OSError = OSError(f"{address} has no address")
    for found in resolve(host.strip("[]")):
        try:
            connection = socket.create_connection((found, int(port)), timeout=_compute_remaining(until))
        except OSError as reason:
            error = reason
            continue
        with connection:
            return _exchange(connection, run_id, status_key, until)
    raise error


def _exchange(connection: socket.socket, run_id: str, status_key: bytes, deadline: float) -> bytes:
    side = protocol.dial(status_key, run_id, secrets.token_hex(32), status_only=True)
    lines = protocol.LineReader()
    coming = _receive_lines(connection, lines, deadline)
    connection.sendall(next(side))
    try:
        while True:
            connection.sendall(side.send(_read_line(coming)))
    except StopIteration as stop:
        proof: protocol.HandshakeResult = stop.value
    lines.max_line_bytes = MAX_REPLY_BYTES
    connection.sendall(proof.final_line)
    return proof.verifier.verify(_read_line(coming))


def _read_line(received: Iterator[bytes]) -> bytes:
    line = next(received, None)
    if line is None:
        raise protocol.ProtocolError(
            "it hung up: it belongs to another job, or another program listens there"
        )
    return line


def _receive_lines(
    connection: socket.socket, reader: protocol.LineReader, deadline: float
) -> Iterator[bytes]:
    while True:
        connection.settimeout(_compute_remaining(deadline))
        data = connection.recv(1 << 16)
        if not data:
            return
        yield from reader.feed(data)


def _compute_remaining(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("no answer in time")
    return left
