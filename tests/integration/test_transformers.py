"""transformers' Trainer, killed at every place of its loop: it ends as if nothing had happened.

Compared bit for bit are the samples and losses of each batch, all logs, weights, optimizer, scheduler, the
best metric and what the callbacks count. In another world each global batch has the same samples.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from elastic_resume.errors import UsageError
from elastic_resume.testing import Fault, assert_same_run
from tests.support.library_job import JobRecords, LibraryJob
from tests.support.paths import ROOT, SCRIPTS, preload

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

SCRIPT = SCRIPTS / "trainer.py"
EXAMPLE = ROOT / "examples" / "transformers_digits.py"
# All agents and workers are forked from one process, which imports once what they need.
PRELOAD = preload(
    "transformers.trainer",
    "transformers.models.llama.modeling_llama",
    "transformers.models.vit.modeling_vit",
    "sklearn.datasets",
    "sklearn.model_selection",
)
SOAK = "ELASTIC_RESUME_SOAK_KILLS" in os.environ

# HOOK@STEP:RANK. The step is the number of finished optimizer steps; an epoch has 7. Two kills in one step
# are for one rank, since the other rank may come to the second place before it notices the first kill.
KILLS = [
    "on_prediction_step@3:0",
    "in_save@6:0",
    "on_log@8:0",
    "in_last_log@14:0",
]
MORE_KILLS = [
    "on_train_begin@0:0",
    "in_step@1:0",
    "on_epoch_end@7:1",
    "on_epoch_begin@0:0",
    "on_step_begin@1:1",
    "on_substep_end@2:0",
    "on_optimizer_step@2:0",
    "on_pre_optimizer_step@3:0",
    "on_log@4:0",
    "on_step_end@4:0",
    "on_evaluate@6:1",
    "on_save@6:1",
    "on_epoch_begin@7:0",
    "on_log@8:0",
    "in_last_log@14:0",
    "in_step@10:1",
    "on_evaluate@12:0",
    "on_epoch_end@14:1",
    "on_train_end@14:0",
]
# Kills that fit each case; the steps differ.
CASES = {
    "tokens": ["in_step@2:1", "on_evaluate@6:0", "on_epoch_end@7:0"],
    "sparse": ["in_step@15:0", "on_step_end@17:1", "on_log@18:0"],
    "sparse-kwargs": ["in_step@15:0", "on_step_end@17:1", "on_log@18:0"],
    "sparse-tokens": ["in_step@15:0", "on_step_end@17:1", "on_log@18:0"],
    "epochs": ["on_epoch_end@7:0", "in_save@7:1", "on_log@14:0", "on_train_end@14:1"],
    "max-steps": ["on_step_end@10:0", "on_epoch_end@10:0", "on_prediction_step@10:0", "on_train_end@10:0"],
    "early-stopping": ["on_evaluate@3:1", "on_evaluate@6:0", "on_epoch_end@6:0"],
    "stopped-epochs": ["on_step_end@3:0", "on_epoch_end@6:1", "on_epoch_begin@6:0", "in_step@8:1"],
    "bf16": ["in_step@4:0", "on_save@6:1"],
    "workers": ["in_step@2:1", "on_step_end@9:0"],
    "augmented": ["in_step@2:1", "on_step_end@9:0"],
    "plateau": ["in_step@4:0", "on_evaluate@6:1", "on_step_begin@9:0"],
    "own-loss": ["in_step@4:0", "on_optimizer_step@9:1"],
    "dropped": ["in_step@4:0", "on_epoch_end@6:1"],
    "eval-on-start": ["on_evaluate@0:0", "in_step@4:0", "on_prediction_step@6:1"],
}


JOB = LibraryJob(SCRIPT, PRELOAD)


def assert_same(killed: JobRecords, undisturbed: JobRecords, ranks: int = 2) -> None:
    """Check batches, logs and ends."""
    killed.check_same_batches(undisturbed)
    killed.check_same_values(undisturbed)
    for rank, logs in undisturbed.logs.items():
        assert sorted(killed.logs[rank]) == sorted(logs)
    assert killed.ends == undisturbed.ends
    assert len(undisturbed.ends) == ranks
    assert len(killed.loggers) <= 1, "a logger began another run"


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> JobRecords:
    """An undisturbed run with gradient accumulation, an uneven last batch, evaluation and the best model."""
    found = JOB.run(tmp_path_factory.mktemp("undisturbed"), "rich")
    found.check_values(map(json.loads, found.logs[0]))
    assert {"eval_loss", "train_loss", "total_flos"} < found.values[14].keys()
    return found


@pytest.mark.parametrize("kills", [KILLS, *([MORE_KILLS] if SOAK else [])])
def test_kill_in_any_part_of_the_loop_changes_nothing(
    undisturbed: JobRecords, kills: list[str], tmp_path: Path
) -> None:
    """Workers die one after the other."""
    undisturbed.check_learned()
    assert_same(JOB.run(tmp_path, "rich", *kills), undisturbed)


@pytest.mark.soak
@pytest.mark.parametrize("case", CASES)
def test_killed_case_equals_undisturbed_case(case: str, tmp_path: Path) -> None:
    """Each setting of the Trainer that changes its loop."""
    undisturbed = JOB.run(tmp_path, case)
    assert_same(JOB.run(tmp_path, case, *CASES[case]), undisturbed)


@pytest.mark.soak
def test_sharded_model_survives_worker_and_node(tmp_path: Path) -> None:
    """FSDP2 by the Trainer on two nodes of two ranks: a worker dies, then a node, which comes back empty."""
    undisturbed = JOB.run(tmp_path, "sharded", nodes=2)
    killed = JOB.run(tmp_path, "sharded", "in_save@3:1", "on_optimizer_step@4:2:node", nodes=2)
    assert_same(killed, undisturbed, ranks=4)


@pytest.mark.soak  # test_end_to_end.py has the samples, unit/integrations/test_trainer.py the global batch
def test_other_worlds_read_the_same_samples(undisturbed: JobRecords, tmp_path: Path) -> None:
    """A node dies in a step and comes back; another one is asked to leave: 3, 2, 3, 2 ranks.

    The first three make the global batch, and the same one is given to the undisturbed run.
    """
    options = ["--case", "derived", "--kill", "on_optimizer_step@3:2:node"]
    found, _ = JOB.run_in_changing_worlds(tmp_path, *options, pauses=(6, 10))
    found.check_samples({step: read for (step, _), read in undisturbed.read.items()})


@pytest.mark.parametrize(
    "case",
    [
        pytest.param("sparse", marks=pytest.mark.soak),
        pytest.param("sparse-tokens", marks=pytest.mark.soak),
        "sparse-kwargs",
    ],
)
def test_ranks_without_samples_change_no_loss(case: str, tmp_path: Path) -> None:
    """The last batch of an epoch has one sample, so the second of two ranks counts none of its own."""
    logs = [JOB.run(tmp_path, case, ranks=ranks).logs[0] for ranks in (1, 2)]
    alone, together = (sorted(map(json.loads, lines), key=str) for lines in logs)
    assert len(alone) > 5
    for (step, values), (other_step, others) in zip(alone, together, strict=True):
        assert step == other_step
        # train_loss has one rank's last steps; an evaluation fills up its last batch, as the Trainer does.
        for name, most in {"loss": 1e-4, "grad_norm": 1e-4, "eval_loss": 0.1}.items():
            if name in values:
                assert others[name] == pytest.approx(values[name], rel=most)


@pytest.mark.soak
def test_example_is_the_same_run_after_kills(tmp_path: Path) -> None:
    """As it is, under a worker's death and a node's."""
    words = ["--epochs", "1", "--output-dir", str(tmp_path)]
    faults = [Fault("kill-worker", rank=1, step=4), Fault("kill-node", node=1, step=9)]
    assert_same_run(EXAMPLE, *words, faults=faults, nodes=2, lines="^test accuracy", env=PRELOAD)


@pytest.mark.soak
def test_example_is_the_same_run_after_a_node_left_and_came_back(tmp_path: Path) -> None:
    """It is asked to leave, saves and ends; the others wait for it."""
    words = ["--epochs", "6", "--output-dir", str(tmp_path)]
    faults = [Fault("preemption", node=1, step=6)]
    assert_same_run(EXAMPLE, *words, faults=faults, nodes=2, lines="^test accuracy", env=PRELOAD)


# ---- what is refused, in this process --------------------------------------------------------------------


def make_trainer(directory: Path, batch: int = 8, **settings: Any) -> Any:
    """Make a Trainer of this process alone."""
    from transformers import TrainingArguments  # noqa: PLC0415  seconds

    from elastic_resume.integrations.transformers import ElasticTrainer  # noqa: PLC0415
    from tests.support.scripts.trainer import Classes, Net  # noqa: PLC0415

    class Elastic(ElasticTrainer):
        elastic_global_batch = batch

    args = TrainingArguments(
        output_dir=str(directory), report_to="none", use_cpu=True, disable_tqdm=True, **settings
    )
    samples = Classes(8, 1)
    samples.has_index = False
    return Elastic(model=Net(), args=args, train_dataset=samples)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"batch": -1}, "elastic_global_batch is -1"),
        ({"gradient_accumulation_steps": 2}, "leave out gradient_accumulation_steps or elastic_global_batch"),
        ({"auto_find_batch_size": True}, "in place of auto_find_batch_size"),
        ({"train_sampling_strategy": "group_by_length"}, "train_sampling_strategy is 'group_by_length'"),
        ({"ignore_data_skip": True}, "leave out ignore_data_skip"),
        ({"enable_jit_checkpoint": True}, "leave out enable_jit_checkpoint"),
        ({"optim": "lomo"}, "the optimizer lomo steps within backward"),
    ],
)
def test_setting_that_cannot_work_is_refused(settings: dict[str, Any], text: str, tmp_path: Path) -> None:
    """Before anything is trained."""
    with pytest.raises(UsageError, match=f"ElasticTrainer cannot train here: .*{text}"):
        make_trainer(tmp_path, **settings).train()


def test_collator_with_a_generator_of_its_own_is_refused(tmp_path: Path) -> None:
    """Its next numbers are in no state."""
    trainer = make_trainer(tmp_path)
    trainer.data_collator = SimpleNamespace(seed=5, generator=None)
    with pytest.raises(UsageError, match="SimpleNamespace has seed=, and so random numbers that no restart"):
        trainer.train()


def test_ranks_that_the_trainer_does_not_see_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without use_cpu=True accelerate ignores torchrun's ranks on CPUs, and each would train alone."""
    trainer = make_trainer(tmp_path)
    environ = {"RANK": "0", "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match="the Trainer works with 1 of 3 ranks"):
        trainer.train()


@pytest.mark.parametrize("name", ["get_train_dataloader", "_get_train_sampler"])
@pytest.mark.parametrize("is_base", [False, True])
def test_own_order_of_samples_is_refused(name: str, is_base: bool, tmp_path: Path) -> None:
    """It has no position, and our own order would silently take its place."""
    from transformers import Trainer  # noqa: PLC0415  seconds

    from elastic_resume.integrations.transformers import ElasticTrainer  # noqa: PLC0415

    trainer = make_trainer(tmp_path)
    own = type("Own", (Trainer,), {name: lambda *_: None})
    kinds = (ElasticTrainer, own) if is_base else (type("Mixed", (own, ElasticTrainer), {}),)
    trainer.__class__ = type("Mine", kinds, {"elastic_global_batch": 8})
    with pytest.raises(UsageError, match=r"get_train_dataloader\(\) or _get_train_sampler\(\) is overridden"):
        trainer.train()


def test_second_training_is_refused(tmp_path: Path) -> None:
    """It would be restored over the first."""
    trainer = make_trainer(tmp_path)
    with pytest.raises(UsageError, match="hyperparameter search"):
        trainer.train(trial=object())
    trainer.elastic_options = {"on_world_change": "keep_local_batch"}
    with pytest.raises(UsageError, match="would change the number of steps"):
        trainer.train()
    trainer.elastic_run = object()
    with pytest.raises(UsageError, match="train\\(\\) was called before"):
        trainer.train()


def test_kind_of_loss_is_found_by_trying_it(tmp_path: Path) -> None:
    """A model may take num_items_in_batch and ignore it, or add another term."""
    trainer = make_trainer(tmp_path)
    noise = torch.nn.Dropout()
    before = torch.get_rng_state()

    def find(loss: Any, count: Any = 8) -> Any:
        def compute(model: Any, inputs: Any, num_items_in_batch: Any) -> torch.Tensor:
            assert not model.training
            assert inputs.pop("x") == 1, "each gets a copy"
            return torch.as_tensor(loss(noise(torch.ones(9)).sum(), num_items_in_batch))

        trainer._elastic_has_sum = None
        return trainer._elastic_is_sum(compute, trainer.model, {"x": 1}, count)

    assert find(lambda total, count: total / count)
    assert not find(lambda total, _: total)
    assert not find(None, None)
    assert find(lambda *_: 0.0)
    assert trainer._elastic_has_sum is None, "no label counts: the next batch decides"
    assert find(lambda *_: float("nan"))
    assert trainer.model.training
    with pytest.raises(UsageError, match="neither a mean over the batch nor a sum divided"):
        find(lambda total, count: total / count + total)
    trainer.loss_is_scaled_for_ga = False
    assert not find(None)
    trainer.loss_is_scaled_for_ga = True
    assert find(None)
    assert torch.equal(torch.get_rng_state(), before)
