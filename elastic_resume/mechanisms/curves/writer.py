"""Write the values of the job to its trackers, in the agent of rank 0's node.

The agent takes notice of each new line (`AgentAddress`), sends it to other nodes (`link`), and a thread of
low priority writes the points. All trackers get the same points; one that fails is opened again later, and
holds up nothing else. Training never waits for a tracker.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from elastic_resume.background import BackgroundThread, lower_priority
from elastic_resume.checkpoint.atomic_io import DISK
from elastic_resume.errors import ConfigError, MachineError
from elastic_resume.mechanisms.curves import description, journal, notes
from elastic_resume.mechanisms.curves.exporter import Exporter, Point, parse_exporter
from elastic_resume.mechanisms.curves.link import Replicator
from elastic_resume.mechanisms.mechanism import AgentContext, AgentPart
from elastic_resume.policy.reasons import JobFinished
from elastic_resume.rendezvous.client import RendezvousClient
from elastic_resume.rendezvous.core.interface import StartWorkers

logger = logging.getLogger(__name__)

FLUSH_S = 5.0
RETRY_S, MAX_RETRY_S = 1.0, 60.0
GATHER_TIMEOUT_S = 30.0
"""How long a generation's first points wait for values that other nodes may have."""
CLOSE_TIMEOUT_S = 90.0  # W&B may upload the rest for a minute
POLL_S = 0.5
PAUSE_S = 0.05  # between two looks, so that several steps are written at once
BATCH = 1000
MAX_TRACKERS = 8


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
    if len(texts) != len(set(texts)) or len(texts) > MAX_TRACKERS:
        raise ConfigError(
            f"{setting} names {len(texts)} trackers: name each once, and {MAX_TRACKERS} at most."
        )
    return tuple(Tracker(text, parse_exporter(setting, text)) for text in texts) or None


class CurveWriter(AgentPart):
    """One node's part: it copies, and writes while rank 0 is here."""

    def __init__(self, context: AgentContext) -> None:
        self._node_dir, self._emit = context.node_dir, context.emit
        self._trackers: tuple[Tracker, ...] = context.settings["log_metrics"]
        self._client: RendezvousClient | None = None
        self._replicator: Replicator | None = None
        self._address: socket.socket | None = None
        self._changed = threading.Event()
        self._own_generation = 0  # of rank 0, if that is on this node; else 0
        self._is_closing = threading.Event()
        self._session: Session | None = None
        self._notice_thread = BackgroundThread("curves-notice", self._take_notice)
        self._write_thread = BackgroundThread("curves-write", self._write)

    def start(self, client: RendezvousClient) -> None:
        """Listen to this node's worker and to other agents."""
        self._client = client
        directory = self._node_dir / journal.DIRECTORY
        try:
            DISK.make_dirs(directory)
            self._address = _bind(notes.agent_address(self._node_dir))
            host = client.address.rpartition(":")[0].strip("[]")
            self._replicator = Replicator(self._node_dir, client.run_id, host, self._changed.set)
            DISK.write_atomic(directory / notes.ENDPOINT_FILE, json.dumps(self._replicator.endpoint).encode())
        except (OSError, MachineError) as error:
            logger.warning("values that run.log() gets are not recorded on this node: %s", error)
            self.close()
            return
        self._notice_thread.start()
        self._write_thread.start()

    def begin_generation(self, world: StartWorkers) -> None:
        """Note whether rank 0 is on this node."""
        self._own_generation = world.generation if world.rank == 0 else 0
        if self._replicator is not None:
            self._replicator.own_generation = self._own_generation
        self._changed.set()

    def close(self) -> None:
        """Write what is left, and end."""
        self._is_closing.set()
        self._changed.set()
        if not self._write_thread.join(CLOSE_TIMEOUT_S):
            logger.warning("the trackers are not closed after %g s; the next start goes on.", CLOSE_TIMEOUT_S)
        self._notice_thread.request_close()
        notes.send_to_agent(self._node_dir, {})  # which ends its wait
        self._notice_thread.close(POLL_S)
        if self._replicator is not None:
            self._replicator.close()
        if self._address is not None:
            self._address.close()
        with contextlib.suppress(OSError, MachineError):
            DISK.unlink(self._node_dir / journal.DIRECTORY / notes.ENDPOINT_FILE)

    # ---- the thread that takes notice --------------------------------------------------------------------

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
            self._changed.set()
        return 0.0

    # ---- the thread that writes --------------------------------------------------------------------------

    def _write(self) -> float | None:
        lower_priority()
        if not self._is_closing.is_set():
            self._changed.wait(POLL_S)
        self._changed.clear()
        is_closing, generation = self._is_closing.is_set(), self._own_generation
        end = self._client.job_end if self._client else None
        is_finished = end is not None and isinstance(end.reason, JobFinished)
        session = self._session
        if session is None and generation and self._client is not None and not is_closing:
            session = self._session = Session(self._node_dir, self._trackers, self._client.run_id, self._emit)
        if session is not None and generation and (is_finished or not self._is_over()):
            session.advance(generation)
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
    """The open trackers, from when rank 0 comes to this node until it leaves."""

    def __init__(
        self, node_dir: Path, trackers: tuple[Tracker, ...], run_id: str, emit: Callable[..., Any]
    ) -> None:
        self._node_dir, self._emit = node_dir, emit
        self.generation = 0
        """The one whose values are written; 0 before the first."""
        self._targets = [_Target(tracker, run_id, emit) for tracker in trackers]
        self._points: dict[int, Point] = {}
        """Those that some tracker lacks; the last one may get more values."""
        self._closed = -1
        self._offset = 0
        self._awaited: tuple[int, float] = (0, 0.0)  # generation, and until when its gaps are waited for
        self._flushed_at = time.monotonic()

    def advance(self, generation: int) -> None:
        """Write what is new; begin a generation once its values are complete."""
        if generation != self.generation and not self._begin(generation):
            return
        self._read_more()
        self._put(self._closed - 1)
        if time.monotonic() >= self._flushed_at + FLUSH_S:
            self.flush()

    def finish(self, *, is_finished: bool) -> None:
        """Write the rest; the last step's point too if the job ``is_finished``, as nothing follows."""
        self._put(self._closed if is_finished else self._closed - 1)
        self.flush()
        self.close()

    def close(self) -> None:
        """Close the trackers."""
        for target in self._targets:
            target.close()

    def flush(self) -> None:
        """Flush all trackers, and record for later writers what they have."""
        self._flushed_at = time.monotonic()
        written = {target.text: step for target in self._targets if (step := target.flush()) is not None}
        if written and self.generation:
            line = journal.format_line(written)
            path = journal.written_path(self._node_dir, self.generation)
            with contextlib.suppress(OSError), open(path, "ab") as file:
                file.write(line)
        self._forget()

    def _begin(self, generation: int) -> bool:
        """Read the values of all generations that count; return False to wait for more of them."""
        heads = {}
        for number in journal.list_generations(self._node_dir):
            if number <= generation and (head := journal.read_head(self._node_dir, number)) is not None:
                heads[number] = head
        if generation not in heads:
            return False  # the workers restore
        chain = journal.follow_chain(generation, heads)
        if self._awaited[0] != generation:
            self._awaited = (generation, time.monotonic() + GATHER_TIMEOUT_S)
        if chain.gaps and time.monotonic() < self._awaited[1]:
            return False
        for number, known, begin in chain.gaps:
            first = min(known.step + 1, begin.step)
            self._emit("curves-lost", first=first, last=begin.step, of_generation=number)
            logger.warning("%s.", description.describe_gap(first, begin.step))
        found = ((number, journal.read_records(self._node_dir, number)) for number in chain.generations)
        records = {number: each for number, each in found if each is not None}
        self.generation, self._offset = generation, 0
        self._points = journal.collect_points(chain, records)
        self._closed = records[generation].closed.step
        since = journal.list_since_way_back(chain, records)
        written = journal.read_written(self._node_dir, since)
        go_back_to = records[since[-1]].begin.step if records[since[-1]].goes_back else None
        for target in self._targets:
            step = written.get(target.text)
            target.begin(-1 if step is None else step, go_back_to if step is None else None)
        return True

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
        for target in self._targets:
            target.put(self._points, last_step)

    def _forget(self) -> None:
        """Drop the points that all trackers have for certain."""
        known = min(target.durable for target in self._targets)
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
        try:
            act(self._exporter)
        except Exception as error:  # noqa: BLE001 - of any library; training goes on
            if not self._pause_s:
                self._emit("curves-failed", tracker=self.text, error=f"{type(error).__name__}: {error}"[:500])
                logger.warning(
                    "%s cannot be written, and is tried again: %s: %.500s",
                    self.text,
                    type(error).__name__,
                    error,
                )
            self.close()
            self._pause_s = min(2 * self._pause_s or RETRY_S, MAX_RETRY_S)
            self._retry_at = time.monotonic() + self._pause_s
            return False
        if self._pause_s and act != self._open:
            self._pause_s = 0.0
            self._emit("curves-recovered", tracker=self.text)
            logger.info("%s is written again.", self.text)
        return True


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
