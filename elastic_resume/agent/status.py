"""Tells people how the job stands: this node's part to whoever leads, and all of it to those who look here.

A thread takes the node's pulse once a second, reads what is new in its event log, and hands both to the
rendezvous; what other nodes tell it writes into ``peers.jsonl``. Who looks gets a document made of that
(`document.py`). Where to look, and with which key, stands in ``look.json`` of the node's directory, for those
whom its file mode lets read it.
What befell the job before is asked of the disk when it begins (`recalling.py`).

Promise: neither the rendezvous nor training waits for anything here, and an error here costs them nothing.

Takes a node's pulse: how far its workers are and how fast, which copies it has, what is wrong with it.

From the board, the slots and the node's own events, once a second, with no system call that waits for a disk.
Decides nothing.

What those who look are given: one JSON object, made of what this agent sees and what nodes have told it.

``elastic-resume status --json`` prints it, and metrics are made of it, so names stay once they are there:
`constants.STATUS_VERSION` counts what is not merely added. A leader's document tells of all nodes; another's of itself, and
who leads. Pure but for the clocks. It takes time in proportion to the number of nodes: there may be 10,000.

Lines of event logs on their way to people: this node's own out of its file, other nodes' into a file.

So a report that is made on a node which led knows what befell nodes whose disks are gone. It promises that
nothing here waits for a disk in the rendezvous' thread, that neither file costs more than its limit, and that
a disk that refuses costs lines and nothing else.

What befell a job before this agent's life, from what lies on its node's disk. Read once, when it begins.

The node's own log has what it saw in earlier lives; ``peers.jsonl`` what others told it while it led. So
whoever comes to lead counts incidents from the job's beginning, and not from its own.

Promise: of each file the newest `MOST_BYTES` are read, for `MOST_S` in all, and few of them are kept. What is
not read is not counted; nothing is counted that did not happen.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

from elastic_resume import constants
from elastic_resume.checkpoint.atomic_io import DISK, Disk
from elastic_resume.errors import MachineError
from elastic_resume.events import Event, age_s, count_of, parse
from elastic_resume.policy.incidents import BOUNDS_S, Tally
from elastic_resume.rendezvous.client import Member
from elastic_resume.rendezvous.core.events import Heard
from elastic_resume.rendezvous.core.quorum import Incarnation
from elastic_resume.rendezvous.core.status import Pulse
from elastic_resume.rendezvous.status_view import View
from elastic_resume.snapshot import slots
from elastic_resume.snapshot.progress_page import read_lines
from elastic_resume.snapshot.slots import SlotState, order_of

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
        self._board = node_dir / constants.BOARD_FILE
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


MAX_INCIDENTS = 10
STALE_S = 60.0
"""A node that is in no world, no spare, and has told nothing for so long is left out."""
_TOLD = [one.name for one in fields(Pulse)]
_SILENT = Pulse()


@dataclass(frozen=True)
class Known:
    """What a node told last, and when it was heard, on this process's monotonic clock."""

    pulse: Pulse
    heard_at: float


def make(
    view: View,
    known: Mapping[str, Known],
    tally: Tally,
    *,
    run_id: str,
    missed: int,
) -> dict[str, Any]:
    """Make the document. ``missed``: lines of other nodes' logs that did not come through."""
    world, sums = view.world, tally.sums()
    ranks = {one.node: rank for rank, one in enumerate(world.members)} if world else {}
    nodes = [_node(one, ranks.get(one), known.get(one)) for one in _names(view, known)]
    running = [one for one in nodes if world and one["generation"] == world.generation]
    furthest = max(running, key=lambda one: int(one["step"]), default=None)
    return {
        "version": constants.STATUS_VERSION,
        "run_id": run_id,
        "t": round(time.time(), 3),
        "node": view.me.node,
        "address": view.me.address,
        "leads": view.leads,
        "leader": _place(view.leader) if view.leader else None,
        "generation": view.generation,
        "world": {
            "generation": world.generation,
            "nodes": [one.node for one in world.members],
            "addresses": [one.address for one in world.members],
            "ranks": max((int(one["world_size"]) for one in running), default=0),
        }
        if world
        else None,
        "spares": list(view.spares),
        "missing": list(view.missing),
        "waiting": view.waiting,
        "over": view.over,
        "step": furthest["step"] if furthest else max((int(one["step"]) for one in nodes), default=0),
        "steps_per_s": furthest["steps_per_s"] if furthest else 0.0,
        "nodes": nodes,
        "incidents": [asdict(one) for one in tally.incidents()[-MAX_INCIDENTS:]],
        "sums": {
            "incidents": dict(sums.incidents),
            "lost_steps": sums.lost_steps,
            "recovery_bounds_s": list(BOUNDS_S),
            "recoveries": sums.recoveries,
            "recovery_s": round(sums.recovery_s, 3),
        },
        "missed_lines": missed,
    }


def _place(who: Incarnation) -> dict[str, str]:
    return {"node": who.node, "address": who.address}


def _names(view: View, known: Mapping[str, Known]) -> list[str]:
    """Members in the order of their ranks, then the others."""
    if not view.leads:
        return [view.me.node]
    members = [one.node for one in view.world.members] if view.world else []
    now = time.monotonic()
    others = {view.me.node, *view.spares}
    if not view.world:
        others |= {name for name, one in known.items() if now < one.heard_at + STALE_S}
    return [*members, *sorted(others - set(members))]


def _node(name: str, rank: int | None, one: Known | None) -> dict[str, Any]:
    """One node's part. Ages are as of now: those that it told, and how long ago that was."""
    told = one.pulse if one else _SILENT
    pulse = {field: getattr(told, field) for field in _TOLD}
    heard_s = time.monotonic() - one.heard_at if one else None
    for what in ("snapshot", "checkpoint"):
        age_s = pulse.pop(f"{what}_age_s")
        there = pulse[f"{what}_step"] is not None and heard_s is not None
        pulse[f"{what}_age_s"] = round(age_s + (heard_s or 0.0), 3) if there else None
    return {
        "node": name,
        "node_rank": rank,
        "heard_s": round(heard_s, 3) if heard_s is not None else None,
        **pulse,
    }


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


MOST_BYTES = 64 << 20
"""Most of a log are marks of steps, ten a second and rank at most: that is half a day of one rank."""
MOST_S = 2.0
_STEP = b'"event":"step"'


def recall(node_dir: Path, end: int, *, most_bytes: int = MOST_BYTES, most_s: float = MOST_S) -> Tally:
    """Give the incidents that the node's files tell of, of its log up to byte ``end``."""
    until = time.monotonic() + most_s
    tally, newest = Tally(), 0
    since = float("-inf") if end <= most_bytes else float("inf")
    for event in _events(node_dir / constants.EVENTS_FILE, end, most_bytes, until):
        since = min(since, event["t"])
        newest = max(newest, count_of(event, "generation") or 0)
        tally.take(event)
    for event in _events(node_dir / constants.PEERS_FILE, None, most_bytes, until):
        # Of a time of which its own log is not read, others' lines say too little of why worlds ended.
        if event["t"] >= since:
            tally.take(event, newest)
    return tally


def _events(path: Path, end: int | None, most_bytes: int, until: float) -> Iterator[Event]:
    """Give what a log tells up to byte ``end``; of the steps of a generation the first."""
    known = b""  # how a step of the generation that is read looks
    try:
        with open(path, "rb") as file:
            end = path.stat().st_size if end is None else end
            if end > most_bytes:
                file.seek(end - most_bytes)
                file.readline()
            place = file.tell()
            for line in file:
                place += len(line)
                if place > end or time.monotonic() > until:
                    return
                if known and _STEP in line and known in line:
                    continue
                event = parse(line)
                if event is not None:
                    yield event
                    if event["event"] == "step":
                        known = b'"generation":%d,' % (count_of(event, "generation") or 0)
    except OSError:
        return


EVERY_S = 1.0
FRESH_S = 0.3
"""So long who looks gets the same document as the one before."""
CLOSE_S = 2.0
SLACK = 8
"""So far beyond the newest world that this agent knows of may be one that another tells of."""
MAX_HEARD_BYTES = 8 << 20
"""Of lines that wait to be written to a slow disk."""


class Teller:
    """The teller of one agent, from `start` to `close`."""

    def __init__(
        self,
        node_dir: Path,
        run_id: str,
        finger: Finger,
        tail: Tail,
        *,
        say: Callable[[str], None],
    ) -> None:
        """``finger`` takes the node's pulse, ``tail`` reads its events, ``say`` gets a line for people."""
        self._run_id = run_id
        self._node_dir = node_dir
        self._look_file = node_dir / constants.LOOK_FILE
        self._finger = finger
        self._say = say
        self._member: Member | None = None
        self._tail = tail
        self._picker = Picker()
        self._peers = Peers(node_dir / constants.PEERS_FILE)
        self._tally = Tally()
        self._nodes: dict[str, Known] = {}
        self._heard: deque[str] = deque()
        self._heard_bytes = 0
        self._newest = 0  # generation that the rendezvous knows of
        self._next: dict[str, int] = {}  # number of the line that each life of a node tells next
        self._missed = 0
        self._shown: tuple[float, bytes] = (float("-inf"), b"")
        self._said = ""
        self._lock = threading.Lock()  # of what the rendezvous' thread touches too: never held for long
        self._showing = threading.Lock()  # of the tally, and of what was shown last
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._live, name="elastic-resume-teller", daemon=True)

    def start(self, member: Member, key: bytes) -> None:
        """Tell and be told through ``member``; ``key`` lets people look."""
        self._member = member
        with contextlib.suppress(OSError):  # a disk that refuses is told of by who has to write to it
            _write_private(
                self._look_file,
                {
                    "run_id": self._run_id,
                    "address": member.address,
                    "endpoints": list(member.candidates),
                    "key": key.hex(),
                },
            )
        self._thread.start()

    def close(self) -> None:
        """End it; no later than `CLOSE_S` from now, though a disk hangs."""
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join(CLOSE_S)

    # ---- the rendezvous' thread ----------------------------------------------------------------------

    def hear(self, heard: Heard) -> None:
        """Take in what another node tells."""
        node, life, tidings = heard.who.node, str(heard.who.life), heard.tidings
        with self._lock:
            if tidings.pulse is not None:
                self._nodes[node] = Known(tidings.pulse, time.monotonic())
            self._newest = max(self._newest, heard.newest)
            expected = self._next.get(life, tidings.first)  # a leader before this one may have heard the rest
            self._missed += max(0, tidings.first - expected)
            new = tidings.news[max(0, expected - tidings.first) :]
            self._next[life] = max(expected, tidings.first + len(tidings.news))
            self._heard.extend(new)
            self._heard_bytes += sum(map(len, new))
            while self._heard_bytes > MAX_HEARD_BYTES:
                self._heard_bytes -= len(self._heard.popleft())
                self._missed += 1

    # ---- those who look: a thread of the rendezvous ---------------------------------------------------

    def show(self, view: View) -> bytes:
        """Give the document for those who look; see `document.make`."""
        with self._showing:
            made_at, shown = self._shown
            if time.monotonic() < made_at + FRESH_S:
                return shown
            with self._lock:
                nodes, missed = dict(self._nodes), self._missed + self._peers.lost
            made = make(
                view,
                nodes,
                self._tally,
                run_id=self._run_id,
                missed=missed,
            )
            shown = json.dumps(made, separators=(",", ":")).encode()
            self._shown = (time.monotonic(), shown)
            return shown

    # ---- the thread ----------------------------------------------------------------------------------

    def _live(self) -> None:
        self._try(self._recall)
        ends = False
        while not ends:
            ends = self._closing.wait(EVERY_S)
            self._try(partial(self._turn, last=ends))
        with contextlib.suppress(OSError):
            self._look_file.unlink(missing_ok=True)

    def _try(self, what: Callable[[], None]) -> None:
        try:
            what()
        except Exception as error:  # noqa: BLE001 - a fault of ours must not end what people are told
            if repr(error) != self._said:
                self._said = repr(error)
                self._say(f"status: a fault of elastic_resume itself: {error!r:.500}. Training goes on.")

    def _recall(self) -> None:
        """Begin with the incidents that are known here: before any new event, as they are taken in order."""
        tally = recall(self._node_dir, self._tail.began)
        with self._showing:
            self._tally = tally

    def _turn(self, *, last: bool) -> None:
        own = self._tail.read()
        with self._lock:
            heard, self._heard, self._heard_bytes = self._heard, deque(), 0
            newest = self._newest + SLACK
        told = list(parsed(heard))
        try:
            self._tell(own, [event for _, event in told], newest)
        finally:  # whatever it was, they are told once
            self._peers.append((line for line, _ in told), last=last)

    def _tell(self, own: list[tuple[str, Event]], heard: list[Event], newest: int) -> None:
        with self._showing:
            for _, event in own:
                self._tally.take(event)
            for event in heard:
                self._tally.take(event, newest)
            incidents = len(self._tally.incidents())
        for _, event in own:
            self._finger.note(event)
        pulse = self._finger.take(incidents)
        member = self._member
        if member is not None:
            with self._lock:
                self._nodes[member.node] = Known(pulse, time.monotonic())
            member.tell_people(pulse, [line for line, event in own if self._picker.wants(event)])


def _write_private(path: Path, said: dict[str, object]) -> None:
    """Write a small file that nobody else may read, the one that stands there included."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with open(descriptor, "w", encoding="utf-8") as file:
        os.fchmod(descriptor, 0o600)
        file.write(json.dumps(said) + "\n")
