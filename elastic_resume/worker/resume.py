"""The start of a generation: every rank ends with the same state, the newest that anybody holds.

All ranks run the same steps; what is decided is a pure function of what all have seen
(`policy/source.py`). Then all load what is being read, sent and verified at the same time (`loading.py`); a
copy that fails is set aside and the plan is made again without it. Nothing trains before a plan has gone
through on all ranks, and an error on one rank is raised on all.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from elastic_resume import failpoints
from elastic_resume.errors import CorruptError, DivergenceError, MachineError, MismatchError
from elastic_resume.policy import source
from elastic_resume.policy.divergence import RESUME, UNLIKE_MACHINES
from elastic_resume.policy.source import MEMORY, Inventory, ResumePlan
from elastic_resume.store import checkpoint, life
from elastic_resume.store.board import Board
from elastic_resume.store.manifest import Manifest
from elastic_resume.store.node_dir import NodeDir
from elastic_resume.worker import foreign, inventory, restoring, state, telling
from elastic_resume.worker.loading import PROVEN_BAD, Attempt, Failures
from elastic_resume.worker.place import Place
from elastic_resume.worker.ranks_equal import first_difference
from elastic_resume.worker.state import BUFFER, OWN, REPLICATED, FlatState, Leaf

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


def resume(
    place: Place, node_dir: NodeDir, board: Board, tracked: Mapping[str, Any], *, accumulate: int = 1
) -> Resumed:
    """Bring the tracked objects of all ranks to the newest state that any node holds.

    ``accumulate``: how many batches of the data a step reads, for the position of a file made elsewhere.

    Raises:
        NoValidCheckpointError: copies exist and none is valid.
        MismatchError: the objects do not fit the checkpoint, or ranks built different ones.
        UntrackableError: an object holds state that cannot be stored.
        MachineError: a node's disk cannot take the checkpoints.
        DivergenceError: ranks end with different parameters or optimizer state.

    """
    began = time.monotonic()
    flat = place.together(lambda: state.flatten(tracked))
    room = _room(place, node_dir, flat, tracked)
    stock = _take_stock(place, node_dir, board)
    mode = source.mode_of(stock, place.settings.resume)
    brought = source.bringer(stock) if mode == place.settings.resume else None
    if brought is not None:
        place.together(lambda: foreign.bring(place, tracked, *brought, accumulate))
        stock = _take_stock(place, node_dir, board)
        mode = source.mode_of(stock, mode)
    elif mode != place.settings.resume:
        place.together(lambda: foreign.leave(place, stock))
    failpoints.hit("resume.planned")
    while True:
        plan = source.choose(stock, mode)
        if plan.kind == "cold":
            place.together(lambda: _require(room))
            _equalise(place, flat, tracked)
            manifest, on_disk = None, False
            break
        attempt = Attempt(place, plan)
        failures = _attempt(place, attempt, tracked)
        if failures:
            stock = _set_aside(place, plan, stock, failures)
            continue
        manifest, on_disk = attempt.manifest, attempt.on_disk
        flat = place.together(lambda: state.flatten(tracked))
        failures = _compare(place, plan, flat)
        if failures:
            _end(place, attempt, failures)
            stock = _set_aside(place, plan, stock, failures)
            continue
        attempt.keep()
        break
    failpoints.hit("resume.loaded")
    place.together(lambda: _enter(place, node_dir, plan))
    earlier = _earlier(plan, stock) if mode in {"auto", "must"} else None
    if room is not None and manifest is not None:
        telling.say(f"node {place.node}: {room} Training goes on, from what memory and other nodes hold.")
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
            life.note(place.node_dir, inventory.supervisor(), plan.floor)


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
        name = checkpoint.name_of(copy.generation, copy.step) if copy.home else place.settings.resume
        name += " (in memory)" if copy.tier == MEMORY else ""
        kind, reason = failures[one.node]
        left.append(source.without(one, copy, name, reason, kind))
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
    found = first_difference(place.world, state.fingerprints(flat.of_kind(REPLICATED)))
    if found is None:
        return {}
    name, told = found.name, found.digests
    by_node = {
        node: [t for t, n in zip(told, place.node_of, strict=True) if n == node] for node in place.lead_of
    }
    wrong = source.outvoted(plan, by_node)
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
        "diverged before it was saved, or an object does not restore all that it saves. Start from the copy "
        f"of one node that you trust with --resume PATH (see `elastic-resume ls`){hint}. {UNLIKE_MACHINES}"
    )


def _equalise(place: Place, flat: FlatState, tracked: Mapping[str, Any]) -> None:
    """Start cold: as DDP does when it is built, rank 0's values are the job's; the optimizer's too.

    And those of an averaged model, which may have been made of each rank's own.

    Raises:
        MismatchError: the ranks built different models.

    """
    leaves = flat.of_kind(REPLICATED, BUFFER, OWN)
    shapes = {leaf.name: f"{leaf.tensor.dtype}{list(leaf.tensor.shape)}" for leaf in leaves}
    found = first_difference(place.world, shapes)
    if found is not None:
        raise MismatchError(
            f"the ranks built different models: {found.name!r} is not the same on {found.ranks}. "
            "Build the model from the same arguments on every rank."
        )
    _require_same_order(place, flat)
    channel = place.world.everybody()
    prints = state.combined(state.fingerprints(leaves))
    if channel is None or len(set(place.world.gather(prints))) == 1:
        return
    now = {leaf.name: leaf.tensor.detach() for leaf in flat.leaves}
    with torch.no_grad():
        for leaf in leaves:
            here = leaf.tensor.detach().cpu().contiguous()
            channel.broadcast(here, 0)
            leaf.tensor.copy_(here)
    # What an object's own state_dict() gives may be copies: it has to take them.
    told = {leaf.name.split("/", maxsplit=1)[0] for leaf in leaves}
    own = {k: v for k, v in tracked.items() if k in told and not isinstance(v, (nn.Module, Optimizer))}
    parts = {name: flat.skeleton[name] for name in own}
    place.together(lambda: restoring.load(own, parts, lambda name: now[name].cpu()))


def _require_same_order(place: Place, flat: FlatState) -> None:
    """Ranks that read other samples or number parameters otherwise would be refused at the first resume."""
    for name, what in (
        (DATA, "the order of samples"),
        (PARAMETERS, "the order of the optimizer's parameters"),
    ):
        told = place.world.gather(state.combined({"": flat.skeleton.get(name)}))
        other = [rank for rank, one in enumerate(told) if one != told[0]]
        if other:
            raise MismatchError(
                f"{what} ({name}) on rank {other[0]} is not that of rank 0: give every rank the same "
                "arguments. GlobalBatches gives each rank its own share by itself."
            )
