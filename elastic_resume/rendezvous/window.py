"""Those who only look: each is told how the job stands, in one line of JSON, and the connection is closed.

They have proved that they hold the key for it (`wire.look_key`), and get past nobody: the core never hears of
them. There are `Limits.lookers` at most, the oldest goes first; none stays longer than a handshake may take;
`LOOKS_PER_S` are answered, however many ask; and the line is made in a thread of its own, one at a time, so
no heartbeat waits for it.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from elastic_resume.rendezvous.channel import Channel
from elastic_resume.rendezvous.door import Limits
from elastic_resume.rendezvous.view import View

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
