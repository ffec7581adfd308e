"""Jobs on a real Slurm continue at the step that they had reached, after each kind of end.

Each test has jobs of its own on one cluster of three nodes. Their disks (/scratch) outlive a job.
"""

from __future__ import annotations

import os
import re
import secrets
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import yaml

from elastic_resume import constants, events
from elastic_resume.events import Event
from elastic_resume.grace import DEFAULT_GRACE_S
from tests.support import notices
from tests.support.paths import ROOT, SCRIPTS
from tests.system.slurm import slurm_cluster
from tests.system.slurm.slurm_cluster import NODES, SlurmCluster

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

README = ROOT / "README.md"
TRAIN = str(SCRIPTS / "train.py")
ALLOCATION = str(ROOT / "deploy" / "slurm" / "train.sbatch")
DISK = "/scratch/checkpoints"
STEPS_PER_EPOCH = 10
ASKED_STEPS = 8
"""In so many steps of 0.3 s all agents learn that the script asks for notices; each looks once a second."""
OVER = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED"}


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    """One Slurm for all tests."""
    why = slurm_cluster.unavailable_reason()
    if why and "CI" not in os.environ:
        pytest.skip(why)
    with SlurmCluster(tmp_path_factory.mktemp("slurm")) as made:
        yield made


@pytest.fixture
def slurm(cluster: SlurmCluster) -> Iterator[SlurmCluster]:
    """The cluster with no job and all nodes."""
    yield cluster
    cluster.command("scancel", "--user=root")
    cluster.boot(*(index for index in NODES if not cluster.machines.is_up(index)))
    cluster.wait(lambda: cluster.idle_node_count() == len(NODES), "idle nodes after a test")


@dataclass
class Job:
    """A job that trains, by its id (of an array: the array's)."""

    slurm: SlurmCluster
    id: str
    fast: Path
    notices: Path
    steps: int
    kept: dict[int, list[Event]] = field(default_factory=dict)
    """What nodes had told before they lost their disks."""

    @property
    def run_id(self) -> str:
        """Under which its checkpoints are kept, as long as it lives."""
        return f"slurm-{self.id}-{Path(TRAIN).stem}"

    def events_of(self, index: int, kind: str | None = None) -> list[Event]:
        """One node's events."""
        machines = self.slurm.machines
        found = self.kept.get(index, [])
        if machines.is_up(index):
            path = machines.path(
                index, f"{DISK}/{self.run_id}/{machines.name(index)}/{constants.EVENTS_FILE}"
            )
            found = [*found, *events.read(path)]
        return [event for event in found if kind in (None, event["event"])]

    def events(self, kind: str) -> list[Event]:
        """All nodes' events of a kind."""
        found = [event for index in NODES for event in self.events_of(index, kind)]
        return sorted(found, key=lambda event: float(event["t"]))

    def newest(self, generation: int | None = None) -> int:
        """The last step that a rank is known to have finished."""
        steps = [e for e in self.events("step") if generation in {None, e["generation"]}]
        return max((int(e["step"]) for e in steps), default=0)

    def wait_step(self, step: int, generation: int = 1) -> Event:
        """Wait until a rank has finished a step in that generation or a later one."""
        return self.slurm.wait(
            lambda: next(
                (e for e in self.events("step") if e["step"] >= step and e["generation"] >= generation), None
            ),
            f"step {step} of generation {generation} of job {self.id}",
        )

    def wait_world(self, size: int, generation: int = 1, steps: int = 3) -> Event:
        """Wait until a world of that many nodes has finished some steps; give how it began."""
        resume = self.slurm.wait(
            lambda: next(
                (
                    e
                    for e in self.events("resume")
                    if (e["world_size"], e["generation"] >= generation) == (size, True)
                ),
                None,
            ),
            f"a world of {size} in job {self.id}",
        )
        self.wait_step(resume["step"] + steps, resume["generation"])
        return resume

    def check_notice(self, generation: int, reason: str) -> None:
        """Check that all ranks of three nodes had the same notice at the same step, and then trained on."""
        nodes = [self.slurm.machines.name(index) for index in NODES]
        step, notice = notices.check_same(self.notices, generation, ranks=3, nodes=nodes, reason=reason)
        assert 0 < notice["seconds"] <= DEFAULT_GRACE_S
        assert step <= self.newest(generation) <= step + 1

    def wait_state(self, *states: str) -> str:
        """Wait until Slurm says one of these of it."""
        return self.slurm.wait(
            lambda: next((s for s in [self.slurm.job_state(self.id)] if s in states), None),
            f"job {self.id} {states}",
        )

    def hurry(self) -> None:
        """Let the rest of the training take no time."""
        self.fast.touch()

    def lose_power(self, index: int) -> float:
        """Switch a node off; give when."""
        self.kept[index] = self.events_of(index)
        self.slurm.machines.poweroff(index)
        return time.time()


def submit(slurm: SlurmCluster, script: str, *options: str, epochs: int = 15) -> Job:
    """Submit a training of ``epochs`` times ten steps, each of 0.3 s until `Job.hurry`."""
    name = secrets.token_hex(4)
    hurry, noticed = slurm.directory / f"hurry-{name}", slurm.directory / f"notices-{name}"
    job = slurm.sbatch(
        *("--cpus-per-task=1", f"--output={slurm.directory}/%x-%j.out", *options, script, TRAIN),
        *("--step-log", str(slurm.directory / "step_log"), "--epochs", str(epochs), "--step-delay", "0.3"),
        *("--fast-from", str(hurry), "--notices", str(noticed)),
        env={
            "ELASTIC_RESUME_CKPT_DIR": DISK,
            "ELASTIC_RESUME_STEP_MARK_S": "0",
            "ELASTIC_RESUME_SNAPSHOT_EVERY": "1",  # no finished step is lost then, however slow this machine
            "OMP_NUM_THREADS": "1",
            "WATCH_S": "1",
        },
    )
    return Job(slurm, job, hurry, noticed, epochs * STEPS_PER_EPOCH)


def went_on(job: Job, former: int) -> Event:
    """Give how the generation after ``former`` began: at the step that this had reached."""
    job.wait_step(1, former + 1)
    resume = next(event for event in job.events("resume") if event["generation"] > former)
    assert resume["step"] >= job.newest(former)
    assert resume["recomputed_steps"] == 0
    return resume


def restart(job: Job, former: int, reason: str) -> int:
    """Check a requeued job's notice, and that it continues at its last step; return the new generation."""
    job.wait_state("PENDING")
    job.check_notice(former, reason)
    job.slurm.start_now(job.id)
    went_on(job, former)
    return int(job.wait_world(3, former + 1, ASKED_STEPS)["generation"])


def test_job_continues_after_requeue_preemption_time_limit_and_power_loss(slurm: SlurmCluster) -> None:
    """One job meets them in this order, and each time it continues from the disks of its nodes.

    At each drain `run.preemption` is the same on all ranks at the same step.
    """
    limited = slurm.directory / "limited.sbatch"
    limit = 'scontrol update JobId="$SLURM_JOB_ID" EndTime=now+24seconds'
    limit = f"\n[[ ${{SLURM_RESTART_COUNT:-0}} != 2 ]] || {limit}\nset -uo"
    limited.write_text(Path(ALLOCATION).read_text().replace("\nset -uo", limit))
    job = submit(slurm, str(limited), epochs=40)
    former = job.wait_world(3, steps=ASKED_STEPS)["generation"]

    slurm.command("scontrol", "requeue", job.id)
    former = restart(job, former, "SIGTERM")

    # A higher partition takes the nodes; Slurm itself would let a job end that ends within its grace.
    (slurm.directory / "high.sh").write_text("#!/bin/bash\nexit 0\n")
    high = slurm.sbatch("--partition=high", "--nodes=3", "--exclusive", "--output=/dev/null", "high.sh")
    job.wait_state("PENDING")
    slurm.wait(lambda: slurm.job_state(high) == "COMPLETED", "the higher job's turn")
    former = restart(job, former, "SIGTERM")

    # Slurm sends no signal: the agents ask for the limit and drain in time; the script requeues the job.
    former = restart(job, former, "deadline")
    assert [drain["cause"] for drain in job.events("drain")].count("deadline") == 3
    assert slurm.job_info(job.id)["Restarts"] == "3"

    off = job.lose_power(NODES[-1])  # the batch host is the first
    first = job.wait_step(1, former + 1)
    print(f"the next step was done {first['t'] - off:.2f} s after the loss")  # -rP shows it
    assert went_on(job, former)["world_size"] == 2
    job.hurry()
    # srun waits for Slurm's own word on the lost node, and then tells of the others only.
    assert job.wait_state(*OVER) == "COMPLETED"


def test_a_cancelled_job_and_one_at_fault_are_not_queued_again(slurm: SlurmCluster) -> None:
    """They end, with what their users want to see."""
    broken = slurm.directory / "broken.py"
    broken.write_text("import there_is_no_such_module\n")
    fault = slurm.sbatch(
        "--nodes=1", "--cpus-per-task=1", f"--output={slurm.directory}/%x-%j.out", ALLOCATION, str(broken)
    )
    job = submit(slurm, ALLOCATION, "--nodes=2")
    job.wait_world(2)
    slurm.command("scancel", job.id)
    assert job.wait_state(*OVER) == "CANCELLED"
    slurm.wait(lambda: slurm.job_state(fault) in OVER, "the end of the job at fault")
    ended = slurm.job_info(fault)
    assert (ended["JobState"], ended["ExitCode"]) == ("FAILED", f"{constants.EXIT_JOB_ERROR}:0")
    assert {slurm.job_info(each)["Restarts"] for each in (fault, job.id)} == {"0"}


def test_elements_of_a_sweep_are_queued_again_one_by_one(slurm: SlurmCluster) -> None:
    """One has the number of the whole array; its siblings run on all the same."""
    array = submit(slurm, ALLOCATION, "--array=0-2", "--nodes=1", epochs=150)  # they run on to the end
    elements = [Job(slurm, f"{array.id}_{each}", array.fast, array.notices, array.steps) for each in range(3)]
    for each in elements:
        each.wait_world(1)
    same = next(each for each in elements if slurm.job_info(each.id)["JobId"] == array.id)
    former = same.events("resume")[-1]["generation"]
    slurm.command("scancel", "--signal=USR1", same.id)
    same.wait_state("PENDING")
    slurm.start_now(same.id)
    went_on(same, former)
    assert [slurm.job_info(each.id)["Restarts"] for each in elements if each is not same] == ["0", "0"]
    assert [slurm.job_state(each.id) for each in elements] == ["RUNNING"] * 3


def test_an_allocation_that_loses_the_batch_host_does_not_hang(slurm: SlurmCluster) -> None:
    """The others finish the training; the watchdog requeues the job. The README uses this script."""
    assert " deploy/slurm/train.sbatch train.py\n" in README.read_text()
    job = submit(slurm, ALLOCATION)
    former = job.wait_world(3)["generation"]
    batch_host = slurm.index(slurm.job_info(job.id)["BatchHost"])
    job.lose_power(batch_host)
    assert went_on(job, former)["world_size"] == 2
    job.hurry()
    job.wait_state("PENDING")
    assert all(end["outcome"] == "done" for end in job.events("agent-end"))
    assert job.newest() == job.steps
    slurm.boot(batch_host)
    slurm.start_now(job.id)
    assert job.wait_state(*OVER) == "COMPLETED"
    assert slurm.job_info(job.id)["Restarts"] == "1"


def test_srun_starts_a_job_without_any_flag(slurm: SlurmCluster) -> None:
    """Three nodes find each other, share a secret, and are named after the job."""
    kept = slurm.directory / "checkpoints"
    before = set(kept.glob("*"))
    said = slurm.command(
        *("srun", "-N3", "elastic-resume", "run", TRAIN, "--step-log", "step_log", "--epochs", "1"),
        env={"OMP_NUM_THREADS": "1"},
        timeout_s=120,
    )
    assert "3 ranks on 3 nodes" in said
    (run,) = set(kept.iterdir()) - before
    check_three_ends(slurm, run)


def test_one_file_starts_the_readmes_job(slurm: SlurmCluster) -> None:
    """The batch script and srun's command get the file alone."""
    job = yaml.safe_load((ROOT / "examples" / "digits.yaml").read_text())
    job["script"], job["script-args"] = str(ROOT / job["script"]), ["--epochs", 1]
    job |= {"ckpt-dir": str(slurm.directory / "of-file")}
    (slurm.directory / "job.yaml").write_text(yaml.safe_dump(job))
    batch = slurm.sbatch(f"--output={slurm.directory}/%x-%j.out", ALLOCATION, "--config", "job.yaml")
    slurm.wait(lambda: slurm.job_state(batch) in OVER, "the end of the job", 120)
    assert slurm.job_state(batch) == "COMPLETED"
    (run,) = (slurm.directory / "of-file").iterdir()
    check_three_ends(slurm, run, script="digits")
    settings = (run / slurm.machines.name(NODES[0]) / constants.SETTINGS_FILE).read_text()
    assert re.search(r"^save-every: 30s +# job.yaml:\d+$", settings, re.MULTILINE)
    assert re.search(r"^nnodes: 1:3 +# slurm$", settings, re.MULTILINE)


def check_three_ends(slurm: SlurmCluster, run: Path, script: str = Path(TRAIN).stem) -> None:
    """Check that all nodes have finished the run; nothing of the secret is left."""
    named = re.match(rf"slurm-\d+(?=-{script}$)", run.name)
    assert named is not None
    assert {each.name for each in run.iterdir()} == {slurm.machines.name(index) for index in NODES}
    ends = [event for event in events.read_run(run) if event["event"] == "agent-end"]
    assert [end["outcome"] for end in ends] == ["done"] * 3
    assert not list((slurm.directory / ".elastic_resume").glob(f"{named[0]}.*"))


SICK = """
import os, pathlib, time
node, sick = os.environ["SLURMD_NODENAME"], pathlib.Path("sick")
with open("starts", "a") as starts:
    starts.write(node + "\\n")
if os.environ["RANK"] == "1" and not sick.exists():
    sick.write_text(node)
    raise RuntimeError("CUDA error: uncorrectable ECC error encountered")
if "SLURM_RESTART_COUNT" not in os.environ:
    time.sleep(600)
"""


def test_requeued_job_does_not_get_the_node_that_it_excluded(slurm: SlurmCluster) -> None:
    """Two of three nodes: one has a broken GPU, and the job cannot go on without another."""
    (slurm.directory / "sick.py").write_text(SICK)
    job = slurm.sbatch(
        *("--nodes=2", "--cpus-per-task=1", f"--output={slurm.directory}/%x-%j.out", ALLOCATION),
        *("--nnodes=2", "--rdzv-conf=join_timeout=5s", "sick.py"),
        env={"ELASTIC_RESUME_CKPT_DIR": DISK, "OMP_NUM_THREADS": "1"},
    )
    slurm.wait(
        lambda: slurm.job_state(job) == "PENDING" and slurm.job_info(job)["Restarts"] == "1", "the requeue"
    )
    sick = (slurm.directory / "sick").read_text()
    slurm.wait(lambda: slurm.job_info(job)["ExcNodeList"] == sick, f"job {job} without {sick}")
    slurm.start_now(job)
    slurm.wait(lambda: slurm.job_state(job) in OVER, "the end of the job", 120)
    assert slurm.job_state(job) == "COMPLETED"
    starts = (slurm.directory / "starts").read_text().split()
    assert sick not in starts[-2:]
    assert not (slurm.directory / ".elastic_resume" / f"{job}.excluded").exists()
