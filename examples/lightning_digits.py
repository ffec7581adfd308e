"""Handwritten digits by Lightning's Trainer, losing nothing when a worker or a node dies.

python lightning_digits.py
torchrun --nproc-per-node 3 lightning_digits.py
elastic-resume run --nproc-per-node 3 --preload lightning.pytorch lightning_digits.py

Without elastic_resume: delete its import and strategy=.
"""

from __future__ import annotations

import argparse

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from elastic_resume.integrations.lightning import ElasticDDPStrategy


class LitDigits(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 10))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        loss = cross_entropy(self.net(images), labels)
        self.log("train_loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        images, labels = batch
        correct = (self.net(images).argmax(1) == labels).float().mean()
        self.log("val_accuracy", correct, sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def digits() -> tuple[TensorDataset, TensorDataset]:
    """1,437 digits to train on and 360 to validate on: grey images of 8 x 8, scaled to [0, 1]."""
    images, labels = load_digits(return_X_y=True)
    parts = train_test_split(images, labels, test_size=360, random_state=0, stratify=labels)
    train_images, test_images = (torch.tensor(part / 16, dtype=torch.float32) for part in parts[:2])
    return TensorDataset(train_images, torch.tensor(parts[2])), TensorDataset(
        test_images, torch.tensor(parts[3])
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--epochs", type=int, default=10)
    args = parser.parse_args()
    pl.seed_everything(0, verbose=False)
    torch.set_num_threads(1)
    train, test = digits()
    best = ModelCheckpoint("lightning_digits", monitor="val_accuracy", mode="max")
    trainer = pl.Trainer(
        max_epochs=args.epochs,
        callbacks=[best],
        strategy=ElasticDDPStrategy(),
        logger=False,
        enable_progress_bar=False,
    )
    trainer.fit(LitDigits(), DataLoader(train, batch_size=32, shuffle=True), DataLoader(test, batch_size=120))
    if trainer.is_global_zero:
        print(f"best accuracy {best.best_model_score:.2%}", flush=True)


if __name__ == "__main__":
    main()
