"""Run the subcommands that read a run's directories: report, ls, verify, export and diff.

Each is a function from parsed arguments to an exit code. Only ``export`` and ``diff`` import torch. The
exit codes of ``diff`` are those of diff(1): 0 the same, 1 different, 2 a checkpoint could not be read.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from elastic_resume import constants, events
from elastic_resume.archive.address import Address, parse_source
from elastic_resume.archive.location import FoundArchive
from elastic_resume.checkpoint.stored import CheckpointInDirectory, StoredCheckpoint
from elastic_resume.config import DEFAULT_CKPT_DIR
from elastic_resume.errors import CheckpointError, ElasticResumeError, UsageError
from elastic_resume.report import archived_run, checkpoints, summary
from elastic_resume.report.checkpoints import CheckpointEntry, FoundPath
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
    from elastic_resume.state.diff import ComparedCheckpoint, Comparison, Difference


EXIT_OK, EXIT_BAD, EXIT_UNREADABLE = constants.EXIT_SUCCESS, constants.EXIT_JOB_ERROR, constants.EXIT_USAGE
ADDRESS_HELP = "or an address in an archive"
RUN_DIR_HELP = (
    "CKPT_DIR/RUN_ID, directories of its nodes, or a CKPT_DIR with one run (default ./checkpoints); "
    + ADDRESS_HELP
)
MAX_SHOWN = 20  # limit of differences shown


def register(subparsers: argparse._SubParsersAction[Any]) -> None:
    """Add the parsers of these commands; each sets ``function``."""
    parser = subparsers.add_parser(
        "diff", help="compare two checkpoints; exit 0 same, 1 different, 2 unreadable"
    )
    source_help = f"a checkpoint, or a directory for its newest; {ADDRESS_HELP}"
    parser.add_argument("a", type=parse_source, metavar="A", help=source_help)
    parser.add_argument("b", type=parse_source, metavar="B", help="the other checkpoint")
    parser.add_argument("--all", action="store_true", help=f"list all differences, not only {MAX_SHOWN}")
    parser.set_defaults(function=diff)

    parser = subparsers.add_parser("report", help="explain a run: root causes, downtime, goodput")
    parser.add_argument("paths", type=parse_source, nargs="*", metavar="RUN_DIR", help=RUN_DIR_HELP)
    output = parser.add_mutually_exclusive_group()
    output.add_argument("--html", type=Path, metavar="FILE", help="write one self-contained page")
    output.add_argument("--json", action="store_true", help="print everything as one JSON object")
    parser.set_defaults(function=report)

    parser = subparsers.add_parser("ls", help="list checkpoints: node, step, size, age, validity")
    path_help = f"CKPT_DIR, or a run's or node's directory in it (default ./checkpoints); {ADDRESS_HELP}"
    parser.add_argument("path", type=parse_source, nargs="?", metavar="CKPT_DIR", help=path_help)
    parser.set_defaults(function=ls)

    parser = subparsers.add_parser("verify", help="check checkpoints; exit 1 if one is bad")
    path_help = f"a checkpoint, node, run or CKPT_DIR; {ADDRESS_HELP}"
    parser.add_argument("path", type=parse_source, metavar="PATH", help=path_help)
    parser.add_argument("--deep", action="store_true", help="read all data and check every digest")
    parser.set_defaults(function=verify)

    parser = subparsers.add_parser("export", help="write one object's tensors to a plain file")
    parser.add_argument("path", type=parse_source, metavar="SOURCE", help=source_help)
    parser.add_argument("target", type=Path, metavar="TARGET", help="the file to write; a directory for dcp")
    parser.add_argument(
        "--object", "--only", default="model", metavar="NAME", help="the tracked object (default model)"
    )
    parser.add_argument(
        "--format",
        choices=("safetensors", "torch", "dcp"),
        help="default: torch for .pt .pth .bin .ckpt, else safetensors; dcp makes a directory",
    )
    parser.add_argument("--force", action="store_true", help="replace TARGET if it exists")
    parser.set_defaults(function=export)


def default_ckpt_dir() -> Path:
    """Return the CKPT_DIR that `run` would use without a flag."""
    return Path(os.environ.get(constants.ENV_CKPT_DIR) or DEFAULT_CKPT_DIR)


# ---- report --------------------------------------------------------------------------------------------


def report(args: argparse.Namespace) -> int:
    """Print the report of a run, or write its page; the exit code is always 0."""
    with archived_run.copy_events(args.paths or [default_ckpt_dir()]) as (paths, archived):
        loaded = load_run(paths)
    run_report = summary.build_run_report(
        loaded.events,
        checkpoint_entries=[*loaded.checkpoints, *archived],
        stacks=loaded.stacks,
        charts=loaded.charts,
        problems=loaded.problems,
        now=time.time(),
        boot_stamp=events.boot_fields(),
    )
    for problem in loaded.problems:
        print(problem, file=sys.stderr)
    if args.html is not None:
        from elastic_resume.report import html  # noqa: PLC0415 - imports jinja2, which no other command needs

        _write_page(args.html, html.render_page(run_report))
        write_stdout("\n".join(wrap_text(run_report.verdict.text)) + f"\nwritten to {args.html}\n")
    else:
        write_stdout(summary.format_json(run_report) if args.json else summary.format_text(run_report))
    return EXIT_OK


def _write_page(path: Path, text: str) -> None:
    if str(path) == "-":
        raise UsageError("--html -: the page cannot go to stdout; give a file name.")
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{path}: the page cannot be written: {error.strerror or error}.") from error


# ---- ls, verify ----------------------------------------------------------------------------------------


def ls(args: argparse.Namespace) -> int:
    """Print the table of checkpoints; the exit code is always 0."""
    found = checkpoints.find_checkpoints(args.path or default_ckpt_dir())
    write_stdout(checkpoints.format_checkpoints(found, time.time()))
    return EXIT_OK


def verify(args: argparse.Namespace) -> int:
    """Print one line for each checkpoint; exit code 1 if one is bad or there is none.

    Quarantined checkpoints are listed, but are no failure.
    """
    found = checkpoints.find_checkpoints(args.path)
    counts = {"valid": 0, "bad": 0, "quarantined": 0}
    for entry in checkpoints.list_checkpoints(found, deep=args.deep):
        counts[entry.state] += 1
        write_stdout("\n".join(wrap_text(_verify_line(entry, found.path))) + "\n")
    if not counts["valid"] and not counts["bad"]:
        write_stdout(f"{args.path}: no checkpoints here\n")
        return EXIT_BAD
    method = "every digest checked" if args.deep else "quick check; --deep reads all data"
    quarantined = f", {counts['quarantined']} quarantined" if counts["quarantined"] else ""
    write_stdout(f"{counts['valid']} valid, {counts['bad']} bad{quarantined} ({method})\n")
    return EXIT_BAD if counts["bad"] else EXIT_OK


def _verify_line(entry: CheckpointEntry, base: Path | Address) -> str:
    name = str(entry.path).removeprefix(str(base)).lstrip("/") or entry.path.name
    if entry.state == "valid":
        return f"ok   {name}  {format_bytes(entry.bytes)}"
    return f"{'BAD ' if entry.state == 'bad' else 'aside'} {name}: {entry.reason}"


# ---- export --------------------------------------------------------------------------------------------


def export(args: argparse.Namespace) -> int:
    """Write the tensors of one object to a plain file."""
    found = checkpoints.find_checkpoints(args.path)
    from elastic_resume.state import export as exporting  # noqa: PLC0415  imports torch, seconds

    file_format = args.format or exporting.guess_format(args.target)
    for stored in _list_stored(found):
        try:
            manifest = stored.read_manifest()
            exported = exporting.export(
                stored,
                manifest,
                args.target,
                name=args.object,
                file_format=file_format,
                force=args.force,
            )
        except CheckpointError as error:
            if found.level == "checkpoint":
                raise
            print(f"not used: {error}", file=sys.stderr)
            continue
        age_text = format_seconds(max(0.0, time.time() - manifest.written_at))
        write_stdout(
            f"{args.object} of {stored.place} "
            f"(generation {manifest.generation}, step {manifest.step}, {age_text} old)\n"
        )
        size = f"{format_count(exported.tensor_count, 'tensor')}, {format_bytes(exported.byte_count)}"
        write_stdout(f"-> {args.target}: {size}, {file_format}\n")
        if exported.skipped:
            more = f" and {len(exported.skipped) - 5} more" if len(exported.skipped) > 5 else ""
            write_stdout(
                "\n".join(wrap_text(f"left out, not tensors: {', '.join(exported.skipped[:5])}{more}")) + "\n"
            )
        return EXIT_OK
    raise UsageError(f"{args.path}: holds no valid checkpoint; `elastic-resume ls` shows why.")


def _list_stored(found: FoundPath | FoundArchive) -> list[StoredCheckpoint]:
    """Return the named checkpoint, or those of the nodes, newest first."""
    if len(found.run_ids) > 1:
        raise UsageError(
            f"{found.path}: holds {len(found.run_ids)} runs; give one: {', '.join(found.run_ids[:20])}."
        )
    if isinstance(found, FoundArchive):
        return [*found.list_checkpoints()]
    if found.level == "checkpoint":
        return [CheckpointInDirectory(found.path)]
    valid = [entry for entry in checkpoints.list_checkpoints(found) if entry.state == "valid"]
    newest_first = sorted(valid, key=lambda entry: (entry.generation or 0, entry.step or 0), reverse=True)
    return [CheckpointInDirectory(Path(str(entry.path))) for entry in newest_first]


# ---- diff --------------------------------------------------------------------------------------------


def diff(args: argparse.Namespace) -> int:
    """Print where two checkpoints differ."""
    from elastic_resume.state.diff import compare  # noqa: PLC0415  imports torch, seconds

    try:
        comparison = compare(args.a, args.b)
    except ElasticResumeError as error:
        print(f"elastic-resume diff: {error}", file=sys.stderr)
        return EXIT_UNREADABLE
    except Exception as error:  # noqa: BLE001  whatever it is: Python's own exit code would say "different"
        print(f"elastic-resume diff: internal error: {error!r}", file=sys.stderr)
        return EXIT_UNREADABLE
    max_shown = len(comparison.differences) if args.all else MAX_SHOWN
    write_stdout("\n".join(format_diff_text(comparison, max_shown)) + "\n")
    return EXIT_BAD if comparison.differences else EXIT_OK


def format_diff_text(comparison: Comparison, max_shown: int) -> list[str]:
    """Return lines for a terminal: both checkpoints, the differences, and a count."""
    lines = [f"A: {_format_side(comparison.checkpoint_a)}", f"B: {_format_side(comparison.checkpoint_b)}"]
    lines += [_format_difference(difference) for difference in comparison.differences[:max_shown]]
    hidden = len(comparison.differences) - max_shown
    if hidden > 0:
        lines.append(f"and {format_count(hidden, 'more difference')}; --all lists them")
    compared = f"{format_count(comparison.tensor_count, 'tensor')} and "
    compared += f"{format_count(comparison.other_count, 'other value')} compared"
    found = format_count(len(comparison.differences), "difference") if comparison.differences else "the same"
    return [*(replace_unprintable(line) for line in lines), f"{found}: {compared}"]


def _format_side(side: ComparedCheckpoint) -> str:
    return f"{side.path} (generation {side.generation}, step {side.step})"


def _format_difference(difference: Difference) -> str:
    name, kind, values = difference.name, difference.kind, f"{difference.value_a} -> {difference.value_b}"
    if kind.startswith("only"):
        return f"  {name}: {kind} ({difference.value_b if kind == 'only in B' else difference.value_a})"
    if kind == "value":
        return f"  {name}: {values}"
    extent = (
        f"{difference.differing_elements} of {difference.total_elements} differ, "
        f"by {difference.max_abs_difference:.3g} at most, relative {difference.max_rel_difference:.3g}"
    )
    if kind == "values":
        return f"  {name} {difference.value_a}: {extent}"
    return f"  {name}: {kind} {values}{f'; {extent}' if kind == 'dtype' else ''}"
