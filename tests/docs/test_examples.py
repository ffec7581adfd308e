"""The examples run as a reader would type them, and the two of each pair differ by what they teach."""

from __future__ import annotations

import difflib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import ROOT

pytest.importorskip(
    "sklearn", reason="the digits come from scikit-learn (pip install elastic-resume[examples])"
)

EXAMPLES = ROOT / "examples"
PYTHON = [sys.executable, "-W", "error"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
ELASTIC = [sys.executable, "-m", "elastic_resume", "run", "--nproc-per-node", "2", "--rdzv-id", "digits"]
SMALL_TEXT = ["--characters", "30000", "--epochs", "2"]
PAIRS = [("digits_ddp.py", "digits.py"), ("char_lm_ddp.py", "char_lm.py")]


def run(launcher: list[str], example: str, *words: str, cwd: Path) -> str:
    """What the example prints; an exit code other than 0 ends the test."""
    command = [*launcher, str(EXAMPLES / example), *words]
    # Two threads that spin for each other on two cores that others use took 36 s for what takes 5.
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=cwd, env=environ, capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def accuracy(output: str) -> float:
    """The last line's percentage."""
    found = re.fullmatch(r"test accuracy ([\d.]+)%", output.splitlines()[-1])
    assert found is not None, output
    return float(found[1])


@pytest.mark.parametrize(("plain", "elastic"), PAIRS)
def test_the_pair_differs_by_a_screen_at_most(plain: str, elastic: str) -> None:
    """What elastic_resume adds is less than what it takes the place of."""
    before, after = ((EXAMPLES / name).read_text().splitlines() for name in (plain, elastic))
    changes = [line for line in difflib.ndiff(before, after) if line.startswith(("+ ", "- "))]
    added = [line for line in changes if line.startswith("+ ")]
    assert len(changes) <= 42
    assert len(added) < len(changes) - len(added)


@pytest.mark.cluster
def test_plain_python_learns_the_digits(tmp_path: Path) -> None:
    """No launcher, no process group, no warning."""
    assert accuracy(run(PYTHON, "digits_ddp.py", cwd=tmp_path)) >= 95


@pytest.mark.cluster
def test_plain_python_learns_some_characters(tmp_path: Path) -> None:
    """Fewer bits than the 7 of a uniform guess, and fewer after the second epoch than after the first."""
    lines = run(PYTHON, "char_lm.py", *SMALL_TEXT, cwd=tmp_path).splitlines()
    first, second, last = (float(line.split()[-4]) for line in lines)
    assert 7 > first > second == last


@pytest.mark.cluster
def test_torchrun_learns_the_digits(tmp_path: Path) -> None:
    """Two workers, one model; only rank 0 prints."""
    output = run(TORCHRUN, "digits_ddp.py", "--seed", "1", cwd=tmp_path)
    assert accuracy(output) >= 95
    assert len(output.splitlines()) == 11


@pytest.mark.cluster
def test_torchrun_learns_some_characters(tmp_path: Path) -> None:
    """Tied weights and a GPU where there is one."""
    lines = run(TORCHRUN, "char_lm_ddp.py", *SMALL_TEXT, cwd=tmp_path).splitlines()
    assert float(lines[-1].split()[0]) < 7


@pytest.mark.cluster
def test_python_torchrun_and_elastic_resume_continue_each_others_run(tmp_path: Path) -> None:
    """Four epochs by python, three by torchrun, three by elastic-resume: one training of ten."""
    lines: list[str] = []
    for launcher, epochs in ((PYTHON, 4), (TORCHRUN, 7), (ELASTIC, 10)):
        output = run(launcher, "digits.py", "--epochs", str(epochs), cwd=tmp_path)
        lines += output.splitlines()[:-1]  # of rank 0 alone
    assert [line.split(":")[0] for line in lines] == [f"epoch {number}" for number in range(1, 11)]
    assert accuracy(output) >= 95
