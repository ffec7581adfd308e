"""Kill the writers of an exporter at random moments, one after the other, until all points are written."""

from __future__ import annotations

import math
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.support.point_writer import make_point

KILLS = int(os.environ.get("ELASTIC_RESUME_SOAK_KILLS", "4"))


def write_with_kills(
    text: str,
    directory: Path,
    last_step: int,
    *,
    kills: int = KILLS,
    seed: int = 1,
    env: dict[str, str] | None = None,
) -> None:
    """Have ``last_step`` + 1 points written to a tracker by ``kills`` + 1 processes; all but one are killed.

    A writer is killed, with the processes that it started, a random short time after it has come to a random
    step.
    """
    chance = random.Random(seed)
    for number in range(kills + 1):
        is_last = number == kills
        target = last_step * (number + 1) // (kills + 1)
        numbers = (target, chance.randint(1, 7), chance.randint(1, 20))
        with subprocess.Popen(
            [
                *(sys.executable, "-m", "tests.support.point_writer", text, str(directory / "known")),
                *("close" if is_last else "wait", *map(str, numbers)),
            ],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **(env or {})},
            start_new_session=True,
        ) as writer:
            assert writer.stdout
            kill_at = target - chance.randint(0, last_step // (kills + 1))
            for line in writer.stdout:
                verb, step = line.split()
                if not is_last and (int(step) >= kill_at or verb == "wait"):
                    time.sleep(chance.random() * 0.01)  # how far the writer gets meanwhile does not matter
                    os.killpg(writer.pid, signal.SIGKILL)
                    break
            code = writer.wait()
        assert code == (0 if is_last else -signal.SIGKILL), (number, code)


def assert_equal_points(found: dict[int, dict[str, float]], last_step: int) -> None:
    """Check that a tracker's points are the undisturbed run's: a reader must have checked that none is double."""
    assert sorted(found) == list(range(last_step + 1))
    for step, values in found.items():
        expected = make_point(step).values
        assert values.keys() == expected.keys(), step
        for key, value in expected.items():
            assert values[key] == value or (math.isnan(value) and math.isnan(values[key])), (step, key)
