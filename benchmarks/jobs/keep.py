"""A keeper of snapshots as the agent's, in a process of its own: keep.py NODE_DIR RUN_ID, until stdin ends.

It prints the name under which workers reach it.
"""

from __future__ import annotations

import sys
from pathlib import Path

from elastic_resume.checkpoint.node_dir import NodeDir
from elastic_resume.snapshot.committer import CheckpointCommitter
from elastic_resume.snapshot.ipc import SnapshotServer
from elastic_resume.snapshot.slot_pool import SlotPool


def main() -> None:
    node_dir, run_id = Path(sys.argv[1]), sys.argv[2]

    def say(text: str) -> None:
        print(f"keeper: {text}", file=sys.stderr, flush=True)

    with NodeDir.claim(node_dir.parent.parent, run_id, node_dir.name):
        keeper = CheckpointCommitter(
            node_dir, run_id, SlotPool(None, log=say), log=say, emit=lambda *_, **__: None
        )
        desk = SnapshotServer(keeper)
        keeper.start()
        desk.start()
        print(desk.socket_name, flush=True)
        sys.stdin.read()
        desk.close()
        keeper.close()


if __name__ == "__main__":
    main()
