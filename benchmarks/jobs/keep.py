"""A keeper of snapshots as the agent's, in a process of its own: keep.py NODE_DIR RUN_ID, until stdin ends.

It prints the name under which workers reach it.
"""

from __future__ import annotations

import sys
from pathlib import Path

from elastic_resume.checkpoint.node_dir import NodeDir
from elastic_resume.snapshot.committer import Keeper
from elastic_resume.snapshot.ipc import Desk
from elastic_resume.snapshot.slot_pool import Rack


def main() -> None:
    node_dir, run_id = Path(sys.argv[1]), sys.argv[2]

    def say(text: str) -> None:
        print(f"keeper: {text}", file=sys.stderr, flush=True)

    with NodeDir.claim(node_dir.parent.parent, run_id, node_dir.name):
        keeper = Keeper(node_dir, run_id, Rack(None, say=say), say=say, tell=lambda *_, **__: None)
        desk = Desk(keeper)
        keeper.start()
        desk.open()
        print(desk.name, flush=True)
        sys.stdin.read()
        desk.close()
        keeper.close()


if __name__ == "__main__":
    main()
