"""TRL's Trainers, killed: weights, logged values and what callbacks hold are those of the undisturbed run.

Only in `make soak`, which installs TRL: its datasets bring 200 MB. `make test` has the same kind of Trainer
in tests/unit/integrations/test_trainer.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.library_job import LibraryJob
from tests.support.paths import SCRIPTS, preload

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.soak]

PRELOAD = preload(
    "transformers.trainer", "transformers.models.llama.modeling_llama", "trl", "peft", "datasets"
)
JOB = LibraryJob(SCRIPTS / "trl_trainer.py", PRELOAD)


@pytest.mark.parametrize("case", ["sft", "dpo", "kto"])
def test_killed_training_ends_as_the_undisturbed_one(case: str, tmp_path: Path) -> None:
    """Each rank dies once: within a step, and after an evaluation and a log."""
    (tmp_path / "undisturbed").mkdir()
    undisturbed = JOB.run(tmp_path / "undisturbed", case)
    (tmp_path / "killed").mkdir()
    killed = JOB.run(tmp_path / "killed", case, "on_optimizer_step@4:1", "on_evaluate@8:0")
    assert killed.ends == undisturbed.ends
    assert len(undisturbed.ends) == 2
    assert undisturbed.ends[0]["batch"] == 12
    assert {name for entry in undisturbed.ends[0]["log"] for name in entry} >= {"num_tokens", "eval_loss"}
