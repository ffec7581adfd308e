"""Measure on a GPU, in one command of at most six minutes; print each table as soon as it is there.

    tests      tests/gpu: killed jobs on the device end with the undisturbed bits, NCCL, CUDA graphs, NVML
    stalls     what a snapshot at every step costs, beside torch.save and dcp.async_save (checkpoint.py)
    resumes    er.resume() of a tenth of that size from memory, disk and another node (checkpoint.py)
    recovery   SIGKILL of a worker to the next step: in-process, with restarts, and torchrun (recovery.py).
               All ranks share the device, so they talk through gloo

A part that takes longer than its share is stopped; what it has printed stays. `--device cpu --megabytes 100`
rehearses all of it on a machine without a GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).parent
END_TIMEOUT_S = 10.0  # of a part that is stopped, for its own processes


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda", help="cuda, or cpu to rehearse")
    parser.add_argument("--megabytes", type=int, default=10_000, help="of the state, for the stalls")
    parser.add_argument("--only", default="tests,stalls,resumes,recovery", help="a comma-separated list")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="gpu-") as directory:  # on the disk of $TMPDIR
        return run_all(options, directory)


def run_all(options: argparse.Namespace, directory: str) -> int:
    """Run the chosen parts, which write into ``directory``; return 1 if one was not complete."""
    checkpoint = ["checkpoint.py", "--dir", directory]
    stalls = [*checkpoint, "--only", "stalls", "--sizes", str(options.megabytes), "--repetitions", "2"]
    size = str(max(options.megabytes // 10, 100))
    resumes = [*checkpoint, "--only", "resumes", "--sizes", size, "--repetitions", "1"]
    recovery = ["recovery.py", "--only", "in-process,ours,tuned", "--rows", "worker", "--kills", "3"]
    parts = {
        "tests": (["-m", "pytest", "-q", "-o", "addopts=", str(HERE.parent / "tests" / "gpu")], 110.0),
        "stalls": (stalls, 80.0),
        "resumes": (resumes, 60.0),
        "recovery": (recovery, 105.0),
    }
    failed = [name for name in options.only.split(",") if not run(name, *parts[name], device=options.device)]
    if failed:
        print(f"\nNot complete: {', '.join(failed)}.")
    return int(bool(failed))


def run(name: str, command: list[str], limit_s: float, *, device: str) -> bool:
    """Run one part with a limit; return whether it was complete."""
    print(f"\n== {name}", flush=True)
    began, env = time.monotonic(), {**os.environ, "BENCH_DEVICE": device}
    process = subprocess.Popen([sys.executable, *command], cwd=HERE, env=env, start_new_session=True)
    try:
        code = process.wait(limit_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGINT)  # it ends its own processes, and removes what it has written
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(END_TIMEOUT_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        print(f"== {name}: stopped after {limit_s:.0f} s", flush=True)
        return False
    print(f"== {name}: {time.monotonic() - began:.0f} s", flush=True)
    return code == 0


if __name__ == "__main__":
    sys.exit(main())
