"""The program of the agents' fork server: import once, fork agents on request.

Run as ``python -u fork_server_main.py DESCRIPTOR PARENT``. It dies with its parent, and its forks die with
it. A simulated node needs seconds for the imports of its agent; on one machine all nodes share them. A forked
agent runs `elastic_resume.cli` with its own command, environment, directory, network and output.

Variables that only a new interpreter reads (`forkserver.PROCESS_START_ENV_PREFIXES`) must be equal in all;
the caller checks that.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import signal
import socket
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

if __name__ == "__main__" and not getattr(sys.flags, "safe_path", False):
    del sys.path[0]  # scripts must not import the modules of this directory

from elastic_resume import failpoints
from elastic_resume.agent.workers import forkserver, forkserver_manager, run_main, worker_request

PR_SET_PDEATHSIG = 1
CLONE_NEWNET = 0x40000000
LENGTH_BYTES = 4
MAX_REQUEST_BYTES = 16 << 20
_LIBC = ctypes.CDLL(None, use_errno=True)


# ---- messages ------------------------------------------------------------------------------------------


def send(connection: socket.socket, message: dict[str, Any], descriptors: Sequence[int] = ()) -> None:
    """Send one message, prefixed with its length, and descriptors with it."""
    data = json.dumps(message).encode()
    socket.send_fds(connection, [len(data).to_bytes(LENGTH_BYTES, "big")], descriptors)
    connection.sendall(data)


def receive(connection: socket.socket, max_descriptors: int = 0) -> tuple[dict[str, Any], list[int]]:
    """Receive one message with at most so many descriptors.

    Raises:
        EOFError: the other side is gone.

    """
    head, descriptors, _, _ = (
        socket.recv_fds(connection, LENGTH_BYTES, max_descriptors)
        if max_descriptors
        else (connection.recv(4), [], 0, 0)
    )
    size = int.from_bytes(head, "big")
    data = b""
    while len(head) == LENGTH_BYTES and len(data) < size <= MAX_REQUEST_BYTES:
        part = connection.recv(size - len(data))
        if not part:
            break
        data += part
    if not data or len(data) != size:
        raise EOFError
    return json.loads(data), list(descriptors)


# ---- the process ---------------------------------------------------------------------------------------


def main() -> None:
    """Import, then serve until the socket is closed. It returns only in a fork, at the fork's end."""
    connection, parent = socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2])
    if not _die_with_parent(parent):
        return
    connection.set_inheritable(False)
    run_main.set_process_name("er-agent-forks")
    before = forkserver.read_environment()
    gc.disable()
    for name in (
        "elastic_resume.agent.torchelastic",
        "elastic_resume.agent.main",
        *forkserver.TORCH_MODULES,
        *forkserver.OWN_MODULES,
    ):
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    # All forks share this memory. In huge pages each agent would cause copies of them, which takes longer.
    forkserver.HUGE_PAGE_SIZE_FILE = Path(os.devnull)
    imported = {k: v for k, v in forkserver.read_environment().items() if before.get(k) != v}
    become = _serve(connection, imported)
    gc.enable()
    become()


def _die_with_parent(parent: int) -> bool:
    """Ask the kernel to kill this process with its parent; return whether the parent still lives."""
    _LIBC.prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    return os.getppid() == parent


def _serve(connection: socket.socket, import_environment: dict[str, str]) -> Callable[[], None]:
    """Serve requests. It returns only in a fork: the function that the fork runs."""
    server_pid = os.getpid()
    while True:
        try:
            request, descriptors = receive(connection, 1)
        except (EOFError, OSError):
            os._exit(0)  # the kernel ends the forked processes
        if "reap" in request:
            send(connection, {"code": forkserver_manager.reap(request["reap"])})
            continue
        pid = forkserver.fork()
        if pid == 0:
            connection.close()
            return _set_up_agent(server_pid, request, descriptors[0], import_environment)
        os.close(descriptors[0])
        send(connection, {"pid": pid})


def _set_up_agent(
    parent: int, request: dict[str, Any], output: int, import_environment: dict[str, str]
) -> Callable[[], None]:
    """In the fork: apply the request; return the function to run."""
    if not _die_with_parent(parent):
        os._exit(1)
    os.setsid()
    empty = os.open(os.devnull, os.O_RDONLY)
    for stream, number in ((empty, 0), (output, 1), (output, 2)):
        os.dup2(stream, number)
    os.close(empty)
    os.close(output)
    worker_request.replace_environment({**import_environment, **request["env"]})
    tempfile.tempdir = None  # computed anew from the changed environment
    failpoints.arm()
    if request["network"]:
        _enter_network(request["network"])
    os.chdir(request["cwd"])
    command = request["command"]
    run_main.set_process_name("er-agent")
    command[1:1] = ["-u"]  # this process runs with -u too; the environment asks for the same
    run_main.set_argv_and_path(command)
    return lambda: _run_command(command)


def _run_command(command: list[str]) -> None:
    """Run the command and exit."""
    code, agent = 0, os.getpid()
    try:
        run_main.run(command)
    except SystemExit as end:
        if os.getpid() != agent:  # the end of a worker's script: the agent has forked the fork server
            raise
        if end.code is not None and not isinstance(end.code, int):
            raise
        code = end.code or 0
    run_main.exit_without_freeing(code)


def _enter_network(path: str) -> None:
    space = os.open(path, os.O_RDONLY)
    if _LIBC.setns(space, CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), f"cannot enter the network {path}")
    os.close(space)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()
