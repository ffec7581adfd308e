"""Starts the ranks of a world by hand, as N nodes, without any agent.

They are forked from a zygote, as an agent's workers are: what a script does is the same
(tests/integration/test_forkserver.py), and minutes do not go into importing torch again and again.
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

THREAD_ENVIRONMENT = {"OMP_NUM_THREADS": "1"}  # which only a new process heeds: the zygote has to have it too


@functools.cache
def start_fork_server() -> str:
    """Start this process's zygote; give its name."""
    before = dict(os.environ)
    os.environ.update(THREAD_ENVIRONMENT)
    warmth = ForkServerManager([sys.executable, "-u", "x.py"])
    warmth.start()
    atexit.register(warmth.close)
    name = os.environ[constants.ENV_FORK_SERVER]
    os.environ.clear()
    os.environ.update(before)
    return name


def rank_environment(rank: int, world_size: int, port: int, **more: str) -> dict[str, str]:
    """What torchrun would set for ``rank`` of ``size``, each on a node of its own."""
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
    """Run ``script`` on every rank to its end; give what each printed.

    ``env``: more for each rank; ``stderr``: a descriptor in the place of a rank's, which is not read then.
    """
    port = find_free_port("")  # where rank 0's store listens, at all addresses
    started = [
        subprocess.Popen(
            [
                sys.executable,
                "-I",
                "-S",
                launcher_shim.__file__,
                "0",
                sys.executable,
                "-u",
                str(script),
                *args,
            ],
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
