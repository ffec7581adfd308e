"""What process 1 of a container has to do, done by a process of its own: the agent is its child.

Process 1 has no default actions: a signal that it does not handle is dropped, and it is handed every process
whose parent has died. An agent that reaped those itself could not tell them from children that torchelastic,
the zygote or a library waits for. So process 1 forks the agent, passes every signal on to it, collects what
has ended, and ends as the agent does; the kernel then kills what is left. No tini is needed.

Promise: the exit code is the agent's, or 128 and the number of the signal that killed it. Does not know
torch: it stays as small as the interpreter.
"""

from __future__ import annotations

import contextlib
import os
import signal

PR_SET_PDEATHSIG = 1
# These come of what a process does itself, or cannot be had; a stop is the terminal's or kubelet's affair.
NOT_PASSED_ON = {
    signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD, signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE,
    signal.SIGILL, signal.SIGTRAP, signal.SIGABRT, signal.SIGSYS, signal.SIGTTIN, signal.SIGTTOU,
}  # fmt: skip


_before: set[int | signal.Signals] | None = None
"""The signals that were blocked before `hold_if_first`; None: it has held nothing."""


def hold_if_first() -> None:
    """Let process 1 of ``elastic-resume run`` keep what it is sent until it can be passed on.

    What process 1 neither handles nor blocks the kernel drops for good, and a pod whose SIGTERM is dropped
    is killed at the end of its grace. So this comes before anything that takes time to import.
    """
    global _before  # noqa: PLW0603
    if os.getpid() == 1:
        _before = signal.pthread_sigmask(signal.SIG_BLOCK, _awaited())


def stand_if_first() -> None:
    """Return in the process that is to be the agent: this one, unless it is process 1."""
    if os.getpid() == 1:
        stand()


def stand() -> None:
    """Fork the agent and look after it. Returns in the agent only."""
    import ctypes  # noqa: PLC0415 - not before `hold_if_first`

    mask = signal.pthread_sigmask(signal.SIG_BLOCK, _awaited())
    first = os.getpid()
    agent = os.fork()
    if agent == 0:
        # Where this stands for process 1 without being it, the kernel would not kill us with it.
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
        if os.getppid() != first:
            os._exit(1)
        os.setpgid(0, 0)  # a terminal's Ctrl-C comes once then
        if os.isatty(0):
            # Who reads it has to be in the foreground. To ask for that from the background stops, by default.
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTTOU})
            with contextlib.suppress(OSError):  # no terminal of ours
                os.tcsetpgrp(0, os.getpgrp())
        signal.pthread_sigmask(signal.SIG_SETMASK, mask if _before is None else _before)
        return
    os._exit(look_after(agent))


def _awaited() -> set[signal.Signals]:
    return signal.valid_signals() - NOT_PASSED_ON | {signal.SIGCHLD}


def look_after(agent: int) -> int:
    """Pass signals on and reap until the agent, a child, has ended; give the exit code. All are blocked."""
    from elastic_resume.agent.guard import reap  # noqa: PLC0415 - 5 ms, which the agent does not wait for

    awaited = _awaited()
    while True:
        number = signal.sigwait(awaited)
        if number != signal.SIGCHLD:
            with contextlib.suppress(ProcessLookupError):  # ended, and about to be collected
                os.kill(agent, number)
            continue
        status = reap(agent)
        if status is not None:
            return 128 + os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)
