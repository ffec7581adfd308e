"""Lines of event logs on their way to people: this node's own out of its file, other nodes' into a file.

So a report that is made on a node which led knows what befell nodes whose disks are gone. It promises that
nothing here waits for a disk in the rendezvous' thread, that neither file costs more than its limit, and that
a disk that refuses costs lines and nothing else.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from elastic_resume.errors import MachineError
from elastic_resume.events import Event, parse
from elastic_resume.store.durable import DISK, Disk

MAX_READ_BYTES = 1 << 20
MAX_PEERS_BYTES = 16 << 20
PAUSE_S = 1.0
LONGEST_PAUSE_S = 30.0
"""Between two tries at a disk that refuses: one that is full takes megabytes, and gives them back."""
MOST_OWN = 1000
"""Lines of the agent's own that wait for the next look; it writes a few in a second."""
STEP_EVERY_S = 60.0
# What a report cannot do without, and is told seldom.
KINDS = frozenset({
    "agent-start", "round", "rendezvous", "zygote-exit", "worker-exit", "hang", "hang-over", "drain",
    "requeue", "preemption-notice", "verdict", "replicas-differ", "agent-end",
    "resume", "worker-start", "commit", "commit-failed", "prune", "snapshot-failed", "quarantine", "failure",
    "run-end",
})  # fmt: skip


class Tail:
    """Gives what is new in a node's events: of other processes as their file has it, of this one as it comes.

    A disk that fails takes lines without a word and loses them: the agent's own, which tell of that, do not
    take the way over the disk.
    """

    def __init__(self, path: Path) -> None:
        """Begin where the file ends now."""
        self._path = path
        self._offset = self.began = _size(path)
        self._own: deque[str] = deque(maxlen=MOST_OWN)

    def hear(self, line: str) -> None:
        """Take in an event that this process writes. From any thread."""
        self._own.append(line)

    def read(self) -> list[tuple[str, Event]]:
        """Give the lines that are new, and what they say, by time."""
        of_others = [found for found in parsed(self._appended()) if found[1].get("pid") != os.getpid()]
        own = parsed([self._own.popleft() for _ in range(len(self._own))])
        return sorted([*of_others, *own], key=lambda found: found[1]["t"])

    def _appended(self) -> list[str]:
        """Give the file's new lines. Of more than `MAX_READ_BYTES` the oldest are passed over."""
        try:
            with open(self._path, "rb") as file:
                end = os.fstat(file.fileno()).st_size
                skips = end - self._offset > MAX_READ_BYTES
                self._offset = end - MAX_READ_BYTES if skips else min(self._offset, end)
                file.seek(self._offset)
                data = file.read(MAX_READ_BYTES)
        except OSError:
            return []
        whole = data.rfind(b"\n") + 1
        self._offset += whole
        lines = data[:whole].splitlines()[1 if skips else 0 :]
        return [line.decode(errors="replace") for line in lines]


class Picker:
    """Picks the lines that others should hear of. Steps are many, and all nodes finish the same ones."""

    def __init__(self) -> None:
        self._generation: object = None
        self._step_at = float("-inf")

    def wants(self, event: Event) -> bool:
        """Whether to tell this one: of steps the first of each generation, and one a minute."""
        if event["event"] != "step":
            return event["event"] in KINDS
        # A clock that was set back is no reason to be silent until it has caught up.
        is_soon = self._step_at <= event["t"] < self._step_at + STEP_EVERY_S
        if event.get("generation") == self._generation and is_soon:
            return False
        self._generation, self._step_at = event.get("generation"), event["t"]
        return True


class Peers:
    """The file of what other nodes have told. What the disk refuses waits in memory for the next try.

    After a refusal that is a while, twice as long each time; what the disk takes ends it.
    """

    def __init__(
        self,
        path: Path,
        limit: int = MAX_PEERS_BYTES,
        disk: Disk = DISK,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Of a file that would grow beyond ``limit`` bytes the older half is given up, of what waits too."""
        self._path = path
        self._limit = limit
        self._disk = disk
        self._clock = clock
        self._waiting: deque[bytes] = deque()
        self._waiting_bytes = 0
        self._dropped = 0
        self._pause_s = 0.0
        self._due = float("-inf")  # the next try

    @property
    def lost(self) -> int:
        """How many lines are not on the disk: too many at once, or it refuses them."""
        return self._dropped + len(self._waiting)

    def append(self, lines: Iterable[str], *, last: bool = False) -> None:
        """Write them behind what is there, or keep them for later; ``last``: there is no later."""
        for line in lines:
            self._waiting.append(line.encode(errors="replace") + b"\n")
            self._waiting_bytes += len(self._waiting[-1])
        while self._waiting_bytes > self._limit // 2:
            self._waiting_bytes -= len(self._waiting.popleft())
            self._dropped += 1
        if not self._waiting or (self._clock() < self._due and not last):
            return
        if self._write():
            self._waiting.clear()
            self._waiting_bytes = 0
            self._pause_s = 0.0
        else:
            self._pause_s = min(max(2 * self._pause_s, PAUSE_S), LONGEST_PAUSE_S)
            self._due = self._clock() + self._pause_s

    def _write(self) -> bool:
        """Write all that waits; whether the disk has taken it. Of a part that it takes nothing is left."""
        size = _size(self._path)
        try:
            if size + self._waiting_bytes > self._limit:
                self._halve(size)
                size = _size(self._path)
            with open(self._path, "ab") as file:
                file.write(b"".join(self._waiting))
        except (OSError, MachineError):
            with contextlib.suppress(OSError):
                os.truncate(self._path, size)
            return False
        return True

    def _halve(self, size: int) -> None:
        with open(self._path, "rb") as file:
            file.seek(size - self._limit // 2)
            data = file.read(self._limit // 2)
        self._disk.write_atomic(self._path, data[data.find(b"\n") + 1 :])


def parsed(lines: Iterable[str]) -> Iterator[tuple[str, Event]]:
    """Give the lines that are events, each with what it says."""
    for line in lines:
        event = parse(line)
        if event is not None:
            yield line, event


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
