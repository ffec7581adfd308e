"""Restore the job's state at the start of a generation: load the newest valid state on every rank.

All ranks run the same steps::

    flatten tracked objects ─► check disk space ─► gather inventories ─► choose a plan (policy/resume_plan.py)
                                                         ▲                   │
          exclude and quarantine the failed states ──────┘◄── failed ── open, transfer, load (attempt.py)
                                                         ▲                   │ loaded
                                                         └◄─── unlike ─── compare replicas (replica_check.py)
                                                                             │ equal
                                        record the generation on every node ◄┘

Invariants:

- Each rank computes the plan from the same gathered inventories, so no rank has to announce it.
- An error on one rank is raised on all ranks; otherwise they would wait for it in their next collective.
- No rank trains before a plan has succeeded on all ranks and the generation is durable on every node.
- A cold start, without any saved state, gives each node the values of rank 0's node: all ranks get those of
  rank 0, and of a sharded model each rank those of the same local rank.
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from elastic_resume import failpoints
from elastic_resume.checkpoint.catalog import choose_milestones
from elastic_resume.checkpoint.manifest import Manifest
from elastic_resume.checkpoint.node_dir import NodeDir
from elastic_resume.checkpoint.shards import shard_index
from elastic_resume.errors import (
    MIXED_HARDWARE_HINT,
    ArchiveErrorKind,
    ConfigError,
    DivergenceError,
    ElasticResumeError,
    MachineError,
    MismatchError,
    OtherRankFailedError,
    UnreadableError,
    UntrackableError,
)
from elastic_resume.mechanisms.registry import pass_over_states
from elastic_resume.policy import going_back, proof, reasons, resume_plan
from elastic_resume.policy.resume_plan import (
    ARCHIVE,
    DISK,
    Inventory,
    RejectedState,
    ResumePlan,
    SavedState,
)
from elastic_resume.proof import record
from elastic_resume.ranks.rank_context import RankContext, raise_if_set
from elastic_resume.restore.attempt import PROVEN_INVALID_KINDS, LoadedState, NodeFailures, RestoreAttempt
from elastic_resume.restore.replica_check import (
    digest_script_state,
    find_first_difference,
    log_own_state,
    may_differ,
)
from elastic_resume.restore.sources import (
    StateSource,
    list_sources,
    take_further_inventory,
    take_inventory,
)
from elastic_resume.restore.warm_memory import TensorPool, count_state_tensors
from elastic_resume.slots.ipc import SlotClient
from elastic_resume.slots.progress_page import ProgressPage
from elastic_resume.state import dtensors, load_objects, state_dict
from elastic_resume.state.state_dict import (
    BUFFER,
    DTYPE_BY_NAME,
    REPLICATED,
    RESERVED_PREFIX,
    SCRIPT_OWNED,
    FlatState,
    make_spec,
)

logger = logging.getLogger(__name__)

DATA = "data"
PARAMETERS = "elastic_resume.parameters"
ARCHIVE_PATIENCE_S = 600.0  # of a start that needs the archive
ARCHIVE_LOG_INTERVAL_S = 60.0


@dataclass(frozen=True)
class ResumeResult:
    """What a generation starts from. ``manifest`` is None after a cold start.

    ``earlier_command`` is the script and arguments of the earlier run of the job that this start resumes,
    empty if unknown. It is None if this start resumes its own state or starts fresh.
    """

    plan: ResumePlan
    manifest: Manifest | None
    flat_state: FlatState
    nodes: tuple[str, ...]
    duration_s: float
    on_disk: bool = False  # the node's own disk holds the fully verified state
    earlier_command: tuple[str, ...] | None = None
    abandoned: tuple[SavedState, ...] = ()  # on this node's disk: see `move_abandoned_aside`
    notes: tuple[tuple[str, tuple[str, ...]], ...] = ()  # each node, and those of its mechanisms

    @property
    def committed_step(self) -> int:
        """The step that this node's disk holds; 0 after a cold start, -1 if its disk lacks the state."""
        return self.plan.step if self.manifest is None or self.on_disk else -1


def restore(
    context: RankContext,
    node_dir: NodeDir,
    progress_page: ProgressPage,
    slot_client: SlotClient | None,
    tracked: Mapping[str, Any],
    *,
    tensor_pool: TensorPool | None = None,
) -> ResumeResult:
    """Bring the tracked objects of all ranks to the newest state that any node holds.

    ``tensor_pool``: what `warm_memory.prepare` returned. Drop it afterwards, to free what was not used.

    Raises:
        NoValidCheckpointError: checkpoints exist and none can be loaded.
        ArchiveError: the archive cannot be read, and this start has not trained yet.
        ConfigError: nodes name different archives, and this start has not trained yet.
        MismatchError: the objects do not fit the checkpoint, or ranks built different ones.
        UntrackableError: an object holds state that cannot be stored.
        MachineError: a node's disk cannot hold the checkpoints.
        DivergenceError: ranks end with different parameters or optimizer state.

    """
    started_at = time.monotonic()
    sources = list_sources(context, slot_client)

    def flatten_and_list() -> tuple[tuple[FlatState, MachineError | None], Any]:
        _check_shards(context, tracked)
        flat = state_dict.flatten(tracked)
        if not context.is_local_leader:
            return (flat, None), None
        disk_error = _check_disk_space(context, node_dir, flat, tracked)
        own = take_inventory(context, sources, progress_page, node_dir.read_generation())
        return (flat, disk_error), reasons.to_json(record.add_wish(own, context, slot_client))

    (flat, disk_error), gathered = context.run_and_gather(flatten_and_list)
    inventories = [_parse_inventory(encoded) for encoded in gathered if encoded is not None]
    _check_archives(context, inventories)
    failpoints.hit("resume.planned")
    plan, inventories, loaded = _load_newest(
        context, sources, inventories, tracked, slot_client=slot_client, tensor_pool=tensor_pool
    )
    manifest, is_on_own_disk = None, False
    if loaded is None:  # a cold start
        context.run_on_all_ranks(lambda: raise_if_set(disk_error))
        _broadcast_first_state(context, flat, tracked)
        flat = context.run_on_all_ranks(lambda: state_dict.flatten(tracked))
    else:
        state, flat = loaded
        manifest, is_on_own_disk = state.manifest, state.on_disk
    failpoints.hit("resume.loaded")
    on_disk = _record_generation(context, node_dir, plan.generation, on_disk=is_on_own_disk)
    if disk_error is not None and loaded is not None:
        logger.warning(
            f"node {context.node}: {disk_error} Training continues: memory or other nodes hold the state."
        )
    return ResumeResult(
        plan,
        manifest,
        flat,
        tuple(context.local_leader_by_node),
        time.monotonic() - started_at,
        on_disk,
        _find_earlier_command(plan, inventories),
        _find_own_abandoned(context, inventories, plan),
        tuple((each.node, each.notes) for each in inventories),
    )


def _load_newest(
    context: RankContext,
    sources: Mapping[str, StateSource],
    inventories: list[Inventory],
    tracked: Mapping[str, Any],
    *,
    slot_client: SlotClient | None,
    tensor_pool: TensorPool | None,
) -> tuple[ResumePlan, list[Inventory], tuple[LoadedState, FlatState] | None]:
    """Load the newest state that all ranks can load.

    Return its plan, the inventories without the states that failed, and the state. It is None if the start
    is cold.
    """
    wait = _ArchiveWait(context)
    while True:
        inventories = _list_all_that_counts(context, sources, inventories, wait)
        plan = _choose_plan(context, inventories)
        if plan.kind == "cold":
            return plan, inventories, None
        try:
            loaded, failures = RestoreAttempt(context, plan, slot_client, tensor_pool, sources).run(tracked)
            if loaded is not None:
                flat, failures = _find_unlike_states(context, plan, tracked)
        except (MismatchError, DivergenceError, OtherRankFailedError):
            if plan.target is None:
                raise
            # On all ranks: the earlier state does not fit. The newest may.
            inventories = [replace(each, wants_proof=False) for each in inventories]
            continue
        if loaded is not None and not failures:
            loaded.publish_slot(slot_client)
            wait.end()
            return plan, inventories, (loaded, flat)
        if (error := _find_archive_failure(plan, sources, inventories, failures)) is not None:
            wait.pause(error)
            continue
        inventories = _exclude_failed_states(context, plan, sources, inventories, failures)
        inventories = _list_more(context, sources, inventories)


def _choose_plan(context: RankContext, inventories: Sequence[Inventory]) -> ResumePlan:
    candidates = pass_over_states(inventories)
    return proof.plan_with_proof(candidates, context.settings.resume, context.collectives.size)


def _record_generation(context: RankContext, node_dir: NodeDir, generation: int, *, on_disk: bool) -> bool:
    """Record the generation durably on every node. Return ``on_disk`` of this node's local leader.

    Each rank needs that one, to decide alike in `SnapshotScheduler.commit`.
    """

    def persist_generation() -> tuple[None, bool]:
        if context.is_local_leader:
            node_dir.persist_generation(generation)
        return None, on_disk

    _, on_disks = context.run_and_gather(persist_generation)
    return bool(on_disks[context.local_leader_by_node[context.node]])


def _find_own_abandoned(
    context: RankContext, inventories: list[Inventory], plan: ResumePlan
) -> tuple[SavedState, ...]:
    """Return the states on this node's disk that the history of ``plan`` has left; on its local leader."""
    own = next(each.saved_states for each in inventories if each.node == context.node)
    return tuple(
        state
        for state in own
        if context.is_local_leader
        and (state.owner_node, state.tier) == (context.node, DISK)
        and going_back.is_abandoned(state, plan)
    )


def move_abandoned_aside(context: RankContext, result: ResumeResult) -> None:
    """Move the checkpoints of this node to quarantine that are newer than where the job went back to.

    They would be pruned, or count as milestones. A failing disk keeps them; they never win by their order.
    """
    for state in result.abandoned:
        path = context.checkpoint_path(state)
        if path.is_symlink() or not path.exists():
            continue
        failpoints.hit("going-back.move-aside")
        reason = going_back.describe_abandoned(state, result.plan)
        try:
            kept = context.catalog.quarantine(path, reason)
            context.events.emit("moved-aside", path=str(kept), reason=reason)
        except MachineError as error:
            logger.warning(
                f"node {context.node}: {path.name} stays in place, and is never resumed from: {error}"
            )


def _check_shards(context: RankContext, tracked: Mapping[str, Any]) -> None:
    """Raise UntrackableError unless the ranks of each node hold the whole model together."""
    for name, item in tracked.items():
        modules = item.modules() if isinstance(item, nn.Module) else ()
        if any(type(module).__name__ == "FullyShardedDataParallel" for module in modules):
            raise UntrackableError(
                f"{name}: it is in FullyShardedDataParallel (FSDP1), whose shards cannot be read. "
                "Use fully_shard() (FSDP2), with mesh=er.shard_mesh()."
            )
    own_ranks = [rank for rank, node in enumerate(context.node_by_rank) if node == context.node]
    for name, tensor in load_objects.iter_live_tensors(tracked):
        if not dtensors.is_dtensor(tensor):
            continue
        dtensors.find_own_shard(tensor, name)  # for its error
        ranks = dtensors.find_shard_ranks(tensor)
        if len(ranks) > 1 and ranks != own_ranks:
            raise UntrackableError(
                f"{name}: it is sharded over the ranks {ranks}, and node {context.node} has the ranks "
                f"{own_ranks}. Each node must hold the whole model: shard over the ranks of one node, with "
                "fully_shard(..., mesh=er.shard_mesh())."
            )
        if len({*Counter(context.node_by_rank).values()}) > 1:
            raise UntrackableError(
                f"{name}: it is sharded, and the nodes have different numbers of ranks: "
                f"{dict(Counter(context.node_by_rank))}. Give all nodes the same --nproc-per-node."
            )


def _parse_inventory(encoded: Any) -> Inventory:
    try:
        inventory: Inventory = reasons.from_json(Inventory, encoded)
    except ValueError as error:
        raise ElasticResumeError(
            f"a node's inventory cannot be read ({error}): do all nodes run the same elastic_resume?"
        ) from error
    return inventory


def _list_more(
    context: RankContext,
    sources: Mapping[str, StateSource],
    inventories: list[Inventory],
    request: str = "",
) -> list[Inventory]:
    """Add what nodes have left out of their inventories, because newer states were there."""

    def list_own() -> tuple[None, Any]:
        if not context.is_local_leader:
            return None, None
        return None, reasons.to_json(take_further_inventory(context, sources, request))

    _, gathered = context.run_and_gather(list_own)
    more_by_node = {each.node: each for each in map(_parse_inventory, filter(None, gathered))}
    return [resume_plan.add_states(each, more_by_node[each.node]) for each in inventories]


def _check_archives(context: RankContext, inventories: list[Inventory]) -> None:
    """Raise ConfigError if nodes name different archives; a job that has trained goes on with a warning."""
    text = resume_plan.find_unlike_archives(inventories)
    if text and not any(each.has_restarted for each in inventories):
        raise ConfigError(text)
    if text and context.collectives.rank == 0:
        logger.warning(f"{text} The job has trained with it, and goes on.")


class _ArchiveWait:
    """How long a restore has waited for the archive, over all of its attempts; on all ranks."""

    def __init__(self, context: RankContext) -> None:
        self._context = context
        self._started_at: float | None = None
        self._logged_at, self._pause_s = -math.inf, 1.0

    def pause(self, error: RejectedState) -> None:
        """Wait before the next attempt. Raises ArchiveError if waiting does not mend it, or took too long."""
        is_first = self._context.collectives.rank == 0
        self._started_at = self._started_at or time.monotonic()
        # All ranks decide alike, by the time that rank 0 has waited.
        waited_s = self._context.collectives.broadcast_json(time.monotonic() - self._started_at, 0)
        if (end := resume_plan.judge_archive_error(error, waited_s, ARCHIVE_PATIENCE_S)) is not None:
            raise end
        if is_first:
            if time.monotonic() - self._logged_at >= ARCHIVE_LOG_INTERVAL_S:
                self._logged_at = time.monotonic()
                self._context.events.emit("archive-wait", seconds=round(waited_s, 1), error=error.reason)
                logger.warning(
                    "waiting for the archive, %.0f min at most, because a newer state may be there: %s",
                    (ARCHIVE_PATIENCE_S - waited_s) / 60,
                    error.reason,
                )
            time.sleep(self._pause_s)
        self._pause_s = min(2 * self._pause_s, 30.0)

    def end(self) -> None:
        """Log that the state was restored after all."""
        if self._logged_at > -math.inf:
            logger.info("the archive can be read again.")


def _await_archive(
    context: RankContext,
    sources: Mapping[str, StateSource],
    inventories: list[Inventory],
    wait: _ArchiveWait,
    request: str = "",
) -> list[Inventory]:
    """Wait while the archive cannot be read, unless the job has trained in this start; else log that.

    The first generation of a start needs it even if a node holds a state, since an older disk would go back.
    So does each ``request`` to go back: a state of that name on a node may be another one.

    Raises:
        ArchiveError: waiting does not mend it, or took too long.

    """
    error, inventories = resume_plan.split_archive_error(inventories)
    while error is not None:
        if not request and _can_go_on_without_archive(inventories):
            if context.collectives.rank == 0:
                logger.warning(
                    "the archive cannot be read, so only what nodes hold is resumed: %s", error.reason
                )
            return inventories
        wait.pause(error)
        error, inventories = resume_plan.split_archive_error(
            _list_more(context, sources, inventories, request)
        )
    return inventories


def _list_all_that_counts(
    context: RankContext,
    sources: Mapping[str, StateSource],
    inventories: list[Inventory],
    wait: _ArchiveWait,
) -> list[Inventory]:
    """Complete the inventories: by the archive, and by what a request to go back may mean."""
    inventories = _await_archive(context, sources, inventories, wait)
    if request := going_back.find_due_request(inventories, context.settings.resume):
        inventories = _list_more(context, sources, inventories, request)
        inventories = _await_archive(context, sources, inventories, wait, request)
    return _drop_foreign_states(context, inventories)


def _can_go_on_without_archive(inventories: Sequence[Inventory]) -> bool:
    """Return whether the job has trained in this start, and a node holds a state."""
    states = (state for each in inventories for state in each.saved_states)
    return any(each.has_restarted for each in inventories) and any(s.tier != ARCHIVE for s in states)


def _drop_foreign_states(context: RankContext, inventories: list[Inventory]) -> list[Inventory]:
    """Leave out what another job of the same run id has archived meanwhile."""
    kept, foreign = resume_plan.drop_foreign_states(inventories)
    if foreign is not None and context.collectives.rank == 0:
        logger.warning(
            f"the archive has step {foreign.step} of generation {foreign.generation}, which another job with "
            f"the run id {context.settings.run_id} has put there. This job goes on from its own state. Stop "
            "one of them, or give it another --rdzv-id."
        )
    return kept


def _check_disk_space(
    context: RankContext, node_dir: NodeDir, flat: FlatState, tracked: Mapping[str, Any]
) -> MachineError | None:
    """Return an error if this node's disk lacks the space for the checkpoints to come.

    The error prevents a cold start only. A job with saved state continues: that state may be in memory alone.
    """
    size = estimate_state_bytes(flat, tracked)
    entries = context.catalog.list_entries()
    milestones = choose_milestones(entries)
    present = sum(not entry.is_link and entry.path not in milestones for entry in entries)
    try:
        node_dir.ensure_free_space(size * max(1, context.settings.keep + 1 - present))
    except MachineError as error:
        return error
    return None


def estimate_state_bytes(flat: FlatState, tracked: Mapping[str, Any]) -> int:
    """Estimate the bytes of the state after each optimizer's first step."""
    size = sum(spec.nbytes for leaf in flat.leaves for spec in leaf.list_specs())
    for name, item in tracked.items():
        if isinstance(item, Optimizer) and not any(
            leaf.name.startswith(f"{name}/state/") for leaf in flat.leaves
        ):
            size += sum(
                count_state_tensors(group) * sum(p.numel() * p.element_size() for p in group["params"])
                for group in item.param_groups
            )
    return size


def _find_earlier_command(plan: ResumePlan, inventories: list[Inventory]) -> tuple[str, ...] | None:
    """Return the command of the earlier run that this start resumes; see `ResumeResult`."""
    if plan.kind == "cold" or any(node_inventory.has_restarted for node_inventory in inventories):
        return None
    command_by_node = {i.node: i.command for i in inventories if i.command}
    source = plan.saved_state_for(plan.source_node)
    nodes = [source.owner_node if source else "", plan.source_node, *command_by_node]
    return next((command_by_node[node] for node in nodes if node in command_by_node), ())


# ---- failed states -----------------------------------------------------------------------------------


def _find_archive_failure(
    plan: ResumePlan,
    sources: Mapping[str, StateSource],
    inventories: Sequence[Inventory],
    failures: NodeFailures,
) -> RejectedState | None:
    """Return why the archived state of the plan cannot be read now, if the start has to wait for it.

    Any other state is an older one.
    """
    kind, reason = failures.get(plan.source_node, ("", ""))
    state = plan.saved_state_for(plan.source_node)
    is_archived = state is not None and state.tier == ARCHIVE and kind == UnreadableError.kind
    if state is None or not is_archived or _can_go_on_without_archive(inventories):
        return None
    name = sources[ARCHIVE].name_of(state)
    reason = f"{name}: {reason}"
    return RejectedState(
        plan.source_node,
        name,
        reason,
        state.version,
        kind,
        archive_error=ArchiveErrorKind.UNAVAILABLE,
    )


def _exclude_failed_states(
    context: RankContext,
    plan: ResumePlan,
    sources: Mapping[str, StateSource],
    inventories: list[Inventory],
    failures: NodeFailures,
) -> list[Inventory]:
    """Return the inventories without the failed states; give up this node's if it is proved invalid."""
    remaining = {each.node: each for each in inventories}
    for node, (kind, reason) in failures.items():
        state = plan.saved_state_for(node)
        if state is not None:
            name = sources[state.tier].name_of(state)
            remaining[node] = resume_plan.reject_saved_state(remaining[node], state, name, reason, kind)

    def give_up_own() -> None:
        state = plan.saved_state_for(context.node)
        kind, reason = failures.get(context.node, ("", ""))
        if state is not None and context.is_local_leader and kind in PROVEN_INVALID_KINDS:
            sources[state.tier].give_up(state, reason)

    context.run_on_all_ranks(give_up_own)
    return list(remaining.values())


# ---- comparison of replicas --------------------------------------------------------------------------


def _find_unlike_states(
    context: RankContext, plan: ResumePlan, tracked: Mapping[str, Any]
) -> tuple[FlatState, NodeFailures]:
    """Flatten and compare the state of all ranks; return it, and the states that must not be used.

    Where ranks may differ these are the states unlike the source's.

    Raises:
        DivergenceError: replicas differ otherwise; the text names the first tensor and the ranks.

    """
    flattened: list[FlatState] = []

    def digest_own() -> dict[str, str]:
        flattened.append(state_dict.flatten(tracked))
        if context.collectives.size == 1:
            return {}
        return state_dict.digest_leaves(flattened[0].select_kinds(REPLICATED))

    difference = find_first_difference(context, digest_own)
    flat = flattened[0]
    if difference is None:
        return flat, {}
    name = difference.name
    digests_by_node: dict[str, list[str]] = {}
    for digest, node in zip(difference.digest_by_rank, context.node_by_rank, strict=True):
        digests_by_node.setdefault(node, []).append(digest)
    source_digests = set(digests_by_node[plan.source_node])
    unlike = [node for node, _ in plan.holders if set(digests_by_node[node]) != source_digests]
    if unlike and may_differ(context):
        reason = f"its values differ from {plan.source_node}'s, first in {name}"
        return flat, dict.fromkeys(unlike, ("unlike", reason))
    raise DivergenceError(
        f"ranks hold different values of {name!r} after loading step {plan.step} ({difference.ranks_text}). "
        "Replicas diverged before it was saved, or an object does not restore all that it saves. Move the "
        "checkpoints of this step elsewhere on the nodes that you do not trust (see `elastic-resume ls`). "
        f"{MIXED_HARDWARE_HINT}"
    )


# ---- cold start --------------------------------------------------------------------------------------


def _broadcast_first_state(context: RankContext, flat: FlatState, tracked: Mapping[str, Any]) -> None:
    """Give all ranks the values of rank 0, as DDP does for a model when it is built.

    Shards of a model come from the ranks of rank 0's node. Rank 0, or its node if the model is sharded, may
    have loaded a foreign checkpoint, so its optimizer may have state where the others' have none. Buffers and
    averages of the model are sent too.

    Raises:
        MismatchError: the ranks built different objects.

    """
    modules = tuple(f"{name}/" for name, item in tracked.items() if isinstance(item, nn.Module))
    leaves = {leaf.name: leaf.tensor.detach() for leaf in flat.select_kinds(REPLICATED, BUFFER, SCRIPT_OWNED)}
    shapes = {name: f"{t.dtype}{list(t.shape)}" for name, t in leaves.items() if name.startswith(modules)}
    orders = {name: state_dict.combine_digests({"": flat.structure.get(name)}) for name in (DATA, PARAMETERS)}
    difference = find_first_difference(context, lambda: {**shapes, **orders})
    if difference is not None:
        order_texts = {DATA: "the order of samples", PARAMETERS: "the order of the optimizer's parameters"}
        raise MismatchError(
            f"the ranks built different objects: {order_texts.get(difference.name, 'the model')} "
            f"({difference.name}) differs on {difference.ranks_text}. Give every rank the same arguments. "
            "GlobalBatches gives each rank its own share by itself. Stages of a pipeline are not supported."
        )
    others = {
        name: item
        for name, item in tracked.items()
        if not (isinstance(item, nn.Module) or name == DATA or name.startswith(RESERVED_PREFIX))
    }
    structures = {name: flat.structure[name] for name in others}
    own = digest_script_state(others, flat.structure)
    digests = {
        **own,
        **state_dict.digest_leaves(flat.leaves),
        "": state_dict.combine_digests(structures),
    }
    difference = find_first_difference(context, lambda: digests)
    if difference is None:
        return
    if difference.name in own:
        log_own_state(context, difference, "as er.resume() got it")
    values = {leaf.name: leaf.tensor.detach() for leaf in flat.leaves}
    structures = context.collectives.broadcast_json(structures, 0)
    _broadcast_leaves(context, leaves, values, modules)
    context.run_on_all_ranks(
        lambda: None if context.collectives.rank == 0 else _load_rank_0_state(others, structures, values)
    )


def _broadcast_leaves(
    context: RankContext, leaves: Mapping[str, Tensor], values: dict[str, Tensor], modules: tuple[str, ...]
) -> None:
    """Send ``leaves`` from rank 0's node to all ranks.

    Tensors of ``modules`` (prefixes of names) are overwritten; others are put into ``values``.
    """
    collectives = context.collectives
    shards = [name for name in leaves if shard_index(name) is not None]
    first_node = [rank for rank, node in enumerate(context.node_by_rank) if node == context.node_by_rank[0]]
    for source in first_node if shards else [0]:
        # Rank 0 sends what every rank holds, and its shards; the others of its node send their shards.
        sent = leaves if source == 0 else shards
        specs = [[*astuple(make_spec(name, leaves[name]))] for name in sent]
        for name, dtype, shape in collectives.broadcast_json(specs, source):
            is_source = collectives.rank == source
            tensor = torch.empty(shape, dtype=DTYPE_BY_NAME[dtype])
            if is_source:
                tensor = values[name].cpu().contiguous()
            collectives.broadcast(tensor, source)
            if is_source or shard_index(name) not in {None, context.local_rank}:
                continue
            if name.startswith(modules):
                with torch.no_grad():
                    values[name].copy_(tensor)
            else:
                values[name] = tensor


def _load_rank_0_state(
    tracked: Mapping[str, Any], structures: Mapping[str, Any], values: Mapping[str, Tensor]
) -> None:
    try:
        load_objects.load_into(tracked, structures, lambda name: values[name].cpu())
    except KeyError as error:
        raise MismatchError(
            f"the ranks built different objects: no rank of rank 0's node has {error}. Where rank 0's "
            "optimizer has state, theirs must too."
        ) from error
    except MismatchError as error:
        raise MismatchError(
            "the ranks built different objects, and this one cannot take rank 0's state. Build the same "
            f"objects on every rank. {error}"
        ) from error
