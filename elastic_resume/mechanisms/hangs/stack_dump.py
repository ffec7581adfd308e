"""Collect the state of this node's workers in a hang: Python stacks, pending collectives, data from /proc.

The worker offers two descriptors on the progress page. When a byte arrives in the request pipe, a Python
thread of the worker writes two lines of JSON: the number of collectives, and torch's flight recorder
(`answers.py`). A worker that holds the GIL cannot answer. `STACKS_SIGNAL` makes the interpreter
write the stacks of all threads, whoever holds the GIL. /proc describes from outside a process that does
neither::

    request to all workers --ANSWER_TIMEOUT_S--> first lines
    workers that answered --RECORDER_TIMEOUT_S--> second lines
    STACKS_SIGNAL to workers that answered, then to the others --STACKS_TIMEOUT_S each--> stacks

A worker that SIGSTOP has stopped is continued for a moment so that it can answer, and then stopped again. The
caller is about to kill it, so this does no harm.

Invariants: every signal and every read is for the process that started at the time in its record, so a
recycled process ID is never hit. A collection takes less than three seconds, whatever the processes do.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from elastic_resume import linux
from elastic_resume.mechanisms.hangs.judge import RankEvidence, StackFrame
from elastic_resume.policy.flight_recorder import parse_dumps
from elastic_resume.policy.wording import describe_collective
from elastic_resume.slots.progress_page import STACKS_SIGNAL, ProgressRecord

ANSWER_TIMEOUT_S = 0.5  # a healthy interpreter passes its GIL on after 5 ms
RECORDER_TIMEOUT_S = 0.8  # 2,000 entries take 0.5 s on a busy machine
STACKS_TIMEOUT_S = 0.6
MIN_CPU_SAMPLE_S = 0.05  # minimum time between two readings of a process's CPU time
POLL_INTERVAL_S = 0.005
MAX_STACK_BYTES = 128 * 1024  # limit for one rank; faulthandler writes at most 100 threads of 100 levels
MAX_ANSWERS_BYTES = 2 << 20  # limit for one rank; two full recorders take half of it
MAX_CHILDREN = 20
MAX_KERNEL_LINES = 20
_STACKS_MEMFD = "/memfd:elastic_resume-stacks"
UNCHANGED_POLLS = 4  # faulthandler writes a line in pieces, and another process may run between two of them
_FRAME_PATTERN = re.compile(r'^  File "(.*)", line (\d+) in (.+)$')
_THREAD_PATTERN = re.compile(r"^(Current thread|Thread) 0x")
_STATUS_FIELDS = ("Name", "State", "Threads", "VmRSS", "SigPnd", "ShdPnd", "voluntary_ctxt_switches")


@dataclass(frozen=True)
class ExaminedRank:
    """The state of one rank: the evidence for a diagnosis, a text for the report, the flight recorders."""

    record: ProgressRecord
    evidence: RankEvidence
    text: str
    recorder_dumps: object = None


def is_alive(record: ProgressRecord) -> bool:
    """Return whether the process of the record lives. A zombie does not."""
    sample = _sample_process(record)
    return sample is not None and sample.state not in {"Z", "X"}


def kill(record: ProgressRecord) -> bool:
    """Send SIGKILL to the process of the record; return whether it was there."""
    return _send_signal(record, signal.SIGKILL)


def collect_rank_states(
    records: Sequence[ProgressRecord], is_stalled: Callable[[ProgressRecord], bool]
) -> list[ExaminedRank]:
    """Collect the state of all ranks at once. ``is_stalled``: whether a rank makes no progress."""
    queries = [_RankQuery(record) for record in records]
    start = time.monotonic()
    for query in queries:
        query.send()
    # Before the signal: it interrupts a native call that holds the GIL, which then could answer.
    _wait_for_all(
        ANSWER_TIMEOUT_S, lambda query: query.poll_answer("collectives") or not query.can_answer, queries
    )
    answering = [query for query in queries if query.answered]
    _wait_for_all(RECORDER_TIMEOUT_S, lambda query: query.poll_answer("flight_recorder"), answering)
    # Last those that did not answer: the signal may set them going, and with them the ranks that wait for
    # them.
    for answered in (True, False):
        group = [query for query in queries if query.answered == answered]
        for query in group:
            query.request_stacks()
        _wait_for_all(STACKS_TIMEOUT_S, lambda query: query.has_all_stacks, group)
    for query in queries:
        query.stop_again()
    time.sleep(max(0.0, MIN_CPU_SAMPLE_S - (time.monotonic() - start)))
    try:
        return [query.build_state(is_stalled(query.record)) for query in queries]
    finally:
        for query in queries:
            query.close()


@dataclass(frozen=True)
class _ProcessSample:
    state: str
    cpu_ns: int
    taken_at_ns: int


class _RankQuery:
    """The collection of one worker's state."""

    def __init__(self, record: ProgressRecord) -> None:
        self.record = record
        self._answers: dict[str, object] = {}
        self._first_sample = _sample_process(record)
        self._stacks_file = -1
        self._stacks_offset = 0
        self._is_sent = False
        self._signalled = False
        self._output = ""
        self._last_size, self._unchanged_polls = -1, 0
        if self._first_sample is not None and record.worker.stack_output_fd > 0:
            with contextlib.suppress(OSError):
                self._stacks_file = _open_worker_descriptor(
                    record, record.worker.stack_output_fd, _STACKS_MEMFD, os.O_RDONLY
                )
                self._stacks_offset = os.fstat(self._stacks_file).st_size

    @property
    def can_answer(self) -> bool:
        """Whether an answer may come: not from a process that is stopped, dead or asleep in the kernel."""
        sample = self._first_sample
        return self._is_sent and sample is not None and sample.state not in {"T", "t", "Z", "X", "D"}

    @property
    def answered(self) -> bool:
        """Whether its Python has answered."""
        return "collectives" in self._answers

    @property
    def _was_stopped(self) -> bool:
        return self._first_sample is not None and self._first_sample.state == "T"

    def send(self) -> None:
        """Request the answers."""
        if self._stacks_file < 0:
            return
        with contextlib.suppress(OSError):
            pipe = _open_worker_descriptor(
                self.record, self.record.worker.stack_request_fd, "pipe:", os.O_WRONLY | os.O_NONBLOCK
            )
            try:
                self._is_sent = os.write(pipe, b"?") == 1
            finally:
                os.close(pipe)

    def poll_answer(self, name: str) -> bool:
        """Return whether the answer ``name`` is there."""
        if name not in self._answers:
            self._read_output()
            self._answers = _parse_answers(self._output)
        return name in self._answers

    def request_stacks(self) -> None:
        """Request the stacks of all threads, if the worker handles the signal."""
        if self._stacks_file < 0 or self._first_sample is None or not _handles_stacks_signal(self.record):
            return
        self._stacks_offset = os.fstat(self._stacks_file).st_size  # the answers need not be read again
        self._signalled = _send_signal(self.record, STACKS_SIGNAL)
        if self._was_stopped:  # a stopped process handles no signal
            _send_signal(self.record, signal.SIGCONT)

    def stop_again(self) -> None:
        """Stop a worker that was stopped: it must not train on before it is killed."""
        if self._signalled and self._was_stopped:
            _send_signal(self.record, signal.SIGSTOP)

    @property
    def has_all_stacks(self) -> bool:
        """Whether whole lines of stacks are there, and none has come in the last calls."""
        if not self._signalled:
            return True
        self._read_output()
        has_grown, self._last_size = len(self._output) != self._last_size, len(self._output)
        self._unchanged_polls = 0 if has_grown else self._unchanged_polls + 1
        if self._unchanged_polls < UNCHANGED_POLLS or not self._output.endswith("\n"):
            return False
        return _THREAD_PATTERN.search(_extract_stacks(self._output)) is not None

    def _read_output(self) -> None:
        if self._stacks_file >= 0:
            with contextlib.suppress(OSError):
                output = os.pread(self._stacks_file, MAX_ANSWERS_BYTES + MAX_STACK_BYTES, self._stacks_offset)
                self._output = output.decode("utf-8", "replace")

    def build_state(self, is_stalled: bool) -> ExaminedRank:
        """Combine the answers with what /proc shows."""
        record, before, after = self.record, self._first_sample, _sample_process(self.record)
        stacks = _extract_stacks(self._output)
        state = _choose_state(before, after)
        # Not from the output: a later answer would describe the worker after the signal has set it going.
        number, dumps = self._answers.get("collectives"), self._answers.get("flight_recorder")
        evidence = RankEvidence(
            rank=record.worker.rank,
            local_rank=record.local_rank,
            process_state=state,
            step=record.step,
            num_collectives=number if type(number) is int and number > 0 else 0,
            python_responded=self.answered if self.can_answer else None,
            recorded=parse_dumps(dumps),
            frames=parse_main_thread(stacks),
            cpu_share=_cpu_share(before, after),
            kernel_function=_read_proc_line(record, "wchan"),
            is_stalled=is_stalled or state in {"", "Z", "X"},
            is_finished=record.last_progress_ns == 0,
        )
        text = _format_state(record, evidence, stacks)
        return ExaminedRank(record, evidence, text, dumps if evidence.recorded else None)

    def close(self) -> None:
        """Close the file of the stacks."""
        if self._stacks_file >= 0:
            os.close(self._stacks_file)
            self._stacks_file = -1


def _wait_for_all(
    timeout_s: float, is_done: Callable[[_RankQuery], bool], queries: Sequence[_RankQuery]
) -> None:
    """Wait until all queries are done. Each is polled each time, since polling reads its output."""
    limit = time.monotonic() + timeout_s
    while not all([is_done(query) for query in queries]) and time.monotonic() < limit:  # noqa: C419 - poll each
        time.sleep(POLL_INTERVAL_S)


def parse_main_thread(stacks: str) -> tuple[StackFrame, ...]:
    """Return the frames of the main thread, which faulthandler writes last, innermost frame first."""
    frames: list[StackFrame] = []
    for text in stacks.splitlines():
        frame = _FRAME_PATTERN.match(text)
        if _THREAD_PATTERN.match(text):
            frames = []
        elif frame:
            frames.append(StackFrame(frame[1], int(frame[2]), frame[3]))
    return tuple(frames)


# ---- processes -----------------------------------------------------------------------------------------


def _sample_process(record: ProgressRecord) -> _ProcessSample | None:
    """Read the state of the record's process; None if it has ended."""
    pid = record.worker.pid
    try:
        # From field 3 on, see proc(5).
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        if int(fields[19]) != record.worker.start_ticks:
            return None
        cpu_ns = int((_read_proc_line(record, "schedstat") or "0").split()[0])
        return _ProcessSample(fields[0], cpu_ns, time.monotonic_ns())
    except (OSError, ValueError, IndexError):
        return None


def _send_signal(record: ProgressRecord, signal_number: int) -> bool:
    try:
        handle = linux.pidfd_open(record.worker.pid)
    except OSError:  # it has ended; or the kernel is older than 5.3, or a filter forbids the call
        handle = -1
    try:
        # With a pidfd the process ID cannot be recycled from here on.
        if _sample_process(record) is None:
            return False
        if handle >= 0:
            linux.pidfd_send_signal(handle, signal_number)
        else:
            os.kill(record.worker.pid, signal_number)
        return True
    except OSError:
        return False
    finally:
        if handle >= 0:
            os.close(handle)


def _open_worker_descriptor(record: ProgressRecord, descriptor: int, link_prefix: str, flags: int) -> int:
    """Open one of the worker's own descriptors, if its link in /proc begins with ``link_prefix``.

    Raises:
        OSError: it is another file now, or /proc denies access.

    """
    path = f"/proc/{record.worker.pid}/fd/{descriptor}"
    if not os.readlink(path).startswith(link_prefix):  # noqa: PTH115 - such a link is no path
        raise OSError(f"{path} is another file now")
    return os.open(path, flags | os.O_CLOEXEC)


def _handles_stacks_signal(record: ProgressRecord) -> bool:
    """Return whether the worker has a handler for the signal, which would kill it otherwise."""
    for text in _read_proc_lines(record, "status"):
        if text.startswith("SigCgt:"):
            return bool(int(text.split()[1], 16) >> (STACKS_SIGNAL - 1) & 1)
    return False


def _choose_state(before: _ProcessSample | None, after: _ProcessSample | None) -> str:
    """Return the first state; but the second if the first was D, which any process may be in for a moment."""
    if before is None:
        return ""
    if before.state == "D" and after is not None:
        return after.state
    return before.state


def _cpu_share(before: _ProcessSample | None, after: _ProcessSample | None) -> float:
    if before is None or after is None or after.taken_at_ns <= before.taken_at_ns:
        return 0.0
    return round((after.cpu_ns - before.cpu_ns) / (after.taken_at_ns - before.taken_at_ns), 3)


def _read_proc_lines(record: ProgressRecord, name: str) -> list[str]:
    with contextlib.suppress(OSError), open(f"/proc/{record.worker.pid}/{name}", "rb") as file:
        return file.read(16384).decode("utf-8", "replace").splitlines()
    return []


def _read_proc_line(record: ProgressRecord, name: str) -> str:
    return next(iter(_read_proc_lines(record, name)), "").strip()


# ---- texts ---------------------------------------------------------------------------------------------


def _parse_answers(output: str) -> dict[str, object]:
    """Return the members of all complete lines of JSON."""
    answers: dict[str, object] = {}
    for text in output.splitlines():
        if text.startswith('{"'):
            with contextlib.suppress(ValueError, RecursionError):
                answers |= json.loads(text)
    return answers


def _extract_stacks(output: str) -> str:
    lines = (text for text in output.splitlines() if text and not text.startswith('{"'))
    return "\n".join(lines)[:MAX_STACK_BYTES]


def _format_state(record: ProgressRecord, evidence: RankEvidence, stacks: str) -> str:
    """Return the rank's section of the report."""
    worker = record.worker
    lines = [
        f"rank {worker.rank} (local rank {record.local_rank}, pid {worker.pid}), finished step {record.step}",
        f"  kernel: state {evidence.process_state or 'ended'}, {evidence.cpu_share:.0%} of a core",
    ]
    if evidence.recorded is None:
        count = evidence.num_collectives or "unknown"
        lines.append("  pending collectives: unknown, torch's flight recorder did not answer")
        lines.append(f"  collectives of the default group so far: {count}")
    else:
        pending, last = evidence.recorded.pending, evidence.recorded.last
        lines += [
            f"  pending collective: {describe_collective(item)} {item.sizes}".rstrip() for item in pending
        ]
        lines += [] if pending else ["  pending collectives: none"]
        lines += [f"  last collective: {describe_collective(item)}" for item in last if item not in pending]
    if evidence.python_responded is False:
        lines.append(f"  Python did not answer within {ANSWER_TIMEOUT_S:g} s: a thread holds the GIL")
    for name in ("wchan", "syscall", "stack"):
        lines += [f"  {name}: {text}" for text in _read_proc_lines(record, name)[:MAX_KERNEL_LINES]]
    lines += [
        f"  {text}" for text in _read_proc_lines(record, "status") if text.partition(":")[0] in _STATUS_FIELDS
    ]
    lines += _describe_children(worker.pid)
    lines.append("  Python stacks, innermost frame first:" if stacks else "  Python stacks: none written")
    lines += [f"    {text}" for text in stacks.splitlines()]
    return "\n".join(lines)


def _describe_children(pid: int) -> list[str]:
    """Return a line for each child process, such as a DataLoader's workers."""
    lines = []
    with contextlib.suppress(OSError):
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[:MAX_CHILDREN]:
            with contextlib.suppress(OSError):
                before, _, after = Path(f"/proc/{child}/stat").read_text().rpartition(")")
                wchan = Path(f"/proc/{child}/wchan").read_text()
                name, state = before.partition("(")[2], after.split()[0]
                lines.append(f"  child {child} {name}: state {state}, in {wchan}")
    return lines
