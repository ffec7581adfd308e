"""Trains with transformers' Trainer, for tests/integration/test_transformers.py.

``--case`` names what it trains and how. Each process records what it reads, computes and logs. A place of
``--kill`` (job_log.py) is a callback's hook, ``in_step``, ``in_save`` or ``in_last_log``, and its step the
finished steps.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import EarlyStoppingCallback, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
from transformers.trainer_callback import TrainerCallback
from transformers.trainer_utils import get_last_checkpoint

from elastic_resume.agent.workers import run_main
from elastic_resume.integrations.transformers import ElasticTrainer
from tests.support.scripts import fsdp_on_cpus
from tests.support.scripts.job_log import CLASSES, WIDTH, JobLog, Points, digest, parse_arguments

SAMPLES, EVALUATION_SAMPLES, TOKENS = 76, 20, 24
TIMES = ("runtime", "per_second")


class Classes(Points):
    """Points as dicts."""

    has_index = True

    def __getitem__(self, index: int) -> Any:
        inputs, label, _ = super().__getitem__(index)
        sample = {"inputs": inputs, "labels": label}
        return {**sample, "index": index} if self.has_index else sample


class Texts(Dataset[dict[str, Any]]):
    """Counting modulo a number, where a sample has fewer labels than tokens."""

    has_index = True

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, Any]:
        tokens = (torch.arange(8) * (1 + index % 3) + index) % TOKENS
        labels = tokens.clone()
        labels[: 1 + index % 5] = -100
        sample = {"input_ids": tokens, "labels": labels}
        return {**sample, "index": index} if self.has_index else sample


class Net(nn.Module):
    """Two layers with dropout. It returns its mean loss, and knows no num_items_in_batch."""

    def __init__(self, dropout: float = 0.2) -> None:
        super().__init__()
        self.first, self.drop, self.last = nn.Linear(WIDTH, 24), nn.Dropout(dropout), nn.Linear(24, CLASSES)

    def forward(self, inputs: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        """Return the scores, and the mean loss if there are labels."""
        scores = self.last(self.drop(torch.relu(self.first(inputs))))
        loss = {} if labels is None else {"loss": nn.functional.cross_entropy(scores, labels)}
        return {**loss, "logits": scores}


class NetWithKwargs(Net):
    """It takes num_items_in_batch and ignores it, as BertForSequenceClassification and many others do."""

    def forward(self, inputs: Tensor, labels: Tensor | None = None, **_: Any) -> dict[str, Tensor]:
        """Return the scores, and the mean loss if there are labels."""
        return super().forward(inputs, labels)


def make_llama() -> LlamaForCausalLM:
    """Make a language model of a few thousand parameters; its loss is per token of the whole step."""
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=TOKENS, max_position_embeddings=16, **sizes))


def summed_loss(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    """Return the loss of one batch as its part of the step's mean."""
    total = nn.functional.cross_entropy(outputs["logits"], labels, reduction="sum")
    return total / float(num_items_in_batch)


class Averaging(TrainerCallback):
    """Holds an average of the weights and counts, without a state() that would show them."""

    def __init__(self) -> None:
        self.updates, self.by_epoch = 0, {0: 0}
        self.average = torch.zeros(8)

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Begin to count."""
        del args, control
        self.by_epoch[int(state.epoch)] = 0

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        """Count, and average some weights."""
        del args, control
        self.updates += 1
        self.by_epoch[max(self.by_epoch)] += state.global_step
        self.average.mul_(0.9).add_(next(model.parameters()).detach().flatten()[:8], alpha=0.1)


class EpochStopper(TrainerCallback):
    """Ends each epoch after its third step."""

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Stop the epoch."""
        del args
        control.should_epoch_stop = state.global_step % 3 == 0


@dataclass(frozen=True)
class Case:
    """One way to train. ``arguments`` are those of TrainingArguments."""

    arguments: dict[str, Any] = field(default_factory=dict)
    global_batch: int = 12
    is_text: bool = False
    augment: bool = False
    dropout: float = 0.2
    net: type[Net] = Net
    callbacks: tuple[Any, ...] = ()
    trainer: dict[str, Any] = field(default_factory=dict)


BEST = {"load_best_model_at_end": True, "metric_for_best_model": "loss", "save_total_limit": 2}
EVALUATED = {"eval_strategy": "steps", "eval_steps": 3, "save_steps": 3}
CASES = {
    # Accumulation (two or three batches in a step), an uneven last batch, evaluation, the best model.
    "rich": Case({**EVALUATED, **BEST}, callbacks=(EarlyStoppingCallback(9),)),
    # The same if three ranks begin.
    "derived": Case({**EVALUATED, **BEST}, global_batch=0, callbacks=(EarlyStoppingCallback(9),)),
    "tokens": Case({**EVALUATED, "max_grad_norm": 0.5}, is_text=True),
    # The last batch of an epoch has one sample, so other ranks read a sample that does not count.
    "sparse": Case({"logging_steps": 3}, global_batch=5, dropout=0.0),
    "sparse-kwargs": Case(
        {"logging_steps": 3, "eval_strategy": "epoch"}, global_batch=5, dropout=0.0, net=NetWithKwargs
    ),
    "sparse-tokens": Case({"logging_steps": 3}, global_batch=5, is_text=True),
    "epochs": Case({"eval_strategy": "epoch", "save_strategy": "epoch", "logging_strategy": "epoch", **BEST}),
    "max-steps": Case({"eval_strategy": "epoch", "logging_strategy": "epoch", "max_steps": 10}),
    "early-stopping": Case(
        {**EVALUATED, **BEST, "learning_rate": 1.0, "num_train_epochs": 4},
        callbacks=(EarlyStoppingCallback(1),),
    ),
    "stopped-epochs": Case({"num_train_epochs": 4}, callbacks=(EpochStopper(),)),
    "bf16": Case({**EVALUATED, "bf16": True}),
    "workers": Case({"dataloader_num_workers": 2}, augment=True),
    "augmented": Case(augment=True),
    "plateau": Case(
        {**EVALUATED, "lr_scheduler_type": "reduce_lr_on_plateau", "metric_for_best_model": "loss"}
    ),
    "own-loss": Case(trainer={"compute_loss_func": summed_loss}),
    "dropped": Case({"dataloader_drop_last": True, "train_sampling_strategy": "sequential"}),
    "eval-on-start": Case({**EVALUATED, "eval_on_start": True, "optim": "adafactor"}),
    # FSDP2 over the ranks of each node.
    "sharded": Case({**EVALUATED, **BEST, "fsdp": True, "num_train_epochs": 1}, is_text=True),
}


HOOKS = [name for name in dir(TrainerCallback) if name.startswith("on_") and name != "on_init_end"]


class Observer(TrainerCallback):
    """Records logs, kills at its places, and waits at its pauses until the test lets it go on."""

    trainer: Any

    def __init__(self, log: JobLog) -> None:
        self.job_log = log


def is_time(key: str) -> bool:
    """Return whether a logged value was measured by a clock."""
    return any(time in key for time in TIMES)


def _make_hook(name: str) -> Any:
    def hook(self: Any, args: Any, state: Any, control: Any, **more: Any) -> None:
        del args, control
        if name == "on_log":
            logs = {k: v for k, v in more["logs"].items() if not is_time(k)}
            self.job_log.write(step=state.global_step, logs=logs)
            if "train_loss" in logs:
                self.job_log.kill_at("in_last_log", state.global_step)
        if name == "on_train_begin":
            self.job_log.write(step=state.global_step, logger=os.environ["WANDB_RUN_ID"])
        self.job_log.kill_at(name, state.global_step)
        if name == "on_step_begin":
            drain = self.trainer.elastic_run._generation.drain_request
            self.job_log.pause_at(state.global_step, lambda: drain.requested)

    return hook


for _name in HOOKS:
    setattr(Observer, _name, _make_hook(_name))


class Observed(ElasticTrainer, Trainer):
    """Records each batch and its loss, and the state at the end of training."""

    job_log: JobLog

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Record the samples and the loss."""
        indices = inputs.pop("index").tolist()
        loss: Tensor = super().training_step(model, inputs, num_items_in_batch)
        assert self.elastic_run is not None
        step, generation = self.state.global_step + 1, self.elastic_run.generation
        self.job_log.write(step=step, generation=generation, read=indices, loss=float(loss).hex())
        self.job_log.kill_at("in_step", self.state.global_step)
        return loss

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        super()._save(output_dir, state_dict)
        self.job_log.kill_at("in_save", self.state.global_step)

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        objects = {"model": self.model, "optimizer": self.optimizer, "scheduler": self.lr_scheduler}
        digests = {name: digest(item) for name, item in objects.items()}
        output = super()._finalize_training(*args, **kwargs)
        assert self.elastic_run is not None
        end = {
            **digests,
            "model that is kept": digest(self.model),
            "step": output.global_step,
            "train_loss": output.training_loss.hex(),
            "epoch": self.state.epoch,
            "flos": self.state.total_flos,
            "best": [self.state.best_metric, self.state.best_global_step],
            "counters": [
                vars(one).get("early_stopping_patience_counter") for one in self.callback_handler.callbacks
            ],
            "log": [{k: v for k, v in e.items() if not is_time(k)} for e in self.state.log_history],
            "averages": [
                [one.updates, one.by_epoch, one.average.tolist()]
                for one in self.callback_handler.callbacks
                if isinstance(one, Averaging)
            ],
        }
        self.job_log.write_end(**end)
        return output


def main() -> None:
    """Train one case."""
    args = parse_arguments(CASES)
    case, log = CASES[args.case], JobLog(args)
    observer = Observer(log)
    Observed.elastic_global_batch, Observed.job_log = case.global_batch, log
    settings: dict[str, Any] = {
        "output_dir": str(args.records / "output"),
        "num_train_epochs": 2,
        "per_device_train_batch_size": 4,
        "learning_rate": 0.01,
        "lr_scheduler_type": "cosine",
        "logging_steps": 2,
        "save_strategy": "steps" if "eval_steps" in case.arguments else "no",
        "seed": 5,
        "use_cpu": True,
        "report_to": "none",
        "disable_tqdm": True,
        "remove_unused_columns": False,
    }
    if args.case == "sharded":
        fsdp_on_cpus.allow()
        settings["parallelism_config"] = fsdp_on_cpus.shard_over_each_node()
    train: Dataset[Any] = Texts(SAMPLES) if case.is_text else Classes(SAMPLES, 1, augment=case.augment)
    evaluation: Any = Texts(EVALUATION_SAMPLES) if case.is_text else Classes(EVALUATION_SAMPLES, 2)
    evaluation.has_index = False
    trainer = observer.trainer = Observed(
        model=make_llama() if case.is_text else case.net(case.dropout),
        args=TrainingArguments(**{**settings, **case.arguments}),
        train_dataset=train,
        eval_dataset=evaluation,
        callbacks=[*case.callbacks, *([] if args.case == "sharded" else [Averaging()]), observer],
        **case.trainer,
    )
    output = Path(settings["output_dir"])  # as many scripts have it: empty at the first start
    trainer.train(resume_from_checkpoint=get_last_checkpoint(output) if output.is_dir() else None)


if __name__ == "__main__":
    main()
    run_main.exit_without_freeing(0)  # freeing torch takes 0.4 s of processor time
