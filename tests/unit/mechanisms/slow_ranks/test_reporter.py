"""Test that a node reports a slow rank if it is its own, and of its generation."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from elastic_resume import constants
from elastic_resume.mechanisms.mechanism import encode_body
from elastic_resume.mechanisms.slow_ranks.judge import OWN_TIMES, SlowRank
from elastic_resume.mechanisms.slow_ranks.reporter import SlowRankReporter
from elastic_resume.rendezvous.facts import Fact
from elastic_resume.slots.progress_page import ProgressPage, WorkerProcess
from tests.support.agent_parts import make_agent_context


@pytest.mark.parametrize(
    ("node", "generation", "local_rank", "is_reported"),
    [("a", 2, 0, True), ("b", 2, 0, False), ("a", 1, 0, False), ("a", 2, 1, False)],
)
def test_only_own_rank_of_running_generation_is_reported(
    node: str, generation: int, local_rank: int, is_reported: bool, tmp_path: Path
) -> None:
    """Each node has a local rank 0; the leader's verdict may be of the view before."""
    worker = WorkerProcess(4, os.getpid(), 2, os.getpid(), 1, 0, 0)
    ProgressPage(tmp_path / constants.PROGRESS_FILE).start_generation(
        0, generation=2, step=7, world_size=8, worker=worker
    )
    emitted: list[dict[str, Any]] = []
    context = make_agent_context(
        node_dir=tmp_path, emit=lambda kind, **fields: emitted.append({"kind": kind, **fields})
    )
    verdict = Fact(OWN_TIMES.name, generation, encode_body(SlowRank(node, local_rank, 200_000, 100_000, 9)))
    client = Mock(node="a", verdicts={OWN_TIMES.name: verdict})
    status = SlowRankReporter(context).update(client)
    assert (status is not None) == is_reported
    assert [(event["kind"], event["rank"], event["generation"]) for event in emitted] == (
        [("slow-rank", 4, 2)] if is_reported else []
    )
