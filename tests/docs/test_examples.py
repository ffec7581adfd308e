"""The examples run as documented, and each pair differs only by what elastic_resume adds."""

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
PAIRS = [("digits_ddp.py", "digits.py"), ("char_lm_ddp.py", "char_lm.py")]


def run(launcher: list[str], example: str, *words: str, cwd: Path) -> str:
    """Return the output of the example. An exit code other than 0 ends the test."""
    command = [*launcher, str(EXAMPLES / example), *words]
    # Two spinning threads on two busy cores take 36 s instead of 5 s.
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=cwd, env=environ, capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def accuracy(output: str) -> float:
    """Return the percentage of the last line."""
    found = re.fullmatch(r"test accuracy ([\d.]+)%", output.splitlines()[-1])
    assert found is not None, output
    return float(found[1])


@pytest.mark.parametrize(("plain", "elastic"), PAIRS)
def test_example_pair_differs_by_few_lines(plain: str, elastic: str) -> None:
    """elastic_resume adds fewer lines than it replaces."""
    before, after = ((EXAMPLES / name).read_text().splitlines() for name in (plain, elastic))
    changes = [line for line in difflib.ndiff(before, after) if line.startswith(("+ ", "- "))]
    added = [line for line in changes if line.startswith("+ ")]
    assert len(changes) <= 42
    assert len(added) < len(changes) - len(added)


@pytest.mark.cluster
@pytest.mark.parametrize(("launcher", "seed"), [(PYTHON, "0"), (TORCHRUN, "1")], ids=["python", "torchrun"])
def test_digits_example_learns_under_launcher(launcher: list[str], seed: str, tmp_path: Path) -> None:
    """Without a warning. Of two workers only rank 0 prints."""
    output = run(launcher, "digits_ddp.py", "--seed", seed, cwd=tmp_path)
    assert accuracy(output) >= 95
    assert len(output.splitlines()) == 11


@pytest.mark.cluster
@pytest.mark.parametrize(
    ("launcher", "example"),
    [(PYTHON, "char_lm.py"), (TORCHRUN, "char_lm_ddp.py")],
    ids=["python", "torchrun"],
)
def test_character_example_learns_under_launcher(launcher: list[str], example: str, tmp_path: Path) -> None:
    """Fewer bits than the 7 of a uniform guess; tied weights, and a GPU where there is one."""
    lines = run(launcher, example, "--characters", "30000", "--epochs", "2", cwd=tmp_path).splitlines()
    if example == "char_lm.py":
        first, second, last = (float(line.split()[-4]) for line in lines)
        assert 7 > first > second == last
    else:
        assert float(lines[-1].split()[0]) < 7


@pytest.mark.cluster
def test_launchers_continue_the_run_of_each_other(tmp_path: Path) -> None:
    """Four epochs by python, three by torchrun, three by elastic-resume: one training of ten."""
    lines: list[str] = []
    for launcher, epochs in ((PYTHON, 4), (TORCHRUN, 7), (ELASTIC, 10)):
        output = run(launcher, "digits.py", "--epochs", str(epochs), cwd=tmp_path)
        lines += output.splitlines()[:-1]  # of rank 0 alone
    assert [line.split(":")[0] for line in lines] == [f"epoch {number}" for number in range(1, 11)]
    assert accuracy(output) >= 95
