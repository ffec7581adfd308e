"""A user's script with every public name, for the type checker and tests/unit/test_types.py.

It also runs: ``python typed.py DIRECTORY``.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, Dataset, TensorDataset

import elastic_resume as er
from elastic_resume.errors import NoValidCheckpointError
from elastic_resume.testing import Cluster, Fault, assert_same_run


class Best:
    """An object of the script with a state."""

    def __init__(self) -> None:
        self.loss = float("inf")

    def state_dict(self) -> dict[str, float]:
        """Return the best loss."""
        return {"loss": self.loss}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Set the best loss."""
        self.loss = state["loss"]


def evaluate(model: nn.Module, loader: DataLoader[tuple[Tensor, ...]]) -> float:
    """Return the mean loss over an `er.ElasticSampler`'s loader."""
    with torch.no_grad():
        losses = [mse_loss(model(inputs), targets) for inputs, targets in loader]
    return float(torch.stack(losses).mean())


def report(run: er.Run, plan: er.ResumePlan, position: er.Position) -> None:
    """Print where the run stands."""
    source: str = plan.source_node
    print(er.__version__, run.generation, run.rank, run.world_size, source)
    print(position.epoch, position.step_in_epoch, position.step, position.samples)


def read_lines(paths: list[Path], loss_sum: Tensor) -> tuple[er.ShardedStream, er.RankValues]:
    """Return what a script with a stream of lines and a running loss would pass to `er.resume`."""

    def read(path: Path) -> Iterator[str]:
        yield from path.read_text().splitlines()

    return er.ShardedStream(paths, read, batch_size=8, num_workers=2), er.RankValues(loss_sum)


def train_as_a_library(run: er.Run, loader: DataLoader[tuple[Tensor, ...]]) -> float:
    """Train one epoch in a loop that reads ahead, after installing signal handlers."""
    run.take_signals()
    run.begin_epoch()
    weights = 0.0
    for _, upcoming in zip(loader, run.upcoming_batches(), strict=False):
        weights += upcoming.loss_weight
        if upcoming.is_last:
            run.step()
    run.end_epoch()
    return weights


def shard(run: er.Run, model: nn.Module) -> nn.Module:
    """Divide a model over the ranks of this node."""
    fully_shard(model, mesh=er.shard_mesh())
    return run.replicate(model)


def train_by_epochs(model: nn.Module, optimizer: torch.optim.Optimizer, loader: DataLoader[Tensor]) -> er.Run:
    """Train in loops that count their steps themselves."""
    for step in er.steps(3, model=model, optimizer=optimizer, track={"own": er.per_rank(Best())}):
        print(step)
    epochs = er.epochs(2, loader, accumulate=2, model=model, optimizer=optimizer)
    for epoch in epochs:
        for index, batch in epochs.run.enumerate(loader):
            print(epoch, index, batch.shape)
        epochs.run.stop()
        break
    return epochs.run


def make_group(run: er.Run) -> object:
    """Make a group of rank 0 alone, in a restartable function."""
    return run.new_group([0])


def read_again(directory: Path) -> bool:
    """Load the newest checkpoint without a process group."""
    try:
        nn.Linear(4, 1).load_state_dict(er.load(directory / "typed"))
    except NoValidCheckpointError as error:
        print(f"nothing to load: {error}")
        return False
    except er.errors.CheckpointError as error:
        print(f"damaged ({error.kind}): {error}")
        raise
    return True


def main(directory: Path) -> None:
    """Train two epochs with gradient accumulation."""
    torch.manual_seed(0)
    plain: Dataset[tuple[Tensor, ...]] = TensorDataset(torch.randn(24, 4), torch.randn(24, 1))
    batches = er.GlobalBatches(24, 8, seed=1, micro_batch=4)
    loader: DataLoader[tuple[Tensor, ...]] = DataLoader(er.seeded(plain), batch_sampler=batches)
    sampler = er.ElasticSampler(range(24), shuffle=False)
    held_out: DataLoader[tuple[Tensor, ...]] = DataLoader(plain, batch_size=8, sampler=sampler)
    inner = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(inner.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1)
    best, count = Best(), torch.zeros(())
    try:
        run = er.resume(
            model=inner,
            optimizer={"main": optimizer},
            scheduler=scheduler,
            ema=torch.optim.swa_utils.AveragedModel(inner),
            data=loader,
            track={"best": best, "counts": {"batches": count}},
            ckpt_dir=directory,
            run_id="typed",
            save_every="30s",
            snapshot_every=1,
            keep=3,
            resume="auto",
            seed=7,
            rng="derived",
            on_world_change="keep_global_batch",
        )
    except er.errors.ConfigError as error:
        raise SystemExit(str(error)) from error

    @run.on_resume
    def log_resume(resumed: er.Run) -> None:
        report(resumed, resumed.plan, resumed.position)

    @run.on_world_change
    def scale(change: er.WorldChange) -> None:
        for group in optimizer.param_groups:
            group["lr"] *= change.factor

    @run.on_preemption
    def keep(preemption: er.Preemption) -> None:
        print(f"{preemption.node}: {preemption.reason}, {preemption.seconds:.0f} s")

    assert read_lines([directory], count)
    assert callable(keep)
    hooks = (log_resume, scale, make_group, shard)

    @run.restartable
    def train() -> None:
        model = run.ddp(inner, gradient_as_bucket_view=True)
        for epoch in run.epochs(2):
            batches_of_epoch: Iterator[tuple[Tensor, ...]] = run.micro_batches(loader)
            for inputs, targets in batches_of_epoch:
                loss = mse_loss(model(inputs), targets) * run.loss_weight
                loss.backward()
                count.add_(1)
                if run.last_micro_batch:
                    optimizer.step()
                    optimizer.zero_grad()
                    if not run.is_recomputed:
                        run.log(loss=loss)
                    run.step()
            scheduler.step()
            if run.preemption is not None:
                continue
            with run.busy("evaluation", limit_s=60.0):
                best.loss = min(best.loss, evaluate(model, held_out))
            print(f"epoch {epoch}: best loss {best.loss:.3f}")

    with run:
        train()
        path: Path | None = run.save()
        run.assert_ranks_equal()
        assert run.world_change is None or run.position.step
    assert read_again(directory)
    print(f"trained: {path is not None} {len(hooks)} hooks")


def start_from_python(directory: Path) -> bool:
    """Start this script's training as a job of its own."""
    results: dict[int, bool] = er.launch(read_again, args=(directory,), nproc_per_node=2)
    return results[0]


def test_survives_a_kill(elastic_cluster: Cluster) -> None:
    """A test of this script with the pytest plugin."""
    elastic_cluster.start("typed.py")
    elastic_cluster.at(step=2, rank=1).kill()
    assert elastic_cluster.wait_exit() == [0, 0, 0]
    check, fault = assert_same_run, Fault
    assert callable(check)
    assert callable(fault)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
