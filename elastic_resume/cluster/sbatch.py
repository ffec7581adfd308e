"""The batch scripts of deploy/slurm, filled in: `elastic-resume manifest slurm`.

Promise: what is printed names its script and all that it is given, so that ``sbatch FILE`` is enough; words
reach the script as they are written. What Slurm would refuse for its form is a ConfigError. Does not know the
site: its partitions, limits and generic resources.
"""

from __future__ import annotations

import argparse
import re
import shlex
from typing import Any

from elastic_resume.cluster.filling import filled
from elastic_resume.cluster.inputs import add_command, name_of, nodes_of, whole
from elastic_resume.errors import ConfigError

SHAPES = {"allocation": "train.sbatch", "array": "array.sbatch"}
DEFAULT_CPUS = "4"
DEFAULT_TIME = "24:00:00"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_SIZE = re.compile(r"[1-9][0-9]{0,8}[KMGT]?")
_TIME = re.compile(r"[1-9][0-9]{0,6}|(\d{1,3}-)?\d{1,2}:\d{2}(:\d{2})?|\d{1,3}-\d{1,2}")


def add(kinds: argparse._SubParsersAction[Any]) -> None:
    """Add the subcommand."""
    one = kinds.add_parser(
        "slurm",
        help="a batch script: one allocation, or an array of one-node elements",
        epilog="example: elastic-resume manifest slurm --nodes 2:3 --gpus 8 -- train.py > job.sbatch; "
        "sbatch job.sbatch",
    )
    flag = one.add_argument
    flag("--nodes", required=True, metavar="N|MIN:MAX", help="nodes; and on how few training goes on")
    flag(
        "--shape",
        choices=tuple(SHAPES),
        default="allocation",
        help="one allocation that goes on with what is left, or an array whose elements go and come back one "
        "by one (default %(default)s)",
    )
    flag("--name", metavar="NAME", help="of the job (default: the script's)")
    flag("--gpus", default="0", metavar="N", help="of each node, and as many workers (default 0: one worker)")
    flag("--cpus", metavar="N", help=f"of each node (default: {DEFAULT_CPUS}; of an array: the whole node's)")
    flag("--memory", default="", metavar="SIZE", help="of each node, as 200G (default: the partition's)")
    flag("--time", default=DEFAULT_TIME, metavar="TIME", help="limit, as D-HH:MM:SS (default %(default)s)")
    flag("--partition", default="", metavar="NAME", help="default: the site's")
    add_command(one)
    one.set_defaults(function=print_slurm)


def print_slurm(args: argparse.Namespace) -> int:
    """``elastic-resume manifest slurm``."""
    print(render(args), end="")
    return 0


def render(args: argparse.Namespace) -> str:
    """Give the script.

    Raises:
        ConfigError: Slurm would refuse it.

    """
    least, nodes = nodes_of(args.nodes)
    name = args.name or name_of(args.command)
    for flag, text in (("--name", name), ("--partition", args.partition)):
        if text and not _NAME.fullmatch(text):
            raise ConfigError(f"{flag} is {text!r}: letters, digits, dots and dashes make a name.")
    if args.memory and not _SIZE.fullmatch(args.memory):
        raise ConfigError(f"--memory is {args.memory!r}: write a size as Slurm does, 200G or 512M.")
    if not _TIME.fullmatch(args.time):
        raise ConfigError(f"--time is {args.time!r}: write minutes, or D-HH:MM:SS.")
    gpus = whole("--gpus", args.gpus, 0, 64)
    words = args.command if ":" not in args.nodes else [f"--nnodes={least}:{nodes}", *args.command]
    return fill(
        SHAPES[args.shape],
        name=name,
        nodes=nodes,
        gpus=str(gpus) if gpus else "",
        cpus=str(whole("--cpus", args.cpus, 1, 100_000)) if args.cpus else "",
        memory=args.memory,
        time=args.time,
        partition=args.partition,
        command=shlex.join(words),
    )


def fill(template: str, *, nodes: int, **values: str) -> str:
    """Fill one of the two scripts; a word that is not given is empty."""
    if template == SHAPES["allocation"]:
        values["cpus"] = values.get("cpus") or DEFAULT_CPUS
    words = ("gpus", "cpus", "memory", "partition", "command")
    known = {**dict.fromkeys(words, ""), "name": "elastic-resume", "time": DEFAULT_TIME, **values}
    return filled(f"slurm/{template}", {**known, "nodes": str(nodes), "last": str(nodes - 1)})
