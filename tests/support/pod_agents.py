"""Start `elastic-resume` in simulated pods as a fork of a process that has imported torch.

A pod's PATH leads to `SHIM` as tini: it is process 1, and does what tini does. Its child is forked by
`pod_fork_server_main` into the pod's namespaces and control group, which saves seconds of imports.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import sys
import threading
from pathlib import Path

from elastic_resume.machine import MemoryCgroup
from elastic_resume.testing import fork_server_main
from elastic_resume.testing.fork_server import AgentForkServer
from tests.support.pods import IMAGE_ENVIRONMENT

SHIM = f"""#!{sys.executable} -IS
import json, os, signal, socket, sys
signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
dashes, command, *words = sys.argv[1:]
with socket.socket(socket.AF_UNIX) as line:
    line.connect("/control/agents")
    data = json.dumps({{"argv": words, "env": dict(os.environ), "cwd": os.getcwd()}}).encode()
    socket.send_fds(line, [len(data).to_bytes(4, "big")], [1])
    line.sendall(data)
    line.recv(1)
agent = int(open("/proc/self/task/1/children").read())
while True:
    number = signal.sigwait(signal.valid_signals())
    if number != signal.SIGCHLD:
        os.kill(agent, number)
        continue
    while True:
        try:
            ended, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            break
        if ended == agent:
            sys.exit(128 + os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status))
        if ended == 0:
            break
"""


class PodAgentServer:
    """Forks agents for the pods of one job."""

    def __init__(self, fork_server: AgentForkServer, control_dir: Path) -> None:
        """Serve ``control_dir``, which is /control in each pod."""
        self._fork_server, self._control_dir = fork_server, control_dir
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(control_dir / "agents"))
        self._listener.listen()
        (control_dir / "tini").write_text(SHIM)
        (control_dir / "tini").chmod(0o755)
        threading.Thread(target=self._serve, daemon=True).start()
        self.image_environment = {"PATH": f"/control:{IMAGE_ENVIRONMENT['PATH']}"}
        """Variables of the pods' image."""

    def _serve(self) -> None:
        while True:
            line, _ = self._listener.accept()
            threading.Thread(target=self._handle_request, args=[line], daemon=True).start()

    def _handle_request(self, connection: socket.socket) -> None:
        """Fork an agent into the caller's pod; answer when it is the caller's child."""
        with connection:
            try:
                request, (output,) = fork_server_main.receive(connection, 1)
            except (OSError, EOFError):  # the pod has ended already
                return
            (pod, _, _) = struct.unpack(
                "3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
            )
            command = [sys.executable, "-m", "elastic_resume", *request["argv"]]
            cwd = Path(request["cwd"])
            middle = self._fork_server.fork(
                command, request["env"], output, cwd=cwd, beside=pod, group=find_control_group(pod)
            )
            os.close(output)
            middle.wait()
            with contextlib.suppress(OSError):  # the pod has ended
                connection.sendall(b"!")


def find_control_group(pid: int) -> str:
    """Return the control group of the simulated machine that has this process; empty if none."""
    own = MemoryCgroup.find_own()
    for group in own.directory.glob(f"*-{os.getpid()}-*") if own else ():
        with contextlib.suppress(OSError):  # the group of a pod that has just ended
            if str(pid) in (group / "cgroup.procs").read_text().split():
                return str(group)
    return ""
