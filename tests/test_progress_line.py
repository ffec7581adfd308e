"""Who waits for many bytes sees how many, how fast, how much longer; who reads a log later does not."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import re
import struct
import termios
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_resume import contract
from elastic_resume.failpoints import DONE
from elastic_resume.worker import progress_line
from elastic_resume.worker.progress_line import WINDOW_S, Pace, shown
from tests import ranks
from tests.stations import until

JOB = Path(__file__).parent / "jobs" / "resumer.py"
GB = 10**9


def pace(total: int, *seen: tuple[float, int]) -> Pace:
    """One that has seen this."""
    made = Pace(total)
    for now, done in seen:
        made.note(now, done)
    return made


def test_the_line_tells_how_much_how_fast_and_how_long() -> None:
    """By what was seen last, not since the beginning."""
    assert pace(4 * GB, (0, 0), (2, GB)).text == "1.00 GB of 4.00 GB (25 %), 0.50 GB/s, 6 s left"
    slower = pace(4 * GB, (0, 0), (1, 2 * GB), (4, 2 * GB), (7, 2 * GB + 3 * 10**8))
    assert slower.text == "2.30 GB of 4.00 GB (57 %), 0.10 GB/s, 17 s left"
    assert pace(4 * GB, (0, GB), (9, GB)).text == "1.00 GB of 4.00 GB (25 %), nothing comes just now"
    assert pace(4 * GB, (0, 0)).text.startswith("0.0 MB of 4.00 GB (0 %)")
    assert pace(900 * GB + GB // 10, (0, 0), (1, GB // 10)).text.endswith("0.10 GB/s, 2 h 30 min left")
    assert pace(90 * GB + GB // 10, (0, 0), (1, GB // 10)).text.endswith("15 min left")


@given(st.lists(st.tuples(st.floats(0, 10), st.integers(0, 1 << 40)), min_size=1), st.integers(1, 1 << 41))
def test_a_pace_takes_any_history(steps: list[tuple[float, int]], total: int) -> None:
    """It keeps a window of it."""
    now, done, made = 0.0, 0, Pace(total)
    for gap, more in steps:
        now, done = now + gap, done + more
        made.note(now, done)
        assert made.rate >= 0
        assert made.text
        assert len(made._seen) < 3 or made._seen[1][0] > now - WINDOW_S


class Terminal:
    """The other end of a terminal of 80 columns, and all that came out of it."""

    def __init__(self) -> None:
        self.master, self.slave = pty.openpty()
        fcntl.ioctl(self.slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        self._seen = bytearray()
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        with contextlib.suppress(OSError):  # how a terminal says that nobody has it open any more
            while data := os.read(self.master, 65536):
                self._seen += data

    def so_far(self) -> str:
        """What came out until now."""
        return self._seen.decode(errors="replace")

    def text(self) -> str:
        """All of it, when nobody has it open any more."""
        os.close(self.slave)
        self._thread.join()
        os.close(self.master)
        return self._seen.decode()


@pytest.mark.cluster
def test_a_slow_transfer_is_drawn_on_a_terminal_and_not_into_a_log(tmp_path: Path) -> None:
    """n0 sends to n1, each block late: n1's standard error is a terminal, n0's is not."""
    terminal = Terminal()
    # One of the last blocks waits for the thread that draws, which may have to wait for a processor.
    late = "transfer.receive=delay:0.25,transfer.receive=wait@14"
    wanted = {"n0": {"disk": [[1, 7]]}, "n1": {"fail": late}}
    faults = {contract.ENV_FAULTS_DIR: str(tmp_path)}
    env = [{contract.ENV_CKPT_DIR: str(tmp_path / f"disk{rank}"), **faults} for rank in range(2)]
    rate = re.compile(r"%\), [\d.]+ MB/s, \d+ s left\x1b")

    def release() -> None:
        until(
            lambda: terminal.so_far().count("receiving") > 2 and bool(rate.search(terminal.so_far())),
            "a rate",
        )
        (tmp_path / f"transfer.receive{DONE}").touch()

    watching = threading.Thread(target=release)
    watching.start()
    try:
        sender, receiver = ranks.run(2, JOB, json.dumps(wanted), env=env, stderr={1: terminal.slave})
    finally:
        seen = terminal.text()
        watching.join()
    assert (sender.returncode, receiver.returncode) == (0, 0), sender.stderr + seen
    assert json.loads(receiver.stdout)["values"] == [7.0]
    drawn = [part for part in seen.split("\r") if "receiving" in part]
    assert len(drawn) > 2, "it is drawn again and again"
    told = re.compile(r"elastic_resume: receiving step 7: \d+\.\d MB of 16\.\d MB \(\d+ %\), .*\x1b\[K\n?")
    assert all(told.fullmatch(part) for part in drawn), drawn
    assert all(len(part.partition("\x1b")[0]) < 80 for part in drawn)
    assert rate.search(seen)
    shares = [int(share) for share in re.findall(r"\((\d+) %\)", seen)]
    assert shares == sorted(shares)
    assert seen.rindex("\r\x1b[K") > seen.rindex("receiving"), "it is taken away"
    assert "sending" not in sender.stderr
    assert "\r" not in sender.stderr


def test_a_log_gets_nothing(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """However long it takes; nobody is asked how far it is."""
    monkeypatch.setattr(progress_line, "FIRST_S", 0.0)
    threads = threading.active_count()
    with shown("reading step 7", GB, lambda: 1):
        assert threading.active_count() == threads
    assert not capfd.readouterr().err


def test_one_who_cannot_tell_ends_the_line_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """What is wrong with the copy is told by who loads it."""
    monkeypatch.setattr(progress_line, "FIRST_S", 0.0)
    monkeypatch.setattr(progress_line, "_is_terminal", lambda: True)
    asked = threading.Event()

    def count() -> int:
        asked.set()
        raise OSError("gone")

    with shown("reading", GB, count):
        assert asked.wait(30)
    assert not capfd.readouterr().err
