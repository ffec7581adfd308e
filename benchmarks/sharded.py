"""Compare a model that is sharded over the ranks of each node with the same model under DDP.

Two nodes of two ranks train a model and Adam of --megabytes, with a snapshot at every step. The two ways take
turns, --repetitions times. In each turn a worker is killed, then a node, which comes back empty; then the job
ends and is started once more. The rows of the table, each with the median of both ways and their ratio:

    stall       how long a rank waits for a snapshot, the mean of one generation
    commit      from memory to a node's disk, digests and fsync included
    resume      from the node's memory, with the transfer to an empty node, and from disk
    peak        memory of its own that a rank has had at the end of er.resume(), without the slots

A node's state has the same bytes both ways; each rank of a sharded model holds half of it. The target is a
ratio of 1.1 at most.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

from elastic_resume.testing.cluster import Cluster

HERE = Path(__file__).parent.absolute()
SCRIPT = HERE / "jobs" / "sharded_or_not.py"
MODES = ("ddp", "sharded")
KILL_WORKER_AT, KILL_NODE_AT, SAVE_EVERY, STEPS, MORE_STEPS = 3, 6, 4, 12, 20
TARGET = 1.1
Figures = dict[str, list[float]]


def measure(mode: str, megabytes: int, base: Path) -> Figures:
    """Run one turn of one way."""
    flags = ["--snapshot-every", "1", "--save-every", str(SAVE_EVERY)]
    figures: Figures = defaultdict(list)
    with Cluster(base, nodes=2, workers_per_node=2, flags=flags, env={"PYTHONPATH": str(HERE)}) as cluster:

        def run_to(steps: int) -> None:
            codes = cluster.wait_exit(timeout_s=600)
            if any(codes):
                raise SystemExit(f"the job of {steps} steps ended with {codes}:\n{cluster.output_tails()}")

        cluster.start(SCRIPT, mode, str(megabytes), str(STEPS))
        cluster.wait(step=KILL_WORKER_AT, timeout_s=600)
        cluster.kill_worker(0, 1)
        cluster.wait(step=KILL_NODE_AT, timeout_s=600)
        cluster.kill_node(1)
        cluster.wipe(1)
        cluster.start_node(1)
        run_to(STEPS)
        cluster.start(SCRIPT, mode, str(megabytes), str(MORE_STEPS))
        run_to(MORE_STEPS)
        for event in cluster.events("resume"):
            if event["source_tier"]:
                kind = "with transfer" if event["receiving_nodes"] else f"from {event['source_tier']}"
                figures[f"resume {kind}, s"].append(event["seconds"])
        figures["commit, s"] += [event["seconds"] for event in cluster.events("commit")]
        last = max(event["generation"] for event in cluster.events("run-end"))
        ends = [event for event in cluster.events("run-end") if event["generation"] == last]
        taken = MORE_STEPS - STEPS
        figures["stall, ms"] += [event["stalled_s"] / taken * 1e3 for event in ends]
        for line in "\n".join(map(cluster.output, range(2))).splitlines():
            if line.startswith("peak_mb "):
                figures["peak, MB"].append(float(line.split()[2]))
    return figures


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--megabytes", type=int, default=600, help="of a node's state (default 600)")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--dir", type=Path, help="where to write: the disk that is measured (default: here)")
    options = parser.parse_args()
    found: dict[str, Figures] = {mode: defaultdict(list) for mode in MODES}
    with tempfile.TemporaryDirectory(prefix="sharded-", dir=options.dir or Path()) as base:
        for turn in range(options.repetitions):
            for mode in MODES:
                directory = Path(base).absolute() / f"{turn}-{mode}"
                for name, values in measure(mode, options.megabytes, directory).items():
                    found[mode][name] += values
    print(f"{options.megabytes} MB on each node{'DDP':>24}{'sharded':>10}{'ratio':>8}")
    for name in sorted(found["ddp"]):
        ddp, sharded = (statistics.median(found[mode][name]) for mode in MODES)
        verdict = "met" if sharded <= TARGET * ddp else "MISSED"
        print(f"  {name:32}{ddp:10.3f}{sharded:10.3f}{sharded / ddp:8.2f}  {verdict} (<= {TARGET:g})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
