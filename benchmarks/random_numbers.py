"""Measure the cost of reproducible random numbers: per step, per sample and per batch.

    python benchmarks/random_numbers.py

Shows the minimum of many repetitions, because other processes only add time. The target is 50 us per step.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable

import torch

from elastic_resume.data import rng
from elastic_resume.data.rng import SeededIndices, attach_epoch

TARGET_US = 50.0
REPETITIONS = 30
INDICES = 10_000


def least_us(work: Callable[[], object], times: int) -> float:
    work()
    found = []
    for _ in range(REPETITIONS):
        began = time.perf_counter()
        for _ in range(times):
            work()
        found.append((time.perf_counter() - began) / times)
    return min(found) * 1e6


def sent(indices: list[int]) -> object:
    return pickle.loads(pickle.dumps(indices))  # noqa: S301  our own, as a DataLoader's queue does it


def main() -> None:
    step = rng.RandomNumbers(rng.DERIVED, 1)

    def boundary() -> None:
        step.after_step(3)
        step.before_batch(3, first=False)

    cost = least_us(boundary, 100)
    print(f"a step's boundary and its next batch: {cost:.1f} us; target: at most {TARGET_US:.0f} us")
    print(f"  with torch.manual_seed instead: {2 * least_us(lambda: torch.manual_seed(1), 20):.0f} us more")
    print(f"a sample: {least_us(lambda: rng.seed_cpu_generators(rng.mix_words(1, 2, 3)), 100):.1f} us")
    plain = torch.randperm(INDICES).tolist()
    kinds: dict[str, Callable[[], list[int]]] = {
        "a list": lambda: list(plain),
        "as of GlobalBatches": lambda: SeededIndices(plain, 3, 4),
        "as of an ElasticSampler": lambda: list[int](attach_epoch(plain, 3, 4)),
    }
    for name, make in kinds.items():
        made = make()
        took = least_us(make, 2), least_us(lambda made=made: sent(made), 2)  # type: ignore[misc]
        print(f"{INDICES:,} indices, {name}: {took[0]:.0f} us to make, {took[1]:.0f} us to send")


if __name__ == "__main__":
    main()
