"""Failpoints: what can be armed, whom it hits, and that it hits once, whichever process comes first."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from elastic_resume import constants, failpoints
from elastic_resume.errors import ConfigError
from elastic_resume.failpoints import FailpointController
from tests.support.processes import wait_for

pytestmark = pytest.mark.slow


@pytest.fixture
def environ(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Variables that are taken back, and failpoints with them."""
    yield monkeypatch
    monkeypatch.undo()
    failpoints.arm()


@pytest.fixture
def arming(environ: pytest.MonkeyPatch, tmp_path: Path) -> FailpointController:
    """A laboratory that this process is in, as rank 1 of node n2."""
    made = FailpointController(tmp_path / "faults")
    for name, value in {**made.env, "RANK": "1", constants.ENV_NODE_NAME: "n2"}.items():
        environ.setenv(name, value)
    failpoints.arm()
    return made


def status_of(child: Callable[[], object]) -> int:
    """How a forked process ends that does this: its exit code, or less than 0 for a signal."""
    pid = os.fork()
    if pid == 0:
        with contextlib.suppress(BaseException):
            child()
            os._exit(0)
        os._exit(99)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.mark.parametrize(
    ("action", "status"),
    [
        ("kill", -signal.SIGKILL),
        ("exit:7", 7),
        ("exit", 1),
        ("raise", 99),
        ("raise:ValueError", 99),
        ("delay:0.01", 0),
        ("kill@2", 0),
        ("kill;rank=0", 0),
        ("kill;rank=1", -signal.SIGKILL),
        ("kill;node=n1", 0),
        ("kill;node=n2;rank=1", -signal.SIGKILL),
        ("kill;step=20", 0),
        ("kill;step=19", -signal.SIGKILL),
        ("do:nothing-by-that-name", 0),
        ("do:end", 5),
    ],
)
def test_failpoint_acts_only_if_conditions_hold(
    environ: pytest.MonkeyPatch, arming: FailpointController, action: str, status: int
) -> None:
    """The conditions are step, rank and node, from the variable and from the armed file."""
    failpoints.register_action("end", lambda: os._exit(5))
    mark = arming.arm(f"step={action}", once="")
    assert status_of(lambda: failpoints.hit("step", 19)) == status
    assert status_of(lambda: failpoints.hit("other", 19)) == 0
    arming.disarm(mark)
    assert status_of(lambda: failpoints.hit("step", 19)) == 0
    environ.setenv(constants.ENV_FAILPOINTS, f"step={action}")
    failpoints.arm()
    assert status_of(lambda: failpoints.hit("step", 19)) == status


def test_failpoint_armed_at_runtime_with_once_acts_in_one_process(
    arming: FailpointController,
) -> None:
    """The mark outlives the process and names it; other failpoints do not disturb it."""
    failpoints.hit("step", 1)
    mark = arming.arm("step=raise:KeyError", step=3)
    other = arming.arm("commit=raise:KeyError", node="n1")
    failpoints.hit("step", 2)
    assert arming.read_fired(mark) is None
    with pytest.raises(KeyError):
        failpoints.hit("step", 4)
    failpoints.hit("step", 5)
    assert status_of(lambda: failpoints.hit("step", 6)) == 0
    fired = arming.read_fired(mark)
    assert fired is not None
    assert (fired["pid"], fired["node"], fired["rank"]) == (os.getpid(), "n2", "1")
    assert arming.read_fired(other) is None


@pytest.mark.parametrize("ends_by", ["successor", "time"])
def test_failpoint_with_duration_repeats_in_first_process_until_its_end(
    arming: FailpointController, monkeypatch: pytest.MonkeyPatch, ends_by: str
) -> None:
    """A slow rank is slow at each step, and its successor is not. It ends though it is still armed."""
    now = 100.0
    monkeypatch.setattr(failpoints, "time", SimpleNamespace(monotonic=lambda: now, time=time.time))
    arming.arm("step=raise:KeyError", for_=0.2)
    for since_s in (0.0, 0.1, 0.19):
        now = 100.0 + since_s
        with pytest.raises(KeyError):
            failpoints.hit("step")
    if ends_by == "successor":
        failpoints.arm()  # as it does
    else:
        now = 100.3
    failpoints.hit("step")


def test_failpoint_wait_blocks_until_released(
    arming: FailpointController, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A test can thus act in the middle of a commit."""
    monkeypatch.setattr(failpoints, "MAX_WAIT_S", 600.0)  # it is not for that that it goes on
    mark = arming.arm("commit=wait")
    thread = threading.Thread(target=failpoints.hit, args=("commit",))
    thread.start()
    wait_for(lambda: arming.is_waiting(mark), "the point to be reached")
    assert thread.is_alive()
    arming.release(mark)
    thread.join(60)
    assert not thread.is_alive()


def test_failpoint_flip_changes_one_bit_of_a_copy(arming: FailpointController) -> None:
    """The original data stay unchanged."""
    data = b"abcdef"
    assert failpoints.mutate("rendezvous.line", data) is data
    arming.arm("rendezvous.line=flip")
    assert failpoints.mutate("rendezvous.line", data) == b"abceef"
    assert failpoints.mutate("rendezvous.line", data) is data
    assert data == b"abcdef"


@pytest.mark.parametrize("late_s", [0.0, 0.5])
def test_failpoint_hold_gil_stops_all_python_threads(
    arming: FailpointController, monkeypatch: pytest.MonkeyPatch, late_s: float
) -> None:
    """A signal does not end it."""
    arming.arm("step=hold-gil:0.3")
    block = signal.pthread_sigmask

    def late(*how: Any) -> None:
        time.sleep(late_s)
        block(*how)

    def child() -> None:
        monkeypatch.setattr(signal, "pthread_sigmask", late)
        signal.signal(signal.SIGUSR1, lambda *_: None)
        moments = [time.monotonic()]

        def note() -> None:
            while moments[-1] < moments[0] + 5:
                moments.append(time.monotonic())
                time.sleep(0.001)

        threading.Thread(target=note, daemon=True).start()
        failpoints.hit("step")
        gap = max(b - a for a, b in zip(moments, [*moments[1:], time.monotonic()], strict=True))
        os._exit(42 if gap > 0.25 else 0)

    assert status_of(child) == 42


def test_failpoint_out_of_memory_is_simulated_without_limit(
    arming: FailpointController, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process ends by SIGKILL, and its message says that the kernel did not do it."""
    monkeypatch.setattr("elastic_resume.machine.MemoryCgroup.read_usage", lambda _: None)
    arming.arm("step=out-of-memory:10000000")
    assert status_of(lambda: failpoints.hit("step")) == -signal.SIGKILL
    assert "no control group limits it" in capfd.readouterr().err


@pytest.mark.parametrize(
    "text",
    [
        "step",
        "step=explode",
        "step=exit:x",
        "step=kill@x",
        "step=kill;rank",
        "step=kill;where=1",
        "a=delay:s",
    ],
)
def test_failpoint_error_names_entry_and_forms(environ: pytest.MonkeyPatch, text: str) -> None:
    """The message shows what to write."""
    environ.setenv(constants.ENV_FAILPOINTS, f"other=kill,{text}")
    if text == "step=kill;rank":  # an empty condition is none
        failpoints.arm()
        return
    with pytest.raises(ConfigError, match=r"cannot read .*commit\.before-rename=kill"):
        failpoints.arm()


def test_hit_without_armed_failpoints_reads_no_file(environ: pytest.MonkeyPatch) -> None:
    """Nothing is remembered either."""
    environ.delenv(constants.ENV_FAULTS_DIR, raising=False)
    failpoints.arm()
    environ.setattr(Path, "stat", lambda *_: pytest.fail("a file was looked at"))
    failpoints.hit("step", 3)
    assert failpoints.mutate("rendezvous.line", b"x") == b"x"
