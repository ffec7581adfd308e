"""Serve this node's snapshots from the agent, so that they outlive the workers that took them.

The agent owns the slots and the committer. When a generation ends, its newest snapshot is committed to disk
while the next rendezvous runs. When the agent ends, for any reason but SIGKILL, it commits the newest
snapshot first, if the disk accepts it.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from elastic_resume import constants
from elastic_resume.config import Settings
from elastic_resume.errors import MachineError
from elastic_resume.slots.committer import CheckpointCommitter
from elastic_resume.slots.ipc import SnapshotServer
from elastic_resume.slots.slot_pool import SlotPool

logger = logging.getLogger(__name__)


@contextlib.contextmanager
def serve_snapshots(
    node_dir: Path, settings: Settings, emit: Callable[..., Any]
) -> Iterator[CheckpointCommitter]:
    """Serve snapshots within the context; workers find the service by their environment.

    This process owns ``node_dir``. ``emit`` takes an event's kind and fields.
    """
    slot_pool = SlotPool(settings.snapshot_memory)
    committer = CheckpointCommitter(node_dir, settings.run_id, slot_pool, emit=emit)
    server = SnapshotServer(committer)
    os.environ[constants.ENV_COMMITTER] = server.socket_name
    os.environ[constants.ENV_SLOTS] = slot_pool.control_path
    committer.start()
    server.start()
    try:
        yield committer
    finally:
        os.environ.pop(constants.ENV_COMMITTER, None)
        os.environ.pop(constants.ENV_SLOTS, None)
        with contextlib.suppress(MachineError):  # the committer has logged the error
            committer.commit()
        if committer.last_error:
            text = "the newest snapshot was not committed and is lost with this agent: %s"
            logger.error(text, committer.last_error)
        server.close()
        committer.close()
