"""Start the ranks of a world as N nodes without any agent.

They are forked from a fork server, like an agent's workers (tests/integration/test_forkserver.py), which
saves the import of torch.
"""

from __future__ import annotations

import atexit
import functools
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from elastic_resume import constants
from elastic_resume.agent.workers import launcher_shim
from elastic_resume.agent.workers.forkserver_manager import ForkServerManager
from elastic_resume.testing.backends import find_free_port

THREAD_ENVIRONMENT = {"OMP_NUM_THREADS": "1"}  # only a new process reads it, so the fork server needs it too


@functools.cache
def start_fork_server() -> str:
    """Start the fork server of this process; return its name."""
    before = dict(os.environ)
    os.environ.update(THREAD_ENVIRONMENT)
    manager = ForkServerManager([sys.executable, "-u", "x.py"])
    manager.start()
    atexit.register(manager.close)
    name = os.environ[constants.ENV_FORK_SERVER]
    os.environ.clear()
    os.environ.update(before)
    return name


def rank_environment(rank: int, world_size: int, port: int, **more: str) -> dict[str, str]:
    """Return the variables that torchrun sets for a rank that is alone on its node."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("ELASTIC_RESUME_", "TORCHELASTIC_"))}
    return {
        **kept,
        "RANK": str(rank),
        "LOCAL_RANK": "0",
        "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "lo",
        **THREAD_ENVIRONMENT,
        "ELASTIC_RESUME_NODE_NAME": f"n{rank}",
        **more,
    }


def run_ranks(
    world_size: int,
    script: Path | str,
    *args: str,
    env: Sequence[Mapping[str, str]] = (),
    stderr: Mapping[int, int] | None = None,
    timeout_s: float = 120,
) -> list[subprocess.CompletedProcess[str]]:
    """Run ``script`` on every rank to its end; return the output of each.

    ``env``: further variables of each rank. ``stderr``: descriptors that replace a rank's stderr.
    """
    port = find_free_port("")  # rank 0's store listens at all addresses
    shim = [sys.executable, "-I", "-S", launcher_shim.__file__, "0"]
    started = [
        subprocess.Popen(
            [*shim, sys.executable, "-u", str(script), *args],
            env={
                **rank_environment(rank, world_size, port, **(env[rank] if env else {})),
                constants.ENV_FORK_SERVER: start_fork_server(),
            },
            stdout=subprocess.PIPE,
            stderr=(stderr or {}).get(rank, subprocess.PIPE),
            text=True,
        )
        for rank in range(world_size)
    ]
    done = []
    try:
        for process in started:
            out, err = process.communicate(timeout=timeout_s)
            done.append(subprocess.CompletedProcess(process.args, process.returncode, out, err))
    finally:
        for process in started:
            process.kill()
            process.wait()
    return done
