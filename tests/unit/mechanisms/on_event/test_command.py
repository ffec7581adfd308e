"""The user's command: real processes that fail, hang, flood, and leave children."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from elastic_resume import config, constants
from elastic_resume.checkpoint.node_dir import NodeDir
from elastic_resume.errors import ConfigError
from elastic_resume.mechanisms.on_event import ON_EVENT, command
from elastic_resume.mechanisms.on_event.command import CommandQueue, parse_command, run_command
from tests.support.processes import is_alive, wait_for

NOTICE = {"kind": "failure", "text": "a $(touch pwned) `touch pwned` 'quote\"\n"}


def shell(text: str) -> tuple[str, ...]:
    """Return the words of a command of a shell."""
    return ("/bin/sh", "-c", text)


def never() -> bool:
    """Return that no limit is over."""
    return False


def until(path: Path) -> Callable[[], bool]:
    """Return a limit that is over once a file exists, which the command writes."""
    return path.exists


def test_command_gets_notice_on_stdin_and_no_private_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No shell reads the notice; the user's own variables are there."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ELASTIC_RESUME_AGENT_PID", "1")
    monkeypatch.setenv("WEBHOOK", "there")
    assert not run_command(shell("cat > notice; env > variables"), NOTICE, never)
    assert json.loads((tmp_path / "notice").read_text()) == NOTICE
    variables = (tmp_path / "variables").read_text()
    assert "WEBHOOK=there" in variables
    assert "ELASTIC_RESUME_" not in variables
    assert not (tmp_path / "pwned").exists()


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (shell("exit 0"), ""),
        (shell("echo no route; exit 3"), "ended with exit code 3, and printed: no route"),
        (
            shell("echo 'curl --token hunter2'; exit 3"),
            "ended with exit code 3, and printed: curl --token ***",
        ),
        (
            shell("echo https://example.org/T0/hunter2: Authorization: Bearer hunter2; exit 3"),
            "ended with exit code 3, and printed: https://example.org/*** Authorization: Bearer ***",
        ),
        (shell("kill -9 $$"), "was ended by signal 9"),
        (("/nowhere/notify",), "could not be started: No such file or directory"),
    ],
)
def test_failure_of_command_is_described(words: tuple[str, ...], problem: str) -> None:
    """With the end of its output, secrets masked."""
    assert run_command(words, NOTICE, never) == problem


def test_flood_of_output_is_cut(tmp_path: Path) -> None:
    """What is kept has a limit, and so has the time."""
    flood = f"yes | head -c 3000000; echo the last line; touch {tmp_path}/done; exit 1"
    problem = run_command(shell(flood), NOTICE, never)
    assert problem.endswith("the last line")
    assert len(problem) < command.MAX_SHOWN_BYTES + 100
    endless = f"touch {tmp_path}/begun; exec yes"
    assert "took too long and was killed" in run_command(shell(endless), NOTICE, until(tmp_path / "begun"))


def test_command_that_ignores_signals_is_killed_with_its_children(tmp_path: Path) -> None:
    """SIGTERM would not do; the whole process group ends."""
    hangs = f"trap '' TERM; cd {tmp_path}; sleep 600 & echo $! > child.new; mv child.new child; wait"
    problem = run_command(shell(hangs), NOTICE, until(tmp_path / "child"))
    assert problem == "took too long and was killed"
    child = int((tmp_path / "child").read_text())
    wait_for(lambda: not is_alive(child), "the end of the command's child")


def test_process_that_command_leaves_is_killed(tmp_path: Path) -> None:
    """It would hold the job's streams, or send for ever. Success counts."""
    assert not run_command(shell(f"sleep 600 & echo $! > {tmp_path}/child"), NOTICE, never)
    child = int((tmp_path / "child").read_text())
    wait_for(lambda: not is_alive(child), "the end of what the command left")


AGENT = """
import sys
from elastic_resume.mechanisms.on_event.command import CommandQueue
script = "trap '' TERM HUP; echo $$ > pid.new; mv pid.new pid; exec sleep 600"
queue = CommandQueue(("/bin/sh", "-c", script))
queue.put({"kind": "start"})
sys.stdin.read()
"""


def test_command_ends_with_an_agent_that_is_killed(tmp_path: Path) -> None:
    """Nobody is left to kill it at its limit."""
    with subprocess.Popen([sys.executable, "-c", AGENT], cwd=tmp_path, stdin=subprocess.PIPE) as agent:
        wait_for((tmp_path / "pid").exists, "the command")
        pid = int((tmp_path / "pid").read_text())
        assert is_alive(pid)
        agent.kill()
    try:
        wait_for(lambda: not is_alive(pid), "the end of the command")
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def test_command_that_is_killed_at_the_agents_end_is_described_truly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """No training continues, and it has not had its usual limit."""
    monkeypatch.setattr(command, "MIN_END_S", 0.1)
    queue = CommandQueue(shell(f"touch {tmp_path}/begun; exec sleep 600"))
    queue.put({"kind": "stop"})
    wait_for((tmp_path / "begun").exists, "the command")
    queue.finish(0.0)
    (line,) = caplog.messages
    assert line == (
        "on-event: the command for the event 'stop' took too long and was killed. The job does not depend on "
        "it; later failures of the command are not logged."
    )


def test_oldest_notices_are_dropped_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """`put` does not wait for a command that hangs."""
    begun, goes_on = threading.Event(), threading.Event()
    found: list[dict[str, Any]] = []

    def run(_words: object, notice: dict[str, Any], _over: object) -> str:
        found.append(notice)
        begun.set()
        goes_on.wait(60)
        return ""

    monkeypatch.setattr(command, "run_command", run)
    queue = CommandQueue(("x",))
    queue.put({**NOTICE, "number": 0})
    assert begun.wait(60)
    for number in range(1, command.MAX_WAITING + 3):
        queue.put({"number": number})
    goes_on.set()
    queue.finish()
    assert [notice["number"] for notice in found] == [0, *range(3, command.MAX_WAITING + 3)]
    assert [notice["dropped"] for notice in found[:3]] == [0, 2, 0]


def test_failing_command_is_logged_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Each later event still runs it."""
    found: list[dict[str, Any]] = []

    def run(_words: object, notice: dict[str, Any], _over: object) -> str:
        found.append(notice)
        return "ended with exit code 1"

    monkeypatch.setattr(command, "run_command", run)
    queue = CommandQueue(("x",))
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            queue.put({"kind": "alert"})
        queue.finish()
    assert len(found) == 3
    (line,) = caplog.messages
    assert "the command for the event 'alert' ended with exit code 1" in line


@pytest.mark.parametrize("left_s", [None, 3.0])
def test_last_notice_gets_its_share_though_the_command_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, left_s: float | None
) -> None:
    """The agent's end waits for both together no longer than the limit, or the rest of the grace."""
    monkeypatch.setattr(command, "END_LIMIT_S", 3.0 if left_s is None else 600.0)
    queue = CommandQueue(shell(f"cat >> {tmp_path}/notices; exec sleep 600"))
    queue.put({**NOTICE, "number": 0})
    wait_for((tmp_path / "notices").exists, "the first run")
    queue.put({**NOTICE, "number": 1})
    queue.finish(left_s)
    assert [json.loads(line)["number"] for line in (tmp_path / "notices").read_text().splitlines()] == [0, 1]


@pytest.mark.parametrize("text", ["", " ", "notify 'open", "true 'a\0b'", "no-such-program-here --now"])
def test_wrong_command_is_refused(text: str) -> None:
    """At the start of the job, not at its first failure. A webhook's address is not quoted."""
    with pytest.raises(ConfigError, match=r"^--on-event"):
        parse_command("--on-event", text)


def test_command_is_split_and_its_arguments_are_not_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a shell splits words; the program's path does not depend on a later directory."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notify").write_text("#!/bin/sh\n")
    (tmp_path / "notify").chmod(0o755)
    text = "./notify 'two words' $HOME https://hooks.example/T0/secret"
    assert parse_command("x", text) == (
        os.path.join(tmp_path, "notify"),  # noqa: PTH118
        "two words",
        "$HOME",
        "https://hooks.example/T0/secret",
    )
    (option,) = ON_EVENT.options
    assert option.show(text) == "./notify ***"
    assert option.show("./notify") == "./notify"
    assert option.show("") == ""


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (["run", "--on-event", "curl https://x/SECRET", "train.py"], "run --on-event curl *** train.py"),
        (["run", "--on-event=curl https://x/SECRET", "train.py"], "run --on-event=curl *** train.py"),
        (["run", "--on_event", "curl https://x/SECRET"], "run --on_event curl ***"),
        (["run", "--keep", "3", "train.py", "on-event", "x y"], "run --keep 3 train.py on-event x y"),
        (["run", "--on-event"], "run --on-event"),
    ],
)
def test_its_words_are_not_in_the_file_of_the_directorys_owner(
    tmp_path: Path, words: list[str], shown: str
) -> None:
    """The file is for other users and machines: a webhook's address is a secret."""
    command_line = config.mask_command(["elastic-resume", *words])
    with NodeDir.claim(tmp_path, "job", "a", command=command_line) as node_dir:
        owner = json.loads((node_dir.path / constants.LOCK_OWNER_FILE).read_text())
    assert owner["command"].partition("elastic-resume ")[2] == shown
