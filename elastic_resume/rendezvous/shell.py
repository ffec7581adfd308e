"""A thread for a `node.Node`: the rendezvous of one agent's process.

Everything but `start`, `submit` and `stop` happens in that thread, on a loop of its own. What it promises: an
error of our own ends the thread, which is seen by `alive` and told by `threading.excepthook`.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import resource
import socket
import threading
from collections.abc import Callable
from typing import Any

from elastic_resume.rendezvous.address import Resolve, lookup
from elastic_resume.rendezvous.channel import end_lookups
from elastic_resume.rendezvous.core import Agent
from elastic_resume.rendezvous.door import Limits
from elastic_resume.rendezvous.node import Node
from elastic_resume.rendezvous.quorum import Incarnation
from elastic_resume.rendezvous.record import Record
from elastic_resume.rendezvous.steps import Effect, Event, Settings
from elastic_resume.rendezvous.view import View

__all__ = ["Limits", "Shell"]

OTHER_FILES = 512
"""Descriptors for all that is not a connection of ours."""


class Shell:
    """Runs a `Node` in a thread. Give it events with `submit`; it gives effects to ``carry_out``."""

    def __init__(
        self,
        settings: Settings,
        me: Incarnation,
        *,
        listener: socket.socket,
        run_id: str,
        token: bytes,
        record: Record,
        carry_out: Callable[[Effect], None],
        limits: Limits | None = None,
        watch: Callable[[Agent], None] | None = None,
        seen: int = 0,
        resolve: Resolve = lookup,
        show: Callable[[View], bytes] | None = None,
    ) -> None:
        """Nothing runs before `start`.

        Args:
            settings: of the core.
            me: this life of this agent.
            listener: bound and listening.
            run_id: the job's name.
            token: what peers must hold.
            record: what the core keeps on disk.
            carry_out: gets the effects that are not the shell's own, in the thread; must not block.
            limits: what others may make this process spend.
            watch: called in the thread after every event, before its effects are carried out.
            seen: the greatest generation that this node knows of from elsewhere.
            resolve: gives the addresses of a name that is called; in threads.
            show: makes a line of JSON of what this agent sees, for those who look; in a thread of its own.

        """
        self._limits = limits or Limits()
        self._make = functools.partial(
            Node,
            settings,
            me,
            listener=listener,
            run_id=run_id,
            token=token,
            record=record,
            carry_out=carry_out,
            limits=self._limits,
            watch=watch,
            seen=seen,
            resolve=resolve,
            show=show,
        )
        self._listener = listener
        self._loop = asyncio.new_event_loop()
        self._stopped = asyncio.Event()
        self._linger_s = 1.0
        self._node: Node | None = None
        self._early: list[Event] = []
        self._thread = threading.Thread(target=self._run, name="elastic-resume-rendezvous", daemon=True)

    # ---- called from any thread ----------------------------------------------------------------------

    def start(self) -> None:
        """Start the thread."""
        allow_descriptors(self._limits.connections + self._limits.unproven + OTHER_FILES)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    def submit(self, event: Event) -> None:
        """Hand an event to the core."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is left to be told
            self._loop.call_soon_threadsafe(self._happen, event)

    def stop(self, linger_s: float = 1.0) -> None:
        """Send what is queued and end the thread."""
        self._linger_s = linger_s
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._stopped.set)
        self._thread.join(linger_s + 1.0)

    # ---- the thread ----------------------------------------------------------------------------------

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._live())
        finally:
            self._loop.close()

    async def _live(self) -> None:
        self._node = node = self._make()
        try:
            await node.open()
            for event in self._early:
                node.happen(event)
            stopped = asyncio.ensure_future(self._stopped.wait())
            ends: list[asyncio.Future[Any]] = [stopped, node.fault]
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            stopped.cancel()
        finally:
            await node.close(self._linger_s)
            await end_lookups()
        if node.fault.done():
            raise node.fault.result()

    def _happen(self, event: Event) -> None:
        if self._node is None:
            self._early.append(event)
        else:
            self._node.happen(event)


def allow_descriptors(wanted: int) -> None:
    """Raise the limit of open files towards ``wanted``, as far as the machine lets us.

    systemd and many clusters start processes with 1,024, with which nobody leads a thousand members.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        room = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, room), hard))
