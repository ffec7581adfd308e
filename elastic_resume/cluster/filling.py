"""Templates of what schedulers read, and how they are filled.

``{{word}}`` stands for a value; what is between ``{{#word}}`` and ``{{/word}}`` stays where the value is not
empty, between ``{{^word}}`` and ``{{/word}}`` where it is. A marker alone on its line takes the line along.
Nothing else is touched, so that what shells and Kubernetes write as ``${x}`` and ``$(x)`` stays as it is.

Promise: a word without a value is an error of ours, never an empty place. Does not know what it fills.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

TEMPLATES = Path(__file__).with_name("templates")
_SECTION = re.compile(
    r"^[ \t]*\{\{([#^])(\w+)\}\}\n(.*?)^[ \t]*\{\{/\2\}\}\n|\{\{([#^])(\w+)\}\}(.*?)\{\{/\5\}\}",
    re.MULTILINE | re.DOTALL,
)
_WORD = re.compile(r"^([ \t]*)\{\{(\w+)\}\}$|\{\{(\w+)\}\}", re.MULTILINE)


def filled(name: str, values: Mapping[str, str]) -> str:
    """Fill the template of that name, a path under ``templates/``.

    A value of several lines on a line of its own is indented as its place is.
    """
    return fill((TEMPLATES / name).read_text(), values)


def fill(text: str, values: Mapping[str, str]) -> str:
    """Fill a template."""

    def section(match: re.Match[str]) -> str:
        kind, word, inside = match.group(1, 2, 3) if match[1] else match.group(4, 5, 6)
        kept = bool(values[word]) == (kind == "#")
        return fill_sections(inside) if kept else ""

    def fill_sections(part: str) -> str:
        return _SECTION.sub(section, part)

    def word(match: re.Match[str]) -> str:
        if match[2] is None:
            return values[match[3]]
        lines = values[match[2]].removesuffix("\n").split("\n")
        return "\n".join(match[1] + line if line else "" for line in lines)

    return _WORD.sub(word, fill_sections(text))
