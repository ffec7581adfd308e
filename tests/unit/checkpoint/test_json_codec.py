"""Test that typed JSON restores values bit for bit, or refuses them by path and type."""

from __future__ import annotations

import json
import math
import struct
from collections import Counter, OrderedDict, defaultdict, deque
from enum import IntEnum
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_resume.checkpoint import json_codec
from elastic_resume.checkpoint.json_codec import MAX_DEPTH, MAX_SHARDS, TensorRef, decode, encode
from elastic_resume.checkpoint.shards import Shards
from elastic_resume.errors import CorruptError, UntrackableError

# Every bit pattern.
floats = st.binary(min_size=8, max_size=8).map(lambda bits: float(struct.unpack(">d", bits)[0]))
atoms = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-(1 << 300), 1 << 300)
    | floats
    | st.floats()
    | st.builds(complex, floats, floats)
    | st.text(st.characters())
    | st.binary()
    | st.builds(TensorRef, st.text(max_size=5), st.sampled_from(["tensor", "numpy"]))
)
keys = st.recursive(
    atoms,
    lambda inner: st.lists(inner, max_size=3).map(tuple) | st.frozensets(inner, max_size=3),
    max_leaves=4,
)
values = st.recursive(
    atoms | st.sampled_from(["$", "tuple", "items"]),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(keys, inner, max_size=4)
        | st.dictionaries(st.sampled_from(["a", "b", "$", "items"]), inner, max_size=4)
        | st.dictionaries(keys, inner, max_size=4).map(OrderedDict)
        | st.dictionaries(keys, st.integers(), max_size=4).map(Counter)
        | st.sets(keys, max_size=4)
        | st.frozensets(keys, max_size=4)
        | st.builds(
            lambda items, more: deque(items, len(items) + more),
            st.lists(inner, max_size=3),
            st.integers(0, 3),
        )
        | st.lists(inner, max_size=3).map(deque)
    ),
    max_leaves=12,
)


def same(a: Any, b: Any) -> bool:
    """Equal in type, order and every bit."""
    if type(a) is not type(b):
        return False
    if isinstance(a, float):
        return struct.pack(">d", a) == struct.pack(">d", b)
    if isinstance(a, complex):
        return same(a.real, b.real) and same(a.imag, b.imag)
    if isinstance(a, dict):
        return len(a) == len(b) and all(
            same(x, y) for x, y in zip([*a.keys(), *a.values()], [*b.keys(), *b.values()], strict=True)
        )
    if isinstance(a, (set, frozenset)):
        return json.dumps(encode(a)) == json.dumps(encode(b))
    if isinstance(a, (list, tuple, deque)):
        limits = getattr(a, "maxlen", None) == getattr(b, "maxlen", None)
        return limits and len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


@given(values)
def test_supported_values_are_restored_exactly(value: Any) -> None:
    """Type, order and bits survive real JSON text."""
    assert same(decode(json.loads(json.dumps(encode(value), allow_nan=False))), value)


def test_special_floats_keep_their_bits() -> None:
    """-0.0, infinities and the payload of a NaN."""
    nan_with_payload = struct.unpack(">d", bytes.fromhex("7ff8dead00000001"))[0]
    for value in [-0.0, math.inf, -math.inf, nan_with_payload, 5e-324, 0.1, 1e300]:
        assert same(decode(json.loads(json.dumps(encode(value)))), value)


def test_plain_state_stays_plain_json() -> None:
    """Values that JSON represents exactly stay readable."""
    state = {"lr": 0.1, "betas": [0.9, 0.999], "steps": 3, "nested": {"on": True, "off": None}}
    assert encode(state) == state


def test_sets_encode_in_sorted_order() -> None:
    """Their own order depends on the hash seed of the process."""
    numbers = [8 * i for i in range(50)]  # they collide: the order of insertion shows
    assert list({*numbers}) != list({*numbers[::-1]})
    assert encode({*numbers}) == encode({*numbers[::-1]})


class Level(IntEnum):
    """A subclass of int."""

    ONE = 1


class Name(str):
    """A subclass of str."""

    __slots__ = ()


class Pair(NamedTuple):
    """A subclass of tuple."""

    a: int


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (Level.ONE, r"opt\['a'\]\[1\]: a .*Level cannot be stored; convert it to int"),
        (Pair(1), "Pair cannot be stored; convert it to tuple"),
        (defaultdict(list), "collections.defaultdict cannot be stored; convert it to dict"),
        (Path("x"), "Path cannot be stored"),
        (object(), r"opt\['a'\]\[1\]: a object cannot be stored; return tensors and plain data"),
        (bytearray(b"x"), "bytearray cannot be stored"),
        (TensorRef(Name("x")), "TensorRef cannot be stored"),
        (TensorRef("x", Name("numpy")), "TensorRef cannot be stored"),
        ({Path("k"): 1}, r"key of opt\['a'\]\[1\]\[.*Path.*\]: a .*Path cannot be stored"),
    ],
)
def test_unsupported_value_is_refused_by_path_and_type(value: Any, text: str) -> None:
    """The message has path, type and advice."""
    with pytest.raises(UntrackableError, match=text):
        encode({"a": [0, value]}, "opt")


def test_value_without_a_name_is_that_of_the_state() -> None:
    """The error says at least that."""
    with pytest.raises(UntrackableError, match=r"^state\[0\]: a object cannot"):
        encode([object()])


def test_key_of_a_dict_that_looks_like_a_tag_is_no_tag() -> None:
    """Else a script's own dict would be decoded as something else."""
    assert decode(encode({"$": "int", "hex": "0x10"})) == {"$": "int", "hex": "0x10"}


@pytest.mark.parametrize("shards", [None, Shards(1, 10, 4), Shards(0, 0, 1), Shards(0, 5, MAX_SHARDS)])
def test_tensor_keeps_its_shards(shards: Shards | None) -> None:
    """The names of its entries in the image follow from them."""
    ref = TensorRef("w", "tensor", shards)
    assert decode(json.loads(json.dumps(encode(ref)))) == ref
    assert ref.stored_names == (
        ["w"] if shards is None else [f"w@{i}of{shards.count}" for i in range(shards.count)]
    )


def test_cycle_is_refused() -> None:
    """A list that contains itself has no JSON."""
    cycle: list[Any] = []
    cycle.append({"again": cycle})
    with pytest.raises(UntrackableError, match=r"m\[0\]\['again'\]: a list that contains itself"):
        encode(cycle, "m")


def test_shared_object_is_no_cycle() -> None:
    """It is restored as two equal objects."""
    shared = [1]
    assert decode(encode([shared, shared])) == [[1], [1]]


def nested(depth: int) -> Any:
    """Lists in lists."""
    value: Any = []
    for _ in range(depth - 1):
        value = [value]
    return value


def test_depth_is_limited_when_encoding_and_decoding() -> None:
    """No RecursionError is raised."""
    assert decode(json.loads(json.dumps(encode(nested(MAX_DEPTH))))) == nested(MAX_DEPTH)
    with pytest.raises(UntrackableError, match="nested more than"):
        encode(nested(MAX_DEPTH + 1))
    with pytest.raises(UntrackableError, match="nested"):
        encode(nested(10_000))
    with pytest.raises(CorruptError, match="nested too deeply"):
        decode(nested(10_000))


def overflow(*args: Any) -> Any:
    """Recurse for ever."""
    return overflow(*args)


def test_unknown_tag_is_named() -> None:
    """It may be of a later version."""
    with pytest.raises(CorruptError, match="unknown tag 'pickle'"):
        decode({"$": "pickle"})


def test_full_stack_is_named_by_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """A script may call from deep within its own recursion."""
    monkeypatch.setattr(json_codec, "_encode", overflow)
    with pytest.raises(UntrackableError, match=r"^opt: nested too deeply for the interpreter"):
        encode([], "opt")
    with pytest.raises(UntrackableError, match=r"^state: nested too deeply for the interpreter"):
        encode([])


@pytest.mark.parametrize(
    "bad",
    [
        {"$": "pickle", "data": ""},
        {"$": None},
        {"$": []},
        {"$": "tuple"},
        {"$": "int", "hex": "-0x"},
        {"$": "float", "bits": "00"},
        {"$": "set", "items": [[]]},
        (1, 2),
        *(
            {"$": "sharded", "name": "w", "kind": "tensor", "dim": 0, "size": 8, "count": 2, **wrong}
            for wrong in (
                {"dim": -1},
                {"dim": 0.0},
                {"dim": True},
                {"size": 1 << 63},
                {"size": "8"},
                {"count": 0},
                {"count": MAX_SHARDS + 1},
                {"count": 2.0},
            )
        ),
    ],
)
def test_decode_refuses_data_that_encode_never_writes(bad: Any) -> None:
    """Nothing unknown is guessed."""
    with pytest.raises(CorruptError):
        decode({"deep": [bad]})
