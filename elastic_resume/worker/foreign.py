"""``--resume PATH`` of a checkpoint that somebody else made: it becomes the first checkpoint of this job.

The lead of one node reads the file, puts what it holds into the live objects, and commits those as a
checkpoint of the generation after all that are set aside; from there on it is a copy like any other, which
the other nodes get, and which a restart finds. So a restart goes on from the job's own newest copy and never
from the file, and so does whoever starts the job again.

Promise: whatever does not fit is listed, and then nothing was loaded or written. What the file lacks starts
fresh, what it has beyond the tracked objects is left, and both are said in one line.
After a crash: no checkpoint was committed and the file is read again, or it was, and is resumed from.

Not known: what the numbers in such a file mean. ``epoch`` is the last one done for some scripts and the next
to do for others. It counts only where the optimizer's or the scheduler's own count says which.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from elastic_resume.errors import CheckpointError, MismatchError, NoValidCheckpointError, UnreadableError
from elastic_resume.plural import amount, verb
from elastic_resume.policy.source import Inventory
from elastic_resume.store import committed, life
from elastic_resume.store.manifest import Manifest, Position
from elastic_resume.store.writing import Writer
from elastic_resume.worker import contents, fitting, inventory, parts, state, streaming, telling
from elastic_resume.worker.batches import GlobalBatches
from elastic_resume.worker.contents import Contents
from elastic_resume.worker.fitting import Fit
from elastic_resume.worker.parts import Part
from elastic_resume.worker.place import Place
from elastic_resume.worker.state import type_name

DATA = "data"
INTERNAL = "elastic_resume."
PARAMETERS = "elastic_resume.parameters"
_SHOWN = 50


def bring(place: Place, tracked: Mapping[str, Any], node: str, floor: int, accumulate: int) -> None:
    """Make a checkpoint of what ``--resume PATH`` names, on ``node``; to be called on every rank.

    Args:
        place: of this rank.
        tracked: the objects that take what the file holds.
        node: whose lead reads the file.
        floor: the generation up to which this start of the job sets all checkpoints aside.
        accumulate: how many batches of the data an optimizer step reads.

    Raises:
        MismatchError: the file does not fit the objects; nothing was loaded.
        NoValidCheckpointError: the file cannot be read, or is not what it says.
        MachineError: the disk refuses the checkpoint.

    """
    if not place.leads:
        return
    # First: what is committed now must not be taken for older than this start of the job.
    life.note(place.node_dir, inventory.supervisor(), floor)
    if place.node == node:
        _convert(place, tracked, Path(place.settings.resume), floor + 1, accumulate)


def leave(place: Place, stock: Sequence[Inventory]) -> None:
    """Say once in each start of the job that it goes on from its own copies, and does not read the file."""
    own = next(one for one in stock if one.node == place.node)
    if not place.leads or own.began:
        return
    life.note(place.node_dir, inventory.supervisor(), own.floor)
    if place.world.rank == 0:
        telling.say(
            f"--resume {place.settings.resume} is not read: the job has copies of its own, and goes on from "
            "the newest. To begin with that file give the job another --rdzv-id."
        )


def _convert(place: Place, tracked: Mapping[str, Any], path: Path, generation: int, accumulate: int) -> None:
    try:
        found = contents.look_into(path)
        found.verify()
        taken = _parts(found, tracked)
        fits = _fits(found, tracked, taken)
        position, why = position_of(found, taken, tracked.get(DATA), accumulate)
        for name, one in fits.items():
            _load(name, tracked[name], fitting.read(one.state))
    except CheckpointError as error:
        refused = NoValidCheckpointError(f"--resume {path}: {str(error).removeprefix(f'{path}: ')}")
        refused.at_fault = not isinstance(error, UnreadableError)
        raise refused from error
    manifest = _commit(place, tracked, generation, position)
    line = told(found, tracked, taken, position, why)
    telling.say(line)
    place.events.write(
        "import", generation=manifest.generation, step=manifest.step, path=str(path), message=line
    )


def _parts(found: Contents, tracked: Mapping[str, Any]) -> dict[str, Part]:
    modules = [name for name, item in tracked.items() if isinstance(item, nn.Module)]
    taken = {}
    for name in tracked:
        if name == DATA or name.startswith(INTERNAL):
            continue
        part = parts.part_of(found, name, modules)
        if part is not None:
            taken[name] = part
    if modules and not any(name in taken for name in modules):
        keys = ", ".join(map(repr, list(found.tree)[:20])) if isinstance(found.tree, dict) else "no names"
        raise MismatchError(
            f"{found.path} ({found.format}): holds no state of {' or '.join(modules)}; nothing was loaded. "
            f"It has {keys}. Save the model's state_dict() under the key {modules[0]!r}."
        )
    return taken


def _fits(found: Contents, tracked: Mapping[str, Any], taken: Mapping[str, Part]) -> dict[str, Fit]:
    """Compare every part with its object. Raises MismatchError with all differences of all of them."""
    orders = tracked[PARAMETERS].state_dict() if PARAMETERS in tracked else {}
    fits = {
        name: fitting.fit(name, tracked[name], part.state, orders.get(name, ()))
        for name, part in taken.items()
    }
    problems = [problem for one in fits.values() for problem in one.differences]
    if problems:
        shown = "\n  ".join(problems[:_SHOWN])
        more = f"\n  and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        raise MismatchError(
            f"{found.path} ({found.format}) does not fit the tracked objects; nothing was loaded. Build them "
            "as those were that it was saved from; or take what fits yourself before er.resume(), without "
            f"resume=: model.load_state_dict(er.load(PATH), strict=False).\n  {shown}{more}"
        )
    return fits


def _load(name: str, item: Any, restored: Any) -> None:
    try:
        item.load_state_dict(restored)
    except (ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
        raise MismatchError(f"{name}: {type_name(item)} refuses the file's state: {error}.") from error


def _commit(place: Place, tracked: Mapping[str, Any], generation: int, position: Position) -> Manifest:
    flat = state.flatten(tracked)
    layout = streaming.layout_of(flat)
    manifest = streaming.manifest_of(place, flat, layout, generation, position)
    with Writer(place.node_dir, *manifest.order) as writer:
        for piece in streaming.image_of(flat, layout):
            writer.write(piece)
        writer.commit(manifest)
    committed.note(place.node_dir, generation)
    return manifest


# ---- where training begins -----------------------------------------------------------------------------


def position_of(
    found: Contents, taken: Mapping[str, Part], data: Any, accumulate: int = 1
) -> tuple[Position, str]:
    """Give the position that the file tells beyond doubt, at an epoch's beginning, and why it is that one.

    Two numbers have to agree: ``epoch`` (either the last one done or the next) with the steps that the
    optimizer has counted, where ``data`` says how many an epoch has, or with the scheduler's count of epochs.
    """
    start = Position(0, 0, 0, 0)
    tree = found.tree if isinstance(found.tree, dict) else {}
    epoch = parts.count_of(tree, parts.EPOCH_KEYS)
    counted = _steps_counted(taken)
    said = parts.count_of(tree, parts.STEP_KEYS)
    per_epoch = -(-data.steps // accumulate) if isinstance(data, GlobalBatches) else 0
    if epoch is None and said is None:
        return start, "the file tells no epoch and no step"
    if counted and per_epoch:
        done, over = divmod(counted, per_epoch)
        agrees = epoch is not None and epoch[1] in ({done} if over else {done, done - 1})
        if agrees or (epoch is None and said is not None and said[1] == counted):
            rest = f"{amount(over, 'step')} {verb(over, 'was', 'were')}"
            again = f"; of epoch {done} {rest} done, and it starts over" if over else ""
            steps = amount(counted, "step")
            return _at(done, counted - over, data), f"the optimizer has counted {steps}{again}"
    elif epoch is not None and (done := _epochs_counted(taken)) - epoch[1] in {0, 1}:
        return _at(
            done, done * per_epoch or counted, data
        ), f"the scheduler has counted {amount(done, 'epoch')}"
    what = " and ".join(f"{key} {number}" for key, number in filter(None, (epoch, said)))
    return start, f"nothing else in the file says what its {what} counts"


def _at(epoch: int, step: int, data: Any) -> Position:
    samples = epoch * data.samples_per_epoch if isinstance(data, GlobalBatches) else 0
    return Position(epoch, 0, step, samples)


def _steps_counted(taken: Mapping[str, Part]) -> int:
    """The greatest step that an optimizer has counted for a parameter (Adam and its kin do); 0: none has."""
    counts = [0]
    for part in taken.values():
        inner = (
            part.state.get("state") if isinstance(part.state, dict) and "param_groups" in part.state else None
        )
        for values in inner.values() if isinstance(inner, dict) else ():
            step = fitting.read(values.get("step")) if isinstance(values, dict) else None
            if step is not None and float(step).is_integer():
                counts.append(int(step))
    return max(counts)


def _epochs_counted(taken: Mapping[str, Part]) -> int:
    """What the schedulers have counted, if they agree; -1 else, and where they have counted nothing."""
    counts = [
        part.state["last_epoch"]
        for part in taken.values()
        if isinstance(part.state, dict) and type(part.state.get("last_epoch")) is int
    ]
    return counts[0] if len(set(counts)) == 1 and counts[0] > 0 else -1


# ---- what is said --------------------------------------------------------------------------------------


def told(
    found: Contents, tracked: Mapping[str, Any], taken: Mapping[str, Part], position: Position, why: str
) -> str:
    """Say in one line what was taken, what starts fresh, what was left, and where training begins."""
    named = [f"{name} from {part.key!r}" if part.key else name for name, part in taken.items()]
    fresh = [n for n in tracked if n not in taken and n != DATA and not n.startswith(INTERNAL)]
    keys = {part.key.partition("/")[0] for part in taken.values()}
    used = {*keys, *parts.EPOCH_KEYS, *parts.STEP_KEYS}
    left = [] if "" in keys else [repr(key) for key in found.tree if key not in used]
    words = [f"{found.path} ({found.format}) gives {', '.join(named)}"]
    if fresh:
        words.append(f"starts fresh: {', '.join(fresh)}")
    if left:
        more = f" and {len(left) - 8} more" if len(left) > 8 else ""
        words.append(f"not used: {', '.join(left[:8])}{more}")
    words.append(f"training begins at epoch {position.epoch}, step {position.step}: {why}")
    return "; ".join(words)
