"""The subcommands that look at a run: report, ls, verify, export.

Each is a function from parsed arguments to an exit code. Only ``export`` imports torch.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from elastic_resume import contract, events
from elastic_resume.errors import CheckpointError, UsageError
from elastic_resume.report import checkpoints, places, render, story
from elastic_resume.report.checkpoints import Item
from elastic_resume.report.gather import gather
from elastic_resume.report.saying import say
from elastic_resume.report.text import amount, seconds, size, wrap

if TYPE_CHECKING:
    from elastic_resume.store.manifest import Manifest

EXIT_GOOD = contract.EXIT_DONE
EXIT_BAD = contract.EXIT_AT_FAULT


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
    found = gather(args.paths)
    told = story.tell(
        found.events,
        items=found.items,
        stacks=found.stacks,
        problems=found.problems,
        now=time.time(),
        stamp=events.stamp(),
    )
    for problem in found.problems:
        print(problem, file=sys.stderr)
    if args.html is not None:
        from elastic_resume.report import html  # noqa: PLC0415 - imports jinja2, which no other command needs

        _write(args.html, html.render(told))
        say("\n".join(wrap(told.verdict.text)) + f"\nwritten to {args.html}\n")
    else:
        say(story.as_json(told) if args.json else render.as_text(told))
    return EXIT_GOOD


def _write(path: Path, text: str) -> None:
    if str(path) == "-":
        raise UsageError("--html -: give the name of a file to write the page to.")
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{path}: the page cannot be written: {error.strerror or error}.") from error


# ---- ls, verify ----------------------------------------------------------------------------------------


def ls(args: argparse.Namespace) -> int:
    """Print the table of checkpoints; exit code 0 whatever they are worth."""
    say(checkpoints.ls(places.find(args.path), time.time()))
    return EXIT_GOOD


def verify(args: argparse.Namespace) -> int:
    """Print one line for each checkpoint; exit code 1 when one is bad, or there is none.

    What lies in quarantine is named, and is no failure: it has been dealt with.
    """
    found = places.find(args.path)
    counts = {"valid": 0, "bad": 0, "quarantined": 0}
    for item in checkpoints.items(found, deep=args.deep):
        counts[item.state] += 1
        say("\n".join(wrap(_verdict(item, found.path))) + "\n")
    if not counts["valid"] and not counts["bad"]:
        say(f"{args.path}: no checkpoints here\n")
        return EXIT_BAD
    how = "every digest checked" if args.deep else "quick check; --deep reads all data"
    aside = f", {counts['quarantined']} quarantined" if counts["quarantined"] else ""
    say(f"{counts['valid']} valid, {counts['bad']} bad{aside} ({how})\n")
    return EXIT_BAD if counts["bad"] else EXIT_GOOD


def _verdict(item: Item, base: Path) -> str:
    name = str(item.path.relative_to(base)) if item.path != base else item.path.name
    if item.state == "valid":
        return f"ok   {name}  {size(item.bytes)}"
    return f"{'BAD ' if item.state == 'bad' else 'aside'} {name}: {item.reason}"


# ---- export --------------------------------------------------------------------------------------------


def export(args: argparse.Namespace) -> int:
    """Write the tensors of one object to a plain file."""
    found = places.find(args.path)
    from elastic_resume.worker import export as exporting  # noqa: PLC0415  imports torch, seconds

    file_format = args.format or exporting.format_for(args.target)
    for path, manifest in _sources(found):
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
        age = seconds(max(0.0, time.time() - manifest.written_at))
        what = "all" if args.all else args.object
        say(f"{what} of {path} (generation {manifest.generation}, step {manifest.step}, {age} old)\n")
        say(f"-> {args.target}: {amount(done.tensors, 'tensor')}, {size(done.bytes)}, {file_format}\n")
        if done.left_out:
            more = f" and {len(done.left_out) - 5} more" if len(done.left_out) > 5 else ""
            say("\n".join(wrap(f"left out, not tensors: {', '.join(done.left_out[:5])}{more}")) + "\n")
        return EXIT_GOOD
    raise UsageError(f"{args.path}: holds no valid checkpoint; `elastic-resume ls` says why.")


def _sources(found: places.Found) -> Iterator[tuple[Path, Manifest]]:
    """The checkpoint that was named, or those of the nodes, newest first."""
    from elastic_resume.store.checkpoint import quick_check  # noqa: PLC0415

    if found.level == "checkpoint":
        yield found.path, quick_check(found.path, None)
        return
    if len(found.runs) > 1:
        raise UsageError(
            f"{found.path}: holds {len(found.runs)} runs; give one: {', '.join(found.runs[:20])}."
        )
    valid = [item for item in checkpoints.items(found) if item.state == "valid"]
    for item in sorted(valid, key=lambda item: (item.generation or 0, item.step or 0), reverse=True):
        try:
            yield item.path, quick_check(item.path, None)
        except CheckpointError as error:  # pruned meanwhile by a run that goes on
            print(f"not used: {error}", file=sys.stderr)
