"""Test what a worker records for the hang detector."""

from __future__ import annotations

import inspect
import time
from pathlib import Path
from types import SimpleNamespace
from typing import cast

from elastic_resume.mechanisms.hangs.detector import take_sample
from elastic_resume.ranks.rank_context import RankContext
from elastic_resume.slots.progress_page import ProgressPage, WorkerProcess, read_records
from elastic_resume.training.heartbeat import BUSY_LIMIT_S, RankHeartbeat
from elastic_resume.training.run import Run


def test_busy_rank_is_judged_again_after_four_hours(tmp_path: Path) -> None:
    """Within it ranks may wait for one that never comes. With a limit of 0 it is never judged."""
    page = ProgressPage(tmp_path / "page")
    worker = WorkerProcess(0, 0, 1, 77, 0, 0, 0)
    page.start_generation(0, generation=1, step=0, world_size=1, worker=worker)
    page.finish_step(0, 1)
    heartbeat = RankHeartbeat(page, cast("RankContext", SimpleNamespace(local_rank=0)))

    def is_busy_after(hours: float) -> bool:
        (record,) = read_records(tmp_path / "page", 1)
        return take_sample(record, time.monotonic_ns() + int(hours * 3600e9)).is_busy

    with heartbeat.busy():
        assert is_busy_after(3.9)
        assert not is_busy_after(4.1)
    with heartbeat.busy(0.0):
        assert is_busy_after(1000.0)
    assert inspect.signature(Run.busy).parameters["limit_s"].default == BUSY_LIMIT_S == 4 * 3600
