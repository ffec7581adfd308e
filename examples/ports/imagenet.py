"""An image classifier, saved and resumed by elastic_resume: PyTorch's ImageNet example, ported.

python imagenet.py
torchrun --nproc-per-node 2 imagenet.py
elastic-resume run --nproc-per-node 2 imagenet.py

Each continues where the others stopped. Without elastic_resume it was imagenet_before.py, whose checkpoint
a first start can begin with: --resume checkpoint.pth.tar
"""

from __future__ import annotations

import argparse
import os
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, Dataset

import elastic_resume as er

PRINT_FREQ = 5

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
parser.add_argument("--epochs", default=4, type=int)
parser.add_argument("--start-epoch", default=0, type=int, help="where to continue; for restarts by hand")
parser.add_argument("--batch-size", default=16, type=int, help="of each rank")
parser.add_argument("--lr", default=0.05, type=float)
parser.add_argument("--momentum", default=0.9, type=float)
parser.add_argument("--weight-decay", default=1e-4, type=float)
parser.add_argument("--resume", default="", type=str, metavar="PATH", help="the checkpoint to continue from")
parser.add_argument("--seed", default=0, type=int)


class Pictures(Dataset[tuple[Tensor, int]]):
    """Noise around the pattern of each of ten classes; a picture to train on may be flipped."""

    def __init__(self, count: int, *, train: bool) -> None:
        generator = torch.Generator().manual_seed(int(train))
        patterns = torch.randn(10, 3, 8, 8, generator=torch.Generator().manual_seed(2))
        self.labels = torch.randint(10, (count,), generator=generator)
        self.pictures = patterns[self.labels] + 2 * torch.randn(count, 3, 8, 8, generator=generator)
        self.train = train

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        picture = self.pictures[index]
        if self.train and torch.rand(()) < 0.5:
            picture = picture.flip(-1)
        return picture, int(self.labels[index])


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(4),
        nn.Flatten(),
        nn.Linear(16 * 4 * 4, 10),
    )


def main() -> None:
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    torch.set_num_threads(1)
    best_acc1 = torch.zeros(())

    distributed = "RANK" in os.environ
    if distributed:
        dist.init_process_group("gloo")
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if distributed else (0, 1)

    # create model
    model = network()
    if distributed:
        model = DistributedDataParallel(model)

    # define loss function (criterion), optimizer, and learning rate scheduler
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(
        model.parameters(), args.lr, momentum=args.momentum, weight_decay=args.weight_decay
    )
    scheduler = StepLR(optimizer, step_size=2, gamma=0.1)

    # optionally resume from a checkpoint
    if args.resume:
        checkpoint = torch.load(args.resume, map_location="cpu", weights_only=True)
        args.start_epoch = checkpoint["epoch"]
        best_acc1.fill_(checkpoint["best_acc1"])
        model.load_state_dict(checkpoint["state_dict"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        scheduler.load_state_dict(checkpoint["scheduler"])
        print(f"=> loaded checkpoint '{args.resume}' (epoch {checkpoint['epoch']})")

    # data loading code
    train_dataset, val_dataset = Pictures(400, train=True), Pictures(200, train=False)
    train_sampler = er.ElasticSampler(train_dataset)
    train_loader = DataLoader(train_dataset, batch_size=args.batch_size, sampler=train_sampler)
    val_loader = DataLoader(val_dataset, batch_size=100)

    run = er.resume(
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        data=train_loader,
        track={"best_acc1": best_acc1},
    )
    for number in run.epochs(args.epochs - args.start_epoch):
        epoch = args.start_epoch + number
        train_sampler.set_epoch(epoch)

        # train for one epoch
        train(train_loader, model, criterion, optimizer, epoch=epoch, run=run)

        # evaluate on validation set
        acc1 = validate(val_loader, model)
        scheduler.step()

        # remember best acc@1 and save checkpoint
        is_best = acc1 > best_acc1
        best_acc1.fill_(max(acc1, float(best_acc1)))
        if rank == 0:
            print(f"epoch {epoch + 1}: acc@1 {acc1:.2f}, best {best_acc1:.2f}", flush=True)
            if is_best:
                torch.save(model.state_dict(), "model_best.pth.tar")

    if distributed:
        dist.destroy_process_group()


def train(
    train_loader: DataLoader[Any],
    model: nn.Module,
    criterion: nn.Module,
    optimizer: Optimizer,
    *,
    epoch: int,
    run: er.Run,
) -> None:
    model.train()
    for i, (images, target) in enumerate(train_loader):
        # compute output
        output = model(images)
        loss = criterion(output, target)

        # compute gradient and do SGD step
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.step()

        if i % PRINT_FREQ == 0:
            print(f"epoch [{epoch + 1}][{i}/{len(train_loader)}] loss {loss:.4f}", flush=True)


@torch.no_grad()
def validate(val_loader: DataLoader[Any], model: nn.Module) -> float:
    model.eval()
    correct = total = 0
    for images, target in val_loader:
        correct += int((model(images).argmax(1) == target).sum())
        total += len(target)
    return 100 * correct / total


if __name__ == "__main__":
    main()
