"""Glue for libraries that own the training loop.

Each module needs its library, and only its users import it.
`require_versions` refuses a version that a module was not written for.
"""

from __future__ import annotations

import importlib.metadata

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


def _parse(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
