"""``elastic-resume run`` with real agents, workers and signals.

The training scripts do not import torch: what is tested here is the agent, and torchelastic does not ask
its workers to.
"""

from __future__ import annotations

import os
import re
import shutil
import signal

import pytest

from elastic_resume import constants
from elastic_resume.testing.backends import find_free_port
from tests.support.agents import Agent, Agents
from tests.support.agents import agents as agents  # noqa: PLC0414  pytest finds fixtures by name
from tests.support.processes import is_alive, wait_for

pytestmark = pytest.mark.cluster

HOST = "127.0.0.1"


# Says that it is there, then waits until the test makes a file.
WAITS = """
import os, pathlib, signal, subprocess, sys, time
child = subprocess.Popen(["sleep", "600"], start_new_session=True)
pathlib.Path(f"child-{child.pid}").touch()
pathlib.Path(f"worker-{os.environ['ELASTIC_RESUME_NODE_NAME']}-{os.getpid()}").touch()
while not os.path.exists("finish"):
    time.sleep(0.02)
"""


# ---- whole jobs ----------------------------------------------------------------------------------------


def test_torchruns_flags_keep_their_meaning(agents: Agents) -> None:
    """Several ranks, macros, -m, log files, tee, error files, a range of restarts."""
    # Each line in one piece: unbuffered, who reads it between two words would show it as two.
    agents.script(
        "import os, sys; e = os.environ\n"
        'sys.stdout.write(f\'out {e["RANK"]} {e["TORCHELASTIC_MAX_RESTARTS"]} {sys.argv[1:]}\\n\')\n'
        "sys.stderr.write(f'err {e[\"TORCHELASTIC_ERROR_FILE\"]}\\n')\n"
    )
    flags = ["--nproc-per-node=2", "--log-dir=logs", "--tee=3", "--max-restarts=7"]
    code, log = agents.run(*flags, "-m", "train", "local=${local_rank}", "$x", OMP_NUM_THREADS="1")
    assert code == 0, log
    logs = agents.directory / "logs"
    for rank in (0, 1):
        line = f"out {rank} 7 ['local={rank}', '$x']"
        assert f"[default{rank}]:{line}" in log
        assert [line] == [p.read_text().strip() for p in logs.glob(f"*/attempt_0/{rank}/stdout.log")]
        (err,) = logs.glob(f"*/attempt_0/{rank}/stderr.log")
        named = agents.directory / err.read_text().strip().removeprefix("err ")  # absolute since Python 3.12
        assert named == err.with_name("error.json")


def test_no_python_program_starts_cold(agents: Agents) -> None:
    """Under --virtual-local-rank a variable of its own has the true local rank."""
    sh = shutil.which("sh") or "/bin/sh"
    script = "echo got $RANK $LOCAL_RANK $CUDA_VISIBLE_DEVICES $ELASTIC_RESUME_LOCAL_RANK"
    flags = ["--nproc-per-node=2", "--virtual-local-rank", "--no-python"]
    agent = agents.start(*flags, sh, "-c", script, warm=True, ELASTIC_RESUME_LOG_LEVEL="DEBUG")
    code, log = agent.wait(120), agents.log()
    assert code == 0, log
    assert log.count("workers start cold: --no-python") == 1
    assert {"got 0 0 0 0", "got 1 0 1 1"} <= set(log.splitlines())


def test_restart_without_resume_is_logged(agents: Agents) -> None:
    """The program, which is no Python, fails at its first start."""
    sh = shutil.which("sh") or "/bin/sh"
    script = "test -e failed || { touch failed; exit 3; }"
    code, log = agents.run("--no-python", sh, "-c", script)
    assert code == 0, log
    assert log.count("A script that never calls it saves nothing and starts over at each restart") == 1


def test_flags_beat_variables(agents: Agents) -> None:
    """Both torchrun's and ours."""
    # In one piece: unbuffered, two workers' words would mix.
    agents.script('import os; e = os.environ; print(f\'env {e["WORLD_SIZE"]} {e["ELASTIC_RESUME_KEEP"]}\')')
    flags = ["--nproc-per-node", "2", "--keep", "4", "--ckpt-dir", "elsewhere"]
    code, log = agents.run(*flags, "train.py", PET_NPROC_PER_NODE="3", ELASTIC_RESUME_KEEP="9")
    assert code == 0, log
    assert log.count("env 2 4") == 2
    assert (agents.directory / "elsewhere" / "train" / "a" / "events.jsonl").exists()


def test_quiet_run_prints_warnings_and_errors_only(agents: Agents) -> None:
    """Workers inherit it. A job that fails still says why."""
    agents.script("import os, sys; print('quiet', os.environ.get('ELASTIC_RESUME_QUIET')); sys.exit(9)")
    code, log = agents.run("--quiet", "train.py")
    assert code == 1
    lines = [line for line in log.splitlines() if line.startswith("elastic_resume")]
    assert "rank 0 ended with exit code 9; restarting." in lines[0]
    assert not [line for line in lines if "checkpoints in" in line]
    assert "3 starts in a row failed without progress" in lines[-1]
    assert "quiet 1" in log
    assert len(agents.events("generation-start")) == 3
    (end,) = agents.events("agent-end")
    assert (end["outcome"], end["exit_code"]) == ("failed", 1)


def test_run_ends_with_2_for_a_flag_that_the_rendezvous_refuses(agents: Agents) -> None:
    """Such a flag is judged when the node's directory is made already; its end is in the log of events."""
    agents.script("")
    flags = ["--nnodes", "1:2", "--rdzv-endpoint", f"{HOST}:{agents.port}", "--local-addr", "192.0.2.7"]
    code, log = agents.run(*flags, "train.py")
    assert code == 2, log
    assert "--local-addr 192.0.2.7 is not an address of this machine" in log.strip().splitlines()[-1]
    (end,) = agents.events("agent-end")
    assert (end["outcome"], end["exit_code"]) == ("failed", 2)


# A failure that ends the job, told as a real worker tells it: to the agent's memory and to the node's log.
FAULTY = """
import os, sys
from pathlib import Path
from elastic_resume.events import EventLog
path, memory = Path(os.environ["ELASTIC_RESUME_EVENTS_PATH"]), os.environ["ELASTIC_RESUME_EVIDENCE"]
log = EventLog(
    path, memory_path=memory, node=os.environ["ELASTIC_RESUME_NODE_NAME"], rank=int(os.environ["RANK"])
)
log.emit("failure", generation=int(os.environ["ELASTIC_RESUME_GENERATION"]), step=0, type="MismatchError",
          message="fc.weight is (3,) and was (4,)", frame="train.py:9", deterministic=True)
sys.exit(1)
"""


WRONG_USE = """
import os, sys
from pathlib import Path
from elastic_resume.events import EventLog
path, memory = Path(os.environ["ELASTIC_RESUME_EVENTS_PATH"]), os.environ["ELASTIC_RESUME_EVIDENCE"]
EventLog(path, memory_path=memory, node="a").emit(
    "failure", generation=None, rank=None, step=None, type="ConfigError",
    message="keep is 1, which is too few. Write 2 or more.", frame="", deterministic=True)
sys.exit(1)
"""


def test_wrong_use_ends_the_job_at_once_and_the_last_line_says_what_is_wrong(agents: Agents) -> None:
    """A worker that refuses its arguments knows neither rank nor generation; the stub knows the rank."""
    agents.script(WRONG_USE)
    code, log = agents.run("--nproc-per-node=2", "train.py", OMP_NUM_THREADS="1")
    assert code == 1
    assert len(agents.events("generation-start")) == 1
    said = (
        r"node a gave up: rank \d ended with exit code 1: ConfigError: keep is 1, which is too few\. Write 2"
    )
    last = log.strip().splitlines()[-1]
    assert re.search(said + r" or more\.( |$)", last), last
    assert log.count("keep is 1") == 1, "the last line alone"
    assert "Traceback" not in log


def test_signal_to_the_agent_stops_its_workers(agents: Agents) -> None:
    """Exit code 128 + signal, and nothing is left. test_graceful_shutdown.py sends the other signals."""
    agents.script(WAITS)
    agent = agents.start("--nproc-per-node=2", "train.py")
    pids = wait_for(lambda: len(agents.pids("worker")) == 2 and agents.pids("worker"), "two workers")
    agent.send_signal(signal.SIGHUP)
    assert agent.wait(60) == 128 + signal.SIGHUP
    wait_for(lambda: not any(map(is_alive, [*pids, *agents.pids("child")])), "workers and children to die")
    (end,) = agents.events("agent-end")
    assert (end["outcome"], end["exit_code"]) == ("signalled", 128 + signal.SIGHUP)


def test_signal_during_rendezvous_ends_agent(agents: Agents) -> None:
    """A rendezvous may last minutes."""
    agents.script(WAITS)
    agent = agents.start("--nnodes=2", "--rdzv-endpoint", f"127.0.0.1:{find_free_port(HOST)}", "train.py")
    wait_for(
        lambda: any(event["what"] == "waiting" for event in agents.events("rendezvous")), "the agent to join"
    )
    agent.send_signal(signal.SIGTERM)
    assert agent.wait(60) == 143
    assert agents.events("agent-end")[0]["outcome"] == "signalled"


def test_second_agent_with_same_node_name_is_rejected(agents: Agents) -> None:
    """The message names the first agent, which continues."""
    agents.script(WAITS)
    first = agents.start("train.py")
    wait_for(lambda: agents.pids("worker"), "a worker")
    printed = len(agents.log())
    assert agents.start("train.py").wait(60) == constants.EXIT_MACHINE_ERROR  # elsewhere it would start
    (line,) = agents.log()[printed:].splitlines()
    assert f"is held by process {first.pid} " in line
    (agents.directory / "finish").touch()
    assert first.wait(60) == 0


# ---- two nodes -----------------------------------------------------------------------------------------


def start_two(
    agents: Agents,
    more: tuple[str, ...] = (),
    host: str = "127.0.0.1",
    addresses: tuple[str, ...] = ("127.0.0.1", "127.0.0.2"),
) -> list[Agent]:
    """Two agents as two nodes of one job."""
    agents.port = find_free_port(HOST)
    meet = f"{host}:{agents.port}"
    own = [["--local-addr", address] for address in addresses] or [[], []]
    return [start_one(agents, node, meet, *own[i], *more) for i, node in enumerate("ab")]


def start_one(agents: Agents, node: str, meet: str, *flags: str) -> Agent:
    """One of two."""
    return agents.start("--nnodes=2", "--rdzv-endpoint", meet, *flags, "train.py", node=node)


def test_two_nodes_continue_after_worker_is_killed(agents: Agents) -> None:
    """Both restart and both end with 0."""
    agents.script(WAITS)
    two = start_two(agents)
    wait_for(lambda: agents.pids("worker-a") and agents.pids("worker-b"), "two workers")
    first = agents.pids("worker-b")
    os.kill(first[0], signal.SIGKILL)
    wait_for(lambda: len(agents.pids("worker-a")) == len(agents.pids("worker-b")) == 2, "two new workers")
    (agents.directory / "finish").touch()
    assert [agent.wait(60) for agent in two] == [0, 0]
    sizes = {
        node: [(e["generation"], e["num_nodes"]) for e in agents.events("generation-start", node)]
        for node in "ab"
    }
    assert sizes == {"a": [(1, 2), (2, 2)], "b": [(1, 2), (2, 2)]}
    (killed,) = [e for e in agents.events("worker-exit", "b") if e["signal"]]
    assert (killed["worker_pid"], killed["signal"], killed["stopped"]) == (first[0], "SIGKILL", False)
    (stopped,) = [e for e in agents.events("worker-exit", "a") if e["generation"] == 1]
    assert stopped["stopped"] is True
    assert "was killed by SIGKILL; restarting" in agents.log("b")
    assert "rank 1 on node b was killed by SIGKILL; restarting." in agents.log("a")


@pytest.mark.parametrize(
    ("host", "addresses"), [("[::1]", ("::1", "::1")), pytest.param("localhost", (), marks=pytest.mark.soak)]
)
def test_two_agents_of_one_machine_meet(agents: Agents, host: str, addresses: tuple[str, ...]) -> None:
    """By IPv6 or by name; the second one finds the candidate's port held by the first, and joins it."""
    agents.script(WAITS)
    two = start_two(agents, host=host, addresses=addresses)
    wait_for(lambda: agents.pids("worker-a") and agents.pids("worker-b"), "two workers")
    (agents.directory / "finish").touch()
    assert [agent.wait(60) for agent in two] == [0, 0]


def test_job_ends_on_both_nodes_when_the_leader_gives_up(agents: Agents) -> None:
    """Exit code 1."""
    agents.script(
        f"import os\nif os.environ['ELASTIC_RESUME_NODE_NAME'] == 'a':\n    exec({FAULTY!r})\n" + WAITS
    )
    two = start_two(agents)
    assert [agent.wait(60) for agent in two] == [1, 1]
    for node in "ab":
        last = agents.log(node).strip().splitlines()[-1]
        assert "node a gave up: " in last
        assert "MismatchError: fc.weight" in last
    wait_for(lambda: not any(map(is_alive, agents.pids("worker"))), "workers to die")
    assert agents.events("agent-end", "a")[0]["message"].count("MismatchError") == 1


def test_join_timeout_exits_with_requeue_code(agents: Agents) -> None:
    """One of two nodes is lost and both are needed: exit code 75."""
    agents.script(WAITS)
    meet = f"{HOST}:{find_free_port(HOST)}"
    first = start_one(agents, "a", meet, "--local-addr", HOST)
    wait_for(lambda: agents.events("rendezvous"), "the first to wait: its start takes nothing of the time")
    second = start_one(agents, "b", meet, "--local-addr", "127.0.0.2", "--rdzv-conf=join_timeout=3")
    wait_for(lambda: agents.pids("worker-a") and agents.pids("worker-b"), "two workers")
    first.kill()
    code = second.wait(60)
    log = agents.log("b")
    assert code == 75, log
    last = log.strip().splitlines()[-1]
    assert "no rendezvous within 3 s: 1 of at least 2 nodes have joined" in last


def test_torch_backend_is_replaced_by_ours(agents: Agents) -> None:
    """The survivor of two continues, which torch's own could not do without its host."""
    agents.script(WAITS)
    conf = "is_host=1,timeout=60,cas_backoff_max_seconds=0.5"
    two = start_two(agents, more=("--nnodes=1:2", "--rdzv-backend", "c10d", "--rdzv-conf", conf))
    wait_for(lambda: agents.pids("worker-a") and agents.pids("worker-b"), "two workers")
    two[0].kill()
    wait_for(lambda: len(agents.pids("worker-b")) == 2, "another worker")
    (agents.directory / "finish").touch()
    assert two[1].wait(60) == 0
    assert "--rdzv-conf cas_backoff_max_seconds, is_host: has no effect here." in agents.log("b")


def test_run_with_master_addr_and_node_rank_orders_the_nodes(agents: Agents) -> None:
    """Torchrun's static command line: nodes meet at the master's address, ranks follow --node-rank."""
    agents.script("import os; print(f\"node {os.environ['GROUP_RANK']}\")")
    flags = ["--nnodes=2", "--master-addr", HOST, "--master-port", str(find_free_port(HOST))]
    own = [["--node-rank=1", "--local-addr=127.0.0.2"], ["--node-rank=0", f"--local-addr={HOST}"]]
    two = [agents.start(*flags, *own[i], "train.py", node=node) for i, node in enumerate("ab")]
    assert [agent.wait(60) for agent in two] == [0, 0]
    assert "node 1" in agents.log("a")
    assert "node 0" in agents.log("b")
