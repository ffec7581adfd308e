"""Flatten the tracked objects to named tensors and plain data.

Flattening reads each object's ``state_dict()``. Each tensor gets a name (``model/conv1.weight``,
``optimizer/state/0/exp_avg``) and is replaced by a reference; the rest must be plain data. Names never
contain ``module.`` or ``_orig_mod.``, so a checkpoint of a wrapped model loads into a bare one and the
other way round. Tied tensors, which share their memory exactly, are stored once.

A tensor has one of three kinds: data that data-parallel training keeps equal on every rank (parameters,
optimizer state), buffers of modules, and everything else. Only the first kind must agree between ranks;
for the others the job uses the values of one rank.
"""

from __future__ import annotations

import ctypes
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
from elastic_resume.checkpoint.layout import Layout, TensorSpec
from elastic_resume.checkpoint.shards import Shards, shard_index, tensor_name
from elastic_resume.errors import ConfigError, UntrackableError
from elastic_resume.state import dtensors
from elastic_resume.state.generators import wrap_generator

# safetensors' name of each dtype. Complex tensors are stored as pairs of reals.
NAME_BY_DTYPE: dict[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.uint16: "U16",
    torch.uint32: "U32",
    torch.uint64: "U64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
DTYPE_BY_NAME = {name: dtype for dtype, name in NAME_BY_DTYPE.items()}


def make_spec(name: str, tensor: Tensor) -> TensorSpec:
    """Describe ``tensor`` under ``name``."""
    return TensorSpec(name, NAME_BY_DTYPE[tensor.dtype], tuple(tensor.shape))


def view_bytes(tensor: Tensor) -> memoryview:
    """Return the bytes of a contiguous CPU tensor, without a copy and without numpy.

    The tensor must outlive the view.
    """
    size = tensor.numel() * tensor.element_size()
    return memoryview((ctypes.c_char * size).from_address(tensor.data_ptr())).cast("B")


class TensorBuffer:
    """Views a block of host memory as named tensors, without copying.

    The block is byte for byte the safetensors file of a checkpoint. The same block is filled by a save,
    written to disk, read and verified by a restore, and sent to ranks that lack it.
    """

    def __init__(self, layout: Layout, memory: memoryview) -> None:
        """Take ``memory`` of ``layout.total_bytes`` bytes, header included."""
        self.layout = layout
        self.memory = memory

    def tensor(self, name: str) -> Tensor:
        """Return the tensor ``name`` as a view of the memory.

        Raises:
            KeyError: no such tensor.

        """
        extent = self.layout.extents[name]
        dtype = DTYPE_BY_NAME[extent.dtype]
        if extent.start == extent.stop:
            return torch.empty(extent.shape, dtype=dtype)
        count = (extent.stop - extent.start) // dtype.itemsize
        flat = torch.frombuffer(self.memory, dtype=dtype, count=count, offset=extent.start)
        return flat.view(extent.shape)

    def tensor_bytes(self, name: str) -> memoryview:
        """Return the bytes of the tensor ``name``."""
        extent = self.layout.extents[name]
        return self.memory[extent.start : extent.stop]


class TrackedTensors:
    """Tensors that a script keeps itself, with ``state_dict`` and ``load_state_dict``.

    An average of the weights, say: ``ema=shadow`` or ``ema={"shadow": shadow, "updates": count}``. Tensors in
    the given container may be changed in place or replaced; another container is not noticed.
    """

    def __init__(self, name: str, container: Any) -> None:
        """Track ``container``, for which `is_tensor_container` is true, as ``name``."""
        self._name, self._container = name, container

    def state_dict(self) -> dict[str, Tensor]:
        """Return the current tensors by key or index. Raise UntrackableError for another value."""
        container = self._container
        if isinstance(container, Tensor):
            return {"value": container}
        items = container.items() if isinstance(container, dict) else enumerate(container)
        tensors = {str(key): value for key, value in items}
        for key, value in tensors.items():
            if not isinstance(value, Tensor):
                raise UntrackableError(
                    f"{self._name}/{key}: a {type(value).__name__} among tracked tensors cannot be loaded in "
                    "place. Keep it as a 0-d tensor, or track an object with state_dict()."
                )
        return tensors

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Copy ``state`` into the existing tensors."""
        with torch.no_grad():
            for key, tensor in self.state_dict().items():
                tensor.copy_(state[key])


def is_tensor_container(item: Any) -> bool:
    """Return whether ``item`` is a tensor, a dict of tensors, or a list or tuple that begins with one."""
    if isinstance(item, dict):
        return bool(item) and all(isinstance(value, Tensor) for value in item.values())
    if isinstance(item, (list, tuple)):
        return bool(item) and isinstance(item[0], Tensor)
    return isinstance(item, Tensor)


REPLICATED = "replicated"  # equal on every rank after every step
BUFFER = "buffer"  # a module's buffer; rank 0's at each step boundary
SCRIPT_OWNED = "own"  # the script's own tensors and averages; start with rank 0's values, as the weights do
OTHER = "other"
# An object of this name is an average of the model.
EMA_NAME = "ema"
RESERVED_PREFIX = "elastic_resume."  # of the objects that a run tracks itself

COMPLEX_KINDS = {torch.complex64: "complex64", torch.complex128: "complex128"}
_MAX_DEPTH = 200

# Known by name: importing them takes as long as importing all of this package.
_PER_RANK_OPTIMIZERS = {
    "ZeroRedundancyOptimizer": "holds another part of the state on each rank, so a node's snapshot would not "
    "be whole. Use the optimizer inside of it (optimizer_class=) directly: under DDP every rank then holds "
    "all of its state, which has to fit into its memory.",
    "PostLocalSGDOptimizer": "lets the ranks' weights differ between two averagings, so no rank holds the "
    "state of the job. Use the optimizer inside of it, with DDP's own all-reduce at each step.",
}

TensorKey = tuple[Any, ...]  # see make_key


@dataclass(frozen=True)
class Leaf:
    """One named tensor of the live state; ``tensor`` shares the object's storage.

    It is detached, or the object's own (`state_cache.CachedState`): copy it without grad. For a DTensor it is
    this rank's shard; ``name`` is that of the shard, and ``shards`` tells how the whole tensor is divided.
    """

    name: str  # of the entry in the image
    tensor: Tensor
    kind: str
    shards: Shards | None = None

    @property
    def is_divided(self) -> bool:
        """Whether other ranks of the node hold other parts of the tensor."""
        return self.shards is not None and self.shards.count > 1

    def list_specs(self) -> list[TensorSpec]:
        """Describe the tensor's entries in the image, those of the other ranks' shards too."""
        if self.shards is None:
            return [make_spec(self.name, self.tensor)]
        dtype, shape = NAME_BY_DTYPE[self.tensor.dtype], tuple(self.tensor.shape)
        names = self.shards.names(tensor_name(self.name))
        return [TensorSpec(name, dtype, self.shards.shape(i, shape)) for i, name in enumerate(names)]


@dataclass(frozen=True)
class FlatState:
    """The whole tracked state: tensors by name, and the rest as typed JSON that refers to them."""

    leaves: tuple[Leaf, ...]
    structure: Any

    def select_kinds(self, *kinds: str) -> list[Leaf]:
        """Return the leaves of the given kinds, in order."""
        return [leaf for leaf in self.leaves if leaf.kind in kinds]


def collect_objects(objects: Mapping[str, Any]) -> dict[str, Any]:
    """Return every tracked object by name: ``model={"g": G, "d": D}`` becomes ``model.g`` and ``model.d``.

    None is left out. DDP, DataParallel and torch.compile wrappers are removed.

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
        if name.startswith(RESERVED_PREFIX):
            raise ConfigError(f"{name!r} cannot name a tracked object: {RESERVED_PREFIX}* is reserved.")
        tracked[name] = _make_trackable(name, item)
    return tracked


def _iter_named_objects(objects: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    """Yield the values of nested dicts with their full names."""
    for key, value in objects.items():
        name = f"{prefix}{key}"
        if type(value) is dict and not is_tensor_container(value):
            yield from _iter_named_objects(value, f"{name}.")
        else:
            yield name, value


def _make_trackable(name: str, item: Any) -> Any:
    """Return the object to track for ``item``. Raise UntrackableError if there is none."""
    if is_tensor_container(item):
        return TrackedTensors(name, item)
    item = wrap_generator(name, item)
    if isinstance(item, type) or not (
        callable(getattr(item, "state_dict", None)) and callable(getattr(item, "load_state_dict", None))
    ):
        raise UntrackableError(
            f"{name}: {type_name(item)} has no state_dict() and load_state_dict(); "
            "give it both, or do not pass it to resume(). Tensors may be passed as they are, also in a list "
            "or dict; keep a number as a 0-d tensor."
        )
    names = {kind.__name__ for kind in type(item).__mro__}
    for kind, advice in _PER_RANK_OPTIMIZERS.items():
        if kind in names:
            raise UntrackableError(f"{name}: {type_name(item)} {advice}")
    return unwrap(item)


# What libraries put around a module, an optimizer or a scheduler: class -> attribute with the inner object.
LIBRARY_WRAPPERS = {
    "accelerate.optimizer.AcceleratedOptimizer": "optimizer",
    "accelerate.scheduler.AcceleratedScheduler": "scheduler",
    "lightning.fabric.wrappers._FabricModule": "_forward_module",
    "lightning.fabric.wrappers._FabricOptimizer": "optimizer",
    "lightning.pytorch.core.optimizer.LightningOptimizer": "optimizer",
}


def unwrap(item: Any) -> Any:
    """Remove DDP, DataParallel, torch.compile and the wrappers of libraries (`LIBRARY_WRAPPERS`)."""
    return _list_wrappers(item)[-1]


def find_parallel_wrapper(model: Any) -> nn.Module | None:
    """Return the DDP or DataParallel wrapper of a model. torch.compile may be around it."""
    wrappers = (w for w in _list_wrappers(model) if isinstance(w, (DistributedDataParallel, DataParallel)))
    return next(wrappers, None)


def find_ddp_models(objects: Mapping[str, Any]) -> list[DistributedDataParallel]:
    """Return the DDP wrappers among the given objects."""
    found = [find_parallel_wrapper(item) for _, item in _iter_named_objects(objects, "")]
    return [item for item in found if isinstance(item, DistributedDataParallel)]


def find_gpus(tracked: Mapping[str, Any]) -> set[int]:
    """Return the indices of the GPUs with parameters of tracked models."""
    models = [item for item in tracked.values() if isinstance(item, nn.Module)]
    return {p.device.index for model in models for p in model.parameters() if p.is_cuda}


def find_gpu_uuid(tracked: Mapping[str, Any]) -> str | None:
    """Return the UUID of the first of these GPUs, as nvidia-smi prints it; None without one."""
    for index in sorted(find_gpus(tracked)):
        uuid = getattr(torch.cuda.get_device_properties(index), "uuid", None)  # older ROCm builds have none
        return f"GPU-{uuid}" if uuid else None
    return None


def _list_wrappers(item: Any) -> list[Any]:
    """List ``item`` and what it wraps, innermost last."""
    layers = [item]
    while (inner := _find_wrapped(layers[-1])) is not None:
        layers.append(inner)
    return layers


def _find_wrapped(outer: Any) -> Any:
    """Return what ``outer`` wraps, or None."""
    if isinstance(outer, (DistributedDataParallel, DataParallel)):
        return outer.module
    if isinstance(outer, nn.Module) and isinstance(getattr(outer, "_orig_mod", None), nn.Module):
        return outer._orig_mod  # noqa: SLF001  torch.compile's state_dict() shows this name
    for kind in type(outer).__mro__:
        name = f"{kind.__module__}.{kind.__qualname__}".replace("lightning_fabric.", "lightning.fabric.")
        if attribute := LIBRARY_WRAPPERS.get(name.replace("pytorch_lightning.", "lightning.pytorch.")):
            return getattr(outer, attribute)
    return None


def flatten(tracked: Mapping[str, Any]) -> FlatState:
    """Name every tensor of the tracked objects, and check that the rest is plain data.

    Raises:
        UntrackableError: a value is neither; the text gives its path and type.

    """
    collector = TensorCollector()
    structure = {name: flatten_object(collector, name, item) for name, item in tracked.items()}
    return FlatState(tuple(collector.leaves), structure)


def flatten_object(collector: TensorCollector, name: str, item: Any) -> Any:
    """Add one object's tensors to ``collector``, and return the rest of its state as typed JSON."""
    if isinstance(item, nn.Module):
        return json_codec.encode(_flatten_module(collector, name, item), name)
    if isinstance(item, Optimizer):
        kind = REPLICATED
    elif isinstance(item, TrackedTensors) or name.split(".", maxsplit=1)[0] == EMA_NAME:
        kind = SCRIPT_OWNED
    else:
        kind = OTHER
    return json_codec.encode(collector.replace_tensors(item.state_dict(), name, kind), name)


def refuse_divided(leaves: Iterable[Leaf]) -> None:
    """Raise UntrackableError if a tensor is divided over ranks that do not all save it."""
    for leaf in leaves:
        if leaf.is_divided:
            raise UntrackableError(
                f"{tensor_name(leaf.name)}: it has been sharded after er.resume(), so no rank saves all of "
                "it. Call fully_shard() before er.resume()."
            )


def digest_leaves(leaves: Iterable[Leaf]) -> dict[str, str]:
    """Return an xxh3-128 digest of each leaf's dtype, shape and bytes."""
    return digest_tensors((leaf.name, leaf.tensor) for leaf in leaves)


def digest_tensors(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, str]:
    """Return such a digest of each named tensor."""
    return {name: _digest_tensor(tensor) for name, tensor in tensors}


def combine_digests(digests: Mapping[str, Any]) -> str:
    """Return one digest of many JSON values."""
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
        """``find_known_name`` returns the name of a tensor that another collector has, by its `make_key`."""
        self.leaves: list[Leaf] = []
        self._used_names: set[str] = set()
        self.name_by_key: dict[TensorKey, str] = {}
        self._find_known_name = find_known_name

    def replace_tensors(self, value: Any, path: str, kind: str, depth: int = 0) -> Any:
        """Return ``value`` with references instead of tensors."""
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
        """Collect ``tensor``, or this rank's shard, under a name made from ``path``.

        Tied tensors share the first one's name.
        """
        shards, index = None, 0
        if dtensors.is_dtensor(tensor):
            shards, index = dtensors.find_own_shard(tensor, path)
            tensor = dtensors.to_local(tensor)
        elif shard_index(path) is not None:
            raise UntrackableError(f"{path}: rename it: this is how a checkpoint names a part of a tensor.")
        _check_storable(tensor, path)
        stored_as, tensor = to_stored_form(tensor)
        key, has_address = make_key(tensor, stored_as), tensor.numel() > 0
        if shards is not None and not has_address and tensor.untyped_storage().data_ptr():
            # Other ranks see by the address of their shard whether it is tied. FSDP has padded this one.
            key, has_address = (tensor.untyped_storage().data_ptr(), *key), True
        if has_address:
            name = self.name_by_key.get(key) or (
                self._find_known_name(key) if self._find_known_name else None
            )
            if name is not None:
                return TensorRef(tensor_name(name) if shards else name, stored_as, shards)
        name = path
        while name in self._used_names:  # keys 1 and "1" of one dict have the same path
            name += "~"
        self._used_names.add(name)
        entry = shards.name(name, index) if shards else name
        self.name_by_key[key] = entry
        self.leaves.append(Leaf(entry, tensor, kind, shards))
        return TensorRef(name, stored_as, shards)

    def _add_numpy(self, value: Any, path: str, kind: str) -> Any:
        if not hasattr(value, "dtype") or not hasattr(value, "shape") or value.dtype.kind not in "biuf":
            return value  # json_codec refuses it with its path and type
        is_scalar = type(value).__name__ != "ndarray"
        tensor = torch.tensor(value) if is_scalar else torch.from_numpy(value.copy())
        reference = self.add_tensor(tensor, path, kind)
        return TensorRef(reference.name, "numpy-scalar" if is_scalar else "numpy")


def to_stored_form(tensor: Tensor) -> tuple[str, Tensor]:
    """Return how a tensor is stored, and that form: detached, complex numbers as pairs, resolved."""
    stored_as, tensor = "tensor", tensor.detach()
    if tensor.dtype in COMPLEX_KINDS:
        stored_as, tensor = COMPLEX_KINDS[tensor.dtype], torch.view_as_real(tensor.resolve_conj())
    return stored_as, tensor.resolve_neg()


def make_key(tensor: Tensor, stored_as: str) -> TensorKey:
    """Return a key that tied tensors share: the same memory, viewed in the same way."""
    place = tensor.device, tensor.data_ptr()
    return *place, tuple(tensor.shape), tensor.stride(), tensor.dtype, stored_as


def _rebuild_dict(original: dict[Any, Any], items: dict[Any, Any]) -> Any:
    """Return ``items`` as an OrderedDict or Counter. json_codec refuses other types of dict by name."""
    kind = type(original)
    if kind.__module__ == "collections" and kind.__name__ in {"OrderedDict", "Counter"}:
        return kind(items)
    return original


def _check_storable(tensor: Tensor, path: str) -> None:
    problem = ""
    if nn.parameter.is_lazy(tensor):
        problem = "is lazy and has no shape yet: run one forward pass before resume()"
    elif tensor.is_meta:
        problem = "is on the meta device and holds no data: materialise it before resume()"
    elif tensor.layout is not torch.strided:
        problem = f"has layout {tensor.layout}; store it dense, or leave it out of state_dict()"
    elif tensor.is_quantized or (tensor.dtype not in NAME_BY_DTYPE and tensor.dtype not in COMPLEX_KINDS):
        problem = (
            f"has dtype {tensor.dtype}, which cannot be stored; dequantise or convert it in state_dict()"
        )
    elif type(tensor) not in {Tensor, nn.Parameter, nn.Buffer}:
        problem = f"is a {type_name(tensor)}: only plain tensors, and those that FSDP2 shards, can be tracked"
    if problem:
        raise UntrackableError(f"{path}: this tensor {problem}.")


def _flatten_module(collector: TensorCollector, name: str, module: nn.Module) -> dict[str, Any]:
    """Return a module's state_dict with references instead of tensors."""
    parameters = {key for key, _ in module.named_parameters(remove_duplicate=False)}
    plain = {}
    canonical = make_name_canonicalizer(module)
    for key, value in module.state_dict().items():
        path = f"{name}/{canonical(key)}"
        kind = REPLICATED if key in parameters else BUFFER
        plain[canonical(key)] = collector.replace_tensors(value, path, kind)
        if isinstance(value, Tensor) and _is_expanded(value):
            raise UntrackableError(
                f"{path}: several elements of this tensor share one memory location (expand()), so nothing "
                "can be loaded into it. Make it contiguous: tensor.expand(...).clone()."
            )
    return plain


def _is_expanded(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and any(
        size > 1 and not stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )


def make_name_canonicalizer(module: nn.Module) -> Callable[[str], str]:
    """Return a function that removes the names of inner wrappers from a key of ``module.state_dict()``."""
    drop = set()
    for path, part in module.named_modules():
        prefix = f"{path}." if path else ""
        if isinstance(part, (DistributedDataParallel, DataParallel)):
            drop.add(f"{prefix}module.")
        elif "_orig_mod" in dict(part.named_children()):
            drop.add(f"{prefix}_orig_mod.")

    def canonical(key: str) -> str:
        for prefix in sorted(drop, key=len, reverse=True):  # inner prefixes first: the outer ones stay valid
            if key.startswith(prefix):
                wrapper = prefix.rsplit(".", 2)[0] + "." if prefix.count(".") > 1 else ""
                key = wrapper + key[len(prefix) :]
        return key

    return canonical if drop else lambda key: key


def type_name(item: Any) -> str:
    """Return the readable name of an object's type."""
    return f"{type(item).__module__}.{type(item).__qualname__}".removeprefix("builtins.")
