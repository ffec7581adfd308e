"""Read the pipes of a node's workers, and print what the collapsers of both streams return.

Run as ``python -m …filter_process OUT0 ERR0 OUT1 ERR1…``: the reading ends of each local rank's pipes. It
ends when nobody can write into any of them: no agent and no worker is left. It blocks all signals, since
those that stop a job may reach all its processes, and workers print at their end too.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from collections.abc import Sequence

from elastic_resume.mechanisms.collapsed_output.line_collapser import LineCollapser

READ_BYTES = 1 << 16
STREAMS = (1, 2)  # of this process; the agent's


def main(descriptors: Sequence[int]) -> None:
    """Print until all pipes are closed."""
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    ranks = len(descriptors) // len(STREAMS)
    collapsers = {stream: LineCollapser(ranks) for stream in STREAMS}
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    left = set(descriptors)
    while left:
        for descriptor, _ in poll.poll(_find_wait_ms(collapsers)):
            rank, index = divmod(descriptors.index(descriptor), len(STREAMS))
            stream = STREAMS[index]
            data = os.read(descriptor, READ_BYTES)
            if data:
                print_all(stream, collapsers[stream].feed(rank, data, time.monotonic()))
            else:
                poll.unregister(descriptor)
                left.remove(descriptor)
        for stream, collapser in collapsers.items():
            print_all(stream, collapser.expire(time.monotonic()))
    for stream, collapser in collapsers.items():
        print_all(stream, collapser.flush())


def _find_wait_ms(collapsers: dict[int, LineCollapser]) -> float | None:
    deadlines = [at for collapser in collapsers.values() if (at := collapser.find_deadline()) is not None]
    return max(0.0, min(deadlines) - time.monotonic()) * 1000 + 1 if deadlines else None


def print_all(stream: int, data: bytes) -> None:
    """Write all; drop it if nobody can read it any more, as the workers must not wait for ever."""
    while data:
        try:
            data = data[os.write(stream, data) :]
        except BlockingIOError:
            writable = select.poll()
            writable.register(stream, select.POLLOUT)
            writable.poll()
        except OSError:
            return


if __name__ == "__main__":
    main([int(argument) for argument in sys.argv[1:]])
