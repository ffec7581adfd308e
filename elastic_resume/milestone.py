"""Name checkpoints: labels that keep them, which of several with a metric counts, and ways back to them.

A checkpoint may have several milestones. `checkpoint.catalog` stores them beside its manifest.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeVar

LATEST = "latest"
OFF = "off"  # no request
DAMAGED = "?"  # no label: the name of milestones whose file cannot be read, so that they stay
MAX_NAMES = 32  # of one checkpoint
MAX_WAYS_BACK = 256  # of one history: each of its states has them all
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_STEP = re.compile(r"[0-9]{1,15}")
_VERSION = re.compile(r"g([0-9]{1,16})-s([0-9]{1,16})")

Version = tuple[int, int]
T = TypeVar("T")


@dataclass(frozen=True)
class Milestone:
    """A name for a checkpoint. Of several with a metric only the one with the greatest counts."""

    name: str
    metric: float | None = None


@dataclass(frozen=True)
class WayBack:
    """A way back: its request, the state's generation and step, and the generation that it began."""

    request: str
    generation: int
    step: int
    new_generation: int

    @property
    def version(self) -> Version:
        """Return (generation, step) of the state to which the history has gone back."""
        return (self.generation, self.step)


def find_way_behind(version: Version, ways: Iterable[WayBack]) -> WayBack | None:
    """Return the way of ``ways`` on which a history left ``version``: it was newer when that way began."""
    return next((way for way in ways if way.version < version and version[0] < way.new_generation), None)


def is_name(text: str) -> bool:
    """Return whether ``text`` can be a milestone's name: a step, a checkpoint, latest and off are none."""
    is_other = text in {LATEST, OFF} or _STEP.fullmatch(text) or parse_version(text)
    return _NAME.fullmatch(text) is not None and not is_other


def parse_step(text: str) -> int | None:
    """Return the step that ``text`` names, or None."""
    return int(text) if _STEP.fullmatch(text) else None


def parse_version(text: str) -> Version | None:
    """Return (generation, step) of a checkpoint's name such as g4-s500 or g000004-s0000000500, or None."""
    found = _VERSION.fullmatch(text)
    return (int(found[1]), int(found[2])) if found else None


def format_short_version(version: Version) -> str:
    """Return a checkpoint's name as a person writes it."""
    return f"g{version[0]}-s{version[1]}"


def format_version(version: Version) -> str:
    """Return the name of a checkpoint's directory."""
    return f"g{version[0]:06d}-s{version[1]:010d}"


def choose_requested(request: str, candidates: Iterable[tuple[T, Version, Iterable[Milestone]]]) -> T | None:
    """Return what a request means among ``candidates``, oldest first, each with the milestones that count.

    It is the newest of a step or name; of the milestones of a name the best, if it has a metric.
    """
    chosen, best = None, -math.inf
    step, wanted = parse_step(request), parse_version(request)
    for candidate, version, labels in candidates:
        if step == version[1] or wanted == version:
            chosen = candidate
        for label in labels:
            metric = -math.inf if label.metric is None or request == LATEST else label.metric
            if request in {LATEST, label.name} and metric >= best:
                chosen, best = candidate, metric
    return chosen


def choose_kept(labels: Iterable[tuple[Version, Milestone]]) -> set[tuple[Version, Milestone]]:
    """Return the milestones that count: all without a metric, and of each name the best.

    The newest of several equal ones is the best.
    """
    kept, best = set(), dict[str, tuple[float, Version]]()
    for version, milestone in labels:
        if milestone.metric is None:
            kept.add((version, milestone))
        else:
            found = (milestone.metric, version)
            best[milestone.name] = max(found, best.get(milestone.name, found))
    return kept | {(version, Milestone(name, metric)) for name, (metric, version) in best.items()}
