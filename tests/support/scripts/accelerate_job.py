"""Trains with Accelerate in the way that its options name, for tests/integration/test_accelerate.py.

``accelerate_job.py DIRECTORY [OPTION ...]``. Each rank records in DIRECTORY what it reads, its losses,
learning rates and metrics, and the state at the end. The loop passes failpoints named ``job.PLACE`` at which
a test kills it.

Options: ``accumulate`` (several micro-batches per step), ``bf16``, ``workers`` (two in each loader),
``sampler`` (an `ElasticSampler`), ``pair`` (two models and optimizers), ``max-steps``, ``stop`` (early),
``sharded`` (FSDP2 over the ranks of each node, for two epochs).
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import FullyShardedDataParallelPlugin
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, TensorDataset

import elastic_resume as er
from elastic_resume import failpoints
from elastic_resume.agent.workers import run_main
from elastic_resume.integrations.accelerate import prepare
from elastic_resume.state import state_dict
from tests.support.scripts import fsdp_on_cpus

# The last step has two samples: fewer than ranks.
SAMPLES, BATCH, EPOCHS = 98, 16, 3
STEPS_PER_EPOCH = -(-SAMPLES // BATCH)
EVALUATE_EVERY, SAVE_EVERY = 4, 5
MAX_STEPS, PATIENCE = 17, 2
MARGIN = 0.05  # of the loss, by which a better model must be better


class Stopper:
    """Stops when the metric gets no better, and keeps the weights that were best."""

    def __init__(self, model: nn.Module) -> None:
        self.best_loss, self.bad, self.is_over = float("inf"), 0, False
        self.weights = {name: value.clone() for name, value in model.state_dict().items()}

    def update(self, loss: float, model: nn.Module) -> None:
        """Compare ``loss`` with the best one."""
        if loss < self.best_loss - MARGIN:
            self.best_loss, self.bad = loss, 0
            for name, value in model.state_dict().items():
                self.weights[name].copy_(value.full_tensor() if isinstance(value, DTensor) else value)
        else:
            self.bad += 1
            self.is_over = self.bad > PATIENCE

    def state_dict(self) -> dict[str, Any]:
        """Return the numbers; the weights are tracked as tensors."""
        return {"best_loss": self.best_loss, "bad": self.bad, "is_over": self.is_over}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set the numbers."""
        self.__dict__.update(state)


def make_dataset(size: int, seed: int) -> TensorDataset:
    """Make random samples that contain their index."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(size, 8, generator=generator)
    return TensorDataset(inputs, (inputs.sum(1) > 0).long(), torch.arange(size))


def make_loader(options: set[str]) -> DataLoader[tuple[Tensor, ...]]:
    """Make the loader of our batches."""
    dataset = make_dataset(SAMPLES, 3)
    workers = 2 if "workers" in options else 0
    if "sampler" in options:
        return DataLoader(
            dataset, batch_size=6, sampler=er.ElasticSampler(dataset, seed=3), num_workers=workers
        )
    micro = 2 if "accumulate" in options else None
    batches = er.GlobalBatches(SAMPLES, BATCH, seed=3, micro_batch=micro)
    return DataLoader(dataset, batch_sampler=batches, num_workers=workers)


class Job:
    """The loop, and what it records."""

    def __init__(self, directory: Path, options: set[str]) -> None:
        self.options, self.directory = options, directory
        sharding: dict[str, Any] = {}
        if "sharded" in options:
            fsdp_on_cpus.allow()
            sharding = {
                "fsdp_plugin": FullyShardedDataParallelPlugin(
                    fsdp_version=2, auto_wrap_policy="size_based_wrap", min_num_params=20
                ),
                "parallelism_config": fsdp_on_cpus.shard_over_each_node(),
            }
        self.accelerator = Accelerator(
            cpu=True,
            mixed_precision="bf16" if "bf16" in options else "no",
            gradient_accumulation_steps=3 if "accumulate" in options else 1,
            **sharding,
        )
        torch.manual_seed(1 + self.accelerator.process_index)  # the job takes rank 0's weights
        names = ["a", "b"] if "pair" in options else ["a"]
        models: Any = {
            name: nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Dropout(0.2), nn.Linear(12, 2))
            for name in names
        }
        optimizers: Any = {
            name: torch.optim.AdamW(model.parameters(), lr=0.02) for name, model in models.items()
        }
        schedulers: Any = {
            name: torch.optim.lr_scheduler.LambdaLR(one, lambda step: 0.9**step)
            for name, one in optimizers.items()
        }
        self.stopper = Stopper(models["a"])
        self.accelerator.register_for_checkpointing(self.stopper)
        self.loader = make_loader(options)
        test = DataLoader(make_dataset(31, 4), batch_size=4, num_workers=self.loader.num_workers)
        self.test_loader = self.accelerator.prepare(test)
        if sharding:  # Accelerate shards one model
            models, optimizers = models["a"], optimizers["a"]
        self.run, models, optimizers, self.schedulers = prepare(
            self.accelerator,
            model=models,
            optimizer=optimizers,
            scheduler=schedulers,
            data=self.loader,
            track={"best": self.stopper.weights},
            seed=5,
        )
        self.models: Any = {"a": models} if sharding else models
        self.optimizers: Any = {"a": optimizers} if sharding else optimizers
        self.accelerator.register_save_state_pre_hook(lambda *_: self.hit("save"))
        path = directory / f"g{self.run.generation}-r{self.run.rank}.jsonl"
        self.log_fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def hit(self, place: str) -> None:
        """Pass a failpoint in the step that is being made."""
        failpoints.hit(f"job.{place}", self.run.position.step + 1)

    def record(self, kind: str, **values: Any) -> None:
        """Write one line."""
        line = {"kind": kind, "step": self.run.position.step, **values}
        os.write(self.log_fd, (json.dumps(line) + "\n").encode())

    def train(self) -> None:
        """Train to the end, or until there is a reason to stop."""
        for _ in self.run.epochs(2 if "sharded" in self.options else EPOCHS):
            if not self.train_epoch():
                break
            self.hit("epoch-end")
            self.evaluate("epoch")
        self.run.close()

    def train_epoch(self) -> bool:
        """Train the rest of an epoch; return whether training goes on."""
        losses, read = [], []
        for inputs, labels, numbers in self.run.micro_batches(self.loader):
            is_enough = "max-steps" in self.options and self.run.position.step >= MAX_STEPS
            if is_enough or ("stop" in self.options and self.stopper.is_over):
                return False
            self.hit("begin")
            with self.accelerator.accumulate(*self.models.values()):
                losses += [self.learn(name, inputs, labels) for name in self.models]
            read += numbers.tolist()
            if self.accelerator.sync_gradients:
                self.end_step(losses, read)
                losses, read = [], []
        return True

    def learn(self, name: str, inputs: Tensor, labels: Tensor) -> str:
        """Learn from one batch; return the loss, exactly."""
        model, optimizer, scheduler = self.models[name], self.optimizers[name], self.schedulers[name]
        loss: Tensor = nn.functional.cross_entropy(model(inputs), labels)
        self.hit("forward")
        self.accelerator.backward(loss)
        self.hit("backward")
        if self.accelerator.sync_gradients:
            self.accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        return float(loss).hex()

    def end_step(self, losses: list[str], read: list[int]) -> None:
        """Do what belongs to the step, and commit it."""
        self.hit("stepped")
        number = self.run.position.step + 1
        if number % EVALUATE_EVERY == 0:
            self.evaluate("evaluation")
        if number % SAVE_EVERY == 0:
            self.accelerator.save_state(str(self.directory / "project" / f"step-{number}"))
            self.record("saved", folders=self.list_saved())
        rates = [scheduler.get_last_lr() for scheduler in self.schedulers.values()]
        self.record("step", losses=losses, read=read, rates=rates)
        self.accelerator.log({"loss": float.fromhex(losses[-1])}, step=number)
        self.hit("logged")
        self.accelerator.log({"rate": rates[0][0], "text": "left out"})
        self.hit("recorded")
        self.run.step()
        self.hit("told")

    def list_saved(self) -> list[str]:
        """Return the names of the folders of save_state()."""
        found = (path.name for path in (self.directory / "project").iterdir())
        return sorted(name for name in found if name == "end" or name.startswith("step-"))

    @torch.no_grad()
    def evaluate(self, kind: str) -> None:
        """Evaluate the first model on all test samples."""
        model = self.models["a"]
        model.eval()
        losses = []
        for number, (inputs, labels, _) in enumerate(self.test_loader):
            loss = nn.functional.cross_entropy(model(inputs), labels, reduction="none")
            losses.append(self.accelerator.gather_for_metrics(loss))
            if number == 1:
                self.hit("evaluation")
        model.train()
        total = torch.cat(losses).double().mean()
        self.stopper.update(float(total), self.accelerator.unwrap_model(model))
        self.record(kind, loss=float(total).hex(), bad=self.stopper.bad, count=len(torch.cat(losses)))
        self.accelerator.log(
            {f"{kind}/loss": total}, step=self.run.position.step if kind == "epoch" else None
        )

    def finish(self) -> None:
        """Load the best weights, and write the state of this rank."""
        items = {
            "model": self.models,
            "optimizer": self.optimizers,
            "scheduler": self.schedulers,
            "stopper": self.stopper,
            "best": self.stopper.weights,
        }
        flat = state_dict.flatten(state_dict.collect_objects(items))
        digests = {**state_dict.digest_leaves(flat.leaves), "": json.dumps(flat.structure)}
        if "sharded" not in self.options:
            self.accelerator.unwrap_model(self.models["a"]).load_state_dict(self.stopper.weights)
        self.evaluate("end")
        self.accelerator.save_state(str(self.directory / "project" / "end"))
        end = {"step": self.run.position.step, "digests": digests, "saved": self.list_saved()}
        (self.directory / f"end-{self.run.rank}.json").write_text(json.dumps(end))


def main() -> None:
    """Train, and write the end."""
    torch.set_num_threads(1)
    job = Job(Path(sys.argv[1]), set(sys.argv[2:]))
    job.train()
    job.finish()


if __name__ == "__main__":
    main()
    run_main.exit_without_freeing(0)  # freeing torch takes 0.4 s of processor time
