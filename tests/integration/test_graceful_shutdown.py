"""A signal to the agent: workers end at a step boundary with their state saved, or after the grace."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import psutil
import pytest

from elastic_resume import constants
from elastic_resume.checkpoint.catalog import Catalog
from tests.support.agents import Agent, Agents
from tests.support.agents import agents as agents  # noqa: PLC0414  pytest finds fixtures by name
from tests.support.paths import SCRIPTS
from tests.support.processes import is_alive, wait_for

pytestmark = pytest.mark.cluster

TRAIN = SCRIPTS / "train.py"
# It ends only by SIGKILL.
STUBBORN = """
import os, pathlib, signal, time
signal.signal(signal.SIGTERM, lambda *_: pathlib.Path("terminated").touch())
pathlib.Path(f"worker-{os.getpid()}").touch()
while True:
    time.sleep(1)
"""

# Children of several kinds, forked by a script whose rank may be asked to end.
FORKS = """
import multiprocessing, os, signal, sys, time
import torch
from torch.utils.data import DataLoader, TensorDataset
import elastic_resume as er

model = torch.nn.Linear(2, 2)
run = er.resume(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
fork = multiprocessing.get_context("fork")

def idle(ready):
    ready.set()
    while True:
        time.sleep(3600)

def child(**kind):
    ready = fork.Event()
    process = fork.Process(target=idle, args=(ready,), **kind)
    process.start()
    ready.wait()
    return process

terminated = child()
terminated.terminate()
terminated.join(20)
print("terminated", terminated.exitcode, flush=True)
os.kill(terminated.pid, signal.SIGKILL) if terminated.exitcode is None else None
idle_child = child(daemon=True)  # Python terminates it at the end of this process, and waits for that
loader = DataLoader(TensorDataset(torch.zeros(4, 2)), num_workers=1, persistent_workers=True)
for _ in run.epochs(1):
    for batch in loader:
        run.step()
run.close()
"""

# An agent with one part more, which reads checkpoints as an archive would.
READING_AGENT = """
import sys
from elastic_resume import cli
from elastic_resume.agent import main as agent
from elastic_resume.mechanisms.mechanism import AgentPart

class Reader(AgentPart):
    def __init__(self, context):
        context.committer.checkpoint_listeners.append(lambda path: self.print("reads", path.name))

    def print(self, *words):
        print(*words, file=sys.stderr, flush=True)

    def observe(self, event):
        if event["event"] == "agent-end":
            self.print("observes", event["message"])

    def close(self):
        self.print("closed")

make = agent.make_agent_parts
agent.make_agent_parts = lambda context: {**make(context), Reader(context): None}
if __name__ == "__main__":
    sys.exit(cli.main(sys.argv[1:]))
"""


def start(agents: Agents, *flags: str) -> Agent:
    """Start a job that saves only when it must, and wait until it has trained some steps."""
    script = ["--rdzv-id=train", *flags, str(TRAIN), "--step-log", str(agents.directory), "--epochs", "1000"]
    env = {"ELASTIC_RESUME_STEP_MARK_S": "0", "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    agent = agents.start("--save-every=100000", *script, warm=True, **env)
    wait_for(lambda: len(agents.events("step")) > 4, "some steps")
    return agent


@pytest.mark.parametrize(
    ("number", "workers"), [(signal.SIGTERM, 2), (signal.SIGINT, 1), (signal.SIGUSR1, 2)]
)
def test_drain_commits_last_finished_step(agents: Agents, number: signal.Signals, workers: int) -> None:
    """Nothing had been saved before; the exit code says whether to requeue the job."""
    agent = start(agents, f"--nproc-per-node={workers}", "--grace=30")
    agent.send_signal(number)
    assert agent.wait(60) == (75 if number == signal.SIGUSR1 else 128 + number)
    (drain,) = agents.events("drain")
    assert drain["cause"] == number.name
    newest = max(event["step"] for event in agents.events("step") if event["rank"] == 0)
    (copy,) = Catalog(agents.directory / "checkpoints" / "train" / "a", "train").list_valid(read_data=True)
    assert copy.version[1] == newest
    end = f"elastic_resume[a] stopped by {number.name}; step {newest} is saved in {copy.path.parent}."
    assert agents.log().splitlines()[-1] == end
    assert "Traceback" not in agents.log()


@pytest.mark.soak  # test_archived_jobs.py archives the last step of a stopped job, by such a reader
def test_readers_of_checkpoints_get_the_last_one(agents: Agents) -> None:
    """It is committed after the node has left; nothing else may hold its step."""
    program = agents.directory / "agent.py"
    program.write_text(READING_AGENT)
    agents.command = [sys.executable, str(program), "run"]
    agent = start(agents, "--grace=30")
    agent.send_signal(signal.SIGTERM)
    assert agent.wait(60) == 128 + signal.SIGTERM
    (copy,) = Catalog(agents.directory / "checkpoints" / "train" / "a", "train").list_valid()
    lines = agents.log().splitlines()
    assert [line for line in lines if line.startswith(("reads", "observes", "closed"))] == [
        f"reads {copy.path.name}",
        "observes stopped by SIGTERM.",
        "closed",
    ]


def test_reason_of_a_failure_precedes_the_last_uploads(agents: Agents) -> None:
    """A part is closed last, which may upload a checkpoint for minutes; the user's command gets it before."""
    program = agents.directory / "agent.py"
    program.write_text(READING_AGENT)
    agents.command = [sys.executable, str(program), "run"]
    agents.script("raise ValueError('wrong data')")
    assert agents.start("--max-restarts=0", "train.py").wait(60) == 1
    lines = agents.log().splitlines()
    (reason,) = [line for line in lines if line.startswith("elastic_resume[a] failed: ")]
    after = lines[lines.index(reason) + 1 :]
    assert [line.partition(" ")[0] for line in after] == ["observes", "closed"], agents.log()


def test_drain_kills_worker_after_grace(agents: Agents) -> None:
    """The worker ignores SIGTERM; the next test shows that it gets the grace."""
    agents.script(STUBBORN)
    agent = agents.start("--grace=0.5", "train.py", ELASTIC_RESUME_LOG_LEVEL="DEBUG")
    (pid,) = wait_for(lambda: agents.pids("worker"), "the worker")
    agents.wait_for_workers()
    agent.terminate()
    assert agent.wait(60) == 143
    assert "stopped by SIGTERM; nothing was saved, because no step was finished." in agents.log()
    assert not is_alive(pid)
    (end,) = agents.events("worker-exit")
    assert (end["signal"], end["stopped"]) == ("SIGKILL", True)


def test_second_interrupt_skips_grace(agents: Agents) -> None:
    """A second Ctrl-C ends the agent at once."""
    agents.script(STUBBORN)
    agent = agents.start("--grace=3600", "train.py", ELASTIC_RESUME_LOG_LEVEL="DEBUG")
    (pid,) = wait_for(lambda: agents.pids("worker"), "the worker")
    agents.wait_for_workers()
    agent.send_signal(signal.SIGINT)
    wait_for((agents.directory / "terminated").exists, "SIGTERM in the worker")
    assert is_alive(pid)
    assert "er-fork-server" not in {child.name() for child in psutil.Process(agent.pid).children()}  # NO_WARM
    agent.send_signal(signal.SIGINT)
    assert agent.wait(60) == 130
    wait_for(lambda: not is_alive(pid), "the worker to die")


def test_forked_children_end_by_sigterm(agents: Agents) -> None:
    """`terminate()` ends a child, and a finished job does not wait for its idle children."""
    agents.script(FORKS)
    agent = agents.start("train.py", warm=True, OMP_NUM_THREADS="1", PYTHONUNBUFFERED="1")
    assert agent.wait(120) == 0, agents.log()
    assert f"terminated -{signal.SIGTERM.value}\n" in agents.log()


# The first child's parent was asked to end; the second child gets the signal before our code runs in it.
FORKED_EARLY = """
import os, signal
early = []
os.register_at_fork(after_in_child=lambda: early and os.kill(os.getpid(), signal.SIGTERM))
from elastic_resume.training.worker_exit import DrainRequest

def child():
    if (pid := os.fork()) == 0:
        DrainRequest.terminate_instead_of_raising(RuntimeError)
        os._exit(7)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

request = DrainRequest()
signal.raise_signal(signal.SIGTERM)
assert request.requested
first = child()
early.append(True)
print(first, child())
"""


def test_forked_child_follows_its_own_sigterm_only() -> None:
    """Also if the signal arrives before the child has restored the default action."""
    env = {**os.environ, constants.ENV_AGENT_PID: str(os.getpid())}
    code = [sys.executable, "-c", FORKED_EARLY]
    done = subprocess.run(code, env=env, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.split() == ["7", str(-signal.SIGTERM)], done.stderr
