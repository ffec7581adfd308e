"""``elastic-resume diff A B``: what `worker.difference` has found, for people and for programs.

Exit codes are those of ``diff``: 0 they are the same, 1 they differ, 2 one of them could not be read.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from elastic_resume import contract
from elastic_resume.errors import ElasticResumeError
from elastic_resume.report.saying import say
from elastic_resume.report.text import amount, clean

if TYPE_CHECKING:
    from elastic_resume.worker.difference import Comparison, Difference, Side

SAME, DIFFERENT, TROUBLE = contract.EXIT_DONE, contract.EXIT_AT_FAULT, contract.EXIT_USAGE
_SHOWN = 20


def register(subparsers: argparse._SubParsersAction[Any]) -> None:
    """Add the parser; it sets ``function``."""
    one = subparsers.add_parser(
        "diff", help="where two checkpoints differ; exit 0 same, 1 different, 2 trouble"
    )
    one.add_argument("a", type=Path, metavar="A", help="a checkpoint; or a node or a run, for its newest")
    one.add_argument("b", type=Path, metavar="B", help="another one")
    one.add_argument("--all", action="store_true", help=f"list every difference, not the first {_SHOWN}")
    one.add_argument("--json", action="store_true", help="all differences, as one JSON object")
    one.set_defaults(function=diff)


def diff(args: argparse.Namespace) -> int:
    """Print the differences."""
    from elastic_resume.worker import difference  # noqa: PLC0415  imports torch, seconds

    try:
        found = difference.compare(args.a, args.b)
    except ElasticResumeError as error:
        print(f"elastic-resume diff: {error}", file=sys.stderr)
        return TROUBLE
    except Exception as error:  # noqa: BLE001  whatever it is: Python's own exit code would say "different"
        print(f"elastic-resume diff: a fault of elastic_resume itself: {error!r}", file=sys.stderr)
        return TROUBLE
    lines = [as_json(found)] if args.json else as_text(found, len(found.differences) if args.all else _SHOWN)
    say("\n".join(lines) + "\n")
    return DIFFERENT if found.differences else SAME


def as_json(found: Comparison) -> str:
    """Give all there is; an infinite distance is the string "inf", since JSON has no such number."""
    told = {"same": not found.differences, **asdict(found)}
    for one in told["differences"]:
        for key in ("max_abs", "max_rel"):
            one[key] = one[key] if math.isfinite(one[key]) else "inf"
    return json.dumps(told)


def as_text(found: Comparison, shown: int) -> list[str]:
    """Lines for a terminal: both sides, the differences, and how many there are."""
    lines = [f"A: {_side(found.a)}", f"B: {_side(found.b)}"]
    lines += [clean(_line(one)) for one in found.differences[:shown]]
    hidden = len(found.differences) - shown
    if hidden > 0:
        lines.append(f"and {amount(hidden, 'more difference')}; --all lists them")
    compared = f"{amount(found.tensors, 'tensor')} and {amount(found.others, 'other value')} compared"
    if not found.differences:
        return [*lines, f"the same: {compared}"]
    return [*lines, f"{amount(len(found.differences), 'difference')}: {compared}"]


def _side(side: Side) -> str:
    return clean(f"{side.path} (generation {side.generation}, step {side.step})")


def _line(one: Difference) -> str:
    if one.kind.startswith("only"):
        return f"  {one.name}: {one.kind} ({one.b if one.kind == 'only in B' else one.a})"
    if one.kind == "value":
        return f"  {one.name}: {one.a} -> {one.b}"
    by = f"{one.elements} of {one.of} differ, by {one.max_abs:.3g} at most, relative {one.max_rel:.3g}"
    if one.kind == "values":
        return f"  {one.name} {one.a}: {by}"
    return f"  {one.name}: {one.kind} {one.a} -> {one.b}{f'; {by}' if one.kind == 'dtype' else ''}"
