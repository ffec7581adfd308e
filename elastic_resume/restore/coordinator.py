"""The start of a generation: every rank ends with the same state, the newest that anybody holds.

All ranks run the same steps; what is decided is a pure function of what all have seen
(`policy/source.py`). Then all load what is being read, sent and verified at the same time (`loading.py`); a
copy that fails is set aside and the plan is made again without it. Nothing trains before a plan has gone
through on all ranks, and an error on one rank is raised on all.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import astuple, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from elastic_resume import console, failpoints
from elastic_resume.checkpoint import reader
from elastic_resume.checkpoint.manifest import Manifest
from elastic_resume.checkpoint.node_dir import NodeDir, record_job_start
from elastic_resume.errors import CorruptError, DivergenceError, MachineError, MismatchError
from elastic_resume.policy import resume_plan
from elastic_resume.policy.divergence import MIXED_HARDWARE_HINT, RESUME_FROM_MAJORITY
from elastic_resume.policy.resume_plan import MEMORY, Inventory, ResumePlan
from elastic_resume.restore import inventory
from elastic_resume.restore.attempt import PROVEN_INVALID_KINDS, NodeFailures, RestoreAttempt
from elastic_resume.restore.rank_context import RankContext
from elastic_resume.restore.replica_check import find_first_difference
from elastic_resume.snapshot.progress_page import ProgressPage
from elastic_resume.state import load_state, state_dict
from elastic_resume.state.load import INTERNAL_PREFIX
from elastic_resume.state.state_dict import BUFFER, REPLICATED, SCRIPT_OWNED, FlatState, Leaf
from elastic_resume.state.tensor_buffer import DTYPE_BY_NAME, make_spec

DATA = "data"
PARAMETERS = "elastic_resume.parameters"


@dataclass(frozen=True)
class ResumeResult:
    """What a generation starts from. ``manifest`` is None after a cold start.

    ``earlier`` are the script and arguments of the start of the job that this one goes on with, empty where
    they are not known; None where this start has been in a world before, or begins anew.
    """

    plan: ResumePlan
    manifest: Manifest | None
    flat_state: FlatState
    nodes: tuple[str, ...]
    duration_s: float
    on_disk: bool = False  # on a lead: whether its node's own disk holds it, every byte verified
    earlier_command: tuple[str, ...] | None = None

    @property
    def committed_step(self) -> int:
        """The newest step that is on this node's disk, or needs not be (0); -1 where it is not."""
        return self.plan.step if self.manifest is None or self.on_disk else -1


def restore(
    context: RankContext, node_dir: NodeDir, progress_page: ProgressPage, tracked: Mapping[str, Any]
) -> ResumeResult:
    """Bring the tracked objects of all ranks to the newest state that any node holds.

    Raises:
        NoValidCheckpointError: copies exist and none is valid.
        MismatchError: the objects do not fit the checkpoint, or ranks built different ones.
        UntrackableError: an object holds state that cannot be stored.
        MachineError: a node's disk cannot take the checkpoints.
        DivergenceError: ranks end with different parameters or optimizer state.

    """
    began = time.monotonic()
    flat = context.run_on_all_ranks(lambda: state_dict.flatten(tracked))
    room = _check_disk_space(context, node_dir, flat, tracked)
    stock = _gather_inventories(context, node_dir, progress_page)
    mode = context.settings.resume
    failpoints.hit("resume.planned")
    while True:
        plan = resume_plan.choose_resume_plan(stock, mode)
        if plan.kind == "cold":
            context.run_on_all_ranks(lambda: _raise_if_set(room))
            _broadcast_rank_0_state(context, flat, tracked)
            flat = context.run_on_all_ranks(lambda: state_dict.flatten(tracked))
            manifest, on_disk = None, False
            break
        attempt = RestoreAttempt(context, plan)
        failures = _execute_plan(context, attempt, tracked)
        if failures:
            stock = _exclude_failed_copies(context, plan, stock, failures)
            continue
        manifest, on_disk = attempt.manifest, attempt.on_disk
        flat = context.run_on_all_ranks(lambda: state_dict.flatten(tracked))
        failures = _find_outvoted_copies(context, plan, flat)
        if failures:
            _close_attempt(context, attempt, failures)
            stock = _exclude_failed_copies(context, plan, stock, failures)
            continue
        attempt.publish_slot()
        break
    failpoints.hit("resume.loaded")
    context.run_on_all_ranks(lambda: _record_generation(context, node_dir, plan))
    earlier = _find_earlier_command(plan, stock) if mode != "never" else None
    if room is not None and manifest is not None:
        console.say(f"node {context.node}: {room} Training goes on, from what memory and other nodes hold.")
    took_s = time.monotonic() - began
    return ResumeResult(plan, manifest, flat, tuple(context.local_leader_by_node), took_s, on_disk, earlier)


def _gather_inventories(
    context: RankContext, node_dir: NodeDir, progress_page: ProgressPage
) -> list[Inventory]:
    """Gather what each node could resume from."""
    own = context.run_on_all_ranks(
        lambda: (
            inventory.list_snapshots_and_checkpoints(context, progress_page, node_dir.read_generation())
            if context.is_local_leader
            else None
        )
    )
    told = context.collectives.gather(inventory.to_json(own) if own else None)
    return [inventory.from_json(one) for one in told if one is not None]


def _check_disk_space(
    context: RankContext, node_dir: NodeDir, flat: FlatState, tracked: Mapping[str, Any]
) -> MachineError | None:
    """Ask before the first step whether this node's disk takes what training will write.

    One that does not is a reason not to begin. It is none to end a job that has got somewhere: what it has
    may lie in memory only.
    """
    if not context.is_local_leader:
        return None
    size = estimate_state_bytes(flat, tracked)
    missing = context.settings.keep + 1 - sum(not entry.is_link for entry in context.catalog.list_entries())
    try:
        node_dir.ensure_free_space(size * max(1, missing))
    except MachineError as error:
        return error
    return None


def _raise_if_set(error: MachineError | None) -> None:
    if error is not None:
        raise error


def estimate_state_bytes(flat: FlatState, tracked: Mapping[str, Any]) -> int:
    """Bytes of the state as it will be once optimizers have stepped."""
    size = sum(_tensor_bytes(leaf) for leaf in flat.leaves)
    for name, item in tracked.items():
        if isinstance(item, Optimizer) and not any(
            leaf.name.startswith(f"{name}/state/") for leaf in flat.leaves
        ):
            size += sum(
                _count_optimizer_tensors(group) * sum(p.numel() * p.element_size() for p in group["params"])
                for group in item.param_groups
            )
    return size


def _count_optimizer_tensors(group: Mapping[str, Any]) -> int:
    """How many tensors of a parameter's size an optimizer will hold; by its hyperparameters' names."""
    if "betas" in group:  # Adam and its kin
        return 3 if group.get("amsgrad") else 2
    if "momentum" in group:  # SGD, RMSprop
        return bool(group["momentum"]) + ("alpha" in group) + bool(group.get("centered"))
    return 2


def _tensor_bytes(leaf: Leaf) -> int:
    return leaf.tensor.numel() * leaf.tensor.element_size()


def _record_generation(context: RankContext, node_dir: NodeDir, plan: ResumePlan) -> None:
    """Make this generation known to the node before any of its steps is taken."""
    if context.is_local_leader:
        node_dir.persist_generation(plan.generation)
        if plan.min_generation >= 0:  # all nodes note the one that was agreed on, a new and empty one too
            record_job_start(context.node_dir, inventory.launcher_id(), plan.min_generation)


def _find_earlier_command(plan: ResumePlan, inventories: list[Inventory]) -> tuple[str, ...] | None:
    """Give the words of the start that this one goes on with; see `Resumed`."""
    if plan.kind == "cold" or any(one.has_restarted for one in inventories):
        return None
    known = {one.node: one.command for one in inventories if one.command}
    copy = plan.saved_state_for(plan.source_node)
    homes = [copy.owner_node if copy else "", plan.source_node, *known]
    return next((known[home] for home in homes if home in known), ())


# ---- from a copy -------------------------------------------------------------------------------------


def _execute_plan(context: RankContext, attempt: RestoreAttempt, tracked: Mapping[str, Any]) -> NodeFailures:
    """Carry out a plan; give the copies because of which that was not possible."""
    failures = attempt.open() or attempt.load(tracked)
    if failures:
        _close_attempt(context, attempt, failures)
    return failures


def _close_attempt(context: RankContext, attempt: RestoreAttempt, failures: NodeFailures) -> None:
    attempt.close()
    kind, _ = failures.get(context.node, ("", ""))
    if context.is_local_leader and attempt.tier == MEMORY and kind in PROVEN_INVALID_KINDS:
        attempt.discard_snapshot()


def _exclude_failed_copies(
    context: RankContext, plan: ResumePlan, inventories: list[Inventory], failures: NodeFailures
) -> list[Inventory]:
    """Take the copies that failed out of the inventories; quarantine those of our own that are proven bad."""
    left = []
    for one in inventories:
        copy = plan.saved_state_for(one.node)
        if one.node not in failures or copy is None:
            left.append(one)
            continue
        name = reader.checkpoint_name(copy.generation, copy.step)
        name += " (in memory)" if copy.tier == MEMORY else ""
        kind, reason = failures[one.node]
        left.append(resume_plan.reject_saved_state(one, copy, name, reason, kind))
    context.run_on_all_ranks(lambda: _quarantine_local_copy(context, plan, failures))
    return left


def _quarantine_local_copy(context: RankContext, plan: ResumePlan, failures: NodeFailures) -> None:
    copy = plan.saved_state_for(context.node)
    kind, reason = failures.get(context.node, ("", ""))
    if (
        not context.is_local_leader
        or copy is None
        or copy.owner_node != context.node
        or kind not in PROVEN_INVALID_KINDS
    ):
        return
    if copy.tier != MEMORY and not context.checkpoint_path(copy).is_symlink():
        context.quarantine(context.checkpoint_path(copy), reason)


# ---- equality ----------------------------------------------------------------------------------------


def _find_outvoted_copies(context: RankContext, plan: ResumePlan, flat: FlatState) -> NodeFailures:
    """Prove that all ranks hold the same parameters and optimizer state; give the copies that are outvoted.

    Raises:
        DivergenceError: naming the first tensor that differs, and the ranks on either side. Not where a
            majority of copies is equal and ``--on-divergence`` says that it counts; nor with
            ``--check-replicas off``, which lets the source's values count.

    """
    if context.collectives.size == 1:
        return {}
    found = find_first_difference(
        context.collectives, state_dict.digest_leaves(flat.select_kinds(REPLICATED))
    )
    if found is None:
        return {}
    name, told = found.name, found.digest_by_rank
    by_node = {
        node: [t for t, n in zip(told, context.node_by_rank, strict=True) if n == node]
        for node in context.local_leader_by_node
    }
    wrong = resume_plan.find_minority_holders(plan, by_node)
    if wrong and context.settings.on_divergence == RESUME_FROM_MAJORITY:
        reason = f"its values differ from those of most nodes, first in {name}"
        return dict.fromkeys(wrong, (CorruptError.kind, reason))
    others = [node for node, _ in plan.holders if set(by_node[node]) != set(by_node[plan.source_node])]
    if others and context.settings.check_replicas.is_off:
        return dict.fromkeys(
            others, ("unlike", f"its values differ from {plan.source_node}'s, first in {name}")
        )
    hint = f", or let the majority decide with --on-divergence {RESUME_FROM_MAJORITY}" if wrong else ""
    raise DivergenceError(
        f"ranks hold different values of {name!r} after loading the same step ({found.ranks_text}). Replicas "
        "diverged before it was saved, or an object does not restore all that it saves. Move this step's "
        "checkpoints elsewhere on the nodes that you do not trust (see `elastic-resume ls`)"
        f"{hint}. {MIXED_HARDWARE_HINT}"
    )


def _broadcast_rank_0_state(context: RankContext, flat: FlatState, tracked: Mapping[str, Any]) -> None:
    """Give all ranks the values of rank 0, at a cold start: as DDP does for a model when it is built.

    Only rank 0 may have loaded a checkpoint that was made elsewhere, so its optimizer may have state where
    the others' have none. Buffers too, and an average that was made of each rank's own model.

    Raises:
        MismatchError: the ranks built different objects.

    """
    modules = tuple(f"{name}/" for name, item in tracked.items() if isinstance(item, nn.Module))
    leaves = {leaf.name: leaf.tensor.detach() for leaf in flat.select_kinds(REPLICATED, BUFFER, SCRIPT_OWNED)}
    shapes = {name: f"{t.dtype}{list(t.shape)}" for name, t in leaves.items() if name.startswith(modules)}
    found = find_first_difference(context.collectives, shapes)
    if found is not None:
        raise MismatchError(
            f"the ranks built different models: {found.name!r} is not the same on {found.ranks_text}. "
            "Build the model from the same arguments on every rank."
        )
    _check_same_order(context, flat)
    others = {
        name: item
        for name, item in tracked.items()
        if not (isinstance(item, nn.Module) or name == DATA or name.startswith(INTERNAL_PREFIX))
    }
    plain = {name: flat.skeleton[name] for name in others}
    prints = state_dict.combine_digests({**state_dict.digest_leaves(flat.leaves), "": plain})
    channel = context.collectives.all_ranks_channel()
    if channel is None or len(set(context.collectives.gather(prints))) == 1:
        return
    plain, specs = context.collectives.broadcast_json(
        [plain, [[*astuple(make_spec(*leaf))] for leaf in leaves.items()]], 0
    )
    values = {leaf.name: leaf.tensor.detach() for leaf in flat.leaves}
    with torch.no_grad():
        for name, dtype, shape in specs:
            first = context.collectives.rank == 0
            here = (
                values[name].cpu().contiguous() if first else torch.empty(shape, dtype=DTYPE_BY_NAME[dtype])
            )
            channel.broadcast(here, 0)
            if not name.startswith(modules):
                values[name] = here
            elif not first:
                values[name].copy_(here)
    context.run_on_all_ranks(
        lambda: _load_rank_0_state(others, plain, values) if context.collectives.rank else None
    )


def _load_rank_0_state(
    tracked: Mapping[str, Any], skeletons: Mapping[str, Any], values: Mapping[str, Tensor]
) -> None:
    try:
        load_state.load_into(tracked, skeletons, lambda name: values[name].cpu())
    except MismatchError as error:
        raise MismatchError(
            "the ranks built different objects, and this one cannot take rank 0's state. Build the same on "
            f"every rank. {error}"
        ) from error


def _check_same_order(context: RankContext, flat: FlatState) -> None:
    """Ranks that read other samples or number parameters otherwise would be refused at the first resume."""
    for name, what in (
        (DATA, "the order of samples"),
        (PARAMETERS, "the order of the optimizer's parameters"),
    ):
        told = context.collectives.gather(state_dict.combine_digests({"": flat.skeleton.get(name)}))
        other = [rank for rank, one in enumerate(told) if one != told[0]]
        if other:
            raise MismatchError(
                f"{what} ({name}) on rank {other[0]} is not that of rank 0: give every rank the same "
                "arguments. GlobalBatches gives each rank its own share by itself."
            )
