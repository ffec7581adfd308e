"""The process that torchelastic starts for a rank: it starts the worker and mirrors its life.

Run as ``python -I -S stub.py LOCAL_RANK COMMAND...``, never imported by us outside tests. It exits with the
worker's exit code, or dies of the worker's signal, after whatever the worker left behind is dead.

Promise: the worker never outlives the agent. The kernel tells the stub when its parent dies and the stub
then kills worker and descendants, which it can find because orphans of its descendants become its own
children; should the stub itself be killed, the kernel kills the worker.

Knows nothing of this package: with site-packages or torch in reach it would not be up in 30 ms. So its
few names are literals, which tests/test_stub.py holds against contract.py.

States: every signal that can be, is blocked and taken from a queue in one place, so there is no moment
at which one could be missed::

    running --SIGTERM, SIGINT, …--> stopping --grace over--> killing
    running, stopping --parent gone--> killing
    any --worker reaped--> sweep what it left, write worker-exit, end alike
"""

import ctypes
import os
import signal
import sys
import time

ENV_AGENT_PID = "ELASTIC_RESUME_AGENT_PID"
ENV_EVENTS_PATH = "ELASTIC_RESUME_EVENTS_PATH"
ENV_ROUND = "ELASTIC_RESUME_ROUND"
ENV_LOCAL_RANK = "ELASTIC_RESUME_LOCAL_RANK"
ENV_NODE_NAME = "ELASTIC_RESUME_NODE_NAME"
ENV_GRACE_S = "ELASTIC_RESUME_GRACE_S"
DEFAULT_GRACE_S = 5.0
# A worker's own children often see its end and go by themselves, cleaning shared memory as they do
# (multiprocessing's resource tracker, torch_shm_manager). Longer would delay the restart.
SWEEP_GRACE_S = 0.1
SWEEP_LIMIT_S = 5.0  # a process in uninterruptible sleep does not die; torchelastic must not wait for it

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
# Faults must kill the stub as they kill anything; job control is the terminal's affair.
NOT_TAKEN = {
    signal.SIGKILL, signal.SIGSTOP, signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU, signal.SIGCONT,
    signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT, signal.SIGTRAP,
}  # fmt: skip
# Signals that ask for the end even where --signals-to-handle does not name them.
STOPPING = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT}


def main(argv: list[str]) -> None:
    """Start ``argv[1:]`` as local rank ``argv[0]`` and end as it ends. Does not return."""
    local_rank, command = argv[0], argv[1:]
    libc = ctypes.CDLL(None)
    taken = signal.valid_signals() - NOT_TAKEN
    old_mask = signal.pthread_sigmask(signal.SIG_BLOCK, taken)
    agent = int(os.environ.get(ENV_AGENT_PID) or os.getppid())
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    # Not SIGKILL: a stub that is told can take the worker's descendants with it.
    libc.prctl(PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)
    if os.getppid() != agent:
        os._exit(1)  # the agent died before it could be watched, and nothing has been started
    os.environ[ENV_LOCAL_RANK] = local_rank
    stub = os.getpid()
    worker = os.fork()
    if worker == 0:
        become(command, libc, stub, old_mask)
    status, stopped = watch(worker, taken, agent)
    sweep()
    write_exit(worker, status, stopped=stopped, local_rank=local_rank)
    end_alike(status)


def become(command: list[str], libc: ctypes.CDLL, stub: int, mask: "set[int | signal.Signals]") -> None:
    """Turn this forked child into the worker. Does not return."""
    libc.prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != stub:
        os._exit(1)
    # Python ignores these two at its start; what is ignored stays so across exec, and a worker that
    # writes into a closed pipe must die of it as it would without us.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # no KeyboardInterrupt between here and exec
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    try:
        os.execvp(command[0], command)  # noqa: S606 - that is what we are for
    except OSError as error:
        os.write(2, f"elastic_resume: cannot start {command[0]}: {error.strerror}\n".encode())
        os._exit(127 if isinstance(error, FileNotFoundError) else 126)


def watch(worker: int, taken: "set[signal.Signals]", agent: int) -> "tuple[int, bool]":
    """Wait for the worker's end; give its wait status and whether it had been told to stop."""
    stopping = set(STOPPING)
    for name in os.environ.get("TORCHELASTIC_SIGNALS_TO_HANDLE", "").split(","):
        stopping.add(getattr(signal, name.strip(), signal.SIGTERM))
    deadline = None
    stopped = False
    while True:
        status = reap(worker)
        if status is not None:
            return status, stopped
        if os.getppid() != agent or (deadline is not None and time.monotonic() >= deadline):
            stopped = True
            kill(worker)
            deadline = time.monotonic() + 1.0  # it is dying; should that last, ask again now and then
        wait_s = 3600.0 if deadline is None else max(0.0, deadline - time.monotonic())
        got = signal.sigtimedwait(taken, wait_s)
        if got is None or got.si_signo not in stopping:
            continue
        forward(worker, got.si_signo)
        if not stopped:
            stopped = True
            deadline = time.monotonic() + grace_s()


def grace_s() -> float:
    """Seconds between SIGTERM and SIGKILL."""
    try:
        return max(0.0, float(os.environ[ENV_GRACE_S]))
    except (KeyError, ValueError):
        return DEFAULT_GRACE_S


def forward(worker: int, number: int) -> None:
    """Pass a signal on to a worker that has left our process group, which torchelastic signals whole."""
    try:
        if os.getpgid(worker) != os.getpgrp():
            os.kill(worker, number)
    except ProcessLookupError:
        pass


def kill(pid: int) -> None:
    """SIGKILL ``pid``, which may be gone."""
    try:  # noqa: SIM105 - contextlib and pathlib would cost a third of the start
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass


def reap(worker: int) -> "int | None":
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


def sweep() -> None:
    """Kill what the worker left behind. Orphans come to us as their parents die: ask until none is left."""
    start = time.monotonic()
    while True:
        reap(0)
        left = children()
        age_s = time.monotonic() - start
        if not left or age_s > SWEEP_LIMIT_S:
            return
        if age_s >= SWEEP_GRACE_S:
            for pid in left:
                kill(pid)
        time.sleep(0.005)


def children() -> "list[int]":
    """Our direct children, adopted ones included."""
    try:
        with open(f"/proc/self/task/{os.getpid()}/children") as file:
            return [int(pid) for pid in file.read().split()]
    except FileNotFoundError:
        pass  # a kernel without CONFIG_PROC_CHILDREN
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):  # noqa: PTH208 - see kill
        try:
            with open(f"/proc/{name}/stat") as file:
                # The command's name is in parentheses and may hold anything; state and parent follow it.
                if int(file.read().rpartition(")")[2].split()[1]) == os.getpid():
                    found.append(int(name))
        except (OSError, ValueError, IndexError):
            continue
    return found


def write_exit(worker: int, status: int, *, stopped: bool, local_rank: str) -> None:
    """Append ``worker-exit`` to the node's events. A lost disk does not change how the stub ends."""
    import json  # noqa: PLC0415 - 3 ms that the start should not pay

    number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else None
    event = {
        "t": round(time.time(), 3),
        "event": "worker-exit",
        "node": os.environ.get(ENV_NODE_NAME, ""),
        "pid": os.getpid(),
        "rank": number_or_none(os.environ.get("RANK")),
        "local_rank": number_or_none(local_rank),
        "round": number_or_none(os.environ.get(ENV_ROUND)),
        "worker_pid": worker,
        "exit_code": os.WEXITSTATUS(status) if number is None else None,
        "signal": None if number is None else signal_name(number),
        "stopped": stopped,
    }
    if status != 0 and not stopped:
        event["message"] = recorded_error(json)
    try:
        path = os.environ[ENV_EVENTS_PATH]
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        os.write(descriptor, (json.dumps(event, separators=(",", ":")) + "\n").encode())
    except (KeyError, OSError):
        pass


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


def end_alike(status: int) -> None:
    """Exit with the worker's code or die of its signal. Does not return."""
    if not os.WIFSIGNALED(status):
        os._exit(os.WEXITSTATUS(status))
    number = os.WTERMSIG(status)
    import resource  # noqa: PLC0415 - needed at the end only

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the worker's core file is the one to look at
    if number not in {signal.SIGKILL, signal.SIGSTOP}:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
    os.kill(os.getpid(), number)
    os._exit(128 + number)  # the signal's default is to be ignored


if __name__ == "__main__":
    main(sys.argv[1:])
