"""Answer in a worker what the agent asks about a stalled rank: where it stands.

Under an agent each worker can be examined in two ways:

- A thread waits for a byte in a pipe, and answers with the number of collectives, then with torch's flight
  recorder. It needs the GIL: without an answer, something holds the GIL.
- `STACKS_SIGNAL` makes faulthandler write the stacks of all threads without the GIL, even from a blocked
  native call.

Both write into a memfd, so a hanging disk hides nothing and no file is left behind. Without a request there
is no cost.
"""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import json
import os
import sys
import threading
from collections.abc import Callable
from itertools import accumulate, takewhile
from typing import Any

from elastic_resume import linux
from elastic_resume.slots.progress_page import STACKS_SIGNAL

# NCCL has a recorder of its own; torch 2.15 also keeps those of its newer NCCL backends apart.
FLIGHT_RECORDERS: tuple[tuple[str, str, dict[str, str]], ...] = (
    ("gloo", "_dump_fr_trace_json", {}),
    ("nccl", "_dump_nccl_trace_json", {}),
    *((name, "_dump_fr_trace_json", {"backend": name}) for name in ("nccl2", "nccl-lazy")),
)
MAX_ENTRIES_BYTES = 512 * 1024  # of one recorder: about 1,000 entries, as many as CUDA queues kernels
MAX_FIELD_BYTES = 64 * 1024


def open_answers(count_collectives: Callable[[], int]) -> tuple[int, int]:
    """Create the memfd for answers and start the thread; return the memfd and the pipe's writing end."""
    stacks_fd = linux.create_anonymous_file("elastic_resume-stacks")
    fcntl.fcntl(stacks_fd, fcntl.F_SETFL, os.O_APPEND)
    faulthandler.register(STACKS_SIGNAL, file=stacks_fd, all_threads=True, chain=False)
    read_fd, write_fd = os.pipe()
    threading.Thread(
        target=_serve_requests,
        args=(read_fd, stacks_fd, count_collectives),
        name="elastic-resume-answers",
        daemon=True,
    ).start()
    return stacks_fd, write_fd


def _serve_requests(request_fd: int, stacks_fd: int, count_collectives: Callable[[], int]) -> None:
    with contextlib.suppress(OSError):  # the script has closed all descriptors
        while os.read(request_fd, 64):
            _write_answer(stacks_fd, {"collectives": count_collectives()})
            # Second: reading 20,000 entries takes a second, and longer if a CUDA device does not respond.
            _write_answer(stacks_fd, {"flight_recorder": dump_flight_recorders()})


def _write_answer(stacks_fd: int, answer: dict[str, Any]) -> None:
    os.write(stacks_fd, b"\n" + json.dumps(answer).encode() + b"\n")


def dump_flight_recorders() -> dict[str, Any]:
    """Return the newest entries of each of torch's flight recorders that has any."""
    c10d = sys.modules.get("torch._C._distributed_c10d")  # a private module that not every build has
    found = {}
    for name, function, options in FLIGHT_RECORDERS:
        dump: Callable[..., bytes] | None = getattr(c10d, function, None)
        with contextlib.suppress(RuntimeError, ValueError, TypeError, AttributeError):  # an older torch
            trace = json.loads(dump(**options)) if dump is not None else {}
            if trace.get("entries"):
                found[name] = _keep_newest(trace)
    return found


def _keep_newest(trace: dict[str, Any]) -> dict[str, Any]:
    """Drop the oldest entries beyond `MAX_ENTRIES_BYTES`, and other fields beyond `MAX_FIELD_BYTES`."""
    entries = trace.pop("entries")
    lengths = accumulate(len(json.dumps(entry)) for entry in reversed(entries))
    first = len(entries) - sum(1 for _ in takewhile(MAX_ENTRIES_BYTES.__ge__, lengths))
    kept = {name: value for name, value in trace.items() if len(json.dumps(value)) <= MAX_FIELD_BYTES}
    return {**kept, "entries": entries[first:]}
