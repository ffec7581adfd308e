"""`elastic-resume chaos`: what it refuses, what it prints, how it ends, and that it leaves nothing behind.

In the last test, which `make soak` runs, faults come for ELASTIC_RESUME_CHAOS_S seconds.
ELASTIC_RESUME_CHAOS_SEED chooses other faults.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from elastic_resume import cli, constants
from elastic_resume.background import BackgroundThread
from elastic_resume.events import read_run
from elastic_resume.report import summary
from elastic_resume.state import diff
from elastic_resume.testing import Cluster, chaos, virtual_network
from elastic_resume.testing.chaos import RUN_ID, Experiment, ExperimentResult
from elastic_resume.testing.fault_runner import FaultOutcome
from elastic_resume.testing.faults import Fault, JobShape, draw_random_faults
from tests.support.processes import wait_for
from tests.support.training_job import SCRIPT, check_end, left_behind

SECONDS = float(os.environ.get("ELASTIC_RESUME_CHAOS_S", "600"))
SEED = int(os.environ.get("ELASTIC_RESUME_CHAOS_SEED", "9"))
QUICK = ["--snapshot-every", "1", "--rdzv-conf", "last_call_timeout=60"]
ONE_KILL = ["--seed", "4", "--mtbf", "1s", "--for", "1s"]  # one fault, which kills a worker
SHORT_TIMEOUT = ["--node-timeout", "1"]
# Random faults may hit a slowly starting job again and again.
MANY_RESTARTS = {"ELASTIC_RESUME_MAX_NO_PROGRESS": "30"}
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - only looked at


def chaos_args(directory: Path, *flags: str, epochs: int = 3, step_s: float = 0.02) -> list[str]:
    """Return the arguments of a chaos run in ``directory``."""
    script = [str(SCRIPT), "--step-log", str(directory / "step_log"), "--epochs", str(epochs)]
    return [*flags, "--dir", str(directory / "run"), "--", *script, "--step-delay", str(step_s)]


# ---- what is refused -----------------------------------------------------------------------------------


SCRIPT_ARGS = ["--", "train.py"]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--nnodes", "4", *SCRIPT_ARGS], "--nnodes is not for chaos to pass on"),
        (["--ckpt-dir=x", *SCRIPT_ARGS], "--ckpt-dir is not for chaos to pass on"),
        (["--min-nodes", "4", *SCRIPT_ARGS], "--min-nodes is 4: write 1 to 3"),
        (["--mtbf", "15x", *SCRIPT_ARGS], "--mtbf is '15x': write a time"),
        (["--nodes", "0", *SCRIPT_ARGS], "'0' is not a number from 1"),
        (["--dir", "train.py", *SCRIPT_ARGS], "train.py: cannot be used: Not a directory"),
        (["--dir", "/proc/none", *SCRIPT_ARGS], "--dir /proc/none: cannot be made: No such file"),
        (["--dir", ".", *SCRIPT_ARGS], "is not empty"),
        (["--disk", "1GB", "--hosts", "loopback", *SCRIPT_ARGS], "--disk takes nodes that have one of their"),
        (["--nodes", "3", "train.py"], "write the script behind --"),
    ],
)
def test_command_that_cannot_run_is_refused_before_start(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    args: list[str],
    message: str,
) -> None:
    """It exits with code 2 and one line, and makes no directory."""
    monkeypatch.chdir(tmp_path)
    Path("train.py").touch()
    with contextlib.suppress(SystemExit):
        assert cli.main(["chaos", *args]) == 2
    assert message in capsys.readouterr().err
    assert not Path("chaos-run").exists()


def test_parse_command_splits_flags_and_draws_faults(tmp_path: Path) -> None:
    """Flags of `run` keep their order; --seed, --mtbf and --for decide the faults."""
    line = ["--nodes", "4", "--save-every", "10", "--dir", str(tmp_path / "new"), "--keep", "2"]
    line += ["--seed", "3", "--mtbf", "20s", "--for", "1h", "--hosts", "loopback"]
    job = chaos.parse_command([*line, "--", str(SCRIPT), "--", "--nodes", "9"])
    assert (job.flags, job.script, job.nodes) == (
        ("--save-every", "10", "--keep", "2"), (str(SCRIPT), "--", "--nodes", "9"), 4
    )  # fmt: skip
    assert job.faults == tuple(draw_random_faults(JobShape(4), mtbf_s=20, until_s=3600, seed=3))


# ---- jobs ----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def act_after_fault(directory: Path, number: int, act: Callable[[], object]) -> Iterator[None]:
    """Call ``act`` when this fault has happened."""

    def watch() -> float | None:
        events = read_run(directory / "run/checkpoints" / RUN_ID)
        if not any(event["event"] == "fault" and event["number"] == number for event in events):
            return 0.05
        act()
        return None

    watcher = BackgroundThread("watch faults", watch)
    watcher.start()
    try:
        yield
    finally:
        watcher.close()


def test_result_says_why_a_fault_was_not_injected(tmp_path: Path) -> None:
    """Else nobody knows whether to train for longer or to mend the command."""
    experiment = Experiment(tmp_path, 1, 1, 1, "loopback", (), {}, ("train.py",), ())
    outcome = FaultOutcome(1, Fault("kill-worker", rank=0, step=9), reason="rank 0 is not running")
    text = chaos.format_result(experiment, ExperimentResult("", (outcome,), summary.build_run_report([])))
    assert "Fault 1, kill-worker, was not injected: rank 0 is not running" in text


@pytest.mark.cluster
def test_chaos_injects_faults_and_leaves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each fault and each generation is printed; the end is the report and one sentence."""
    for name, text in MANY_RESTARTS.items():
        monkeypatch.setenv(name, text)
    before = set(SHARED_MEMORY.iterdir())
    flags = ["--min-nodes", "2", "--hosts", "loopback", *ONE_KILL]
    line = chaos_args(tmp_path, *flags, *QUICK, *SHORT_TIMEOUT, epochs=4)
    file = tmp_path / "has-come"  # the job does not end before
    with act_after_fault(tmp_path, 1, file.touch):
        assert chaos.main([*line, "--slow-from", "20", "--slow-until", str(file)]) == 0
    output = capsys.readouterr().out
    assert re.search(r"\d s  fault 1: kill-worker rank \d on n\d", output), output
    assert re.search(r"\d s  generation \d+ continues after step \d", output), output
    sentence = " ".join(output.split())  # it is wrapped
    assert re.search(r"The job finished, at step 40: 1 fault injected, 1 incident followed", sentence), output
    wait_for(lambda: not list(left_behind(tmp_path)), "all processes to end")
    wait_for(lambda: set(SHARED_MEMORY.iterdir()) <= before, "shared memory to be given back", 60)


@pytest.mark.cluster
def test_chaos_with_failed_job_exits_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No generation starts any more, so the job gives up. Settings reach the agents."""
    monkeypatch.setenv("ELASTIC_RESUME_MAX_NO_PROGRESS", "2")
    script = tmp_path / "job.py"
    fails = f"os.environ['RANK'] == '1' and int(os.environ[{constants.ENV_GENERATION!r}]) > 1"
    train = f"runpy.run_path({str(SCRIPT)!r}, run_name='__main__')"
    script.write_text(f"import os, runpy\nif {fails}: raise ValueError\n{train}\n")
    flags = [*ONE_KILL, "--nodes", "2", "--min-nodes", "2", "--hosts", "loopback"]
    args = chaos_args(tmp_path, *flags, *QUICK, epochs=30)
    assert chaos.main([str(script) if word == str(SCRIPT) else word for word in args]) == 1
    output = capsys.readouterr().out
    why = r"WRONG: the job did not get to its end: .*failed without progress.* \(exit codes 1, 1\)"
    assert re.search(why, " ".join(output.split())), output
    assert re.search(r"starts in a row failed without progress.*ValueError", output, re.DOTALL)


@pytest.mark.cluster
def test_chaos_stopped_by_signal_prints_result(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing stays behind, and the exit code names the signal."""
    flags = [*ONE_KILL, "--nodes", "1", "--hosts", "loopback", *QUICK]
    with act_after_fault(tmp_path, 1, lambda: os.kill(os.getpid(), signal.SIGTERM)):
        assert chaos.main(chaos_args(tmp_path, *flags, epochs=10_000)) == 128 + signal.SIGTERM
    output = capsys.readouterr().out
    assert "WRONG: it was interrupted (1 fault injected" in output
    assert "gen  nodes" in output
    wait_for(lambda: not list(left_behind(tmp_path)), "all processes to end")


@pytest.mark.cluster
@pytest.mark.soak
def test_random_faults_leave_right_weights_and_nothing_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a snapshot at every step no step is lost, and the end equals the end of an undisturbed run."""
    hosts = "loopback" if virtual_network.unavailable_reason() else "namespaces"
    epochs = round(SECONDS * 0.75)  # of ten steps, a tenth of a second each
    kept, undisturbed = run_undisturbed(tmp_path / "undisturbed", epochs)
    before = traces()
    flags = [
        "--seed",
        str(SEED),
        "--for",
        f"{SECONDS:.0f}s",
        "--hosts",
        hosts,
        *QUICK,
        *SHORT_TIMEOUT,
    ]
    for name, text in MANY_RESTARTS.items():
        monkeypatch.setenv(name, text)
    line = ["--nodes", "4", "--min-nodes", "4", *chaos_args(tmp_path, *flags, epochs=epochs, step_s=0.1)]
    code = chaos.main(line)
    output = capsys.readouterr().out
    print(output)
    assert code == 0, output
    right = rf"The job finished, at step {10 * epochs}: \d+ faults injected, .*, 0\s+steps\s+recomputed"
    assert re.search(right, output), output
    assert check_end(tmp_path / "step_log", world_size=4, epochs=epochs) == undisturbed
    found = diff.compare(kept, newest_checkpoint(tmp_path / "run")).differences
    # BatchNorm's statistics follow one rank, and another rank after its node is gone: see README.
    assert not [one for one in found if "running_" not in one.name], found
    wait_for(lambda: not list(left_behind(tmp_path)), "all processes to end")
    wait_for(lambda: traces() <= before, "mounts, devices and shared memory to be given back", 60)
    assert not [path for path in (tmp_path / "run").rglob("*") if path.is_socket()]


def run_undisturbed(directory: Path, epochs: int) -> tuple[Path, str]:
    """Return the newest checkpoint of four undisturbed nodes, and the digest of their final state."""
    flags = ["--save-every", "1000", "--rdzv-conf", "last_call_timeout=0.5"]
    with Cluster(directory, nodes=4, flags=flags) as cluster:
        kept = directory / "step_log"
        cluster.start(SCRIPT, "--step-log", str(kept), "--epochs", str(epochs), "--step-delay", "0")
        assert cluster.wait_exit(600) == [0, 0, 0, 0], cluster.output_tails()
        return newest_checkpoint(directory), check_end(kept, world_size=4, epochs=epochs)


def newest_checkpoint(directory: Path) -> Path:
    """Return the newest checkpoint of any node below ``directory``."""
    found = [path.parent for path in directory.rglob(constants.MANIFEST_FILE)]
    return max((path for path in found if path.parent.name != "quarantine"), key=lambda path: path.name)


def traces() -> set[str]:
    """List what simulated nodes might leave on this machine: mounts, named namespaces, shared memory."""
    mounts = Path("/proc/self/mounts").read_text().splitlines()
    return {*mounts, *map(str, [*Path("/run/netns").glob("*"), *SHARED_MEMORY.iterdir()])}
