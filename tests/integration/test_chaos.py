"""`elastic-resume chaos`: what it refuses, what it tells, how it ends, and that it leaves nothing behind.

ELASTIC_RESUME_CHAOS_S is for how long faults come in the last test (`make soak`: ten minutes), with
ELASTIC_RESUME_CHAOS_SEED for another night.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from elastic_resume import cli, constants
from elastic_resume.errors import ConfigError
from elastic_resume.events import read_run
from elastic_resume.policy.incidents import GenerationEnd
from elastic_resume.report import summary
from elastic_resume.report.incidents import Generation, RejectedStateRecord, RunHistory
from elastic_resume.state import diff
from elastic_resume.testing import Cluster, chaos, faults, virtual_network
from elastic_resume.testing.chaos import RUN_ID, Experiment, ExperimentResult, _EventTail, _ExperimentRun
from elastic_resume.testing.fault_runner import DONE, FaultOutcome
from elastic_resume.testing.faults import KINDS, Fault, FaultPlan
from elastic_resume.testing.triggers import FailpointController
from tests.support.paths import ROOT
from tests.support.processes import wait_for
from tests.support.training_job import SCRIPT, check_end, left_behind

SOAK = "ELASTIC_RESUME_CHAOS_S" in os.environ
SECONDS = float(os.environ.get("ELASTIC_RESUME_CHAOS_S", "4"))
SEED = int(os.environ.get("ELASTIC_RESUME_CHAOS_SEED", "9"))
FAULTS = max(3, round(SECONDS / 15))
QUICK = ["--snapshot-every", "1", "--settle", "60"]
SILENCE = ["--node-timeout", "1"]  # of nodes that are cut off or stopped: others may take a moment
LUCK = [
    "--max-no-progress",
    "30",
]  # what is drawn by time may hit a job that is slow to start again and again
PAGE = ROOT / "docs" / "chaos.md"
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - only looked at


def words(directory: Path, *flags: str, epochs: int = 3, step_s: float = 0.02) -> list[str]:
    """A command of chaos, in ``directory``."""
    script = [str(SCRIPT), "--diary", str(directory / "diary"), "--epochs", str(epochs)]
    return [*flags, "--dir", str(directory / "run"), "--", *script, "--step-delay", str(step_s)]


# ---- what is refused -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--plan", "none.yaml"], "none.yaml cannot be read"),
        (
            ["--plan", "cut.yaml", "--hosts", "loopback"],
            "fault 2 (cut node 1 at 3s): it takes nodes that",
        ),
        (["--plan", "far.yaml", "--nodes", "2"], "fault 1 (kill-node node 7 at step 1): there is no node 7"),
        (["--nnodes", "4"], "--nnodes is not for chaos to pass on: it decides that itself; see --nodes and"),
        (["--ckpt-dir=x"], "--ckpt-dir is not for chaos to pass on"),
        (["--min-nodes", "4"], "--min-nodes is 4: write 1 to 3"),
        (["--mtbf", "15x"], "--mtbf is '15x': write a time"),
        (["--nodes", "0"], "'0' is not a number from 1"),
        (["--save-plan", "none/x.yaml"], "--save-plan none/x.yaml: cannot be written"),
        (["--dir", "train.py"], "train.py: cannot be used: Not a directory"),
        (["--dir", "/proc/none"], "--dir /proc/none: cannot be made: No such file"),
        (["--disk", "1GB", "--hosts", "loopback"], "--disk takes nodes that have one of their own (--hosts "),
        (["--keep", "none"], "keep is 'none'"),
        (["--max-restarts", "1", "--checkpoint-evry", "2"], "unknown flag --checkpoint-evry"),
        (["--no-python"], "there is no program 'train.py'"),
    ],
)
def test_what_cannot_be_done_is_refused_before_anything_starts(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    flags: list[str],
    said: str,
) -> None:
    """With exit code 2, one line, and no directory made."""
    monkeypatch.chdir(tmp_path)
    Path("train.py").touch()
    Path("cut.yaml").write_text("faults: [worker 0 at step 1, cut 1 at 3s]")
    Path("far.yaml").write_text("faults: [node 7 at step 1]")
    assert code_of(["chaos", *flags, "--", "train.py"]) == 2
    assert said in capsys.readouterr().err
    assert not Path("chaos-run").exists()


def code_of(command: Sequence[str]) -> int:
    """How the command ends in this process."""
    try:
        return cli.main(command)
    except SystemExit as end:
        return int(end.code or 0)


def test_a_script_is_written_behind_two_dashes(capsys: pytest.CaptureFixture[str]) -> None:
    """Its flags could not be told from those of `run` otherwise."""
    assert code_of(["chaos", "--nodes", "3", "train.py"]) == 2
    assert "write the script behind --" in capsys.readouterr().err


def test_a_script_that_is_not_there_is_refused_before_nodes_start(capsys: pytest.CaptureFixture[str]) -> None:
    """And not by each of them."""
    assert code_of(["chaos", "--", "none.py"]) == 2
    assert capsys.readouterr().err.startswith("elastic-resume: error: there is no training script 'none.py'")


def test_a_directory_with_something_in_it_is_left_alone(tmp_path: Path) -> None:
    """Two runs would be told as one."""
    (tmp_path / "kept").touch()
    with pytest.raises(ConfigError, match="is not empty"):
        chaos.parse_command(["--dir", str(tmp_path), "--", str(SCRIPT)])


def test_flags_of_run_are_passed_on_and_the_rest_is_chaos_own(tmp_path: Path) -> None:
    """As they stand, in their order; a seed and a rate make a plan, or change that of the file."""
    file = tmp_path / "plan.yaml"
    file.write_text("seed: 3\nfaults: [worker 1 at step 20]\nevery: {mtbf: 1m, kinds: [raise]}")
    line = ["--nodes", "4", "--save-every", "10", "--dir", str(tmp_path / "new"), "--no-warm"]
    job, saved = chaos.parse_command([*line, "--hosts", "loopback", "--", str(SCRIPT), "--", "--nodes", "9"])
    assert (job.flags, job.script, job.nodes) == (
        ("--save-every", "10", "--no-warm"), (str(SCRIPT), "--", "--nodes", "9"), 4
    )  # fmt: skip
    assert saved is None
    assert job.plan.every is not None
    assert (job.plan.every.mtbf_s, job.plan.faults) == (15, ())
    asked = ["--plan", str(file), "--seed", "8", "--mtbf", "20s", "--hosts", "loopback"]
    plan = chaos.parse_command([*asked, "--dir", str(tmp_path / "new"), "--", str(SCRIPT)])[0].plan
    assert plan.every is not None
    assert (plan.seed, str(plan.faults[0]), plan.every.mtbf_s) == (8, "kill-worker rank 1 at step 20", 20)
    assert plan.every.kinds == (("raise", 1.0),)


def fate_of(number: int, what: str, node: int, t: float) -> FaultOutcome:
    """A fault that came."""
    return FaultOutcome(
        number, Fault(what, node=node, at_s=0), state=DONE, injected_at=t, nodes=(f"n{node}",)
    )


def row_of(began: float, end: GenerationEnd, rejected: tuple[RejectedStateRecord, ...] = ()) -> Generation:
    """A generation of which nothing else is known."""
    unknown: dict[str, Any] = dict.fromkeys((field.name for field in fields(Generation)), None)
    return Generation(**{**unknown, "start_t": began, "end": end, "rejected": rejected})


def test_of_two_faults_in_one_moment_the_one_that_hit_the_rank_is_to_blame() -> None:
    """A disk that turns slow just before a worker's death kills nobody; nor does what hit it long before."""
    rows = [
        row_of(
            0.0, GenerationEnd("signal", "rank 1 on node n1 was killed by SIGKILL", t=10.0, node="n1", rank=1)
        )
    ]
    disk = summary.FaultHit(9.99, ["n1"])
    assert summary.attribute_ends([summary.FaultHit(9.96, ["n1"], 1), disk], rows) == [rows, []]
    assert summary.attribute_ends([summary.FaultHit(9.96, ["n1"], 0), disk], rows) == [[], rows]
    assert summary.attribute_ends([summary.FaultHit(5.0, ["n1"], 1), disk], rows) == [[], rows]


@pytest.mark.parametrize(("kind", "rank"), [("node-lost", None), ("signal", 0)])
def test_what_cannot_end_a_node_has_not_if_another_fault_can(kind: str, rank: int | None) -> None:
    """Though it came closer, and to all of them."""
    rows = [row_of(0.0, GenerationEnd(kind, "n0 ended", t=10.0, node="n0", rank=rank))]
    full = summary.FaultHit(9.98, ["n0", "n1"], kind="disk-full")
    killed = summary.FaultHit(9.95, ["n0"], kind="kill-node")
    assert summary.attribute_ends([full, killed], rows) == [[], rows]
    assert summary.attribute_ends([full, killed._replace(nodes=["n1"])], rows) == [rows, []]
    whole = [replace(row_of(0.0, GenerationEnd("job", "whole job killed", t=10.0)), nodes=("n0",))]
    last = [summary.FaultHit(9.5, ["n1"], kind="kill-node"), summary.FaultHit(10.2, ["n0"], kind="kill-node")]
    assert summary.attribute_ends(last, whole) == [[], whole]  # all that was left then
    assert set(KINDS) >= summary.NON_FATAL_FAULTS


def test_that_all_were_told_to_leave_is_told_of_the_notice() -> None:
    """It is no incident, and cost some time nevertheless."""
    ends = [GenerationEnd("stopped", "a notice", t=3.0), GenerationEnd("finished", "finished", t=20.0)]
    rows = tuple(
        replace(row_of(began, end), recovery_s=4.0) for began, end in zip((0.0, 9.0), ends, strict=True)
    )
    fates = (fate_of(1, "preemption", 0, 2.0), fate_of(2, "preemption", 0, 10.0))
    outcome = ExperimentResult(
        "",
        (0,),
        fates,
        replace(summary.build_run_report([]), history=RunHistory(rows, (), 0, 0, 0, 7, "finished", "")),
    )
    assert chaos._consequences(outcome) == {1: "a notice, back in 4.0 s"}


def test_a_rank_that_was_hit_without_its_name_was_hit_too() -> None:
    """A plan may name a node or a role: of two faults of one rank the later one killed it."""
    end = GenerationEnd("signal", "rank 1 on node n1 was killed by SIGKILL", t=10.0, node="n1", rank=1)
    slow = FaultOutcome(
        1, Fault("slow-rank", rank=1, step=30), state=DONE, injected_at=9.95, nodes=("n1",), rank=1
    )
    killed = FaultOutcome(
        2, Fault("kill-worker", node=1, step=31), state=DONE, injected_at=9.99, nodes=("n1",), rank=1
    )
    report = RunHistory((row_of(0.0, end),), (), 4, 0, 0, 7, "stopped", "")
    outcome = ExperimentResult(
        "", (0, 0), (slow, killed), replace(summary.build_run_report([]), history=report)
    )
    assert list(chaos._consequences(outcome)) == [2]


def test_a_fault_is_told_what_followed_of_it_and_of_no_other() -> None:
    """Not of the one that came while the job was down, nor what no fault did, nor how it was drained."""
    ends = [
        *(("signal", "n1", 3.0), ("signal", "n2", 12.0)),
        *(("node-lost", "n0", 15.0), ("preempted", "n0", 22.0)),
    ]
    rows = []
    for began, (kind, node, t) in zip((0.0, 9.0, 13.0, 18.0), ends, strict=True):
        copies = (RejectedStateRecord("n0", 1, 5, "digest"),) if node == "n2" else ()
        rows.append(row_of(began, GenerationEnd(kind, f"{kind} {node} at {t:.0f}", t=t, node=node), copies))
    fates = (
        *(fate_of(1, "bit-flip", 0, 1.0), fate_of(2, "kill-node", 1, 2.0), fate_of(3, "kill-node", 1, 5.0)),
        *(fate_of(4, "kill-node", 0, 16.0), FaultOutcome(5, Fault("kill-node", node=0, at_s=90))),
        fate_of(6, "torn-write", 2, 20.5),
    )
    report = RunHistory(tuple(rows), (), 4, 0, 0, 7, "stopped", "")
    stepped: Any = (SimpleNamespace(last_step_t=20.0),)
    told = replace(summary.build_run_report([]), start_t=0.0, history=report, generation_times=stepped)
    outcome = ExperimentResult("", (0, 0, 0), fates, told, drained_at=21.0)
    text = " ".join("\n".join(chaos._fault_table(outcome)).split())
    assert "nothing of the plan - signal n2 at 12" in text
    assert "1 bit-flip node 0 1.0 s a copy of n0 was set aside: digest" in text
    assert "2 kill-node node 1 2.0 s signal n1 at 3" in text
    assert "3 kill-node node 1 5.0 s training continued" in text
    assert "4 kill-node node 0 16 s node-lost n0 at 15" in text  # which it told last, a second before
    assert "6 torn-write node 2 20 s no step followed" in text
    assert "n0 at 22" not in text
    wrong = " ".join(
        "\n".join(
            chaos._fault_table(replace(outcome, failure="it stood still", fault_outcomes=fates[:3]))
        ).split()
    )
    assert "3 kill-node node 1 5.0 s see below" in wrong


def test_a_job_is_drained_when_it_has_gone_on_after_the_last_fault(tmp_path: Path) -> None:
    """The ranks that are left finish the step that a dead one had begun, and no other; nor is a start one."""
    at = SimpleNamespace(generation=1, step=9, first_step=0)
    told: list[int] = []
    cluster = SimpleNamespace(
        nodes=[SimpleNamespace(directory=tmp_path, alive=True, agent=None)],
        run_dir=tmp_path,
        failpoints=FailpointController(tmp_path / "armed"),
        workers_per_node=1,
        rank_progress=lambda: [(0, at)],
        kill_agent=lambda _, number: told.append(number),
    )
    job = Experiment(tmp_path, 1, 1, 1, "loopback", (), (), FaultPlan(seed=1), fault_window_s=0.0, drain=True)
    trial = _ExperimentRun(job, cast("Cluster", cluster))
    for at.generation, at.step, at.first_step in ((1, 9, 0), (1, 10, 0), (2, 10, 10)):
        trial._stall_message(0.0)
        trial._finish_faults()
        assert not told
    at.step = 11
    trial._finish_faults()
    assert told == [signal.SIGTERM]
    trial.injector.close()


def test_news_of_a_node_are_told_once_whatever_befalls_its_clock_and_its_disk(tmp_path: Path) -> None:
    """A clock that goes back, a disk that is wiped, one that is away for a while, one that has lost lines."""
    path = tmp_path / constants.EVENTS_FILE
    tail = _EventTail(path)

    def told(text: str) -> list[str]:
        path.write_text(text)
        return [re.findall(r"\d+", said)[0] for said in tail.read_new_messages()]

    def line(generation: int, t: float) -> str:
        return json.dumps({"t": t, "event": "resume", "generation": generation}) + "\n"

    first, second, third = line(1, 9000.0), line(2, 3600.0), line(3, 3610.0)
    assert told(first) == ["1"]
    assert told(first + second) == ["2"]
    assert told(first) == []
    assert told(first + third) == ["3"]
    assert told(line(4, 3700.0)) == ["4"]
    path.unlink()
    assert not list(tail.read_new_messages())
    assert told(line(4, 3700.0) + line(5, 3800.0)) == ["5"]


# ---- jobs ----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def has_come(directory: Path, number: int) -> Iterator[Path]:
    """A file that is there once a fault of the plan has come: the job cannot be over before."""
    file, over = directory / "has-come", threading.Event()

    def watch() -> None:
        while not over.wait(0.05):
            events = read_run(directory / "run/checkpoints" / RUN_ID)
            if any(event["event"] == "fault" and event["number"] == number for event in events):
                file.touch()
                return

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield file
    finally:
        over.set()
        thread.join()


@pytest.mark.cluster
def test_the_plan_of_the_docs_is_carried_out_and_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With deaths in a rendezvous and in a resume too; what never comes is named, by exit code 3."""
    found = re.search(r"^```yaml\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert found is not None
    every = found[1].index("every:")
    more = """\
  - {what: kill-agent, node: 2, phase: in rendezvous, step: 12, back-after: 100ms}
  - {what: kill-worker, rank: 1, phase: in resume, step: 14}
  - worker 2 at step 1000
"""
    plan, saved = tmp_path / "plan.yaml", tmp_path / "saved.yaml"
    plan.write_text(found[1][:every] + more + found[1][every:])
    shape = ["--min-nodes", "2", "--hosts", "loopback", "--save-plan", str(saved), "--save-every", "5"]
    before = set(SHARED_MEMORY.iterdir())
    line = words(tmp_path, "--plan", str(plan), *shape, *QUICK, *SILENCE, *LUCK, epochs=16)
    with has_come(tmp_path, number=5) as it:
        assert chaos.main([*line, "--slow-from", "110", "--slow-until", str(it)]) == 3
    told = capsys.readouterr().out
    for number in (1, 2, 3, 4, 5, 6, 7):
        assert re.search(rf"\d s  fault {number}: ", told), told
    assert re.search(r"n2 is started again, 1s after its end", told)
    assert re.search(r"8  kill-worker rank 2 +-  never came: the job was over", told)
    sentence = " ".join(told.split())  # which is broken where the number of faults that were drawn wants it
    assert re.search(r"The job ended right, at step 160: \d+ faults came, .*, 0 steps run again", sentence)
    assert "1 fault of the plan never came" in sentence, told
    assert faults.read_plan(saved) == faults.read_plan(plan)
    numbers = [
        event["number"]
        for event in read_run(tmp_path / "run/checkpoints" / RUN_ID)
        if event["event"] == "fault"
    ]
    assert sorted(numbers)[:7] == [1, 2, 3, 4, 5, 6, 7]
    wait_for(lambda: not list(left_behind(tmp_path)), "all processes to end")
    wait_for(lambda: set(SHARED_MEMORY.iterdir()) <= before, "shared memory to be given back", 60)


@pytest.mark.cluster
def test_a_job_that_ends_wrong_is_told_as_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No generation gets through its resume any more: the job gives up, which is told with exit code 1."""
    plan = tmp_path / "plan.yaml"
    plan.write_text("""
faults:
  - worker 0 at step 4
  - {what: raise, rank: 1, phase: in resume, step: 4, error: ValueError, repeat: true}
""")
    flags = ["--plan", str(plan), "--nodes", "2", "--min-nodes", "2", "--hosts", "loopback"]
    assert chaos.main(words(tmp_path, *flags, *QUICK, epochs=30)) == 1
    told = capsys.readouterr().out
    why = r"WRONG: the job did not get to its end: .*failed without progress.* \(exit codes 1, 1\)"
    assert re.search(why, " ".join(told.split())), told
    assert re.search(r"starts in a row failed without progress.*ValueError", told, re.DOTALL)


@pytest.mark.cluster
def test_a_job_without_an_end_is_drained_when_the_faults_are_over(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It saves, and nobody is started again; that is no wrong end."""
    (tmp_path / "plan.yaml").write_text("faults: [worker 1 at 0s]")
    flags = ["--plan", str(tmp_path / "plan.yaml"), "--nodes", "2", "--for", "2s", "--drain"]
    assert chaos.main(words(tmp_path, *flags, "--hosts", "loopback", *QUICK, epochs=10_000)) == 0
    told = capsys.readouterr().out
    assert re.search(r"The job was drained, at step \d+: 1 fault came, 1 incident followed, 0 steps", told)
    assert "is started again" not in told


@pytest.mark.cluster
def test_a_signal_ends_all_at_once_and_tells_what_there_is(tmp_path: Path) -> None:
    """In the midst of faults; nothing stays, and the exit code says which signal it was."""
    flags = ["--seed", "1", "--mtbf", "1s", "--hosts", "loopback", *QUICK, *SILENCE]
    command = [sys.executable, "-m", "elastic_resume", "chaos", *words(tmp_path, *flags, epochs=1000)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        assert process.stdout is not None
        told = []
        for line in process.stdout:
            told.append(line)
            if "fault 1:" in line:
                process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 128 + signal.SIGTERM, "".join(told)
    assert re.search(r"WRONG: it was interrupted \(\d+ fault", "".join(told))
    assert "gen  nodes" in "".join(told)
    wait_for(lambda: not list(left_behind(tmp_path)), "all processes to end")


@pytest.mark.cluster
def test_mixed_faults_leave_the_right_weights_and_nothing_else(tmp_path: Path) -> None:
    """On four machines, a snapshot at every step: no step is lost, and the end is that of a quiet run."""
    own = "loopback" if virtual_network.unavailable_reason() else "namespaces"
    plan = tmp_path / "plan.yaml"
    plan.write_text(f"seed: {SEED}\nevery: {{mtbf: {0.9 * SECONDS / FAULTS:.1f}s, count: {FAULTS}}}\n")
    epochs = max(6, round(SECONDS * 0.75))  # of ten steps, a tenth of a second each
    kept, undisturbed = quiet_run(tmp_path / "quiet", epochs)
    before = traces()
    flags = ["--plan", str(plan), "--for", f"{SECONDS:.0f}s", "--hosts", own, *QUICK, *SILENCE, *LUCK]
    line = [sys.executable, "-m", "elastic_resume", "chaos", "--nodes", "4", "--min-nodes", "4"]
    line += words(tmp_path, *flags, epochs=epochs, step_s=0.1)
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    came = FAULTS if SOAK else r"[1-9]\d*"  # in seconds some may not find whom they are to hit
    right = rf"The job ended right, at step {10 * epochs}: {came} faults? came, .*, 0\s+steps\s+run\s+again"
    assert re.search(right, done.stdout)
    assert check_end(tmp_path / "diary", world_size=4, epochs=epochs) == undisturbed
    found = diff.compare(kept, newest(tmp_path / "run")).differences
    # BatchNorm's statistics are those of one rank, and another's when its node is gone: README.
    assert not [one for one in found if "running_" not in one.name], found
    wait_for(lambda: not list(left_behind(tmp_path)), "all processes to end")
    wait_for(lambda: traces() <= before, "mounts, devices and shared memory to be given back", 60)
    assert not [path for path in (tmp_path / "run").rglob("*") if path.is_socket()]


def quiet_run(directory: Path, epochs: int) -> tuple[Path, str]:
    """The newest checkpoint of four nodes that nothing befalls, and the digest of what they end with."""
    with Cluster(directory, nodes=4, flags=["--save-every", "1000", "--settle", "0.5"]) as cluster:
        kept = directory / "diary"
        cluster.start(SCRIPT, "--diary", str(kept), "--epochs", str(epochs), "--step-delay", "0")
        assert cluster.wait_exit(600) == [0, 0, 0, 0], cluster.output_tails()
        return newest(directory), check_end(kept, world_size=4, epochs=epochs)


def newest(directory: Path) -> Path:
    """The newest checkpoint of any node of the run below."""
    found = [path.parent for path in directory.rglob(constants.MANIFEST_FILE)]
    return max((path for path in found if path.parent.name != "quarantine"), key=lambda path: path.name)


def traces() -> set[str]:
    """What a laboratory might leave on this machine: mounts, namespaces by name, memory."""
    mounts = Path("/proc/self/mounts").read_text().splitlines()
    return {*mounts, *map(str, [*Path("/run/netns").glob("*"), *SHARED_MEMORY.iterdir()])}
