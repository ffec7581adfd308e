"""What a training script holds: the commit point, the position, and the way to build DDP."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from elastic_resume import contract, failpoints
from elastic_resume.config import Settings
from elastic_resume.errors import ConfigError
from elastic_resume.events import EventLog
from elastic_resume.policy import cadence
from elastic_resume.policy.source import ResumePlan
from elastic_resume.store.board import Board
from elastic_resume.store.manifest import Position
from elastic_resume.store.node_dir import NodeDir
from elastic_resume.worker import announce, failure, rng, state
from elastic_resume.worker import resume as resuming
from elastic_resume.worker.batches import GlobalBatches
from elastic_resume.worker.buckets import BucketOrder
from elastic_resume.worker.place import Place
from elastic_resume.worker.resume import Resumed
from elastic_resume.worker.saver import Saver
from elastic_resume.worker.world import World

Hook = Callable[["Run"], object]
H = TypeVar("H", bound=Hook)

BUCKETS = "elastic_resume.buckets"  # the name under which the order of DDP's buckets is tracked


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
    keep: int | None = None,
    resume: str | os.PathLike[str] | None = None,
    seed: int = 0,
    rng: str = "derived",
    **named: Any,
) -> Run:
    """Bring the given objects to the newest valid state that any node holds, or start fresh.

    Call it once, on every rank, when the objects are built; before or after DDP is. It joins the process
    group that torchrun's environment describes, unless the script already has.

    Args:
        model: a module, bare or wrapped; or a dict of several (``{"g": G, "d": D}``).
        optimizer: an optimizer, or a dict of several.
        scheduler: a learning rate scheduler, or a dict of several.
        scaler: a GradScaler.
        ema: an averaged model, or any object with ``state_dict`` and ``load_state_dict``.
        data: a `GlobalBatches` (or the DataLoader around one), so that an epoch goes on where it stopped.
        ckpt_dir: root of the checkpoints; default ``./checkpoints``. Of this and the next two the flags of
            ``elastic-resume run`` win, since the agent holds the directory that they name.
        run_id: the job's name; default from torchrun's ``--rdzv-id``, else the script's name.
        node_name: this node's name; default from the scheduler, else the host name.
        save_every: a number of steps, "30s", or "auto".
        keep: how many checkpoints each node keeps, at least 2.
        resume: "auto", "must", "never", or the path of a checkpoint.
        seed: from which random numbers are derived, with rank and step.
        rng: "derived" seeds torch, `random` and numpy at each step boundary, so that a resumed run draws
            what the uninterrupted one drew; "off" leaves random numbers alone.
        **named: further objects to track, by name.

    Raises:
        ElasticResumeError: one of its kinds, each saying what to do; see `elastic_resume.errors`. It is
            raised on all ranks, before anything was loaded.

    """
    if rng not in {"derived", "off"}:
        raise ConfigError(f"rng is {rng!r}: use 'derived' or 'off'.")
    settings = Settings.for_worker(
        os.environ,
        sys.argv[0],
        ckpt_dir=ckpt_dir,
        run_id=run_id,
        node_name=node_name,
        save_every=save_every,
        keep=keep,
        resume=resume,
    )
    world = World.join()
    node_dir = settings.ckpt_dir / settings.run_id / settings.node_name
    events = EventLog(node_dir / contract.EVENTS_FILE, node=settings.node_name, rank=world.rank)
    failure.report_to(events)
    batches = getattr(data, "batch_sampler", data)
    batches = batches if isinstance(batches, GlobalBatches) else None
    tracked = state.collect(
        {
            "model": model,
            "optimizer": optimizer,
            "scheduler": scheduler,
            "scaler": scaler,
            "ema": ema,
            "data": batches if batches is not None else data,
            **named,
        }
    )
    place = Place(world, settings, events)
    return Run(place, tracked, batches, seed if rng == "derived" else None)


class Run:
    """One rank's view of the job, in one generation. Made by `resume`."""

    def __init__(
        self, place: Place, tracked: dict[str, Any], batches: GlobalBatches | None, seed: int | None
    ) -> None:
        """Resume; see `resume`. ``seed`` is None when random numbers are left alone."""
        self._place = place
        self._buckets = BucketOrder()
        self._tracked = tracked = {**tracked, BUCKETS: self._buckets}
        self._batches = batches
        self._seed = seed
        self._node_dir = place.together(lambda: _open_node(place))
        self._board = Board(place.node_dir / contract.BOARD_FILE)
        self._hooks: list[Hook] = []
        self._hooks_ran = False
        self._closed = False
        self._mark_every_s = float(os.environ.get(contract.ENV_STEP_MARK_S, "5"))
        self._next_mark = 0.0
        if batches is not None:
            batches.bind(place.world.rank, place.world.size, self._reseed)
        resumed = resuming.resume(place, self._node_dir, self._board, tracked)
        self._plan = resumed.plan
        self._position = _start_position(resumed, batches)
        self._saver = Saver(place, self.generation, _saved_step(self._plan, place)) if place.leads else None
        failure.enter(generation=self.generation, step=lambda: self._position.step)
        self._begin(resumed)

    # ---- what the script reads -----------------------------------------------------------------------

    @property
    def position(self) -> Position:
        """Where training stands: epoch, step_in_epoch, step (of the whole job) and samples, all finished."""
        return self._position

    @property
    def generation(self) -> int:
        """This lifetime of the worker group; grows over the whole job."""
        return self._plan.generation

    @property
    def plan(self) -> ResumePlan:
        """What this generation started from, and what was rejected."""
        return self._plan

    @property
    def rank(self) -> int:
        """This rank, 0 to world_size - 1."""
        return self._place.world.rank

    @property
    def world_size(self) -> int:
        """How many ranks this generation has."""
        return self._place.world.size

    @property
    def loss_weight(self) -> float:
        """What to multiply this rank's mean loss with before backward().

        DDP's plain mean over ranks is then the exact mean over the global batch, even where the
        shares differ in size. 1.0 where they do not, and without ``data=``.
        """
        return self._batches.loss_weight(self._position.step_in_epoch) if self._batches else 1.0

    # ---- what the script calls -----------------------------------------------------------------------

    def ddp(self, model: nn.Module, **ddp_kwargs: Any) -> nn.Module:
        """Wrap ``model`` in DistributedDataParallel; give it back as it is when there is no process group.

        For a tracked model nothing is broadcast (``init_sync=False``): `resume` has compared the digests of
        all ranks. ``ddp_kwargs`` go to DistributedDataParallel and win over what is chosen here.
        """
        if isinstance(model, (DistributedDataParallel, DataParallel)) or not dist.is_initialized():
            return model
        inner = state.unwrap(model)
        name = next((name for name, item in self._tracked.items() if item is inner), None)
        if name is not None:
            ddp_kwargs.setdefault("init_sync", False)
        devices = {parameter.device for parameter in model.parameters()}
        if len(devices) == 1 and next(iter(devices)).type == "cuda":
            ddp_kwargs.setdefault("device_ids", [next(iter(devices)).index])
        wrapped = DistributedDataParallel(model, **ddp_kwargs)
        if name is not None:
            self._buckets.prepare(name, model, wrapped)
        return wrapped

    def epochs(self, count: int) -> Iterator[int]:
        """Yield the numbers of the epochs that are left of ``count``, the interrupted one first.

        After the last one the newest state is committed on every node.
        """
        self._run_hooks()
        while self._position.epoch < count:
            self._seek()
            yield self._position.epoch
            self._position = replace(self._position, epoch=self._position.epoch + 1, step_in_epoch=0)
        self._finish()

    def step(self) -> None:
        """Commit point: the step just finished counts. Call it once after each optimizer step.

        Raises:
            UntrackableError: a save is due and an object has come to hold state that cannot be stored.

        """
        before = self._position
        self._position = position = Position(
            epoch=before.epoch,
            step_in_epoch=before.step_in_epoch + 1,
            step=before.step + 1,
            samples=before.samples + (self._batches.samples(before.step_in_epoch) if self._batches else 0),
        )
        self._buckets.end_step()
        self._board.finish_step(self._place.local_rank, position.step)
        failpoints.hit("step")
        self._reseed()
        now = time.monotonic()
        if now >= self._next_mark:
            self._next_mark = now + self._mark_every_s
            self._place.events.write("step", **self._where(), epoch=position.epoch)
        saver = self._saver
        if (
            saver is not None
            and cadence.is_due(
                self._place.settings.save_every,
                step=position.step,
                saved_step=saver.saved_step,
                since_s=saver.since_s,
                stall_s=saver.stall_s,
            )
            and saver.idle
        ):
            saver.take(self._tracked, position)

    def save(self) -> Path | None:
        """Commit the state now, and wait for the disk. Give the path on the rank that leads its node.

        Call it at a step boundary. None on other ranks, and where the disk refused (which is told aloud).
        """
        if self._saver is None:
            return None
        path = self._saver.wait()
        if self._saver.saved_step < self._position.step:
            self._saver.take(self._tracked, self._position)
            path = self._saver.wait()
        return path

    def on_resume(self, hook: H) -> H:
        """Call ``hook(run)`` in each generation that starts from a checkpoint, before its first epoch.

        Hooks run in the new world, in the order of their registration. Can be used as a decorator.
        """
        if self._hooks_ran:
            self._call(hook)
        self._hooks.append(hook)
        return hook

    @contextlib.contextmanager
    def busy(self, reason: str) -> Iterator[None]:
        """Mark a long stretch without steps (an evaluation, say), so that nobody takes it for a hang."""
        self._board.set_busy(self._place.local_rank, True)
        self._place.events.write("busy", **self._where(), reason=reason)
        try:
            yield
        finally:
            self._board.set_busy(self._place.local_rank, False)

    def close(self) -> None:
        """Commit the newest finished step and release the node's directory.

        In a ``finally`` that an exception passes through nothing is saved: the state may be half way
        through a step.
        """
        if not self._closed and sys.exc_info()[0] is None:
            self.save()
        self._release()

    def __enter__(self) -> Run:  # noqa: PYI034  typing.Self needs Python 3.11
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self._release()

    # ---- inside --------------------------------------------------------------------------------------

    def _begin(self, resumed: Resumed) -> None:
        world = self._place.world
        self._board.begin(
            self._place.local_rank,
            generation=self.generation,
            step=self._position.step,
            world_size=world.size,
        )
        self._place.events.write(
            "worker-start", **self._where(), local_rank=self._place.local_rank, world_size=world.size
        )
        self._reseed()
        if self.rank == 0:
            self._place.events.write("resume", **announce.as_event(resumed, self._position, world.size))
            line = announce.as_text(resumed, self._position, world.size, self._batches is not None)
            print(f"elastic_resume: {line}", file=sys.stderr, flush=True)
        atexit.register(self._release)

    def _reseed(self) -> None:
        if self._seed is not None:
            rng.seed_all(self._seed, self.rank, self._position.step)

    def _where(self) -> dict[str, int]:
        return {"generation": self.generation, "step": self._position.step}

    def _seek(self) -> None:
        if self._batches is not None:
            self._batches.seek(self._position.epoch, self._position.step_in_epoch)

    def _run_hooks(self) -> None:
        if not self._hooks_ran:
            self._hooks_ran = True
            for hook in self._hooks:
                self._call(hook)

    def _call(self, hook: Hook) -> None:
        if self._plan.kind == "checkpoint":
            hook(self)

    def _finish(self) -> None:
        self.save()
        self._place.events.write("run-end", **self._where(), epoch=self._position.epoch)

    def _release(self) -> None:
        if self._closed:
            return
        self._closed = True
        if self._saver is not None:
            self._saver.close()
        self._node_dir.release()
        self._place.events.close()


def _open_node(place: Place) -> NodeDir:
    """Claim the node's directory where no agent has done so; only the rank that leads its node does."""
    settings = place.settings
    if place.leads and contract.ENV_AGENT_PID not in os.environ:
        # After a kill, forked DataLoader workers hold the lock until they notice, within some seconds.
        node_dir = NodeDir.claim(settings.ckpt_dir, settings.run_id, settings.node_name, timeout_s=20)
    else:
        node_dir = NodeDir.attach(settings.ckpt_dir, settings.run_id, settings.node_name)
    if place.leads:
        place.catalog.sweep()
    return node_dir


def _saved_step(plan: ResumePlan, place: Place) -> int:
    """The step that the node's own disk holds: none where a peer's directory or a given path was read."""
    copy = plan.copy_of(place.node)
    elsewhere = copy is not None and copy.home != place.node
    return -1 if plan.kind == "checkpoint" and elsewhere else plan.step


def _start_position(resumed: Resumed, batches: GlobalBatches | None) -> Position:
    if resumed.manifest is None:
        return Position(epoch=0, step_in_epoch=0, step=0, samples=0)
    position = resumed.manifest.position
    return position if batches is not None else replace(position, step_in_epoch=0)
