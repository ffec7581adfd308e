"""Format tables and figures for a terminal: aligned plain text, at most `WIDTH` columns.

Output is printable, and a table has one line for each row, whatever a log or a directory's name held.
`write_stdout` writes a command's answer completely or raises.
"""

from __future__ import annotations

import math
import os
import re
import sys
import textwrap
import time
from collections.abc import Sequence
from itertools import groupby

from elastic_resume.errors import MachineError
from elastic_resume.units import format_bytes as format_bytes  # noqa: PLC0414 - reports take it from here
from elastic_resume.units import format_count as format_count  # noqa: PLC0414 - reports take it from here

WIDTH = 100  # columns; half of a screen
_COLUMN_GAP = "  "
_NUMBERED_NAME_PATTERN = re.compile(r"(.*?)(\d{1,15})")


def format_table(
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    right_aligned: Sequence[int] = (),
    shrinkable: int = -1,
) -> list[str]:
    """Return the lines of a table under its column names.

    The columns ``right_aligned`` are aligned right. The cells of the column ``shrinkable`` are cut if the
    table would be wider than `WIDTH`.
    """
    cells = [list(columns), *([replace_unprintable(cell) for cell in row] for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(columns))]
    if shrinkable >= 0:
        others = sum(widths) - widths[shrinkable] + len(_COLUMN_GAP) * (len(widths) - 1)
        widths[shrinkable] = max(len(columns[shrinkable]), min(widths[shrinkable], WIDTH - others))
    lines = []
    for row in cells:
        shown = [
            truncate(cell, width).rjust(width)
            if column in right_aligned
            else truncate(cell, width).ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append(truncate(_COLUMN_GAP.join(shown).rstrip(), WIDTH))
    return lines


def truncate(text: str, width: int) -> str:
    """Return ``text``, cut to ``width`` characters with dots at the end."""
    return text if len(text) <= width else text[: max(0, width - 3)] + "..."[:width]


def replace_unprintable(text: str) -> str:
    """Replace terminal control characters and line ends with spaces."""
    return "".join(char if char.isprintable() else " " for char in text)


def wrap_text(text: str, indent: str = "  ") -> list[str]:
    """Break ``text`` into lines of at most `WIDTH`, later ones indented. Long words are cut."""
    shown = replace_unprintable(text)
    return textwrap.wrap(shown, WIDTH, subsequent_indent=indent, break_on_hyphens=False) or [""]


def format_seconds(value: float | None) -> str:
    """Format a duration: ``0.31 s``, ``48 s``, ``2 h 05 min``."""
    if value is None or not math.isfinite(value):
        return "-"
    if value < 9.95:
        return f"{max(0.0, value):.2f} s" if value < 1 else f"{value:.1f} s"
    whole = round(value)
    if whole < 120:
        return f"{whole} s"
    if whole < 7200:
        return f"{whole // 60} min {whole % 60:02} s"
    if whole < 48 * 3600:
        return f"{whole // 3600} h {whole % 3600 // 60:02} min"
    return f"{whole // 86400} days"


def format_utc(t: float) -> str:
    """Format Unix seconds as date and time in UTC."""
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(t))
    except (ValueError, OverflowError, OSError):
        return f"{t:.0f} s"


def fold_node_names(names: Sequence[str], width: int = 24) -> str:
    """Format node names in little space: ``n0 n1 n2``, or as Slurm writes many, ``n[0-63]``."""
    plain = " ".join(names)
    if len(plain) <= width:
        return plain
    groups: dict[str, list[str]] = {}
    for name in names:
        match = _NUMBERED_NAME_PATTERN.fullmatch(name)
        groups.setdefault(match[1] if match else f"{name}\0", []).append(match[2] if match else "")
    parts = []
    for prefix, numbers in groups.items():
        if prefix.endswith("\0"):
            parts.append(prefix[:-1])
        elif len(numbers) == 1:
            parts.append(prefix + numbers[0])
        else:
            parts.append(f"{prefix}[{','.join(_format_number_ranges(numbers))}]")
    return truncate(",".join(parts), max(width, 16))


def _format_number_ranges(numbers: Sequence[str]) -> list[str]:
    """Format 7, 8, 9 as ``7-9``. Numbers of different length (``09`` and ``9``) are different names."""
    ordered = sorted(set(numbers), key=lambda text: (len(text), int(text)))
    runs = []
    for _, group in groupby(enumerate(ordered), lambda pair: (len(pair[1]), int(pair[1]) - pair[0])):
        run = [text for _, text in group]
        runs.append(run[0] if len(run) == 1 else f"{run[0]}-{run[-1]}")
    return runs


def format_percent(share: float) -> str:
    """Format a share of 0 to 1: ``96.4 %``. Only exactly 1 becomes 100 %, only exactly 0 becomes 0 %."""
    value = 100 * share
    if 0 < value < 0.1:
        return "<0.1 %"
    if 99.95 <= value < 100:
        return ">99.9 %"
    return f"{value:.1f} %" if 0 < value < 10 or 90 <= value < 100 else f"{value:.0f} %"


def write_stdout(text: str) -> bool:
    """Write to stdout and flush; return whether a reader is there.

    Characters that stdout's encoding lacks are escaped. A reader that closed the pipe (``| head``) is no
    error.

    Raises:
        MachineError: stdout is closed or cannot be written, for instance to a full disk.
    """
    if sys.stdout is None:
        raise MachineError("stdout is closed, so the answer cannot be written.")
    encoding = sys.stdout.encoding or "utf-8"
    try:
        sys.stdout.write(text.encode(encoding, "backslashreplace").decode(encoding))
        sys.stdout.flush()
    except BrokenPipeError:
        _discard_stdout()
        return False
    except OSError as error:
        _discard_stdout()
        raise MachineError(f"stdout cannot be written: {error.strerror or error}.") from error
    return True


def _discard_stdout() -> None:
    """Redirect stdout to /dev/null, or Python would report the error again at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
