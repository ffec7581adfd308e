"""Trains as scripts for Accelerate do, for tests/integration/test_accelerate.py: its own loader and folders.

``accelerate_folders.py DIRECTORY``. The main process alone saves a folder every three steps, and keeps two of
them. A restart looks for the newest folder, as those scripts do. Each process records its losses and rates.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from elastic_resume import failpoints
from elastic_resume.agent.workers import run_main
from elastic_resume.integrations.accelerate import prepare

EPOCHS, SAVE_EVERY, KEPT = 2, 3, 2


def list_folders(directory: Path) -> list[Path]:
    """Return the folders of steps, the newest last."""
    return sorted(directory.glob("step_*"), key=lambda folder: int(folder.name.split("_")[1]))


def main() -> None:
    """Train, and write the end."""
    torch.set_num_threads(1)
    directory = Path(sys.argv[1])
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    torch.manual_seed(3)
    inputs = torch.randn(70, 8)
    dataset = TensorDataset(inputs, (inputs.sum(1) > 0).long())
    loader = DataLoader(dataset, batch_size=2, shuffle=True)
    model: Any = nn.Sequential(nn.Linear(8, 12), nn.Dropout(0.2), nn.Linear(12, 2))
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.02)
    total = len(loader) * EPOCHS // 2  # of one process: Accelerate steps a schedule once per process
    scheduler: Any = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / (2 * total))
    run, model, optimizer, scheduler = prepare(
        accelerator, model=model, optimizer=optimizer, scheduler=scheduler, data=loader
    )
    accelerator.register_save_state_pre_hook(lambda *_: failpoints.hit("job.save", run.position.step + 1))
    for newest in list_folders(directory)[-1:]:
        accelerator.load_state(str(newest))
        loader = accelerator.skip_first_batches(loader, 2 * int(newest.name.split("_")[1]))
    log = os.open(directory / f"{run.rank}.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for _ in run.epochs(EPOCHS):
        for index, (batch, labels) in run.enumerate(loader):
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(batch), labels)
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            step = run.position.step + 1
            line = [step, index, float(loss).hex(), scheduler.get_last_lr()]
            os.write(log, (json.dumps(line) + "\n").encode())
            if accelerator.sync_gradients:
                if step % SAVE_EVERY == 0 and accelerator.is_main_process:
                    for folder in list_folders(directory)[: 1 - KEPT]:
                        shutil.rmtree(folder)
                    accelerator.save_state(str(directory / f"step_{step}"))
                    names = [folder.name for folder in list_folders(directory)]
                    os.write(log, (json.dumps([step, names]) + "\n").encode())
                run.step()
    run_main.exit_without_freeing(0)  # freeing torch takes 0.4 s of processor time


if __name__ == "__main__":
    main()
