"""Agents forked for simulated nodes, compared with agents started as new processes."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from elastic_resume.agent.workers.forkserver_manager import ForkedProcess
from elastic_resume.testing import Cluster, fork_server
from tests.support.processes import wait_for

PROBE = """
import atexit, json, os, signal, sys, threading, time
print(json.dumps({
    "argv": sys.argv[1:], "file": __file__, "name": __name__, "path": sys.path[0], "cwd": os.getcwd(),
    "environ": {k: v for k, v in os.environ.items() if not k.startswith(("TORCH", "KMP_"))},
    "leads": os.getsid(0) == os.getpid(), "stdin": os.path.realpath("/proc/self/fd/0"),
    "interrupt": str(signal.getsignal(signal.SIGINT)), "terminate": str(signal.getsignal(signal.SIGTERM)),
    "threads": threading.active_count(),
}))
threading.Thread(target=lambda: (time.sleep(0.1), print("a thread's last word"))).start()
atexit.register(print, "at exit")
if "wait" in sys.argv:
    signal.pause()
sys.exit(7)
"""


@pytest.fixture
def env(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Return the environment of a simulated node, in a directory with the module `probed`."""
    (tmp_path / "probed.py").write_text(PROBE)
    monkeypatch.chdir(tmp_path)
    return {**Cluster(tmp_path, nodes=1).env, "ELASTIC_RESUME_X": "é\udcff"}


def fork(env: Mapping[str, str], *words: str) -> ForkedProcess:
    """Fork `probed`, which prints into the file ``out``."""
    with open("out", "wb") as out:
        forked = fork_server.start([sys.executable, "-m", "probed", *words], env, out)
    assert forked is not None
    return forked


def parse(output: str) -> tuple[dict[str, Any], list[str]]:
    """Return the facts that `probed` printed as JSON, and its other lines."""
    facts, *words = output.splitlines()
    return json.loads(facts), words


@pytest.mark.cluster
def test_forked_agent_equals_new_process(env: dict[str, str]) -> None:
    """Arguments, search path, directory, environment, session, streams, signals, threads and exit code."""
    command = [sys.executable, "-m", "probed", "a b", "é"]
    new = subprocess.run(
        command, env=env, stdin=subprocess.DEVNULL, capture_output=True, start_new_session=True, check=False
    )
    forked = fork(env, "a b", "é")
    assert forked.wait(60) == new.returncode == 7
    assert parse(Path("out").read_text()) == parse(new.stdout.decode())

    waiting = fork(env, "wait")
    assert waiting.poll() is None
    waiting.kill()
    assert waiting.wait(60) == waiting.poll() == waiting.returncode == -signal.SIGKILL
    waiting.send_signal(signal.SIGTERM)  # it has ended


@pytest.mark.cluster
def test_fork_server_outlives_thread_that_started_it(
    env: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel sends the parent-death signal when the forking thread ends."""
    servers: dict[frozenset[tuple[str, str]], fork_server.AgentForkServer] = {}
    monkeypatch.setattr(fork_server, "_servers", servers)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(fork, env, "wait").result()
    with pytest.raises(subprocess.TimeoutExpired):
        waiting.wait(0.5)
    for one in servers.values():
        one.close()
    assert waiting.wait(60) == -signal.SIGKILL


IMPATIENT = """
import os, signal, socket, sys
line = socket.socket(fileno=int(sys.argv[1]))
line.recv(1)
os.kill(int(sys.argv[2]), signal.SIGUSR1)
signal.pause()
"""


def test_interrupt_during_request_ends_fork_server(
    env: dict[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Otherwise the next request would get that answer, and the forked process would be left behind."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    servers: dict[frozenset[tuple[str, str]], fork_server.AgentForkServer] = {}
    monkeypatch.setattr(fork_server, "_servers", servers)
    monkeypatch.setattr(fork_server, "SERVER_PROGRAM", tmp_path / "impatient.py")
    fork_server.SERVER_PROGRAM.write_text(IMPATIENT)
    before = signal.signal(signal.SIGUSR1, interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            fork(env)
    finally:
        signal.signal(signal.SIGUSR1, before)
    (interrupted,) = servers.values()
    assert not interrupted.alive


LAST = """
import atexit, os, subprocess, threading
from elastic_resume import linux
from elastic_resume.testing import fork_server as ending

def start():
    command = ["sleep", "60"]
    return ending.start_with_lasting_parent(
        lambda: subprocess.Popen(command, preexec_fn=linux.die_with_parent)
    )

first = start()
if os.fork() == 0:
    print("in a fork", start().poll(), flush=True)
    os._exit(0)
os.wait()
threading.Thread(target=lambda: (threading.main_thread().join(), print("after", first.poll()))).start()
atexit.register(lambda: print("at exit", first.poll(), start().poll()))
"""


def test_process_with_lasting_parent_ends_after_exit_handlers() -> None:
    """It also outlives the threads that outlive the main thread."""
    done = subprocess.run(
        [sys.executable, "-c", LAST], capture_output=True, text=True, timeout=50, check=True
    )
    assert done.stdout.splitlines() == ["in a fork None", "after None", "at exit None None"], done.stderr


BUSY = """
import os, signal, time
server = os.getpid()
if os.fork() == 0:
    while os.getppid() == server:
        time.sleep(0.01)
    os._exit(0)
signal.pause()
"""


@pytest.mark.parametrize(("program", "is_replaced"), [("import signal; signal.pause()", True), (BUSY, False)])
def test_idle_fork_server_makes_room_for_another_environment(
    env: dict[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, program: str, is_replaced: bool
) -> None:
    """Each set of variables that only a new interpreter reads needs a fork server of its own."""
    for name, text in {"first.py": program, "ending.py": ""}.items():
        (tmp_path / name).write_text(text)
    first = fork_server.AgentForkServer(env, tmp_path / "first.py")
    key: frozenset[tuple[str, str]] = frozenset()
    servers = {key: first}
    monkeypatch.setattr(fork_server, "_servers", servers)
    monkeypatch.setattr(fork_server, "SERVER_PROGRAM", tmp_path / "ending.py")
    monkeypatch.setattr(fork_server, "MAX_SERVERS", 1)
    try:
        wait_for(lambda: first.is_idle == is_replaced, "the fork of the first")
        with open(tmp_path / "out", "wb") as out:
            other = {**env, "OMP_NUM_THREADS": "3"}
            assert fork_server.start([sys.executable, "-m", "probed"], other, out) is None
        assert first.alive is not is_replaced
        assert (key in servers) is not is_replaced
        assert len(servers) == 1
    finally:
        for server in {first, *servers.values()}:
            server.close()
