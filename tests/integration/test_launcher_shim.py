"""The stub with real processes and real signals: it mirrors its worker and leaves nothing behind."""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from elastic_resume import constants, events
from elastic_resume.agent.round_events import RoundEvents
from elastic_resume.agent.workers import launcher_shim, supervisor
from elastic_resume.agent.workers.lease_page import LeasePage

pytestmark = pytest.mark.slow

STUB = [sys.executable, "-I", "-S", launcher_shim.__file__, "0"]


def wait_for(condition: Callable[[], Any], what: str, timeout_s: float = 30.0) -> Any:
    """Wait until ``condition`` is true; its value."""
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline, f"waited in vain: {what}"
        time.sleep(0.01)
    return value


def pid_in(path: Path) -> int:
    """The process that wrote its id to ``path``, once it has."""
    return int(wait_for(lambda: path.exists() and path.read_text().strip(), f"{path} to be written"))


def alive(pid: int) -> bool:
    """Whether the process runs; a zombie does not."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    """What an agent would set, with this process as the agent."""
    return {
        **os.environ,
        "RANK": "3",
        constants.ENV_AGENT_PID: str(os.getpid()),
        constants.ENV_EVENTS_PATH: str(tmp_path / "events.jsonl"),
        constants.ENV_ROUND: "2",
        constants.ENV_NODE_NAME: "a",
        constants.ENV_GRACE_S: "600",  # who ends by itself has time for it on a busy machine too
    }


@pytest.fixture
def start(environ: dict[str, str]) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Start a stub as torchelastic does, in a session of its own; kill it at the end."""
    started: list[subprocess.Popen[bytes]] = []

    def run(*command: str, **kwargs: Any) -> subprocess.Popen[bytes]:
        process = subprocess.Popen([*STUB, *command], env=environ, start_new_session=True, **kwargs)
        started.append(process)
        return process

    yield run
    for process in started:
        process.kill()
        process.wait()


@pytest.fixture
def fence(environ: dict[str, str]) -> Iterator[LeasePage]:
    """A fence that this process owns, with a lease without end."""
    fence = LeasePage()
    fence.set(math.inf)
    environ[constants.ENV_LEASE_PAGE] = fence.path
    yield fence
    fence.close()


def python(code: str) -> tuple[str, ...]:
    """A worker that runs ``code``."""
    return sys.executable, "-c", code


def exit_event(tmp_path: Path) -> dict[str, Any]:
    """The one line that the stub wrote."""
    (line,) = (tmp_path / "events.jsonl").read_text().splitlines()
    event: dict[str, Any] = json.loads(line)
    return event


def test_its_literals_are_the_contracts() -> None:
    """The stub imports nothing of the package, so it repeats the names."""
    modules = (launcher_shim, supervisor, supervisor, supervisor)
    names = [(module, name) for module in modules for name in vars(module) if name.startswith("ENV_")]
    assert len(names) >= 7
    for module, name in names:
        assert getattr(module, name) == getattr(constants, name)


def test_it_imports_only_what_starts_fast() -> None:
    """No site-packages, nothing of ours, none of the slow modules of the standard library."""
    code = "import sys; sys.path.insert(0, sys.argv[1]); import launcher_shim; print(*sorted(sys.modules))"
    words = [sys.executable, "-I", "-S", "-c", code, str(Path(launcher_shim.__file__).parent)]
    modules = subprocess.check_output(words, text=True).split()
    assert not {"torch", "elastic_resume", "json", "subprocess", "typing", "site"} & set(modules)


@pytest.mark.parametrize("code", [0, 1, 77, 255])
def test_exit_codes_pass_through(code: int, start: Any, tmp_path: Path) -> None:
    """And are told in the event log."""
    assert start("/bin/sh", "-c", f"exit {code}").wait(30) == code
    event = exit_event(tmp_path)
    assert (event["exit_code"], event["signal"], event["stopped"]) == (code, None, False)
    assert (event["rank"], event["local_rank"], event["round"], event["node"]) == (3, 0, 2, "a")
    now = events.boot_fields()  # of the same boot, in seconds since then
    assert event["boot"] == now["boot"] == events.BOOT_ID_FILE.read_text().replace("-", "")[:12]
    assert now["b"] - 1800 < event["b"] <= now["b"]


@pytest.mark.parametrize("name", ["SIGKILL", "SIGTERM", "SIGSEGV", "SIGABRT", "SIGUSR2", "SIGPIPE"])
def test_signals_pass_through(name: str, start: Any, tmp_path: Path) -> None:
    """The stub dies of what its worker died of, and leaves no core file of its own."""
    number = signal.Signals[name]
    assert start("/bin/sh", "-c", f"ulimit -c 0; kill -{int(number)} $$", cwd=tmp_path).wait(30) == -number
    event = exit_event(tmp_path)
    assert (event["exit_code"], event["signal"], event["stopped"]) == (None, name, False)
    assert [path.name for path in tmp_path.iterdir()] == ["events.jsonl"]


def test_the_worker_starts_as_without_a_stub(start: Any) -> None:
    """Arguments, environment, stdio, ignored and blocked signals: as a plain Popen would give it."""
    code = (
        "import os, signal, sys; print(sys.argv[1:], os.environ['RANK'], sys.stdin.read(),"
        " signal.pthread_sigmask(signal.SIG_BLOCK, []));"
        " print([line for line in open('/proc/self/status') if line.startswith(('SigIgn', 'SigBlk'))])"
    )
    command = [*python(code), "a b", "", "$x"]
    plain = subprocess.run(
        command, input=b"in", env={**os.environ, "RANK": "3"}, capture_output=True, check=True
    )
    process = start(*command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.communicate(b"in", 30)[0] == plain.stdout


def test_a_worker_whose_reader_is_gone_dies_of_it(start: Any) -> None:
    """SIGPIPE is not ignored on the way."""
    reader, writer = os.pipe()
    os.close(reader)
    assert start("/bin/sh", "-c", "exec cat /proc/self/status", stdout=writer).wait(30) == -signal.SIGPIPE
    os.close(writer)


@pytest.mark.parametrize(("command", "code"), [("/nowhere/python", 127), ("/etc/hostname", 126)])
def test_a_command_that_cannot_start_is_said(command: str, code: int, start: Any) -> None:
    """With the shell's exit codes."""
    process = start(command, stderr=subprocess.PIPE)
    assert f"cannot start {command}: ".encode() in process.communicate(timeout=30)[1]
    assert process.returncode == code


def test_the_message_that_record_left_is_told(environ: Any, start: Any, tmp_path: Path) -> None:
    """The @record of torch writes the exception where torchelastic said."""
    environ["TORCHELASTIC_ERROR_FILE"] = str(tmp_path / "error.json")
    (tmp_path / "error.json").write_text(
        json.dumps({"message": {"message": "ValueError: x", "extraInfo": {}}})
    )
    assert start("/bin/sh", "-c", "exit 1").wait(30) == 1
    assert exit_event(tmp_path)["message"] == "ValueError: x"


def test_a_lost_disk_changes_nothing(environ: Any, start: Any) -> None:
    """The exit code is worth more than the event."""
    environ[constants.ENV_EVENTS_PATH] = "/nowhere/events.jsonl"
    assert start("/bin/sh", "-c", "exit 5").wait(30) == 5


def test_how_a_worker_ended_is_in_the_agents_memory_though_no_disk_takes_it(environ: Any, start: Any) -> None:
    """The agent decides by it; the log on disk is for people."""
    environ[constants.ENV_EVENTS_PATH] = "/dev/full"
    with contextlib.closing(RoundEvents()) as told:
        environ[constants.ENV_ROUND_EVENTS] = told.path
        assert start("/bin/sh", "-c", "exit 5").wait(30) == 5
        (event,) = told.read()
        assert (event["event"], event["rank"], event["exit_code"], event["node"]) == (
            "worker-exit",
            3,
            5,
            "a",
        )
        told.clear()
        assert start("/bin/sh", "-c", "kill -9 $$").wait(30) == -signal.SIGKILL
        (event,) = told.read()
        assert event["signal"] == "SIGKILL"


def test_end_is_not_written_into_a_file_that_is_not_an_agents(
    environ: Any, start: Any, tmp_path: Path
) -> None:
    """The agent has ended, and the descriptor in /proc is that of a process that got its pid."""
    with open(tmp_path / "strangers", "w") as file:
        environ[constants.ENV_ROUND_EVENTS] = f"/proc/{os.getpid()}/fd/{file.fileno()}"
        assert start("/bin/sh", "-c", "exit 5").wait(30) == 5
        assert exit_event(tmp_path)["exit_code"] == 5
    assert (tmp_path / "strangers").read_text() == ""


def test_sigterm_to_the_group_lets_the_worker_end_by_itself(start: Any, tmp_path: Path) -> None:
    """Its own exit code counts, and the event says that it had been told."""
    code = (
        "import os, signal, sys, time; signal.signal(signal.SIGTERM, lambda *_: sys.exit(9));"
        f" open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    )
    process = start(*python(code))
    pid_in(tmp_path / "pid")
    os.killpg(process.pid, signal.SIGTERM)
    assert process.wait(30) == 9
    assert exit_event(tmp_path)["stopped"] is True


def test_a_worker_that_ignores_sigterm_is_killed_after_the_grace(
    environ: dict[str, str], start: Any, tmp_path: Path
) -> None:
    """Bounded, whatever the script does with the signal."""
    environ[constants.ENV_GRACE_S] = "0.3"
    code = (
        "import os, signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
        f" open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    )
    process = start(*python(code))
    pid_in(tmp_path / "pid")
    os.killpg(process.pid, signal.SIGTERM)
    assert process.wait(30) == -signal.SIGKILL
    event = exit_event(tmp_path)
    assert (event["signal"], event["stopped"]) == ("SIGKILL", True)


def test_sigterm_reaches_the_worker_and_not_the_processes_that_it_needs(start: Any, tmp_path: Path) -> None:
    """DataLoader workers that died first would take away what the worker wants to save."""
    code = f"""
import os, signal, subprocess, sys, time
child = subprocess.Popen(["/bin/cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
def told(*_):
    out, _ = child.communicate(b"alive")
    sys.exit(9 if out == b"alive" and os.getsid(0) == os.getpid() else 1)
signal.signal(signal.SIGTERM, told)
open({str(tmp_path / "pid")!r}, "w").write(str(os.getpid()))
time.sleep(600)
"""
    process = start(*python(code))
    pid_in(tmp_path / "pid")
    os.killpg(process.pid, signal.SIGTERM)
    assert process.wait(30) == 9


@pytest.mark.usefixtures("fence")
def test_after_a_failure_of_the_round_workers_are_killed_at_once(
    environ: dict[str, str], start: Any, tmp_path: Path
) -> None:
    """Whatever they do with SIGTERM: what torchelastic wants is a restart. An older round is not meant."""
    told = tmp_path / "told"
    code = (
        f"import os, pathlib, signal, time; told = pathlib.Path({str(told)!r});"
        " signal.signal(signal.SIGTERM, lambda *_: told.touch());"
        f" open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))\nwhile True: time.sleep(1)"
    )
    process = start(*python(code))
    worker = pid_in(tmp_path / "pid")
    environ[constants.ENV_ROUND] = "1"
    assert start("/bin/sh", "-c", "exit 3").wait(30) == 3
    process.terminate()
    wait_for(told.exists, "the worker to be told")
    assert alive(worker)
    environ[constants.ENV_ROUND] = "2"
    assert start("/bin/sh", "-c", "exit 3").wait(30) == 3
    process.terminate()
    assert process.wait(30) == -signal.SIGKILL
    assert not alive(worker)


def test_what_a_worker_leaves_behind_is_killed(start: Any, tmp_path: Path) -> None:
    """Orphans that left the session included: they become the stub's children."""
    pids = [tmp_path / "one", tmp_path / "two"]
    process = start(
        "/bin/sh",
        "-c",
        f"setsid sh -c 'trap \"\" TERM; echo $$ > {pids[0]}; sleep 600; true' & "
        f"(sh -c 'echo $$ > {pids[1]}; exec sleep 600' &) ; "
        f"while [ ! -s {pids[0]} ] || [ ! -s {pids[1]} ]; do sleep 0.01; done; exit 4",
    )
    assert process.wait(30) == 4
    for path in pids:
        assert not alive(pid_in(path))


FAMILY = (
    "setsid sh -c 'trap \"\" TERM; echo $$ > {0}/child; sleep 600; true' & echo $$ > {0}/pid; sleep 600; true"
)


def test_a_stub_that_is_killed_takes_the_worker_and_its_children_along(start: Any, tmp_path: Path) -> None:
    """The guard sees its line end."""
    process = start("/bin/sh", "-c", FAMILY.format(tmp_path))
    family = [pid_in(tmp_path / name) for name in ("pid", "child")]
    process.kill()
    wait_for(lambda: not any(map(alive, family)), "the worker and its child to die")


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_guard_that_is_killed_or_stopped_costs_its_worker_only(
    number: int, environ: dict[str, str], start: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel kills the worker, the stub what that one leaves, and torchelastic sees a worker killed."""
    monkeypatch.setitem(environ, constants.ENV_GRACE_S, "0")
    process = start("/bin/sh", "-c", FAMILY.format(tmp_path))
    family = [pid_in(tmp_path / name) for name in ("pid", "child")]
    keeper = psutil.Process(family[0]).parent()
    assert keeper is not None
    keeper.send_signal(number)
    if number == signal.SIGSTOP:
        process.terminate()  # as torchelastic would, which waits for the stub
    assert process.wait(60) == -signal.SIGKILL
    assert not any(map(alive, [keeper.pid, *family]))
    assert exit_event(tmp_path)["signal"] == "SIGKILL"


FREEZER = Path(
    "/sys/fs/cgroup/freezer"
)  # of cgroup v1: what it has frozen is in state D, and no signal ends it


@pytest.mark.slow
@pytest.mark.skipif(
    not os.access(FREEZER, os.W_OK), reason="needs root and cgroup v1 to make a process that no signal ends"
)
def test_a_worker_that_does_not_die_of_sigkill_does_not_hold_the_stub(
    environ: dict[str, str], start: Any, tmp_path: Path
) -> None:
    """It sleeps uninterruptibly, as behind a broken disk. The guard stays with it, torchelastic goes on."""
    environ[constants.ENV_GRACE_S] = "0"
    process = start("/bin/sh", "-c", f"echo $$ > {tmp_path / 'pid'}; exec sleep 600")
    worker = psutil.Process(pid_in(tmp_path / "pid"))
    keeper = worker.parent()
    cgroup = FREEZER / f"test-{os.getpid()}"
    cgroup.mkdir()
    try:
        (cgroup / "cgroup.procs").write_text(str(worker.pid))
        (cgroup / "freezer.state").write_text("FROZEN")
        wait_for(lambda: worker.status() == psutil.STATUS_DISK_SLEEP, "the worker to sleep in the kernel")
        process.terminate()
        assert process.wait(60) == -signal.SIGKILL
        assert exit_event(tmp_path)["stuck"] is True
        assert worker.is_running()
    finally:
        (cgroup / "freezer.state").write_text("THAWED")
    assert keeper is not None
    wait_for(lambda: not alive(keeper.pid) and not alive(worker.pid), "the worker and its guard to end")
    cgroup.rmdir()


@pytest.mark.parametrize("stopped", [False, True])
def test_an_agent_that_is_killed_leaves_nothing(
    environ: dict[str, str], tmp_path: Path, stopped: bool
) -> None:
    """Stub, worker, and a grandchild in a session of its own, though the worker ignores signals.

    ``stopped``: the stub was, by SIGSTOP.
    """
    script = (
        f"trap '' TERM HUP INT; setsid sh -c 'echo $$ > {tmp_path / 'grandchild'}; exec sleep 600' & "
        f"echo $$ > {tmp_path / 'worker'}; while true; do sleep 1; done"
    )
    agent = subprocess.Popen(
        [
            *python(
                "import os, subprocess, sys, time;"
                f" os.environ[{constants.ENV_AGENT_PID!r}] = str(os.getpid());"
                " p = subprocess.Popen(sys.argv[1:], start_new_session=True);"
                f" open({str(tmp_path / 'stub')!r}, 'w').write(str(p.pid)); time.sleep(600)"
            ),
            *STUB,
            "/bin/sh",
            "-c",
            script,
        ],
        env=environ,
    )
    pids = [pid_in(tmp_path / name) for name in ("stub", "worker", "grandchild")]
    if stopped:
        os.kill(pids[0], signal.SIGSTOP)
    agent.kill()
    agent.wait()
    wait_for(lambda: not any(map(alive, pids)), "stub, worker and grandchild to die")
    wait_for_event(tmp_path)
    assert exit_event(tmp_path)["stopped"] is True


def test_a_stub_whose_agent_is_dead_already_starts_nothing(environ: Any, start: Any, tmp_path: Path) -> None:
    """The agent may die between fork and the stub's request to be told."""
    environ[constants.ENV_AGENT_PID] = "1"
    assert start("/bin/sh", "-c", f"touch {tmp_path / 'started'}").wait(30) == 1
    assert not (tmp_path / "started").exists()


# ---- fencing -----------------------------------------------------------------------------------------------


def stubborn(tmp_path: Path) -> tuple[str, ...]:
    """A worker with a grandchild in a session of its own; both ignore what can be ignored."""
    grandchild = f"echo $$ > {tmp_path / 'grandchild'}; exec sleep 600"
    worker = f"(setsid sh -c '{grandchild}' &); echo $$ > {tmp_path / 'worker'}; exec sleep 600"
    return "/bin/sh", "-c", f"trap '' TERM HUP INT; {worker}"


def family(tmp_path: Path) -> list[int]:
    """The processes of `stubborn`, once they run."""
    return [pid_in(tmp_path / name) for name in ("worker", "grandchild")]


def wait_for_looks(process: subprocess.Popen[bytes], looks: int = 4) -> None:
    """Wait until the guard of a living stub has woken up so often."""
    (entry,) = psutil.Process(process.pid).children()
    start = entry.num_ctx_switches().voluntary

    def woken() -> bool:
        assert process.poll() is None, f"the stub ended with {process.returncode}"
        return bool(entry.num_ctx_switches().voluntary >= start + looks)

    wait_for(woken, "the guard to look at its fence")


def wait_for_event(tmp_path: Path) -> None:
    """Wait until a guard has written something."""
    path = tmp_path / "events.jsonl"
    wait_for(lambda: path.exists() and path.stat().st_size, "the guard's event")


def fenced_event(tmp_path: Path) -> dict[str, Any]:
    """What the guard wrote of a worker that it fenced, once it has."""
    wait_for_event(tmp_path)
    event = exit_event(tmp_path)
    assert (event["signal"], event["stopped"], event["lease_expired"]) == ("SIGKILL", True, True)
    return event


def test_a_lease_that_runs_out_ends_all_but_the_stub(fence: LeasePage, start: Any, tmp_path: Path) -> None:
    """The stub waits to be told, or torchelastic would spend a restart; then it ends like its worker."""
    process = start(*stubborn(tmp_path))
    pids = family(tmp_path)
    fence.set(time.clock_gettime(time.CLOCK_BOOTTIME) + 0.2)
    wait_for(lambda: not any(map(alive, pids)), "worker and grandchild to die")
    assert fenced_event(tmp_path)["worker_pid"] == pids[0]
    wait_for_looks(process)
    os.killpg(process.pid, signal.SIGTERM)
    assert process.wait(30) == -signal.SIGKILL
    assert exit_event(tmp_path)["lease_expired"]


def test_a_worker_can_be_ended_at_once(fence: LeasePage, start: Any, tmp_path: Path) -> None:
    """No lease at all leaves no grace, whatever the script does with signals."""
    process = start(*stubborn(tmp_path))
    pids = family(tmp_path)
    fence.set(-math.inf)
    wait_for(lambda: not any(map(alive, pids)), "worker and grandchild to die")
    fenced_event(tmp_path)
    wait_for_looks(process)
    process.terminate()
    assert process.wait(30) == -signal.SIGKILL


@pytest.mark.parametrize("word", [-math.inf, math.nan, 0.0, 1.0])
def test_no_worker_lives_without_a_lease(word: float, fence: LeasePage, start: Any, tmp_path: Path) -> None:
    """A world may be over before its workers have started. What is no time is no lease."""
    fence.set(word)
    process = start("/bin/sh", "-c", "exec sleep 600")
    worker = fenced_event(tmp_path)["worker_pid"]
    assert not alive(worker)
    wait_for_looks(process)


def test_a_stub_that_was_told_before_its_worker_was_fenced_ends_at_once(
    fence: LeasePage, start: Any, tmp_path: Path
) -> None:
    """Nobody will tell it again. The fence goes before the grace."""
    process = start(*stubborn(tmp_path))
    family(tmp_path)
    process.terminate()
    wait_for_looks(process)
    fence.set(-math.inf)
    assert process.wait(30) == -signal.SIGKILL
    fenced_event(tmp_path)


@contextlib.contextmanager
def stub_whose(clock: str, environ: dict[str, str], *command: str) -> Iterator[subprocess.Popen[bytes]]:
    """Start a stub whose clock is what this line of Python makes of it; kill it at the end."""
    begin = "sys.path.insert(0, sys.argv[1]); import launcher_shim; launcher_shim.main(sys.argv[2:])"
    code = f"import os, sys, time; {clock}; {begin}"
    words = [sys.executable, "-I", "-S", "-c", code, str(Path(launcher_shim.__file__).parent), "0", *command]
    process = subprocess.Popen(words, env=environ, start_new_session=True)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def test_a_renewed_lease_keeps_the_worker_alive(fence: LeasePage, environ: Any, tmp_path: Path) -> None:
    """The stub goes by the word of the moment, not by one that it has seen before."""
    later = tmp_path / "later"  # with which its clock is an hour on: the first lease has run out then
    clock = f"now = time.monotonic; time.monotonic = lambda: now() + 3600 * os.path.exists({str(later)!r})"
    with stub_whose(clock, environ, *stubborn(tmp_path)) as process:
        pids = family(tmp_path)
        fence.set(time.clock_gettime(time.CLOCK_BOOTTIME) + 1800)
        wait_for_looks(process)
        fence.set(time.clock_gettime(time.CLOCK_BOOTTIME) + 7200)
        later.touch()
        wait_for_looks(process)
        assert all(map(alive, pids))
        assert not (tmp_path / "events.jsonl").exists()
        fence.set(-math.inf)
        wait_for(lambda: not any(map(alive, pids)), "worker and grandchild to die")


def test_an_agent_that_believes_in_a_dead_worker_is_shown_its_end(
    fence: LeasePage, start: Any, tmp_path: Path
) -> None:
    """Who renews a lease does not know that the worker was killed over it."""
    process = start(*stubborn(tmp_path))
    family(tmp_path)
    fence.set(-math.inf)
    fenced_event(tmp_path)
    fence.set(math.inf)
    assert process.wait(30) == -signal.SIGKILL


# An agent with a lease that it renews as long as it runs. Once its worker is up it stops, with little left.
LEASED = """
import os, pathlib, signal, subprocess, sys, time
from elastic_resume import constants
from elastic_resume.agent.workers.lease_page import LeasePage
lease_page = LeasePage()
lease_page.set(time.clock_gettime(time.CLOCK_BOOTTIME) + 3600)
os.environ[constants.ENV_AGENT_PID] = str(os.getpid())
os.environ[constants.ENV_LEASE_PAGE] = lease_page.path
here = pathlib.Path(sys.argv[1])
stub = subprocess.Popen(sys.argv[2:], start_new_session=True)
while not all((here / name).exists() for name in ("worker", "grandchild")):
    time.sleep(0.01)
(here / "stub").write_text(str(stub.pid))
lease_page.set(time.clock_gettime(time.CLOCK_BOOTTIME) + 0.5)
os.kill(os.getpid(), signal.SIGSTOP)
"""


def test_an_agent_that_is_stopped_loses_its_workers(environ: dict[str, str], tmp_path: Path) -> None:
    """Nobody else on the node needs to run for that. What remains goes with the agent."""
    arguments = [str(tmp_path), *STUB, *stubborn(tmp_path)]
    agent = subprocess.Popen([*python(LEASED), *arguments], env=environ)
    try:
        stub_pid, *pids = [pid_in(tmp_path / "stub"), *family(tmp_path)]
        wait_for(lambda: not any(map(alive, pids)), "worker and grandchild to die")
        fenced_event(tmp_path)
        assert alive(stub_pid)
    finally:
        agent.kill()
        agent.wait()
    wait_for(lambda: not alive(stub_pid), "the stub to die")


def test_a_jump_of_the_wall_clock_changes_no_lease(fence: LeasePage, environ: Any, tmp_path: Path) -> None:
    """Here it jumps by a day whenever it is asked. The event has the time of day, the lease has not."""
    clock = "now, days = time.time, iter(range(1, 10**9)); time.time = lambda: now() + 86400 * next(days)"
    fence.set(time.clock_gettime(time.CLOCK_BOOTTIME) + 3600)
    with stub_whose(clock, environ, *stubborn(tmp_path)) as process:
        pids = family(tmp_path)
        wait_for_looks(process)
        assert all(map(alive, pids))
        fence.set(time.clock_gettime(time.CLOCK_BOOTTIME) + 0.1)
        assert fenced_event(tmp_path)["t"] > time.time() + 80000


@pytest.mark.parametrize("kind", ["missing", "short", "device"])
def test_a_worker_that_cannot_be_fenced_does_not_start(
    kind: str, environ: Any, start: Any, tmp_path: Path
) -> None:
    """It is said where a person looks, and in the event that the agent reads."""
    (tmp_path / "short").write_bytes(b"")
    path = {"missing": "/proc/self/fd/99", "short": str(tmp_path / "short"), "device": "/dev/null"}[kind]
    environ[constants.ENV_LEASE_PAGE] = path
    process = start("/bin/sh", "-c", f"touch {tmp_path / 'started'}", stderr=subprocess.PIPE)
    said = process.communicate(timeout=30)[1].decode()
    assert process.returncode == 1
    assert said.startswith("elastic_resume: no worker can start without a lease, and its page ")
    assert path in said
    assert said.count("\n") == 1
    assert not (tmp_path / "started").exists()
    event = exit_event(tmp_path)
    assert (event["exit_code"], event["stopped"], event["worker_pid"]) == (1, False, None)
    assert event["message"] in said


@pytest.mark.usefixtures("fence")
def test_a_worker_knows_nothing_of_its_fence(start: Any) -> None:
    """A job that it starts by itself must not be fenced with it, nor may it hold a descriptor."""
    code = (
        f"import os; print({constants.ENV_LEASE_PAGE!r} in os.environ, sorted(os.listdir('/proc/self/fd')))"
    )
    plain = subprocess.check_output(python(code))
    assert plain.startswith(b"False")
    process = start(*python(code), stdout=subprocess.PIPE)
    assert process.communicate(timeout=30)[0] == plain


@pytest.mark.usefixtures("fence")
@pytest.mark.parametrize("has_lease", [False, True])
@pytest.mark.parametrize("code", [0, 7])
def test_a_worker_within_its_lease_ends_as_without_one(
    has_lease: bool, code: int, environ: Any, start: Any, tmp_path: Path
) -> None:
    """At once, and with the same event."""
    if not has_lease:
        del environ[constants.ENV_LEASE_PAGE]
    assert start("/bin/sh", "-c", f"exit {code}").wait(30) == code
    event = exit_event(tmp_path)
    fields = {
        "t",
        "event",
        "node",
        "pid",
        "b",
        "boot",
        "rank",
        "local_rank",
        "round",
        "worker_pid",
        "exit_code",
        "signal",
    }
    assert set(event) == fields | {"stopped"} | ({"message"} if code else set())
    assert event["stopped"] is False
