"""Compare a model that is sharded over the ranks of each node with the same model under DDP.

Two nodes of two ranks train a model and Adam of --megabytes, with a snapshot at every step. The two ways take
turns, --repetitions times. In each turn a worker is killed, then a node, which comes back empty; then the job
ends and is started once more. The rows of the table, each with the median of both ways and their ratio:

    stall       how long the slowest rank waits for a snapshot in each step: the mean of the last generation.
                With DDP that is the rank which copies its node's state; the shards are copied by all
    commit      from memory to a node's disk, digests and fsync included
    resume      after a worker's death, after a node's death with the transfer to it, and from disk
    memory      what er.resume() adds to a rank's own memory at its peak, without the slots. It loads the
                optimizer's state, which is two thirds of what the rank holds

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
KILL_WORKER_AT, KILL_NODE_AT, SAVE_EVERY, EPOCHS = 3, 6, 4, 2
RESUMES = ("after a worker's death", "with transfer", "from disk")
TARGET = 1.1
Figures = dict[str, list[float]]


def measure(mode: str, megabytes: int, base: Path) -> Figures:
    """Run one turn of one way."""
    flags = ["--snapshot-every", "1", "--save-every", str(SAVE_EVERY)]
    figures: Figures = defaultdict(list)
    with Cluster(base, nodes=2, workers_per_node=2, flags=flags, env={"PYTHONPATH": str(HERE)}) as cluster:

        def wait_for_end() -> None:
            if any(codes := cluster.wait_exit(timeout_s=600)):
                raise SystemExit(f"the job ended with {codes}:\n{cluster.output_tails()}")

        cluster.start(SCRIPT, mode, str(megabytes), "1")
        cluster.wait(step=KILL_WORKER_AT, timeout_s=600)
        cluster.kill_worker(0, 1)
        cluster.wait(step=KILL_NODE_AT, timeout_s=600)
        cluster.kill_node(1)
        cluster.wipe(1)
        cluster.start_node(1)
        wait_for_end()
        cluster.start(SCRIPT, mode, str(megabytes), str(EPOCHS))
        wait_for_end()
        _, *resumed = cluster.events("resume")
        for kind, event in zip(RESUMES, resumed, strict=True):
            figures[f"resume {kind}, s"].append(event["seconds"])
        figures["commit, s"] += [event["seconds"] for event in cluster.events("commit")]
        last = resumed[-1]["generation"]
        stalls = []
        for rank in range(4):
            steps = [event for event in cluster.events("step") if event["generation"] == last]
            first, *_, end = [event for event in steps if event["rank"] == rank]
            stalls.append((end["stalled_s"] - first["stalled_s"]) / (end["step"] - first["step"]) * 1e3)
        figures["stall of a step, ms"].append(max(stalls))
        for line in "\n".join(map(cluster.output, range(2))).splitlines():
            if line.startswith("added_mb ") and line.split()[1] != "0":
                figures["memory, MB"].append(float(line.split()[2]))
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
    print(f"{f'{options.megabytes} MB on each node':38}{'DDP':>10}{'sharded':>10}{'ratio':>8}")
    for name in sorted(found["ddp"]):
        ddp, sharded = (statistics.median(found[mode][name]) for mode in MODES)
        verdict = "met" if sharded <= TARGET * ddp else "MISSED"
        print(f"  {name:36}{ddp:10.3f}{sharded:10.3f}{sharded / ddp:8.2f}  {verdict} (<= {TARGET:g})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
