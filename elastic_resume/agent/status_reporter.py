"""Collect this node's status for ``elastic-resume status`` and for metrics.

Once a second the reporter's thread samples this node (`StatusSampler`) and reads what is new in its event log
(`EventTail`). Each agent serves its own status only; `commands.job_status` asks all agents of the job::

    progress page, slots, events.jsonl --> StatusReporter thread --> status server --> elastic-resume status
                                                                          +----------> metrics of this node

Clients find the agent's address and a read-only key in ``agent-endpoint.json``. Neither the rendezvous nor
training waits for anything here, and an error here costs only status.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from elastic_resume import constants
from elastic_resume.events import Event, age_s, get_count, get_seconds, parse_line
from elastic_resume.mechanisms.mechanism import AgentPart, StatusMember, encode_body
from elastic_resume.rendezvous.client import RendezvousClient
from elastic_resume.rendezvous.core.world import View
from elastic_resume.rendezvous.facts import FactBody
from elastic_resume.rendezvous.net.status_server import RendezvousStatus
from elastic_resume.report.agent_status import AgentStatus, KnownIncidents, NodeStatus, encode_reply
from elastic_resume.report.generations import MAX_FAILURE_EVENTS, MAX_GENERATIONS, GenerationTracker
from elastic_resume.slots import slot_memory
from elastic_resume.slots.progress_page import read_own_records
from elastic_resume.slots.slot_memory import SlotState, decode_snapshot_id

logger = logging.getLogger(__name__)

UPDATE_INTERVAL_S = 1.0
CLOSE_TIMEOUT_S = 2.0
MAX_SLOT_READS = 3
RATE_WINDOW_S = 10.0  # steps per second are averaged over this time, within one generation
MAX_LISTED_INCIDENTS = 10
MAX_LISTED_MEMBERS = 256
"""Only the leader names the members of a larger view: all replies together are the square of that size."""
MAX_LOGGED_ERRORS = 8
"""Different ones."""
MAX_OWN_LINES = 1000  # limit of this process's events between two updates; it writes a few each second
MAX_READ_BYTES = 1 << 20  # limit of the event log that one update reads


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
        self._node_dir = node_dir
        self._local_world_size = local_world_size
        self._read_slot_states = read_slot_states
        self._describe_problem = describe_problem
        self._steps: deque[tuple[float, int]] = deque()
        self._generation = 0
        self._snapshot: tuple[int, float] | None = None  # (snapshot id, time at which it was first seen)
        self._checkpoint: tuple[int, float] | None = None  # (step, time of the commit)
        self._commits = self._commit_failures = self._commit_bytes = 0
        self._proof = ""
        self._commit_s = 0.0

    def record_event(self, event: Event) -> None:
        """Count this node's commits, and keep the newest verdict about a resume."""
        if event["event"] == "commit":
            self._commits += 1
            self._commit_bytes += get_count(event, "bytes") or 0
            self._commit_s += get_seconds(event, "seconds") or 0.0
            self._checkpoint = (get_count(event, "step") or 0, time.monotonic() - age_s(event))
        elif event["event"] == "commit-failed":
            self._commit_failures += 1
        elif event["event"] == "proof":
            self._proof = str(event.get("message"))[:1000]

    def sample(self) -> NodeStatus:
        """Return the node's status now."""
        now = time.monotonic()
        records = read_own_records(self._node_dir, self._local_world_size)
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
            problem=self._describe_problem()[:500],
            proof=self._proof,
        )

    def _find_snapshot(self, now: float) -> tuple[int, float] | None:
        """Return the newest complete snapshot's id, and when it was first seen."""
        # Slots change while their words are read one by one, so that at times none seems to be complete.
        for _ in range(MAX_SLOT_READS):
            newest = slot_memory.newest_complete(self._read_slot_states())
            if newest is not None:
                if self._snapshot is None or newest.snapshot_id != self._snapshot[0]:
                    self._snapshot = (newest.snapshot_id, now)
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


# ---- events ------------------------------------------------------------------------------------------------


class EventTail:
    """Read a node's new events: other processes' events from the file, this process's from memory.

    This process's events do not take the way over the disk, because some of them report that it fails.
    """

    def __init__(self, path: Path) -> None:
        """Begin at the present end of the file."""
        self._path = path
        self._offset = _file_size(path)
        self._own_lines: deque[str] = deque(maxlen=MAX_OWN_LINES)

    def add_own_line(self, line: str) -> None:
        """Add an event that this process writes. Safe in any thread."""
        self._own_lines.append(line)

    def read(self) -> list[Event]:
        """Return the new events by time."""
        from_others = [
            event for event in _parse_events(self._read_appended()) if event.get("pid") != os.getpid()
        ]
        own = _parse_events([self._own_lines.popleft() for _ in range(len(self._own_lines))])
        return sorted([*from_others, *own], key=lambda event: event["t"])

    def _read_appended(self) -> list[str]:
        """Return the file's new complete lines; beyond `MAX_READ_BYTES` the oldest are skipped."""
        try:
            with open(self._path, "rb") as file:
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


def _parse_events(lines: Iterable[str]) -> Iterator[Event]:
    """Yield the events among the lines."""
    return (event for event in map(parse_line, lines) if event is not None)


def _file_size(path: Path) -> int:
    """Return a file's size in bytes; 0 if it cannot be read."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


# ---- the reporter ------------------------------------------------------------------------------------------


class StatusReporter:
    """The thread of one agent that keeps its status, from `start` to `close`."""

    def __init__(
        self,
        node_dir: Path,
        sampler: StatusSampler,
        parts: Mapping[AgentPart, StatusMember | None],
        event_tail: EventTail,
    ) -> None:
        """``parts`` are those of the mechanisms."""
        self._endpoint_file = node_dir / constants.AGENT_ENDPOINT_FILE
        self._sampler = sampler
        self._parts = parts
        self._event_tail = event_tail
        self._tracker = GenerationTracker(MAX_GENERATIONS, MAX_FAILURE_EVENTS)
        self._sample: tuple[float, NodeStatus] | None = None  # (time, status)
        self._logged_errors: set[str] = set()
        self._lock = threading.Lock()  # guards the tracker
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="elastic-resume-status", daemon=True)

    def start(self, client: RendezvousClient, key: bytes) -> None:
        """Start to sample, and publish the address and the read-only ``key`` for status clients."""
        self._client = client
        with contextlib.suppress(OSError):  # other code, which depends on the disk, reports its failure
            _write_private(
                self._endpoint_file,
                {
                    "run_id": client.run_id,
                    "address": client.address,
                    "endpoints": list(client.candidates),
                    "key": key.hex(),
                },
            )
        self._thread.start()

    def close(self) -> None:
        """End the thread; wait `CLOSE_TIMEOUT_S` at most, though a disk hangs."""
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join(CLOSE_TIMEOUT_S)

    def render_status(self, rendezvous: RendezvousStatus) -> bytes:
        """Return the reply to a client. Called in a thread of the rendezvous server."""
        with self._lock:
            totals, newest = self._tracker.totals(), self._tracker.incidents()[-MAX_LISTED_INCIDENTS:]
        view, sample = rendezvous.view, self._sample
        if view and not rendezvous.is_leader and len(view.members) > MAX_LISTED_MEMBERS:
            rendezvous = replace(rendezvous, view=View(view.generation, (), view.leader))
        incidents = KnownIncidents(
            tuple(newest),
            tuple(sorted(totals.incidents.items())),
            totals.recomputed_steps,
            tuple(totals.recovery_buckets),
            round(totals.recovery_s, 3),
        )
        age_s = round(time.monotonic() - sample[0], 3) if sample else 0.0
        return encode_reply(AgentStatus(rendezvous, sample[1] if sample else None, age_s, incidents))

    def _run(self) -> None:
        while not self._closing.wait(UPDATE_INTERVAL_S):
            self._try_update()
        with contextlib.suppress(OSError):
            self._endpoint_file.unlink(missing_ok=True)

    def _try_update(self) -> None:
        with self._log_defects():
            self._update()

    @contextlib.contextmanager
    def _log_defects(self) -> Iterator[None]:
        """Log an error of our own, which must not end the reports, nor those of other mechanisms."""
        try:
            yield
        except Exception as error:  # noqa: BLE001
            if repr(error) not in self._logged_errors and len(self._logged_errors) < MAX_LOGGED_ERRORS:
                self._logged_errors.add(repr(error))
                logger.warning(
                    "status: internal error of elastic_resume: %.500r. Training is not affected.", error
                )

    def _update(self) -> None:
        events = self._event_tail.read()
        with self._lock:
            for event in events:
                self._tracker.record_event(event)
        for event in events:
            self._sampler.record_event(event)
        members: list[tuple[str, FactBody]] = []
        for part, member in self._parts.items():
            for event in events:
                with self._log_defects():
                    part.observe(event)
            with self._log_defects():
                value = part.update(self._client)
                if member and value is not None:
                    members.append((member.name, encode_body(value)))
        self._sample = (time.monotonic(), replace(self._sampler.sample(), mechanisms=tuple(members)))


def _write_private(path: Path, content: dict[str, object]) -> None:
    """Write a small file that only this user may read, also if the file exists with another mode."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with open(descriptor, "w", encoding="utf-8") as file:
        os.fchmod(descriptor, 0o600)
        file.write(json.dumps(content) + "\n")
