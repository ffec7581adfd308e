"""The stub with real processes and real signals: it mirrors its worker and leaves nothing behind."""

from __future__ import annotations

import json
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

from elastic_resume import contract
from elastic_resume.agent import stub

STUB = [sys.executable, "-I", "-S", stub.__file__, "0"]


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
        contract.ENV_AGENT_PID: str(os.getpid()),
        contract.ENV_EVENTS_PATH: str(tmp_path / "events.jsonl"),
        contract.ENV_ROUND: "2",
        contract.ENV_NODE_NAME: "a",
        contract.ENV_GRACE_S: "0.3",
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
    names = [name for name in vars(stub) if name.startswith("ENV_")]
    assert len(names) >= 6
    for name in names:
        assert getattr(stub, name) == getattr(contract, name)


def test_it_imports_only_what_starts_fast() -> None:
    """No site-packages, nothing of ours, none of the slow modules of the standard library."""
    code = "import sys; exec(open(sys.argv[1]).read(), {}); print(*sorted(sys.modules))"
    modules = subprocess.check_output(
        [sys.executable, "-I", "-S", "-c", code, stub.__file__], text=True
    ).split()
    assert not {"torch", "elastic_resume", "json", "subprocess", "typing", "site"} & set(modules)


@pytest.mark.parametrize("code", [0, 1, 77, 255])
def test_exit_codes_pass_through(code: int, start: Any, tmp_path: Path) -> None:
    """And are told in the event log."""
    assert start("/bin/sh", "-c", f"exit {code}").wait(30) == code
    event = exit_event(tmp_path)
    assert (event["exit_code"], event["signal"], event["stopped"]) == (code, None, False)
    assert (event["rank"], event["local_rank"], event["round"], event["node"]) == (3, 0, 2, "a")


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
    environ[contract.ENV_EVENTS_PATH] = "/nowhere/events.jsonl"
    assert start("/bin/sh", "-c", "exit 5").wait(30) == 5


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


def test_a_worker_that_ignores_sigterm_is_killed_after_the_grace(start: Any, tmp_path: Path) -> None:
    """Bounded, whatever the script does with the signal."""
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


def test_a_worker_in_a_session_of_its_own_is_told_too(start: Any, tmp_path: Path) -> None:
    """The signal of torchelastic goes to the stub's group only."""
    code = (
        "import os, signal, sys, time; os.setsid(); signal.signal(signal.SIGTERM, lambda *_: sys.exit(9));"
        f" open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    )
    process = start(*python(code))
    pid_in(tmp_path / "pid")
    os.killpg(process.pid, signal.SIGTERM)
    assert process.wait(30) == 9


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


def test_a_stub_that_is_killed_takes_the_worker_along(start: Any, tmp_path: Path) -> None:
    """By the kernel's hand."""
    process = start("/bin/sh", "-c", f"echo $$ > {tmp_path / 'pid'}; exec sleep 600")
    worker = pid_in(tmp_path / "pid")
    process.kill()
    wait_for(lambda: not alive(worker), "the worker to die")


def test_an_agent_that_is_killed_leaves_nothing(environ: dict[str, str], tmp_path: Path) -> None:
    """Stub, worker, and a grandchild in a session of its own: all gone, though the worker ignores signals."""
    script = (
        f"trap '' TERM HUP INT; setsid sh -c 'echo $$ > {tmp_path / 'grandchild'}; exec sleep 600' & "
        f"echo $$ > {tmp_path / 'worker'}; while true; do sleep 1; done"
    )
    agent = subprocess.Popen(
        [
            *python(
                "import os, subprocess, sys, time;"
                f" os.environ[{contract.ENV_AGENT_PID!r}] = str(os.getpid());"
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
    agent.kill()
    agent.wait()
    wait_for(lambda: not any(map(alive, pids)), "stub, worker and grandchild to die")
    assert exit_event(tmp_path)["stopped"] is True


def test_a_stub_whose_agent_is_dead_already_starts_nothing(environ: Any, start: Any, tmp_path: Path) -> None:
    """The agent may die between fork and the stub's request to be told."""
    environ[contract.ENV_AGENT_PID] = "1"
    assert start("/bin/sh", "-c", f"touch {tmp_path / 'started'}").wait(30) == 1
    assert not (tmp_path / "started").exists()
