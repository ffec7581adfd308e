"""docs/troubleshooting.md has an entry for each message, and each entry quotes a message that exists.

An entry is a term of a definition list. Each text between backquotes in a term quotes the constant part of a
message; ``…`` stands for the parts that vary. A quote covers every message that contains it; a quote of one
word covers those that begin with it.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support.paths import ROOT

PRODUCT = ROOT / "elastic_resume"
PAGE = ROOT / "docs" / "troubleshooting.md"
HOLE = "…"
LOG_METHODS = {"warning", "error", "exception", "critical"}
# A message with fewer words of its own repeats the text of another error.
MIN_WORDS = 2

# Modules whose messages stand under one entry of the page each, with the reason.
NOT_LISTED = {
    "testing/faults.py": "each message names the fault of a test and what to write there",
    "testing/virtual_network.py": "arguments of simulated networks, for tests of this project",
}


class Message(NamedTuple):
    """One message of the product: file and line, and its text with ``…`` for what varies."""

    place: str
    text: str


def error_classes() -> set[str]:
    """Return the names of all classes in elastic_resume.errors."""
    tree = ast.parse((PRODUCT / "errors.py").read_text())
    return {node.name for node in tree.body if isinstance(node, ast.ClassDef)}


def template(node: ast.expr, names: dict[str, list[ast.expr]]) -> str:
    """Return the constant parts of a string expression; names are looked up among the file's assignments."""
    match node:
        case ast.Constant(value=str(text)):
            return re.sub(r"%[-.\d]*[sdfgr]|\{[^{}]*\}", HOLE, text)
        case ast.JoinedStr(values=values):
            return "".join(template(value, {}) for value in values)
        case ast.BinOp(op=ast.Add(), left=left, right=right):
            return template(left, names) + template(right, names)
        case ast.IfExp(body=body, orelse=orelse):
            return f"{template(body, names)}{HOLE}{template(orelse, names)}"
        case ast.Call(func=ast.Attribute(value=ast.Name(), attr="format") as method):
            return template(method.value, names)
        case ast.Name(id=name) if name in names:
            return HOLE.join(template(value, {}) for value in names[name])
    return HOLE


def assignments(tree: ast.AST) -> dict[str, list[ast.expr]]:
    """Return the values that each plain name is assigned or incremented by, anywhere in the file."""
    found: dict[str, list[ast.expr]] = {}
    for node in ast.walk(tree):
        match node:
            case (
                ast.Assign(targets=[ast.Name(id=name)], value=value)
                | ast.AugAssign(target=ast.Name(id=name), value=value)
            ):
                found.setdefault(name, []).append(value)
    return found


def called_name(call: ast.Call) -> str:
    """Return the last name of what is called."""
    match call.func:
        case ast.Name(id=name):
            return name
        case ast.Attribute(attr=name):
            return name
    return ""


@functools.cache
def parse(path: Path) -> ast.Module:
    """Return the tree of a file."""
    return ast.parse(path.read_text())


def messages() -> Iterator[Message]:
    """Yield the message of each error that is constructed, and of each warning and error that is logged."""
    classes = error_classes()
    for path in sorted(PRODUCT.rglob("*.py")):
        module = path.relative_to(PRODUCT).as_posix()
        if module in NOT_LISTED:
            continue
        tree = parse(path)
        names = assignments(tree)
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call) or not node.args:
                continue
            is_logged = isinstance(node.func, ast.Attribute) and node.func.attr in LOG_METHODS
            if is_logged or called_name(node) in classes:
                text = " ".join(template(node.args[0], names).split())
                if len(re.findall(r"[A-Za-z]{2,}", text)) >= MIN_WORDS:
                    yield Message(f"{module}:{node.lineno}", text)


def all_texts() -> str:
    """Return every string of the product as a template, one on each line."""
    found: list[str] = []
    for path in sorted(PRODUCT.rglob("*.py")):
        nodes = ast.walk(parse(path))
        strings = (node for node in nodes if isinstance(node, ast.JoinedStr | ast.Constant))
        found.extend(" ".join(template(node, {}).split()) for node in strings)
    return "\n".join(found)


def quotes(page: str) -> list[str]:
    """Return the quotes in the terms of the page's definition lists."""
    terms = re.findall(r"^(.+)\n(?:: )", page, re.MULTILINE)
    return [quote for term in terms for quote in re.findall(r"`([^`]+)`", term)]


class Quote:
    """Finds a quote in templates, one on each line."""

    def __init__(self, text: str) -> None:
        self.text = text
        self._first, *self._others = [part for part in text.split(HOLE) if part]
        if " " not in text.replace(f" {HOLE}", "") and not text.startswith(HOLE):
            self._first = f"\n{self._first}"

    def is_in(self, templates: str) -> bool:
        """Return whether a line has its parts in their order. An expression takes ten times as long."""
        templates = f"\n{templates}\n"
        place = templates.find(self._first)
        while place >= 0:
            line = templates[place + len(self._first) : templates.index("\n", place + len(self._first))]
            for part in self._others:
                _, found, line = line.partition(part)
                if not found:
                    break
            else:
                return True
            place = templates.find(self._first, place + 1)
        return False


@pytest.fixture(scope="module")
def page_quotes() -> list[str]:
    """Return the quotes of the page."""
    found = quotes(PAGE.read_text())
    assert found, "no entry was found"
    return found


def test_each_message_has_an_entry(page_quotes: list[str]) -> None:
    """Every message has an entry that quotes its constant part, and no quote covers too many."""
    found = list(messages())
    assert len(found) > 200, "the messages were not collected"
    covering = [Quote(text) for text in page_quotes]
    missing = [f"{m.place} {m.text}" for m in found if not any(q.is_in(m.text) for q in covering)]
    assert not missing, "\n".join(missing)
    broad = [q.text for q in covering if sum(q.is_in(m.text) for m in found) > len(found) / 15]
    assert not broad, "a quote that is hardly more than an ellipsis: " + "\n".join(broad)


def test_each_entry_quotes_an_existing_message(page_quotes: list[str]) -> None:
    """An entry whose message was changed or removed is found."""
    texts = all_texts()
    stale = [quote for quote in page_quotes if not Quote(quote).is_in(texts)]
    assert not stale, "\n".join(stale)


def test_no_entry_is_there_twice(page_quotes: list[str]) -> None:
    """A message with two entries has two explanations."""
    assert sorted(page_quotes) == sorted(set(page_quotes))
