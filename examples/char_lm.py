"""A small transformer that reads Python's standard library character by character, resumable.

python char_lm.py
torchrun --nproc-per-node 2 char_lm.py
elastic-resume run --nproc-per-node 2 char_lm.py

Each resumes from ./checkpoints what the others left. Without elastic_resume it is char_lm_ddp.py.
"""

from __future__ import annotations

import argparse
import math
import os
import sysconfig
import time
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import elastic_resume as er

CONTEXT = 64  # characters that the model looks back on
ALPHABET = 128  # ASCII; any other character is read as "?"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--global-batch", type=int, default=32, help="blocks per step, over all ranks")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--step-delay", type=float, default=0.0, help="seconds to sleep in each step")
    parser.add_argument("--characters", type=int, default=1_000_000, help="how much to read")
    return parser.parse_args()


def blocks(characters: int) -> tuple[TensorDataset, TensorDataset]:
    """Cut the standard library's modules, in order of name, into blocks; the last tenth is the test.

    The text belongs to the Python that runs this: use the same release on every node.
    """
    modules = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = b""
    for module in modules:
        text += module.read_text(encoding="utf-8").encode("ascii", "replace")
        if len(text) >= characters:
            break
    whole = min(len(text), characters) // (CONTEXT + 1)
    rows = torch.frombuffer(bytearray(text[: whole * (CONTEXT + 1)]), dtype=torch.uint8)
    rows = rows.view(whole, CONTEXT + 1)
    test = max(1, whole // 10)
    return TensorDataset(rows[:-test]), TensorDataset(rows[-test:])


class CharLM(nn.Module):
    """Next-character logits, (batch, length, ALPHABET), from characters, (batch, length <= CONTEXT)."""

    def __init__(self, width: int = 96, layers: int = 2, heads: int = 4) -> None:
        super().__init__()
        self.characters = nn.Embedding(ALPHABET, width)
        self.positions = nn.Embedding(CONTEXT, width)
        layer = nn.TransformerEncoderLayer(
            width, heads, 4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(width)
        for table in (self.characters, self.positions):
            nn.init.normal_(table.weight, std=0.02)

    def forward(self, text: Tensor) -> Tensor:
        """See the class."""
        length = text.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=text.device)
        hidden = self.characters(text) + self.positions(torch.arange(length, device=text.device))
        hidden = self.layers(hidden, mask=mask, is_causal=True)
        return torch.matmul(self.norm(hidden), self.characters.weight.T)


def loss_of(model: nn.Module, rows: Tensor) -> Tensor:
    text = rows.long()
    return cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())


def warm_up_and_decay(step: int) -> float:
    """Factor of the learning rate: linear for 100 steps, then by the inverse square root.

    No total number of steps in it: --epochs may be raised when a run continues.
    """
    return float(min((step + 1) / 100, (100 / (step + 1)) ** 0.5))


@torch.no_grad()
def bits_per_character(model: nn.Module, dataset: TensorDataset, device: torch.device) -> float:
    model.eval()
    parts = dataset.tensors[0].to(device).chunk(8)
    nats = sum(float(loss_of(model, part)) * len(part) for part in parts)
    model.train()
    return nats / len(dataset) / math.log(2)


def main() -> None:
    args = arguments()
    torch.manual_seed(args.seed)
    torch.set_num_threads(1)
    gpus, local_rank = torch.cuda.device_count(), int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device("cuda", local_rank % gpus) if gpus else torch.device("cpu")

    train, test = blocks(args.characters)
    batches = er.GlobalBatches(len(train), args.global_batch, seed=args.seed)
    loader = DataLoader(train, batch_sampler=batches)
    model = CharLM().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, warm_up_and_decay)
    run = er.resume(model=model, optimizer=optimizer, scheduler=scheduler, data=batches, seed=args.seed)

    # When another worker dies, this process stays, and calls the function again: docs/guides/in-process.md.
    @run.restartable
    def train_model() -> None:
        ddp = run.ddp(model)
        for epoch in run.epochs(args.epochs):
            for (rows,) in loader:
                loss = loss_of(ddp, rows.to(device)) * run.loss_weight
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                run.step()
                time.sleep(args.step_delay)
            bits = bits_per_character(model, test, device)
            if run.rank == 0:
                print(f"epoch {epoch + 1}: {bits:.3f} bits per character", flush=True)

    train_model()
    bits = bits_per_character(model, test, device)
    if run.rank == 0:
        print(f"{bits:.3f} bits per character", flush=True)


if __name__ == "__main__":
    main()
