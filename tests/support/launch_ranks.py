"""Start the ranks of a world as N nodes without any agent.

They are forked from the process that forks the agents of simulated nodes, which saves the import of torch.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from elastic_resume.testing import fork_server
from elastic_resume.testing.backends import find_free_port
from tests.support import processes
from tests.support.paths import ROOT

RANK_PROGRAM = Path(__file__).with_name("rank_process.py")
THREAD_ENVIRONMENT = {"OMP_NUM_THREADS": "1"}  # only a new process reads it, so the fork server needs it too


_preforked: dict[str, fork_server.AgentProcess] = {}  # name of a fork server -> the process that forked it


def start_fork_server() -> str:
    """Return the name of a fork server as an agent has it: forked from a process that was forked itself.

    It serves all tests of this process. It ends with the process from which all are forked.
    """
    for name, process in _preforked.items():
        if process.poll() is None:
            return name
    with tempfile.NamedTemporaryFile() as output:
        command = [sys.executable, "-m", "tests.support.preforked_server"]
        started = fork_server.start(command, {**os.environ, **THREAD_ENVIRONMENT}, output.file, cwd=ROOT)
        assert started is not None
        path = Path(output.name)
        processes.wait_for(lambda: path.read_text().endswith("\n"), "a fork server", 120)
        _preforked[name := path.read_text().splitlines()[-1]] = started
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
    timeout_s: float = 120,
) -> list[subprocess.CompletedProcess[str]]:
    """Run ``script`` on every rank to its end; return the output of each.

    ``env``: further variables of each rank.
    """
    port = find_free_port("")  # rank 0's store listens at all addresses
    with tempfile.TemporaryDirectory(prefix="ranks-") as directory:
        environs = [
            rank_environment(rank, world_size, port, **(env[rank] if env else {}))
            for rank in range(world_size)
        ]
        outputs = [Path(directory, str(rank)) for rank in range(world_size)]
        words = [str(script), *args]
        started = [start_rank(*each, words) for each in zip(outputs, environs, strict=True)]
        try:
            codes = [process.wait(timeout_s) for process in started]
        except subprocess.TimeoutExpired as error:
            stacks = [output.with_suffix(".err").read_text() for output in outputs]
            raise AssertionError(f"{error}\n" + "\n".join(stacks)) from error
        finally:
            for process in started:
                process.kill()
                process.wait()
        texts = [[output.with_suffix(end).read_text() for end in (".out", ".err")] for output in outputs]
    return [subprocess.CompletedProcess(words, code, *text) for code, text in zip(codes, texts, strict=True)]


def read_results(ranks: Iterable[subprocess.CompletedProcess[str]]) -> list[Any]:
    """Return what each rank printed at its end."""
    results = []
    for done in ranks:
        assert done.returncode == 0, done.stderr
        results.append(json.loads(done.stdout.splitlines()[-1]))
    return results


def check_kinds(results: list[dict[str, dict[str, Any]]], count: int) -> None:
    """Check that every rank has resumed ``count`` kinds of models in their middle, bit for bit."""
    for rank, kinds in enumerate(results):
        assert len(kinds) == count
        for kind, result in kinds.items():
            assert "error" not in result, f"{kind}, rank {rank}: {result['error']}"
            assert result["began"] == 3, f"{kind}: not resumed in its middle"
            assert not result["differ"], f"{kind}, rank {rank}: {result['differ']}"
            assert result["losses"], f"{kind}, rank {rank}: another loss"


def start_rank(output: Path, env: Mapping[str, str], words: list[str]) -> fork_server.AgentProcess:
    """Start one rank, which writes to ``output`` with the suffixes ``.out`` and ``.err``."""
    command = [sys.executable, str(RANK_PROGRAM), str(output.with_suffix(".err")), *words]
    with output.with_suffix(".out").open("wb") as file:
        return fork_server.start(command, env, file) or subprocess.Popen(command, env=env, stdout=file)
