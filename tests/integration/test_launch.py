"""`er.launch` from scripts and notebooks, with real kernels, agents and workers."""

from __future__ import annotations

import ast
import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from elastic_resume.testing.backends import find_free_port
from tests.docs import test_blocks
from tests.support import launch_ranks
from tests.support.paths import ROOT
from tests.support.processes import is_alive, wait_for, wait_for_pid

pytestmark = pytest.mark.cluster
LAUNCHED = ROOT / "tests" / "support" / "launched.py"

TRAIN = """
import elastic_resume as er
import torch
torch.nn.Linear(64, 64)(torch.randn(64, 64)).sum().backward()  # this process has threads of torch from now on

class Settings:
    kills = False

learning_rate = 0.2

def train(settings):
    import os, pathlib, signal
    torch.manual_seed(0)
    samples = torch.utils.data.TensorDataset(torch.randn(64, 8), torch.arange(64) % 2)
    batches = er.GlobalBatches(64, global_batch=8, seed=0)
    model = torch.nn.Linear(8, 2)
    optimizer = torch.optim.SGD(model.parameters(), learning_rate)
    run = er.resume(model=model, optimizer=optimizer, data=batches)
    ddp = run.ddp(model)
    for epoch in run.epochs(2):
        for inputs, labels in torch.utils.data.DataLoader(samples, batch_sampler=batches):
            loss = torch.nn.functional.cross_entropy(ddp(inputs), labels) * run.loss_weight
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            run.step()
            marker = pathlib.Path("killed")
            if settings.kills and run.rank == 1 and run.position.step == 5 and not marker.exists():
                marker.touch()
                os.kill(os.getpid(), signal.SIGKILL)
    run.close()
    print(f"rank {run.rank} prints into the cell")
    return settings, [parameter.detach().clone() for parameter in model.parameters()]
"""
ALONE = """
import os
_, weights = train(Settings())
torch.save(weights, f"calm-{os.environ['RANK']}")
"""
CALM = """
if __name__ == "__main__":
    results = er.launch(train, (Settings(),), nproc_per_node=2, rdzv_id="calm", check_replicas="off")
    assert all(type(settings) is Settings for settings, _ in results.values())
    torch.save({rank: weights for rank, (_, weights) in results.items()}, "calm")
"""
KILL = """
before = signal.getsignal(signal.SIGINT), dict(os.environ), threading.active_count()
Settings.kills = True
killed = er.launch(train, (Settings(),), nproc_per_node=2, rdzv_id="killed", snapshot_every=1)
assert before == (signal.getsignal(signal.SIGINT), dict(os.environ), threading.active_count())
assert os.path.exists("killed") and sorted(killed) == [0, 1]
assert type(killed[0][0]) is Settings
torch.save({rank: weights for rank, (_, weights) in killed.items()}, "results")
"""
FAIL = """
def fail(text):
    if int(os.environ["RANK"]) == 1:
        raise ValueError(f"no {text}")
    torch.distributed.init_process_group()
    torch.distributed.barrier()

try:
    er.launch(fail, ("way",), nproc_per_node=2, rdzv_id="fail", max_restarts=0)
except er.errors.LaunchError as error:
    print(error.rank, error.error_type, error.exit_code, error.node != "")
    print("with source:", 'raise ValueError(f"no' in str(error))
"""
INTERRUPTED = f"""
import sys
sys.path.insert(0, {str(LAUNCHED.parent)!r})
import launched
er.launch(launched.train, (launched.Limits(100_000), "."), rdzv_id="long")
"""


def run_notebook(directory: Path, *cells: str, marker: str = "") -> list[str]:
    """Execute cells in ``directory``, and return what each has printed."""
    (directory / "cells").write_text(json.dumps(cells))
    command = [sys.executable, "-m", "tests.support.notebook", "cells", "outputs", *filter(None, [marker])]
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    environ.pop("JPY_SESSION_NAME", None)
    done = subprocess.run(
        command, cwd=directory, env=environ, check=False, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr
    outputs: list[str] = json.loads((directory / "outputs").read_text())
    return outputs


def read_readme() -> str:
    """Return README's first block as a function, after the objects that a reader has, and its launch."""
    block = next(block for block in test_blocks.BLOCKS if block.page == "README.md" and block.is_fragment)
    objects = test_blocks.PREFACE.partition("\nshards = ")[0]
    body = textwrap.indent(objects + block.code, "    ")
    cell = f"def port():\n{body}    return model.module.state_dict()\n"
    return cell + 'print(er.launch(port, nproc_per_node=2, rdzv_id="readme")[1].keys())'


def start(directory: Path, script: Path = LAUNCHED, **settings: Any) -> subprocess.Popen[str]:
    """Start a script that calls `launch`."""
    command = [sys.executable, str(script), str(directory), json.dumps(settings)]
    return subprocess.Popen(
        command,
        cwd=directory,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        stdin=subprocess.DEVNULL,
    )


@pytest.fixture(scope="module")
def notebook(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """Run a notebook, whose last cell is interrupted; return its directory and what its cells print."""
    directory = tmp_path_factory.mktemp("notebook")
    cells = ("import os\nimport elastic_resume as er\nimport torch", FAIL, INTERRUPTED)
    return directory, run_notebook(directory, *cells, marker="pid-0")


@pytest.fixture(scope="module")
def calm_weights(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[torch.Tensor]]:
    """Run the notebook's function on ranks that no agent starts and nobody kills; return their weights."""
    directory = tmp_path_factory.mktemp("alone")
    (directory / "calm.py").write_text(TRAIN + ALONE)
    env = [{"ELASTIC_RESUME_CKPT_DIR": str(directory)}] * 2
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(directory)
        ranks = launch_ranks.run_ranks(2, directory / "calm.py", env=env)
    assert [done.returncode for done in ranks] == [0, 0], ranks[0].stderr
    return {rank: torch.load(directory / f"calm-{rank}") for rank in range(2)}


def check_weights(results: Path, expected: dict[int, list[torch.Tensor]]) -> None:
    """Check the weights that each rank has returned."""
    weights = torch.load(results)
    assert weights.keys() == expected.keys() == {0, 1}
    for rank, tensors in expected.items():
        assert all(map(torch.equal, weights[rank], tensors)), rank


def test_notebook_function_survives_kill_and_returns_exact_results(
    tmp_path: Path, calm_weights: dict[int, list[torch.Tensor]]
) -> None:
    """The function, a class and a global of the cell reach each worker. The cell gets lines and errors."""
    setup = "import os, signal, threading" + TRAIN
    _, killed, unnamed = run_notebook(tmp_path, setup, KILL, "er.launch(train, (1,))")
    assert "rank 1 was killed by SIGKILL; restarting." in killed
    assert "rank 1 prints into the cell" in killed
    check_weights(tmp_path / "results", calm_weights)
    assert "ConfigError: launch() cannot find the name of this notebook" in unnamed


@pytest.mark.soak  # unit/launching/test_call_memory.py and test_command_of_function.py have each part
def test_script_is_imported_again_for_its_function_and_class(
    tmp_path: Path, calm_weights: dict[int, list[torch.Tensor]]
) -> None:
    """Its checkpoints are beside it."""
    (tmp_path / "calm.py").write_text(TRAIN + CALM)
    with start(tmp_path, tmp_path / "calm.py") as caller:
        _, errors = caller.communicate(timeout=250)
    assert caller.returncode == 0, errors
    assert (tmp_path / "checkpoints" / "calm").is_dir()
    check_weights(tmp_path / "calm", calm_weights)


@pytest.mark.soak  # unit/launching/test_launcher.py raises from what ranks have stored
def test_failed_job_raises_in_notebook(notebook: tuple[Path, list[str]]) -> None:
    """The error has rank, kind and exit code, and the line of the cell."""
    _, (_, failed, _) = notebook
    assert "1 ValueError 1 True" in failed
    assert "with source: True" in failed


@pytest.mark.soak
def test_first_block_of_readme_runs_in_notebook(tmp_path: Path) -> None:
    """With its own DistributedDataParallel, loader and sampler."""
    _, output = run_notebook(tmp_path, "import elastic_resume as er", read_readme())
    assert "odict_keys(['weight', 'bias'])" in output, output


@pytest.mark.soak
def test_blocks_of_guide_run_in_notebook(tmp_path: Path) -> None:
    """One after the other, as a reader types them; start.py is a script of its own."""
    blocks = [block for block in test_blocks.BLOCKS if block.page == "docs/guides/notebooks.md"]
    cells = [block.text for block in blocks if block.language == "python" and not block.file]
    outputs = run_notebook(tmp_path, *cells, "weights.keys()")
    assert not any("Error" in output for output in outputs), outputs
    names = {path.name for path in (tmp_path / "checkpoints").iterdir()}
    assert names == {"digits", "digits-0.1", "digits-0.2"}


@pytest.mark.soak  # test_run_command.py has a signal to the agent, the next test a caller that ends
def test_interrupted_notebook_ends_job_and_raises(notebook: tuple[Path, list[str]]) -> None:
    """The agent gets the interrupt once, saves the last step, and leaves no process."""
    directory, (*_, output) = notebook
    assert "KeyboardInterrupt" in output, output
    assert "is saved in" in output, output
    assert not is_alive(int((directory / "pid-0").read_text()))


def test_job_of_killed_caller_ends(tmp_path: Path) -> None:
    """All of it, and in order. Its name is that of the function."""
    with start(tmp_path, steps=100_000) as caller:
        worker = wait_for_pid(tmp_path / "pid-0")
        job = psutil.Process(caller.pid).children(recursive=True)
        assert worker in {process.pid for process in job}
        caller.kill()
        try:
            wait_for(lambda: not any(is_alive(process.pid) for process in job), "the end of the job", 120.0)
        finally:
            for process in filter(psutil.Process.is_running, job):
                process.kill()
    log = next((tmp_path / "checkpoints" / "launched.train").iterdir()) / "events.jsonl"
    kinds = [json.loads(line)["event"] for line in log.read_text().splitlines()]
    assert "agent-end" in kinds  # it has ended in order, and was not killed


@pytest.mark.soak
def test_two_callers_with_one_call_are_two_nodes(tmp_path: Path) -> None:
    """Each gets the results of its own ranks."""
    addresses = [f"127.0.0.{number + 1}" for number in range(2)]
    endpoints = [f"{address}:{find_free_port(address)}" for address in addresses]
    common: dict[str, Any] = {"nnodes": 2, "rdzv_endpoint": endpoints, "rdzv_id": "two"}
    nodes = []
    for number, address in enumerate(addresses):
        directory = tmp_path / f"n{number}"
        directory.mkdir()
        own: dict[str, Any] = {"node_name": f"n{number}", "local_addr": address}
        nodes.append(start(directory, **common, **own, ckpt_dir=str(directory), nproc_per_node=1))
    done = [node.communicate(timeout=250) for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], done
    merged: dict[str, list[int]] = {}
    for output, _ in done:
        merged |= json.loads(output.splitlines()[-1])
    assert merged == {"0": [8, 2], "1": [8, 2]}


@pytest.mark.soak
@pytest.mark.parametrize(
    ("call", "message"),
    [
        ("er.launch(lambda: (i for i in range(3)))", "rank 0 has returned a generator, which cannot be sent"),
        (
            "er.launch(launched.train, (1, '.'), nproc_pernode=2)",
            "unknown flag --nproc-pernode. Did you mean --nproc-per-node",
        ),
        ("er.launch(launched.train, (1, '.'), keep=0)", "--keep is 0"),
        ("er.launch(launched.die, max_restarts=0)", "killed by SIGKILL"),
    ],
)
def test_wrong_call_raises_in_caller(tmp_path: Path, call: str, message: str) -> None:
    """Each error names what is wrong; a script is used, so that no kernel has to start."""
    guard = "if __name__ == '__main__':"
    path = f"sys.path.insert(0, {str(LAUNCHED.parent)!r})"
    (tmp_path / "script.py").write_text(
        f"import os, sys\n{path}\nimport elastic_resume as er, launched\n{guard}\n    {call}\n"
    )
    with start(tmp_path, tmp_path / "script.py") as caller:
        _, errors = caller.communicate(timeout=250)
    assert caller.returncode == 1
    assert message in errors


@pytest.mark.soak
@pytest.mark.parametrize("no_warm", [False, True])
def test_restartable_function_and_cold_worker(tmp_path: Path, *, no_warm: bool) -> None:
    """The survivor's result is of the last generation, and a worker that starts cold finds the call too."""
    function = """
import functools, os, pathlib, signal, sys
sys.path.insert(0, DIRECTORY)
import elastic_resume as er, launched
if __name__ == "__main__":
    results = er.launch(launched.train_in_process, nproc_per_node=2, snapshot_every=1, no_warm=NO_WARM)
    print(results)
"""
    function = function.replace("DIRECTORY", repr(str(LAUNCHED.parent))).replace("NO_WARM", str(no_warm))
    (tmp_path / "script.py").write_text(function)
    with start(tmp_path, tmp_path / "script.py") as caller:
        output, errors = caller.communicate(timeout=250)
    assert caller.returncode == 0, errors
    survivor, other = ast.literal_eval(output.splitlines()[-1]).values()
    assert survivor[0] >= 2, "it was not called again"
    assert (survivor[1], other[1]) == (16, 16)


@pytest.mark.soak
def test_script_without_guard_is_told(tmp_path: Path) -> None:
    """Else each worker would start a job, and so on."""
    (tmp_path / "script.py").write_text("import elastic_resume as er\ndef f(): pass\ner.launch(f)\n")
    with start(tmp_path, tmp_path / "script.py") as caller:
        _, errors = caller.communicate(timeout=250)
    assert "LaunchError" in errors
    assert "put the call under if __name__ ==" in errors


@pytest.mark.soak
def test_interrupt_of_terminal_reaches_job_once(tmp_path: Path) -> None:
    """A script's process group gets SIGINT from a terminal; the agent is in a session of its own."""
    with start(tmp_path, rdzv_id="long", steps=100_000) as caller:
        wait_for_pid(tmp_path / "pid-0")
        caller.send_signal(signal.SIGINT)
        _, errors = caller.communicate(timeout=250)
    assert caller.returncode == -signal.SIGINT
    assert "KeyboardInterrupt" in errors
    assert "is saved in" in errors


@pytest.mark.soak
def test_worker_may_launch_a_job_of_its_own(tmp_path: Path) -> None:
    """As an evaluation. Its name is that of the job and the rank around it."""
    (tmp_path / "script.py").write_text(
        "import os, elastic_resume as er\n"
        "def answer(): return os.environ['ELASTIC_RESUME_RUN_ID']\n"
        "if __name__ == '__main__': print('said', er.launch(answer))\n"
    )
    command = [sys.executable, "-m", "elastic_resume", "run", "--rdzv-id", "outer", "script.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=250)
    assert "said {0: 'outer-r0-" in done.stdout, done.stdout + done.stderr


@pytest.mark.soak
def test_function_below_the_guard_is_told(tmp_path: Path) -> None:
    """No worker finds it, and none tries again."""
    (tmp_path / "script.py").write_text(
        "import elastic_resume as er\n"
        "if __name__ == '__main__':\n"
        "    def late(): pass\n"
        "    er.launch(late, rdzv_id='late')\n"
    )
    with start(tmp_path, tmp_path / "script.py") as caller:
        _, errors = caller.communicate(timeout=250)
    assert "LaunchError" in errors
    assert errors.count("Define it at the top level of its module") == 1
