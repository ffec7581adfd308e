"""The process that torchelastic starts for a rank: it asks for a worker and mirrors its life.

Run as ``python -I -S stub.py LOCAL_RANK COMMAND...``, never imported by us outside tests. A worker comes
warm from the agent's zygote, or cold: then the stub forks a guard (`guard.py`) which starts the command.
Either way it passes signals on to the guard and exits with the worker's exit code, or dies of the worker's
signal, after whatever the worker left behind is dead.

Promise: when the agent dies the kernel kills the stub, and with the stub the guard and all its worker go.

Knows nothing of this package: with site-packages or torch in reach it would not be up in 30 ms. So its
few names are literals, which tests/test_stub.py holds against contract.py.
"""

import _socket
import ctypes
import os
import select
import signal
import sys
import time

TYPE_CHECKING = False  # typing would cost a third of the start

if TYPE_CHECKING:
    from elastic_resume.agent.workers import supervisor
else:
    sys.path.insert(0, os.path.dirname(__file__))  # noqa: PTH120 - pathlib would cost a third of the start
    import supervisor

    del sys.path[0]

ENV_AGENT_PID = "ELASTIC_RESUME_AGENT_PID"
ENV_LOCAL_RANK = supervisor.ENV_LOCAL_RANK
ENV_FORK_SERVER = "ELASTIC_RESUME_ZYGOTE"  # where it listens: the name of an abstract unix socket
# Guard and worker answer at once. A guard that somebody stopped does not, and torchelastic waits for us.
ANSWER_TIMEOUT_S = 5.0

PR_SET_CHILD_SUBREAPER = supervisor.PR_SET_CHILD_SUBREAPER
# Faults must kill the stub as they kill anything; job control is the terminal's affair.
UNFORWARDED_SIGNALS = {
    signal.SIGKILL, signal.SIGSTOP, signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU, signal.SIGCONT,
    signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT, signal.SIGTRAP,
}  # fmt: skip
# Signals that ask for the end even where --signals-to-handle does not name them.
STOP_SIGNALS = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT}


def main(argv: list[str]) -> None:
    """Start ``argv[1:]`` as local rank ``argv[0]`` and end as it ends. Does not return."""
    local_rank, command = argv[0], argv[1:]
    taken = signal.valid_signals() - UNFORWARDED_SIGNALS
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, taken)
    agent = int(os.environ.get(ENV_AGENT_PID) or os.getppid())
    libc = ctypes.CDLL(None)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # should a guard of ours be killed
    # Not a signal that waits while we are stopped. The guard sees its line end, and sweeps.
    libc.prctl(supervisor.PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != agent:
        os._exit(1)  # the agent died before it could be watched, and nothing has been started
    os.environ[ENV_LOCAL_RANK] = local_rank
    line = start_from_fork_server(os.environ.pop(ENV_FORK_SERVER, None), command, mask) or start_cold(
        command, mask
    )
    exit_like_worker(forward_until_exit(line, taken, mask))


def start_from_fork_server(
    socket_name: "str | None", command: list[str], signal_mask: "set[int | signal.Signals]"
) -> "_socket.socket | None":
    """Ask the zygote for a worker; give the line to its guard, None where it gives none."""
    if socket_name is None or not _has_standard_streams():
        return None
    import json  # noqa: PLC0415 - a cold start needs none
    import resource  # noqa: PLC0415

    # A character for each byte: what these hold need not be text in any encoding.
    request = json.dumps(
        {
            "command": [os.fsencode(word).decode("latin-1") for word in command],
            "environ": {k.decode("latin-1"): v.decode("latin-1") for k, v in os.environb.items()},
            "cwd": _working_directory(),
            "mask": sorted(int(number) for number in signal_mask),
            # By nohup, say: whoever starts a worker cold hands that on.
            "ignored": sorted(int(number) for number in STOP_SIGNALS if _is_ignored(number)),
            "umask": _read_umask(),
            "cpus": sorted(os.sched_getaffinity(0)),
            "limits": {kind: resource.getrlimit(kind) for kind in range(resource.RLIMIT_NOFILE + 1)},
            "nice": os.nice(0),
        }
    ).encode()
    # It may import for minutes. Nothing has been started yet: whoever asks for the end gets it.
    for number in STOP_SIGNALS:
        if not _is_ignored(number):
            signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    try:
        return _request_worker(socket_name, request)
    finally:
        signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)


def _is_ignored(number: signal.Signals) -> bool:
    return signal.getsignal(number) is signal.SIG_IGN


def _request_worker(socket_name: str, request: bytes) -> "_socket.socket | None":
    line = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM | _socket.SOCK_CLOEXEC)
    try:
        line.connect("\0" + socket_name)
        if not _is_same_user(line):
            return None
        rights = (
            (0).to_bytes(4, sys.byteorder) + (1).to_bytes(4, sys.byteorder) + (2).to_bytes(4, sys.byteorder)
        )
        line.sendmsg([len(request).to_bytes(4, "big")], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, rights)])
        line.sendall(request)
        if line.recv(1) == b"y":  # it is imported by now, and a guard has been forked
            return line
    except OSError:
        pass
    line.close()
    return None


def _has_standard_streams() -> bool:
    """Whether input, output and errors are open: one that is closed cannot be handed on."""
    try:
        return all(os.fstat(number) for number in range(3))
    except OSError:
        return False


def _working_directory() -> str:
    """The working directory; nowhere where it has been removed, which the zygote refuses."""
    try:
        return os.getcwdb().decode("latin-1")  # noqa: PTH109 - see above
    except OSError:
        return ""


def _is_same_user(connection: "_socket.socket") -> bool:
    """Whether the listener runs as our user: an abstract name is free for anybody to take."""
    peer = connection.getsockopt(_socket.SOL_SOCKET, _socket.SO_PEERCRED, 12)  # struct ucred: pid, uid, gid
    return int.from_bytes(peer[4:8], sys.byteorder) == os.getuid()


def _read_umask() -> int:
    value = os.umask(0o077)
    os.umask(value)
    return value


def start_cold(command: list[str], signal_mask: "set[int | signal.Signals]") -> "_socket.socket":
    """Fork a guard that starts the command; give the line to it."""
    ours, its = _socket.socketpair(_socket.AF_UNIX, _socket.SOCK_STREAM | _socket.SOCK_CLOEXEC)
    if os.fork() == 0:
        ours.close()
        supervisor.fork_supervised_worker(its, signal_mask)
        exec_worker(command)
    its.close()
    return ours


def exec_worker(command: list[str]) -> None:
    """Turn this forked child into the worker. Does not return."""
    # Python ignores these two at its start; what is ignored stays so across exec, and a worker that
    # writes into a closed pipe must die of it as it would without us.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # no KeyboardInterrupt between here and exec
    try:
        os.execvp(command[0], command)  # noqa: S606 - that is what we are for
    except OSError as error:
        os.write(2, f"elastic_resume: cannot start {command[0]}: {error.strerror}\n".encode())
        os._exit(127 if isinstance(error, FileNotFoundError) else 126)


def forward_until_exit(
    connection: "_socket.socket", forwarded: "set[signal.Signals]", signal_mask: "set[int | signal.Signals]"
) -> int:
    """Pass signals on until the worker has ended; give its wait status."""
    bell, ringer = os.pipe()
    os.set_blocking(ringer, False)
    signal.set_wakeup_fd(ringer, warn_on_full_buffer=False)
    for number in forwarded:
        signal.signal(number, supervisor.ignore_signal)
    signal.pthread_sigmask(signal.SIG_SETMASK, signal_mask)
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    poll.register(bell, select.POLLIN)
    stopping = read_stop_signals()
    heard, keeper, deadline = b"", 0, supervisor.INFINITY
    while True:
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            supervisor.kill(keeper)  # somebody has stopped it; its worker and what is left go with it
            deadline = left_s = supervisor.INFINITY
        for descriptor, _ in poll.poll(None if left_s == supervisor.INFINITY else left_s * 1000):
            if descriptor == bell:
                orders = bytes(number for number in os.read(bell, 4096) if number in stopping)
                if orders:
                    send_signals(connection, orders)
                    deadline = min(
                        deadline,
                        time.monotonic()
                        + supervisor.read_grace_s()
                        + supervisor.KILL_TIMEOUT_S
                        + ANSWER_TIMEOUT_S,
                    )
                continue
            data = receive_report(connection)
            if not data:
                return report_lost_supervisor()
            heard += data
            while b"\n" in heard:
                word, _, heard = heard.partition(b"\n")
                kind, first, *rest = word.split()
                if kind == b"started":
                    keeper = int(rest[0])
                else:
                    return int(first) if kind == b"ended" else int(signal.SIGKILL)


def receive_report(connection: "_socket.socket") -> bytes:
    """What the guard says; nothing when it is gone."""
    try:
        return connection.recv(4096)
    except OSError:
        return b""


def send_signals(connection: "_socket.socket", signal_numbers: bytes) -> None:
    """Pass the numbers of signals on to the guard, which may be gone."""
    try:  # noqa: SIM105 - see guard.say
        connection.sendall(signal_numbers)
    except OSError:
        pass


def report_lost_supervisor() -> int:
    """Tell the end of a worker whose guard was killed, which the kernel has killed too; give its status."""
    status = int(signal.SIGKILL)
    supervisor.write_worker_exit(
        None, status, stopped=False, lease_expired=False, message="its guard process was killed"
    )
    supervisor.kill_leftovers(supervisor.LeaseView(None), at_once=True)
    return status


def read_stop_signals() -> "set[int]":
    """Give the signals that ask for the end."""
    stopping: set[int] = {*STOP_SIGNALS, *supervisor.read_drain_signals()}
    for name in os.environ.get("TORCHELASTIC_SIGNALS_TO_HANDLE", "").split(","):
        stopping.add(getattr(signal, name.strip(), signal.SIGTERM))
    return stopping


def exit_like_worker(wait_status: int) -> None:
    """Exit with the worker's code or die of its signal. Does not return."""
    if not os.WIFSIGNALED(wait_status):
        os._exit(os.WEXITSTATUS(wait_status))
    number = os.WTERMSIG(wait_status)
    import resource  # noqa: PLC0415 - needed at the end only

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the worker's core file is the one to look at
    if number not in {signal.SIGKILL, signal.SIGSTOP}:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
    os.kill(os.getpid(), number)
    os._exit(128 + number)  # the signal's default is to be ignored


if __name__ == "__main__":
    main(sys.argv[1:])
