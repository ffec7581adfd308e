"""The worker of budgets.py: train a large state for some steps and print the time of each.

budgeted.py MEGABYTES STEPS
"""

from __future__ import annotations

import sys
import time

import elastic_resume as er
from jobs.trained import large


def main() -> None:
    training = large(int(sys.argv[1]))
    run = er.resume(**training.tracked)
    while run.position.step < int(sys.argv[2]):
        began = time.perf_counter()
        training.step()
        run.step()
        print("step_s", time.perf_counter() - began, flush=True)
    run.close()


if __name__ == "__main__":
    main()
