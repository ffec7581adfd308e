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

from elastic_resume.rendezvous.endpoint import Resolve, lookup
from elastic_resume.rendezvous.net import protocol
from elastic_resume.rendezvous.net.connection import Channel
from elastic_resume.rendezvous.net.handshake_limiter import Limits
from elastic_resume.rendezvous.status_view import View

LOOKS_PER_S = 200
"""A look of a leader with a thousand followers takes the loop a third of a millisecond."""


class Window:
    """The lookers of one agent."""

    def __init__(self, limits: Limits, show: Callable[[View], bytes] | None) -> None:
        """``show`` makes the line; without it there is nothing to be seen."""
        self._limits = limits
        self._show = show or _nothing
        self._inside: dict[Channel, tuple[asyncio.Task[None], asyncio.TimerHandle]] = {}
        self._maker: ThreadPoolExecutor | None = None
        self._next_at = 0.0

    def enter(self, channel: Channel, look: Callable[[], View]) -> None:
        """Answer one that has proved itself, with what ``look`` gives when its turn has come."""
        while len(self._inside) >= self._limits.lookers:
            next(iter(self._inside)).abort()
            self.leave(next(iter(self._inside)))
        loop = asyncio.get_running_loop()
        late = loop.call_later(self._limits.handshake_s, channel.abort)
        now = loop.time()
        # Those who were sent away gave their turns back: nobody waits longer than for all who are inside.
        longest_s = self._limits.lookers / LOOKS_PER_S
        self._next_at = min(max(self._next_at + 1 / LOOKS_PER_S, now), now + longest_s)
        answer = self._answer(channel, look, self._next_at - now)
        self._inside[channel] = (loop.create_task(answer), late)

    def leave(self, channel: Channel) -> None:
        """Nothing is left of that connection."""
        task, late = self._inside.pop(channel, (None, None))
        if task is not None and late is not None:
            task.cancel()
            late.cancel()

    async def close(self) -> None:
        """Answer nobody any more."""
        tasks = [task for task, _ in self._inside.values()]
        for channel in list(self._inside):
            channel.abort()
            self.leave(channel)
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._maker is not None:
            self._maker.shutdown(wait=False)

    async def _answer(self, channel: Channel, look: Callable[[], View], waits_s: float) -> None:
        await asyncio.sleep(waits_s)
        if self._maker is None:
            self._maker = ThreadPoolExecutor(1, "elastic-resume-show")
        try:
            line = await asyncio.get_running_loop().run_in_executor(self._maker, self._show, look())
        except Exception as error:  # noqa: BLE001  a fault of ours that must cost a look, and nothing else
            line = json.dumps({"error": f"an error of elastic_resume itself: {error!r:.500}"}).encode()
        channel.send(line + b"\n")
        channel.close()


def _nothing(_: View) -> bytes:
    return json.dumps({"error": "this agent has nothing to show"}).encode()


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
    side = protocol.call(key, run_id, secrets.token_hex(32), looks=True)
    lines = protocol.Lines()
    coming = _lines(connection, lines, until)
    connection.sendall(next(side))
    try:
        while True:
            connection.sendall(side.send(_next(coming)))
    except StopIteration as stop:
        proof: protocol.Proof = stop.value
    lines.limit = MAX_ANSWER_BYTES
    connection.sendall(proof.last)
    return proof.hears.check(_next(coming))


def _next(coming: Iterator[bytes]) -> bytes:
    line = next(coming, None)
    if line is None:
        raise protocol.WireError("it hung up: it belongs to another job, or another program listens there")
    return line


def _lines(connection: socket.socket, lines: protocol.Lines, until: float) -> Iterator[bytes]:
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
