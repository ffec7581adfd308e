"""The event log: one event is one dict is one JSON line.

Every agent, stub and worker of a node appends to ``NODE/events.jsonl``. A line is written by a single
``write(2)`` on a descriptor opened with O_APPEND, so lines of several processes of one node do not mix
(nodes never share a file). After a crash or on a full disk the last line may be torn: whoever opens the log
next begins a new line, and `read` also finds an event that was glued to the rest of a torn one. What does
not parse is left out. Log text for people is rendered from these dicts elsewhere.

Fields of every event: ``t`` (seconds since the epoch), ``event`` (its kind), ``node``, ``pid``, ``b``
(CLOCK_BOOTTIME: seconds since the machine's boot) and ``boot`` (which boot that is). The wall clock may jump:
durations come from ``b``, between events of one boot.

Kinds, who writes them, and their own fields::

    agent-start      agent    run_id, command, min_nodes, max_nodes, local_world_size
    round            agent    round, node_rank, num_nodes, generation      a world began; workers start now
    rendezvous       agent    what (leading, lost, waiting, spare, …), message
    zygote-ready     agent    seconds, left_out {module: reason}
    zygote-exit      agent    exit_code
    worker-exit      guard    rank, local_rank, round, worker_pid (null: not started), exit_code (or null),
                              signal (name or null), stopped (true: the agent had told it to end), message (of
                              torch's @record), fenced (true: its lease was over), stuck (true: it lives on)
    hang             agent    generation, step, suspects [{rank, local_rank, worker_pid, reason}], victims
                              [rank], waiting {rank: reason}, elsewhere (true: all wait for another node),
                              threshold_s, seconds (without a step), steps {rank: step}, report (a path)
    hang-over        agent    generation, step      ranks that waited for another node went on
    watch-failed     agent    error                 a fault of ours while hangs were looked for
    drain            agent    cause (SIGTERM, SIGUSR1, …, deadline, a preemption notice), alone (others stay)
    requeue          agent    action (requeue | exit code | leave alone), why; of a request: job, done, tries,
                              message (what Slurm said last)
    preemption-notice agent   source, reason, deadline (seconds since the epoch, or null); drains
    verdict          agent    generation, causes, cascade    how all nodes see its end (policy.failures)
    replicas-differ  agent    generation, step, agreed_step (the newest at which all were equal), nodes [those
                              that hold the same, as lists, most first], wrong [node], goes_on (from the
                              majority's state; else the job ends)
    agent-end        agent    outcome (done | failed | signalled | left), exit_code, message
    import           worker   generation, step, path, message    a file of others became a checkpoint of ours
    resume           rank 0   generation, step, epoch, world_size, previous_world_size (or null), nodes,
                              kind (cold | checkpoint), source_node, source_tier (memory | disk | ""),
                              source_generation, lacking,
                              rejected [{node, generation, step, reason}], lost_steps, seconds
    worker-start     worker   generation, rank, local_rank, world_size, step     state loaded, training starts
    step             worker   generation, rank, step, epoch, stalled_s (what this rank waited for copies in
                              this generation)                 at a bounded rate; always the first one
    commit           keeper   generation, step, bytes, seconds, path     (the agent, or a worker without one)
    commit-failed    keeper   generation, step, error
    prune            keeper   path
    prune-failed     keeper   error
    snapshot-ignored keeper   generation, step, reason     what lies in memory cannot be true
    keeper-failed    keeper   error                        a fault of ours; it goes on with what comes next
    snapshot-failed  worker   generation, reason           a copy into memory failed; training goes on
    quarantine       worker   path, reason
    board-ignored    worker   reason             the page of last steps was damaged, and is cleared
    failure          worker   generation, rank, step, type, message, frame, at_fault, traceback
                              an exception ended it
    fault            (none)   number, what, where, when, node, rank, message    injected; in faults.jsonl
    run-end          worker   generation, rank, step, epoch, stalled_s    the script's epochs are done
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

MAX_LINE_BYTES = 64 * 1024  # a traceback's last lines fit; a line is never the place for more
MAX_COUNT_VALUE = 1 << 53
MAX_TIME_S = 1e12  # the year 33658: what is beyond is no time
# What follows from the end of a round is decided by these, so they are kept where no disk can lose them.
ROUND_END_KINDS = frozenset({"worker-start", "failure", "worker-exit", "hang", "hang-ended"})
MAX_PENDING_LINES = 1000  # lines, of some hundred bytes each
BOOT_ID_FILE = Path("/proc/sys/kernel/random/boot_id")
_MEMFD_LINK_PREFIX = (
    "/memfd:elastic_resume-round-events"  # what the link in /proc of an `agent.round_events` says
)
_EVENT_PREFIX = b'{"t":'  # of every event, whoever writes it; inside a JSON text the quotes would be escaped


class EventLog:
    """Appends events of one process. Losing the disk never stops training: `write` does not raise OSError.

    What a disk refuses (it is full, it fails) waits in memory, and is written before the next event that it
    takes; the newest `MOST_WAITING` are kept. So it can be told afterwards what went wrong with the disk.
    """

    def __init__(
        self,
        path: Path,
        *,
        on_line: Callable[[str], None] | None = None,
        memory_path: str | None = None,
        **fixed: Any,
    ) -> None:
        """``fixed`` goes into every event, first. ``hear`` gets each line, whatever the disk does with it.

        ``memory`` is where `DECISIVE` events are kept too (`contract.ENV_ROUND_EVENTS`); None: nowhere.
        """
        self._path = path
        self._on_line = on_line
        self._memory_path = memory_path
        self._common_fields = fixed
        self._descriptor = -1
        self._pending: deque[bytes] = deque()
        self._dropped = 0
        self._ends_within_line = False  # whether the file ends within a line

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
        if self._memory_path is not None and event in ROUND_END_KINDS:
            _append_to_memory(self._memory_path, line)
        self._pending.append(line)
        with contextlib.suppress(IndexError):  # another thread has taken the last one
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
        """How many events are not on the disk."""
        return self._dropped + len(self._pending)

    def _append(self, line: bytes) -> bool:
        """Write a line; whether the disk has taken all of it."""
        try:
            if self._descriptor < 0:
                flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
                self._descriptor = os.open(self._path, flags, 0o644)
                self._ends_within_line = _is_last_line_torn(self._descriptor)
            line = b"\n" * self._ends_within_line + line
            written = os.write(self._descriptor, line)
            self._ends_within_line = written < len(line)
        except OSError:
            self.close()  # a file of a disk that was mounted anew is lost for good: the next one may work
            return False
        return written >= len(line) - 1  # its end alone follows before the next one

    def close(self) -> None:
        """Release the descriptor; a later `write` opens the file again."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def read(path: Path, offset: int = 0) -> Iterator[Event]:
    """Yield the events of one file from byte ``offset``, in the order they were appended.

    A line that is not a JSON object with a kind and a time (torn by a crash, say) is left out.

    Raises:
        OSError: the disk fails (EIO, ESTALE). A file that is missing has no events.

    """
    try:
        with open(path, "rb") as file:
            file.seek(offset)
            for line in file:
                event = parse_complete_line(line)
                if event is not None:
                    yield event
    except FileNotFoundError:
        return


def parse_line(line: str | bytes) -> Event | None:
    """Read one line; None where it is no object with a kind and a time. Its other fields may be anything."""
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
    """Read a line that its writer has finished, or the event that was glued to the rest of a torn one."""
    if not line.endswith(b"\n"):
        return None
    event = parse_line(line)
    if event is None:
        glued = line.rfind(_EVENT_PREFIX, max(1, len(line) - MAX_LINE_BYTES))
        event = parse_line(line[glued:]) if glued > 0 else None
    return event


def get_seconds(event: Mapping[str, Any], name: str = "t") -> float | None:
    """The field ``name`` where that is a time in seconds, or a span; not NaN, nor an int of any size."""
    value: Any = event.get(name)
    return float(value) if type(value) in {int, float} and abs(value) <= MAX_TIME_S else None


def boot_fields() -> Event:
    """Give the fields ``b`` and ``boot`` of an event that happens now; none where the boot has no name."""
    boot = _read_boot_id()
    return {"b": round(time.clock_gettime(time.CLOCK_BOOTTIME), 3), "boot": boot} if boot else {}


def get_boot_time(event: Mapping[str, Any]) -> tuple[str, float] | None:
    """Which boot of a machine the event is of, and its seconds since then; None where it does not say."""
    boot, since = event.get("boot"), get_seconds(event, "b")
    return (boot, since) if isinstance(boot, str) and boot and since is not None else None


def age_s(event: Mapping[str, Any]) -> float:
    """Seconds since the event; by the wall clock where that was in another boot than this one."""
    then, now = get_boot_time(event), get_boot_time(boot_fields())
    if then is not None and now is not None and then[0] == now[0]:
        return max(0.0, now[1] - then[1])
    return max(0.0, time.time() - (get_seconds(event) or 0.0))


def get_count(event: Mapping[str, Any], name: str) -> int | None:
    """The field ``name`` where that is a count."""
    value: Any = event.get(name)
    return value if type(value) is int and 0 <= value <= MAX_COUNT_VALUE else None


def read_run(run_dir: Path) -> list[Event]:
    """All events of all nodes under ``CKPT_DIR/RUN_ID``, and of injected faults, by time."""
    beside = [run_dir / name for name in (constants.FAULTS_FILE, constants.PEER_EVENTS_FILE)]
    paths = [*sorted(run_dir.glob(f"*/{constants.EVENTS_FILE}")), *beside]
    merged = [event for path in paths for event in read(path)]
    return sorted(merged, key=lambda event: event["t"])


def _append_to_memory(memory_path: str, line: bytes) -> None:
    with contextlib.suppress(OSError):  # the agent has ended, and decides no more
        if not str(Path(memory_path).readlink()).startswith(
            _MEMFD_LINK_PREFIX
        ):  # its pid is another process's by now
            return
        descriptor = os.open(memory_path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        try:
            os.write(descriptor, line)
        finally:
            os.close(descriptor)


@functools.cache
def _read_boot_id() -> str:
    """Name this boot of the machine: the first twelve digits of the kernel's random id; or nothing."""
    try:
        return BOOT_ID_FILE.read_text().replace("-", "")[:12]
    except OSError:
        return ""


def _is_last_line_torn(descriptor: int) -> bool:
    size = os.fstat(descriptor).st_size
    return size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"
