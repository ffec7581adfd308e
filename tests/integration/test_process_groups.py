"""The end of the process groups of er.resume: no gloo thread is left, and no peer delays it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from elastic_resume import constants
from elastic_resume.agent.workers import launcher_shim
from elastic_resume.testing.backends import find_free_port
from tests.support import launch_ranks
from tests.support.processes import wait_for, wait_for_pid

pytestmark = pytest.mark.slow

SCRIPT = """
import atexit, os, signal, sys, time, weakref
from pathlib import Path

def threads():
    found = 0
    for name in Path("/proc/self/task").glob("*/comm"):
        try:
            found += "gloo_runloop" in name.read_text()
        except OSError:  # the thread has just ended
            pass
    return found

@atexit.register  # first, so it is called last, but before the interpreter ends
def print_threads():
    limit = time.monotonic() + 10
    while threads() > int(sys.argv[2]) and time.monotonic() < limit:
        time.sleep(0.01)  # a joined thread may be listed for another moment
    print("threads", threads(), "our group", ours(), flush=True)

import torch, torch.distributed as dist, elastic_resume as er

torch.set_num_threads(1)
if "own" in sys.argv:
    dist.init_process_group("gloo")
model = torch.nn.Linear(2, 2)
run = er.resume(
    model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), ckpt_dir=sys.argv[1], run_id="job"
)
assert threads(), "gloo calls its threads otherwise: count those"
ours = weakref.ref(run._generation.context.collectives._group)
if "destroyed" in sys.argv:
    dist.destroy_process_group()
if "stop" in sys.argv:
    if run.rank == 1:
        Path(sys.argv[1]).with_name("stopping").write_text(str(os.getpid()))
        os.kill(os.getpid(), signal.SIGSTOP)
    if "pending" in sys.argv:  # as in a script that ends by an error in the middle of things
        work = dist.all_reduce(torch.ones(1), group=run._generation.context.collectives._group, async_op=True)
run.close()
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """The script in a file."""
    path = tmp_path / "job.py"
    path.write_text(SCRIPT)
    return path


def start_ranks(script: Path, *words: str) -> list[subprocess.Popen[str]]:
    """Start two ranks as an agent's workers, whose interpreters end as usual."""
    port, fork_server = find_free_port(""), launch_ranks.start_fork_server()
    shim = [sys.executable, "-I", "-S", launcher_shim.__file__, "0"]
    return [
        subprocess.Popen(
            [*shim, sys.executable, "-u", str(script), *words],
            env=launch_ranks.rank_environment(rank, 2, port) | {constants.ENV_FORK_SERVER: fork_server},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]


@pytest.mark.parametrize(
    ("how", "left"),
    [
        (["ours"], 0),
        (["own"], 2),  # the script's own group
        (["own", "destroyed"], 2),  # or none: the first ranks of a test process see torch keep that group
        (["ours", "destroyed"], 0),
    ],
)
def test_exit_joins_gloo_threads_before_interpreter_ends(
    how: list[str], left: int, script: Path, tmp_path: Path
) -> None:
    """A gloo thread that frees a tensor later aborts the process."""
    for rank in start_ranks(script, str(tmp_path / "kept"), str(left), *how):
        stdout, stderr = rank.communicate(timeout=120)
        assert rank.returncode == 0, stderr
        counts = {0, left} if "destroyed" in how else {left}
        assert stdout.splitlines()[-1] in {f"threads {n} our group None" for n in counts}, stderr


@pytest.mark.parametrize("how", [["ours"], ["own", "pending"]])
def test_exit_does_not_wait_for_stopped_peer(how: list[str], script: Path, tmp_path: Path) -> None:
    """Gloo itself would wait half an hour for a pending collective."""
    stopping = tmp_path / "stopping"
    peers = start_ranks(script, str(tmp_path / "kept"), "99", "stop", *how)
    try:
        # The fork server may have to import torch first, which takes long on a loaded machine.
        wait_for(stopping.exists, "rank 1 to be about to stop", timeout_s=120)
        stopped = psutil.Process(wait_for_pid(stopping))
        wait_for(lambda: stopped.status() == psutil.STATUS_STOPPED, "rank 1 to stop")
        _, stderr = peers[0].communicate(timeout=60)
        assert peers[0].returncode == 0, stderr
    finally:
        for peer in peers:
            peer.kill()
            peer.communicate()
