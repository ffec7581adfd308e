"""Save what the parts of a model keep beside parameters and buffers, and restore it in place.

These are random generators, and containers, arrays, tensors and objects of the script, also within each
other, and modules that are no parts of the model, such as a teacher in a list. Code outside of the model may
hold the same objects, so none is replaced. What a forward pass changes elsewhere, such as a global variable
or a file, cannot be found here.
"""

from __future__ import annotations

import argparse
import array
import contextlib
import copy
import functools
import io
import random
import sys
import types
import weakref
from collections import UserDict, UserList, deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from elastic_resume.mechanisms.compute_check.request import NotCheckable

MAX_OBJECTS = 2
"""So many objects of the script within each other; a library's objects may lead to the whole job."""
MAX_ITEMS = 10_000
"""Of a container whose items are looked at; a larger one is restored, and its items are not."""
MAX_BYTES = 256 << 20
"""Of a tensor or array that is copied."""
_PLAIN = (bool, int, float, complex, str, bytes, type(None), type, types.ModuleType, DistributedDataParallel)
_FOREIGN = {*sys.stdlib_module_names, "torch", "numpy", "elastic_resume"}
_STANDARD_OBJECTS = (types.SimpleNamespace, argparse.Namespace, UserDict, UserList)
_NOT_WALKED = vars(nn.Module()).keys() - {"_non_persistent_buffers_set"}
_TENSOR_DICTS = {"_parameters", "_buffers", "_modules"}


def find_iterator(module: nn.Module) -> None:
    """Look for an iterator that a part keeps, from which a check would take an item.

    Raises:
        NotCheckable: there is one.

    """
    for value, depth in _walk(module):
        # An object of the script may hold a file, such as that of a log.
        deepest = 0 if isinstance(value, io.IOBase) else 1
        if hasattr(type(value), "__next__") and depth <= deepest:
            raise NotCheckable(
                f"a part of it keeps the iterator {type(value).__name__}, from which a check would take items"
            )


def save(module: nn.Module, seed: int, new: Mapping[Any, Any]) -> Iterator[Callable[[], object]]:
    """Prepare what the parts keep for a computation; yield functions that restore it.

    Generators get ``seed``, and containers and objects those tensors that ``new`` has for theirs.
    """
    for value, _ in _walk(module):
        if isinstance(value, Tensor):
            if value not in new:
                yield from _save_tensor(value)
        elif (restore := _save_generator(value, seed) or _save_container(value, new)) is not None:
            yield restore


def _walk(module: nn.Module) -> Iterator[tuple[Any, int]]:
    """Yield each value that the parts keep, and the number of the script's objects that lead to it."""
    pending: list[tuple[Any, int]] = [
        (value, 0)
        for part in module.modules()
        for name, value in vars(part).items()
        if name not in _NOT_WALKED and not isinstance(value, Tensor)  # the request has those
    ]
    own = set(map(id, module.modules()))
    seen: dict[int, Any] = {}  # which keeps them, so that no id is used again
    while pending:
        value, depth = pending.pop()
        if id(value) in seen or id(value) in own or isinstance(value, (*_PLAIN, *weakref.ProxyTypes)):
            continue
        seen[id(value)] = value
        is_object = _is_object(value) and not isinstance(value, nn.Module)
        pending += [(each, depth + is_object) for each in _list_parts(value)] if depth < MAX_OBJECTS else ()
        yield value, depth


def _is_object(value: Any) -> bool:
    """Whether it is an instance of a class of the script, or of a library of which models are made."""
    if type(value) in _STANDARD_OBJECTS:
        return True
    if str(type(value).__module__).partition(".")[0] in _FOREIGN:
        return False
    return isinstance(getattr(value, "__dict__", None), dict) or bool(_read_slots(value))


def _read_slots(value: Any) -> dict[types.MemberDescriptorType, Any]:
    """Return what an object has in ``__slots__``."""
    found = {}
    for kind in type(value).__mro__:
        for member in vars(kind).values() if "__slots__" in vars(kind) else ():
            if isinstance(member, types.MemberDescriptorType):
                with contextlib.suppress(AttributeError):  # it is not set
                    found[member] = member.__get__(value)
    return found


def _list_parts(value: Any) -> list[Any]:
    parts: list[Any] = []
    if isinstance(value, nn.Module):
        return [each for name, each in vars(value).items() if name not in _NOT_WALKED - _TENSOR_DICTS]
    if _is_object(value):
        parts += [*getattr(value, "__dict__", {}).values(), *_read_slots(value).values()]
    if isinstance(value, (list, tuple, set, frozenset, deque, dict)):
        if len(value) <= MAX_ITEMS:
            parts += value.values() if isinstance(value, dict) else value
    elif isinstance(value, functools.partial):
        parts += [value.func, *value.args, *value.keywords.values()]
    elif isinstance(value, (types.MethodType, types.BuiltinMethodType)):
        parts.append(value.__self__)
    elif isinstance(value, types.FunctionType):
        parts += [content for _, content in _read_cells(value)]
    elif (numpy := sys.modules.get("numpy")) is not None and isinstance(value, numpy.random.Generator):
        parts.append(value.bit_generator)
    return parts


def _read_cells(function: types.FunctionType) -> Iterator[tuple[types.CellType, Any]]:
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # it is empty
            yield cell, cell.cell_contents


def _save_generator(value: Any, seed: int) -> Callable[[], object] | None:
    """Seed a random generator, as far as its kind can be; return what restores it."""
    numpy = sys.modules.get("numpy")
    restore: Callable[[], object] | None = None
    if isinstance(value, torch.Generator):
        restore = functools.partial(value.set_state, value.get_state())
        value.manual_seed(seed)
    elif isinstance(value, random.Random) and not isinstance(value, random.SystemRandom):
        restore = functools.partial(value.setstate, value.getstate())
        value.seed(seed)
    elif numpy is not None and isinstance(value, numpy.random.BitGenerator):
        restore = functools.partial(setattr, value, "state", value.state)
        with contextlib.suppress(TypeError, ValueError):  # a kind of another library
            value.state = type(value)(seed).state
    elif numpy is not None and isinstance(value, numpy.random.RandomState):
        restore = functools.partial(value.set_state, value.get_state(legacy=False))
        with contextlib.suppress(TypeError):  # only MT19937 can be
            value.seed(seed & 0xFFFFFFFF)
    return restore


def _save_tensor(value: Tensor) -> Iterator[Callable[[], object]]:
    if value.is_leaf and value.requires_grad:  # so that it gets no gradient
        yield functools.partial(value.requires_grad_, True)
        value.requires_grad_(False)
    if not value.is_inference() and value.numel() * value.element_size() <= MAX_BYTES:
        yield functools.partial(_restore_tensor, value, value.detach().clone(), value._version)  # noqa: SLF001


def _restore_tensor(value: Tensor, saved: Tensor, version: int) -> None:
    # Some changes leave no trace in the version: those of BatchNorm's averages, by `.data`, by a numpy view.
    is_changed = value._version != version or value.layout is not torch.strided  # noqa: SLF001
    if is_changed or not torch.equal(value.detach(), saved):
        value.data.copy_(saved)


def _save_container(value: Any, new: Mapping[Any, Any]) -> Callable[[], object] | None:
    """Give a container or object the ``new`` tensors for its own; return what restores it."""
    numpy = sys.modules.get("numpy")
    if isinstance(value, (dict, nn.Module)) or _is_object(value):
        own: dict[Any, Any] = value if isinstance(value, dict) else getattr(value, "__dict__", {})
        before, slots = dict(own), {} if isinstance(value, (dict, nn.Module)) else _read_slots(value)
        for key, each in before.items():
            if isinstance(each, Tensor) and each in new:
                own[key] = new[each]
        return functools.partial(_restore_object, value, slots, own, before)
    if isinstance(value, (list, deque)):
        items = list(value)
        for index, each in enumerate(items):
            if isinstance(each, Tensor) and each in new:
                value[index] = new[each]
        return functools.partial(_restore_items, value, items)
    if isinstance(value, (set, bytearray, array.array)):
        return functools.partial(_restore_plain, value, copy.copy(value))
    if isinstance(value, types.FunctionType):
        return functools.partial(_restore_cells, [*_read_cells(value)])
    if numpy is not None and isinstance(value, numpy.ndarray) and value.nbytes <= MAX_BYTES:
        return functools.partial(_restore_array, value, value.copy())
    return None


def restore_dict(own: Any, before: Mapping[Any, Any]) -> None:
    """Give a dict the items of ``before``, in their order. An equal one is not written to."""
    if list(own) != list(before):
        own.clear()
    for key, each in before.items():
        if key not in own or own[key] is not each:
            own[key] = each


def _restore_object(
    value: Any,
    slots: Mapping[types.MemberDescriptorType, Any],
    own: dict[Any, Any],
    before: Mapping[Any, Any],
) -> None:
    restore_dict(own, before)
    for member, each in _read_slots(value).items() if slots else ():
        if member not in slots:
            member.__delete__(value)
        elif slots[member] is not each:
            member.__set__(value, slots[member])
    for member in slots.keys() - _read_slots(value).keys():
        member.__set__(value, slots[member])


def _restore_cells(before: list[tuple[types.CellType, Any]]) -> None:
    for cell, content in before:
        cell.cell_contents = content


def _restore_items(value: Any, items: list[Any]) -> None:
    if len(value) != len(items) or any(one is not other for one, other in zip(value, items, strict=True)):
        value.clear()
        value.extend(items)


def _restore_plain(value: Any, before: Any) -> None:
    if value == before:
        return
    if isinstance(value, set):
        value.clear()
        value.update(before)
    else:
        value[:] = before


def _restore_array(value: Any, before: Any) -> None:
    # Another process may write to one in shared memory or a file, so nothing is written in vain.
    if value.flags.writeable and value.tobytes() != before.tobytes():
        value[...] = before
