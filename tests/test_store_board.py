"""The board tells how far a node came, or that it cannot be believed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from elastic_resume.errors import MachineError, RecordError
from elastic_resume.store.board import MAX_LOCAL_RANKS, Board


def test_the_rank_that_came_furthest_in_the_newest_generation_is_told(tmp_path: Path) -> None:
    """Also to a process that opens the page later."""
    board = Board(tmp_path / "board")
    assert board.newest(0) == (0, 0, 0)
    board.begin(0, generation=1, step=90, world_size=8)
    board.begin(1, generation=2, step=3, world_size=4)
    board.finish_step(1, 4)
    assert Board(tmp_path / "board").newest(2) == (2, 4, 4)


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
def test_a_page_that_cannot_be_true_is_refused_and_can_be_cleared(tmp_path: Path, damage: bytes) -> None:
    """No generation or step is taken from it: a generation of 2**64 could never be counted on from."""
    path = tmp_path / "board"
    Board(path)
    with open(path, "r+b") as file:
        file.write(damage)
    board = Board(path)
    with pytest.raises(RecordError, match="board: is damaged: local rank"):
        board.newest(4)
    board.clear()
    assert Board(path).newest(4) == (0, 0, 0)


@pytest.mark.parametrize("size", [0, 5, 4096, 10**6])
def test_a_page_of_another_size_is_made_whole(tmp_path: Path, size: int) -> None:
    """Truncated or grown while nobody used it: a store must not fail."""
    path = tmp_path / "board"
    Board(path).begin(0, generation=1, step=2, world_size=1)
    os.truncate(path, size)
    board = Board(path)
    board.finish_step(MAX_LOCAL_RANKS - 1, 7)
    assert path.stat().st_size == MAX_LOCAL_RANKS * 160


def test_its_room_is_taken_when_it_is_opened(tmp_path: Path) -> None:
    """A store into a hole of a full disk would be a SIGBUS in the middle of training."""
    path = tmp_path / "board"
    Board(path)
    assert path.stat().st_blocks * 512 >= MAX_LOCAL_RANKS * 160


def test_something_else_in_its_place_is_a_machine_error(tmp_path: Path) -> None:
    """Named, with what to do."""
    (tmp_path / "board").mkdir()
    with pytest.raises(MachineError, match=r"cannot open .*board: Is a directory; .*move it away"):
        Board(tmp_path / "board")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(MachineError, match=r"cannot open .*pipe"):
        Board(tmp_path / "pipe")
