"""Run a script to its end by python, torchrun or elastic-resume."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

PYTHON = [sys.executable, "-W", "error"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
ELASTIC = [sys.executable, "-m", "elastic_resume", "run", "--nproc-per-node", "2"]


def run(launcher: list[str], script: Path, *words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Return the ended process. An exit code other than 0 ends the test."""
    # Two spinning threads on two busy cores take 36 s instead of 5 s.
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [*launcher, str(script), *words]
    done = subprocess.run(
        command, cwd=cwd, env=environ, capture_output=True, text=True, check=False, timeout=240
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done
