"""Load a stored state into live objects, after checking that all of it fits.

Invariant: names, shapes and dtypes are compared before anything is changed, and every difference is listed.
Exempt are buffers that get their shape from the first batch: a registered None or empty tensor takes any
shape, and a module with a ``_load_from_state_dict`` of its own checks its buffers itself.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from elastic_resume.checkpoint import json_codec
from elastic_resume.checkpoint.json_codec import TensorRef
from elastic_resume.errors import MismatchError
from elastic_resume.state import dtensors
from elastic_resume.state.dtensors import LiveShards
from elastic_resume.state.parameters import ParameterOrder
from elastic_resume.state.shared_groups import SharedGroups
from elastic_resume.state.state_dict import (
    COMPLEX_KINDS,
    RESERVED_PREFIX,
    TrackedTensors,
    make_name_canonicalizer,
    type_name,
)

# Keys that schedulers write into the groups of an optimizer.
SCHEDULER_GROUP_KEYS = frozenset(
    {"initial_lr", "max_lr", "min_lr", "max_momentum", "base_momentum", "param_names"}
)

_EXTRA_STATE_KEY = "_extra_state"  # the key that nn.Module.get_extra_state() has in a state_dict


def load_into(
    tracked: Mapping[str, Any],
    structure: Any,
    get_tensor: Callable[[str], Tensor],
    *,
    peek_tensor: Callable[[str], Tensor] | None = None,
    make_tensor: Callable[[str], Tensor] | None = None,
) -> None:
    """Load a stored state into the live objects, after checking that all of it fits.

    Args:
        tracked: name -> object, from `collect_objects`.
        structure: the stored counterpart of `FlatState.structure`. If a live tensor is sharded, this rank
            loads its shard, however the stored tensor is divided.
        get_tensor: returns a stored tensor by name, on the CPU. It may block; its memory is not kept.
        peek_tensor: returns a tensor for its shape and dtype only, without blocking; default ``get_tensor``.
        make_tensor: returns a tensor for an object to keep; default is a copy from ``get_tensor``.

    Raises:
        MismatchError: objects, names, shapes or dtypes differ, and nothing was changed.

    """
    stored = {name: json_codec.decode(part) for name, part in structure.items()}
    live, peek = LiveShards(tensor for _, tensor in iter_live_tensors(tracked)), peek_tensor or get_tensor
    problems = _find_mismatches(tracked, stored, peek, live)
    if problems:
        shown = "\n  ".join(problems[:50])
        more = f"\n  and {len(problems) - 50} more" if len(problems) > 50 else ""
        raise MismatchError(
            "the tracked objects do not fit the checkpoint; nothing was loaded. Restore the model's "
            f"definition, or start over on purpose with --resume never.\n  {shown}{more}"
        )
    # An unsharded run's optimizer has whole tensors only; a sharded one's divides what belongs in shards.
    for name, item in tracked.items():
        if isinstance(item, ParameterOrder) and name in stored:
            item.prepare(stored[name])
    parts = [part.values() for part in stored.values() if isinstance(part, dict)]
    was_sharded = any(isinstance(value, TensorRef) and value.shards for part in parts for value in part)
    shared_groups = SharedGroups(tracked)
    for name, item in tracked.items():
        if name not in stored:  # a record that an older release did not keep
            continue
        # Outside of the try: an error of get_tensor is not a mismatch.
        if isinstance(item, nn.Module):
            restored = _build_module_state(item, stored[name], get_tensor)
        elif isinstance(item, TrackedTensors):
            targets = item.state_dict()
            restored = {k: replace_references(v, get_tensor, targets.get(k)) for k, v in stored[name].items()}
        else:
            make = cache_by_name(make_tensor or (lambda key: get_tensor(key).clone()))
            restored = _build_state(item, stored[name], make, peek, live, was_sharded=was_sharded)
        try:
            item.load_state_dict(restored)
            if isinstance(item, Optimizer):
                _restore_dtypes(item, restored)
        except (ValueError, KeyError, RuntimeError) as error:
            raise MismatchError(
                f"{name}: {type_name(item)} refuses the checkpoint's state: {error}. "
                "Build it as the run that wrote the checkpoint did, or start over with --resume never."
            ) from error
    shared_groups.restore()


def iter_live_tensors(tracked: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """Yield the names of live tensors that may be sharded, and the tensors.

    An optimizer's state is made anew by a restore, so only its parameters are among them.
    """
    for name, item in tracked.items():
        if isinstance(item, nn.Module):
            yield from ((f"{name}/{key}", parameter) for key, parameter in item.named_parameters())
        elif isinstance(item, Optimizer):
            yield from ((name, parameter) for group in item.param_groups for parameter in group["params"])
        elif isinstance(item, TrackedTensors):
            yield from ((f"{name}/{key}", tensor) for key, tensor in item.state_dict().items())


def _find_mismatches(
    tracked: Mapping[str, Any],
    stored: Mapping[str, Any],
    get_tensor: Callable[[str], Tensor],
    live_shards: LiveShards,
) -> list[str]:
    problems = [
        f"{name}: tracked now, not in the checkpoint"
        for name in tracked
        if name not in stored and not name.startswith(RESERVED_PREFIX)
    ]
    problems += [
        f"{name}: in the checkpoint, not passed to resume()" for name in stored if name not in tracked
    ]
    for name, item in tracked.items():
        if name not in stored:
            continue
        if hasattr(item, "differences"):
            problems += item.differences(stored[name])
        if isinstance(item, (Optimizer, LRScheduler)):
            problems += _find_setting_mismatches(name, item, stored[name])
        if not isinstance(item, (nn.Module, TrackedTensors)):
            continue
        canonical = make_name_canonicalizer(item) if isinstance(item, nn.Module) else str
        live = {canonical(key): value for key, value in item.state_dict().items()}
        kept = stored[name] if isinstance(stored[name], dict) else {}
        late = _find_late_buffers(item, kept) if isinstance(item, nn.Module) else {}
        for key in sorted((live.keys() | kept.keys()) - late.keys()):
            if key.rpartition(".")[2] == _EXTRA_STATE_KEY and key in live and key in kept:
                continue  # the module checks it itself
            here = _describe_value(live.get(key), get_tensor, live_shards)
            there = _describe_value(kept.get(key), get_tensor, live_shards)
            if here != there:
                place = "the model" if isinstance(item, nn.Module) else "the tracked tensors"
                problems.append(f"{name}/{key}: {here} in {place}, {there} in the checkpoint")
    return problems


def _find_setting_mismatches(name: str, item: Optimizer | LRScheduler, stored: Any) -> list[str]:
    """Find optimizers and schedulers with settings that the stored state lacks, while it has others.

    Missing settings alone, or extra ones alone, are another release of torch. torch would load a state
    with other settings: an optimizer fails at its first step, a scheduler keeps its own settings.
    """
    stored = stored if isinstance(stored, dict) else {}
    pairs = [(name, item.state_dict(), stored)]
    if isinstance(item, Optimizer):
        groups = stored.get("param_groups")
        live = item.state_dict()["param_groups"]
        kept = groups if isinstance(groups, list) else []
        pairs = [(f"{name}/param_groups/{i}", *pair) for i, pair in enumerate(zip(live, kept, strict=False))]
    problems = []
    for path, here, there in pairs:
        only_here = sorted(key for key in here if key not in there and key not in SCHEDULER_GROUP_KEYS)
        only_there = sorted(str(key) for key in there if key not in here and key not in SCHEDULER_GROUP_KEYS)
        if only_here and only_there:
            problems.append(
                f"{path}: has {', '.join(only_here[:6])} now, {', '.join(only_there[:6])} in the checkpoint: "
                f"is {type_name(item)} of the same kind?"
            )
    return problems


def _describe_value(value: Any, get_tensor: Callable[[str], Tensor], live_shards: LiveShards) -> str:
    if value is None:
        return "absent"
    if isinstance(value, TensorRef) and value.shards is not None:
        # Describe the whole by one shard. A complex tensor is stored with one dimension more.
        shard = replace_references(TensorRef(live_shards.find_name(value), value.kind), get_tensor)
        return _describe(shard.dtype, live_shards.shape_of(value, get_tensor)[: shard.dim()])
    if isinstance(value, TensorRef):
        value = replace_references(value, get_tensor)
    return describe_tensor(value) if isinstance(value, Tensor) else "not a tensor"


def describe_tensor(tensor: Tensor) -> str:
    """Return dtype and shape, such as ``float32[2, 3]``."""
    return _describe(tensor.dtype, tensor.shape)


def _describe(dtype: torch.dtype, shape: Iterable[int]) -> str:
    return f"{str(dtype).removeprefix('torch.')}{list(shape)}"


def _build_module_state(
    module: nn.Module,
    stored: Mapping[str, Any],
    get_tensor: Callable[[str], Tensor],
) -> dict[str, Any]:
    canonical = make_name_canonicalizer(module)
    late = _find_late_buffers(module, stored)
    for key, (_, owner, own_name) in late.items():
        buffer = owner._buffers.get(own_name)  # noqa: SLF001  the only way to reach a registered None
        if own_name in owner._buffers and (buffer is None or not buffer.numel()):  # noqa: SLF001
            value = replace_references(stored[key], get_tensor)
            device = buffer.device if buffer is not None else _find_device(owner, module)
            owner._buffers[own_name] = torch.empty_like(value, device=device)  # noqa: SLF001
    live = module.state_dict()
    # A live state_dict carries the version numbers that modules read when they load.
    for key, (real, _, _) in late.items():
        live[real] = replace_references(stored[key], get_tensor, live.get(real))
    for key in live:
        if canonical(key) not in late:
            live[key] = replace_references(stored[canonical(key)], get_tensor, live[key])
    return live


def _find_late_buffers(module: nn.Module, stored: Mapping[str, Any]) -> dict[str, tuple[str, nn.Module, str]]:
    """Find the stored buffers whose shape, or presence, the first batch decides.

    Return the real key of each, the module that owns it, and its name there.
    """
    canonical = make_name_canonicalizer(module)
    owners = {canonical(f"{path}." if path else ""): (path, owner) for path, owner in module.named_modules()}
    found = {}
    for key, value in stored.items():
        prefix, dot, own_name = key.rpartition(".")
        path, owner = owners.get(prefix + dot, ("", None))
        if owner is None or own_name in owner._parameters or own_name in owner._non_persistent_buffers_set:  # noqa: SLF001
            continue
        buffer = owner._buffers.get(own_name)  # noqa: SLF001
        is_empty = own_name in owner._buffers and (buffer is None or not buffer.numel())  # noqa: SLF001
        if isinstance(value, TensorRef) and (is_empty or _loads_itself(owner)):
            found[key] = (f"{path}.{own_name}" if path else own_name, owner, own_name)
    return found


def _loads_itself(module: nn.Module) -> bool:
    """Return whether a module loads its buffers by code of its own; torch.nn's own classes check shapes."""
    loader = type(module)._load_from_state_dict  # noqa: SLF001  what a module overrides to load
    return not loader.__module__.startswith("torch.nn.") or bool(module._load_state_dict_pre_hooks)  # noqa: SLF001


def _find_device(*modules: nn.Module) -> torch.device | None:
    """Return the device of the first tensor of the modules."""
    tensors = (tensor for module in modules for tensor in chain(module.parameters(), module.buffers()))
    return next((tensor.device for tensor in tensors), None)


def _build_state(
    item: Any,
    stored: Any,
    make_tensor: Callable[[str], Tensor],
    peek_tensor: Callable[[str], Tensor],
    live_shards: LiveShards,
    *,
    was_sharded: bool,
) -> Any:
    """Build the state of any object but a module.

    An optimizer's tensor of the same shape as its parameter is divided like it, unless it is stored whole
    though the model ``was_sharded``.
    """
    is_like_torch = isinstance(item, Optimizer) and isinstance(stored, dict)
    if not is_like_torch or not isinstance(stored.get("state"), dict):
        return replace_references(stored, make_tensor, live_shards.find)
    parameters = [parameter for group in item.param_groups for parameter in group["params"]]

    def find_live(index: Any, ref: TensorRef) -> Any:
        is_known = type(index) is int and 0 <= index < len(parameters)
        parameter: Any = parameters[index] if is_known else None
        if not dtensors.is_dtensor(parameter) or (was_sharded and ref.shards is None):
            return live_shards.find(ref)
        shape = live_shards.shape_of(ref, peek_tensor)
        shape = shape[:-1] if ref.kind in COMPLEX_KINDS.values() else shape
        return parameter if shape == tuple(parameter.shape) else live_shards.find(ref)

    rest = {key: value for key, value in stored.items() if key != "state"}
    state = {
        index: replace_references(entries, make_tensor, partial(find_live, index))
        for index, entries in stored["state"].items()
    }
    return {"state": state, **replace_references(rest, make_tensor)}


def cache_by_name(make_tensor: Callable[[str], Tensor]) -> Callable[[str], Tensor]:
    """Return a function that makes one tensor for each name, so that tied tensors stay tied."""
    tensors: dict[str, Tensor] = {}

    def get_tensor(name: str) -> Tensor:
        if name not in tensors:
            tensors[name] = make_tensor(name)
        return tensors[name]

    return get_tensor


def _restore_dtypes(optimizer: Optimizer, restored: Mapping[str, Any]) -> None:
    """Restore the dtypes of optimizer state: torch's load_state_dict() casts them to the parameter's.

    An optimizer with float32 moments for bfloat16 parameters would continue with rounded ones.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for index, stored in restored.get("state", {}).items():
        if type(index) is not int or not 0 <= index < len(parameters) or not isinstance(stored, dict):
            continue
        live: Any = optimizer.state.get(parameters[index])
        if not isinstance(live, dict):
            continue
        for key, value in stored.items():
            cast = live.get(key)
            if isinstance(value, Tensor) and isinstance(cast, Tensor) and cast.dtype != value.dtype:
                live[key] = value.to(cast.device)


def replace_references(value: Any, get_tensor: Callable[[str], Tensor], live: Any = None) -> Any:
    """Replace the references in a decoded state by tensors and arrays.

    ``live`` is the live tensor, or a function that returns one or None for a reference. If that is a DTensor,
    the result is a DTensor too, divided in the same way. All others become whole tensors.
    """
    if isinstance(value, TensorRef):
        return _read_reference(value, get_tensor, live(value) if callable(live) else live)
    if isinstance(value, dict):
        items = {k: replace_references(v, get_tensor, live) for k, v in value.items()}
        return items if type(value) is dict else type(value)(items)
    if type(value) in {list, tuple}:
        return type(value)(replace_references(v, get_tensor, live) for v in value)
    if type(value) is deque:
        return deque((replace_references(v, get_tensor, live) for v in value), value.maxlen)
    return value


def _read_reference(ref: TensorRef, get_tensor: Callable[[str], Tensor], live: Any) -> Any:
    is_sharded = dtensors.is_dtensor(live)
    tensor = (
        dtensors.read_own_shard(ref, live, get_tensor) if is_sharded else dtensors.read_whole(ref, get_tensor)
    )
    if ref.kind in COMPLEX_KINDS.values():
        tensor = torch.view_as_complex(tensor)
    if is_sharded:
        return dtensors.make_dtensor(tensor, live)
    if ref.kind == "numpy":
        return tensor.numpy()
    return tensor.numpy()[()] if ref.kind == "numpy-scalar" else tensor
