"""Integrations of training libraries: transformers, Accelerate and Lightning.

Each module imports its library, so import only the one that you use.
`require_versions` refuses a version that a module was not written for, and `set_known` one that lacks an
attribute.
"""

from __future__ import annotations

import importlib.metadata
from typing import Any

from elastic_resume.errors import MachineError

LIGHTNING_VERSIONS = ("2.6", "2.7")  # from the first to below the second


def require_versions(library: str, oldest: str, newest: str) -> None:
    """Raise MachineError unless ``oldest`` <= version of ``library`` < ``newest``; both are "X.Y"."""
    try:
        version = importlib.metadata.version(library)
    except importlib.metadata.PackageNotFoundError:
        raise MachineError(
            f"elastic_resume.integrations needs {library} from {oldest} to below {newest}, which is not "
            f"installed: pip install '{library}>={oldest},<{newest}'."
        ) from None
    if not _parse(oldest) <= _parse(version) < _parse(newest):
        raise MachineError(
            f"{library} is {version}, and this elastic_resume works with {oldest} to below {newest}: install "
            f"one of these (pip install '{library}>={oldest},<{newest}'), or another elastic_resume."
        )


def set_known(owner: Any, name: str, value: Any) -> None:
    """Set an attribute that the library reads. Raises MachineError if the library does not have it."""
    if not hasattr(owner, name):
        library = type(owner).__module__.partition(".")[0]
        raise MachineError(
            f"{type(owner).__name__} of {library} {importlib.metadata.version(library)} has no {name}, which "
            "this elastic_resume sets. Install a version that the library's page in docs/guides names."
        )
    setattr(owner, name, value)


def _parse(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
