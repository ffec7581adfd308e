"""A restartable worker without torch. In each generation it writes a file with its process until it parks.

A standby waits for the file ``NODE-ready`` of its node, and ends with an error if that has a text.
"""

from __future__ import annotations

import json
import os
import select
import socket
import sys
import time
from pathlib import Path

from elastic_resume.constants import PROGRESS_FILE
from elastic_resume.slots.progress_page import ProgressPage, WorkerProcess, read_start_ticks
from elastic_resume.training.worker_exit import open_event_log

directory = Path(sys.argv[1])
node, local_rank = os.environ["ELASTIC_RESUME_NODE_NAME"], os.environ["LOCAL_RANK"]
link = socket.socket(fileno=int(os.environ.pop("ELASTIC_RESUME_SUPERVISOR_FD")))


def begin_generation() -> None:
    """Report the start of this process, as a slow one, and leave a file about this generation."""
    generation, rank = int(os.environ["ELASTIC_RESUME_GENERATION"]), int(os.environ["RANK"])
    events = Path(os.environ["ELASTIC_RESUME_EVENTS_PATH"])
    log, world_size = open_event_log(events, node, rank), int(os.environ["WORLD_SIZE"])
    fields = {"generation": generation, "local_rank": int(local_rank)}
    log.emit("worker-start", **fields, step=100 * generation, world_size=world_size)
    pid, agent = os.getpid(), int(os.environ["ELASTIC_RESUME_AGENT_PID"])
    process = WorkerProcess(rank, agent, generation, pid, read_start_ticks(pid), 0, 0)
    page = ProgressPage(events.parent / PROGRESS_FILE)
    where = {"generation": generation, "step": 100 * generation, "world_size": world_size}
    page.start_generation(int(local_rank), **where, worker=process)
    page.finish_step(int(local_rank), 100 * generation + 1)
    log.emit("restartable", **fields, start_s=20.0, state_bytes=1 << 20)
    link.sendall(b"restartable\n")
    temporary = directory / f"tmp-{os.getpid()}"
    temporary.write_text(str(os.getpid()))
    temporary.rename(directory / f"{generation}-{node}-{local_rank}")


def resume(message: bytes) -> None:
    """Take on the environment that the supervisor sends; this worker needs no other streams."""
    header, _, environ = message.partition(b"\n")
    while len(environ) < int(header.split()[1]):
        environ += link.recv(1 << 20)
    os.environ.clear()
    os.environ.update(json.loads(environ))


if "ELASTIC_RESUME_EARLY_START" in os.environ:
    ready = directory / f"{node}-ready"
    while not ready.exists():
        time.sleep(0.01)
    if ready.read_text():
        raise ValueError(ready.read_text())
    link.sendall(b"parked\n")
else:
    begin_generation()
while not (directory / "stop").exists():
    if select.select([link], [], [], 0.05)[0]:
        message = link.recv(1 << 20)
        if message == b"park\n":
            link.sendall(b"parked\n")
        elif message:
            resume(message)
            begin_generation()
