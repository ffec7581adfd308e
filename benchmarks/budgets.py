"""Train with memory for three, two, one and no snapshot slots, and check that each case works and is logged.

One node with one worker trains a model and Adam of --megabytes, with a snapshot at every step and a
checkpoint at every fifth. The worker is killed once. The table shows for each memory limit: seconds per step,
the step and the source of the next generation, and the line that the node logs. Three slots need five times
the state's size of memory.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from pathlib import Path

from elastic_resume.testing.cluster import Cluster

HERE = Path(__file__).parent.absolute()
SCRIPT = HERE / "jobs" / "budgeted.py"
SAVE_EVERY, KILL_AT, STEPS = 5, 8, 12
SLACK = 1.2  # no whole number of layers gives the very size that is asked for


def measure(megabytes: int, slots: int, base: Path) -> str:
    """Run the job with memory for that many slots and return its row."""
    allowed = str(int(slots * megabytes * 1e6 * SLACK)) if slots else "off"
    flags = ["--snapshot-every", "1", "--save-every", str(SAVE_EVERY)]
    env = {
        "PYTHONPATH": str(HERE),
        "ELASTIC_RESUME_SNAPSHOT_MEMORY": allowed,
        "ELASTIC_RESUME_LOG_LEVEL": "DEBUG",
    }
    with Cluster(base / str(slots), nodes=1, flags=flags, env=env) as cluster:
        cluster.start(SCRIPT, str(megabytes), str(STEPS))
        cluster.wait(step=KILL_AT, timeout_s=600)
        cluster.kill_worker(0)
        (end,) = cluster.wait_exit(timeout_s=900)
        resumed = cluster.events("resume")[-1]
        output = cluster.output(0)
    logged = next((line for line in output.splitlines() if "snapshots: " in line), "(nothing was logged)")
    seconds = [float(line.split()[1]) for line in output.splitlines() if line.startswith("step_s ")]
    step_s = statistics.median(seconds)
    where = f"{resumed['source_tier'] or 'nowhere'} at step {resumed['step']}"
    ran = f"{step_s:6.2f} s a step, killed after step {KILL_AT}, continues from {where}, exit {end}"
    return f"{slots} slots: {ran}\n  {logged}"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--megabytes", type=int, default=3000)
    parser.add_argument(
        "--slots", type=lambda text: [int(one) for one in text.split(",")], default=[3, 2, 1, 0]
    )
    parser.add_argument("--dir", type=Path, help="where to write (default: here)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="budgets-", dir=options.dir or Path()) as base:
        for slots in options.slots:
            print(measure(options.megabytes, slots, Path(base).absolute()), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
