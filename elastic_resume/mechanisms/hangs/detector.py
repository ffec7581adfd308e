"""Detect hung workers of this node, name the suspects, and kill stalled workers so that training restarts.

A thread of the agent reads the progress page of the workers four times a second::

    progress page --judge.find_hung_ranks--> hung ranks
    hung ranks --stack_dump.collect_rank_states--> evidence of all ranks of the node
    evidence --judge.diagnose_hang--> suspects and victims
    diagnosis --> one event, one log line, one report file; kill the stalled workers

torchelastic then sees workers end and restarts. Workers that make no step are judged when all others of their
node have ended: supervisors write starts and exits of workers to the agent's memory (`failure_evidence`).

Each node judges its own ranks. If another node may hold the cause, the kill is deferred, so that the detector
there acts first; see `HangThreshold.kill_delay_s`. The report of a run combines the events of all nodes.

Invariants: only workers of this agent's current generation are ever judged or killed, whatever the page says.
A disk that hangs, perhaps the cause, delays a kill by at most `EVENT_WRITE_TIMEOUT_S`.
"""

from __future__ import annotations

import json
import logging
import os
import re
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from elastic_resume import constants
from elastic_resume.background import BackgroundThread
from elastic_resume.checkpoint.atomic_io import DISK, Disk
from elastic_resume.errors import MachineError
from elastic_resume.events import Event
from elastic_resume.mechanisms.hangs import judge, stack_dump
from elastic_resume.mechanisms.hangs.description import describe_diagnosis, describe_finding
from elastic_resume.mechanisms.hangs.judge import (
    HangDecision,
    HangDiagnosis,
    HangThreshold,
    ProgressSample,
    RankProgress,
)
from elastic_resume.mechanisms.hangs.stack_dump import ExaminedRank
from elastic_resume.mechanisms.mechanism import AgentContext, AgentPart
from elastic_resume.policy.reasons import to_json
from elastic_resume.rendezvous.client import RendezvousClient
from elastic_resume.rendezvous.core.interface import StartWorkers
from elastic_resume.slots.progress_page import (
    ProgressRecord,
    WorkerProcess,
    read_own_records,
    read_start_ticks,
)

logger = logging.getLogger(__name__)

POLL_INTERVAL_S = 0.25
MIN_POLL_INTERVAL_S = 0.02
EVENT_WRITE_TIMEOUT_S = 0.5
CLOSE_TIMEOUT_S = 2.0
MAX_REPORTS = 20
MAX_REPORT_BYTES = 1 << 20
MAX_ERROR_CHARS = 500
MAX_LISTED_RANKS = 64  # limit of ranks in one event


class HangDetector(AgentPart):
    """Look for hung workers of one node from `start` to `close`."""

    def __init__(self, context: AgentContext, disk: Disk = DISK) -> None:
        self._node_dir = context.node_dir
        self._local_world_size = context.local_world_size
        self._emit, self._read_events = context.emit, context.read_evidence
        self._hang_threshold = HangThreshold(context.settings["hang_timeout"])
        self._generation = 0  # of this agent's newest workers
        self._idle_workers: judge.IdleWorkers | None = None
        self._disk = disk
        self._progress: dict[int, RankProgress] = {}
        self._handled_workers: set[tuple[int, ...]] = set()  # incarnations whose hang was reported
        self._deferred_kill: _DeferredKill | None = None
        self._polled_at = time.monotonic()
        self._report_thread: threading.Thread | None = None
        self._paused = threading.Event()
        self._thread = BackgroundThread(
            "hang-detector", self._poll_periodically, on_error=self._emit_error, retry_s=POLL_INTERVAL_S
        )

    def start(self, client: RendezvousClient) -> None:
        """Start to look for hangs, unless this is turned off."""
        del client
        if self._hang_threshold.configured_s != 0:
            self._thread.start()

    def begin_generation(self, view: StartWorkers) -> None:
        """Judge the workers of this generation."""
        self._generation = view.generation

    def begin_stop(self, cause: str) -> None:
        """Judge no rank any more: workers are being stopped and may take their time."""
        del cause
        self._paused.set()

    def close(self) -> None:
        """Stop, and give a report that is being written `CLOSE_TIMEOUT_S`."""
        self._thread.close()
        if self._report_thread is not None:
            self._report_thread.join(CLOSE_TIMEOUT_S)

    def _poll_periodically(self) -> float:
        now = time.monotonic()
        elapsed_s, self._polled_at = now - self._polled_at, now
        return self.poll(elapsed_s)

    def _emit_error(self, error: Exception) -> None:
        self._emit("hang-detector-failed", error=repr(error)[:MAX_ERROR_CHARS])

    def poll(self, elapsed_s: float) -> float:
        """Look for hangs ``elapsed_s`` after the previous poll, and act; return the seconds to the next."""
        records = self._read_progress()
        now_ns = time.monotonic_ns()
        progress = {
            record.local_rank: judge.update_progress(
                self._progress.get(record.local_rank), take_sample(record, now_ns), elapsed_s
            )
            for record in records
        }
        self._progress = judge.pause_while_peer_busy(progress)
        self._check_deferred_kill()
        decision = judge.find_hung_ranks(self._progress, self._hang_threshold)
        if decision.hung_ranks and not self._paused.is_set():
            decision = self._judge_live_workers(records)
        if decision.hung_ranks and not self._paused.is_set():
            self._handle_hang(records, decision)
        self._check_left_behind(records, elapsed_s)
        return min(POLL_INTERVAL_S, max(MIN_POLL_INTERVAL_S, decision.next_check_s))

    def _read_progress(self) -> list[ProgressRecord]:
        """Read the records of the current generation's workers."""
        records, generation = read_own_records(self._node_dir, self._local_world_size), self._generation
        return [record for record in records if record.worker.assigned_generation == generation > 0]

    def _judge_live_workers(self, records: Sequence[ProgressRecord]) -> HangDecision:
        """Judge again the live workers whose hang was not reported yet.

        Asking the kernel at every poll would cost too much.
        """
        live = {record.local_rank for record in records if stack_dump.is_alive(record)}
        progress = {rank: entry for rank, entry in self._progress.items() if rank in live}
        decision = judge.find_hung_ranks(progress, self._hang_threshold)
        unhandled = tuple(
            rank
            for rank in decision.hung_ranks
            if progress[rank].sample.incarnation not in self._handled_workers
        )
        return HangDecision(unhandled, decision.limit_s, POLL_INTERVAL_S)

    def _handle_hang(self, records: Sequence[ProgressRecord], decision: HangDecision) -> None:
        """Diagnose and report a hang, and kill the stalled workers now or later."""
        stalled_ranks = judge.find_stalled_ranks(self._progress, decision)
        no_progress_s = max(self._progress[rank].no_progress_s for rank in decision.hung_ranks)
        states = stack_dump.collect_rank_states(records, lambda record: record.local_rank in stalled_ranks)
        diagnosis = judge.diagnose_hang(
            [state.evidence for state in states], max(record.world_size for record in records)
        )
        stalled = [
            state.record for state in states if state.evidence.is_stalled and state.evidence.process_state
        ]
        kill_delay_s = self._hang_threshold.kill_delay_s(diagnosis, decision.limit_s)
        self._handled_workers = {entry.sample.incarnation for entry in self._progress.values()}
        hang = Hang(
            generation=max(record.generation for record in records),
            step=max(record.step for record in records),
            limit_s=decision.limit_s,
            no_progress_s=no_progress_s,
            kill_delay_s=kill_delay_s,
            diagnosis=diagnosis,
            ranks=tuple(states),
        )
        self._report_hang(hang)
        if kill_delay_s:
            self._deferred_kill = _DeferredKill(
                hang, stalled, dict(self._progress), no_progress_s + kill_delay_s
            )
        else:
            self._kill_workers(stalled)

    def _check_deferred_kill(self) -> None:
        """Drop the deferred kill if training continues; execute it if the time is up."""
        deferred = self._deferred_kill
        if deferred is None:
            return
        previous = deferred.progress
        current = {record.local_rank: self._progress.get(record.local_rank) for record in deferred.records}
        progress = {rank: entry for rank, entry in current.items() if entry is not None}
        if len(progress) < len(current):
            return  # the page cannot be read, as on a disk that hangs, or the generation has ended
        if any(
            entry.sample.incarnation != previous[rank].sample.incarnation for rank, entry in progress.items()
        ):
            self._deferred_kill = None  # a worker has ended
        elif any(entry.sample != previous[rank].sample for rank, entry in progress.items()):
            self._deferred_kill = None
            self._handled_workers = set()
            self._emit("hang-ended", generation=deferred.hang.generation, step=deferred.hang.step)
            logger.warning("training continues after the hang of step %d.", deferred.hang.step)
        elif not self._paused.is_set() and all(
            entry.is_finished or entry.no_progress_s >= deferred.kill_after_s for entry in progress.values()
        ):
            self._deferred_kill = None
            logger.debug(
                "no node has ended the hang after step %d: killing our own workers.", deferred.hang.step
            )
            self._kill_workers(deferred.records)

    def _check_left_behind(self, records: Sequence[ProgressRecord], elapsed_s: float) -> None:
        """Report and kill workers that are idle after all others of this node have ended."""
        if self._local_world_size == 1:
            return
        forked = judge.find_remaining_workers(self._read_events(), self._generation, self._local_world_size)
        idle, self._idle_workers = self._idle_workers, None
        entries = [self._progress.get(event["local_rank"]) for event in forked]
        is_busy = any(entry is not None and entry.sample.is_busy for entry in entries)
        if not forked or is_busy or self._deferred_kill or self._paused.is_set():
            return
        known = {record.worker.pid: record for record in records}
        try:
            remaining = [known.get(event["worker_pid"]) or _make_record(event) for event in forked]
            cpu_s = sum(_read_cpu_s(event["pid"], event["worker_pid"]) for event in forked)
        except (OSError, psutil.Error):
            return  # one has just ended
        sample = judge.IdleWorkers(tuple((record.worker, record.step) for record in remaining), cpu_s)
        idle = judge.update_idle_workers(idle, sample, elapsed_s, self._hang_threshold)
        if idle.idle_s < self._hang_threshold.left_behind_s:
            self._idle_workers = idle
            return
        states = stack_dump.collect_rank_states(remaining, lambda _: True)
        suspects = [
            judge.RankFinding(
                state.evidence.rank, state.evidence.local_rank, judge.make_left_behind(state.evidence)
            )
            for state in states
        ]
        hang = Hang(
            generation=max(record.generation for record in remaining),
            step=max(record.step for record in remaining),
            limit_s=self._hang_threshold.left_behind_s,
            no_progress_s=idle.idle_s,
            kill_delay_s=0.0,
            diagnosis=HangDiagnosis(tuple(suspects), cause_is_here=True),
            ranks=tuple(states),
        )
        self._report_hang(hang)
        self._kill_workers(remaining)

    def _kill_workers(self, records: Sequence[ProgressRecord]) -> None:
        for record in records:
            if not stack_dump.kill(record) and stack_dump.is_alive(record):
                logger.warning(
                    "local rank %d hangs, and its process %d could not be killed: kill it by hand.",
                    record.local_rank,
                    record.worker.pid,
                )

    def _report_hang(self, hang: Hang) -> None:
        """Write event, log line and report in a thread: a disk that hangs must not prevent the kill."""
        path = self._node_dir / constants.STACKS_DIR / f"g{hang.generation}-s{hang.step}.txt"
        is_logged = threading.Event()

        def write() -> None:
            try:
                self._emit("hang", **hang.event_fields(), report=str(path))
                logger.warning(hang.format_headline(path))
            finally:
                is_logged.set()
            try:
                self._disk.make_dirs(path.parent)
                self._disk.write_atomic(path, hang.format_report().encode()[:MAX_REPORT_BYTES])
                for state in hang.ranks:
                    if state.recorder_dumps:
                        dump_path = path.with_name(f"{path.stem}-rank{state.evidence.rank}.json")
                        self._disk.write_atomic(dump_path, json.dumps(state.recorder_dumps).encode())
                self._prune_reports(path.parent)
            except (MachineError, OSError) as error:
                logger.warning("cannot write the report of the hang: %s", error)

        self._report_thread = threading.Thread(target=write, name="hang-report", daemon=True)
        self._report_thread.start()
        is_logged.wait(EVENT_WRITE_TIMEOUT_S)

    def _prune_reports(self, directory: Path) -> None:
        """Delete the files of all but the newest `MAX_REPORTS` hangs."""
        found: dict[tuple[int, int], list[Path]] = {}
        for path in directory.iterdir():
            name = re.fullmatch(r"g(\d{1,16})-s(\d{1,16})(\.txt|-rank\d{1,16}\.json)", path.name)
            if name:
                found.setdefault((int(name[1]), int(name[2])), []).append(path)
        for hang in sorted(found)[:-MAX_REPORTS]:
            for path in found[hang]:
                self._disk.unlink(path)


@dataclass(frozen=True)
class Hang:
    """One hang as this node sees it. Its own workers are killed after ``kill_delay_s``."""

    generation: int
    step: int
    limit_s: float
    no_progress_s: float
    kill_delay_s: float
    diagnosis: HangDiagnosis
    ranks: tuple[ExaminedRank, ...]

    def event_fields(self) -> dict[str, Any]:
        """Return the fields of the ``hang`` event; see `events`."""
        pids = {state.record.local_rank: state.record.worker.pid for state in self.ranks}
        suspects = [
            {
                "rank": suspect.rank,
                "local_rank": suspect.local_rank,
                "worker_pid": pids[suspect.local_rank],
                "reason": to_json(suspect.stall),
            }
            for suspect in self.diagnosis.suspects
        ]
        return {
            "generation": self.generation,
            "step": self.step,
            "suspects": suspects,
            "victims": [victim.rank for victim in self.diagnosis.victims],
            "waiting": {
                str(victim.rank): to_json(victim.stall)
                for victim in self.diagnosis.victims[:MAX_LISTED_RANKS]
            },
            "waits_for_other_node": self.diagnosis.waits_for_other_node,
            "kill_delay_s": round(self.kill_delay_s, 3),
            "threshold_s": round(self.limit_s, 3),
            "seconds": round(self.no_progress_s, 3),
            "steps": {
                str(state.record.worker.rank): state.record.step for state in self.ranks[:MAX_LISTED_RANKS]
            },
        }

    def format_headline(self, path: Path) -> str:
        """Return the log line, which names the report at ``path``."""
        duration = (
            f"no step for {self.no_progress_s:.1f} s (limit {self.limit_s:.1f} s) after step {self.step}"
        )
        action = "The stalled workers are killed and restarted"
        if self.diagnosis.waits_for_other_node:
            action = f"That node has {self.kill_delay_s:.0f} s to end the hang"
        elif self.kill_delay_s:
            action = (
                "A rank of another node may be the cause. The stalled workers are killed in "
                f"{self.kill_delay_s:.0f} s, unless that node ends the hang"
            )
        diagnosis = describe_diagnosis(self.diagnosis)
        return f"hang: {diagnosis}; {duration}. {action}. Stacks of all ranks: {path}"

    def format_report(self) -> str:
        """Return the report: the diagnosis and the state of every rank."""
        now = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
        lines = [
            f"A hang in generation {self.generation} after step {self.step}, detected at {now}.",
            f"No step was finished for {self.no_progress_s:.1f} s; the limit is {self.limit_s:.1f} s.",
            "",
            *(f"SUSPECT {describe_finding(suspect)}" for suspect in self.diagnosis.suspects),
            *(f"victim  {describe_finding(victim)}" for victim in self.diagnosis.victims),
        ]
        if not self.diagnosis.suspects:
            lines.append(f"No rank of this node is a suspect: {describe_diagnosis(self.diagnosis)}.")
        share = MAX_REPORT_BYTES // max(1, len(self.ranks)) - 4096
        for state in self.ranks:
            text = state.text if len(state.text) <= share else state.text[:share] + "\n  (cut)"
            lines += ["", "-" * 80, text]
        return "\n".join(lines) + "\n"


@dataclass(frozen=True)
class _DeferredKill:
    """Stalled workers that are killed after so long without progress, unless they continue before."""

    hang: Hang
    records: list[ProgressRecord]
    progress: dict[int, RankProgress]
    kill_after_s: float


def _make_record(forked: Event) -> ProgressRecord:
    """Make the record of a worker without a step; raise OSError if it has ended."""
    pid, generation = forked["worker_pid"], forked["generation"]
    worker = WorkerProcess(forked["rank"], os.getpid(), generation, pid, read_start_ticks(pid), 0, 0)
    return ProgressRecord(forked["local_rank"], generation, 0, 0, False, worker, 0, 0, 0, 0)


def _read_cpu_s(supervisor_pid: int, worker_pid: int) -> float:
    """Return the CPU time of a worker and all processes below its supervisor.

    Raises:
        psutil.NoSuchProcess: the worker has ended; its process ID may be another's.

    """
    processes = psutil.Process(supervisor_pid).children(recursive=True)
    if all(process.pid != worker_pid for process in processes):
        raise psutil.NoSuchProcess(worker_pid)
    return sum(sum(process.cpu_times()) for process in processes)


def take_sample(record: ProgressRecord, now_ns: int) -> ProgressSample:
    """Convert a record of the progress page into a sample for `judge`."""
    worker = record.worker
    return ProgressSample(
        incarnation=(worker.pid, worker.start_ticks, worker.assigned_generation, record.generation),
        first_step=record.first_step,
        step=record.step,
        progress_counter=record.last_progress_ns,
        is_busy=record.busy and (record.busy_until_ns == 0 or now_ns < record.busy_until_ns),
        is_between_epochs=record.epoch_end_step == record.step > record.first_step,
    )
