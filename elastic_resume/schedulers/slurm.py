"""The names in a node list of Slurm.

Promise: a list that is not understood is a ConfigError that shows it, never a guess, and no list makes us
build more than `MAX_NAMES` names. Does not need ``scontrol``, which containers often lack: what only Slurm's
own commands can tell is in `slurm_job`.

What Slurm's own commands say of a running job, and the one thing that is asked of them: its requeue.

Promise: an answer to a question takes `ASK_S` at most, or there is none; a request takes `REQUEST_S`. Nothing
here raises for a command that is missing, refuses, or cannot reach the controller. Texts of commands are
looked at, not trusted: what is not understood is no answer.

Does not decide anything (`policy.requeue`). Fields and texts are those of Slurm 22.05, seen there.
"""

from __future__ import annotations

import calendar
import math
import os
import re
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from elastic_resume.errors import ConfigError
from elastic_resume.policy.requeue import TOLD_TO_END, Word

# What Slurm itself expands at most, of one bracket and of one list.
MAX_NAMES = 65536
_NUMBER = r"[0-9]{1,18}"
_RANGE = re.compile(rf"({_NUMBER})(?:-({_NUMBER}))?")
_PIECE = re.compile(r"([A-Za-z0-9._-]*)(?:\[([^][]*)\])?")


def hostnames(text: str) -> list[str]:
    """Expand a node list as ``scontrol show hostnames`` does, in its order: ``n[1-2,07],gpu3``.

    Several brackets in a name (``r[1-2]n[01-10]``) and what follows one are understood too; Slurm 22.05
    itself refuses the latter. A name that is listed twice is given twice.

    Args:
        text: SLURM_JOB_NODELIST or its like.

    Raises:
        ConfigError: it is no node list, or one of more than `MAX_NAMES` names.

    """
    names: list[str] = []
    for word in _words(text):
        literals, ranges = _parts(word, text)
        count = 1
        for one in ranges:
            count *= sum(last - first + 1 for first, last, _ in one)
        if len(names) + count > MAX_NAMES:
            raise _unreadable(text, f"it stands for more than {MAX_NAMES} names")
        names += _expanded(literals, [list(_numbers(one)) for one in ranges])
    return names


def _words(text: str) -> Iterator[str]:
    """Split at the commas that stand outside of brackets."""
    start = depth = 0
    for at, letter in enumerate(text):
        depth += (letter == "[") - (letter == "]")
        if letter == "," and depth == 0:
            yield text[start:at]
            start = at + 1
    yield text[start:]


def _parts(word: str, text: str) -> tuple[list[str], list[list[tuple[int, int, int]]]]:
    """Take a word apart: what stands before, between and behind its brackets, and the ranges in each."""
    literals, ranges, at = [""], [], 0
    while at < len(word):
        match = _PIECE.match(word, at)
        if match is None or match.end() == at:
            raise _unreadable(text, f"{word[at]!r} at {word[:100]!r}")
        at = match.end()
        literals[-1] += match[1]
        if match[2] is not None:
            ranges.append([_range(part, text) for part in match[2].split(",")])
            literals.append("")
    if not word:
        raise _unreadable(text, "a name is missing")
    return literals, ranges


def _range(part: str, text: str) -> tuple[int, int, int]:
    """Read ``3``, ``3-5`` or ``08-11``: first, last, and how many digits each has at least."""
    match = _RANGE.fullmatch(part)
    if match is None:
        raise _unreadable(text, f"[{part[:100]}] holds no range of numbers")
    first, last = int(match[1]), int(match[2] or match[1])
    if last < first:
        raise _unreadable(text, f"[{part}] ends before it begins")
    return first, last, len(match[1])


def _numbers(ranges: list[tuple[int, int, int]]) -> Iterator[str]:
    for first, last, width in ranges:
        for number in range(first, last + 1):
            yield f"{number:0{width}d}"


def _expanded(literals: list[str], brackets: list[list[str]]) -> Iterator[str]:
    """All names of one word. Slurm's order: the last bracket runs fastest, then the first, the second, …."""
    *earlier, last = brackets or [[""]]
    for slow_to_fast in product(*reversed(earlier), last):
        *others, fastest = slow_to_fast
        numbers = [*reversed(others), fastest]
        name = literals[0]
        for number, literal in zip(numbers, [*literals[1:], ""][: len(numbers)], strict=True):
            name += number + literal
        yield name


def _unreadable(text: str, why: str) -> ConfigError:
    shown = text if len(text) <= 200 else text[:200] + "…"
    return ConfigError(f"the Slurm node list {shown!r} cannot be read: {why}.")


ASK_S = 10.0  # a controller that is down lets commands wait for 4 to 9 s, by MessageTimeout
REQUEST_S = 60.0  # a controller that is restarted, or fails over, is back by then
RETRY_S = 3.0
ASK_TRIES = 3  # why a job got SIGTERM; its processes live for KillWait at least, 30 s by default
MAX_TEXT = 64 * 1024
# Times in UTC and in full, whatever the user has set for people.
PLAIN_TIMES = {"SLURM_TIME_FORMAT": "standard", "TZ": "UTC"}
_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d")
# Slurm says no, and would say no again. "Unexpected message received" is a controller that is away.
_REFUSED = re.compile(
    r"invalid job id|disabled|only batch jobs|denied|permission|not supported|invalid user|cannot be run",
    re.IGNORECASE,
)
_REQUEUED = re.compile(r"is pending execution", re.IGNORECASE)


@dataclass(frozen=True)
class Answer:
    """What a command answered; ``code`` is None where there is none, or it did not end in time."""

    code: int | None
    text: str


Run = Callable[[Sequence[str], float], Answer]


def run(words: Sequence[str], timeout_s: float) -> Answer:
    """Run a command of Slurm's. Its errors come with its output.

    It starts with the signals ignored that this process ignores. A requeue sends SIGTERM to every process of
    the step, and so to the command that asks for it.
    """
    try:
        # In memory: disks may be full when a job ends.
        with open(os.memfd_create("answer"), "w+b") as output:
            code = _wait(words, output.fileno(), timeout_s)
            if code is None:
                return Answer(None, f"{words[0]} did not answer within {timeout_s:.0f} s")
            output.seek(0)
            return Answer(code, output.read(MAX_TEXT).decode(errors="replace").strip())
    except OSError as error:
        return Answer(None, f"{words[0]} cannot be run: {error.strerror}")


def _wait(words: Sequence[str], output: int, timeout_s: float) -> int | None:
    process = subprocess.Popen(
        list(words),
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        env={**_without_tastes(os.environ), **PLAIN_TIMES},
    )
    try:
        return process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        return None


def _without_tastes(environ: Mapping[str, str]) -> dict[str, str]:
    """What a user has set for people: SQUEUE_STATES=PENDING hides a job that runs."""
    return {name: text for name, text in environ.items() if not name.startswith(("SQUEUE_", "SCONTROL_"))}


# ---- until when ----------------------------------------------------------------------------------------


def end_time(job: str, run: Run = run) -> float | None:
    """Ask when Slurm ends a job, in unix seconds: infinite without a limit, None where nobody answers.

    Args:
        job: its number, or ``ARRAY_ELEMENT``.
        run: runs a command.

    """
    answer = run(["squeue", "-h", "-j", job, "-o", "%e|%l"], ASK_S)
    end, separator, limit = answer.text.partition("|")
    if answer.code != 0 or not separator:
        return None
    # Without a limit 22.05 tells NONE, or a moment in a year.
    if limit.strip().upper() in {"UNLIMITED", "INFINITE", "NOT_SET"}:
        return math.inf
    return seconds(end)


def deadline(job: str, run: Run = run, environ: Mapping[str, str] = os.environ) -> float | None:
    """When Slurm ends a job, in unix seconds; None where there is no limit, or nothing tells.

    SLURM_JOB_END_TIME, which later versions set, counts where ``squeue`` does not answer: a limit may be
    changed while the job runs.
    """
    asked = end_time(job, run)
    if asked is None and re.fullmatch(r"[0-9]{1,12}", environ.get("SLURM_JOB_END_TIME", "")):
        asked = float(environ["SLURM_JOB_END_TIME"])
    return asked if asked is not None and math.isfinite(asked) else None


def seconds(text: str) -> float | None:
    """Read a time in UTC, as Slurm writes it; None for NONE, Unknown, N/A."""
    if not _TIME.fullmatch(text.strip()):
        return None
    try:
        return float(calendar.timegm(time.strptime(text.strip(), "%Y-%m-%dT%H:%M:%S")))
    except ValueError:
        return None


# ---- why -----------------------------------------------------------------------------------------------


def word(job: str, run: Run = run, *, sleep: Callable[[float], None] = time.sleep) -> Word:
    """Ask why the processes of a job have got SIGTERM.

    A job that is preempted with a grace still runs, and has a PreemptTime; one that is preempted without ends
    in the second of its PreemptTime. One that is cancelled or requeued is completing, also within such a
    grace, and its end is another. At its time limit that is the Reason.
    """
    for attempt in range(ASK_TRIES):
        answer = run(_show(job), ASK_S)
        if answer.code == 0 or _REFUSED.search(answer.text):
            break
        if attempt < ASK_TRIES - 1:
            sleep(RETRY_S)
    return _read(answer)


def _show(job: str) -> list[str]:
    return ["scontrol", "show", "job", job, "-o"]


def _read(answer: Answer) -> Word:
    if answer.code != 0:
        return Word.NONE
    found = dict(re.findall(r"(?:^|\s)(JobState|Reason|PreemptTime|EndTime)=(\S+)", answer.text))
    state, preempted = found.get("JobState", ""), seconds(found.get("PreemptTime", ""))
    if state in {"RUNNING", "SUSPENDED"}:
        return Word.RUNNING if preempted is None else Word.PREEMPTED
    if found.get("Reason") == "TimeLimit" or state == "TIMEOUT":
        return Word.TIME_LIMIT
    if preempted is not None and seconds(found.get("EndTime", "")) == preempted:
        return Word.PREEMPTED
    return Word.ENDING if state else Word.NONE


# ---- the requeue ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Requeued:
    """What became of a request: ``done`` or not, and what Slurm said last.

    ``ending``: it was not made, since the job is being cancelled, or requeued by somebody else.
    """

    done: bool
    text: str
    tries: int
    ending: bool = False


def requeue(
    job: str,
    run: Run = run,
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Requeued:
    """Ask for the requeue of a job, for `REQUEST_S` at most while the controller is away.

    Right before each try Slurm's word is heard: to ask for the requeue of a job that is being cancelled
    brings it back, and a drain gives people the time to cancel it.

    Args:
        job: its number; of an array's element ``ARRAY_ELEMENT``: the bare number means all its siblings too.
        run: runs a command.
        clock: seconds that only grow.
        sleep: waits for so many.

    """
    until, tries = clock() + REQUEST_S, 0
    while True:
        tries += 1
        answer = run(_show(job), min(ASK_S, max(1.0, until - clock())))
        heard = _read(answer)
        if heard is Word.ENDING:
            return Requeued(False, TOLD_TO_END, tries, ending=True)
        if heard is not Word.NONE:
            answer = run(["scontrol", "requeue", job], min(2 * ASK_S, max(1.0, until - clock())))
        elif answer.code == 0:
            answer = Answer(None, "scontrol show job says nothing of its state")
        text = answer.text.splitlines()[0][:200] if answer.text else ""
        if answer.code == 0 or _REQUEUED.search(text):
            return Requeued(True, text, tries)
        if _REFUSED.search(text) or clock() + RETRY_S >= until:
            return Requeued(False, text or f"exit code {answer.code}", tries)
        sleep(RETRY_S)
