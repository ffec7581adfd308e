"""Takes a node's pulse: how far its workers are and how fast, which copies it has, what is wrong with it.

From the board, the slots and the node's own events, once a second, with no system call that waits for a disk.
Decides nothing.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

from elastic_resume import contract
from elastic_resume.events import Event, age_s
from elastic_resume.rendezvous.tidings import Pulse
from elastic_resume.store import slots
from elastic_resume.store.board import read_lines
from elastic_resume.store.slots import SlotState, order_of

LOOKS = 3
WINDOW_S = 10.0
"""A rate of steps is one over so many seconds of one generation."""


class Finger:
    """Takes the pulse of one node."""

    def __init__(
        self,
        node_dir: Path,
        workers: int,
        *,
        states: Callable[[], list[SlotState]],
        trouble: Callable[[], str],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``states`` gives those of its slots; ``trouble`` says what is wrong with its disk or memory."""
        self._board = node_dir / contract.BOARD_FILE
        self._pid = os.getpid()
        self._workers = workers
        self._states = states
        self._trouble = trouble
        self._clock = clock
        self._steps: deque[tuple[float, int]] = deque()
        self._generation = 0
        self._snapshot: tuple[int, float] | None = None  # mark, and when it was first seen
        self._checkpoint: tuple[int, float] | None = None  # step, and when it was committed
        self._commits = self._commit_failures = self._commit_bytes = 0
        self._commit_s = 0.0

    def note(self, event: Event) -> None:
        """Take in an event of this node."""
        if event["event"] == "commit":
            self._commits += 1
            self._commit_bytes += int(_number(event.get("bytes")))
            self._commit_s += _number(event.get("seconds"))
            self._checkpoint = (int(_number(event.get("step"))), self._clock() - age_s(event))
        elif event["event"] == "commit-failed":
            self._commit_failures += 1

    def take(self, incidents: int) -> Pulse:
        """Take it. ``incidents``: how many this node has seen."""
        now = self._clock()
        # Ranks finish a step together: the slowest tells how far the node is.
        lines = [
            line for line in read_lines(self._board, self._workers) if line.worker.agent_pid == self._pid
        ]
        generation = max((line.generation for line in lines), default=0)
        step = min((line.step for line in lines if line.generation == generation), default=0)
        # Words are read one after the other while training goes on: at times no slot seems to be whole.
        newest = next((one for _ in range(LOOKS) if (one := slots.newest(self._states())) is not None), None)
        if newest is not None and (self._snapshot is None or newest.target != self._snapshot[0]):
            self._snapshot = (newest.target, now)
        held = self._snapshot if newest is not None else None
        return Pulse(
            generation=generation,
            step=step,
            steps_per_s=round(self._rate(now, generation, step), 4),
            world_size=max((line.world_size for line in lines), default=0),
            workers=self._workers,
            snapshot_step=order_of(held[0])[1] if held else None,
            snapshot_age_s=round(now - held[1], 3) if held else 0.0,
            checkpoint_step=self._checkpoint[0] if self._checkpoint else None,
            checkpoint_age_s=round(now - self._checkpoint[1], 3) if self._checkpoint else 0.0,
            commits=self._commits,
            commit_s=round(self._commit_s, 3),
            commit_bytes=self._commit_bytes,
            commit_failures=self._commit_failures,
            incidents=incidents,
            trouble=self._trouble()[:500],
        )

    def _rate(self, now: float, generation: int, step: int) -> float:
        if generation != self._generation or (self._steps and step < self._steps[-1][1]):
            self._generation = generation
            self._steps.clear()
        self._steps.append((now, step))
        while len(self._steps) > 2 and self._steps[1][0] <= now - WINDOW_S:
            self._steps.popleft()
        began, first = self._steps[0]
        return (step - first) / (now - began) if now > began else 0.0


def _number(value: object) -> float:
    return float(value) if isinstance(value, (int, float)) and 0 <= value < 1 << 53 else 0.0
