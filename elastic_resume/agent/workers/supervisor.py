"""Supervise one worker as its parent process: stop it, keep it parked, kill what it leaves, report its exit.

It stops the worker when torchelastic asks for that, when the lease ends or when the launcher shim ends. Then
it kills every process that the worker leaves behind. The fork server forks it for a warm worker, the launcher
shim for a cold one. Sockets connect it to the launcher shim, the process that torchelastic started, and to
the worker::

    launcher shim --signal number, one byte--> supervisor    torchelastic stops the worker
    supervisor --line of text--> launcher shim               started PID SUPERVISOR, parked PID, stuck PID,
                                                             ended STATUS
    worker --line of text--> supervisor                      restartable    it can park from now on
                                                             unrestartable  it cannot any more
                                                             waiting N      it waits N seconds for the end
                                                             parked         it holds nothing of its generation
    supervisor --line of text--> worker                      park           the generation is over
                                                             resume N       N bytes of JSON follow: its new
                                                                            environment; with its streams

`TRANSITIONS` has the states. After the worker has ended in any of them, the supervisor kills the leftovers,
writes ``worker-exit`` and reports to the launcher shim.

A generation is over when the lease has ended, or when a signal arrives after a failure on this node. Any
other signal means a drain. Then SIGTERM goes to the worker alone, because it may need its DataLoader workers
and subprocesses to save. They are killed after the worker.

A worker that starts early runs the script up to `er.resume()` before its node joins a view. It belongs to no
generation and writes no events. A launcher shim that connects early waits until the worker has parked.

Invariants:

- A running worker never outlives its launcher shim: the supervisor kills everything when the socket closes.
- No worker outlives its agent. The supervisor of a parked worker polls the name of the agent's lease page.
  If that supervisor is stopped, the parked worker kills it, and so itself.
- No worker runs after its lease, a word in shared memory (`lease_page.py`). The supervisor polls that word,
  so no message has to arrive. If the agent revokes it early, a restartable worker has until its former end to
  park, at most PARK_TIMEOUT_S. A parked worker runs no step and needs no lease.
- If the supervisor itself is killed, the kernel kills the worker. The supervisor's parent adopts the
  leftovers and kills them. A cold worker that has parked once has no such parent.

When the lease ends, the supervisor delays the report until torchelastic has sent a signal, or until the agent
has renewed the lease. An earlier report would look like a script failure. Once a parked worker's launcher
shim has exited, the worker's end is reported to nobody: the next launcher shim starts a new worker.

This module imports little and only the standard library: the launcher shim must start in 30 ms, and it
imports this module without site-packages. Its literals repeat those of `constants.py`; a test compares them.
"""

import _socket
import ctypes
import mmap
import os
import select
import time

TYPE_CHECKING = False  # importing typing would cost a third of the start
if TYPE_CHECKING:
    import signal
    from typing import Any, NoReturn
else:
    import _signal as signal  # the module `signal` makes enums of the numbers, which would cost 7 ms

if TYPE_CHECKING or __package__:
    from elastic_resume import local_socket, shared_page
    from elastic_resume.agent.workers import children, worker_events, worker_request
else:
    import children  # the launcher shim imports these without the package
    import local_socket
    import shared_page
    import worker_events
    import worker_request

ENV_GENERATION = worker_events.ENV_GENERATION
ENV_LOCAL_RANK = worker_events.ENV_LOCAL_RANK
ENV_GRACE = "ELASTIC_RESUME_GRACE"
ENV_LEASE_PAGE = "ELASTIC_RESUME_LEASE_PAGE"
ENV_SLOTS = "ELASTIC_RESUME_SLOTS"
ENV_EARLY_START = "ELASTIC_RESUME_EARLY_START"
ENV_SUPERVISOR_FD = "ELASTIC_RESUME_SUPERVISOR_FD"
ENV_DRAIN_SIGNALS = "ELASTIC_RESUME_DRAIN_SIGNALS"

COPYING_START = 16  # same as in `slots`: the first of the words that name each local rank's copy
AWAITING_SLOT = 1 << 63  # same as in `slots`: the rank waits for its local leader and copies nothing yet
MAX_LOCAL_RANKS = 1024
# A worker that is copying its last step into a slot may finish the copy within its lease; otherwise that step
# would be lost. 3 GB take 0.3 s.
COPY_TIMEOUT_S = 2.0
COPY_POLL_INTERVAL_S = 0.002

# Time for a worker to leave its step, its collectives and its snapshot. A held GIL takes longer.
PARK_TIMEOUT_S = 2.0
WATCH_POLL_INTERVAL_S = 0.002  # while the worker waits for the end of its generation, which is near
RESUME_TIMEOUT_S = 1.0  # for a parked worker to take a message that is larger than the socket's buffer

DEFAULT_GRACE_S = 5.0
# The lease is polled, since an agent may be stopped before it can send anything. The end of a lease is
# noticed within a millisecond, an early revocation within this time.
LEASE_POLL_INTERVAL_S = 0.05
# An agent that let the lease expire sends SIGTERM within torchelastic's monitor interval (0.1 s by default).
# An agent that renews the lease instead does not know that the worker is dead. A stopped agent does neither.
RENEWED_LEASE_WAIT_S = 1.0
AGENT_WAIT_LIMIT_S = 60.0
INFINITY = float("inf")  # importing math would delay the start

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
# Signals besides SIGTERM by which a scheduler may announce the end of a job. It sends them to every process
# of the job, and their default action kills. So workers start with them ignored, and the agent drains its
# node.
CATCHABLE_DRAIN_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2)
# Ignored by fork server and supervisors, which `pkill python` may reach. A supervisor ends with its socket.
IGNORED_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, *CATCHABLE_DRAIN_SIGNALS)


# ---- worker supervisor ---------------------------------------------------------------------------------


def fork_supervised_worker(connection: "_socket.socket", signal_mask: "set[int]") -> None:
    """Become a supervisor and fork its worker. Return in the worker only, which leads a session of its own.

    Call this in a newly forked process that has one thread and the environment of the worker.

    Args:
        connection: socket to the launcher shim.
        signal_mask: signals that are blocked when the worker starts.

    """
    libc = ctypes.CDLL(None)
    os.setsid()
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    lease, copy_monitor, link = open_lease(connection), SnapshotCopyMonitor(), WorkerLink()
    previous = {number: signal.signal(number, signal.SIG_IGN) for number in IGNORED_SIGNALS}
    previous[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, ignore_signal)
    wakeup_read, wakeup_write = os.pipe()
    os.set_blocking(wakeup_read, False)
    os.set_blocking(wakeup_write, False)
    signal.set_wakeup_fd(wakeup_write, warn_on_full_buffer=False)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    supervisor = os.getpid()
    try:
        worker = os.fork()
    except OSError as error:
        exit_without_worker(connection, f"cannot fork a process for the worker: {error.strerror}.")
    if worker == 0:
        libc.prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
        if os.getppid() != supervisor:
            os._exit(1)  # the supervisor ended before the kernel watched it
        os.setsid()
        signal.set_wakeup_fd(-1)
        for number, action in (previous | dict.fromkeys(read_drain_signals(), signal.SIG_IGN)).items():
            signal.signal(number, action)
        signal.pthread_sigmask(signal.SIG_SETMASK, signal_mask)
        for descriptor in (wakeup_read, wakeup_write):
            os.close(descriptor)
        connection.close()
        link.become_worker()
        return
    link.become_supervisor()
    WorkerSupervisor(
        worker, wakeup_read, link, connection=connection, lease=lease, copy_monitor=copy_monitor
    ).run()
    os._exit(0)


# ---- states --------------------------------------------------------------------------------------------

RUNNING = "running"  # in a generation
STOPPING = "stopping"  # has got SIGTERM, and has the grace period
PARKING = "parking"  # the generation is over, and the worker was asked to park
COPYING = "copying"  # the generation is over, and the worker may finish the copy of its last step
PARKED = "parked"  # the launcher shim stays until torchelastic stops it
WAITING = "waiting"  # parked, for the next launcher shim
STARTING = "starting"  # early, before its first generation
KILLING = "killing"

TRANSITIONS = {  # (state, event): (next state, what is done); every other event leaves the state as it is
    (RUNNING, "signal"): (STOPPING, "terminate"),
    (RUNNING, "over, can park"): (PARKING, "ask to park"),
    (RUNNING, "over"): (COPYING, ""),
    (STOPPING, "over, can park"): (COPYING, ""),  # it has got SIGTERM and may be saving
    (STOPPING, "over"): (COPYING, ""),
    (STOPPING, "late"): (KILLING, ""),
    (PARKING, "parked"): (PARKED, "listen"),
    (PARKING, "cannot park"): (COPYING, ""),
    (PARKING, "late"): (KILLING, ""),
    (COPYING, "copied"): (KILLING, ""),
    (COPYING, "late"): (KILLING, ""),
    (PARKED, "signal"): (WAITING, "release"),
    (WAITING, "resumed"): (RUNNING, ""),
    (STARTING, "parked"): (WAITING, "release"),
    (STARTING, "signal"): (KILLING, ""),
}
KILLING_EVENTS = {"shim ended", "agent ended", "refused"}  # in every state


def find_transition(state: str, event: str) -> "tuple[str, str]":
    """Return the next state, and what the supervisor has to do: the name of an action, or an empty text."""
    return (KILLING, "") if event in KILLING_EVENTS else TRANSITIONS.get((state, event), (state, ""))


def find_event(
    state: str,
    *,
    is_over: bool,
    has_lease: bool,
    has_agent: bool,
    is_parked: bool,
    is_restartable: bool,
    stop_requested: bool,
    is_copying: bool,
    is_late: bool,
) -> str:
    """Return the event that changes a state, other than messages; an empty text if nothing does."""
    if state in {RUNNING, STOPPING} and is_over:
        return "over, can park" if is_restartable and has_lease else "over"
    if state in {PARKING, PARKED, WAITING, STARTING} and not has_agent:
        return "agent ended"
    if state in {PARKING, STARTING} and is_parked:
        return "parked"
    if state == PARKED and stop_requested:
        return "signal"
    if state == PARKING and not is_restartable:
        return "cannot park"
    if state == COPYING and not is_copying:
        return "copied"
    return "late" if is_late and find_transition(state, "late")[0] != state else ""


class WorkerSupervisor:
    """Supervise one worker, in one generation or several, until it and all its leftovers have ended."""

    def __init__(
        self,
        worker: int,
        wakeup_read: int,
        link: "WorkerLink",
        *,
        connection: "_socket.socket",
        lease: "LeaseView",
        copy_monitor: "SnapshotCopyMonitor",
    ) -> None:
        """Supervise the child process ``worker``. Signals write into the pipe ``wakeup_read``."""
        self._worker = worker
        self._wakeup_read = wakeup_read
        self._link = link
        self._listener: _socket.socket | None = None  # for the next launcher shim
        self._poll = select.poll()
        self._poll.register(wakeup_read, select.POLLIN)
        if link.socket is not None:
            self._poll.register(link.socket, select.POLLIN)
        self._state, self._deadline = RUNNING, INFINITY
        self._begin_generation(connection, lease, copy_monitor)
        if ENV_EARLY_START in os.environ:
            self._state = STARTING
            self._listener = worker_request.listen_parked(os.environ[ENV_LOCAL_RANK])

    def _begin_generation(
        self, connection: "_socket.socket", lease: "LeaseView", copy_monitor: "SnapshotCopyMonitor"
    ) -> None:
        """Supervise the worker for the launcher shim at ``connection``."""
        self._connection = connection
        self._poll.register(connection, select.POLLIN)
        self._lease = lease
        self._copy_monitor = copy_monitor
        self._last_expiry = INFINITY  # the newest end of the lease before it was revoked
        self._lease_expired = False
        self._stop_requested = False
        self._stopped_at: float | None = None  # Unix time of the first of both
        self._was_late_to_park = False
        send(connection, b"started %d %d\n" % (self._worker, os.getpid()))
        worker_events.write_worker_forked(self._worker)

    def run(self) -> None:
        """Wait for the end of the worker, kill its leftovers, and report."""
        status = self._wait_for_worker()
        if status is None:
            self._write_exit(int(signal.SIGKILL), stuck=True)
            send(self._connection, b"stuck %d\n" % self._worker)
            while children.reap(self._worker) is None:
                time.sleep(1.0)
            return
        if status != 0 and self._stopped_at is None:
            self._lease.record_failure()
        has_time = status == 0 and not self._stop_requested  # a next generation does not wait for them
        children.kill_all(
            self._lease.remaining_s,
            at_once=self._lease.has_no_grace(),
            grace_s=read_grace_s() if has_time else children.LEFTOVERS_GRACE_S,
            connection=self._connection,
        )
        self._write_exit(status)
        if self._lease_expired and not self._stop_requested and self._wait_for_agent():
            status = int(signal.SIGKILL)
        send(self._connection, b"ended %d\n" % status)

    def _write_exit(self, status: int, *, stuck: bool = False) -> None:
        """Write the worker's end into the events, unless it has parked and belongs to no generation."""
        if self._connection.fileno() >= 0:
            worker_events.write_worker_exit(
                self._worker,
                status,
                stopped_at=self._stopped_at,
                lease_expired=self._lease_expired,
                not_parked=self._was_late_to_park,
                stuck=stuck,
            )

    def _wait_for_worker(self) -> "int | None":
        """Return the worker's wait status, or None if SIGKILL did not end it in time."""
        while True:
            status = children.reap(self._worker)
            if status is not None:
                return status
            now = now_s()
            while event := self._find_event(now):
                self._handle(event, now)
            if self._state == KILLING:
                children.kill(self._worker)
                if now >= self._deadline:
                    return None
            for descriptor, _ in self._poll.poll(self._poll_interval_s(now) * 1000):
                if descriptor == self._wakeup_read:
                    os.read(self._wakeup_read, 4096)
                elif descriptor == self._connection.fileno():
                    self._receive_signal()
                elif self._listener is not None and descriptor == self._listener.fileno():
                    self._handle_next_shim(self._listener)
                elif not self._link.receive():
                    self._poll.unregister(descriptor)

    def _find_event(self, now: float) -> str:
        """Return what has happened, other than messages; an empty text if nothing changes the state."""
        state, expires_at = self._state, self._lease.expires_at()
        if expires_at > -INFINITY:
            self._last_expiry = expires_at
        return find_event(
            state,
            is_over=state in {RUNNING, STOPPING} and self._is_over(),
            has_lease=now < self._last_expiry,
            has_agent=not self._lease.has_agent_ended(),
            is_parked=self._link.is_parked,
            is_restartable=self._link.is_restartable,
            stop_requested=self._stop_requested,
            is_copying=state == COPYING and self._copy_monitor.is_copying(),
            is_late=now >= self._deadline,
        )

    def _is_over(self) -> bool:
        """Return whether the generation is over: its workers park or are killed, and get no SIGTERM."""
        self._lease_expired = self._lease_expired or self._lease.remaining_s() <= 0
        return self._lease_expired or (self._stop_requested and self._lease.has_no_grace())

    def _handle(self, event: str, now: float) -> None:
        """Change the state, and do what belongs to the change."""
        former = self._state
        self._state, action = find_transition(former, event)
        if self._stopped_at is None:  # a generation that begins resets it
            self._stopped_at = time.time()
        if action == "terminate":
            children.send_signal(self._worker, signal.SIGTERM)
            self._deadline = now + read_grace_s()
        elif action == "ask to park":
            self._link.send(b"park\n")
            self._deadline = min(now + PARK_TIMEOUT_S, self._last_expiry)
        elif action == "listen":
            self._deadline = INFINITY
            self._listener = worker_request.listen_parked(os.environ[ENV_LOCAL_RANK])
        elif action == "release":
            if self._listener is None:  # no launcher shim could find it
                self._handle("refused", now)
                return
            send(self._connection, b"parked %d\n" % self._worker)
            self._poll.unregister(self._connection)
            self._connection.close()
            self._poll.register(self._listener, select.POLLIN)
        elif self._state == COPYING != former:
            self._deadline = min(self._deadline, now + COPY_TIMEOUT_S, self._last_expiry)
        elif self._state == KILLING != former:
            self._deadline = now + children.KILL_TIMEOUT_S
            self._was_late_to_park = former == PARKING

    def _poll_interval_s(self, now: float) -> float:
        """Return for how long to wait for messages before the next look at lease and deadline."""
        interval_s = COPY_POLL_INTERVAL_S if self._state == COPYING else LEASE_POLL_INTERVAL_S
        if self._state in {RUNNING, STOPPING}:
            interval_s = WATCH_POLL_INTERVAL_S if now < self._link.watch_until else interval_s
            interval_s = min(interval_s, self._lease.remaining_s())
        return max(0.0, min(interval_s, self._deadline - now))

    def _receive_signal(self) -> None:
        """Read a signal number from the launcher shim, or the end of the connection."""
        signal_number = receive(self._connection, 1)
        self._stop_requested = True
        if self._stopped_at is None:
            self._stopped_at = time.time()
        if not signal_number:
            self._poll.unregister(self._connection)
            self._handle("shim ended", now_s())
        elif self._state == STARTING or not self._is_over():
            self._handle("signal", now_s())

    # ---- parked --------------------------------------------------------------------------------------

    def _handle_next_shim(self, listener: "_socket.socket") -> None:
        """Have the worker resume in the generation of the launcher shim that connects."""
        if os.waitid(os.P_PID, self._worker, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            return  # the worker has just ended, so this launcher shim starts a new one
        try:
            connection = _socket.socket(fileno=listener._accept()[0])  # type: ignore[attr-defined]  # noqa: SLF001
            request, streams = worker_request.receive(connection)
            environ = request["environ"]
        except worker_request.ERRORS:
            return
        self._poll.unregister(listener)
        listener.close()
        self._listener = None
        worker_request.replace_environment(environ)
        worker_request.replace_streams(streams)
        lease, copy_monitor = open_lease(connection), SnapshotCopyMonitor()
        if self._link.resume():
            send(connection, b"y")
            self._handle("resumed", now_s())
            self._begin_generation(connection, lease, copy_monitor)
        else:  # this launcher shim starts a new worker
            connection.close()
            self._handle("refused", now_s())

    def _wait_for_agent(self) -> bool:
        """Wait until the agent stops the dead worker; return True if the agent renewed the lease instead."""
        poll = select.poll()
        poll.register(self._connection, select.POLLIN)
        limit = now_s() + AGENT_WAIT_LIMIT_S
        renewed_at = INFINITY
        while now_s() < limit:
            if poll.poll(LEASE_POLL_INTERVAL_S * 1000):
                return False  # a signal, or the end of the launcher shim
            renewed_at = min(renewed_at, now_s()) if self._lease.remaining_s() > 0 else INFINITY
            if now_s() - renewed_at > RENEWED_LEASE_WAIT_S:
                return True
        return False


class WorkerLink:
    """The socket between supervisor and worker. Without an agent there is none, and no worker parks."""

    def __init__(self) -> None:
        self.socket: _socket.socket | None = None
        self.is_restartable = self.is_parked = False
        self.watch_until = 0.0
        self._unread = b""
        self._worker_end: _socket.socket | None = None
        if worker_request.ENV_PARKED in os.environ:
            self.socket, self._worker_end = _socket.socketpair(
                _socket.AF_UNIX, _socket.SOCK_STREAM | _socket.SOCK_CLOEXEC
            )
            self.socket.settimeout(RESUME_TIMEOUT_S)

    def become_worker(self) -> None:
        """Keep the worker's end, also over exec, and name it in the environment."""
        if self._worker_end is not None:
            descriptor = self._worker_end.detach()
            os.set_inheritable(descriptor, True)
            os.environ[ENV_SUPERVISOR_FD] = str(descriptor)

    def become_supervisor(self) -> None:
        """Close the worker's end."""
        if self._worker_end is not None:
            self._worker_end.close()

    def receive(self) -> bool:
        """Read what the worker has sent; return False if its end is closed."""
        data = b"" if self.socket is None else receive(self.socket, 4096)
        *lines, unread = (self._unread + data).split(b"\n")
        self._unread = unread[-4096:]
        for line in lines:
            if line in {b"restartable", b"unrestartable"}:
                self.is_restartable = line == b"restartable"
            elif line.startswith(b"waiting ") and line[8:].replace(b".", b"", 1).isdigit():
                self.watch_until = now_s() + float(line[8:])
            elif line == b"parked":
                self.is_parked = True
        self.is_restartable = self.is_restartable and bool(data)
        return bool(data)

    def send(self, data: bytes) -> None:
        """Send bytes to the worker."""
        if self.socket is not None:
            send(self.socket, data)

    def resume(self) -> bool:
        """Send this process's environment and streams to the parked worker; return whether it got them."""
        import json  # noqa: PLC0415 - see `worker_events.write_worker_exit`

        if self.socket is None:
            return False
        environ = json.dumps(dict(os.environ)).encode()
        message = b"resume %d\n%b" % (len(environ), environ)
        try:
            sent = self.socket.sendmsg([message], [local_socket.encode_descriptors(range(3))])
            while sent < len(message):
                sent += self.socket.send(message[sent:])
        except OSError:
            return False
        self.is_parked = False
        return True


def ignore_signal(number: int, frame: object) -> None:
    """Do nothing: `signal.set_wakeup_fd` has written the signal's number into a pipe."""


def exit_without_worker(connection: "_socket.socket", reason: str) -> "NoReturn":
    """Exit because no worker can start; log and report ``reason``."""
    os.write(2, f"elastic_resume: {reason}\n".encode())
    worker_events.write_worker_exit(None, 1 << 8, stopped_at=None, lease_expired=False, message=reason)
    send(connection, b"ended %d\n" % (1 << 8))
    os._exit(1)


def send(connection: "_socket.socket", data: bytes) -> None:
    """Send bytes between supervisor and launcher shim, unless the other end has closed."""
    try:  # noqa: SIM105 - importing contextlib or pathlib would cost a third of the start
        connection.sendall(data)
    except OSError:
        pass


def receive(connection: "_socket.socket", max_bytes: int) -> bytes:
    """Receive bytes between supervisor and launcher shim; empty if the other end has closed."""
    try:
        return connection.recv(max_bytes)
    except OSError:  # the other end had not read all that was sent to it
        return b""


def read_grace_s() -> float:
    """Return the seconds between SIGTERM and SIGKILL."""
    try:
        return max(0.0, float(os.environ[ENV_GRACE]))
    except (KeyError, ValueError):
        return DEFAULT_GRACE_S


# ---- shared memory of the agent ------------------------------------------------------------------------


def now_s() -> float:
    """Return the seconds since boot. Unlike CLOCK_MONOTONIC they include the time in suspend."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class LeaseView:
    """The lease page of the agent as a supervisor sees it; see `lease_page.py` for its words."""

    def __init__(self, words: "Any | None", path: str = "", page: "os.stat_result | None" = None) -> None:
        """Read and write ``words`` of the file ``page``, which has this path while the agent lives.

        None stands for a lease without end, where there is no agent.
        """
        self._words = words
        self._path = path
        self._page = page

    def expires_at(self) -> float:
        """Return when the lease expires; minus infinity if it is revoked."""
        return INFINITY if self._words is None else self._words[0]

    def remaining_s(self) -> float:
        """Return for how long the worker may still run; 0 if the word is NaN."""
        if self._words is None:
            return INFINITY
        remaining = self._words[0] - now_s()
        return remaining if remaining > 0 else 0.0

    def has_agent_ended(self) -> bool:
        """Return whether the agent has ended or has closed its lease page."""
        try:
            found = os.stat(self._path)  # noqa: PTH116 - see `send`
        except OSError:
            return True
        return self._page is None or not os.path.samestat(found, self._page)

    def record_failure(self) -> None:
        """Record for all supervisors of this node that a worker of this generation has failed."""
        generation = worker_events.read_int(ENV_GENERATION)
        if self._words is not None and generation is not None:
            self._words[1] = generation

    def has_no_grace(self) -> bool:
        """Return whether the workers are killed at once: one has failed, or Ctrl-C came twice."""
        return self._words is not None and self._words[1] == worker_events.read_int(ENV_GENERATION)


def open_lease(connection: "_socket.socket") -> LeaseView:
    """Map the agent's lease page; exit if there is an agent whose page cannot be mapped.

    The variable is removed, so that a job which the worker starts does not depend on this lease.
    """
    path = os.environ.pop(ENV_LEASE_PAGE, None)
    if path is None:
        return LeaseView(None)
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        # read(2) would not do: the kernel may copy byte by byte and mix bytes of two values.
        page = shared_page.SharedPage(descriptor, mmap.PAGESIZE, shared_page.SECONDS)
        file = os.fstat(descriptor)
        os.close(descriptor)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        exit_without_worker(
            connection,
            f"no worker can start without a lease, and its page {path} cannot be opened: {reason}. Either "
            "the agent has ended, or /proc hides it: run workers as the agent's user, in its PID namespace, "
            "with /proc mounted.",
        )
    return LeaseView(page.words, path, file)


class SnapshotCopyMonitor:
    """Tell whether the worker is copying its state into a slot, which outlives the worker."""

    def __init__(self) -> None:
        """Map the control block of the agent's slots, where there is one."""
        path, rank = os.environ.pop(ENV_SLOTS, None), worker_events.read_int(ENV_LOCAL_RANK)
        self._words: Any = None
        self._copy_word = COPYING_START + (rank or 0)
        if path is None or rank is None or not 0 <= rank < MAX_LOCAL_RANKS:
            return
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            size = (COPYING_START + MAX_LOCAL_RANKS) * 8
            page = shared_page.SharedPage(descriptor, size, shared_page.COUNTS, is_writable=False)
            os.close(descriptor)
        except (OSError, ValueError):
            return
        self._words = page.words

    def is_copying(self) -> bool:
        """Return whether the worker copies now."""
        return self._words is not None and 0 < self._words[self._copy_word] < AWAITING_SLOT


# ---- drain signals -------------------------------------------------------------------------------------


def read_drain_signals() -> "list[int]":
    """Return the drain signals that the agent has put into the environment, without SIGTERM."""
    known = worker_events.known_signals()
    names = os.environ.get(ENV_DRAIN_SIGNALS, "").split(",")
    return [known[name] for name in names if name in known and name != "SIGTERM"]
