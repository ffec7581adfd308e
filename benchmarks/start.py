"""Compare the start of a job with torchrun's, and with an earlier checkout of this project, in one run.

    line     `run --standalone --nproc-per-node 1` of a script that prints a line: wall and processor seconds
             of the command with all its processes
    step     seconds from the command until the first step of a DDP script (jobs/first_step.py) is finished:
             with er.resume() under elastic_resume, without it under torchrun
    rejoin   two nodes train. One is killed with all its processes, and its agent is started again: seconds
             from that until the first step in a world of two nodes. torchrun has no row; recovery.py
             measures what it does after a node's death

The systems take turns. ``--before DIRECTORY`` is a checkout of an earlier state with its own .venv. The first
turn compiles bytecode and is not counted.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psutil
from recovery import machine

SCRIPT = Path(__file__).with_name("jobs") / "first_step.py"
REJOIN_LIMIT_S = 120.0
Row = dict[str, float]


def torchrun() -> list[str]:
    """Return the command of torchrun."""
    return [sys.executable, "-m", "torch.distributed.run"]


def ours(checkout: Path | None, directory: Path) -> list[str]:
    """Return the command of elastic_resume, of this or another checkout."""
    python = sys.executable if checkout is None else str(checkout / ".venv" / "bin" / "python")
    return [python, "-m", "elastic_resume", "run", "--ckpt-dir", str(directory / "checkpoints")]


def measure_line(command: list[str], directory: Path) -> Row:
    """Run a script that prints a line."""
    script = directory / "line.py"
    script.write_text("print('a line')\n")
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    run_once([*command, "--standalone", "--nproc-per-node", "1", str(script)], directory)
    wall_s, after = time.monotonic() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"line wall": wall_s, "line processors": cpu_s}


def measure_step(command: list[str], directory: Path) -> Row:
    """Run a DDP script until its first step."""
    way = "plain" if "torch.distributed.run" in command else "resume"
    start = time.monotonic()
    words = ["--standalone", "--nproc-per-node", "1", str(SCRIPT), way, "1"]
    out = run_once([*command, *words], directory)
    return {"step": float(out.partition("first ")[2].split()[0]) - start}


def run_once(command: list[str], directory: Path) -> str:
    """Run a command in ``directory``; return its output."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(command, cwd=directory, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout


def measure_rejoin(command: list[str], directory: Path) -> Row:
    """Kill one of two nodes, start it again, and wait for a step of both."""
    if "torch.distributed.run" in command:
        return {}
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        endpoint = f"127.0.0.1:{probe.getsockname()[1]}"
    nodes: dict[str, subprocess.Popen[bytes]] = {}

    def start(name: str) -> None:
        words = [
            "--nnodes",
            "1:2",
            "--nproc-per-node",
            "1",
            "--rdzv-id",
            "start",
            "--rdzv-endpoint",
            endpoint,
        ]
        env = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "ELASTIC_RESUME_NODE_NAME": name}
        with open(directory / f"{name}.log", "ab") as log:
            nodes[name] = subprocess.Popen(
                [*command, *words, str(SCRIPT), "resume", "1000000"],
                cwd=directory,
                env={**os.environ, **env},
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait_for_world(size: int, since: float) -> float:
        limit = time.monotonic() + REJOIN_LIMIT_S
        while time.monotonic() < limit:
            lines = [line for name in nodes for line in (directory / f"{name}.log").read_text().splitlines()]
            marks = [line.split()[1:] for line in lines if line.startswith("first ")]
            times = [float(at) for at, world in marks if int(world) == size and float(at) > since]
            if len(times) >= size:
                return max(sorted(times)[:size])
            time.sleep(0.02)
        raise SystemExit(f"no world of {size} nodes within {REJOIN_LIMIT_S:.0f} s: see {directory}")

    try:
        start("n0")
        start("n1")
        wait_for_world(2, 0.0)
        time.sleep(3)  # wait for the imports that follow the start
        killed_at = time.monotonic()
        kill_node(nodes["n1"])
        wait_for_world(1, killed_at)
        time.sleep(1)
        started_at = time.monotonic()
        start("n1")
        return {"rejoin": wait_for_world(2, started_at) - started_at}
    finally:
        for process in nodes.values():
            kill_node(process)


def kill_node(agent: subprocess.Popen[bytes]) -> None:
    """Kill an agent and all of its descendants."""
    with contextlib.suppress(psutil.NoSuchProcess):
        processes = [psutil.Process(agent.pid), *psutil.Process(agent.pid).children(recursive=True)]
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGKILL)
    agent.wait()


MEASURES: dict[str, Callable[[list[str], Path], Row]] = {
    "line": measure_line,
    "step": measure_step,
    "rejoin": measure_rejoin,
}


def main() -> None:
    """Run the comparison and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--only", default=",".join(MEASURES), help="measures, separated by commas")
    parser.add_argument("--before", type=Path, help="a checkout of an earlier state, with a .venv")
    parser.add_argument("--json", type=Path, help="write the figures here too")
    args = parser.parse_args()
    rows: dict[str, dict[str, list[float]]] = {}
    systems = ["torchrun", "ours", *(["before"] if args.before else [])]
    for turn in range(args.repetitions + 1):
        for measure in args.only.split(","):
            for system in systems:
                with tempfile.TemporaryDirectory() as name:
                    directory = Path(name)
                    former = args.before.resolve() if system == "before" else None
                    command = torchrun() if system == "torchrun" else ours(former, directory)
                    figures = MEASURES[measure](command, directory)
                for key, seconds in figures.items() if turn else ():
                    rows.setdefault(key, {}).setdefault(system, []).append(seconds)
    medians = {
        key: {system: round(statistics.median(found), 3) for system, found in by_system.items()}
        for key, by_system in rows.items()
    }
    print(f"{'seconds, medians':<18}" + "".join(f"{system:>12}" for system in systems))
    for key, by_system in medians.items():
        print(f"{key:<18}" + "".join(f"{by_system.get(system, float('nan')):>12.2f}" for system in systems))
    if args.json:
        args.json.write_text(json.dumps({"machine": machine(), "medians": medians, "all": rows}, indent=1))


if __name__ == "__main__":
    main()
