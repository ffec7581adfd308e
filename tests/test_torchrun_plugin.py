"""`torchrun --rdzv-backend=elastic_resume`: our rendezvous without our agent."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.cluster

SCRIPT = Path(__file__).parent / "jobs" / "heart.py"
Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start torchrun as a node; all are killed in the end."""
    running: list[subprocess.Popen[str]] = []
    network = f"127.{1 + secrets.randbelow(253)}.{secrets.randbelow(256)}"
    (tmp_path / "hearts").mkdir()

    def node(index: int, *, workers: int = 1, conf: str = "settle=60") -> subprocess.Popen[str]:
        words = [
            *(
                sys.executable,
                "-m",
                "torch.distributed.run",
                "--nnodes",
                "1:2",  # the first world begins when both are there, whoever was late
                "--nproc-per-node",
                str(workers),
            ),
            *("--rdzv-backend", "elastic_resume", "--rdzv-endpoint", f"{network}.1,{network}.2"),
            *("--rdzv-conf", conf, "--rdzv-id", "plug", "--local-addr", f"{network}.{index}"),
            *(str(SCRIPT), str(tmp_path / "hearts")),
        ]
        own = {
            "ELASTIC_RESUME_NODE_NAME": f"n{index}",
            "ELASTIC_RESUME_CKPT_DIR": str(tmp_path / f"d{index}"),
        }
        env = {**os.environ, **own, "OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(
            words,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        running.append(process)
        return process

    yield node
    (tmp_path / "hearts" / "stop").touch()  # workers of a torchrun that was killed live on
    for process in running:
        process.kill()
        process.communicate()


def wait_for_beats(directory: Path, *names: str) -> None:
    """Wait until these workers, of whatever generation, beat."""
    deadline = time.monotonic() + 60
    while True:
        there = {path.name.partition("-")[2].removesuffix(".beats") for path in directory.glob("*.beats")}
        if set(names) <= there:
            return
        assert time.monotonic() < deadline, f"waited for {names}, there are {sorted(there)}"
        time.sleep(0.02)


def test_nodes_with_different_numbers_of_workers_survive_a_loss(start: Start, tmp_path: Path) -> None:
    """Ranks follow the nodes' order; SIGKILL of one torchrun leaves the other training."""
    hearts = tmp_path / "hearts"
    nodes = [start(1, workers=1), start(2, workers=2)]
    wait_for_beats(hearts, "n1-0-3", "n2-1-3", "n2-2-3")
    nodes[0].kill()
    wait_for_beats(hearts, "n2-0-2", "n2-1-2")
    (hearts / "stop").touch()
    said, _ = nodes[1].communicate(timeout=60)
    assert nodes[1].returncode == 0, said
    assert "n1 died" in said or "n1, which led, died" in said


def test_a_wrong_setting_is_an_error_that_names_it(start: Start) -> None:
    """What --rdzv-conf says for c10d means nothing here."""
    said, _ = start(1, conf="last_call_timeout=3").communicate(timeout=60)
    assert "last_call_timeout belongs to another rendezvous" in said
