"""The examples run as documented, and each pair differs only by what elastic_resume adds."""

from __future__ import annotations

import difflib
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import launch_ranks
from tests.support.paths import ROOT

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("sklearn") is None,
    reason="the digits come from scikit-learn (pip install '.[examples]')",
)

EXAMPLES = ROOT / "examples"


def accuracy(output: str) -> float:
    """Return the percentage of the last line."""
    found = re.fullmatch(r"test accuracy ([\d.]+)%", output.splitlines()[-1])
    assert found is not None, output
    return float(found[1])


@pytest.mark.parametrize(
    ("plain", "elastic", "most"),
    [
        ("digits_ddp", "digits", 20),
        ("char_lm_ddp", "char_lm", 28),
        ("accelerate_digits_before", "accelerate_digits", 9),
        ("ports/toy_before", "ports/toy", 9),
        ("ports/imagenet_before", "ports/imagenet", 25),
        ("ports/ema_before", "ports/ema", 10),
    ],
)
def test_example_adds_few_lines(plain: str, elastic: str, most: int) -> None:
    """The docstring at the top of the file is not counted."""
    before, after = (
        (EXAMPLES / f"{name}.py").read_text().split('"""', 2)[2].splitlines() for name in (plain, elastic)
    )
    added = [line for line in difflib.ndiff(before, after) if line.startswith("+ ") and line[2:].strip()]
    assert len(added) <= most, "\n".join(added)


def test_guide_counts_lines_of_each_port() -> None:
    """As `difflib` counts them, without the docstring at the top and empty lines."""
    page = (ROOT / "docs" / "getting-started" / "port-your-script.md").read_text()
    rows = re.findall(r"^\| `(\S+)`, `(\S+)` \| (\d+) \| (\d+) \|$", page, re.MULTILINE)
    assert len(rows) == 5
    for before, after, *counts in rows:
        sides = [(ROOT / name).read_text().split('"""', 2)[2].splitlines() for name in (before, after)]
        lines = [line for line in difflib.ndiff(*sides) if line[2:].strip()]
        assert [sum(line.startswith(sign) for line in lines) for sign in ("+ ", "- ")] == list(
            map(int, counts)
        )


def run_two_ranks(example: str, *words: str) -> str:
    """Return the output of rank 0 of two, of which only rank 0 prints."""
    first, second = launch_ranks.run_ranks(2, EXAMPLES / example, *words)
    assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
    assert second.stdout == ""
    return first.stdout


@pytest.mark.cluster
def test_digits_example_learns_on_two_ranks() -> None:
    """It reaches 95 % without elastic_resume."""
    output = run_two_ranks("digits_ddp.py", "--seed", "1")
    assert accuracy(output) >= 95
    assert len(output.splitlines()) == 11


@pytest.mark.cluster
@pytest.mark.soak
def test_character_example_learns(tmp_path: Path) -> None:
    """Fewer bits than the 7 of a uniform guess; tied weights, and a GPU where there is one."""
    words = ["--characters", "30000", "--epochs", "2"]
    env = [{"ELASTIC_RESUME_CKPT_DIR": str(tmp_path)}]
    (alone,) = launch_ranks.run_ranks(1, EXAMPLES / "char_lm.py", *words, env=env)
    assert alone.returncode == 0, alone.stderr
    lines = alone.stdout.splitlines()
    first, second, last = (float(line.split()[-4]) for line in lines)
    assert 7 > first > second == last
    assert float(run_two_ranks("char_lm_ddp.py", *words).splitlines()[-1].split()[0]) < 7


@pytest.mark.cluster
@pytest.mark.soak
def test_launchers_continue_the_run_of_each_other(tmp_path: Path) -> None:
    """Epochs by torchrun, python and elastic-resume: one training of ten."""
    lines: list[str] = []
    two = ["--nproc-per-node", "2"]
    torchrun = ["-m", "torch.distributed.run", "--standalone", *two]
    elastic = ["-m", "elastic_resume", "run", *two, "--rdzv-id", "digits"]
    for launcher, epochs in ((torchrun, 3), (["-W", "error"], 5), (elastic, 10)):
        words = [*launcher, str(EXAMPLES / "digits.py"), "--epochs", str(epochs)]
        output = subprocess.check_output([sys.executable, *words], cwd=tmp_path, text=True, timeout=240)
        lines += output.splitlines()[:-1]  # of rank 0 alone
    assert [line.split(":")[0] for line in lines] == [f"epoch {number}" for number in range(1, 11)]
    assert accuracy(output) >= 95
