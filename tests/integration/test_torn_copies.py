"""Scripts that change parameters while a snapshot is copied: no healthy node is ended, and no bit differs."""

from __future__ import annotations

import pytest

from elastic_resume.testing import Fault, assert_same_run
from tests.support.paths import SCRIPTS

pytestmark = [pytest.mark.cluster, pytest.mark.soak]  # unit/capture/test_snapshotter.py has it in one process


@pytest.mark.parametrize(
    "change",
    ["swap", "forward", "clamp", "numpy"],
)
def test_script_that_changes_parameters_during_the_copy_resumes_bit_for_bit(change: str) -> None:
    """The replicas of two nodes are compared at each step; then a worker is killed.

    All snapshots must be of their step boundary, else replicas differ or the resumed state does.
    """
    assert_same_run(
        SCRIPTS / "changing.py",
        nodes=2,
        faults=[Fault("kill-worker", rank=1, step=5)],
        env={"CHANGE": change, "ELASTIC_RESUME_CHECK_REPLICAS": "1"},
    )
