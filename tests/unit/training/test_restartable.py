"""Test how a restartable function is left and called again, with the test as its supervisor."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import select
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import FrameType
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from elastic_resume.errors import WorldChanged
from elastic_resume.ranks.group_connections import GroupConnections
from elastic_resume.training import restartable
from elastic_resume.training.restartable import (
    INTERRUPT_SIGNAL,
    Interrupter,
    InterrupterState,
    RestartableCall,
    ScriptState,
    Section,
    find_state,
)
from elastic_resume.training.supervisor_link import SupervisorLink

RESUME = b"resume 2\n{}"


class Connections(GroupConnections):
    """Connections whose `cut` does what the test wants."""

    def __init__(self, cut: Callable[[], None] = lambda: None) -> None:
        super().__init__()
        self._cut = cut

    def cut(self) -> None:
        """Do it."""
        self._cut()


@pytest.fixture(autouse=True)
def _keep_handler() -> Iterator[None]:
    handler = signal.getsignal(INTERRUPT_SIGNAL)
    yield
    signal.signal(INTERRUPT_SIGNAL, handler)


@pytest.fixture
def supervisor() -> Iterator[tuple[socket.socket, SupervisorLink]]:
    """Yield the supervisor's end of the socket, and the worker's link."""
    end, workers_end = socket.socketpair()
    with end:
        yield end, SupervisorLink(workers_end)


def make_call(link: SupervisorLink, cut: Callable[[], None] = lambda: None) -> RestartableCall:
    """Return a call that always finds a state to load."""
    return RestartableCall(link, Interrupter(), leave=lambda: "", get_connections=lambda: Connections(cut))


def serve(end: socket.socket, *answers: bytes) -> threading.Thread:
    """Send an answer each time that the worker has parked."""

    def run() -> None:
        lines = end.makefile("rb")
        for answer in answers:
            while lines.readline() != b"parked\n":
                pass
            end.sendall(answer)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread


def wait_for_interrupt() -> None:
    """Wait until the test's limit."""
    threading.Event().wait()


def test_request_that_follows_a_resume_at_once_is_not_lost(
    supervisor: tuple[socket.socket, SupervisorLink],
) -> None:
    """Two changes of the world in quick succession: the worker parks twice."""
    end, link = supervisor
    server = serve(end, RESUME + b"park\n", RESUME)
    calls = []

    def train() -> int:
        calls.append(1)
        if len(calls) == 1:
            end.sendall(b"park\n")
            wait_for_interrupt()
        return len(calls)

    assert make_call(link).run(train) in {2, 3}
    server.join(10)
    assert not server.is_alive()
    assert not link.is_world_over.is_set()


def test_failure_to_connect_waits_for_the_end_of_the_generation(
    supervisor: tuple[socket.socket, SupervisorLink],
) -> None:
    """A peer has died before the process groups were made."""
    end, link = supervisor
    connections, calls = GroupConnections(), []

    def answer() -> None:
        with end.makefile("rb") as lines:
            while not lines.readline().startswith(b"waiting"):
                pass
        end.sendall(b"park\n")
        serve(end, RESUME).join()

    def train() -> int:
        calls.append(1)
        with connections.record():
            if len(calls) == 1:
                raise RuntimeError("connection refused")
        return len(calls)

    thread = threading.Thread(target=answer)
    thread.start()
    call = RestartableCall(link, Interrupter(), leave=lambda: "", get_connections=lambda: connections)
    assert call.run(train) == 2
    thread.join()


def test_late_cut_does_not_disturb_next_generation(
    supervisor: tuple[socket.socket, SupervisorLink],
) -> None:
    """The main thread has left and has its next generation, before the cut of the last one has ended."""
    end, link = supervisor
    server = serve(end, RESUME)

    def cut() -> None:
        """Free the main thread, and give it time to begin the next generation, which it must not."""
        failed.set()
        server.join()
        second_call.wait(0.3)
        ended.set()

    failed, second_call, ended = threading.Event(), threading.Event(), threading.Event()
    calls = []

    def train() -> bool:
        calls.append(1)
        if len(calls) == 1:
            end.sendall(b"park\n")
            failed.wait()
            raise RuntimeError("a collective failed")
        second_call.set()
        return ended.is_set()

    assert make_call(link, cut).run(train)


def test_swallowed_interrupt_is_repeated(
    supervisor: tuple[socket.socket, SupervisorLink], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python drops an exception in ``__del__``; a script may catch everything."""
    monkeypatch.setattr(restartable, "SECOND_INTERRUPT_S", 0.3)  # the first one may be unhandled for a while
    end, link = supervisor
    serve(end, RESUME)
    cuts: list[int] = []
    swallowed = threading.Event()

    def cut() -> None:
        cuts.append(1)
        assert len(cuts) == 1 or swallowed.wait(60)

    def train() -> int:
        if not swallowed.is_set():
            try:
                end.sendall(b"park\n")
                wait_for_interrupt()
            except BaseException:  # noqa: BLE001
                swallowed.set()
            wait_for_interrupt()
        return len(cuts)

    assert make_call(link, cut).run(train) == 2


def test_signal_that_python_has_not_seen_is_sent_again(
    supervisor: tuple[socket.socket, SupervisorLink], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It came after Python's last look for signals, and before the thread slept in the kernel."""
    monkeypatch.setattr(restartable, "SECOND_INTERRUPT_S", 60.0)
    send_signal, sent = signal.pthread_kill, list[int]()

    def lose_first(thread: int, number: int) -> None:
        sent.append(number)
        if len(sent) > 1:
            send_signal(thread, number)

    monkeypatch.setattr(signal, "pthread_kill", lose_first)
    end, link = supervisor
    serve(end, RESUME)
    calls: list[int] = []

    def train() -> int:
        calls.append(1)
        if len(calls) == 1:
            end.sendall(b"park\n")
            wait_for_interrupt()
        return len(calls)

    assert make_call(link).run(train) == 2


class BlockedFinalizer:
    """Runs its ``__del__`` until the world ends, and a little longer."""

    def __init__(self, end_world: Callable[[], None], seen: list[str]) -> None:
        self._end_world, self._seen = end_world, seen

    def __del__(self) -> None:
        self._end_world()
        time.sleep(0.05)
        self._seen.append("del ended")


@pytest.mark.parametrize("block", ["failure", "interrupt", "context", "finalizer"])
def test_blocks_that_unwind_are_not_cut(
    block: str, supervisor: tuple[socket.socket, SupervisorLink], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A peer's failure or the interrupt itself unwinds them; also later than the second interrupt."""
    monkeypatch.setattr(restartable, "SECOND_INTERRUPT_S", 0.03)
    if block == "finalizer":
        monkeypatch.setattr(restartable, "SECOND_INTERRUPT_S", 60.0)
    end, link = supervisor
    serve(end, RESUME)
    calls, seen = list[int](), list[str]()

    def end_world() -> None:
        end.sendall(b"park\n")
        link.is_world_over.wait(60)

    @contextlib.contextmanager
    def opened() -> Iterator[None]:
        try:
            yield
        finally:
            if block != "interrupt":
                end_world()
            time.sleep(0.1)
            seen.append("finally ended")

    def train() -> list[str]:
        calls.append(1)
        if len(calls) > 1:
            return seen
        if block == "finalizer":
            BlockedFinalizer(end_world, seen)
            wait_for_interrupt()
        with opened():
            if block == "interrupt":
                end_world()
                wait_for_interrupt()
            raise RuntimeError("a collective failed")

    assert make_call(link).run(train) == ["del ended" if block == "finalizer" else "finally ended"]
    assert len(calls) == 2


def test_import_is_not_cut(
    supervisor: tuple[socket.socket, SupervisorLink], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Else the module is broken for this process; torch.compile imports at its first call."""
    monkeypatch.setattr(restartable, "SECOND_INTERRUPT_S", 0.03)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "imported_late.py").write_text(
        "import sys, time\nsys.end_world()\ntime.sleep(0.1)\nis_whole = True\n"
    )
    end, link = supervisor
    serve(end, RESUME)
    calls: list[int] = []

    def end_world() -> None:
        end.sendall(b"park\n")
        link.is_world_over.wait(60)

    def train() -> bool:
        calls.append(1)
        monkeypatch.setattr(sys, "end_world", end_world, raising=False)
        import imported_late  # type: ignore[import-not-found]  # noqa: PLC0415

        if len(calls) == 1:
            wait_for_interrupt()
        return bool(imported_late.is_whole)

    assert make_call(link).run(train)
    assert len(calls) == 2


def test_training_within_except_is_interrupted(
    supervisor: tuple[socket.socket, SupervisorLink], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error that the script handles is none of the world's end; the caller's error counts for nothing."""
    monkeypatch.setattr(restartable, "SECOND_INTERRUPT_S", 0.05)
    end, link = supervisor
    serve(end, RESUME, RESUME)
    calls: list[int] = []

    def train() -> int:
        calls.append(1)
        if len(calls) == 1:
            end.sendall(b"park\n")
            wait_for_interrupt()
        if len(calls) == 2:
            try:
                raise OSError("the first file is missing")
            except OSError:
                end.sendall(b"park\n")
                wait_for_interrupt()
        return len(calls)

    try:
        raise RuntimeError("the script's own")
    except RuntimeError:
        assert make_call(link).run(train) == 3


def test_message_of_loader_is_read_to_its_end(
    supervisor: tuple[socket.socket, SupervisorLink], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next generation reads the next message of the same pipe; both may come from persistent workers."""
    monkeypatch.setattr(restartable, "SECOND_INTERRUPT_S", 60.0)  # the rest of the message comes earlier
    end, link = supervisor
    serve(end, RESUME)
    reader, writer = multiprocessing.Pipe(duplex=False)
    postponed = []  # no Event: a handler within its set() would wait for itself

    class Observed(Interrupter):
        def _handle(self, number: int, frame: FrameType | None) -> None:
            super()._handle(number, frame)
            if self.state is InterrupterState.POSTPONED:
                postponed.append(number)

    interrupter = Observed()

    def end_world_within_message() -> None:
        while select.select([reader], [], [], 0)[0]:  # its size is not read yet
            time.sleep(0.001)
        end.sendall(b"park\n")
        while not postponed:
            time.sleep(0.001)
        os.write(writer.fileno(), b"old!")
        writer.send_bytes(b"new")

    os.write(writer.fileno(), struct.pack("!i", 4))
    threading.Thread(target=end_world_within_message, daemon=True).start()
    calls = []

    def train() -> bytes:
        calls.append(1)
        if len(calls) == 1:
            reader.recv_bytes()
            wait_for_interrupt()
        return bytes(reader.recv_bytes())

    call = RestartableCall(
        link, interrupter, leave=lambda: "", get_connections=lambda: Connections(lambda: None)
    )
    assert call.run(train) == b"new"


def test_failing_cut_has_the_supervisor_kill_the_worker() -> None:
    """Nothing else would ever read the next generation."""
    end, workers_end = socket.socketpair()

    def fail() -> None:
        raise OSError("no descriptor is left")

    with end:
        SupervisorLink(workers_end).allow_parking(fail)
        end.sendall(b"park\n")
        assert end.makefile("rb").read() == b"restartable\n"


@pytest.mark.parametrize("state", InterrupterState)
@pytest.mark.parametrize(
    ("section", "must_break", "expected"),
    [
        (Section.PLAIN, False, InterrupterState.RAISED),
        (Section.PLAIN, True, InterrupterState.RAISED),
        (Section.PROTECTED, False, InterrupterState.PENDING),
        (Section.PROTECTED, True, InterrupterState.PENDING),
        (Section.UNBROKEN, False, InterrupterState.POSTPONED),
        (Section.UNBROKEN, True, InterrupterState.RAISED),
        (Section.UNBREAKABLE, False, InterrupterState.POSTPONED),
        (Section.UNBREAKABLE, True, InterrupterState.POSTPONED),
    ],
)
def test_interrupt_depends_on_the_section_unless_disarmed(
    state: InterrupterState, section: Section, must_break: bool, expected: InterrupterState
) -> None:
    """Whatever became of an earlier one."""
    is_disarmed = state is InterrupterState.DISARMED
    assert find_state(state, section, must_break=must_break) is (state if is_disarmed else expected)


def test_interrupt_at_any_instruction_keeps_protection_balanced() -> None:
    """A protected block runs to its end or not at all, and a later interrupt raises."""
    for instruction in range(1, 1000):
        interrupter = Interrupter()
        interrupter.arm()
        block: list[str] = []

        def work(interrupter: Interrupter = interrupter, block: list[str] = block) -> None:
            with interrupter.protect():
                block.append("begin")
                block.append("end")

        if not run_with_interrupt(work, interrupter, instruction):
            break
        assert block in ([], ["begin", "end"])
        with pytest.raises(WorldChanged):
            interrupter._handle(0, None)
    assert instruction > 50
    assert sys.exc_info()[0] is None


def run_with_interrupt(work: Callable[[], None], interrupter: Interrupter, instruction: int) -> bool:
    """Interrupt ``work`` at its N-th instruction; return whether it has so many.

    It must raise then, or be put off: contextlib handles a StopIteration at a block's normal end.
    """
    seen = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal seen
        if frame.f_code.co_filename not in {__file__, contextlib.__file__, restartable.__file__}:
            return None  # a weak reference's callback, in which Python drops exceptions
        frame.f_trace_opcodes = True
        if event == "opcode":
            seen += 1
            if seen == instruction:
                interrupter._handle(0, None)
        return trace

    def work_traced() -> bool:
        sys.settrace(cast(Any, trace))
        try:
            work()
        except WorldChanged:
            return True
        finally:
            sys.settrace(None)
        return False

    # An interrupt between two instructions of an except block leaves its thread "handling" that exception.
    # Signals never come there, and later tests would run while an exception is handled.
    with ThreadPoolExecutor(1) as thread:
        raised = thread.submit(work_traced).result()
    assert raised or interrupter.state is InterrupterState.POSTPONED or seen < instruction
    return seen >= instruction


class Counting(nn.Module):
    """Counts its calls in a buffer that it assigns anew, and that no checkpoint holds."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Tensor
        self.register_buffer("count", torch.zeros(()), persistent=False)
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self) -> Tensor:
        """Count this call."""
        self.count = self.count + 1
        return self.weight * self.count


def test_script_state_is_reset_as_it_was_at_first_call() -> None:
    """Also a buffer that was replaced; autocast that an exception has left on cannot be undone."""
    model = Counting()
    state = ScriptState({"model": model})
    model().backward()
    model.eval()
    model.weight.requires_grad_(False)
    state.reset()
    assert (model.count.item(), model.training, model.weight.requires_grad) == (0.0, True, True)
    assert model.weight.grad is None
    assert state.has_same_modes()
    with torch.autocast("cpu"):
        assert not state.has_same_modes()
    with torch.inference_mode():
        assert not state.has_same_modes()
