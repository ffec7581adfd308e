"""What a scheduler says of those who are missing, whichever it is: `gone` asks Slurm, `pods` Kubernetes."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Verdict:
    """``dead``: of the homes asked about; ``alone``: nobody else of the job can be alive; ``why``: if not."""

    dead: frozenset[str] = frozenset()
    alone: bool = False
    why: str = ""


class Oracle(Protocol):
    """A scheduler that can be asked. It does not raise: no answer is a verdict that proves nothing."""

    def ask(self, missing: Collection[str], here: Collection[str]) -> Verdict:
        """Say who of the missing is dead, and whether anybody but those who are here can be alive."""
