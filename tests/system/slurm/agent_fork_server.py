"""On a simulated node: `elastic-resume` starts in a moment, forked from a process that has imported torch.

Run as ``python -m tests.system.slurm.agent_fork_server SOCKET`` on each node, it serves `SHIM`, to which a
job's PATH leads. The task that Slurm starts is the shim; it passes on what Slurm signals, and ends as the
agent ends. The agent, and all that it starts, is born into the shim's control group, so Slurm finds and kills
it as any process of the step. What is left out of a real start is ten seconds of importing.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
from pathlib import Path

from elastic_resume.testing import fork_server_main
from elastic_resume.testing.fork_server import AgentForkServer

FREEZER = Path("/sys/fs/cgroup/freezer")
SHIM = """#!{python} -IS
import json, os, signal, socket, sys, time
group = next(line.split(":")[2].strip() for line in open("/proc/self/cgroup") if ":freezer:" in line)
told = {{"argv": sys.argv[1:], "env": dict(os.environ), "cwd": os.getcwd(), "group": group}}
passed_on = [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2]
signal.pthread_sigmask(signal.SIG_BLOCK, passed_on)
line = socket.socket(socket.AF_UNIX)
for _ in range(600):  # a node that has just booted may have jobs before it has this
    if line.connect_ex("{socket}") == 0:
        break
    time.sleep(0.05)
data = json.dumps(told).encode()
socket.send_fds(line, [len(data).to_bytes(4, "big")], [1])
line.sendall(data)
answers = line.makefile()
pid = int(answers.readline())
for each in passed_on:
    signal.signal(each, lambda number, frame: os.kill(pid, number))
signal.pthread_sigmask(signal.SIG_UNBLOCK, passed_on)
code = int(answers.readline())
if code < 0:
    signal.signal(-code, signal.SIG_DFL) if code != -9 else None
    os.kill(os.getpid(), -code)
sys.exit(code)
"""


class SlurmAgentServer:
    """Forks agents for shims that ask."""

    def __init__(self) -> None:
        self._fork_server = AgentForkServer({**os.environ, "OMP_NUM_THREADS": "1"})
        self._lock = threading.Lock()

    def serve(self, connection: socket.socket) -> None:
        """Serve one shim: fork its agent, tell its process id, and its exit code when it has ended."""
        with connection:
            told, (output,) = fork_server_main.receive(connection, 1)
            command = [sys.executable, "-m", "elastic_resume", *told["argv"]]
            with self._lock:
                self._move_fork_server(told["group"])
                agent = self._fork_server.fork(
                    command, told["env"], output, cwd=Path(told["cwd"]), network=""
                )
                self._move_fork_server("/")
            os.close(output)
            connection.sendall(f"{agent.pid}\n".encode())
            connection.sendall(f"{agent.wait()}\n".encode())

    def _move_fork_server(self, group: str) -> None:
        """Have what is forked from now on be born there."""
        procs = FREEZER / group.lstrip("/") / "cgroup.procs"
        procs.write_text(str(self._fork_server._process.pid))


def main() -> None:
    """Serve for ever."""
    hatchery = SlurmAgentServer()
    with socket.socket(socket.AF_UNIX) as door:
        door.bind(sys.argv[1])
        door.listen()
        while True:
            line, _ = door.accept()
            threading.Thread(target=hatchery.serve, args=[line], daemon=True).start()


if __name__ == "__main__":
    main()
