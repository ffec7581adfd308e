"""Trains with Lightning's Trainer, for tests/integration/test_lightning.py.

``--case`` names what it trains and how. Each process records what it reads, computes and logs. A place of
``--kill`` (job_log.py) is a hook of Lightning's callbacks, or ``in_step``, and its step the global step.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler as schedulers
from torch.utils.data import DataLoader, Dataset
from torchmetrics.classification import MulticlassAccuracy

import elastic_resume as er
from elastic_resume.agent.workers import run_main
from elastic_resume.state import state_dict
from tests.support.scripts.job_log import CLASSES, WIDTH, JobLog, Points, digest, parse_arguments

if TYPE_CHECKING:
    import lightning.pytorch as pl

    from elastic_resume.integrations.lightning import ElasticDDPStrategy
else:
    LIBRARY = os.environ.get("LIGHTNING_LIBRARY", "lightning.pytorch")
    pl = importlib.import_module(LIBRARY)
    integration = "pytorch_lightning" if LIBRARY == "pytorch_lightning" else "lightning"
    ElasticDDPStrategy = importlib.import_module(
        f"elastic_resume.integrations.{integration}"
    ).ElasticDDPStrategy

SAMPLES, VALIDATION_SAMPLES = 77, 20  # no rank gets a batch of one: BatchNorm


class Net(pl.LightningModule):
    """Two layers with dropout and batch norm, which log in every way."""

    def __init__(self, log: JobLog, case: Case) -> None:
        super().__init__()
        self.job_log, self.case = log, case
        self.first, self.drop, self.last = nn.Linear(WIDTH, 24), nn.Dropout(0.2), nn.Linear(24, CLASSES)
        self.norm = nn.BatchNorm1d(24)
        self.accuracy = MulticlassAccuracy(CLASSES)

    def forward(self, inputs: Tensor) -> Tensor:
        """Score the classes."""
        return self.last(self.drop(torch.relu(self.norm(self.first(inputs)))))  # type: ignore[no-any-return]

    def on_train_start(self) -> None:
        """Log past ``self.log()``, in each process; a job has one start."""
        logger: Any = self.logger
        logger.log_metrics({"start": 1.0}, 0)

    def record(self, indices: Tensor, loss: Tensor) -> None:
        """Write down a batch and come to the middle of a step."""
        strategy: Any = self.trainer.strategy
        self.job_log.write(
            step=strategy.run.position.step + 1,
            generation=strategy.run.generation,
            read=indices.tolist(),
            loss=float(loss).hex(),
        )
        self.job_log.kill_at("in_step", self.trainer.global_step)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Return the loss, and log it as mean, sum and maximum, and now and then."""
        inputs, labels, indices = batch
        scores = self(inputs)
        loss = nn.functional.cross_entropy(scores, labels)
        self.accuracy(scores, labels)
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        self.log("worst", loss, on_step=False, on_epoch=True, reduce_fx="max")
        self.log("accuracy", self.accuracy, on_step=True, on_epoch=True)
        if batch_idx % 4 == 0:
            self.log("sparse", loss * 2, on_step=True, on_epoch=True, reduce_fx="sum", sync_dist=True)
        self.record(indices, loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:  # noqa: ARG002
        """Log the mean loss."""
        inputs, labels, _ = batch
        self.log("val_loss", nn.functional.cross_entropy(self(inputs), labels), sync_dist=True)

    def configure_optimizers(self) -> Any:
        """Return an optimizer with the case's schedulers."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.case.learning_rate)
        steps = int(self.trainer.estimated_stepping_batches)
        plans: dict[str, Any] = {
            "cosine": {"scheduler": schedulers.CosineAnnealingLR(optimizer, steps), "interval": "step"},
            "plateau": {
                "scheduler": schedulers.ReduceLROnPlateau(optimizer, patience=0),
                "interval": "epoch",
                "monitor": "val_loss",
            },
            "plateau-step": {
                "scheduler": schedulers.ReduceLROnPlateau(optimizer, patience=1),
                "interval": "step",
                "monitor": "loss_step",
            },
            "epoch": {"scheduler": schedulers.StepLR(optimizer, 1, 0.5), "interval": "epoch"},
        }
        return [optimizer], [plans[name] for name in self.case.schedulers]


class TwoNets(Net):
    """Two networks with an optimizer each, which manual optimization steps in turn."""

    def __init__(self, log: JobLog, case: Case) -> None:
        super().__init__(log, case)
        self.automatic_optimization = False
        self.critic = nn.Linear(CLASSES, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:  # noqa: ARG002
        """Step the critic, then the net."""
        inputs, labels, indices = batch
        optimizers: Any = self.optimizers()
        for number, optimizer in enumerate(optimizers):
            scores = self(inputs)
            loss = nn.functional.cross_entropy(scores, labels) + 0.1 * self.critic(scores).mean().square()
            optimizer.zero_grad()
            self.toggle_optimizer(optimizer)
            self.manual_backward(loss)
            optimizer.step()
            self.untoggle_optimizer(optimizer)
            self.log(f"loss{number}", loss, on_step=True, on_epoch=True, sync_dist=True)
        self.record(indices, loss)
        done: Tensor = loss.detach()
        return done

    def configure_optimizers(self) -> Any:
        """Return one optimizer for each network."""
        own = [parameter for name, parameter in self.named_parameters() if not name.startswith("critic")]
        return [torch.optim.Adam(self.critic.parameters(), 0.01), torch.optim.SGD(own, 0.05, momentum=0.9)]


@dataclass(frozen=True)
class Case:
    """One way to train; ``trainer`` are arguments of Trainer."""

    trainer: dict[str, Any] = field(default_factory=dict)
    schedulers: tuple[str, ...] = ("cosine",)
    learning_rate: float = 0.01
    module: type[Net] = Net
    batch: int = 4
    patience: int = 9
    workers: int = 0
    augment: bool = False
    loader: Callable[[Dataset[Any]], Any] | None = None


def global_batches(dataset: Dataset[Any]) -> Any:
    """Return a loader with batches that do not depend on the number of ranks."""
    return DataLoader(dataset, batch_sampler=er.GlobalBatches(SAMPLES, 16, seed=5, micro_batch=4))


def elastic_sampler(dataset: Dataset[Any]) -> Any:
    """Return a loader with our sampler."""
    return DataLoader(dataset, batch_size=4, sampler=er.ElasticSampler(dataset, seed=5))  # type: ignore[arg-type]


CASES = {
    # Two batches in a step, an uneven last batch, a validation in the middle of a step, two schedulers.
    "rich": Case(
        {"accumulate_grad_batches": 2, "val_check_interval": 0.5, "gradient_clip_val": 1.0},
        ("cosine", "plateau"),
    ),
    "plain": Case(schedulers=("epoch",)),
    "max-steps": Case({"max_steps": 13, "max_epochs": -1}),
    "limited": Case({"limit_train_batches": 6, "accumulate_grad_batches": 2}, ("plateau",)),
    "early-stopping": Case(learning_rate=1.0, patience=1),
    "early-in-epoch": Case({"val_check_interval": 3}, learning_rate=1.0, patience=1),
    "every-3-steps": Case({"val_check_interval": 3, "check_val_every_n_epoch": None}, ("plateau-step",)),
    "bf16": Case({"precision": "bf16-mixed"}),
    "workers": Case(workers=2, augment=True),
    "augmented": Case(augment=True),
    "manual": Case(module=TwoNets),
    "global-batches": Case(loader=global_batches),
    "elastic-sampler": Case(loader=elastic_sampler),
    "no-sanity-check": Case(
        {
            "num_sanity_val_steps": 0,
            "max_epochs": 2,
            "enable_progress_bar": True,
            "enable_model_summary": True,
        }
    ),
}


class LogLogger(pl.loggers.logger.Logger):
    """Records what is logged."""

    name, version = "log", 0

    def __init__(self, log: JobLog) -> None:
        super().__init__()
        self.job_log = log

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        """Write exact numbers."""
        exact = {name: float(value).hex() for name, value in sorted(metrics.items())}
        self.job_log.write(step=step, logs=exact)

    def log_hyperparams(self, *_: Any, **__: Any) -> None:
        """Ignore them."""


class Observer(pl.Callback):
    """Comes to each place of the loop."""

    def __init__(self, log: JobLog) -> None:
        self.job_log = log


def _make_hook(name: str) -> Any:
    def hook(self: Any, trainer: Any, *_: Any) -> None:
        if not trainer.sanity_checking:
            self.job_log.kill_at(name, trainer.global_step)
            if name == "on_train_batch_start":
                drain = trainer.strategy.run._generation.drain_request
                self.job_log.pause_at(trainer.global_step, lambda: drain.requested)

    return hook


HOOKS = [
    *(f"on_{name}" for name in ("before_zero_grad", "before_backward", "after_backward", "save_checkpoint")),
    *("on_before_optimizer_step", "on_train_start", "on_train_end", "on_fit_start"),
    *(f"on_{kind}_epoch_{edge}" for kind in ("train", "validation") for edge in ("start", "end")),
    *(f"on_{kind}_batch_{edge}" for kind in ("train", "validation") for edge in ("start", "end")),
    *("on_validation_start", "on_validation_end"),
]
for _name in HOOKS:
    setattr(Observer, _name, _make_hook(_name))


def describe_file(path: Path) -> str:
    """Return a digest of the weights in a checkpoint of Lightning."""
    weights = torch.load(path, weights_only=True)["state_dict"]
    return state_dict.combine_digests({name: weights[name].tolist() for name in weights})


def main() -> None:
    """Train one case."""
    args = parse_arguments(CASES)
    case, log = CASES[args.case], JobLog(args)
    module = case.module(log, case)
    files = args.records / "lightning"
    callbacks: list[pl.Callback] = [Observer(log)]
    if case.module is Net:
        monitor: Any = {"monitor": "val_loss"}
        callbacks += [
            pl.callbacks.EarlyStopping(**monitor, patience=case.patience),
            pl.callbacks.ModelCheckpoint(files / "best", **monitor, save_top_k=2, save_last=True),
            pl.callbacks.ModelCheckpoint(files / "often", every_n_train_steps=3, save_top_k=-1),
        ]
    train = Points(SAMPLES, 1, augment=case.augment)
    loader = (case.loader or _make_plain_loader(case))(train)
    strategy = ElasticDDPStrategy(resume_options={"seed": 5}, restartable=args.restartable)
    trainer = pl.Trainer(
        **{
            "max_epochs": 3,
            "accelerator": "cpu",
            "strategy": strategy,
            "callbacks": callbacks,
            "logger": [
                LogLogger(log),
                pl.loggers.CSVLogger(args.records / "csv", flush_logs_every_n_steps=4),
            ],
            "log_every_n_steps": 2,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "enable_checkpointing": case.module is Net,
            "default_root_dir": str(args.records),
            **case.trainer,
        }
    )
    fitted: Any = trainer
    validation = DataLoader(Points(VALIDATION_SAMPLES, 2), batch_size=5)
    fitted.fit(module, loader, validation, ckpt_path="last")  # it finds one at a restart
    states = {one.state_key: one.state_dict() for one in fitted.callbacks}
    for state in states.values():
        for name in ("dirpath", "best_model_path", "kth_best_model_path", "last_model_path"):
            state.pop(name, None)
        state["best_k_models"] = sorted(map(float, state.pop("best_k_models", {}).values()))
    end = {
        # A restart gives all ranks the BatchNorm buffers of rank 0, until their next forward pass.
        "model": digest(module if log.rank == "0" else dict(module.named_parameters())),
        **{f"optimizer{number}": digest(one) for number, one in enumerate(trainer.optimizers)},
        "schedulers": str([config.scheduler.state_dict() for config in trainer.lr_scheduler_configs]),
        "callbacks": str(states),
        "metrics": {name: float(value).hex() for name, value in sorted(trainer.callback_metrics.items())},
        "step": trainer.global_step,
        "epoch": trainer.current_epoch,
        "position": list(vars(strategy.run.position).values()),
        "files": {str(path.relative_to(files)): describe_file(path) for path in sorted(files.rglob("*.ckpt"))}
        if trainer.is_global_zero
        else {},
        "rows": {
            str(path.relative_to(args.records)): path.read_text() for path in args.records.rglob("*.csv")
        }
        if trainer.is_global_zero
        else {},
    }
    log.write_end(**end)


def _make_plain_loader(case: Case) -> Callable[[Dataset[Any]], Any]:
    return lambda dataset: DataLoader(
        dataset, batch_size=case.batch, shuffle=True, num_workers=case.workers, persistent_workers=False
    )


if __name__ == "__main__":
    main()
    run_main.exit_without_freeing(0)  # freeing torch takes 0.4 s of processor time
