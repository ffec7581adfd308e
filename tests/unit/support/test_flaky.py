"""`make flaky` counts the failures of each test."""

from __future__ import annotations

import re

import pytest

from tests.support.paths import ROOT

pytest_plugins = ["pytester"]

TESTS = """
import pathlib
import pytest

@pytest.mark.parametrize("a", ["x", "y"])
def test_every_third_run_fails(a):
    path = pathlib.Path(a)
    path.write_text(path.read_text() + "." if path.exists() else ".")
    assert len(path.read_text()) % 3, "the third run"
"""


def test_summary_counts_failures_of_each_test(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Runs of one test with its parameters are counted together; equal errors are printed once."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    pytester.makepyfile(TESTS)
    output = str(pytester.runpytest_subprocess("-p", "tests.support.flaky", "--flaky-runs", "6").stdout)
    assert "2 tests, 12 runs, 2 tests failed" in output
    for case in "xy":
        row = rf"2 of +6 .*::test_every_third_run_fails\[{case}\]\n +2 x AssertionError: the third run"
        assert re.search(row, output)
