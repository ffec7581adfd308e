"""What a worker has left is waited for, named, asked to end and killed, in this order."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from elastic_resume.agent.workers import children
from tests.support.paths import ROOT
from tests.support.processes import is_alive, wait_for, wait_for_pid

pytestmark = pytest.mark.slow

# Leaves a process that writes what it gets, and ends all its children under these conditions.
PARENT = """
import os, socket, subprocess, sys
from elastic_resume.agent.workers import children
left, grace_s, term_s, urgent, descriptor, loop = sys.argv[1:]
children.LEFTOVERS_TERM_S = float(term_s)
if urgent:
    children.LEFTOVERS_GRACE_S = 60  # else it may pass before the urgent moment
script = f'trap "echo TERM >> {left}.got" TERM; echo $$ > {left}; ' + loop
subprocess.Popen(["/bin/sh", "-c", script])
while not (os.path.exists(left) and os.path.getsize(left)):
    pass
polls = iter([1.0] * 20)
lease = {"lease": lambda: next(polls, 0.0)}.get(urgent, lambda: 1.0)
connection = socket.socket(fileno=int(descriptor)) if int(descriptor) >= 0 else None
children.kill_all(lease, at_once=urgent == "flag", grace_s=float(grace_s), connection=connection)
print(len(children.list_all()))
"""
FOREVER = "while :; do sleep 0.05; done"


def end_leftover(
    tmp_path: Path,
    loop: str = FOREVER,
    *,
    grace_s: float = 600,
    term_s: float = 600,
    urgent: str = "",
    connection: int = -1,
) -> tuple[str, str]:
    """Return what the leftover got and what was printed, once all children have ended."""
    left = tmp_path / "left"
    words = [str(left), str(grace_s), str(term_s), urgent, str(connection), loop]
    done = subprocess.run(
        [sys.executable, "-c", PARENT, *words],
        env={**os.environ, "PYTHONPATH": str(ROOT), "RANK": "3"},
        pass_fds=[connection] if connection >= 0 else [],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout == "0\n", done.stderr
    assert not is_alive(wait_for_pid(left))
    got = Path(f"{left}.got")
    return got.read_text() if got.exists() else "", done.stderr


@pytest.mark.parametrize("urgent", ["flag", "lease"])
def test_urgent_end_asks_nothing(urgent: str, tmp_path: Path) -> None:
    """A failure waits for nothing. A lease that expires meanwhile ends the wait."""
    assert end_leftover(tmp_path, urgent=urgent) == ("", "")


def test_what_ends_by_itself_soon_is_not_named(tmp_path: Path) -> None:
    """As multiprocessing's resource tracker."""
    assert end_leftover(tmp_path, "exit 0") == ("", "")


def test_short_grace_is_followed_by_a_kill(tmp_path: Path) -> None:
    """It was given for clean-ups alone."""
    assert end_leftover(tmp_path, grace_s=children.LEFTOVERS_GRACE_S) == ("", "")


def test_long_grace_names_what_is_left(tmp_path: Path) -> None:
    """It may use all of it."""
    got, lines = end_leftover(tmp_path, "sleep 0.5")
    assert got == ""
    assert lines.count("rank 3: has ended well and left '/bin/sh -c'") == 1
    assert "did not end" not in lines


def test_sigterm_comes_once_before_the_kill(tmp_path: Path) -> None:
    """A second one would cut the clean-up of the first."""
    got, lines = end_leftover(tmp_path, grace_s=0.3, term_s=0.4)
    assert got == "TERM\n"
    assert "what it left did not end within 0.3 s, and is stopped" in lines


def test_sigterm_suffices(tmp_path: Path) -> None:
    """Nothing is killed while it cleans up."""
    loop = f"trap 'sleep 0.3; echo clean >> {tmp_path / 'left.got'}; exit' TERM; {FOREVER}"
    assert end_leftover(tmp_path, loop, grace_s=0.3)[0] == "clean\n"


@pytest.mark.parametrize("grace_s", ["600", "0.3"], ids=["named", "asked"])
def test_message_of_the_shim_ends_the_wait(grace_s: str, tmp_path: Path) -> None:
    """Whether the grace or the time after SIGTERM runs."""
    ours, theirs = socket.socketpair()
    words = [str(tmp_path / "left"), grace_s, "600", "", str(theirs.fileno()), FOREVER]
    with (
        ours,
        theirs,
        subprocess.Popen(
            [sys.executable, "-c", PARENT, *words],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            pass_fds=[theirs.fileno()],
            stderr=subprocess.PIPE,
            text=True,
        ) as parent,
    ):
        assert parent.stderr
        assert "has ended well and left" in parent.stderr.readline()
        if grace_s != "600":
            wait_for((tmp_path / "left.got").exists, "SIGTERM to arrive")
        ours.sendall(b"signal 15\n")
        assert parent.wait(60) == 0
    assert not is_alive(wait_for_pid(tmp_path / "left"))


@pytest.mark.parametrize("stderr", ["closed", "broken", "full"])
def test_stderr_that_takes_nothing_delays_no_end(stderr: str, tmp_path: Path) -> None:
    """As after ``2>&1 | head``, or Ctrl-S in a terminal. The job has succeeded."""
    words = [str(tmp_path / "left"), "0.3", "0.3", "", "-1", FOREVER]
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    with contextlib.suppress(BlockingIOError):
        while stderr == "full":
            os.write(writing, bytes(4096))
    os.set_blocking(writing, True)
    if stderr != "full":
        os.close(reading)
    closes = "import os; os.close(2)\n" if stderr == "closed" else ""
    done = subprocess.run(
        [sys.executable, "-c", closes + PARENT, *words],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=writing,
        text=True,
        timeout=60,
        check=False,
    )
    os.close(writing)
    assert (done.returncode, done.stdout) == (0, "0\n")
    assert not is_alive(wait_for_pid(tmp_path / "left"))
    if stderr == "full":
        os.close(reading)


def test_closed_connection_brings_no_message() -> None:
    """A parked worker's supervisor may have none."""
    with socket.socket() as connection:
        pass
    assert not children._has_message(connection)


def test_names_need_a_process_that_lives(capfd: pytest.CaptureFixture[str]) -> None:
    """It may have ended since it was listed."""
    with subprocess.Popen(["true"]) as process:
        process.wait()
        children.write_names([process.pid], 1)
    assert capfd.readouterr().err == ""


@pytest.mark.skipif(os.getuid() != 0, reason="a mount needs root")
def test_children_are_found_without_the_kernels_list() -> None:
    """It needs CONFIG_PROC_CHILDREN."""
    program = """
import os, subprocess
from elastic_resume.agent.workers import children
others = [subprocess.Popen(["cat"], stdin=subprocess.PIPE) for _ in range(2)]
print(os.path.exists(f"/proc/self/task/{os.getpid()}"), set(children.list_all()) == {o.pid for o in others})
"""
    script = 'mount -t tmpfs none /proc/$$/task && exec "$@"'
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", script, "sh", sys.executable, "-c", program],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
        timeout=60,
    )
    assert done.stdout == "False True\n", done.stderr
