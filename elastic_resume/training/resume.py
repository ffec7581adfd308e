"""Provide `resume`, by which a training script restores its state or starts fresh.

It checks the script's arguments, joins the ranks, and creates the process's `Run`. A process that starts
early parks before it joins them, until its node is in a view (`supervisor_link`).
"""

from __future__ import annotations

import functools
import inspect
import logging
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, ParamSpec

from elastic_resume import console, constants
from elastic_resume.config import Settings, forget_agent_around_torchrun
from elastic_resume.data import batch_size, elastic_sampler, rng
from elastic_resume.data.global_batches import GlobalBatches
from elastic_resume.data.sharded_stream import ShardedStream
from elastic_resume.errors import ConfigError, ElasticResumeError, UsageError
from elastic_resume.restore import coordinator, warm_memory
from elastic_resume.restore.warm_memory import TensorPool
from elastic_resume.setting_values import suggest_similar
from elastic_resume.slots.ipc import SlotClient
from elastic_resume.slots.progress_page import read_start_ticks
from elastic_resume.state import state_dict
from elastic_resume.state.built_settings import BuiltSettings
from elastic_resume.state.parameters import FrozenParameters
from elastic_resume.training import rank_claim, untracked, worker_exit
from elastic_resume.training.generation import RunArguments
from elastic_resume.training.progress import RunOptions
from elastic_resume.training.run import Run
from elastic_resume.training.supervisor_link import open_link

logger = logging.getLogger(__name__)

P = ParamSpec("P")

TICKS_PER_S = os.sysconf("SC_CLK_TCK")

# Node directories of this process's runs. A second run there would continue the first one.
_resumed: set[Path] = set()


def _refuse_unknown_keywords(function: Callable[P, Run]) -> Callable[P, Run]:
    """Let ``function`` raise a ConfigError for an unknown keyword. Type checkers see its own signature."""
    known = list(inspect.signature(function).parameters)

    @functools.wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> Run:
        unknown = {name: value for name, value in kwargs.items() if name not in known}
        if unknown:
            worker_exit.install_startup_hook()
            console.show_log(os.environ)
            raise ConfigError(" ".join(_explain_unknown(name, unknown[name], known) for name in unknown))
        return function(*args, **kwargs)

    return checked


def _explain_unknown(name: str, value: Any, known: list[str]) -> str:
    similar = suggest_similar(name, known).replace("-", "_")
    try:
        is_trackable = bool(state_dict.collect_objects({name: value}))
    except Exception:  # noqa: BLE001 - the object's own code runs; the unknown name is the error to report
        is_trackable = False
    hint = f' Pass an object of your own as track={{"{name}": ...}}.' if is_trackable else ""
    return f"resume() has no argument {name!r}.{similar}{hint}"


@_refuse_unknown_keywords
def resume(
    *,
    model: Any = None,
    optimizer: Any = None,
    scheduler: Any = None,
    scaler: Any = None,
    ema: Any = None,
    data: Any = None,
    track: Mapping[str, Any] | None = None,
    ckpt_dir: str | os.PathLike[str] | None = None,
    run_id: str | None = None,
    node_name: str | None = None,
    save_every: str | int | None = None,
    snapshot_every: str | int | None = None,
    keep: int | None = None,
    resume: Literal["auto", "must", "never"] | None = None,
    resume_from: str | int | None = None,
    seed: int | None = None,
    rng: Literal["derived", "off"] = "derived",
    on_world_change: Literal["keep_global_batch", "keep_local_batch", "error"] | None = None,
) -> Run:
    """Restore the newest valid state that any node holds into the given objects, or start fresh.

    A fresh start takes rank 0's values, including anything that the script loaded into them before.

    Call it once on every rank, after the objects are built, before or after wrapping in DDP. It joins the
    process group of torchrun's environment, unless the script has done so.

    An argument beats a flag of ``elastic-resume run``, the flag beats the environment
    (``ELASTIC_RESUME_KEEP=5``), the environment beats the file of ``--config`` (``ELASTIC_RESUME_CONFIG``),
    and the file beats the default. There is one exception: under ``elastic-resume run`` the agent decides
    ``ckpt_dir``, ``run_id`` and ``node_name``, and the arguments of these names are ignored. The agent has
    locked that directory before the script starts.

    Args:
        model: a module, bare or wrapped; or a dict of several (``{"g": G, "d": D}``).
        optimizer: an optimizer, or a dict of several.
        scheduler: a learning rate scheduler, or a dict of several.
        scaler: a GradScaler.
        ema: an averaged model, any object with ``state_dict`` and ``load_state_dict``, or tensors: one, a
            list, or a dict by name. Tensors are changed in place, or replaced in their container.
        data: a `GlobalBatches` or the DataLoader around one, the DataLoader around an `ElasticSampler`, or a
            `ShardedStream`, so that an interrupted epoch continues at its next sample.
        track: further objects by name, ``track={"discriminator": d, "best": best}``. A value has the same
            forms as ``ema``, and may be a dict of such objects. A number is a tensor without dimensions that
            is changed in place. A checkpoint stores each under its name.
        ckpt_dir: root of the checkpoints; default ``./checkpoints``. Ignored under ``elastic-resume run``, as
            are the next two arguments.
        run_id: the job's name; default from torchrun's ``--rdzv-id``, else the script's name.
        node_name: this node's name; default from the scheduler, else the host name.
        save_every: interval between checkpoints: a number of steps, a time ("30s"), or "auto".
        snapshot_every: interval between snapshots in memory: the same forms, or "off".
        keep: how many checkpoints each node keeps, at least 2.
        resume: "auto", "must" or "never". "never" moves an earlier run of this name to ``RUN_ID.old-N``;
            under ``elastic-resume run`` give it to the command.
        resume_from: go back to an earlier state, once: a step (500), a milestone of `Run.save` ("best": the
            greatest metric, else the newest of that name), "latest" (the newest milestone) or a checkpoint
            ("g4-s500": generation 4, step 500). Newer states are moved to quarantine and never win again. A
            restart with the same value goes on from there.
        seed: the seed from which random numbers are derived, with rank and step. The default is rank 0's
            ``torch.manual_seed`` at the first start; it stays the same over restarts.
        rng: "derived" seeds torch, `random` and numpy (global) at each step boundary, so that a resumed run
            draws the same numbers as an uninterrupted one; "off" leaves random numbers alone. For
            augmentation see `er.seeded`.
        on_world_change: the policy if the number of ranks differs from the checkpoint's. "keep_global_batch"
            keeps the batch of an optimizer step, the default with `GlobalBatches` and, where it can be kept,
            with an `ElasticSampler`. "keep_local_batch" keeps each rank's share. "error" raises. The learning
            rate is never changed: see `Run.on_world_change`.

    Raises:
        ConfigError: an argument is unknown or has a wrong value.
        UsageError: the job had a run in this process before, or an optimizer's parameter is in no object.
        UntrackableError: an object cannot be stored, for example because it has no ``state_dict``.
        ElasticResumeError: another subclass in `elastic_resume.errors`, on all ranks, before anything was
            loaded.

    """
    start_s = time.clock_gettime(time.CLOCK_BOOTTIME) - read_start_ticks(os.getpid()) / TICKS_PER_S
    worker_exit.before_resume()
    try:
        console.show_log(os.environ)
        forget_agent_around_torchrun(os.environ)
        link = open_link()
        starts_early = constants.ENV_EARLY_START in os.environ
        objects = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "scaler": scaler}
        objects |= {"ema": ema, "data": None}
        _check_track(track, objects)
        objects |= track or {}
        _check_random_options(seed, rng)
        tensor_pool = None
        if starts_early and link is not None:
            tensor_pool = _touch_memory(state_dict.collect_objects(objects))
            link.park()  # until the node is in a view; what follows reads rank and world size
        _check_resume_mode(resume)
        batches = elastic_sampler.find_batches(data := elastic_sampler.find_loader(data))
        _check_world_change_policy(data, batches, on_world_change)
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
            resume_from=resume_from,
        )
        objects["data"] = data if batches is None else batches
        tracked = state_dict.collect_objects(objects)
        _check_single_data_order(tracked, batches)
        untracked.require_tracked_parameters(tracked)
        frozen, built_settings = FrozenParameters(tracked), BuiltSettings(tracked)
        _check_second_run(settings.node_dir)
    except ElasticResumeError:
        worker_exit.install_startup_hook()  # the node's name is not known yet
        raise
    rank_claim.claim_rank()
    options = RunOptions(seed, rng, on_world_change)
    arguments = RunArguments(tracked, batches, data, options, settings, frozen, built_settings, start_s)
    run = Run(arguments, link, has_parked=starts_early, tensor_pool=tensor_pool)
    _prepare_wrappers(run, frozen, {"model": model, **(track or {})})
    _resumed.add(settings.node_dir)
    return run


def _prepare_wrappers(run: Run, frozen: FrozenParameters, objects: Mapping[str, Any]) -> None:
    """Restore the bucket order of each DDP that the script has made; warn if it lacks parameters."""
    for wrapper in state_dict.find_ddp_models(objects):
        run.ddp(wrapper)
        unfrozen = frozen.find_unfrozen(wrapper.module)
        if unfrozen and run.rank == 0 and run.world_size > 1:
            logger.warning(
                f"WARNING: the checkpoint has requires_grad=True for {unfrozen[0]} (of {len(unfrozen)}), and "
                "DistributedDataParallel was made before er.resume(), when it was False: it would not "
                "average these gradients. Wrap the model after er.resume(): model = run.ddp(model)."
            )


def _touch_memory(tracked: Mapping[str, Any]) -> TensorPool | None:
    """Touch the memory that the restore will need, while the process waits for its node's first view."""
    size, local_rank = (os.environ.get(n, "") for n in (constants.ENV_STATE_BYTES, constants.ENV_LOCAL_RANK))
    if not (size.isdigit() and local_rank.isdigit()):
        return None
    name = os.environ.get(constants.ENV_COMMITTER, "")
    client = SlotClient(name, int(local_rank), is_local_leader=int(local_rank) == 0)
    try:
        return warm_memory.prepare(tracked, int(size), client)
    finally:
        client.close()


def _check_second_run(node_dir: Path) -> None:
    """Raise UsageError if this process had a run in ``node_dir``. Without an agent only warn.

    A test without an agent may simulate a restart in one process.
    """
    if node_dir not in _resumed:
        return
    if constants.ENV_AGENT_PID in os.environ:
        raise UsageError(
            f"er.resume() was called before in this process, for {node_dir}. A second training, such as the "
            "next fold of a cross-validation, would continue the first one. Start it as a job of its own, "
            "with another --rdzv-id."
        )
    if os.environ.get("RANK", "0") == "0":
        logger.warning(
            f"WARNING: er.resume() was called before in this process, for {node_dir}. A second training, "
            "such as the next fold of a cross-validation, continues the first one. Give it another run_id=."
        )


def _check_track(track: object, objects: Mapping[str, Any]) -> None:
    if track is not None and not isinstance(track, Mapping):
        raise ConfigError(
            f"track is {state_dict.type_name(track)}: pass a dict of objects by name, "
            'track={"name": object}.'
        )
    for name in objects.keys() & (track or {}):
        raise ConfigError(f"track has the name {name!r}, which is an argument: pass the object as {name}=.")


def _check_resume_mode(resume: object) -> None:
    """Refuse "never" if the agent has not moved the earlier run aside: its states would be resumed."""
    if resume != "never" or constants.ENV_AGENT_PID not in os.environ:
        return
    if Settings.for_worker(os.environ, sys.argv[0]).resume != "never":
        raise ConfigError(
            "resume='never': under `elastic-resume run` the agent must move the earlier run aside before it "
            "starts workers. Give `--resume never` to the command."
        )


def _check_random_options(seed: object, rng_mode: object) -> None:
    if rng_mode not in rng.MODES:
        raise ConfigError(f"rng is {rng_mode!r}: use 'derived' or 'off'.")
    if seed is not None and (type(seed) is not int or not -(2**63) <= seed < 2**63):
        raise ConfigError(f"seed is {seed!r}: use an integer of at most 64 bits.")


def _check_world_change_policy(data: object, batches: GlobalBatches | None, policy: object) -> None:
    if policy is not None and policy not in batch_size.POLICIES:
        policies = ", ".join(map(repr, batch_size.POLICIES))
        raise ConfigError(f"on_world_change is {policy!r}: use one of {policies}.")
    if isinstance(data, ShardedStream):
        if policy == batch_size.KEEP_GLOBAL:
            raise ConfigError(
                f"on_world_change is {policy!r}, but a ShardedStream reads batch_size samples on each rank, "
                'so its global batch grows with the number of ranks: use "keep_local_batch".'
            )
    elif batches is None and policy not in {None, batch_size.ERROR}:
        raise ConfigError(
            f"on_world_change is {policy!r}, but without data= batches cannot be divided: pass a "
            "GlobalBatches or a loader with an ElasticSampler as data=."
        )


def _check_single_data_order(tracked: Mapping[str, Any], batches: GlobalBatches | None) -> None:
    """Refuse a second order of samples: it would get no position, and every rank would read all of it."""
    for name, item in tracked.items():
        is_order = isinstance(item, (GlobalBatches, elastic_sampler.ElasticSampler, ShardedStream))
        if is_order and item is not batches and name != coordinator.DATA:
            raise ConfigError(
                f"{name}: a run keeps its place in one order of samples, data=, and this is another one. "
                "Leave it out of resume(): read it with torch's DistributedSampler, or bind() and seek() it."
            )
