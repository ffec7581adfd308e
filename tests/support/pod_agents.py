"""In simulated pods: `elastic-resume` starts in a moment, forked from a process that has imported torch.

A pod's PATH leads to `SHIM` as tini: it is process 1, and does what tini does. Its child comes from the
nursery, in all of the pod's namespaces and its control group. What is left out of a real start is seconds of
importing. A host named by `Agents.really` starts the real command, once.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import sys
import threading
from pathlib import Path

from elastic_resume.schedulers.resources import Group
from elastic_resume.testing import fork_server_main
from elastic_resume.testing.fork_server import Nursery
from tests.support.pods import IMAGE

SHIM = f"""#!{sys.executable} -IS
import json, os, signal, socket, sys
signals = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
dashes, command, *words = sys.argv[1:]
real = "/control/really-" + os.environ["HOSTNAME"]
if os.path.exists(real):
    os.unlink(real)
    agent = os.fork()
    if agent == 0:
        signal.pthread_sigmask(signal.SIG_SETMASK, signals)
        os.execv("{Path(sys.executable).parent}/elastic-resume", [command, *words])
else:
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


class Agents:
    """Forks agents for the pods of one job."""

    def __init__(self, nursery: Nursery, control: Path) -> None:
        """``control`` is each pod's /control."""
        self._nursery, self._control = nursery, control
        self._door = socket.socket(socket.AF_UNIX)
        self._door.bind(str(control / "agents"))
        self._door.listen()
        (control / "tini").write_text(SHIM)
        (control / "tini").chmod(0o755)
        threading.Thread(target=self._serve, daemon=True).start()
        self.image = {"PATH": f"/control:{IMAGE['PATH']}"}
        """Of the pods."""

    def really(self, host: str) -> None:
        """Let the next start there be a real one."""
        (self._control / f"really-{host}").touch()

    def _serve(self) -> None:
        while True:
            line, _ = self._door.accept()
            threading.Thread(target=self._answer, args=[line], daemon=True).start()

    def _answer(self, line: socket.socket) -> None:
        """Let an agent be born beside who asks; say so when it is that one's child."""
        with line:
            try:
                told, (output,) = fork_server_main.receive(line, 1)
            except (OSError, EOFError):  # the pod has ended already
                return
            (pod, _, _) = struct.unpack("3i", line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
            command = [sys.executable, "-m", "elastic_resume", *told["argv"]]
            cwd = Path(told["cwd"])
            between = self._nursery.fork(
                command, told["env"], output, cwd=cwd, beside=pod, group=group_of(pod)
            )
            os.close(output)
            between.wait()
            with contextlib.suppress(OSError):  # it has ended meanwhile
                line.sendall(b"!")


def group_of(process: int) -> str:
    """The control group that limits the memory of a machine of ours."""
    own = Group.of_this_process()
    for group in own.directory.glob(f"*-{os.getpid()}-*") if own else ():
        with contextlib.suppress(OSError):  # the group of a pod that has just ended
            if str(process) in (group / "cgroup.procs").read_text().split():
                return str(group)
    return ""
