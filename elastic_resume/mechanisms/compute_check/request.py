"""Carry what rank 0's model was called with to the other ranks: its structure as JSON, beside its tensors.

Nothing is pickled. Arguments of other types, and structures beyond the limits, are refused with a sentence.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

MAX_DEPTH = 16
MAX_TENSORS = 10_000
MAX_BYTES = 4 << 20
"""Of the structure and of each text in it; a model with ten thousand buffers needs one MiB."""


class NotCheckable(Exception):  # noqa: N818 - a reason, which is logged once
    """Compute checks cannot handle this model; the text says why, without a full stop."""


@dataclass(frozen=True)
class TensorFormat:
    """What another rank must know to receive a tensor."""

    dtype: str
    shape: list[int]
    on_cpu: bool
    requires_grad: bool = False

    @classmethod
    def of(cls, tensor: Tensor, where: str) -> TensorFormat:
        """Describe a plain dense tensor.

        Raises:
            NotCheckable: it is of another kind.

        """
        is_plain = type(tensor) in {Tensor, torch.nn.Parameter, torch.nn.Buffer}
        if not is_plain or tensor.layout is not torch.strided or tensor.is_quantized:
            raise NotCheckable(f"{where} is a {type(tensor).__name__} of layout {tensor.layout}")
        if tensor.device.type not in {"cpu", "cuda"}:
            raise NotCheckable(f"{where} is on {tensor.device.type}, not on a CPU or a CUDA device")
        dtype = str(tensor.dtype).removeprefix("torch.")
        return cls(dtype, list(tensor.shape), tensor.device.type == "cpu", tensor.requires_grad)

    def allocate(self, device: torch.device) -> Tensor:
        """Return an empty tensor of this format; ``device`` is that of this rank's parameters."""
        dtype = getattr(torch, self.dtype, None)
        if not isinstance(dtype, torch.dtype):
            raise NotCheckable(f"rank 0 has a tensor of the unknown dtype {self.dtype!r}")
        return torch.empty(self.shape, dtype=dtype, device="cpu" if self.on_cpu else device)


@dataclass(frozen=True)
class Request:
    """One call of rank 0's model, but for the values of tensors.

    ``arguments`` and ``keywords`` are as `encode` returns them. ``state`` names the tensors of the model that
    are no parameters, by the path of the part and the attribute. They follow those of the arguments in
    ``formats``. ``modes`` has a 1 for each part in training mode.
    """

    seed: int
    arguments: Any
    keywords: Any
    formats: tuple[TensorFormat, ...]
    state: tuple[tuple[str, str], ...]
    modes: str
    autocast: tuple[tuple[str, bool, str], ...] = ()
    """Of each type of device: whether it is on, and its dtype."""

    def to_bytes(self) -> bytes:
        """Encode it.

        Raises:
            NotCheckable: it is too long.

        """
        data = json.dumps(asdict(self)).encode()
        if len(data) > MAX_BYTES or len(self.formats) > MAX_TENSORS:
            raise NotCheckable(f"its arguments have {len(self.formats)} tensors and {len(data)} bytes beside")
        return data

    @classmethod
    def from_bytes(cls, data: bytes) -> Request:
        """Decode what `to_bytes` returned."""
        values = json.loads(data)
        values["formats"] = tuple(TensorFormat(**each) for each in values["formats"])
        values["state"] = tuple((path, name) for path, name in values["state"])
        values["autocast"] = tuple(map(tuple, values["autocast"]))
        return cls(**values)


def encode(value: Any, where: str, tensors: list[Tensor], depth: int = 0) -> Any:
    """Return a value as JSON, and append its tensors.

    Raises:
        NotCheckable: it has a part of another type than those of `decode`.

    """
    if value is None or type(value) in {bool, int, float, str}:
        return value
    if isinstance(value, Tensor):
        tensors.append(value)
        return {"tensor": len(tensors) - 1}
    if depth < MAX_DEPTH and len(tensors) <= MAX_TENSORS:
        if type(value) in {list, tuple}:
            name = type(value).__name__
            return {name: [encode(v, f"{where}[{i}]", tensors, depth + 1) for i, v in enumerate(value)]}
        if type(value) is dict and all(type(key) in {str, int} for key in value):
            pairs = [[k, encode(v, f"{where}[{k!r}]", tensors, depth + 1)] for k, v in value.items()]
            return {"dict": pairs}
    raise NotCheckable(
        f"{where} is a {type(value).__name__}: it can be a tensor, a number, a text, None, or a list, tuple "
        "or dict of them"
    )


def decode(encoded: Any, tensors: Sequence[Tensor]) -> Any:
    """Return the value that `encode` got."""
    if not isinstance(encoded, dict):
        return encoded
    ((kind, content),) = encoded.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "dict":
        return {key: decode(value, tensors) for key, value in content}
    values = [decode(value, tensors) for value in content]
    return tuple(values) if kind == "tuple" else values


def find_tensors(value: Any, depth: int = 0) -> Iterator[Tensor]:
    """Yield the tensors of a model's outputs, which may be of any type, in their order."""
    if isinstance(value, Tensor):
        yield value
        return
    parts: Sequence[Any] = ()
    if isinstance(value, Mapping):
        parts = list(value.values())
    elif isinstance(value, (list, tuple)):
        parts = value
    elif is_dataclass(value) and not isinstance(value, type):
        parts = [getattr(value, field.name) for field in fields(value)]
    if depth < MAX_DEPTH:
        for part in parts:
            yield from find_tensors(part, depth + 1)
