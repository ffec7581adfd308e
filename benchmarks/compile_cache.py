"""Measure the first step of a node that replaces another, of a compiled model, with and without shared code.

    without   nothing is shared: the new node compiles
    with      --share-compile-cache: it gets its peers' artifacts
    directory both nodes have one TORCHINDUCTOR_CACHE_DIR, as on a network file system (here a local disk)

The three take turns. For each the first step of the new node is measured in wall seconds and in processor
seconds of the worker and of its children, such as the C++ compiler, and what the mechanism has loaded.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from recovery import machine

from elastic_resume.testing import Cluster

SCRIPT = Path(__file__).parents[1] / "tests/support/scripts/compiled.py"
VARIANTS = ("without", "with", "directory")
LIMIT_S = 900.0


def measure(variant: str, layers: int) -> dict[str, float]:
    """Replace a node of two by an empty one; return the figures of its first step."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        flags = ["--snapshot-every", "1", *(["--share-compile-cache"] if variant == "with" else [])]
        with Cluster(directory / "job", nodes=2, flags=flags) as cluster:

            def start(index: int, cache: str) -> None:
                path = directory / "inductor" / ("shared" if variant == "directory" else cache)
                # Else the second compilation of a machine finds the header that the first has compiled.
                temporary = directory / "tmp" / cache
                temporary.mkdir(parents=True)
                cluster.start_node(index, {"TORCHINDUCTOR_CACHE_DIR": str(path), "TMPDIR": str(temporary)})

            def read(generation: int) -> dict[str, Any]:
                path = directory / f"g{generation}-r1.json"
                cluster.wait(path.exists, f"generation {generation}", LIMIT_S)
                return dict(json.loads(path.read_text()))

            cluster.start(SCRIPT, str(directory), str(layers), only=[])
            start(0, "n0")
            start(1, "n1")
            read(1)
            if variant == "with":
                file = cluster.nodes[0].directory / "compile-cache/rank0"
                cluster.wait(file.exists, "the peer's file", LIMIT_S)
            cluster.wait(step=4, timeout_s=LIMIT_S)
            cluster.kill_node(1)
            cluster.wipe(1)
            start(1, "replaced")
            found = read(2)
            (directory / "end").touch()
            cluster.wait_exit(LIMIT_S)
            loaded = cluster.node_events(1, "compile-cache")
    return {
        "wall s": found["seconds"],
        "processor s": found["own_cpu_s"] + found["children_cpu_s"],
        "hits": found["inductor"].get("fxgraph_cache_hit", 0),
        "misses": found["inductor"].get("fxgraph_cache_miss", 0),
        "MB": sum(event["bytes"] for event in loaded) / 1e6,
        "load s": sum(event["seconds"] for event in loaded),
    }


def main() -> None:
    """Print the medians of each variant, and their ratios to the first."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--layers", type=int, default=8)
    args = parser.parse_args()
    print(machine())
    rows: dict[str, list[dict[str, float]]] = {variant: [] for variant in VARIANTS}
    for number in range(args.rounds):
        for variant in VARIANTS:
            row = measure(variant, args.layers)
            rows[variant].append(row)
            figures = ", ".join(f"{name} {value:.3g}" for name, value in row.items())
            print(f"round {number + 1}, {variant}: {figures}", flush=True)
    for figure in ("wall s", "processor s"):
        medians = {name: statistics.median(row[figure] for row in found) for name, found in rows.items()}
        ratios = ", ".join(f"{name} {value / medians['without']:.2f}" for name, value in medians.items())
        print(f"{figure}: {ratios} of without ({medians['without']:.1f})")


if __name__ == "__main__":
    main()
