"""Test compute checks in worlds of processes without an agent, and their decisions in a world of one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from elastic_resume import events
from elastic_resume.events import Event
from tests.support import launch_ranks
from tests.support.training_job import SCRIPT

CHECKED = {"ELASTIC_RESUME_CHECK_COMPUTE_EVERY": "3", "ELASTIC_RESUME_PROVE": "off"}

UNCHECKED = {"ELASTIC_RESUME_PROVE": "off"}


def train(
    directory: Path, *env: dict[str, str], flags: tuple[str, ...] = ()
) -> tuple[list[str], list[Event], str]:
    """Train an epoch with dropout and BatchNorm; return the digests, the events, and rank 0's log."""
    logs = directory / "step_log"
    environs = [{**each, "ELASTIC_RESUME_CKPT_DIR": str(directory / "ckpt")} for each in env]
    words = ["--step-log", str(logs), "--epochs", "1", "--step-delay", "0", *flags]
    done = launch_ranks.run_ranks(len(env), SCRIPT, *words, env=environs)
    assert [each.returncode for each in done] == [0] * len(env), done[0].stderr
    ends = [json.loads(path.read_text()) for path in sorted(logs.glob("end-*.json"))]
    found = [event for path in directory.glob("ckpt/*/*/events.jsonl") for event in events.read(path)]
    return [str(end["digest"]) for end in ends], found, done[0].stderr


def list_checks(found: list[Event]) -> list[Any]:
    """Return step, node and result of each check."""
    checks = [event for event in found if event["event"] == "compute-check"]
    return sorted((event["step"], event["node"], event["is_equal"]) for event in checks)


def test_worker_imports_the_fault_only_where_it_is_asked_for() -> None:
    """It is for tests; the fork server imports the same."""
    words = "import sys; from elastic_resume.training import resume, run; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", words], capture_output=True, text=True, check=True)
    assert "elastic_resume.training.ddp" in done.stdout.split()
    assert "elastic_resume.training.wrong_gradients" not in done.stdout.split()


@pytest.mark.slow
def test_run_with_checks_has_the_bits_of_a_run_without(tmp_path: Path) -> None:
    """Three ranks, with dropout and BatchNorm, agree in each check. The setting of rank 0 counts."""
    plain, none, _ = train(tmp_path / "plain", *[UNCHECKED] * 3)
    checked, found, _ = train(tmp_path / "checked", CHECKED, CHECKED, UNCHECKED)
    assert checked == plain
    assert len(set(checked)) == 1
    assert list_checks(none) == []
    assert list_checks(found) == [(step, f"n{rank}", True) for step in (3, 6, 9) for rank in range(3)]
    assert not any(event["event"].startswith(("gradients-differ", "compute-check-off")) for event in found)


@pytest.mark.slow
def test_two_ranks_that_differ_are_both_named(tmp_path: Path) -> None:
    """It is unknown which is wrong, so nobody leaves. The fault comes at the end of step 4.

    The script has made DistributedDataParallel itself, which the fault has to find.
    """
    wrong = {**CHECKED, "ELASTIC_RESUME_FAILPOINTS": "step=do:wrong-gradients@4"}
    digests, found, log = train(tmp_path, CHECKED, wrong, flags=("--own-ddp", "--backend", "gloo"))
    assert len(set(digests)) == 1
    assert [(step, is_equal) for step, node, is_equal in list_checks(found) if node == "n0"] == [
        (3, True),
        (6, False),
        (9, False),
    ]
    differ = [event for event in found if event["event"] == "gradients-differ"]
    assert [(event["step"], event["rank"], event["agreed_step"]) for event in differ] == [
        (6, None, 3),
        (9, None, 3),
    ]
    assert differ[0]["ranks"] == ["0 on n0", "1 on n1"]
    assert "there is no majority: 0 on n0, 1 on n1" in log
