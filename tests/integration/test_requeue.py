"""How nodes of a Slurm job end, and which has it run again: real agents, recorded answers of Slurm."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

import psutil
import pytest

from elastic_resume import constants
from elastic_resume.testing.cluster import Cluster
from tests.support.agents import Agents, wait_for
from tests.support.agents import agents as agents  # noqa: PLC0414  pytest finds fixtures by name
from tests.support.paths import SCRIPTS
from tests.support.slurm_answers import JOB_RECORDS, format_job_record, write_command

pytestmark = pytest.mark.cluster

TRAIN = SCRIPTS / "train.py"
NODES = 2
RUNS = "scancel --signal=TERM"  # of which Slurm's record knows nothing


class Slurm:
    """The commands of Slurm, which answer what a test wants and write down who asked."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory / "slurm"
        self.directory.mkdir()
        here = self.directory
        write_command(
            here,
            "scontrol",
            f'echo "$PPID $*" >> {here}/calls\n'
            f"[ $1 = show ] && exec cat {here}/shown\n"
            f"[ -e {here}/away ] || exit 0\n"
            f'rm {here}/away; echo "Unexpected message received for job $2"; exit 1',
        )
        write_command(here, "squeue", f"cat {here}/end")
        self.ends("NONE|UNLIMITED")
        self.shows(RUNS)

    def ends(self, text: str) -> None:
        """Let ``squeue`` tell this of the job's end."""
        (self.directory / "end").write_text(text)

    def shows(self, done: str) -> None:
        """Let the job's record be that of a job with which this was done."""
        (self.directory / "shown").write_text(format_job_record(JOB_RECORDS[done][0]))

    def requeues(self) -> list[tuple[int, str]]:
        """Who asked for which requeue since the last time; forget it."""
        path = self.directory / "calls"
        calls = path.read_text().splitlines() if path.exists() else []
        path.unlink(missing_ok=True)
        words = [call.split() for call in calls]
        return [(int(pid), job) for pid, what, job, *_ in words if what == "requeue"]

    def environ(self, nodes: int, restarts: int = 0, path: str | None = None) -> dict[str, str]:
        """What Slurm tells a task of a job."""
        return {
            "PATH": f"{self.directory}:{os.environ['PATH']}" if path is None else path,
            "SLURM_JOB_ID": "77",
            "SLURM_JOB_NUM_NODES": str(nodes),
            "SLURM_STEP_ID": "0",
            **({"SLURM_RESTART_COUNT": str(restarts)} if restarts else {}),
            constants.ENV_SHARED_DIR: "off",
        }


@pytest.fixture
def slurm(tmp_path: Path) -> Slurm:
    """Commands of Slurm in a directory of their own."""
    return Slurm(tmp_path)


def start(cluster: Cluster, slurm: Slurm, restarts: int, steps: int = 5) -> None:
    """Start a life of the job on all nodes, and wait until it has trained so many steps."""
    newest = max((event["step"] for event in cluster.events("step")), default=0)
    cluster.env.update(slurm.environ(NODES, restarts))
    for index in range(NODES):
        cluster.start_node(index, env={"SLURM_NODEID": str(index)})
    cluster.wait(step=newest + steps)


def send(receivers: list[psutil.Process], number: signal.Signals) -> None:
    """Send a signal to all of them, as ``scancel`` does. A loader may have ended with its epoch."""
    for process in receivers:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(number)


def all_have_saved(cluster: Cluster) -> bool:
    """Whether the newest finished step is on disk, and on each node that or the one before it.

    A node that hears that another has left, while its own worker is within the step, ends that at once.
    """
    steps = [cluster.checkpoints(index)[0].step for index in range(NODES)]
    finished = max(event["step"] for event in cluster.events("step"))
    return max(steps) >= finished and max(steps) - min(steps) <= 1


def processes(cluster: Cluster) -> list[psutil.Process]:
    """All processes of all nodes."""
    return [process for index in range(NODES) for process in cluster.processes(index)]


def those_that_do_not_tell(cluster: Cluster) -> list[psutil.Process] | None:
    """All but agents and stubs, once every rank has its loader, which ends with each epoch."""
    agents = {one.pid for one in agents_of(cluster)}
    found = []
    for process in processes(cluster):
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.pid not in agents and "launcher_shim.py" not in " ".join(process.cmdline()):
                found.append(process)
    return found if len(found) >= 4 * NODES else None  # zygote, guard, worker, its loader


def agents_of(cluster: Cluster) -> list[psutil.Process]:
    """The agents of all nodes."""
    return [psutil.Process(node.agent.pid) for node in cluster.nodes if node.agent is not None]


def test_job_of_several_nodes_is_requeued_once(tmp_path: Path, slurm: Slurm) -> None:
    """After USR1, preemption or the time limit all nodes commit and one requests."""
    flags = ("--save-every=100000", "--snapshot-every=1", "--grace=10")
    with Cluster(tmp_path, nodes=NODES, flags=flags) as cluster:
        cluster._script = [str(TRAIN), "--diary", str(tmp_path), "--epochs", "100000", "--loaders", "1"]
        # scancel --signal=USR1, to all processes: who is not the agent goes on
        start(cluster, slurm, restarts=0)
        others = cluster.wait(lambda: those_that_do_not_tell(cluster), "a loader of each rank")
        send(others, signal.SIGUSR1)
        cluster.wait(step=cluster.events("step")[-1]["step"] + 5)
        assert not cluster.events("worker-exit")  # as when a loader had died of it
        (slurm.directory / "away").touch()
        first = agents_of(cluster)[0].pid
        send(processes(cluster), signal.SIGUSR1)
        assert cluster.wait_exit() == [75, 0]  # only one node's exit code asks the script to requeue
        assert slurm.requeues() == [(first, "77")] * 2  # by node 0; the controller was away once
        assert all_have_saved(cluster)
        assert [event["cause"] for event in cluster.events("drain")] == ["SIGUSR1"] * NODES
        ends = cluster.events("worker-exit")
        assert all(end["stopped"] or end.get("lease_expired") for end in ends)  # and none of the signal
        told = cluster.node_events(0, "requeue")[-1]
        assert (told["action"], told["done"], told["attempts"]) == ("requeue", True, 2)

        # preempted within a grace: Slurm would let the job end for good
        slurm.shows("preempted with a grace")
        start(cluster, slurm, restarts=1)
        send(agents_of(cluster), signal.SIGTERM)
        assert sorted(cluster.wait_exit()) == [75, 143]
        assert len(slurm.requeues()) == 1
        assert all_have_saved(cluster)

        slurm.shows(RUNS)

        # its time limit, which nobody announces
        slurm.ends(time.strftime("%Y-%m-%dT%H:%M:%S|5:00", time.gmtime(time.time() + 8)))
        start(cluster, slurm, restarts=2, steps=0)
        assert cluster.wait_exit() == [75] * NODES
        assert len(slurm.requeues()) == 1
        assert [event["cause"] for event in cluster.events("drain")[-NODES:]] == ["deadline"] * NODES
        assert all_have_saved(cluster)


WAITS = "import pathlib, time\npathlib.Path('there').touch()\nwhile True:\n    time.sleep(1)\n"


def test_deterministic_failure_is_not_requeued(agents: Agents, slurm: Slurm) -> None:
    """It would fail again."""
    agents.script("import no_such_module_at_all\n")
    code, log = agents.run("--rdzv-id=train", "train.py", **slurm.environ(1))
    assert code == 1, log
    assert not slurm.requeues()
    assert not agents.events("requeue")


@pytest.mark.parametrize(
    ("environ", "path", "restarts", "shows", "code", "says"),
    [
        ({}, None, 0, RUNS, 75, "job 77 is requeued"),
        ({}, None, 0, "scancel", 143, "not requeued: the scheduler has been told to end"),  # by now
        ({}, "/nowhere", 0, RUNS, 75, "there is no scontrol here"),
        ({"ELASTIC_RESUME_REQUEUE": "off"}, None, 0, RUNS, 75, "requeue is off"),
        ({}, None, 3, RUNS, 1, "it has lived 4 times without a new step"),
    ],
)
def test_drain_signal_requeues_single_node(
    agents: Agents,
    slurm: Slurm,
    *,
    environ: dict[str, str],
    path: str | None,
    restarts: int,
    shows: str,
    code: int,
    says: str,
) -> None:
    """The signal is not the default; a start without a step counts as no progress."""
    slurm.shows(shows)
    agents.script(WAITS)
    node_dir = agents.directory / "checkpoints" / "train" / "a"
    node_dir.mkdir(parents=True)
    (node_dir / constants.EVENTS_FILE).write_text('{"t":1,"event":"agent-start"}\n' * restarts)
    environ = {**environ, "ELASTIC_RESUME_DRAIN_SIGNALS": "usr2", **slurm.environ(1, restarts, path)}
    agent = agents.start("--rdzv-id=train", "--grace=0.1", "train.py", warm=False, **environ)
    wait_for((agents.directory / "there").exists, "the worker")
    agent.send_signal(signal.SIGUSR2)
    assert agent.wait(60) == code
    assert says in agents.log()
    assert [job for _, job in slurm.requeues()] == (["77"] if "is requeued" in says else [])


@pytest.mark.parametrize(
    ("name", "text"),
    [("DRAIN_SIGNALS", "SIGINT"), ("DRAIN_SIGNALS", ","), ("DRAIN_SIGNALS", "9"), ("REQUEUE", "always")],
)
def test_invalid_drain_settings_are_rejected(agents: Agents, name: str, text: str) -> None:
    """Nothing starts."""
    agents.script("")
    code, log = agents.run("train.py", **{f"ELASTIC_RESUME_{name}": text})
    assert code == 2, log
    assert f"ELASTIC_RESUME_{name} is {text!r}" in log
