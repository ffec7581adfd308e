"""Send a view as its difference to one that the peer has: the names of 10,000 members take 248 kB.

Each direction of a connection has a *base*: the view that travelled last in this direction. At the start it
is the newest view of both sides, if their handshake shows that it is the same. In a line a view that differs
from the base is this object in place of the text of `codec.pack_view`::

    {"base": DIGEST, "fields": [[FIRST, COUNT], "a new field", ...]}

A pair stands for that many fields of the base's text, which semicolons separate.
"""

from __future__ import annotations

import functools
import hashlib
from typing import Any, NamedTuple

from elastic_resume.rendezvous.core.messages import Message
from elastic_resume.rendezvous.core.world import View
from elastic_resume.rendezvous.net.codec import MAX_MEMBERS, ProtocolError, dump_json, pack_view

MIN_CHARS = 1024
"""A shorter view is sent whole."""
MAX_FIELDS = MAX_MEMBERS + 4
DIGEST_CHARS = 32


class Base(NamedTuple):
    """A view that both sides have, as `codec.pack_view` returns it."""

    digest: str
    packed: str


NO_BASE = Base("", "")


@functools.lru_cache(maxsize=8)
def make_base(text: str) -> Base:
    """Return a text with its digest; the newest ones are kept, since all connections have the same."""
    return Base(hashlib.sha256(text.encode()).hexdigest()[:DIGEST_CHARS], text)


def find_view(message: Message) -> View | None:
    """Return the view in a message, if it has one."""
    holder = getattr(message, "proposal", None) or getattr(message, "accepted", None) or message
    view = getattr(holder, "view", None)
    return view if isinstance(view, View) else None


def next_base(message: Message, base: Base) -> Base:
    """Return the base of a direction after a message."""
    view = find_view(message)
    return base if view is None else make_base(pack_view(view))


def shorten(value: Any, view: View, base: Base) -> Any:
    """Replace the view in the plain data of a message by its difference to ``base``, if that is shorter."""
    text = pack_view(view)
    if len(text) < MIN_CHARS or not base.packed:
        return value
    delta = _make_delta(base, text)
    return value if delta is None else _replace(value, text, delta)


def _replace(value: Any, text: str, delta: dict[str, Any]) -> Any:
    if isinstance(value, list):
        return [_replace(item, text, delta) for item in value]
    return delta if value == text else value


@functools.lru_cache(maxsize=8)
def _split(base: Base) -> list[str]:
    return base.packed.split(";")


@functools.lru_cache(maxsize=8)
def _make_delta(base: Base, text: str) -> dict[str, Any] | None:
    """Return the object that stands for ``text``, or None if it is no shorter."""
    places = {field: place for place, field in enumerate(_split(base))}
    runs: list[Any] = []
    for field in text.split(";"):
        place = places.get(field)
        if place is None:
            runs.append(field)
        elif runs and isinstance(runs[-1], list) and sum(runs[-1]) == place:
            runs[-1][1] += 1
        else:
            runs.append([place, 1])
    delta = {"base": base.digest, "fields": runs}
    return delta if len(dump_json(delta)) < len(text) else None


def restore(value: dict[str, Any], base: Base) -> Any:
    """Return the text of a view for an object of `shorten`, and every other object of a line unchanged.

    Raises:
        ProtocolError: it refers to another base, or not to fields of it.

    """
    if value.keys() != {"base", "fields"}:
        return value
    if not base.digest or value["base"] != base.digest:
        raise ProtocolError("a view that is described by one which this node does not have")
    known = _split(base)
    if value["fields"] == [[0, len(known)]]:
        return base.packed  # the same object, whose view is known
    fields: list[str] = []
    for item in value["fields"] if isinstance(value["fields"], list) else [None]:
        if isinstance(item, str):
            fields.append(item)
        elif isinstance(item, list) and len(item) == 2 and all(type(number) is int for number in item):
            first, count = item
            if not (first >= 0 and count > 0 and first + count <= len(known)):
                raise ProtocolError("a view with fields that its base does not have")
            fields += known[first : first + count]
        else:
            raise ProtocolError("a view that is not fields of its base, or new ones")
        if len(fields) > MAX_FIELDS:
            raise ProtocolError(f"a view of more than {MAX_MEMBERS} members")
    return ";".join(fields)
