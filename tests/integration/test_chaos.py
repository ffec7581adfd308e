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
from elastic_resume.state import diff
from elastic_resume.testing import Cluster, chaos, virtual_network
from elastic_resume.testing.chaos import RUN_ID
from tests.support.paths import ROOT
from tests.support.processes import wait_for
from tests.support.training_job import SCRIPT, check_end, left_behind

SECONDS = float(os.environ.get("ELASTIC_RESUME_CHAOS_S", "600"))
SEED = int(os.environ.get("ELASTIC_RESUME_CHAOS_SEED", "9"))
FAULTS = round(SECONDS / 15)
QUICK = ["--snapshot-every", "1", "--rdzv-conf", "last_call_timeout=60"]
SHORT_TIMEOUT = ["--node-timeout", "1"]
# Random faults may hit a slowly starting job again and again.
MANY_RESTARTS = {"ELASTIC_RESUME_MAX_NO_PROGRESS": "30"}
PAGE = ROOT / "docs" / "guides" / "chaos.md"
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
        (["--plan", "none.yaml", *SCRIPT_ARGS], "none.yaml cannot be read"),
        (["--plan", "cut.yaml", "--hosts", "loopback", *SCRIPT_ARGS], "fault 2 (cut node 1 at 3s): it takes"),
        (["--plan", "far.yaml", "--nodes", "2", *SCRIPT_ARGS], "fault 1 (kill-node node 7 at step 1): there"),
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
    Path("cut.yaml").write_text("faults: [{what: raise, step: 1}, {what: cut, node: 1, at: 3s}]")
    Path("far.yaml").write_text("faults: [{what: kill-node, node: 7, step: 1}]")
    with contextlib.suppress(SystemExit):
        assert cli.main(["chaos", *args]) == 2
    assert message in capsys.readouterr().err
    assert not Path("chaos-run").exists()


def test_parse_command_splits_flags_and_builds_plan(tmp_path: Path) -> None:
    """Flags of `run` keep their order; --seed and --mtbf make a plan, or change the plan of the file."""
    file = tmp_path / "plan.yaml"
    file.write_text(
        "seed: 3\nfaults: [{what: kill-worker, rank: 1, step: 20}]\nevery: {mtbf: 1m, kinds: [raise]}"
    )
    line = ["--nodes", "4", "--save-every", "10", "--dir", str(tmp_path / "new"), "--keep", "2"]
    job = chaos.parse_command([*line, "--hosts", "loopback", "--", str(SCRIPT), "--", "--nodes", "9"])
    assert (job.flags, job.script, job.nodes) == (
        ("--save-every", "10", "--keep", "2"), (str(SCRIPT), "--", "--nodes", "9"), 4
    )  # fmt: skip
    assert job.plan.every is not None
    assert (job.plan.every.mtbf_s, job.plan.faults) == (15, ())
    asked = ["--plan", str(file), "--seed", "8", "--mtbf", "20s", "--hosts", "loopback"]
    plan = chaos.parse_command([*asked, "--dir", str(tmp_path / "new"), "--", str(SCRIPT)]).plan
    assert plan.every is not None
    assert (plan.seed, str(plan.faults[0]), plan.every.mtbf_s) == (8, "kill-worker rank 1 at step 20", 20)
    assert plan.every.kinds == ("raise",)


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


@pytest.mark.cluster
def test_chaos_runs_plan_of_docs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With deaths in a rendezvous and in a resume too. A fault that never comes gives exit code 3."""
    for name, text in MANY_RESTARTS.items():
        monkeypatch.setenv(name, text)
    found = re.search(r"^```yaml\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert found is not None
    every = found[1].index("every:")
    more = """\
  - {what: kill-agent, node: 2, phase: in rendezvous, step: 12, back-after: 100ms}
  - {what: kill-worker, rank: 1, phase: in resume, step: 14}
  - {what: kill-worker, rank: 2, step: 1000}
"""
    plan = tmp_path / "plan.yaml"
    plan.write_text(found[1][:every] + more + found[1][every:])
    shape = ["--min-nodes", "2", "--hosts", "loopback", "--save-every", "5"]
    before = set(SHARED_MEMORY.iterdir())
    line = chaos_args(tmp_path, "--plan", str(plan), *shape, *QUICK, *SHORT_TIMEOUT, epochs=16)
    file = tmp_path / "has-come"  # the job does not end before
    with act_after_fault(tmp_path, 5, file.touch):
        assert chaos.main([*line, "--slow-from", "110", "--slow-until", str(file)]) == 3
    output = capsys.readouterr().out
    for number in (1, 2, 3, 4, 5, 6, 7):
        assert re.search(rf"\d s  fault {number}: ", output), output
    assert re.search(r"n2 is started again 1s after its end", output)
    sentence = " ".join(output.split())  # it is wrapped
    assert "not injected: fault 8, kill-worker rank 2 at step 1000: the job was over" in sentence, output
    assert re.search(r"\d s  generation \d+ continues after step \d\d", output), output
    # While the agent of n0 is stopped, n1 has no vote but its own. The end of its lease may kill its worker
    # in the middle of a copy, and then that one step is lost.
    right = r"The job finished, at step 160: \d+ faults injected, .*, (0 steps|1 step) recomputed"
    assert re.search(right, sentence), output
    assert "1 planned fault was not injected" in sentence, output
    numbers = [
        event["number"]
        for event in read_run(tmp_path / "run/checkpoints" / RUN_ID)
        if event["event"] == "fault"
    ]
    assert sorted(numbers)[:7] == [1, 2, 3, 4, 5, 6, 7]
    wait_for(lambda: not list(left_behind(tmp_path)), "all processes to end")
    wait_for(lambda: set(SHARED_MEMORY.iterdir()) <= before, "shared memory to be given back", 60)


@pytest.mark.cluster
def test_chaos_with_failed_job_exits_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No generation starts any more, so the job gives up. Settings reach the agents."""
    monkeypatch.setenv("ELASTIC_RESUME_MAX_NO_PROGRESS", "2")
    plan, script = tmp_path / "plan.yaml", tmp_path / "job.py"
    plan.write_text("faults: [{what: kill-worker, rank: 0, step: 4}]")
    fails = f"os.environ['RANK'] == '1' and int(os.environ[{constants.ENV_GENERATION!r}]) > 1"
    train = f"runpy.run_path({str(SCRIPT)!r}, run_name='__main__')"
    script.write_text(f"import os, runpy\nif {fails}: raise ValueError\n{train}\n")
    flags = ["--plan", str(plan), "--nodes", "2", "--min-nodes", "2", "--hosts", "loopback"]
    args = chaos_args(tmp_path, *flags, *QUICK, epochs=30)
    assert chaos.main([str(script) if word == str(SCRIPT) else word for word in args]) == 1
    output = capsys.readouterr().out
    why = r"WRONG: the job did not get to its end: .*failed without progress.* \(exit codes 1, 1\)"
    assert re.search(why, " ".join(output.split())), output
    assert re.search(r"starts in a row failed without progress.*ValueError", output, re.DOTALL)


@pytest.mark.cluster
def test_chaos_stopped_by_signal_prints_result(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing stays behind, and the exit code names the signal."""
    (tmp_path / "plan.yaml").write_text("faults: [{what: kill-worker, rank: 0, step: 1}]")
    flags = ["--plan", str(tmp_path / "plan.yaml"), "--nodes", "1", "--hosts", "loopback", *QUICK]
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
    plan = tmp_path / "plan.yaml"
    plan.write_text(f"seed: {SEED}\nevery: {{mtbf: {0.9 * SECONDS / FAULTS:.1f}s, count: {FAULTS}}}\n")
    epochs = round(SECONDS * 0.75)  # of ten steps, a tenth of a second each
    kept, undisturbed = run_undisturbed(tmp_path / "undisturbed", epochs)
    before = traces()
    flags = [
        "--plan",
        str(plan),
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
    right = rf"The job finished, at step {10 * epochs}: {FAULTS} faults injected, .*, 0\s+steps\s+recomputed"
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
