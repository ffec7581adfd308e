"""Reference pages from the source: commands and flags from the parsers, settings from their declarations.

`{command-line}` in a page becomes a section for each command, `{settings-table}` a table of all settings. Docstrings write `er.resume` as users do. A
name without a page here stays plain text if Python finds it; any other name is a warning.
"""

from __future__ import annotations

import argparse
import inspect
import pydoc
import re
from collections.abc import Iterator
from typing import Any

from docutils import nodes
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.util.docutils import SphinxDirective

import elastic_resume as er
from elastic_resume import cli, config

DEFAULT = re.compile(r" *\(default:? (.*?)\)$")


def setting_rows() -> Iterator[tuple[list[str], str, str]]:
    """Yield the names, the default and the meaning of each setting.

    The names are the key, the flag, the argument of `er.resume` and the variable, as far as there are.
    """
    flags = config.actions_by_flag(subcommands()["run"])
    arguments = inspect.signature(er.resume).parameters
    for option in config.OPTIONS:
        if not option.help:
            continue
        names = [option.name, f"--{option.name}", f"{option.field}=", option.variable]
        there = [True, names[1] in flags, option.field in arguments, bool(option.variable)]
        found = DEFAULT.search(option.help)
        default = found[1] if found else "" if option.default is None else str(option.default)
        yield (
            [name for name, is_there in zip(names, there, strict=True) if is_there],
            default,
            DEFAULT.sub("", option.help),
        )


def subcommands() -> dict[str, argparse.ArgumentParser]:
    """Return the parser of each command of `elastic-resume`."""
    for action in cli.build_parser()._actions:
        if isinstance(action, argparse._SubParsersAction):
            return dict(action.choices)
    raise LookupError("elastic-resume has no commands")


def escape(text: str) -> str:
    """Return ``text`` as Markdown that shows it unchanged."""
    return re.sub(r"([\\`*_{}\[\]<>|$#@:])", r"\\\1", " ".join(text.split()))


def describe_action(parser: argparse.ArgumentParser, action: argparse.Action) -> list[str]:
    """Return the lines of a definition list for one flag or argument."""
    words = parser._get_formatter()._format_action_invocation(action)
    metavar = words.rpartition(action.option_strings[-1])[2] if action.option_strings else words
    names = [name for name in action.option_strings if "_" not in name] or [""]
    text = action.help or ""
    if text.count("%(") or "%%" in text:
        text = parser._get_formatter()._expand_help(action)
    return [", ".join(f"`{name}{metavar}`" for name in names), f": {escape(text) or '—'}", ""]


class CommandLine(SphinxDirective):
    """A section for each command, with its flags by group."""

    def run(self) -> list[nodes.Node]:
        """Return the sections."""
        lines: list[str] = []
        for name, parser in subcommands().items():
            lines += [f"## elastic-resume {name}", "", escape(parser.description or ""), ""]
            for group in parser._action_groups:
                shown = [action for action in group._group_actions if action.help != argparse.SUPPRESS]
                if not shown:
                    continue
                if group.title not in {"options", "positional arguments"}:
                    lines += [f"### {escape(group.title or '')}", "", escape(group.description or ""), ""]
                for action in shown:
                    if action.dest != "help":
                        lines += describe_action(parser, action)
        return self.parse_text_to_nodes("\n".join(lines), allow_section_headings=True)


class SettingsTable(SphinxDirective):
    """A table of all settings of `elastic-resume run` and `er.resume`."""

    def run(self) -> list[nodes.Node]:
        """Return the table."""
        lines = ["| key, flag, argument, variable | default | meaning |", "|---|---|---|"]
        for names, default, meaning in setting_rows():
            cell = "<br>".join(f"`{name}`" for name in names)
            lines.append(f"| {cell} | {escape(default)} | {escape(meaning)} |")
        return self.parse_text_to_nodes("\n".join(lines))


def resolve_name(
    app: Sphinx, env: BuildEnvironment, node: pending_xref, text: nodes.TextElement
) -> nodes.Node | None:
    """Resolve the names that no page or inventory has; None leads to Sphinx's warning."""
    if node.get("refdomain") not in {"py", None, ""}:
        return None
    target = re.sub(r"^er\.", "elastic_resume.", node["reftarget"]).removesuffix("()")
    python = env.get_domain("py")
    found = python.resolve_xref(env, node["refdoc"], app.builder, "obj", target, node, text)
    if found is not None:
        return found
    places = (
        target,
        f"{node.get('py:module')}.{target}",
        f"{node.get('py:module')}.{node.get('py:class')}.{target}",
    )
    return text if any(pydoc.locate(place) is not None for place in places) else None


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the directives and the names."""
    app.add_directive("command-line", CommandLine)
    app.add_directive("settings-table", SettingsTable)
    app.connect("missing-reference", resolve_name, priority=900)  # after intersphinx
    return {"parallel_read_safe": True}
