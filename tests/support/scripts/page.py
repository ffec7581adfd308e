"""Runs blocks of a documentation page one after another, on one rank of a world.

``page.py BLOCKS FOLDER``: BLOCKS is a JSON list of [first line, code], the first of which all others begin
with. Each gets a working directory of its own, and its line numbers are the page's. What a test wants to know
of a block is what it leaves behind there.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path

import torch
import torch.distributed as dist


def main() -> None:
    """Run them all; the first that fails ends this rank, and by that the others."""
    page, blocks, folder = sys.argv[1], json.loads(Path(sys.argv[2]).read_text()), Path(sys.argv[3])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(1)
    (start, preface), *others = blocks
    for line, code in others:
        place = folder / str(line)
        place.mkdir(parents=True, exist_ok=True)
        dist.barrier()
        os.chdir(place)
        names: dict[str, object] = {"__name__": "__main__"}
        try:
            exec(compile("\n" * start + preface, page, "exec"), names)  # noqa: S102
            exec(compile("\n" * line + code, page, "exec"), names)  # noqa: S102
        except BaseException:  # noqa: BLE001 - an exit in good order might wait for the other ranks
            traceback.print_exc()
            os._exit(1)
    print("all", len(others), "blocks", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
