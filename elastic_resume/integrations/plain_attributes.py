"""Read and set what objects hold as plain attributes: numbers, texts, containers of these, tensors, modules.

A script's trainer, callbacks and meters count in attributes that no ``state_dict()`` shows. `list_attributes`
finds them, `read` copies a value into a form that can be compared, stored and set again, and `assign` sets it
in place, so that other references to a list or tensor stay valid.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import sysconfig
import time
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from elastic_resume.checkpoint.json_codec import TensorRef
from elastic_resume.state.generators import wrap_generator
from elastic_resume.state.state_dict import NAME_BY_DTYPE

Owners = Mapping[str, tuple[Any, frozenset[str]]]  # by name: an object, and attributes of it to leave out

MAX_DEPTH = 3  # objects of the script within each other
MAX_ITEMS = 10_000  # of one attribute: it is read at every step, in about 1 us for each
MAX_OBJECTS = 100  # of the script in one list or dict
FLAT_ITEMS = 16  # numbers in a list that take as long
SCALARS = frozenset({bool, int, float, str, bytes, complex, type(None)})
KEYS = SCALARS | {tuple}  # of dicts
CLOCKS = (time.time, time.monotonic, time.perf_counter)
_MODULE_NAMES = frozenset(vars(nn.Module()))
_LIBRARY_PATHS = tuple(
    {f"{Path(path).resolve()}/" for path in (sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"))}
)


class Clocks:
    """Tells what was read from a clock since this object was made: each process has its own times."""

    def __init__(self) -> None:
        self._begin_times = [clock() for clock in CLOCKS]

    def have_shown(self, value: Any) -> bool:
        """Return whether ``value`` was read from a clock since then."""
        return type(value) is float and any(
            start <= value <= clock() for start, clock in zip(self._begin_times, CLOCKS, strict=True)
        )


class NotPlainError(Exception):
    """A value that cannot be copied and set again; the text says what it is."""


@dataclass(frozen=True)
class Form:
    """A copy of a value: ``skeleton`` has references in the places of ``tensors``, which are the live ones.

    ``versions`` tell whether a tensor was exchanged or changed. The form holds it: its address stays taken.
    """

    skeleton: Any
    tensors: tuple[Tensor, ...] = ()
    versions: tuple[Any, ...] = ()

    def is_same(self, other: Form) -> bool:
        """Return whether nothing has changed since ``other`` was read."""
        return (
            type(self.skeleton) is type(other.skeleton)
            and self.versions == other.versions
            and bool(self.skeleton == other.skeleton)
        )

    def seems_same(self) -> bool:
        """Return whether the tensors are as they were read."""
        return tuple(map(get_version, self.tensors)) == self.versions

    def with_copies(self) -> Form:
        """Return the form with copies of the tensors, to be set again."""
        return Form(self.skeleton, tuple(tensor.detach().clone() for tensor in self.tensors), self.versions)

    def fill(self) -> Any:
        """Return the value with its tensors in their places."""
        return _merge(None, self.skeleton, self.tensors, lambda tensor: tensor)

    def count_numbers(self) -> int:
        """Return the number of elements of all tensors."""
        return sum(tensor.numel() for tensor in self.tensors)


def list_attributes(owners: Owners) -> Iterator[tuple[str, Any, str]]:
    """Yield (path, object, name) of each attribute of ``owners`` and of the script's objects in them."""
    seen = {id(owner) for owner, _ in owners.values()}
    for title, (owner, excluded) in owners.items():
        yield from _list_object(title, owner, excluded, seen, 0)


def _list_object(
    title: str, owner: Any, excluded: frozenset[str], seen: set[int], depth: int
) -> Iterator[tuple[str, Any, str]]:
    for name, value in list(vars(owner).items()):
        if name in excluded:
            continue
        inner = _find_script_objects(f"{title}.{name}", value) if depth < MAX_DEPTH else {}
        if not any(item is value for item in inner.values()):
            yield f"{title}.{name}", owner, name
        for path, item in inner.items():
            if id(item) not in seen:
                seen.add(id(item))
                yield from _list_object(path, item, frozenset(), seen, depth + 1)


def _find_script_objects(path: str, value: Any) -> dict[str, Any]:
    """Return ``value``, or what a list or dict holds, by path, where it is an object of the script's own."""
    items = list_items(path, value).items()
    return {path: item for path, item in items if is_of_script(item) and not _has_state(item)}


def list_items(path: str, value: Any) -> dict[str, Any]:
    """Return ``value`` by its path, or what it holds if it is a list or dict that is not long."""
    kind = type(value)  # isinstance() asks a proxy, which may raise
    if issubclass(kind, (list, tuple, dict)) and len(value) <= MAX_OBJECTS:
        pairs = value.items() if issubclass(kind, dict) else enumerate(value)
        return {f"{path}[{key!r}]": item for key, item in pairs}
    return {path: value}


def list_module_attributes(title: str, root: nn.Module) -> Iterator[tuple[str, Any, str]]:
    """Yield (path, module, name) of what ``root`` holds besides parameters: a metric's counts, and buffers.

    A module's ``state_dict()`` lacks attributes and buffers that are not persistent.
    """
    for inner, module in root.named_modules():
        path = f"{title}.{inner}" if inner else title
        names = [name for name in vars(module) if name not in _MODULE_NAMES]
        for name in [*names, "_buffers"] if module._buffers else names:  # noqa: SLF001
            yield f"{path}.{name}", module, name


def is_of_script(value: Any) -> bool:
    """Return whether ``value`` is an object, with attributes, of a class that no installed package has."""
    kind = type(value)
    return kind.__module__ != "builtins" and hasattr(value, "__dict__") and _is_script_module(kind.__module__)


@functools.cache
def _is_script_module(name: str) -> bool:
    if name == "__main__":
        return True
    file = getattr(sys.modules.get(name), "__file__", None)
    return (
        file is not None
        and name.partition(".")[0] != "elastic_resume"
        and not str(Path(file).resolve()).startswith(_LIBRARY_PATHS)
        and "-packages/" not in file
    )


def list_script_modules(model: nn.Module) -> dict[str, tuple[Any, frozenset[str]]]:
    """Return the modules of ``model`` whose classes are the script's, as owners."""
    return {
        f"model.{path}" if path else "model": (module, _MODULE_NAMES)
        for path, module in model.named_modules()
        if is_of_script(module)
    }


def read(value: Any) -> Form:
    """Copy ``value``. Raises NotPlainError if it cannot be set again."""
    if type(value) in SCALARS:
        return Form(value)
    tensors: list[tuple[Tensor, Any]] = []  # each with its version
    try:
        value = wrap_generator("attribute", value)
        if isinstance(value, nn.Module):
            plain: Any = value.state_dict(keep_vars=True)
        else:
            plain = value.state_dict() if _has_state(value) else value
        skeleton = _copy(plain, tensors, [0])
    except NotPlainError:
        raise
    except Exception as error:  # of a method of the script's, or of a tensor without a shape
        raise NotPlainError(f"a {type(value).__name__} that cannot be read ({error})") from error
    return Form(skeleton, tuple(tensor for tensor, _ in tensors), tuple(version for _, version in tensors))


def get_version(tensor: Tensor) -> Any:
    """Return what changes with a tensor, as far as torch counts that: not in inference mode."""
    if tensor.is_inference():
        return tensor.data_ptr(), tensor.shape
    return tensor.data_ptr(), tensor.shape, tensor._version  # noqa: SLF001  counts changes in place


def _has_state(value: Any) -> bool:
    return not issubclass(type(value), type) and all(
        callable(getattr(type(value), method, None)) for method in ("state_dict", "load_state_dict")
    )


def _copy(value: Any, tensors: list[tuple[Tensor, Any]], count: list[int]) -> Any:
    """Return a copy with references in the places of tensors, which are added to ``tensors``."""
    kind = type(value)
    if kind in SCALARS:
        return value
    if isinstance(value, Tensor):
        _check_tensor(value)
        tensors.append((value, get_version(value)))
        return TensorRef(str(len(tensors) - 1))
    if kind.__module__ == "numpy" and getattr(getattr(value, "dtype", None), "kind", "") in "biuf":
        tensors.append((torch.as_tensor(value.copy()), value.tobytes()))
        return TensorRef(str(len(tensors) - 1), "numpy" if kind.__name__ == "ndarray" else "numpy-scalar")
    if kind not in {list, tuple, dict, set, frozenset, deque, OrderedDict, Counter, defaultdict}:
        raise NotPlainError(f"a {kind.__module__}.{kind.__qualname__}".replace("builtins.", ""))
    is_flat = not isinstance(value, dict) and len(value) <= MAX_ITEMS * FLAT_ITEMS
    is_flat = is_flat and set(map(type, value)) <= SCALARS
    count[0] += 1 + len(value) // (FLAT_ITEMS if is_flat else 1)
    if count[0] > MAX_ITEMS:
        raise NotPlainError(f"a {kind.__name__} of more than {MAX_ITEMS} items")
    if isinstance(value, dict):
        if not set(map(type, value)) <= KEYS:
            raise NotPlainError("a dict with keys that are no numbers or texts")
        items = {key: _copy(item, tensors, count) for key, item in value.items()}
        return items if kind in {dict, defaultdict} else kind(items)
    copied: Any = value if is_flat else [_copy(item, tensors, count) for item in value]
    return deque(copied, value.maxlen) if isinstance(value, deque) else kind(copied)


def _check_tensor(tensor: Tensor) -> None:
    is_plain = type(tensor) in {Tensor, nn.Parameter, nn.Buffer} and tensor.layout is torch.strided
    if not is_plain or tensor.is_meta or tensor.dtype not in NAME_BY_DTYPE:
        raise NotPlainError(f"a {type(tensor).__name__} of {tensor.dtype}")


def assign(owner: Any, name: str, form: Form, device: torch.device | None = None) -> None:
    """Set the attribute to the value of ``form``, in place where that is possible.

    A tensor whose place is empty goes to ``device``, unless it is None.
    """

    def make(tensor: Tensor) -> Tensor:
        return tensor.clone() if device is None else tensor.to(device, copy=True)

    live = wrap_generator(name, vars(owner).get(name))
    if isinstance(live, nn.Module):
        with torch.no_grad():
            for key, target in live.state_dict(keep_vars=True).items():
                if isinstance(ref := form.skeleton.get(key), TensorRef):
                    target.copy_(form.tensors[int(ref.name)])
    elif live is not None and _has_state(live):
        live.load_state_dict(_merge(None, form.skeleton, form.tensors, make))
    else:
        vars(owner)[name] = _merge(live, form.skeleton, form.tensors, make)


def _merge(live: Any, value: Any, tensors: tuple[Tensor, ...], make: Callable[[Tensor], Tensor]) -> Any:
    """Return ``value`` with tensors for its references: in the objects of ``live``, where they fit."""
    if isinstance(value, TensorRef):
        return _merge_tensor(live, tensors[int(value.name)], value.kind, make)
    if isinstance(value, dict):
        old = live if isinstance(live, dict) else {}
        items = {key: _merge(old.get(key), item, tensors, make) for key, item in value.items()}
        if not isinstance(live, dict):
            return type(value)(items)
        live.clear()
        for key, item in items.items():  # update() of a Counter adds
            live[key] = item
        return live
    if isinstance(value, (list, tuple, deque)):
        old_items = list(live) if isinstance(live, (list, tuple, deque)) else []
        old_items += [None] * (len(value) - len(old_items))
        merged = [_merge(o, item, tensors, make) for o, item in zip(old_items, value, strict=False)]
        if isinstance(value, deque):
            return deque(merged, value.maxlen)
        if not (isinstance(live, list) and isinstance(value, list)):
            return type(value)(merged)
        live[:] = merged
        return live
    return value


def _merge_tensor(live: Any, saved: Tensor, kind: str, make: Callable[[Tensor], Tensor]) -> Any:
    if kind == "numpy":
        return saved.numpy().copy()
    if kind == "numpy-scalar":
        return saved.numpy()[()]
    if isinstance(live, Tensor) and (live.shape, live.dtype) == (saved.shape, saved.dtype):
        with contextlib.suppress(RuntimeError), torch.no_grad():  # an expanded tensor cannot be written
            live.copy_(saved)
            return live
    return make(saved)


class Preserved:
    """The plain attributes of some owners, which are as before after the ``with`` block."""

    def __init__(self, owners: Owners) -> None:
        self._owners = owners

    def __enter__(self) -> None:
        self._names = {path for path, _, _ in self._list()}
        self._before = {path: (form, form.with_copies()) for path, _, _, form in self._read()}

    def __exit__(self, *_: object) -> None:
        for path, owner, name, form in list(self._read()):
            if path not in self._names:
                del vars(owner)[name]
            elif path in self._before and not form.is_same(self._before[path][0]):
                assign(owner, name, self._before[path][1])

    def _read(self) -> Iterator[tuple[str, Any, str, Form]]:
        """Yield what can be set again, but parameters: these are large, and an optimizer changes them."""
        for path, owner, name in self._list():
            value = vars(owner)[name]
            if not (issubclass(type(value), nn.Module) or _has_state(value)):
                with contextlib.suppress(NotPlainError):
                    form = read(value)
                    if not any(isinstance(tensor, nn.Parameter) for tensor in form.tensors):
                        yield path, owner, name, form

    def _list(self) -> Iterator[tuple[str, Any, str]]:
        """Yield the attributes, also within modules and objects whose state_dict() may lack some."""
        for path, owner, name in list_attributes(self._owners):
            yield path, owner, name
            for inner, item in list_items(path, vars(owner)[name]).items():
                if issubclass(type(item), nn.Module):
                    yield from list_module_attributes(inner, item)
                elif _has_state(item):
                    yield from ((f"{inner}.{each}", item, each) for each in getattr(item, "__dict__", ()))
