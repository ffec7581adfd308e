"""`make demo`: train real digits on three simulated nodes, break things, show what it cost.

First one worker is killed, then a whole node, agent and worker, which then comes back with an empty disk.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from pathlib import Path

from elastic_resume.events import Event
from elastic_resume.testing import Cluster

HERE = Path(__file__).parent
KEPT = HERE.parent / "demo-run"
EPOCHS = 10
STEP_DELAY_S = 0.15  # without it the whole training is over before anything can be killed

began = time.monotonic()


def say(text: str) -> None:
    print(f"{time.monotonic() - began:5.1f} s  {text}", flush=True)


def wait_world(cluster: Cluster, size: int, after: int) -> Event:
    """Wait until a generation later than ``after`` trains with ``size`` ranks; tell what it started from."""
    resumed = cluster.wait(
        lambda: next(
            (e for e in cluster.events("resume") if e["world_size"] == size and e["generation"] > after), None
        ),
        f"a world of {size} after generation {after}",
    )
    sent = (
        f", sent by {resumed['source_node']} to {', '.join(resumed['receiving_nodes'])}"
        if resumed["receiving_nodes"]
        else ""
    )
    lost = resumed["recomputed_steps"]
    say(
        f"generation {resumed['generation']}: {size} ranks go on at step {resumed['step'] + 1}{sent}; "
        f"{lost} {'step is' if lost == 1 else 'steps are'} run again"
    )
    return resumed


def break_things(cluster: Cluster) -> None:
    say("three nodes start: n0, n1, n2, one worker each")
    generation = int(wait_world(cluster, 3, 0)["generation"])

    step = int(cluster.wait(step=20)["step"])
    say(f"step {step}: kill -9 of the worker on n1")
    cluster.kill_worker(1)
    generation = int(wait_world(cluster, 3, generation)["generation"])

    step = int(cluster.wait(step=step + 15, generation=generation)["step"])
    say(f"step {step}: kill -9 of node n2, agent and worker")
    cluster.kill_node(2)
    generation = int(wait_world(cluster, 2, generation)["generation"])

    step = int(cluster.wait(step=step + 15, generation=generation)["step"])
    say(f"step {step}: node n2 is back, its disk is empty")
    cluster.wipe(2)
    cluster.start_node(2)
    wait_world(cluster, 3, generation)
    say("nothing more is broken; training goes on to its end")


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
        say(f"all nodes have ended, exit codes {codes}")
        printed = [line for line in cluster.output(0).splitlines() if line.startswith("test accuracy")]
    print(
        f"\n{printed[-1] if printed else 'no accuracy was printed'} (1,437 digits to train on, 360 to test)\n"
    )
    report = [sys.executable, "-m", "elastic_resume", "report", str(cluster.run_dir)]
    told = subprocess.run(report, check=False).returncode
    print(f"\nWhat the nodes printed is in {KEPT.name}/logs, what they wrote in {KEPT.name}/checkpoints.")
    return 0 if printed and set(codes) == {0} and told == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
