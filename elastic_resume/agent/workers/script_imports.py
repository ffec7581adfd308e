"""Give a script that changes the environment before an import what the import would read in a new process.

Many scripts begin with ``os.environ["OMP_NUM_THREADS"] = "2"`` and import torch then. A forked worker has
imported torch already, with the variables of the fork server. So what the fork server has imported is hidden
until the script imports it (`hide`). If the script has changed a variable that the import reads, this process
executes its command: the script begins again, as in a worker that starts cold. Otherwise the import returns
the module that is there.

A new process would import torch._dynamo later, with the first optimizer. So `er.resume()` compares what that
import reads (`_HiddenPackages.check_late`).
"""

from __future__ import annotations

import contextlib
import importlib.machinery
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from types import ModuleType
from typing import Any

from elastic_resume.agent.workers import children, supervisor, worker_request
from elastic_resume.constants import ENV_NEW_PROCESS, EXIT_NEEDS_GENERATION

# What torch and the libraries below it read when they are imported. PYTHON… and LD_… act on new processes
# only, whoever sets them. CUDA_…, NCCL_… and GLOO_… are read later, where they are used.
READ_BY_TORCH = ("TORCH", "PYTORCH_", "OMP_", "KMP_", "GOMP_", "MKL_", "OPENBLAS_", "NUMEXPR_")
READ_BY_PRELOADED = ("HF_", "HUGGINGFACE_", "TRANSFORMERS_", "PL_")  # what packages of `--preload` import
READ_LATER = (
    *("TORCH_NCCL_", "TORCHELASTIC_", "TORCH_HOME", "TORCH_EXTENSIONS_DIR", "TORCH_CUDA_ARCH_LIST"),
    *("PYTORCH_NVML_BASED_CUDA_CHECK", "PYTORCH_KERNEL_CACHE_PATH", "HF_TOKEN"),  # Lightning sets the first
)
# What torch._dynamo and torch._inductor read, which import torch does not import. Torch sets the last itself.
READ_BY_COMPILER = ("TORCH_COMPILE", "TORCHDYNAMO_", "TORCH_DYNAMO_", "TORCHINDUCTOR_")
READ_BY_COMPILER_LATER = ("TORCHINDUCTOR_CACHE_DIR",)

# Modules of torch from which a script may import names before it imports torch.
LIKELY_FIRST = frozenset(
    f"torch.{name}"
    for name in (
        *("nn", "nn.functional", "nn.parallel", "nn.utils", "optim", "optim.lr_scheduler", "optim.swa_utils"),
        *("utils", "utils.data", "utils.data.distributed", "distributed", "distributed.fsdp", "cuda", "amp"),
        *("cuda.amp", "multiprocessing", "backends", "autograd", "compiler", "_dynamo", "random", "hub"),
    )
)


def hide(packages: Iterable[str], command: Sequence[str], mask: Iterable[int]) -> Callable[[], None]:
    """Hide imported packages until the script imports one of them, and compare the environment then.

    Return what `er.resume()` has to call first.

    Args:
        packages: names of modules that the fork server has imported; the package of each is hidden.
        command: what this worker executes if a variable has changed.
        mask: signals that are blocked when the command starts.

    """
    roots = {name.partition(".")[0] for name in packages} & sys.modules.keys()
    # Not all of their submodules: looking at a thousand names costs 30 ms, for pages that have to be copied.
    names = [name for name in [*roots, *LIKELY_FIRST] if name in sys.modules]
    has_compiler = "torch._dynamo" in sys.modules
    hidden = {name: sys.modules.pop(name) for name in names}
    finder = _HiddenPackages(roots, hidden, command, mask)
    sys.meta_path.insert(0, finder)
    return finder.check_late if has_compiler else lambda: None


def list_changed(before: dict[bytes, bytes], now: dict[bytes, bytes], packages: Iterable[str]) -> list[str]:
    """Return the names of changed variables that one of the packages reads when it is imported."""
    preloaded = [f"{name.upper()}_" for name in packages if name != "torch"]
    prefixes = (*READ_BY_TORCH, *preloaded, *(READ_BY_PRELOADED if preloaded else ()))
    return _list_changed(before, now, prefixes, READ_LATER)


def _list_changed(
    before: dict[bytes, bytes], now: dict[bytes, bytes], prefixes: tuple[str, ...], excluded: tuple[str, ...]
) -> list[str]:
    names = {os.fsdecode(name) for name in {*before, *now} if before.get(name) != now.get(name)}
    return sorted(n for n in names if n.startswith(prefixes) and not n.startswith(excluded))


class _HiddenPackages:
    """Finder and loader of the hidden packages."""

    def __init__(
        self, roots: set[str], modules: dict[str, ModuleType], command: Sequence[str], mask: Iterable[int]
    ) -> None:
        self._roots, self._modules, self._command, self._mask = roots, modules, command, mask
        self._environ, self._pid, self._cwd = dict(os.environb), os.getpid(), "."
        with contextlib.suppress(OSError):  # it was removed
            self._cwd = os.getcwd()  # noqa: PTH109 - pathlib would cost time
        self._umask = os.umask(0)
        os.umask(self._umask)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Return a spec for a hidden package, if the script has changed nothing that it reads."""
        del path, target
        if name not in self._roots:  # a submodule's package is imported first
            return None
        changed = list_changed(self._environ, dict(os.environb), self._roots)
        if changed and os.getpid() == self._pid:  # what a script forks is no worker
            self._start_again(changed)
        there = self._modules[name].__spec__
        spec = importlib.machinery.ModuleSpec(name, self, is_package=True)  # type: ignore[arg-type]
        if there is not None:  # scripts look for a package's files by its spec
            spec.origin, spec.has_location = there.origin, there.has_location
            spec.submodule_search_locations = there.submodule_search_locations
        return spec

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        """Return the package that is there."""
        self._spec = self._modules[spec.name].__spec__
        return self._modules[spec.name]

    def exec_module(self, module: ModuleType) -> None:
        """Show all packages, and put back what `importlib` has replaced."""
        module.__spec__ = self._spec
        sys.meta_path.remove(self)
        sys.modules.update(self._modules)

    def check_late(self) -> None:
        """Begin again if the script has changed a variable that a new process would have read meanwhile."""
        changed = _list_changed(self._environ, dict(os.environb), READ_BY_COMPILER, READ_BY_COMPILER_LATER)
        if not changed or os.getpid() != self._pid:
            return
        if sys.modules["torch"].distributed.is_initialized():  # a second group could not be made
            message = (
                f"elastic_resume: the script sets {', '.join(changed)} after it imports torch, and has "
                "called init_process_group(): this forked worker has read another value. Set variables "
                "before the import, or where the command runs.\n"
            )
            os.write(2, message.encode())
            return
        self._start_again(changed)

    def _start_again(self, changed: list[str]) -> None:
        """Execute this worker's command, with the environment, directory and umask of its start."""
        if supervisor.ENV_EARLY_START in os.environ:
            message = (
                f"elastic_resume: the script sets {', '.join(changed)}, which torch reads at its import, so "
                "this worker cannot start before its node joins; the other nodes wait for it. Set variables "
                "where the command runs.\n"
            )
            os.write(2, message.encode())
            os._exit(EXIT_NEEDS_GENERATION)
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
        with contextlib.suppress(ValueError):  # not in the main thread, where no handler runs
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's raises when a loader's worker is killed
        children.kill_all(lambda: math.inf, at_once=True)  # the script starts them again
        os.environb.clear()
        os.environb.update(self._environ)
        os.environ[ENV_NEW_PROCESS] = f"{time.monotonic()} {', '.join(changed)}"
        with contextlib.suppress(OSError):  # the directory was removed
            os.chdir(self._cwd)
        os.umask(self._umask)
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)
        worker_request.execute(list(self._command))
