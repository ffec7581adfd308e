"""Write and read the event log: each event is a dict, stored as one line of JSON.

All processes of a node append to ``NODE/events.jsonl``; nodes never share a file. One ``write(2)`` on an
O_APPEND descriptor writes one line, so lines of several processes do not mix. A crash or a full disk may tear
the last line: the next process to open the log begins a new line, and `read` finds an event behind the rest
of a torn line.

Every event has ``t`` (seconds since the epoch), ``event`` (its kind), ``node``, ``pid``, ``b``
(CLOCK_BOOTTIME) and ``boot`` (the id of that boot). The wall clock may jump: take durations from ``b``,
between events of one boot.

A ``reason``, a ``decision`` and the ``cause`` of a failure are facts in the form of
`policy.reasons.to_json`: ``kind`` and fields; `from_json` reads them. A failure has the fields of
`policy.failure_classification.Failure`. A ``message`` has words for people.

Kinds, their writers and their own fields (each package in `mechanisms` describes its own)::

    agent-start           agent      run_id, command, min_nodes, max_nodes, local_world_size,
                                     settings [text] (those that are no default, with their sources)
    generation-start      agent      generation, node_rank, num_nodes, begins_job (no agent of it has had a
                                     generation before); workers are about to start
    rendezvous            agent      what (leading, lost, view-ended, waiting, spare, ...), generation (if
                                     known), reason, message
    fork-server-ready     agent      seconds, skipped_modules {module: reason}
    fork-server-exit      agent      exit_code
    worker-forked         supervisor rank, local_rank, generation, worker_pid; only in the agent's memory
    worker-exit           supervisor rank, local_rank, generation, worker_pid (null: not started), exit_code
                                     (or null), signal (name or null), stopped (the agent had requested
                                     the end), message (from torch's @record), lease_expired, stuck (it could
                                     not be killed), not_parked (killed since it did not park in time)
    hang                  agent      generation, step, suspects [{rank, local_rank, worker_pid, reason}],
                                     victims [rank], waiting {rank: reason}, waits_for_other_node (all ranks
                                     here do), kill_delay_s (0: killed at once; else another node may
                                     act first), threshold_s, seconds (without a step),
                                     steps {rank: step}, report (a path)
    hang-ended            agent      generation, step; the stalled ranks continued before their kill
    drain                 agent      cause (SIGTERM, SIGUSR1, ..., deadline, or a mechanism's own text),
                                     others_continue
    verdict               agent      generation (that ended), next_generation (null: this node takes part in
                                     none), reason (why the leader ended the view, or null), joined [node],
                                     lost [node], root_causes, secondary_failures [failures], decision
                                     (continue | give-up | exclude), speaks_for_job
    agent-end             agent      outcome (done | failed | signalled | left), exit_code, reason, message,
                                     speaks_for_job (this node reports the job's end, or restart, to its
                                     user: `policy.reporting_node`)
    archive-wait          rank 0     seconds (waited so far), error; each minute in which a start needs an
                                     archive that cannot be read
    resume                rank 0     generation, step, epoch, world_size, previous_world_size (or null),
                                     nodes, kind (cold | resumed), source_node, source_tier (memory |
                                     disk | archive | ""), source_generation, proves_step (or null),
                                     receiving_nodes [node], rejected [{node, generation, step, reason}],
                                     recomputed_steps, resume_from (the request if the job went back, or
                                     null), given_up_steps, seconds
    proof                 rank 0     generation, step, first_step, verdict (proved | rounding | not proved),
                                     ranks, rounding, within_epoch, seconds, message; steps were computed
                                     again
    worker-start          worker     generation, rank, local_rank, world_size, step, kept_step (up to which
                                     steps are computed again on purpose, as by a proof, or given up), gpu
                                     (UUID of the model's device, or null); the state is loaded
    restartable           worker     generation, rank, local_rank, start_s (from its start to er.resume),
                                     state_bytes
    step                  worker     generation, rank, step, epoch, stalled_s (time that this rank has
                                     waited for snapshots in this generation); at a bounded rate, and
                                     always the first
    busy                  worker     generation, rank, step, reason; the script entered `run.busy`
    commit                committer  generation, step, bytes, seconds, path
    commit-failed         committer  generation, step, error
    milestone             worker     generation, rank, step, name, metric (or null), path
    prune                 committer  path
    prune-failed          committer  error
    snapshot-ignored      committer  generation, step, reason; the snapshot's metadata is invalid
    committer-failed      committer  error; a bug of ours, it continues with the next request
    snapshot-failed       worker     generation, reason; training continues
    quarantine            worker     path, reason
    moved-aside           worker     path, reason; newer than the state to which the job went back
    failure               worker     generation, rank, step, type, message (its first line), detail (the
                                     others), cause and cause_type (the exception of a GPU that led to
                                     it), frame, deterministic, worth_requeue (a later start may not
                                     meet it), is_proving (steps were computed again), traceback; an
                                     exception ended the worker
    fault                 (none)     number, what, where, when, node, rank, message; injected, in
                                     faults.jsonl
    run-end               worker     generation, rank, step, epoch, stalled_s; the script's epochs are done
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from elastic_resume import constants

Event = dict[str, Any]

MAX_LINE_BYTES = 64 * 1024  # enough for the ends of a traceback
MAX_COUNT_VALUE = 1 << 53
MAX_TIME_S = 1e12  # Unix time of the year 33658
# The agent uses these events to decide what follows a generation, so its memory keeps them too.
FAILURE_EVIDENCE_KINDS = frozenset(
    {
        "archive-wait",
        "failure",
        "gpu-fault",
        "hang",
        "hang-ended",
        "restartable",
        "worker-exit",
        "worker-start",
    }
)
MAX_PENDING_LINES = 1000  # each has a few hundred bytes
BOOT_ID_FILE = Path("/proc/sys/kernel/random/boot_id")
_MEMFD_LINK_PREFIX = "/memfd:elastic_resume-evidence"  # link of `agent.failure_evidence` in /proc
_EVENT_PREFIX = b'{"t":'  # every event begins so; inside a JSON string the quotes would be escaped


class EventLog:
    """Appends the events of one process to its node's file.

    A failing disk never stops training: `emit` raises no OSError. Lines that the disk refuses stay in memory,
    at most the newest `MAX_PENDING_LINES`, and are written before the next event.
    """

    def __init__(
        self,
        path: Path,
        *,
        on_line: Callable[[str], None] | None = None,
        memory_path: str | None = None,
        **common_fields: Any,
    ) -> None:
        """Prepare a log; the first event opens the file.

        Args:
            path: the file.
            on_line: called with each line, also when the disk refuses it.
            memory_path: a memfd that also receives `FAILURE_EVIDENCE_KINDS` (`constants.ENV_EVIDENCE`).
            **common_fields: added to every event.

        """
        self.path = path
        self._on_line = on_line
        self._memory_path = memory_path
        self._common_fields = common_fields
        self._descriptor = -1
        self._pending: deque[bytes] = deque()
        self._dropped = 0
        self._ends_within_line = False  # the file ends with a torn line

    def emit(self, event: str, /, **fields: Any) -> Event:
        """Append one event and return it."""
        record: Event = {
            "t": round(time.time(), 3),
            "event": event,
            **self._common_fields,
            "pid": os.getpid(),
            **boot_fields(),
            **fields,
        }
        line = (json.dumps(record, separators=(",", ":"), default=str) + "\n").encode()
        if len(line) > MAX_LINE_BYTES:
            record = {k: v if len(str(v)) < 1024 else str(v)[:1024] for k, v in record.items()}
            line = (json.dumps(record, separators=(",", ":"), default=str) + "\n").encode()
        if self._on_line is not None:
            self._on_line(line[:-1].decode())
        if self._memory_path is not None and event in FAILURE_EVIDENCE_KINDS:
            _append_to_memory(self._memory_path, line)
        self._pending.append(line)
        with contextlib.suppress(IndexError):  # another thread took the last line
            while self._pending:
                first = self._pending.popleft()
                if not self._append(first):
                    self._pending.appendleft(first)
                    break
            while len(self._pending) > MAX_PENDING_LINES:
                self._pending.popleft()
                self._dropped += 1
        return record

    @property
    def unwritten_count(self) -> int:
        """The number of events that are not on the disk."""
        return self._dropped + len(self._pending)

    def _append(self, line: bytes) -> bool:
        """Write a line. Return whether the disk has accepted all of it."""
        try:
            if self._descriptor < 0:
                flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
                self._descriptor = os.open(self.path, flags, 0o644)
                self._ends_within_line = _is_last_line_torn(self._descriptor)
            line = b"\n" * self._ends_within_line + line
            written = os.write(self._descriptor, line)
            self._ends_within_line = written < len(line)
        except OSError:
            self.close()  # after a remount the old descriptor never works again; a new one may
            return False
        return written >= len(line) - 1  # a missing newline is written before the next line

    def close(self) -> None:
        """Close the descriptor; a later `emit` opens the file again."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def read(path: Path) -> Iterator[Event]:
    """Yield the events of one file, in the order of appending.

    Lines that are not a JSON object with a kind and a time are skipped. A missing file has no events.

    Raises:
        OSError: the disk fails (EIO, ESTALE).

    """
    try:
        with open(path, "rb") as file:
            for line in file:
                event = parse_complete_line(line)
                if event is not None:
                    yield event
    except FileNotFoundError:
        return


def parse_line(line: str | bytes) -> Event | None:
    """Parse one line; None unless it is an object with a kind and a time. Other fields are not checked."""
    if len(line) > MAX_LINE_BYTES:
        return None
    try:
        event = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(event, dict) or not isinstance(event.get("event"), str):
        return None
    return event if get_seconds(event) is not None else None


def parse_complete_line(line: bytes) -> Event | None:
    """Parse a line that ends with a newline, or the event behind the rest of a torn line."""
    if not line.endswith(b"\n"):
        return None
    event = parse_line(line)
    if event is None:
        start = line.rfind(_EVENT_PREFIX, max(1, len(line) - MAX_LINE_BYTES))
        event = parse_line(line[start:]) if start > 0 else None
    return event


def get_seconds(event: Mapping[str, Any], name: str = "t") -> float | None:
    """Return the field ``name`` if it is a finite number of seconds, else None."""
    value: Any = event.get(name)
    return float(value) if type(value) in {int, float} and abs(value) <= MAX_TIME_S else None


def boot_fields() -> Event:
    """Return the fields ``b`` and ``boot`` for an event that happens now; none if the boot id is unknown."""
    boot = _read_boot_id()
    return {"b": round(time.clock_gettime(time.CLOCK_BOOTTIME), 3), "boot": boot} if boot else {}


def get_boot_time(event: Mapping[str, Any]) -> tuple[str, float] | None:
    """Return the event's boot id and its seconds since that boot, or None."""
    boot, since = event.get("boot"), get_seconds(event, "b")
    return (boot, since) if isinstance(boot, str) and boot and since is not None else None


def age_s(event: Mapping[str, Any]) -> float:
    """Return the seconds since the event; by the wall clock if the machine has booted since."""
    then, now = get_boot_time(event), get_boot_time(boot_fields())
    if then is not None and now is not None and then[0] == now[0]:
        return max(0.0, now[1] - then[1])
    return max(0.0, time.time() - (get_seconds(event) or 0.0))


def get_count(event: Mapping[str, Any], name: str) -> int | None:
    """Return the field ``name`` if it is a count, else None."""
    value: Any = event.get(name)
    return value if type(value) is int and 0 <= value <= MAX_COUNT_VALUE else None


def read_run(run_dir: Path) -> list[Event]:
    """Return all events of all nodes under ``CKPT_DIR/RUN_ID``, with injected faults, by time."""
    paths = [*sorted(run_dir.glob(f"*/{constants.EVENTS_FILE}")), run_dir / constants.FAULTS_FILE]
    merged = [event for path in paths for event in read(path)]
    return sorted(merged, key=lambda event: event["t"])


def _append_to_memory(memory_path: str, line: bytes) -> None:
    with contextlib.suppress(OSError):  # the agent has ended
        if not str(Path(memory_path).readlink()).startswith(_MEMFD_LINK_PREFIX):
            return  # another process has the agent's pid now
        descriptor = os.open(memory_path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        try:
            os.write(descriptor, line)
        finally:
            os.close(descriptor)


@functools.cache
def _read_boot_id() -> str:
    """Return the first twelve digits of the kernel's boot id, or an empty text."""
    try:
        return BOOT_ID_FILE.read_text().replace("-", "")[:12]
    except OSError:
        return ""


def _is_last_line_torn(descriptor: int) -> bool:
    size = os.fstat(descriptor).st_size
    return size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"
