"""Start a Trainer: with the global batch of the job's first start, or after the steps of another job.

A file in each node's directory keeps that global batch, and what a finished training has measured.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
from collections.abc import Mapping
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
from elastic_resume.state.diff import MEASURED
from elastic_resume.training.run import Run

logger = logging.getLogger(__name__)

TRAINER_FILE = "trainer.json"  # in the node's directory


def find_global_batch(trainer: Any, options: dict[str, Any]) -> int:
    """Return the global batch of the job's first start, or what the arguments make with this many ranks.

    The schedule and the order of samples depend on it, so it has to be known before the state is restored.
    """
    args = trainer.args
    parts = args.per_device_train_batch_size, args.world_size, args.gradient_accumulation_steps
    here = parts[0] * parts[1] * parts[2]
    names = {name: options[name] for name in ("ckpt_dir", "run_id", "node_name") if options.get(name)}
    settings = Settings.for_worker(os.environ, sys.argv[0], **names)
    path = settings.node_dir / TRAINER_FILE
    own = (node_dir.read_json(path) or {}).get("global_batch")
    own_tensor = torch.tensor([own if type(own) is int and own > 0 else 0], device=args.device)
    recorded = int(trainer.accelerator.gather(own_tensor).max())
    if recorded not in {0, here} and args.process_index == 0:
        console.show_log(os.environ)  # as er.resume() does, later
        logger.info(
            f"the global batch stays {recorded} samples, as at the job's first start. Here "
            f"{parts[0]} per device x {parts[1]} ranks x {parts[2]} accumulation steps would make {here}."
        )
    return recorded or here


def record(run: Run, **values: Any) -> None:
    """Write what later starts read into the node's directory, if it is not there.

    If the disk fails, a start with another number of ranks is refused for its order of samples, and another
    start of a finished job measures anew.
    """
    context = run._generation.context  # noqa: SLF001
    path = context.node_dir / TRAINER_FILE
    before = node_dir.read_json(path) or {}
    if context.is_local_leader and before != {**before, **values}:
        with contextlib.suppress(MachineError, TypeError):  # a callback's state may be no JSON
            DISK.write_atomic(path, json.dumps({**before, **values}).encode())


def measured(logs: Mapping[str, Any]) -> dict[str, Any]:
    """Return what ``logs`` has of this process's own: times and rates."""
    return {name: value for name, value in logs.items() if MEASURED.search(name)}


def read_finished(run: Run) -> dict[str, Any]:
    """Return what the start that finished the training has recorded, or nothing."""
    path = run._generation.context.node_dir / TRAINER_FILE  # noqa: SLF001
    finished: dict[str, Any] = (node_dir.read_json(path) or {}).get("finished") or {}
    kinds = {"step": int, "metrics": dict, "callbacks": dict, "logged": list}
    is_whole = isinstance(finished, dict) and all(isinstance(finished.get(n), k) for n, k in kinds.items())
    return finished if is_whole and finished["step"] == run.position.step else {}


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
    run._generation.progress.position = Position(epoch, within, step, samples)  # noqa: SLF001
    run._generation.random_numbers.start_at(step)  # noqa: SLF001
