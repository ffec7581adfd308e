"""Test that a full disk stops a new job at its start, but not a job that has made progress."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.support import launch_ranks

TRAIN = """
import resource, sys, torch
import elastic_resume as er
torch.manual_seed(1)
model = torch.nn.Linear(256, 256)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
run = er.resume(model=model, optimizer=optimizer, keep=int(sys.argv[1]), save_every=10**6)
ddp = run.ddp(model)
for _ in range(2):
    ddp(torch.ones(1, 256)).sum().backward()
    optimizer.step()
    run.step()
if sys.argv[2:]:  # later files may not exceed 1000 bytes, and a .pyc file of this length would stay for ever
    sys.dont_write_bytecode = True
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
run.close()
print(run.position.step)
"""
NO_ROOM_FOR = str(10**9 - 1)  # as many checkpoints of half a megabyte


def run_two_steps(path: Path, node: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Train for two steps on one node of the job."""
    script = path / "train.py"
    script.write_text(TRAIN)
    env = {
        "ELASTIC_RESUME_NODE_NAME": node,
        "ELASTIC_RESUME_CKPT_DIR": str(path / node),
        "ELASTIC_RESUME_RUN_ID": "job",
    }
    (end,) = launch_ranks.run_ranks(1, script, *arguments, env=[env])
    return end


@pytest.mark.slow
def test_full_disk_stops_new_job_but_not_resumed_one(tmp_path: Path) -> None:
    """A job with a checkpoint logs the problem and trains on; a new job fails at its start."""
    assert run_two_steps(tmp_path, "a", "2").stdout.split() == ["2"]
    again = run_two_steps(tmp_path, "a", NO_ROOM_FOR)
    assert again.stdout.split() == ["4"], again.stderr
    assert "are needed and" in again.stderr
    assert "Training continues" in again.stderr
    fresh = run_two_steps(tmp_path, "b", NO_ROOM_FOR)
    assert fresh.returncode != 0
    assert "are needed and" in fresh.stderr
    assert "free space there, lower --keep" in fresh.stderr


@pytest.mark.slow
def test_run_fails_if_its_final_state_cannot_be_saved(tmp_path: Path) -> None:
    """No other node has it, and the next job must not take the run for complete."""
    end = run_two_steps(tmp_path, "a", "2", "limit")
    assert end.returncode != 0
    assert "the end state (step 2) could not be saved" in end.stderr
