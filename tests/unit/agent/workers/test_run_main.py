"""Test what a script leaves when it ends, in this process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from elastic_resume.agent.workers import run_main
from elastic_resume.training import worker_exit


@pytest.mark.parametrize(("code", "is_error"), [("", False), ("0", False), ("1", True), ("'text'", True)])
def test_exit_code_counts_as_an_error_that_ended_the_script(
    code: str, is_error: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hydra and others catch the script's exceptions, and exit with 1."""
    for name in ("__main__", "__mp_main__"):
        monkeypatch.setitem(sys.modules, name, sys.modules["__main__"])
    monkeypatch.setattr(sys, "last_value", None, raising=False)
    monkeypatch.delattr(sys, "last_value")
    script = tmp_path / "script.py"
    script.write_text(f"import sys; sys.exit({code})")
    with pytest.raises(SystemExit):
        run_main.run([sys.executable, "-u", str(script)])
    has_value = hasattr(sys, "last_value")
    assert has_value == is_error
    assert not is_error or worker_exit.is_error_raised()


def test_exit_removes_no_operators_of_torch_but_calls_other_finalizers() -> None:
    """Pins where torch and Python keep them."""
    code = """
import collections, torch, weakref
from elastic_resume.agent.workers import run_main
def count():
    found = (each.peek()[1] for each in weakref.finalize._registry if each.atexit)
    return collections.Counter(function.__module__ for function in found)["torch.library"]
print(count() > 100)
weakref.finalize(run_main, lambda: print("other", count()))
run_main.exit_without_freeing(3)
"""
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert (done.returncode, done.stdout.split()) == (3, ["True", "other", "0"]), done.stderr
