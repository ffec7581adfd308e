"""What Slurm's own commands say of a running job, and the one thing that is asked of them: its requeue.

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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from elastic_resume.policy.requeue import TOLD_TO_END, Word

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
