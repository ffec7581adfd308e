"""``er.resume``: from the arguments of a script to a `Run`."""

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
    """Bring the given objects to the newest valid state that any node holds, or start fresh.

    A fresh start takes rank 0's values, and so whatever was loaded into the objects there before.

    Call it once, on every rank, when the objects are built; before or after DDP is. It joins the process
    group that torchrun's environment describes, unless the script already has.

    Args:
        model: a module, bare or wrapped; or a dict of several (``{"g": G, "d": D}``).
        optimizer: an optimizer, or a dict of several.
        scheduler: a learning rate scheduler, or a dict of several.
        scaler: a GradScaler.
        ema: an averaged model, any object with ``state_dict`` and ``load_state_dict``, or tensors: one, a
            list, or a dict by name, each changed in place or replaced where it stands.
        data: a `GlobalBatches` or the DataLoader around one, or the DataLoader around an `ElasticSampler`,
            so that an epoch goes on where it stopped.
        ckpt_dir: root of the checkpoints; default ``./checkpoints``. Of this and the next two the flags of
            ``elastic-resume run`` win, since the agent holds the directory that they name.
        run_id: the job's name; default from torchrun's ``--rdzv-id``, else the script's name.
        node_name: this node's name; default from the scheduler, else the host name.
        save_every: steps or seconds between two checkpoints: a number of steps, "30s", or "auto".
        snapshot_every: the same for copies in memory, or "off".
        keep: how many checkpoints each node keeps, at least 2.
        resume: "auto", "must" or "never".
        seed: from which random numbers are derived, with rank and step; default is what rank 0 gave
            ``torch.manual_seed`` before, kept over all restarts.
        rng: "derived" seeds torch, `random` and numpy (global) at each step boundary, so that a resumed run
            draws what the uninterrupted one drew; "off" leaves random numbers alone. For augmentation see
            `er.seeded`.
        on_world_change: what another number of ranks than the checkpoint's means. "keep_global_batch" leaves
            the batch of an optimizer step as it is, the default with `GlobalBatches`; "keep_local_batch"
            leaves what each rank reads of it, the default with an `ElasticSampler`; "error" refuses it.
            The learning rate is never touched: see `Run.on_world_change`.
        **named: further objects to track, by name.

    Raises:
        ElasticResumeError: one of its kinds, each saying what to do; see `elastic_resume.errors`. It is
            raised on all ranks, before anything was loaded.

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
    world = Collectives.join()
    node_dir = settings.ckpt_dir / settings.run_id / settings.node_name
    events = EventLog(
        node_dir / constants.EVENTS_FILE,
        memory_path=os.environ.get(constants.ENV_ROUND_EVENTS),
        node=settings.node_name,
        rank=world.rank,
    )
    crash_reporting.install_hook(events)
    if batches is None:
        elastic_sampler.check_no_per_rank_state(data, world.size)
    return Run(RankContext(world, settings, events), tracked, batches, options)


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
            f"on_world_change is {on_world_change!r}, and no data= says how batches are cut: pass a "
            "GlobalBatches or a loader with an ElasticSampler."
        )


def _check_single_data_order(tracked: Mapping[str, Any], batches: GlobalBatches | None) -> None:
    """Refuse a second order of samples: nobody would tell it its place, all ranks would read all of it."""
    for name, item in tracked.items():
        if isinstance(item, (GlobalBatches, elastic_sampler.ElasticSampler)) and item is not batches:
            raise ConfigError(
                f"{name}: a run keeps its place in one order of samples, data=, and this is another one. "
                "Leave it out of resume(): read it with torch's DistributedSampler, or bind() and seek() it."
            )
