"""Handwritten digits by a small CNN, data-parallel, as one writes it for torchrun.

python digits_ddp.py
torchrun --nproc-per-node 3 digits_ddp.py

The same with elastic_resume is digits.py; `diff digits_ddp.py digits.py` shows what it takes.
"""

from __future__ import annotations

import argparse
import os
import time

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--global-batch", type=int, default=96, help="samples per step, over all ranks")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--step-delay", type=float, default=0.0, help="seconds to sleep in each step")
    return parser.parse_args()


def digits() -> tuple[TensorDataset, TensorDataset]:
    """1,437 digits to train on and 360 to test on: grey images of 8 x 8, scaled to [0, 1]."""
    images, labels = load_digits(return_X_y=True)
    parts = train_test_split(images, labels, test_size=360, random_state=0, stratify=labels)
    train_images, test_images = (torch.tensor(part / 16, dtype=torch.float32) for part in parts[:2])
    train_labels, test_labels = (torch.tensor(part) for part in parts[2:])
    return (
        TensorDataset(train_images.view(-1, 1, 8, 8), train_labels),
        TensorDataset(test_images.view(-1, 1, 8, 8), test_labels),
    )


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Dropout(0.25),
        nn.Linear(32 * 4 * 4, 10),
    )


@torch.no_grad()
def accuracy(model: nn.Module, dataset: TensorDataset) -> float:
    images, labels = dataset.tensors
    model.eval()
    correct = model(images).argmax(1) == labels
    model.train()
    return float(correct.float().mean())


def main() -> None:
    args = arguments()
    torch.manual_seed(args.seed)
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(1)

    distributed = "RANK" in os.environ
    if distributed:
        dist.init_process_group("gloo")
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if distributed else (0, 1)

    train, test = digits()
    sampler: DistributedSampler[int] = DistributedSampler(train, world_size, rank, seed=args.seed)
    loader = DataLoader(train, batch_size=args.global_batch // world_size, sampler=sampler)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    # No total number of steps in it: --epochs may be raised when a run continues.
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 100 / (100 + step))
    if distributed:
        model = DistributedDataParallel(model)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for images, labels in loader:
            loss = cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            time.sleep(args.step_delay)
        correct = accuracy(model, test)
        if rank == 0:
            print(f"epoch {epoch + 1}: test accuracy {correct:.2%}", flush=True)

    correct = accuracy(model, test)
    if rank == 0:
        print(f"test accuracy {correct:.2%}", flush=True)
    if distributed:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
