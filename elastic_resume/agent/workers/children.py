"""End the processes that a worker has left: its supervisor's children, adopted ones included.

As `supervisor.py`, this module imports little and only the standard library.
"""

import os
import select
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    import _socket
    import signal
    from collections.abc import Callable
else:
    import _signal as signal

# Children of a worker often end by themselves after it and clean up shared memory (multiprocessing's resource
# tracker, torch_shm_manager). A longer wait would delay the restart.
LEFTOVERS_GRACE_S = 0.1
LEFTOVERS_TERM_S = 1.0  # between SIGTERM and SIGKILL for what a successful worker has left
# SIGKILL does not end a process in uninterruptible sleep, and torchelastic must not wait for one.
KILL_TIMEOUT_S = 5.0
MAX_LINE_BYTES = 4096  # a pipe that takes anything takes so much


def kill(pid: int) -> None:
    """Send SIGKILL to ``pid``, unless it has ended."""
    send_signal(pid, signal.SIGKILL)


def send_signal(pid: int, signal_number: int) -> None:
    """Send a signal to ``pid``, unless it has ended or its number belongs to another user's process."""
    try:  # noqa: SIM105 - contextlib would cost time at the start
        os.kill(pid, signal_number)
    except (ProcessLookupError, PermissionError):
        pass


def reap(worker: int) -> "int | None":
    """Reap every child that has ended; return the wait status of ``worker`` if it is among them."""
    worker_status = None
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return worker_status
        if pid == 0:
            return worker_status
        if pid == worker:
            worker_status = status


def kill_all(
    remaining_s: "Callable[[], float]",
    *,
    at_once: bool,
    grace_s: float = LEFTOVERS_GRACE_S,
    connection: "_socket.socket | None" = None,
) -> None:
    """Kill all children of this process, also those that it adopts when their parents end.

    They have ``grace_s``, while the lease has ``remaining_s()``. If that is long, they are named, and get
    SIGTERM before SIGKILL. A message of the launcher shim at ``connection``, or its end, ends the wait.
    """

    def is_urgent() -> bool:
        return at_once or remaining_s() <= 0 or _has_message(connection)

    if _wait_for_end(min(grace_s, LEFTOVERS_GRACE_S), is_urgent):
        return
    if grace_s > LEFTOVERS_GRACE_S and not is_urgent():
        write_names(list_all(), grace_s)
        if _wait_for_end(grace_s - LEFTOVERS_GRACE_S, is_urgent):
            return
        if not is_urgent():
            write_line(f"what it left did not end within {grace_s:g} s, and is stopped; it may be incomplete")
            if _wait_for_end(LEFTOVERS_TERM_S, is_urgent, signal.SIGTERM):
                return
    _wait_for_end(KILL_TIMEOUT_S, lambda: False, signal.SIGKILL)


def _wait_for_end(limit_s: float, is_urgent: "Callable[[], bool]", number: int = 0) -> bool:
    """Wait for the end of all children; return false if one is left at the limit, or it is urgent.

    Each gets the signal once: a second SIGTERM would cut its clean-up.
    """
    deadline = time.monotonic() + limit_s
    signalled: set[int] = set()
    while True:
        reap(0)
        pids = list_all()
        if not pids:
            return True
        if time.monotonic() >= deadline or is_urgent():
            return False
        if number:
            for pid in set(pids) - signalled:
                send_signal(pid, number)
            signalled.update(pids)
        # What a restart waits for is looked at often. Without CONFIG_PROC_CHILDREN a look reads all of /proc.
        time.sleep(0.002 if number == signal.SIGKILL or limit_s <= LEFTOVERS_GRACE_S else 0.05)


def _has_message(connection: "_socket.socket | None") -> bool:
    """Return whether the launcher shim has sent a signal, or has ended."""
    if connection is None or connection.fileno() < 0:
        return False
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    return bool(poll.poll(0))


def write_names(pids: "list[int]", grace_s: float) -> None:
    """Print which processes a successful worker has left."""
    names = []
    for pid in pids[:3]:
        try:
            with open(f"/proc/{pid}/cmdline", errors="replace") as file:
                words = file.read().split(chr(0))[:2]  # later ones may be secrets
                names.append(f"{' '.join(words)[:100]!r} (process {pid})")
        except OSError:
            continue
    if not names:
        return
    write_line(
        f"has ended well and left {', '.join(names)}. After {grace_s:g} s (--grace) SIGTERM follows: "
        "wait for what the script starts, or give more time"
    )


def write_line(text: str) -> None:
    """Print a sentence about this rank, unless its stderr is closed, broken or full: a kill waits for it."""
    line = f"elastic_resume: rank {os.environ.get('RANK', '?')}: {text}.\n"
    poll = select.poll()
    poll.register(2, select.POLLOUT)
    try:
        if poll.poll(0):
            os.write(2, line.encode(errors="replace")[:MAX_LINE_BYTES])
    except OSError:
        pass


def list_all() -> "list[int]":
    """Return the direct children of this process, adopted ones included."""
    try:
        with open(f"/proc/self/task/{os.getpid()}/children") as file:
            return [int(pid) for pid in file.read().split()]
    except OSError:
        pass  # the kernel lacks CONFIG_PROC_CHILDREN, or this process has changed its user
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):  # noqa: PTH208 - pathlib would cost time at the start
        try:
            with open(f"/proc/{name}/stat") as file:
                # The command's name is in parentheses and may contain any text; state and parent follow.
                if int(file.read().rpartition(")")[2].split()[1]) == os.getpid():
                    found.append(int(name))
        except (OSError, ValueError, IndexError):
            continue
    return found
