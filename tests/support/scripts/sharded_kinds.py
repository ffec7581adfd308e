"""Trains every kind of sharded model: uninterrupted, and resumed from the middle.

The ranks are two nodes of two. Each rank trains each kind for five steps and saves at the third. It then
builds everything again from other seeds, resumes, and trains the other two. Kinds that can stay do so in a
restartable function, whose world ends twice: each rank is then at another moment of a step. The script is
its own supervisor. It prints what differs at the end, for tests/integration/test_sharded.py.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import elastic_resume as er
from elastic_resume import failpoints
from elastic_resume.errors import ElasticResumeError
from elastic_resume.state import open_checkpoint, state_dict
from tests.support.own_supervisor import Supervisor, compare_kinds, count_world, leave

SAVED, END = 3, 5
WIDTH = 24
MOMENTS = (
    "forward", "between blocks", "last gradient", "first gradient", "clipped", "stepped", "torn", "step",
    "start",
)  # fmt: skip


class Net(nn.Module):
    """Two blocks with a normalization and dropout, and a head whose bias leaves one rank without a part."""

    calls: Tensor
    blocks: Any

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Dropout(0.1)) for _ in range(2)
        )
        self.head = nn.Linear(WIDTH, 1)
        self.register_buffer("calls", torch.zeros(()))
        self.reach: Callable[[str], None] = lambda _: None

    def forward(self, x: Tensor) -> Tensor:
        """Compute one number for each sample."""
        if self.training:
            self.calls.add_(1.0)
        for block in self.blocks:
            if block is self.blocks[1]:
                self.reach("between blocks")
            x = torch.tanh(block(x))
            if x.requires_grad:
                gradient = "first gradient" if block is self.blocks[1] else "last gradient"
                x.register_hook(lambda _, moment=gradient: self.reach(moment))
        return self.head(x)  # type: ignore[no-any-return]


class Tied(Net):
    """Two blocks share a weight, and two heads a bias, of which one rank has no part.

    So only the whole model is given to fully_shard().
    """

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1][0].weight = self.blocks[0][0].weight
        self.second_head = nn.Linear(WIDTH, 1)
        self.second_head.bias = self.head.bias

    def forward(self, x: Tensor) -> Tensor:
        """Compute the number with both heads."""
        second: Tensor = self.second_head(x)
        return super().forward(x) + second


class Frozen(Net):
    """The first block is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[0].requires_grad_(False)


class Rows(torch.optim.Optimizer):
    """Scales the gradient of each row by a state that is not of the parameter's shape.

    The number of steps is a plain tensor of the shape that the head's bias has.
    """

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Add up the squares of each row's gradients."""
        del closure
        for parameter in self.param_groups[0]["params"]:
            squares = parameter.grad.square()
            if parameter.dim() > 1:
                squares = squares.sum(1, keepdim=True)
            state = self.state[parameter]
            state["rows"] = state["rows"] + squares if state else squares
            state["count"] = state.get("count", torch.zeros(1)) + 1.0
            rate = 0.01 / state["count"].item()
            parameter.sub_(rate * parameter.grad / (state["rows"].sqrt() + 1e-3))


@dataclass(frozen=True)
class Kind:
    """How one kind is built and trained."""

    net: Callable[[], Any] = Net
    optimizer: Callable[[Any], Any] = lambda parameters: torch.optim.AdamW(parameters, lr=0.01)
    how: dict[str, Any] = field(default_factory=dict)  # of fully_shard
    mesh: Callable[[], Any] = er.shard_mesh
    prepare: Callable[[Any], Any] = lambda model: model  # before er.resume
    micro_batch: int | None = None

    @property
    def can_stay(self) -> bool:
        """Whether FSDP's groups are ours to make anew, and torch can drop an interrupted step."""
        return self.mesh is er.shard_mesh and hasattr(FSDPModule, "reset_iter_state")


def make_wide_mesh(*names: str) -> Any:
    """Return the mesh of HSDP, over which FSDP replicates by itself.

    torch takes a mesh for an equal one of an earlier world, so each world needs other ``names``.
    """
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=names or ("replicate", "shard"))


def make_deep_mesh() -> Any:
    """Return a mesh with a further dimension of size 1."""
    return init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("replicate", "shard", "tp"))[
        "replicate", "shard"
    ]


def compile_blocks(model: Any) -> Any:
    """Compile each block, as torchtitan does."""
    for block in model.blocks:
        block.compile(backend="aot_eager")
    return model


def scale_gradients(model: Any) -> Any:
    """Let the script divide by itself."""
    for part in (*model.blocks, model):
        part.set_gradient_divide_factor(2.0)
        part.set_force_sum_reduction_for_comms(True)  # gloo has no PREMUL_SUM
    return model


def add_teacher(model: Any) -> Any:
    """Let a frozen sharded model, which is not saved, compute what the head gets."""
    teacher: Any = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
    nn.init.eye_(teacher.weight)
    nn.init.ones_(teacher.bias)
    fully_shard(teacher, mesh=er.shard_mesh())
    model.head.register_forward_pre_hook(lambda _, inputs: (inputs[0] + teacher(inputs[0]),))
    return model


BFLOAT16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
KINDS = {
    "AdamW": Kind(),
    "fused, kept whole": Kind(
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=0.01, fused=True),
        how={"reshard_after_forward": False},
    ),
    "momentum, frozen": Kind(
        net=Frozen, optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    ),
    "one by one, tied": Kind(
        net=Tied, optimizer=lambda parameters: torch.optim.Adam(parameters, amsgrad=True, foreach=False)
    ),
    "rows": Kind(optimizer=Rows),
    "bfloat16, accumulated": Kind(how={"mp_policy": BFLOAT16}, micro_batch=2),
    "columns": Kind(how={"shard_placement_fn": lambda p: Shard(1) if p.dim() > 1 else Shard(0)}),
    "compiled": Kind(prepare=compile_blocks),
    "own factor": Kind(prepare=scale_gradients),
    "offloaded": Kind(how={"offload_policy": CPUOffloadPolicy(pin_memory=False)}),
    "with a teacher": Kind(prepare=add_teacher),
    "mesh of two dimensions": Kind(mesh=make_wide_mesh),
    "mesh of three dimensions": Kind(mesh=make_deep_mesh),
}


class Script:
    """One kind's objects, built as a script would, its run, and its training."""

    def __init__(
        self, name: str, directory: Path, seed: int, supervisor: Supervisor | None = None, number: int = 0
    ) -> None:
        """With a ``supervisor`` the function is restartable; ``number`` chooses where its worlds end."""
        count_world()
        kind = self.kind = KINDS[name]
        self.supervisor, self.number = supervisor, number
        torch.manual_seed(seed)
        self.model = kind.net()
        mesh = kind.mesh()
        for part in (*(() if kind.net is Tied else self.model.blocks), self.model):
            fully_shard(part, mesh=mesh, **kind.how)
        self.model = kind.prepare(self.model)
        self.optimizer = kind.optimizer(self.model.parameters())
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2)
        batches = er.GlobalBatches(96, 16, micro_batch=kind.micro_batch, seed=0)
        samples = torch.randn(96, WIDTH, generator=torch.Generator().manual_seed(0))
        self.loader: Any = torch.utils.data.DataLoader(
            torch.utils.data.TensorDataset(samples), batch_sampler=batches
        )
        self.run = er.resume(
            model=self.model, optimizer=self.optimizer, scheduler=self.scheduler, data=batches, seed=1,
            ckpt_dir=directory, run_id=name.replace(" ", "-").replace(",", ""), save_every=10**6,
            snapshot_every=1,
        )  # fmt: skip
        self.began = self.entered = self.run.position.step
        self.losses: dict[int, float] = {}
        if supervisor is not None:
            self.model.reach = self.reach
            failpoints.hit = lambda name, *_: self.reach(name)
            self.run.on_resume(lambda _: self.reach("start"))

    def reach(self, moment: str) -> None:
        """End the world if that is planned here."""
        if self.supervisor is not None:
            self.supervisor.reach(self, moment, MOMENTS, self.number + 2 * self.run.rank)

    @torch.no_grad()
    def tear(self) -> None:
        """Leave nothing as it was, like an optimizer in the middle of its step."""
        objects = state_dict.collect_objects({"model": self.model, "optimizer": self.optimizer})
        for leaf in state_dict.flatten(objects).leaves:
            leaf.tensor.fill_(1)
        for parameter in self.model.parameters():
            parameter.requires_grad_(not parameter.requires_grad)

    def train(self, until: int, save_at: int) -> None:
        """Step until step ``until``, in the first epoch."""
        train = self._train if self.supervisor is None else self.run.restartable(self._train)
        train(until, save_at)

    def _train(self, until: int, save_at: int) -> None:
        self.entered = self.run.position.step
        if self.kind.mesh is er.shard_mesh:
            self.run.replicate(self.model)
        self.run.begin_epoch()
        batches = self.run.micro_batches(self.loader)
        while self.run.position.step < until:
            self.optimizer.zero_grad()
            total = 0.0
            while True:
                (x,) = next(batches)
                self.reach("forward")
                loss = self.model(x).square().mean() * self.run.loss_weight
                loss.backward()
                total += loss.item()
                if self.run.last_micro_batch:
                    break
            nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
            self.reach("clipped")
            self.optimizer.step()
            self.reach("stepped")
            self.reach("torn")
            self.scheduler.step()
            self.run.step()
            self.losses[self.run.position.step] = total
            if self.run.position.step == save_at:
                self.path = self.run.save()
        self.run.assert_ranks_equal()

    def digests(self) -> dict[str, str]:
        """Return a digest of each tensor of this rank, and of the rest."""
        flat = state_dict.flatten(
            {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler}
        )
        return {**state_dict.digest_leaves(flat.leaves), "": state_dict.combine_digests(flat.structure)}


def compare(name: str, directory: Path, number: int, supervisor: Supervisor) -> dict[str, Any]:
    """Train one kind whole and in parts; return the differences."""
    seed = int(os.environ["RANK"])
    whole = Script(name, directory, seed)
    whole.train(SAVED, SAVED)
    full = {key: value.full_tensor() for key, value in whole.model.state_dict().items() if key != "calls"}
    is_whole = None
    if whole.path is not None:
        loaded = open_checkpoint.load(whole.path)
        is_whole = all(torch.equal(loaded[key], value) for key, value in full.items())
    whole.train(END, 0)
    plan = whole.run._generation.snapshot_scheduler.snapshotter._plan
    overlaps = plan is not None and not plan.copies_at_once
    first = whole.digests()
    leave(whole.run)
    supervisor.worlds = 0
    again = Script(name, directory, seed + 50, supervisor if whole.kind.can_stay else None, number)
    again.train(END, 0)
    second = again.digests()
    leave(again.run)
    return {
        "began": again.began,
        "differ": [key for key in {**first, **second} if first.get(key) != second.get(key)],
        "losses": all(whole.losses[step] == loss for step, loss in again.losses.items()),
        "loss": list(whole.losses.values()),
        "worlds": supervisor.worlds,
        "loaded": is_whole,
        "overlaps": overlaps,
    }


def shard_over_nodes(resume: Callable[..., Any]) -> None:
    """Shard over all ranks."""
    resume(fully_shard(Net(), mesh=init_device_mesh("cpu", (4,))))


def replicate_whole(resume: Callable[..., Any]) -> None:
    """Do not shard at all."""
    model = Net()
    resume(model).replicate(model)


def replicate_late(resume: Callable[..., Any]) -> None:
    """Shard a model that er.resume() has seen whole."""
    model = Net()
    run = resume(model)
    run.replicate(fully_shard(model, mesh=er.shard_mesh()))


def replicate_ignored(resume: Callable[..., Any]) -> None:
    """Leave a parameter whole."""
    model = Net()
    fully_shard(model, mesh=er.shard_mesh(), ignored_params={model.head.bias})
    resume(model).replicate(model)


def replicate_twice(resume: Callable[..., Any]) -> None:
    """Have FSDP replicate over the nodes too."""
    model = Net()
    resume(fully_shard(model, mesh=make_wide_mesh("nodes", "ranks"))).replicate(model)


def step_on_rank_0(resume: Callable[..., Any]) -> None:
    """Give the optimizer of rank 0 alone a state, as if it had loaded a checkpoint."""
    model: Any = Net()
    fully_shard(model, mesh=er.shard_mesh())
    optimizer = torch.optim.AdamW(model.parameters())
    if dist.get_rank() == 0:
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
    resume(model, optimizer=optimizer)


def shard_late(resume: Callable[..., Any]) -> None:
    """Shard a model that er.resume() has seen whole, and save it."""
    model = Net()
    run = resume(model)
    fully_shard(model, mesh=er.shard_mesh())
    run.begin_epoch()
    run.step()


def use_tensor_parallel(resume: Callable[..., Any]) -> None:
    """Divide weights over the ranks of the node in a dimension of tensor parallelism."""
    model = nn.Linear(WIDTH, WIDTH)
    mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("replicate", "shard", "tp"))
    placements = [Replicate(), Shard(0), Shard(0)]
    for name, value in list(model.named_parameters()):
        setattr(model, name, nn.Parameter(distribute_tensor(value.detach(), mesh, placements)))
    resume(model)


def ignore_on_own_mesh(resume: Callable[..., Any]) -> None:
    """Leave out one parameter, whose gradients nothing averages, and train a step."""
    model = nn.Linear(WIDTH, WIDTH)
    mesh = make_wide_mesh("nodes", "ranks")
    train_step(resume, fully_shard(model, mesh=mesh, ignored_params={model.bias}))


def forget_replicate(resume: Callable[..., Any]) -> None:
    """Train a step without gradients of the other node."""
    train_step(resume, fully_shard(nn.Linear(WIDTH, WIDTH), mesh=er.shard_mesh()))


def train_step(resume: Callable[..., Any], model: Any) -> None:
    """Train a step in which the ranks have different samples."""
    optimizer = torch.optim.AdamW(model.parameters())
    run = resume(model, optimizer=optimizer)
    model(torch.full((1, WIDTH), float(run.rank))).square().mean().backward()
    optimizer.step()
    run.step()


def save_other_steps(resume: Callable[..., Any]) -> None:
    """Save another step on rank 0."""
    run = resume(fully_shard(Net(), mesh=er.shard_mesh()))
    run._generation.snapshot_scheduler.await_all_ranks(int(run.rank == 0))


REFUSED = {
    "over nodes": shard_over_nodes,
    "whole": replicate_whole,
    "replicated late": replicate_late,
    "ignored": replicate_ignored,
    "replicated twice": replicate_twice,
    "step on rank 0": step_on_rank_0,
    "other steps saved": save_other_steps,
    "late": shard_late,
    "tensor parallelism": use_tensor_parallel,
    "FSDP1": lambda resume: resume(FullyShardedDataParallel(Net(), device_id=torch.device("cpu"))),
    "ignored on an own mesh": ignore_on_own_mesh,
    "not replicated": forget_replicate,
}


def refuse(name: str, directory: Path) -> str:
    """Return what a refused script is told; "" if it is not refused."""
    runs = []

    def resume(model: Any, **more: Any) -> Any:
        run_id = name.replace(" ", "-")
        runs.append(er.resume(model=model, ckpt_dir=directory, run_id=run_id, save_every=10**6, **more))
        return runs[0]

    try:
        REFUSED[name](resume)
    except ElasticResumeError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        for run in runs:
            run._release()
    return ""


def main(directory: Path, names: list[str]) -> None:
    """Train each kind whole and in parts; then try what is refused."""
    kinds = [(number, name) for number, name in enumerate(KINDS) if name in names or not names]
    results = compare_kinds(compare, directory, kinds)
    count_world()
    refused = {name: refuse(name, directory) for name in REFUSED if name in names or not names}
    print(json.dumps({"kinds": results, "refused": refused}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
