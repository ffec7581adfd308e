"""Find what training changes and `er.resume` was not given, before a resume starts without it.

Parameters that an optimizer trains are refused. For the rest, a scheduler or an average of the weights, a
script may have a way of its own, so a warning names the argument.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import re
import sys
import weakref
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from types import FrameType
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import dataloader

from elastic_resume.data.elastic_sampler import ElasticSampler, has_our_batches
from elastic_resume.data.global_batches import GlobalBatches
from elastic_resume.errors import UsageError
from elastic_resume.state import dtensors
from elastic_resume.state.shared_groups import list_with_inner
from elastic_resume.state.state_dict import flatten, type_name, unwrap

logger = logging.getLogger(__name__)

MAX_WALK = 3  # containers and attributes between a tracked object and what it holds
_LOADER_ITERATORS = {
    dataloader._SingleProcessDataLoaderIter,  # noqa: SLF001
    dataloader._MultiProcessingDataLoaderIter,  # noqa: SLF001
}
_AVERAGE = re.compile(r"(^|[a-z_])(EMA|Ema)([A-Z_V\d]|$)|Averag")  # AveragedModel, ModelEmaV2, EMAModel


# ---- parameters ---------------------------------------------------------------------------------------


def require_tracked_parameters(tracked: Mapping[str, Any]) -> None:
    """Raise UsageError for a parameter that a tracked optimizer trains and no tracked object holds.

    A resume would restore its moments, and leave its value as the script builds it.
    """
    optimizers = {name: item for name, item in tracked.items() if isinstance(item, Optimizer)}
    known = {id(p) for item in tracked.values() if isinstance(item, nn.Module) for p in item.parameters()}
    suspects = [
        (name, index, p)
        for name, item in optimizers.items()
        for index, group in enumerate(item.param_groups)
        for p in group["params"]
        if id(p) not in known and (p.requires_grad or p.grad is not None)
    ]
    if not suspects:
        return
    held = collect_held(tracked)
    suspects = [each for each in suspects if id(each[2]) not in held]
    stored = {find_storage(leaf.tensor) for leaf in flatten(tracked).leaves if leaf.tensor.numel()}
    copied = {name: _find_copied_shapes(optimizers[name]) for name, _, _ in suspects}
    untracked = [
        each
        for each in suspects
        if each[2].numel()
        and find_storage(dtensors.to_local(each[2])) not in stored
        and each[2].shape not in copied[each[0]]
    ]
    if untracked:
        name, index, parameter = untracked[0]
        owner = find_variable(parameter)
        more = f", and {len(untracked) - 1} more" if len(untracked) > 1 else ""
        variable = owner or "criterion"
        raise UsageError(
            f"{name}: it trains a parameter of shape {list(parameter.shape)} in its group {index}"
            f"{f' ({owner})' if owner else ''}{more}, and no object that er.resume() was given holds its "
            f'value. A resume would start from a new one. Pass what holds it: track={{"{variable}": '
            f"{variable}}}. Its gradient has to be averaged over the ranks too: wrap what holds it in "
            "DDP, or all_reduce it before optimizer.step()."
        )


def collect_held(tracked: Mapping[str, Any]) -> set[int]:
    """Return the ids of tensors and objects that tracked objects hold, optimizers excepted."""
    items = [item for item in tracked.values() if not isinstance(item, Optimizer)]
    return set(_iter_held(items))


def _iter_held(items: Iterable[Any]) -> Iterator[int]:
    """Yield the ids of ``items`` and of what their attributes and containers hold."""
    seen: set[int] = set()
    level = list(items)
    for _ in range(MAX_WALK + 1):
        following: list[Any] = []
        for item in level:
            if id(item) in seen:
                continue
            seen.add(id(item))
            if isinstance(item, nn.Module):
                seen.update(map(id, chain(item.modules(), item.parameters())))
            elif isinstance(item, (list, tuple, set)):
                following += item
            elif isinstance(item, dict):
                following += item.values()
            elif not isinstance(item, (Tensor, type)):
                following += getattr(item, "__dict__", {}).values()
        level = following
    yield from seen


def find_storage(tensor: Tensor) -> tuple[Any, int]:
    """Return device and address of a tensor's memory: a view has that of its base."""
    return tensor.device, tensor.untyped_storage().data_ptr()


def _find_copied_shapes(optimizer: Optimizer) -> set[Any]:
    """Return the shapes of the copies of parameters in the state_dict() of an optimizer's own."""
    if type(optimizer).state_dict is Optimizer.state_dict:
        return set()
    parts = [part for key, part in optimizer.state_dict().items() if key not in {"state", "param_groups"}]
    return {item.shape for item in _iter_tensors(parts)}


def _iter_tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (dict, list, tuple)):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _iter_tensors(part)


def find_variable(item: Any) -> str:
    """Return the name of the script's variable that is ``item`` or a module with that parameter, or ""."""
    for name, value in iter_variables():
        module = unwrap(value) if isinstance(value, nn.Module) else None
        if value is item or (module and any(p is item for p in module.parameters())):
            return name
    return ""


def iter_variables() -> Iterator[tuple[str, Any]]:
    """Yield the variables of the functions of the script that have called this, innermost first."""
    frame: FrameType | None = sys._getframe()  # noqa: SLF001  to name the script's own variable
    while frame is not None:
        if not frame.f_globals.get("__name__", "").startswith("elastic_resume"):
            yield from {**frame.f_globals, **frame.f_locals}.items()
        frame = frame.f_back


# ---- objects ------------------------------------------------------------------------------------------


def list_checked_objects() -> list[Any]:
    """Return the objects of this process that the checks of the first step look at, in one pass."""
    objects = gc.get_objects()
    kinds = {
        kind
        for kind in set(map(type, objects))
        if issubclass(kind, nn.Module) or kind in _LOADER_ITERATORS or _is_candidate(kind)
    }
    return [item for item in objects if type(item) in kinds]


def find_untracked(tracked: Mapping[str, Any], objects: list[Any], *, has_data: bool) -> list[str]:
    """Describe schedulers, averages and samplers among ``objects`` that `er.resume` was not given."""
    optimizers = {
        id(each): name
        for name, item in tracked.items()
        if isinstance(item, Optimizer)
        for each in list_with_inner(item)
    }
    models = {name: unwrap(item) for name, item in tracked.items() if isinstance(item, nn.Module)}
    shapes = {name: [p.shape for p in model.parameters()] for name, model in models.items()}
    kinds = {kind for kind in set(map(type, objects)) if _is_candidate(kind)}
    candidates = [item for item in objects if type(item) in kinds and hasattr(item, "__dict__")]
    candidates = [item for item in candidates if unwrap(item) is item]
    held = collect_held(tracked)
    candidates = [item for item in candidates if id(item) not in held]
    inner = {part for item in candidates for part in _iter_held([item]) if part != id(item)}
    found = []
    for item in candidates:
        optimizer = optimizers.get(id(unwrap(vars(item).get("optimizer"))))
        name = next((name for name, own in shapes.items() if own and _averages(item, own)), None)
        if isinstance(item, (ElasticSampler, GlobalBatches)):
            if not has_data:
                found.append(
                    f"{type(item).__name__}: one was made, and er.resume() got no data=, so an interrupted "
                    "epoch would start over: pass its DataLoader as data=."
                )
        elif id(item) in inner:
            continue
        elif optimizer is not None and hasattr(type(item), "step"):
            found.append(
                f"a {type_name(item)} works on {optimizer!r}, and er.resume() was not given it, so a resume "
                "would begin it anew: build it before er.resume() and pass it as scheduler=, several as a "
                "dict. Ignore this if the script sets it from run.position."
            )
        elif name is not None:
            found.append(
                f"a {type_name(item)} averages the weights of {name!r}, and er.resume() was not given it, "
                "so a resume would begin the average anew: build it before er.resume() and pass it as ema=."
            )
    return list(dict.fromkeys(found))


def _is_candidate(kind: type) -> bool:
    """Return whether a class may be a scheduler, an average or a sampler of ours."""
    if issubclass(kind, (ElasticSampler, GlobalBatches)):
        return kind.__name__ != "LocalBatches"
    if issubclass(kind, Optimizer):
        return False
    methods = {name for each in kind.__mro__ for name in vars(each)}
    if not {"state_dict", "load_state_dict"} <= methods:
        return False
    is_module = issubclass(kind, nn.Module)
    return ("step" in methods and not is_module) or is_average(kind)


def is_average(kind: type) -> bool:
    """Return whether a class averages weights, by its name."""
    return _AVERAGE.search(kind.__name__) is not None


def _averages(item: Any, shapes: list[Any]) -> bool:
    """Return whether an object of a class for averages holds tensors like the parameters of a model."""
    if not is_average(type(item)):
        return False
    if isinstance(item, nn.Module):
        own = [p.shape for p in item.parameters()]
        return own[: len(shapes)] == shapes
    values = vars(item).values()
    tensors = [list(v.values()) if isinstance(v, dict) else v for v in values if isinstance(v, (dict, list))]
    return any([t.shape for t in each if isinstance(t, Tensor)] == shapes for each in tensors)


def describe_unknown_loader(objects: list[Any], *, has_batches: bool) -> str:
    """Describe a DataLoader that is being read and that ``data=`` does not name, or return ""."""
    for item in objects:
        if type(item) not in _LOADER_ITERATORS or has_our_batches(item, "_index_sampler"):
            continue
        with contextlib.suppress(TypeError):  # an IterableDataset may have no length
            if not 0 < item._num_yielded < len(item):  # noqa: SLF001
                continue
        remedy = "write er.epochs(count, loader, ...), or pass it as data=."
        if has_batches:
            remedy = "read both through one dataset that returns a sample of each."
        return (
            f"the loop reads a DataLoader of a {type_name(item._dataset)}, whose position no checkpoint "  # noqa: SLF001
            f"holds: after a restart it begins anew. If training reads it, {remedy}"
        )
    return ""


class UntrackedOptimizerCheck:
    """Warns once about each optimizer that steps tracked parameters while its own state is not tracked.

    Such an optimizer was built after `er.resume`, or is hidden in one whose state_dict() lacks its state. The
    check runs after the first step that leaves tensors in the optimizer's state.
    """

    def __init__(self, tracked: Mapping[str, Any]) -> None:
        """Check every optimizer of this process after its steps, until `close`."""
        self._tracked = dict(tracked)
        optimizers = [item for item in tracked.values() if isinstance(item, Optimizer)]
        self._checked_optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet(optimizers)
        self._hook = register_optimizer_step_post_hook(self._check_optimizer)

    def close(self) -> None:
        """Stop checking."""
        self._hook.remove()

    def _check_optimizer(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        if optimizer in self._checked_optimizers or not optimizer.state:
            return
        self._checked_optimizers.add(optimizer)
        addresses = {
            dtensors.to_local(value).data_ptr()
            for entries in optimizer.state.values()
            for value in (entries.values() if isinstance(entries, dict) else ())
            if isinstance(value, Tensor) and value.numel()
        }
        stepped_ids = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        models = {name: item for name, item in self._tracked.items() if isinstance(item, nn.Module)}
        stepped = [name for name in models if any(id(p) in stepped_ids for p in models[name].parameters())]
        if not addresses or not stepped:
            return
        # A tracked optimizer that wraps this one may include its state.
        tracked_addresses = {leaf.tensor.data_ptr() for leaf in flatten(self._tracked).leaves}
        if not addresses <= tracked_addresses:
            logger.warning(
                f"WARNING: {type_name(optimizer)} steps parameters of {stepped[0]!r}, but its state is "
                "untracked. A resume would start without it. Build it before er.resume() and pass it as "
                "optimizer=."
            )
