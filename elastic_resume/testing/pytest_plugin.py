"""Register the fixtures and the mark of `elastic_resume.testing` with pytest, and report failed tests."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from elastic_resume.testing.cluster import Cluster

MARK_NAME = "elastic_resume"
SNAPSHOT_EVERY_STEP = ("--snapshot-every", "1")
TAIL_LINES = 40  # lines of each node's output that are shown for a failed test
_FAILED = pytest.StashKey[bool]()
_CLUSTERS = pytest.StashKey[list["Cluster"]]()


def pytest_configure(config: pytest.Config) -> None:
    """Register the mark."""
    description = (
        f'{MARK_NAME}(nodes=3, min_nodes=2, hosts="loopback", …): the nodes of the fixture `elastic_cluster`'
    )
    config.addinivalue_line("markers", description)


@pytest.fixture
def make_cluster(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[..., Cluster]]:
    """Return a function that makes a `Cluster` in the test's directory; the clusters end with the test."""
    made: list[Cluster] = []
    request.node.stash[_CLUSTERS], request.node.stash[_FAILED] = made, False

    def make(**options: Any) -> Cluster:
        directory = tmp_path / ("cluster" if not made else f"cluster-{len(made) + 1}")
        made.append(_build_cluster(directory, options))
        return made[-1]

    with contextlib.ExitStack() as stack:
        yield make
        for cluster in made:
            if request.node.stash[_FAILED]:
                stack.callback(cluster.stop)
            else:
                stack.push(cluster)  # its end raises if a planned action never ran


@pytest.fixture
def elastic_cluster(request: pytest.FixtureRequest, make_cluster: Callable[..., Cluster]) -> Cluster:
    """Return three simulated nodes, two of which suffice, or the nodes of the mark. `start` starts them."""
    options: dict[str, Any] = {}
    for mark in reversed(list(request.node.iter_markers(MARK_NAME))):  # the nearest mark wins
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
    flags = [*SNAPSHOT_EVERY_STEP, *options.get("flags", ())]  # if a flag is given twice, the last one counts
    return Cluster(directory, **{**defaults, **options, "flags": flags})


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, None]:
    """Add the report of the run and the last output of each node to a test that failed."""
    report: pytest.TestReport = (yield).get_result()
    if not report.failed:
        return
    item.stash[_FAILED] = True
    for cluster in item.stash.get(_CLUSTERS, []):
        report.sections.append((f"elastic-resume report {cluster.run_dir}", cluster.report_text()))
        # The error of a wait that timed out contains the output.
        shown = call.excinfo is not None and call.excinfo.typename == "ClusterTimeoutError"
        for index, node in enumerate(cluster.nodes if not shown else ()):
            lines = cluster.output(index).splitlines()
            text = "\n".join(lines[-TAIL_LINES:])
            report.sections.append((f"node {node.name}: its last lines, of {len(lines)}", text))
