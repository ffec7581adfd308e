"""Nothing is left of a test's nodes when its pytest is interrupted or killed."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from elastic_resume import linux
from tests.support.fake_sklearn import write_fake_sklearn
from tests.support.paths import ROOT

WORD = "LEFT_BEHIND"  # in the environment of all processes of a test
SCRIPT = ROOT / "examples" / "digits.py"
TESTS = """
import os, time
from pathlib import Path
import pytest

def train(cluster):
    cluster.start(SCRIPT, "--epochs", "100000", "--step-delay", "0.05")
    cluster.wait(step=2)
    name = os.environ["PYTEST_CURRENT_TEST"].split("::")[1].split(" ")[0]
    Path(name).touch()
    time.sleep(600)

def test_both(make_cluster):
    with make_cluster(nodes=1) as one:
        one.start(SCRIPT, "--epochs", "100000", "--step-delay", "0.05")
        train(make_cluster(nodes=1, hosts="namespaces"))
"""


@dataclass
class Traces:
    """The traces of a test run on this machine, found by a variable in its processes' environment."""

    place: str
    shm: set[str] = field(default_factory=lambda: _names("/dev/shm"))  # noqa: S108
    namespaces: set[str] = field(default_factory=set)

    def processes(self) -> list[int]:
        """Return its running processes."""
        word = f"{WORD}={self.place}".encode()
        return [pid for pid in _pids() if word in _read(f"/proc/{pid}/environ").split(b"\0")]

    def note(self) -> None:
        """Record the namespaces of its processes."""
        own = {kind: _link(f"/proc/self/ns/{kind}") for kind in ("net", "mnt", "pid", "uts", "ipc")}
        for pid in self.processes():
            self.namespaces |= {_link(f"/proc/{pid}/ns/{kind}") for kind in own} - set(own.values()) - {""}

    def left(self) -> list[str]:
        """Return the traces that are left."""
        held = {_link(f"/proc/{pid}/ns/{kind}") for pid in _pids() for kind in ("net", "mnt", "pid", "uts")}
        found = [f"process {pid}: {_read(f'/proc/{pid}/cmdline')!r}" for pid in self.processes()]
        found += [f"namespace {one}" for one in self.namespaces & held]
        found += [
            line for line in Path("/proc/self/mountinfo").read_text().splitlines() if self.place in line
        ]
        new = _names("/dev/shm") - self.shm  # noqa: S108
        return found + [f"/dev/shm/{name}" for name in new if not _is_open(f"/dev/shm/{name}")]  # noqa: S108


def _pids() -> list[int]:
    return [int(name) for name in _names("/proc") if name.isdecimal()]


def _names(folder: str) -> set[str]:
    return {path.name for path in Path(folder).iterdir()}


def _read(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError:
        return b""


def _link(path: str) -> str:
    try:
        return str(Path(path).readlink())
    except OSError:
        return ""


def _is_open(path: str) -> bool:
    """Return whether a living process, so another test, uses the file."""
    return any(path.encode() in _read(f"/proc/{pid}/maps") for pid in _pids()) or any(
        _link(str(one)) == path for pid in _pids() for one in _descriptors(pid)
    )


def _descriptors(pid: int) -> list[Path]:
    try:
        return list(Path(f"/proc/{pid}/fd").iterdir())
    except OSError:
        return []


def _as_at_a_terminal() -> None:
    """End with the parent, and accept SIGINT, which background processes of a shell ignore."""
    linux.die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_DFL)


class Run:
    """A test run of a user, in a directory of its own."""

    def __init__(self, place: Path, *words: str) -> None:
        self.place = place
        (place / "tmp").mkdir(parents=True)
        (place / "test_it.py").write_text(f"SCRIPT = {str(SCRIPT)!r}\n{TESTS}")
        self.traces = Traces(str(place))
        env = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST")}
        env.update({WORD: str(place), "TMPDIR": str(place / "tmp"), "PYTHONDONTWRITEBYTECODE": "1"})
        env["PYTHONPATH"] = write_fake_sklearn(place.parent)
        # Plain asserts: to rewrite the package's, and not to keep them, takes each process two seconds.
        options = ["-q", "-p", "no:cacheprovider", "--assert=plain", "--basetemp", str(place / "base")]
        self.output = place / "output"
        with open(self.output, "wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "pytest", *options, *words],
                cwd=place,
                env=env,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=_as_at_a_terminal,  # noqa: PLW1509  two system calls
            )

    def wait_until_ready(self, test: str) -> None:
        """Wait until a test's nodes train."""
        self.wait((self.place / test).exists, f"{test} to train")
        self.traces.note()

    def wait(self, look: Callable[[], object], what: str) -> None:
        """Wait until ``look`` returns a true value."""
        limit = time.monotonic() + 150
        while not look():
            assert time.monotonic() < limit, f"{what}\n{self.traces.left()}\n{self.output.read_text()}"
            time.sleep(0.05)

    def nothing_is_left(self) -> None:
        """Wait until no trace is left, and check that only the test's own files exist."""
        self.wait(lambda: not self.traces.left(), "something is left")
        # torch makes this directory when it is imported.
        assert not [one for one in (self.place / "tmp").iterdir() if one.name != "torchinductor_root"]
        names = {path.name.split(".")[0] for path in self.place.iterdir()}
        assert names <= {"tmp", "base", "output", "test_it", "test_both"}, names


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    """Yield a function that starts a run; the run ends with the test."""
    with contextlib.ExitStack() as stack:

        def run(*words: str) -> Run:
            made = Run(tmp_path / "run", *words)
            stack.callback(made.process.wait)
            stack.callback(made.process.kill)
            return made

        yield run


@pytest.mark.cluster
@pytest.mark.soak
@pytest.mark.parametrize(
    ("number", "code"),
    [
        (signal.SIGINT, pytest.ExitCode.INTERRUPTED),
        (signal.SIGKILL, -signal.SIGKILL),
    ],
)
def test_interrupted_or_killed_run_leaves_nothing(
    start: Callable[..., Run], number: signal.Signals, code: int
) -> None:
    """Ctrl-C or SIGKILL, with nodes of both kinds; pytest's exit code is unchanged."""
    run = start()
    run.wait_until_ready("test_both")
    assert run.traces.namespaces
    run.process.send_signal(number)
    assert run.process.wait(60) == code
    run.nothing_is_left()
