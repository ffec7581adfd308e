"""Trains a GAN in a restartable function, and waits at planned steps for the test to change the world.

``survivors.py DIRECTORY [OPTION ...]``. A rank that has finished a step of ``--hold`` makes a file
``held-STEP-GENERATION-NODE-LOCALRANK`` with its process and the number of ranks. It goes on when there is a
file ``go-STEP``. A standby waits for the file ``start``.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

import elastic_resume as er
from elastic_resume import constants
from elastic_resume.agent.workers import run_main
from tests.support.scripts.job_log import write_end

EPOCHS, SAMPLES, GLOBAL_BATCH = 2, 60, 12
SHARD_SIZES = (4, 7, 3, 6, 5, 2, 8, 5)


def make_sample(number: int) -> tuple[int, Tensor, Tensor]:
    """Return a sample: its number, noise for the generator, and a real point."""
    random = torch.Generator().manual_seed(number)
    return number, torch.randn(8, generator=random), torch.randn(4, generator=random)


class Samples(Dataset[Any]):
    """All samples."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        return make_sample(index)


def read_shard(shard: int) -> Iterator[Any]:
    """Yield the samples of a shard, with noise that torch draws."""
    for number in range(SHARD_SIZES[shard]):
        name, _, real = make_sample(100 * shard + number)
        yield name, torch.randn(8), real


class Job:
    """The training of one process."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.directory: Path = args.directory
        self.generator = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
        self.discriminator = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1))
        self.generator_optimizer = torch.optim.Adam(self.generator.parameters())
        self.discriminator_optimizer = torch.optim.Adam(self.discriminator.parameters())
        self.losses = torch.zeros(2)  # the sums of this rank
        self.batches: Any
        if args.stream:
            data: Any = er.ShardedStream(
                range(len(SHARD_SIZES)), read_shard, batch_size=3, seed=5, num_workers=1
            )
            self.batches = data
        else:
            data = er.GlobalBatches(SAMPLES, GLOBAL_BATCH, shuffle=True)
            self.batches = DataLoader(Samples(), batch_sampler=data)
        self.tracked: dict[str, Any] = {
            "model": {"g": self.generator, "d": self.discriminator},
            "optimizer": {"g": self.generator_optimizer, "d": self.discriminator_optimizer},
        }
        self.values = er.RankValues(self.losses)
        while constants.ENV_EARLY_START in os.environ and not (self.directory / "start").exists():
            time.sleep(0.01)
        self.run = er.resume(**self.tracked, data=data, track={"losses": self.values})

    def train(self) -> None:
        """Train until the end of the last epoch."""
        run = self.run
        if self.args.slow:  # so its node joins when it has started
            run._generation.context.events.emit("restartable", generation=run.generation, start_s=20.0)
        log = self.directory / f"g{run.generation}-r{run.rank}-{os.getpid()}.jsonl"
        generator, discriminator = run.ddp(self.generator), run.ddp(self.discriminator)
        for _ in run.epochs(EPOCHS):
            for names, noise, real in self.batches:
                self.hold()
                fake = generator(noise)
                scores = discriminator(torch.cat([real, fake.detach()]))
                truth = torch.cat([torch.ones(len(real), 1), torch.zeros(len(real), 1)])
                loss = functional.binary_cross_entropy_with_logits(scores, truth) * run.loss_weight
                self.discriminator_optimizer.zero_grad()
                loss.backward()
                self.discriminator_optimizer.step()
                self.discriminator.requires_grad_(requires_grad=False)
                self.kill()
                other = functional.softplus(-self.discriminator(fake)).mean() * run.loss_weight
                self.generator_optimizer.zero_grad()
                other.backward()
                self.generator_optimizer.step()
                self.discriminator.requires_grad_(requires_grad=True)
                self.losses += torch.stack([loss.detach(), other.detach()])
                run.step()
                entry = {
                    "step": run.position.step,
                    "samples": names.tolist() if run.loss_weight else [],
                    "loss": [each.item() / run.world_size for each in (loss, other)],
                    "sums": self.losses.tolist(),
                }
                with log.open("a") as file:
                    file.write(json.dumps(entry) + "\n")

    def hold(self) -> None:
        """Wait for the test, if this is planned after the newest step; ``--hold-gil``: in C, with the GIL."""
        step = self.run.position.step
        if step not in self.args.hold:
            return
        place = f"{os.environ[constants.ENV_NODE_NAME]}-{os.environ['LOCAL_RANK']}"
        name = f"held-{step}-{self.run.generation}-{place}"
        text = f"{os.getpid()} {self.run.world_size}"
        if f"{step}-{self.run.generation}-{place}" in self.args.hold_gil:
            os.chdir(self.directory)
            ctypes.PyDLL(None).system(f"echo {text} > tmp-{name}; mv tmp-{name} {name}; sleep 600".encode())
        (self.directory / f"tmp-{name}").write_text(text)
        (self.directory / f"tmp-{name}").rename(self.directory / name)
        while not (self.directory / f"go-{step}").exists():
            time.sleep(0.01)

    def kill(self) -> None:
        """Kill this process if that is planned for the running step, once."""
        name = f"{self.run.position.step + 1}:{self.run.rank}"
        done = self.directory / f"killed-{name}"
        if name in self.args.kill and not done.exists():
            done.touch()
            os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path)
    parser.add_argument("--hold", type=int, nargs="+", default=[])
    parser.add_argument("--hold-gil", default="", help="STEP-GENERATION-NODE-LOCALRANK")
    parser.add_argument("--kill", nargs="+", default=[], help="STEP:RANK, between the steps of both nets")
    parser.add_argument("--slow", action="store_true", help="a start that is said to take 20 s")
    parser.add_argument("--stream", action="store_true", help="read a ShardedStream")
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)  # sums over other numbers of ranks are then as good as equal
    torch.manual_seed(1)
    job = Job(parser.parse_args())
    job.run.restartable(job.train)()
    write_end(job.directory, job.run, **job.tracked, losses=job.values)
    job.run.close()


if __name__ == "__main__":
    main()
    run_main.exit_without_freeing(0)  # freeing torch takes 0.4 s of processor time
