"""A worker without torch: it writes heartbeats into a file of its own until the test stops it."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

BEAT_S = 0.02


def main(directory: Path) -> None:
    """Write the time of each heartbeat until the file `stop` exists."""
    generation, node = os.environ["ELASTIC_RESUME_GENERATION"], os.environ["ELASTIC_RESUME_NODE_NAME"]
    rank, world_size = os.environ["RANK"], os.environ["WORLD_SIZE"]
    with open(directory / f"{int(generation):06d}-{node}-{rank}-{world_size}.beats", "a") as file:
        while not (directory / "stop").exists():
            print(time.monotonic(), file=file, flush=True)
            time.sleep(BEAT_S)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
