"""Start a Trainer: with the global batch of the job's first start, or after the steps of another job."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
from pathlib import Path
from typing import Any

import torch

from elastic_resume import console
from elastic_resume.checkpoint import node_dir
from elastic_resume.checkpoint.atomic_io import DISK
from elastic_resume.checkpoint.manifest import Position
from elastic_resume.config import Settings
from elastic_resume.data.global_batches import GlobalBatches
from elastic_resume.errors import MachineError, UsageError
from elastic_resume.training.run import Run

logger = logging.getLogger(__name__)

BATCH_FILE = "trainer.json"  # in the node's directory


def find_global_batch(trainer: Any, options: dict[str, Any]) -> int:
    """Return the global batch of the job's first start, or what the arguments make with this many ranks.

    The schedule and the order of samples depend on it, so it has to be known before the state is restored.
    """
    args = trainer.args
    parts = args.per_device_train_batch_size, args.world_size, args.gradient_accumulation_steps
    here = parts[0] * parts[1] * parts[2]
    names = {name: options[name] for name in ("ckpt_dir", "run_id", "node_name") if options.get(name)}
    settings = Settings.for_worker(os.environ, sys.argv[0], **names)
    path = settings.ckpt_dir / settings.run_id / settings.node_name / BATCH_FILE
    own = (node_dir.read_json(path) or {}).get("global_batch")
    own_tensor = torch.tensor([own if type(own) is int and own > 0 else 0], device=args.device)
    recorded = int(trainer.accelerator.gather(own_tensor).max())
    if recorded not in {0, here} and args.process_index == 0:
        console.show_log("elastic_resume: ", os.environ)  # as er.resume() does, later
        logger.info(
            f"the global batch stays {recorded} samples, as at the job's first start. Here "
            f"{parts[0]} per device x {parts[1]} ranks x {parts[2]} accumulation steps would make {here}."
        )
    return recorded or here


def record_global_batch(run: Run, global_batch: int) -> None:
    """Write the global batch into the node's directory, if it is not there.

    If the disk fails, a start with another number of ranks is refused for its order of samples.
    """
    context = run._context  # noqa: SLF001
    path = context.node_dir / BATCH_FILE
    if context.is_local_leader and node_dir.read_json(path) != {"global_batch": global_batch}:
        with contextlib.suppress(MachineError):
            DISK.write_atomic(path, json.dumps({"global_batch": global_batch}).encode())


def check_same_checkpoint(trainer: Any, path: str | None) -> None:
    """Raise UsageError on all ranks unless all have found the checkpoint ``path``, or none."""
    step = -1
    if path is not None:
        state = node_dir.read_json(Path(path, "trainer_state.json")) or {}
        step = int(state.get("global_step", 0)) if Path(path).is_dir() else -2
    steps = trainer.accelerator.gather(torch.tensor([step], device=trainer.args.device)).tolist()
    if len(set(steps)) > 1 or step == -2:
        raise UsageError(
            f"ElasticTrainer cannot train here: resume_from_checkpoint={path!r} is not the same checkpoint "
            "on every rank, or is none. Put it where all nodes see it, or leave resume_from_checkpoint out."
        )


def set_position(run: Run, batches: GlobalBatches, step: int) -> None:
    """Let a new job begin after ``step`` steps that another one has trained."""
    epoch, within = divmod(step, batches.steps)
    per_epoch = sum(map(batches.samples, range(batches.steps)))
    samples = epoch * per_epoch + sum(map(batches.samples, range(within)))
    run._progress.position = Position(epoch, within, step, samples)  # noqa: SLF001
    run._random_numbers.start_at(step)  # noqa: SLF001
