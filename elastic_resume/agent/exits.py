"""How the end of a worker is told to its agent and in its node's log. Standard library only: see `stub`."""

import os
import signal
import time

ENV_EVENTS_PATH = "ELASTIC_RESUME_EVENTS_PATH"
ENV_ROUND_EVENTS = "ELASTIC_RESUME_ROUND_EVENTS"
MEMORY = "/memfd:elastic_resume-round-events"  # as in `events`
ENV_ROUND = "ELASTIC_RESUME_ROUND"
ENV_LOCAL_RANK = "ELASTIC_RESUME_LOCAL_RANK"
ENV_NODE_NAME = "ELASTIC_RESUME_NODE_NAME"


def write_exit(
    worker: "int | None", status: int, *, stopped: bool, fenced: bool, message: str = "", stuck: bool = False
) -> None:
    """Append ``worker-exit`` to what the agent decides by, in its memory, and to the node's log on disk."""
    import json  # noqa: PLC0415 - 3 ms that the start should not pay

    number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else None
    event = {
        "t": round(time.time(), 3),
        "event": "worker-exit",
        "node": os.environ.get(ENV_NODE_NAME, ""),
        "pid": os.getpid(),
        **stamp(),
        "rank": number_or_none(os.environ.get("RANK")),
        "local_rank": number_or_none(os.environ.get(ENV_LOCAL_RANK)),
        "round": number_or_none(os.environ.get(ENV_ROUND)),
        "worker_pid": worker,
        "exit_code": os.WEXITSTATUS(status) if number is None else None,
        "signal": None if number is None else signal_name(number),
        "stopped": stopped,
    }
    if fenced:
        event["fenced"] = True
    if stuck:
        event["stuck"] = True
    if status != 0 and not stopped:
        event["message"] = message or recorded_error(json)
    line = (json.dumps(event, separators=(",", ":")) + "\n").encode()
    append(ENV_ROUND_EVENTS, line, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
    append(ENV_EVENTS_PATH, line, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC)


def stamp() -> "dict[str, object]":
    """Give what `events.stamp` gives."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            boot = file.read().replace("-", "")[:12]
    except OSError:
        return {}
    return {"b": round(time.clock_gettime(time.CLOCK_BOOTTIME), 3), "boot": boot}


def append(variable: str, line: bytes, flags: int) -> None:
    """Append a line to the file that the variable names; a lost disk costs the line."""
    try:
        path = os.environ[variable]
        if variable == ENV_ROUND_EVENTS and not os.readlink(path).startswith(MEMORY):  # noqa: PTH115
            return  # the agent has ended, and its pid is another process's by now
        descriptor = os.open(path, flags, 0o644)
    except (KeyError, OSError):
        return
    try:  # noqa: SIM105 - contextlib would cost a third of the start
        os.write(descriptor, line)
    except OSError:
        pass
    os.close(descriptor)


def recorded_error(json: "object") -> str:
    """Give the message that torch's ``@record`` left for this attempt; empty when there is none."""
    try:
        with open(os.environ["TORCHELASTIC_ERROR_FILE"], "rb") as file:
            message = json.loads(file.read(1 << 20))["message"]  # type: ignore[attr-defined]
        return str(message["message"] if isinstance(message, dict) else message)[:1024]
    except (KeyError, OSError, ValueError, TypeError):
        return ""


def number_or_none(text: "str | None") -> "int | None":
    """``int(text)`` where that is a number."""
    return int(text) if text and text.isdigit() else None


def signal_name(number: int) -> str:
    """``SIGKILL`` for 9; real-time signals have no name of their own."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"SIG{number}"
