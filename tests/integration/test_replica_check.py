"""A model that DDP does not average is found; unit/restore/test_replica_check.py has the comparison."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import launch_ranks
from tests.support.paths import SCRIPTS


@pytest.mark.cluster
@pytest.mark.parametrize(
    ("case", "text"),
    [
        ("none", "'model.body/weight' after step 2 (rank 0 against rank 1). No tracked model is in DDP, so"),
        ("outside", "'model.head/weight' after step 2 (rank 0 against rank 1). Look for something that one"),
        ("by-hand", ""),
    ],
)
def test_model_outside_of_ddp_ends_the_job_within_the_first_steps(
    tmp_path: Path, case: str, text: str
) -> None:
    """On one node too, where each rank would train a model of its own to the end."""
    env = {"ELASTIC_RESUME_CKPT_DIR": str(tmp_path), "ELASTIC_RESUME_NODE_NAME": "n0"}
    finished = launch_ranks.run_ranks(2, SCRIPTS / "unwrapped.py", case, env=[env] * 2)
    assert [done.returncode for done in finished] == [int(bool(text))] * 2, finished[0].stderr
    for done in finished:
        assert text in done.stderr
