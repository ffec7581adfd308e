"""Start `elastic-resume` on simulated machines as a fork of a process that has imported torch.

This saves ten seconds per start; all else is as on a real machine.

A machine's PATH leads to `SHIM`. The process that Slurm or a test starts is the shim; it passes signals on,
and ends as the agent ends. One process of the host forks the agents of all machines. An agent enters the
shim's namespaces and control group, so Slurm finds and kills it as any process of the step.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[2])

from elastic_resume.agent.workers import forkserver
from elastic_resume.local_socket import read_peer, receive_message
from elastic_resume.testing import fork_server
from elastic_resume.testing.fork_server import AgentForkServer
from tests.support import mounts, processes

FREEZER = Path("/sys/fs/cgroup/freezer")
SHIM = """#!{python} -IS
import json, os, signal, socket, sys
groups = [line.split(":")[2].strip() for line in open("/proc/self/cgroup") if ":freezer:" in line]
request = {{"argv": sys.argv[1:], "env": dict(os.environ), "cwd": os.getcwd(), "groups": groups}}
forwarded = [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2]
signal.pthread_sigmask(signal.SIG_BLOCK, forwarded)
connection = socket.socket(socket.AF_UNIX)
connection.connect("{socket}")
data = json.dumps(request).encode()
socket.send_fds(connection, [len(data).to_bytes(4, "big")], [1])
connection.sendall(data)
answers = connection.makefile()
pid = int(answers.readline())
for number in forwarded:
    signal.signal(number, lambda received, frame: os.kill(pid, received))
signal.pthread_sigmask(signal.SIG_UNBLOCK, forwarded)
sys.exit(int(answers.readline()))
"""


class ShimAgentServer:
    """Forks agents for the shims of one test."""

    def __init__(self, directory: Path, env: Mapping[str, str]) -> None:
        """Start it; ``directory`` is one that all machines see."""
        self.bin_dir = directory / "bin"
        """Has the shim, in place of `elastic-resume`."""
        self.bin_dir.mkdir()
        shim, path = self.bin_dir / "elastic-resume", directory / "agents"
        shim.write_text(SHIM.format(python=sys.executable, socket=path))
        shim.chmod(0o755)
        self._fork_server = AgentForkServer(env, Path(__file__))
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen()
        threading.Thread(target=self._serve, daemon=True).start()

    def close(self) -> None:
        """End all agents."""
        self._fork_server.close()
        self._listener.shutdown(socket.SHUT_RD)  # ends the wait of the thread
        self._listener.close()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return  # closed
            threading.Thread(target=self._handle_request, args=[connection], daemon=True).start()

    def _handle_request(self, connection: socket.socket) -> None:
        """Fork an agent for one shim; send its process id on the node, and its exit code at its end."""
        # At any point the node may lose its power, or `close` may end the fork server.
        with connection, contextlib.suppress(OSError):
            data, (output,) = receive_message(connection, fork_server.MAX_MESSAGE_BYTES, 1)
            request, (shim, _) = json.loads(data), read_peer(connection)
            command = [sys.executable, "-m", "elastic_resume", *request["argv"]]
            place = {"cwd": Path(request["cwd"]), "beside": shim, "groups": request["groups"]}
            waiter = self._fork_server.fork(command, request["env"], output, **place)
            os.close(output)
            connection.sendall(f"{_find_pid_on_node(waiter.pid)}\n".encode())
            connection.sendall(f"{waiter.wait()}\n".encode())


def _find_pid_on_node(waiter: int) -> str:
    """Return the process id that the only child of ``waiter`` has in its own namespace."""
    path = Path(f"/proc/{waiter}/task/{waiter}/children")
    processes.wait_for(lambda: path.read_text().split(), "the agent on its node")
    children = path.read_text().split()
    status = Path(f"/proc/{children[0]}/status").read_text()
    return str(re.findall(r"^NSpid:.*\s(\d+)$", status, re.MULTILINE)[0])


def set_up_agent_on_node(
    parent: int, request: dict[str, Any], output: int, import_environment: dict[str, str]
) -> Callable[[], None]:
    """Fork the agent into the shim's namespaces; this process waits for it outside, and ends as it ends."""
    del parent
    for kind in ("net", "uts", "ipc", "pid", "mnt"):
        mounts.enter_namespace(f"/proc/{request['beside']}/ns/{kind}")
    agent = forkserver.fork()
    if agent:
        os.close(output)  # srun waits until nobody can write any more
        code = os.waitstatus_to_exitcode(os.waitpid(agent, 0)[1])
        os._exit(code if code >= 0 else 128 - code)
    for group in request["groups"]:
        (FREEZER / group.lstrip("/") / "cgroup.procs").write_text("0")
    # getppid() is 0 if the parent is outside the pid namespace.
    return fork_server.set_up_agent(0, request, output, import_environment)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        fork_server.main(set_up_agent_on_node)
