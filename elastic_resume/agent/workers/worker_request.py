"""Request a worker: what a launcher shim sends, and what the other side makes of it.

The fork server answers with a new worker, the supervisor of a parked worker with that one::

    launcher shim --message of JSON, three streams--> fork server, or supervisor of a parked worker
    supervisor --y, then what `supervisor.py` says--> launcher shim

A connection that closes without ``y`` is a refusal. Any user may bind an abstract socket name or connect to
it, so both sides check the other's user. A parked worker's name is the kernel's choice each time, so nobody
can take it in advance. It stands in the agent's file `ENV_PARKED`, which only our user can open.

As `supervisor.py`, this module imports little and only the standard library.
"""

import _socket
import errno
import os
import select

TYPE_CHECKING = False
if TYPE_CHECKING:
    import signal
    from typing import Any, NoReturn
else:
    import _signal as signal

if TYPE_CHECKING or __package__:
    from elastic_resume.local_socket import is_same_user, read_peer, receive_message, send_message
else:  # in the launcher shim
    from local_socket import is_same_user, read_peer, receive_message, send_message

ENV_PARKED = "ELASTIC_RESUME_PARKED"
AUTOBIND_BYTES = 6  # unix(7): a null byte and five hexadecimal digits
MAX_REQUEST_BYTES = 16 << 20
REQUEST_TIMEOUT_S = 1.0  # a launcher shim sends its request at once; other shims wait for it
STOPPED_CHECK_S = 1.0
STREAMS = 3


class RequestRefusedError(Exception):
    """A request of a launcher shim is refused; the text says why."""


ERRORS = (OSError, ValueError, TypeError, KeyError, RequestRefusedError)


def listen_parked(local_rank: str) -> "_socket.socket | None":
    """Return a socket at which the next launcher shim finds the parked worker; None if the system refuses."""
    listener = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM | _socket.SOCK_CLOEXEC)
    try:
        listener.bind("")  # the kernel chooses a name that is free
        listener.listen(16)
        file = os.open(os.environ[ENV_PARKED], os.O_WRONLY | os.O_CLOEXEC)
        os.pwrite(file, listener.getsockname(), int(local_rank) * AUTOBIND_BYTES)
        os.close(file)
    except OSError:
        listener.close()
        return None
    return listener


def read_parked_address(local_rank: str) -> bytes:
    """Return the address of the newest socket of `listen_parked`; without one, an address of nobody.

    Raises:
        OSError: the agent has ended.

    """
    with open(os.environ[ENV_PARKED], "rb") as file:
        return os.pread(file.fileno(), AUTOBIND_BYTES, int(local_rank) * AUTOBIND_BYTES) or b"\0"


def is_parked(local_rank: str) -> bool:
    """Return whether a supervisor of our user waits there. It ignores a connection without a request."""
    probe = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM | _socket.SOCK_CLOEXEC)
    try:
        probe.setblocking(False)
        error = probe.connect_ex(read_parked_address(local_rank))
        return error == errno.EAGAIN or (error == 0 and is_same_user(probe))
    except OSError:
        return False
    finally:
        probe.close()


def send(
    address: "str | bytes", request: bytes, *, kills_if_stopped: bool = False
) -> "_socket.socket | None":
    """Send a request; return the connection to the worker's supervisor, or None if there is no worker.

    The supervisor of a worker that has not parked yet answers late. If ``kills_if_stopped``, a supervisor
    that was stopped by a signal is killed, and the kernel kills its worker.
    """
    connection = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM | _socket.SOCK_CLOEXEC)
    try:
        connection.connect(address)
        if is_same_user(connection):
            send_message(connection, request, range(STREAMS))
            answer = select.poll()
            answer.register(connection, select.POLLIN)
            while not answer.poll(STOPPED_CHECK_S * 1000):
                if kills_if_stopped:
                    _kill_if_stopped(connection)
            if connection.recv(1) == b"y":
                return connection
    except OSError:
        pass
    connection.close()
    return None


def _kill_if_stopped(connection: "_socket.socket") -> None:
    peer = read_peer(connection)[0]
    with open(f"/proc/{peer}/stat") as file:  # there is no process 0, which another namespace's has here
        if file.read().rpartition(")")[2].split()[0] == "T":
            os.kill(peer, 9)


def receive(connection: "_socket.socket") -> "tuple[dict[str, Any], list[int]]":
    """Receive the request of a launcher shim; return it with the shim's standard streams.

    Raises:
        RequestRefusedError: another user sent it.
        OSError, ValueError, TypeError: it is incomplete, too long or malformed, or its sender has ended.

    """
    import json  # noqa: PLC0415 - takes 3 ms, which the start of a launcher shim must not pay

    if not is_same_user(connection):
        raise RequestRefusedError("the request is another user's")
    connection.settimeout(REQUEST_TIMEOUT_S)
    data, streams = receive_message(connection, MAX_REQUEST_BYTES, STREAMS, timeout_s=REQUEST_TIMEOUT_S)
    connection.settimeout(None)
    try:
        sender = select.poll()
        sender.register(connection, 0)
        if sender.poll(0) or len(streams) != STREAMS:  # POLLHUP
            raise ValueError("the sender has ended, or has sent no streams")  # noqa: TRY301
        return json.loads(data), streams
    except BaseException:
        for stream in streams:
            os.close(stream)
        raise


def replace_streams(streams: "list[int]") -> None:
    """Make these the standard streams of this process."""
    for target, stream in enumerate(streams):
        os.dup2(stream, target)
        os.close(stream)


def replace_environment(environ: "dict[str, str]") -> None:
    """Set the environment. Each character stands for a byte, as in latin-1: it need not be valid text."""
    os.environ.clear()
    for name, value in environ.items():
        if name and "=" not in name:  # the kernel passes such names on, but putenv refuses them
            os.environb[name.encode("latin-1")] = value.encode("latin-1")


def execute(command: "list[str]") -> "NoReturn":
    """Replace this forked process by the command."""
    # Python ignores these two at its start, and exec would pass that on to the worker.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # a SIGINT before exec must not raise KeyboardInterrupt
    try:
        os.execvp(command[0], command)  # noqa: S606 - the user's own command
    except OSError as error:
        os.write(2, f"elastic_resume: cannot start {command[0]}: {error.strerror}\n".encode())
        os._exit(127 if isinstance(error, FileNotFoundError) else 126)
