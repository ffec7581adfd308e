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

from elastic_resume.errors import MachineError
from elastic_resume.slots.progress_page import MAX_LOCAL_RANKS, ProgressPage, WorkerProcess, read_records

WORKER = WorkerProcess(
    rank=5, agent_pid=11, assigned_generation=2, pid=12, start_ticks=13, stack_output_fd=4, stack_request_fd=6
)


def start_page(directory: Path) -> ProgressPage:
    """Return a page on which local rank 0 has started its first generation."""
    page = ProgressPage(directory / "page")
    page.start_generation(0, generation=1, step=0, world_size=1, worker=WORKER)
    return page


def test_newest_progress_is_of_most_advanced_rank_in_newest_generation(tmp_path: Path) -> None:
    """A process that opens the page later reads the same."""
    page = ProgressPage(tmp_path / "page")
    assert page.newest_progress(0) == (0, 0, 0)
    page.start_generation(0, generation=1, step=90, world_size=8)
    page.start_generation(1, generation=2, step=3, world_size=4)
    page.finish_step(1, 4)
    assert ProgressPage(tmp_path / "page").newest_progress(2) == (2, 4, 4)


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
def test_impossible_numbers_are_passed_over(tmp_path: Path, damage: bytes) -> None:
    """No generation is taken from them: nothing could count on from 2**64."""
    path = tmp_path / "page"
    ProgressPage(path)
    with open(path, "r+b") as file:
        file.write(damage)
    page = ProgressPage(path)
    page.start_generation(1, generation=3, step=7, world_size=2)
    assert page.newest_progress(4) == (3, 7, 2)


@pytest.mark.parametrize("size", [0, 5, 4096, 10**6])
def test_page_is_resized_and_allocated_when_opened(tmp_path: Path, size: int) -> None:
    """A store must not fail after a truncation, nor hit a hole on a full disk: both raise SIGBUS."""
    path = tmp_path / "page"
    ProgressPage(path).start_generation(0, generation=1, step=2, world_size=1)
    os.truncate(path, size)
    page = ProgressPage(path)
    page.finish_step(MAX_LOCAL_RANKS - 1, 7)
    assert path.stat().st_size == MAX_LOCAL_RANKS * 160
    assert path.stat().st_blocks * 512 >= MAX_LOCAL_RANKS * 160


def test_directory_in_place_of_page_is_machine_error(tmp_path: Path) -> None:
    """The error names the path and what to do."""
    (tmp_path / "page").mkdir()
    with pytest.raises(MachineError, match=r"cannot open .*page: Is a directory; .*move it away"):
        ProgressPage(tmp_path / "page")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(MachineError, match=r"cannot open .*pipe"):
        ProgressPage(tmp_path / "pipe")


# ---- records ---------------------------------------------------------------------------------------------


def test_record_has_process_and_time_of_last_progress(tmp_path: Path) -> None:
    """Before the first step there is no time of progress."""
    page = ProgressPage(tmp_path / "page")
    page.start_generation(1, generation=3, step=40, world_size=8, worker=WORKER)
    (record,) = read_records(tmp_path / "page", 4)
    assert (record.local_rank, record.worker, record.generation, record.world_size) == (1, WORKER, 3, 8)
    assert (record.first_step, record.step, record.last_progress_ns, record.busy) == (40, 40, 0, False)
    before = time.monotonic_ns()
    page.finish_step(1, 41)
    page.end_epoch(1, 41)
    (record,) = read_records(tmp_path / "page", 4)
    assert (record.first_step, record.step, record.epoch_end_step) == (40, 41, 41)
    assert before <= record.last_progress_ns <= time.monotonic_ns()


def test_busy_rank_restarts_its_progress_time_at_the_end(tmp_path: Path) -> None:
    """The limit is recorded; a rank without a step has no time to restart."""
    page = start_page(tmp_path)
    page.set_busy(0, True)
    page.set_busy(0, False)
    assert read_records(tmp_path / "page", 1)[0].last_progress_ns == 0
    page.finish_step(0, 1)
    (first,) = read_records(tmp_path / "page", 1)
    page.set_busy(0, True, limit_s=60)
    (busy,) = read_records(tmp_path / "page", 1)
    assert busy.busy
    assert busy.busy_until_ns - first.last_progress_ns > 59e9
    page.set_busy(0, False)
    (after,) = read_records(tmp_path / "page", 1)
    assert not after.busy
    assert after.last_progress_ns > first.last_progress_ns


def test_idle_rank_has_no_progress_time_until_next_step(tmp_path: Path) -> None:
    """After the last step of a script nothing counts as a hang."""
    page = start_page(tmp_path)
    page.finish_step(0, 1)
    page.set_idle(0)
    page.set_busy(0, True)
    page.set_busy(0, False)
    assert read_records(tmp_path / "page", 1)[0].last_progress_ns == 0
    page.finish_step(0, 2)
    assert read_records(tmp_path / "page", 1)[0].last_progress_ns > 0


def test_new_generation_clears_record(tmp_path: Path) -> None:
    """A rank that died while busy is not busy in the next generation."""
    page = start_page(tmp_path)
    page.finish_step(0, 1)
    page.end_epoch(0, 1)
    page.set_busy(0, True, limit_s=5)
    page.start_generation(0, generation=2, step=1, world_size=1, worker=WORKER)
    (record,) = read_records(tmp_path / "page", 1)
    assert not any(
        (
            record.busy,
            record.last_progress_ns,
            record.busy_until_ns,
            record.epoch_end_step,
        )
    )


@pytest.mark.parametrize("size", [None, 0, 100, MAX_LOCAL_RANKS * 32])
def test_missing_or_truncated_page_has_no_records(tmp_path: Path, size: int | None) -> None:
    """The agent reads with pread, so truncation does not kill it."""
    path = tmp_path / "page"
    if size is not None:
        ProgressPage(path).start_generation(0, generation=1, step=0, world_size=1, worker=WORKER)
        os.truncate(path, size)
    assert read_records(path, 3) == []


def count_descriptors() -> int:
    """Count the open descriptors of this process."""
    return len(list(Path("/proc/self/fd").iterdir()))


def test_page_is_opened_without_waiting_and_leaves_no_descriptor(tmp_path: Path) -> None:
    """A pipe in its place would keep the reader for ever."""
    ProgressPage(tmp_path / "page")
    before = count_descriptors()
    read_records(tmp_path / "page", 3)
    assert count_descriptors() == before
    page = ProgressPage(tmp_path / "page")
    assert count_descriptors() == before + 1  # the mapping's own
    del page
    os.mkfifo(tmp_path / "pipe")
    assert read_records(tmp_path / "pipe", 3) == []
    with pytest.raises(MachineError):
        ProgressPage(tmp_path / "pipe")


def test_page_under_creation_has_no_records(tmp_path: Path) -> None:
    """It may grow between the two reads."""
    path = tmp_path / "page"
    ProgressPage(path)
    code = "import os, sys\nwhile 1: os.truncate(sys.argv[1], 0); os.truncate(sys.argv[1], int(sys.argv[2]))"
    command = [sys.executable, "-IS", "-c", code, str(path), str(path.stat().st_size)]
    with subprocess.Popen(command) as creator:
        try:
            while path.stat().st_size:
                pass
            assert not any(read_records(path, 3) for _ in range(5000))
        finally:
            creator.kill()


@given(st.binary(min_size=1, max_size=160 * 4), st.integers(0, 1 << 15))
def test_damaged_record_is_dropped_or_within_bounds(
    tmp_path_factory: pytest.TempPathFactory, noise: bytes, at: int
) -> None:
    """No impossible pid is read from any page content."""
    path = tmp_path_factory.mktemp("page") / "page"
    ProgressPage(path).start_generation(0, generation=1, step=0, world_size=1, worker=WORKER)
    with open(path, "r+b") as file:
        file.seek(MAX_LOCAL_RANKS * 32 + at % 640 if at % 2 else at)
        file.write(noise)
    for record in read_records(path, 8):
        assert 0 < record.worker.pid < 1 << 22
        assert max(record.generation, record.step, record.worker.rank) <= 1 << 53
        assert max(record.worker.stack_output_fd, record.worker.stack_request_fd) < 1 << 30
