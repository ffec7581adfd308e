"""Workers forked from the fork server behave like new processes; and what happens when either fails."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import mmap
import os
import re
import select
import signal
import socket
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from elastic_resume import constants
from elastic_resume.agent.workers import forkserver, forkserver_manager, launcher_shim
from elastic_resume.agent.workers.forkserver_manager import ForkServerManager
from elastic_resume.agent.workers.lease_page import LeasePage
from tests.support.leak_reports import without_leaks
from tests.support.processes import is_alive, read_exit_event, wait_for, wait_for_pid

pytestmark = pytest.mark.cluster  # each fork server imports torch for seconds

SHIM = [sys.executable, "-I", "-S", launcher_shim.__file__, "0"]


class RunningForkServer:
    """A fork server of this process, with its events."""

    def __init__(self, preload: Sequence[str] = (), *, import_first: bool = True) -> None:
        self.events: list[str] = []
        self.manager = ForkServerManager(
            [sys.executable, "-u", "x.py"],
            preload,
            lambda event, **_: self.events.append(event),
            import_first=import_first,
        )
        self.manager.start()
        self.socket_name = os.environ[constants.ENV_FORK_SERVER]

    def wait_until_ready(self, times: int = 1) -> None:
        """Wait until that many fork servers have been ready."""
        wait_for(lambda: self.events.count("fork-server-ready") >= times, "a ready fork server", 120)


@pytest.fixture(scope="module")
def warm() -> Iterator[RunningForkServer]:
    """Start one fork server for all tests that do not disturb it."""
    server = RunningForkServer()
    server.wait_until_ready()  # a shim would wait for the imports, longer on a busy machine than tests do
    yield server
    server.manager.close()


# forkserver.py without its imports, which take seconds.
BARE_SERVER = """
import sys
del sys.path[0]
from elastic_resume.agent.workers import forkserver
forkserver.TORCH_MODULES, forkserver.OWN_MODULES = (), ()
forkserver.main()
"""


@pytest.fixture
def start_own(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> Iterator[Callable[..., RunningForkServer]]:
    """Start fork servers for one test. They import ``preload`` alone."""
    caplog.set_level("DEBUG")

    def spawn(argv: list[str], **others: Any) -> subprocess.Popen[bytes]:
        assert argv[2] == str(forkserver_manager.FORK_SERVER_PATH)
        return subprocess.Popen([*argv[:2], "-c", BARE_SERVER, *argv[3:]], **others)

    monkeypatch.setattr(forkserver_manager, "spawn", spawn)
    servers: list[RunningForkServer] = []

    def make(*preload: str, import_first: bool = True) -> RunningForkServer:
        servers.append(RunningForkServer(preload, import_first=import_first))
        return servers[-1]

    yield make
    for server in servers:
        server.manager.close()


def environ(tmp_path: Path, socket_name: str | None = None, **more: str) -> dict[str, str]:
    """Return the environment that an agent gives to a launcher shim."""
    plain = {k: v for k, v in os.environ.items() if not k.startswith(constants.ENV_PREFIX)}
    ours = {
        constants.ENV_AGENT_PID: str(os.getpid()),
        constants.ENV_EVENTS_PATH: str(tmp_path / "events.jsonl"),
        constants.ENV_GRACE: "0.3",
    }
    named = {constants.ENV_FORK_SERVER: socket_name} if socket_name else {}
    return {**plain, "RANK": "3", **ours, **named, **more}


def start(env: dict[str, str], *command: str, **kwargs: Any) -> subprocess.Popen[str]:
    """Start a launcher shim as torchelastic does."""
    words = [*SHIM, sys.executable, "-u", *command]
    return subprocess.Popen(words, env=env, start_new_session=True, text=True, **kwargs)


Way = tuple[int, str, str]


def run_ways(tmp_path: Path, warm: RunningForkServer, *command: str, **env: str) -> list[Way]:
    """Return exit code, stdout and stderr of a plain start and a warm one."""
    plain = [sys.executable, "-u", *command]
    ends = []
    for words, name in ((plain, None), ([*SHIM, *plain], warm.socket_name)):
        done = subprocess.run(
            words,
            env=environ(tmp_path, name, **env),
            input="",
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
            start_new_session=True,
            cwd=tmp_path,
        )
        ends.append((done.returncode, done.stdout, without_leaks(done.stderr)))
    return ends


def test_workers_draw_different_random_numbers(warm: RunningForkServer, tmp_path: Path) -> None:
    """A fork would inherit the seeds, and all ranks would augment alike."""
    script = tmp_path / "draw.py"
    script.write_text(
        "import random, numpy, torch; print(random.random(), numpy.random.rand(), torch.rand(1).item())"
    )
    env = environ(tmp_path, warm.socket_name)
    drawn = {start(env, str(script), stdout=subprocess.PIPE).communicate(timeout=60)[0] for _ in range(3)}
    assert len({word for line in drawn for word in line.split()}) == 9


ENDS = {
    "exception": "def f():\n    raise ValueError('no')\nf()",
    "exit text": "import sys; sys.exit('a last word')",
    "exit code": "import sys; sys.exit(300)",
    "raise exit in thread": "import threading; threading.Thread(target=lambda: 1 / 0, name='t').start()",
    "syntax": "print('never')\n  x = 1",
    "missing module": "import there_is_no_such_module",
    "hook": "import sys; sys.excepthook = lambda *a: print('hooked', a[0].__name__); raise ValueError",
    "broken hook": "import sys; sys.excepthook = lambda *a: 1 / 0; raise ValueError('first')",
    "keyboard": "import atexit; atexit.register(print, 'bye'); raise KeyboardInterrupt",
    "signal": "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)",
    "raw exit": "import os; print('x'); os._exit(5)",
    "pipe": "import os; os.close(1); print('nowhere')",
    "abort": "import faulthandler, os; faulthandler.enable(); os.abort()",
    "encoding": "# -*- coding: latin-1 -*-\nprint('done')",
    "deprecation": "import warnings; warnings.warn('old', DeprecationWarning)",
    "recursion": "import sys; sys.setrecursionlimit(60)\ndef f(): f()\nf()",
}


# In `make test`; `make soak` has all.
SOME_ENDS = {"exception", "exit code", "raise exit in thread", "syntax", "hook", "keyboard", "signal", "pipe"}


@pytest.mark.parametrize(
    "how", [pytest.param(how, marks=() if how in SOME_ENDS else pytest.mark.soak) for how in ENDS]
)
def test_script_exits_the_same_plain_and_warm(how: str, warm: RunningForkServer, tmp_path: Path) -> None:
    """Exit code or signal and output are the same; tracebacks show no frame of ours."""
    script = tmp_path / "script.py"
    script.write_text(ENDS[how])
    plain, warmed = (
        (code, out, re.sub("thread 0x[0-9a-f]+", "thread", err))
        for code, out, err in run_ways(tmp_path, warm, "script.py")
    )
    if how == "recursion":  # the depth at which a script starts is not part of the promise
        assert (warmed[0], warmed[2][-60:]) == (plain[0], plain[2][-60:])
    elif how == "abort":
        assert (warmed[0], warmed[2].splitlines()[:2]) == (plain[0], plain[2].splitlines()[:2])
    else:
        assert warmed == plain


def test_modules_directories_and_archives_run(warm: RunningForkServer, tmp_path: Path) -> None:
    """``-m package.module``, a directory with a __main__.py, and a zip file of one."""
    body = "import sys; print(__name__, __package__, __file__, bool(__spec__), sys.argv, sys.path[0])"
    (tmp_path / "pack").mkdir()
    for name in ("__init__.py", "__main__.py", "part.py"):
        (tmp_path / "pack" / name).write_text(body if name != "__init__.py" else "")
    subprocess.run([sys.executable, "-m", "zipapp", "pack", "-o", "pack.pyz"], check=True, cwd=tmp_path)
    for command in (["-m", "pack.part", "a"], ["-m", "pack"], ["pack", "b"], ["pack.pyz"], ["-m", "no_such"]):
        plain, warmed = run_ways(tmp_path, warm, *command)
        assert warmed == plain, command


def test_differing_process_start_variables_start_cold(warm: RunningForkServer, tmp_path: Path) -> None:
    """The interpreter and libraries read them once, when they start."""
    script = tmp_path / "script.py"
    script.write_text("import sys; print('torch' in sys.modules, hash('a'))")
    plain, warmed = run_ways(tmp_path, warm, "script.py", PYTHONHASHSEED="5")
    assert plain[1].startswith("False ")
    assert warmed == plain


BEFORE_TORCH = """
import os, sys
print("top", "torch" in sys.modules, os.environ.get("OMP_NUM_THREADS"), os.getpid() == os.getpgid(0))
os.environ.update(OMP_NUM_THREADS="2", TORCH_COMPILE_JOB_ID="mine", WANDB_MODE="offline")
from torch.nn import Linear
import torch.compiler.config as compiler
import torch
assert sys.modules["torch"] is torch and torch.__spec__.name == "torch" and torch.nn.Linear is Linear
print(torch.get_num_threads(), compiler.job_id, os.environ["WANDB_MODE"], sys.argv)
"""


def test_variables_that_a_script_sets_before_it_imports_torch_count(
    warm: RunningForkServer, tmp_path: Path
) -> None:
    """The script begins again in a new process. Its first lines print twice."""
    (tmp_path / "script.py").write_text(BEFORE_TORCH)
    plain, warmed = run_ways(tmp_path, warm, "script.py", "a")
    top, rest = plain[1].splitlines()
    assert rest.endswith("mine offline ['script.py', 'a']")
    assert warmed == (0, f"{top}\n{top}\n{rest}\n", plain[2])


def test_other_variables_cost_no_new_process(warm: RunningForkServer, tmp_path: Path) -> None:
    """Torch reads those of CUDA and NCCL when it needs them."""
    (tmp_path / "script.py").write_text(
        "import os, sys\n"
        "os.environ.update(CUDA_VISIBLE_DEVICES='0', NCCL_DEBUG='WARN', TORCH_NCCL_BLOCKING_WAIT='1')\n"
        "import torch\n"
        "print('elastic_resume.training.resume' in sys.modules, torch.__spec__.name)\n"
    )
    process = start(environ(tmp_path, warm.socket_name), str(tmp_path / "script.py"), stdout=subprocess.PIPE)
    assert process.communicate(timeout=60)[0] == "True torch\n"


def test_processes_have_names(warm: RunningForkServer, tmp_path: Path) -> None:
    """``ps`` shows which is the worker, the supervisor and the fork server."""
    script = tmp_path / "script.py"
    script.write_text(
        f"import os, time; open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid())); time.sleep(99)"
    )
    process = start(environ(tmp_path, warm.socket_name), str(script), "--rate", "0.1")
    worker = psutil.Process(wait_for_pid(tmp_path / "pid"))
    assert worker.name() == "er-worker"
    supervisor = worker.parent()
    assert supervisor is not None
    assert supervisor.name() == "er-supervisor"
    assert psutil.Process(supervisor.ppid()).name() == "er-fork-server"
    assert supervisor.ppid() == warm.manager.pid
    process.kill()
    process.wait()
    wait_for(lambda: not is_alive(worker.pid), "the worker to die with its shim")


def test_memory_moves_into_huge_pages() -> None:
    """If the kernel can do that and has some free; otherwise nothing changes."""
    try:
        size = int(forkserver.HUGE_PAGE_SIZE_FILE.read_text())
    except OSError:
        assert not forkserver.list_huge_page_chunks()
        return
    memory = mmap.mmap(-1, 3 * size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.write(bytes(range(256)) * (len(memory) // 256))
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    chunks = [chunk for chunk in forkserver.list_huge_page_chunks() if 0 <= chunk[0] - start < len(memory)]
    assert len(chunks) >= 2
    errors = [forkserver.move_into_huge_pages(*chunk) for chunk in chunks]
    assert memory[:] == bytes(range(256)) * (len(memory) // 256)
    smaps = Path("/proc/self/smaps").read_text()
    extents = re.split(r"^([0-9a-f]+)-[0-9a-f]+ .*$", smaps, flags=re.MULTILINE)[1:]
    mine = max(
        (int(first, 16), text)
        for first, text in zip(extents[::2], extents[1::2], strict=True)
        if int(first, 16) <= start
    )[1]
    huge_kib = int(re.findall(r"AnonHugePages: +(\d+) kB", mine)[0])
    assert huge_kib * 1024 >= errors.count(0) * size
    assert errors.count(0) or errors[0] in {errno.EINVAL, errno.ENOMEM, errno.EBUSY, errno.EAGAIN}


def test_worker_has_process_attributes_of_shim(warm: RunningForkServer, tmp_path: Path) -> None:
    """A user, or torchelastic with numactl, may set them around the command."""
    script = tmp_path / "script.py"
    script.write_text(
        "import os, resource; print(sorted(os.sched_getaffinity(0)), os.umask(0), os.nice(0),"
        " resource.getrlimit(resource.RLIMIT_NOFILE))"
    )
    cpu = max(os.sched_getaffinity(0))
    command = " ".join(["taskset", "-c", str(cpu), *SHIM, sys.executable, "-u", str(script)])
    done = subprocess.run(
        ["/bin/sh", "-c", f"ulimit -n 300; umask 027; exec nice -n 5 {command}"],
        env=environ(tmp_path, warm.socket_name),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    assert done.stdout == f"[{cpu}] {0o27} {min(os.nice(0) + 5, 19)} (300, 300)\n"


# ---- failures ------------------------------------------------------------------------------------------


def sleeper(tmp_path: Path) -> str:
    """Write a script that records its process, starts a child in its own session, and sleeps."""
    script = tmp_path / "sleeper.py"
    script.write_text(
        textwrap.dedent(f"""
        import os, subprocess, time
        child = subprocess.Popen(["/bin/sleep", "600"], start_new_session=True)
        open({str(tmp_path / "child")!r}, "w").write(str(child.pid))
        open({str(tmp_path / "worker")!r}, "w").write(str(os.getpid()))
        time.sleep(600)
        """)
    )
    return str(script)


def test_killed_supervisor_leaves_no_process(warm: RunningForkServer, tmp_path: Path) -> None:
    """The kernel kills the worker, the fork server kills the leftovers."""
    process = start(environ(tmp_path, warm.socket_name), sleeper(tmp_path))
    pids = [wait_for_pid(tmp_path / name) for name in ("worker", "child")]
    supervisor = psutil.Process(pids[0]).parent()
    assert supervisor is not None
    supervisor.kill()
    assert process.wait(60) == -signal.SIGKILL
    wait_for(lambda: not any(map(is_alive, pids)), "worker and child to die")
    assert read_exit_event(tmp_path)["signal"] == "SIGKILL"


def test_killed_fork_server_is_replaced_and_workers_survive(
    start_own: Callable[..., RunningForkServer], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Until the next one is ready, workers start cold."""
    warm = start_own()
    warm.wait_until_ready()
    process = start(environ(tmp_path, warm.socket_name), sleeper(tmp_path))
    worker = wait_for_pid(tmp_path / "worker")
    first = warm.manager.pid
    assert first is not None
    os.kill(first, signal.SIGKILL)
    warm.wait_until_ready(times=2)
    assert warm.manager.pid not in {None, first}
    assert "killed by signal 9: workers start cold until another is ready" in caplog.text
    assert process.poll() is None
    assert is_alive(worker)
    process.terminate()
    assert process.wait(60) == -signal.SIGTERM
    wait_for(lambda: not is_alive(worker), "the worker to end")


def is_connected(pid: int) -> bool:
    """Return whether the process holds a connected unix socket (proc_pid_net(5): state 03)."""
    lines = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    connected = {f"socket:[{words[6]}]" for words in lines if words[5] == "03"}
    with contextlib.suppress(FileNotFoundError):
        return any(str(entry.readlink()) in connected for entry in Path(f"/proc/{pid}/fd").iterdir())
    return False


def test_shim_starts_cold_when_fork_server_dies(
    start_own: Callable[..., RunningForkServer], tmp_path: Path
) -> None:
    """The shim waits while the fork server imports."""
    warm = start_own()
    assert warm.manager.pid is not None
    os.kill(warm.manager.pid, signal.SIGSTOP)  # so that it cannot answer
    script = tmp_path / "script.py"
    script.write_text("import sys; print('elastic_resume' in sys.modules)")
    process = start(environ(tmp_path, warm.socket_name), str(script), stdout=subprocess.PIPE)
    wait_for(lambda: is_connected(process.pid), "the request of the shim")
    os.kill(warm.manager.pid, signal.SIGKILL)
    assert process.communicate(timeout=60)[0] == "False\n"


def test_last_message_of_fork_server_is_handled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It arrives between the read and the check for the end of the process."""
    caplog.set_level("INFO")
    started: list[subprocess.Popen[bytes]] = []
    message = json.dumps({"fork_unsafe_module": "pooling", "reason": "it uses native threads"}) + "\n"
    polled = tmp_path / "polled"
    code = f"import os, sys, time\nwhile not os.path.exists({str(polled)!r}): time.sleep(0.01)\n"
    code += f"os.write(int(sys.argv[2]), {message.encode()!r})"

    def spawn(argv: list[str], **others: Any) -> subprocess.Popen[bytes]:
        started.append(subprocess.Popen([*argv[:2], "-c", code, *argv[3:]], **others))
        return started[-1]

    others = set(threading.enumerate())  # with the one of the fixture `warm`

    def poll(readers: Any, writers: Any, broken: Any, timeout: float) -> Any:
        if threading.current_thread() in others:
            return select.select(readers, writers, broken, timeout)
        ready = select.select(readers, [], [], 0)
        if not ready[0]:
            polled.touch()
            with contextlib.suppress(ChildProcessError):  # the manager has reaped it already
                os.waitid(os.P_PID, started[-1].pid, os.WEXITED | os.WNOWAIT)
        return ready

    monkeypatch.setattr(forkserver_manager, "spawn", spawn)
    monkeypatch.setattr(forkserver_manager, "select", SimpleNamespace(select=poll))
    manager = ForkServerManager(["python", "x.py"], ["pooling"])
    manager.start()
    wait_for(lambda: caplog.messages, "a log line")
    manager.close()
    assert caplog.messages[0] == "--preload pooling is left out: it uses native threads."


def test_fork_server_dies_with_its_agent(tmp_path: Path) -> None:
    """The kernel kills it."""
    code = """
import os, sys, time
from elastic_resume.agent.workers.forkserver_manager import ForkServerManager
from elastic_resume.agent.workers.lease_page import LeasePage
manager = ForkServerManager([sys.executable, "-u", "x.py"])
manager.start()
open(sys.argv[1], "w").write(str(manager.pid))
time.sleep(600)
"""
    agent = subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "fork-server")])
    pid = wait_for_pid(tmp_path / "fork-server")
    agent.kill()
    agent.wait()
    wait_for(lambda: not is_alive(pid), "the fork server to die")


def test_unsafe_or_failing_preload_is_left_out(
    start_own: Callable[..., RunningForkServer],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The log names each with its reason; other modules are imported.

    A fork would wait for a missing OpenMP pool; an orphan would keep our sockets open.
    """
    bodies = {
        "fine": "",
        "failing": "1 / 0",
        "threading_one": "import threading\nthreading.Timer(600, print).start()",
        "leaving": "import os; os.system(\"setsid sh -c 'sleep 300; true' &\")",
        "pooling": "import torch; torch.ones(3000, 3000).sum()",
    }
    for name, body in bodies.items():
        (tmp_path / f"{name}.py").write_text(f"import os; importer = os.getpid()\n{body}")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.delenv("OMP_NUM_THREADS")  # with one thread there is no pool
    warm = start_own(*bodies)
    failed = "the fork server cannot import failing, so it is left out: ZeroDivisionError: division by zero"
    wait_for(lambda: failed in caplog.messages, "a log line about the failing import", 120)
    reasons = {
        "threading_one": "it starts threads",
        "leaving": "it starts processes",
    }
    if len(os.sched_getaffinity(0)) > 1:  # with one core there is no pool
        reasons["pooling"] = "it uses native threads"
    for name, reason in reasons.items():
        assert f"--preload {name} is left out: {reason}" in caplog.text
    script = tmp_path / "script.py"
    script.write_text(
        "import os, fine, pooling\n"
        "print([m.__name__ for m in (fine, pooling) if m.importer != os.getpid()])\n"
    )
    process = start(
        environ(tmp_path, warm.socket_name, PYTHONPATH=str(tmp_path)), str(script), stdout=subprocess.PIPE
    )
    assert process.communicate(timeout=60)[0] == (
        "['fine']\n" if "pooling" in reasons else "['fine', 'pooling']\n"
    )


def test_obstacles_to_fork_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads are found in the test above."""
    monkeypatch.setattr(threading, "enumerate", list)
    cuda = SimpleNamespace(is_initialized=lambda: True)
    assert "it starts processes" in forkserver.find_fork_obstacle({1})
    monkeypatch.setitem(sys.modules, "torch.cuda", cuda)
    assert "it initializes CUDA" in forkserver.find_fork_obstacle(set())


def test_killed_supervisor_is_no_reason_to_leave_out_a_module(
    start_own: Callable[..., RunningForkServer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker that it leaves becomes a child of the fork server, as a process of the module would."""
    (tmp_path / "slow.py").write_text(
        f"import os, time\nopen({str(tmp_path / 'begun')!r}, 'w').close()\n"
        f"while not os.path.exists({str(tmp_path / 'go')!r}): time.sleep(0.01)"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    server = start_own("slow", import_first=False)
    process = start(environ(tmp_path, server.socket_name, PYTHONPATH=str(tmp_path)), sleeper(tmp_path))
    pids = [wait_for_pid(tmp_path / name) for name in ("worker", "child")]
    wait_for((tmp_path / "begun").exists, "the first worker to run, then the import", 120)
    worker_supervisor = psutil.Process(pids[0]).parent()
    assert worker_supervisor is not None
    worker_supervisor.kill()
    wait_for(lambda: not is_alive(pids[0]), "the worker to die")
    (tmp_path / "go").touch()
    server.wait_until_ready()
    assert process.wait(60) == -signal.SIGKILL
    wait_for(lambda: not any(map(is_alive, pids)), "worker and child to die")
    assert server.events == ["fork-server-ready"]


def test_changes_of_preloaded_modules_reach_workers(
    start_own: Callable[..., RunningForkServer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A module sets a variable and puts a directory first on the search path."""
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "only_there.py").write_text("")
    (tmp_path / "changing.py").write_text(
        f"import os, sys; os.environ['CHANGED'] = 'yes'; sys.path.insert(0, {str(tmp_path / 'lib')!r})"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    warm = start_own("changing")
    script = tmp_path / "script.py"
    script.write_text("import changing, only_there, os, sys; print(os.environ['CHANGED'], sys.path[:2])")
    process = start(environ(tmp_path, warm.socket_name), str(script), stdout=subprocess.PIPE)
    assert process.communicate(timeout=60)[0] == f"yes {[str(tmp_path / 'lib'), str(tmp_path)]}\n"


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-"])
def test_closed_streams_are_closed_in_worker(closed: str, warm: RunningForkServer, tmp_path: Path) -> None:
    """No other file takes their place."""
    script = tmp_path / "script.py"
    facts = "[s is None for s in (sys.stdin, sys.stdout, sys.stderr)]"
    script.write_text(f"import sys; open({str(tmp_path / 'facts')!r}, 'w').write(repr({facts}))")
    words = " ".join([*SHIM, sys.executable, "-u", str(script)])
    shell = ["/bin/sh", "-c", f"exec {words} {closed}"]
    subprocess.run(shell, env=environ(tmp_path, warm.socket_name), check=True)
    assert (tmp_path / "facts").read_text() == repr([closed == c for c in ("<&-", ">&-", "2>&-")])


def test_removed_working_directory_starts_cold(warm: RunningForkServer, tmp_path: Path) -> None:
    """A plain start runs there too."""
    script = tmp_path / "script.py"
    script.write_text("print('ran')")
    gone = tmp_path / "gone"
    gone.mkdir()
    words = " ".join([*SHIM, sys.executable, "-u", str(script)])
    done = subprocess.run(
        ["/bin/sh", "-c", f"rmdir ../gone; exec {words}"],
        env=environ(tmp_path, warm.socket_name),
        cwd=gone,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    assert done.stdout == "ran\n"


def test_shim_waiting_for_imports_ends_on_sigterm(
    start_own: Callable[..., RunningForkServer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No worker has been started yet."""
    # Otherwise the manager would replace the stopped server.
    monkeypatch.setattr(forkserver_manager, "_is_stopped", lambda _: False)
    warm = start_own()
    assert warm.manager.pid is not None
    os.kill(warm.manager.pid, signal.SIGSTOP)
    process = start(environ(tmp_path, warm.socket_name), "-c", "pass")
    wait_for(lambda: is_connected(process.pid), "the request of the shim")
    process.terminate()
    assert process.wait(30) == -signal.SIGTERM


def test_malformed_requests_do_not_disturb_fork_server(warm: RunningForkServer, tmp_path: Path) -> None:
    """Any process of our user may connect. Incomplete, empty and too long requests are dropped."""
    with contextlib.ExitStack() as stack:
        for data in (
            b"",
            b"\x00",
            b"\xff" * 4,
            b"\x00\x00\x00\x02{}",
            (8).to_bytes(4, "big") + b"{}",
            os.urandom(999),
        ):
            client = stack.enter_context(socket.socket(socket.AF_UNIX))
            client.connect("\0" + warm.socket_name)
            with contextlib.suppress(BrokenPipeError):
                client.sendall(data)
                client.shutdown(socket.SHUT_WR)
        script = tmp_path / "script.py"
        script.write_text("import sys; print('elastic_resume.training.resume' in sys.modules)")
        process = start(environ(tmp_path, warm.socket_name), str(script), stdout=subprocess.PIPE)
        assert process.communicate(timeout=60)[0] == "True\n"


def test_fork_server_that_never_gets_ready_is_given_up(
    start_own: Callable[..., RunningForkServer],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Workers start cold, and one log line says so."""
    (tmp_path / "dying.py").write_text("import os; os._exit(3)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    warm = start_own("dying")
    wait_for(lambda: "cold from now on" in caplog.text, "it to be given up", 120)
    assert "3 fork servers in a row failed; the last ended with exit code 3" in caplog.messages[-1]
    assert warm.manager.pid is None


def test_only_process_start_variables_are_compared() -> None:
    """Those of torchelastic and of each rank always differ and do not count."""
    ours = {"PYTHONPATH": "a", "OMP_NUM_THREADS": "1", "RANK": "0", "MASTER_PORT": "1"}
    theirs = {
        "PYTHONPATH": "a",
        "OMP_NUM_THREADS": "2",
        "RANK": "1",
        "LD_PRELOAD": "x.so",
        "TORCHELASTIC_RUN_ID": "1",
    }
    assert forkserver.list_differing_variables(ours, theirs) == ["LD_PRELOAD", "OMP_NUM_THREADS"]
    assert forkserver.list_differing_variables(ours, {**ours, "RANK": "7", "LOCAL_RANK": "3"}) == []


# ---- standbys ------------------------------------------------------------------------------------------

PARKING_WORKER = str(Path(__file__).parents[1] / "support" / "scripts" / "parking_worker.py")


@pytest.fixture
def lease_page() -> Iterator[LeasePage]:
    """Create a lease page that this process owns. At first no worker may run."""
    with contextlib.closing(LeasePage()) as lease_page:
        yield lease_page


@pytest.fixture
def standby_environ(
    start_own: Callable[..., RunningForkServer], lease_page: LeasePage, tmp_path: Path
) -> dict[str, str]:
    """Return the environment of a standby."""
    server = start_own()
    server.wait_until_ready()
    environment = environ(tmp_path, server.socket_name)
    del environment["RANK"]
    parked_file = tmp_path / "parked"
    parked_file.touch()
    return environment | {
        constants.ENV_LEASE_PAGE: lease_page.path,
        constants.ENV_PARKED: str(parked_file),
        constants.ENV_EARLY_START: "1",
    }


def test_standby_resumes_for_shim_that_came_early(standby_environ: dict[str, str], tmp_path: Path) -> None:
    """The agent needs no lease meanwhile. Both launcher shims wait for `er.resume()`."""
    ready = tmp_path / "ready"
    standby = start(standby_environ, PARKING_WORKER, "standby", str(ready))
    wait_for((tmp_path / "parked").read_bytes, "the standby's supervisor to listen")
    del standby_environ[constants.ENV_EARLY_START], standby_environ[constants.ENV_LEASE_PAGE]
    environment = standby_environ | {"RANK": "1", constants.ENV_GENERATION: "2"}
    facts = tmp_path / "facts"
    with facts.open("wb") as output:
        ended, waiting = (start(environment, PARKING_WORKER, stdout=output) for _ in range(2))
    wait_for(lambda: is_connected(ended.pid) and is_connected(waiting.pid), "the requests of both shims")
    ended.terminate()  # the view has ended
    assert ended.wait(30) == -signal.SIGTERM
    assert standby.poll() is None
    ready.touch()
    assert standby.wait(30) == constants.EXIT_PARKED
    worker, *words = wait_for(facts.read_text, "the worker to resume").split()
    assert words == ["1", "2", "None"]
    assert psutil.Process(int(worker)).name() == "er-worker"
    os.kill(int(worker), signal.SIGKILL)
    assert waiting.wait(30) == -signal.SIGKILL


@pytest.mark.parametrize("end", ["signal", "agent"])
def test_standby_ends_with_shim_and_agent(
    end: str, standby_environ: dict[str, str], lease_page: LeasePage, tmp_path: Path
) -> None:
    """It may have to start for minutes until it could park, and has no step to save in the grace period."""
    process = start(standby_environ | {constants.ENV_GRACE: "600"}, sleeper(tmp_path))
    pids = [wait_for_pid(tmp_path / name) for name in ("worker", "child")]
    if end == "signal":
        process.terminate()
    else:
        lease_page.close()
    assert process.wait(30) == -signal.SIGKILL
    assert not any(map(is_alive, pids))


def test_script_that_reads_its_rank_is_no_standby(standby_environ: dict[str, str], tmp_path: Path) -> None:
    """The message names line and variable. A default would be a wrong rank."""
    reads = {
        "RANK": ("os.environ['RANK']", "os.environ.get('RANK', '0')", "int(os.getenv('RANK', 0))"),
        "WORLD_SIZE": ("os.environb.get(b'WORLD_SIZE')", "'WORLD_SIZE' in os.environ"),
        "MASTER_ADDR": ("os.environ.setdefault('MASTER_ADDR', 'localhost')",),
    }
    script = tmp_path / "script.py"
    for variable, expressions in reads.items():
        for expression in expressions:
            script.write_text(f"import os\nassert os.environ.get('OTHER') is None\n{expression}\n")
            process = start(standby_environ, str(script), stderr=subprocess.PIPE)
            assert f"{script}:3 reads {variable} before er.resume()" in process.communicate(timeout=60)[1]
            assert process.returncode == constants.EXIT_NEEDS_GENERATION, expression
