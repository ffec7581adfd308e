"""A world as one line of text, which is remembered: most of what agents send each other is the same world.

A world of a thousand members is 40 kB, and it is in every hello, welcome, proposal and restart. As JSON it
took 3 ms to read; a leader with a thousand followers reads it a thousand times when they all come to it. As
one text it is looked up: the few newest texts and the worlds they stand for are kept. It also comes out as
the same object each time, so that to compare what two agents know takes no time either.

Fields are quoted as in URLs (RFC 3986), so no name can hold a separator. A long text is compressed (zlib),
which halves what a leader sends. Pure but for that memory, whose size is bounded: `KEPT` worlds of
`KEPT_CHARACTERS` at most.
"""

from __future__ import annotations

import base64
import zlib
from typing import Any
from urllib.parse import quote, unquote

from elastic_resume.rendezvous.quorum import Incarnation, World

MAX_MEMBERS = 100_000
KEPT = 16
KEPT_CHARACTERS = 1 << 20  # a world of 10,000 members
SHORT = 4096
"""A text of so many characters is sent as it is, and can be read in the record on disk."""
MAX_CHARACTERS = 1 << 24
_COMPRESSED = "z"
_MAX_FIELD = 4096
_MAX_INT = 1 << 53
_SAFE = ":.[]+/@ "

_texts: dict[int, tuple[World, str]] = {}
"""By identity: two worlds are equal when their members are, whatever their addresses."""
_worlds: dict[str, World] = {}


def pack(world: World) -> str:
    """Give the text of a world."""
    kept = _texts.get(id(world))
    if kept is not None and kept[0] is world:
        return kept[1]
    text = ";".join([str(world.generation), *map(_pack_one, (world.leader, *world.members))])
    if len(text) > SHORT:
        text = _COMPRESSED + base64.b64encode(zlib.compress(text.encode(), 1)).decode()
    _keep(text, world)
    return text


def unpack(text: Any) -> World:
    """Read what `pack` gave.

    Raises:
        ValueError: it is not one.
        TypeError: it is not even a text.

    """
    if not isinstance(text, str):
        raise TypeError("not a text")
    world = _worlds.get(text)
    if world is None:
        world = _read(text)
        _keep(text, world)
    return world


def _keep(text: str, world: World) -> None:
    if len(text) > KEPT_CHARACTERS:
        return
    for kept in (_texts, _worlds):
        if len(kept) >= KEPT:
            kept.clear()  # one step, so that threads need no lock
    _texts[id(world)] = (world, text)
    _worlds[text] = world


def _pack_one(who: Incarnation) -> str:
    names = (quote(field, safe=_SAFE) for field in (who.node, who.life, who.address))
    return ",".join((*names, "" if who.candidate is None else str(who.candidate)))


def _read(text: str) -> World:
    if text.startswith(_COMPRESSED):
        text = _expand(text)
    generation, *fields = text.split(";", MAX_MEMBERS + 2)
    if not 1 <= len(fields) <= MAX_MEMBERS + 1:
        raise ValueError("no leader, or too many members")
    leader, *members = map(_read_one, fields)
    return World(_number(generation), tuple(members), leader)


def _expand(text: str) -> str:
    expander = zlib.decompressobj()
    try:
        said = expander.decompress(base64.b64decode(text[1:], validate=True), MAX_CHARACTERS)
    except zlib.error as error:
        raise ValueError("not compressed") from error
    if not expander.eof or expander.unused_data:
        raise ValueError("too long when expanded, or cut off")
    return said.decode("ascii")


def _read_one(text: str) -> Incarnation:
    node, life, address, candidate = text.split(",")
    return Incarnation(
        _field(node), _field(life), _field(address), None if candidate == "" else _number(candidate)
    )


def _field(text: str) -> str:
    field = unquote(text, errors="strict") if "%" in text else text
    if len(field) > _MAX_FIELD or not text.isascii():
        raise ValueError("not a name")
    return field


def _number(text: str) -> int:
    if not text.isascii() or not text.isdecimal() or len(text) > 16 or int(text) > _MAX_INT:
        raise ValueError("not a whole number in range")
    return int(text)
