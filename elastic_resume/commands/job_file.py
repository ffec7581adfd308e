"""Write what ``--config`` reads: a file from flags, and the effective settings with their sources.

`list_settings` is for ``run --show-config`` and for the node's directory. Its lines are a file again: what
is a default is a comment. No secret is in it: `config_file` refuses those in a file, and words of the script
that look like one are masked.
"""

from __future__ import annotations

import argparse
import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from elastic_resume import config, config_file
from elastic_resume.checkpoint.node_dir import mask_secrets
from elastic_resume.config import DEFAULT, Settings
from elastic_resume.errors import ConfigError
from elastic_resume.units import to_printable

DEFAULT_PATH = "elastic-resume.yaml"
COMMENT_COLUMN = 40
MAX_SHOWN, MAX_SHOWN_CHARS = 60, 100  # settings in the report, and of the text of each
# What torchrun's own defaults mean under `run`, by destination.
OUR_DEFAULTS = {"max_restarts": "unlimited", "monitor_interval": "0.015", "rdzv_backend": "elastic_resume"}
_PLAIN = re.compile(r"(?!(?i:null)\Z)[\w./][\w./:@%+=,-]*(?<!:)", re.ASCII)


class Row(NamedTuple):
    """A setting, its text, and its source: a flag, a variable, FILE:LINE, a scheduler, or default."""

    key: str
    text: str
    origin: str


# ---- the effective settings ----------------------------------------------------------------------------


def list_settings(
    parser: argparse.ArgumentParser, args: argparse.Namespace, settings: Settings, filled: Mapping[str, str]
) -> list[Row]:
    """Return each setting of a start.

    ``args`` are from `config.parse_flags`; ``filled`` has the values of torchrun's flags that the scheduler
    gives, by destination.
    """
    scheduler = filled.get("scheduler", "scheduler")
    command_line = args.sources.get("training_script", "command line")
    rows = [
        Row(config_file.SCRIPT, args.training_script, command_line),
        *(Row("", word, "") for word in mask_secrets(args.training_script_args)),
    ]
    ours = {option.field for option in config.OPTIONS}
    for action in dict.fromkeys(config.actions_by_flag(parser).values()):
        dest = action.dest
        if dest in ours or dest in config.NO_KEYS:
            continue
        variable = f"PET_{dest.upper()}"
        origin = args.sources.get(dest) or (variable if variable in os.environ else DEFAULT)
        origin = args.file_entries[dest].where if dest in args.file_entries and ": " in origin else origin
        text = _format_value(getattr(args, dest))
        if dest in filled:
            text, origin = filled[dest], scheduler
        if dest == "rdzv_id":
            text, origin = settings.run_id, args.origins["run_id"][1]
        rows.append(
            Row(dest.replace("_", "-"), OUR_DEFAULTS.get(dest, text) if origin == DEFAULT else text, origin)
        )
    for option in config.OPTIONS:
        if option.help:
            value, origin = args.origins[option.field]
            text = settings.node_name if option.field == "node_name" else option.show(_format_value(value))
            rows.append(Row(option.name, text or option.default_text, origin))
    for name, entry in args.file.env.items():
        is_overridden = os.environ.get(name, entry.text) != entry.text
        origin = f"{entry.where}; the environment has another value" if is_overridden else entry.where
        rows.append(Row(f"{config_file.ENV} {name}", entry.raw, origin))
    return rows


def _format_value(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return ",".join(map(str, value))
    return "" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def format_settings(rows: Sequence[Row]) -> str:
    """Return the settings as a file of ``--config``, each with its source as a comment."""
    lines, words, variables = [], [row.text for row in rows if not row.key], []
    for row in rows:
        if row.key.startswith(f"{config_file.ENV} "):
            line = f"  {row.key.partition(' ')[2]}: {quote(row.text, has_variables=True)}"
            variables.append(f"{line:<{COMMENT_COLUMN}}  # {row.origin}")
        elif row.key:
            line = f"{'# ' if row.origin == DEFAULT else ''}{row.key}: {quote(row.text)}"
            lines.append(f"{line:<{COMMENT_COLUMN}}  # {row.origin}")
        if row.key == config_file.SCRIPT and words:
            lines += _format_script_args(words)
    return "\n".join([*lines, *([f"{config_file.ENV}:"] if variables else []), *variables]) + "\n"


def list_given(rows: Sequence[Row]) -> list[str]:
    """Return what differs from the defaults, for the report: ``KEY TEXT (SOURCE)``."""
    skipped = {"", config_file.SCRIPT}  # the report has the command
    given = [row for row in rows if row.origin != DEFAULT and row.key not in skipped]
    return [
        f"{row.key} {to_printable(row.text, MAX_SHOWN_CHARS)} ({row.origin})" for row in given[:MAX_SHOWN]
    ]


def quote(text: str, *, has_variables: bool = False) -> str:
    """Return ``text`` as a value of a file, which `config_file` reads as the same text.

    YAML's double quotes know JSON's escapes; a character that is not printable has one of YAML's own.
    """
    escaped = text if has_variables else text.replace("$", "$$")
    if _PLAIN.fullmatch(escaped):
        return escaped
    quoted = json.dumps(escaped, ensure_ascii=False)
    return "".join(char if char.isprintable() else f"\\U{ord(char):08x}" for char in quoted)


def _format_script_args(words: Sequence[str]) -> list[str]:
    return [f"{config_file.SCRIPT_ARGS}:", *(f"- {quote(word)}" for word in words)]


# ---- init ----------------------------------------------------------------------------------------------


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``init`` to those of ``run``."""
    group = parser.add_argument_group("init")
    group.add_argument(
        "--output", metavar="FILE", default=DEFAULT_PATH, help=f"the file (default {DEFAULT_PATH})"
    )
    group.add_argument("--overwrite", action="store_true", help="write it although it is there")


def write_file(parser: argparse.ArgumentParser, words: Sequence[str]) -> Path:
    """Write the flags, the script and its arguments of a command line into a file; return its path.

    Raises:
        ConfigError: the flags are wrong, name a file themselves, or the file is there.

    """
    given, has_script = config.parse_given(parser, words)
    if given.keys() & {"config", "show_config"}:
        raise ConfigError("init writes a file of flags: leave --config and --show-config out.")
    args, _ = config.parse_flags(parser, words if has_script else [*words, config_file.SCRIPT], {})
    text = format_file(parser, args, given, has_script=has_script)
    path = Path(args.output)
    config.check_keys(config_file.parse(str(path), text.encode(), {}), config.actions_by_flag(parser))
    try:
        with open(path, "w" if args.overwrite else "x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise ConfigError(f"{path} is there: give --overwrite to replace it, or another --output.") from None
    except OSError as error:
        raise ConfigError(f"--output {path}: cannot be written: {error.strerror}.") from error
    return path


def format_file(
    parser: argparse.ArgumentParser, args: argparse.Namespace, given: Mapping[str, Any], *, has_script: bool
) -> str:
    """Return a file of the given flags, each below its help."""
    lines = [
        "# Start this job: elastic-resume run --config FILE. A key is a flag without its dashes.",
        "# A flag or a variable beats this file. ${NAME} is a variable, $$ a dollar.",
        "",
        f"{config_file.SCRIPT}: {quote(args.training_script)}"
        if has_script
        else f"# {config_file.SCRIPT}: train.py",
    ]
    if has_script and args.training_script_args:
        lines += _format_script_args(args.training_script_args)
    for action in dict.fromkeys(config.actions_by_flag(parser).values()):
        dest = action.dest
        if dest in given.keys() - config.NO_KEYS - {"output", "overwrite"}:
            help_text = " ".join((action.help or "").split()).replace("%%", "%")
            value = "true" if action.nargs == 0 else _format_value(given[dest])
            lines += [
                "",
                *([f"# {help_text}"] if help_text else []),
                f"{dest.replace('_', '-')}: {quote(value)}",
            ]
    return "\n".join(lines) + "\n"
