"""``--collapse-output`` in real jobs: equal lines are one, and no death loses a line."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from tests.support.agents import Agents
from tests.support.agents import agents as agents  # noqa: PLC0414  pytest finds fixtures by name
from tests.support.processes import wait_for

pytestmark = pytest.mark.cluster

RUN = ("--collapse-output", "--nproc-per-node=2")
FILTER = "elastic_resume.mechanisms.collapsed_output.filter_process"
# The ranks print at the same time, as those of a job whose steps have collectives.
SCRIPT = """
import os, pathlib, sys, time
rank = os.environ["RANK"]
def meet(name):
    pathlib.Path(f"{name}-{rank}").touch()
    wait_for(f"{name}-{1 - int(rank)}")
def wait_for(name):
    while not os.path.exists(name):
        time.sleep(0.01)
"""


def find_filter(agent_pid: int) -> psutil.Process:
    """Return the process that prints the workers' lines."""
    (found,) = (child for child in psutil.Process(agent_pid).children() if FILTER in child.cmdline())
    return found


def test_equal_lines_are_one_also_after_a_restart(agents: Agents) -> None:
    """A rank's own lines, and those of both streams, are all there; a worker is killed after its last."""
    script = agents.script(
        SCRIPT
        + """
generation = os.environ["ELASTIC_RESUME_GENERATION"]
meet("first" + generation)
print("of all", generation, flush=True)
print("of all, stderr", generation, file=sys.stderr, flush=True)
print("of rank", rank, generation, flush=True)
if generation == "1":
    if rank == "1":
        os.kill(os.getpid(), 9)
    time.sleep(600)
print("end of", rank, end="", flush=True)
"""
    )
    code, log = agents.run(*RUN, script)
    assert code == 0, log
    lines = log.replace("end of 0", "").replace("end of 1", "").splitlines()
    workers = sorted(line for line in lines if line.startswith("of "))
    assert workers == sorted(
        line
        for generation in "12"
        for line in (
            *(f"of all {generation} [2 ranks]", f"of all, stderr {generation} [2 ranks]"),
            *(f"of rank 0 {generation}", f"of rank 1 {generation}"),
        )
    )
    assert (log.count("end of 0"), log.count("end of 1")) == (1, 1)


def test_killed_agent_loses_no_line(agents: Agents) -> None:
    """One rank's line is held while the agent is killed; the process prints it, and ends."""
    script = agents.script(
        SCRIPT
        + """
if rank == "0":
    print("of one", flush=True)
    pathlib.Path("printed").touch()
time.sleep(600)
"""
    )
    agent = agents.start(*RUN, script)
    wait_for((agents.directory / "printed").exists, "the line")
    process = find_filter(agent.pid)
    agent.kill()
    agent.wait()
    wait_for(lambda: not process.is_running() or process.status() == psutil.STATUS_ZOMBIE, "its end")
    assert "of one\n" in agents.log()


def test_killed_process_is_started_again(agents: Agents) -> None:
    """The workers print on, and do not notice."""
    script = agents.script(SCRIPT + "\nmeet('ready')\nwait_for('go')\nprint('of all', flush=True)\n")
    agent = agents.start(*RUN, script)
    wait_for((agents.directory / "ready-0").exists, "the workers")
    first = find_filter(agent.pid)
    first.kill()
    wait_for(lambda: "It is started again." in agents.log(), "the warning")
    (agents.directory / "go").touch()
    assert agent.wait(120) == 0
    assert "of all [2 ranks]\n" in agents.log()


def test_streams_in_files_stay_as_they_are(agents: Agents) -> None:
    """Stdout is redirected, stderr is not."""
    script = agents.script(
        SCRIPT + "\nmeet('ready')\nprint('out', flush=True)\nprint('err', file=sys.stderr, flush=True)\n"
    )
    code, log = agents.run(*RUN, "--log-dir=logs", "--redirects=1", script)
    assert code == 0, log
    files = sorted(Path(agents.directory / "logs").rglob("stdout.log"))
    assert [file.read_text() for file in files] == ["out\n", "out\n"]
    assert "err [2 ranks]\n" in log


def test_nothing_changes_without_the_flag_or_with_one_rank(agents: Agents) -> None:
    """The workers have the agent's own streams."""
    script = agents.script("import os; print(os.readlink('/proc/self/fd/1'), flush=True)")
    for flags in (["--nproc-per-node=2"], ["--collapse-output"]):
        code, log = agents.run(*flags, script)
        assert code == 0, log
        assert "pipe:" not in log
    assert agents.log().count(str(agents.directory / "a.log")) == 3
