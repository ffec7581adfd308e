"""Puts a stored state into live objects, after checking that all of it fits.

Promise: names, shapes and dtypes are compared before anything is changed, and every difference is listed.
Does not know where the tensors come from.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from elastic_resume.checkpoint import json_codec
from elastic_resume.checkpoint.json_codec import TensorRef
from elastic_resume.errors import MismatchError
from elastic_resume.state.state_dict import COMPLEX_KINDS, TrackedTensors, make_name_canonicalizer, type_name

# What a scheduler writes into an optimizer's groups.
SCHEDULER_GROUP_KEYS = frozenset(
    {"initial_lr", "max_lr", "min_lr", "max_momentum", "base_momentum", "param_names"}
)

_EXTRA_STATE_KEY = "_extra_state"  # the key that nn.Module.get_extra_state() has in a state_dict


def load_into(
    tracked: Mapping[str, Any],
    skeleton: Any,
    get_tensor: Callable[[str], Tensor],
    *,
    peek_tensor: Callable[[str], Tensor] | None = None,
    make_tensor: Callable[[str], Tensor] | None = None,
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
    stored = {name: json_codec.decode(part) for name, part in skeleton.items()}
    problems = _find_mismatches(tracked, stored, peek_tensor or get_tensor)
    if problems:
        shown = "\n  ".join(problems[:50])
        more = f"\n  and {len(problems) - 50} more" if len(problems) > 50 else ""
        raise MismatchError(
            "the tracked objects do not fit the checkpoint; nothing was loaded. Restore the model's "
            f"definition, or start over on purpose with --resume never.\n  {shown}{more}"
        )
    for name, item in tracked.items():
        # Outside of the try: what `tensor` raises is no refusal.
        if isinstance(item, nn.Module):
            restored = _build_module_state(item, stored[name], get_tensor)
        elif isinstance(item, TrackedTensors):
            restored = replace_references(stored[name], get_tensor)
        else:
            restored = replace_references(
                stored[name], cache_by_name(make_tensor or (lambda key: get_tensor(key).clone()))
            )
        try:
            item.load_state_dict(restored)
            if isinstance(item, Optimizer):
                _restore_dtypes(item, restored)
        except (ValueError, KeyError, RuntimeError) as error:
            raise MismatchError(
                f"{name}: {type_name(item)} refuses the checkpoint's state: {error}. "
                "Build it as the run that wrote the checkpoint did, or start over with --resume never."
            ) from error


def _find_mismatches(
    tracked: Mapping[str, Any], stored: Mapping[str, Any], get_tensor: Callable[[str], Tensor]
) -> list[str]:
    problems = [f"{name}: tracked now, not in the checkpoint" for name in tracked if name not in stored]
    problems += [
        f"{name}: in the checkpoint, not passed to resume()" for name in stored if name not in tracked
    ]
    for name, item in tracked.items():
        if name in stored and hasattr(item, "differences"):
            problems += item.differences(stored[name])
        if name in stored and isinstance(item, (Optimizer, LRScheduler)):
            problems += _find_setting_mismatches(name, item, stored[name])
        if name not in stored or not isinstance(item, (nn.Module, TrackedTensors)):
            continue
        canonical = make_name_canonicalizer(item) if isinstance(item, nn.Module) else str
        live = {canonical(key): value for key, value in item.state_dict().items()}
        kept = stored[name] if isinstance(stored[name], dict) else {}
        for key in sorted(live.keys() | kept.keys()):
            if key.rpartition(".")[2] == _EXTRA_STATE_KEY and key in live and key in kept:
                continue  # the module's own business: it may have grown
            here, there = (
                _describe_value(live.get(key), get_tensor),
                _describe_value(kept.get(key), get_tensor),
            )
            if here != there:
                what = "the model" if isinstance(item, nn.Module) else "what is tracked"
                problems.append(f"{name}/{key}: {here} in {what}, {there} in the checkpoint")
    return problems


def _find_setting_mismatches(name: str, item: Optimizer | LRScheduler, stored: Any) -> list[str]:
    """Say where an optimizer or a scheduler has settings that the stored one lacks, and lacks some of its.

    One of the two alone is another release of torch. torch takes either: the optimizer fails at its first
    step, and the scheduler goes on with what it was built with.
    """
    stored = stored if isinstance(stored, dict) else {}
    pairs = [(name, item.state_dict(), stored)]
    if isinstance(item, Optimizer):
        groups = stored.get("param_groups")
        live = item.state_dict()["param_groups"]
        kept = groups if isinstance(groups, list) else []
        pairs = [(f"{name}/param_groups/{i}", *pair) for i, pair in enumerate(zip(live, kept, strict=False))]
    problems = []
    for path, mine, theirs in pairs:
        lacking = sorted(key for key in mine if key not in theirs and key not in SCHEDULER_GROUP_KEYS)
        strange = sorted(str(key) for key in theirs if key not in mine and key not in SCHEDULER_GROUP_KEYS)
        if lacking and strange:
            problems.append(
                f"{path}: has {', '.join(lacking[:6])} now, {', '.join(strange[:6])} in the checkpoint: "
                f"is {type_name(item)} of the same kind?"
            )
    return problems


def _describe_value(value: Any, get_tensor: Callable[[str], Tensor]) -> str:
    if value is None:
        return "absent"
    if isinstance(value, TensorRef):
        stored = replace_references(value, get_tensor)
        return _describe_value(stored, get_tensor)
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    return "not a tensor"


def _build_module_state(
    module: nn.Module, stored: Mapping[str, Any], get_tensor: Callable[[str], Tensor]
) -> dict[str, Any]:
    canonical = make_name_canonicalizer(module)
    live = module.state_dict()
    # The fresh state_dict carries the version numbers that modules look at when they load.
    for key in live:
        live[key] = replace_references(stored[canonical(key)], get_tensor)
    return live


def cache_by_name(make_tensor: Callable[[str], Tensor]) -> Callable[[str], Tensor]:
    """Give one tensor for one name, however often it is asked for: what was one tensor comes back as one."""
    made: dict[str, Tensor] = {}

    def give(name: str) -> Tensor:
        if name not in made:
            made[name] = make_tensor(name)
        return made[name]

    return give


def _restore_dtypes(optimizer: Optimizer, restored: Mapping[str, Any]) -> None:
    """Put state back in its own dtype: torch turns it into its parameter's.

    An optimizer that keeps float32 moments or weights for bfloat16 parameters would go on with rounded ones.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for number, stored in restored.get("state", {}).items():
        if type(number) is not int or not 0 <= number < len(parameters) or not isinstance(stored, dict):
            continue
        live: Any = optimizer.state.get(parameters[number])
        if not isinstance(live, dict):
            continue
        for key, was in stored.items():
            now = live.get(key)
            if isinstance(was, Tensor) and isinstance(now, Tensor) and now.dtype != was.dtype:
                live[key] = was.to(now.device)


def replace_references(value: Any, get_tensor: Callable[[str], Tensor]) -> Any:
    """Replace the references in a decoded state by tensors and arrays."""
    if isinstance(value, TensorRef):
        found = get_tensor(value.name)
        if value.kind in COMPLEX_KINDS.values():
            found = torch.view_as_complex(found)
        if value.kind == "numpy":
            return found.numpy()
        return found.numpy()[()] if value.kind == "numpy-scalar" else found
    if isinstance(value, dict):
        items = {k: replace_references(v, get_tensor) for k, v in value.items()}
        return items if type(value) is dict else type(value)(items)
    if type(value) in {list, tuple}:
        return type(value)(replace_references(v, get_tensor) for v in value)
    if type(value) is deque:
        return deque((replace_references(v, get_tensor) for v in value), value.maxlen)
    return value
