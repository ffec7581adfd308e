"""The pytest plugin, in a pytest of a user's: what passes, what fails and why, and what is told then."""

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
PAGE = ROOT / "docs" / "testing.md"
RESUME = "    run = er.resume("  # with which the line begins
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
    one.cut(0)

@pytest.mark.elastic_resume(nodes=4)
class TestMarks:
    @pytest.mark.elastic_resume(run_id="mine")
    def test_nearest(self, elastic_cluster):
        assert isinstance(elastic_cluster, Cluster)
        assert (len(elastic_cluster.nodes), elastic_cluster.run_id) == (4, "mine")
"""


def run(place: Path, *words: str, env: dict[str, str] | None = None) -> tuple[dict[str, str], str]:
    """Run pytest in a folder; what became of each test, and all that it printed."""
    command = [sys.executable, "-m", "pytest", "-rA", "-p", "no:cacheprovider", "--import-mode", "importlib"]
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST", "COLUMNS"))}
    done = subprocess.run(
        [*command, "--basetemp", str(place / "base"), *words],
        cwd=place,
        env={**kept, "COLUMNS": "200", **(env or {})},
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    _, _, summary = done.stdout.rpartition("short test summary info")
    ends = re.findall(r"^(PASSED|FAILED|ERROR|SKIPPED) (\S+)", summary, re.MULTILINE)
    return {name: end for end, name in ends}, done.stdout + done.stderr


def test_the_plugin_costs_a_run_that_does_not_use_it_nothing() -> None:
    """Neither torch nor anything of the laboratory is imported before a test asks for nodes."""
    code = (
        "import pytest, sys; known = set(sys.modules); import elastic_resume.testing; "
        "print(*set(sys.modules) - known)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    ours = {name for name in done.stdout.split() if name.startswith("elastic_resume")}
    assert ours == {"elastic_resume", "elastic_resume.testing"}
    assert not {"torch", "psutil", "yaml", "xxhash"} & set(done.stdout.split())


def test_marks_and_errors_say_what_to_do(tmp_path: Path) -> None:
    """Nodes are described, and never started; on a machine that has no tools for namespaces."""
    (tmp_path / "test_small.py").write_text(SMALL)
    ends, text = run(tmp_path, "-p", "no:xdist", env={"PATH": "/nowhere"})
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
    assert "fixture 'cluster' not found" in text, "many projects have one of their own, which ours would hide"
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


def project(place: Path, script: str) -> None:
    """A user's folder: a script, and the tests of the example for it."""
    place.mkdir()
    (place / "digits.py").write_text(script)
    (place / "test_my_training.py").write_text((EXAMPLES / "test_my_training.py").read_text())


def blocks() -> list[str]:
    """Those of the page."""
    return re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)


def statements(source: str) -> list[str]:
    """Those of its functions, without docstrings, the script called train.py."""
    functions = [node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)]
    found = [ast.unparse(each) for function in functions for each in function.body]
    return [each.replace("SCRIPT", "'train.py'") for each in found if not each.startswith(("'", '"'))]


def test_the_pages_ten_lines_are_the_examples() -> None:
    """Which are run; the readme leads there."""
    example = (EXAMPLES / "test_my_training.py").read_text()
    assert statements(blocks()[0]) == statements(example)
    assert len(statements(example)) <= 10
    assert "docs/testing.md" in (ROOT / "README.md").read_text()


@pytest.mark.cluster
@pytest.mark.slow
def test_a_users_tests_pass_and_fail_for_the_right_reason(tmp_path: Path) -> None:
    """The example's and the page's pass, side by side; where nothing is resumed, or not all, they fail."""
    script = (EXAMPLES / "digits.py").read_text()
    (line,) = (line for line in script.splitlines(keepends=True) if line.startswith(RESUME))
    project(tmp_path / "good", script)
    (tmp_path / "train.py").write_text(script)
    for number, block in enumerate(blocks()[1:]):
        (tmp_path / f"test_page{number}.py").write_text(block)
    project(tmp_path / "no_resume", script.replace(line, ""))
    project(tmp_path / "no_optimizer", script.replace("optimizer=optimizer, ", ""))
    survives, ends_the_same = "test_my_training_survives", "test_my_training_ends_as_if_nothing_had_happened"
    bad = [
        f"no_resume/test_my_training.py::{survives}",
        f"no_optimizer/test_my_training.py::{ends_the_same}",
    ]
    ends, text = run(
        tmp_path,
        *("-n", "2", "--dist", "worksteal", "good", *(f"test_page{n}.py" for n in range(3)), *bad),
        env={"PYTHONPATH": write_fake_sklearn(tmp_path)},
    )
    assert {name for name, end in ends.items() if end == "FAILED"} == set(bad), text
    assert [*ends.values()].count("PASSED") == 2 + 3, text
    assert "assert [1, 1, 1] == [0, 0]" in text
    assert "NameError: name 'run' is not defined" in text
    assert (
        "digits.py does not end as it ends undisturbed (kill-worker rank 1 at step 8, kill-node node 2"
        in text
    )
    assert "What er.resume() was not given is not restored" in text
