"""Convert frozen dataclasses to plain JSON values and back, and check each field.

Fields stand in order, as a list. A value that is missing, surplus, ill-typed or out of range raises
`ProtocolError` and nothing else.

A view is one line of text, and it is cached. A view of 1,000 members has 40 kB and is part of every hello,
welcome and proposal. A new leader parses it once for each follower; as JSON this took 3 ms each. The newest
texts and their views are kept, so parsing is a lookup and equal views are the same object. Fields are quoted
as in URLs (RFC 3986), so no name can contain a separator.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import types
import typing
from collections.abc import Callable
from enum import Enum
from typing import Any, TypeVar
from urllib.parse import quote, unquote

from elastic_resume.rendezvous.core.world import Incarnation, View
from elastic_resume.rendezvous.facts import MAX_BODY_CHARS, FactBody

MAX_MEMBERS = 100_000
MAX_CACHED_VIEWS = 16
MAX_CACHED_CHARS = 1 << 21  # a view of 10,000 members
_MAX_FIELD = 4096
_UNQUOTED_CHARS = ":.[]+/@ "
_MAX_INT = 1 << 53
_MAX_TEXT = 4096
_MAX_ITEMS = 100_000

_text_cache: dict[int, tuple[View, str]] = {}
"""By identity, because views compare equal although the addresses of their members differ."""
_view_cache: dict[str, View] = {}


def pack_view(view: View) -> str:
    """Return the text of a view."""
    cached = _text_cache.get(id(view))
    if cached is not None:  # it keeps the view, so that no other one has its id
        return cached[1]
    leader = _pack_member(view.leader) if view.leader else ""
    rule = "strict" if view.is_strict else ""
    head = [str(view.generation), rule, quote(view.history, safe=_UNQUOTED_CHARS), leader]
    text = ";".join([*head, *map(_pack_member, view.members)])
    _cache_view(text, view)
    return text


def decode_view(value: Any, where: str) -> View:
    """Parse what `pack_view` returned."""
    if not isinstance(value, str):
        raise ProtocolError(f"{where}: not a view")
    view = _view_cache.get(value)
    if view is None:
        try:
            view = _parse_view(value)
        except ValueError as error:
            raise ProtocolError(f"{where}: not a view") from error
        _cache_view(value, view)
    return view


def _cache_view(text: str, view: View) -> None:
    if len(text) > MAX_CACHED_CHARS:
        return
    for cache in (_text_cache, _view_cache):
        if len(cache) >= MAX_CACHED_VIEWS:
            cache.clear()  # atomic, so that threads need no lock
    _text_cache[id(view)] = (view, text)
    _view_cache[text] = view


def _pack_member(member: Incarnation) -> str:
    names = (quote(field, safe=_UNQUOTED_CHARS) for field in (member.node, member.disk_id, member.address))
    index = "" if member.candidate_index is None else str(member.candidate_index)
    return ",".join((*names, str(member.boot), index))


def _parse_view(text: str) -> View:
    generation, rule, history, *fields = text.split(";", MAX_MEMBERS + 4)
    if rule not in {"", "strict"}:
        raise ValueError("not a rule")
    if not 1 <= len(fields) <= MAX_MEMBERS + 1:
        raise ValueError("no leader, or too many members")
    leader = _parse_member(fields[0]) if fields[0] else None
    members = tuple(map(_parse_member, fields[1:]))
    return View(_parse_number(generation), members, leader, _parse_field(history), rule == "strict")


def _parse_member(text: str) -> Incarnation:
    node, disk_id, address, boot, candidate = text.split(",")
    return Incarnation(
        _parse_field(node),
        _parse_field(disk_id),
        _parse_number(boot),
        _parse_field(address),
        None if candidate == "" else _parse_number(candidate),
    )


def _parse_field(text: str) -> str:
    field = unquote(text, errors="strict") if "%" in text else text
    if len(field) > _MAX_FIELD or not text.isascii():
        raise ValueError("not a name")
    return field


def _parse_number(text: str) -> int:
    if not text.isascii() or not text.isdecimal() or len(text) > 16 or int(text) > _MAX_INT:
        raise ValueError("not a whole number in range")
    return int(text)


# ---- dataclasses ---------------------------------------------------------------------------------------


T = TypeVar("T")
Encode = Callable[[Any], Any]
Decode = Callable[[Any, str], Any]

_encoder = json.JSONEncoder(separators=(",", ":"), allow_nan=False)


class ProtocolError(Exception):
    """The peer sent something that is not part of the protocol; the text says what."""


def dump_json(value: Any) -> bytes:
    """Return plain data as JSON without spaces."""
    return _encoder.encode(value).encode()


def to_json_value(value: Any) -> Any:
    """Return a frozen dataclass as plain JSON data, as it would be sent."""
    return _get_codec(type(value))[0](value)  # type: ignore[arg-type]  # a type is hashable


def from_json_value(kind: type[T], value: Any, where: str = "") -> T:
    """Parse what `to_json_value` returned; ``where`` names it in errors.

    Raises:
        ProtocolError: it is not of that kind.

    """
    parsed: T = _get_codec(kind)[1](value, where or kind.__name__)  # type: ignore[arg-type]
    return parsed


def decode_int(value: Any, where: str) -> int:
    """Check a whole number."""
    if type(value) is not int or not 0 <= value <= _MAX_INT:
        raise ProtocolError(f"{where}: not a whole number in range")
    return value


def _decode_float(value: Any, where: str) -> float:
    if type(value) not in {int, float} or not 0 <= value <= _MAX_INT:
        raise ProtocolError(f"{where}: not a number in range")
    return float(value)


def _keep(value: Any) -> Any:
    return value


def _encode_text(value: str) -> str:
    # A reason may name a thousand nodes, and every receiver of a text that is too long would disconnect.
    return value if len(value) <= _MAX_TEXT else value[: _MAX_TEXT - 1] + "…"


def _decode_text(value: Any, where: str) -> str:
    if not isinstance(value, str) or len(value) > _MAX_TEXT:
        raise ProtocolError(f"{where}: not a text of at most {_MAX_TEXT} characters")
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError as error:  # half of a surrogate pair is valid JSON
            raise ProtocolError(f"{where}: a text that cannot be encoded") from error
    return value


def _decode_bool(value: Any, where: str) -> bool:
    if not isinstance(value, bool):
        raise ProtocolError(f"{where}: neither true nor false")
    return value


def _decode_body(value: Any, where: str) -> FactBody:
    if not isinstance(value, str) or not value.isascii() or len(value) > MAX_BODY_CHARS:
        raise ProtocolError(f"{where}: not a body of at most {MAX_BODY_CHARS} characters")
    return FactBody(value)


_SCALAR_CODECS: dict[Any, tuple[Encode, Decode]] = {
    str: (_encode_text, _decode_text),
    int: (_keep, decode_int),
    float: (_keep, _decode_float),
    bool: (_keep, _decode_bool),
    FactBody: (_keep, _decode_body),
    View: (pack_view, decode_view),
}


def _check_list(value: Any, where: str) -> list[Any]:
    if not isinstance(value, list) or len(value) > _MAX_ITEMS:
        raise ProtocolError(f"{where}: not a list of at most {_MAX_ITEMS}")
    return value


@functools.cache  # building takes a millisecond
def _get_codec(kind: Any) -> tuple[Encode, Decode]:
    """Return the encoder and decoder of a type hint."""
    if kind in _SCALAR_CODECS:
        return _SCALAR_CODECS[kind]
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        return _build_dataclass_codec(kind)
    if isinstance(kind, type) and issubclass(kind, Enum):
        return (lambda value: value.name), functools.partial(_decode_member, kind)
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in {types.UnionType, typing.Union} and type(None) in arguments:
        kinds = tuple(kind for kind in arguments if kind is not type(None))
        put, take = _get_codec(kinds[0]) if len(kinds) == 1 else _build_union_codec(kinds)
        return (
            lambda value: None if value is None else put(value),
            lambda value, where: None if value is None else take(value, where),
        )
    if origin in {types.UnionType, typing.Union}:
        return _build_union_codec(arguments)
    if origin is tuple and arguments[1:] == (...,):
        put, take = _get_codec(arguments[0])
        return (
            lambda value: [put(item) for item in value],
            lambda value, where: tuple(take(item, where) for item in _check_list(value, where)),
        )
    if origin is tuple:
        return _build_record_codec({str(place): kind for place, kind in enumerate(arguments)})
    if origin is frozenset:
        put, take = _get_codec(arguments[0])
        return (
            lambda value: sorted((put(item) for item in value), key=dump_json),
            lambda value, where: frozenset(take(item, where) for item in _check_list(value, where)),
        )
    raise TypeError(f"no codec for {kind}")


def _decode_member(kind: type[Enum], value: Any, where: str) -> Enum:
    if not isinstance(value, str) or value not in kind.__members__:
        raise ProtocolError(f"{where}: not one of {', '.join(kind.__members__)}")
    return kind[value]


def _build_union_codec(kinds: tuple[Any, ...]) -> tuple[Encode, Decode]:
    """Build the codec of one of several classes: the name of the class, and the value."""
    codecs = {kind.__name__: _get_codec(kind) for kind in kinds}

    def put(value: Any) -> Any:
        name = type(value).__name__
        return [name, codecs[name][0](value)]

    def take(value: Any, where: str) -> Any:
        items = _check_list(value, where)
        if len(items) != 2 or not isinstance(items[0], str) or items[0] not in codecs:
            raise ProtocolError(f"{where}: not one of {', '.join(codecs)}")
        return codecs[items[0]][1](items[1], f"{where}.{items[0]}")

    return put, take


def _build_dataclass_codec(kind: type) -> tuple[Encode, Decode]:
    hints = typing.get_type_hints(kind)
    names = [field.name for field in dataclasses.fields(kind)]
    put, take = _build_record_codec({name: hints[name] for name in names})
    return (
        lambda value: put([getattr(value, name) for name in names]),
        lambda value, where: kind(*take(value, where)),
    )


def _build_record_codec(kinds: dict[str, Any]) -> tuple[Encode, Decode]:
    """Build the codec of a sequence of values by name: a list of as many items."""
    codecs = {name: _get_codec(kind) for name, kind in kinds.items()}

    def put(values: Any) -> Any:
        return [codec[0](value) for codec, value in zip(codecs.values(), values, strict=True)]

    def take(value: Any, where: str) -> Any:
        items = _check_list(value, where)
        if len(items) != len(codecs):
            raise ProtocolError(f"{where}: {len(items)} fields instead of {len(codecs)}")
        pairs = zip(codecs.items(), items, strict=True)
        return tuple(codec[1](item, f"{where}.{name}") for (name, codec), item in pairs)

    return put, take
