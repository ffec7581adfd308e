"""``python -m tests.support.rendezvous_sim``: play random schedules of faults against the rendezvous."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from tests.support.rendezvous_sim import batch
from tests.support.rendezvous_sim.mutations import MUTATIONS


def main(argv: Sequence[str] | None = None) -> int:
    """Play the schedules; return 1 if an invariant was violated."""
    parser = argparse.ArgumentParser(prog=batch.COMMAND, description=__doc__)
    parser.add_argument(
        "--seeds", type=_parse_count, default=2000, metavar="N", help="how many (%(default)s)"
    )
    parser.add_argument("--first", type=int, default=0, metavar="F", help="the first seed (%(default)s)")
    parser.add_argument("--seed", type=int, metavar="S", help="play this seed only, with a trace")
    parser.add_argument(
        "--wide", action="store_true", help="draw leavers, full stops, second runs and conditions of clusters"
    )
    parser.add_argument(
        "--jobs", type=_parse_count, metavar="J", help="processes (default: one for each core)"
    )
    parser.add_argument(
        "--break",
        dest="mutation",
        default="",
        metavar="MUTATION",
        choices=MUTATIONS,
        help="break one quorum rule or undo one bug fix, to test the checkers: %(choices)s",
    )
    args = parser.parse_args(argv)
    if args.seed is not None:
        return batch.run_one(args.seed, args.mutation, is_wide=args.wide)
    seeds = range(args.first, args.first + args.seeds)
    return batch.run_many(seeds, args.mutation, args.jobs, is_wide=args.wide)


def _parse_count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1 on")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
