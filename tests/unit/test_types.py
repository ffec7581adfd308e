"""Test that type checkers see the public names: mypy --strict on users' scripts outside of the tree."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import elastic_resume as er
from tests.support.paths import ROOT, SCRIPTS

MISTAKES = '''"""A user's script with mistakes. Each wrong line has a mark."""

from pathlib import Path

import torch

import elastic_resume as er

model = torch.nn.Linear(1, 1)
run = er.resume(model=model, keep=5)
er.resume(model=model, keeep=5)  # wrong
er.resume(model=model, save_every=0.5)  # wrong
er.resume(model=model, rng="saved")  # wrong
er.resume(model=model, track=[model])  # wrong
er.resume(model)  # wrong


@run.on_resume
def report(resumed: er.Run) -> None:
    print(resumed.position.steps)  # wrong


@run.on_world_change  # wrong
def scale(change: er.Run) -> None:
    print(change)


for epoch in run.epochs("2"):  # wrong
    run.step(epoch)  # wrong
path: Path = run.save()  # wrong
er.GlobalBatches(24, 8, micro_batches=2)  # wrong
raise er.errors.ConfigErrors  # wrong
'''

# Without the cache of `make lint` it reads all of torch, which takes a minute on a busy machine.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def mypy_errors(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[int]]:
    """Return the lines with an error, for each script."""
    directory = tmp_path_factory.mktemp("user")
    shutil.copy(SCRIPTS / "typed.py", directory)
    (directory / "mistakes.py").write_text(MISTAKES)
    # The project's own options are strict; with them the types of torch come from the cache of `make lint`.
    # A copy of it: here the package is an installed one, which would make `make lint` check it again.
    cache, kept = tmp_path_factory.mktemp("cache"), ROOT / ".mypy_cache"
    if kept.exists():
        shutil.copytree(kept, cache, dirs_exist_ok=True)
    options = [f"--config-file={ROOT}/pyproject.toml", f"--cache-dir={cache}"]
    command = [sys.executable, "-m", "mypy", *options, "typed.py", "mistakes.py"]
    result = subprocess.run(command, cwd=directory, capture_output=True, text=True, check=False)
    assert not result.stderr, result.stderr
    found = re.findall(r"^(\w+\.py):(\d+): error", result.stdout, re.MULTILINE)
    assert len(found) == result.stdout.count(": error:"), result.stdout
    print(result.stdout)
    lines: dict[str, list[int]] = {"typed.py": [], "mistakes.py": []}
    for name, line in found:
        lines[name].append(int(line))
    return lines


def test_script_with_every_public_name_passes_strict_check(mypy_errors: dict[str, list[int]]) -> None:
    """It uses hooks, decorators, GlobalBatches, micro_batches, track and errors."""
    text = (SCRIPTS / "typed.py").read_text()
    names = {"__version__", *er.__all__}
    assert {name for name in names if f"er.{name}" not in text} == set()
    methods = {name for name in vars(er.Run) if not name.startswith("_")} - {"close"}
    used = set(re.findall(r"\brun\.(\w+)", text)) | {"plan", "position"}
    assert methods - used == set()
    assert mypy_errors["typed.py"] == []


def test_mistakes_are_refused_at_their_lines(mypy_errors: dict[str, list[int]]) -> None:
    """A wrong keyword, wrong types of arguments, a wrong hook, and unknown names."""
    marked = [n for n, line in enumerate(MISTAKES.splitlines(), 1) if line.endswith("# wrong")]
    assert mypy_errors["mistakes.py"] == marked


def test_typed_script_runs(tmp_path: Path) -> None:
    """What passes the check also works."""
    command = [sys.executable, str(SCRIPTS / "typed.py"), str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert "trained: True 2 hooks" in result.stdout, result.stderr
