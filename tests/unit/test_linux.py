"""Calls that Python lacks are made by their numbers."""

from __future__ import annotations

import os
import signal
import subprocess

import pytest

from elastic_resume import linux


@pytest.fixture(params=["python's", "numbers"])
def calls(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Take Python's functions away, or leave them."""
    if request.param == "numbers":
        monkeypatch.delattr(os, "memfd_create")
        monkeypatch.delattr(os, "pidfd_open")
        monkeypatch.delattr(signal, "pidfd_send_signal")
    return str(request.param)


@pytest.mark.usefixtures("calls")
@pytest.mark.parametrize("may_seal", [False, True])
def test_anonymous_file_is_private(may_seal: bool) -> None:
    """It has a name for people, is empty, and no child inherits it."""
    descriptor = linux.create_anonymous_file("elastic_resume-test", may_seal=may_seal)
    try:
        assert os.readlink(f"/proc/self/fd/{descriptor}").startswith("/memfd:elastic_resume-test")  # noqa: PTH115
        assert not os.get_inheritable(descriptor)
        assert os.write(descriptor, b"ab") == 2
        assert os.pread(descriptor, 9, 0) == b"ab"
    finally:
        os.close(descriptor)


@pytest.mark.usefixtures("calls")
def test_signal_reaches_the_process_of_a_pidfd() -> None:
    """After the process has ended, neither call finds it."""
    with subprocess.Popen(["sleep", "60"]) as process:
        descriptor = linux.pidfd_open(process.pid)
        try:
            assert not os.get_inheritable(descriptor)
            linux.pidfd_send_signal(descriptor, signal.SIGKILL)
            assert process.wait(20) == -signal.SIGKILL
            with pytest.raises(ProcessLookupError):
                linux.pidfd_send_signal(descriptor, signal.SIGKILL)
        finally:
            os.close(descriptor)
    with pytest.raises(ProcessLookupError):
        linux.pidfd_open(process.pid)


@pytest.mark.usefixtures("calls")
def test_refused_call_raises() -> None:
    """With the number of the error."""
    with pytest.raises(OSError, match="Invalid argument"):
        linux.memfd_create("elastic_resume-test", 1 << 30)
