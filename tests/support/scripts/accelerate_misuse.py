"""Uses Accelerate wrongly in several ways on two ranks, and prints the error of each as one line."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import DataLoaderConfiguration
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import elastic_resume as er
from elastic_resume.errors import ElasticResumeError
from elastic_resume.integrations.accelerate import prepare

NUMBERS = itertools.count()
DATASET = TensorDataset(torch.randn(96, 8), torch.arange(96) % 2)


def make_accelerator(**arguments: Any) -> Accelerator:
    """Make an accelerator that shares no state with those before."""
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    return Accelerator(**arguments)


def make_loader(**arguments: Any) -> DataLoader[Any]:
    """Make a loader of our batches."""
    return DataLoader(DATASET, batch_sampler=er.GlobalBatches(96, 12, **arguments))


def make_run(accelerator: Accelerator, data: Any) -> tuple[er.Run, Any, Any]:
    """Prepare a new job."""
    model = nn.Linear(8, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    name = f"{sys.argv[1]}-{next(NUMBERS)}"
    prepared = prepare(accelerator, model=model, optimizer=optimizer, data=data, run_id=name)
    return prepared.run, prepared.model, prepared.optimizer


def without_cpu() -> None:
    """Each rank would train alone."""
    make_run(make_accelerator(), make_loader())


def prepared_loader(**arguments: Any) -> None:
    """The loader that prepare() gets was prepared."""
    accelerator = make_accelerator(cpu=True, **arguments)
    make_run(accelerator, accelerator.prepare(make_loader()))


def dispatched_loader() -> None:
    """Rank 0 reads for all, and divides its own share."""
    prepared_loader(dataloader_config=DataLoaderConfiguration(dispatch_batches=True, split_batches=True))


def prepared_behind_our_back() -> None:
    """The loader was prepared by another accelerator, and prepare() gets the batches."""
    loader = make_loader()
    batches = loader.batch_sampler
    other = make_accelerator(cpu=True).prepare(loader)
    accelerator = make_accelerator(cpu=True)
    run, model, optimizer = make_run(accelerator, batches)
    with run:
        for _ in run.epochs(2):
            for inputs, labels in other:
                accelerator.backward(nn.functional.cross_entropy(model(inputs), labels))
                optimizer.step()
                optimizer.zero_grad()
                run.step()


def accumulation_without_micro_batches() -> None:
    """Nothing would be accumulated."""
    make_run(make_accelerator(cpu=True, gradient_accumulation_steps=4), make_loader())


def after_prepare(name: str, *arguments: Any) -> None:
    """A method that is refused from then on."""
    accelerator = make_accelerator(cpu=True)
    loader = make_loader()
    run, _, _ = make_run(accelerator, loader)
    with run:
        getattr(accelerator, name)(*(arguments or (loader,)))


def backward_without_accumulate() -> None:
    """The first micro-batch would become a step."""
    loader = make_loader(micro_batch=2)
    accelerator = make_accelerator(cpu=True)
    run, model, _ = make_run(accelerator, loader)
    with run:
        for _ in run.epochs(1):
            for inputs, labels in run.micro_batches(loader):
                accelerator.backward(nn.functional.cross_entropy(model(inputs), labels))


def plain_backward() -> None:
    """The loss has no weight."""
    loader = make_loader()
    run, model, optimizer = make_run(make_accelerator(cpu=True), loader)
    with run:
        for _ in run.epochs(1):
            for inputs, labels in loader:
                nn.functional.cross_entropy(model(inputs), labels).backward()
                optimizer.step()


def own_loader(**arguments: Any) -> DataLoader[Any]:
    """Make a loader as scripts for Accelerate do."""
    return DataLoader(DATASET, batch_size=6, shuffle=True, **arguments)


def prepared_own_loader() -> None:
    """Each process would divide its own share."""
    accelerator = make_accelerator(cpu=True)
    make_run(accelerator, accelerator.prepare(own_loader(drop_last=True)))


def loads_while_it_trains() -> None:
    """An older state in the place of the one that is trained."""
    accelerator = make_accelerator(cpu=True)
    run, _, _ = make_run(accelerator, own_loader())
    with run:
        for _ in run.epochs(1):
            accelerator.load_state("folder")


def skips_at_the_start() -> None:
    """There is nothing that was read before."""
    accelerator, loader = make_accelerator(cpu=True), own_loader()
    make_run(accelerator, loader)
    accelerator.skip_first_batches(loader, 3)


def saves_on_main_process_only() -> None:
    """Nobody waits for the other ranks: in a step, at the end of an epoch and at the end."""
    accelerator, loader = make_accelerator(cpu=True, gradient_accumulation_steps=2), own_loader()
    run, model, optimizer = make_run(accelerator, loader)
    with run:
        for epoch in run.epochs(2):
            for inputs, labels in loader:
                with accelerator.accumulate(model):
                    accelerator.backward(nn.functional.cross_entropy(model(inputs), labels))
                    optimizer.step()
                    optimizer.zero_grad()
                if accelerator.sync_gradients:
                    if accelerator.is_main_process:
                        accelerator.save_state(f"{sys.argv[2]}/step")
                    run.step()
            if accelerator.is_main_process:
                accelerator.save_state(f"{sys.argv[2]}/epoch-{epoch}")
        if accelerator.is_main_process:
            accelerator.save_state(f"{sys.argv[2]}/end")
            accelerator.load_state(f"{sys.argv[2]}/epoch-0")  # the best one, say


CASES: dict[str, Callable[[], None]] = {
    "without cpu=True": without_cpu,
    "prepared loader": prepared_loader,
    "dispatched loader": dispatched_loader,
    "prepared by another accelerator": prepared_behind_our_back,
    "accumulation without micro_batch": accumulation_without_micro_batches,
    "prepare(loader) afterwards": lambda: after_prepare("prepare"),
    "load_state": loads_while_it_trains,
    "skip_first_batches of own loader": skips_at_the_start,
    "prepared own loader": prepared_own_loader,
    "register_for_checkpointing": lambda: after_prepare("register_for_checkpointing", er),
    "backward without accumulate": backward_without_accumulate,
    "plain backward": plain_backward,
    "save_state on the main process": saves_on_main_process_only,
}


def main() -> None:
    """Try each case."""
    torch.set_num_threads(1)
    for name, case in CASES.items():
        try:
            case()
        except ElasticResumeError as error:
            print(f"{name}: {type(error).__name__}: {error}", flush=True)
        else:
            print(f"{name}: no error", flush=True)


if __name__ == "__main__":
    main()
