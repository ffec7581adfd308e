"""The subcommands that look at a run: report, ls, verify, export.

Each is a function from parsed arguments to an exit code. Only ``export`` imports torch.

``elastic-resume diff A B``: what `worker.difference` has found, for people and for programs.

Exit codes are those of ``diff``: 0 they are the same, 1 they differ, 2 one of them could not be read.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from elastic_resume import constants, events
from elastic_resume.errors import CheckpointError, ElasticResumeError, UsageError
from elastic_resume.report import checkpoints, paths, summary, text_report
from elastic_resume.report.checkpoints import CheckpointEntry
from elastic_resume.report.formatting import (
    format_bytes,
    format_count,
    format_seconds,
    replace_unprintable,
    wrap_text,
    write_stdout,
)
from elastic_resume.report.loader import load_run

if TYPE_CHECKING:
    from elastic_resume.checkpoint.manifest import Manifest
    from elastic_resume.state.diff import ComparedCheckpoint, Comparison, Difference


EXIT_OK = constants.EXIT_SUCCESS
EXIT_BAD = constants.EXIT_JOB_ERROR


def register(subparsers: argparse._SubParsersAction[Any]) -> None:
    """Add the parsers of the four commands; each sets ``function``."""
    one = subparsers.add_parser("report", help="what befell a run: generations, causes, lost steps")
    one.add_argument(
        "paths",
        type=Path,
        nargs="+",
        metavar="RUN_DIR",
        help="CKPT_DIR/RUN_ID; or its parts",
    )
    how = one.add_mutually_exclusive_group()
    how.add_argument("--html", type=Path, metavar="FILE", help="write one page that needs nothing else")
    how.add_argument("--json", action="store_true", help="everything that is known, as one JSON object")
    one.set_defaults(function=report)

    one = subparsers.add_parser("ls", help="checkpoints: node, step, size, age, valid or why not")
    one.add_argument("path", type=Path, metavar="CKPT_DIR", help="or the directory of a run or of a node")
    one.set_defaults(function=ls)

    one = subparsers.add_parser("verify", help="check checkpoints; exit 1 when one is bad")
    one.add_argument("path", type=Path, metavar="PATH", help="a checkpoint, or a node's, a run's, all runs'")
    one.add_argument("--deep", action="store_true", help="read all data and check every digest")
    one.set_defaults(function=verify)

    one = subparsers.add_parser("export", help="write one object's tensors to a plain file")
    one.add_argument("path", type=Path, metavar="SOURCE", help="a checkpoint; or the newest of a node or run")
    one.add_argument("target", type=Path, metavar="TARGET", help="the file to write, or DCP's directory")
    what = one.add_mutually_exclusive_group()
    what.add_argument(
        "--object", "--only", default="model", metavar="NAME", help="which tracked object (default model)"
    )
    what.add_argument("--all", action="store_true", help="all objects, epoch and step (torch and dcp only)")
    one.add_argument(
        "--format",
        choices=("safetensors", "torch", "dcp"),
        help="default: torch for .pt .pth .bin .ckpt, else safetensors; dcp makes a directory",
    )
    one.add_argument(
        "--for",
        dest="wrapped",
        choices=("plain", "dp", "ddp"),
        default="plain",
        help="names as a bare model has them (default), or with 'module.' for DataParallel or DDP",
    )
    one.add_argument("--force", action="store_true", help="replace TARGET if it exists")
    one.set_defaults(function=export)


# ---- report --------------------------------------------------------------------------------------------


def report(args: argparse.Namespace) -> int:
    """Print what befell a run, or write the page of it; exit code 0 whatever that was."""
    found = load_run(args.paths)
    told = summary.build_run_report(
        found.events,
        checkpoint_entries=found.checkpoints,
        stacks=found.stacks,
        problems=found.problems,
        now=time.time(),
        boot_stamp=events.boot_fields(),
    )
    for problem in found.problems:
        print(problem, file=sys.stderr)
    if args.html is not None:
        from elastic_resume.report import html  # noqa: PLC0415 - imports jinja2, which no other command needs

        _write_page(args.html, html.render_page(told))
        write_stdout("\n".join(wrap_text(told.verdict.text)) + f"\nwritten to {args.html}\n")
    else:
        write_stdout(summary.format_json(told) if args.json else text_report.format_text(told))
    return EXIT_OK


def _write_page(path: Path, text: str) -> None:
    if str(path) == "-":
        raise UsageError("--html -: give the name of a file to write the page to.")
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{path}: the page cannot be written: {error.strerror or error}.") from error


# ---- ls, verify ----------------------------------------------------------------------------------------


def ls(args: argparse.Namespace) -> int:
    """Print the table of checkpoints; exit code 0 whatever they are worth."""
    write_stdout(checkpoints.format_checkpoints(paths.find_node_dirs(args.path), time.time()))
    return EXIT_OK


def verify(args: argparse.Namespace) -> int:
    """Print one line for each checkpoint; exit code 1 when one is bad, or there is none.

    What lies in quarantine is named, and is no failure: it has been dealt with.
    """
    found = paths.find_node_dirs(args.path)
    counts = {"valid": 0, "bad": 0, "quarantined": 0}
    for item in checkpoints.list_checkpoints(found, deep=args.deep):
        counts[item.state] += 1
        write_stdout("\n".join(wrap_text(_verify_line(item, found.path))) + "\n")
    if not counts["valid"] and not counts["bad"]:
        write_stdout(f"{args.path}: no checkpoints here\n")
        return EXIT_BAD
    how = "every digest checked" if args.deep else "quick check; --deep reads all data"
    aside = f", {counts['quarantined']} quarantined" if counts["quarantined"] else ""
    write_stdout(f"{counts['valid']} valid, {counts['bad']} bad{aside} ({how})\n")
    return EXIT_BAD if counts["bad"] else EXIT_OK


def _verify_line(item: CheckpointEntry, base: Path) -> str:
    name = str(item.path.relative_to(base)) if item.path != base else item.path.name
    if item.state == "valid":
        return f"ok   {name}  {format_bytes(item.bytes)}"
    return f"{'BAD ' if item.state == 'bad' else 'aside'} {name}: {item.reason}"


# ---- export --------------------------------------------------------------------------------------------


def export(args: argparse.Namespace) -> int:
    """Write the tensors of one object to a plain file."""
    found = paths.find_node_dirs(args.path)
    from elastic_resume.state import export as exporting  # noqa: PLC0415  imports torch, seconds

    file_format = args.format or exporting.guess_format(args.target)
    for path, manifest in _export_sources(found):
        try:
            done = exporting.export(
                path,
                manifest,
                args.target,
                name=None if args.all else args.object,
                file_format=file_format,
                wrapped=args.wrapped,
                force=args.force,
            )
        except CheckpointError as error:
            if found.level == "checkpoint":
                raise
            print(f"not used: {error}", file=sys.stderr)
            continue
        age = format_seconds(max(0.0, time.time() - manifest.written_at))
        what = "all" if args.all else args.object
        write_stdout(
            f"{what} of {path} (generation {manifest.generation}, step {manifest.step}, {age} old)\n"
        )
        write_stdout(
            f"-> {args.target}: {format_count(done.tensor_count, 'tensor')}, {format_bytes(done.byte_count)}, {file_format}\n"
        )
        if done.skipped:
            more = f" and {len(done.skipped) - 5} more" if len(done.skipped) > 5 else ""
            write_stdout(
                "\n".join(wrap_text(f"left out, not tensors: {', '.join(done.skipped[:5])}{more}")) + "\n"
            )
        return EXIT_OK
    raise UsageError(f"{args.path}: holds no valid checkpoint; `elastic-resume ls` says why.")


def _export_sources(found: paths.FoundPath) -> Iterator[tuple[Path, Manifest]]:
    """The checkpoint that was named, or those of the nodes, newest first."""
    from elastic_resume.checkpoint.reader import quick_check  # noqa: PLC0415

    if found.level == "checkpoint":
        yield found.path, quick_check(found.path, None)
        return
    if len(found.run_ids) > 1:
        raise UsageError(
            f"{found.path}: holds {len(found.run_ids)} runs; give one: {', '.join(found.run_ids[:20])}."
        )
    valid = [item for item in checkpoints.list_checkpoints(found) if item.state == "valid"]
    for item in sorted(valid, key=lambda item: (item.generation or 0, item.step or 0), reverse=True):
        try:
            yield item.path, quick_check(item.path, None)
        except CheckpointError as error:  # pruned meanwhile by a run that goes on
            print(f"not used: {error}", file=sys.stderr)


SAME, DIFFERENT, READ_FAILED = constants.EXIT_SUCCESS, constants.EXIT_JOB_ERROR, constants.EXIT_USAGE
MAX_SHOWN = 20


def register_diff(subparsers: argparse._SubParsersAction[Any]) -> None:
    """Add the parser; it sets ``function``."""
    one = subparsers.add_parser(
        "diff", help="where two checkpoints differ; exit 0 same, 1 different, 2 trouble"
    )
    one.add_argument("a", type=Path, metavar="A", help="a checkpoint; or a node or a run, for its newest")
    one.add_argument("b", type=Path, metavar="B", help="another one")
    one.add_argument("--all", action="store_true", help=f"list every difference, not the first {MAX_SHOWN}")
    one.add_argument("--json", action="store_true", help="all differences, as one JSON object")
    one.set_defaults(function=diff)


def diff(args: argparse.Namespace) -> int:
    """Print the differences."""
    from elastic_resume.state.diff import compare  # noqa: PLC0415  imports torch, seconds

    try:
        found = compare(args.a, args.b)
    except ElasticResumeError as error:
        print(f"elastic-resume diff: {error}", file=sys.stderr)
        return READ_FAILED
    except Exception as error:  # noqa: BLE001  whatever it is: Python's own exit code would say "different"
        print(f"elastic-resume diff: a fault of elastic_resume itself: {error!r}", file=sys.stderr)
        return READ_FAILED
    lines = (
        [format_diff_json(found)]
        if args.json
        else format_diff_text(found, len(found.differences) if args.all else MAX_SHOWN)
    )
    write_stdout("\n".join(lines) + "\n")
    return DIFFERENT if found.differences else SAME


def format_diff_json(found: Comparison) -> str:
    """Give all there is; an infinite distance is the string "inf", since JSON has no such number."""
    told = {"same": not found.differences, **asdict(found)}
    for one in told["differences"]:
        for key in ("max_abs_difference", "max_rel_difference"):
            one[key] = one[key] if math.isfinite(one[key]) else "inf"
    return json.dumps(told)


def format_diff_text(found: Comparison, max_shown: int) -> list[str]:
    """Lines for a terminal: both sides, the differences, and how many there are."""
    lines = [f"A: {_format_side(found.checkpoint_a)}", f"B: {_format_side(found.checkpoint_b)}"]
    lines += [replace_unprintable(_format_difference(one)) for one in found.differences[:max_shown]]
    hidden = len(found.differences) - max_shown
    if hidden > 0:
        lines.append(f"and {format_count(hidden, 'more difference')}; --all lists them")
    compared = f"{format_count(found.tensor_count, 'tensor')} and {format_count(found.other_count, 'other value')} compared"
    if not found.differences:
        return [*lines, f"the same: {compared}"]
    return [*lines, f"{format_count(len(found.differences), 'difference')}: {compared}"]


def _format_side(side: ComparedCheckpoint) -> str:
    return replace_unprintable(f"{side.path} (generation {side.generation}, step {side.step})")


def _format_difference(one: Difference) -> str:
    if one.kind.startswith("only"):
        return f"  {one.name}: {one.kind} ({one.value_b if one.kind == 'only in B' else one.value_a})"
    if one.kind == "value":
        return f"  {one.name}: {one.value_a} -> {one.value_b}"
    by = f"{one.differing_elements} of {one.total_elements} differ, by {one.max_abs_difference:.3g} at most, relative {one.max_rel_difference:.3g}"
    if one.kind == "values":
        return f"  {one.name} {one.value_a}: {by}"
    return (
        f"  {one.name}: {one.kind} {one.value_a} -> {one.value_b}{f'; {by}' if one.kind == 'dtype' else ''}"
    )
