"""What is tracked: from live objects to named tensors and plain data, and back.

Flattening walks each object's ``state_dict()``. Tensors get a name (``model/conv1.weight``,
``optimizer/state/0/exp_avg``) and leave a reference in what remains, which must be plain data. Names never
carry ``module.`` or ``_orig_mod.``: they are those of the model as its author wrote it, so a checkpoint
taken from a wrapped model loads into a bare one and the other way round. Tensors that share storage exactly
(tied weights) are stored once.

Three kinds of tensor: what data-parallel training keeps equal on every rank (parameters, optimizer state),
a module's buffers, and everything else. Only the first kind must agree between ranks; of the others the
job's value is that of one rank (see `policy/source.py`).

Tensors that a script keeps by itself: one, or a list, tuple or dict of them, tracked as they are.

A hand-made average of the weights, say: ``ema=shadow``, or ``ema={"shadow": shadow, "updates": count}``
where each is a tensor or holds tensors. What is tracked is the list or dict that was given: a tensor in it
may be changed in place, or replaced by one like it. Another list that takes its place is not seen.

Promise: a state is loaded into the very tensors that stand there, after their names, shapes and dtypes were
compared (`restoring.load`).

The order of parameters in optimizers, compared before anything is loaded.
"""

from __future__ import annotations

import hashlib
import json
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import xxhash
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim import Optimizer

from elastic_resume.checkpoint import json_codec
from elastic_resume.checkpoint.json_codec import TensorRef
from elastic_resume.errors import ConfigError, UntrackableError
from elastic_resume.state.tensor_buffer import NAME_BY_DTYPE, view_bytes


class TrackedTensors:
    """What was given, as an object with ``state_dict`` and ``load_state_dict``."""

    def __init__(self, name: str, container: Any) -> None:
        """``given`` is what `are_tensors` says yes to; ``name`` is what it is tracked as."""
        self._name, self._container = name, container

    def state_dict(self) -> dict[str, Tensor]:
        """Give the tensors that stand there now, by key or number.

        Raises:
            UntrackableError: something else has come to stand among them.

        """
        given = self._container
        if isinstance(given, Tensor):
            return {"value": given}
        items = given.items() if isinstance(given, dict) else enumerate(given)
        found = {str(key): value for key, value in items}
        for key, value in found.items():
            if not isinstance(value, Tensor):
                raise UntrackableError(
                    f"{self._name}/{key}: {type(value).__name__} stands among tracked tensors and cannot be "
                    "put back in place; keep it as a 0-d tensor, or track an object with state_dict()."
                )
        return found

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Copy into the tensors that stand there."""
        with torch.no_grad():
            for key, tensor in self.state_dict().items():
                tensor.copy_(state[key])


def is_tensor_container(item: Any) -> bool:
    """Whether ``item`` is a tensor or a list, tuple or dict that begins with one."""
    if isinstance(item, dict):
        return bool(item) and all(isinstance(value, Tensor) for value in item.values())
    if isinstance(item, (list, tuple)):
        return bool(item) and isinstance(item[0], Tensor)
    return isinstance(item, Tensor)


REPLICATED = "replicated"  # equal on every rank after every step
BUFFER = "buffer"  # a module's buffer: DDP takes rank 0's
SCRIPT_OWNED = "own"  # tensors of the script's own, and its averages: begin as rank 0's, as the weights do
OTHER = "other"
# An object of this name follows from the model. But it need not be equal: averages of BatchNorm's buffers,
# which many keep beside those of the weights, are each rank's own.
EMA_NAME = "ema"

COMPLEX_KINDS = {torch.complex64: "complex64", torch.complex128: "complex128"}
_MAX_DEPTH = 200

# By name: to import them takes as long as all of this package.
_PER_RANK_OPTIMIZERS = {
    "ZeroRedundancyOptimizer": "holds another part of the state on each rank, and a node's copy would not be "
    "whole. Use the optimizer inside of it (optimizer_class=) directly: under DDP every rank then holds all "
    "of its state, which has to fit.",
    "PostLocalSGDOptimizer": "lets the ranks' weights differ between two averagings, so that no rank's copy "
    "is the job's. Use the optimizer inside of it, with DDP's own all-reduce at each step.",
}

TensorKey = tuple[Any, ...]  # see `key_of`


@dataclass(frozen=True)
class Leaf:
    """One named tensor of the live state; ``tensor`` shares the object's storage.

    It is detached, or the object's own (see `tracking.Fixed`): copy it without grad.
    """

    name: str
    tensor: Tensor
    kind: str


@dataclass(frozen=True)
class FlatState:
    """The whole tracked state: tensors by name, and the rest as typed JSON that refers to them."""

    leaves: tuple[Leaf, ...]
    skeleton: Any

    def select_kinds(self, *kinds: str) -> list[Leaf]:
        """Return the leaves of the given kinds, in order."""
        return [leaf for leaf in self.leaves if leaf.kind in kinds]


def collect_objects(objects: Mapping[str, Any]) -> dict[str, Any]:
    """Give every tracked object one name: ``model={"g": G, "d": D}`` becomes ``model.g`` and ``model.d``.

    None stands for "not used". DDP, DataParallel and torch.compile wrappers are taken off.

    Raises:
        ConfigError: two objects under one name, an unusable name, or an object without state_dict.

    """
    tracked: dict[str, Any] = {}
    for name, item in _iter_named_objects(objects, ""):
        if item is None:
            continue
        if name in tracked:
            raise ConfigError(f"two objects are tracked under the name {name!r}; give each its own name.")
        if not name or "/" in name:
            raise ConfigError(f"{name!r} cannot name a tracked object: use letters, digits, dots and '_'.")
        tracked[name] = _make_trackable(name, item)
    return tracked


def _iter_named_objects(objects: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    """Give what dictionaries hold, dictionaries in them too, each under its full name."""
    for key, value in objects.items():
        name = f"{prefix}{key}"
        if type(value) is dict and not is_tensor_container(value):
            yield from _iter_named_objects(value, f"{name}.")
        else:
            yield name, value


def _make_trackable(name: str, item: Any) -> Any:
    """Give what is tracked for ``item``. Raises UntrackableError."""
    if is_tensor_container(item):
        return TrackedTensors(name, item)
    if not (callable(getattr(item, "state_dict", None)) and callable(getattr(item, "load_state_dict", None))):
        raise UntrackableError(
            f"{name}: {type_name(item)} has no state_dict() and load_state_dict(); "
            "give it both, or do not pass it to resume(). Tensors may be passed as they are, in a list or "
            "dict too; a number is best kept as a 0-d tensor."
        )
    names = {kind.__name__ for kind in type(item).__mro__}
    for kind, advice in _PER_RANK_OPTIMIZERS.items():
        if kind in names:
            raise UntrackableError(f"{name}: {type_name(item)} {advice}")
    return unwrap(item)


def unwrap(item: Any) -> Any:
    """Take DDP, DataParallel and torch.compile wrappers off a module."""
    return _list_wrappers(item)[-1]


def find_parallel_wrapper(model: nn.Module) -> nn.Module | None:
    """Find the DDP or DataParallel among a model's wrappers: torch.compile may be around it."""
    wrappers = _list_wrappers(model)
    return next((one for one in wrappers if isinstance(one, (DistributedDataParallel, DataParallel))), None)


def _list_wrappers(item: Any) -> list[Any]:
    """Give ``item`` and what it wraps, to the innermost."""
    found = [item]
    while isinstance(found[-1], nn.Module):
        outer = found[-1]
        if isinstance(outer, (DistributedDataParallel, DataParallel)):
            found.append(outer.module)
        elif isinstance(getattr(outer, "_orig_mod", None), nn.Module):
            found.append(outer._orig_mod)  # noqa: SLF001  the name torch.compile's state_dict shows to everybody
        else:
            break
    return found


def flatten(tracked: Mapping[str, Any]) -> FlatState:
    """Name every tensor of the tracked objects; check that all the rest is plain data.

    Raises:
        UntrackableError: something is neither; the text gives its path and type.

    """
    walk = TensorCollector()
    skeleton = {}
    for name, item in tracked.items():
        skeleton[name] = flatten_object(walk, name, item)
    return FlatState(tuple(walk.leaves), skeleton)


def flatten_object(collector: TensorCollector, name: str, item: Any) -> Any:
    """Ask one tracked object for its state: tensors go into ``walk``, the rest comes back as typed JSON."""
    if isinstance(item, nn.Module):
        plain = _flatten_module(collector, name, item)
    else:
        followed = (
            SCRIPT_OWNED
            if isinstance(item, TrackedTensors) or name.split(".", maxsplit=1)[0] == EMA_NAME
            else OTHER
        )
        plain = collector.replace_tensors(
            item.state_dict(), name, REPLICATED if isinstance(item, Optimizer) else followed
        )
    return json_codec.encode(plain, name)


def digest_leaves(leaves: Iterable[Leaf]) -> dict[str, str]:
    """Digest (xxh3-128) of each leaf's dtype, shape and bytes."""
    return {leaf.name: _digest_tensor(leaf.tensor) for leaf in leaves}


def combine_digests(digests: Mapping[str, Any]) -> str:
    """One digest of many values that JSON can say."""
    return hashlib.sha256(json.dumps(digests, sort_keys=True).encode()).hexdigest()


def _digest_tensor(tensor: Tensor) -> str:
    here = tensor.cpu().contiguous()
    digest = xxhash.xxh3_128(f"{tensor.dtype} {tuple(tensor.shape)} ".encode())
    if here.numel():
        digest.update(view_bytes(here))
    return digest.hexdigest()


class TensorCollector:
    """Replaces tensors by references while it collects them."""

    def __init__(self, find_known_name: Callable[[TensorKey], str | None] | None = None) -> None:
        """``known`` gives the name of a tensor that another walk has collected, by its `key_of`."""
        self.leaves: list[Leaf] = []
        self._used_names: set[str] = set()
        self.name_by_key: dict[TensorKey, str] = {}
        self._find_known_name = find_known_name

    def replace_tensors(self, value: Any, path: str, kind: str, depth: int = 0) -> Any:
        """Give ``value`` with references in the place of tensors."""
        if depth > _MAX_DEPTH:
            raise UntrackableError(f"{path}: nested deeper than {_MAX_DEPTH} levels, or contains itself.")
        if isinstance(value, Tensor):
            return self.add_tensor(value, path, kind)
        if type(value).__module__ == "numpy":
            return self._add_numpy(value, path, kind)
        if isinstance(value, dict):
            items = {k: self.replace_tensors(v, f"{path}/{k}", kind, depth + 1) for k, v in value.items()}
            return items if type(value) is dict else _rebuild_dict(value, items)
        if type(value) in {list, tuple}:
            return type(value)(
                self.replace_tensors(v, f"{path}/{i}", kind, depth + 1) for i, v in enumerate(value)
            )
        if type(value) is deque:
            return deque(self.replace_tensors(list(value), path, kind, depth), value.maxlen)
        return value

    def add_tensor(self, tensor: Tensor, path: str, kind: str) -> TensorRef:
        """Collect ``tensor`` under a name made from ``path``; tied ones share the first one's."""
        _check_storable(tensor, path)
        stored_as, tensor = to_stored_form(tensor)
        key = make_key(tensor, stored_as)
        if tensor.numel():
            name = self.name_by_key.get(key) or (
                self._find_known_name(key) if self._find_known_name else None
            )
            if name is not None:
                return TensorRef(name, stored_as)
        name = path
        while name in self._used_names:  # keys 1 and "1" of one dict print alike
            name += "~"
        self._used_names.add(name)
        self.name_by_key[key] = name
        self.leaves.append(Leaf(name, tensor, kind))
        return TensorRef(name, stored_as)

    def _add_numpy(self, value: Any, path: str, kind: str) -> Any:
        if not hasattr(value, "dtype") or not hasattr(value, "shape") or value.dtype.kind not in "biuf":
            return value  # refused by typed.encode, with its path and type
        scalar = type(value).__name__ != "ndarray"
        tensor = torch.tensor(value) if scalar else torch.from_numpy(value.copy())
        reference = self.add_tensor(tensor, path, kind)
        return TensorRef(reference.name, "numpy-scalar" if scalar else "numpy")


def to_stored_form(tensor: Tensor) -> tuple[str, Tensor]:
    """Say how a tensor is stored, and give it so: detached, complex numbers as pairs, no lazy conj or neg."""
    stored_as, tensor = "tensor", tensor.detach()
    if tensor.dtype in COMPLEX_KINDS:
        stored_as, tensor = COMPLEX_KINDS[tensor.dtype], torch.view_as_real(tensor.resolve_conj())
    return stored_as, tensor.resolve_neg()


def make_key(tensor: Tensor, stored_as: str) -> TensorKey:
    """Give what tied tensors share: the same memory, seen in the same way."""
    return (
        tensor.device,
        tensor.data_ptr(),
        tuple(tensor.shape),
        tensor.stride(),
        tensor.dtype,
        stored_as,
    )


def _rebuild_dict(original: dict[Any, Any], items: dict[Any, Any]) -> Any:
    """An OrderedDict or Counter stays one; what typed JSON does not know is refused there, by its type."""
    kind = type(original)
    if kind.__module__ == "collections" and kind.__name__ in {"OrderedDict", "Counter"}:
        return kind(items)
    return original


def _check_storable(tensor: Tensor, path: str) -> None:
    why = ""
    if nn.parameter.is_lazy(tensor):
        why = "is lazy and has no shape yet: run one forward pass before resume()"
    elif tensor.is_meta:
        why = "is on the meta device and holds no data: materialise it before resume()"
    elif tensor.layout is not torch.strided:
        why = f"has layout {tensor.layout}; store it dense, or leave it out of state_dict()"
    elif tensor.is_quantized or (tensor.dtype not in NAME_BY_DTYPE and tensor.dtype not in COMPLEX_KINDS):
        why = f"has dtype {tensor.dtype}, which cannot be stored; dequantise or convert it in state_dict()"
    elif type(tensor) not in {Tensor, nn.Parameter, nn.Buffer}:
        why = (
            f"is a {type_name(tensor)}: only plain tensors that every rank holds whole are tracked "
            "(DDP, not FSDP or tensor parallelism)"
        )
    if why:
        raise UntrackableError(f"{path}: this tensor {why}.")


def _flatten_module(collector: TensorCollector, name: str, module: nn.Module) -> dict[str, Any]:
    """Give a module's state_dict with references in the place of tensors."""
    parameters = {key for key, _ in module.named_parameters(remove_duplicate=False)}
    plain = {}
    canonical = make_name_canonicalizer(module)
    for key, value in module.state_dict().items():
        path = f"{name}/{canonical(key)}"
        kind = REPLICATED if key in parameters else BUFFER
        plain[canonical(key)] = collector.replace_tensors(value, path, kind)
        if isinstance(value, Tensor) and _is_expanded(value):
            raise UntrackableError(
                f"{path}: several elements of this tensor are one in memory (expand()), so that nothing can "
                "be loaded into it: make it contiguous, tensor.expand(...).clone()."
            )
    return plain


def _is_expanded(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and any(
        size > 1 and not stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )


def make_name_canonicalizer(module: nn.Module) -> Callable[[str], str]:
    """Give a function from a key of ``module.state_dict()`` to its name without wrappers inside the model."""
    drop = set()
    for path, part in module.named_modules():
        prefix = f"{path}." if path else ""
        if isinstance(part, (DistributedDataParallel, DataParallel)):
            drop.add(f"{prefix}module.")
        elif "_orig_mod" in dict(part.named_children()):
            drop.add(f"{prefix}_orig_mod.")

    def canonical(key: str) -> str:
        for prefix in sorted(drop, key=len, reverse=True):  # inner ones first: outer prefixes stay valid
            if key.startswith(prefix):
                wrapper = prefix.rsplit(".", 2)[0] + "." if prefix.count(".") > 1 else ""
                key = wrapper + key[len(prefix) :]
        return key

    return canonical if drop else lambda key: key


def type_name(item: Any) -> str:
    """Name the type of an object for people."""
    return f"{type(item).__module__}.{type(item).__qualname__}".removeprefix("builtins.")


class ParameterOrder:
    """Which parameter each optimizer means by which number.

    An optimizer's own state knows numbers only: built over the same parameters in another order it would take
    the momentum of one for another's, in silence where their shapes agree.
    """

    def __init__(self, tracked: Mapping[str, Any]) -> None:
        """Note the order in each optimizer of ``tracked``, by the names that the tracked models give."""
        names: dict[int, str] = {}
        for name, item in tracked.items():
            if isinstance(item, nn.Module):
                canonical = make_name_canonicalizer(item)  # walks the model: once, not for each parameter
                names |= {id(p): f"{name}/{canonical(key)}" for key, p in item.named_parameters()}
        self._optimizers = {name: item for name, item in tracked.items() if isinstance(item, Optimizer)}
        self._name_by_parameter_id = names

    @property
    def optimizers(self) -> list[Optimizer]:
        """The optimizers whose order this is: while theirs stays the same, so does `state_dict`."""
        return list(self._optimizers.values())

    def state_dict(self) -> dict[str, Any]:
        """Give, for each optimizer and group, the names of its parameters; "" for one that is not tracked."""
        return {
            name: [
                [self._name_by_parameter_id.get(id(p), "") for p in group["params"]]
                for group in optimizer.param_groups
            ]
            for name, optimizer in self._optimizers.items()
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Nothing to take: `differences` has compared."""

    def differences(self, stored: Mapping[str, Any]) -> list[str]:
        """List the optimizers whose groups or parameters are not those of the checkpoint."""
        problems = []
        for name, groups in self.state_dict().items():
            kept = stored.get(name, groups)
            sizes, were = [len(group) for group in groups], [len(group) for group in kept]
            if sizes != were:
                problems.append(f"{name}: groups of {sizes} parameters now, of {were} in the checkpoint")
                continue
            pairs = [(a, b) for g, k in zip(groups, kept, strict=True) for a, b in zip(g, k, strict=True)]
            moved = [(a, b) for a, b in pairs if a != b]
            if moved:
                here, there = moved[0]
                problems.append(f"{name}: {here or 'a parameter'} stands where the checkpoint has {there!r}")
        return problems
