"""Keep what rank 0 logs in files of its node's directory, which other nodes copy as they grow.

Each generation has a file of its own, ``curves/g000003.jsonl``. All nodes write its first line alike when the
generation begins, and rank 0's worker appends a line when it finishes a step::

    {"step":120,"epoch":1,"source":2,"goes_back":false}     where the generation begins, and in whose state
    [121,1,1767225600.5,{"loss":0.25}]                      a finished step, its epoch, the time, the values
    [121,1,1767225600.9,{"eval_loss":0.5}]                  more values of it, logged after its end

So the file on every other node is a prefix of rank 0's, in bytes. A line that a kill has cut off has no end,
and is not read. Nothing is ever changed: the next generation has another file. ``g000003.written.jsonl`` is
appended by the agent of rank 0's node: the last step that each tracker has for certain.

The newest generation's file names the one whose state it has resumed, and so on. Along this chain each step
that counts is recorded once, and `follow_chain` finds what is missing.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from elastic_resume.mechanisms.curves.exporter import Point

DIRECTORY = "curves"
FILE_NAME = re.compile(r"g(\d{6,9})(\.written)?\.jsonl")
MAX_CLOSED = 16
"""Generations whose newest finished step a node tells the others."""


class Moment(NamedTuple):
    """A finished step; the greater epoch: with the work after the epoch's last step."""

    step: int
    epoch: int


@dataclass
class GenerationRecords:
    """What one file holds, as far as it has been read."""

    begin: Moment
    source: int
    """The generation whose state it has resumed; 0 for a cold start."""
    goes_back: bool
    closed: Moment
    """The newest moment whose values are all here."""
    lines: list[tuple[Moment, float, dict[str, float]]] = field(default_factory=list)


def record_path(node_dir: Path, generation: int) -> Path:
    """Return the file with the values of a generation."""
    return node_dir / DIRECTORY / f"g{generation:06d}.jsonl"


def written_path(node_dir: Path, generation: int) -> Path:
    """Return the file with what the trackers have."""
    return node_dir / DIRECTORY / f"g{generation:06d}.written.jsonl"


def format_begin(begin: Moment, source: int, *, goes_back: bool) -> bytes:
    """Return the first line of a file, the same on all nodes."""
    return format_line({**begin._asdict(), "source": source, "goes_back": goes_back})


def format_line(value: Any) -> bytes:
    """Return a line of a file."""
    return json.dumps(value, separators=(",", ":")).encode() + b"\n"


def parse_records(data: bytes) -> GenerationRecords | None:
    """Parse the bytes of a file; None unless its first line is whole. Damaged lines are left out."""
    first, *others = data.split(b"\n")[:-1] or [b""]
    with contextlib.suppress(ValueError, TypeError, KeyError):
        head = json.loads(first)
        begin = Moment(int(head["step"]), int(head["epoch"]))
        found = GenerationRecords(begin, int(head["source"]), bool(head["goes_back"]), begin)
        add_lines(found, others)
        return found
    return None


def add_lines(records: GenerationRecords, lines: Iterable[bytes]) -> None:
    """Add whole lines that follow the first one."""
    for line in lines:
        with contextlib.suppress(ValueError, TypeError):
            step, epoch, time, values = json.loads(line)
            moment = Moment(int(step), int(epoch))
            records.closed = max(records.closed, moment)
            if values:
                records.lines.append((moment, float(time), {str(k): float(v) for k, v in values.items()}))


def read_records(node_dir: Path, generation: int) -> GenerationRecords | None:
    """Read one file; None without it, or without its first line."""
    with contextlib.suppress(OSError):
        return parse_records(record_path(node_dir, generation).read_bytes())
    return None


def read_head(node_dir: Path, generation: int) -> GenerationRecords | None:
    """Read the first and the last line of a file; None without it, or without its first line."""
    path = record_path(node_dir, generation)
    with contextlib.suppress(OSError), open(path, "rb") as file:
        head, closed = parse_records(file.readline()), _read_closed(path)
        if head is not None and closed is not None:
            head.closed = closed
            return head
    return None


def list_files(node_dir: Path) -> dict[str, int]:
    """Return the names and sizes of the files of a node."""
    found = {}
    with contextlib.suppress(OSError), os.scandir(node_dir / DIRECTORY) as entries:
        for entry in entries:
            if FILE_NAME.fullmatch(entry.name):
                found[entry.name] = entry.stat().st_size
    return found


def list_generations(node_dir: Path) -> list[int]:
    """Return the generations of which a node has a file, the newest first."""
    matches = (FILE_NAME.fullmatch(name) for name in list_files(node_dir))
    return sorted({int(match[1]) for match in matches if match and not match[2]}, reverse=True)


def read_closed(node_dir: Path) -> dict[int, Moment]:
    """Return the newest moment of each newest generation whose values are all on this node."""
    found = {}
    for generation in list_generations(node_dir)[:MAX_CLOSED]:
        if (moment := _read_closed(record_path(node_dir, generation))) is not None:
            found[generation] = moment
    return found


def _read_closed(path: Path, tail_bytes: int = 1 << 17) -> Moment | None:
    """Read the last whole line of a file, or the first one if there is no other."""
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError), open(path, "rb") as file:
        first = file.readline()
        if not first.endswith(b"\n"):
            return None
        size, lines = os.fstat(file.fileno()).st_size, list[bytes]()
        while len(lines) < 2:  # the first of them may be cut
            start = max(len(first), size - tail_bytes)
            file.seek(start)
            lines = file.read(size - start).split(b"\n")[:-1]
            if start == len(first):
                break
            tail_bytes *= 4
        if not lines:
            head = json.loads(first)
            return Moment(int(head["step"]), int(head["epoch"]))
        step, epoch, *_ = json.loads(lines[-1])
        return Moment(int(step), int(epoch))
    return None


def read_written(node_dir: Path, generations: Iterable[int]) -> dict[str, int]:
    """Return the last step that each tracker has for certain, as far as this node knows."""
    found: dict[str, int] = {}
    for generation in generations:
        with contextlib.suppress(OSError):
            for line in written_path(node_dir, generation).read_bytes().split(b"\n")[:-1]:
                with contextlib.suppress(ValueError, TypeError, AttributeError):
                    for name, step in json.loads(line).items():
                        found[name] = max(found.get(name, -1), int(step))
    return found


class Chain(NamedTuple):
    """The generations whose values count, and the moments where their values are missing."""

    generations: tuple[int, ...]
    """The newest first."""
    gaps: tuple[tuple[int, Moment, Moment], ...]
    """Generation, the newest moment that is here, and the one from which the job went on."""
    has_origin: bool
    """It begins with a cold start; else the values of earlier generations are unknown."""

    @property
    def is_complete(self) -> bool:
        """Whether the values of all steps are here."""
        return self.has_origin and not self.gaps


def follow_chain(newest: int, records: Mapping[int, GenerationRecords]) -> Chain:
    """Follow the states that were resumed, from a generation back to the job's first."""
    generations, generation = [newest], newest
    gaps: list[tuple[int, Moment, Moment]] = []
    while True:
        current = records[generation]
        source = current.source
        if source == 0 or source not in records or source >= generation:
            return Chain(tuple(generations), tuple(gaps), source == 0)
        if records[source].closed < current.begin:
            gaps.append((source, records[source].closed, current.begin))
        generations.append(source)
        generation = source


def list_missing_steps(chain: Chain, records: Mapping[int, GenerationRecords]) -> list[tuple[int, int, int]]:
    """Return each generation whose values are missing, and the first and last step of these."""
    found = [(number, min(known.step + 1, begin.step), begin.step) for number, known, begin in chain.gaps]
    oldest = records[chain.generations[-1]]
    if not chain.has_origin and oldest.begin.step:
        found.append((oldest.source, 1, oldest.begin.step))
    return found


def list_since_way_back(chain: Chain, records: Mapping[int, GenerationRecords]) -> tuple[int, ...]:
    """Return the generations since the job went back on purpose, that one included; all if it never did."""
    for at, generation in enumerate(chain.generations):
        if records[generation].goes_back:
            return chain.generations[: at + 1]
    return chain.generations


def collect_points(chain: Chain, records: Mapping[int, GenerationRecords]) -> dict[int, Point]:
    """Return the points of a chain by step. What a generation had beyond the resumed state does not count."""
    points: dict[int, Point] = {}
    limits = [None, *(records[generation].begin for generation in chain.generations)]
    for generation, limit in reversed(list(zip(chain.generations, limits, strict=False))):
        for moment, time, values in records[generation].lines:
            if limit is None or moment <= limit:
                add_point(points, moment.step, time, values)
    return dict(sorted(points.items()))


def add_point(points: dict[int, Point], step: int, time: float, values: dict[str, float]) -> None:
    """Add values to the point of a step; the later value of a key wins."""
    known = points.get(step)
    points[step] = Point(step, time, {**known.values, **values}) if known else Point(step, time, values)
