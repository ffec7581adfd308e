"""Test that a node without compiled code gets that of its peers, and that nobody loads what is not the job's."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from elastic_resume.testing import Cluster
from tests.support.paths import SCRIPTS

pytestmark = pytest.mark.cluster

COMPILED = SCRIPTS / "compiled.py"
FLAGS = ("--snapshot-every", "1", "--save-every", "5")
COMPILE_S = 300.0  # on a busy machine


def caches(directory: Path, name: str) -> Mapping[str, str]:
    """Return the variables of a node whose compiler has a cache of its own: simulated nodes share /tmp."""
    return {"TORCHINDUCTOR_CACHE_DIR": str(directory / "inductor" / name)}


def read_counters(cluster: Cluster, directory: Path, generation: int, rank: int) -> dict[str, Any]:
    """Return the counters of a rank's first step in a generation."""
    path = directory / f"g{generation}-r{rank}.json"
    cluster.wait(path.exists, f"the first step of rank {rank} in generation {generation}", COMPILE_S)
    return dict(json.loads(path.read_text()))


def replace_a_node(directory: Path, *flags: str) -> tuple[dict[str, Any], dict[str, Any], list[Any]]:
    """Train on two nodes, replace the second by an empty one.

    Return the counters of its first step before and after, and the events of what was loaded.
    """
    with Cluster(directory / "job", nodes=2, flags=[*FLAGS, *flags]) as cluster:
        for index in range(2):
            cluster.start(COMPILED, str(directory), only=[])  # it notes the script
            cluster.start_node(index, env=caches(directory, f"n{index}"))
        before = read_counters(cluster, directory, 1, 1)
        cluster.wait(step=5, timeout_s=COMPILE_S)
        cluster.kill_node(1)
        cluster.wipe(1)
        cluster.start_node(1, env=caches(directory, "new"))
        after = read_counters(cluster, directory, 2, 1)
        (directory / "end").touch()
        assert cluster.wait_exit() == [0, 0]
        return before, after, cluster.events("compile-cache")


def test_empty_node_finds_in_its_cache_what_its_peer_has_compiled(tmp_path: Path) -> None:
    """Its compiler misses nothing. The peer kept its process's cache on disk, and the new node has none."""
    before, after, loaded = replace_a_node(tmp_path, "--share-compile-cache")
    assert before["inductor"]["fxgraph_cache_miss"] > 0
    assert before["inductor"].get("fxgraph_cache_hit", 0) == 0
    assert after["inductor"]["fxgraph_cache_hit"] == before["inductor"]["fxgraph_cache_miss"]
    assert after["inductor"].get("fxgraph_cache_miss", 0) == 0
    assert after["aot_autograd"].get("autograd_cache_hit", 0) > 0
    print(before, after, loaded)
