"""Looks for hung workers of this node, says who is to blame and why, and kills them so that training goes on.

A thread of the agent reads the board four times a second. When a rank is hung (`policy/health.py`) it asks
all workers of the node where they stand (`stacks.py`), names suspects and victims (`policy/blame.py`), writes
one event and one file for people, says one line, and kills what does not go on: torchelastic sees workers end
and starts again. Where all workers of this node wait for one of another node, that node is left time to act.

Promise: only workers of this agent's present round are ever looked at or killed, whatever the board says.
A disk that hangs, which may be why, delays a kill by half a second.

Each node judges and tells of its own ranks; a report puts together what several have seen.
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elastic_resume import constants
from elastic_resume.agent import stack_dump
from elastic_resume.agent.stack_dump import RankState
from elastic_resume.checkpoint.atomic_io import DISK, Disk
from elastic_resume.errors import MachineError
from elastic_resume.policy import hangs
from elastic_resume.policy.hangs import (
    HangDecision,
    HangDiagnosis,
    HangThreshold,
    ProgressSample,
    RankProgress,
)
from elastic_resume.snapshot.progress_page import ProgressRecord, read_records
from elastic_resume.units import parse_duration

POLL_INTERVAL_S = 0.25
MIN_POLL_INTERVAL_S = 0.02
EVENT_WRITE_TIMEOUT_S = 0.5  # how long a kill waits for the event to be written
CLOSE_TIMEOUT_S = 2.0  # and the agent's end for the report
MAX_REPORTS = 20
MAX_REPORT_BYTES = 1 << 20
MAX_REASON_CHARS = 300  # characters
MAX_LISTED_RANKS = 64  # ranks of a node in one event


def parse_hang_timeout(text: str | None) -> HangThreshold | None:
    """Read ``--hang-timeout``; None where hangs are not looked for.

    Raises:
        ConfigError: it is no duration.

    """
    if text is None:
        return HangThreshold()
    limit_s = parse_duration("--hang-timeout", text)
    return HangThreshold(limit_s) if limit_s > 0 else None


@contextlib.contextmanager
def detect_hangs(
    node_dir: Path,
    local_world_size: int,
    hang_threshold: HangThreshold | None,
    *,
    log: Callable[[str], None],
    emit: Callable[..., Any],
) -> Iterator[Callable[[], None]]:
    """Watch this node's workers within the context; see `Watch`. Gives its `Watch.pause`."""
    if hang_threshold is None:
        yield lambda: None
        return
    watch = HangDetector(node_dir, local_world_size, hang_threshold, log=log, emit=emit)
    watch.start()
    try:
        yield watch.pause
    finally:
        watch.close()


class HangDetector:
    """The watch of one agent, from `start` to `close`."""

    def __init__(
        self,
        node_dir: Path,
        local_world_size: int,
        hang_threshold: HangThreshold,
        *,
        log: Callable[[str], None],
        emit: Callable[..., Any],
        disk: Disk = DISK,
    ) -> None:
        """Make one; it looks from `start` on.

        Args:
            node_dir: where the board lies, and the reports go.
            local_ranks: how many workers this node has.
            patience: how long a rank may take.
            say: gets a line for people.
            tell: gets events, by kind and fields.
            disk: what writes the reports.

        """
        self._node_dir = node_dir
        self._local_world_size = local_world_size
        self._hang_threshold = hang_threshold
        self._log = log
        self._emit = emit
        self._disk = disk
        self._progress: dict[int, RankProgress] = {}
        self._handled_workers: set[tuple[int, ...]] = (
            set()
        )  # lives that were told of; what became of them is known
        self._deferred_kill: _DeferredKill | None = None
        self._page_id = (0, 0, 0)  # the board of the round: its file
        self._is_page_replaced = False
        self._report_thread: threading.Thread | None = None
        self._closing = threading.Event()
        self._paused = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)

    def start(self) -> None:
        """Begin to look."""
        self._thread.start()

    def pause(self) -> None:
        """Judge nobody from now on: workers are being ended, and may take their time. From any thread."""
        self._paused.set()

    def close(self) -> None:
        """End it."""
        self._closing.set()
        self._thread.join()
        if self._report_thread is not None:
            self._report_thread.join(CLOSE_TIMEOUT_S)

    def _run(self) -> None:
        last = time.monotonic()
        wait_s = POLL_INTERVAL_S
        while not self._closing.wait(wait_s):
            now = time.monotonic()
            try:
                wait_s = self.poll(now - last)
            except Exception as error:  # noqa: BLE001 - a fault of ours must not leave the job unwatched
                self._emit("hang-detector-failed", error=repr(error)[:500])
                wait_s = POLL_INTERVAL_S
            last = now

    def poll(self, elapsed_s: float) -> float:
        """Look once, and act; give the seconds until the next look. ``since_s``: since the last one."""
        lines = self._read_progress()
        now_ns = time.monotonic_ns()
        seen = {
            line.local_rank: hangs.update_progress(
                self._progress.get(line.local_rank), take_sample(line, now_ns), elapsed_s
            )
            for line in lines
        }
        self._progress = hangs.pause_while_peer_busy(seen)
        self._check_deferred_kill()
        judgement = hangs.find_hung_ranks(self._progress, self._hang_threshold)
        if judgement.hung_ranks and not self._paused.is_set():
            judgement = self._judge_live_workers(lines)
        if judgement.hung_ranks and not self._paused.is_set():
            self._handle_hang(lines, judgement)
        return min(POLL_INTERVAL_S, max(MIN_POLL_INTERVAL_S, judgement.next_check_s))

    def _read_progress(self) -> list[ProgressRecord]:
        """The lines of this round's workers."""
        text, agent = os.environ.get(constants.ENV_ROUND, ""), os.getpid()  # what new workers are told
        this_round = int(text) if text.isdigit() else 0
        path = self._node_dir / constants.PROGRESS_FILE
        if not this_round or not self._is_current_page(path, this_round):
            return []
        return [
            line
            for line in read_records(path, self._local_world_size)
            if line.worker.round == this_round and line.worker.agent_pid == agent
        ]

    def _is_current_page(self, path: Path, this_round: int) -> bool:
        """Whether this round's workers write there: a disk that is mounted anew has the page of before."""
        try:
            status = path.stat()
        except OSError:
            return False
        page = (this_round, status.st_dev, status.st_ino)
        if self._page_id[0] != this_round:
            self._page_id = page
        elif self._page_id != page and not self._is_page_replaced:
            self._log(f"{path} is another file now. Until the next restart nobody looks for hangs here.")
        self._is_page_replaced = self._page_id != page
        return not self._is_page_replaced

    def _judge_live_workers(self, lines: Sequence[ProgressRecord]) -> HangDecision:
        """Judge anew those that live and were not told of. To ask the kernel at every look would be dear."""
        left = {line.local_rank for line in lines if stack_dump.is_alive(line)}
        pulses = {rank: pulse for rank, pulse in self._progress.items() if rank in left}
        judgement = hangs.find_hung_ranks(pulses, self._hang_threshold)
        new = tuple(
            rank
            for rank in judgement.hung_ranks
            if pulses[rank].sample.incarnation not in self._handled_workers
        )
        return HangDecision(new, judgement.limit_s, POLL_INTERVAL_S)

    def _handle_hang(self, lines: Sequence[ProgressRecord], judgement: HangDecision) -> None:
        """Find out where all stand, tell, and kill those that do not go on."""
        standing = hangs.find_stalled_ranks(self._progress, judgement)
        quiet_s = max(self._progress[rank].no_progress_s for rank in judgement.hung_ranks)
        found = stack_dump.collect_rank_states(lines, lambda line: line.local_rank in standing)
        verdict = hangs.diagnose_hang([one.evidence for one in found], max(line.world_size for line in lines))
        hung = [one.line for one in found if one.evidence.is_stalled and one.evidence.process_state]
        patience_s = (
            0.0 if not verdict.waits_for_other_node else self._hang_threshold.peer_wait_s(judgement.limit_s)
        )
        self._handled_workers = {pulse.sample.incarnation for pulse in self._progress.values()}
        hang = Hang(
            generation=max(line.generation for line in lines),
            step=max(line.step for line in lines),
            limit_s=judgement.limit_s,
            quiet_s=quiet_s,
            kill_delay_s=patience_s,
            blame=verdict,
            ranks=tuple(found),
        )
        self._report_hang(hang)
        if verdict.waits_for_other_node:
            self._deferred_kill = _DeferredKill(hang, hung, dict(self._progress), quiet_s + patience_s)
        else:
            self._kill_workers(hung)

    def _check_deferred_kill(self) -> None:
        """See whether another node has ended the hang, or whether time is up for our own workers too."""
        left = self._deferred_kill
        if left is None:
            return
        now = {line.local_rank: self._progress.get(line.local_rank) for line in left.lines}
        lives = {rank: pulse.sample.incarnation for rank, pulse in left.progress.items()}
        if any(pulse is None or pulse.sample.incarnation != lives[rank] for rank, pulse in now.items()):
            self._deferred_kill = None  # they have ended
        elif any(
            pulse is not None and pulse.sample != left.progress[rank].sample for rank, pulse in now.items()
        ):
            self._deferred_kill = None
            self._handled_workers = set()
            self._emit("hang-ended", generation=left.hang.generation, step=left.hang.step)
            self._log(f"training goes on after the hang of step {left.hang.step}.")
        elif not self._paused.is_set() and all(
            pulse is not None and pulse.no_progress_s >= left.quiet_limit_s for pulse in now.values()
        ):
            self._deferred_kill = None
            self._log(f"no node has ended the hang after step {left.hang.step}: ending our own workers.")
            self._kill_workers(left.lines)

    def _kill_workers(self, lines: Sequence[ProgressRecord]) -> None:
        for line in lines:
            stack_dump.kill(line)

    def _report_hang(self, hang: Hang) -> None:
        """Write event, line and report in a thread: a disk that hangs must not keep us from the kill."""
        path = self._node_dir / constants.HANGS_DIR / f"g{hang.generation}-s{hang.step}.txt"
        told = threading.Event()

        def write() -> None:
            try:
                self._emit("hang", **hang.event_fields(), report=str(path))
                self._log(hang.format_headline(path))
            finally:
                told.set()
            try:
                self._disk.make_dirs(path.parent)
                self._disk.write_atomic(path, hang.format_report().encode()[:MAX_REPORT_BYTES])
                self._prune_reports(path.parent)
            except (MachineError, OSError) as error:
                self._log(f"the report of the hang was not written: {error}")

        self._report_thread = threading.Thread(target=write, name="watch-report", daemon=True)
        self._report_thread.start()
        told.wait(EVENT_WRITE_TIMEOUT_S)

    def _prune_reports(self, directory: Path) -> None:
        """Keep the newest reports."""
        found = []
        for path in directory.iterdir():
            name = re.fullmatch(r"g(\d{1,16})-s(\d{1,16})\.txt", path.name)
            if name:
                found.append((int(name[1]), int(name[2]), path))
        for _, _, path in sorted(found)[:-MAX_REPORTS]:
            self._disk.unlink(path)


@dataclass(frozen=True)
class Hang:
    """One hang as this node saw it. ``patience_s``: how long its own workers are left alone."""

    generation: int
    step: int
    limit_s: float
    quiet_s: float
    kill_delay_s: float
    blame: HangDiagnosis
    ranks: tuple[RankState, ...]

    def event_fields(self) -> dict[str, Any]:
        """The event's own fields."""
        pids = {one.line.local_rank: one.line.worker.pid for one in self.ranks}
        suspects = [
            {
                "rank": one.rank,
                "local_rank": one.local_rank,
                "worker_pid": pids[one.local_rank],
                "reason": one.reason[:MAX_REASON_CHARS],
            }
            for one in self.blame.suspects
        ]
        return {
            "generation": self.generation,
            "step": self.step,
            "suspects": suspects,
            "victims": [one.rank for one in self.blame.victims],
            "waiting": {
                str(one.rank): one.reason[:MAX_REASON_CHARS] for one in self.blame.victims[:MAX_LISTED_RANKS]
            },
            "elsewhere": self.blame.waits_for_other_node,
            "threshold_s": round(self.limit_s, 3),
            "seconds": round(self.quiet_s, 3),
            "steps": {str(one.line.worker.rank): one.line.step for one in self.ranks[:MAX_LISTED_RANKS]},
        }

    def format_headline(self, path: Path) -> str:
        """One line for people."""
        after = f"no step for {self.quiet_s:.1f} s (limit {self.limit_s:.1f} s) after step {self.step}"
        then = (
            f"Its node is left {self.kill_delay_s:.0f} s to end it"
            if self.blame.waits_for_other_node
            else "They are killed and started again"
        )
        return f"hang: {hangs.describe_diagnosis(self.blame)}; {after}. {then}. Where each stood: {path}"

    def format_report(self) -> str:
        """Tell all that is known, for a person who looks into it later."""
        now = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
        told = [
            f"A hang in generation {self.generation} after step {self.step}, seen at {now}.",
            f"No step was finished for {self.quiet_s:.1f} s; the limit is {self.limit_s:.1f} s.",
            "",
            *(f"SUSPECT rank {one.rank} {one.reason}" for one in self.blame.suspects),
            *(f"victim  rank {one.rank} {one.reason}" for one in self.blame.victims),
        ]
        if not self.blame.suspects:
            told.append(f"No rank of this node is to blame: {hangs.describe_diagnosis(self.blame)}.")
        share = MAX_REPORT_BYTES // max(1, len(self.ranks)) - 4096
        for one in self.ranks:
            text = one.text if len(one.text) <= share else one.text[:share] + "\n  (cut)"
            told += ["", "-" * 80, text]
        return "\n".join(told) + "\n"


@dataclass(frozen=True)
class _DeferredKill:
    """Workers that wait for another node: what they looked like, and until when they may."""

    hang: Hang
    lines: list[ProgressRecord]
    progress: dict[int, RankProgress]
    quiet_limit_s: float


def take_sample(line: ProgressRecord, now_ns: int) -> ProgressSample:
    """Take from a line what matters for a judgement."""
    worker = line.worker
    return ProgressSample(
        incarnation=(worker.pid, worker.start_ticks, worker.round, line.generation),
        first_step=line.first_step,
        step=line.step,
        progress_counter=line.last_progress_ns,
        is_busy=line.busy and (line.busy_until_ns == 0 or now_ns < line.busy_until_ns),
        is_between_epochs=line.epoch_end_step == line.step > line.first_step,
    )
