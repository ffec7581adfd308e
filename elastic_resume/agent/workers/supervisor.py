"""The guard: the parent of one worker, which ends it when it has to end and sweeps up what it leaves.

It is a process of its own between the worker and whoever forked it: the zygote for a warm worker, the stub
for a cold one. At the other end of its ``line``, a socket, sits the stub, which torchelastic knows::

    stub --number of a signal, one byte--> guard        torchelastic asks for the end
    guard --a line of text--> stub                      started PID GUARD, stuck PID, ended STATUS

Promise: a worker never outlives its stub, and so neither its agent: with the line's end all is killed. Nor
does it outlive the lease that the agent holds for it (`fence.py`): a word in memory, which the guard looks
at itself and which nobody needs to send. Should the guard be killed, the kernel kills the worker, and the
guard's parent adopts and kills what that one leaves.

States::

    running --signal, while the round goes well--> stopping --grace over--> killing
    running --signal, after a failure of the round--> killing
    running, stopping --line closed, or fenced--> killing
    any --worker reaped--> sweep what it left, tell the agent (worker-exit), then the stub

Where a worker of this node has failed, the signal that ends the others is for a restart: they are killed at
once, whatever they do with SIGTERM. Else it is a drain, and SIGTERM goes to the worker alone: its DataLoader
workers and subprocesses are needed for what it may want to save, and are swept when it is gone.

Only a worker that was fenced before anyone told it to stop is held back before the last step: the agent
means to end it and is about to say so, and torchelastic would take its end for a failure of the script.

Knows nothing of this package: the stub, which must be up in 30 ms, imports it without site-packages. So its
few names are literals, which tests/test_stub.py holds against contract.py.

How the end of a worker is told to its agent and in its node's log. Standard library only: see `stub`.

Which signals tell an agent ahead of time that the end will come, besides SIGTERM.

A scheduler sends them to every process of a job, and by default they kill. So workers start with them
ignored, as nohup does with SIGHUP, and what workers start inherits that: the agent drains its node in order.
Standard library only, see `stub.py`.
"""

import _socket
import ctypes
import mmap
import os
import select
import signal
import time

TYPE_CHECKING = False  # typing would cost a third of the start
if TYPE_CHECKING:
    from collections.abc import Collection
    from typing import NoReturn

ENV_EVENTS_PATH = "ELASTIC_RESUME_EVENTS_PATH"
ENV_ROUND_EVENTS = "ELASTIC_RESUME_ROUND_EVENTS"
ROUND_EVENTS_MEMFD = "/memfd:elastic_resume-round-events"  # as in `events`
ENV_NODE_NAME = "ELASTIC_RESUME_NODE_NAME"


def write_worker_exit(
    worker: "int | None",
    wait_status: int,
    *,
    stopped: bool,
    lease_expired: bool,
    message: str = "",
    stuck: bool = False,
) -> None:
    """Append ``worker-exit`` to what the agent decides by, in its memory, and to the node's log on disk."""
    import json  # noqa: PLC0415 - 3 ms that the start should not pay

    number = os.WTERMSIG(wait_status) if os.WIFSIGNALED(wait_status) else None
    event = {
        "t": round(time.time(), 3),
        "event": "worker-exit",
        "node": os.environ.get(ENV_NODE_NAME, ""),
        "pid": os.getpid(),
        **boot_fields(),
        "rank": parse_int_or_none(os.environ.get("RANK")),
        "local_rank": parse_int_or_none(os.environ.get(ENV_LOCAL_RANK)),
        "round": parse_int_or_none(os.environ.get(ENV_ROUND)),
        "worker_pid": worker,
        "exit_code": os.WEXITSTATUS(wait_status) if number is None else None,
        "signal": None if number is None else signal_name(number),
        "stopped": stopped,
    }
    if lease_expired:
        event["lease_expired"] = True
    if stuck:
        event["stuck"] = True
    if wait_status != 0 and not stopped:
        event["message"] = message or read_recorded_error(json)
    line = (json.dumps(event, separators=(",", ":")) + "\n").encode()
    append_line(ENV_ROUND_EVENTS, line, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
    append_line(ENV_EVENTS_PATH, line, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC)


def boot_fields() -> "dict[str, object]":
    """Give what `events.stamp` gives."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            boot = file.read().replace("-", "")[:12]
    except OSError:
        return {}
    return {"b": round(time.clock_gettime(time.CLOCK_BOOTTIME), 3), "boot": boot}


def append_line(variable: str, line: bytes, flags: int) -> None:
    """Append a line to the file that the variable names; a lost disk costs the line."""
    try:
        path = os.environ[variable]
        if variable == ENV_ROUND_EVENTS and not os.readlink(path).startswith(ROUND_EVENTS_MEMFD):  # noqa: PTH115
            return  # the agent has ended, and its pid is another process's by now
        descriptor = os.open(path, flags, 0o644)
    except (KeyError, OSError):
        return
    try:  # noqa: SIM105 - contextlib would cost a third of the start
        os.write(descriptor, line)
    except OSError:
        pass
    os.close(descriptor)


def read_recorded_error(json: "object") -> str:
    """Give the message that torch's ``@record`` left for this attempt; empty when there is none."""
    try:
        with open(os.environ["TORCHELASTIC_ERROR_FILE"], "rb") as file:
            message = json.loads(file.read(1 << 20))["message"]  # type: ignore[attr-defined]
        return str(message["message"] if isinstance(message, dict) else message)[:1024]
    except (KeyError, OSError, ValueError, TypeError):
        return ""


def parse_int_or_none(text: "str | None") -> "int | None":
    """``int(text)`` where that is a number."""
    return int(text) if text and text.isdigit() else None


def signal_name(number: int) -> str:
    """``SIGKILL`` for 9; real-time signals have no name of their own."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"SIG{number}"


CATCHABLE_DRAIN_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2)
ENV_DRAIN_SIGNALS = "ELASTIC_RESUME_DRAIN_SIGNALS"


def read_drain_signals() -> "list[signal.Signals]":
    """Give those that the agent has put into our environment; none where there is no agent."""
    known = signal.Signals.__members__
    names = os.environ.get(ENV_DRAIN_SIGNALS, "").split(",")
    return [known[name] for name in names if name in known and name != "SIGTERM"]


_early_signals: "list[int]" = []


def record_early_signals() -> None:
    """Note such signals from now on. An agent imports for seconds before it knows which are meant for it."""
    for number in CATCHABLE_DRAIN_SIGNALS:
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, _record_early_signal)


def _record_early_signal(number: int, frame: object) -> None:
    del frame
    _early_signals.append(number)


def restore_default_handlers(handled: "Collection[int]") -> "int | None":
    """Give the signals that are not ``taken`` their default action again; tell what came before that, if any.

    One that came and was not taken has its default action now, as it would have had.
    """
    for number in CATCHABLE_DRAIN_SIGNALS:
        if signal.getsignal(number) is _record_early_signal:
            signal.signal(number, signal.SIG_DFL)
    came = [number for number in _early_signals if number in handled]
    for other in set(_early_signals).difference(handled):
        signal.raise_signal(other)
    return came[0] if came else None


ENV_ROUND = "ELASTIC_RESUME_ROUND"
ENV_LOCAL_RANK = "ELASTIC_RESUME_LOCAL_RANK"
ENV_GRACE_S = "ELASTIC_RESUME_GRACE_S"
ENV_LEASE_PAGE = "ELASTIC_RESUME_FENCE"
ENV_SLOTS = "ELASTIC_RESUME_SLOTS"
COPYING_START = 16  # slots.COPYING_AT: from this word on, what each local rank is copying
AWAITING_SLOT = 1 << 63  # slots.WAITING: its lead has not said yet that there is something to copy
MAX_LOCAL_RANKS = 1024
DEFAULT_GRACE_S = 5.0
# A worker's own children often see its end and go by themselves, cleaning shared memory as they do
# (multiprocessing's resource tracker, torch_shm_manager). Longer would delay the restart.
SWEEP_GRACE_S = 0.1
# A process in uninterruptible sleep does not die of SIGKILL, and torchelastic must not wait for it.
KILL_TIMEOUT_S = 5.0
# A worker that is copying its last step into memory is let finish that, or the step would be lost with it:
# 3 GB take 0.3 s. Not beyond its lease.
COPY_TIMEOUT_S = 2.0
COPY_POLL_INTERVAL_S = 0.002
# Nobody can wake us when the word moves: the agent that moves it may be stopped the next moment. A lease that
# runs out is awaited to the millisecond; this is how late a restart can find the word moved back.
LEASE_POLL_INTERVAL_S = 0.05
# An agent that fenced sends SIGTERM within its monitor's interval (torchelastic's default is 0.1 s). One that
# renews instead believes that its worker lives: it has to see it dead. One that is stopped says nothing.
RENEWED_LEASE_WAIT_S = 1.0
AGENT_WAIT_LIMIT_S = 60.0
INFINITY = float("inf")  # math would cost the start more than the fence does

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
# What may reach a process of its own session: `pkill python`, say. Its line is what ends it.
IGNORED_SIGNALS = (
    signal.SIGTERM,
    signal.SIGINT,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
)


def now_s() -> float:
    """Return the seconds since boot: unlike CLOCK_MONOTONIC they go on while the machine is suspended."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class LeaseView:
    """The agent's page of memory: until when workers may run, and the round in which one failed."""

    def __init__(self, words: "memoryview[float] | None") -> None:
        """Use ``words``; None where no agent fences."""
        self._words = words

    def expires_at(self) -> float:
        """Until when the worker may run; minus infinite: its agent has ended that."""
        return INFINITY if self._words is None else self._words[0]

    def remaining_s(self) -> float:
        """Seconds for which the worker may still run: none where the word is no number."""
        if self._words is None:
            return INFINITY
        left = self._words[0] - now_s()
        return left if left > 0 else 0.0

    def record_failure(self) -> None:
        """Tell the other guards of this node that a worker of the round has failed."""
        this_round = parse_int_or_none(os.environ.get(ENV_ROUND))
        if self._words is not None and this_round is not None:
            self._words[1] = this_round

    def has_round_failed(self) -> bool:
        """Whether a worker of this round has failed on this node."""
        return self._words is not None and self._words[1] == parse_int_or_none(os.environ.get(ENV_ROUND))


class SnapshotCopyMonitor:
    """Whether the worker is copying its state into memory that outlives it."""

    def __init__(self) -> None:
        """Use the control block of the agent's slots; where it cannot be had, nobody copies."""
        path, rank = os.environ.pop(ENV_SLOTS, None), parse_int_or_none(os.environ.get(ENV_LOCAL_RANK))
        self._copy_word: memoryview[int] | None = None
        self._wait_started_at = INFINITY
        if path is None or rank is None or not 0 <= rank < MAX_LOCAL_RANKS:
            return
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            page = mmap.mmap(descriptor, (COPYING_START + MAX_LOCAL_RANKS) * 8, prot=mmap.PROT_READ)
            os.close(descriptor)
        except (OSError, ValueError):
            return
        self._copy_word = memoryview(page).cast("Q")[COPYING_START + rank : COPYING_START + rank + 1]

    def should_wait(self, now: float, lease_expires_at: float) -> bool:
        """Whether to wait for it before the worker is killed: for a while, and within its lease."""
        self._wait_started_at = min(self._wait_started_at, now)
        return (
            self._copy_word is not None
            and 0 < self._copy_word[0] < AWAITING_SLOT
            and now < min(self._wait_started_at + COPY_TIMEOUT_S, lease_expires_at)
        )


def fork_supervised_worker(connection: "_socket.socket", signal_mask: "set[int | signal.Signals]") -> None:
    """Become a guard, with a worker. Returns in the worker only: in a session of its own, to die with us.

    Call it in a process that has just been forked, has one thread and the environment of the worker.

    Args:
        line: to the stub.
        mask: signals that the worker starts with blocked, as the stub did.

    """
    libc = ctypes.CDLL(None)
    os.setsid()
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    page, copying = open_lease_page(connection), SnapshotCopyMonitor()
    before = {number: signal.signal(number, signal.SIG_IGN) for number in IGNORED_SIGNALS}
    before[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, ignore_signal)
    bell, ringer = os.pipe()
    os.set_blocking(bell, False)
    os.set_blocking(ringer, False)
    signal.set_wakeup_fd(ringer, warn_on_full_buffer=False)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    guard = os.getpid()
    try:
        worker = os.fork()
    except OSError as error:
        exit_without_worker(connection, f"no process can be forked for the worker: {error.strerror}.")
    if worker == 0:
        libc.prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
        if os.getppid() != guard:
            os._exit(1)
        os.setsid()
        signal.set_wakeup_fd(-1)
        for number, action in (before | dict.fromkeys(read_drain_signals(), signal.SIG_IGN)).items():
            signal.signal(number, action)
        signal.pthread_sigmask(signal.SIG_SETMASK, signal_mask)
        for descriptor in (bell, ringer):
            os.close(descriptor)
        connection.close()
        return
    send_line(connection, f"started {worker} {guard}")
    _supervise_worker(worker, connection, bell, page, copying)
    os._exit(0)


def ignore_signal(number: int, frame: object) -> None:
    """Do nothing: the signal's number is in the pipe of `set_wakeup_fd`."""


def _supervise_worker(
    worker: int,
    connection: "_socket.socket",
    wakeup_read: int,
    lease_view: LeaseView,
    copy_monitor: SnapshotCopyMonitor,
) -> None:
    """See the worker and all that it leaves to their end, and tell of it."""
    status, told, fenced = wait_for_worker(worker, connection, wakeup_read, lease_view, copy_monitor)
    if status is None:
        write_worker_exit(
            worker, int(signal.SIGKILL), stopped=told or fenced, lease_expired=fenced, stuck=True
        )
        send_line(connection, f"stuck {worker}")
        while reap_children(worker) is None:  # whoever comes to look at it finds us beside it
            time.sleep(1.0)
        return
    if status != 0 and not (told or fenced):
        lease_view.record_failure()
    kill_leftovers(lease_view, at_once=fenced or lease_view.has_round_failed())
    write_worker_exit(worker, status, stopped=told or fenced, lease_expired=fenced)
    if fenced and not told and wait_for_agent(connection, lease_view):
        status = int(signal.SIGKILL)
    send_line(connection, f"ended {status}")


def open_lease_page(connection: "_socket.socket") -> LeaseView:
    """Map the agent's page; one of no words where there is no agent. Exit where it cannot be read.

    The variable goes no further: what the worker starts is fenced with it.
    """
    path = os.environ.pop(ENV_LEASE_PAGE, None)
    if path is None:
        return LeaseView(None)
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        # Mapped, not read(2): the kernel may copy byte by byte, and a half of each of two times is a third.
        page = mmap.mmap(descriptor, mmap.PAGESIZE)
        os.close(descriptor)
    except (OSError, ValueError) as error:
        text = (
            f"no worker may run that cannot be fenced, and {path} cannot be opened: "
            f"{getattr(error, 'strerror', None) or error}. Either the agent has ended, or /proc hides it: "
            "let workers run as the agent's user, in its PID namespace, with /proc mounted."
        )
        exit_without_worker(connection, text)
    return LeaseView(memoryview(page).cast("d"))


def exit_without_worker(connection: "_socket.socket", reason: str) -> "NoReturn":
    """Say why there is no worker, to people, to the agent and to the stub. Does not return."""
    os.write(2, f"elastic_resume: {reason}\n".encode())
    write_worker_exit(None, 1 << 8, stopped=False, lease_expired=False, message=reason)
    send_line(connection, f"ended {1 << 8}")
    os._exit(1)


def send_line(connection: "_socket.socket", text: str) -> None:
    """Send a line to the stub, which may be gone."""
    try:  # noqa: SIM105 - contextlib and pathlib would cost a third of the start
        connection.sendall(text.encode() + b"\n")
    except OSError:
        pass


def wait_for_worker(
    worker: int,
    connection: "_socket.socket",
    wakeup_read: int,
    lease_view: LeaseView,
    copy_monitor: SnapshotCopyMonitor,
) -> "tuple[int | None, bool, bool]":
    """Wait for the worker's end.

    Give its wait status, whether it had been told to stop, and whether the fence ended it. The status is
    None where it does not die of SIGKILL.
    """
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    poll.register(wakeup_read, select.POLLIN)
    deadline = INFINITY  # then it is killed
    killed_at = INFINITY
    told, fenced, lease = False, False, INFINITY  # the lease is what the agent has granted last
    while True:
        status = reap_children(worker)
        if status is not None:
            return status, told, fenced
        until, now = lease_view.expires_at(), now_s()
        lease = until if until > -INFINITY else lease
        fenced = fenced or lease_view.remaining_s() <= 0
        over = fenced or (told and lease_view.has_round_failed())
        waits = over and now < deadline and copy_monitor.should_wait(now, lease)
        if (over and not waits) or now >= deadline:
            kill(worker)
            killed_at = min(killed_at, now)
            if now - killed_at > KILL_TIMEOUT_S:
                return None, told, fenced
        poll_s = (
            LEASE_POLL_INTERVAL_S
            if killed_at < INFINITY
            else min(LEASE_POLL_INTERVAL_S, lease_view.remaining_s(), deadline - now)
        )
        poll_s = COPY_POLL_INTERVAL_S if waits else poll_s
        for descriptor, _ in poll.poll(max(0.0, poll_s) * 1000):
            if descriptor == wakeup_read:
                os.read(wakeup_read, 4096)
                continue
            order = receive_signal_number(connection)
            if not order:
                poll.unregister(connection)
                deadline = 0.0
            elif not told and not lease_view.has_round_failed():
                send_signal(worker, signal.SIGTERM)
                deadline = min(deadline, now_s() + read_grace_s())
            told = True


def receive_signal_number(connection: "_socket.socket") -> bytes:
    """Read an order; nothing when the stub is gone."""
    try:
        return connection.recv(1)
    except OSError:  # it had not read all that we have said
        return b""


def wait_for_agent(connection: "_socket.socket", lease_view: LeaseView) -> bool:
    """Wait, with the worker dead, until the agent comes for it; tell whether the agent missed its end."""
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    limit = now_s() + AGENT_WAIT_LIMIT_S
    renewed_at = INFINITY
    while now_s() < limit:
        if poll.poll(LEASE_POLL_INTERVAL_S * 1000):
            return False  # a signal, or the stub is gone
        renewed_at = min(renewed_at, now_s()) if lease_view.remaining_s() > 0 else INFINITY
        if now_s() - renewed_at > RENEWED_LEASE_WAIT_S:
            return True
    return False


def read_grace_s() -> float:
    """Seconds between SIGTERM and SIGKILL."""
    try:
        return max(0.0, float(os.environ[ENV_GRACE_S]))
    except (KeyError, ValueError):
        return DEFAULT_GRACE_S


def kill(pid: int) -> None:
    """SIGKILL ``pid``, which may be gone."""
    send_signal(pid, signal.SIGKILL)


def send_signal(pid: int, signal_number: int) -> None:
    """Send a signal to ``pid``, which may be gone, or have become another user's."""
    try:  # noqa: SIM105 - see `say`
        os.kill(pid, signal_number)
    except (ProcessLookupError, PermissionError):
        pass


def reap_children(worker: int) -> "int | None":
    """Collect every child that has ended; give the worker's status if it is among them."""
    found = None
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return found
        if pid == 0:
            return found
        if pid == worker:
            found = status


def kill_leftovers(lease_view: LeaseView, *, at_once: bool) -> None:
    """Kill what the worker left behind. Orphans come to us as their parents die: ask until none is left."""
    start = time.monotonic()
    while True:
        reap_children(0)
        left = list_children()
        age_s = time.monotonic() - start
        if not left or age_s > KILL_TIMEOUT_S:
            return
        if at_once or age_s >= SWEEP_GRACE_S or lease_view.remaining_s() <= 0:
            for pid in left:
                kill(pid)
        time.sleep(0.002)


def list_children() -> "list[int]":
    """Our direct children, adopted ones included."""
    try:
        with open(f"/proc/self/task/{os.getpid()}/children") as file:
            return [int(pid) for pid in file.read().split()]
    except OSError:
        pass  # a kernel without CONFIG_PROC_CHILDREN, or a process that has changed its user
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):  # noqa: PTH208 - see `say`
        try:
            with open(f"/proc/{name}/stat") as file:
                # The command's name is in parentheses and may hold anything; state and parent follow it.
                if int(file.read().rpartition(")")[2].split()[1]) == os.getpid():
                    found.append(int(name))
        except (OSError, ValueError, IndexError):
            continue
    return found
