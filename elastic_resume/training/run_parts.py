"""Restore the state on all ranks at the start of a generation, and build the parts of a `Run`."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from elastic_resume import constants
from elastic_resume.capture.schedule import SnapshotScheduler
from elastic_resume.checkpoint.node_dir import NodeDir
from elastic_resume.config import Settings
from elastic_resume.data import elastic_sampler, rng
from elastic_resume.data.dataset_digest import digest_dataset
from elastic_resume.data.global_batches import GlobalBatches
from elastic_resume.data.rank_values import RankState, exchange
from elastic_resume.data.sharded_stream import ShardedStream
from elastic_resume.proof.replay import Replay
from elastic_resume.ranks.collectives import Collectives
from elastic_resume.ranks.rank_context import CommitterConnection, RankContext, open_node_dir
from elastic_resume.restore import coordinator
from elastic_resume.restore.coordinator import ResumeResult
from elastic_resume.restore.warm_memory import TensorPool
from elastic_resume.slots.ipc import SlotClient
from elastic_resume.slots.progress_page import ProgressPage
from elastic_resume.state.bucket_order import BucketOrder
from elastic_resume.state.built_settings import BuiltSettings
from elastic_resume.state.parameters import FrozenParameters, ParameterOrder
from elastic_resume.training import worker_exit
from elastic_resume.training.heartbeat import RankHeartbeat
from elastic_resume.training.progress import RunOptions, TrainingProgress

logger = logging.getLogger(__name__)

DATASET = "dataset"  # a mark of the checkpoint: the digest of rank 0's dataset at the first start


@dataclass(frozen=True)
class RunArguments:
    """What `er.resume` was called with, checked. It is the same in all generations of a process."""

    objects: dict[str, Any]
    batches: GlobalBatches | None
    data: Any
    options: RunOptions
    settings: Settings
    frozen: FrozenParameters
    built_settings: BuiltSettings
    start_s: float  # the process's age when it called er.resume

    @property
    def records(self) -> dict[str, Any]:
        """What is tracked of the script's objects beside their state."""
        return {"elastic_resume.frozen": self.frozen, "elastic_resume.built": self.built_settings}

    @functools.cached_property
    def dataset_digest(self) -> int:
        """The digest of the dataset as the script has built it; later it may keep other lists."""
        return digest_dataset(self.data)

    @property
    def node_dir(self) -> Path:
        """The node's directory."""
        return self.settings.ckpt_dir / self.settings.run_id / self.settings.node_name


@dataclass(frozen=True)
class RunParts:
    """What a run works with, once the state is restored."""

    context: RankContext
    tracked: dict[str, Any]
    rank_values: list[RankState]
    node_dir: NodeDir
    committer_connection: CommitterConnection
    bucket_order: BucketOrder
    random_numbers: rng.RandomNumbers
    progress: TrainingProgress
    heartbeat: RankHeartbeat
    snapshot_scheduler: SnapshotScheduler
    drain_request: worker_exit.DrainRequest
    result: ResumeResult
    state_bytes: int
    replay: Replay | None


def open_context(
    collectives: Collectives, arguments: RunArguments, base_hook: worker_exit.Hook
) -> RankContext:
    """Gather the nodes' names, and report the exception that ends this process as that of its rank.

    ``base_hook``: see `worker_exit.install_hook`.
    """
    events = worker_exit.open_event_log(
        arguments.node_dir / constants.EVENTS_FILE, arguments.settings.node_name, collectives.rank
    )
    worker_exit.install_hook(events, base_hook)
    if arguments.batches is None:
        elastic_sampler.check_no_per_rank_state(arguments.data, collectives.size)
    return RankContext(collectives, arguments.settings, events)


def restore_parts(
    context: RankContext, arguments: RunArguments, tensor_pool: TensorPool | None = None
) -> RunParts:
    """Restore the state on all ranks, and build the parts of a run."""
    objects, batches, options = arguments.objects, arguments.batches, arguments.options
    drain_request = worker_exit.DrainRequest()  # before the restore, which may take long

    def before_batch(first: bool) -> None:
        random_numbers.before_batch(progress.position.step, first=first)

    stream = _bind_data(
        arguments, context.collectives, before_batch, lambda: heartbeat.end_epoch(progress.position.step)
    )
    # Another generation may follow, or a later cell of a notebook that calls resume again.
    with contextlib.ExitStack() as cleanup:
        cleanup.callback(context.events.close)
        node_dir = context.run_on_all_ranks(lambda: open_node_dir(context))
        cleanup.callback(node_dir.release)
        page, shared_seed, digests = _open_page_and_share_seed(context, node_dir, arguments.dataset_digest)
        bucket_order = BucketOrder()
        random_numbers = rng.RandomNumbers(options.rng, shared_seed, context.collectives.rank)
        rank_values = _exchange_rank_values(context, objects)
        tracked = {
            **objects,
            "elastic_resume.buckets": bucket_order,
            "elastic_resume.seed": random_numbers,
            coordinator.PARAMETERS: ParameterOrder(objects),
        } | arguments.records
        connection = CommitterConnection.open(context)
        cleanup.callback(connection.close)
        result = coordinator.restore(
            context, node_dir, page, connection.slot_client, tracked, tensor_pool=tensor_pool
        )
        progress = TrainingProgress(result.manifest, batches, options, context.collectives, stream)
        if coordinator.DATA in tracked:  # an object that keeps its own position
            progress.repeated_steps = 0
        _set_seeds(random_numbers, batches, options)
        _check_dataset(digests, random_numbers.marks, result, context.collectives.rank)
        heartbeat = RankHeartbeat(page, context)
        scheduler = SnapshotScheduler(
            context,
            result.plan,
            result.committed_step,
            tracked,
            connection.slot_client,
            waiting_for_disk=heartbeat.busy,
        )
        cleanup.callback(scheduler.close)
        state_bytes = coordinator.estimate_state_bytes(result.flat_state, tracked)
        scheduler.reserve_memory(state_bytes)
        replay = _begin_replay(context, result, tracked, connection.slot_client, progress)
        # Wait for all ranks: no rank may step before its local leader has scheduled snapshots.
        context.run_on_all_ranks(lambda: None)
        cleanup.pop_all()
    return RunParts(
        context,
        tracked,
        rank_values,
        node_dir,
        connection,
        bucket_order,
        random_numbers,
        progress,
        heartbeat,
        scheduler,
        drain_request,
        result,
        state_bytes,
        replay,
    )


def _exchange_rank_values(context: RankContext, objects: dict[str, Any]) -> list[RankState]:
    """Exchange the first values of all ranks. Else a cold start would give all ranks rank 0's."""
    found = [item for item in objects.values() if isinstance(item, RankState)]
    exchange(found, context.collectives)
    return found


def _set_seeds(random_numbers: rng.RandomNumbers, batches: GlobalBatches | None, options: RunOptions) -> None:
    """Set the seeds, after that of the first start or of a checkpoint is known."""
    if options.seed is not None:
        random_numbers.seed = options.seed  # an explicit seed overrides both
    if batches is not None:
        batches.worker_seed = random_numbers.seed if options.rng == rng.DERIVED else None


def _begin_replay(
    context: RankContext,
    result: ResumeResult,
    tracked: dict[str, Any],
    slot_client: SlotClient,
    progress: TrainingProgress,
) -> Replay | None:
    """Begin to compute the newest state again, if the generation starts from an earlier one."""
    target = result.plan.target
    if target is None:
        return None
    return Replay(
        context,
        result.plan,
        target,
        tracked,
        slot_client,
        knows_data=coordinator.DATA in tracked,
        within_epoch=coordinator.DATA not in tracked or progress.position.step_in_epoch > 0,
    )


def _bind_data(
    arguments: RunArguments,
    collectives: Collectives,
    before_batch: Callable[[bool], None],
    after_last_batch: Callable[[], None],
) -> ShardedStream | None:
    """Bind the order of samples to this rank; return it if it is a stream."""
    if arguments.batches is not None:
        policy = arguments.options.on_world_change
        arguments.batches.bind(collectives.rank, collectives.size, before_batch, policy=policy)
    stream = arguments.objects.get(coordinator.DATA)
    if not isinstance(stream, ShardedStream):
        return None
    stream.bind(collectives, before_batch, after_last_batch)
    return stream


def _open_page_and_share_seed(
    context: RankContext, node_dir: NodeDir, dataset_digest: int
) -> tuple[ProgressPage, int, list[int]]:
    """Open the node's progress page, check the node names; return rank 0's seed, and all ranks' digests.

    It takes one gather. Scripts may have given torch.manual_seed different numbers on each rank.
    """

    def open_page() -> tuple[ProgressPage, Any]:
        page = ProgressPage(context.node_dir / constants.PROGRESS_FILE)
        seed = torch.initial_seed()  # 64 bits, unsigned
        seed = seed if seed < 1 << 63 else seed - (1 << 64)
        return page, [node_dir.read_identity(), seed, dataset_digest]

    page, shared = context.run_and_gather(open_page)
    context.check_node_names_unique([identity for identity, _, _ in shared])
    return page, int(shared[0][1]), [int(digest) for _, _, digest in shared]


def _check_dataset(digests: list[int], marks: dict[str, int], result: ResumeResult, rank: int) -> None:
    """Warn if the ranks have built different datasets, or another one than at the job's first start."""
    first = marks.setdefault(DATASET, digests[0])
    other = next((each for each, digest in enumerate(digests) if digest != digests[0]), None)
    is_start = result.plan.kind == "cold" or result.earlier_command is not None
    if rank or (first == digests[0] and (other is None or not is_start)):
        return
    place = "at each start of this job" if first != digests[0] else f"on all ranks, as on 0 and {other}"
    logger.warning(
        f"WARNING: the dataset of data= is not the same {place}: its lists differ. So a resumed epoch goes "
        "on with other samples. If random_split() or a shuffle draws it without a seed, pass generator="
        "torch.Generator().manual_seed(0), or call torch.manual_seed(0) and random.seed(0) before it."
    )
