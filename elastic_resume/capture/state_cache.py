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
    Leaf,
    ParameterOrder,
    TensorCollector,
    TensorKey,
    flatten_object,
    make_key,
    make_name_canonicalizer,
    to_stored_form,
)

P = ParamSpec("P")
T = TypeVar("T")

_MODULE_METHODS = (
    "state_dict", "_save_to_state_dict", "get_extra_state",
    "named_parameters", "named_modules", "_named_members", "named_children",
)  # fmt: skip
_get_module_dicts = attrgetter(
    "_parameters", "_buffers", "_modules", "_state_dict_hooks", "_state_dict_pre_hooks"
)
_get_optimizer_hooks = attrgetter("_optimizer_state_dict_pre_hooks", "_optimizer_state_dict_post_hooks")
_STATIC_GROUP_KEYS = {"params", "param_names"}  # of a param group: they change with its parameters only
_IMMUTABLE_TYPES = {type(None), bool, int, float, str}

_get_dtype_and_shape = attrgetter("dtype", "shape")
_get_requires_grad = attrgetter("requires_grad")


@dataclass(frozen=True)
class CachedState:
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

    version: int
    leaves: tuple[Leaf, ...]
    static_skeleton: dict[str, Any]
    may_overlap: tuple[bool, ...]


@dataclass(frozen=True)
class StateView:
    """The tracked state at one moment.

    Attributes:
        fixed: the very same object as last time while nothing but values has changed.
        live: tensors that were asked for now. Copy them at once; next time they may be others.
        dynamic: typed JSON that goes over ``fixed.static`` (`store.note.merge`), by tracked name.

    """

    cached: CachedState
    uncached_leaves: tuple[Leaf, ...]
    dynamic_skeleton: dict[str, Any]

    @property
    def leaves(self) -> tuple[Leaf, ...]:
        """All tensors of the state."""
        return self.cached.leaves + self.uncached_leaves


def without_garbage_collection(function: Callable[P, T]) -> Callable[P, T]:
    """Run ``work`` without the collector of cycles: it makes many objects, and all of them stay.

    For 20,000 tensors half of the time of the first look went into looking for garbage.
    """

    @functools.wraps(function)
    def done(*args: P.args, **kwargs: P.kwargs) -> T:
        collecting = gc.isenabled()
        gc.disable()
        try:
            return function(*args, **kwargs)
        finally:
            if collecting:
                gc.enable()

    return done


class StateTracker:
    """Looks at the same tracked objects again and again."""

    def __init__(self, tracked: Mapping[str, Any]) -> None:
        """``tracked`` is what `state.collect` gave."""
        self._tracked = dict(tracked)
        self._cache: _StateCache | None = None
        self._version = 0
        self._uncached_names: set[str] = set()  # share memory with objects that are asked each time
        self._frozen_names: set[str] = (
            set()
        )  # parameters seen without requires_grad: in a GAN it comes and goes

    def read_state(self) -> StateView:
        """Return the state as it is now.

        Raises:
            UntrackableError: an object has come to hold state that cannot be stored.

        """
        if self._cache is not None and self._cache.is_valid():
            try:
                return self._cache.read_uncached()
            except _StaleCacheError:
                pass
        return self._flatten()

    @without_garbage_collection
    def _flatten(self) -> StateView:
        self._version += 1
        while True:
            cache = _StateCache(self._tracked, self._uncached_names, self._frozen_names, self._version)
            if not cache.uncacheable_names:
                break
            self._uncached_names |= cache.uncacheable_names
        self._cache = cache
        return StateView(cache.cached, tuple(cache.uncached_leaves), cache.dynamic_skeleton)


class _StaleCacheError(Exception):
    """What is asked for does not fit to what was cached."""


class _StateCache:
    """A `Fixed`, and all that is needed to see whether it is still valid."""

    def __init__(
        self, tracked: dict[str, Any], uncached_names: set[str], frozen_names: set[str], version: int
    ) -> None:
        self._dict_identities = _DictIdentities()
        self._optimizers: list[Optimizer] = []
        self._group_optimizers: list[Optimizer] = []
        self._bucket_orders: list[BucketOrder] = []
        self._checked_tensors: list[Tensor] = []  # parameters, buffers, and what is stored as a view
        self._cached_names: dict[
            TensorKey, tuple[int, str]
        ] = {}  # of cached tensors, with the number of their object
        self._uncached_readers: list[tuple[int, str, Callable[[TensorCollector], Any]]] = []
        self._current_index = 0
        self.uncacheable_names: set[str] = (
            set()
        )  # cached objects with tensors that are known by an uncached one's name
        self.uncached_leaves: list[Leaf] = []
        self.dynamic_skeleton: dict[str, Any] = {}
        self._static_skeleton: dict[str, Any] = {}
        self._cached_leaves: list[Leaf] = []
        walk = TensorCollector()
        for index, (name, item) in enumerate(tracked.items()):
            if name not in uncached_names and _is_cacheable(item):
                self._add_object(walk, index, name, item)
            else:
                self._static_skeleton[name] = None  # keeps its place among the names
                read = functools.partial(flatten_object, name=name, item=item)
                self._uncached_readers.append((index, name, read))
                before = len(walk.leaves)
                self.dynamic_skeleton[name] = read(walk)
                self.uncached_leaves += walk.leaves[before:]
        parameters = _find_parameters(tracked, frozen_names)
        self._trained_parameters = [
            parameter for leaf, parameter in parameters.items() if leaf not in frozen_names
        ]
        may_overlap = _make_overlap_rule(tracked, self._optimizers, parameters, frozen_names)
        overlapped = tuple(may_overlap(leaf.name) for leaf in self._cached_leaves)
        self.cached = CachedState(version, tuple(self._cached_leaves), self._static_skeleton, overlapped)
        self._complex_tensors = [tensor for tensor in self._checked_tensors if tensor.is_complex()]
        self._expected_addresses = list(map(Tensor.data_ptr, self._checked_tensors))
        self._expected_specs = list(map(_get_dtype_and_shape, self._checked_tensors))
        counts = Counter(
            self._expected_addresses
        )  # tensors at one address are tied, unless their strides differ
        both = zip(self._checked_tensors, self._expected_addresses, strict=True)
        self._aliased_tensors = [tensor for tensor, address in both if counts[address] > 1]
        self._aliased_strides = list(map(Tensor.stride, self._aliased_tensors))
        self._optimizer_states = [(item, item.state, list(item.state.values())) for item in self._optimizers]
        self._saved_group_lists = list(map(list, self._collect_group_lists()))
        self._bucket_revisions = [order.revision for order in self._bucket_orders]

    def is_valid(self) -> bool:
        """Whether flattening would still give the same tensors under the same names."""
        try:
            return (
                self._dict_identities.are_unchanged()
                and all(starmap(_is_same_state, self._optimizer_states))
                and _have_same_items(self._collect_group_lists(), self._saved_group_lists)
                and [order.revision for order in self._bucket_orders] == self._bucket_revisions
                and list(map(Tensor.data_ptr, self._checked_tensors)) == self._expected_addresses
                and all(map(eq, map(_get_dtype_and_shape, self._checked_tensors), self._expected_specs))
                and list(map(Tensor.stride, self._aliased_tensors)) == self._aliased_strides
                and all(map(_get_requires_grad, self._trained_parameters))
                and not any(map(Tensor.is_conj, self._complex_tensors))
            )
        except (AttributeError, KeyError, TypeError, RuntimeError):  # something of another kind stands there
            return False

    def read_uncached(self) -> StateView:
        """Ask for what is not cached."""
        walk, dynamic = TensorCollector(self._find_cached_name), {}  # type: tuple[TensorCollector, dict[str, Any]]
        for index, name, read in self._uncached_readers:
            self._current_index = index
            dynamic[name] = read(walk)
        return StateView(self.cached, tuple(walk.leaves), dynamic)

    def _find_cached_name(self, key: TensorKey) -> str | None:
        """Return the name of a cached tensor. Of tied ones the first in the order gives the name."""
        index, name = self._cached_names.get(key, (0, None))
        if index > self._current_index:
            raise _StaleCacheError
        return name

    def _add_object(self, collector: TensorCollector, index: int, name: str, item: Any) -> None:
        own = _list_tensors(item)
        keys = {key: tensor for tensor in own if (key := _make_stored_key(tensor)) is not None}
        asked = {leaf.name for leaf in self.uncached_leaves}
        before, seen = len(collector.leaves), len(collector.name_by_key)
        encoded = flatten_object(collector, name, item)
        if asked and not asked.isdisjoint(map(collector.name_by_key.get, keys)):
            self.uncacheable_names.add(name)
        new = collector.leaves[before:]
        if isinstance(item, nn.Module):
            for part in item.modules():
                self._dict_identities.add_module(part)
        elif isinstance(item, Optimizer):
            for holder in (*item.state.values(), *_get_optimizer_hooks(item)):
                self._dict_identities.add_dict(holder)
            self._optimizers.append(item)
            self._group_optimizers.append(item)
            self.uncached_leaves += [leaf for leaf in new if leaf.name.startswith(f"{name}/param_groups/")]
            new = [leaf for leaf in new if not leaf.name.startswith(f"{name}/param_groups/")]
            groups = _ParamGroups(name, item)
            self._uncached_readers.append((index, name, groups.encode_groups))
            self.dynamic_skeleton[name], encoded = groups.split_static(encoded)
        elif isinstance(item, ParameterOrder):
            self._group_optimizers += item.optimizers
        else:
            self._bucket_orders.append(item)
        self._static_skeleton[name] = encoded
        is_model = isinstance(item, nn.Module)
        self._checked_tensors += own if is_model else filter(Tensor.is_complex, own)
        cached = {leaf.name for leaf in new}
        for key, leaf_name in islice(collector.name_by_key.items(), seen, None):
            if leaf_name in cached:
                self._cached_names[key] = (index, leaf_name)
        for leaf in new:  # as they are, so that what ``p.data = x`` puts there does not keep the old memory
            original = keys.get(make_key(leaf.tensor, "tensor"), leaf.tensor)
            self._cached_leaves.append(Leaf(leaf.name, original, leaf.kind))

    def _collect_group_lists(self) -> list[Sequence[Any]]:
        optimizers = dict.fromkeys(self._group_optimizers)
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        names = [group["param_names"] for group in groups if "param_names" in group]
        params = [group["params"] for group in groups]
        return [*(optimizer.param_groups for optimizer in optimizers), *params, *names]


class _DictIdentities:
    """Objects that must stay under their keys, in dicts that must not grow. Compared in C, 34 ns each."""

    def __init__(self) -> None:
        self._expected_empty: list[Any] = []
        self._expected_dicts: list[dict[Any, Any]] = []
        self._expected_sizes: list[int] = []
        self._dict_of_each_key: list[dict[Any, Any]] = []  # one for each key and value
        self._expected_keys: list[Any] = []
        self._expected_values: list[Any] = []
        self._sets: list[set[str]] = []
        self._set_copies: list[set[str]] = []

    def add_module(self, module: nn.Module) -> None:
        hidden = module._non_persistent_buffers_set
        for holder in _get_module_dicts(module):
            self.add_dict(holder, hidden if holder is module._buffers else ())
        if hidden:
            self._sets.append(hidden)
            self._set_copies.append(set(hidden))
        else:
            self._expected_empty.append(hidden)

    def add_dict(self, entries: dict[Any, Any], excluded_keys: Collection[str] = ()) -> None:
        """``but``: keys under which other objects may come to stand."""
        if not entries:
            self._expected_empty.append(entries)
            return
        self._expected_dicts.append(entries)
        self._expected_sizes.append(len(entries))
        kept = [key for key in entries if key not in excluded_keys] if excluded_keys else entries
        self._dict_of_each_key += [entries] * len(kept)
        self._expected_keys += kept
        self._expected_values += map(entries.__getitem__, kept)

    def are_unchanged(self) -> bool:
        """Raises KeyError if one has gone."""
        return (
            not any(self._expected_empty)
            and list(map(len, self._expected_dicts)) == self._expected_sizes
            and self._sets == self._set_copies
            and all(
                map(is_, map(getitem, self._dict_of_each_key, self._expected_keys), self._expected_values)
            )
        )


def _is_same_state(optimizer: Optimizer, state: Mapping[Any, Any], inner: list[Any]) -> bool:
    same = optimizer.state is state and len(state) == len(inner) and all(map(is_, state.values(), inner))
    return same and _has_own_state_dict(optimizer)


def _have_same_items(now: list[Sequence[Any]], before: list[list[Any]]) -> bool:
    """Compare two lists of lists: the same objects in each."""
    return list(map(len, now)) == list(map(len, before)) and all(map(is_, chain(*now), chain(*before)))


class _ParamGroups:
    """The hyperparameters of a plain optimizer, which schedulers and scripts change."""

    def __init__(self, name: str, optimizer: Optimizer) -> None:
        self._name, self._optimizer = name, optimizer
        self._expected_keys = [list(group) for group in optimizer.param_groups]
        self._last_encoded: list[tuple[list[Any], dict[str, Any]]] = [([], {}) for _ in self._expected_keys]

    def split_static(self, encoded: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Divide an optimizer's encoded state into what is read each time, and what is static."""
        groups = encoded["param_groups"]
        moving = [{k: v for k, v in group.items() if k not in _STATIC_GROUP_KEYS} for group in groups]
        static = [{k: v if k in _STATIC_GROUP_KEYS else None for k, v in group.items()} for group in groups]
        return {"param_groups": moving}, {**encoded, "param_groups": static}

    def encode_groups(self, collector: TensorCollector) -> dict[str, Any]:
        """Encode the groups; those with the same numbers as last time are not encoded again."""
        groups = self._optimizer.param_groups
        if [list(group) for group in groups] != self._expected_keys:
            raise _StaleCacheError
        for i, group in enumerate(groups):
            plain = {key: value for key, value in group.items() if key not in _STATIC_GROUP_KEYS}
            values = list(plain.values())
            before, _ = self._last_encoded[i]
            if not before or not all(map(is_, values, before)):
                plain = collector.replace_tensors(plain, f"{self._name}/param_groups/{i}", REPLICATED)
                encoded = json_codec.encode(plain, f"{self._name}['param_groups'][{i}]")
                self._last_encoded[i] = (values if all(map(_is_immutable, values)) else [], encoded)
        return {"param_groups": [encoded for _, encoded in self._last_encoded]}


def _is_immutable(value: Any) -> bool:
    kinds = set(map(type, value)) if type(value) is tuple else {type(value)}
    return kinds <= _IMMUTABLE_TYPES


def _is_cacheable(item: Any) -> bool:
    if isinstance(item, nn.Module):
        return _is_plain_module(item) and not any(map(_is_lazy_view, _list_tensors(item)))
    if isinstance(item, Optimizer):
        return _is_plain_optimizer(item) and not any(map(_is_lazy_view, _list_tensors(item)))
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
        and not any(_get_optimizer_hooks(optimizer))
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


def _list_tensors(item: Any) -> list[Tensor]:
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


def _make_stored_key(tensor: Tensor) -> TensorKey | None:
    try:
        stored_as, tensor = to_stored_form(tensor)
        return make_key(tensor, stored_as)
    except (RuntimeError, ValueError):  # without an address: flattening refuses it
        return None


# ---- what may be copied while training goes on -------------------------------------------------------------


def _find_parameters(tracked: Mapping[str, Any], frozen_names: set[str]) -> dict[str, nn.Parameter]:
    """Find the models' parameters. Add to ``frozen`` those without requires_grad, or changed by forward()."""
    found: dict[str, nn.Parameter] = {}
    for name, model in tracked.items():
        if isinstance(model, nn.Module):
            canonical = make_name_canonicalizer(model)
            clipped = [part for part in model.modules() if getattr(part, "max_norm", None) is not None]
            moving = {id(parameter) for part in clipped for parameter in part.parameters(recurse=False)}
            for key, parameter in model.named_parameters(remove_duplicate=False):
                leaf = f"{name}/{canonical(key)}"
                found[leaf] = parameter
                if not parameter.requires_grad or id(parameter) in moving:
                    frozen_names.add(leaf)
    return found


def _make_overlap_rule(
    tracked: Mapping[str, Any],
    plain_optimizers: list[Optimizer],
    parameters: Mapping[str, nn.Parameter],
    frozen_names: set[str],
) -> Callable[[str], bool]:
    """Return whether a leaf changes in an optimizer's `step` alone, by its name. See `Fixed.overlapped`."""
    optimizers = {name: item for name, item in tracked.items() if isinstance(item, Optimizer)}
    hooked = {name for name, item in optimizers.items() if item in plain_optimizers and _can_be_hooked(item)}
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
        return id(parameters[leaf]) in stepped and leaf not in frozen_names

    return may_overlap


def _can_be_hooked(optimizer: Optimizer) -> bool:
    """Whether a hook runs before each step, and only there are parameters changed.

    LBFGS takes many steps in one, and evaluates the model between them.
    """
    return not isinstance(optimizer, LBFGS) and getattr(type(optimizer).step, "hooked", False) is True
