"""Test that the progress page reports how far a node came, or that it is damaged."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_resume.errors import MachineError, NodeFileError
from elastic_resume.snapshot.progress_page import MAX_LOCAL_RANKS, ProgressPage, WorkerProcess, read_records

WORKER = WorkerProcess(
    rank=5, agent_pid=11, round=2, pid=12, start_ticks=13, stack_output_fd=4, stack_request_fd=6
)


def test_newest_progress_is_of_most_advanced_rank_in_newest_generation(tmp_path: Path) -> None:
    """A process that opens the page later reads the same."""
    board = ProgressPage(tmp_path / "board")
    assert board.newest_progress(0) == (0, 0, 0)
    board.start_generation(0, generation=1, step=90, world_size=8)
    board.start_generation(1, generation=2, step=3, world_size=4)
    board.finish_step(1, 4)
    assert ProgressPage(tmp_path / "board").newest_progress(2) == (2, 4, 4)


@pytest.mark.parametrize(
    "damage",
    [
        b"\xff" * MAX_LOCAL_RANKS * 32,
        (5).to_bytes(8, "little"),  # the node knows four generations
        (4).to_bytes(8, "little") + b"\xff" * 8,
        (4).to_bytes(8, "little") + bytes(8) + b"\xff" * 8,
        bytes(32 * 700) + b"not a page of numbers.." * 20,
    ],
)
def test_damaged_page_is_refused_and_can_be_cleared(tmp_path: Path, damage: bytes) -> None:
    """No generation is taken from it: nothing could count on from 2**64."""
    path = tmp_path / "board"
    ProgressPage(path)
    with open(path, "r+b") as file:
        file.write(damage)
    board = ProgressPage(path)
    with pytest.raises(NodeFileError, match="board: is damaged: local rank"):
        board.newest_progress(4)
    board.clear()
    assert ProgressPage(path).newest_progress(4) == (0, 0, 0)


@pytest.mark.parametrize("size", [0, 5, 4096, 10**6])
def test_page_of_wrong_size_is_resized(tmp_path: Path, size: int) -> None:
    """A store must not fail after the page was truncated or grown while unused."""
    path = tmp_path / "board"
    ProgressPage(path).start_generation(0, generation=1, step=2, world_size=1)
    os.truncate(path, size)
    board = ProgressPage(path)
    board.finish_step(MAX_LOCAL_RANKS - 1, 7)
    assert path.stat().st_size == MAX_LOCAL_RANKS * 160


def test_page_allocates_its_blocks_when_opened(tmp_path: Path) -> None:
    """A store into a hole on a full disk would raise SIGBUS during training."""
    path = tmp_path / "board"
    ProgressPage(path)
    assert path.stat().st_blocks * 512 >= MAX_LOCAL_RANKS * 160


def test_directory_in_place_of_page_is_machine_error(tmp_path: Path) -> None:
    """The error names the path and what to do."""
    (tmp_path / "board").mkdir()
    with pytest.raises(MachineError, match=r"cannot open .*board: Is a directory; .*move it away"):
        ProgressPage(tmp_path / "board")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(MachineError, match=r"cannot open .*pipe"):
        ProgressPage(tmp_path / "pipe")


# ---- lines -----------------------------------------------------------------------------------------------


def test_record_has_process_and_time_of_last_progress(tmp_path: Path) -> None:
    """Before the first step there is no time to judge by."""
    board = ProgressPage(tmp_path / "board")
    board.start_generation(1, generation=3, step=40, world_size=8, worker=WORKER)
    (line,) = read_records(tmp_path / "board", 4)
    assert (line.local_rank, line.worker, line.generation, line.world_size) == (1, WORKER, 3, 8)
    assert (line.first_step, line.step, line.last_progress_ns, line.busy) == (40, 40, 0, False)
    before = time.monotonic_ns()
    board.finish_step(1, 41, collectives=7)
    board.end_epoch(1, 41)
    (line,) = read_records(tmp_path / "board", 4)
    assert (line.first_step, line.step, line.collectives, line.epoch_end_step) == (40, 41, 7, 41)
    assert before <= line.last_progress_ns <= time.monotonic_ns()


def test_busy_rank_restarts_its_progress_time_at_the_end(tmp_path: Path) -> None:
    """The limit is recorded; a rank without a step has no time to restart."""
    board = ProgressPage(tmp_path / "board")
    board.start_generation(0, generation=1, step=0, world_size=1, worker=WORKER)
    board.set_busy(0, True)
    board.set_busy(0, False)
    assert read_records(tmp_path / "board", 1)[0].last_progress_ns == 0
    board.finish_step(0, 1)
    (first,) = read_records(tmp_path / "board", 1)
    board.set_busy(0, True, limit_s=60)
    (busy,) = read_records(tmp_path / "board", 1)
    assert busy.busy
    assert busy.busy_until_ns - first.last_progress_ns > 59e9
    board.set_busy(0, False)
    (after,) = read_records(tmp_path / "board", 1)
    assert not after.busy
    assert after.last_progress_ns > first.last_progress_ns


def test_idle_rank_has_no_progress_time_until_next_step(tmp_path: Path) -> None:
    """After the last step of a script nothing counts as a hang."""
    board = ProgressPage(tmp_path / "board")
    board.start_generation(0, generation=1, step=0, world_size=1, worker=WORKER)
    board.finish_step(0, 1)
    board.set_idle(0)
    board.set_busy(0, True)
    board.set_busy(0, False)
    assert read_records(tmp_path / "board", 1)[0].last_progress_ns == 0
    board.finish_step(0, 2)
    assert read_records(tmp_path / "board", 1)[0].last_progress_ns > 0


def test_new_generation_clears_record(tmp_path: Path) -> None:
    """A rank that died while busy is not busy in the next generation."""
    board = ProgressPage(tmp_path / "board")
    board.start_generation(0, generation=1, step=0, world_size=1, worker=WORKER)
    board.finish_step(0, 1, collectives=9)
    board.end_epoch(0, 1)
    board.set_busy(0, True, limit_s=5)
    board.start_generation(0, generation=2, step=1, world_size=1, worker=WORKER)
    (line,) = read_records(tmp_path / "board", 1)
    assert (line.busy, line.last_progress_ns, line.busy_until_ns, line.collectives, line.epoch_end_step) == (
        False,
        0,
        0,
        0,
        0,
    )


@pytest.mark.parametrize("size", [None, 0, 100, MAX_LOCAL_RANKS * 32])
def test_missing_or_truncated_page_has_no_records(tmp_path: Path, size: int | None) -> None:
    """The agent reads with pread, so truncation does not kill it."""
    path = tmp_path / "board"
    if size is not None:
        ProgressPage(path).start_generation(0, generation=1, step=0, world_size=1, worker=WORKER)
        os.truncate(path, size)
    assert read_records(path, 3) == []


def test_page_under_creation_has_no_records(tmp_path: Path) -> None:
    """It may grow between the two reads."""
    path = tmp_path / "board"
    ProgressPage(path)
    code = "import os, sys\nwhile 1: os.truncate(sys.argv[1], 0); os.truncate(sys.argv[1], int(sys.argv[2]))"
    words = [str(path), str(path.stat().st_size)]
    with subprocess.Popen([sys.executable, "-IS", "-c", code, *words]) as making:
        try:
            while path.stat().st_size:
                pass
            assert not any(read_records(path, 3) for _ in range(20_000))
        finally:
            making.kill()


@given(st.binary(min_size=1, max_size=160 * 4), st.integers(0, 1 << 15))
def test_damaged_record_is_dropped_or_within_bounds(
    tmp_path_factory: pytest.TempPathFactory, noise: bytes, at: int
) -> None:
    """No impossible pid is read from any page content."""
    path = tmp_path_factory.mktemp("page") / "board"
    ProgressPage(path).start_generation(0, generation=1, step=0, world_size=1, worker=WORKER)
    with open(path, "r+b") as file:
        file.seek(MAX_LOCAL_RANKS * 32 + at % 640 if at % 2 else at)
        file.write(noise)
    for line in read_records(path, 8):
        assert 0 < line.worker.pid < 1 << 22
        assert max(line.generation, line.step, line.worker.rank) <= 1 << 53
        assert max(line.worker.stack_output_fd, line.worker.stack_request_fd) < 1 << 30
