"""``er.load``: what a checkpoint holds, in plain tensors, without a process group or a run.

Promise: what comes out was verified as far as its format allows (see `contents`), lies in memory of its own,
and shares it only where it was tied.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from torch import Tensor

from elastic_resume.errors import CheckpointError, ForeignError, NoValidCheckpointError, UsageError
from elastic_resume.store import catalog
from elastic_resume.store.catalog import Catalog, Entry
from elastic_resume.store.reading import located
from elastic_resume.worker import contents, parts
from elastic_resume.worker.contents import Contents, Stored, Unreadable, replace_leaves
from elastic_resume.worker.state import key_of, stored_form

_MAX_RUNS = 1000


def load(path: str | os.PathLike[str], name: str | None = "model") -> Any:
    """Read a checkpoint into tensors on the CPU: ``model.load_state_dict(er.load("checkpoints/train"))``.

    Needs no process group, no agent and no GPU, and changes nothing.

    Args:
        path: a checkpoint of ours; the directory of a node or a run, of which the newest valid one is taken;
            a torch.save file (never unpickled beyond tensors and plain data); a DCP directory; a safetensors
            file, or several with their index.
        name: which object: "model" gives its state_dict, name -> tensor, without ``module.`` and
            ``_orig_mod.``; "optimizer", "scheduler" … what they take in ``load_state_dict``. None: all there
            is, as it lies there.

    Raises:
        UsageError: there is no such object; the text lists those that there are.
        CheckpointError: nothing readable is there, or its bytes are not what they must be.
        NoValidCheckpointError: a directory of checkpoints, and none of them is valid.

    """
    found = opened(Path(path))
    found.verify()
    if name is None:
        with located(found.path):
            return _owned(found.tree)
    part = parts.part_of(found, name)
    if part is None:
        known = ", ".join(map(repr, list(found.tree)[:20])) if isinstance(found.tree, dict) else "no names"
        raise UsageError(
            f"{found.path}: holds no {name!r}; there is: {known}. Choose one with name=…, or None."
        )
    state = part.state
    if name in {"model", "ema"} and found.format != contents.OURS:
        state = parts.without_wrappers(state)
    with located(found.path):
        return _owned(state)


def opened(path: Path) -> Contents:
    """Look into the checkpoint at ``path``, or into the newest valid one of a node or a run."""
    with located(path):
        entries = _entries_in(path)
    if not entries:
        return contents.look_into(path)
    problems = []
    for entry in sorted(entries, key=lambda entry: entry.order, reverse=True):
        try:
            if entry.problem is not None:
                raise entry.problem
            return contents.look_into(entry.path)
        except CheckpointError as error:
            problems.append(str(error))
    more = f"; and {len(problems) - 4} more" if len(problems) > 4 else ""
    raise NoValidCheckpointError(f"{path}: no checkpoint can be read ({'; '.join(problems[:4])}{more}).")


def _entries_in(path: Path) -> list[Entry]:
    """The checkpoints of ours in the directory of a node, a run, or the only run; none in anything else."""
    if not path.is_dir() or contents.is_ours(path):
        return []
    own = Catalog(path, None).entries() or _of_run(path)
    if own or contents.looks_foreign(path):
        return own
    runs = {child: _of_run(child) for child in sorted(path.iterdir())[:_MAX_RUNS] if child.is_dir()}
    found = [child.name for child, entries in runs.items() if entries]
    if len(found) > 1:
        raise UsageError(f"{path}: holds {len(found)} runs; give one of them: {', '.join(found[:20])}.")
    return [entry for entries in runs.values() for entry in entries]


def _of_run(path: Path) -> list[Entry]:
    return [entry for entries in catalog.scan_run(path, None).values() for entry in entries]


def _owned(tree: Any) -> Any:
    """Copy tensors out of the file's memory; those that were one tensor there stay one."""
    known: dict[Any, Any] = {}

    def leaf(item: Any, path: str) -> Any:
        if isinstance(item, Unreadable):
            raise ForeignError(f"{path or 'what is saved'} is {item.what}: read the other parts with name=….")
        if not isinstance(item, Stored):
            return item
        tensor = item.read()
        stored_as, plain = stored_form(tensor)
        key = (key_of(plain, stored_as), item.kind) if tensor.numel() else object()
        if key not in known:
            known[key] = (
                _as_saved(tensor.clone(), item.kind),
                tensor,
            )  # which lives on: its address is the key
        return known[key][0]

    return replace_leaves(tree, leaf)


def _as_saved(tensor: Tensor, kind: str) -> Any:
    if kind == "numpy":
        return tensor.numpy()
    return tensor.numpy()[()] if kind == "numpy-scalar" else tensor
