"""HTML and SVG that cannot be broken by what they show.

Promise: text becomes text. What is not `Markup` is escaped, in children and in attributes alike, and loses
what no page may hold (control characters); only this module makes `Markup` of text.
"""

from __future__ import annotations

import html
from collections.abc import Iterable

from elastic_resume.report.text import clean, cut

MAX_TEXT = 4000  # characters of one text: a message may be as long as its writer likes
_VOID = frozenset({"meta", "link", "br", "hr", "rect", "line", "use", "path", "circle"})


class Markup(str):
    """Text that is HTML already."""

    __slots__ = ()


def text(value: object) -> Markup:
    """``value`` as text of a page, on one line."""
    if isinstance(value, Markup):
        return value
    return Markup(html.escape(clean(cut(str(value), MAX_TEXT))))


def lines(value: str, limit: int) -> Markup:
    """``value`` as text that keeps its lines, for ``<pre>``."""
    return Markup("\n".join(html.escape(clean(line)) for line in cut(value, limit).splitlines()))


def tag(name: str, *children: object, **attributes: object) -> Markup:
    """One element. ``class_`` and ``for_`` are ``class`` and ``for``; ``stroke_width`` is ``stroke-width``.

    An attribute that is None or False is left out; True gives the bare name.
    """
    words = [name]
    for key, value in attributes.items():
        if value is None or value is False:
            continue
        label = key.rstrip("_").replace("_", "-")
        words.append(label if value is True else f'{label}="{text(value)}"')
    opened = " ".join(words)
    if name in _VOID and not children:
        return Markup(f"<{opened}/>")
    return Markup(f"<{opened}>{joined(children)}</{name}>")


def joined(children: Iterable[object]) -> Markup:
    """Elements and texts one after the other; None is nothing."""
    return Markup("".join(text(child) for child in children if child is not None))
