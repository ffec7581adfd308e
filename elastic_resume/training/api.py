"""``er.resume``: check a script's arguments, and build its `Run`."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Any

from elastic_resume import constants
from elastic_resume.config import Settings
from elastic_resume.data import elastic_sampler, world_size
from elastic_resume.data.global_batches import GlobalBatches
from elastic_resume.data.rng import MODES
from elastic_resume.data.world_size import ERROR
from elastic_resume.errors import ConfigError
from elastic_resume.events import EventLog
from elastic_resume.restore.collectives import Collectives
from elastic_resume.restore.rank_context import RankContext
from elastic_resume.state import state_dict
from elastic_resume.training import crash_reporting
from elastic_resume.training.progress import RunOptions
from elastic_resume.training.run import Run


def resume(
    *,
    model: Any = None,
    optimizer: Any = None,
    scheduler: Any = None,
    scaler: Any = None,
    ema: Any = None,
    data: Any = None,
    ckpt_dir: str | os.PathLike[str] | None = None,
    run_id: str | None = None,
    node_name: str | None = None,
    save_every: str | int | None = None,
    snapshot_every: str | int | None = None,
    keep: int | None = None,
    resume: str | None = None,
    seed: int | None = None,
    rng: str = "derived",
    on_world_change: str | None = None,
    **named: Any,
) -> Run:
    """Restore the newest valid state that any node holds into the given objects, or start fresh.

    A fresh start takes rank 0's values, including anything that the script loaded into them before.

    Call it once on every rank, after the objects are built, before or after wrapping in DDP. It joins the
    process group of torchrun's environment, unless the script has done so.

    Args:
        model: a module, bare or wrapped; or a dict of several (``{"g": G, "d": D}``).
        optimizer: an optimizer, or a dict of several.
        scheduler: a learning rate scheduler, or a dict of several.
        scaler: a GradScaler.
        ema: an averaged model, any object with ``state_dict`` and ``load_state_dict``, or tensors: one, a
            list, or a dict by name. Tensors are changed in place, or replaced in their container.
        data: a `GlobalBatches` or the DataLoader around one, or the DataLoader around an `ElasticSampler`,
            so that an interrupted epoch continues at its next sample.
        ckpt_dir: root of the checkpoints; default ``./checkpoints``. Under ``elastic-resume run`` its flags
        decide
            this and the next two arguments, because the agent has locked that directory.
        run_id: the job's name; default from torchrun's ``--rdzv-id``, else the script's name.
        node_name: this node's name; default from the scheduler, else the host name.
        save_every: interval between checkpoints: a number of steps, a time ("30s"), or "auto".
        snapshot_every: interval between snapshots in memory: the same forms, or "off".
        keep: how many checkpoints each node keeps, at least 2.
        resume: "auto", "must" or "never".
        seed: the seed from which random numbers are derived, with rank and step. The default is the one that
        rank 0
            gave ``torch.manual_seed`` at the first start; it stays the same over restarts.
        rng: "derived" seeds torch, `random` and numpy (global) at each step boundary, so that a resumed run
            draws the same numbers as an uninterrupted one; "off" leaves random numbers alone. For
            augmentation see `er.seeded`.
        on_world_change: the policy if the number of ranks differs from the checkpoint's. "keep_global_batch"
        keeps
            the batch of an optimizer step, the default with `GlobalBatches`. "keep_local_batch" keeps each
            rank's share, the default with an `ElasticSampler`. "error" raises. The learning rate is never
            changed: see `Run.on_world_change`.
        **named: further objects to track, by name.

    Raises:
        ElasticResumeError: a subclass in `elastic_resume.errors`, on all ranks, before anything was loaded.

    """
    with crash_reporting.report_startup_errors():
        options = RunOptions(seed, rng, on_world_change)
        _check_random_options(seed, rng)
        batches = elastic_sampler.find_batches(data)
        _check_world_change_policy(batches, on_world_change)
        settings = Settings.for_worker(
            os.environ,
            sys.argv[0],
            ckpt_dir=ckpt_dir,
            run_id=run_id,
            node_name=node_name,
            save_every=save_every,
            snapshot_every=snapshot_every,
            keep=keep,
            resume=resume,
        )
        given = {
            "model": model,
            "optimizer": optimizer,
            "scheduler": scheduler,
            "scaler": scaler,
            "ema": ema,
            "data": batches if batches is not None else data,
            **named,
        }
        tracked = state_dict.collect_objects(given)
        _check_single_data_order(tracked, batches)
    collectives = Collectives.join()
    node_dir = settings.ckpt_dir / settings.run_id / settings.node_name
    events = EventLog(
        node_dir / constants.EVENTS_FILE,
        memory_path=os.environ.get(constants.ENV_ROUND_EVENTS),
        node=settings.node_name,
        rank=collectives.rank,
    )
    crash_reporting.install_hook(events)
    if batches is None:
        elastic_sampler.check_no_per_rank_state(data, collectives.size)
    return Run(RankContext(collectives, settings, events), tracked, batches, options)


def _check_random_options(seed: object, rng: object) -> None:
    if rng not in MODES:
        raise ConfigError(f"rng is {rng!r}: use 'derived' or 'off'.")
    if seed is not None and (type(seed) is not int or not -(2**63) <= seed < 2**63):
        raise ConfigError(f"seed is {seed!r}: use an integer of at most 64 bits.")


def _check_world_change_policy(batches: GlobalBatches | None, on_world_change: object) -> None:
    if on_world_change is not None and on_world_change not in world_size.POLICIES:
        raise ConfigError(
            f"on_world_change is {on_world_change!r}: use one of {', '.join(map(repr, world_size.POLICIES))}."
        )
    if batches is None and on_world_change not in {None, ERROR}:
        raise ConfigError(
            f"on_world_change is {on_world_change!r}, but without data= batches cannot be divided: pass a "
            "GlobalBatches or a loader with an ElasticSampler as data=."
        )


def _check_single_data_order(tracked: Mapping[str, Any], batches: GlobalBatches | None) -> None:
    """Refuse a second order of samples: it would get no position, and every rank would read all of it."""
    for name, item in tracked.items():
        if isinstance(item, (GlobalBatches, elastic_sampler.ElasticSampler)) and item is not batches:
            raise ConfigError(
                f"{name}: a run keeps its place in one order of samples, data=, and this is another one. "
                "Leave it out of resume(): read it with torch's DistributedSampler, or bind() and seek() it."
            )
