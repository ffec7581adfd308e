"""Puts a word in front of each line that a worker prints: which node, rank and generation said it.

A process of its own for each stream, forked by the guard ahead of the worker: a reader that is slow, or a
terminal that was paused, must hold up the worker's printing and never the guard. Lines go out whole, so those
of several ranks do not mix. Standard library only, see `stub.py`.
"""

import os
import select

ENV_LOG_PREFIX = "ELASTIC_RESUME_LOG_PREFIX"
ENV_GENERATION = "ELASTIC_RESUME_GENERATION"
ENV_ROUND = "ELASTIC_RESUME_ROUND"
ENV_NODE_NAME = "ELASTIC_RESUME_NODE_NAME"
LINE_LIMIT = 64 * 1024  # a longer line goes out in parts, each with the word
TORN = b"\n"
HELD_UP_S = 1.0
LATE_S = 10.0


def prefix() -> bytes:
    """What the agent asked for, with this worker's rank; empty when it asked for nothing."""
    asked = os.environ.get(ENV_LOG_PREFIX, "")
    generation = os.environ.get(ENV_GENERATION) or os.environ.get(ENV_ROUND, "?")
    node = os.environ.get(ENV_NODE_NAME, "?")
    return f"[{node}:{os.environ.get('RANK', '?')} {generation}] ".encode() if asked else b""


class Relays:
    """One relay behind each of a worker's two streams; none where the agent asked for no word."""

    def __init__(self, not_theirs: "list[int]") -> None:
        """Fork them. They close ``not_theirs``: descriptors whose end means something to somebody."""
        self.pids: set[int] = set()
        self._into: dict[int, int] = {}
        word = prefix()
        for stream in (1, 2) if word else ():
            source, into = os.pipe()
            pid = os.fork()
            if pid == 0:
                for descriptor in (*not_theirs, *self._into.values(), into):
                    os.close(descriptor)
                _serve(source, stream, word)
            os.close(source)
            self.pids.add(pid)
            self._into[stream] = into

    def attach(self) -> None:
        """In the worker: print through them."""
        for stream, into in self._into.items():
            os.dup2(into, stream)
            os.close(into)

    def detach(self) -> None:
        """In the guard: let them end with the last process that prints through them."""
        for into in self._into.values():
            os.close(into)


def are_held_up(age_s: float) -> bool:
    """Whether relays that did not end with the worker, that many seconds ago, will not soon.

    Nobody waits for a reader that does not read. Where the streams take what is written, a relay that is late
    waits for a processor.
    """
    if age_s <= HELD_UP_S:
        return False
    poll = select.poll()
    for stream in (1, 2):
        poll.register(stream, select.POLLOUT)
    return age_s > LATE_S or len(poll.poll(0)) < 2


def _serve(source: int, target: int, word: bytes) -> None:
    try:
        relay(source, target, word)
    finally:
        os._exit(0)  # also when nobody reads any more: the worker then dies of its pipe, as without us


def relay(source: int, target: int, word: bytes) -> None:
    """Copy lines from one descriptor to the other until its end, ``word`` before each."""
    kept = b""
    while True:
        data = os.read(source, LINE_LIMIT)
        kept += data
        lines = kept.split(b"\n")
        kept = lines.pop()
        if not data or len(kept) > LINE_LIMIT:
            lines += [kept] if kept else []
            kept = b""
        text = b"".join(word + line + TORN for line in lines)
        while text:
            text = text[os.write(target, text) :]
        if not data:
            return
