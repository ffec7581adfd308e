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
from elastic_resume.policy.divergence import RESUME, UNLIKE_MACHINES
from elastic_resume.policy.resume_plan import MEMORY, Inventory, ResumePlan
from elastic_resume.restore import inventory
from elastic_resume.restore.attempt import PROVEN_BAD, Attempt, Failures
from elastic_resume.restore.rank_context import Place
from elastic_resume.restore.replica_check import first_difference
from elastic_resume.snapshot.progress_page import Board
from elastic_resume.state import load_state, state_dict
from elastic_resume.state.load import INTERNAL
from elastic_resume.state.state_dict import BUFFER, OWN, REPLICATED, FlatState, Leaf
from elastic_resume.state.tensor_buffer import DTYPES, spec_of

DATA = "data"
PARAMETERS = "elastic_resume.parameters"


@dataclass(frozen=True)
class Resumed:
    """What a generation starts from. ``manifest`` is None after a cold start.

    ``earlier`` are the script and arguments of the start of the job that this one goes on with, empty where
    they are not known; None where this start has been in a world before, or begins anew.
    """

    plan: ResumePlan
    manifest: Manifest | None
    flat: FlatState
    nodes: tuple[str, ...]
    seconds: float
    on_disk: bool = False  # on a lead: whether its node's own disk holds it, every byte verified
    earlier: tuple[str, ...] | None = None

    @property
    def saved_step(self) -> int:
        """The newest step that is on this node's disk, or needs not be (0); -1 where it is not."""
        return self.plan.step if self.manifest is None or self.on_disk else -1


def resume(place: Place, node_dir: NodeDir, board: Board, tracked: Mapping[str, Any]) -> Resumed:
    """Bring the tracked objects of all ranks to the newest state that any node holds.

    Raises:
        NoValidCheckpointError: copies exist and none is valid.
        MismatchError: the objects do not fit the checkpoint, or ranks built different ones.
        UntrackableError: an object holds state that cannot be stored.
        MachineError: a node's disk cannot take the checkpoints.
        DivergenceError: ranks end with different parameters or optimizer state.

    """
    began = time.monotonic()
    flat = place.together(lambda: state_dict.flatten(tracked))
    room = _room(place, node_dir, flat, tracked)
    stock = _take_stock(place, node_dir, board)
    mode = place.settings.resume
    failpoints.hit("resume.planned")
    while True:
        plan = resume_plan.choose(stock, mode)
        if plan.kind == "cold":
            place.together(lambda: _require(room))
            _equalise(place, flat, tracked)
            flat = place.together(lambda: state_dict.flatten(tracked))
            manifest, on_disk = None, False
            break
        attempt = Attempt(place, plan)
        failures = _attempt(place, attempt, tracked)
        if failures:
            stock = _set_aside(place, plan, stock, failures)
            continue
        manifest, on_disk = attempt.manifest, attempt.on_disk
        flat = place.together(lambda: state_dict.flatten(tracked))
        failures = _compare(place, plan, flat)
        if failures:
            _end(place, attempt, failures)
            stock = _set_aside(place, plan, stock, failures)
            continue
        attempt.keep()
        break
    failpoints.hit("resume.loaded")
    place.together(lambda: _enter(place, node_dir, plan))
    earlier = _earlier(plan, stock) if mode != "never" else None
    if room is not None and manifest is not None:
        console.say(f"node {place.node}: {room} Training goes on, from what memory and other nodes hold.")
    took_s = time.monotonic() - began
    return Resumed(plan, manifest, flat, tuple(place.lead_of), took_s, on_disk, earlier)


def _take_stock(place: Place, node_dir: NodeDir, board: Board) -> list[Inventory]:
    """Gather what each node could resume from."""
    own = place.together(
        lambda: inventory.take_stock(place, board, node_dir.generation()) if place.leads else None
    )
    told = place.world.gather(inventory.to_json(own) if own else None)
    return [inventory.from_json(one) for one in told if one is not None]


def _room(
    place: Place, node_dir: NodeDir, flat: FlatState, tracked: Mapping[str, Any]
) -> MachineError | None:
    """Ask before the first step whether this node's disk takes what training will write.

    One that does not is a reason not to begin. It is none to end a job that has got somewhere: what it has
    may lie in memory only.
    """
    if not place.leads:
        return None
    size = expected_bytes(flat, tracked)
    missing = place.settings.keep + 1 - sum(not entry.is_link for entry in place.catalog.entries())
    try:
        node_dir.ensure_room(size * max(1, missing))
    except MachineError as error:
        return error
    return None


def _require(room: MachineError | None) -> None:
    if room is not None:
        raise room


def expected_bytes(flat: FlatState, tracked: Mapping[str, Any]) -> int:
    """Bytes of the state as it will be once optimizers have stepped."""
    size = sum(_bytes(leaf) for leaf in flat.leaves)
    for name, item in tracked.items():
        if isinstance(item, Optimizer) and not any(
            leaf.name.startswith(f"{name}/state/") for leaf in flat.leaves
        ):
            size += sum(
                _tensors_to_come(group) * sum(p.numel() * p.element_size() for p in group["params"])
                for group in item.param_groups
            )
    return size


def _tensors_to_come(group: Mapping[str, Any]) -> int:
    """How many tensors of a parameter's size an optimizer will hold; by its hyperparameters' names."""
    if "betas" in group:  # Adam and its kin
        return 3 if group.get("amsgrad") else 2
    if "momentum" in group:  # SGD, RMSprop
        return bool(group["momentum"]) + ("alpha" in group) + bool(group.get("centered"))
    return 2


def _bytes(leaf: Leaf) -> int:
    return leaf.tensor.numel() * leaf.tensor.element_size()


def _enter(place: Place, node_dir: NodeDir, plan: ResumePlan) -> None:
    """Make this generation known to the node before any of its steps is taken."""
    if place.leads:
        node_dir.persist_generation(plan.generation)
        if plan.floor >= 0:  # all nodes note the one that was agreed on, a new and empty one too
            record_job_start(place.node_dir, inventory.supervisor(), plan.floor)


def _earlier(plan: ResumePlan, stock: list[Inventory]) -> tuple[str, ...] | None:
    """Give the words of the start that this one goes on with; see `Resumed`."""
    if plan.kind == "cold" or any(one.restarted for one in stock):
        return None
    known = {one.node: one.words for one in stock if one.words}
    copy = plan.copy_of(plan.source_node)
    homes = [copy.home if copy else "", plan.source_node, *known]
    return next((known[home] for home in homes if home in known), ())


# ---- from a copy -------------------------------------------------------------------------------------


def _attempt(place: Place, attempt: Attempt, tracked: Mapping[str, Any]) -> Failures:
    """Carry out a plan; give the copies because of which that was not possible."""
    failures = attempt.open() or attempt.load(tracked)
    if failures:
        _end(place, attempt, failures)
    return failures


def _end(place: Place, attempt: Attempt, failures: Failures) -> None:
    attempt.close()
    kind, _ = failures.get(place.node, ("", ""))
    if place.leads and attempt.tier == MEMORY and kind in PROVEN_BAD:
        attempt.discard()


def _set_aside(place: Place, plan: ResumePlan, stock: list[Inventory], failures: Failures) -> list[Inventory]:
    """Take the copies that failed out of the inventories; quarantine those of our own that are proven bad."""
    left = []
    for one in stock:
        copy = plan.copy_of(one.node)
        if one.node not in failures or copy is None:
            left.append(one)
            continue
        name = reader.name_of(copy.generation, copy.step)
        name += " (in memory)" if copy.tier == MEMORY else ""
        kind, reason = failures[one.node]
        left.append(resume_plan.without(one, copy, name, reason, kind))
    place.together(lambda: _quarantine_own(place, plan, failures))
    return left


def _quarantine_own(place: Place, plan: ResumePlan, failures: Failures) -> None:
    copy = plan.copy_of(place.node)
    kind, reason = failures.get(place.node, ("", ""))
    if not place.leads or copy is None or copy.home != place.node or kind not in PROVEN_BAD:
        return
    if copy.tier != MEMORY and not place.path_of(copy).is_symlink():
        place.quarantine(place.path_of(copy), reason)


# ---- equality ----------------------------------------------------------------------------------------


def _compare(place: Place, plan: ResumePlan, flat: FlatState) -> Failures:
    """Prove that all ranks hold the same parameters and optimizer state; give the copies that are outvoted.

    Raises:
        DivergenceError: naming the first tensor that differs, and the ranks on either side. Not where a
            majority of copies is equal and ``--on-divergence`` says that it counts; nor with
            ``--check-replicas off``, which lets the source's values count.

    """
    if place.world.size == 1:
        return {}
    found = first_difference(place.world, state_dict.fingerprints(flat.of_kind(REPLICATED)))
    if found is None:
        return {}
    name, told = found.name, found.digests
    by_node = {
        node: [t for t, n in zip(told, place.node_of, strict=True) if n == node] for node in place.lead_of
    }
    wrong = resume_plan.outvoted(plan, by_node)
    if wrong and place.settings.on_divergence == RESUME:
        reason = f"its values differ from those of most nodes, first in {name}"
        return dict.fromkeys(wrong, (CorruptError.kind, reason))
    others = [node for node, _ in plan.holders if set(by_node[node]) != set(by_node[plan.source_node])]
    if others and place.settings.check_replicas.off:
        return dict.fromkeys(
            others, ("unlike", f"its values differ from {plan.source_node}'s, first in {name}")
        )
    hint = f", or let the majority decide with --on-divergence {RESUME}" if wrong else ""
    raise DivergenceError(
        f"ranks hold different values of {name!r} after loading the same step ({found.ranks}). Replicas "
        "diverged before it was saved, or an object does not restore all that it saves. Move this step's "
        "checkpoints elsewhere on the nodes that you do not trust (see `elastic-resume ls`)"
        f"{hint}. {UNLIKE_MACHINES}"
    )


def _equalise(place: Place, flat: FlatState, tracked: Mapping[str, Any]) -> None:
    """Give all ranks the values of rank 0, at a cold start: as DDP does for a model when it is built.

    Only rank 0 may have loaded a checkpoint that was made elsewhere, so its optimizer may have state where
    the others' have none. Buffers too, and an average that was made of each rank's own model.

    Raises:
        MismatchError: the ranks built different objects.

    """
    modules = tuple(f"{name}/" for name, item in tracked.items() if isinstance(item, nn.Module))
    leaves = {leaf.name: leaf.tensor.detach() for leaf in flat.of_kind(REPLICATED, BUFFER, OWN)}
    shapes = {name: f"{t.dtype}{list(t.shape)}" for name, t in leaves.items() if name.startswith(modules)}
    found = first_difference(place.world, shapes)
    if found is not None:
        raise MismatchError(
            f"the ranks built different models: {found.name!r} is not the same on {found.ranks}. "
            "Build the model from the same arguments on every rank."
        )
    _require_same_order(place, flat)
    others = {
        name: item
        for name, item in tracked.items()
        if not (isinstance(item, nn.Module) or name == DATA or name.startswith(INTERNAL))
    }
    plain = {name: flat.skeleton[name] for name in others}
    prints = state_dict.combined({**state_dict.fingerprints(flat.leaves), "": plain})
    channel = place.world.everybody()
    if channel is None or len(set(place.world.gather(prints))) == 1:
        return
    plain, specs = place.world.tell([plain, [[*astuple(spec_of(*leaf))] for leaf in leaves.items()]], 0)
    values = {leaf.name: leaf.tensor.detach() for leaf in flat.leaves}
    with torch.no_grad():
        for name, dtype, shape in specs:
            first = place.world.rank == 0
            here = values[name].cpu().contiguous() if first else torch.empty(shape, dtype=DTYPES[dtype])
            channel.broadcast(here, 0)
            if not name.startswith(modules):
                values[name] = here
            elif not first:
                values[name].copy_(here)
    place.together(lambda: _load_rank_0s(others, plain, values) if place.world.rank else None)


def _load_rank_0s(tracked: Mapping[str, Any], plain: Mapping[str, Any], values: Mapping[str, Tensor]) -> None:
    try:
        load_state.load(tracked, plain, lambda name: values[name].cpu())
    except MismatchError as error:
        raise MismatchError(
            "the ranks built different objects, and this one cannot take rank 0's state. Build the same on "
            f"every rank. {error}"
        ) from error


def _require_same_order(place: Place, flat: FlatState) -> None:
    """Ranks that read other samples or number parameters otherwise would be refused at the first resume."""
    for name, what in (
        (DATA, "the order of samples"),
        (PARAMETERS, "the order of the optimizer's parameters"),
    ):
        told = place.world.gather(state_dict.combined({"": flat.skeleton.get(name)}))
        other = [rank for rank, one in enumerate(told) if one != told[0]]
        if other:
            raise MismatchError(
                f"{what} ({name}) on rank {other[0]} is not that of rank 0: give every rank the same "
                "arguments. GlobalBatches gives each rank its own share by itself."
            )
