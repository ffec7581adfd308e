"""Those who only look: each is told how the job stands, in one line of JSON, and the connection is closed.

They have proved that they hold the key for it (`wire.look_key`), and get past nobody: the core never hears of
them. There are `Limits.lookers` at most, the oldest goes first; none stays longer than a handshake may take;
the line is made in a thread of its own, one at a time, so no heartbeat waits for it.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from elastic_resume.rendezvous.channel import Channel
from elastic_resume.rendezvous.door import Limits
from elastic_resume.rendezvous.view import View


class Window:
    """The lookers of one agent."""

    def __init__(self, limits: Limits, show: Callable[[View], bytes] | None) -> None:
        """``show`` makes the line; without it there is nothing to be seen."""
        self._limits = limits
        self._show = show or _nothing
        self._inside: dict[Channel, tuple[asyncio.Task[None], asyncio.TimerHandle]] = {}
        self._maker: ThreadPoolExecutor | None = None

    def enter(self, channel: Channel, view: View) -> None:
        """Answer one that has proved itself."""
        while len(self._inside) >= self._limits.lookers:
            next(iter(self._inside)).abort()
            self.leave(next(iter(self._inside)))
        loop = asyncio.get_running_loop()
        late = loop.call_later(self._limits.handshake_s, channel.abort)
        self._inside[channel] = (loop.create_task(self._answer(channel, view)), late)

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

    async def _answer(self, channel: Channel, view: View) -> None:
        if self._maker is None:
            self._maker = ThreadPoolExecutor(1, "elastic-resume-show")
        try:
            line = await asyncio.get_running_loop().run_in_executor(self._maker, self._show, view)
        except Exception as error:  # noqa: BLE001  a fault of ours that must cost a look, and nothing else
            line = json.dumps({"error": f"an error of elastic_resume itself: {error!r:.500}"}).encode()
        channel.write(line + b"\n")
        channel.close()


def _nothing(_: View) -> bytes:
    return json.dumps({"error": "this agent has nothing to show"}).encode()
