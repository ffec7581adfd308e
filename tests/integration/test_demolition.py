"""Test that all else works without the package of a mechanism and its line in the registry."""

from __future__ import annotations

import importlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from elastic_resume.mechanisms.registry import MECHANISMS
from tests.support.paths import ROOT

pytestmark = pytest.mark.cluster

# Of the tests that do not belong to a mechanism, those of what asks the registry. The pages of docs/ describe
# all mechanisms, so their tests stay out.
PURE_TESTS = [
    "unit/report/test_metrics.py",
    "unit/commands/test_job_status.py",
]
JOB = """
import contextlib, io
from pathlib import Path
from elastic_resume import cli
from elastic_resume.testing import Cluster

def show(*words):
    with contextlib.redirect_stdout(io.StringIO()) as text, contextlib.suppress(SystemExit):
        assert cli.main(words) == 0 or words[0] == "status"  # an agent that answers late counts as none
    return text.getvalue()

assert Path(cli.__file__).is_relative_to(Path.cwd()), cli.__file__
assert "report" in show("--help")
with Cluster(Path("job"), nodes=1, workers_per_node=2, flags=["--snapshot-every", "1"]) as cluster:
    slow = ["--slow-from=3", f"--slow-until={Path('asked').resolve()}"]
    cluster.start("tests/support/scripts/train.py", "--step-log=log", "--epochs=2", *slow)
    cluster.wait(step=3)
    cluster.kill_worker(0)
    cluster.wait(lambda: len(cluster.events("resume")) > 1, "the restart")
    status = ["status", str(cluster.nodes[0].ckpt_dir / cluster.run_id)]
    text = "job: generation 2, 1 node, 2 ranks"
    cluster.wait(lambda: text in show(*status), "its status")
    Path("asked").touch()
    assert cluster.wait_exit() == [0]
    print(show("report", str(cluster.run_dir)))
"""
RUN = """
import subprocess, sys
command = [sys.executable, "-m", "elastic_resume", "run", sys.argv[1] + "=1", "train.py"]
done = subprocess.run(command, capture_output=True, text=True)
assert done.returncode == 2, done
print(done.stderr)
"""


NAMES = sorted(path.parent.name for path in (ROOT / "elastic_resume/mechanisms").glob("*/__init__.py"))
TESTED = "slow_ranks"  # in `make test`; the others in `make soak`
SOAKED = [pytest.param(name, marks=pytest.mark.soak) for name in NAMES if name != TESTED]


@pytest.mark.parametrize("name", [TESTED, *SOAKED])
def test_all_else_works_without_a_mechanism(tmp_path: Path, name: str) -> None:
    """Help, status and report too, in a job with a killed worker."""
    for folder in ("elastic_resume", "tests"):
        shutil.copytree(ROOT / folder, tmp_path / folder)  # with what is compiled: Python compares times
    for folder in ("docs", "deploy"):
        (tmp_path / folder).symlink_to(ROOT / folder)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    shutil.rmtree(tmp_path / "elastic_resume/mechanisms" / name)
    registry = tmp_path / "elastic_resume/mechanisms/registry.py"
    text, count = re.subn(rf"(?im)^.*\b{name}\b.*\n", "", registry.read_text())
    assert count == 2, "the import and the line of the list"
    registry.write_text(text)
    environ = {**os.environ, "PYTHONPATH": str(tmp_path)}

    def run(*command: str) -> str:
        done = subprocess.run(
            [sys.executable, *command], cwd=tmp_path, env=environ, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    tests = [f"tests/{path}" for path in PURE_TESTS]
    run("-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", "not slow", "-k", "not document", *tests)
    for flag in list_flags(name):
        assert f"error: unknown flag {flag}." in run("-c", RUN, flag)
    assert "1 failure" in run("-c", JOB)


def list_flags(name: str) -> list[str]:
    """Return the flags that a mechanism adds."""
    mechanism = getattr(importlib.import_module(f"elastic_resume.mechanisms.{name}"), name.upper())
    assert mechanism in MECHANISMS
    return [f"--{option.name}" for option in mechanism.options if option.has_flag]
