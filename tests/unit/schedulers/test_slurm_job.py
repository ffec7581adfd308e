"""What Slurm's commands say of a job, as recorded from Slurm 22.05, and how its requeue is asked for."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from elastic_resume.policy.requeue import TerminationReason
from elastic_resume.schedulers import slurm
from elastic_resume.schedulers.slurm import REQUEUE_TIMEOUT_S, CommandResult, RequeueResult

SHOWN = (
    "JobId=2 JobName=b.sh UserId=root(0) GroupId=root(0) MCS_label=N/A Priority=4294901758 Nice=0 "
    "Account=(null) QOS=(null) JobState={state} Reason={reason} Dependency=(null) Requeue=1 "
    "Restarts=0 BatchFlag=1 Reboot=0 ExitCode=0:0 RunTime=00:00:01 TimeLimit=UNLIMITED TimeMin=N/A "
    "StartTime=2026-11-21T23:23:25 EndTime={end} Deadline=N/A PreemptEligibleTime=2026-11-21T23:23:25 "
    "PreemptTime={preempted} SuspendTime=None Command=/a/EndTime=1/JobState=b.sh WorkDir=/"
)
# JobState, Reason, EndTime, PreemptTime at the first SIGTERM, and what had been done to the job.
RECORDED = {
    "preempted with a grace": (
        "RUNNING None 2026-11-21T23:24:39 2026-11-21T23:24:27",
        TerminationReason.PREEMPTED,
    ),
    "the same without a time limit": (
        "RUNNING None Unknown 2026-11-21T23:23:25",
        TerminationReason.PREEMPTED,
    ),
    "preempted at once": (
        "COMPLETING None 2026-11-21T23:34:34 2026-11-21T23:34:34",
        TerminationReason.PREEMPTED,
    ),
    "scancel": ("COMPLETING None 2026-11-21T23:25:21 None", TerminationReason.JOB_ENDING),
    "scancel within the grace": (
        "COMPLETING None 2026-11-21T23:34:45 2026-11-21T23:34:42",
        TerminationReason.JOB_ENDING,
    ),
    "scontrol requeue": ("COMPLETING None Unknown None", TerminationReason.JOB_ENDING),
    "time limit": ("COMPLETING TimeLimit 2026-11-21T23:25:54 None", TerminationReason.TIME_LIMIT),
    "scancel --signal=TERM": ("RUNNING None Unknown None", TerminationReason.RUNNING),
}


def shown(fields: str) -> str:
    """Give the line of ``scontrol show job -o``."""
    state, reason, end, preempted = fields.split()
    return SHOWN.format(state=state, reason=reason, end=end, preempted=preempted)


RUNS = CommandResult(0, shown("RUNNING None Unknown None"))


class Commands:
    """Answers what it is told to, on a clock of its own that a command moves."""

    def __init__(self, *answers: CommandResult, takes_s: float = 0.0) -> None:
        self.answers = list(answers)
        self.asked: list[list[str]] = []
        self.now = 0.0
        self._takes_s = takes_s

    def run(self, words: Sequence[str], timeout_s: float) -> CommandResult:
        """Answer the next one, the last for ever."""
        self.asked.append(list(words))
        self.now += min(self._takes_s, timeout_s)
        return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]

    def run_live(self, words: Sequence[str], timeout_s: float) -> CommandResult:
        """The same, of a job that runs."""
        if words[1] == "show":
            return RUNS
        return self.run(words, timeout_s)

    def requeue(self, job: str) -> RequeueResult:
        """Ask for a requeue on this clock."""
        return slurm.request_requeue(job, self.run_live, clock=lambda: self.now, sleep=self.sleep)

    def sleep(self, seconds: float) -> None:
        """Let time go by."""
        self.now += seconds


@pytest.mark.parametrize("done", RECORDED)
def test_why_a_job_got_sigterm_is_told_by_its_record(done: str) -> None:
    """A preempted job can be told from one that somebody cancelled."""
    fields, expected = RECORDED[done]
    commands = Commands(CommandResult(0, shown(fields)))
    assert slurm.query_termination_reason("2", commands.run) is expected
    assert commands.asked == [["scontrol", "show", "job", "2", "-o"]]


@pytest.mark.parametrize(
    "answer",
    [
        CommandResult(1, "slurm_load_jobs error: Invalid job id specified"),
        CommandResult(None, "no answer"),
        CommandResult(0, ""),
        CommandResult(0, "JobState"),
        CommandResult(1, shown("RUNNING None Unknown 2026-11-21T23:23:25")),
    ],
)
def test_without_an_answer_nothing_is_known(answer: CommandResult) -> None:
    """And so nothing is requeued. A controller that is away is asked again, a moment later."""
    commands = Commands(answer)
    assert (
        slurm.query_termination_reason("2", commands.run, sleep=commands.sleep) is TerminationReason.UNKNOWN
    )
    away = answer.exit_code != 0 and "Invalid job id" not in answer.output
    assert len(commands.asked) == (3 if away else 1)


def test_a_controller_that_comes_back_tells_why() -> None:
    """A preempted job is not given up because Slurm was busy."""
    shows = CommandResult(0, shown(RECORDED["preempted with a grace"][0]))
    commands = Commands(CommandResult(1, "Unable to contact slurm controller (connect failure)"), shows)
    assert (
        slurm.query_termination_reason("2", commands.run, sleep=commands.sleep) is TerminationReason.PREEMPTED
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("2026-11-21T23:44:56|10:00", 1795304696.0),
        ("2027-11-21T23:23:34|UNLIMITED", math.inf),
        ("NONE|UNLIMITED", math.inf),
        ("NONE|10:00", None),
        ("Unknown|1-00:00:00", None),
        ("2026-13-45T00:00:00|10:00", None),
        ("23:44:56|10:00", None),
        ("2026-11-21T23:44:56", None),
        ("", None),
        ("slurm_load_jobs error: Unable to contact slurm controller (connect failure)", None),
    ],
)
def test_the_end_of_a_job_is_read_from_squeue(text: str, expected: float | None) -> None:
    """No limit is not the same as no answer; to who only wants a deadline it is."""
    commands = Commands(CommandResult(0, text))
    assert slurm.query_end_time("7_1", commands.run) == expected
    assert commands.asked == [["squeue", "-h", "-j", "7_1", "-o", "%e|%l"]]
    finite = expected if expected is not None and math.isfinite(expected) else None
    assert slurm.find_deadline("7_1", commands.run, {}) == finite


def test_a_variable_counts_where_squeue_does_not_answer() -> None:
    """A limit may be changed while the job runs: what squeue says is newer."""
    environ = {"SLURM_JOB_END_TIME": "1795304000"}
    away = Commands(CommandResult(None, "away"))
    assert slurm.find_deadline("7", away.run, environ) == 1795304000.0
    assert slurm.find_deadline("7", Commands(CommandResult(0, "NONE|UNLIMITED")).run, environ) is None
    assert slurm.find_deadline("7", away.run, {"SLURM_JOB_END_TIME": "soon"}) is None


@pytest.mark.parametrize(
    ("text", "done"),
    [
        ("Job is pending execution for job 5", True),  # another node was faster
        ("Requested operation is presently disabled for job 5", False),  # sbatch --no-requeue
        ("Only batch jobs are accepted or processed for job 6", False),  # srun or salloc without a script
        ("Invalid job id specified for job 999", False),
        ("Access/permission denied for job 5", False),
    ],
)
def test_what_would_be_refused_again_is_asked_once(text: str, done: bool) -> None:
    """The texts are Slurm's."""
    commands = Commands(CommandResult(1, text))
    assert commands.requeue("5") == RequeueResult(done, text, 1)
    assert commands.asked == [["scontrol", "requeue", "5"]]


def test_a_controller_that_is_away_is_asked_again() -> None:
    """It fails over, or is restarted."""
    away = CommandResult(1, "Unexpected message received for job 10")
    commands = Commands(away, CommandResult(None, "no answer"), away, CommandResult(0, ""), takes_s=4.0)
    assert commands.requeue("10_3") == RequeueResult(True, "", 4)
    assert commands.asked[-1] == ["scontrol", "requeue", "10_3"]


@pytest.mark.parametrize("takes_s", [0.0, 4.0, 9.0, 100.0])
def test_but_not_for_ever(takes_s: float) -> None:
    """Slurm kills what is left of a job before long."""
    commands = Commands(
        CommandResult(1, "Unable to contact slurm controller (connect failure)"), takes_s=takes_s
    )
    ended = commands.requeue("10")
    assert not ended.succeeded
    assert ended.attempts > 1
    assert commands.now <= REQUEUE_TIMEOUT_S


@pytest.mark.parametrize("done", RECORDED)
def test_a_job_is_looked_at_right_before_its_requeue(done: str) -> None:
    """Also before a second try: somebody may have cancelled it meanwhile, and the request would undo that."""
    fields, word = RECORDED[done]
    record = CommandResult(0, shown(fields))
    ended = Commands(record, CommandResult(0, ""))
    asked = slurm.request_requeue("5", ended.run, clock=lambda: ended.now, sleep=ended.sleep)
    assert (asked.succeeded, asked.job_is_ending) == (
        word is not TerminationReason.JOB_ENDING,
        word is TerminationReason.JOB_ENDING,
    )
    again = Commands(
        RUNS, CommandResult(1, "Unexpected message received for job 5"), record, CommandResult(0, "")
    )
    asked = slurm.request_requeue("5", again.run, clock=lambda: again.now, sleep=again.sleep)
    assert (asked.succeeded, asked.attempts) == (word is not TerminationReason.JOB_ENDING, 2)
    assert [words[1] for words in again.asked].count("requeue") == (
        1 if word is TerminationReason.JOB_ENDING else 2
    )


def test_a_job_of_which_nothing_is_known_is_not_requeued() -> None:
    """It may be one that is being cancelled. The question is asked again as long as the request would be."""
    mute = Commands(
        CommandResult(1, "Unable to contact slurm controller (connect failure)"), CommandResult(0, "?")
    )
    asked = slurm.request_requeue("5", mute.run, clock=lambda: mute.now, sleep=mute.sleep)
    assert not asked.succeeded
    assert asked.attempts > 10
    assert {words[1] for words in mute.asked} == {"show"}


def script(directory: Path, name: str, text: str) -> None:
    """Make a command."""
    path = directory / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def test_a_command_has_so_long_and_may_say_so_much(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Real processes: one that says too much, one that hangs, one that is not there."""
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_TIME_FORMAT", "relative")
    monkeypatch.setenv("SQUEUE_STATES", "PENDING")
    monkeypatch.setattr("tempfile.tempdir", "/nowhere")
    script(tmp_path, "talks", "head -c 200000 /dev/zero | tr '\\0' x")
    assert slurm.run_command(["talks"], 60) == CommandResult(0, "x" * slurm.MAX_OUTPUT_BYTES)
    script(tmp_path, "fails", 'echo "no: $SLURM_TIME_FORMAT $TZ$SQUEUE_STATES" >&2; exit 3')
    assert slurm.run_command(["fails"], 60) == CommandResult(3, "no: standard UTC")
    script(tmp_path, "hangs", "exec sleep 60")
    assert slurm.run_command(["hangs"], 0.1).exit_code is None
    gone = slurm.run_command(["no-such-command"], 1)
    assert gone == CommandResult(None, "no-such-command cannot be run: No such file or directory")
    assert slurm.request_requeue("5", lambda *_: gone) == RequeueResult(False, gone.output, 1)
