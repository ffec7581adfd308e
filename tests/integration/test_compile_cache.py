"""Test that a node without compiled code gets that of its peers, and that a damaged one is not loaded."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from elastic_resume.testing import Cluster
from tests.support.paths import SCRIPTS

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]

COMPILED = SCRIPTS / "compiled.py"
COMPILE_S = 300.0  # on a busy machine


class Replaced(NamedTuple):
    """What a job with a replaced node has shown."""

    before: dict[str, Any]
    """What the first step of rank 1 has counted in its first generation."""
    after: dict[str, Any]
    """The same of the process that replaced it, on an empty node."""
    loaded: list[tuple[str, int | None]]
    """Each node that has loaded artifacts, with the rank from which it got them."""
    peer_log: str


def replace_node(
    directory: Path, *flags: str, meanwhile: Callable[[Cluster], object] = lambda _: None
) -> Replaced:
    """Train on two nodes, and replace the second by an empty one; ``meanwhile`` no node trains.

    Nodes on one machine would share torch's cache in /tmp, so each gets its own.
    """
    interval = ("--snapshot-every", "1", "--save-every", "5")
    with Cluster(directory / "job", nodes=2, flags=[*interval, *flags]) as cluster:

        def start(index: int, cache: str) -> None:
            cluster.start_node(index, env={"TORCHINDUCTOR_CACHE_DIR": str(directory / "inductor" / cache)})

        def read_counts(generation: int) -> dict[str, Any]:
            path = directory / f"g{generation}-r1.json"
            cluster.wait(path.exists, f"the first step of generation {generation}", COMPILE_S)
            return dict(json.loads(path.read_text()))

        cluster.start(COMPILED, str(directory), "0", only=[])  # the script of both
        start(0, "n0")
        start(1, "n1")
        before = read_counts(1)
        if flags:
            path = cluster.nodes[0].directory / "compile-cache/rank0"
            cluster.wait(path.exists, "the file of node 0", COMPILE_S)
        cluster.wait(step=3, timeout_s=COMPILE_S)
        cluster.kill_node(1)
        cluster.wipe(1)
        meanwhile(cluster)
        start(1, "replaced")
        after = read_counts(2)
        (directory / "end").touch()
        assert cluster.wait_exit(COMPILE_S) == [0, 0]
        loaded = [(event["node"], event["source_rank"]) for event in cluster.events("compile-cache")]
        return Replaced(before, after, loaded, cluster.output(0))


def test_empty_node_compiles_nothing_that_its_peer_has_compiled(tmp_path: Path) -> None:
    """Its compiler finds all in its cache, before its first forward pass."""
    found = replace_node(tmp_path, "--share-compile-cache")
    misses = found.before["inductor"]["fxgraph_cache_miss"]
    assert misses > 0
    assert "fxgraph_cache_hit" not in found.before["inductor"]
    assert found.after["inductor"]["fxgraph_cache_hit"] == misses
    assert "fxgraph_cache_miss" not in found.after["inductor"]
    assert found.after["aot_autograd"]["autograd_cache_hit"] > 0
    assert sorted(found.loaded) == [("n0", None), ("n1", 0)]


@pytest.mark.soak
def test_without_the_flag_an_empty_node_compiles_again(tmp_path: Path) -> None:
    """So the test above sees what the flag does. Nothing of it is imported or kept."""
    found = replace_node(tmp_path)
    assert found.after["inductor"]["fxgraph_cache_miss"] == found.before["inductor"]["fxgraph_cache_miss"] > 0
    assert "fxgraph_cache_hit" not in found.after["inductor"]
    assert (found.after["imported"], found.loaded) == (False, [])
    assert not list(tmp_path.rglob("compile-cache"))


@pytest.mark.soak
def test_damaged_artifacts_cost_a_compilation_and_not_the_job(tmp_path: Path) -> None:
    """A bit flips on the disk of the only node that has them."""

    def damage(cluster: Cluster) -> None:
        path = cluster.nodes[0].directory / "compile-cache/rank0"
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 4
        path.write_bytes(data)

    found = replace_node(tmp_path, "--share-compile-cache", meanwhile=damage)
    assert found.after["inductor"]["fxgraph_cache_miss"] == found.before["inductor"]["fxgraph_cache_miss"] > 0
    assert found.loaded == []
    assert "is not used: it is damaged: its digest is another one" in found.peer_log
