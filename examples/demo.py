"""`make demo`: train on three simulated nodes, kill some, and show what it cost.

It kills a worker, then a whole node with its agent, and starts that node again with an empty disk.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from pathlib import Path

from elastic_resume.events import Event
from elastic_resume.testing import Cluster, ClusterTimeoutError

HERE = Path(__file__).parent
KEPT = HERE.parent / "demo-run"
EPOCHS = 15
STEP_DELAY_S = 0.15  # without it, training ends before anything can be killed

STARTED_AT = time.monotonic()


def log(text: str) -> None:
    print(f"{time.monotonic() - STARTED_AT:5.1f} s  {text}", flush=True)


def wait_world(cluster: Cluster, size: int, after: int) -> Event:
    """Wait until a generation later than ``after`` trains with ``size`` ranks; print where it continues."""
    resumed = cluster.wait(
        lambda: next(
            (e for e in cluster.events("resume") if e["world_size"] == size and e["generation"] > after), None
        ),
        f"a world of {size} after generation {after}",
    )
    sent = (
        f", state sent by {resumed['source_node']} to {', '.join(resumed['receiving_nodes'])}"
        if resumed["receiving_nodes"]
        else ""
    )
    log(
        f"generation {resumed['generation']}: {size} ranks continue at step {resumed['step'] + 1}{sent}; "
        f"steps recomputed: {resumed['recomputed_steps']}"
    )
    return resumed


def break_things(cluster: Cluster) -> None:
    log("starting three nodes: n0, n1, n2, one worker each")
    generation = int(wait_world(cluster, 3, 0)["generation"])

    step = int(cluster.wait(step=20)["step"])
    log(f"step {step}: kill -9 of the worker on n1")
    cluster.kill_worker(1)
    generation = int(wait_world(cluster, 3, generation)["generation"])

    step = int(cluster.wait(step=step + 15, generation=generation)["step"])
    log(f"step {step}: kill -9 of node n2, agent and worker")
    cluster.kill_node(2)
    generation = int(wait_world(cluster, 2, generation)["generation"])

    step = int(cluster.wait(step=step + 15, generation=generation)["step"])
    log(f"step {step}: starting node n2 again, with an empty disk")
    cluster.wipe(2)
    cluster.start_node(2)
    try:
        wait_world(cluster, 3, generation)
    except ClusterTimeoutError:
        if cluster.wait_exit() != [0, 0, 0]:
            raise
        log("training ended before n2 had joined; this machine is busy")
    else:
        log("no more failures; training continues to its end")


def main() -> int:
    shutil.rmtree(KEPT, ignore_errors=True)
    with Cluster(
        KEPT,
        nodes=3,
        min_nodes=2,
        fresh=True,
        run_id="digits",
        flags=["--save-every", "10", "--preload", "sklearn.datasets"],
    ) as cluster:
        cluster.start(HERE / "digits.py", "--epochs", str(EPOCHS), "--step-delay", str(STEP_DELAY_S))
        break_things(cluster)
        codes = cluster.wait_exit()
        log(f"all nodes ended with exit codes {codes}")
        printed = [line for line in cluster.output(0).splitlines() if line.startswith("test accuracy")]
    print(
        f"\n{printed[-1] if printed else 'no accuracy was printed'} (1,437 digits to train on, 360 to test)\n"
    )
    report = [sys.executable, "-m", "elastic_resume", "report", str(cluster.run_dir)]
    report_code = subprocess.run(report, check=False).returncode
    print(f"\nThe nodes' output is in {KEPT.name}/logs, their checkpoints in {KEPT.name}/checkpoints.")
    return 0 if printed and set(codes) == {0} and report_code == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
