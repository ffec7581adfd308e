"""Trains every kind of model, wrapper and state under DDP: uninterrupted, and resumed from the middle.

Each rank trains each kind for six steps and saves at the third. It then builds everything again from other
seeds, resumes, and trains the other three. Kinds that can stay do so in a restartable function, whose world
ends twice: each rank is then at another moment of a step, and the next world begins in the same process. The
script is its own supervisor. It prints what differs at the end, for tests/integration/test_state_kinds.py.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrizations
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import elastic_resume as er
from elastic_resume import failpoints
from elastic_resume.state import state_dict
from tests.support.own_supervisor import Supervisor, compare_kinds, count_world, leave

SAVED, END = 3, 6
WIDTH = 48
MOMENTS = (
    "forward", "first gradient", "last gradient", "stepped", "torn", "averaged", "evaluation", "step",
    "start", "saving",
)  # fmt: skip


class Net(nn.Module):
    """A net with dropout, BatchNorm, and enough gradients for their order in a bucket to matter."""

    def __init__(self, change: Callable[[nn.Module], nn.Module] = lambda layer: layer) -> None:
        super().__init__()
        self.first = change(nn.Linear(16, WIDTH))
        self.norm = nn.BatchNorm1d(WIDTH)
        self.second = change(nn.Linear(WIDTH, WIDTH))
        self.drop = nn.Dropout(0.1)
        self.last = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        """Score four classes; the layer that was built last but one is used last but one."""
        hidden = self.drop(torch.relu(self.norm(self.first(x))))
        scores: Tensor = self.last(hidden + self.second(hidden))
        return scores


class Spare(Net):
    """A parameter that no forward pass reads, and one that is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Parameter(torch.randn(WIDTH))
        self.first.requires_grad_(requires_grad=False)


class Checkpointed(Net):
    """A net that recomputes a block in the backward pass."""

    def forward(self, x: Tensor) -> Tensor:
        """Score four classes."""
        hidden = torch.relu(self.norm(self.first(x)))
        again: Any = torch.utils.checkpoint.checkpoint
        scores: Tensor = self.last(hidden + again(self.second, hidden, use_reentrant=False))
        return scores


class Words(Net):
    """An embedding with sparse gradients, beside dense ones."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(8, 16, sparse=True)

    def forward(self, x: Tensor) -> Tensor:
        """Add a word to each input."""
        return super().forward(x + self.words(x[:, :8].argmax(1)))


class Tied(Net):
    """Two layers with one weight, and a view of it that is a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.third = nn.Linear(WIDTH, WIDTH)
        self.third.weight = cast("nn.Linear", self.second).weight

    def forward(self, x: Tensor) -> Tensor:
        """Go through the weight twice."""
        hidden = torch.relu(self.norm(self.first(x)))
        scores: Tensor = self.last(self.third(self.second(hidden)))
        return scores


class Counting(Net):
    """Extra state that grows, and a buffer that is not kept."""

    scratch: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[float] = []
        self.register_buffer("scratch", torch.zeros(2), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Count, and scale by what was counted."""
        if self.training:
            self.seen.append(0.01)
        return super().forward(x) * (1 + sum(self.seen) + self.scratch.sum())

    def get_extra_state(self) -> Tensor:
        """Return the counts, which grow at each step."""
        return torch.tensor(self.seen)

    def set_extra_state(self, state: Tensor) -> None:
        """Load it."""
        self.seen = state.tolist()


@dataclass
class Kind:
    """The way in which one kind builds and trains."""

    net: Callable[[], nn.Module] = Net
    optimizer: Callable[[Any], torch.optim.Optimizer] = lambda parameters: torch.optim.AdamW(parameters, 0.01)
    # Returns what is passed to resume() instead of the bare model.
    before: Callable[[nn.Module], nn.Module] = lambda model: model
    wrap: Callable[[er.Run, nn.Module], nn.Module] = lambda run, model: run.ddp(model)
    ddp: dict[str, Any] = field(default_factory=dict)
    ema: Callable[[nn.Module], Any] = lambda _: None
    average: Callable[[Any, nn.Module], object] = lambda *_: None
    autocast: bool = False
    late_optimizer: bool = False
    scaler: bool = False
    parts: int = 1  # in which each step accumulates its gradients
    can_stay: bool = True  # in a restartable function


def with_ddp(model: nn.Module, **how: Any) -> nn.Module:
    """Wrap as a script would by itself."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    return DistributedDataParallel(model, **how)


def compiled(model: nn.Module) -> nn.Module:
    """Compile without a compiler."""
    return cast("nn.Module", torch.compile(model, backend="eager"))


def compressed(run: er.Run, model: nn.Module) -> nn.Module:
    """Send gradients as float16."""
    wrapped = run.ddp(model)
    cast("DistributedDataParallel", wrapped).register_comm_hook(None, fp16_compress_hook)
    return wrapped


def add_little(parameter: Tensor) -> None:
    """Change the parameter, like an optimizer that steps in the backward pass."""
    parameter.data.add_(0.01)


def hooked(model: nn.Module) -> nn.Module:
    """Hooks on the model and on a parameter, which change what they see."""
    model.register_forward_hook(lambda _module, _args, result: result * 1.5)
    parameter = next(model.parameters())
    parameter.register_hook(lambda grad: grad * 0.5)
    parameter.register_post_accumulate_grad_hook(add_little)
    return model


class Doubled:
    """Calls a module's forward and doubles the result, as some libraries wrap it."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __call__(self, *args: Any) -> Tensor:
        """Return the doubled result."""
        return 2 * self.inner(*args)  # type: ignore[no-any-return]


def patched() -> nn.Module:
    """Replace the method of an instance."""
    net = Net()
    net.__dict__["forward"] = Doubled(net.forward)
    return net


class Average:
    """A hand-made average as people write it: an object whose state_dict() gives copies."""

    def __init__(self, model: nn.Module) -> None:
        self.shadow = {name: p.detach().clone() for name, p in model.named_parameters()}
        self.backup: dict[str, Tensor] = {}
        self.updates = 0

    def update(self, model: nn.Module) -> None:
        """Update the average with the new weights."""
        self.updates += 1
        for name, parameter in model.named_parameters():
            self.shadow[name] = 0.9 * self.shadow[name] + 0.1 * parameter.detach()

    def state_dict(self) -> dict[str, Any]:
        """Return copies."""
        return {"shadow": {key: t.clone() for key, t in self.shadow.items()}, "updates": self.updates}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the average."""
        self.shadow, self.updates = dict(state["shadow"]), state["updates"]


def averaged_model(model: nn.Module) -> AveragedModel:
    """Torch's own average, buffers too."""
    return AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)


class Factored(torch.optim.Optimizer):
    """An optimizer like Adafactor: second moments by row and column, new tensors at each step."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.01})

    def step(self, closure: Any = None) -> Any:
        """Divide each gradient by the root of its row's and column's moments."""
        loss = closure()
        for parameter in self.param_groups[0]["params"]:
            square = parameter.grad.square() + 1e-8
            rows, columns = square.mean(-1, keepdim=True), square.mean(0, keepdim=True)
            own = self.state[parameter]
            own["rows"] = 0.9 * own.get("rows", rows) + 0.1 * rows
            own["columns"] = 0.9 * own.get("columns", columns) + 0.1 * columns
            scale = (own["rows"] * own["columns"] / own["rows"].mean()).sqrt()
            parameter.data.sub_(0.01 * parameter.grad / scale)
        return loss


def spectral(layer: nn.Module) -> nn.Module:
    """Normalise by buffers that each forward pass changes."""
    return parametrizations.spectral_norm(layer)


KINDS = {
    "plain": Kind(),
    "bucket views": Kind(ddp={"gradient_as_bucket_view": True}),
    "fused": Kind(optimizer=lambda parameters: torch.optim.AdamW(parameters, 0.01, fused=True)),
    "momentum": Kind(optimizer=lambda p: torch.optim.SGD(p, 0.01, momentum=0.9, foreach=True)),
    "checkpointed": Kind(net=Checkpointed),
    "unused and frozen": Kind(net=Spare, ddp={"find_unused_parameters": True}),
    "static graph": Kind(ddp={"static_graph": True}, can_stay=False),
    "static graph, unused": Kind(net=Spare, ddp={"static_graph": True}, can_stay=False),
    "static graph, checkpointed": Kind(net=Checkpointed, ddp={"static_graph": True}, can_stay=False),
    "own DDP before": Kind(before=with_ddp, wrap=lambda _, model: model, can_stay=False),
    "own DDP after": Kind(wrap=lambda run, model: run.ddp(with_ddp(model)), can_stay=False),
    "compiled inside": Kind(wrap=lambda run, model: run.ddp(compiled(model))),
    "compiled before": Kind(before=compiled),
    "compiled outside": Kind(wrap=lambda run, model: compiled(run.ddp(model))),
    "compiled around own DDP": Kind(before=lambda model: compiled(with_ddp(model)), can_stay=False),
    "sparse": Kind(net=Words, optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1)),
    "hooks": Kind(before=hooked),
    "compressed": Kind(wrap=compressed, can_stay=False),
    "tied": Kind(net=Tied),
    "extra state": Kind(net=Counting),
    "spectral norm": Kind(net=lambda: Net(spectral)),
    "patched forward": Kind(net=patched),
    "autocast": Kind(autocast=True),
    "bfloat16": Kind(net=lambda: Net().bfloat16(), optimizer=torch.optim.Adafactor),
    "scaler": Kind(scaler=True),
    "accumulated": Kind(parts=2),
    "factored": Kind(optimizer=Factored),
    "line search": Kind(
        optimizer=lambda parameters: torch.optim.LBFGS(parameters, lr=0.05, max_iter=2, history_size=4)
    ),
    "averaged model": Kind(ema=averaged_model, average=lambda ema, model: ema.update_parameters(model)),
    "average in an object": Kind(ema=Average, average=lambda ema, model: ema.update(model)),
    "optimizer built after": Kind(
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1), late_optimizer=True
    ),
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
        self.given = kind.before(self.model)
        self.ema = kind.ema(self.model)
        self.own_optimizer = None if kind.late_optimizer else kind.optimizer(self.given.parameters())
        self.scaler = None
        if kind.scaler:  # it grows within the run
            self.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
        # A fixed seed: the numbers drawn while training must not follow from this one.
        self.run = er.resume(
            model=self.given, optimizer=self.own_optimizer, scaler=self.scaler, ema=self.ema, seed=1,
            ckpt_dir=directory, run_id=name.replace(" ", "-").replace(",", ""), save_every=10**6,
            snapshot_every="off",
        )  # fmt: skip
        self.began = self.entered = self.run.position.step
        self.losses: list[float] = []
        self.finished: list[tuple[int, list[float]]] = []
        if supervisor is not None:
            trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
            trained[0].register_hook(lambda _: self.reach("last gradient"))
            trained[-1].register_hook(lambda _: self.reach("first gradient"))
            failpoints.hit = lambda name, *_: self.reach(name)
            self.run.on_resume(lambda _: self.reach("start"))

    def reach(self, moment: str) -> None:
        """End the world if that is planned here."""
        if self.supervisor is not None:
            self.supervisor.reach(self, moment, MOMENTS, self.number + 3 * self.run.rank)

    @torch.no_grad()
    def tear(self) -> None:
        """Leave nothing as it was, like an optimizer in the middle of its step."""
        for tensor in [*(leaf.tensor for leaf in self.leaves()), *self.model.buffers()]:
            tensor.fill_(1)
        for parameter in self.model.parameters():
            parameter.requires_grad_(not parameter.requires_grad)

    def train(self, until: int, save_at: int) -> None:
        """Step until step ``until``; leave the process groups."""
        train = self._train if self.supervisor is None else self.run.restartable(self._train)
        train(until, save_at)
        leave(self.run)

    def _train(self, until: int, save_at: int) -> None:
        self.entered = self.run.position.step  # one more than it began with if `saving` was not interrupted
        how = self.kind.ddp
        self.ddp = self.kind.wrap(self.run, self.given) if not how else self.run.ddp(self.given, **how)
        self.optimizer = self.own_optimizer or self.kind.optimizer(self.ddp.parameters())
        while self.run.position.step < until:
            self.losses = []
            self.run._script_hooks.run()  # there is no epoch
            with torch.no_grad():
                self.model.eval()
                self.reach("evaluation")
                self.model.train()
            x = torch.randn(6, 16, dtype=next(self.model.parameters()).dtype)
            if self.scaler is None:
                self.optimizer.step(lambda x=x: self.evaluate(x))  # type: ignore[misc]
            else:
                self.evaluate(x)
                self.scaler.step(self.optimizer)
                self.reach("stepped")
                self.scaler.update()
            self.reach("stepped")
            self.reach("torn")
            self.kind.average(self.ema, self.model)
            self.reach("averaged")
            self.run.step()
            self.finished.append((self.run.position.step, self.losses))
            self.reach("saving")
            if self.run.position.step == save_at:
                self.run.save()

    def evaluate(self, x: Tensor) -> float:
        """Compute the gradients of one step; return the loss, which is equal on all ranks for LBFGS."""
        self.optimizer.zero_grad()
        total = torch.zeros(())
        for number, part in enumerate(x.chunk(self.kind.parts), 1):
            is_last = number == self.kind.parts
            with contextlib.nullcontext() if is_last else cast("DistributedDataParallel", self.ddp).no_sync():
                with torch.autocast("cpu", torch.bfloat16, enabled=self.kind.autocast):
                    self.reach("forward")
                    loss: Tensor = self.ddp(part).float().square().mean() / self.kind.parts
                (loss if self.scaler is None else self.scaler.scale(loss)).backward()
            total += loss.detach()
        self.losses.append(total.item())
        dist.all_reduce(total)
        return total.item()

    def leaves(self) -> list[state_dict.Leaf]:
        """Return all tensors; running statistics only on rank 0, whose are the job's."""
        tracked = {"model": self.model, "optimizer": self.optimizer, "ema": self.ema}
        flat = state_dict.flatten(state_dict.collect_objects(tracked))
        return [leaf for leaf in flat.leaves if self.run.rank == 0 or "norm.running" not in leaf.name]

    def common(self) -> str:
        """Return a digest of the state that is equal on every rank."""
        leaves = [leaf for leaf in self.leaves() if "norm.running" not in leaf.name]
        return state_dict.combine_digests(state_dict.digest_leaves(leaves))

    def digests(self) -> dict[str, str]:
        """Return a digest of each tensor, and of the rest."""
        objects = {"optimizer": self.optimizer, "scaler": self.scaler, "ema": self.ema}
        rest = state_dict.flatten(state_dict.collect_objects(objects)).structure
        return {**state_dict.digest_leaves(self.leaves()), "rest": state_dict.combine_digests(rest)}


def main(directory: Path, part: int) -> None:
    """Train every eighth kind whole and in parts."""
    print(json.dumps(compare_kinds(compare, directory, [*enumerate(KINDS)][part::8])))


def compare(name: str, directory: Path, number: int, supervisor: Supervisor) -> dict[str, Any]:
    """Train one kind whole and in parts; return the differences."""
    seed = 100 * number + int(os.environ["RANK"])
    whole = Script(name, directory, seed)
    whole.train(END, SAVED)
    supervisor.worlds = 0
    stays = supervisor if KINDS[name].can_stay else None
    again = Script(name, directory, seed + 50, stays, number)
    again.train(END, 0)
    first, second = whole.digests(), again.digests()
    losses = dict(whole.finished)
    return {
        "began": again.began,
        "differ": [key for key in {**first, **second} if first.get(key) != second.get(key)],
        "losses": all(losses[step] == found for step, found in again.finished),
        "worlds": supervisor.worlds,
        "common": again.common(),
    }


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
