"""Measure what the proof of a resume costs: the comparison of live state with a snapshot in memory.

For each of the --sizes (megabytes of a model with Adam), in turns: `compare_rank` of equal state, of state in
which every parameter differs, and one pass that compares the same bytes with `memoryview`. The last is the
least that any comparison costs here. The steps that a replay computes again are the script's own.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch
from recovery import machine
from torch import nn

from elastic_resume.capture import direct_write
from elastic_resume.checkpoint.manifest import Manifest, Position
from elastic_resume.proof.comparison import Snapshots, compare_rank
from elastic_resume.state import state_dict
from elastic_resume.state.state_dict import TensorBuffer

POSITION = Position(epoch=1, step_in_epoch=2, step=12, samples=48)
WIDTH = 2048


def measure(call: Callable[[], object]) -> float:
    """Return the seconds of one call."""
    started_at = time.perf_counter()
    call()
    return time.perf_counter() - started_at


def run(megabytes: int, rounds: int) -> dict[str, float]:
    """Return the medians of one size, in seconds."""
    layers = max(1, megabytes * 10**6 // (3 * 4 * WIDTH * WIDTH))
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(layers)])
    optimizer = torch.optim.Adam(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    tracked = state_dict.collect_objects({"model": model, "optimizer": optimizer})
    flat = state_dict.flatten(tracked)
    layout = direct_write.build_layout(flat)
    memory = bytearray().join(bytes(piece) for piece in direct_write.iter_state_chunks(flat, layout))
    manifest = Manifest("job", "n0", 0, 1, 1, POSITION, 1.0, "bench", flat.structure)
    buffer = TensorBuffer(layout, memoryview(memory))
    copy = bytes(memory)

    def compare() -> None:
        compare_rank(
            tracked,
            POSITION,
            Snapshots(manifest, buffer, buffer),
            is_source=True,
            local_rank=0,
            knows_data=True,
        )

    def change(sign: float) -> None:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(sign)

    found: dict[str, list[float]] = {"equal_s": [], "differs_s": [], "bytes_s": []}
    for _ in range(rounds):
        found["bytes_s"].append(measure(lambda: memory == copy))
        found["equal_s"].append(measure(compare))
        change(1.0)
        found["differs_s"].append(measure(compare))
        change(-1.0)
        with torch.no_grad():  # the round trip rounds
            for name, parameter in model.named_parameters():
                parameter.copy_(buffer.tensor(f"model/{name}"))
    return {"megabytes": len(memory) / 1e6, **{name: statistics.median(v) for name, v in found.items()}}


def main() -> None:
    """Print a row for each size."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", default=[300, 3000])
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(json.dumps({"machine": machine(), "rows": [run(size, options.rounds) for size in options.sizes]}))


if __name__ == "__main__":
    main()
