"""Handwritten digits with Hugging Face Accelerate, as its documentation has the loop.

torchrun --nproc-per-node 2 accelerate_digits_before.py

With elastic_resume it is accelerate_digits.py.
"""

import argparse

import torch
from accelerate import Accelerator
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=10)
    epochs = parser.parse_args().epochs
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    torch.manual_seed(0)
    torch.set_num_threads(1)
    images, labels = load_digits(return_X_y=True)
    digits = TensorDataset(torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels))
    train, test = random_split(digits, [1437, 360])
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 100, 0.5)
    loss_function = nn.CrossEntropyLoss()
    loader = DataLoader(train, batch_size=48, shuffle=True)
    test_loader = accelerator.prepare(DataLoader(test, batch_size=64))
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)

    for epoch in range(epochs):
        for inputs, targets in loader:
            loss = loss_function(model(inputs), targets)
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()

        model.eval()
        correct = []
        with torch.no_grad():
            for inputs, targets in test_loader:
                hits = model(inputs).argmax(1) == targets
                correct.append(accelerator.gather_for_metrics(hits))
        model.train()
        accelerator.print(f"epoch {epoch + 1}: test accuracy {torch.cat(correct).float().mean():.2%}")


if __name__ == "__main__":
    main()
