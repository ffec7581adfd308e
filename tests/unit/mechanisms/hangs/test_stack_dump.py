"""Test when a dump of stacks counts as whole: faulthandler writes a line in pieces."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any
from unittest.mock import Mock

import pytest

from elastic_resume import linux
from elastic_resume.mechanisms.hangs import stack_dump
from elastic_resume.mechanisms.hangs.stack_dump import UNCHANGED_POLLS, _RankQuery

HEAD = b'Thread 0x00007f3df1 (most recent call first):\n  File "hang.py", line 45 in '


@pytest.fixture
def query(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Make a query whose worker writes what the test writes."""
    monkeypatch.setattr(stack_dump, "_sample_process", lambda _: None)
    made: Any = _RankQuery(Mock())
    made._stacks_file = linux.create_anonymous_file("stacks")
    made._signalled = True
    yield made
    made.close()


def poll(query: Any, times: int) -> list[bool]:
    """Ask so many times."""
    return [query.has_all_stacks for _ in range(times)]


def test_stacks_are_whole_once_no_line_is_open_and_none_has_come_for_a_while(query: Any) -> None:
    """A process may be interrupted between two pieces of a line, or between two lines."""
    os.write(query._stacks_file, HEAD)
    assert not any(poll(query, 10 * UNCHANGED_POLLS))
    os.write(query._stacks_file, b"main\n")
    assert poll(query, UNCHANGED_POLLS + 1) == [False] * UNCHANGED_POLLS + [True]


def test_line_without_its_function_is_no_frame() -> None:
    """A timeout may cut the output anywhere."""
    assert stack_dump.parse_main_thread(HEAD.decode()) == ()
    (frame,) = stack_dump.parse_main_thread(HEAD.decode() + "main\n")
    assert frame.name == "main"
