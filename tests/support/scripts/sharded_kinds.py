"""Trains every kind of sharded model: uninterrupted, and resumed from the middle.

The ranks are two nodes of two. Each rank trains each kind for six steps and saves at the third. It then
builds everything again from other seeds, resumes, and trains the other three. It prints what differs at the
end, and the errors of models that are refused, for tests/integration/test_sharded.py.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
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
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import elastic_resume as er
from elastic_resume.errors import ElasticResumeError
from elastic_resume.state import open_checkpoint, state_dict

SAVED, END = 3, 6
WIDTH = 24


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

    def forward(self, x: Tensor) -> Tensor:
        """Compute one number for each sample."""
        if self.training:
            self.calls.add_(1.0)
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.head(x)  # type: ignore[no-any-return]


class Tied(Net):
    """Both blocks share a weight, so only the whole model is given to fully_shard()."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1][0].weight = self.blocks[0][0].weight


class Frozen(Net):
    """The first block is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[0].requires_grad_(False)


class Rows(torch.optim.Optimizer):
    """Scales the gradient of each row by a state that is not of the parameter's shape."""

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
            parameter.sub_(0.01 * parameter.grad / (state["rows"].sqrt() + 1e-3))


@dataclass(frozen=True)
class Kind:
    """How one kind is built and trained."""

    net: Callable[[], Any] = Net
    optimizer: Callable[[Any], Any] = lambda parameters: torch.optim.AdamW(parameters, lr=0.01)
    how: dict[str, Any] = field(default_factory=dict)  # of fully_shard
    mesh: Callable[[], Any] = er.shard_mesh
    prepare: Callable[[Any], Any] = lambda model: model  # before er.resume
    micro_batch: int | None = None


def make_wide_mesh() -> Any:
    """Return the mesh of HSDP, over which FSDP replicates by itself."""
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))


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


BFLOAT16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
KINDS = {
    "AdamW": Kind(),
    "fused": Kind(optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=0.01, fused=True)),
    "momentum": Kind(optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9)),
    "one by one": Kind(
        optimizer=lambda parameters: torch.optim.Adam(parameters, amsgrad=True, foreach=False)
    ),
    "rows": Kind(optimizer=Rows),
    "kept whole": Kind(how={"reshard_after_forward": False}),
    "bfloat16": Kind(how={"mp_policy": BFLOAT16}),
    "columns": Kind(how={"shard_placement_fn": lambda p: Shard(1) if p.dim() > 1 else Shard(0)}),
    "tied": Kind(net=Tied),
    "frozen": Kind(net=Frozen),
    "compiled": Kind(prepare=compile_blocks),
    "own factor": Kind(prepare=scale_gradients),
    "accumulated": Kind(micro_batch=2),
    "offloaded": Kind(how={"offload_policy": CPUOffloadPolicy(pin_memory=False)}),
    "mesh of two dimensions": Kind(mesh=make_wide_mesh),
    "mesh of three dimensions": Kind(mesh=make_deep_mesh),
}


class Script:
    """One kind's objects, built as a script would, its run, and its training."""

    def __init__(self, name: str, directory: Path, seed: int) -> None:
        kind = KINDS[name]
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
            ckpt_dir=directory, run_id=name.replace(" ", "-"), save_every=10**6, snapshot_every=1,
        )  # fmt: skip
        if mesh.ndim == 1:
            self.run.replicate(self.model)
        self.began = self.run.position.step
        self.losses: list[float] = []

    def train(self, until: int, save_at: int) -> None:
        """Step until step ``until``, in the first epoch."""
        self.run.begin_epoch()
        batches = self.run.micro_batches(self.loader)
        while self.run.position.step < until:
            self.optimizer.zero_grad()
            total = 0.0
            while True:
                (x,) = next(batches)
                loss = self.model(x).square().mean() * self.run.loss_weight
                loss.backward()
                total += loss.item()
                if self.run.last_micro_batch:
                    break
            nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
            self.optimizer.step()
            self.scheduler.step()
            self.run.step()
            self.losses.append(total)
            if self.run.position.step == save_at:
                self.path = self.run.save()
        self.run.assert_ranks_equal()

    def digests(self) -> dict[str, str]:
        """Return a digest of each tensor of this rank, and of the rest."""
        flat = state_dict.flatten(
            {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler}
        )
        return {**state_dict.digest_leaves(flat.leaves), "": state_dict.combine_digests(flat.structure)}


def compare(name: str, directory: Path, seed: int) -> dict[str, Any]:
    """Train one kind whole and in two parts; return the differences."""
    whole = Script(name, directory, seed)
    whole.train(SAVED, SAVED)
    full = {key: value.full_tensor() for key, value in whole.model.state_dict().items() if key != "calls"}
    is_whole = None
    if whole.path is not None:
        loaded = open_checkpoint.load(whole.path)
        is_whole = all(torch.equal(loaded[key], value) for key, value in full.items())
    whole.train(END, 0)
    plan = whole.run._snapshot_scheduler.snapshotter._plan
    overlaps = plan is not None and not plan.copies_at_once
    whole.run._release()  # a close() would save the end
    again = Script(name, directory, seed + 50)
    again.train(END, 0)
    again.run._release()
    first, second = whole.digests(), again.digests()
    return {
        "began": again.began,
        "differ": [key for key in {**first, **second} if first.get(key) != second.get(key)],
        "losses": whole.losses[-len(again.losses) :] == again.losses,
        "loss": whole.losses,
        "loaded": is_whole,
        "overlaps": overlaps,
    }


def shard_over_nodes(model: nn.Module) -> None:
    """Let two nodes hold one replica."""
    fully_shard(model, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "replicate"))["shard"])


def use_tensor_parallel(model: nn.Module) -> None:
    """Divide a weight over the ranks of the node in a dimension of tensor parallelism."""
    mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("replicate", "shard", "tp"))
    placements = [Replicate(), Shard(0), Shard(0)]
    for name, value in list(model.named_parameters()):
        setattr(model, name, nn.Parameter(distribute_tensor(value.detach(), mesh, placements)))


def ignore_bias(model: nn.Module) -> None:
    """Leave out one parameter, whose gradients nothing averages."""
    fully_shard(model, mesh=make_wide_mesh(), ignored_params={model.get_parameter("bias")})


REFUSED = {
    "shards over nodes": shard_over_nodes,
    "tensor parallelism": use_tensor_parallel,
    "FSDP1": lambda model: FullyShardedDataParallel(model, device_id=torch.device("cpu")),
    "ignored parameter": ignore_bias,
}


def refuse(name: str, directory: Path) -> str:
    """Train one step with a model that is refused; return the error."""
    model: Any = nn.Linear(WIDTH, WIDTH)
    model = REFUSED[name](model) or model
    optimizer = torch.optim.AdamW(model.parameters())
    try:
        run = er.resume(model=model, optimizer=optimizer, ckpt_dir=directory, run_id=name.replace(" ", "-"))
        model(torch.full((1, WIDTH), float(run.rank))).square().mean().backward()
        optimizer.step()
        run.step()
    except ElasticResumeError as error:
        return str(error)
    return ""


def main(directory: Path, names: list[str]) -> None:
    """Train each kind whole and in two parts."""
    torch.set_num_threads(1)
    results: dict[str, Any] = {}
    for name in names or KINDS:
        try:
            results[name] = compare(name, directory, int(os.environ["RANK"]))
        except Exception:  # noqa: BLE001  the other kinds continue, and the test names this one
            results[name] = {"error": traceback.format_exc()}
    results["refused"] = {} if names else {name: refuse(name, directory) for name in REFUSED}
    print(json.dumps(results))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
