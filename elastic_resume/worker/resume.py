"""The start of a generation: every rank ends with the same state, the newest that anybody holds.

All ranks run the same steps; what is decided is a pure function of what all have seen
(`policy/source.py`). Holders read and verify their own copy before anything is loaded; a copy that fails
is set aside and the plan is made again without it; those who lack the copy receive it from one rank.
Nothing is loaded before every rank has verified bytes in memory, and an error on one rank is raised on all.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import xxhash
from torch.optim import Optimizer

from elastic_resume import failpoints
from elastic_resume.errors import (
    CheckpointError,
    CorruptError,
    DivergenceError,
    MismatchError,
    TornError,
    UnreadableError,
)
from elastic_resume.policy import source
from elastic_resume.policy.source import Copy, Inventory, ResumePlan
from elastic_resume.store import checkpoint, life
from elastic_resume.store.board import Board
from elastic_resume.store.layout import Layout
from elastic_resume.store.manifest import Manifest
from elastic_resume.store.node_dir import NodeDir
from elastic_resume.worker import inventory, state, transfer
from elastic_resume.worker.image import Image, memory_of
from elastic_resume.worker.place import Place
from elastic_resume.worker.state import BUFFER, REPLICATED, FlatState, Leaf

DATA = "data"
PARAMETERS = "elastic_resume.parameters"
Failures = Mapping[str, tuple[str, str]]  # node -> kind of CheckpointError and reason
_PROVEN_BAD = {TornError.kind, CorruptError.kind}
_BATCH_BYTES = 64 * 1024 * 1024  # of small tensors sent in one broadcast


@dataclass(frozen=True)
class Resumed:
    """What a generation starts from. ``manifest`` is None after a cold start."""

    plan: ResumePlan
    manifest: Manifest | None
    flat: FlatState
    nodes: tuple[str, ...]
    seconds: float


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
    flat = place.together(lambda: state.flatten(tracked))
    place.together(lambda: _make_room(place, node_dir, flat, tracked))
    own = place.together(
        lambda: inventory.take_stock(place, board, node_dir.generation()) if place.leads else None
    )
    told = place.world.gather(inventory.to_json(own) if own else None)
    stock = [inventory.from_json(one) for one in told if one is not None]
    failpoints.hit("resume.planned")
    while True:
        plan = source.choose(stock, place.settings.resume)
        if plan.kind == "cold":
            _equalise(place, flat)
            manifest = None
            break
        image, failures = _read_held(place, plan)
        if failures:
            stock = _set_aside(place, plan, stock, failures)
            continue
        manifest = _share_manifest(place, plan)
        image = _send_to_lacking(place, plan, manifest, image)
        _load(place, plan, manifest, image, tracked)
        flat = place.together(lambda: state.flatten(tracked))
        _require_equal(place, flat)
        break
    failpoints.hit("resume.loaded")
    place.together(lambda: _enter(place, node_dir, plan))
    return Resumed(plan, manifest, flat, tuple(place.lead_of), time.monotonic() - began)


def _make_room(place: Place, node_dir: NodeDir, flat: FlatState, tracked: Mapping[str, Any]) -> None:
    """Ask before the first step whether the disk takes what training will write."""
    if not place.leads:
        return
    size = expected_bytes(flat, tracked)
    missing = place.settings.keep + 1 - sum(not entry.is_link for entry in place.catalog.entries())
    node_dir.ensure_room(size * max(1, missing))


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


# ---- from a checkpoint -------------------------------------------------------------------------------


def _read_held(place: Place, plan: ResumePlan) -> tuple[Image | None, Failures]:
    """Read this rank's copy, if its node holds one; give it with the failures of all."""
    copy, image, problem = plan.copy_of(place.node), None, None
    if copy is not None:
        try:
            image = _read(place, copy)
        except CheckpointError as error:
            problem = (error.kind, str(error))
        except (OSError, MemoryError) as error:
            problem = (UnreadableError.kind, f"{place.path_of(copy)}: cannot be read now ({error!r})")
    header = xxhash.xxh3_128_hexdigest(image.layout.header) if image else None
    told = place.world.gather([problem, header])
    failures: dict[str, tuple[str, str]] = {}
    for rank, (found, _) in enumerate(told):
        # Of several ranks of a node, one that proved the copy bad knows more than one that could not read it.
        if found is not None and failures.get(place.node_of[rank], ("",))[0] not in _PROVEN_BAD:
            failures[place.node_of[rank]] = (found[0], found[1])
    if not failures:
        expected = told[plan.source_rank][1]
        failures = {
            place.node_of[rank]: ("unlike", f"its tensors are laid out unlike those of {plan.source_node}")
            for rank, one in enumerate(told)
            if one[1] not in {None, expected}
        }
    return image, failures


def _read(place: Place, copy: Copy) -> Image:
    path = place.path_of(copy)
    run_id = place.settings.run_id if copy.home else None
    manifest = checkpoint.quick_check(path, run_id)
    memory = checkpoint.map_image(path, manifest)  # its bytes are sent and copied on at once, and dropped
    return Image(Layout.parse(memory, manifest.file_bytes), memory)


def _set_aside(place: Place, plan: ResumePlan, stock: list[Inventory], failures: Failures) -> list[Inventory]:
    """Take the copies that failed out of the inventories; quarantine those of our own that are proven bad."""
    left = []
    for one in stock:
        copy = plan.copy_of(one.node)
        if one.node not in failures or copy is None:
            left.append(one)
            continue
        name = checkpoint.name_of(copy.generation, copy.step) if copy.home else place.settings.resume
        kind, reason = failures[one.node]
        left.append(source.without(one, copy, name, reason, kind))
    place.together(lambda: _quarantine_own(place, plan, failures))
    return left


def _quarantine_own(place: Place, plan: ResumePlan, failures: Failures) -> None:
    copy = plan.copy_of(place.node)
    kind, reason = failures.get(place.node, ("", ""))
    if not place.leads or copy is None or copy.home != place.node or kind not in _PROVEN_BAD:
        return
    if not place.path_of(copy).is_symlink():
        place.quarantine(place.path_of(copy), reason)


def _share_manifest(place: Place, plan: ResumePlan) -> Manifest:
    """Give every rank the source's manifest; it carries its own digest, which is checked on arrival."""

    def read() -> str | None:
        copy = plan.copy_of(place.node)
        if place.world.rank != plan.source_rank or copy is None:
            return None
        manifest = checkpoint.quick_check(place.path_of(copy), place.settings.run_id if copy.home else None)
        return replace(manifest, run_id=place.settings.run_id).to_bytes().decode()

    return Manifest.parse(place.world.tell(place.together(read), plan.source_rank).encode())


def _send_to_lacking(place: Place, plan: ResumePlan, manifest: Manifest, image: Image | None) -> Image:
    """Let one rank of each lacking node receive the image; its other ranks read it from their disk."""
    if plan.lacking:
        receivers = [place.lead_of[node] for node in plan.lacking]
        channel = place.world.subgroup([plan.source_rank, *receivers])
        if channel is not None and place.world.rank == plan.source_rank and image is not None:
            transfer.send(channel, image, manifest, plan.source_rank)
        received = place.together(
            lambda: (
                transfer.receive(channel, manifest, plan.source_rank, place.node_dir)
                if channel is not None and place.world.rank in receivers
                else None
            )
        )
        image = image or received
    if image is None:
        image = place.together(lambda: _read(place, Copy(place.node, manifest.generation, manifest.step, 0)))
    elif plan.lacking:
        place.together(lambda: None)
    return image


def _load(
    place: Place, plan: ResumePlan, manifest: Manifest, image: Image, tracked: Mapping[str, Any]
) -> None:
    """Load the image, with the source's values of everything that ranks need not agree on."""
    channel = place.world.everybody()
    if channel is not None:
        for batch in _batches(image, manifest.follows_rank0):
            packed = torch.cat([torch.frombuffer(image.bytes_of(name), dtype=torch.uint8) for name in batch])
            channel.broadcast(packed, plan.source_rank)
            arrived, at = memory_of(packed), 0
            for name in batch:
                target = image.bytes_of(name)
                target[:] = arrived[at : at + len(target)]
                at += len(target)
    place.together(lambda: state.load(tracked, manifest.state, image.tensor))


def _batches(image: Image, names: tuple[str, ...]) -> list[list[str]]:
    batches: list[list[str]] = []
    room = 0
    for name in names:
        size = len(image.bytes_of(name))
        if size == 0:
            continue
        if size > room:
            batches.append([])
            room = _BATCH_BYTES
        batches[-1].append(name)
        room -= size
    return batches


# ---- equality ----------------------------------------------------------------------------------------


def _require_equal(place: Place, flat: FlatState) -> None:
    """Prove that all ranks hold the same parameters and optimizer state, or say which differ.

    Raises:
        DivergenceError: naming the first tensor that differs, and the ranks on either side.

    """
    prints = state.fingerprints(flat.of_kind(REPLICATED))
    told = place.world.gather(state.combined(prints))
    if len(set(told)) == 1:
        return
    everyone = place.world.gather(prints)
    name, ranks = _first_difference(everyone)
    raise DivergenceError(
        f"ranks hold different values of {name!r} after loading the same step ({ranks}). Replicas diverged "
        "before it was saved, or an object does not restore all that it saves. Start from the copy of one "
        "node that you trust with --resume PATH (see `elastic-resume ls`)."
    )


def _first_difference(everyone: list[dict[str, str]]) -> tuple[str, str]:
    names = list(dict.fromkeys(name for prints in everyone for name in prints))
    for name in names:
        sides: dict[str | None, list[int]] = {}
        for rank, prints in enumerate(everyone):
            sides.setdefault(prints.get(name), []).append(rank)
        if len(sides) > 1:
            return name, " against ".join(f"rank {', '.join(map(str, side))}" for side in sides.values())
    return "(no tensor)", "only the combined digest differs"


def _equalise(place: Place, flat: FlatState) -> None:
    """Start cold: as DDP does when it is built, rank 0's values are the job's; the optimizer's too.

    Raises:
        MismatchError: the ranks built different models.

    """
    leaves = flat.of_kind(REPLICATED, BUFFER)
    shapes = {leaf.name: f"{leaf.tensor.dtype}{list(leaf.tensor.shape)}" for leaf in leaves}
    if len(set(place.world.gather(state.combined(shapes)))) > 1:
        name, ranks = _first_difference(place.world.gather(shapes))
        raise MismatchError(
            f"the ranks built different models: {name!r} is not the same on {ranks}. "
            "Build the model from the same arguments on every rank."
        )
    _require_same_order(place, flat)
    channel = place.world.everybody()
    prints = state.combined(state.fingerprints(leaves))
    if channel is None or len(set(place.world.gather(prints))) == 1:
        return
    with torch.no_grad():
        for leaf in leaves:
            here = leaf.tensor.detach().cpu().contiguous()
            channel.broadcast(here, 0)
            leaf.tensor.copy_(here)


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
