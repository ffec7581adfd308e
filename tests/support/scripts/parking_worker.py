"""A worker without torch that parks when its supervisor asks for it, and resumes.

At its start and whenever it resumes it prints its process, rank, generation and lease page. Its arguments:
``stops`` and ``ignores`` say what it does instead of parking; it sends ``waiting N`` and ``unrestartable`` at
its start; with ``standby FILE`` it parks once the file exists.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from pathlib import Path

link = socket.socket(fileno=int(os.environ.pop("ELASTIC_RESUME_SUPERVISOR_FD")))
buffer = b""
streams: list[int] = []


def take(size: int) -> bytes:
    """Return the next bytes of the supervisor, or its next line if ``size`` is 0; keep received streams."""
    global buffer  # noqa: PLW0603
    while len(buffer) < size or (not size and b"\n" not in buffer):
        data, received, _, _ = socket.recv_fds(link, 65536, 3)
        if not data:
            sys.exit(1)
        buffer += data
        streams.extend(received)
    size = size or buffer.index(b"\n") + 1
    taken, buffer = buffer[:size], buffer[size:]
    return taken


def print_facts() -> None:
    """Print what changes when this worker resumes."""
    names = ("RANK", "ELASTIC_RESUME_GENERATION", "ELASTIC_RESUME_LEASE_PAGE")
    print(os.getpid(), *map(os.environ.get, names), flush=True)


signal.signal(signal.SIGTERM, lambda *_: sys.exit(9))
if "standby" in sys.argv:
    while not Path(sys.argv[-1]).exists():
        time.sleep(0.01)
    link.sendall(b"parked\n")
else:
    link.sendall(b"".join(b"%b\n" % word.encode() for word in ("restartable", *sys.argv[1:])))
    print_facts()
while True:
    words = take(0).split()
    if words == [b"park"]:
        os.write(2, b"park\n")
        if "stops" in sys.argv:
            os.kill(os.getpid(), signal.SIGSTOP)
        elif "ignores" not in sys.argv:
            link.sendall(b"parked\n")
        continue
    environ = json.loads(take(int(words[1])))
    os.environ.clear()
    os.environ.update(environ)
    for target, stream in enumerate(streams):
        os.dup2(stream, target)
        os.close(stream)
    streams.clear()
    print_facts()
    link.sendall(b"restartable\n")
