"""Print the help of ``elastic-resume run``: one screen for ``--help``, everything for ``--help-all``.

``--help`` lists our flags and the usual ones of torchrun in groups. It does not need torch. A test compares
the names with torchrun's parser.
"""

from __future__ import annotations

import argparse
import sys
import textwrap
from collections.abc import Iterator
from typing import Any

from elastic_resume import config
from elastic_resume.mechanisms.registry import MECHANISM_OPTIONS
from elastic_resume.rendezvous.rendezvous_config import CONF_KEYS
from elastic_resume.report.formatting import write_stdout

USAGE = "[flags] SCRIPT [arguments of the script]"
HELP_COLUMN = 28
HELP_WIDTH = 80
_OURS = {option.name: option for option in config.FLAG_OPTIONS}


def _list_mechanism_flags(group: str) -> list[str]:
    return [o.name for o in MECHANISM_OPTIONS if o.has_flag and o.help_group == group]


# Each entry is a name of our table, or torchrun's flag with its help.
GROUPS: dict[str, tuple[str | tuple[str, str], ...]] = {
    "job": (
        ("--nnodes N|MIN:MAX", "nodes of the job (default 1)"),
        ("--nproc-per-node N", "workers of this node, or gpu, cpu, auto (default 1)"),
        ("--standalone", "one node; ignore the environment"),
        ("-m, --module", "SCRIPT is a module, as for python -m"),
        ("--no-python", "SCRIPT is a program, not Python"),
    ),
    "rendezvous": (
        ("--rdzv-endpoint HOST,...", "nodes that may lead at the start; same on each node"),
        ("--rdzv-id NAME", "name of the job (default: the script's name)"),
        ("--rdzv-conf KEY=VALUE,...", ", ".join(CONF_KEYS)),
        ("--local-addr ADDRESS", "address at which other nodes reach this one"),
        "node-timeout",
    ),
    "processes and logs": (
        ("--log-dir DIR", "directory of the workers' logs"),
        ("-r, --redirects 1|2|3", "workers' stdout (1), stderr (2) or both into logs"),
        ("-t, --tee 1|2|3", "the same, and to the console too"),
        *_list_mechanism_flags("processes and logs"),
        "preload",
    ),
    "checkpoints": (
        *("ckpt-dir", "save-every", "snapshot-every", "keep"),
        *_list_mechanism_flags("checkpoints"),
        *("resume", "resume-from"),
    ),
    "recovery": (
        ("--max-restarts N", "end the job after N restarts (default: no limit)"),
        *_list_mechanism_flags("recovery"),
        "grace",
        "prove",
    ),
    "other": (
        "metrics",
        "quiet",
        ("--config FILE", "YAML file with flags, settings and the script"),
        ("--show-config", "print each setting with its source, and exit"),
        ("-h, --help", "print this and exit"),
        ("--help-all", "print all flags, torchrun's too, and all settings"),
    ),
}


# Help of torchrun's flags that mean something else here, by destination.
CHANGED_HELP = {
    "rdzv_backend": "c10d and static are accepted and mean our rendezvous; etcd is refused",
    "rdzv_endpoint": "HOST[:PORT],...: nodes that may lead at the start, such as three; same on each node",
    "rdzv_id": "name of the job and of its directory (default: the scheduler's job, else the script's name)",
    "rdzv_conf": "KEY=VALUE,...: settings of the rendezvous; the keys are listed at the end",
    "standalone": "one node; ignore the environment",
    "max_restarts": "end the job after this many restarts (default: no limit while steps advance)",
}


PROG = "elastic-resume run"


class RunParser(config.Parser):
    """The parser of ``run``: ``--help`` prints one screen instead of torchrun's long texts."""

    def print_help(self, file: Any = None) -> None:
        """Print the short help."""
        self._print_message(format_help(), file or sys.stdout)

    def _get_option_tuples(self, option_string: str) -> list[Any]:
        """Count a prefix of several flags as unknown: argparse refuses it even among the script's own flags.

        This method of argparse is not public.
        """
        found: list[Any] = super()._get_option_tuples(option_string)
        return found if len(found) == 1 else []


class HelpAllAction(argparse.Action):
    """Print all flags and settings, and exit."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        """Print all flags and settings, and exit."""
        write_stdout(f"{parser.format_help()}\n{format_other_settings()}")
        parser.exit()


def add_help_all(parser: argparse.ArgumentParser) -> None:
    """Add ``--help-all``, and correct torchrun's help where a flag means something else here."""
    for action in parser._actions:  # noqa: SLF001  argparse has no public accessor
        action.help = CHANGED_HELP.get(action.dest, action.help)
    parser.add_argument(
        "--help-all",
        "--help_all",
        action=HelpAllAction,
        nargs=0,
        default=argparse.SUPPRESS,
        help="print all flags and settings, and exit",
    )


def format_help() -> str:
    """Return the help of one screen."""
    *flags, last = config.STEPS_OR_TIME_FLAGS
    times = (
        f"TIME is seconds, or 500ms, 30s, 5m, 1.5h. A bare N of {', of '.join(flags)} and of {last} is steps."
    )
    return "\n".join([
        f"usage: {PROG} {USAGE}",
        "",
        "elastic_resume runs a script as torchrun does, and continues after failures.",
        f"  {PROG} --nproc-per-node 8 train.py --epochs 90",
        f"  {PROG} --nnodes 2:4 --rdzv-endpoint node0,node1,node2 train.py",
        *(line for title, entries in GROUPS.items() for line in ("", f"{title}:", *_format_group(entries))),
        "",
        textwrap.fill(times, HELP_WIDTH, break_on_hyphens=False),
        "A setting is a flag (--keep 5), a variable (ELASTIC_RESUME_KEEP=5) or a line of",
        "the --config file (keep: 5), in this order; er.resume(keep=5) beats them all.",
        "",
    ])  # fmt: skip


def _format_group(entries: tuple[str | tuple[str, str], ...]) -> Iterator[str]:
    for entry in entries:
        if isinstance(entry, tuple):
            flag, text = entry
        else:
            option = _OURS[entry]
            flag = f"--{option.name} {option.metavar or ''}".rstrip()
            default = f" (default {option.default_text})" if option.metavar else ""
            is_short = len(option.help) + len(default) <= 80 - HELP_COLUMN
            text = option.help + (default if is_short else "")
        yield f"  {flag:<{HELP_COLUMN - 2}}{text}"


def format_other_settings() -> str:
    """Return the settings without a flag and the keys of ``--rdzv-conf``."""
    lines = ["settings without a flag"]
    for option in config.OPTIONS_WITHOUT_FLAG:
        forms = option.metavar or "true|false"
        lines += [f"  {option.variable}={forms}", f"      {option.help} (default {option.default_text})"]
    lines += ["", "keys of --rdzv-conf"]
    lines += [f"  {key + '=':<20}{text}" for key, text in CONF_KEYS.items()]
    return "\n".join(lines) + "\n"
