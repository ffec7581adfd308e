"""Write the events of a worker's start and end: to the agent's memory, which decides, and to the node's log.

As `supervisor.py`, this module imports little and only the standard library.
"""

import os
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    import signal
else:
    import _signal as signal

ENV_GENERATION = "ELASTIC_RESUME_GENERATION"
ENV_LOCAL_RANK = "ELASTIC_RESUME_LOCAL_RANK"
ENV_NODE_NAME = "ELASTIC_RESUME_NODE_NAME"
ENV_EVENTS_PATH = "ELASTIC_RESUME_EVENTS_PATH"
ENV_EVIDENCE = "ELASTIC_RESUME_EVIDENCE"
EVIDENCE_MEMFD = "/memfd:elastic_resume-evidence"  # the same literal as in `events`
MAX_ERROR_CHARS = 1024


def write_worker_forked(worker: int) -> None:
    """Append a ``worker-forked`` event to the agent's memory: most scripts offer no progress page."""
    names = ("RANK", ENV_LOCAL_RANK, ENV_GENERATION)
    rank, local_rank, generation = map(read_int, names)
    if rank is not None and local_rank is not None and generation is not None:  # else there is no agent
        line = (  # by hand: see `write_worker_exit`
            f'{{"t":{time.time():.3f},"event":"worker-forked","pid":{os.getpid()},"worker_pid":{worker},'
            f'"rank":{rank},"local_rank":{local_rank},"generation":{generation}}}\n'
        )
        append_line(ENV_EVIDENCE, line.encode(), os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)


def write_worker_exit(
    worker: "int | None",
    wait_status: int,
    *,
    stopped_at: "float | None",
    lease_expired: bool,
    message: str = "",
    not_parked: bool = False,
    stuck: bool = False,
) -> None:
    """Append a ``worker-exit`` event to the agent's memory, which decides, and to the node's log on disk."""
    import json  # noqa: PLC0415 - takes 3 ms, which the start must not pay

    number = os.WTERMSIG(wait_status) if os.WIFSIGNALED(wait_status) else None
    event = {
        "t": round(time.time(), 3),
        "event": "worker-exit",
        "node": os.environ.get(ENV_NODE_NAME, ""),
        "pid": os.getpid(),
        **boot_fields(),
        "rank": read_int("RANK"),
        "local_rank": read_int(ENV_LOCAL_RANK),
        "generation": read_int(ENV_GENERATION),
        "worker_pid": worker,
        "exit_code": os.WEXITSTATUS(wait_status) if number is None else None,
        "signal": None if number is None else signal_name(number),
        "stopped": stopped_at is not None,
    }
    if stopped_at is not None:
        event["stopped_at"] = round(stopped_at, 3)
    if lease_expired:
        event["lease_expired"] = True
    if not_parked:
        event["not_parked"] = True
    if stuck:
        event["stuck"] = True
    if wait_status != 0 and stopped_at is None:
        event["message"] = message or read_recorded_error(json)
    line = (json.dumps(event, separators=(",", ":")) + "\n").encode()
    append_line(ENV_EVIDENCE, line, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
    append_line(ENV_EVENTS_PATH, line, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC)


def boot_fields() -> "dict[str, object]":
    """Return the same fields as `events.boot_fields`."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            boot = file.read().replace("-", "")[:12]
    except OSError:
        return {}
    return {"b": round(time.clock_gettime(time.CLOCK_BOOTTIME), 3), "boot": boot}


def append_line(variable: str, line: bytes, flags: int) -> None:
    """Append a line to the file that an environment variable names. A failing disk loses the line."""
    try:
        path = os.environ[variable]
        if variable == ENV_EVIDENCE and not os.readlink(path).startswith(EVIDENCE_MEMFD):  # noqa: PTH115
            return  # the agent has ended, and another process has its pid
        descriptor = os.open(path, flags, 0o644)
    except (KeyError, OSError):
        return
    try:  # noqa: SIM105 - contextlib would cost time at the start
        os.write(descriptor, line)
    except OSError:
        pass
    os.close(descriptor)


def read_recorded_error(json: "object") -> str:
    """Return the message that torch's ``@record`` wrote for this attempt, if any."""
    try:
        with open(os.environ["TORCHELASTIC_ERROR_FILE"], "rb") as file:
            message = json.loads(file.read(1 << 20))["message"]  # type: ignore[attr-defined]
        return str(message["message"] if isinstance(message, dict) else message)[:MAX_ERROR_CHARS]
    except (KeyError, OSError, ValueError, TypeError):
        return ""


def read_int(variable: str) -> "int | None":
    """Return the number in an environment variable; None if it is unset or no number."""
    text = os.environ.get(variable, "")
    return int(text) if text.isdigit() else None


def signal_name(number: int) -> str:
    """Return SIGKILL for 9, and SIG40 for a real-time signal, which has no name."""
    return next((name for name, known in sorted(known_signals().items()) if known == number), f"SIG{number}")


def known_signals() -> "dict[str, int]":
    """Return the numbers of the signals that have a name."""
    return {name: number for name, number in vars(signal).items() if name[:3] == "SIG" and name[3] != "_"}
