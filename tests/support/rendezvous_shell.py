"""A rendezvous server on the event loop of a test, around a state machine that the test scripts."""

from __future__ import annotations

import asyncio
import contextlib
import math
import socket
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, cast

from elastic_resume.rendezvous.core.interface import (
    Effect,
    EmitEvent,
    Event,
    PeerConnected,
    RendezvousSettings,
    Tick,
)
from elastic_resume.rendezvous.core.node import RendezvousNode
from elastic_resume.rendezvous.core.world import Incarnation
from elastic_resume.rendezvous.net.connection import ConnectionLimits
from elastic_resume.rendezvous.net.durable_state import DurableStateFile
from elastic_resume.rendezvous.net.server import RendezvousServer
from elastic_resume.rendezvous.net.status_server import RendezvousStatus
from tests.support.rendezvous_nodes import (
    RUN,
    TIMEOUT_S,
    TOKEN,
    authenticate,
    is_disconnected,
    listener_address,
)


class ScriptedCore:
    """A state machine that keeps its events and returns what the test gave it."""

    def __init__(self, node: RendezvousNode) -> None:
        """Show the status of ``node``."""
        self.state, self.role, self.end_reason = node.state, node.role, node.end_reason
        self.next_deadline = math.inf
        self.events: list[Event] = []
        self.effects: list[Effect] = []
        self.error: Exception | None = None

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Keep the event."""
        del now
        self.events.append(event)
        if self.error is not None:
            raise self.error
        effects, self.effects = self.effects, []
        return effects


class SlowRenderer:
    """Renders a status when it is allowed to."""

    def __init__(self) -> None:
        self.allowed = threading.Event()
        self.count = 0

    def __call__(self, _: RendezvousStatus) -> bytes:
        """Wait, and render nothing."""
        self.count += 1
        assert self.allowed.wait(TIMEOUT_S)
        return b"{}"


class Shell:
    """A server that listens, with its scripted core."""

    def __init__(self, directory: Path, limits: ConnectionLimits, **arguments: Any) -> None:
        self.effects: list[Effect] = []
        listener = socket.create_server(("127.0.0.1", 0))
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 16)  # the kernel queues little
        self.address = listener_address(listener)
        self.server = RendezvousServer(
            RendezvousSettings((self.address,), node_timeout_s=0.1),
            Incarnation("a", "disk a", 1, self.address, 0),
            listener=listener,
            run_id=RUN,
            token=TOKEN,
            state_file=DurableStateFile(directory),
            on_effect=self.effects.append,
            limits=limits,
            **arguments,
        )
        self.core = ScriptedCore(self.server._core)
        self.server._core = cast("RendezvousNode", self.core)

    def carry_out(self, *effects: Effect) -> None:
        """Let the state machine return effects."""
        self.core.effects = list(effects)
        self.server.handle_event(Tick())

    def find(self, kind: type[Event]) -> list[Any]:
        """Return the events of a class."""
        return [event for event in self.core.events if isinstance(event, kind)]

    @property
    def log_lines(self) -> list[str]:
        """Return the texts about dropped connections."""
        return [str(effect.reason) for effect in self.effects if isinstance(effect, EmitEvent)]


@contextlib.asynccontextmanager
async def serve(
    directory: Path, limits: ConnectionLimits | None = None, **arguments: Any
) -> AsyncIterator[Shell]:
    """Serve until the end of the block."""
    limits = limits or ConnectionLimits(handshake_timeout_s=TIMEOUT_S, log_interval_s=0.01)
    shell = Shell(directory, limits, **arguments)
    await shell.server.open()
    try:
        yield shell
    finally:
        await shell.server.close(1.0)
        shell.server._listener.close()
    assert shell.core.error or not shell.server.failure.done()


async def wait_on_loop(condition: Callable[[], bool]) -> None:
    """Wait for a condition on the event loop."""
    while not condition():  # noqa: ASYNC110  the test has a timeout
        await asyncio.sleep(0.001)


def dial(shell: Shell) -> socket.socket:
    """Connect to the server."""
    host, _, port = shell.address.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=TIMEOUT_S)


async def join(shell: Shell, peer: socket.socket) -> int:
    """Authenticate a peer; return the number of its connection."""

    def find_accepted() -> list[int]:
        """Connections that the server dials itself have numbers above zero."""
        return [event.conn_id for event in shell.find(PeerConnected) if event.conn_id < 0]

    known = len(find_accepted())
    await asyncio.to_thread(authenticate, peer)
    await wait_on_loop(lambda: len(find_accepted()) > known)
    return find_accepted()[-1]


async def ends(peer: socket.socket) -> bool:
    """Return whether the server closes the connection."""
    return await asyncio.to_thread(is_disconnected, peer)


def count_timers(callback: Callable[[], None] | None = None) -> int:
    """Return how many timers of the event loop will call a function, or any."""
    timers = asyncio.get_running_loop()._scheduled  # type: ignore[attr-defined]
    return sum(callback in {None, timer._callback} and not timer.cancelled() for timer in timers)
