"""Share between an agent and its ranks what is known of a notice, and how many steps each has taken.

Words of the page, each with one writing process::

    0  of the agent: generation, is_used, patience, boundary, is_void (`judge.AgentWords`), held_limit_s
    8  of each local rank: generation, count of its step boundaries, is_used, step_us (a mean)

The agent stores the generation before its workers start, and the notice's text before its boundary. A rank
stores count 0 before its generation.
"""

from __future__ import annotations

import os
from typing import NamedTuple

from elastic_resume import linux
from elastic_resume.mechanisms.preemption.judge import AgentWords
from elastic_resume.shared_page import COUNTS, SharedPage, barrier

_GENERATION, _IS_USED, _PATIENCE, _BOUNDARY, _IS_VOID = range(5)
_HELD_LIMIT_S = 5
_RANKS_START, _RANK_WORDS = 8, 4
_RANK_GENERATION, _COUNT, _RANK_USES, _STEP_US = range(4)
MAX_TEXT_BYTES = 4096


class RankWords(NamedTuple):
    """What one rank has stored."""

    boundaries: int
    is_used: int
    step_us: int


class NoticePage:
    """The page of one agent, in memory that outlives no process."""

    def __init__(self, descriptor: int) -> None:
        """Map the page; the object owns the descriptor."""
        self._descriptor = descriptor
        self._words_bytes = os.fstat(descriptor).st_size - MAX_TEXT_BYTES
        self._page = SharedPage(descriptor, self._words_bytes, COUNTS)
        self._words = self._page.words
        self.path = linux.name_descriptor(descriptor)

    @classmethod
    def create(cls, local_ranks: int, held_limit_s: int) -> NoticePage:
        """Create an agent's page, whose ranks wait ``held_limit_s`` for an agreed boundary at most."""
        descriptor = linux.create_anonymous_file("elastic_resume-notices")
        os.ftruncate(descriptor, (_RANKS_START + _RANK_WORDS * local_ranks) * 8 + MAX_TEXT_BYTES)
        page = cls(descriptor)
        page._words[_HELD_LIMIT_S] = held_limit_s
        return page

    @classmethod
    def open(cls, path: str) -> NoticePage:
        """Open the page of the agent; raise OSError or ValueError if it has ended."""
        return cls(os.open(path, os.O_RDWR | os.O_CLOEXEC))

    def close(self) -> None:
        """Unmap the page."""
        if self._descriptor >= 0:
            self._page.close()
            os.close(self._descriptor)
            self._descriptor = -1

    # ---- the agent -----------------------------------------------------------------------------------

    def begin_generation(self, generation: int) -> None:
        """Forget the notice of the generation before."""
        for word in (_GENERATION, _IS_USED, _PATIENCE, _BOUNDARY, _IS_VOID):
            self._words[word] = 0
        self._words[_GENERATION] = generation

    def set_used(self) -> None:
        """Store that a script of the job asks for notices."""
        self._words[_IS_USED] = 1

    def announce(self, patience: int) -> int:
        """Store that there is a notice; return the boundary at which each rank sees it at the latest."""
        self._words[_PATIENCE] = patience
        barrier()
        return 1 + max((rank.boundaries for rank in self.read_ranks()), default=0)

    def agree(self, boundary: int, text: bytes) -> None:
        """Store the boundary at which all ranks get the notice."""
        os.pwrite(self._descriptor, text.ljust(MAX_TEXT_BYTES, b"\0"), self._words_bytes)
        barrier()
        self._words[_BOUNDARY] = boundary

    def make_void(self) -> None:
        """Store that no rank gets the notice."""
        self._words[_IS_VOID] = 1

    def read_ranks(self) -> list[RankWords]:
        """Read what the ranks of this generation have stored."""
        generation, end = self._words[_GENERATION], self._words_bytes // 8
        return [
            RankWords(self._words[at + _COUNT], self._words[at + _RANK_USES], self._words[at + _STEP_US])
            for at in range(_RANKS_START, end, _RANK_WORDS)
            if self._words[at + _RANK_GENERATION] == generation
        ]

    # ---- a rank --------------------------------------------------------------------------------------

    def join(self, local_rank: int, generation: int) -> None:
        """Store that a rank begins a generation."""
        at = _RANKS_START + _RANK_WORDS * local_rank
        self._words[at + _RANK_GENERATION] = 0
        for word in (_COUNT, _RANK_USES, _STEP_US):
            self._words[at + word] = 0
        self._words[at + _RANK_GENERATION] = generation

    def count(self, local_rank: int, count: int, step_us: int) -> bool:
        """Store that a rank has come to a step boundary; return whether there is a notice."""
        at = _RANKS_START + _RANK_WORDS * local_rank
        self._words[at + _STEP_US] = step_us
        self._words[at + _COUNT] = count
        barrier()
        return bool(self._words[_PATIENCE])

    def use(self, local_rank: int) -> None:
        """Store that a rank's script asks for notices."""
        self._words[_RANKS_START + _RANK_WORDS * local_rank + _RANK_USES] = 1

    def read_agent(self) -> AgentWords:
        """Read what the agent has stored."""
        return AgentWords(*(self._words[word] for word in range(5)))

    @property
    def held_limit_s(self) -> int:
        """How long a rank waits for the agreed boundary."""
        return int(self._words[_HELD_LIMIT_S])

    def read_text(self) -> bytes:
        """Read the text of the notice whose boundary is known."""
        return os.pread(self._descriptor, MAX_TEXT_BYTES, self._words_bytes).rstrip(b"\0")
