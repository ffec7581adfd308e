"""Answers of Slurm's commands as recorded from 22.05, requeue requests, and node lists."""

from __future__ import annotations

import math
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_resume.errors import ConfigError
from elastic_resume.policy.requeue import TerminationReason
from elastic_resume.schedulers import slurm
from elastic_resume.schedulers.slurm import (
    MAX_NAMES,
    REQUEUE_TIMEOUT_S,
    CommandResult,
    RequeueResult,
    expand_node_list,
)
from tests.support.slurm_answers import JOB_RECORDS, format_job_record, write_command

RUNS = CommandResult(0, format_job_record("RUNNING None Unknown None"))


class Commands:
    """Scripted answers, on a clock that each command advances."""

    def __init__(self, *answers: CommandResult, takes_s: float = 0.0) -> None:
        self.answers = list(answers)
        self.asked: list[list[str]] = []
        self.now = 0.0
        self._takes_s = takes_s

    def run(self, words: Sequence[str], timeout_s: float) -> CommandResult:
        """Return the next answer; repeat the last."""
        self.asked.append(list(words))
        self.now += min(self._takes_s, timeout_s)
        return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]

    def run_live(self, words: Sequence[str], timeout_s: float) -> CommandResult:
        """Return the next answer, for a job that runs."""
        if words[1] == "show":
            return RUNS
        return self.run(words, timeout_s)

    def requeue(self, job: str) -> RequeueResult:
        """Request a requeue on this clock."""
        return slurm.request_requeue(job, self.run_live, clock=lambda: self.now, sleep=self.sleep)

    def sleep(self, seconds: float) -> None:
        """Advance the clock."""
        self.now += seconds


@pytest.mark.parametrize("done", JOB_RECORDS)
def test_termination_reason_is_read_from_job_record(done: str) -> None:
    """A preempted job differs from a cancelled job."""
    fields, expected = JOB_RECORDS[done]
    commands = Commands(CommandResult(0, format_job_record(fields)))
    assert slurm.query_termination_reason("2", commands.run) is expected
    assert commands.asked == [["scontrol", "show", "job", "2", "-o"]]


@pytest.mark.parametrize(
    "answer",
    [
        CommandResult(1, "slurm_load_jobs error: Invalid job id specified"),
        CommandResult(None, "no answer"),
        CommandResult(0, ""),
        CommandResult(0, "JobState"),
        CommandResult(1, format_job_record("RUNNING None Unknown 2026-11-21T23:23:25")),
    ],
)
def test_termination_reason_without_answer_is_unknown(answer: CommandResult) -> None:
    """A controller that is away is queried again."""
    commands = Commands(answer)
    assert (
        slurm.query_termination_reason("2", commands.run, sleep=commands.sleep) is TerminationReason.UNKNOWN
    )
    away = answer.exit_code != 0 and "Invalid job id" not in answer.output
    assert len(commands.asked) == (3 if away else 1)


def test_termination_reason_is_queried_again_while_controller_is_away() -> None:
    """The controller may be restarting."""
    shows = CommandResult(0, format_job_record(JOB_RECORDS["preempted with a grace"][0]))
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
def test_end_time_is_read_from_squeue(text: str, expected: float | None) -> None:
    """No limit differs from no answer; neither is a deadline."""
    commands = Commands(CommandResult(0, text))
    assert slurm.query_end_time("7_1", commands.run) == expected
    assert commands.asked == [["squeue", "-h", "-j", "7_1", "-o", "%e|%l"]]
    finite = expected if expected is not None and math.isfinite(expected) else None
    assert slurm.find_deadline("7_1", commands.run, {}) == finite


def test_deadline_uses_variable_if_squeue_does_not_answer() -> None:
    """The limit may change while the job runs, so squeue is newer."""
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
def test_requeue_that_is_refused_is_requested_once(text: str, done: bool) -> None:
    """The texts are Slurm's."""
    commands = Commands(CommandResult(1, text))
    assert commands.requeue("5") == RequeueResult(done, text, 1)
    assert commands.asked == [["scontrol", "requeue", "5"]]


def test_requeue_is_requested_again_while_controller_is_away() -> None:
    """It may fail over, or restart."""
    away = CommandResult(1, "Unexpected message received for job 10")
    commands = Commands(away, CommandResult(None, "no answer"), away, CommandResult(0, ""), takes_s=4.0)
    assert commands.requeue("10_3") == RequeueResult(True, "", 4)
    assert commands.asked[-1] == ["scontrol", "requeue", "10_3"]


@pytest.mark.parametrize("takes_s", [0.0, 4.0, 9.0, 100.0])
def test_requeue_gives_up_after_timeout(takes_s: float) -> None:
    """Slurm kills the processes of an ending job after KillWait."""
    commands = Commands(
        CommandResult(1, "Unable to contact slurm controller (connect failure)"), takes_s=takes_s
    )
    ended = commands.requeue("10")
    assert not ended.succeeded
    assert ended.attempts > 1
    assert commands.now <= REQUEUE_TIMEOUT_S


@pytest.mark.parametrize("done", JOB_RECORDS)
def test_requeue_queries_job_before_each_request(done: str) -> None:
    """A user may have cancelled the job; a requeue would undo that."""
    fields, word = JOB_RECORDS[done]
    record = CommandResult(0, format_job_record(fields))
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


def test_requeue_of_unknown_job_is_not_requested() -> None:
    """The job may be about to be cancelled; it is queried until the timeout."""
    mute = Commands(
        CommandResult(1, "Unable to contact slurm controller (connect failure)"), CommandResult(0, "?")
    )
    asked = slurm.request_requeue("5", mute.run, clock=lambda: mute.now, sleep=mute.sleep)
    assert not asked.succeeded
    assert asked.attempts > 10
    assert {words[1] for words in mute.asked} == {"show"}


def test_command_has_time_limit_and_bounded_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Real processes: long output, a failure, a hang, a missing program."""
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_TIME_FORMAT", "relative")
    monkeypatch.setenv("SQUEUE_STATES", "PENDING")
    monkeypatch.setattr("tempfile.tempdir", "/nowhere")
    write_command(tmp_path, "talks", "head -c 200000 /dev/zero | tr '\\0' x")
    assert slurm.run_slurm_command(["talks"], 60) == CommandResult(0, "x" * slurm.MAX_OUTPUT_BYTES)
    write_command(tmp_path, "fails", 'echo "no: $SLURM_TIME_FORMAT $TZ$SQUEUE_STATES" >&2; exit 3')
    assert slurm.run_slurm_command(["fails"], 60) == CommandResult(3, "no: standard UTC")
    write_command(tmp_path, "hangs", "exec sleep 60")
    assert slurm.run_slurm_command(["hangs"], 0.1).exit_code is None
    gone = slurm.run_slurm_command(["no-such-command"], 1)
    assert gone == CommandResult(None, "no-such-command cannot be run: No such file or directory")
    assert slurm.request_requeue("5", lambda *_: gone) == RequeueResult(False, gone.output, 1)


# ---- node lists ----------------------------------------------------------------------------------------

# Slurm 22.05 expands all of these, except those in BEYOND.
LISTS = {
    "n1": "n1",
    "localhost": "localhost",
    "a,b,c": "a b c",
    "n[1-3]": "n1 n2 n3",
    "n[1-3,07-09]": "n1 n2 n3 n07 n08 n09",
    "n[08-11]": "n08 n09 n10 n11",
    "n[9-11]": "n9 n10 n11",
    "n[099-101]": "n099 n100 n101",
    "n[001-3]": "n001 n002 n003",
    "n[2,1,5]": "n2 n1 n5",
    "n[1,1]": "n1 n1",
    "node-a[1-2],gpu-b-[01,03],login": "node-a1 node-a2 gpu-b-01 gpu-b-03 login",
    "r[1-2]n[01-03]": "r1n01 r1n02 r1n03 r2n01 r2n02 r2n03",
    "n[1-2][3-4]": "n13 n14 n23 n24",
    "n[1-2]n[1-2]n[1-2]": "n1n1n1 n1n1n2 n2n1n1 n2n1n2 n1n2n1 n1n2n2 n2n2n1 n2n2n2",
    "[1-3]": "1 2 3",
    "5[1-2]": "51 52",
    "ip-10-0-1-[7-8]": "ip-10-0-1-7 ip-10-0-1-8",
    "n0.example.com": "n0.example.com",
}
BEYOND = {
    "n[1-2]-ib": "n1-ib n2-ib",
    "r[1-2]n[1-2].site": "r1n1.site r1n2.site r2n1.site r2n2.site",
}
WRONG = [
    "", ",", "n1,", ",n1", "n1,,n2", "(null)", "None assigned", "a b", "n1\n", "n/../x", "n{1,2}", "n\u0661",
    "n[", "n[1", "n]", "n[1-2", "n[1-2]]", "n[[1-2]]", "n[]", "n[1-]", "n[-1]", "n[1,]", "n[3-1]", "n[a-c]",
    "n[1 -2]", "n[\u0661]", f"n[1-{'9' * 30}]",
]  # fmt: skip


@pytest.mark.parametrize(("text", "names"), [*LISTS.items(), *BEYOND.items()])
def test_node_list_is_expanded_in_slurms_order(text: str, names: str) -> None:
    """Ranges, zero padding, several prefixes, several brackets."""
    assert expand_node_list(text) == names.split()


@pytest.mark.parametrize("text", WRONG)
def test_invalid_node_list_is_refused_and_format_job_record(text: str) -> None:
    """A partial list would be a world with too few nodes."""
    with pytest.raises(ConfigError) as caught:
        expand_node_list(text)
    assert repr(text) in str(caught.value)


@pytest.mark.parametrize(
    "text", [f"n[0-{MAX_NAMES}]", "n[1-1000]x[1-1000]y[1-1000]", f"n[1-{MAX_NAMES}],m", f"n[1-{10**17}]"]
)
def test_node_list_above_slurms_limit_is_refused(text: str) -> None:
    """The limit is checked before names are created."""
    with pytest.raises(ConfigError, match="more than 65536"):
        expand_node_list(text)
    assert len(expand_node_list(f"n[1-{MAX_NAMES}]")) == MAX_NAMES


def test_node_list_error_is_short() -> None:
    """An error has a line or two."""
    with pytest.raises(ConfigError) as caught:
        expand_node_list("n1," * 10000)
    assert len(str(caught.value)) < 300


prefixes = st.text("abcxyz019-", min_size=1, max_size=4).filter(lambda text: text[0] != "-")


@st.composite
def ranges(draw: st.DrawFn) -> str:
    """The inside of a bracket, as Slurm writes it."""
    parts = []
    for _ in range(draw(st.integers(1, 3))):
        first = draw(st.integers(0, 120))
        width = draw(st.integers(0, 4))
        last = first + draw(st.integers(0, 12))
        parts.append(f"{first:0{width}d}-{last:0{width}d}" if last > first else f"{first:0{width}d}")
    return ",".join(parts)


@st.composite
def node_lists(draw: st.DrawFn) -> str:
    """Lists of up to four words with up to two brackets each."""
    words = []
    for _ in range(draw(st.integers(1, 4))):
        brackets = draw(st.integers(0, 2))
        words.append(
            "".join(f"{draw(prefixes)}[{draw(ranges())}]" for _ in range(brackets)) or draw(prefixes)
        )
    return ",".join(words)


@given(st.lists(st.tuples(prefixes, st.integers(0, 10**6), st.integers(0, 7)), min_size=1, max_size=50))
def test_node_list_without_brackets_is_split_at_commas(parts: list[tuple[str, int, int]]) -> None:
    """Without brackets a list is its names, in order."""
    names = [f"{prefix}{number:0{width}d}" for prefix, number, width in parts]
    assert expand_node_list(",".join(names)) == names


@given(st.text("n[]-,0123456789 ", max_size=30))
def test_node_list_of_any_text_is_names_or_error(text: str) -> None:
    """There is no other error, and no name contains brackets or commas."""
    try:
        names = expand_node_list(text)
    except ConfigError:
        return
    assert names
    assert not set("".join(names)) & set("[], ")


@pytest.fixture(scope="module")
def slurm_conf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A configuration for ``scontrol show hostnames``, which queries no controller."""
    path = tmp_path_factory.mktemp("slurm") / "slurm.conf"
    path.write_text("ClusterName=x\nSlurmctldHost=localhost\nNodeName=n[1-3]\n")
    return path


def expand_by_slurm(texts: list[str], conf: Path) -> list[list[str]]:
    """Return Slurm's expansions of many lists, which a separator name delimits."""
    separator = "SEPARATOR"
    answer = subprocess.run(
        ["scontrol", "show", "hostnames", ",".join(f"{text},{separator}" for text in texts)],
        env={**os.environ, "SLURM_CONF": str(conf)},
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    ).stdout
    return [part.split() for part in answer.split(f"{separator}\n")[:-1]]


needs_slurm = pytest.mark.skipif(shutil.which("scontrol") is None, reason="needs Slurm's scontrol")


@needs_slurm
def test_table_of_node_lists_agrees_with_slurm(slurm_conf: Path) -> None:
    """The table holds Slurm's behaviour."""
    assert expand_by_slurm(list(LISTS), slurm_conf) == [names.split() for names in LISTS.values()]


@needs_slurm
@settings(max_examples=15, deadline=None)
@given(texts=st.lists(node_lists(), min_size=1, max_size=20))
def test_random_node_lists_are_expanded_as_by_slurm(slurm_conf: Path, texts: list[str]) -> None:
    """Up to twenty lists per process."""
    assert expand_by_slurm(texts, slurm_conf) == [expand_node_list(text) for text in texts]
