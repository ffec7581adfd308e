"""Prints what a script sees of its start, as one of two workers, and fails; for test_warm_start.py."""

from __future__ import annotations

import atexit
import gc
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

# torch is imported where it is used, since a spawned process imports this file again.


class Result:
    """A class of the script itself, which another process sends here."""

    def __init__(self, value: object) -> None:
        self.value = value


def child(queue: Any) -> None:
    """Run in a process that multiprocessing started."""
    name = multiprocessing.current_process().name.split("-")[0]
    queue.put(Result((__name__ in {"__main__", "__mp_main__"}, name)))


def spawned(method: str) -> Any:
    """Return what a child of that kind sends, and its exit code."""
    context: Any = multiprocessing.get_context(method)
    queue = context.Queue()
    process = context.Process(target=child, args=(queue,))
    process.start()
    value = queue.get().value
    process.join()
    return value, process.exitcode


def loaded() -> list[list[int]]:
    """Return two epochs of batches from two persistent DataLoader workers."""
    from torch.utils.data import DataLoader  # noqa: PLC0415

    squares: Any = [number * number for number in range(8)]
    loader: Any = DataLoader(squares, batch_size=4, num_workers=2, persistent_workers=True)
    return [batch.tolist() for _ in range(2) for batch in loader]


def list_descriptors() -> list[str]:
    """List the open files, without the socket to the supervisor."""
    found = set(os.listdir("/proc/self/fd")) - {os.environ.get("ELASTIC_RESUME_SUPERVISOR_FD")}  # noqa: PTH208
    return sorted(number for number in found if Path(f"/proc/self/fd/{number}").exists())


def facts() -> dict[str, Any]:
    """Return all that must not depend on how this script was started."""
    import torch  # noqa: PLC0415

    main = sys.modules["__main__"]
    return {
        "main": {
            name: repr(getattr(main, name)) for name in ("__name__", "__file__", "__package__", "__spec__")
        },
        "loader": type(main.__loader__).__name__,
        "annotations": getattr(main, "__annotations__", None),
        "argv": sys.argv,
        "orig_argv": sys.orig_argv[1:],
        "path": sys.path[:3],
        "executable": sys.executable,
        "cwd": str(Path.cwd()),
        "input": sys.stdin.read(),
        "streams": [
            [getattr(stream, name) for name in ("encoding", "errors", "line_buffering", "write_through")]
            for stream in (sys.stdout, sys.stderr)
        ],
        "descriptors": list_descriptors(),
        "signals": {n.name: str(signal.getsignal(n)) for n in signal.Signals if n not in {9, 19}},
        "mask": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
        "umask": [os.umask(0o22), os.umask(0o22)],
        "cpus": sorted(os.sched_getaffinity(0)),
        "session": os.getsid(0) == os.getpid(),
        "gc": gc.isenabled(),
        "threads": [thread.name for thread in threading.enumerate()],
        "main thread": threading.current_thread() is threading.main_thread(),
        "native id": threading.main_thread().native_id == os.getpid(),
        "stdin": [sys.stdin is sys.__stdin__, sys.stdin.name],
        "torch threads": torch.get_num_threads(),
        "environ": {
            k: v for k, v in os.environ.items() if not k.startswith(("ELASTIC_RESUME", "PYTEST", "_"))
        },
        "ours": "ELASTIC_RESUME_FORK_SERVER" in os.environ or "ELASTIC_RESUME_LEASE_PAGE" in os.environ,
        "processes": [spawned("fork"), spawned("spawn")],
        "batches": loaded(),
        "subprocess": subprocess.check_output(["/bin/echo", "said"], text=True),
    }


def main() -> None:
    """Print the facts, and print again from a thread and at exit."""
    print(json.dumps(facts()))
    atexit.register(print, "at exit")
    timer = threading.Timer(0.2, print, ["from a thread"])
    timer.start()
    while not Path("rank-1").exists():  # the failure of rank 0 ends rank 1 too
        time.sleep(0.01)
    raise ValueError("rank 0 fails")


def stand_by() -> None:
    """Print the ranks and sleep until a signal. Imports no torch."""
    print("rank", os.environ["RANK"], "local", os.environ["LOCAL_RANK"])
    Path("rank-1").touch()
    time.sleep(600)


if __name__ == "__main__":
    if os.environ["RANK"] == "1":
        stand_by()
    from torch.distributed.elastic.multiprocessing.errors import record

    record(main)()
