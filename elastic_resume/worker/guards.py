# ruff: noqa: SLF001  a module's own dicts are what state_dict() reads; no public way is as fast
"""Notices whether anything but values has changed in a module or an optimizer, without walking it.

A state_dict() of 20,000 tensors takes 100 ms and more. What it would give is the same as last time while each
dict that it reads holds the same objects under as many keys, and that is compared in C: 34 ns per entry,
`map` over `operator.getitem` and `operator.is_`.

The same object may still be another tensor (``p.data = x``, ``set_``): see `Watch`.

For 20,000 tensors that is 13 to 25 ms all the same, since after a step none of these dicts is in any cache.
So a guard gives its comparisons one by one (`checks`), each within a quarter of a millisecond, and who makes
them may let others have the GIL in between. The first of them is quick, and tells most: whether there are as
many as before.

Not noticed: a module whose whole ``_parameters`` dict is exchanged, and a method that is put on a
submodule's instance after the guard was made. Neither is done to a model in training.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from itertools import islice
from operator import attrgetter, eq, getitem, is_, not_
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.optim import Optimizer

from elastic_resume.worker.state import BUFFER, REPLICATED, Key, canonical_names, key_of, stored_form

# Of how many tensors each look compares dtype and shape as well: 0.4 us each. A model of 600 tensors with
# its optimizer state is compared wholly each time, 80,000 tensors within 140 looks.
COMPARED_EACH_LOOK = 600

# How many are compared at once: 0.1 ms when the caches are warm, 0.25 ms when they are not.
AT_A_TIME = 1500
TOUCHED_AT_A_TIME = 200  # tensors of which dtype, shape and address are compared: several misses each

_MODULE_METHODS = ("state_dict", "_save_to_state_dict", "get_extra_state")
_ROOT_METHODS = ("named_parameters", "named_modules", "_named_members", "named_children")
_requires_grad = attrgetter("requires_grad")
_spec = attrgetter("dtype", "shape")


class Place(NamedTuple):
    """Where one tensor of a state stands: ``holder[key]``, called ``path`` and of ``kind``."""

    holder: dict[Any, Any]
    key: Any
    path: str
    kind: str

    @property
    def tensor(self) -> Tensor:
        """What stands there now."""
        tensor: Tensor = self.holder[self.key]
        return tensor


class _Entries:
    """Objects that must stay under their keys, in dicts that must not grow."""

    def __init__(self) -> None:
        self._holders: list[dict[Any, Any]] = []
        self._keys: list[Any] = []
        self._values: list[Any] = []
        self._sized: list[Any] = []
        self._sizes: list[int] = []
        self._empty: list[Any] = []

    def keep(self, holder: dict[Any, Any], key: Any) -> None:
        self._holders.append(holder)
        self._keys.append(key)
        self._values.append(holder[key])

    def keep_size(self, holder: Any) -> None:
        if holder:
            self._sized.append(holder)
            self._sizes.append(len(holder))
        else:
            self._empty.append(holder)  # twice as fast to ask as its length

    def checks(self) -> Iterator[bool]:
        try:
            same = map(is_, map(getitem, self._holders, self._keys), self._values)
            yield from _in_pieces(same, len(self._holders))
        except KeyError:
            yield False
        yield from _in_pieces(map(eq, map(len, self._sized), self._sizes), len(self._sized))
        yield from _in_pieces(map(not_, self._empty), len(self._empty))


def _in_pieces(results: Iterator[bool], count: int) -> Iterator[bool]:
    for _ in range(0, count, AT_A_TIME):
        yield all(islice(results, AT_A_TIME))


class ModuleGuard:
    """Holds while a module's state_dict() would give the same tensors under the same names."""

    def __init__(self, name: str, module: nn.Module, volatile: set[str]) -> None:
        """Places in ``volatile``, by path, may get another tensor at any time."""
        canonical = canonical_names(module)
        found = [(canonical(key), place) for key, place in _standing(module, "")]
        self.places = {key: place._replace(path=f"{name}/{key}") for key, place in found}
        self.plain = len(self.places) == len(found)  # two keys of one canonical name: let state.py say
        self._entries = entries = _Entries()
        self._sets: list[set[str]] = []
        for part in module.modules():
            _keep_module(entries, part)
            if part._non_persistent_buffers_set:
                self._sets.append(part._non_persistent_buffers_set)
        self._were = [set(names) for names in self._sets]
        for place in self.places.values():
            if place.path not in volatile:
                entries.keep(place.holder, place.key)

    def checks(self) -> Iterator[bool]:
        """Compare."""
        yield self._sets == self._were
        yield from self._entries.checks()


def _keep_module(entries: _Entries, part: nn.Module) -> None:
    for holder in (part._parameters, part._buffers, part._modules):
        entries.keep_size(holder)
    for key in part._modules:
        entries.keep(part._modules, key)
    for holder in (part._parameters, part._buffers):
        for key, value in holder.items():
            if value is None:
                entries.keep(holder, key)
    entries.keep_size(part._non_persistent_buffers_set)
    entries.keep_size(part._state_dict_hooks)
    entries.keep_size(part._state_dict_pre_hooks)


def _standing(module: nn.Module, prefix: str) -> Iterator[tuple[str, Place]]:
    """Give each key of state_dict(), in its order, and where its tensor stands."""
    for key, value in module._parameters.items():
        if value is not None:
            yield prefix + key, Place(module._parameters, key, "", REPLICATED)
    for key, buffer in module._buffers.items():
        if buffer is not None and key not in module._non_persistent_buffers_set:
            yield prefix + key, Place(module._buffers, key, "", BUFFER)
    for key, child in module._modules.items():
        if child is not None:
            yield from _standing(child, f"{prefix}{key}.")


def is_plain_module(module: nn.Module) -> bool:
    """Whether state_dict() is torch's own all the way down, so that it needs not be called to know it."""
    if any(getattr(type(module), name) is not getattr(nn.Module, name) for name in _ROOT_METHODS):
        return False
    own = set(_MODULE_METHODS)
    for part in module.modules():
        if part._state_dict_hooks or part._state_dict_pre_hooks or not own.isdisjoint(part.__dict__):
            return False
    kinds = {type(part) for part in module.modules()}
    return all(getattr(kind, name) is getattr(nn.Module, name) for kind in kinds for name in own)


class GroupsGuard:
    """Holds while an optimizer's groups list the same parameters."""

    def __init__(self, optimizer: Optimizer) -> None:
        """Note them."""
        self._optimizer = optimizer
        self._groups = list(optimizer.param_groups)
        self._params = [list(group["params"]) for group in self._groups]
        self._names = [copy(group.get("param_names", ())) for group in self._groups]

    def checks(self) -> Iterator[bool]:
        """Compare."""
        groups = self._optimizer.param_groups
        lists = [group["params"] for group in groups]
        names = [group.get("param_names", ()) for group in groups]
        yield (
            len(groups) == len(self._groups)
            and all(map(is_, groups, self._groups))
            and list(map(len, lists)) == list(map(len, self._params))
            and names == self._names
        )
        for now, params in zip(lists, self._params, strict=True):
            yield from _in_pieces(map(is_, now, params), len(params))
            yield len(now) == len(params)  # or the others were not compared


class OptimizerGuard:
    """Holds while an optimizer's state_dict()["state"] would give the same tensors."""

    def __init__(self, name: str, optimizer: Optimizer, volatile: set[str]) -> None:
        """Places in ``volatile``, by path, may get another tensor at any time."""
        self._optimizer, self._state = optimizer, optimizer.state
        self._inner = list(optimizer.state.values())
        self._entries = entries = _Entries()
        numbers = _numbers(optimizer)
        self.places: dict[Any, dict[Any, Place | None]] = {}
        for parameter, inner in optimizer.state.items():
            number = numbers[id(parameter)]
            entries.keep_size(inner)
            self.places[number] = own = {}
            for key, value in inner.items():
                place = Place(inner, key, f"{name}/state/{number}/{key}", REPLICATED)
                own[key] = place if value is not None else None
                if place.path not in volatile:
                    entries.keep(inner, key)

    def checks(self) -> Iterator[bool]:
        """Compare."""
        state = self._optimizer.state
        yield (
            state is self._state and len(state) == len(self._inner) and _has_own_state_dict(self._optimizer)
        )
        yield from _in_pieces(map(is_, state.values(), self._inner), len(self._inner))
        yield from self._entries.checks()


def _numbers(optimizer: Optimizer) -> dict[int, int]:
    """Number parameters as Optimizer.state_dict does: one that occurs twice keeps its first number."""
    numbers: dict[int, int] = {}
    start = 0
    for group in optimizer.param_groups:
        for number, parameter in enumerate(group["params"], start):
            numbers.setdefault(id(parameter), number)
        start += len(group["params"])
    return numbers


def is_plain_optimizer(optimizer: Optimizer) -> bool:
    """Whether state_dict() is torch's own, and its state per parameter nothing but tensors."""
    if not _has_own_state_dict(optimizer):
        return False
    known = _numbers(optimizer)
    return all(
        type(group) is dict and "$" not in group and all(type(key) is str for key in group)
        for group in optimizer.param_groups
    ) and all(
        isinstance(parameter, Tensor)
        and id(parameter) in known
        and type(inner) is dict
        and all(value is None or isinstance(value, Tensor) for value in inner.values())
        for parameter, inner in optimizer.state.items()
    )


def _has_own_state_dict(optimizer: Optimizer) -> bool:
    return (
        type(optimizer).state_dict is Optimizer.state_dict
        and "state_dict" not in optimizer.__dict__
        and not optimizer._optimizer_state_dict_pre_hooks
        and not optimizer._optimizer_state_dict_post_hooks
    )


class Watch:
    """Holds while the watched objects are tensors of the same dtype and shape, tied as they were.

    Each look compares a number of tensors in turn by address, dtype and shape: ``p.data = x`` changes them
    behind the object's back. To look at 20,000 each time took 5 of a look's 11 ms, for memory that
    is in no cache; and whoever copies has to touch them anyway, and refuses what has become another dtype or
    size (`copying.copy_now`). Tensors that share an address are compared in full each time, since their
    ties may end by a change of stride alone.
    """

    def __init__(self, own: Sequence[Tensor], others: Sequence[Tensor], trained: Sequence[Tensor]) -> None:
        """``own`` are parameters and buffers, which scripts are known to move; ``trained`` require grad."""
        self._tensors = [*own, *others]
        self._trained = list(trained)
        self._at = 0
        self._complex = [tensor for tensor in self._tensors if tensor.is_complex()]
        self._specs = list(map(_spec, self._tensors))
        self._memory = _memory_of(self._tensors)

    def checks(self, moved: Callable[[], None]) -> Iterator[bool]:
        """Compare those whose turn it is, some at a time; ``moved``: see `holds`."""
        for _ in range(0, COMPARED_EACH_LOOK, TOUCHED_AT_A_TIME):
            yield self.holds(moved, TOUCHED_AT_A_TIME)

    def holds(self, moved: Callable[[], None], count: int) -> bool:
        """Compare the next ``count``; ``moved`` is called when addresses, but nothing else, are new."""
        begin, end = self._at, self._at + count
        if not self._holds(begin, end, moved):
            return False
        self._at = end if end < len(self._tensors) else 0
        return True

    def _holds(self, begin: int, end: int, moved: Callable[[], None]) -> bool:
        part = self._tensors[begin:end]
        try:
            if any(map(Tensor.is_conj, self._complex)):
                return False
            if not all(map(_requires_grad, self._trained[begin:end])):
                return False
            if list(map(_spec, part)) != self._specs[begin:end]:
                return False
            if (
                list(map(Tensor.data_ptr, part)) == self._memory.addresses[begin:end]
                and [_key(self._tensors[i]) for i in self._memory.kin] == self._memory.kin_keys
            ):
                return True
            return self._only_moved(moved)
        except RuntimeError:  # it has become something without an address
            return False

    def _only_moved(self, moved: Callable[[], None]) -> bool:
        """Whether `state.flatten` would still give the same names, dtypes and shapes."""
        if self._complex:
            return False  # what is stored of them are views of the old memory
        if list(map(_spec, self._tensors)) != self._specs:
            return False
        now = _memory_of(self._tensors)
        if now.ties != self._memory.ties:
            return False
        self._memory = now
        moved()
        return True


class _Memory(NamedTuple):
    """Where tensors lie, which of them (by number) share an address, and which are the same as another."""

    addresses: list[int]
    kin: list[int]
    kin_keys: list[Key]
    ties: list[tuple[int, int]]


def _memory_of(tensors: Sequence[Tensor]) -> _Memory:
    addresses = list(map(Tensor.data_ptr, tensors))
    counts = Counter(addresses)
    kin = [i for i, at in enumerate(addresses) if at and counts[at] > 1]
    kin_keys = [_key(tensors[i]) for i in kin]
    first: dict[Key, int] = {}
    pairs = zip(kin, kin_keys, strict=True)
    ties = [(i, first[key]) for i, key in pairs if first.setdefault(key, i) != i]
    return _Memory(addresses, kin, kin_keys, ties)


def _key(tensor: Tensor) -> Key:
    stored_as, tensor = stored_form(tensor)
    return key_of(tensor, stored_as)
