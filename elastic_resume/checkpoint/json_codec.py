"""Encode state that is not a tensor as typed JSON, and decode it to the same types and bits.

Values that JSON represents exactly stay plain: None, bool, str, finite float, list, dict with str keys. Every
other type becomes an object ``{"$": tag, ...}``. Decoding restores NaN payloads, -0.0, integers of any size,
tuples, and the order of dicts. A subclass of a known type is refused, because it would be restored as its
base class.

An object that occurs in two places is restored as two equal objects. Nothing that is read is executed: an
unknown tag raises CorruptError. Equal values have equal encodings on every node (sets are sorted), so digests
of encoded state can be compared. Tensors are replaced by a `TensorRef` before encoding.
"""

from __future__ import annotations

import base64
import json
import math
import struct
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NoReturn

from elastic_resume.checkpoint.shards import Shards
from elastic_resume.errors import CorruptError, UntrackableError

MAX_DEPTH = 200  # a state dict is 5 deep; Python's stack ends at 1000
MAX_SHARDS = 1024  # local ranks of a node
TAG = "$"
_PLAIN_INT_LIMIT = 1 << 63  # other JSON readers may round greater integers


@dataclass(frozen=True)
class TensorRef:
    """Stand in for a tensor; ``name`` is its name in the image, only `state` interprets ``kind``.

    A sharded tensor has one entry in the image for each of its ``shards``; see `stored_names`.
    """

    name: str
    kind: str = "tensor"
    shards: Shards | None = None

    @property
    def stored_names(self) -> list[str]:
        """The names of the tensor's entries in the image."""
        return [self.name] if self.shards is None else self.shards.names(self.name)


def encode(value: Any, path: str = "") -> Any:
    """Return ``value`` as data for `json.dumps`; ``path`` names it in error messages.

    Raises:
        UntrackableError: naming path and type of a value that `decode` could not restore exactly.

    """
    try:
        return _encode(value, path or "state", ())
    except RecursionError:
        raise UntrackableError(f"{path or 'state'}: nested too deeply for the interpreter's stack.") from None


def decode(encoded: Any) -> Any:
    """Return the value that `encode` was given; raise CorruptError for an unknown tag.

    What follows a known tag is ours: callers have verified a digest.
    """
    try:
        return _decode(encoded)
    except RecursionError as error:
        raise CorruptError("state: nested too deeply.") from error


def reject_constant(constant: str) -> NoReturn:
    """Refuse NaN and Infinity, as the ``parse_constant`` of `json.loads`."""
    raise ValueError(f"{constant} is not JSON")


def _encode(value: Any, path: str, ancestors: tuple[int, ...]) -> Any:
    kind = type(value)
    if value is None or kind is bool or kind is str:
        return value
    if kind in _SCALAR_ENCODERS:
        return _SCALAR_ENCODERS[kind](value, path)
    if kind not in _CONTAINER_ENCODERS:
        _reject(value, path)
    if id(value) in ancestors:
        raise UntrackableError(
            f"{path}: a {kind.__name__} that contains itself cannot be stored; break the cycle."
        )
    if len(ancestors) >= MAX_DEPTH:
        raise UntrackableError(f"{path}: nested more than {MAX_DEPTH} deep; flatten it.")
    return _CONTAINER_ENCODERS[kind](value, path, (*ancestors, id(value)))


def _encode_int(value: int, _path: str) -> Any:
    if -_PLAIN_INT_LIMIT <= value < _PLAIN_INT_LIMIT:
        return value
    return {TAG: "int", "hex": hex(value)}


def _encode_float(value: float, _path: str) -> Any:
    return value if math.isfinite(value) else {TAG: "float", "bits": struct.pack(">d", value).hex()}


def _encode_tensor_ref(value: TensorRef, path: str) -> Any:
    if type(value.name) is not str or type(value.kind) is not str:
        _reject(value, path)
    encoded = {TAG: "tensor", "name": value.name, "kind": value.kind}
    if value.shards is not None:
        encoded |= {TAG: "sharded", **vars(value.shards)}
    return encoded


def _encode_items(value: Iterable[Any], path: str, ancestors: tuple[int, ...]) -> list[Any]:
    return [_encode(item, f"{path}[{index}]", ancestors) for index, item in enumerate(value)]


def _encode_pairs(value: dict[Any, Any], path: str, ancestors: tuple[int, ...]) -> list[Any]:
    pairs = []
    for key, item in value.items():
        place = f"{path}[{_abbreviate(key)}]"
        pairs.append([_encode(key, f"key of {place}", ancestors), _encode(item, place, ancestors)])
    return pairs


def _encode_dict(value: dict[Any, Any], path: str, ancestors: tuple[int, ...]) -> Any:
    if all(type(key) is str and key != TAG for key in value):
        return {key: _encode(item, f"{path}[{_abbreviate(key)}]", ancestors) for key, item in value.items()}
    return {TAG: "dict", "items": _encode_pairs(value, path, ancestors)}


def _encode_sorted(value: Iterable[Any], path: str, ancestors: tuple[int, ...]) -> list[Any]:
    # The order of a set depends on the process's hash seed, so digests of two nodes would differ.
    items = (_encode(item, f"{path}{{{_abbreviate(item)}}}", ancestors) for item in value)
    return sorted(items, key=json.dumps)


_SCALAR_ENCODERS: dict[type, Callable[[Any, str], Any]] = {
    int: _encode_int,
    float: _encode_float,
    complex: lambda v, _: {TAG: "complex", "bits": struct.pack(">2d", v.real, v.imag).hex()},
    bytes: lambda v, _: {TAG: "bytes", "base64": base64.b64encode(v).decode()},
    TensorRef: _encode_tensor_ref,
}

_CONTAINER_ENCODERS: dict[type, Callable[[Any, str, tuple[int, ...]], Any]] = {
    list: _encode_items,
    tuple: lambda v, path, above: {TAG: "tuple", "items": _encode_items(v, path, above)},
    dict: _encode_dict,
    OrderedDict: lambda v, path, above: {TAG: "OrderedDict", "items": _encode_pairs(v, path, above)},
    Counter: lambda v, path, above: {TAG: "Counter", "items": _encode_pairs(v, path, above)},
    set: lambda v, path, above: {TAG: "set", "items": _encode_sorted(v, path, above)},
    frozenset: lambda v, path, above: {TAG: "frozenset", "items": _encode_sorted(v, path, above)},
    deque: lambda v, path, above: {TAG: "deque", "items": _encode_items(v, path, above), "maxlen": v.maxlen},
}


def _reject(value: Any, path: str) -> NoReturn:
    kind = type(value)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    known_types = _CONTAINER_ENCODERS | _SCALAR_ENCODERS
    base = next((known.__name__ for known in known_types if isinstance(value, known)), None)
    advice = f"convert it to {base} in" if base else "return tensors and plain data from"
    raise UntrackableError(f"{path}: a {name} cannot be stored; {advice} state_dict(), or leave it out.")


def _abbreviate(key: Any) -> str:
    text = repr(key) if type(key) in {str, int, bool, float, bytes} else type(key).__name__
    return text if len(text) <= 80 else text[:77] + "..."


def _decode(encoded: Any) -> Any:
    if encoded is None or type(encoded) in {bool, str, int, float}:
        return encoded
    if type(encoded) is list:
        return [_decode(item) for item in encoded]
    if type(encoded) is not dict:
        raise CorruptError(f"state: a {type(encoded).__name__} is not typed JSON.")
    if TAG not in encoded:
        return {key: _decode(item) for key, item in encoded.items()}
    tag = encoded[TAG]
    if type(tag) is not str or tag not in _DECODERS:
        raise CorruptError(f"state: unknown tag {tag!r}.")
    try:
        return _DECODERS[tag](encoded)
    except (KeyError, ValueError, TypeError, struct.error) as error:
        raise CorruptError(f"state: a malformed {tag!r} ({error}).") from error


def _decode_bits(fields: dict[str, Any], layout: str) -> tuple[float, ...]:
    return struct.unpack(layout, bytes.fromhex(fields["bits"]))


def _decode_items(fields: dict[str, Any]) -> list[Any]:
    return [_decode(item) for item in fields["items"]]


def _decode_pairs(fields: dict[str, Any]) -> dict[Any, Any]:
    return {_decode(key): _decode(value) for key, value in fields["items"]}


def _decode_shards(fields: dict[str, Any]) -> Shards:
    numbers = fields["dim"], fields["size"], fields["count"]
    if any(type(number) is not int or not 0 <= number < _PLAIN_INT_LIMIT for number in numbers):
        raise ValueError(f"impossible shards {numbers}")
    if not 0 < numbers[2] <= MAX_SHARDS:
        raise ValueError(f"{numbers[2]} shards")
    return Shards(*numbers)


def _decode_counter(fields: dict[str, Any]) -> Counter[Any]:
    counter: Counter[Any] = Counter()
    dict.update(counter, _decode_pairs(fields))  # Counter.update would add, and fail on non-numbers
    return counter


_DECODERS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "int": lambda fields: int(fields["hex"], 16),
    "float": lambda fields: _decode_bits(fields, ">d")[0],
    "complex": lambda fields: complex(*_decode_bits(fields, ">2d")),
    "bytes": lambda fields: base64.b64decode(fields["base64"]),
    "tensor": lambda fields: TensorRef(fields["name"], fields["kind"]),
    "sharded": lambda fields: TensorRef(fields["name"], fields["kind"], _decode_shards(fields)),
    "tuple": lambda fields: tuple(_decode_items(fields)),
    "dict": _decode_pairs,
    "OrderedDict": lambda fields: OrderedDict(_decode_pairs(fields)),
    "Counter": _decode_counter,
    "set": lambda fields: set(_decode_items(fields)),
    "frozenset": lambda fields: frozenset(_decode_items(fields)),
    "deque": lambda fields: deque(_decode_items(fields), fields["maxlen"]),
}
