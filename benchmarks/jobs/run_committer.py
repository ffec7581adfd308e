"""Run a committer like the agent's in its own process: run_committer.py NODE_DIR RUN_ID, until stdin ends.

It prints the socket name at which workers reach it.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from elastic_resume import console
from elastic_resume.checkpoint.node_dir import NodeDir
from elastic_resume.slots.committer import CheckpointCommitter
from elastic_resume.slots.ipc import SnapshotServer
from elastic_resume.slots.slot_pool import SlotPool


def main() -> None:
    node_dir, run_id = Path(sys.argv[1]), sys.argv[2]

    console.show_log(os.environ)
    with NodeDir.claim(node_dir.parent.parent, run_id, node_dir.name):
        committer = CheckpointCommitter(node_dir, run_id, SlotPool(None), emit=lambda *_, **__: None)
        server = SnapshotServer(committer)
        committer.start()
        server.start()
        print(server.socket_name, flush=True)
        sys.stdin.read()
        server.close()
        committer.close()


if __name__ == "__main__":
    main()
