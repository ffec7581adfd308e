"""A training by transformers' Trainer in this process, which an exception can leave, and what it counts."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import TrainerCallback, TrainingArguments
from transformers.integrations import TensorBoardCallback
from transformers.trainer_utils import get_last_checkpoint

from elastic_resume.integrations import transformers as integration
from elastic_resume.state.diff import MEASURED

__all__ = ["TensorBoardCallback", "get_last_checkpoint"]

STEPS = 8


class LeftError(Exception):
    """The end of a process."""


class Samples:
    """Points of two classes."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(index)
        return {"inputs": torch.randn(4, generator=generator), "labels": torch.tensor(index % 2)}


class Net(nn.Module):
    """A model that counts its own calls."""

    def __init__(self) -> None:
        super().__init__()
        self.scores, self.calls = nn.Linear(4, 2), 0

    def forward(self, inputs: Tensor, labels: Tensor, **_: Any) -> dict[str, Tensor]:
        """Return the mean loss; **kwargs seems to take num_items_in_batch."""
        self.calls += self.training
        scores = self.scores(inputs)
        return {"loss": nn.functional.cross_entropy(scores, labels), "logits": scores}


class Counting(integration.Trainer):
    """Logs as TRL's trainers do."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._metrics: dict[str, Any] = {"train": defaultdict(list), "eval": defaultdict(list)}
        self._total = 0

    def compute_loss(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Note the mean of the inputs, and their number."""
        mode = "train" if model.training else "eval"
        self._metrics[mode]["mean"].append(float(inputs["inputs"].mean()))
        self._total += len(inputs["inputs"]) * model.training
        self._metrics[mode]["total"] = [self._total]
        return super().compute_loss(model, inputs, *args, **kwargs)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add the means of this mode."""
        mode = "train" if self.model.training else "eval"
        means = {key: sum(values) / len(values) for key, values in self._metrics[mode].items()}
        super().log({**logs, **{f"{mode}_{key}": mean for key, mean in means.items()}}, start_time)
        self._metrics[mode].clear()


class Meter:
    """An object of the script's own."""

    def __init__(self) -> None:
        self.sum = 0.0


class Average(TrainerCallback):
    """Holds averages of the weights, and counts. It has no state()."""

    def __init__(self) -> None:
        self.updates, self.meters, self.in_epoch = 0, {"a": Meter()}, 0
        self.shadow: dict[str, Tensor] = {}
        self.average = torch.optim.swa_utils.AveragedModel(Net())

    def on_train_begin(self, *_: Any, model: Any, **__: Any) -> None:
        """Begin to count, in each process."""
        self.updates, self.shadow = 0, {name: p.detach().clone() for name, p in model.named_parameters()}

    def on_epoch_begin(self, *_: Any, **__: Any) -> None:
        """Begin to count within the epoch."""
        self.in_epoch = 0

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        """Count."""
        del args, control
        self.updates, self.in_epoch = self.updates + 1, self.in_epoch + 1
        self.meters["a"].sum += state.global_step
        self.average.update_parameters(model)
        for name, parameter in model.named_parameters():
            self.shadow[name] = 0.5 * self.shadow[name] + 0.5 * parameter.detach()

    def read(self) -> Any:
        """Return all of it."""
        averages = [{name: t.tolist() for name, t in self.shadow.items()}]
        averages += [{name: t.tolist() for name, t in self.average.state_dict().items()}]
        return [self.updates, self.in_epoch, self.meters["a"].sum, averages]


def _leave(name: str) -> Callable[..., None]:
    def hook(self: Leaving, args: Any, state: Any, control: Any, **_: Any) -> None:
        del args, control
        if self.left_at == f"{name}@{state.global_step}":
            raise LeftError

    return hook


class Leaving(TrainerCallback):
    """Leaves the training; it comes after the others."""

    def __init__(self, left_at: str) -> None:
        self.left_at = left_at


for _name in ("on_step_end", "on_log", "on_evaluate", "on_epoch_end", "on_save"):
    setattr(Leaving, _name, _leave(_name))


class Job:
    """One directory, and the Trainers of its processes, one after the other."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def train(
        self,
        left_at: str = "",
        start: Any = None,
        kind: type[Any] = Counting,
        average: Callable[..., Average] = Average,
        loggers: tuple[Any, ...] = (),
        **settings: Any,
    ) -> tuple[Any, Average]:
        """Train to the end, or until the training is left at "HOOK@STEP"."""
        torch.manual_seed(7)
        names = {"ckpt_dir": self.directory / "ckpt", "run_id": "job", "node_name": "n"}
        callback = average()
        arguments: dict[str, Any] = {
            "logging_steps": 3,
            "eval_strategy": "steps",
            "eval_steps": 2,
            "num_train_epochs": 2,
            "per_device_train_batch_size": 2,
            "gradient_accumulation_steps": 2,
            "seed": 3,
            "report_to": "none",
            "use_cpu": True,
            "disable_tqdm": True,
            "save_strategy": "no",
        }
        args = TrainingArguments(str(self.directory / "output"), **{**arguments, **settings})
        callbacks = [callback, *loggers, Leaving(left_at)]
        trainer = kind(Net(), args, train_dataset=Samples(), eval_dataset=Samples(), callbacks=callbacks)
        trainer.elastic_options = {**names, "save_every": 1, "snapshot_every": 1}
        try:
            trainer.train(start)
        except LeftError:
            trainer.elastic_run._release()
        assert (trainer.state.global_step == STEPS) == (not left_at)
        return trainer, callback


def read(trainer: Any, callback: Average) -> Any:
    """Return what must be equal."""
    log = [{k: v for k, v in each.items() if not MEASURED.search(k)} for each in trainer.state.log_history]
    own = trainer._total, trainer._metrics, trainer.model.calls
    return json.loads(json.dumps([log, own, callback.read()]))


class Calls:
    """Metrics that keep a count."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, _: Any) -> dict[str, float]:
        """Count."""
        self.count += 1
        return {"calls": float(self.count)}


class Levels(Samples):
    """A dataset whose samples grow, as the script says."""

    level = 0

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Return a sample of this level."""
        sample = super().__getitem__(index)
        return {**sample, "inputs": sample["inputs"] * (1 + self.level / 10)}


class Curriculum(Counting):
    """Changes its dataset in training."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.train_dataset, self.compute_metrics = Levels(), Calls()

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Make the next samples larger."""
        self.train_dataset.level += 1
        return super().training_step(*args, **kwargs)
