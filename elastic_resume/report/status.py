"""``elastic-resume status``: how a job that runs stands, on one screen, refreshed; or once, or as JSON."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from pathlib import Path
from typing import Any

from elastic_resume import contract
from elastic_resume.durations import parse_duration
from elastic_resume.errors import RendezvousLostError, UsageError
from elastic_resume.report import asking, status_screen
from elastic_resume.report.saying import say

LONGEST_S = 60.0
"""After so long without an answer a job that was looked at counts as ended."""
_CLEAR = "\x1b[H\x1b[J"


def register(subparsers: argparse._SubParsersAction[Any]) -> None:
    """Add the parser of the command."""
    one = subparsers.add_parser("status", help="how a job that runs stands: world, steps, copies, incidents")
    one.add_argument(
        "path", type=Path, nargs="?", metavar="CKPT_DIR", help="or a run's or node's directory in it"
    )
    one.add_argument(
        "--rdzv-endpoint", metavar="HOST,...", help="as for run: any agent of the job may be asked"
    )
    one.add_argument("--rdzv-id", metavar="NAME", help="as for run: the job's name")
    one.add_argument(
        "--rdzv-token-file", type=Path, metavar="FILE", help="as for run (or ELASTIC_RESUME_TOKEN)"
    )
    one.add_argument(
        "--once", action="store_true", help="print it once; so it is where stdout is no terminal"
    )
    one.add_argument("--json", action="store_true", help="once, all that is known, as one JSON object")
    one.add_argument(
        "--interval", type=_seconds, default=1.0, metavar="TIME", help="between two looks (default 1s)"
    )
    one.set_defaults(function=status)


def _seconds(text: str) -> float:
    return parse_duration("--interval", text, least_s=0.1, most_s=3600)


def status(args: argparse.Namespace) -> int:
    """Show it; exit code 1 when nobody answers."""
    job = asking.find(
        args.path, endpoint=args.rdzv_endpoint, run_id=args.rdzv_id, token_file=args.rdzv_token_file
    )
    if args.json:
        say(json.dumps(job.ask(), indent=2) + "\n")
    elif args.once or not (sys.stdout and sys.stdout.isatty()):
        say(_text(job.ask()))
    else:
        _watch(job, args.interval)
    return contract.EXIT_DONE


def _watch(job: asking.Job, interval_s: float) -> None:
    """Show it again and again, until Ctrl-C or until nobody has answered for long."""
    said, answered_at = job.ask(), time.monotonic()
    while True:
        silent_s = time.monotonic() - answered_at
        note = f"\nno answer for {silent_s:.0f} s\n" if silent_s > interval_s + asking.PATIENCE_S else ""
        # A row less than there are: the last line ends with a new one.
        columns, rows = shutil.get_terminal_size()
        say(f"{_CLEAR}{_text(said, columns, rows - 1 - note.count(chr(10)))}{note}")
        time.sleep(interval_s)
        try:
            said, answered_at = job.ask(), time.monotonic()
        except RendezvousLostError:
            if time.monotonic() > answered_at + LONGEST_S:
                raise


def _text(said: dict[str, Any], columns: int = 0, rows: int = 0) -> str:
    """The screen; with ``columns`` and ``rows`` as much of it as they have room for."""
    try:
        lines = status_screen.fitting(said, columns, rows) if rows else status_screen.screen(said)
        return "\n".join(lines) + "\n"
    except (AttributeError, LookupError, OverflowError, TypeError, ValueError) as error:
        raise UsageError(f"an agent answered with a document that is not one of ours: {error!r}.") from error
