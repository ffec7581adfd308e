"""Read logged values from the directories of a run's nodes, for the report's page."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from elastic_resume.mechanisms.curves import journal
from elastic_resume.mechanisms.mechanism import Chart

MAX_CHARTS = 12
MAX_FILE_BYTES = 64 << 20


def load_charts(node_dirs: Sequence[Path]) -> list[Chart]:
    """Return a chart for each of the first keys that rank 0 has logged, with the steps of restarts.

    Of a generation's files, which are beginnings of one, the longest counts. Files that cannot be read, or
    are larger than `MAX_FILE_BYTES`, are left out.
    """
    found: dict[int, tuple[int, Path]] = {}
    for node_dir in node_dirs:
        sizes = journal.list_files(node_dir)
        for generation in journal.list_generations(node_dir):
            path = journal.record_path(node_dir, generation)
            found[generation] = max(found.get(generation, (0, path)), (sizes.get(path.name, 0), path))
    records = {}
    for generation, (size, path) in found.items():
        with contextlib.suppress(OSError):
            parsed = journal.parse_records(path.read_bytes()) if size <= MAX_FILE_BYTES else None
            if parsed is not None:
                records[generation] = parsed
    if not records:
        return []
    chain = journal.follow_chain(max(records), records)
    points: dict[str, list[tuple[int, float]]] = defaultdict(list)
    for step, point in journal.collect_points(chain, records).items():
        for key, value in point.values.items():
            points[key].append((step, value))
    starts = tuple(sorted(records[generation].begin.step for generation in chain.generations))[1:]
    return [Chart(key, tuple(of_key), starts) for key, of_key in list(points.items())[:MAX_CHARTS]]
