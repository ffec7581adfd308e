"""A disk without room is a reason not to begin; a job that has got somewhere goes on."""

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
if sys.argv[2:]:  # from now on no file may be larger
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
run.close()
print(run.position.step)
"""
NO_ROOM_FOR = str(10**9 - 1)  # so many copies of half a megabyte


def start(path: Path, node: str, *arguments: str) -> subprocess.CompletedProcess[str]:
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
def test_a_disk_that_has_got_full_ends_no_job_that_has_something(tmp_path: Path) -> None:
    """It is said, and training goes on from what there is; a new job does not begin on such a disk."""
    assert start(tmp_path, "a", "2").stdout.split() == ["2"]
    again = start(tmp_path, "a", NO_ROOM_FOR)
    assert again.stdout.split() == ["4"], again.stderr
    assert "are needed and" in again.stderr
    assert "Training goes on" in again.stderr
    fresh = start(tmp_path, "b", NO_ROOM_FOR)
    assert fresh.returncode != 0
    assert "are needed and" in fresh.stderr
    assert "free space there, lower --keep" in fresh.stderr


@pytest.mark.slow
def test_a_run_whose_end_is_on_no_disk_does_not_end_well(tmp_path: Path) -> None:
    """Nobody else has it: who starts the next job must not take it for done."""
    end = start(tmp_path, "a", "2", "limit")
    assert end.returncode != 0
    assert "the end state (step 2) could not be saved" in end.stderr
