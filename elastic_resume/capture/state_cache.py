"""Cache the names and tensors of the tracked state, so that a snapshot need not call every state_dict().

Between two snapshots usually only values change. So names, tensors and the JSON around them are found once
(`CachedState`). The cache is valid while every entry of every dict that a state_dict() reads is the same
object. Every parameter and buffer must keep its address, dtype and shape (``p.data = x`` exchanges these),
and every trained parameter its requires_grad. Complex tensors, and tensors that share an address, must keep
their strides. After any other change the whole state is flattened again.

The cache holds the objects' own tensors, so no old tensor is ever copied. If an optimizer's state changes
its dtype or shape in place, the copy fails (`copy_engine.copy_tensors`) and the next snapshot flattens
again. Objects with a state_dict() of their own or with state_dict hooks, and the hyperparameters of
optimizers, are read every time.

Invariant: a `StateView` equals the result of `state_dict.flatten` at that moment. Its tensors have the same
names, dtypes, shapes, kinds and ties; `slot_memory.merge_state` of its two pieces of JSON gives the same
state. Errors are the same too.

Changes that the cache does not detect:

- an exchanged ``_parameters`` dict;
- a state_dict method that was assigned to an instance after it was flattened;
- new strides of a tensor that shares its address with no other. Its values are copied correctly, but an
  expanded tensor is not refused;
- a new name of a module's last entry, without any other change.

Use it in the training thread, at a step boundary.
"""

from __future__ import annotations

import functools
import gc
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain, islice
from operator import attrgetter, eq, is_
from typing import Any, ParamSpec, TypeVar

from torch import Tensor, nn
from torch.optim import Optimizer

from elastic_resume.capture.copy_barrier import OverlapRule
from elastic_resume.capture.copy_engine import get_format
from elastic_resume.checkpoint import json_codec
from elastic_resume.checkpoint.shards import tensor_name
from elastic_resume.state.bucket_order import BucketOrder
from elastic_resume.state.dtensors import is_dtensor, to_local
from elastic_resume.state.parameters import ParameterOrder
from elastic_resume.state.state_dict import (
    REPLICATED,
    Leaf,
    TensorCollector,
    TensorKey,
    flatten_object,
    make_key,
)

P = ParamSpec("P")
T = TypeVar("T")

_MODULE_METHODS = (
    "state_dict", "_save_to_state_dict", "get_extra_state",
    "named_parameters", "named_modules", "_named_members", "named_children",
)  # fmt: skip
# A module's own dicts are what state_dict() reads; no public way is as fast.
_get_module_dicts = attrgetter("_parameters", "_modules", "_state_dict_hooks", "_state_dict_pre_hooks")
_get_module_hooks = attrgetter("_state_dict_hooks", "_state_dict_pre_hooks")
_get_parameters = attrgetter("_parameters")
_get_buffers = attrgetter("_buffers")
_get_excluded = attrgetter("_non_persistent_buffers_set")
_get_optimizer_hooks = attrgetter("_optimizer_state_dict_pre_hooks", "_optimizer_state_dict_post_hooks")
_FSDP_HOOK = "FSDPParamGroup._register_state_dict_hooks.<locals>.to_sharded_hook"  # not public
_STATIC_GROUP_KEYS = {"params", "param_names"}  # entries of a param group that follow from its parameters
_get_trained_spec = attrgetter("dtype", "shape", "requires_grad")


@dataclass(frozen=True)
class CachedState:
    """The part of a state that changes in values only. Any other change makes a new one."""

    version: int  # grows with each new cached state
    leaves: tuple[Leaf, ...]  # the objects' own tensors, not detached
    static_structure: dict[str, Any]  # tracked name -> typed JSON around the leaves
    may_overlap: tuple[bool, ...]  # one flag for each leaf; see OverlapRule


@dataclass(frozen=True)
class StateView:
    """The tracked state at one moment. ``cached`` stays the same object while only values change."""

    cached: CachedState
    uncached_leaves: tuple[Leaf, ...]  # copied at once, because the next state may have others
    dynamic_structure: dict[str, Any]  # slots.merge_state lays it over cached.static_structure

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
        self._cache = _StateCache(self._tracked, self._frozen_names, self._version)
        return self._cache.first_view


class _StaleCacheError(Exception):
    """The state that was read now does not fit the cached state."""


class _Fingerprint:
    """Everything that decides which tensors the cacheable objects hold, under which names.

    A comparison takes a fraction of the time of flattening: each list is compared in C.
    """

    def __init__(self, items: Iterable[Any], trained_ids: set[int]) -> None:
        """Read ``items``. ``trained_ids`` are the parameters whose requires_grad must not change."""
        self._optimizers: list[Optimizer] = []
        self._grouped_optimizers: list[Optimizer] = []  # Their param groups must not change.
        self._bucket_orders: list[BucketOrder] = []
        self._partial_modules: list[nn.Module] = []  # with buffers that a forward pass may replace
        self._dtensors: list[Any] = []  # FSDP may replace their local tensors.
        dicts: list[Any] = []
        tensors: list[Tensor] = []  # parameters, buffers, and complex optimizer state
        excluded_names = []
        for item in items:
            if isinstance(item, Optimizer):
                self._optimizers.append(item)
                self._grouped_optimizers.append(item)
                dicts += [*item.state.values(), *_get_optimizer_hooks(item)]
                self._dtensors += filter(is_dtensor, _list_tensors(item))
                tensors += filter(Tensor.is_complex, map(to_local, _list_tensors(item)))
            elif isinstance(item, nn.Module):
                self._dtensors += filter(is_dtensor, _list_tensors(item))
                tensors += map(to_local, _list_tensors(item))
                for part in item.modules():
                    dicts += _get_module_dicts(part)
                    excluded_names.append(_get_excluded(part))
                    if _get_excluded(part):
                        self._partial_modules.append(part)
                    else:
                        dicts.append(_get_buffers(part))
            elif isinstance(item, ParameterOrder):
                self._grouped_optimizers += item.optimizers
            elif isinstance(item, BucketOrder):
                self._bucket_orders.append(item)
        # Most modules have no submodules, no buffers and no hooks. One call checks that all these stay empty.
        self._empty = [item for item in chain(dicts, excluded_names) if not item]
        self._dicts = [item for item in dicts if item]
        self._trained_tensors = [item for item in tensors if id(item) in trained_ids]
        self._other_tensors = [item for item in tensors if id(item) not in trained_ids]
        counts = Counter(map(Tensor.data_ptr, tensors))
        # A complex tensor's leaf is a view of it, with the strides of when it was flattened.
        self._strided_tensors = [t for t in tensors if counts[t.data_ptr()] > 1 or t.is_complex()]
        self._structure = self._describe_structure()
        self._entries = list(self._iter_entries())
        self._memory = share_equal(self._iter_memory())

    def is_unchanged(self) -> bool:
        """Return whether flattening would still give the same tensors under the same names."""
        try:
            return (
                self._describe_structure() == self._structure
                and not any(self._empty)
                and all(map(is_, self._iter_entries(), self._entries))
                and all(map(eq, self._iter_memory(), self._memory))
            )
        except (AttributeError, KeyError, TypeError, RuntimeError):  # an object of another type took a place
            return False

    def _collect_dicts(self) -> list[dict[Any, Any]]:
        """Return all dicts that must keep their entries. An optimizer may exchange its state's dict."""
        return [*self._dicts, *(optimizer.state for optimizer in self._optimizers)]

    def _describe_structure(self) -> tuple[list[Any], ...]:
        return (
            list(map(len, self._collect_dicts())),
            list(map(_identify_persistent_buffers, self._partial_modules)),
            list(map(_describe_groups, self._grouped_optimizers)),
            [order.revision for order in self._bucket_orders],
            [(tensor.stride(), tensor.is_conj()) for tensor in self._strided_tensors],
            [(id(to_local(tensor)), tensor.requires_grad) for tensor in self._dtensors],
        )

    def _iter_entries(self) -> Iterator[Any]:
        return chain.from_iterable(map(dict.values, self._collect_dicts()))

    def _iter_memory(self) -> Iterator[Any]:
        """Yield each tensor's address, then its spec: one pass loads each object into the cache."""
        pairs = (
            zip(map(Tensor.data_ptr, tensors), map(get_spec, tensors), strict=True)
            for tensors, get_spec in (
                (self._trained_tensors, _get_trained_spec), (self._other_tensors, get_format),
            )
        )  # fmt: skip
        return chain.from_iterable(chain.from_iterable(pairs))


class _StateCache:
    """A `CachedState`, and the reading of what is not cached."""

    def __init__(self, tracked: dict[str, Any], frozen_names: set[str], version: int) -> None:
        self._is_reusable = True
        self._cached_names: dict[TensorKey, tuple[int, str]] = {}  # (index of the object, leaf name)
        self._uncached_collector = TensorCollector(self._find_cached_name)
        self._uncached_reads: list[tuple[int, str, Callable[[TensorCollector], Any]]] = []
        self._current_index = 0  # index of the tracked object that is being read
        cacheable = {name: item for name, item in tracked.items() if _is_cacheable(item)}
        cached_collector, cached_leaves = TensorCollector(self._find_uncached_name), list[Leaf]()
        static_structure: dict[str, Any] = {}
        dynamic_structure: dict[str, Any] = {}
        for index, (name, item) in enumerate(tracked.items()):
            self._current_index, static_structure[name] = index, None
            if name in cacheable:
                static_structure[name] = self._add_cached(cached_collector, cached_leaves, name, item)
            if name not in cacheable or isinstance(item, Optimizer):
                flatten = _flatten_groups if name in cacheable else flatten_object
                read = functools.partial(flatten, name=name, item=item)
                self._uncached_reads.append((index, name, read))
                dynamic_structure[name] = read(self._uncached_collector)
        optimizers = [item for item in cacheable.values() if isinstance(item, Optimizer)]
        overlap_rule = OverlapRule(tracked, optimizers, frozen_names)
        may_overlap = tuple(overlap_rule.may_overlap(tensor_name(leaf.name)) for leaf in cached_leaves)
        self._cached = CachedState(version, tuple(cached_leaves), static_structure, may_overlap)
        self.first_view = StateView(self._cached, tuple(self._uncached_collector.leaves), dynamic_structure)
        trained_ids = set(map(id, overlap_rule.trained_parameters))
        self._fingerprint = _Fingerprint(cacheable.values(), trained_ids)

    def is_valid(self) -> bool:
        """Return whether flattening would still give the same tensors under the same names."""
        return self._is_reusable and self._fingerprint.is_unchanged()

    def read_uncached(self) -> StateView:
        """Read the state that is not cached.

        Raises:
            _StaleCacheError: it shares memory with the cached state in a way that changes names.

        """
        collector = TensorCollector(self._find_cached_name)
        dynamic_structure: dict[str, Any] = {}
        for index, name, read in self._uncached_reads:
            self._current_index = index
            dynamic_structure[name] = read(collector)
        return StateView(self._cached, tuple(collector.leaves), dynamic_structure)

    def _find_cached_name(self, key: TensorKey) -> str | None:
        """Return the name of a cached tensor. The first of several tied tensors gives the name."""
        index, name = self._cached_names.get(key, (0, None))
        if index > self._current_index:
            raise _StaleCacheError
        return name

    def _find_uncached_name(self, key: TensorKey) -> str | None:
        """Return the name that an uncached object gave a tensor. The next read must flatten again."""
        name = self._uncached_collector.name_by_key.get(key)
        self._is_reusable = self._is_reusable and name is None
        return name

    def _add_cached(self, collector: TensorCollector, leaves: list[Leaf], name: str, item: Any) -> Any:
        """Collect a cacheable object; return the static part of its structure."""
        leaf_count, key_count = len(collector.leaves), len(collector.name_by_key)
        flatten = _flatten_static_part if isinstance(item, Optimizer) else flatten_object
        encoded = flatten(collector, name, item)
        for key, leaf_name in islice(collector.name_by_key.items(), key_count, None):
            self._cached_names[key] = (self._current_index, leaf_name)
        # Keep the object's own tensors, so that ``p.data = x`` frees the old memory.
        originals = {make_key(tensor, "tensor"): tensor for tensor in map(to_local, _list_tensors(item))}
        for leaf in collector.leaves[leaf_count:]:
            tensor = originals.get(make_key(leaf.tensor, "tensor"), leaf.tensor)
            leaves.append(replace(leaf, tensor=tensor))
        return encoded


def share_equal(values: Iterable[T]) -> list[T]:
    """Return the values as a list in which equal values are one object: a comparison reads less memory."""
    known: dict[T, T] = {}
    return [known.setdefault(value, value) for value in values]


def _identify_persistent_buffers(module: nn.Module) -> dict[str, int]:
    """Return the ids of a module's persistent buffers: a forward pass may replace the others."""
    excluded = _get_excluded(module)
    return {key: id(value) for key, value in _get_buffers(module).items() if key not in excluded}


def _describe_groups(optimizer: Optimizer) -> list[tuple[list[str], list[int], list[str]]]:
    """Return the keys of each param group, the ids of its parameters, and their names."""
    return [
        (list(group), list(map(id, group["params"])), list(group.get("param_names", ())))
        for group in optimizer.param_groups
    ]


# ---- the hyperparameters of optimizers, which schedulers and scripts change --------------------------------


def _flatten_groups(collector: TensorCollector, name: str, item: Optimizer) -> dict[str, Any]:
    """Encode an optimizer's hyperparameters."""
    groups = [{k: v for k, v in group.items() if k not in _STATIC_GROUP_KEYS} for group in item.param_groups]
    plain = collector.replace_tensors(groups, f"{name}/param_groups", REPLICATED)
    return {"param_groups": json_codec.encode(plain, f"{name}['param_groups']")}


def _flatten_static_part(collector: TensorCollector, name: str, optimizer: Optimizer) -> Any:
    """Encode an optimizer's state without the values of its hyperparameters."""
    state = optimizer.state_dict()
    groups = state["param_groups"]
    state["param_groups"] = [
        {k: v if k in _STATIC_GROUP_KEYS else None for k, v in g.items()} for g in groups
    ]
    return json_codec.encode(collector.replace_tensors(state, name, REPLICATED), name)


# ---- which objects can be cached ---------------------------------------------------------------------------


def _is_cacheable(item: Any) -> bool:
    if isinstance(item, (nn.Module, Optimizer)):
        is_plain = _is_plain_module(item) if isinstance(item, nn.Module) else _is_plain_optimizer(item)
        return is_plain and not any(map(_is_lazy_view, _list_tensors(item)))
    return type(item) in {ParameterOrder, BucketOrder}


def _is_plain_module(module: nn.Module) -> bool:
    """Return whether state_dict() is torch's own all the way down, so that the modules' dicts decide it."""
    parts, methods = list(module.modules()), set(_MODULE_METHODS)
    if any(_has_own_hooks(part) or methods & part.__dict__.keys() for part in parts):
        return False
    return all(getattr(kind, m) is getattr(nn.Module, m) for kind in set(map(type, parts)) for m in methods)


def _has_own_hooks(module: nn.Module) -> bool:
    """Return whether hooks of the script change what state_dict() returns. FSDP's only reshards first."""
    return any(
        getattr(hook, "__qualname__", "") != _FSDP_HOOK
        for hooks in _get_module_hooks(module)
        for hook in hooks.values()
    )


def _is_plain_optimizer(optimizer: Optimizer) -> bool:
    """Return whether state_dict() is torch's own, and the state of each parameter holds tensors only."""
    known = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    return (
        type(optimizer).state_dict is Optimizer.state_dict
        and "state_dict" not in optimizer.__dict__
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


def _list_tensors(item: Any) -> list[Tensor]:
    """List the tensors that a plain module or optimizer stores."""
    if isinstance(item, Optimizer):
        return [value for entries in item.state.values() for value in entries.values() if value is not None]
    if not isinstance(item, nn.Module):
        return []
    return [
        tensor
        for part in item.modules()
        for key, tensor in (*_get_parameters(part).items(), *_get_buffers(part).items())
        if tensor is not None and key not in _get_excluded(part)
    ]


def _is_lazy_view(tensor: Tensor) -> bool:
    """Return whether the stored form of ``tensor`` is a copy of it."""
    return type(tensor) in {Tensor, nn.Parameter} and (tensor.is_conj() or tensor.is_neg())
