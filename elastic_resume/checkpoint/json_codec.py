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

from elastic_resume.errors import CorruptError, UntrackableError

MAX_DEPTH = 200  # a state dict is 5 deep; Python's stack ends at 1000
MAX_INT_BITS = 1 << 20
TAG = "$"
_PLAIN_INT_LIMIT = 1 << 63  # other JSON readers may round greater integers


@dataclass(frozen=True)
class TensorRef:
    """Stand in for a tensor; ``name`` is its name in the image, only `state` interprets ``kind``."""

    name: str
    kind: str = "tensor"


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
    """Return the value that `encode` was given; raise CorruptError for data that it does not write."""
    try:
        return _decode(encoded, 0)
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


def _encode_int(value: int, path: str) -> Any:
    if -_PLAIN_INT_LIMIT <= value < _PLAIN_INT_LIMIT:
        return value
    if value.bit_length() > MAX_INT_BITS:
        raise UntrackableError(f"{path}: an int of {value.bit_length()} bits; the limit is {MAX_INT_BITS}.")
    return {TAG: "int", "hex": hex(value)}


def _encode_float(value: float, _path: str) -> Any:
    return value if math.isfinite(value) else {TAG: "float", "bits": struct.pack(">d", value).hex()}


def _encode_tensor_ref(value: TensorRef, path: str) -> Any:
    if type(value.name) is not str or type(value.kind) is not str:
        _reject(value, path)
    return {TAG: "tensor", "name": value.name, "kind": value.kind}


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


def _decode(encoded: Any, depth: int) -> Any:
    if encoded is None or type(encoded) in {bool, str, int, float}:
        return encoded
    if depth > MAX_DEPTH:
        raise CorruptError(f"state: nested more than {MAX_DEPTH} deep.")
    if type(encoded) is list:
        return [_decode(item, depth + 1) for item in encoded]
    if type(encoded) is not dict:
        raise CorruptError(f"state: a {type(encoded).__name__} is not typed JSON.")
    if TAG not in encoded:
        return {key: _decode(item, depth + 1) for key, item in encoded.items()}
    fields = {key: item for key, item in encoded.items() if key != TAG}
    tag = encoded[TAG]
    if type(tag) is not str or tag not in _DECODERS or set(fields) != _DECODERS[tag][0]:
        raise CorruptError(f"state: unknown tag {tag!r} with fields {sorted(fields)[:8]}.")
    try:
        return _DECODERS[tag][1](fields, depth + 1)
    except (ValueError, TypeError, struct.error) as error:
        raise CorruptError(f"state: a malformed {tag!r} ({error}).") from error


def _decode_int(fields: dict[str, Any], _depth: int) -> int:
    text = _require_text(fields["hex"])
    value = int(text, 16)
    is_plain = -_PLAIN_INT_LIMIT <= value < _PLAIN_INT_LIMIT
    if hex(value) != text or is_plain or value.bit_length() > MAX_INT_BITS:
        raise ValueError("not as written")
    return value


def _decode_bits(fields: dict[str, Any], layout: str) -> tuple[float, ...]:
    return struct.unpack(layout, bytes.fromhex(_require_text(fields["bits"])))


def _decode_items(fields: dict[str, Any], depth: int) -> list[Any]:
    items = fields["items"]
    if type(items) is not list:
        raise ValueError("items is not a list")
    return [_decode(item, depth) for item in items]


def _decode_pairs(fields: dict[str, Any], depth: int) -> dict[Any, Any]:
    items = fields["items"]
    if type(items) is not list or not all(type(pair) is list and len(pair) == 2 for pair in items):
        raise ValueError("items are not pairs")
    pairs = {_decode(key, depth): _decode(value, depth) for key, value in items}
    if len(pairs) != len(items):
        raise ValueError("a key occurs twice")
    return pairs


def _decode_set(fields: dict[str, Any], depth: int) -> set[Any]:
    items = _decode_items(fields, depth)
    if len(set(items)) != len(items):
        raise ValueError("an item occurs twice")
    return set(items)


def _decode_counter(fields: dict[str, Any], depth: int) -> Counter[Any]:
    counter: Counter[Any] = Counter()
    dict.update(counter, _decode_pairs(fields, depth))  # Counter.update would add, and fail on non-numbers
    return counter


def _decode_deque(fields: dict[str, Any], depth: int) -> deque[Any]:
    items, maxlen = _decode_items(fields, depth), fields["maxlen"]
    if maxlen is not None and (type(maxlen) is not int or maxlen < len(items)):
        raise ValueError("maxlen does not fit")
    return deque(items, maxlen)


def _require_text(value: Any) -> str:
    if type(value) is not str:
        raise ValueError("not a string")
    return value


_DECODERS: dict[str, tuple[set[str], Callable[[dict[str, Any], int], Any]]] = {
    "int": ({"hex"}, _decode_int),
    "float": ({"bits"}, lambda fields, _: _decode_bits(fields, ">d")[0]),
    "complex": ({"bits"}, lambda fields, _: complex(*_decode_bits(fields, ">2d"))),
    "bytes": ({"base64"}, lambda fields, _: base64.b64decode(_require_text(fields["base64"]), validate=True)),
    "tensor": (
        {"name", "kind"},
        lambda fields, _: TensorRef(_require_text(fields["name"]), _require_text(fields["kind"])),
    ),
    "tuple": ({"items"}, lambda fields, depth: tuple(_decode_items(fields, depth))),
    "dict": ({"items"}, _decode_pairs),
    "OrderedDict": ({"items"}, lambda fields, depth: OrderedDict(_decode_pairs(fields, depth))),
    "Counter": ({"items"}, _decode_counter),
    "set": ({"items"}, _decode_set),
    "frozenset": ({"items"}, lambda fields, depth: frozenset(_decode_set(fields, depth))),
    "deque": ({"items", "maxlen"}, _decode_deque),
}
