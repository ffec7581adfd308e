"""Report how the job stands: this node's status to the leader, all nodes' status to people.

Once a second the reporter's thread samples this node (`StatusSampler`), reads what is new in its event log
(`EventTail`), and sends both to the leader. The leader thus has the status and the important events of every
node; it answers ``elastic-resume status`` and metrics from them (`build_status_document`) and keeps the
events in ``peers.jsonl``, so that a report can cover nodes whose disks are gone::

    progress page, slots, events.jsonl --> StatusReporter thread --> rendezvous --> leader's on_peer_status
                                                                                        |
         elastic-resume status, metrics <-- render_status <-- statuses, incidents <-----+--> peers.jsonl

Clients find the agent's address and a read-only key in ``agent-endpoint.json``. Neither the rendezvous nor
training waits for anything here, and an error here costs only status.
"""

from __future__ import annotations

import contextlib
import heapq
import json
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from elastic_resume import constants
from elastic_resume.events import Event, age_s, get_count, get_seconds, parse_line
from elastic_resume.policy.incidents import RECOVERY_BUCKETS_S, IncidentTracker
from elastic_resume.rendezvous.client import RendezvousClient
from elastic_resume.rendezvous.core.events import DeliverPeerStatus
from elastic_resume.rendezvous.core.quorum import Incarnation
from elastic_resume.rendezvous.core.status import NodeStatus
from elastic_resume.rendezvous.net.status import RendezvousStatus
from elastic_resume.snapshot import slots
from elastic_resume.snapshot.progress_page import read_records
from elastic_resume.snapshot.slots import SlotState, decode_snapshot_id

logger = logging.getLogger(__name__)

UPDATE_INTERVAL_S = 1.0
DOCUMENT_MAX_AGE_S = 0.3  # a rendered document is served again for this time
CLOSE_TIMEOUT_S = 2.0
MAX_SLOT_READS = 3
RATE_WINDOW_S = 10.0  # steps per second are averaged over this time, within one generation
MAX_LISTED_INCIDENTS = 10
STALE_NODE_S = 60.0  # a node outside the view is dropped from the document after this time without a status
MAX_GENERATION_LEAD = 8  # a peer's events may be this far ahead of the newest generation known here
MAX_RECEIVED_BYTES = 8 << 20  # limit of peers' events that wait for a slow disk
MAX_OWN_LINES = 1000  # limit of this process's events between two updates; it writes a few each second
MAX_READ_BYTES = 1 << 20  # limit of the event log that one update reads
MAX_PEERS_BYTES = 16 << 20
STEP_EVENT_INTERVAL_S = 60.0
# Half a day of one rank: most lines are `step` events, at most ten a second and rank.
MAX_HISTORY_BYTES = 64 << 20
# Events that a report needs and that are rare.
FORWARDED_KINDS = frozenset({
    "agent-start", "round", "rendezvous", "fork-server-exit", "worker-exit", "hang", "hang-ended", "drain",
    "requeue", "preemption-notice", "verdict", "replicas-differ", "agent-end",
    "resume", "worker-start", "commit", "commit-failed", "prune", "snapshot-failed", "quarantine", "failure",
    "run-end",
})  # fmt: skip
_STEP_MARKER = b'"event":"step"'
_STATUS_FIELDS = [field.name for field in fields(NodeStatus)]
_NO_STATUS = NodeStatus()


# ---- this node ---------------------------------------------------------------------------------------------


class StatusSampler:
    """Sample one node's status from its progress page, its slots and its own events.

    No sample makes a system call that waits for a disk.
    """

    def __init__(
        self,
        node_dir: Path,
        local_world_size: int,
        *,
        read_slot_states: Callable[[], list[SlotState]],
        describe_problem: Callable[[], str],
    ) -> None:
        """``describe_problem`` describes what is wrong with the node's disk or memory; "" for nothing."""
        self._progress_page_path = node_dir / constants.PROGRESS_FILE
        self._pid = os.getpid()
        self._local_world_size = local_world_size
        self._read_slot_states = read_slot_states
        self._describe_problem = describe_problem
        self._steps: deque[tuple[float, int]] = deque()
        self._generation = 0
        self._snapshot: tuple[int, float] | None = None  # (snapshot id, time at which it was first seen)
        self._checkpoint: tuple[int, float] | None = None  # (step, time of the commit)
        self._commits = self._commit_failures = self._commit_bytes = 0
        self._commit_s = 0.0

    def record_event(self, event: Event) -> None:
        """Count this node's commits."""
        if event["event"] == "commit":
            self._commits += 1
            self._commit_bytes += get_count(event, "bytes") or 0
            self._commit_s += get_seconds(event, "seconds") or 0.0
            self._checkpoint = (get_count(event, "step") or 0, time.monotonic() - age_s(event))
        elif event["event"] == "commit-failed":
            self._commit_failures += 1

    def sample(self, incidents: int) -> NodeStatus:
        """Return the node's status now; ``incidents`` is how many this node knows of."""
        now = time.monotonic()
        records = [
            record
            for record in read_records(self._progress_page_path, self._local_world_size)
            if record.worker.agent_pid == self._pid
        ]
        generation = max((record.generation for record in records), default=0)
        # Ranks finish a step together, so the slowest one shows the node's step.
        step = min((record.step for record in records if record.generation == generation), default=0)
        snapshot = self._find_snapshot(now)
        checkpoint = self._checkpoint
        return NodeStatus(
            generation=generation,
            step=step,
            steps_per_s=round(self._step_rate(now, generation, step), 4),
            world_size=max((record.world_size for record in records), default=0),
            workers=self._local_world_size,
            snapshot_step=decode_snapshot_id(snapshot[0])[1] if snapshot else None,
            snapshot_age_s=round(now - snapshot[1], 3) if snapshot else 0.0,
            checkpoint_step=checkpoint[0] if checkpoint else None,
            checkpoint_age_s=round(now - checkpoint[1], 3) if checkpoint else 0.0,
            commits=self._commits,
            commit_s=round(self._commit_s, 3),
            commit_bytes=self._commit_bytes,
            commit_failures=self._commit_failures,
            incidents=incidents,
            problem=self._describe_problem()[:500],
        )

    def _find_snapshot(self, now: float) -> tuple[int, float] | None:
        """Return the newest complete snapshot's id, and when it was first seen."""
        # Slots change while their words are read one by one, so that at times none seems to be complete.
        for _ in range(MAX_SLOT_READS):
            newest = slots.newest_complete(self._read_slot_states())
            if newest is not None:
                if self._snapshot is None or newest.target != self._snapshot[0]:
                    self._snapshot = (newest.target, now)
                return self._snapshot
        return None

    def _step_rate(self, now: float, generation: int, step: int) -> float:
        if generation != self._generation or (self._steps and step < self._steps[-1][1]):
            self._generation = generation
            self._steps.clear()
        self._steps.append((now, step))
        while len(self._steps) > 2 and self._steps[1][0] <= now - RATE_WINDOW_S:
            self._steps.popleft()
        first_time, first_step = self._steps[0]
        return (step - first_step) / (now - first_time) if now > first_time else 0.0


# ---- events on their way -----------------------------------------------------------------------------------


class EventTail:
    """Read a node's new events: other processes' events from the file, this process's from memory.

    This process's events do not take the way over the disk, because some of them report that it fails.
    """

    def __init__(self, path: Path) -> None:
        """Begin at the present end of the file."""
        self.path = path
        self._offset = self.start_offset = file_size(path)
        self._own_lines: deque[str] = deque(maxlen=MAX_OWN_LINES)

    def add_own_line(self, line: str) -> None:
        """Add an event that this process writes. Safe in any thread."""
        self._own_lines.append(line)

    def read(self) -> list[tuple[str, Event]]:
        """Return the new lines with their events, by time."""
        from_others = [
            (line, event)
            for line, event in parse_events(self._read_appended())
            if event.get("pid") != os.getpid()
        ]
        own = parse_events([self._own_lines.popleft() for _ in range(len(self._own_lines))])
        return sorted([*from_others, *own], key=lambda line_event: line_event[1]["t"])

    def _read_appended(self) -> list[str]:
        """Return the file's new complete lines; beyond `MAX_READ_BYTES` the oldest are skipped."""
        try:
            with open(self.path, "rb") as file:
                end = os.fstat(file.fileno()).st_size
                skips = end - self._offset > MAX_READ_BYTES
                self._offset = end - MAX_READ_BYTES if skips else min(self._offset, end)
                file.seek(self._offset)
                data = file.read(MAX_READ_BYTES)
        except OSError:
            return []
        complete = data.rfind(b"\n") + 1
        self._offset += complete
        lines = data[:complete].splitlines()[1 if skips else 0 :]
        return [line.decode(errors="replace") for line in lines]


class EventFilter:
    """Select the events that are sent to the leader."""

    def __init__(self) -> None:
        self._generation: object = None
        self._last_step_at = float("-inf")

    def should_forward(self, event: Event) -> bool:
        """Return whether to send the event: of `step` events, each generation's first and one a minute."""
        if event["event"] != "step":
            return event["event"] in FORWARDED_KINDS
        # A clock that was set back must not silence the node until it has caught up.
        is_recent = self._last_step_at <= event["t"] < self._last_step_at + STEP_EVENT_INTERVAL_S
        if event.get("generation") == self._generation and is_recent:
            return False
        self._generation, self._last_step_at = event.get("generation"), event["t"]
        return True


class PeerEventLog:
    """The file of peers' events. Lines that the disk refuses are lost and counted."""

    def __init__(self, path: Path, max_bytes: int = MAX_PEERS_BYTES) -> None:
        """``max_bytes`` is the limit of the file, and at least twice the size of an `append`."""
        self.lost_lines = 0
        self.path = path
        self._max_bytes = max_bytes

    def append(self, lines: Sequence[str]) -> None:
        """Append all lines or none; a file that would grow beyond its limit loses its older half first."""
        data = "".join(f"{line}\n" for line in lines).encode(errors="replace")
        size = file_size(self.path)
        try:
            if size + len(data) > self._max_bytes:
                size = self._drop_older_half()
            with open(self.path, "ab") as file:
                file.write(data)
        except OSError:
            self.lost_lines += len(lines)
            with contextlib.suppress(OSError):
                os.truncate(self.path, size)

    def _drop_older_half(self) -> int:
        """Rewrite the file in place, which works on a full disk too; return its new size in bytes."""
        with open(self.path, "r+b") as file:
            file.seek(-(self._max_bytes // 2), os.SEEK_END)
            file.readline()  # the rest of a line whose start is dropped
            newer = file.read()
            file.seek(0)
            file.write(newer)
            return file.truncate()


def parse_events(lines: Iterable[str]) -> Iterator[tuple[str, Event]]:
    """Yield each line that is an event, with the event."""
    for line in lines:
        event = parse_line(line)
        if event is not None:
            yield line, event


def file_size(path: Path) -> int:
    """Return a file's size in bytes; 0 if it cannot be read."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


def load_past_incidents(
    path: Path, end_offset: int, peers_path: Path | None = None, max_bytes: int = MAX_HISTORY_BYTES
) -> IncidentTracker:
    """Return the incidents in a node's event logs, so that a new leader counts from the job's beginning.

    This agent's own events begin at byte ``end_offset`` of ``path``. It reads the last
    ``max_bytes`` before that. ``peers_path`` has what peers sent: a node's own log does not name the nodes of
    a generation, and rank 0 may have run elsewhere.
    """
    own = list(_read_past_events(path, end_offset, max_bytes))
    peers: Iterable[Event] = ()
    if peers_path is not None:
        peers = _read_past_events(peers_path, file_size(peers_path), max_bytes)
    newest = max((get_count(event, "generation") or 0 for event in own), default=0)
    tracker = IncidentTracker()
    for event in heapq.merge(own, peers, key=lambda event: event["t"]):
        tracker.record(event, newest + MAX_GENERATION_LEAD)
    return tracker


def _read_past_events(path: Path, end_offset: int, max_bytes: int) -> Iterator[Event]:
    """Yield the events before ``end_offset``, but only about one `step` event per generation."""
    known_generation = b""  # of the last step event, as JSON; to parse all events would take seconds
    with contextlib.suppress(OSError), open(path, "rb") as file:
        if end_offset > max_bytes:
            file.seek(end_offset - max_bytes)
            file.readline()
        offset = file.tell()
        for line in file:
            offset += len(line)
            if offset > end_offset:
                break
            if known_generation and _STEP_MARKER in line and known_generation in line:
                continue
            event = parse_line(line)
            if event is not None:
                yield event
                if event["event"] == "step":
                    known_generation = b'"generation":%d,' % (get_count(event, "generation") or 0)


# ---- the document ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ReceivedStatus:
    """A node's last status, and when it arrived, on this process's monotonic clock."""

    status: NodeStatus
    received_at: float


def build_status_document(
    view: RendezvousStatus,
    statuses: Mapping[str, ReceivedStatus],
    tracker: IncidentTracker,
    *,
    run_id: str,
    lost_event_lines: int,
) -> dict[str, Any]:
    """Build the JSON object that ``elastic-resume status --json`` prints and that metrics are made from.

    A leader's document covers all nodes; a follower's covers itself and names the leader. The time to build
    it grows with the number of nodes, up to 10,000. Members may be added; any other change increases
    `constants.STATUS_VERSION`. ``statuses`` is by node name. ``lost_event_lines`` counts lines of peers that
    did not arrive or are not on disk.
    """
    world, totals = view.view, tracker.totals()
    ranks = {member.node: rank for rank, member in enumerate(world.members)} if world else {}
    nodes = [
        _describe_node(name, ranks.get(name), statuses.get(name)) for name in _list_nodes(view, statuses)
    ]
    running = [node for node in nodes if world and node["generation"] == world.generation]
    furthest = max(running, key=lambda node: int(node["step"]), default=None)
    return {
        "version": constants.STATUS_VERSION,
        "run_id": run_id,
        "t": round(time.time(), 3),
        "node": view.incarnation.node,
        "address": view.incarnation.address,
        "is_leader": view.is_leader,
        "leader": _describe_member(view.leader) if view.leader else None,
        "generation": view.generation,
        "world": {
            "generation": world.generation,
            "nodes": [member.node for member in world.members],
            "addresses": [member.address for member in world.members],
            "ranks": max((int(node["world_size"]) for node in running), default=0),
        }
        if world
        else None,
        "spares": list(view.spares),
        "missing": list(view.missing),
        "waiting": view.waiting_reason,
        "end_reason": view.end_reason,
        "step": furthest["step"] if furthest else max((int(node["step"]) for node in nodes), default=0),
        "steps_per_s": furthest["steps_per_s"] if furthest else 0.0,
        "nodes": nodes,
        "incidents": [asdict(incident) for incident in tracker.incidents()[-MAX_LISTED_INCIDENTS:]],
        "totals": {
            "incidents": dict(totals.incidents),
            "recomputed_steps": totals.recomputed_steps,
            "recovery_bounds_s": list(RECOVERY_BUCKETS_S),
            "recovery_counts": totals.recovery_buckets,
            "recovery_s": round(totals.recovery_s, 3),
        },
        "lost_event_lines": lost_event_lines,
    }


def _describe_member(member: Incarnation) -> dict[str, str]:
    return {"node": member.node, "address": member.address}


def _list_nodes(view: RendezvousStatus, statuses: Mapping[str, ReceivedStatus]) -> list[str]:
    """List the nodes of the document: members in rank order, then the others by name."""
    if not view.is_leader:
        return [view.incarnation.node]
    members = [member.node for member in view.view.members] if view.view else []
    now = time.monotonic()
    others = {view.incarnation.node, *view.spares}
    if not view.view:
        others |= {name for name, received in statuses.items() if now < received.received_at + STALE_NODE_S}
    return [*members, *sorted(others - set(members))]


def _describe_node(name: str, rank: int | None, received: ReceivedStatus | None) -> dict[str, Any]:
    """Describe one node; ages are as of now, so the status's own age is added to what it says."""
    status = received.status if received else _NO_STATUS
    members = {field: getattr(status, field) for field in _STATUS_FIELDS}
    status_age_s = time.monotonic() - received.received_at if received else None
    for saved_state in ("snapshot", "checkpoint"):
        saved_age_s = members.pop(f"{saved_state}_age_s")
        exists = members[f"{saved_state}_step"] is not None and status_age_s is not None
        members[f"{saved_state}_age_s"] = round(saved_age_s + (status_age_s or 0.0), 3) if exists else None
    return {
        "node": name,
        "node_rank": rank,
        "status_age_s": round(status_age_s, 3) if status_age_s is not None else None,
        **members,
    }


# ---- the reporter ------------------------------------------------------------------------------------------


class StatusReporter:
    """The thread of one agent that sends and collects status, from `start` to `close`."""

    def __init__(self, node_dir: Path, run_id: str, sampler: StatusSampler, event_tail: EventTail) -> None:
        self._run_id = run_id
        self._endpoint_file = node_dir / constants.AGENT_ENDPOINT_FILE
        self._sampler = sampler
        self._client: RendezvousClient | None = None
        self._event_tail = event_tail
        self._event_filter = EventFilter()
        self._peer_events = PeerEventLog(node_dir / constants.PEER_EVENTS_FILE)
        self._tracker = IncidentTracker()
        self._statuses: dict[str, ReceivedStatus] = {}
        self._received: deque[str] = deque()  # lines from peers that are not handled yet
        self._received_bytes = 0
        self._newest_generation = 0  # the newest generation that the rendezvous knows
        self._next_line: dict[str, int] = {}  # incarnation of a peer -> number of its next line
        self._lost_lines = 0
        self._last_document: tuple[float, bytes] = (float("-inf"), b"")
        self._last_error = ""
        self._lock = threading.Lock()  # guards what the rendezvous thread changes; held for microseconds
        self._document_lock = threading.Lock()  # guards the tracker and the last document
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="elastic-resume-status", daemon=True)

    def start(self, client: RendezvousClient, key: bytes) -> None:
        """Start to report through ``client``, and publish the read-only ``key`` for status clients."""
        self._client = client
        with contextlib.suppress(OSError):  # other code, which depends on the disk, reports its failure
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
        """Send a last update and end the thread; wait `CLOSE_TIMEOUT_S` at most, though a disk hangs."""
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join(CLOSE_TIMEOUT_S)

    def on_peer_status(self, update: DeliverPeerStatus) -> None:
        """Queue another node's update. Called in the rendezvous thread, so it must not wait."""
        node, incarnation = update.sender.node, str(update.sender.incarnation_id)
        status_update = update.status_update
        first_line = status_update.first_line_number
        with self._lock:
            if status_update.status is not None:
                self._statuses[node] = ReceivedStatus(status_update.status, time.monotonic())
            self._newest_generation = max(self._newest_generation, update.installed_generation)
            # The first line from an incarnation is no gap: an earlier leader may have got those before it.
            expected = self._next_line.get(incarnation, first_line)
            self._lost_lines += max(0, first_line - expected)
            new_lines = status_update.event_lines[max(0, expected - first_line) :]
            self._next_line[incarnation] = max(expected, first_line + len(status_update.event_lines))
            self._received.extend(new_lines)
            self._received_bytes += sum(map(len, new_lines))
            while self._received_bytes > MAX_RECEIVED_BYTES:
                self._received_bytes -= len(self._received.popleft())
                self._lost_lines += 1

    def render_status(self, view: RendezvousStatus) -> bytes:
        """Return the status document for a client. Called in a thread of the rendezvous server."""
        with self._document_lock:
            rendered_at, document = self._last_document
            if time.monotonic() < rendered_at + DOCUMENT_MAX_AGE_S:
                return document
            with self._lock:
                statuses = dict(self._statuses)
                lost_lines = self._lost_lines + self._peer_events.lost_lines
            content = build_status_document(
                view, statuses, self._tracker, run_id=self._run_id, lost_event_lines=lost_lines
            )
            document = json.dumps(content, separators=(",", ":")).encode()
            self._last_document = (time.monotonic(), document)
            return document

    def _run(self) -> None:
        # Past incidents come before any new event: the tracker expects them in order.
        self._run_and_log_errors(self._load_past_incidents)
        is_last = False
        while not is_last:
            is_last = self._closing.wait(UPDATE_INTERVAL_S)
            self._run_and_log_errors(self._update)
        with contextlib.suppress(OSError):
            self._endpoint_file.unlink(missing_ok=True)

    def _run_and_log_errors(self, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:  # noqa: BLE001 - our own bug must not end the reports
            if repr(error) != self._last_error:
                self._last_error = repr(error)
                logger.warning(
                    "status: internal error of elastic_resume: %.500r. Training is not affected.", error
                )

    def _load_past_incidents(self) -> None:
        tracker = load_past_incidents(
            self._event_tail.path, self._event_tail.start_offset, self._peer_events.path
        )
        with self._document_lock:
            self._tracker = tracker

    def _update(self) -> None:
        """Handle new events of this node and its peers, and send this node's status."""
        own_events = self._event_tail.read()
        with self._lock:
            received, self._received, self._received_bytes = self._received, deque(), 0
            max_generation = self._newest_generation + MAX_GENERATION_LEAD
        peer_events = list(parse_events(received))
        try:
            self._record_events(own_events, peer_events, max_generation)
            self._send_status(own_events)
        finally:  # also after a bug in this package
            self._peer_events.append([line for line, _ in peer_events])

    def _record_events(
        self, own_events: list[tuple[str, Event]], peer_events: list[tuple[str, Event]], max_generation: int
    ) -> None:
        with self._document_lock:
            for _, event in own_events:
                self._tracker.record(event)
            for _, event in peer_events:
                self._tracker.record(event, max_generation)
        for _, event in own_events:
            self._sampler.record_event(event)

    def _send_status(self, own_events: list[tuple[str, Event]]) -> None:
        with self._document_lock:
            incidents = len(self._tracker.incidents())
        status = self._sampler.sample(incidents)
        client = self._client
        if client is not None:
            with self._lock:
                self._statuses[client.node] = ReceivedStatus(status, time.monotonic())
            lines = [line for line, event in own_events if self._event_filter.should_forward(event)]
            client.send_status(status, lines)


def _write_private(path: Path, content: dict[str, object]) -> None:
    """Write a small file that only this user may read, also if the file exists with another mode."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with open(descriptor, "w", encoding="utf-8") as file:
        os.fchmod(descriptor, 0o600)
        file.write(json.dumps(content) + "\n")
