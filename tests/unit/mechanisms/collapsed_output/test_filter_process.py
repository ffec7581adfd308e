"""The process between real pipes: it prints both streams apart, and ends with the last writer."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

from elastic_resume.mechanisms.collapsed_output import filter_process


def test_streams_are_apart_and_signals_end_nothing() -> None:
    """Stdout and stderr of two ranks; what is held when all writers have ended is printed."""
    pipes = [os.pipe() for _ in range(4)]
    command = [sys.executable, "-m", filter_process.__name__, *(str(reading) for reading, _ in pipes)]
    process = subprocess.Popen(
        command,
        pass_fds=[reading for reading, _ in pipes],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    for reading, _ in pipes:
        os.close(reading)
    assert process.stdout is not None
    for (_, writing), data in zip(pipes, (b"a\n", b"e\n", b"a\nb\n", b"a\n"), strict=True):
        os.write(writing, data)
    assert os.read(process.stdout.fileno(), 1 << 16) == b"a [2 ranks]\n"  # it has started
    process.send_signal(signal.SIGTERM)
    for (_, writing), data in zip(pipes, (b"c\n", b"", b"end", b""), strict=True):
        os.write(writing, data)
        os.close(writing)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0
    assert sorted(out.splitlines()) == [b"b", b"c", b"end"]
    assert sorted(err.splitlines()) == [b"a", b"e"]


def test_output_that_nobody_reads_is_dropped() -> None:
    """A full one that does not block is waited for."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    data = b"x" * (1 << 20)
    reader = subprocess.Popen([sys.executable, "-c", "import sys; print(len(sys.stdin.buffer.read()))"],
                              stdin=reading, stdout=subprocess.PIPE)  # fmt: skip
    os.close(reading)
    filter_process.print_all(writing, data)
    os.close(writing)
    assert reader.communicate()[0] == b"%d\n" % len(data)
    reading, writing = os.pipe()
    os.close(reading)
    filter_process.print_all(writing, data)
    os.close(writing)
