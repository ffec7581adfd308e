"""The process that torchelastic starts for a rank: it starts the worker and mirrors its life.

Run as ``python -I -S stub.py LOCAL_RANK COMMAND...``, never imported by us outside tests. It exits with the
worker's exit code, or dies of the worker's signal, after whatever the worker left behind is dead.

Promise: the worker never outlives the agent. The kernel tells the stub when its parent dies and the stub
then kills worker and descendants, which it can find because orphans of its descendants become its own
children; should the stub itself be killed, the kernel kills the worker.

Promise: nor does it outlive the lease that the agent holds for it, be the agent stopped, wedged or gone: the
fence (`fence.py`) is a word in memory, which the stub looks at itself and which nobody needs to send.

Knows nothing of this package: with site-packages or torch in reach it would not be up in 30 ms. So its
few names are literals, which tests/test_stub.py holds against contract.py.

States: every signal that can be, is blocked and taken from a queue in one place, so there is no moment
at which one could be missed::

    running --SIGTERM, SIGINT, …--> stopping --grace over--> killing
    running, stopping --parent gone, or fenced--> killing
    any --worker reaped--> sweep what it left, write worker-exit, end alike

Only a worker that was fenced before anyone told it to stop is held back before the last step: the agent
means to end it and is about to say so, and torchelastic would take its end for a failure of the script.
"""

import ctypes
import mmap
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
ENV_FENCE = "ELASTIC_RESUME_FENCE"
DEFAULT_GRACE_S = 5.0
# A worker's own children often see its end and go by themselves, cleaning shared memory as they do
# (multiprocessing's resource tracker, torch_shm_manager). Longer would delay the restart.
SWEEP_GRACE_S = 0.1
SWEEP_LIMIT_S = 5.0  # a process in uninterruptible sleep does not die; torchelastic must not wait for it
# Nobody can wake us when the word moves: the agent that moves it may be stopped the next moment. A lease that
# runs out is awaited to the millisecond; this is how late a restart can find the word moved back.
FENCE_POLL_S = 0.05
# An agent that fenced sends SIGTERM within its monitor's interval (torchelastic's default is 0.1 s). One that
# renews instead believes that its worker lives: it has to see it dead. One that is stopped says nothing.
HOLD_RENEWED_S = 1.0
HOLD_LIMIT_S = 60.0
FOREVER = float("inf")  # math would cost the start more than the fence does

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
    word = open_fence()
    stub = os.getpid()
    worker = os.fork()
    if worker == 0:
        become(command, libc, stub, old_mask)
    status, told, fenced = watch(worker, taken, agent, word)
    sweep(word, at_once=fenced)
    write_exit(worker, status, stopped=told or fenced, fenced=fenced)
    if fenced and not told and hold(taken, agent, word):
        status = int(signal.SIGKILL)
    end_alike(status)


def open_fence() -> "memoryview[float] | None":
    """Map the word until when the worker may run; None where nothing fences. Exit where it cannot be read.

    The variable goes no further: what the worker starts is fenced with it.
    """
    path = os.environ.pop(ENV_FENCE, None)
    if path is None:
        return None
    try:
        descriptor = os.open(path, os.O_RDONLY)
        # Mapped, not read(2): the kernel may copy byte by byte, and a half of each of two times is a third.
        page = mmap.mmap(descriptor, mmap.PAGESIZE, prot=mmap.PROT_READ)
        os.close(descriptor)
    except (OSError, ValueError) as error:
        text = (
            f"no worker may run that cannot be fenced, and {path} cannot be read: "
            f"{getattr(error, 'strerror', None) or error}. Either the agent has ended, or /proc hides it: "
            "let workers run as the agent's user, in its PID namespace, with /proc mounted."
        )
        os.write(2, f"elastic_resume: {text}\n".encode())
        write_exit(None, 1 << 8, stopped=False, fenced=False, message=text)
        os._exit(1)
    return memoryview(page).cast("d")


def left_s(word: "memoryview[float] | None") -> float:
    """Seconds for which the worker may still run: none where the word is no number."""
    if word is None:
        return FOREVER
    left = word[0] - time.monotonic()
    return left if left > 0 else 0.0


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


def watch(
    worker: int, taken: "set[signal.Signals]", agent: int, word: "memoryview[float] | None"
) -> "tuple[int, bool, bool]":
    """Wait for the worker's end.

    Give its wait status, whether it had been told to stop, and whether the fence ended it.
    """
    stopping = stopping_signals()
    poll_s = 3600.0 if word is None else FENCE_POLL_S
    deadline = FOREVER
    told = fenced = False
    while True:
        status = reap(worker)
        if status is not None:
            return status, told, fenced
        left = left_s(word)
        fenced = fenced or left <= 0
        orphaned = os.getppid() != agent
        told = told or orphaned
        if fenced or orphaned or time.monotonic() >= deadline:
            kill(worker)
            deadline = time.monotonic() + 1.0  # it is dying; should that last, ask again now and then
            left = FOREVER
        wait_s = max(0.0, min(poll_s, left, deadline - time.monotonic()))
        got = signal.sigtimedwait(taken, wait_s)
        if got is None or got.si_signo not in stopping:
            continue
        forward(worker, got.si_signo)
        if not told:
            told = True
            deadline = min(deadline, time.monotonic() + grace_s())


def stopping_signals() -> "set[int]":
    """Give the signals that ask for the end."""
    stopping: set[int] = set(STOPPING)
    for name in os.environ.get("TORCHELASTIC_SIGNALS_TO_HANDLE", "").split(","):
        stopping.add(getattr(signal, name.strip(), signal.SIGTERM))
    return stopping


def hold(taken: "set[signal.Signals]", agent: int, word: "memoryview[float] | None") -> bool:
    """Wait, with the worker dead, until the agent comes for it; tell whether the agent missed its end."""
    stopping = stopping_signals()
    limit = time.monotonic() + HOLD_LIMIT_S
    renewed_at = FOREVER
    while os.getppid() == agent and time.monotonic() < limit:
        got = signal.sigtimedwait(taken, FENCE_POLL_S)
        if got is not None and got.si_signo in stopping:
            return False
        renewed_at = min(renewed_at, time.monotonic()) if left_s(word) > 0 else FOREVER
        if time.monotonic() - renewed_at > HOLD_RENEWED_S:
            return True
    return False


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


def sweep(word: "memoryview[float] | None", *, at_once: bool) -> None:
    """Kill what the worker left behind. Orphans come to us as their parents die: ask until none is left."""
    start = time.monotonic()
    while True:
        reap(0)
        left = children()
        age_s = time.monotonic() - start
        if not left or age_s > SWEEP_LIMIT_S:
            return
        if at_once or age_s >= SWEEP_GRACE_S or left_s(word) <= 0:
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


def write_exit(worker: "int | None", status: int, *, stopped: bool, fenced: bool, message: str = "") -> None:
    """Append ``worker-exit`` to the node's events. A lost disk does not change how the stub ends."""
    import json  # noqa: PLC0415 - 3 ms that the start should not pay

    number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else None
    event = {
        "t": round(time.time(), 3),
        "event": "worker-exit",
        "node": os.environ.get(ENV_NODE_NAME, ""),
        "pid": os.getpid(),
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
    if status != 0 and not stopped:
        event["message"] = message or recorded_error(json)
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
