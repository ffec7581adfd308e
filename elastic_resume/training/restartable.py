"""Call a function again, in the same process, whenever the world has changed: the survivors' side.

::

    enter a generation ──▶ the function ──▶ returns
       ▲                     │ WorldChanged, or a collective fails
       └─── parked ◀── leave ┘

The supervisor's request to park arrives in a thread (`supervisor_link`). It cuts the process groups'
connections, which frees the main thread from a collective, and raises `WorldChanged` there by a signal.
`Run` methods that write into shared memory are protected: the exception waits for their end. So are the
script's ``finally`` and ``with`` blocks while another exception unwinds them, and ``__del__``.

Invariants:

- The state of the next generation is loaded from a snapshot or checkpoint. What an interrupted step has left
  in parameters, optimizers, gradients and flags is overwritten or reset.
- A process that cannot leave in two seconds, or has nothing to load, is restarted as without this module.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from multiprocessing.connection import Connection
from types import FrameType
from typing import Any, Concatenate, NoReturn, ParamSpec, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.data import dataloader

from elastic_resume.errors import UsageError, WorldChanged
from elastic_resume.ranks.group_connections import GroupConnections
from elastic_resume.slots.progress_page import STACKS_SIGNAL
from elastic_resume.training import worker_exit
from elastic_resume.training.supervisor_link import SupervisorLink

logger = logging.getLogger(__name__)

T = TypeVar("T")
P = ParamSpec("P")

INTERRUPT_SIGNAL = STACKS_SIGNAL + 1
# A broken connection reaches the peers before their agents end the generation.
WORLD_END_WAIT_S = 2.0
SECOND_INTERRUPT_S = 1.0  # the script may have swallowed the first one
POSTPONED_S = 0.005
IMPORT_SYSTEM = "<frozen importlib._bootstrap>"
UNHANDLED_S = 0.02
# Left in their middle, they would leave the rest of a message in a pipe: a DataLoader's persistent workers
# could not be used again.
UNBROKEN = frozenset(
    getattr(owner, name).__code__
    for owner, name in (
        (Connection, "_recv_bytes"),
        (getattr(dataloader, "_MultiProcessingDataLoaderIter", None), "_reset"),
    )
    if hasattr(owner, name)
)
GPU_CHECK_TIMEOUT_S = 1.0


class InterrupterState(enum.Enum):
    """Whether a signal raises `WorldChanged`, and what became of the last one."""

    DISARMED = "disarmed"  # signals are ignored
    ARMED = "armed"
    PENDING = "pending"  # raises at the end of the protected block
    POSTPONED = "postponed"  # the signal has to be sent again
    RAISED = "raised"  # the script may have swallowed it: a further signal raises again


class Section(enum.Enum):
    """What the main thread runs when it is interrupted."""

    PLAIN = "plain"
    PROTECTED = "protected"  # writes into shared memory
    UNBROKEN = "unbroken"  # is left in its middle only if nothing else helps
    UNBREAKABLE = "unbreakable"


def find_state(state: InterrupterState, section: Section, *, must_break: bool) -> InterrupterState:
    """Return the state after an interrupt in ``section``; RAISED if it has to raise."""
    if state is InterrupterState.DISARMED:
        return state
    if section is Section.PROTECTED:
        return InterrupterState.PENDING
    if section is Section.UNBREAKABLE or (section is Section.UNBROKEN and not must_break):
        return InterrupterState.POSTPONED
    return InterrupterState.RAISED


class Interrupter:
    """Raises `WorldChanged` in the main thread while it is armed and not protected.

    Only the main thread changes the state. Another thread sends the signals.
    """

    def __init__(self) -> None:
        self.state = InterrupterState.DISARMED
        self.is_unhandled = False
        """Whether Python has not seen the last signal yet. It looks for signals before it enters a blocking
        call, and a signal that arrives in between is only seen when another one ends that call."""
        self._pid = os.getpid()
        self._depth = 0  # of protected blocks
        self._must_break = False
        self._outer_error: BaseException | None = None

    def install(self) -> None:
        """Handle the signal from now on. Call it in the main thread."""
        signal.signal(INTERRUPT_SIGNAL, self._handle)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {INTERRUPT_SIGNAL})

    def arm(self) -> None:
        """Let a signal raise."""
        self._outer_error = sys.exc_info()[1]  # the function may be called in an `except` block
        self.state = InterrupterState.ARMED

    def disarm(self) -> None:
        """Ignore signals."""
        self.state = InterrupterState.DISARMED

    @contextlib.contextmanager
    def protect(self) -> Iterator[None]:
        """Put the exception off until the end of the block."""
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
        if self.state is InterrupterState.PENDING and not self._depth:
            self._change_state(self._find_unwinding_section())

    def interrupt(self, *, must_break: bool = False) -> None:
        """Raise in the main thread, from another thread. The signal ends a blocking system call.

        ``must_break`` breaks an UNBROKEN section too.
        """
        self._must_break = must_break
        self.is_unhandled = self.state is not InterrupterState.DISARMED
        if self.is_unhandled:
            signal.pthread_kill(threading.main_thread().ident or 0, INTERRUPT_SIGNAL)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        del number
        self.is_unhandled = False
        if os.getpid() == self._pid:
            self._change_state(self._find_section(frame))

    def _change_state(self, section: Section) -> None:
        self.state = find_state(self.state, section, must_break=self._must_break)
        if self.state is InterrupterState.RAISED:
            raise WorldChanged

    def _find_section(self, frame: FrameType | None) -> Section:
        """Return what the main thread runs in ``frame`` and its callers."""
        if self._depth:
            return Section.PROTECTED
        section = self._find_unwinding_section()
        while frame is not None:
            # A module whose import was cut is broken for this process: better that the process is killed.
            if frame.f_code.co_filename == IMPORT_SYSTEM:
                return Section.UNBREAKABLE
            # Python prints and drops what is raised in __del__, so the interrupt would be lost there.
            is_unbroken = frame.f_code in UNBROKEN or frame.f_code.co_name == "__del__"
            if is_unbroken and section is Section.PLAIN:
                section = Section.UNBROKEN
            frame = frame.f_back
        return section

    def _find_unwinding_section(self) -> Section:
        """Return UNBREAKABLE while the script unwinds the end of the world: its ``finally`` must not be cut.

        An error of another kind may be one that the script handles by training on.
        """
        error = sys.exc_info()[1]
        if error is None or error is self._outer_error:
            return Section.PLAIN
        return Section.UNBREAKABLE if isinstance(error, (WorldChanged, RuntimeError)) else Section.UNBROKEN


class ScriptState:
    """Keep the state of tracked objects that no checkpoint holds, as it was at the function's first call.

    These are the train flags of modules, ``requires_grad``, and buffers that are not persistent. An exception
    at the entry of ``torch.no_grad()`` may also leave gradients off.
    """

    def __init__(self, tracked: Mapping[str, Any]) -> None:
        models = [item for item in tracked.values() if isinstance(item, nn.Module)]
        modules = dict.fromkeys(module for model in models for module in model.modules())
        self._tracked = tracked
        self._is_grad_enabled = torch.is_grad_enabled()
        self._training = [(module, module.training) for module in modules]
        self._requires_grad = [(p, p.requires_grad) for model in models for p in model.parameters()]
        self._modes = _read_modes()
        self._buffers: list[tuple[nn.Module, str, Tensor, Tensor]] = [
            (module, name, buffer, buffer.detach().clone())
            for module in modules
            for name, buffer in module._buffers.items()  # noqa: SLF001  named_buffers() has the others too
            if buffer is not None and name in module._non_persistent_buffers_set  # noqa: SLF001
        ]

    def has_same_modes(self) -> bool:
        """Return whether autocast and inference mode are as they were: an exception may leave them on."""
        return _read_modes() == self._modes

    def reset(self) -> None:
        """Set all of it back, and drop gradients and what a GradScaler knows of an unfinished step."""
        torch.set_grad_enabled(self._is_grad_enabled)
        for module, is_training in self._training:
            module.training = is_training
        for parameter, requires_grad in self._requires_grad:
            parameter.requires_grad_(requires_grad)
            parameter.grad = None
        with torch.no_grad():
            for module, name, buffer, value in self._buffers:
                buffer.copy_(value)
                setattr(module, name, buffer)  # forward() may have replaced it
        for item in self._tracked.values():
            if isinstance(item, Optimizer):
                item.zero_grad(set_to_none=True)
            unfinished = getattr(item, "_per_optimizer_states", None)  # of a GradScaler; not public
            if isinstance(unfinished, dict):
                unfinished.clear()


def _read_modes() -> tuple[int | bool, ...]:
    nesting = torch.autocast_increment_nesting()
    torch.autocast_decrement_nesting()
    autocast = [torch.is_autocast_enabled(device) for device in ("cpu", "cuda")]
    return nesting, *autocast, torch.is_inference_mode_enabled()


class RestartableCall:
    """Calls a run's restartable function in one generation after the other."""

    def __init__(
        self,
        link: SupervisorLink,
        interrupter: Interrupter,
        *,
        leave: Callable[[], str],
        get_connections: Callable[[], GroupConnections],
        stop_waiting: Callable[[], None] = lambda: None,
    ) -> None:
        """``leave`` releases all that belongs to the last generation.

        It returns why this process can enter no other, or "". ``get_connections`` returns those of the
        current one. ``stop_waiting`` ends the wait of `run.step` for a snapshot that other ranks began.
        """
        self._link = link
        self._interrupter = interrupter
        self._leave = leave
        self._get_connections = get_connections
        self._stop_waiting = stop_waiting
        self._has_left = threading.Event()

    def run(self, function: Callable[[], T], enter: Callable[[], None] = lambda: None) -> T:
        """Call ``function`` until it returns, or raises an error of its own.

        ``enter`` begins each generation but the first.
        """
        self._interrupter.install()
        self._link.allow_parking(self._interrupt)
        must_enter = False
        try:
            while True:
                try:
                    try:
                        self._has_left.clear()
                        self._interrupter.arm()
                        if self._link.is_world_over.is_set():  # before a signal could raise
                            raise WorldChanged
                        if must_enter:
                            enter()
                        return function()
                    finally:
                        self._interrupter.disarm()
                except WorldChanged:
                    pass
                except Exception as error:
                    if not self._is_world_over(error):
                        raise
                # Here no exception is alive, whose frames would keep the old DDP module. A signal at the
                # begin of `finally` skips the first disarm().
                self._interrupter.disarm()
                self._has_left.set()
                self._leave_and_park()
                must_enter = True
        finally:
            self._has_left.set()
            self._link.forbid_parking()

    def _interrupt(self) -> None:
        """Free the main thread; in the thread that reads from the supervisor."""
        self._get_connections().cut()
        self._stop_waiting()
        self._interrupter.interrupt()
        limit, must_break = time.monotonic() + SECOND_INTERRUPT_S, False
        while not self._has_left.wait(UNHANDLED_S if self._interrupter.is_unhandled else POSTPONED_S):
            if not must_break and time.monotonic() > limit:
                must_break = True
                self._get_connections().cut()
                self._interrupter.interrupt(must_break=True)
            elif self._interrupter.is_unhandled or self._interrupter.state is InterrupterState.POSTPONED:
                self._interrupter.interrupt(must_break=must_break)

    def _is_world_over(self, error: Exception) -> bool:
        """Return whether ``error`` follows from the end of the generation."""
        drain = worker_exit.DrainRequest.current
        if drain is not None and drain.requested:
            return False
        causes = [error, *worker_exit.list_causes(error)]
        is_from_peer = any(isinstance(each, RuntimeError) for each in causes)
        if self._link.is_world_over.is_set():
            if not is_from_peer:
                logger.warning(
                    "the world changed, and the script raised an error of its own:", exc_info=error
                )
            return True
        if isinstance(error, torch.OutOfMemoryError) or not self._get_connections().is_used:
            return False
        return is_from_peer and self._link.await_world_end(WORLD_END_WAIT_S)

    def _leave_and_park(self) -> None:
        if obstacle := self._leave():
            self._await_kill(obstacle)
        if not is_gpu_alive():
            self._await_kill("its GPU does not answer after its collectives were aborted")
        self._link.park()

    def _await_kill(self, reason: str) -> NoReturn:
        """Let the supervisor kill this process, and start a new one."""
        logger.info(f"a new process takes the place of this one: {reason}.")
        self._link.forbid_parking()
        while True:
            time.sleep(1.0)


def is_gpu_alive() -> bool:
    """Return whether this process's GPU still works after groups were aborted on it; True without a GPU."""
    if not torch.cuda.is_initialized():
        return True
    device, works = torch.cuda.current_device(), threading.Event()

    def synchronize() -> None:
        with contextlib.suppress(RuntimeError):
            torch.cuda.synchronize(device)
            works.set()

    threading.Thread(target=synchronize, daemon=True).start()
    return works.wait(GPU_CHECK_TIMEOUT_S)


class _Interruptible(Protocol):
    _interrupter: Interrupter


R = TypeVar("R", bound=_Interruptible)


def uninterrupted(method: Callable[Concatenate[R, P], T]) -> Callable[Concatenate[R, P], T]:
    """Let a change of the world wait for the end of ``method``, which writes into shared memory."""

    @functools.wraps(method)
    def protected(self: R, /, *args: P.args, **kwargs: P.kwargs) -> T:
        with self._interrupter.protect():
            return method(self, *args, **kwargs)

    return protected


def release_wrapper(wrapper: DistributedDataParallel) -> None:
    """Free what a DDP module holds of its world: gradient buckets, hooks on parameters, and the group.

    A garbage collection would do it too, but may take seconds in a large process.
    """
    for name in ("logger", "reducer", "process_group"):  # the logger holds the reducer
        if name in vars(wrapper):
            setattr(wrapper, name, None)


def check_groups(connections: GroupConnections) -> None:
    """Raise UsageError for a process group that the script has made itself; torch has no public list."""
    world = getattr(dist.distributed_c10d, "_world", None)
    for group in getattr(world, "pg_map", {}):
        if group not in connections.groups:
            raise UsageError(
                f"run.restartable: the process group {_describe_group(group)} was not made by er.resume() or "
                "run.new_group(), so it would outlive its ranks. Let er.resume() call init_process_group(), "
                "and write run.new_group(...) in the function, with the arguments of dist.new_group()."
            )


def _describe_group(group: dist.ProcessGroup) -> str:
    with contextlib.suppress(AttributeError, RuntimeError):
        return repr(group.group_desc if group.group_desc != "undefined" else group.group_name)
    return "of another kind"


def check_call(*, is_second: bool) -> None:
    """Raise UsageError for the second call of a process, and for one outside the main thread."""
    if is_second:
        raise UsageError(
            "run.restartable: a restartable function was called before in this process. A new worker "
            "would run the first one while the others are in the second: make one function of both."
        )
    if threading.current_thread() is not threading.main_thread():
        raise UsageError("run.restartable: call the function in the main thread.")


def check_world(*, owns_group: bool, is_wrapped: bool) -> None:
    """Raise UsageError for what the script has made for this world before the function is called."""
    if not owns_group and dist.is_initialized():
        raise UsageError(
            "run.restartable: the script has called init_process_group(), so er.resume() cannot do it "
            "again for the next world. Leave that call out."
        )
    if is_wrapped:
        raise UsageError(
            "run.restartable: the model was wrapped in DistributedDataParallel, or given to "
            "run.replicate(), before the function was called: do it in the function."
        )


def check_wrappers(wrappers: Collection[DistributedDataParallel], *, may_lack: bool) -> None:
    """Raise UsageError for a wrapper that could not be made anew, or if there is none."""
    for wrapper in wrappers:
        _check_wrapper(wrapper)
    if not (wrappers or may_lack):
        raise UsageError(
            "run.restartable: no model was given to run.ddp() or run.replicate() in the function. A "
            "DistributedDataParallel that the script makes itself would keep the ranks of its world."
        )


def _check_wrapper(wrapper: DistributedDataParallel) -> None:
    """Raise UsageError for a communication hook, whose state would be of another world, and for arguments."""
    check_ddp_arguments(vars(wrapper))  # a library may have made it
    hooks = getattr(wrapper, "_comm_hooks", [])
    if hooks:
        name = getattr(hooks[0][0], "__name__", str(hooks[0][0]))
        raise UsageError(
            f"run.restartable: the communication hook {name} keeps state of its world, which no checkpoint "
            "holds. Train without it, or without run.restartable: then the process is restarted."
        )


def check_ddp_arguments(arguments: Mapping[str, Any]) -> None:
    """Raise UsageError for an argument of DistributedDataParallel that cannot be built anew."""
    for name in ("static_graph", "lazy_bucket_allocation", "require_manual_backward_finalization"):
        if arguments.get(name):
            raise UsageError(
                f"run.ddp: {name}=True is not possible in a run.restartable function: leave it out, or train "
                "without run.restartable."
            )
