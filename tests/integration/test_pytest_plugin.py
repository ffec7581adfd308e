"""The pytest plugin in a user's test run: its fixtures, its marks, and what it adds to a failure report."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.fake_sklearn import write_fake_sklearn
from tests.support.paths import ROOT

pytestmark = pytest.mark.slow

EXAMPLES = ROOT / "examples"
PAGE = ROOT / "docs" / "guides" / "testing.md"
SMALL = """
import pytest
from elastic_resume.testing import Cluster

@pytest.mark.elastic_resume(nodez=3)
def test_strange(elastic_cluster): ...

@pytest.mark.elastic_resume(3)
def test_nameless(elastic_cluster): ...

@pytest.mark.elastic_resume(hosts="namespaces")
def test_elsewhere(elastic_cluster): ...

def test_never(elastic_cluster):
    elastic_cluster.at(step=7, rank=1).kill()

@pytest.mark.elastic_resume(nodes=4, disk_bytes=1)
def test_sizes(elastic_cluster): ...

def test_general_name(cluster): ...

def test_fails(make_cluster):
    one, other = make_cluster(nodes=2), make_cluster()
    one.nodes[1].log.write_text("".join(f"line {n}\\n" for n in range(100)))
    assert not {node.address for node in one.nodes} & {node.address for node in other.nodes}
    one.network.cut(0)

@pytest.mark.elastic_resume(nodes=4)
class TestMarks:
    @pytest.mark.elastic_resume(run_id="mine")
    def test_nearest(self, elastic_cluster):
        assert isinstance(elastic_cluster, Cluster)
        assert (len(elastic_cluster.nodes), elastic_cluster.run_id) == (4, "mine")
"""


def run_pytest(directory: Path, *args: str, env: dict[str, str] | None = None) -> tuple[dict[str, str], str]:
    """Run pytest in a directory; return the outcome of each test, and all output."""
    command = [sys.executable, "-m", "pytest", "-rA", "-p", "no:cacheprovider", "--import-mode", "importlib"]
    environ = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST", "COLUMNS"))}
    done = subprocess.run(
        [*command, "--basetemp", str(directory / "base"), *args],
        cwd=directory,
        env={**environ, "COLUMNS": "200", **(env or {})},
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    _, _, summary = done.stdout.rpartition("short test summary info")
    ends = re.findall(r"^(PASSED|FAILED|ERROR|SKIPPED) (\S+)", summary, re.MULTILINE)
    return {name: end for end, name in ends}, done.stdout + done.stderr


def test_plugin_import_loads_only_itself() -> None:
    """Neither torch nor a module of simulated nodes is imported before a test asks for nodes."""
    code = (
        "import pytest, sys; known = set(sys.modules); import elastic_resume.testing.pytest_plugin; "
        "print(*set(sys.modules) - known)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    ours = {name for name in done.stdout.split() if name.startswith("elastic_resume")}
    package = "elastic_resume"
    assert ours == {package, f"{package}.errors", f"{package}.testing", f"{package}.testing.pytest_plugin"}
    assert not {"torch", "psutil", "xxhash"} & set(done.stdout.split())


def test_fixture_with_wrong_options_fails_with_advice(tmp_path: Path) -> None:
    """No node is started; the machine has no tools for namespaces."""
    (tmp_path / "test_small.py").write_text(SMALL)
    ends, text = run_pytest(tmp_path, "-p", "no:xdist", env={"PATH": "/nowhere"})
    assert ends == {
        "test_small.py::test_strange": "ERROR",
        "test_small.py::test_nameless": "ERROR",
        "[1]": "SKIPPED",
        "test_small.py::test_never": "ERROR",
        "test_small.py::test_sizes": "ERROR",
        "test_small.py::test_general_name": "ERROR",
        "test_small.py::test_fails": "FAILED",
        "test_small.py::TestMarks::test_nearest": "PASSED",
    }
    assert "a cluster has no nodez; it has nodes, min_nodes, " in text
    assert "give names: nodes=4" in text
    assert "fixture 'cluster' not found" in text, "ours would hide the fixture of many projects"
    assert 'hosts="namespaces": no ' in text
    assert "SIGKILL at step 7 of rank 1: never came" in text
    assert 'disk_bytes: nodes have disks of their own with hosts="namespaces"' in text
    assert (
        'these nodes are processes that share one network: make the Cluster with hosts="namespaces"' in text
    )
    assert "node n1: its last lines, of 100" in text
    assert "line 60\nline 61\n" in text
    assert "line 59" not in text
    assert f"elastic-resume report {tmp_path}/base/test_fails0/cluster-2/checkpoints/job" in text


def blocks() -> list[str]:
    """Return the Python blocks of the page."""
    return re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)


def statements(source: str) -> list[str]:
    """Return the statements of all functions, without docstrings, with train.py as the script."""
    functions = [node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)]
    found = [ast.unparse(each) for function in functions for each in function.body]
    return [each.replace("SCRIPT", "'train.py'") for each in found if not each.startswith(("'", '"'))]


def test_page_ten_lines_equal_example() -> None:
    """The example is run below."""
    example = (EXAMPLES / "test_my_training.py").read_text()
    assert statements(blocks()[0]) == statements(example)
    assert len(statements(example)) <= 10


@pytest.mark.cluster
@pytest.mark.soak
@pytest.mark.parametrize(("files", "count"), [("test_my*.py", 2), ("test_page*.py", 2)])
def test_example_and_page_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: str, count: int
) -> None:
    """In this process, so that its nodes fork without importing torch again.

    The README has a shorter form of the example, and test_blocks.py runs that. test_equivalence.py has the
    scripts that must fail.
    """
    for name in ("digits.py", "train.py"):
        (tmp_path / name).write_text((EXAMPLES / "digits.py").read_text())
    (tmp_path / "test_my_training.py").write_text((EXAMPLES / "test_my_training.py").read_text())
    for number, block in enumerate(blocks()[1:]):
        # Fewer epochs, but long enough for the node to return.
        shorter = block.replace('"--epochs", "30"', '"--epochs", "6", "--step-delay", "0.05"')
        (tmp_path / f"test_page{number}.py").write_text(shorter)
    write_fake_sklearn(tmp_path)  # beside the script
    monkeypatch.chdir(tmp_path)
    passed: list[str] = []

    class Recorder:
        def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
            passed.extend([report.nodeid] if report.when == "call" and report.passed else [])

    off = [f"-pno:{plugin}" for plugin in ("cacheprovider", "faulthandler", "timeout", "xdist")]
    base = ["--import-mode", "importlib", "--basetemp", str(tmp_path / "base")]
    paths = sorted(path.name for path in tmp_path.glob(files))
    assert pytest.main(["-q", *off, *base, *paths], [Recorder()]) == 0
    assert len(passed) == count
