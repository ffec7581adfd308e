"""Kill the writers of an exporter at random moments, one after the other, until all points are written."""

from __future__ import annotations

import contextlib
import json
import math
import os
import random
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from tests.support.point_writer import make_point

KILLS = int(os.environ.get("ELASTIC_RESUME_SOAK_KILLS", "4"))


def write_with_kills(
    text: str,
    directory: Path,
    last_step: int,
    *,
    modules: tuple[str, ...] = (),
    kills: int = KILLS,
    seed: int = 1,
    env: Mapping[str, str] | None = None,
) -> None:
    """Have ``last_step`` + 1 points written to a tracker by ``kills`` + 1 writers; all but one are killed.

    A writer is killed, with the processes that it started, a random short time after it has come to a random
    step. ``modules`` are imported before, once.
    """
    chance = random.Random(seed)
    with subprocess.Popen(
        [sys.executable, "-m", "tests.support.point_writer", *modules],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **(env or {})},
    ) as server:
        for number in range(kills + 1):
            is_last = number == kills
            target = last_step * (number + 1) // (kills + 1)
            kill_at = target - chance.randint(0, last_step // (kills + 1))
            numbers = (target, chance.randint(1, 7), chance.randint(1, 20))
            code = _run(
                server,
                [text, str(directory / "known"), "close" if is_last else "wait", numbers],
                None if is_last else kill_at,
                chance,
            )
            assert code == (0 if is_last else -signal.SIGKILL), (number, code)
        assert server.stdin
        server.stdin.close()


def _run(
    server: subprocess.Popen[str], arguments: list[object], kill_at: int | None, chance: random.Random
) -> int:
    """Run one writer; return its exit code."""
    assert server.stdin
    assert server.stdout
    server.stdin.write(json.dumps(arguments) + "\n")
    server.stdin.flush()
    writer = -1
    for line in server.stdout:
        verb, text = line.split()
        if verb == "begin":
            writer = int(text)
        elif verb == "end":
            return int(text)
        elif kill_at is not None and (int(text) >= kill_at or verb == "wait"):
            time.sleep(chance.random() * 0.01)  # how far the writer gets meanwhile does not matter
            with contextlib.suppress(ProcessLookupError):
                os.killpg(writer, signal.SIGKILL)
    raise AssertionError("the server of writers ended")


def assert_equal_points(
    found: Mapping[int, Mapping[str, float]], last_step: int, convert: Callable[[float], float] = float
) -> None:
    """Check that a tracker's points are the undisturbed run's: a reader has checked that none is double."""
    assert sorted(found) == list(range(last_step + 1))
    for step, values in found.items():
        expected = make_point(step).values
        assert values.keys() == expected.keys(), step
        for key, value in expected.items():
            kept = convert(value)
            assert values[key] == kept or (math.isnan(kept) and math.isnan(values[key])), (step, key)


def to_float32(value: float) -> float:
    """Return the nearest number of 32 bits."""
    return float(struct.unpack("f", struct.pack("f", value))[0])
