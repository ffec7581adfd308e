"""Reference pages from the source: commands and flags from the parsers, settings from their declarations.

In a page, `{command-line}` becomes a section for each command, `{settings-table}` a table of all settings,
and `{rendezvous-table}` the keys of ``--rdzv-conf``. Docstrings write `er.resume` as users do. A name without
a page stays plain text if Python finds it; any other name is a warning.
"""

from __future__ import annotations

import argparse
import inspect
import pydoc
import re
from typing import Any

from docutils import nodes
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.util.docutils import SphinxDirective

import elastic_resume as er
from elastic_resume import cli, config
from elastic_resume.rendezvous.rendezvous_config import CONF_KEYS


def escape(text: str) -> str:
    """Return ``text`` as Markdown that shows it unchanged, with flags as code."""
    parts = re.split(r"(--[a-z][\w-]*)", " ".join(text.split()))
    plain = (re.sub(r"([\\`*_{}\[\]<>|$#@:])", r"\\\1", part) for part in parts[::2])
    code = [*(f"`{flag}`" for flag in parts[1::2]), ""]
    return "".join(word for pair in zip(plain, code, strict=True) for word in pair)


def subcommands() -> dict[str, argparse.ArgumentParser]:
    """Return the parser of each command of ``elastic-resume``."""
    for action in cli.build_parser()._actions:
        if isinstance(action, argparse._SubParsersAction):
            return dict(action.choices)
    raise LookupError("elastic-resume has no commands")


def describe_action(parser: argparse.ArgumentParser, action: argparse.Action) -> list[str]:
    """Return the lines of a definition list for one flag or argument."""
    formatter = parser._get_formatter()
    words = formatter._format_action_invocation(action)
    if action.option_strings:
        value = words.rpartition(action.option_strings[-1])[2]
        # torchrun has each flag with underscores too.
        names = [f"{name}{value}" for name in action.option_strings if "_" not in name]
    else:
        names = [words]
    text = formatter._expand_help(action) if action.help else ""
    return [", ".join(f"`{name}`" for name in names), f": {escape(text) or '…'}", ""]


def command_lines() -> list[str]:
    """Return the Markdown of all commands."""
    lines: list[str] = []
    for name, parser in subcommands().items():
        lines += [f"## elastic-resume {name}", "", escape(parser.description or ""), ""]
        for group in parser._action_groups:
            shown = [action for action in group._group_actions if action.help != argparse.SUPPRESS]
            if shown and group.title not in {"options", "positional arguments"}:
                lines += [f"### {escape(group.title or '')}", "", escape(group.description or ""), ""]
            for action in shown:
                if action.dest != "help":
                    lines += describe_action(parser, action)
    return lines


def settings_lines() -> list[str]:
    """Return the Markdown of a table with each setting's name, flag, argument of `er.resume` and variable."""
    arguments = inspect.signature(er.resume).parameters
    lines = ["| name, flag, argument, variable | default | meaning |", "|---|---|---|"]
    for option in config.OPTIONS:
        if not option.help:
            continue
        names = [option.name]
        names += [f"--{option.name}"] if option.has_flag else []
        names += [f"{option.field}="] if option.field in arguments else []
        names += [option.variable]
        cell = "<br>".join(f"`{name}`" for name in names)
        form = f"{option.metavar}: " if option.metavar else ""
        text = form + option.help + (f"; {option.details}" if option.details else "")
        lines.append(f"| {cell} | {escape(option.default_text)} | {escape(text)} |")
    return lines


def rendezvous_lines() -> list[str]:
    """Return the Markdown of a table with the keys of ``--rdzv-conf``."""
    rows = [f"| `{key}` | {escape(text)} |" for key, text in CONF_KEYS.items()]
    return ["| key of `--rdzv-conf` | value |", "|---|---|", *rows]


class CommandLine(SphinxDirective):
    """A section for each command, with its flags by group."""

    def run(self) -> list[nodes.Node]:
        """Return the sections."""
        return self.parse_text_to_nodes("\n".join(command_lines()), allow_section_headings=True)


class SettingsTable(SphinxDirective):
    """The table of settings."""

    def run(self) -> list[nodes.Node]:
        """Return the table."""
        found = self.parse_text_to_nodes("\n".join(settings_lines()))
        for table in (table for node in found for table in node.findall(nodes.table)):
            table["classes"].append("settings")  # for site.css
        return found


class RendezvousTable(SphinxDirective):
    """The table of the keys of ``--rdzv-conf``."""

    def run(self) -> list[nodes.Node]:
        """Return the table."""
        return self.parse_text_to_nodes("\n".join(rendezvous_lines()))


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
    module, class_name = node.get("py:module"), node.get("py:class")
    places = (target, f"{module}.{target}", f"{module}.{class_name}.{target}")
    return text if any(pydoc.locate(place) is not None for place in places) else None


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the directives and the names."""
    app.add_directive("command-line", CommandLine)
    app.add_directive("settings-table", SettingsTable)
    app.add_directive("rendezvous-table", RendezvousTable)
    app.connect("missing-reference", resolve_name, priority=900)  # after intersphinx
    return {"parallel_read_safe": True}
