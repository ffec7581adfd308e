# ruff: noqa: SLF001  a module's own dicts are what state_dict() reads; no public way is as fast
"""Caches the names and tensors of the tracked state, so that a snapshot need not call every state_dict().

Most of a state changes in values only, so names, tensors and the JSON around them are found once
(`CachedState`). Each `StateTracker.read_state` checks that the cache is still valid. Every entry of every
dict that a state_dict() reads must be the same object. Every parameter and buffer must have the same
address, dtype and shape, because ``p.data = x`` exchanges these behind the object's back. If anything
differs, the whole state is flattened again.

The cache holds the objects' own tensors, so no old tensor is ever copied. If an optimizer's state changes
its dtype or size in place, the copy fails (`copy_engine.copy_tensors`) and the next snapshot flattens
again. Objects with a state_dict() of their own or with state_dict hooks, and the hyperparameters of
optimizers, are read every time.

Promise: the tensors of a `StateView`, and `slots.merge_state` of its two pieces of JSON, equal the result of
`state_dict.flatten` at that moment: same names, dtypes, shapes, kinds and ties, and the same errors.

Not noticed: a module whose whole ``_parameters`` dict is exchanged, and a state_dict method that is assigned
to a submodule after the model was flattened. Use it in the training thread, at a step boundary.
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
from torch.optim import Optimizer

from elastic_resume.capture.copy_barrier import OverlapRule
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
_STATIC_GROUP_KEYS = {"params", "param_names"}  # entries of a param group that follow from its parameters
_get_dtype_and_shape = attrgetter("dtype", "shape")
_get_requires_grad = attrgetter("requires_grad")


@dataclass(frozen=True)
class CachedState:
    """The part of a state that changes in values only. Any other change makes a new one."""

    version: int  # grows with each new one
    leaves: tuple[Leaf, ...]  # the objects' own tensors, not detached
    static_skeleton: dict[str, Any]  # typed JSON around them, by tracked name
    may_overlap: tuple[bool, ...]  # for each leaf; see OverlapRule


@dataclass(frozen=True)
class StateView:
    """The tracked state at one moment. ``cached`` stays the same object while only values change."""

    cached: CachedState
    uncached_leaves: tuple[Leaf, ...]  # copy them at once: next time there may be others
    dynamic_skeleton: dict[str, Any]  # slots.merge_state lays it over cached.static_skeleton

    @property
    def leaves(self) -> tuple[Leaf, ...]:
        """All tensors of the state."""
        return self.cached.leaves + self.uncached_leaves


def without_garbage_collection(function: Callable[P, T]) -> Callable[P, T]:
    """Disable the cyclic garbage collector while ``function`` runs.

    The function makes many objects and all of them stay. For 20,000 tensors the collector took half the time.
    """

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        was_enabled = gc.isenabled()
        gc.disable()
        try:
            return function(*args, **kwargs)
        finally:
            if was_enabled:
                gc.enable()

    return run


class StateTracker:
    """Reads the state of the same tracked objects again and again."""

    def __init__(self, tracked: Mapping[str, Any]) -> None:
        self._tracked = dict(tracked)
        self._cache: _StateCache | None = None
        self._version = 0
        self._uncacheable_names: set[str] = set()  # objects that share memory with uncached ones
        # Parameters once seen without requires_grad. A GAN switches it at each step; the cache must settle.
        self._frozen_names: set[str] = set()

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
            cache = _StateCache(self._tracked, self._uncacheable_names, self._frozen_names, self._version)
            if not cache.uncacheable_names:
                break
            self._uncacheable_names |= cache.uncacheable_names
        self._cache = cache
        return StateView(cache.cached, tuple(cache.uncached_leaves), cache.dynamic_skeleton)


class _StaleCacheError(Exception):
    """The state that was read now does not fit the cached state."""


class _StateCache:
    """A `CachedState`, and everything that is compared to decide whether it is still valid."""

    def __init__(
        self, tracked: dict[str, Any], uncacheable_names: set[str], frozen_names: set[str], version: int
    ) -> None:
        self.uncached_leaves: list[Leaf] = []
        self.dynamic_skeleton: dict[str, Any] = {}
        self.uncacheable_names: set[str] = set()  # cached objects with a tensor that an uncached one named
        self._static_skeleton: dict[str, Any] = {}
        self._cached_leaves: list[Leaf] = []
        self._cached_names: dict[TensorKey, tuple[int, str]] = {}  # (index of the object, leaf name)
        self._uncached_readers: list[tuple[int, str, Callable[[TensorCollector], Any]]] = []
        self._current_index = 0
        self._dict_identities = _DictIdentities()
        self._optimizers: list[Optimizer] = []
        self._group_optimizers: list[Optimizer] = []
        self._bucket_orders: list[BucketOrder] = []
        self._checked_tensors: list[Tensor] = []  # parameters, buffers, and complex optimizer state
        collector = TensorCollector()
        for index, (name, item) in enumerate(tracked.items()):
            if name not in uncacheable_names and _is_cacheable(item):
                self._add_cached(collector, index, name, item)
            else:
                self._add_uncached(collector, index, name, item)
        overlap_rule = OverlapRule(tracked, self._optimizers, frozen_names)
        self._trained_parameters = overlap_rule.trained_parameters
        may_overlap = tuple(overlap_rule.may_overlap(leaf.name) for leaf in self._cached_leaves)
        self.cached = CachedState(version, tuple(self._cached_leaves), self._static_skeleton, may_overlap)
        self._record_expectations()

    def _record_expectations(self) -> None:
        tensors = self._checked_tensors
        self._complex_tensors = list(filter(Tensor.is_complex, tensors))
        self._expected_addresses = list(map(Tensor.data_ptr, tensors))
        self._expected_specs = list(map(_get_dtype_and_shape, tensors))
        # Tensors at one address are tied only while their strides agree.
        counts = Counter(self._expected_addresses)
        self._aliased_tensors = [tensor for tensor in tensors if counts[tensor.data_ptr()] > 1]
        self._aliased_strides = list(map(Tensor.stride, self._aliased_tensors))
        self._optimizer_states = [(item, item.state, list(item.state.values())) for item in self._optimizers]
        self._expected_group_lists = list(map(list, self._collect_group_lists()))
        self._bucket_revisions = [order.revision for order in self._bucket_orders]

    def is_valid(self) -> bool:
        """Return whether flattening would still give the same tensors under the same names."""
        try:
            return (
                self._dict_identities.are_unchanged()
                and all(starmap(_is_same_state, self._optimizer_states))
                and _have_same_items(self._collect_group_lists(), self._expected_group_lists)
                and [order.revision for order in self._bucket_orders] == self._bucket_revisions
                and list(map(Tensor.data_ptr, self._checked_tensors)) == self._expected_addresses
                and all(map(eq, map(_get_dtype_and_shape, self._checked_tensors), self._expected_specs))
                and list(map(Tensor.stride, self._aliased_tensors)) == self._aliased_strides
                and all(map(_get_requires_grad, self._trained_parameters))
                and not any(map(Tensor.is_conj, self._complex_tensors))
            )
        except (AttributeError, KeyError, TypeError, RuntimeError):  # an object of another type took a place
            return False

    def read_uncached(self) -> StateView:
        """Read the state that is not cached.

        Raises:
            _StaleCacheError: it shares memory with the cached state in a way that changes names.

        """
        collector = TensorCollector(self._find_cached_name)
        dynamic_skeleton: dict[str, Any] = {}
        for index, name, read in self._uncached_readers:
            self._current_index = index
            dynamic_skeleton[name] = read(collector)
        return StateView(self.cached, tuple(collector.leaves), dynamic_skeleton)

    def _find_cached_name(self, key: TensorKey) -> str | None:
        """Return the name of a cached tensor. The first of several tied tensors gives the name."""
        index, name = self._cached_names.get(key, (0, None))
        if index > self._current_index:
            raise _StaleCacheError
        return name

    def _add_uncached(self, collector: TensorCollector, index: int, name: str, item: Any) -> None:
        self._static_skeleton[name] = None  # keeps its place in the order of names
        read = functools.partial(flatten_object, name=name, item=item)
        self._uncached_readers.append((index, name, read))
        before = len(collector.leaves)
        self.dynamic_skeleton[name] = read(collector)
        self.uncached_leaves += collector.leaves[before:]

    def _add_cached(self, collector: TensorCollector, index: int, name: str, item: Any) -> None:
        tensors = _list_tensors(item)
        tensor_by_key = {key: tensor for tensor in tensors if (key := _make_stored_key(tensor)) is not None}
        uncached_names = {leaf.name for leaf in self.uncached_leaves}
        leaf_count, key_count = len(collector.leaves), len(collector.name_by_key)
        encoded = flatten_object(collector, name, item)
        if not uncached_names.isdisjoint(map(collector.name_by_key.get, tensor_by_key)):
            self.uncacheable_names.add(name)
        leaves = collector.leaves[leaf_count:]
        if isinstance(item, nn.Module):
            for part in item.modules():
                self._dict_identities.add_module(part)
            self._checked_tensors += tensors
        elif isinstance(item, Optimizer):
            for entries in (*item.state.values(), *_get_optimizer_hooks(item)):
                self._dict_identities.add_dict(entries)
            self._checked_tensors += filter(Tensor.is_complex, tensors)
            self._optimizers.append(item)
            self._group_optimizers.append(item)
            self._uncached_readers.append((index, name, _make_group_reader(name, item)))
            self.dynamic_skeleton[name], encoded = _split_param_groups(encoded)
            group_prefix = f"{name}/param_groups/"
            self.uncached_leaves += [leaf for leaf in leaves if leaf.name.startswith(group_prefix)]
            leaves = [leaf for leaf in leaves if not leaf.name.startswith(group_prefix)]
        elif isinstance(item, ParameterOrder):
            self._group_optimizers += item.optimizers
        else:
            self._bucket_orders.append(item)
        self._static_skeleton[name] = encoded
        leaf_names = {leaf.name for leaf in leaves}
        for key, leaf_name in islice(collector.name_by_key.items(), key_count, None):
            if leaf_name in leaf_names:
                self._cached_names[key] = (index, leaf_name)
        for leaf in leaves:  # keep the object's own tensor, so that ``p.data = x`` frees the old memory
            original = tensor_by_key.get(make_key(leaf.tensor, "tensor"), leaf.tensor)
            self._cached_leaves.append(Leaf(leaf.name, original, leaf.kind))

    def _collect_group_lists(self) -> list[Sequence[Any]]:
        optimizers = dict.fromkeys(self._group_optimizers)
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        names = [group["param_names"] for group in groups if "param_names" in group]
        params = [group["params"] for group in groups]
        return [*(optimizer.param_groups for optimizer in optimizers), *params, *names]


class _DictIdentities:
    """Objects that must stay under their keys, in dicts that must not grow.

    Compared without a Python loop: 34 ns for each entry.
    """

    def __init__(self) -> None:
        self._dicts: list[dict[Any, Any]] = []
        self._expected_sizes: list[int] = []
        self._dict_of_each_key: list[dict[Any, Any]] = []  # parallel to the next two lists
        self._expected_keys: list[Any] = []
        self._expected_values: list[Any] = []
        self._sets: list[set[str]] = []
        self._expected_sets: list[set[str]] = []

    def add_module(self, module: nn.Module) -> None:
        non_persistent = module._non_persistent_buffers_set
        self._sets.append(non_persistent)
        self._expected_sets.append(set(non_persistent))
        for entries in _get_module_dicts(module):
            self.add_dict(entries, non_persistent if entries is module._buffers else ())

    def add_dict(self, entries: dict[Any, Any], excluded_keys: Collection[str] = ()) -> None:
        """Expect ``entries`` to stay as they are. The values of ``excluded_keys`` may be replaced."""
        kept = [key for key in entries if key not in excluded_keys]
        self._dicts.append(entries)
        self._expected_sizes.append(len(entries))
        self._dict_of_each_key += [entries] * len(kept)
        self._expected_keys += kept
        self._expected_values += map(entries.__getitem__, kept)

    def are_unchanged(self) -> bool:
        """Return whether nothing changed. Raises KeyError if a key is gone."""
        values = map(getitem, self._dict_of_each_key, self._expected_keys)
        return (
            list(map(len, self._dicts)) == self._expected_sizes
            and self._sets == self._expected_sets
            and all(map(is_, values, self._expected_values))
        )


def _is_same_state(optimizer: Optimizer, state: Mapping[Any, Any], entries: list[Any]) -> bool:
    same = optimizer.state is state and len(state) == len(entries) and all(map(is_, state.values(), entries))
    return same and _has_own_state_dict(optimizer)


def _have_same_items(now: list[Sequence[Any]], before: list[list[Any]]) -> bool:
    """Return whether two lists of lists hold the same objects."""
    return list(map(len, now)) == list(map(len, before)) and all(map(is_, chain(*now), chain(*before)))


# ---- the hyperparameters of optimizers, which schedulers and scripts change --------------------------------


def _split_param_groups(encoded: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split an optimizer's encoded state into the hyperparameters and the rest."""
    groups = encoded["param_groups"]
    dynamic = [{k: v for k, v in group.items() if k not in _STATIC_GROUP_KEYS} for group in groups]
    static = [{k: v if k in _STATIC_GROUP_KEYS else None for k, v in group.items()} for group in groups]
    return {"param_groups": dynamic}, {**encoded, "param_groups": static}


def _make_group_reader(name: str, optimizer: Optimizer) -> Callable[[TensorCollector], dict[str, Any]]:
    """Return a function that encodes them. It raises _StaleCacheError if the groups have other keys."""
    expected_keys = [list(group) for group in optimizer.param_groups]

    def read_groups(collector: TensorCollector) -> dict[str, Any]:
        groups = optimizer.param_groups
        if [list(group) for group in groups] != expected_keys:
            raise _StaleCacheError
        plain = [{k: v for k, v in group.items() if k not in _STATIC_GROUP_KEYS} for group in groups]
        plain = collector.replace_tensors(plain, f"{name}/param_groups", REPLICATED)
        return {"param_groups": json_codec.encode(plain, f"{name}['param_groups']")}

    return read_groups


# ---- which objects can be cached ---------------------------------------------------------------------------


def _is_cacheable(item: Any) -> bool:
    if isinstance(item, nn.Module):
        return _is_plain_module(item) and not any(map(_is_lazy_view, _list_tensors(item)))
    if isinstance(item, Optimizer):
        return _is_plain_optimizer(item) and not any(map(_is_lazy_view, _list_tensors(item)))
    return type(item) in {ParameterOrder, BucketOrder}


def _is_plain_module(module: nn.Module) -> bool:
    """Return whether state_dict() is torch's own all the way down, so that the modules' dicts decide it."""
    parts, methods = list(module.modules()), set(_MODULE_METHODS)
    if any(p._state_dict_hooks or p._state_dict_pre_hooks or methods & p.__dict__.keys() for p in parts):
        return False
    return all(getattr(kind, m) is getattr(nn.Module, m) for kind in set(map(type, parts)) for m in methods)


def _is_plain_optimizer(optimizer: Optimizer) -> bool:
    """Return whether state_dict() is torch's own, and the state of each parameter holds tensors only."""
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
            and type(entries) is dict
            and all(value is None or isinstance(value, Tensor) for value in entries.values())
            for parameter, entries in optimizer.state.items()
        )
    )


def _has_own_state_dict(optimizer: Optimizer) -> bool:
    return type(optimizer).state_dict is Optimizer.state_dict and "state_dict" not in optimizer.__dict__


def _list_tensors(item: Any) -> list[Tensor]:
    """List the tensors that a plain module or optimizer stores."""
    if isinstance(item, Optimizer):
        return [value for entries in item.state.values() for value in entries.values() if value is not None]
    if not isinstance(item, nn.Module):
        return []
    return [
        tensor
        for part in item.modules()
        for key, tensor in (*part._parameters.items(), *part._buffers.items())
        if tensor is not None and key not in part._non_persistent_buffers_set
    ]


def _is_lazy_view(tensor: Tensor) -> bool:
    """Return whether the stored form of ``tensor`` is a copy of it."""
    return type(tensor) in {Tensor, nn.Parameter} and (tensor.is_conj() or tensor.is_neg())


def _make_stored_key(tensor: Tensor) -> TensorKey | None:
    try:
        stored_as, tensor = to_stored_form(tensor)
        return make_key(tensor, stored_as)
    except (RuntimeError, ValueError):  # no address; flattening refuses it
        return None
