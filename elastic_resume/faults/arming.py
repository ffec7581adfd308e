"""Arms failpoints of processes that run: the other side of `elastic_resume.failpoints`.

All nodes of a job are given one directory. What is armed is a list in it that is replaced in one piece; what
has fired, and what waits at its point, are files that outlive whoever made them. An action is done
once, by whichever process comes first, unless ``once=""`` is said.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from elastic_resume import contract, failpoints
from elastic_resume.failpoints import ARMED_FILE, DONE, FIRED, REACHED


class Arming:
    """The failpoints of one job. One thread at a time."""

    def __init__(self, directory: Path) -> None:
        """Make ``directory``, which every process of the job must see by this path."""
        self.directory = directory
        directory.mkdir(parents=True, exist_ok=True)
        self._entries: dict[str, str] = {}
        self._count = 0

    @property
    def env(self) -> dict[str, str]:
        """What the job's processes find the directory by."""
        return {contract.ENV_FAULTS_DIR: str(self.directory)}

    def arm(self, point: str, **conditions: object) -> str:
        """Arm ``NAME=ACTION`` with conditions (see `failpoints`); give the mark by which to ask for it.

        Raises:
            ConfigError: it cannot be read as one.

        """
        self._count += 1
        mark = f"f{self._count}"
        told = {"once": mark, **{key.rstrip("_"): value for key, value in conditions.items()}}
        entry = ";".join([point, *(f"{k}={v}" for k, v in told.items() if v not in (None, ""))])
        failpoints.check(entry)  # as each process does, too late to tell who wrote it
        self._entries[mark] = entry
        self._write()
        return mark

    def disarm(self, mark: str) -> None:
        """Let nobody else be hit; who is being hit goes on."""
        if self._entries.pop(mark, None) is not None:
            self._write()

    def fired(self, mark: str) -> dict[str, Any] | None:
        """Who was hit first: t, pid, node, rank and local rank, as far as known; None: nobody yet."""
        try:
            told = json.loads((self.directory / (mark + FIRED)).read_bytes())
        except (FileNotFoundError, ValueError):  # being written
            return None
        return told if isinstance(told, dict) else None

    def waits(self, mark: str) -> bool:
        """Whether a process stands at a point that was armed with ``wait``."""
        return (self.directory / (mark + REACHED)).exists()

    def release(self, mark: str) -> None:
        """Let it go on."""
        (self.directory / (mark + DONE)).touch()

    def _write(self) -> None:
        path = self.directory / ARMED_FILE
        new = path.with_suffix(".new")
        new.write_text("\n".join(self._entries.values()) + "\n")
        new.replace(path)
