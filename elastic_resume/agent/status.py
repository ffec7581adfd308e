"""Tells people how the job stands: this node's part to whoever leads, and all of it to those who look here.

A thread takes the node's pulse once a second, reads what is new in its event log, and hands both to the
rendezvous; what other nodes tell it writes into ``peers.jsonl``. Who looks gets a document made of that
(`document.py`). Where to look, and with which key, stands in ``agent-endpoint.json`` of the node's directory, for those
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
from elastic_resume.events import Event, age_s, get_count, parse_line
from elastic_resume.policy.incidents import RECOVERY_BUCKETS_S, IncidentTracker
from elastic_resume.rendezvous.client import RendezvousClient
from elastic_resume.rendezvous.core.events import DeliverPeerStatus
from elastic_resume.rendezvous.core.quorum import Incarnation
from elastic_resume.rendezvous.core.status import NodeStatus
from elastic_resume.rendezvous.net.status import RendezvousStatus
from elastic_resume.snapshot import slots
from elastic_resume.snapshot.progress_page import read_records
from elastic_resume.snapshot.slots import SlotState, decode_snapshot_id

MAX_SLOT_READS = 3
RATE_WINDOW_S = 10.0
"""A rate of steps is one over so many seconds of one generation."""


class StatusSampler:
    """Takes the pulse of one node."""

    def __init__(
        self,
        node_dir: Path,
        local_world_size: int,
        *,
        read_slot_states: Callable[[], list[SlotState]],
        describe_problem: Callable[[], str],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``states`` gives those of its slots; ``trouble`` says what is wrong with its disk or memory."""
        self._progress_page_path = node_dir / constants.PROGRESS_FILE
        self._pid = os.getpid()
        self._local_world_size = local_world_size
        self._read_slot_states = read_slot_states
        self._describe_problem = describe_problem
        self._clock = clock
        self._steps: deque[tuple[float, int]] = deque()
        self._generation = 0
        self._snapshot: tuple[int, float] | None = None  # mark, and when it was first seen
        self._checkpoint: tuple[int, float] | None = None  # step, and when it was committed
        self._commits = self._commit_failures = self._commit_bytes = 0
        self._commit_s = 0.0

    def record_event(self, event: Event) -> None:
        """Take in an event of this node."""
        if event["event"] == "commit":
            self._commits += 1
            self._commit_bytes += int(_parse_number(event.get("bytes")))
            self._commit_s += _parse_number(event.get("seconds"))
            self._checkpoint = (int(_parse_number(event.get("step"))), self._clock() - age_s(event))
        elif event["event"] == "commit-failed":
            self._commit_failures += 1

    def sample(self, incidents: int) -> NodeStatus:
        """Take it. ``incidents``: how many this node has seen."""
        now = self._clock()
        # Ranks finish a step together: the slowest tells how far the node is.
        lines = [
            line
            for line in read_records(self._progress_page_path, self._local_world_size)
            if line.worker.agent_pid == self._pid
        ]
        generation = max((line.generation for line in lines), default=0)
        step = min((line.step for line in lines if line.generation == generation), default=0)
        # Words are read one after the other while training goes on: at times no slot seems to be whole.
        newest = next(
            (
                one
                for _ in range(MAX_SLOT_READS)
                if (one := slots.newest_complete(self._read_slot_states())) is not None
            ),
            None,
        )
        if newest is not None and (self._snapshot is None or newest.target != self._snapshot[0]):
            self._snapshot = (newest.target, now)
        held = self._snapshot if newest is not None else None
        return NodeStatus(
            generation=generation,
            step=step,
            steps_per_s=round(self._step_rate(now, generation, step), 4),
            world_size=max((line.world_size for line in lines), default=0),
            workers=self._local_world_size,
            snapshot_step=decode_snapshot_id(held[0])[1] if held else None,
            snapshot_age_s=round(now - held[1], 3) if held else 0.0,
            checkpoint_step=self._checkpoint[0] if self._checkpoint else None,
            checkpoint_age_s=round(now - self._checkpoint[1], 3) if self._checkpoint else 0.0,
            commits=self._commits,
            commit_s=round(self._commit_s, 3),
            commit_bytes=self._commit_bytes,
            commit_failures=self._commit_failures,
            incidents=incidents,
            problem=self._describe_problem()[:500],
        )

    def _step_rate(self, now: float, generation: int, step: int) -> float:
        if generation != self._generation or (self._steps and step < self._steps[-1][1]):
            self._generation = generation
            self._steps.clear()
        self._steps.append((now, step))
        while len(self._steps) > 2 and self._steps[1][0] <= now - RATE_WINDOW_S:
            self._steps.popleft()
        began, first = self._steps[0]
        return (step - first) / (now - began) if now > began else 0.0


def _parse_number(value: object) -> float:
    return float(value) if isinstance(value, (int, float)) and 0 <= value < 1 << 53 else 0.0


MAX_LISTED_INCIDENTS = 10
STALE_NODE_S = 60.0
"""A node that is in no world, no spare, and has told nothing for so long is left out."""
_STATUS_FIELDS = [one.name for one in fields(NodeStatus)]
_NO_STATUS = NodeStatus()


@dataclass(frozen=True)
class ReceivedStatus:
    """What a node told last, and when it was heard, on this process's monotonic clock."""

    status: NodeStatus
    received_at: float


def build_status_document(
    view: RendezvousStatus,
    statuses: Mapping[str, ReceivedStatus],
    tally: IncidentTracker,
    *,
    run_id: str,
    lost_event_lines: int,
) -> dict[str, Any]:
    """Make the document. ``missed``: lines of other nodes' logs that did not come through."""
    world, sums = view.view, tally.totals()
    ranks = {one.node: rank for rank, one in enumerate(world.members)} if world else {}
    nodes = [_describe_node(one, ranks.get(one), statuses.get(one)) for one in _list_nodes(view, statuses)]
    running = [one for one in nodes if world and one["generation"] == world.generation]
    furthest = max(running, key=lambda one: int(one["step"]), default=None)
    return {
        "version": constants.STATUS_VERSION,
        "run_id": run_id,
        "t": round(time.time(), 3),
        "node": view.incarnation.node,
        "address": view.incarnation.address,
        "leads": view.is_leader,
        "leader": _describe_member(view.leader) if view.leader else None,
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
        "waiting": view.waiting_reason,
        "over": view.end_reason,
        "step": furthest["step"] if furthest else max((int(one["step"]) for one in nodes), default=0),
        "steps_per_s": furthest["steps_per_s"] if furthest else 0.0,
        "nodes": nodes,
        "incidents": [asdict(one) for one in tally.incidents()[-MAX_LISTED_INCIDENTS:]],
        "totals": {
            "incidents": dict(sums.incidents),
            "recomputed_steps": sums.recomputed_steps,
            "recovery_bounds_s": list(RECOVERY_BUCKETS_S),
            "recoveries": sums.recovery_buckets,
            "recovery_s": round(sums.recovery_s, 3),
        },
        "lost_event_lines": lost_event_lines,
    }


def _describe_member(member: Incarnation) -> dict[str, str]:
    return {"node": member.node, "address": member.address}


def _list_nodes(view: RendezvousStatus, statuses: Mapping[str, ReceivedStatus]) -> list[str]:
    """Members in the order of their ranks, then the others."""
    if not view.is_leader:
        return [view.incarnation.node]
    members = [one.node for one in view.view.members] if view.view else []
    now = time.monotonic()
    others = {view.incarnation.node, *view.spares}
    if not view.view:
        others |= {name for name, one in statuses.items() if now < one.received_at + STALE_NODE_S}
    return [*members, *sorted(others - set(members))]


def _describe_node(name: str, rank: int | None, received: ReceivedStatus | None) -> dict[str, Any]:
    """One node's part. Ages are as of now: those that it told, and how long ago that was."""
    told = received.status if received else _NO_STATUS
    pulse = {field: getattr(told, field) for field in _STATUS_FIELDS}
    heard_s = time.monotonic() - received.received_at if received else None
    for what in ("snapshot", "checkpoint"):
        age_s = pulse.pop(f"{what}_age_s")
        there = pulse[f"{what}_step"] is not None and heard_s is not None
        pulse[f"{what}_age_s"] = round(age_s + (heard_s or 0.0), 3) if there else None
    return {
        "node": name,
        "node_rank": rank,
        "status_age_s": round(heard_s, 3) if heard_s is not None else None,
        **pulse,
    }


MAX_READ_BYTES = 1 << 20
MAX_PEERS_BYTES = 16 << 20
MIN_RETRY_DELAY_S = 1.0
MAX_RETRY_DELAY_S = 30.0
"""Between two tries at a disk that refuses: one that is full takes megabytes, and gives them back."""
MAX_OWN_LINES = 1000
"""Lines of the agent's own that wait for the next look; it writes a few in a second."""
STEP_EVENT_INTERVAL_S = 60.0
# What a report cannot do without, and is told seldom.
FORWARDED_KINDS = frozenset({
    "agent-start", "round", "rendezvous", "fork-server-exit", "worker-exit", "hang", "hang-ended", "drain",
    "requeue", "preemption-notice", "verdict", "replicas-differ", "agent-end",
    "resume", "worker-start", "commit", "commit-failed", "prune", "snapshot-failed", "quarantine", "failure",
    "run-end",
})  # fmt: skip


class EventTail:
    """Gives what is new in a node's events: of other processes as their file has it, of this one as it comes.

    A disk that fails takes lines without a word and loses them: the agent's own, which tell of that, do not
    take the way over the disk.
    """

    def __init__(self, path: Path) -> None:
        """Begin where the file ends now."""
        self._path = path
        self._offset = self.start_offset = _file_size(path)
        self._own_lines: deque[str] = deque(maxlen=MAX_OWN_LINES)

    def add_own_line(self, line: str) -> None:
        """Take in an event that this process writes. From any thread."""
        self._own_lines.append(line)

    def read(self) -> list[tuple[str, Event]]:
        """Give the lines that are new, and what they say, by time."""
        of_others = [
            found for found in parse_events(self._read_appended()) if found[1].get("pid") != os.getpid()
        ]
        own = parse_events([self._own_lines.popleft() for _ in range(len(self._own_lines))])
        return sorted([*of_others, *own], key=lambda found: found[1]["t"])

    def _read_appended(self) -> list[str]:
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


class EventFilter:
    """Picks the lines that others should hear of. Steps are many, and all nodes finish the same ones."""

    def __init__(self) -> None:
        self._generation: object = None
        self._last_step_at = float("-inf")

    def should_forward(self, event: Event) -> bool:
        """Whether to tell this one: of steps the first of each generation, and one a minute."""
        if event["event"] != "step":
            return event["event"] in FORWARDED_KINDS
        # A clock that was set back is no reason to be silent until it has caught up.
        is_soon = self._last_step_at <= event["t"] < self._last_step_at + STEP_EVENT_INTERVAL_S
        if event.get("generation") == self._generation and is_soon:
            return False
        self._generation, self._last_step_at = event.get("generation"), event["t"]
        return True


class PeerEventLog:
    """The file of what other nodes have told. What the disk refuses waits in memory for the next try.

    After a refusal that is a while, twice as long each time; what the disk takes ends it.
    """

    def __init__(
        self,
        path: Path,
        max_bytes: int = MAX_PEERS_BYTES,
        disk: Disk = DISK,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Of a file that would grow beyond ``limit`` bytes the older half is given up, of what waits too."""
        self._path = path
        self._max_bytes = max_bytes
        self._disk = disk
        self._clock = clock
        self._unwritten: deque[bytes] = deque()
        self._unwritten_bytes = 0
        self._dropped = 0
        self._retry_delay_s = 0.0
        self._retry_at = float("-inf")  # the next try

    @property
    def lost_lines(self) -> int:
        """How many lines are not on the disk: too many at once, or it refuses them."""
        return self._dropped + len(self._unwritten)

    def append(self, lines: Iterable[str], *, is_last: bool = False) -> None:
        """Write them behind what is there, or keep them for later; ``last``: there is no later."""
        for line in lines:
            self._unwritten.append(line.encode(errors="replace") + b"\n")
            self._unwritten_bytes += len(self._unwritten[-1])
        while self._unwritten_bytes > self._max_bytes // 2:
            self._unwritten_bytes -= len(self._unwritten.popleft())
            self._dropped += 1
        if not self._unwritten or (self._clock() < self._retry_at and not is_last):
            return
        if self._write():
            self._unwritten.clear()
            self._unwritten_bytes = 0
            self._retry_delay_s = 0.0
        else:
            self._retry_delay_s = min(max(2 * self._retry_delay_s, MIN_RETRY_DELAY_S), MAX_RETRY_DELAY_S)
            self._retry_at = self._clock() + self._retry_delay_s

    def _write(self) -> bool:
        """Write all that waits; whether the disk has taken it. Of a part that it takes nothing is left."""
        size = _file_size(self._path)
        try:
            if size + self._unwritten_bytes > self._max_bytes:
                self._halve(size)
                size = _file_size(self._path)
            with open(self._path, "ab") as file:
                file.write(b"".join(self._unwritten))
        except (OSError, MachineError):
            with contextlib.suppress(OSError):
                os.truncate(self._path, size)
            return False
        return True

    def _halve(self, size: int) -> None:
        with open(self._path, "rb") as file:
            file.seek(size - self._max_bytes // 2)
            data = file.read(self._max_bytes // 2)
        self._disk.write_atomic(self._path, data[data.find(b"\n") + 1 :])


def parse_events(lines: Iterable[str]) -> Iterator[tuple[str, Event]]:
    """Give the lines that are events, each with what it says."""
    for line in lines:
        event = parse_line(line)
        if event is not None:
            yield line, event


def _file_size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


MAX_HISTORY_BYTES = 64 << 20
"""Most of a log are marks of steps, ten a second and rank at most: that is half a day of one rank."""
MAX_HISTORY_READ_S = 2.0
_STEP_MARKER = b'"event":"step"'


def load_past_incidents(
    node_dir: Path,
    end_offset: int,
    *,
    max_bytes: int = MAX_HISTORY_BYTES,
    max_read_s: float = MAX_HISTORY_READ_S,
) -> IncidentTracker:
    """Give the incidents that the node's files tell of, of its log up to byte ``end``."""
    until = time.monotonic() + max_read_s
    tally, newest = IncidentTracker(), 0
    since = float("-inf") if end_offset <= max_bytes else float("inf")
    for event in _read_past_events(node_dir / constants.EVENTS_FILE, end_offset, max_bytes, until):
        since = min(since, event["t"])
        newest = max(newest, get_count(event, "generation") or 0)
        tally.record(event)
    for event in _read_past_events(node_dir / constants.PEER_EVENTS_FILE, None, max_bytes, until):
        # Of a time of which its own log is not read, others' lines say too little of why worlds ended.
        if event["t"] >= since:
            tally.record(event, newest)
    return tally


def _read_past_events(path: Path, end_offset: int | None, max_bytes: int, deadline: float) -> Iterator[Event]:
    """Give what a log tells up to byte ``end``; of the steps of a generation the first."""
    known = b""  # how a step of the generation that is read looks
    try:
        with open(path, "rb") as file:
            end_offset = path.stat().st_size if end_offset is None else end_offset
            if end_offset > max_bytes:
                file.seek(end_offset - max_bytes)
                file.readline()
            place = file.tell()
            for line in file:
                place += len(line)
                if place > end_offset or time.monotonic() > deadline:
                    return
                if known and _STEP_MARKER in line and known in line:
                    continue
                event = parse_line(line)
                if event is not None:
                    yield event
                    if event["event"] == "step":
                        known = b'"generation":%d,' % (get_count(event, "generation") or 0)
    except OSError:
        return


UPDATE_INTERVAL_S = 1.0
DOCUMENT_MAX_AGE_S = 0.3
"""So long who looks gets the same document as the one before."""
CLOSE_TIMEOUT_S = 2.0
MAX_GENERATION_LEAD = 8
"""So far beyond the newest world that this agent knows of may be one that another tells of."""
MAX_RECEIVED_BYTES = 8 << 20
"""Of lines that wait to be written to a slow disk."""


class StatusReporter:
    """The teller of one agent, from `start` to `close`."""

    def __init__(
        self,
        node_dir: Path,
        run_id: str,
        sampler: StatusSampler,
        event_tail: EventTail,
        *,
        log: Callable[[str], None],
    ) -> None:
        """``finger`` takes the node's pulse, ``tail`` reads its events, ``say`` gets a line for people."""
        self._run_id = run_id
        self._node_dir = node_dir
        self._endpoint_file = node_dir / constants.AGENT_ENDPOINT_FILE
        self._sampler = sampler
        self._log = log
        self._client: RendezvousClient | None = None
        self._event_tail = event_tail
        self._event_filter = EventFilter()
        self._peer_events = PeerEventLog(node_dir / constants.PEER_EVENTS_FILE)
        self._tally = IncidentTracker()
        self._statuses: dict[str, ReceivedStatus] = {}
        self._received: deque[str] = deque()
        self._received_bytes = 0
        self._newest_generation = 0  # generation that the rendezvous knows of
        self._next_line: dict[str, int] = {}  # number of the line that each life of a node tells next
        self._lost_lines = 0
        self._last_document: tuple[float, bytes] = (float("-inf"), b"")
        self._last_error = ""
        self._lock = threading.Lock()  # of what the rendezvous' thread touches too: never held for long
        self._document_lock = threading.Lock()  # of the tally, and of what was shown last
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="elastic-resume-teller", daemon=True)

    def start(self, client: RendezvousClient, key: bytes) -> None:
        """Tell and be told through ``member``; ``key`` lets people look."""
        self._client = client
        with contextlib.suppress(OSError):  # a disk that refuses is told of by who has to write to it
            _write_private(
                self._endpoint_file,
                {
                    "run_id": self._run_id,
                    "address": client.address,
                    "endpoints": list(client.candidates),
                    "key": key.hex(),
                },
            )
        self._thread.start()

    def close(self) -> None:
        """End it; no later than `CLOSE_S` from now, though a disk hangs."""
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join(CLOSE_TIMEOUT_S)

    # ---- the rendezvous' thread ----------------------------------------------------------------------

    def on_peer_status(self, update: DeliverPeerStatus) -> None:
        """Take in what another node tells."""
        node, life, tidings = update.sender.node, str(update.sender.incarnation_id), update.status_update
        with self._lock:
            if tidings.status is not None:
                self._statuses[node] = ReceivedStatus(tidings.status, time.monotonic())
            self._newest_generation = max(self._newest_generation, update.installed_generation)
            expected = self._next_line.get(
                life, tidings.first_line_number
            )  # a leader before this one may have heard the rest
            self._lost_lines += max(0, tidings.first_line_number - expected)
            new = tidings.event_lines[max(0, expected - tidings.first_line_number) :]
            self._next_line[life] = max(expected, tidings.first_line_number + len(tidings.event_lines))
            self._received.extend(new)
            self._received_bytes += sum(map(len, new))
            while self._received_bytes > MAX_RECEIVED_BYTES:
                self._received_bytes -= len(self._received.popleft())
                self._lost_lines += 1

    # ---- those who look: a thread of the rendezvous ---------------------------------------------------

    def render_status(self, view: RendezvousStatus) -> bytes:
        """Give the document for those who look; see `document.make`."""
        with self._document_lock:
            made_at, shown = self._last_document
            if time.monotonic() < made_at + DOCUMENT_MAX_AGE_S:
                return shown
            with self._lock:
                nodes, missed = dict(self._statuses), self._lost_lines + self._peer_events.lost_lines
            made = build_status_document(
                view,
                nodes,
                self._tally,
                run_id=self._run_id,
                lost_event_lines=missed,
            )
            shown = json.dumps(made, separators=(",", ":")).encode()
            self._last_document = (time.monotonic(), shown)
            return shown

    # ---- the thread ----------------------------------------------------------------------------------

    def _run(self) -> None:
        self._run_and_log_errors(self._load_past_incidents)
        ends = False
        while not ends:
            ends = self._closing.wait(UPDATE_INTERVAL_S)
            self._run_and_log_errors(partial(self._update, is_last=ends))
        with contextlib.suppress(OSError):
            self._endpoint_file.unlink(missing_ok=True)

    def _run_and_log_errors(self, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:  # noqa: BLE001 - a fault of ours must not end what people are told
            if repr(error) != self._last_error:
                self._last_error = repr(error)
                self._log(f"status: a fault of elastic_resume itself: {error!r:.500}. Training goes on.")

    def _load_past_incidents(self) -> None:
        """Begin with the incidents that are known here: before any new event, as they are taken in order."""
        tally = load_past_incidents(self._node_dir, self._event_tail.start_offset)
        with self._document_lock:
            self._tally = tally

    def _update(self, *, is_last: bool) -> None:
        own = self._event_tail.read()
        with self._lock:
            heard, self._received, self._received_bytes = self._received, deque(), 0
            newest = self._newest_generation + MAX_GENERATION_LEAD
        told = list(parse_events(heard))
        try:
            self._send_status(own, [event for _, event in told], newest)
        finally:  # whatever it was, they are told once
            self._peer_events.append((line for line, _ in told), is_last=is_last)

    def _send_status(
        self, own_events: list[tuple[str, Event]], peer_events: list[Event], max_generation: int
    ) -> None:
        with self._document_lock:
            for _, event in own_events:
                self._tally.record(event)
            for event in peer_events:
                self._tally.record(event, max_generation)
            incidents = len(self._tally.incidents())
        for _, event in own_events:
            self._sampler.record_event(event)
        pulse = self._sampler.sample(incidents)
        member = self._client
        if member is not None:
            with self._lock:
                self._statuses[member.node] = ReceivedStatus(pulse, time.monotonic())
            member.send_status(
                pulse, [line for line, event in own_events if self._event_filter.should_forward(event)]
            )


def _write_private(path: Path, content: dict[str, object]) -> None:
    """Write a small file that nobody else may read, the one that stands there included."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with open(descriptor, "w", encoding="utf-8") as file:
        os.fchmod(descriptor, 0o600)
        file.write(json.dumps(content) + "\n")
