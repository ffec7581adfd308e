"""Puts a stored state into live objects, after checking that all of it fits.

Promise: names, shapes and dtypes are compared before anything is changed, and every difference is listed.
Does not know where the tensors come from.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from elastic_resume.errors import MismatchError
from elastic_resume.store import typed
from elastic_resume.store.typed import TensorRef
from elastic_resume.worker.state import COMPLEX, canonical_names, type_name


def load(
    tracked: Mapping[str, Any],
    skeleton: Any,
    tensor: Callable[[str], Tensor],
    *,
    look: Callable[[str], Tensor] | None = None,
    own: Callable[[str], Tensor] | None = None,
) -> None:
    """Put a stored state into the live objects, after checking that all of it fits.

    Args:
        tracked: name -> object, as `collect` gave it.
        skeleton: the stored counterpart of `FlatState.skeleton`.
        tensor: gives the stored tensor of a name, on the CPU; its memory is not kept. May wait for it.
        look: gives it for its shape and dtype alone, without waiting; default ``tensor``.
        own: gives it for an object to keep; default is a copy of what ``tensor`` gives.

    Raises:
        MismatchError: objects, names, shapes or dtypes differ. Every difference is listed, and nothing
            was changed.

    """
    stored = {name: typed.decode(part) for name, part in skeleton.items()}
    problems = _differences(tracked, stored, look or tensor)
    if problems:
        shown = "\n  ".join(problems[:50])
        more = f"\n  and {len(problems) - 50} more" if len(problems) > 50 else ""
        raise MismatchError(
            "the tracked objects do not fit the checkpoint; nothing was loaded. Restore the model's "
            f"definition, or start over on purpose with --resume never.\n  {shown}{more}"
        )
    for name, item in tracked.items():
        if isinstance(item, nn.Module):
            _load_module(item, stored[name], tensor)
            continue
        # Outside of the try: what `tensor` raises is no refusal.
        restored = _restore(stored[name], own or (lambda key: tensor(key).clone()))
        try:
            item.load_state_dict(restored)
        except (ValueError, KeyError, RuntimeError) as error:
            raise MismatchError(
                f"{name}: {type_name(item)} refuses the checkpoint's state: {error}. "
                "Build it as the run that wrote the checkpoint did, or start over with --resume never."
            ) from error


def _differences(
    tracked: Mapping[str, Any], stored: Mapping[str, Any], tensor: Callable[[str], Tensor]
) -> list[str]:
    problems = [f"{name}: tracked now, not in the checkpoint" for name in tracked if name not in stored]
    problems += [
        f"{name}: in the checkpoint, not passed to resume()" for name in stored if name not in tracked
    ]
    for name, item in tracked.items():
        if name in stored and hasattr(item, "differences"):
            problems += item.differences(stored[name])
        if name not in stored or not isinstance(item, nn.Module):
            continue
        canonical = canonical_names(item)
        live = {canonical(key): value for key, value in item.state_dict().items()}
        kept = stored[name] if isinstance(stored[name], dict) else {}
        for key in sorted(live.keys() | kept.keys()):
            here, there = _describe(live.get(key), tensor), _describe(kept.get(key), tensor)
            if here != there:
                problems.append(f"{name}/{key}: {here} in the model, {there} in the checkpoint")
    return problems


def _describe(value: Any, tensor: Callable[[str], Tensor]) -> str:
    if value is None:
        return "absent"
    if isinstance(value, TensorRef):
        stored = _restore(value, tensor)
        return _describe(stored, tensor)
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    return "not a tensor"


def _load_module(module: nn.Module, stored: Mapping[str, Any], tensor: Callable[[str], Tensor]) -> None:
    canonical = canonical_names(module)
    live = module.state_dict()
    # The fresh state_dict carries the version numbers that modules look at when they load.
    for key in live:
        live[key] = _restore(stored[canonical(key)], tensor)
    module.load_state_dict(live)


def _restore(value: Any, tensor: Callable[[str], Tensor]) -> Any:
    """Put tensors back in the place of references."""
    if isinstance(value, TensorRef):
        found = tensor(value.name)
        if value.kind in COMPLEX.values():
            found = torch.view_as_complex(found)
        if value.kind == "numpy":
            return found.numpy()
        return found.numpy()[()] if value.kind == "numpy-scalar" else found
    if isinstance(value, dict):
        items = {k: _restore(v, tensor) for k, v in value.items()}
        return items if type(value) is dict else type(value)(items)
    if type(value) in {list, tuple}:
        return type(value)(_restore(v, tensor) for v in value)
    return value
