"""Save what the parts of a model keep beside parameters and buffers, and restore it in place.

These are random generators, and containers, arrays, tensors and objects of the script, also within each
other. Code outside of the model may hold the same objects, so none is replaced. What a forward pass changes
elsewhere, such as a global variable or a file, cannot be found here.
"""

from __future__ import annotations

import contextlib
import functools
import random
import sys
import types
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from elastic_resume.mechanisms.compute_check.request import NotCheckable

MAX_OBJECTS = 2
"""So many objects of the script within each other; a library's objects may lead to the whole job."""
MAX_ITEMS = 10_000
"""Of a container whose items are looked at; a larger one is restored, and its items are not."""
MAX_BYTES = 256 << 20
"""Of a tensor or array that is copied."""
_PLAIN = (bool, int, float, complex, str, bytes, type(None), type, types.ModuleType, nn.Module)
_FOREIGN = {*sys.stdlib_module_names, "torch", "numpy", "elastic_resume"} - {"types"}
_NOT_WALKED = vars(nn.Module()).keys() - {"_non_persistent_buffers_set"}


def find_iterator(module: nn.Module) -> None:
    """Look for an iterator that a part keeps, from which a check would take an item.

    Raises:
        NotCheckable: there is one.

    """
    for value, depth in _walk(module):
        if not depth and hasattr(type(value), "__next__"):
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
    seen: dict[int, Any] = {}  # which keeps them, so that no id is used again
    while pending:
        value, depth = pending.pop()
        if id(value) in seen or isinstance(value, _PLAIN):
            continue
        seen[id(value)] = value
        is_object = _is_object(value)
        pending += [(each, depth + is_object) for each in _list_parts(value)] if depth < MAX_OBJECTS else ()
        yield value, depth


def _is_object(value: Any) -> bool:
    """Whether it is an instance of a class of the script, or of a library of which models are made."""
    if type(value) is types.SimpleNamespace:
        return True
    is_foreign = str(type(value).__module__).partition(".")[0] in _FOREIGN
    return not is_foreign and isinstance(getattr(value, "__dict__", None), dict)


def _list_parts(value: Any) -> list[Any]:
    parts: list[Any] = list(vars(value).values()) if _is_object(value) else []
    if isinstance(value, (list, tuple, set, frozenset, deque, dict)):
        if len(value) <= MAX_ITEMS:
            parts += value.values() if isinstance(value, dict) else value
    elif isinstance(value, functools.partial):
        parts += [value.func, *value.args, *value.keywords.values()]
    elif isinstance(value, (types.MethodType, types.BuiltinMethodType)):
        parts.append(value.__self__)
    elif isinstance(value, types.FunctionType):
        for cell in value.__closure__ or ():
            with contextlib.suppress(ValueError):  # it is empty
                parts.append(cell.cell_contents)
    elif (numpy := sys.modules.get("numpy")) is not None and isinstance(value, numpy.random.Generator):
        parts.append(value.bit_generator)
    return parts


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
    if value._version != version:  # noqa: SLF001
        value.data.copy_(saved)


def _save_container(value: Any, new: Mapping[Any, Any]) -> Callable[[], object] | None:
    """Give a container or object the ``new`` tensors for its own; return what restores it."""
    numpy = sys.modules.get("numpy")
    if isinstance(value, dict) or _is_object(value):
        own: dict[Any, Any] = value if isinstance(value, dict) else vars(value)
        before = dict(own)
        for key, each in before.items():
            if isinstance(each, Tensor) and each in new:
                own[key] = new[each]
        return functools.partial(restore_dict, own, before)
    if isinstance(value, (list, deque)):
        items = list(value)
        for index, each in enumerate(items):
            if isinstance(each, Tensor) and each in new:
                value[index] = new[each]
        return functools.partial(_restore_items, value, items)
    if isinstance(value, (set, bytearray)):
        return functools.partial(_restore_plain, value, value.copy())
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


def _restore_items(value: Any, items: list[Any]) -> None:
    if len(value) != len(items) or any(one is not other for one, other in zip(value, items, strict=True)):
        value.clear()
        value.extend(items)


def _restore_plain(value: Any, before: Any) -> None:
    if value == before:
        return
    value.clear()
    value.update(before) if isinstance(value, set) else value.extend(before)


def _restore_array(value: Any, before: Any) -> None:
    if value.flags.writeable:
        value[...] = before
