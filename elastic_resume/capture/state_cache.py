# ruff: noqa: SLF001  a module's own dicts are what state_dict() reads; no public way is as fast
"""Caches what `state.flatten` gives, so that a snapshot need not walk the tracked objects again.

Most of a state changes in values only. Its tensors, their names and the JSON around them are found once
(`Fixed`). Each `Tracker.look` compares the identity of every entry of every dict that a state_dict() reads.
Of parameters and buffers it compares address, dtype and shape too: ``p.data = x`` exchanges those behind
the object. If anything differs, all is flattened anew.

The cached tensors are the objects' own, so what is copied is never stale. An optimizer's state that changes
its dtype or size behind the object is refused by the copy (`copying.copy_now`); the next is flattened anew.

An object whose state_dict() is its own, or torch's with hooks, cannot be cached. It is asked for at each
snapshot. So are the hyperparameters of optimizers.

Promise: the tensors of a look, and `store.note.merge` of its two pieces of JSON, are what `state.flatten`
gives at that moment: same names, dtypes, shapes, kinds and ties, and the same errors.

Not noticed: a module whose whole ``_parameters`` dict is exchanged, and a method that is put on a submodule's
instance after the model was flattened.

Use it in the training thread, at a step boundary.
"""

from __future__ import annotations

import functools
import gc
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice, starmap
from operator import attrgetter, eq, getitem, is_
from typing import Any, ParamSpec, TypeVar

from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

from elastic_resume.checkpoint import json_codec
from elastic_resume.state.bucket_order import BucketOrder
from elastic_resume.state.state_dict import (
    REPLICATED,
    Key,
    Leaf,
    ParameterOrder,
    Walk,
    canonical_names,
    flatten_object,
    key_of,
    stored_form,
)

P = ParamSpec("P")
T = TypeVar("T")

_MODULE_METHODS = (
    "state_dict", "_save_to_state_dict", "get_extra_state",
    "named_parameters", "named_modules", "_named_members", "named_children",
)  # fmt: skip
_MODULE_DICTS = attrgetter(
    "_parameters", "_buffers", "_modules", "_state_dict_hooks", "_state_dict_pre_hooks"
)
_OPTIMIZER_HOOKS = attrgetter("_optimizer_state_dict_pre_hooks", "_optimizer_state_dict_post_hooks")
_STATIC_KEYS = {"params", "param_names"}  # of a param group: they change with its parameters only
_ATOMS = {type(None), bool, int, float, str}

_spec = attrgetter("dtype", "shape")
_requires_grad = attrgetter("requires_grad")


@dataclass(frozen=True)
class Fixed:
    """The part of a state that changes in values only. A new one is made when anything else changes.

    Attributes:
        number: grows with each new one.
        leaves: the objects' own tensors, not detached.
        static: typed JSON around them, by tracked name.
        overlapped: for each leaf, whether it may be copied after the look, until the next `step` of the
            optimizers: the state of optimizers that can be hooked, the parameters that they step, and those
            of a model called ``ema``. Nothing else: a forward pass changes buffers, embeddings with max_norm,
            and parameters that nobody steps (the second encoder of MoCo).

    """

    number: int
    leaves: tuple[Leaf, ...]
    static: dict[str, Any]
    overlapped: tuple[bool, ...]


@dataclass(frozen=True)
class Sight:
    """The tracked state at one moment.

    Attributes:
        fixed: the very same object as last time while nothing but values has changed.
        live: tensors that were asked for now. Copy them at once; next time they may be others.
        dynamic: typed JSON that goes over ``fixed.static`` (`store.note.merge`), by tracked name.

    """

    fixed: Fixed
    live: tuple[Leaf, ...]
    dynamic: dict[str, Any]

    @property
    def leaves(self) -> tuple[Leaf, ...]:
        """All tensors of the state."""
        return self.fixed.leaves + self.live


def without_collection(work: Callable[P, T]) -> Callable[P, T]:
    """Run ``work`` without the collector of cycles: it makes many objects, and all of them stay.

    For 20,000 tensors half of the time of the first look went into looking for garbage.
    """

    @functools.wraps(work)
    def done(*args: P.args, **kwargs: P.kwargs) -> T:
        collecting = gc.isenabled()
        gc.disable()
        try:
            return work(*args, **kwargs)
        finally:
            if collecting:
                gc.enable()

    return done


class Tracker:
    """Looks at the same tracked objects again and again."""

    def __init__(self, tracked: Mapping[str, Any]) -> None:
        """``tracked`` is what `state.collect` gave."""
        self._tracked = dict(tracked)
        self._cache: _Cache | None = None
        self._number = 0
        self._uncached: set[str] = set()  # share memory with objects that are asked each time
        self._frozen: set[str] = set()  # parameters seen without requires_grad: in a GAN it comes and goes

    def look(self) -> Sight:
        """Return the state as it is now.

        Raises:
            UntrackableError: an object has come to hold state that cannot be stored.

        """
        if self._cache is not None and self._cache.is_valid():
            try:
                return self._cache.read()
            except _ChangedError:
                pass
        return self._flatten()

    @without_collection
    def _flatten(self) -> Sight:
        self._number += 1
        while True:
            cache = _Cache(self._tracked, self._uncached, self._frozen, self._number)
            if not cache.tangled:
                break
            self._uncached |= cache.tangled
        self._cache = cache
        return Sight(cache.fixed, tuple(cache.live), cache.dynamic)


class _ChangedError(Exception):
    """What is asked for does not fit to what was cached."""


class _Cache:
    """A `Fixed`, and all that is needed to see whether it is still valid."""

    def __init__(self, tracked: dict[str, Any], uncached: set[str], frozen: set[str], number: int) -> None:
        self._entries = _Entries()
        self._optimizers: list[Optimizer] = []
        self._groups_of: list[Optimizer] = []
        self._bucket_orders: list[BucketOrder] = []
        self._watched: list[Tensor] = []  # parameters, buffers, and what is stored as a view
        self._names: dict[Key, tuple[int, str]] = {}  # of cached tensors, with the number of their object
        self._questions: list[tuple[int, str, Callable[[Walk], Any]]] = []
        self._asking = 0
        self.tangled: set[str] = set()  # cached objects with tensors that are known by an uncached one's name
        self.live: list[Leaf] = []
        self.dynamic: dict[str, Any] = {}
        self._static: dict[str, Any] = {}
        self._leaves: list[Leaf] = []
        walk = Walk()
        for index, (name, item) in enumerate(tracked.items()):
            if name not in uncached and _is_cacheable(item):
                self._add(walk, index, name, item)
            else:
                self._static[name] = None  # keeps its place among the names
                read = functools.partial(flatten_object, name=name, item=item)
                self._questions.append((index, name, read))
                before = len(walk.leaves)
                self.dynamic[name] = read(walk)
                self.live += walk.leaves[before:]
        parameters = _parameters_by_leaf(tracked, frozen)
        self._trained = [parameter for leaf, parameter in parameters.items() if leaf not in frozen]
        may_overlap = _overlap_rule(tracked, self._optimizers, parameters, frozen)
        overlapped = tuple(may_overlap(leaf.name) for leaf in self._leaves)
        self.fixed = Fixed(number, tuple(self._leaves), self._static, overlapped)
        self._complex = [tensor for tensor in self._watched if tensor.is_complex()]
        self._addresses = list(map(Tensor.data_ptr, self._watched))
        self._specs = list(map(_spec, self._watched))
        counts = Counter(self._addresses)  # tensors at one address are tied, unless their strides differ
        both = zip(self._watched, self._addresses, strict=True)
        self._shared = [tensor for tensor, address in both if counts[address] > 1]
        self._strides = list(map(Tensor.stride, self._shared))
        self._states = [(item, item.state, list(item.state.values())) for item in self._optimizers]
        self._lists = list(map(list, self._group_lists()))
        self._revisions = [order.revision for order in self._bucket_orders]

    def is_valid(self) -> bool:
        """Whether flattening would still give the same tensors under the same names."""
        try:
            return (
                self._entries.are_same()
                and all(starmap(_has_state, self._states))
                and _are_same_lists(self._group_lists(), self._lists)
                and [order.revision for order in self._bucket_orders] == self._revisions
                and list(map(Tensor.data_ptr, self._watched)) == self._addresses
                and all(map(eq, map(_spec, self._watched), self._specs))
                and list(map(Tensor.stride, self._shared)) == self._strides
                and all(map(_requires_grad, self._trained))
                and not any(map(Tensor.is_conj, self._complex))
            )
        except (AttributeError, KeyError, TypeError, RuntimeError):  # something of another kind stands there
            return False

    def read(self) -> Sight:
        """Ask for what is not cached."""
        walk, dynamic = Walk(self._name_of), {}  # type: tuple[Walk, dict[str, Any]]
        for index, name, read in self._questions:
            self._asking = index
            dynamic[name] = read(walk)
        return Sight(self.fixed, tuple(walk.leaves), dynamic)

    def _name_of(self, key: Key) -> str | None:
        """Return the name of a cached tensor. Of tied ones the first in the order gives the name."""
        index, name = self._names.get(key, (0, None))
        if index > self._asking:
            raise _ChangedError
        return name

    def _add(self, walk: Walk, index: int, name: str, item: Any) -> None:
        own = _tensors_of(item)
        keys = {key: tensor for tensor in own if (key := _stored_key(tensor)) is not None}
        asked = {leaf.name for leaf in self.live}
        before, seen = len(walk.leaves), len(walk.seen)
        encoded = flatten_object(walk, name, item)
        if asked and not asked.isdisjoint(map(walk.seen.get, keys)):
            self.tangled.add(name)
        new = walk.leaves[before:]
        if isinstance(item, nn.Module):
            for part in item.modules():
                self._entries.keep_module(part)
        elif isinstance(item, Optimizer):
            for holder in (*item.state.values(), *_OPTIMIZER_HOOKS(item)):
                self._entries.keep(holder)
            self._optimizers.append(item)
            self._groups_of.append(item)
            self.live += [leaf for leaf in new if leaf.name.startswith(f"{name}/param_groups/")]
            new = [leaf for leaf in new if not leaf.name.startswith(f"{name}/param_groups/")]
            groups = _Groups(name, item)
            self._questions.append((index, name, groups.read))
            self.dynamic[name], encoded = groups.split(encoded)
        elif isinstance(item, ParameterOrder):
            self._groups_of += item.optimizers
        else:
            self._bucket_orders.append(item)
        self._static[name] = encoded
        is_model = isinstance(item, nn.Module)
        self._watched += own if is_model else filter(Tensor.is_complex, own)
        cached = {leaf.name for leaf in new}
        for key, leaf_name in islice(walk.seen.items(), seen, None):
            if leaf_name in cached:
                self._names[key] = (index, leaf_name)
        for leaf in new:  # as they are, so that what ``p.data = x`` puts there does not keep the old memory
            original = keys.get(key_of(leaf.tensor, "tensor"), leaf.tensor)
            self._leaves.append(Leaf(leaf.name, original, leaf.kind))

    def _group_lists(self) -> list[Sequence[Any]]:
        optimizers = dict.fromkeys(self._groups_of)
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        names = [group["param_names"] for group in groups if "param_names" in group]
        params = [group["params"] for group in groups]
        return [*(optimizer.param_groups for optimizer in optimizers), *params, *names]


class _Entries:
    """Objects that must stay under their keys, in dicts that must not grow. Compared in C, 34 ns each."""

    def __init__(self) -> None:
        self._empty: list[Any] = []
        self._filled: list[dict[Any, Any]] = []
        self._sizes: list[int] = []
        self._holders: list[dict[Any, Any]] = []  # one for each key and value
        self._keys: list[Any] = []
        self._values: list[Any] = []
        self._sets: list[set[str]] = []
        self._were: list[set[str]] = []

    def keep_module(self, module: nn.Module) -> None:
        hidden = module._non_persistent_buffers_set
        for holder in _MODULE_DICTS(module):
            self.keep(holder, hidden if holder is module._buffers else ())
        if hidden:
            self._sets.append(hidden)
            self._were.append(set(hidden))
        else:
            self._empty.append(hidden)

    def keep(self, holder: dict[Any, Any], but: Collection[str] = ()) -> None:
        """``but``: keys under which other objects may come to stand."""
        if not holder:
            self._empty.append(holder)
            return
        self._filled.append(holder)
        self._sizes.append(len(holder))
        kept = [key for key in holder if key not in but] if but else holder
        self._holders += [holder] * len(kept)
        self._keys += kept
        self._values += map(holder.__getitem__, kept)

    def are_same(self) -> bool:
        """Raises KeyError if one has gone."""
        return (
            not any(self._empty)
            and list(map(len, self._filled)) == self._sizes
            and self._sets == self._were
            and all(map(is_, map(getitem, self._holders, self._keys), self._values))
        )


def _has_state(optimizer: Optimizer, state: Mapping[Any, Any], inner: list[Any]) -> bool:
    same = optimizer.state is state and len(state) == len(inner) and all(map(is_, state.values(), inner))
    return same and _has_own_state_dict(optimizer)


def _are_same_lists(now: list[Sequence[Any]], before: list[list[Any]]) -> bool:
    """Compare two lists of lists: the same objects in each."""
    return list(map(len, now)) == list(map(len, before)) and all(map(is_, chain(*now), chain(*before)))


class _Groups:
    """The hyperparameters of a plain optimizer, which schedulers and scripts change."""

    def __init__(self, name: str, optimizer: Optimizer) -> None:
        self._name, self._optimizer = name, optimizer
        self._keys = [list(group) for group in optimizer.param_groups]
        self._last: list[tuple[list[Any], dict[str, Any]]] = [([], {}) for _ in self._keys]

    def split(self, encoded: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Divide an optimizer's encoded state into what is read each time, and what is static."""
        groups = encoded["param_groups"]
        moving = [{k: v for k, v in group.items() if k not in _STATIC_KEYS} for group in groups]
        static = [{k: v if k in _STATIC_KEYS else None for k, v in group.items()} for group in groups]
        return {"param_groups": moving}, {**encoded, "param_groups": static}

    def read(self, walk: Walk) -> dict[str, Any]:
        """Encode the groups; those with the same numbers as last time are not encoded again."""
        groups = self._optimizer.param_groups
        if [list(group) for group in groups] != self._keys:
            raise _ChangedError
        for i, group in enumerate(groups):
            plain = {key: value for key, value in group.items() if key not in _STATIC_KEYS}
            values = list(plain.values())
            before, _ = self._last[i]
            if not before or not all(map(is_, values, before)):
                plain = walk.replace(plain, f"{self._name}/param_groups/{i}", REPLICATED)
                encoded = json_codec.encode(plain, f"{self._name}['param_groups'][{i}]")
                self._last[i] = (values if all(map(_is_immutable, values)) else [], encoded)
        return {"param_groups": [encoded for _, encoded in self._last]}


def _is_immutable(value: Any) -> bool:
    kinds = set(map(type, value)) if type(value) is tuple else {type(value)}
    return kinds <= _ATOMS


def _is_cacheable(item: Any) -> bool:
    if isinstance(item, nn.Module):
        return _is_plain_module(item) and not any(map(_is_lazy_view, _tensors_of(item)))
    if isinstance(item, Optimizer):
        return _is_plain_optimizer(item) and not any(map(_is_lazy_view, _tensors_of(item)))
    return type(item) in {ParameterOrder, BucketOrder}


def _is_plain_module(module: nn.Module) -> bool:
    """Whether state_dict() is torch's own all the way down, so that its dicts decide what it gives."""
    parts, methods = list(module.modules()), set(_MODULE_METHODS)
    if any(p._state_dict_hooks or p._state_dict_pre_hooks or methods & p.__dict__.keys() for p in parts):
        return False
    return all(getattr(kind, m) is getattr(nn.Module, m) for kind in set(map(type, parts)) for m in methods)


def _is_plain_optimizer(optimizer: Optimizer) -> bool:
    """Whether state_dict() is torch's own, and its state per parameter nothing but tensors."""
    known = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    return (
        _has_own_state_dict(optimizer)
        and not any(_OPTIMIZER_HOOKS(optimizer))
        and all(
            type(group) is dict and json_codec.TAG not in group and all(type(key) is str for key in group)
            for group in optimizer.param_groups
        )
        and all(
            id(parameter) in known
            and type(inner) is dict
            and all(value is None or isinstance(value, Tensor) for value in inner.values())
            for parameter, inner in optimizer.state.items()
        )
    )


def _has_own_state_dict(optimizer: Optimizer) -> bool:
    return type(optimizer).state_dict is Optimizer.state_dict and "state_dict" not in optimizer.__dict__


def _tensors_of(item: Any) -> list[Tensor]:
    """List the tensors that a plain module or optimizer keeps."""
    if isinstance(item, Optimizer):
        return [value for inner in item.state.values() for value in inner.values() if value is not None]
    if not isinstance(item, nn.Module):
        return []
    return [
        tensor
        for part in item.modules()
        for key, tensor in (*part._parameters.items(), *part._buffers.items())
        if tensor is not None and key not in part._non_persistent_buffers_set
    ]


def _is_lazy_view(tensor: Tensor) -> bool:
    """Whether what is stored of it is a copy."""
    return type(tensor) in {Tensor, nn.Parameter} and (tensor.is_conj() or tensor.is_neg())


def _stored_key(tensor: Tensor) -> Key | None:
    try:
        stored_as, tensor = stored_form(tensor)
        return key_of(tensor, stored_as)
    except (RuntimeError, ValueError):  # without an address: flattening refuses it
        return None


# ---- what may be copied while training goes on -------------------------------------------------------------


def _parameters_by_leaf(tracked: Mapping[str, Any], frozen: set[str]) -> dict[str, nn.Parameter]:
    """Find the models' parameters. Add to ``frozen`` those without requires_grad, or changed by forward()."""
    found: dict[str, nn.Parameter] = {}
    for name, model in tracked.items():
        if isinstance(model, nn.Module):
            canonical = canonical_names(model)
            clipped = [part for part in model.modules() if getattr(part, "max_norm", None) is not None]
            moving = {id(parameter) for part in clipped for parameter in part.parameters(recurse=False)}
            for key, parameter in model.named_parameters(remove_duplicate=False):
                leaf = f"{name}/{canonical(key)}"
                found[leaf] = parameter
                if not parameter.requires_grad or id(parameter) in moving:
                    frozen.add(leaf)
    return found


def _overlap_rule(
    tracked: Mapping[str, Any],
    plain: list[Optimizer],
    parameters: Mapping[str, nn.Parameter],
    frozen: set[str],
) -> Callable[[str], bool]:
    """Return whether a leaf changes in an optimizer's `step` alone, by its name. See `Fixed.overlapped`."""
    optimizers = {name: item for name, item in tracked.items() if isinstance(item, Optimizer)}
    hooked = {name for name, item in optimizers.items() if item in plain and _can_be_hooked(item)}
    stepped, otherwise = set[int](), set[int]()
    for name, item in optimizers.items():
        ids = {id(parameter) for group in item.param_groups for parameter in group["params"]}
        (stepped if name in hooked else otherwise).update(ids)
    stepped -= otherwise
    averaged = bool(hooked) and len(hooked) == len(optimizers)

    def may_overlap(leaf: str) -> bool:
        name = leaf.split("/", maxsplit=1)[0]
        if leaf not in parameters:  # optimizer state, or a buffer
            return name in hooked
        if name == "ema" or name.startswith("ema."):
            return averaged  # changed after each step, by whatever optimizer: all of them wait
        return id(parameters[leaf]) in stepped and leaf not in frozen

    return may_overlap


def _can_be_hooked(optimizer: Optimizer) -> bool:
    """Whether a hook runs before each step, and only there are parameters changed.

    LBFGS takes many steps in one, and evaluates the model between them.
    """
    return not isinstance(optimizer, LBFGS) and getattr(type(optimizer).step, "hooked", False) is True
