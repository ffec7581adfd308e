"""Bring the events of a run from an archive into a temporary directory, where `load_run` reads them.

The checkpoints of the archive are listed, and stay there.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from elastic_resume import constants
from elastic_resume.archive.address import Address
from elastic_resume.archive.location import FoundArchive, find_archive
from elastic_resume.errors import UsageError
from elastic_resume.report.checkpoints import CheckpointEntry, list_checkpoints


@contextlib.contextmanager
def copy_events(places: Sequence[Path | Address]) -> Iterator[tuple[list[Path], list[CheckpointEntry]]]:
    """Yield a path for each place, and the checkpoints of those that are in an archive.

    The path is that of a directory, or of copies that exist within the context.

    Raises:
        UsageError: there are no events at an address, or those of several runs.
        ArchiveError: the archive cannot be reached.

    """
    with contextlib.ExitStack() as cleanup:
        paths, archived = list[Path](), list[CheckpointEntry]()
        for place in places:
            if isinstance(place, Address):
                directory = tempfile.TemporaryDirectory(prefix="elastic_resume-report-")
                found = find_archive(place)
                paths.append(_copy_run(place, found, Path(cleanup.enter_context(directory))))
                archived += list_checkpoints(found)
            else:
                paths.append(place)
        yield paths, archived


def _copy_run(address: Address, found: FoundArchive, directory: Path) -> Path:
    if len(found.archives) > 1:
        raise UsageError(f"{address}: holds {len(found.run_ids)} runs; give one: {', '.join(found.run_ids)}.")
    (archive,) = found.archives
    events = archive.read_events()
    if not events:
        raise UsageError(f"{address}: has checkpoints, but no events of the run; give CKPT_DIR/RUN_ID.")
    for node, data in events.items():
        (directory / archive.run_id / node).mkdir(parents=True)
        (directory / archive.run_id / node / constants.EVENTS_FILE).write_bytes(data)
    return directory / archive.run_id
