"""What a training script holds: the commit point, the position, and the way to build DDP.

What a script wants to be called for when a generation begins, in the order in which it said so.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import torch
from torch import nn

from elastic_resume import console, constants, failpoints
from elastic_resume.capture.schedule import Saver
from elastic_resume.checkpoint.manifest import Position
from elastic_resume.data import rng
from elastic_resume.data.global_batches import GlobalBatches
from elastic_resume.data.world_size import WorldChange
from elastic_resume.errors import MachineError, UsageError
from elastic_resume.policy.resume_plan import ResumePlan
from elastic_resume.restore import coordinator as resuming
from elastic_resume.restore import replica_check
from elastic_resume.restore.coordinator import Resumed
from elastic_resume.restore.rank_context import Keeping, Place, open_node
from elastic_resume.snapshot.progress_page import Board
from elastic_resume.state.bucket_order import BucketOrder
from elastic_resume.state.state_dict import ParameterOrder
from elastic_resume.state.untracked import Untracked
from elastic_resume.training import announce, crash_reporting, ddp
from elastic_resume.training.graceful_shutdown import Drain
from elastic_resume.training.heartbeat import Beat
from elastic_resume.training.progress import Options, Progress

Call = Callable[[], object]


class Hooks:
    """Calls that wait for the generation's first epoch, step or save; later ones are made at once."""

    def __init__(self) -> None:
        self._waiting: list[Call] = []
        self._began = False

    def add(self, call: Call) -> None:
        """Make ``call`` when the generation begins."""
        if self._began:
            call()
        else:
            self._waiting.append(call)

    def begin(self) -> None:
        """Make the calls, the first time."""
        if not self._began:
            self._began = True
            for call in self._waiting:
                call()


Hook = Callable[["Run"], object]
H = TypeVar("H", bound=Hook)
W = TypeVar("W", bound=Callable[[WorldChange], object])
T = TypeVar("T")

FINAL_TRIES = 3


class Run:
    """One rank's view of the job, in one generation. Made by `start.resume`."""

    def __init__(
        self, place: Place, tracked: dict[str, Any], batches: GlobalBatches | None, options: Options
    ) -> None:
        """Resume; see `start.resume`."""
        self._place = place
        self._buckets = BucketOrder()
        seed = options.seed if options.seed is not None else _seed_of_rank_0(place)
        self._random = rng.RandomNumbers(options.rng, seed, place.world.rank)
        self._tracked = tracked = {
            **tracked,
            "elastic_resume.buckets": self._buckets,
            "elastic_resume.seed": self._random,
            resuming.PARAMETERS: ParameterOrder(tracked),
        }
        self._drain = Drain()
        self._hooks = Hooks()
        self._closed = False
        self._pid = os.getpid()
        self._mark_every_s = place.settings.step_mark_s
        self._next_mark = 0.0
        if batches is not None:
            policy = options.on_world_change
            batches.bind(place.world.rank, place.world.size, self._before_batch, policy=policy)
        self._node_dir = place.together(lambda: open_node(place))
        keeping: Keeping | None = None
        try:
            place.refuse_namesakes(place.together(self._node_dir.identity))
            board = place.together(lambda: Board(place.node_dir / constants.BOARD_FILE))
            keeping = self._keeping = Keeping(place)
            place.memory = keeping.memory
            resumed = resuming.resume(place, self._node_dir, board, tracked)
            self._progress = Progress(resumed.manifest, batches, options, place.world)
            if resuming.DATA in tracked:  # which keeps its place itself
                self._progress.repeats = 0
        except BaseException:
            if keeping is not None:
                keeping.close()
            self._node_dir.release()  # a notebook may try again
            raise
        if options.seed is not None:
            self._random.seed = options.seed  # said now, and so meant
        self._plan = resumed.plan
        self._beat = Beat(board, place)
        self._saver = Saver(
            place, self._plan, resumed.saved_step, tracked, keeping.memory, busy=self._beat.busy
        )
        self._saver.expect(resuming.expected_bytes(resumed.flat, tracked))
        place.together(lambda: None)  # no rank takes a step before its lead has said when snapshots come
        crash_reporting.enter(generation=self.generation, step=lambda: self.position.step)
        self._untracked = Untracked(self._tracked) if self.rank == 0 else None
        self._begin(resumed)

    # ---- what the script reads -----------------------------------------------------------------------

    @property
    def position(self) -> Position:
        """Where training stands: epoch, step_in_epoch, step (of the whole job) and samples, all finished."""
        return self._progress.position

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
        return self._progress.loss_weight

    @property
    def last_micro_batch(self) -> bool:
        """Whether the batch that `micro_batches` gave last is its step's last: now step, and `run.step()`."""
        return self._progress.last_part

    @property
    def world_change(self) -> WorldChange | None:
        """What is not as it was when the copy was made that this generation started from; mostly None."""
        return self._progress.change

    # ---- what the script calls -----------------------------------------------------------------------

    def ddp(self, model: nn.Module, **ddp_kwargs: Any) -> nn.Module:
        """Wrap ``model`` in DistributedDataParallel; give it back as it is when there is no process group.

        For a tracked model nothing is broadcast (``init_sync=False``): `resume` has compared the digests of
        all ranks. ``ddp_kwargs`` go to DistributedDataParallel and win over what is chosen here.
        """
        return ddp.wrap(model, self._tracked, self._buckets, ddp_kwargs)

    def epochs(self, count: int) -> Iterator[int]:
        """Yield the numbers of the epochs that are left of ``count``, the interrupted one first.

        What the script does after an epoch's last batch (a scheduler's step, an evaluation) belongs to the
        epoch: a save that falls due with its last step is made when the script asks for the next one. After
        the last one the newest state is committed on every node.
        """
        self._hooks.begin()
        done = f"epoch {self.position.epoch} of {count} is over" if self.position.epoch >= count else ""
        self._earlier.tell(done)
        with self._beat.training():
            while self.position.epoch < count:
                self._random.begin(self.position.step)
                yield self._progress.begin_epoch()
                self._progress.end_epoch()
                self._save_if_due()
            self._finish()

    def step(self) -> None:
        """Commit point: the step just finished counts. Call it once after each optimizer step.

        Raises:
            UntrackableError: a save is due and an object has come to hold state that cannot be stored.

        """
        if self._closed:
            raise UsageError("run.step() was called after run.close(); close the run when training is over.")
        self._hooks.begin()
        self._earlier.tell()
        self._earlier.note()
        position = self._progress.step()
        self._buckets.end_step()
        self._beat.finish_step(position.step)
        failpoints.hit("step", position.step)
        self._random.after_step(position.step)
        now = time.monotonic()
        if now >= self._next_mark:
            self._next_mark = now + self._mark_every_s
            self._place.events.write("step", **self._where(), **self._spent())
        if self._progress.at_epochs_end:
            self._beat.end_epoch(position.step)
            self._saver.after_step(position, may_save=False)
        else:
            self._save_if_due()

    def micro_batches(self, loader: Iterable[T]) -> Iterator[T]:
        """Read ``loader`` where one optimizer step reads several batches of it (see README).

        `loss_weight` is then that of the batch just read. So weighted, losses add up to the global batch's
        mean, at an epoch's end too.
        """
        return self._progress.read(loader)

    def save(self) -> Path | None:
        """Commit the state now, and wait for the disk. Give the path on the rank that leads its node.

        Call it at a step boundary; after an epoch's last batch call it when nothing else of the epoch is left
        to do, since a resume from it begins with the next epoch. None on other ranks, where the step was
        there already when this generation began, and where the disk refused (which is told aloud).
        """
        self._hooks.begin()  # or the copy would be of the new world, and what hooks change of the old one
        if not self._place.leads:
            return None
        position, epoch_over = self._progress.settled()
        with self._beat.busy():
            return self._saver.save(position, epoch_over=epoch_over)

    def assert_ranks_equal(self, *, buffers: bool = False) -> None:
        """Prove that all ranks hold the same parameters, optimizer state and ``ema``, bit for bit.

        Call it on every rank, between two steps. Ranks send each other digests and no tensors; what it costs
        is reading the state once. The same holds for the optimizers' hyperparameters. ``buffers``: a module's
        buffers too; BatchNorm's differ by design, since each rank has its own share of the batch. So does an
        average of them in an object of your own: pass the averaged module itself as ``ema``.

        Raises:
            DivergenceError: on all ranks, naming the first value that differs and the ranks on either side.
            UntrackableError: on all ranks; an object of one has come to hold state that cannot be stored.

        """
        with self._beat.busy():
            replica_check.require(self._place, self._tracked, self.position.step, buffers=buffers)

    @property
    def verify_copies(self) -> bool:
        """Whether each snapshot is checked for state that changes while it is copied. Slow: for looking.

        State that is tracked as a model's parameters or an optimizer's may change in ``optimizer.step()`` and
        before ``run.step()``, and not in between. With this on, what does is a UsageError that names the
        tensor, at the next ``optimizer.step()``.
        """
        return self._saver.snapshots.verify

    @verify_copies.setter
    def verify_copies(self, value: bool) -> None:
        self._saver.snapshots.verify = value

    def on_resume(self, hook: H) -> H:
        """Call ``hook(run)`` in each generation that starts from a checkpoint, before its first epoch.

        Hooks run in the new world, in the order of their registration. Can be used as a decorator.
        """
        self._hooks.add(lambda: hook(self) if self._plan.kind == "checkpoint" else None)
        return hook

    def on_world_change(self, hook: W) -> W:
        """Call ``hook(change)`` in each generation whose world, or global batch, is not its checkpoint's.

        Nothing is scaled for you: optimizer and scheduler are as the checkpoint has them, with what hooks did
        at former changes. Called with those of `on_resume`; can be used as a decorator.
        """
        if (change := self.world_change) is not None:
            self._hooks.add(lambda: hook(change))
        return hook

    @contextlib.contextmanager
    def busy(self, reason: str, limit_s: float = 0.0) -> Iterator[None]:
        """Mark a long stretch without steps (an evaluation, say), so that nobody takes it for a hang.

        Mark it on all ranks: those that wait for others do not step either. ``limit_s``: after so many
        seconds it is taken for a hang all the same; 0: never.
        """
        self._place.events.write("busy", **self._where(), reason=reason)
        with self._beat.busy(limit_s):
            yield

    def close(self) -> None:
        """Commit the newest finished step and release the node's directory.

        While an exception is being handled nothing is saved: the state may be half way through a step.

        Raises:
            MachineError: the job has one node, and its disk refuses.

        """
        if not self._closed and sys.exc_info()[0] is not None:
            console.say("closed while an exception is being handled: nothing more was saved.")
            self._release()
        else:
            self._end()

    def __enter__(self) -> Run:  # noqa: PYI034  typing.Self needs Python 3.11
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self._release()
        else:
            self._end()

    # ---- inside --------------------------------------------------------------------------------------

    def _begin(self, resumed: Resumed) -> None:
        world = self._place.world
        self._earlier = announce.Earlier(resumed, self._place, self.position, sys.argv)
        self._beat.begin(self.generation, self.position.step)
        self._place.events.write(
            "worker-start", **self._where(), local_rank=self._place.local_rank, world_size=world.size
        )
        self._random.begin(self.position.step)
        if self.rank == 0:
            self._place.events.write("resume", **announce.as_event(resumed, self.position, world.size))
            console.say(announce.as_text(resumed, self.position, world.size))
            if self.world_change is not None:
                self.world_change.tell()
        atexit.register(self._release)

    def _before_batch(self, first: bool) -> None:
        at = self.position
        self._random.before_batch(at.step, first=first)

    def _save_if_due(self) -> None:
        if self._drain.wanted and self._place.leads:
            with self._beat.busy():
                self._saver.keep(self.position, epoch_over=self._progress.epoch_over)
            self._drain.end()
        self._saver.after_step(self.position, epoch_over=self._progress.epoch_over)

    def _where(self) -> dict[str, int]:
        return {"generation": self.generation, "step": self.position.step}

    def _spent(self) -> dict[str, float]:
        return {"epoch": self.position.epoch, "stalled_s": round(self._saver.stalled_s, 3)}

    def _end(self) -> None:
        try:
            if not self._closed:
                self._save_end()
        finally:
            self._release()

    def _finish(self) -> None:
        self._save_end()
        self._place.events.write("run-end", **self._where(), **self._spent())

    def _save_end(self) -> None:
        """Commit the end state; a disk that refuses gets two more chances, a second apart."""
        for _ in range(FINAL_TRIES):
            self.save()
            if not self._place.leads or self._saver.has_saved(self.position):
                break
            time.sleep(1.0)
        else:
            if len(self._place.lead_of) == 1:  # with more nodes others hold the end state
                raise MachineError(
                    f"the end state (step {self.position.step}) could not be saved in "
                    f"{self._place.node_dir}: see the lines above, make room, and start the job again."
                )

    def _release(self) -> None:
        if self._closed or os.getpid() != self._pid:  # a forked child ends: nothing here is its own
            return
        self._closed = True
        self._earlier.tell("the script has taken no step")
        self._earlier.note()
        atexit.unregister(self._release)  # it would keep this run, and so its slots, until the process ends
        self._beat.end()
        if self._untracked is not None:
            self._untracked.close()
        self._drain.close()
        self._saver.close()
        self._keeping.close()
        self._node_dir.release()
        self._place.events.close()


def _seed_of_rank_0(place: Place) -> int:
    """What the script gave to torch.manual_seed; ranks may have given different numbers."""
    seed = torch.initial_seed()  # of 64 bits without a sign
    return int(place.world.tell(seed if seed < 1 << 63 else seed - (1 << 64), 0))
