"""One agent on an event loop: sockets, a clock and a disk around the core.

It turns what happens into events, hands them to `core.Agent`, and carries out the effects. It decides
nothing. What it promises: a message reaches the core only after both sides have proved who they are; nothing
that a stranger sends grows memory beyond `Limits`; `Persisted` is said only after fsync, however often the
disk refuses; an error of our own ends it rather than leave half a core at work. The core's times are
CLOCK_BOOTTIME: a jump of the wall clock changes nothing, and leases run on while the machine is suspended.

Knows no thread: `shell` gives it one.

A thread for a `node.Node`: the rendezvous of one agent's process.

Everything but `start`, `submit` and `stop` happens in that thread, on a loop of its own. What it promises: an
error of our own ends the thread, which is seen by `alive` and told by `threading.excepthook`.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import math
import resource
import secrets
import socket
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from elastic_resume.errors import MachineError
from elastic_resume.rendezvous.core.events import (
    Connect,
    Disconnect,
    Effect,
    Event,
    ForceQuorum,
    Log,
    MessageArrived,
    PeerConnected,
    PeerLost,
    Persist,
    Persisted,
    Send,
    Settings,
    Tick,
)
from elastic_resume.rendezvous.core.messages import Message
from elastic_resume.rendezvous.core.node import Agent
from elastic_resume.rendezvous.core.quorum import Incarnation
from elastic_resume.rendezvous.endpoint import Resolve, lookup
from elastic_resume.rendezvous.net import protocol
from elastic_resume.rendezvous.net.connection import Channel, connect, end_lookups
from elastic_resume.rendezvous.net.durable_state import Record
from elastic_resume.rendezvous.net.handshake_limiter import Door, Limits, Notices
from elastic_resume.rendezvous.net.status import Window
from elastic_resume.rendezvous.status_view import View, look

BACKLOG = 1024
"""Members of a large job that call at once wait in the kernel, not in a time-out."""
DISK_PAUSE_S = 1.0
"""Between two attempts to write to a disk that refuses."""
DISK_NEWS_S = 60.0
"""Between two lines that say so."""
FORCE_LOOK_S = 0.5
"""Between two looks for the file of ``elastic-resume force-quorum``, while no workers run."""
SWEEPS = 2
"""Somebody has been mute for so many sweeps, however long this process itself paused in between."""


def now_s() -> float:
    """Return the seconds since boot, suspends included: what leases and the fence are counted in."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Node:
    """One agent on the running event loop: `open` it, give it events with `happen`, `close` it.

    Everything is called on that loop; effects that are not its own go to ``carry_out``.
    """

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
        """See `Shell`."""
        self._resolve = resolve
        self._settings = settings
        self._listener = listener
        self._run_id = run_id
        self._token = token
        self._record = record
        self._carry_out = carry_out
        self._limits = limits or Limits()
        self._watch = watch
        self._loop = asyncio.get_running_loop()
        self._agent = Agent(settings, me, record.memory, now_s(), seen)
        self._channels: dict[int, Channel] = {}  # the core's links
        self._sockets: set[Channel] = set()  # whatever has one, the closing ones too
        self._last_freed = asyncio.Event()
        self._door = Door(self._limits.unproven)
        self._notices = Notices(self._limits.notice_s, self._tell_of_strangers, self._loop.call_later)
        self._window = Window(self._limits, show)
        self._tasks: set[asyncio.Task[None]] = set()
        self._dials: dict[Channel, asyncio.Task[None]] = {}
        self._accepted = 0
        self._timer: asyncio.TimerHandle | None = None
        self._timer_due = math.inf
        self._sweeper: asyncio.TimerHandle | None = None
        self._force_timer: asyncio.TimerHandle | None = None
        self._body: tuple[Message, bytes] | None = None
        self._server: asyncio.Server | None = None
        self._closing = False
        # Not the loop's own threads: lookups of names that hang may hold all of those.
        self._disk = ThreadPoolExecutor(1, "elastic-resume-record")
        self.fault: asyncio.Future[BaseException] = self._loop.create_future()
        """An error of our own, when there is one: the agent cannot go on."""

    # ---- its life ------------------------------------------------------------------------------------

    async def open(self) -> None:
        """Listen, and look for the others."""
        self._server = await self._loop.create_server(self._accept, sock=self._listener, backlog=BACKLOG)
        self._sweep()
        self._look_for_force()
        self.happen(Tick())

    async def close(self, linger_s: float) -> None:
        """Write and send what is queued, for so long at most, and leave no socket and no task behind."""
        await self._written(linger_s)
        self._closing = True  # the core takes no part any more: it would dial those who are being left
        for timer in (self._timer, self._sweeper, self._force_timer):
            if timer is not None:
                timer.cancel()
        if self._server is not None:
            self._server.close()
        for channel in list(self._sockets):
            channel.part()
        for task in (*self._tasks, *self._dials.values()):
            task.cancel()
        await self._window.close()
        await asyncio.gather(*self._tasks, *self._dials.values(), return_exceptions=True)
        await self._freed(linger_s)
        for channel in self._sockets:
            channel.abort()
        await self._freed(linger_s)
        self._disk.shutdown(wait=False)

    async def _written(self, patience_s: float) -> None:
        """Let the disk have the last word: an end that is forgotten would hold up the job's next start."""
        deadline = self._loop.time() + patience_s
        while self._tasks and not self._closing and self._loop.time() < deadline:
            await asyncio.wait(self._tasks, timeout=deadline - self._loop.time())

    async def _freed(self, patience_s: float) -> None:
        if self._sockets:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._last_freed.wait(), patience_s)

    def happen(self, event: Event) -> None:
        """Hand an event to the core and carry out what follows."""
        if self._closing:
            return
        try:
            effects = self._agent.handle(event, now_s())
            if self._watch is not None:
                self._watch(self._agent)
            for effect in effects:
                self._do(effect)
            self._set_timer()
        except Exception as error:  # noqa: BLE001  handed to whoever runs this node
            self._give_up(error)

    def _give_up(self, error: BaseException) -> None:
        self._closing = True
        if not self.fault.done():
            self.fault.set_result(error)

    def _set_timer(self) -> None:
        """Have a timer that is never too late. One that is too early costs less than a new one each time."""
        due = self._agent.next_deadline
        if self._timer is not None and self._timer_due > due:
            self._timer.cancel()
            self._timer = None
        if self._timer is None and due != math.inf:
            # The loop's own clock stands still during a suspend: what is due comes at most a heartbeat late.
            self._timer = self._loop.call_later(max(0.0, due - now_s()), self._tick)
            self._timer_due = due

    def _tick(self) -> None:
        self._timer = None
        if now_s() >= self._agent.next_deadline:
            self.happen(Tick())
        else:
            self._set_timer()

    def _do(self, effect: Effect) -> None:
        if isinstance(effect, Send):
            self._send(effect)
        elif isinstance(effect, Connect):
            channel = self._call(effect.conn)
            self._channels[effect.conn] = channel
            self._dials[channel] = self._loop.create_task(self._dial(channel, effect.address, effect.host))
        elif isinstance(effect, Disconnect):
            self._hang_up(effect.conn)
        elif isinstance(effect, Persist):
            self._spawn(self._persist(effect))
        else:
            self._carry_out(effect)

    def _spawn(self, work: Coroutine[object, object, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # ---- the disk ------------------------------------------------------------------------------------

    async def _persist(self, effect: Persist) -> None:
        told_at = float("-inf")
        write = functools.partial(self._record.write, effect.memory)
        while True:
            try:
                # In a thread of its own: a slow disk must not stop heartbeats.
                await self._loop.run_in_executor(self._disk, write)
                break
            except MachineError as error:
                if self._loop.time() >= told_at + DISK_NEWS_S:
                    told_at = self._loop.time()
                    self._carry_out(Log("disk", f"{str(error).rstrip('.')}; trying again"))
            except Exception as error:  # noqa: BLE001  as in `happen`
                # Under plain torchrun the interpreter may be ending, and no thread takes work any more.
                if not self._closing and threading.main_thread().is_alive():
                    self._give_up(error)
                return
            await asyncio.sleep(DISK_PAUSE_S)
        self.happen(Persisted(effect.number))

    def _look_for_force(self) -> None:
        if self._agent.running is None and not self._agent.over and self._agent.can_force_quorum:
            self._spawn(self._take_force())
        else:
            self._force_timer = self._loop.call_later(FORCE_LOOK_S, self._look_for_force)

    async def _take_force(self) -> None:
        """Hand an operator's declaration to the core. The file goes after what the core knows is written."""
        generation = await self._loop.run_in_executor(self._disk, self._record.read_force)
        if generation is not None:
            self.happen(ForceQuorum(generation))
            await self._loop.run_in_executor(self._disk, self._record.drop_force)
        self._force_timer = self._loop.call_later(FORCE_LOOK_S, self._look_for_force)

    # ---- connections, as the core sees them ----------------------------------------------------------

    def _send(self, effect: Send) -> None:
        channel = self._channels.get(effect.conn)
        if channel is None:
            return
        if self._body is None or self._body[0] is not effect.message:
            # One message to a thousand members is put into words once.
            self._body = (effect.message, protocol.body_of(effect.message))
        channel.send(protocol.line_of(effect.stamp, self._body[1]))
        if channel.queued_bytes > self._limits.backlog_bytes:
            # Not before the effects that follow are carried out.
            self._loop.call_soon(self._cut_off, channel)

    def _cut_off(self, channel: Channel) -> None:
        channel.drop(f"it has not read {channel.queued_bytes} bytes")

    def _hang_up(self, number: int) -> None:
        channel = self._channels.pop(number, None)
        if channel is not None:
            channel.part()
            self._forget(channel)

    def _accept(self) -> Channel:
        handshake = protocol.accept(self._token, self._run_id, secrets.token_hex(32))
        return Channel(self, handshake, self._limits.handshake_s)

    def _call(self, number: int) -> Channel:
        nonce = secrets.token_hex(32)
        handshake = protocol.call(self._token, self._run_id, nonce)
        parting = protocol.parting(self._token, self._run_id, nonce)
        return Channel(self, handshake, self._limits.handshake_s, number, parting)

    async def _dial(self, channel: Channel, address: str, host: str) -> None:
        try:
            await connect(channel, address, self._resolve, host)
        except (OSError, ValueError) as error:
            channel.failed(error)
        finally:
            self._dials.pop(channel, None)

    def _forget(self, channel: Channel) -> None:
        """Stop what is done for a connection that is over."""
        self._door.leave(channel)
        dial = self._dials.get(channel)
        if dial is not None:
            dial.cancel()

    # ---- connections, as they tell (`channel.Owner`) -------------------------------------------------

    def opened(self, channel: Channel) -> None:
        """Let it wait at the door, unless we called."""
        self._sockets.add(channel)
        if self._closing:
            channel.abort()
        elif channel.number == 0 and len(self._channels) >= self._limits.connections:
            channel.drop(f"{len(self._channels)} connections are open already")
        elif channel.number == 0:
            self._door.enter(channel)

    def proven(self, channel: Channel) -> None:
        """Tell the core, which knows the connection from now on; but not of those who only look."""
        self._door.leave(channel)
        if channel.looks:
            self._window.enter(channel, functools.partial(look, self._agent))
            return
        if channel.number == 0:
            self._accepted -= 1
            channel.number = self._accepted
            self._channels[channel.number] = channel
        self.happen(PeerConnected(channel.number, channel.host if channel.number > 0 else ""))

    def heard(self, channel: Channel, line: bytes) -> None:
        """Hand a message to the core."""
        if channel.looks:
            raise protocol.WireError("it came to look, and goes on talking")
        stamp, message = protocol.decode(line)
        self.happen(MessageArrived(channel.number, stamp, message))

    def ended(self, channel: Channel, *, closed: bool, why: str) -> None:
        """Tell the core, if it knew of it."""
        self._forget(channel)
        if self._channels.pop(channel.number, None) is not None:
            self.happen(PeerLost(channel.number, why=why, refused=channel.refused))
        if closed and channel.greeted and not channel.is_proven:
            self.dropped(channel, "it left before it had proved that it holds the run's token")

    def dropped(self, channel: Channel, why: str) -> None:
        """Tell people."""
        if channel in self._sockets and not self._closing:
            self._notices.note(channel.peer, why)

    def freed(self, channel: Channel) -> None:
        """Count it no more."""
        self._sockets.discard(channel)
        self._window.leave(channel)
        if not self._sockets and self._closing:
            self._last_freed.set()

    # ---- strangers -----------------------------------------------------------------------------------

    def _tell_of_strangers(self, text: str) -> None:
        if not self._closing:
            self._carry_out(Log("stranger", f"a connection was dropped: {text}"))

    def _sweep(self) -> None:
        """Drop those who hold the token and say nothing. Members do, and those who wait for a leader too."""
        longest_s = max(self._limits.mute_s, 5 * self._settings.node_timeout_s)
        self._sweeper = self._loop.call_later(longest_s / SWEEPS, self._sweep)
        for channel in [one for number, one in self._channels.items() if number < 0]:
            channel.mute += 1
            if channel.mute > SWEEPS:
                channel.drop(f"it has said nothing for {longest_s:g} s")


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
