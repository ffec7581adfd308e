"""What a test of a training script needs: simulated nodes, and the proof that a killed run is the same run.

The package is a pytest plugin, so ``elastic_cluster`` is there as a fixture: three nodes that can be killed,
cut off, and started again, each step with a snapshot::

    def test_my_training_survives(elastic_cluster):
        elastic_cluster.start("train.py", "--epochs", "2")
        elastic_cluster.at(step=20, rank=1).kill()
        elastic_cluster.at(step=35, node=2).kill()
        assert elastic_cluster.wait_exit() == [0, 0]
        assert elastic_cluster.lost_steps == 0

Other nodes are asked for with a mark, ``@pytest.mark.elastic_resume(nodes=4, hosts="namespaces")``, whose
arguments are those of `Cluster`; several clusters with the fixture ``make_cluster``. `assert_same_run` runs a
script undisturbed and with faults, and fails unless both end bit for bit alike. docs/testing.md has more.

Promise: tests side by side (pytest-xdist) never meet, and nothing is left of a test's nodes however it ends.
A test run that uses none of this pays for no import but this module's.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Generator, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from elastic_resume.testing.cluster import (
        Cluster,
        ClusterTimeoutError,
        Node,
        Recovery,
        Trigger,
        TriggerError,
    )
    from elastic_resume.testing.equivalence import assert_same_run
    from elastic_resume.testing.faults import Fault, FaultPlan

_CLUSTER_MODULE, _EQUIVALENCE_MODULE = "elastic_resume.testing.cluster", "elastic_resume.testing.equivalence"
_LAZY_EXPORTS = {
    "Cluster": _CLUSTER_MODULE,
    "Fault": "elastic_resume.testing.faults",
    "FaultPlan": "elastic_resume.testing.faults",
    "ClusterTimeoutError": _CLUSTER_MODULE,
    "Trigger": _CLUSTER_MODULE,
    "TriggerError": _CLUSTER_MODULE,
    "Node": _CLUSTER_MODULE,
    "Recovery": _CLUSTER_MODULE,
    "assert_same_run": _EQUIVALENCE_MODULE,
}

__all__ = [
    "Cluster",
    "ClusterTimeoutError",
    "Fault",
    "FaultPlan",
    "Node",
    "Recovery",
    "Trigger",
    "TriggerError",
    "assert_same_run",
    "elastic_cluster",
    "make_cluster",
]

MARK_NAME = "elastic_resume"
SNAPSHOT_EVERY_STEP = ("--snapshot-every", "1")
TAIL_LINES = 40  # of each node's output, beside a test that failed
_FAILED = pytest.StashKey[bool]()
_CLUSTERS = pytest.StashKey[list["Cluster"]]()


def __getattr__(name: str) -> Any:
    if name not in _LAZY_EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_LAZY_EXPORTS[name]), name)


def pytest_configure(config: pytest.Config) -> None:
    """Make the mark known."""
    words = (
        f'{MARK_NAME}(nodes=3, min_nodes=2, hosts="loopback", …): the nodes of the fixture `elastic_cluster`'
    )
    config.addinivalue_line("markers", words)


@pytest.fixture
def make_cluster(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[..., Cluster]]:
    """Make simulated nodes, with the arguments of `Cluster` but its directory; they end with the test."""
    made: list[Cluster] = []
    request.node.stash[_CLUSTERS], request.node.stash[_FAILED] = made, False

    def make(**options: Any) -> Cluster:
        directory = tmp_path / ("cluster" if not made else f"cluster-{len(made) + 1}")
        made.append(_build_cluster(directory, options))
        return made[-1]

    with contextlib.ExitStack() as stack:
        yield make
        for one in made:
            if request.node.stash[_FAILED]:
                stack.callback(one.stop)
            else:
                stack.push(one)  # which minds whether all that was planned has come


@pytest.fixture
def elastic_cluster(request: pytest.FixtureRequest, make_cluster: Callable[..., Cluster]) -> Cluster:
    """Three simulated nodes, two of which suffice, or those of the mark; nothing runs before `start`."""
    options: dict[str, Any] = {}
    for mark in reversed(list(request.node.iter_markers(MARK_NAME))):  # the nearest is the last word
        if mark.args:
            pytest.fail(f"@pytest.mark.{MARK_NAME}: give names: nodes=4, hosts='namespaces'.", pytrace=False)
        options.update(mark.kwargs)
    return make_cluster(**options)


def _build_cluster(directory: Path, options: Mapping[str, Any]) -> Cluster:
    import inspect  # noqa: PLC0415

    from elastic_resume.testing import virtual_network  # noqa: PLC0415
    from elastic_resume.testing.cluster import Cluster  # noqa: PLC0415

    known = [name for name in inspect.signature(Cluster).parameters if name != "directory"]
    strange = sorted(set(options) - set(known))
    if strange:
        pytest.fail(f"a cluster has no {', '.join(strange)}; it has {', '.join(known)}.", pytrace=False)
    if options.get("hosts") == "namespaces" and (why := virtual_network.unavailable_reason()):
        pytest.skip(f'hosts="namespaces": {why}')
    nodes = options.get("nodes", 3)
    defaults = {"nodes": nodes, "min_nodes": max(1, nodes - 1)}
    flags = [*SNAPSHOT_EVERY_STEP, *options.get("flags", ())]  # of two that say the same the last one counts
    return Cluster(directory, **{**defaults, **options, "flags": flags})


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, None]:
    """Show what befell the nodes, and what they printed last, beside a test that failed."""
    report: pytest.TestReport = (yield).get_result()
    if not report.failed:
        return
    item.stash[_FAILED] = True
    for one in item.stash.get(_CLUSTERS, []):
        report.sections.append((f"elastic-resume report {one.run_dir}", one.report_text()))
        # A wait that timed out has told the rest.
        shown = call.excinfo is not None and call.excinfo.typename == "ClusterTimeoutError"
        for index, node in enumerate(one.nodes if not shown else ()):
            lines = one.output(index).splitlines()
            text = "\n".join(lines[-TAIL_LINES:])
            report.sections.append((f"node {node.name}: its last lines, of {len(lines)}", text))
