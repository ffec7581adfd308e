"""Integrate three training libraries: transformers, Accelerate and Lightning.

Each module imports its library, so import only the one that you use. It refuses a version that it was not
written for (`require_versions`), or that lacks a method (`require_methods`) or an attribute (`set_known`).
"""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
import numbers
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from elastic_resume.errors import MachineError

if TYPE_CHECKING:
    from elastic_resume.training.run import Run

# Arguments of DataLoader that are kept when a `GlobalBatches` makes its batches.
LOADER_ARGUMENTS = (
    *("collate_fn", "num_workers", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context"),
    *("prefetch_factor", "persistent_workers", "in_order"),
)

# How long a library's save, or one batch of its validation, may take. It is less than the timeout of torch's
# process groups and of our own: a report of a hang names the ranks that have not come, a timeout none.
WAIT_LIMIT_S = 20 * 60.0


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


def require_methods(library: str, oldest: str, newest: str, methods: Mapping[str, tuple[str, ...]]) -> None:
    """Raise MachineError unless the classes of a library have these methods and parameters.

    ``methods`` are by "module.Class". Each is the name of a method or property, and the parameters that are
    relied on.
    """
    for path, lines in methods.items():
        module, _, class_name = path.rpartition(".")
        kind = getattr(importlib.import_module(module), class_name, None)
        for name, *parameters in map(str.split, lines):
            method = getattr(kind, name, None)
            known = inspect.signature(method).parameters if callable(method) else {}
            if method is None or not known.keys() >= set(parameters):
                raise MachineError(
                    f"{library} has another {class_name}.{name} than versions {oldest} to below "
                    f"{newest}, for which elastic_resume was written. Install one of these: pip install "
                    f"'{library}>={oldest},<{newest}'."
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


def log_numbers(run: Run, values: Mapping[str, Any], step: int | None = None) -> None:
    """Log what a library logs, as `Run.log` does; leave out what is no number, such as texts and pictures.

    ``step`` is the library's number of the step. If the job has just finished that one, the values belong to
    it; else to the step that is being computed. What no tracker takes, such as a very long name, is left out
    with a warning: the library may have made the name.
    """
    found = {str(name): value for name, value in values.items() if _is_number(value)}
    if found:
        generation = run._generation  # noqa: SLF001  not for scripts
        of_last_step = step == generation.progress.position.step
        generation.log(found, of_last_step=of_last_step, may_drop=True)


def _is_number(value: Any) -> bool:
    if isinstance(value, numbers.Real):  # numpy's too
        return True
    is_scalar = hasattr(value, "item") and getattr(value, "numel", lambda: 0)() == 1
    return is_scalar and not value.is_complex()


def _parse(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
