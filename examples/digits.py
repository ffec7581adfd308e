"""Handwritten digits by a small CNN, data-parallel, losing nothing when a worker or a node dies.

python digits.py
torchrun --nproc-per-node 3 digits.py
elastic-resume run --nproc-per-node 3 digits.py

Each resumes from ./checkpoints what the others left. Without elastic_resume it is digits_ddp.py.
"""

from __future__ import annotations

import argparse
import time

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import elastic_resume as er


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

    train, test = digits()
    batches = er.GlobalBatches(len(train), args.global_batch, seed=args.seed)
    loader = DataLoader(train, batch_sampler=batches)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    # No total number of steps in it: --epochs may be raised when a run continues.
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 100 / (100 + step))
    run = er.resume(model=model, optimizer=optimizer, scheduler=scheduler, data=batches, seed=args.seed)
    model = run.ddp(model)

    for epoch in run.epochs(args.epochs):
        for images, labels in loader:
            loss = cross_entropy(model(images), labels) * run.loss_weight
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            run.step()
            time.sleep(args.step_delay)
        correct = accuracy(model, test)
        if run.rank == 0:
            print(f"epoch {epoch + 1}: test accuracy {correct:.2%}", flush=True)

    correct = accuracy(model, test)
    if run.rank == 0:
        print(f"test accuracy {correct:.2%}", flush=True)


if __name__ == "__main__":
    main()
