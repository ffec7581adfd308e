"""Lightning's Trainer, killed at every place of its loop: it ends as if nothing had happened.

Compared bit for bit are the samples and losses of each batch, all logs, weights, optimizers, schedulers, what
the callbacks count, and the checkpoints that Lightning wrote. In another world each global batch has the same
samples.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler

import elastic_resume as er
from elastic_resume.checkpoint.manifest import Position
from elastic_resume.errors import ConfigError, UsageError
from elastic_resume.testing import Fault, assert_same_run
from tests.support.library_job import JobRecords, LibraryJob
from tests.support.paths import ROOT, SCRIPTS, preload

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

SCRIPT = SCRIPTS / "lightning_job.py"
EXAMPLE = ROOT / "examples" / "lightning_digits.py"
# All agents and workers are forked from one process, which imports Lightning once.
PRELOAD = preload("lightning.pytorch", "torchmetrics.classification")
SOAK = "ELASTIC_RESUME_SOAK_KILLS" in os.environ

# PLACE@STEP:RANK. The step is Lightning's global step; an epoch has 5, and validates after 2 and 5.
KILLS = [
    "on_save_checkpoint@3:0",
    "on_validation_batch_end@5:1",
    "on_train_epoch_end@10:0",
]
MORE_KILLS = [
    "on_train_start@0:1",
    "in_step@1:0",
    "on_train_epoch_end@5:0",
    "on_train_epoch_start@0:0",
    "on_train_batch_start@1:1",
    "on_before_zero_grad@1:0",
    "on_before_backward@2:0",
    "on_after_backward@2:1",
    "on_train_batch_end@2:1",
    "on_validation_start@2:1",
    "on_validation_epoch_end@2:0",
    "on_validation_end@2:1",
    "on_train_batch_start@3:0",
    "on_train_epoch_start@5:1",
    "on_train_batch_end@6:0",
    "on_before_optimizer_step@7:1",
    "on_validation_batch_start@7:0",
    "on_validation_end@10:0",
    "on_train_epoch_end@10:1",
    "on_save_checkpoint@12:0",
    "on_train_end@15:1",
]
# Kills that fit each case; the steps differ.
CASES = {
    "plain": ["in_step@4:0", "on_validation_end@10:0", "on_train_epoch_end@10:1", "on_train_batch_end@12:0"],
    "max-steps": ["in_step@4:0", "on_train_batch_end@13:1", "on_train_epoch_end@13:0", "on_train_end@13:1"],
    "limited": ["in_step@2:1", "on_train_epoch_end@3:0", "on_train_batch_end@5:1"],
    "early-stopping": ["on_validation_end@10:1", "on_validation_end@20:0", "on_train_epoch_end@20:1"],
    "early-in-epoch": ["on_validation_end@3:1", "on_validation_end@9:0", "on_train_epoch_end@9:1"],
    "every-3-steps": ["on_validation_end@3:1", "in_step@7:0", "on_validation_start@12:1"],
    "bf16": ["in_step@4:0", "on_save_checkpoint@6:0"],
    "workers": ["in_step@2:1", "on_train_batch_end@9:0", "in_step@13:0"],
    "augmented": ["in_step@2:1", "on_train_batch_end@9:0"],
    "manual": ["in_step@4:1", "on_train_batch_end@8:0", "on_train_epoch_end@20:0"],
    "global-batches": ["in_step@2:1", "on_train_batch_end@4:0", "on_train_epoch_end@5:1"],
    "elastic-sampler": ["in_step@4:0", "on_train_epoch_end@10:1", "in_step@12:1"],
    "no-sanity-check": ["in_step@4:0"],
}


JOB = LibraryJob(SCRIPT, PRELOAD)


def assert_same(killed: JobRecords, undisturbed: JobRecords) -> None:
    """Check batches, logs and ends."""
    killed.check_same_batches(undisturbed)
    killed.check_same_values(undisturbed)
    for rank in (0, 1):
        assert killed.logs[rank] == undisturbed.logs[rank]
        for part, value in undisturbed.ends[rank].items():
            assert killed.ends[rank][part] == value, part


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> JobRecords:
    """A run with gradient accumulation, an uneven last batch, validation in a step, and two schedulers."""
    found = JOB.run(tmp_path_factory.mktemp("undisturbed"), "rich")
    found.check_learned()
    logged = [(step + 1, values) for step, values in map(json.loads, found.logs[0])]  # it counts from 0
    found.check_values((step, {k: float.fromhex(v) for k, v in each.items()}) for step, each in logged)
    assert found.ends[0]["files"], "Lightning wrote no checkpoint"
    return found


@pytest.mark.parametrize("restartable", [pytest.param(False, marks=pytest.mark.soak), True])
@pytest.mark.parametrize("kills", [KILLS, *([MORE_KILLS] if SOAK else [])])
def test_kill_in_any_part_of_the_loop_changes_nothing(
    undisturbed: JobRecords, kills: list[str], restartable: bool, tmp_path: Path
) -> None:
    """Workers die one after the other. The other process stays if the strategy is restartable."""
    assert_same(JOB.run(tmp_path, "rich", *kills, restartable=restartable), undisturbed)


@pytest.mark.soak
@pytest.mark.parametrize("case", CASES)
def test_killed_case_equals_undisturbed_case(case: str, tmp_path: Path) -> None:
    """Each setting of the Trainer that changes its loop."""
    undisturbed = JOB.run(tmp_path, case)
    assert_same(JOB.run(tmp_path, case, *CASES[case]), undisturbed)


@pytest.mark.soak
def test_pytorch_lightning_is_the_same(tmp_path: Path) -> None:
    """The same code under its former name."""
    job = LibraryJob(SCRIPT, {**PRELOAD, "LIGHTNING_LIBRARY": "pytorch_lightning"})
    undisturbed = job.run(tmp_path, "rich")
    assert_same(job.run(tmp_path, "rich", *KILLS), undisturbed)


def change_world(tmp_path: Path, case: str) -> tuple[JobRecords, list[dict[str, Any]]]:
    """Train with 3, 2, 3 and 2 ranks: a node dies in a step and comes back; another one is asked to leave."""
    options = ["--case", case, "--kill", "on_after_backward@2:2:node"]
    return JOB.run_in_changing_worlds(tmp_path, *options, pauses=(6, 9))


@pytest.mark.soak
def test_other_worlds_read_the_same_samples(tmp_path: Path) -> None:
    """With a global batch that stays, each step has the samples that it has in one process."""
    found, _ = change_world(tmp_path, "global-batches")
    batches = er.GlobalBatches(77, 16, seed=5)
    wholes = []
    for epoch in range(3):
        batches.seek(epoch, 0)
        wholes += [set(batch) for batch in batches]
    found.check_samples(dict(enumerate(wholes, 1)))


@pytest.mark.soak
def test_other_worlds_read_each_sample_once(tmp_path: Path) -> None:
    """With batches of each rank that stay, a step has other samples, and an epoch the same."""
    found, resumed = change_world(tmp_path, "plain")
    starts = [event["step"] for event in resumed[1:]]
    counted: list[int] = []
    for (step, generation), samples in found.read.items():
        # A step counts in the last generation that took it.
        if generation > len(starts) or step <= starts[generation - 1]:
            counted += samples
    assert sorted(counted) == sorted([*range(77)] * 3)


@pytest.mark.soak
def test_fabric_script_is_the_same_run_after_kills(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As docs/guides/lightning.md has it."""
    monkeypatch.chdir(tmp_path)
    page = (ROOT / "docs" / "guides" / "lightning.md").read_text()
    (code,) = re.findall(r"^```python\n(# fabric_train\.py\n.*?)^```", page, re.MULTILINE | re.DOTALL)
    Path("fabric_train.py").write_text(code)
    faults = [
        Fault("kill-worker", rank=1, step=4),
        Fault("kill-worker", rank=0, step=10),
        Fault("kill-node", node=1, step=13),
    ]
    assert_same_run("fabric_train.py", faults=faults)


@pytest.mark.soak
def test_example_is_the_same_run_after_kills(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As it is, under a worker's death and a node's."""
    monkeypatch.chdir(tmp_path)
    assert_same_run(
        EXAMPLE,
        *("--epochs", "1"),
        faults=[Fault("kill-worker", rank=1, step=4), Fault("kill-node", node=2, step=9)],
        lines="^best accuracy",
        ignore=["callbacks"],  # the second run gives its checkpoints other names than the first
        env=PRELOAD,
    )


# ---- what is refused, in this process --------------------------------------------------------------------


def make_trainer(module: Any = None, **settings: Any) -> tuple[Any, Any]:
    """Make a Trainer of this process alone, and its strategy."""
    import lightning.pytorch as pl  # noqa: PLC0415  seconds

    from elastic_resume.integrations.lightning import ElasticDDPStrategy  # noqa: PLC0415

    strategy = ElasticDDPStrategy(**settings.pop("strategy", {}))
    trainer = pl.Trainer(
        **{
            "strategy": strategy,
            "accelerator": "cpu",
            "logger": False,
            "enable_progress_bar": False,
            **settings,
        }
    )
    trainer.state.fn, trainer.training = pl.trainer.states.TrainerFn.FITTING, True
    strategy._lightning_module = module or pl.LightningModule()
    strategy._trainer = trainer
    return trainer, strategy


def make_module(*, norm: bool, **methods: Any) -> Any:
    """Make a module with a layer, and with methods of its own."""
    import lightning.pytorch as pl  # noqa: PLC0415  seconds

    module: Any = type("Module", (pl.LightningModule,), methods)()
    module.layer = torch.nn.BatchNorm1d(2) if norm else torch.nn.Linear(2, 2)
    return module


class KeepsState:
    """Restores a state that only Lightning's checkpoints hold."""

    state_key = "mine"

    def on_load_checkpoint(self, *_: Any) -> None:
        """Restore it."""


@pytest.mark.filterwarnings("ignore")
def test_setting_that_cannot_work_is_refused() -> None:
    """Before anything is trained."""
    from lightning.pytorch import callbacks  # noqa: PLC0415  seconds

    cases: list[tuple[dict[str, Any], str]] = [
        ({"reload_dataloaders_every_n_epochs": 1}, "reload_dataloaders_every_n_epochs cannot be used"),
        ({"limit_train_batches": 0}, "limit_train_batches=0 cannot be used"),
        ({"strategy": {"ddp_comm_state": object()}}, "ddp_comm_state cannot be used"),
        ({"strategy": {"start_method": "spawn"}}, "start_method='spawn' cannot be used"),
        ({"callbacks": [callbacks.GradientAccumulationScheduler({0: 2})]}, "changes the number of batches"),
        (
            {"callbacks": [callbacks.WeightAveraging()]},
            "WeightAveraging restores state in on_load_checkpoint",
        ),
        (
            {
                "strategy": {"restartable": True},
                "module": make_module(norm=False, prepare_data=lambda _: None),
            },
            "no rank waits for Module.prepare_data",
        ),
        ({"fast_dev_run": 2}, "fast_dev_run with ElasticDDPStrategy would leave"),
        ({"callbacks": [callbacks.BackboneFinetuning()]}, "add parameters to the optimizer during"),
        ({"callbacks": [callbacks.LearningRateFinder()]}, "LearningRateFinder trains before"),
        (
            {"callbacks": [callbacks.StochasticWeightAveraging(0.1)], "module": make_module(norm=True)},
            "StochasticWeightAveraging adds an epoch",
        ),
    ]
    for settings, text in cases:
        trainer, strategy = make_trainer(**settings)
        with pytest.raises(ConfigError, match=text):
            strategy._refuse_unsupported(trainer)
    trainer, strategy = make_trainer(
        callbacks=[callbacks.StochasticWeightAveraging(0.1)], module=make_module(norm=False)
    )
    strategy._refuse_unsupported(trainer)
    with pytest.raises(UsageError, match="from on_fit_start on"):
        _ = strategy.run
    strategy._run = object()
    with pytest.raises(UsageError, match="a job has one"):
        strategy._refuse_unsupported(trainer)


@pytest.mark.filterwarnings("ignore")
def test_loader_gets_global_batches_or_is_left_alone() -> None:
    """A DistributedSampler is replaced; the rest of the loader stays."""
    dataset: Any = list(range(40))
    trainer, strategy = make_trainer(accumulate_grad_batches=2)
    strategy.cluster_environment.set_world_size(1)
    plain = DataLoader(dataset, batch_size=4, sampler=DistributedSampler(dataset, 1, 0, seed=7), timeout=3)
    made = strategy.process_dataloader(plain)
    assert isinstance(made.batch_sampler, er.GlobalBatches)
    assert (made.batch_sampler.global_batch, made.batch_sampler.micro_batch) == (8, 4)
    assert (made.batch_sampler.seed, made.timeout, len(made)) == (7, 3, 10)
    whole: Any = [(torch.full((3, 2), number), [number] * 3) for number in range(6)]  # batches of 3 samples
    sampler: Any = DistributedSampler(whole, 1, 0, shuffle=False)
    loader = strategy.process_dataloader(DataLoader(whole, batch_size=None, sampler=sampler))
    assert (loader.batch_sampler.global_batch, loader.batch_sampler.micro_batch) == (2, 1)
    for (inputs, numbers), (expected, same) in zip(loader, whole, strict=True):
        assert (inputs.tolist(), numbers) == (expected.tolist(), same)
    own: Any = DataLoader(dataset, batch_sampler=er.GlobalBatches(40, 12, micro_batch=4))
    assert trainer._data_connector._requires_distributed_sampler(own)
    assert strategy.process_dataloader(own) is own
    assert trainer.accumulate_grad_batches == 3
    with pytest.raises(ConfigError, match="ElasticSampler gives each step one batch"):
        strategy.process_dataloader(DataLoader(dataset, 4, sampler=er.ElasticSampler(dataset)))
    trainer.training, trainer.validating = False, True
    assert strategy.process_dataloader(plain) is plain


@pytest.mark.filterwarnings("ignore")
def test_devices_follow_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also on nodes with different numbers of workers."""
    environ = {
        "RANK": "4",
        "WORLD_SIZE": "5",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_WORLD_SIZE": "3",
    }
    for name, value in {**environ, "TORCHELASTIC_RUN_ID": "job"}.items():
        monkeypatch.setenv(name, value)
    trainer, strategy = make_trainer(devices=1, num_nodes=7)
    assert strategy.root_device == torch.device("cpu")
    assert (trainer.world_size, trainer.global_rank, trainer.num_nodes) == (5, 4, 3)
    assert strategy.distributed_sampler_kwargs == {"num_replicas": 5, "rank": 4}
    strategy.cluster_environment.validate_settings(1, 7)
    with pytest.raises(ConfigError, match="2 workers, and Trainer has 1 devices"):
        strategy.parallel_devices = [torch.device("cuda", 0)]


@pytest.mark.filterwarnings("ignore")
def test_metrics_that_cannot_be_carried_are_refused() -> None:
    """Lists grow with the epoch."""
    from lightning import pytorch as pl  # noqa: PLC0415  seconds
    from torchmetrics import CatMetric, SumMetric  # noqa: PLC0415

    from elastic_resume.integrations.lightning_metrics import CarriedMetrics  # noqa: PLC0415

    module = torch.nn.Module()
    trainer, _ = make_trainer(module)
    carried = CarriedMetrics(trainer, pl)
    module.kept = CatMetric()
    assert carried.read_own()["metrics"] == {}
    module.kept.update(1.0)
    with pytest.raises(UsageError, match="the metric kept keeps a list of samples"):
        carried.read_own()
    module.kept = SumMetric()
    module.kept.sum_value = torch.zeros(20_000)
    module.kept.update(torch.ones(20_000))
    with pytest.raises(UsageError, match="bytes of logged values"):
        carried.read_own()


def test_other_world_adds_up_what_ranks_have_logged() -> None:
    """Sums over the ranks stay the same, whatever their number."""
    from elastic_resume.integrations.lightning_metrics import _pack, _unpack, fold_rows  # noqa: PLC0415

    def row(number: float) -> Any:
        result = {
            "meta": {"on_epoch": True, "reduce_fx": "torch.mean"},
            "is_tensor": True,
            "rank_zero_only": False,
            "value": _pack(torch.tensor(number)),
            "weight": _pack(torch.tensor(int(number))),
        }
        metric = {
            "updates": 1,
            "states": {"total": _pack(torch.tensor([number, 1.0]))},
            "reductions": {"total": "sum"},
        }
        odd = {**metric, "reductions": {"total": ""}}
        return {"results": {"loss": result}, "shown": {}, "metrics": {"sum": metric, "odd": odd}}

    rows = [row(1.0), row(2.0), row(4.0)]
    for world_size, expected in ((2, [5.0, 2.0]), (1, [7.0]), (5, [1.0, 2.0, 4.0, 0.0, 0.0])):
        folded = [fold_rows(rows, rank, world_size) for rank in range(world_size)]
        results = [one["results"]["loss"] for one in folded]
        assert [_unpack(one["value"]).item() for one in results] == expected
        assert [_unpack(one["weight"]).item() for one in results] == expected
        sums = [
            _unpack(one["metrics"]["sum"]["states"]["total"]).tolist() for one in folded if one["metrics"]
        ]
        assert [sum(column) for column in zip(*sums, strict=True)] == [7.0, 3.0]
        assert all("odd" not in one["metrics"] for one in folded)


def make_loggers(directory: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    """Make a CSVLogger without a version, as a process of a job does, and what lets it continue."""
    from lightning import pytorch as pl  # noqa: PLC0415  seconds

    from elastic_resume.integrations.lightning_loggers import Loggers  # noqa: PLC0415

    monkeypatch.setenv("ELASTIC_RESUME_CKPT_DIR", str(directory / "ckpt"))
    own = pl.loggers.CSVLogger(directory)
    trainer, _ = make_trainer(logger=own)
    return own, Loggers(trainer, pl, {"run_id": "job", "node_name": "n"})


def begin(loggers: Any, directory: Path, kind: str) -> None:
    """Begin a generation in a process of rank 0."""
    node_dir = directory / "ckpt" / "job" / "n"
    node_dir.mkdir(parents=True, exist_ok=True)
    context = SimpleNamespace(is_local_leader=True, node_dir=node_dir)
    parts = SimpleNamespace(context=context, progress=SimpleNamespace(position=Position(0, 1, 1, 4)))
    loggers.begin_generation(SimpleNamespace(rank=0, plan=SimpleNamespace(kind=kind), _generation=parts))


@pytest.mark.filterwarnings("ignore")
def test_logger_continues_in_its_version_with_rows_before_the_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Also after a kill between two restores. A job that begins anew takes the next version."""
    own, loggers = make_loggers(tmp_path, monkeypatch)
    assert not loggers.has_started
    begin(loggers, tmp_path, "cold")
    own.log_metrics({"loss": 1.0}, 0)
    saved = loggers.read_own()
    own.log_metrics({"loss": 2.0, "late": 3.0}, 1)
    loggers.read_own()
    for _ in range(2):  # the first of these processes is killed before it restores
        own, loggers = make_loggers(tmp_path, monkeypatch)
        assert own.version == 0
    loggers.load_rows([saved])
    begin(loggers, tmp_path, "resumed")
    own.log_metrics({"loss": 2.0, "late": 3.0}, 1)
    assert loggers.read_own()["rows"] == [2]
    metrics = tmp_path / "lightning_logs" / "version_0" / "metrics.csv"
    assert metrics.read_text().splitlines() == ["late,loss,step", ",1.0,0", "3.0,2.0,1"]
    assert [path.name for path in metrics.parent.glob("metrics*")] == ["metrics.csv"]
    _, loggers = make_loggers(tmp_path, monkeypatch)
    loggers.load_rows([{**saved, "rows": [5]}])
    assert "metrics.csv has 2 of the 5 rows that were logged before" in caplog.text
    assert loggers.has_started
    begin(loggers, tmp_path, "cold")  # nothing was saved: all rows will come again
    assert loggers.read_own()["rows"] == [2]
    (tmp_path / "ckpt" / "job" / "n" / "lightning-versions.json").unlink()
    assert make_loggers(tmp_path, monkeypatch)[0].version == 1


@pytest.mark.filterwarnings("ignore")
def test_busy_validation_is_noted_again_while_it_advances(monkeypatch: pytest.MonkeyPatch) -> None:
    """One batch has a limit, the validation has none."""
    from elastic_resume.integrations import WAIT_LIMIT_S  # noqa: PLC0415

    trainer, strategy = make_trainer()
    strategy._lightning_module = None
    notes: list[tuple[str, float]] = []

    @contextlib.contextmanager
    def busy(reason: str, limit_s: float) -> Iterator[None]:
        notes.append((reason, limit_s))
        yield
        notes.append(("over", 0.0))

    times = iter((1000.0, 1001.0, 1059.0, 1061.0, 1061.0, 1100.0, 1122.0, 1122.0))
    monkeypatch.setattr(time, "monotonic", lambda: next(times))
    monkeypatch.setattr(strategy.__class__.__mro__[2], "validation_step", lambda *_: None)
    strategy._run = SimpleNamespace(busy=busy)
    monkeypatch.setattr(strategy.__class__.__mro__[2], "on_validation_start", lambda *_: None)
    strategy.on_validation_start()
    for _ in range(5):
        strategy.validation_step()
    strategy.on_validation_end()
    assert notes == [("Lightning's validation", WAIT_LIMIT_S), ("over", 0.0)] * 3
    assert trainer.validating is False


@pytest.mark.filterwarnings("ignore")
def test_checkpoint_path_is_refused_at_the_first_start_only(caplog: pytest.LogCaptureFixture) -> None:
    """A restarted script finds its own: with a state it is left out, and without one too."""
    caplog.set_level("INFO")
    _, strategy = make_trainer()
    loaded: list[Any] = []

    def restore(kind: str, path: str | None, world_before: int | None, *, has_started: bool) -> None:
        plan = SimpleNamespace(kind=kind, previous_world_size=world_before)
        # After `--resume never` generations go on from those of the earlier run.
        strategy._run = SimpleNamespace(plan=plan, generation=3, rank=0, position=SimpleNamespace(step=7))
        strategy._loggers = SimpleNamespace(has_started=has_started)
        strategy._restore_no_checkpoint(lambda *given: loaded.append(given), path)

    for world_before, has_started in ((None, False), (2, False), (None, True)):
        with pytest.raises(ConfigError, match=r"fit\(\) would load last\.ckpt"):
            restore("cold", "last.ckpt", world_before, has_started=has_started)
    restore("cold", None, None, has_started=False)
    for kind in ("cold", "resumed"):
        restore(kind, "last.ckpt", 2, has_started=True)
    assert loaded == [(None, None), (), ()]
    assert [text for text in caplog.messages if "left out" in text] == [
        "Lightning: last.ckpt is left out: the job begins again",
        "Lightning: last.ckpt is left out: the state of step 7 is restored",
    ]


def test_strategy_has_a_name_for_command_lines() -> None:
    """LightningCLI finds it by this name."""
    import lightning.pytorch as pl  # noqa: PLC0415  seconds

    from elastic_resume.integrations.lightning import ElasticDDPStrategy  # noqa: PLC0415

    for name, kwargs in (
        ("elastic", {}),
        ("elastic_find_unused_parameters_true", {"find_unused_parameters": True}),
    ):
        strategy = pl.strategies.StrategyRegistry.get(name)
        assert isinstance(strategy, ElasticDDPStrategy)
        assert strategy._ddp_kwargs == kwargs
