"""Launcher shim and worker supervisor as real processes: they mirror the worker and leave nothing behind."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from elastic_resume import constants, events
from elastic_resume.agent.failure_evidence import FailureEvents
from elastic_resume.agent.workers import launcher_shim, supervisor, worker_events, worker_request
from elastic_resume.agent.workers.lease_page import LeasePage
from tests.support.processes import is_alive, read_exit_event, wait_for, wait_for_pid

pytestmark = pytest.mark.slow

SHIM = [sys.executable, "-I", "-S", launcher_shim.__file__, "0"]


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    """Return the environment that an agent sets, with this process as the agent."""
    return {
        **os.environ,
        "RANK": "3",
        constants.ENV_AGENT_PID: str(os.getpid()),
        constants.ENV_EVENTS_PATH: str(tmp_path / "events.jsonl"),
        constants.ENV_GENERATION: "2",
        constants.ENV_NODE_NAME: "a",
        constants.ENV_GRACE: "600",  # ample on a busy machine
    }


@pytest.fixture
def start(environ: dict[str, str]) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Start a launcher shim as torchelastic does, in a session of its own; kill it at the end."""
    started: list[subprocess.Popen[bytes]] = []

    def run(*command: str, **kwargs: Any) -> subprocess.Popen[bytes]:
        process = subprocess.Popen([*SHIM, *command], env=environ, start_new_session=True, **kwargs)
        started.append(process)
        return process

    yield run
    for process in started:
        process.kill()
        process.wait()


@pytest.fixture
def lease_page(environ: dict[str, str]) -> Iterator[LeasePage]:
    """Create a lease page that this process owns, with a lease without end."""
    lease_page = LeasePage()
    lease_page.set(math.inf)
    environ[constants.ENV_LEASE_PAGE] = lease_page.path
    yield lease_page
    lease_page.close()


@contextlib.contextmanager
def changed_shim(
    change: str, environ: dict[str, str], *command: str, **kwargs: Any
) -> Iterator[subprocess.Popen[bytes]]:
    """Start a launcher shim whose clock or limits a line of Python changes; kill it at the end."""
    begin = "sys.path.insert(0, sys.argv[1]); import launcher_shim, supervisor, children"
    code = f"import os, sys, time; {begin}; {change}; launcher_shim.main(sys.argv[2:])"
    words = [sys.executable, "-I", "-S", "-c", code, str(Path(launcher_shim.__file__).parent), "0", *command]
    process = subprocess.Popen(words, env=environ, start_new_session=True, **kwargs)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


# How long shim and supervisor wait for what does not end.
SHORT_LIMITS = "launcher_shim.REPORT_TIMEOUT_S = children.KILL_TIMEOUT_S = 0.5"


def python(code: str) -> tuple[str, ...]:
    """Return a command that runs ``code``."""
    return sys.executable, "-c", code


def test_literals_equal_constants() -> None:
    """Launcher shim and supervisor cannot import the package, so they repeat its names."""
    names = [
        (module, name)
        for module in (launcher_shim, supervisor, worker_events, worker_request)
        for name in vars(module)
        if name.startswith(("ENV_", "EXIT_"))
    ]
    assert len(names) >= 10
    for module, name in names:
        assert getattr(module, name) == getattr(constants, name)


def test_launcher_shim_imports_neither_package_nor_slow_modules() -> None:
    """It starts in 30 ms."""
    code = "import sys; sys.path.insert(0, sys.argv[1]); import launcher_shim; print(*sorted(sys.modules))"
    words = [sys.executable, "-I", "-S", "-c", code, str(Path(launcher_shim.__file__).parent)]
    modules = subprocess.check_output(words, text=True).split()
    assert not {"torch", "elastic_resume", "json", "subprocess", "typing", "site"} & set(modules)


@pytest.mark.parametrize("code", [0, 255])
def test_shim_exits_with_exit_code_of_worker(code: int, start: Any, tmp_path: Path) -> None:
    """The event log has the exit code and the time since boot."""
    assert start("/bin/sh", "-c", f"exit {code}").wait(30) == code
    event = read_exit_event(tmp_path)
    assert (event["exit_code"], event["signal"], event["stopped"]) == (code, None, False)
    assert (event["rank"], event["local_rank"], event["generation"], event["node"]) == (3, 0, 2, "a")
    now = events.boot_fields()  # the same boot, in seconds since
    assert event["boot"] == now["boot"] == events.BOOT_ID_FILE.read_text().replace("-", "")[:12]
    assert now["b"] - 1800 < event["b"] <= now["b"]


@pytest.mark.parametrize("name", ["SIGKILL", "SIGTERM"])
def test_shim_exits_by_signal_of_worker(name: str, start: Any, tmp_path: Path) -> None:
    """It leaves no core file of its own."""
    number = signal.Signals[name]
    assert start("/bin/sh", "-c", f"ulimit -c 0; kill -{int(number)} $$", cwd=tmp_path).wait(30) == -number
    event = read_exit_event(tmp_path)
    assert (event["exit_code"], event["signal"], event["stopped"]) == (None, name, False)
    assert [path.name for path in tmp_path.iterdir()] == ["events.jsonl"]


def test_worker_starts_as_under_plain_popen(start: Any) -> None:
    """Arguments, environment, stdin, umask, and ignored and blocked signals are the same."""
    code = (
        "import os, signal, sys; print(os.umask(0), sys.argv[1:], os.environ['RANK'], sys.stdin.read(),"
        " signal.pthread_sigmask(signal.SIG_BLOCK, []));"
        " print([line for line in open('/proc/self/status') if line.startswith(('SigIgn', 'SigBlk'))])"
    )
    command = [*python(code), "a b", "", "$x"]
    plain = subprocess.run(
        command, input=b"in", env={**os.environ, "RANK": "3"}, capture_output=True, check=True
    )
    process = start(*command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.communicate(b"in", 30)[0] == plain.stdout


def test_worker_dies_of_sigpipe(start: Any) -> None:
    """The launcher shim does not pass its ignored SIGPIPE on."""
    reader, writer = os.pipe()
    os.close(reader)
    assert start("/bin/sh", "-c", "exec cat /proc/self/status", stdout=writer).wait(30) == -signal.SIGPIPE
    os.close(writer)


@pytest.mark.parametrize(("command", "code"), [("/nowhere/python", 127), ("/etc/hostname", 126)])
def test_unstartable_command_exits_as_in_a_shell(command: str, code: int, start: Any) -> None:
    """The message names the command."""
    process = start(command, stderr=subprocess.PIPE)
    assert f"cannot start {command}: ".encode() in process.communicate(timeout=30)[1]
    assert process.returncode == code


def test_exit_event_has_message_of_record(environ: Any, start: Any, tmp_path: Path) -> None:
    """``@record`` of torch writes the exception to the file that torchelastic names."""
    environ["TORCHELASTIC_ERROR_FILE"] = str(tmp_path / "error.json")
    (tmp_path / "error.json").write_text(
        json.dumps({"message": {"message": "ValueError: x", "extraInfo": {}}})
    )
    assert start("/bin/sh", "-c", "exit 1").wait(30) == 1
    assert read_exit_event(tmp_path)["message"] == "ValueError: x"


def test_exit_event_reaches_evidence_despite_full_disk(environ: Any, start: Any) -> None:
    """The agent decides by its events in memory."""
    environ[constants.ENV_EVENTS_PATH] = "/dev/full"
    with contextlib.closing(FailureEvents()) as evidence:
        environ[constants.ENV_EVIDENCE] = evidence.path
        assert start("/bin/sh", "-c", "exit 5").wait(30) == 5
        forked, event = evidence.read()
        assert (forked["event"], forked["rank"]) == ("worker-forked", 3)
        assert (event["event"], event["rank"], event["exit_code"]) == ("worker-exit", 3, 5)
        assert event["worker_pid"] == forked["worker_pid"]
        evidence.clear()
        assert start("/bin/sh", "-c", "kill -9 $$").wait(30) == -signal.SIGKILL
        _, event = evidence.read()
        assert event["signal"] == "SIGKILL"


def test_exit_event_is_not_written_to_recycled_descriptor(environ: Any, start: Any, tmp_path: Path) -> None:
    """The agent has ended, and another process has its process ID."""
    with open(tmp_path / "strangers", "w") as file:
        environ[constants.ENV_EVIDENCE] = f"/proc/{os.getpid()}/fd/{file.fileno()}"
        assert start("/bin/sh", "-c", "exit 5").wait(30) == 5
        assert read_exit_event(tmp_path)["exit_code"] == 5
    assert (tmp_path / "strangers").read_text() == ""


def test_sigterm_lets_worker_exit_by_itself_with_its_children(start: Any, tmp_path: Path) -> None:
    """A worker may need its DataLoader workers while it saves. Its own exit code counts."""
    code = f"""
import os, signal, subprocess, sys, time
child = subprocess.Popen(["/bin/cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
def handle(*_):
    out, _ = child.communicate(b"alive")
    sys.exit(9 if out == b"alive" and os.getsid(0) == os.getpid() else 1)
signal.signal(signal.SIGTERM, handle)
with open({str(tmp_path / "pid")!r}, "w") as file:  # a finalizer that closes it would swallow SystemExit
    file.write(str(os.getpid()))
time.sleep(600)
"""
    process = start(*python(code))
    wait_for_pid(tmp_path / "pid")
    os.killpg(process.pid, signal.SIGTERM)
    assert process.wait(30) == 9
    assert read_exit_event(tmp_path)["stopped"] is True


@pytest.mark.parametrize("number", [signal.SIGWINCH, signal.SIGCHLD, signal.SIGALRM])
def test_signal_that_stops_nothing_does_not_reach_worker(number: int, start: Any, tmp_path: Path) -> None:
    """As when a person resizes the terminal."""
    end = tmp_path / "end"
    loop = f"echo $$ > {tmp_path / 'pid'}; while [ ! -e {end} ]; do sleep 0.05; done; exit 5"
    process = start("/bin/sh", "-c", f"trap 'exit 3' TERM; {loop}")
    wait_for_pid(tmp_path / "pid")
    shim = psutil.Process(process.pid)
    switches = shim.num_ctx_switches().voluntary
    process.send_signal(number)
    wait_for(lambda: shim.num_ctx_switches().voluntary > switches, "the launcher shim to see the signal")
    end.touch()
    assert process.wait(30) == 5
    assert read_exit_event(tmp_path)["stopped"] is False


def test_signal_that_nohup_ignores_does_not_reach_worker(start: Any, tmp_path: Path) -> None:
    """It may be sent to every process of a job."""
    end = tmp_path / "end"
    loop = f"echo $$ > {tmp_path / 'pid'}; while [ ! -e {end} ]; do sleep 0.05; done; exit 5"
    former = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        process = start("/bin/sh", "-c", loop)
    finally:
        signal.signal(signal.SIGHUP, former)
    wait_for_pid(tmp_path / "pid")
    status = Path(f"/proc/{process.pid}/status")

    def has(field: str, number: int) -> bool:
        masks = dict(line.split(":\t") for line in status.read_text().splitlines() if line.startswith("Sig"))
        return bool(int(masks[field], 16) & 1 << number - 1)

    wait_for(
        lambda: has("SigCgt", signal.SIGTERM) and not has("SigBlk", signal.SIGTERM), "the shim's handlers"
    )
    assert has("SigIgn", signal.SIGHUP)
    process.send_signal(signal.SIGHUP)
    end.touch()
    assert process.wait(30) == 5
    assert read_exit_event(tmp_path)["stopped"] is False


def test_worker_ignoring_sigterm_is_killed_after_grace_period(
    environ: dict[str, str], start: Any, tmp_path: Path
) -> None:
    """The event says that it was stopped, and when that began."""
    environ[constants.ENV_GRACE] = "0.3"
    process = start("/bin/sh", "-c", f"trap '' TERM; echo $$ > {tmp_path / 'pid'}; exec sleep 600")
    wait_for_pid(tmp_path / "pid")
    os.killpg(process.pid, signal.SIGTERM)
    assert process.wait(30) == -signal.SIGKILL
    event = read_exit_event(tmp_path)
    assert (event["signal"], event["stopped"]) == ("SIGKILL", True)
    assert event["stopped_at"] <= event["t"] - 0.29


@pytest.mark.usefixtures("lease_page")
def test_signal_after_failure_of_same_round_kills_at_once(
    environ: dict[str, str], start: Any, tmp_path: Path
) -> None:
    """It means a restart. Failures of an older round and of stopped workers do not count."""
    signalled = tmp_path / "signalled"
    code = (
        f"import os, pathlib, signal, time; signalled = pathlib.Path({str(signalled)!r});"
        " signal.signal(signal.SIGTERM, lambda *_: signalled.touch());"
        f" open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))\nwhile True: time.sleep(1)"
    )
    process = start(*python(code))
    worker = wait_for_pid(tmp_path / "pid")
    environ[constants.ENV_GENERATION] = "1"
    assert (
        start("/bin/sh", "-c", "exit 3").wait(30) == 3
    )  # before the others: the page has the newest failure
    environ[constants.ENV_GENERATION] = "2"
    assert start("/bin/sh", "-c", "exit 0").wait(30) == 0
    stopped = start(
        "/bin/sh", "-c", f"trap 'exit 3' TERM; echo $$ > {tmp_path / 'stopped'}; while :; do sleep 0.05; done"
    )
    wait_for_pid(tmp_path / "stopped")
    stopped.terminate()
    assert stopped.wait(30) == 3
    process.terminate()
    wait_for(signalled.exists, "the signal to reach the worker")
    assert is_alive(worker)
    other = start("/bin/sh", "-c", f"echo $$ > {tmp_path / 'other'}; exec sleep 600")
    wait_for_pid(tmp_path / "other")
    assert start("/bin/sh", "-c", "exit 3").wait(30) == 3
    wait_for_lease_polls(other)  # torchelastic stops the others, and nobody else does
    process.terminate()
    assert process.wait(30) == -signal.SIGKILL
    assert not is_alive(worker)


def test_orphans_of_worker_are_killed(start: Any, tmp_path: Path) -> None:
    """Also those that have left its session."""
    other_session, daemon = tmp_path / "other-session", tmp_path / "daemon"
    process = start(
        "/bin/sh",
        "-c",
        f"setsid sh -c 'trap \"\" TERM; echo $$ > {other_session}; sleep 600; true' & "
        f"(sh -c 'echo $$ > {daemon}; exec sleep 600' &) ; "
        f"while [ ! -s {other_session} ] || [ ! -s {daemon} ]; do sleep 0.01; done; exit 4",
    )
    assert process.wait(30) == 4
    assert not any(is_alive(wait_for_pid(path)) for path in (other_session, daemon))


def test_upload_that_a_successful_worker_leaves_ends_within_the_grace(start: Any, tmp_path: Path) -> None:
    """One line names it. The node's next worker, if any, waits for it."""
    upload = f"trap '' TERM HUP; sleep 0.4; echo done > {tmp_path / 'uploaded'}"
    process = start("/bin/sh", "-c", f'setsid sh -c "{upload}" </dev/null & exit 0')
    assert process.wait(30) == 0
    assert (tmp_path / "uploaded").read_text() == "done\n"


def test_what_stays_longer_is_stopped_and_named(
    lease_page: LeasePage, environ: dict[str, str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """SIGTERM comes first, and once. A drain, or the end of the agent or its lease, waits for nothing."""
    left = tmp_path / "left"
    loop = 'while [ -z "$asked" ]; do sleep 0.05; done; sleep 0.3'  # its clean-up
    command = f'(trap "echo stopped >> {left}.term; asked=1" TERM; echo $$ > {left}; {loop}) & exit 0'
    with changed_shim("pass", environ | {constants.ENV_GRACE: "0.3"}, "/bin/sh", "-c", command) as process:
        assert process.wait(30) == 0
    assert (tmp_path / "left.term").read_text() == "stopped\n"
    lines = capfd.readouterr().err
    assert re.search(r"rank \d: has ended well and left '.*' \(process \d+\). After 0.3 s", lines)
    assert re.search(r"rank \d: what it left did not end within 0.3 s, and is stopped", lines)
    left.unlink()
    with changed_shim("pass", environ | {constants.ENV_GRACE: "600"}, "/bin/sh", "-c", command) as process:
        # What it leaves writes its file before the worker has ended, and the signal would end the worker.
        wait_for(lambda: "has ended well and left" in capfd.readouterr().err, "the grace to begin")
        process.terminate()
        assert process.wait(30) == 0
    left.unlink()
    with changed_shim("pass", environ | {constants.ENV_GRACE: "600"}, "/bin/sh", "-c", command) as process:
        wait_for(lambda: "has ended well and left" in capfd.readouterr().err, "the grace to begin")
        lease_page.set(-math.inf)
        assert process.wait(30) == 0
        assert not is_alive(wait_for_pid(left))


def test_drained_worker_leaves_orphans_no_grace(start: Any, tmp_path: Path) -> None:
    """Its node waits for it to leave the job, though it has ended well."""
    script = f"trap 'exit 0' TERM; sleep 600 & echo $$ > {tmp_path / 'pid'}; while :; do sleep 0.05; done"
    process = start("/bin/sh", "-c", script)
    wait_for_pid(tmp_path / "pid")
    process.terminate()
    assert process.wait(30) == 0


@pytest.mark.usefixtures("lease_page")
def test_failed_worker_leaves_orphans_no_time(environ: dict[str, str], tmp_path: Path) -> None:
    """The next generation waits for them; those of a worker that succeeded may clean up."""
    command = f"sleep 600 & echo $! > {tmp_path / 'orphan'}; exit 3"
    with changed_shim("children.LEFTOVERS_GRACE_S = 600", environ, "/bin/sh", "-c", command) as process:
        assert process.wait(30) == 3
        assert not is_alive(wait_for_pid(tmp_path / "orphan"))


def stubborn(tmp_path: Path) -> tuple[str, ...]:
    """Return a worker with a grandchild in a session of its own; both ignore SIGTERM, SIGHUP and SIGINT."""
    grandchild = f"echo $$ > {tmp_path / 'grandchild'}; exec sleep 600"
    worker = f"(setsid sh -c '{grandchild}' &); echo $$ > {tmp_path / 'worker'}; exec sleep 600"
    return "/bin/sh", "-c", f"trap '' TERM HUP INT; {worker}"


def family(tmp_path: Path) -> list[int]:
    """Return the processes of `stubborn`, once they run."""
    return [wait_for_pid(tmp_path / name) for name in ("worker", "grandchild")]


def test_killed_shim_ends_worker_and_its_children(start: Any, tmp_path: Path) -> None:
    """The supervisor sees its connection close."""
    process = start(*stubborn(tmp_path))
    pids = family(tmp_path)
    process.kill()
    wait_for(lambda: not any(map(is_alive, pids)), "the worker and its child to die")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_killed_or_stopped_supervisor_ends_its_worker(
    number: int, environ: dict[str, str], tmp_path: Path
) -> None:
    """The kernel kills the worker, the launcher shim kills the leftovers and exits by SIGKILL."""
    environ[constants.ENV_GRACE] = "0"
    with changed_shim(SHORT_LIMITS, environ, *stubborn(tmp_path)) as process:
        pids = family(tmp_path)
        supervisor_process = psutil.Process(pids[0]).parent()
        assert supervisor_process is not None
        supervisor_process.send_signal(number)
        if number == signal.SIGSTOP:
            process.terminate()  # like torchelastic, which waits for the shim
        assert process.wait(60) == -signal.SIGKILL
    assert not any(map(is_alive, [supervisor_process.pid, *pids]))
    assert read_exit_event(tmp_path)["signal"] == "SIGKILL"


FREEZER = Path("/sys/fs/cgroup/freezer")  # of cgroup v1: a frozen process is in state D; no signal ends it


@pytest.mark.skipif(
    not os.access(FREEZER, os.W_OK), reason="needs root and cgroup v1 to make a process that no signal ends"
)
def test_unkillable_worker_does_not_block_shim(environ: dict[str, str], tmp_path: Path) -> None:
    """It sleeps in the kernel, as behind a broken disk. Only the supervisor stays with it."""
    environ[constants.ENV_GRACE] = "0"
    sleeper = ("/bin/sh", "-c", f"echo $$ > {tmp_path / 'pid'}; exec sleep 600")
    cgroup = FREEZER / f"test-{os.getpid()}"
    cgroup.mkdir()
    with changed_shim(SHORT_LIMITS, environ, *sleeper) as process:
        worker = psutil.Process(wait_for_pid(tmp_path / "pid"))
        supervisor_process = worker.parent()
        assert supervisor_process is not None
        try:
            (cgroup / "cgroup.procs").write_text(str(worker.pid))
            (cgroup / "freezer.state").write_text("FROZEN")
            wait_for(lambda: worker.status() == psutil.STATUS_DISK_SLEEP, "the worker to sleep in the kernel")
            process.terminate()
            assert process.wait(60) == -signal.SIGKILL
            assert read_exit_event(tmp_path)["stuck"] is True
            assert worker.is_running()
        finally:
            (cgroup / "freezer.state").write_text("THAWED")
    pids = (supervisor_process.pid, worker.pid)
    wait_for(lambda: not any(map(is_alive, pids)), "the worker and its supervisor to end")
    cgroup.rmdir()


@pytest.mark.parametrize("stopped", [False, True])
def test_killed_agent_leaves_no_process(environ: dict[str, str], tmp_path: Path, stopped: bool) -> None:
    """Launcher shim, worker and a grandchild in its own session end, even if SIGSTOP stopped the shim."""
    code = (
        "import os, subprocess, sys, time;"
        f" os.environ[{constants.ENV_AGENT_PID!r}] = str(os.getpid());"
        " p = subprocess.Popen(sys.argv[1:], start_new_session=True);"
        f" open({str(tmp_path / 'shim')!r}, 'w').write(str(p.pid)); time.sleep(600)"
    )
    agent = subprocess.Popen([*python(code), *SHIM, *stubborn(tmp_path)], env=environ)
    pids = [wait_for_pid(tmp_path / name) for name in ("shim", "worker", "grandchild")]
    if stopped:
        os.kill(pids[0], signal.SIGSTOP)
    agent.kill()
    agent.wait()
    wait_for(lambda: not any(map(is_alive, pids)), "launcher shim, worker and grandchild to die")
    wait_for_event(tmp_path)
    assert read_exit_event(tmp_path)["stopped"] is True


def test_shim_without_agent_starts_nothing(environ: Any, start: Any, tmp_path: Path) -> None:
    """The agent may die before the kernel watches it for the launcher shim."""
    environ[constants.ENV_AGENT_PID] = "1"
    assert start("/bin/sh", "-c", f"touch {tmp_path / 'started'}").wait(30) == 1
    assert not (tmp_path / "started").exists()


def test_shim_without_agents_pid_watches_its_parent(environ: Any, start: Any) -> None:
    """As where a launcher of the user's own starts it."""
    del environ[constants.ENV_AGENT_PID]
    assert start("/bin/sh", "-c", "exit 3").wait(30) == 3


def test_standby_does_not_start_cold(environ: Any, start: Any, tmp_path: Path) -> None:
    """Its node starts the worker when it has joined."""
    environ[constants.ENV_EARLY_START] = "1"
    assert start("/bin/sh", "-c", f"touch {tmp_path / 'started'}").wait(30) == 1
    assert not (tmp_path / "started").exists()


# ---- leases --------------------------------------------------------------------------------------------


def wait_for_lease_polls(process: subprocess.Popen[bytes], polls: int = 4) -> None:
    """Wait until the supervisor has woken up that often."""
    (entry,) = psutil.Process(process.pid).children()
    start = entry.num_ctx_switches().voluntary

    def woken() -> bool:
        assert process.poll() is None, f"the launcher shim ended with {process.returncode}"
        return bool(entry.num_ctx_switches().voluntary >= start + polls)

    wait_for(woken, "the supervisor to poll its lease")


def wait_for_event(tmp_path: Path) -> None:
    """Wait until a supervisor has written an event."""
    path = tmp_path / "events.jsonl"
    wait_for(lambda: path.exists() and path.stat().st_size, "the event of the supervisor")


def lease_expired_event(tmp_path: Path) -> dict[str, Any]:
    """Wait for the event of a worker whose lease expired; return it."""
    wait_for_event(tmp_path)
    event = read_exit_event(tmp_path)
    assert (event["signal"], event["stopped"], event["lease_expired"]) == ("SIGKILL", True, True)
    return event


def test_expired_lease_ends_all_but_the_shim(lease_page: LeasePage, start: Any, tmp_path: Path) -> None:
    """The shim waits for a signal, or torchelastic would count a failure; then it exits like its worker."""
    process = start(*stubborn(tmp_path))
    pids = family(tmp_path)
    lease_page.set(time.clock_gettime(time.CLOCK_BOOTTIME) + 0.2)
    wait_for(lambda: not any(map(is_alive, pids)), "worker and grandchild to die")
    assert lease_expired_event(tmp_path)["worker_pid"] == pids[0]
    wait_for_lease_polls(process)
    assert process.poll() is None
    os.killpg(process.pid, signal.SIGTERM)
    assert process.wait(30) == -signal.SIGKILL
    assert read_exit_event(tmp_path)["lease_expired"]


@pytest.mark.parametrize("word", [-math.inf, math.nan, 1.0])
def test_worker_without_valid_lease_is_killed(
    word: float, lease_page: LeasePage, start: Any, tmp_path: Path
) -> None:
    """A world may be over before its workers have started. NaN is no lease."""
    lease_page.set(word)
    process = start("/bin/sh", "-c", "exec sleep 600")
    worker = lease_expired_event(tmp_path)["worker_pid"]
    assert not is_alive(worker)
    wait_for_lease_polls(process)


def test_stopping_shim_exits_at_once_when_lease_expires(
    lease_page: LeasePage, start: Any, tmp_path: Path
) -> None:
    """No second signal will come. The lease overrides the grace period."""
    process = start(*stubborn(tmp_path))
    family(tmp_path)
    process.terminate()
    wait_for_lease_polls(process)
    lease_page.set(-math.inf)
    assert process.wait(30) == -signal.SIGKILL
    lease_expired_event(tmp_path)


def test_renewed_lease_keeps_worker_alive(lease_page: LeasePage, environ: Any, tmp_path: Path) -> None:
    """The supervisor reads the current word, not one that it has seen before."""
    later = tmp_path / "later"  # once it exists the clock is an hour ahead, beyond the first lease
    clock = f"now = time.monotonic; time.monotonic = lambda: now() + 3600 * os.path.exists({str(later)!r})"
    with changed_shim(clock, environ, *stubborn(tmp_path)) as process:
        pids = family(tmp_path)
        lease_page.set(time.clock_gettime(time.CLOCK_BOOTTIME) + 1800)
        wait_for_lease_polls(process)
        lease_page.set(time.clock_gettime(time.CLOCK_BOOTTIME) + 7200)
        later.touch()
        wait_for_lease_polls(process)
        assert all(map(is_alive, pids))
        assert not (tmp_path / "events.jsonl").exists()
        lease_page.set(-math.inf)
        wait_for(lambda: not any(map(is_alive, pids)), "worker and grandchild to die")


def test_worker_that_copies_its_last_step_for_ever_is_killed(
    lease_page: LeasePage, environ: Any, tmp_path: Path
) -> None:
    """It may finish the copy; one that is stopped never does. A later lease and a signal change nothing."""
    control_block = tmp_path / "slots"
    words = [0] * (supervisor.COPYING_START + supervisor.MAX_LOCAL_RANKS)
    words[supervisor.COPYING_START] = 7
    control_block.write_bytes(struct.pack(f"{len(words)}Q", *words))
    environ |= {constants.ENV_SLOTS: str(control_block), constants.ENV_LOCAL_RANK: "0"}
    limit = "supervisor.COPY_TIMEOUT_S = 1"
    command = f"echo $$ > {tmp_path / 'pid'}; exec sleep 600"
    with changed_shim(limit, environ, "/bin/sh", "-c", command) as process:
        worker = wait_for_pid(tmp_path / "pid")
        lease_page.set(-math.inf)
        wait_for_lease_polls(process)
        lease_page.set(math.inf)
        process.terminate()
        event = lease_expired_event(tmp_path)
    assert event["worker_pid"] == worker
    assert event["stopped_at"] <= event["t"] - 0.49


def test_shim_exits_when_agent_renews_lease_of_dead_worker(
    lease_page: LeasePage, start: Any, tmp_path: Path
) -> None:
    """An agent that renews the lease does not know that the worker was killed."""
    process = start(*stubborn(tmp_path))
    family(tmp_path)
    lease_page.set(-math.inf)
    lease_expired_event(tmp_path)
    lease_page.set(math.inf)
    assert process.wait(30) == -signal.SIGKILL


def test_jump_of_wall_clock_changes_no_lease(lease_page: LeasePage, environ: Any, tmp_path: Path) -> None:
    """Here it jumps by a day at every call. Only the event has the time of day."""
    clock = "now, days = time.time, iter(range(1, 10**9)); time.time = lambda: now() + 86400 * next(days)"
    lease_page.set(time.clock_gettime(time.CLOCK_BOOTTIME) + 3600)
    with changed_shim(clock, environ, *stubborn(tmp_path)) as process:
        pids = family(tmp_path)
        wait_for_lease_polls(process)
        assert all(map(is_alive, pids))
        lease_page.set(time.clock_gettime(time.CLOCK_BOOTTIME) + 0.1)
        assert lease_expired_event(tmp_path)["t"] > time.time() + 80000


@pytest.mark.parametrize("kind", ["missing", "short"])
def test_worker_without_readable_lease_page_does_not_start(
    kind: str, environ: Any, start: Any, tmp_path: Path
) -> None:
    """The error output and the event name the reason."""
    (tmp_path / "short").write_bytes(b"")
    path = {"missing": "/proc/self/fd/99", "short": str(tmp_path / "short")}[kind]
    environ[constants.ENV_LEASE_PAGE] = path
    process = start("/bin/sh", "-c", f"touch {tmp_path / 'started'}", stderr=subprocess.PIPE)
    error = process.communicate(timeout=30)[1].decode()
    assert process.returncode == 1
    assert error.startswith("elastic_resume: no worker can start without a lease, and its page ")
    assert path in error
    assert {"missing": "No such file or directory", "short": "mmap"}[kind] in error
    assert error.count("\n") == 1
    assert not (tmp_path / "started").exists()
    event = read_exit_event(tmp_path)
    assert (event["exit_code"], event["stopped"], event["worker_pid"]) == (1, False, None)
    assert event["message"] in error


@pytest.mark.usefixtures("lease_page")
def test_worker_inherits_no_lease_page(start: Any) -> None:
    """A job that it starts must not depend on its lease."""
    code = (
        f"import os; print({constants.ENV_LEASE_PAGE!r} in os.environ, sorted(os.listdir('/proc/self/fd')))"
    )
    plain = subprocess.check_output(python(code))
    assert plain.startswith(b"False")
    process = start(*python(code), stdout=subprocess.PIPE)
    assert process.communicate(timeout=30)[0] == plain


# ---- parking -------------------------------------------------------------------------------------------

PARKING_WORKER = str(Path(__file__).parents[1] / "support" / "scripts" / "parking_worker.py")


class ParkingNode:
    """The environment of an agent whose workers park, and their launcher shims."""

    def __init__(self, environ: dict[str, str], lease_page: LeasePage, tmp_path: Path) -> None:
        self.environ = environ
        self.lease_page = lease_page
        self.evidence = FailureEvents()
        self.shims = contextlib.ExitStack()
        self._errors = tmp_path / "stderr"
        self.parked_file = tmp_path / "parked"
        self.parked_file.touch()
        environ[constants.ENV_PARKED] = str(self.parked_file)
        environ[constants.ENV_EVIDENCE] = self.evidence.path

    def start(
        self, generation: int, *args: str, change: str = "supervisor.PARK_TIMEOUT_S = 60"
    ) -> tuple[subprocess.Popen[bytes], int]:
        """Start a launcher shim in ``generation``; return it with the worker that runs in it."""
        self.lease_page.set(math.inf)
        self.environ |= {"RANK": str(generation), constants.ENV_GENERATION: str(generation)}
        words = (sys.executable, PARKING_WORKER, *args)
        with open(self._errors, "ab") as errors:
            process = changed_shim(change, self.environ, *words, stdout=subprocess.PIPE, stderr=errors)
            shim = self.shims.enter_context(process)
        assert shim.stdout is not None
        with shim.stdout as output:
            worker, *facts = output.readline().split()
        assert facts == [b"%d" % generation, b"%d" % generation, b"None"]
        return shim, int(worker)

    def stop(self, shim: subprocess.Popen[bytes]) -> int:
        """End the generation of ``shim`` as the agent and torchelastic do; return the shim's exit code."""
        self.lease_page.set(-math.inf)
        shim.terminate()
        return shim.wait(30)

    def park(self) -> tuple[int, int]:
        """Start a worker and park it; return it and its supervisor."""
        shim, worker = self.start(2)
        parent = psutil.Process(worker).ppid()
        assert self.stop(shim) == constants.EXIT_PARKED
        assert is_alive(worker)
        return worker, parent

    def list_exits(self, worker: int) -> list[dict[str, Any]]:
        """List the events of the worker's end; those of an earlier test's workers may arrive here too."""
        events = self.evidence.read()
        return [e for e in events if e["event"] == "worker-exit" and e["worker_pid"] == worker]

    def count_park_messages(self) -> int:
        """Return how many times workers have been asked to park."""
        return self._errors.read_text().count("park\n")


@pytest.fixture
def node(environ: dict[str, str], lease_page: LeasePage, tmp_path: Path) -> Iterator[ParkingNode]:
    """Return a node whose workers park."""
    node = ParkingNode(environ, lease_page, tmp_path)
    with node.shims, contextlib.closing(node.evidence):
        yield node


def test_parked_worker_resumes_for_next_shim(node: ParkingNode, start: Any) -> None:
    """It gets the new environment and streams, and its exit belongs to the new generation."""
    worker, _ = node.park()
    shim, same_worker = node.start(3)
    assert same_worker == worker
    assert start("/bin/sh", "-c", "exit 3").wait(30) == 3  # another local rank fails in this generation
    shim.terminate()
    assert shim.wait(30) == constants.EXIT_PARKED
    shim, same_worker = node.start(4)
    assert same_worker == worker
    os.kill(worker, signal.SIGKILL)
    assert shim.wait(30) == -signal.SIGKILL
    events = [(e["event"], e["generation"]) for e in node.evidence.read() if e["worker_pid"] == worker]
    assert events == [*(("worker-forked", generation) for generation in (2, 3, 4)), ("worker-exit", 4)]


@pytest.mark.parametrize("how", ["stops", "ignores"])
def test_worker_that_does_not_park_in_time_is_killed(how: str, node: ParkingNode) -> None:
    """The next launcher shim starts another. The event says why."""
    shim, worker = node.start(2, how, change="supervisor.PARK_TIMEOUT_S = 0.3")
    assert node.stop(shim) == -signal.SIGKILL
    assert node.count_park_messages() == 1
    (event,) = node.list_exits(worker)
    assert (event["signal"], event["stopped"], event["not_parked"]) == ("SIGKILL", True, True)
    assert node.start(3)[1] != worker


@pytest.mark.parametrize("is_revoked", [False, True])
def test_restartable_worker_does_not_outlive_its_lease(
    is_revoked: bool, node: ParkingNode, tmp_path: Path
) -> None:
    """At the end of the lease it is killed at once. Time to park is part of the lease."""
    shim, worker = node.start(2, "ignores")
    node.lease_page.set(time.clock_gettime(time.CLOCK_BOOTTIME) + (5.0 if is_revoked else 0.5))
    if is_revoked:
        wait_for_lease_polls(shim)
        node.lease_page.set(-math.inf)
    wait_for(lambda: not is_alive(worker), "the worker to be killed")
    event = lease_expired_event(tmp_path)
    assert (event["worker_pid"], event.get("not_parked", False)) == (worker, is_revoked)
    assert node.count_park_messages() == is_revoked


def test_worker_that_has_left_its_function_is_killed(node: ParkingNode) -> None:
    """It is not asked to park."""
    shim, worker = node.start(2, "unrestartable")
    assert node.stop(shim) == -signal.SIGKILL
    assert node.count_park_messages() == 0
    (event,) = node.list_exits(worker)
    assert "not_parked" not in event


def test_waiting_worker_parks_without_delay(node: ParkingNode) -> None:
    """Its supervisor polls the lease more often. Here it would never look otherwise."""
    change = "supervisor.LEASE_POLL_INTERVAL_S = 600"
    shim, worker = node.start(2, "waiting 600", change=change)
    node.lease_page.set(-math.inf)
    wait_for(node.count_park_messages, "the message that the generation is over")
    assert node.stop(shim) == constants.EXIT_PARKED
    os.kill(worker, signal.SIGKILL)  # its supervisor would look for its agent in ten minutes


def test_drain_does_not_park(node: ParkingNode) -> None:
    """A signal without the end of the generation is SIGTERM, which the worker handles."""
    shim, _ = node.start(2)
    shim.terminate()
    assert shim.wait(30) == 9
    assert node.count_park_messages() == 0


@pytest.mark.parametrize("victim", ["worker", "supervisor", "stopped supervisor"])
def test_end_of_parked_worker_is_no_failure(victim: str, node: ParkingNode) -> None:
    """The next launcher shim starts another worker."""
    worker, parent = node.park()
    number = signal.SIGSTOP if "stopped" in victim else signal.SIGKILL
    os.kill(worker if victim == "worker" else parent, number)
    if number == signal.SIGKILL:
        wait_for(lambda: not is_alive(parent), "the supervisor to end")
    assert node.start(3)[1] != worker
    assert not is_alive(worker)
    assert not node.list_exits(worker)


def test_parked_worker_that_takes_no_message_is_replaced(node: ParkingNode) -> None:
    """Its new environment is more than the socket holds."""
    worker, _ = node.park()
    os.kill(worker, signal.SIGSTOP)
    node.environ["LARGE"] = "x" * 100_000
    node.environ |= {f"LARGE{n}": "x" * 100_000 for n in range(8)}
    assert node.start(3)[1] != worker
    assert not is_alive(worker)


def test_worker_that_no_shim_would_find_is_killed(node: ParkingNode) -> None:
    """The file that names its socket is gone, and the launcher shim must not wait for it."""
    shim, worker = node.start(2)
    node.parked_file.unlink()
    assert node.stop(shim) == -signal.SIGKILL
    assert not is_alive(worker)


def test_malformed_requests_do_not_end_parked_worker(node: ParkingNode) -> None:
    """Neither does another user's request, or a peer that sends nothing."""
    worker, _ = node.park()
    address = node.parked_file.read_bytes()
    with contextlib.ExitStack() as stack:
        for data in (b"", b"\xff" * 4, (8).to_bytes(4, "big") + b"{}"):
            client = stack.enter_context(socket.socket(socket.AF_UNIX))
            client.connect(address)
            client.sendall(data)
            client.shutdown(socket.SHUT_WR)
        stack.enter_context(socket.socket(socket.AF_UNIX)).connect(address)
        if os.getuid() == 0:
            code = f"""
import contextlib, os, socket
os.setuid(65534)
client = socket.socket(socket.AF_UNIX)
client.connect({address!r})
with contextlib.suppress(ConnectionResetError, BrokenPipeError):
    socket.send_fds(client, [b"\\0\\0\\0\\2{{}}"], [0, 1, 2])
    assert not client.recv(1)
"""
            subprocess.run(python(code), check=True)
        assert node.start(3)[1] == worker


def test_killed_agent_ends_parked_worker(node: ParkingNode) -> None:
    """No launcher shim is left whose end the supervisor could see."""
    code = f"""
import math, os, subprocess, sys, time
from elastic_resume.agent.workers.lease_page import LeasePage
page = LeasePage()
page.set(math.inf)
os.environ |= {{{constants.ENV_LEASE_PAGE!r}: page.path, {constants.ENV_AGENT_PID!r}: str(os.getpid())}}
shim = subprocess.Popen(sys.argv[1:], stdout=subprocess.PIPE)
worker = shim.stdout.readline().split()[0]
page.set(-math.inf)
shim.terminate()
print(int(worker), shim.wait(), flush=True)
time.sleep(600)
"""
    command = [*python(code), *SHIM, sys.executable, PARKING_WORKER]
    with subprocess.Popen(command, env=node.environ, stdout=subprocess.PIPE) as agent:
        assert agent.stdout is not None
        worker, exit_code = map(int, agent.stdout.readline().split())
        assert (exit_code, is_alive(worker)) == (constants.EXIT_PARKED, True)
        agent.kill()
    wait_for(lambda: not is_alive(worker), "the worker to die")
