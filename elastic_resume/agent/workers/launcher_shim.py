"""The launcher shim: the small process that torchelastic starts in place of a worker.

It obtains a worker, forwards signals to the worker's supervisor (`supervisor.py`), and exits with the
worker's exit code or signal. It exits only after all processes that the worker left are dead. A warm worker
comes from the agent's fork server (`forkserver.py`). If that refuses or is missing, the launcher shim forks a
supervisor which starts the command cold. A worker that has parked is asked for first::

    parked: launcher shim --request--> supervisor, with the worker of an earlier generation
    warm:   launcher shim --request--> fork server --fork--> supervisor --fork--> worker
    cold:   launcher shim --fork--> supervisor --fork--> worker, which executes the command

Invariant: when the agent dies, the kernel kills the launcher shim; then the supervisor kills the worker.
When the worker parks, the launcher shim exits with EXIT_PARKED, and worker and supervisor stay.

Run as ``python -I -S launcher_shim.py LOCAL_RANK COMMAND...``. It must start in 30 ms, so it cannot import
this package or site-packages. Its literals repeat those of `constants.py`; a test compares them.
"""

import _json
import _socket
import ctypes
import os
import select
import sys
import time

TYPE_CHECKING = False  # importing typing would cost a third of the start

if TYPE_CHECKING:
    import signal
    from collections.abc import Iterable
    from typing import Any

    from elastic_resume.agent.workers import children, supervisor, worker_events, worker_request
else:
    import _signal as signal

    _here = os.path.dirname(__file__)  # noqa: PTH120 - pathlib would cost a third of the start
    sys.path = [_here, *sys.path, f"{_here}/../.."]
    import children
    import supervisor
    import worker_events
    import worker_request

    sys.path = sys.path[1:-1]

ENV_AGENT_PID = "ELASTIC_RESUME_AGENT_PID"
ENV_LOCAL_RANK = supervisor.ENV_LOCAL_RANK
ENV_FORK_SERVER = "ELASTIC_RESUME_FORK_SERVER"  # name of its abstract unix socket
ENV_MAX_RESTARTS = "ELASTIC_RESUME_TORCH_MAX_RESTARTS"  # of --max-restarts, which torchelastic does not get
EXIT_PARKED = 76
# Time for a supervisor to report the end of its worker beyond its own timeouts. A stopped supervisor never
# does, and torchelastic waits for the launcher shim.
REPORT_TIMEOUT_S = 5.0

# Faults must kill the launcher shim as they kill any process, and job control belongs to the terminal.
UNFORWARDED_SIGNALS = {
    signal.SIGKILL, signal.SIGSTOP, signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU, signal.SIGCONT,
    signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT, signal.SIGTRAP,
}  # fmt: skip
# Signals that stop the worker even if --signals-to-handle does not name them.
STOP_SIGNALS = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT}


def main(argv: list[str]) -> None:
    """Run the command ``argv[1:]`` as local rank ``argv[0]`` and exit as it does."""
    local_rank, command = argv[0], argv[1:]
    forwarded: set[int] = {*(signal.valid_signals() - UNFORWARDED_SIGNALS)}
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, forwarded)
    agent = int(os.environ.get(ENV_AGENT_PID) or os.getppid())
    libc = ctypes.CDLL(None)
    libc.prctl(supervisor.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # adopt the leftovers of a killed supervisor
    # SIGKILL works on a stopped process too.
    libc.prctl(supervisor.PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != agent:
        os._exit(1)  # the agent died before the kernel watched it
    os.environ[ENV_LOCAL_RANK] = local_rank
    if ENV_MAX_RESTARTS in os.environ:
        os.environ["TORCHELASTIC_MAX_RESTARTS"] = os.environ.pop(ENV_MAX_RESTARTS)
    connection = request_worker(os.environ.pop(ENV_FORK_SERVER, None), command, mask)
    if connection is None:
        if supervisor.ENV_EARLY_START in os.environ:
            os._exit(1)  # its node starts workers in the usual way
        connection = start_cold(command, mask)
    exit_like_worker(forward_until_exit(connection, forwarded, mask))


# ---- starting a worker ---------------------------------------------------------------------------------


def request_worker(
    fork_server: "str | None", command: list[str], signal_mask: "set[int]"
) -> "_socket.socket | None":
    """Request a parked worker, or one of the fork server; return the socket to its supervisor, if any."""
    try:
        for number in range(3):
            os.fstat(number)
    except OSError:  # a closed standard stream cannot be sent
        os.environ.pop(worker_request.ENV_PARKED, None)
        return None
    import resource  # noqa: PLC0415 - a cold start does not need it

    try:
        working_directory = os.getcwdb()  # noqa: PTH109 - no pathlib here
    except OSError:
        working_directory = b""  # it was removed: the fork server fails there, and the worker starts cold
    umask = os.umask(0o077)
    os.umask(umask)
    # latin-1 maps each byte to a character: arguments and variables need not be valid text.
    request = encode_json(
        {
            "command": [os.fsencode(argument).decode("latin-1") for argument in command],
            "environ": {k.decode("latin-1"): v.decode("latin-1") for k, v in os.environb.items()},
            "cwd": working_directory.decode("latin-1"),
            "mask": sorted(int(number) for number in signal_mask),
            "ignored": sorted(int(number) for number in STOP_SIGNALS if _is_ignored(number)),  # as by nohup
            "umask": umask,
            "cpus": sorted(os.sched_getaffinity(0)),
            "limits": {kind: resource.getrlimit(kind) for kind in range(resource.RLIMIT_NOFILE + 1)},
            "nice": os.nice(0),
        }
    ).encode()
    # The fork server may import for minutes. No worker runs until it answers, so a stop signal may kill.
    for number in STOP_SIGNALS:
        if not _is_ignored(number):
            signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    try:
        connection = None
        if worker_request.ENV_PARKED in os.environ and supervisor.ENV_EARLY_START not in os.environ:
            parked = worker_request.read_parked_address(os.environ[ENV_LOCAL_RANK])
            connection = worker_request.send(parked, request, kills_if_stopped=True)
        if connection is None and fork_server is not None:
            connection = worker_request.send("\0" + fork_server, request)
        return connection
    finally:
        signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)


def encode_json(value: "str | int | dict[str, Any] | Iterable[Any]") -> str:
    """Encode as json.dumps, which needs 3 ms for its import."""
    if isinstance(value, str):
        return _json.encode_basestring_ascii(value)
    if isinstance(value, int):
        return str(int(value))
    if isinstance(value, dict):
        return f"{{{','.join(f'{encode_json(str(key))}:{encode_json(one)}' for key, one in value.items())}}}"
    return f"[{','.join(map(encode_json, value))}]"


def _is_ignored(number: int) -> bool:
    return signal.getsignal(number) is signal.SIG_IGN


def start_cold(command: list[str], signal_mask: "set[int]") -> "_socket.socket":
    """Fork a supervisor that starts the command; return the socket to it."""
    connection, supervisor_end = _socket.socketpair(
        _socket.AF_UNIX, _socket.SOCK_STREAM | _socket.SOCK_CLOEXEC
    )
    if os.fork() == 0:
        connection.close()
        supervisor.fork_supervised_worker(supervisor_end, signal_mask)
        worker_request.execute(command)
    supervisor_end.close()
    return connection


# ---- mirroring it --------------------------------------------------------------------------------------


def forward_until_exit(connection: "_socket.socket", forwarded: "set[int]", signal_mask: "set[int]") -> int:
    """Forward signals until the worker has ended; return its wait status."""
    wakeup_read, wakeup_write = os.pipe()
    os.set_blocking(wakeup_write, False)
    signal.set_wakeup_fd(wakeup_write, warn_on_full_buffer=False)
    for number in forwarded:
        if not _is_ignored(number):  # as by nohup
            signal.signal(number, supervisor.ignore_signal)
    signal.pthread_sigmask(signal.SIG_SETMASK, signal_mask)
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    poll.register(wakeup_read, select.POLLIN)
    stop_signals = read_stop_signals()
    stop_timeout_s = supervisor.read_grace_s() + children.KILL_TIMEOUT_S + REPORT_TIMEOUT_S
    unread, supervisor_pid, deadline = b"", 0, supervisor.INFINITY
    while True:
        remaining_s = deadline - time.monotonic()
        if remaining_s <= 0:
            # The supervisor is stopped. When it is killed, the kernel kills its worker.
            children.kill(supervisor_pid)
            deadline = remaining_s = supervisor.INFINITY
        for descriptor, _ in poll.poll(None if remaining_s == supervisor.INFINITY else remaining_s * 1000):
            if descriptor == wakeup_read:
                requests = bytes(number for number in os.read(wakeup_read, 4096) if number in stop_signals)
                if requests:
                    supervisor.send(connection, requests)
                    deadline = min(deadline, time.monotonic() + stop_timeout_s)
                continue
            data = supervisor.receive(connection, 4096)
            if not data:
                return report_lost_supervisor()
            *lines, unread = (unread + data).split(b"\n")
            for line in lines:
                kind, argument, *rest = line.split()
                if kind == b"started":
                    supervisor_pid = int(rest[0])
                elif kind == b"parked":
                    return EXIT_PARKED << 8
                else:
                    return int(argument) if kind == b"ended" else int(signal.SIGKILL)


def report_lost_supervisor() -> int:
    """Report the worker of a killed supervisor, which the kernel has killed too; return its wait status."""
    status = int(signal.SIGKILL)
    worker_events.write_worker_exit(
        None, status, stopped_at=None, lease_expired=False, message="its worker supervisor was killed"
    )
    children.kill_all(supervisor.LeaseView(None).remaining_s, at_once=True)
    return status


def read_stop_signals() -> "set[int]":
    """Return the signals that stop the worker: ours, the drain signals and torchelastic's."""
    stop_signals: set[int] = {*STOP_SIGNALS, *supervisor.read_drain_signals()}
    for name in os.environ.get("TORCHELASTIC_SIGNALS_TO_HANDLE", "").split(","):
        stop_signals.add(getattr(signal, name.strip(), signal.SIGTERM))
    return stop_signals


def exit_like_worker(wait_status: int) -> None:
    """Exit with the worker's exit code, or by its signal."""
    if not os.WIFSIGNALED(wait_status):
        os._exit(os.WEXITSTATUS(wait_status))
    number = os.WTERMSIG(wait_status)
    import resource  # noqa: PLC0415 - needed here only

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # only the worker's core file is useful
    if number not in {signal.SIGKILL, signal.SIGSTOP}:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
    os.kill(os.getpid(), number)
    os._exit(128 + number)  # the default action of the signal is to be ignored


if __name__ == "__main__":
    main(sys.argv[1:])
