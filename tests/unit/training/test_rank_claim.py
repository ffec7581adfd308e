"""Test that one process of a rank resumes."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from elastic_resume import constants
from elastic_resume.errors import UsageError
from elastic_resume.training import rank_claim


@pytest.fixture(autouse=True)
def agents_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The agent's file; this process has claimed nothing."""
    path = tmp_path / "parked"
    path.touch()
    monkeypatch.setenv(constants.ENV_PARKED, str(path))
    monkeypatch.setenv(constants.ENV_LOCAL_RANK, "1")
    monkeypatch.setattr(rank_claim, "_claims", {})
    yield path
    for descriptor in rank_claim._claims.values():
        os.close(descriptor)


def claim_in_child(timeout_s: float = 0.0) -> int:
    """Return 0 if a forked child may resume, 1 if not."""
    child = os.fork()
    if child == 0:
        try:
            rank_claim.claim_rank(timeout_s)
        except UsageError:
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_child_of_a_rank_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rank itself may resume again, in its next generation; another rank is not concerned."""
    rank_claim.claim_rank()
    rank_claim.claim_rank()
    assert claim_in_child() == 1
    monkeypatch.setenv(constants.ENV_LOCAL_RANK, "0")
    assert claim_in_child() == 0


def test_error_says_what_to_do(agents_file: Path) -> None:
    """As in a second process of the rank."""
    rank_claim.claim_rank()
    rank_claim._claims[0] = rank_claim._claims.pop(os.getpid())
    with pytest.raises(UsageError, match=r"another process has called er.resume\(\) as rank .*, and it runs"):
        rank_claim.claim_rank(0.0)
    assert agents_file.stat().st_size == 0


def test_next_process_of_a_rank_waits_for_the_end_of_the_former() -> None:
    """Its children end a moment after a killed worker."""
    former = os.fork()
    if former == 0:
        rank_claim.claim_rank()
        time.sleep(600)
    deadline = time.monotonic() + 10
    while claim_in_child() == 0 and time.monotonic() < deadline:
        time.sleep(0.01)
    os.kill(former, signal.SIGKILL)
    rank_claim.claim_rank()
    os.waitpid(former, 0)
    assert claim_in_child() == 1


@pytest.mark.parametrize("path", ["", "/nowhere/parked"])
def test_without_an_agent_nothing_is_claimed(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torchrun's workers lock their directory."""
    monkeypatch.setenv(constants.ENV_PARKED, path)
    rank_claim.claim_rank()
    assert not rank_claim._claims
