"""Write the values of the job to its trackers, in the agent of rank 0's node.

The agent takes notice of each new line (`notes.agent_address`), and sends it to other nodes (`link`). Each
tracker has a thread of low priority, so one that fails or does not answer holds up no other. It is opened
again later. Training never waits for a tracker.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import logging
import math
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from elastic_resume.background import BackgroundThread, lower_priority
from elastic_resume.checkpoint.atomic_io import DISK
from elastic_resume.errors import ConfigError, ElasticResumeError, MachineError
from elastic_resume.mechanisms.curves import description, journal, notes
from elastic_resume.mechanisms.curves.exporter import Exporter, Point, parse_exporter
from elastic_resume.mechanisms.curves.link import Replicator
from elastic_resume.mechanisms.mechanism import AgentContext, AgentPart
from elastic_resume.policy.reasons import JobFinished
from elastic_resume.rendezvous.client import RendezvousClient
from elastic_resume.rendezvous.core.interface import StartWorkers
from elastic_resume.units import format_count

logger = logging.getLogger(__name__)

FLUSH_S = 5.0
RETRY_S, MAX_RETRY_S = 1.0, 60.0
GATHER_TIMEOUT_S = 30.0
"""How long a generation's first points wait for values that other nodes may have."""
CLOSE_TIMEOUT_S = 90.0  # W&B may upload the rest for a minute
STOP_TIMEOUT_S = 3.0
"""The same after a signal: a scheduler kills the agent soon."""
SILENT_S = 10.0
"""A tracker that does not answer for so long is named."""
HANDOVER_S = 5.0
"""The former writer may hold a file for a moment, which is no failure."""
POLL_S = 0.5
PAUSE_S = 0.05  # between two looks, so that several steps are written at once
BATCH = 1000
MAX_TRACKERS = 8
MAX_REASON_CHARS = 500


@dataclass(frozen=True)
class Tracker:
    """One tracker of the setting."""

    text: str
    make: Callable[[str], Exporter] = field(compare=False)


def parse_trackers(setting: str, value: object) -> tuple[Tracker, ...] | None:
    """Parse the trackers of ``--log-metrics``, separated by commas; None for ``off``.

    Raises:
        ConfigError: one is of an unknown kind, or its library is missing.

    """
    texts = [text.strip() for text in str(value).split(",") if text.strip()]
    if texts == ["off"]:
        return None
    if twice := [text for text in texts if texts.count(text) > 1]:
        raise ConfigError(f"{setting} has {twice[0][:200]} twice: name each tracker once.")
    if len(texts) > MAX_TRACKERS:
        raise ConfigError(f"{setting} has {len(texts)} trackers; {MAX_TRACKERS} is the most.")
    return tuple(Tracker(text, parse_exporter(setting, text)) for text in texts) or None


class CurveWriter(AgentPart):
    """One node's part: it copies, and writes while rank 0 is here."""

    def __init__(self, context: AgentContext) -> None:
        self._node_dir, self._emit = context.node_dir, context.emit
        self._client: RendezvousClient | None = None
        self._replicator: Replicator | None = None
        self._address: socket.socket | None = None
        self._stopped = threading.Event()
        self._notice_thread = BackgroundThread("curves-notice", self._take_notice)
        trackers: tuple[Tracker, ...] = context.settings["log_metrics"]
        self._writers = [
            TrackerWriter(self._node_dir, tracker, self._emit, names_gaps=at == 0)
            for at, tracker in enumerate(trackers)
        ]

    def start(self, client: RendezvousClient) -> None:
        """Listen to this node's worker and to other agents."""
        self._client = client
        directory = self._node_dir / journal.DIRECTORY
        try:
            DISK.make_dirs(directory)
            self._address = _bind(notes.agent_address(self._node_dir))
            host = client.address.rpartition(":")[0].strip("[]")
            self._replicator = Replicator(self._node_dir, client.run_id, host, self._wake_writers)
            DISK.write_atomic(directory / notes.ENDPOINT_FILE, json.dumps(self._replicator.endpoint).encode())
        except (OSError, MachineError) as error:
            logger.warning("values that run.log() gets are not recorded on this node: %s", error)
            self.close()
            return
        self._notice_thread.start()
        for writer in self._writers:
            writer.start(client)

    def update(self, client: RendezvousClient) -> description.CurvesStatus | None:
        """Name a tracker that does not answer; return those that are not written."""
        del client
        for writer in self._writers:
            writer.name_if_silent()
        failing = [(writer.text, writer.problem) for writer in self._writers if writer.problem]
        return description.CurvesStatus(tuple(failing)) if failing else None

    def begin_generation(self, world: StartWorkers) -> None:
        """Note whether rank 0 is on this node."""
        own_generation = world.generation if world.rank == 0 else 0
        if self._replicator is not None:
            self._replicator.own_generation = own_generation
        for writer in self._writers:
            writer.own_generation = own_generation
        self._wake_writers()

    def begin_stop(self, cause: str) -> None:
        """Wait for trackers no longer than a signal permits."""
        del cause
        self._stopped.set()

    def close(self) -> None:
        """Write what is left, and end."""
        self._close_writers()
        self._notice_thread.request_close()
        notes.send_to_agent(self._node_dir, {})  # which ends its wait
        self._notice_thread.close(POLL_S)
        if self._replicator is not None:
            self._replicator.close()
        if self._address is not None:
            self._address.close()
        with contextlib.suppress(OSError, MachineError):
            DISK.unlink(self._node_dir / journal.DIRECTORY / notes.ENDPOINT_FILE)

    def _close_writers(self) -> None:
        """Wait until all trackers have the rest: `STOP_TIMEOUT_S` if a signal came or comes."""
        start, is_named = time.monotonic(), False
        for writer in self._writers:
            writer.request_close()
        while left := [writer.text for writer in self._writers if not writer.join(PAUSE_S)]:
            waited_s, names = time.monotonic() - start, ", ".join(left)
            if waited_s > (STOP_TIMEOUT_S if self._stopped.is_set() else CLOSE_TIMEOUT_S):
                logger.warning(
                    "%s: still being written after %.0f s. The values wait in %s, and the same command "
                    "writes them.",
                    names,
                    waited_s,
                    self._node_dir / journal.DIRECTORY,
                )
                return
            if waited_s > STOP_TIMEOUT_S and not is_named:
                is_named = True
                logger.info(
                    "waiting up to %.0f s for %s; Ctrl-C leaves the rest to the next start.",
                    CLOSE_TIMEOUT_S,
                    names,
                )

    def _wake_writers(self) -> None:
        for writer in self._writers:
            writer.changed.set()

    def _take_notice(self) -> float:
        address, replicator = self._address, self._replicator
        if address is None or replicator is None:
            return POLL_S
        with contextlib.suppress(TimeoutError, ValueError, KeyError, TypeError):
            message: Any = json.loads(address.recv(4096))
            if "source" in message:
                source = message["source"]
                replicator.follow((str(source[0]), int(source[1]), str(source[2])) if source else None)
            replicator.announce()
            self._wake_writers()
        return 0.0


class TrackerWriter:
    """The thread that writes to one tracker, and its state."""

    def __init__(
        self, node_dir: Path, tracker: Tracker, emit: Callable[..., Any], *, names_gaps: bool
    ) -> None:
        self.text = tracker.text
        self.changed = threading.Event()
        self.own_generation = 0
        """The running generation if its rank 0 is on this node, else 0."""
        self._node_dir, self._tracker, self._emit, self._names_gaps = node_dir, tracker, emit, names_gaps
        self._client: RendezvousClient | None = None
        self._is_closing = threading.Event()
        self._session: Session | None = None
        self._thread = BackgroundThread("curves-write", self._write)

    def start(self, client: RendezvousClient) -> None:
        """Begin to write, as soon as rank 0 is on this node."""
        self._client = client
        self._thread.start()

    def request_close(self) -> None:
        """Have the rest written and the tracker closed."""
        self._is_closing.set()
        self.changed.set()

    def join(self, timeout_s: float) -> bool:
        """Wait for the end of the thread; return whether it has ended."""
        return self._thread.join(timeout_s)

    def name_if_silent(self) -> None:
        """Log a tracker that does not answer. Safe in any thread."""
        if (session := self._session) is not None:
            session.target.name_if_silent()

    @property
    def problem(self) -> str:
        """Why the tracker is not written; empty if it is. Safe in any thread."""
        return session.target.problem if (session := self._session) is not None else ""

    def _write(self) -> float | None:
        lower_priority()
        if not self._is_closing.is_set():
            self.changed.wait(POLL_S)
        self.changed.clear()
        is_closing, generation = self._is_closing.is_set(), self.own_generation
        end = self._client.job_end if self._client else None
        is_finished = end is not None and isinstance(end.reason, JobFinished)
        session = self._session
        if session is None and generation and self._client is not None and not is_closing:
            target = _Target(self._tracker, self._client.run_id, self._emit)
            session = Session(self._node_dir, target, self._emit, names_gaps=self._names_gaps)
            self._session = session
        if session is not None and generation and (is_finished or not self._is_over()):
            session.advance(generation, is_last=is_closing)
        elif session is not None:
            session.flush()  # another node may write from the next generation on
        if session is not None and (is_closing or not generation):
            session.finish(is_finished=is_closing and is_finished)
            self._session = None
        return None if is_closing else PAUSE_S

    def _is_over(self) -> bool:
        """Return whether the view has ended, so that another node may soon write."""
        return self._client is None or self._client.restart_requested


class Session:
    """What one tracker gets, from when rank 0 comes to this node until it leaves."""

    def __init__(
        self, node_dir: Path, target: _Target, emit: Callable[..., Any], *, names_gaps: bool = True
    ) -> None:
        """``names_gaps``: report values that no node has; the job's other trackers need not."""
        self._node_dir, self._emit, self._names_gaps = node_dir, emit, names_gaps
        self.generation = 0
        """The one whose values are written; 0 before the first."""
        self.target = target
        self._points: dict[int, Point] = {}
        """Those that the tracker lacks; the last one may get more values."""
        self._closed = -1
        self._offset = 0
        self._named_gaps: set[tuple[int, int]] = set()
        self._awaited: tuple[int, float] = (0, 0.0)  # generation, and until when its gaps are waited for
        self._flushed_at = time.monotonic()
        self._has_recorded = False

    def advance(self, generation: int, *, is_last: bool = False) -> None:
        """Write what is new; begin a generation once its values are complete, or if nothing more comes."""
        if generation != self.generation and not self._begin(generation, is_last=is_last):
            return
        self._read_more()
        self._put(self._closed - 1)
        if time.monotonic() >= self._flushed_at + FLUSH_S or not self._has_recorded:
            self._has_recorded = True  # at once: what the trackers have from now on is this job's
            self.flush()

    def finish(self, *, is_finished: bool) -> None:
        """Write the rest; the last step's point too if the job ``is_finished``, as nothing follows."""
        self._put(self._closed if is_finished else self._closed - 1)
        self.flush()
        if left := sum(step > self.target.durable for step in self._points) if is_finished else 0:
            logger.warning(
                "%s lacks the values of %s after step %d%s. They wait in %s: the same command writes them.",
                self.target.text,
                format_count(left, "step"),
                max(0, self.target.durable),
                f": {self.target.last_error.rstrip('.')}" if self.target.last_error else "",
                self._node_dir / journal.DIRECTORY,
            )
        self.target.close()

    def flush(self) -> None:
        """Flush the tracker, and record for later writers what it has."""
        self._flushed_at = time.monotonic()
        step = self.target.flush()
        if step is not None and self.generation:
            line = journal.format_line({self.target.text: step})
            path = journal.written_path(self._node_dir, self.generation)
            with contextlib.suppress(OSError), open(path, "ab") as file:
                file.write(line)
        self._forget()

    def _begin(self, generation: int, *, is_last: bool) -> bool:
        """Read the values of all generations that count; return False to wait for more of them."""
        heads = self._read_heads(generation)
        if generation not in heads:
            return False  # the workers restore
        chain = journal.follow_chain(generation, heads)
        # A new machine's files of former generations arrive after the first line of this one.
        if not chain.is_complete and not is_last and self._is_awaited(generation):
            return False
        if self._names_gaps:
            self._name_gaps(chain, heads)
        records = self._load(chain)
        self._begin_target(chain, records)
        return True

    def _read_heads(self, generation: int) -> dict[int, journal.GenerationRecords]:
        """Return where each generation up to this one began, as far as this node knows."""
        numbers = [number for number in journal.list_generations(self._node_dir) if number <= generation]
        found = ((number, journal.read_head(self._node_dir, number)) for number in numbers)
        return {number: head for number, head in found if head is not None}

    def _is_awaited(self, generation: int) -> bool:
        """Return whether other nodes may still send what a generation's chain lacks."""
        if self._awaited[0] != generation:
            self._awaited = (generation, time.monotonic() + GATHER_TIMEOUT_S)
        return time.monotonic() < self._awaited[1]

    def _name_gaps(self, chain: journal.Chain, heads: Mapping[int, journal.GenerationRecords]) -> None:
        """Report the steps whose values no node has, each once while rank 0 is on this node."""
        for source, first, last in journal.list_missing_steps(chain, heads):
            if (first, last) not in self._named_gaps:
                self._named_gaps.add((first, last))
                self._emit("curves-lost", first=first, last=last, of_generation=source)
                logger.warning("%s.", description.describe_gap(first, last))

    def _load(self, chain: journal.Chain) -> dict[int, journal.GenerationRecords]:
        """Take over the points of a chain, whose newest generation is written from now on."""
        found = ((number, journal.read_records(self._node_dir, number)) for number in chain.generations)
        records = {number: each for number, each in found if each is not None}
        self.generation, self._offset = chain.generations[0], 0
        self._points = journal.collect_points(chain, records)
        self._closed = records[self.generation].closed.step
        return records

    def _begin_target(self, chain: journal.Chain, records: Mapping[int, journal.GenerationRecords]) -> None:
        """Let the tracker go on after what earlier writers have recorded, or from where the job went back."""
        since = journal.list_since_way_back(chain, records)
        written = journal.read_written(self._node_dir, since)
        go_back_to = records[since[-1]].begin.step if records[since[-1]].goes_back else None
        recorded = journal.read_written(self._node_dir, journal.list_generations(self._node_dir))
        if go_back_to is None and chain.is_complete and self.target.text not in recorded:
            go_back_to = -1  # an earlier job had the same run id; its step 0 goes too
        step = written.get(self.target.text)
        self.target.begin(-1 if step is None else step, go_back_to if step is None else None)

    def _read_more(self) -> None:
        path = journal.record_path(self._node_dir, self.generation)
        with contextlib.suppress(OSError), open(path, "rb") as file:
            if os.fstat(file.fileno()).st_size <= self._offset:
                return
            file.seek(self._offset)
            data = file.read()
            lines = data.split(b"\n")[:-1]
            self._offset += sum(map(len, lines)) + len(lines)
            nothing = journal.Moment(-1, -1)
            more = journal.GenerationRecords(nothing, 0, goes_back=False, closed=nothing)
            journal.add_lines(more, lines)
            for moment, at, values in more.lines:
                journal.add_point(self._points, moment.step, at, values)
            self._closed = max(self._closed, more.closed.step)

    def _put(self, last_step: int) -> None:
        self.target.put(self._points, last_step)

    def _forget(self) -> None:
        """Drop the points that the tracker has for certain."""
        known = self.target.durable
        self._points = {
            step: point for step, point in self._points.items() if step > known or step >= self._closed
        }


class _Target:
    """One tracker: what it has, and when it is tried again after an error."""

    def __init__(self, tracker: Tracker, run_id: str, emit: Callable[..., Any]) -> None:
        self.text, self._make, self._run_id, self._emit = tracker.text, tracker.make, run_id, emit
        self._exporter: Exporter | None = None
        self.durable = -1
        """The last step that it has for certain."""
        self._sent = self._known = -1
        self._recorded: int | None = None
        self._go_back_to: int | None = None
        self._retry_at, self._pause_s = 0.0, 0.0
        self._failing_since = math.inf
        self.problem = ""
        """Why it is not written, once that is named; empty if it is written."""
        self.last_error = ""
        self._busy_since = math.inf  # while a call of the library runs

    def name_if_silent(self) -> None:
        """Log once that a call does not return."""
        busy_s = time.monotonic() - self._busy_since
        if busy_s >= SILENT_S:
            self._name(f"it has not answered for {busy_s:.0f} s")

    def begin(self, known: int, go_back_to: int | None) -> None:
        """Go on in another generation; ``known`` is what a writer has recorded that it has."""
        self._known, self._go_back_to = known, go_back_to
        if go_back_to is not None:
            self.close()

    def put(self, points: dict[int, Point], last_step: int) -> None:
        """Write the points up to ``last_step`` that it lacks."""
        if not self._try(self._open):
            return
        due = [point for step, point in sorted(points.items()) if self._sent < step <= last_step]
        for at in range(0, len(due), BATCH):
            batch = due[at : at + BATCH]
            if not self._try(functools.partial(_write, batch)):
                return
            self._sent = batch[-1].step

    def flush(self) -> int | None:
        """Make durable what was written; return the last step if that is new."""
        if self._exporter is None or not self._try(self._flush) or self.durable == self._recorded:
            return None
        self._recorded = self.durable
        return self.durable

    def close(self) -> None:
        """Close it; `put` opens it again."""
        exporter, self._exporter = self._exporter, None
        if exporter is not None:
            with contextlib.suppress(Exception):
                exporter.close()

    def _open(self, exporter: Exporter | None) -> None:
        if exporter is not None:
            return
        made = self._make(self._run_id)
        try:
            self.durable = self._sent = made.open(self._known, self._go_back_to)
        except BaseException:
            with contextlib.suppress(Exception):
                made.close()
            raise
        self._exporter, self._go_back_to = made, None

    def _flush(self, exporter: Exporter) -> None:
        self.durable = self._known = exporter.flush()

    def _try(self, act: Callable[[Any], object]) -> bool:
        """Act on the exporter, unless it has just failed; return whether that went well."""
        if time.monotonic() < self._retry_at:
            return False
        self._busy_since = time.monotonic()
        try:
            act(self._exporter)
        except Exception as error:  # noqa: BLE001 - of any library; training goes on
            self._note_failure(error)
            return False
        finally:
            self._busy_since = math.inf
        if act != self._open:  # which does nothing if it is open
            self._pause_s, self._failing_since = 0.0, math.inf
            self.last_error = ""
            if self.problem:
                self.problem = ""
                self._emit("curves-recovered", tracker=self.text)
                logger.info("%s is written again.", self.text)
        return True

    def _note_failure(self, error: Exception) -> None:
        logger.debug("%s failed", self.text, exc_info=error)
        self.close()
        now = time.monotonic()
        self._failing_since = min(self._failing_since, now)
        is_own = isinstance(error, ElasticResumeError)
        self.last_error = (str(error) if is_own else f"{type(error).__name__}: {error}")[:MAX_REASON_CHARS]
        if isinstance(error, ConfigError) or now >= self._failing_since + HANDOVER_S:
            self._name(self.last_error)
        self._pause_s = min(2 * self._pause_s or RETRY_S, MAX_RETRY_S)
        self._retry_at = now + self._pause_s

    def _name(self, reason: str) -> None:
        """Report once that it is not written."""
        if self.problem:
            return
        self.problem = reason or "no reason"
        self._emit("curves-failed", tracker=self.text, error=self.problem)
        text = "%s is not written, and is tried again: %.500s The values wait in the node's directory."
        logger.warning(text, self.text, reason if reason.endswith(".") else f"{reason}.")


def _write(points: list[Point], exporter: Exporter) -> None:
    exporter.write(points)


def _bind(address: bytes) -> socket.socket:
    receiver = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        receiver.bind(address)
    except OSError as error:
        receiver.close()
        reason = "another agent of this directory runs" if error.errno == errno.EADDRINUSE else str(error)
        raise OSError(error.errno, reason) from error
    receiver.settimeout(POLL_S)
    return receiver
