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
from elastic_resume.agent.stack_dump import Standing
from elastic_resume.checkpoint.atomic_io import DISK, Disk
from elastic_resume.errors import MachineError
from elastic_resume.policy import hangs
from elastic_resume.policy.hangs import Blame, Judgement, Look, Patience, Pulse
from elastic_resume.snapshot.progress_page import Line, read_lines
from elastic_resume.units import parse_duration

LOOK_EVERY_S = 0.25
LEAST_WAIT_S = 0.02
TELL_S = 0.5  # how long a kill waits for the event to be written
CLOSE_S = 2.0  # and the agent's end for the report
MAX_REPORTS = 20
MAX_REPORT_BYTES = 1 << 20
MAX_REASON = 300  # characters
MAX_LISTED = 64  # ranks of a node in one event


def patience_of(text: str | None) -> Patience | None:
    """Read ``--hang-timeout``; None where hangs are not looked for.

    Raises:
        ConfigError: it is no duration.

    """
    if text is None:
        return Patience()
    limit_s = parse_duration("--hang-timeout", text)
    return Patience(limit_s) if limit_s > 0 else None


@contextlib.contextmanager
def watched(
    node_dir: Path,
    local_ranks: int,
    patience: Patience | None,
    *,
    say: Callable[[str], None],
    tell: Callable[..., Any],
) -> Iterator[Callable[[], None]]:
    """Watch this node's workers within the context; see `Watch`. Gives its `Watch.pause`."""
    if patience is None:
        yield lambda: None
        return
    watch = Watch(node_dir, local_ranks, patience, say=say, tell=tell)
    watch.start()
    try:
        yield watch.pause
    finally:
        watch.close()


class Watch:
    """The watch of one agent, from `start` to `close`."""

    def __init__(
        self,
        node_dir: Path,
        local_ranks: int,
        patience: Patience,
        *,
        say: Callable[[str], None],
        tell: Callable[..., Any],
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
        self._local_ranks = local_ranks
        self._patience = patience
        self._say = say
        self._tell = tell
        self._disk = disk
        self._pulses: dict[int, Pulse] = {}
        self._handled: set[tuple[int, ...]] = set()  # lives that were told of; what became of them is known
        self._left_alone: _LeftAlone | None = None
        self._page = (0, 0, 0)  # the board of the round: its file
        self._page_is_lost = False
        self._writing: threading.Thread | None = None
        self._closing = threading.Event()
        self._paused = threading.Event()
        self._thread = threading.Thread(target=self._live, name="watch", daemon=True)

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
        if self._writing is not None:
            self._writing.join(CLOSE_S)

    def _live(self) -> None:
        last = time.monotonic()
        wait_s = LOOK_EVERY_S
        while not self._closing.wait(wait_s):
            now = time.monotonic()
            try:
                wait_s = self.look(now - last)
            except Exception as error:  # noqa: BLE001 - a fault of ours must not leave the job unwatched
                self._tell("watch-failed", error=repr(error)[:500])
                wait_s = LOOK_EVERY_S
            last = now

    def look(self, since_s: float) -> float:
        """Look once, and act; give the seconds until the next look. ``since_s``: since the last one."""
        lines = self._lines()
        now_ns = time.monotonic_ns()
        seen = {
            line.local_rank: hangs.observe(self._pulses.get(line.local_rank), look_at(line, now_ns), since_s)
            for line in lines
        }
        self._pulses = hangs.together(seen)
        self._heed_those_left_alone()
        judgement = hangs.judge(self._pulses, self._patience)
        if judgement.hung and not self._paused.is_set():
            judgement = self._without_the_dead(lines)
        if judgement.hung and not self._paused.is_set():
            self._act(lines, judgement)
        return min(LOOK_EVERY_S, max(LEAST_WAIT_S, judgement.next_s))

    def _lines(self) -> list[Line]:
        """The lines of this round's workers."""
        text, agent = os.environ.get(constants.ENV_ROUND, ""), os.getpid()  # what new workers are told
        this_round = int(text) if text.isdigit() else 0
        path = self._node_dir / constants.BOARD_FILE
        if not this_round or not self._is_their_page(path, this_round):
            return []
        return [
            line
            for line in read_lines(path, self._local_ranks)
            if line.worker.round == this_round and line.worker.agent_pid == agent
        ]

    def _is_their_page(self, path: Path, this_round: int) -> bool:
        """Whether this round's workers write there: a disk that is mounted anew has the page of before."""
        try:
            status = path.stat()
        except OSError:
            return False
        page = (this_round, status.st_dev, status.st_ino)
        if self._page[0] != this_round:
            self._page = page
        elif self._page != page and not self._page_is_lost:
            self._say(f"{path} is another file now. Until the next restart nobody looks for hangs here.")
        self._page_is_lost = self._page != page
        return not self._page_is_lost

    def _without_the_dead(self, lines: Sequence[Line]) -> Judgement:
        """Judge anew those that live and were not told of. To ask the kernel at every look would be dear."""
        left = {line.local_rank for line in lines if stack_dump.is_alive(line)}
        pulses = {rank: pulse for rank, pulse in self._pulses.items() if rank in left}
        judgement = hangs.judge(pulses, self._patience)
        new = tuple(rank for rank in judgement.hung if pulses[rank].look.life not in self._handled)
        return Judgement(new, judgement.limit_s, LOOK_EVERY_S)

    def _act(self, lines: Sequence[Line], judgement: Judgement) -> None:
        """Find out where all stand, tell, and kill those that do not go on."""
        standing = hangs.involved(self._pulses, judgement)
        quiet_s = max(self._pulses[rank].quiet_s for rank in judgement.hung)
        found = stack_dump.gather(lines, lambda line: line.local_rank in standing)
        verdict = hangs.blame([one.evidence for one in found], max(line.world_size for line in lines))
        hung = [one.line for one in found if one.evidence.stands and one.evidence.state]
        patience_s = 0.0 if not verdict.elsewhere else self._patience.for_others_s(judgement.limit_s)
        self._handled = {pulse.look.life for pulse in self._pulses.values()}
        hang = Hang(
            generation=max(line.generation for line in lines),
            step=max(line.step for line in lines),
            limit_s=judgement.limit_s,
            quiet_s=quiet_s,
            patience_s=patience_s,
            blame=verdict,
            standing=tuple(found),
        )
        self._tell_of(hang)
        if verdict.elsewhere:
            self._left_alone = _LeftAlone(hang, hung, dict(self._pulses), quiet_s + patience_s)
        else:
            self._kill(hung)

    def _heed_those_left_alone(self) -> None:
        """See whether another node has ended the hang, or whether time is up for our own workers too."""
        left = self._left_alone
        if left is None:
            return
        now = {line.local_rank: self._pulses.get(line.local_rank) for line in left.lines}
        lives = {rank: pulse.look.life for rank, pulse in left.pulses.items()}
        if any(pulse is None or pulse.look.life != lives[rank] for rank, pulse in now.items()):
            self._left_alone = None  # they have ended
        elif any(pulse is not None and pulse.look != left.pulses[rank].look for rank, pulse in now.items()):
            self._left_alone = None
            self._handled = set()
            self._tell("hang-over", generation=left.hang.generation, step=left.hang.step)
            self._say(f"training goes on after the hang of step {left.hang.step}.")
        elif not self._paused.is_set() and all(
            pulse is not None and pulse.quiet_s >= left.until_quiet_s for pulse in now.values()
        ):
            self._left_alone = None
            self._say(f"no node has ended the hang after step {left.hang.step}: ending our own workers.")
            self._kill(left.lines)

    def _kill(self, lines: Sequence[Line]) -> None:
        for line in lines:
            stack_dump.kill(line)

    def _tell_of(self, hang: Hang) -> None:
        """Write event, line and report in a thread: a disk that hangs must not keep us from the kill."""
        path = self._node_dir / constants.HANGS_DIR / f"g{hang.generation}-s{hang.step}.txt"
        told = threading.Event()

        def write() -> None:
            try:
                self._tell("hang", **hang.fields(), report=str(path))
                self._say(hang.headline(path))
            finally:
                told.set()
            try:
                self._disk.make_dirs(path.parent)
                self._disk.write_atomic(path, hang.report().encode()[:MAX_REPORT_BYTES])
                self._prune(path.parent)
            except (MachineError, OSError) as error:
                self._say(f"the report of the hang was not written: {error}")

        self._writing = threading.Thread(target=write, name="watch-report", daemon=True)
        self._writing.start()
        told.wait(TELL_S)

    def _prune(self, directory: Path) -> None:
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
    patience_s: float
    blame: Blame
    standing: tuple[Standing, ...]

    def fields(self) -> dict[str, Any]:
        """The event's own fields."""
        pids = {one.line.local_rank: one.line.worker.pid for one in self.standing}
        suspects = [
            {
                "rank": one.rank,
                "local_rank": one.local_rank,
                "worker_pid": pids[one.local_rank],
                "reason": one.reason[:MAX_REASON],
            }
            for one in self.blame.suspects
        ]
        return {
            "generation": self.generation,
            "step": self.step,
            "suspects": suspects,
            "victims": [one.rank for one in self.blame.victims],
            "waiting": {str(one.rank): one.reason[:MAX_REASON] for one in self.blame.victims[:MAX_LISTED]},
            "elsewhere": self.blame.elsewhere,
            "threshold_s": round(self.limit_s, 3),
            "seconds": round(self.quiet_s, 3),
            "steps": {str(one.line.worker.rank): one.line.step for one in self.standing[:MAX_LISTED]},
        }

    def headline(self, path: Path) -> str:
        """One line for people."""
        after = f"no step for {self.quiet_s:.1f} s (limit {self.limit_s:.1f} s) after step {self.step}"
        then = (
            f"Its node is left {self.patience_s:.0f} s to end it"
            if self.blame.elsewhere
            else "They are killed and started again"
        )
        return f"hang: {hangs.sentence(self.blame)}; {after}. {then}. Where each stood: {path}"

    def report(self) -> str:
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
            told.append(f"No rank of this node is to blame: {hangs.sentence(self.blame)}.")
        share = MAX_REPORT_BYTES // max(1, len(self.standing)) - 4096
        for one in self.standing:
            text = one.text if len(one.text) <= share else one.text[:share] + "\n  (cut)"
            told += ["", "-" * 80, text]
        return "\n".join(told) + "\n"


@dataclass(frozen=True)
class _LeftAlone:
    """Workers that wait for another node: what they looked like, and until when they may."""

    hang: Hang
    lines: list[Line]
    pulses: dict[int, Pulse]
    until_quiet_s: float


def look_at(line: Line, now_ns: int) -> Look:
    """Take from a line what matters for a judgement."""
    worker = line.worker
    return Look(
        life=(worker.pid, worker.start_ticks, worker.round, line.generation),
        first_step=line.first_step,
        step=line.step,
        beat=line.beat_ns,
        busy=line.busy and (line.busy_until_ns == 0 or now_ns < line.busy_until_ns),
        between_epochs=line.epoch_end == line.step > line.first_step,
    )
