"""The names in a node list of Slurm.

Promise: a list that is not understood is a ConfigError that shows it, never a guess, and no list makes us
build more than `MAX_NAMES` names. Does not need ``scontrol``, which containers often lack: what only Slurm's
own commands can tell is in `slurm_job`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import product

from elastic_resume.errors import ConfigError

# What Slurm itself expands at most, of one bracket and of one list.
MAX_NAMES = 65536
_NUMBER = r"[0-9]{1,18}"
_RANGE = re.compile(rf"({_NUMBER})(?:-({_NUMBER}))?")
_PIECE = re.compile(r"([A-Za-z0-9._-]*)(?:\[([^][]*)\])?")


def hostnames(text: str) -> list[str]:
    """Expand a node list as ``scontrol show hostnames`` does, in its order: ``n[1-2,07],gpu3``.

    Several brackets in a name (``r[1-2]n[01-10]``) and what follows one are understood too; Slurm 22.05
    itself refuses the latter. A name that is listed twice is given twice.

    Args:
        text: SLURM_JOB_NODELIST or its like.

    Raises:
        ConfigError: it is no node list, or one of more than `MAX_NAMES` names.

    """
    names: list[str] = []
    for word in _words(text):
        literals, ranges = _parts(word, text)
        count = 1
        for one in ranges:
            count *= sum(last - first + 1 for first, last, _ in one)
        if len(names) + count > MAX_NAMES:
            raise _unreadable(text, f"it stands for more than {MAX_NAMES} names")
        names += _expanded(literals, [list(_numbers(one)) for one in ranges])
    return names


def _words(text: str) -> Iterator[str]:
    """Split at the commas that stand outside of brackets."""
    start = depth = 0
    for at, letter in enumerate(text):
        depth += (letter == "[") - (letter == "]")
        if letter == "," and depth == 0:
            yield text[start:at]
            start = at + 1
    yield text[start:]


def _parts(word: str, text: str) -> tuple[list[str], list[list[tuple[int, int, int]]]]:
    """Take a word apart: what stands before, between and behind its brackets, and the ranges in each."""
    literals, ranges, at = [""], [], 0
    while at < len(word):
        match = _PIECE.match(word, at)
        if match is None or match.end() == at:
            raise _unreadable(text, f"{word[at]!r} at {word[:100]!r}")
        at = match.end()
        literals[-1] += match[1]
        if match[2] is not None:
            ranges.append([_range(part, text) for part in match[2].split(",")])
            literals.append("")
    if not word:
        raise _unreadable(text, "a name is missing")
    return literals, ranges


def _range(part: str, text: str) -> tuple[int, int, int]:
    """Read ``3``, ``3-5`` or ``08-11``: first, last, and how many digits each has at least."""
    match = _RANGE.fullmatch(part)
    if match is None:
        raise _unreadable(text, f"[{part[:100]}] holds no range of numbers")
    first, last = int(match[1]), int(match[2] or match[1])
    if last < first:
        raise _unreadable(text, f"[{part}] ends before it begins")
    return first, last, len(match[1])


def _numbers(ranges: list[tuple[int, int, int]]) -> Iterator[str]:
    for first, last, width in ranges:
        for number in range(first, last + 1):
            yield f"{number:0{width}d}"


def _expanded(literals: list[str], brackets: list[list[str]]) -> Iterator[str]:
    """All names of one word. Slurm's order: the last bracket runs fastest, then the first, the second, …."""
    *earlier, last = brackets or [[""]]
    for slow_to_fast in product(*reversed(earlier), last):
        *others, fastest = slow_to_fast
        numbers = [*reversed(others), fastest]
        name = literals[0]
        for number, literal in zip(numbers, [*literals[1:], ""][: len(numbers)], strict=True):
            name += number + literal
        yield name


def _unreadable(text: str, why: str) -> ConfigError:
    shown = text if len(text) <= 200 else text[:200] + "…"
    return ConfigError(f"the Slurm node list {shown!r} cannot be read: {why}.")
