"""`make flaky` counts the failures of each test."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from tests.support.paths import ROOT

TESTS = """
import pathlib
import pytest

@pytest.mark.parametrize("a", ["x", "y"])
def test_every_third_run_fails(a):
    with open(a, "a") as file:
        file.write(".")
    assert len(pathlib.Path(a).read_text()) % 3, "the third run"

def test_passes():
    pass
"""


def test_summary_counts_failures_of_each_test(tmp_path: Path) -> None:
    """Runs of one test with its parameters are counted together; equal errors are printed once."""
    (tmp_path / "test_some.py").write_text(TESTS)
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "tests.support.flaky",
            "--flaky-runs",
            "6",
            "-c",
            os.devnull,
        ],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTEST_ADDOPTS": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "3 tests, 18 runs, 2 tests failed" in done.stdout, done.stdout + done.stderr
    for case in ("x", "y"):
        test = rf"test_some\.py::test_every_third_run_fails\[{case}\]"
        assert re.search(rf"2 of +6  {test}\n +2 x AssertionError: the third run", done.stdout)
