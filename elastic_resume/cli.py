"""The command ``elastic-resume``: one function per subcommand; each imports its modules when called.

A user's error is one line on stderr without a traceback. The exit code is then 1; for ``diff`` and ``chaos``
it is 2. A ``run`` that has not started exits with 2 after a `ConfigError` and with 74 after a `MachineError`.
``ls``, ``verify``, ``report`` and ``status`` do not import torch.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Callable, Sequence

from elastic_resume import __version__, constants
from elastic_resume.errors import ConfigError, ElasticResumeError, MachineError

PROG = "elastic-resume"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand and return its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        if words[:1] == ["run"]:
            return run(words[1:])
        if words[:1] == ["chaos"]:
            return chaos(words[1:])
        args = _build_parser().parse_args(words)
        function: Callable[[argparse.Namespace], int] = args.function
        return function(args)
    except ElasticResumeError as error:
        print(f"{PROG}: error: {error}", file=sys.stderr)
        if words[:1] == ["run"]:
            return exit_code_before_start(error)
        # These commands use 1 to report that two files differ, or that a job failed.
        return constants.EXIT_USAGE if words[:1] in (["diff"], ["chaos"]) else constants.EXIT_JOB_ERROR
    except KeyboardInterrupt:
        return constants.EXIT_SIGNAL_BASE + signal.SIGINT


def exit_code_before_start(error: ElasticResumeError) -> int:
    """Return the exit code of a ``run`` that failed before it started anything."""
    if isinstance(error, MachineError):
        return constants.EXIT_MACHINE_ERROR  # the command may succeed on another machine
    return constants.EXIT_USAGE if isinstance(error, ConfigError) else constants.EXIT_JOB_ERROR


def _build_parser() -> argparse.ArgumentParser:
    from elastic_resume.config import Parser  # noqa: PLC0415 - `run` reports a broken set-up without it
    from elastic_resume.report import commands, doctor, status  # noqa: PLC0415

    parser = Parser(
        prog=PROG, description="Wraps a PyTorch DDP job so that it survives the death of workers and nodes."
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    # Its flags are torchrun's; listing them imports torch, so only `run --help` does.
    subparsers.add_parser(
        "run", help="run a training script as torchrun does, and restart it after failures", add_help=False
    )
    # Flags after its own belong to `run`, so it parses its command line itself.
    subparsers.add_parser(
        "chaos", help="run a job on simulated nodes and inject faults by a plan", add_help=False
    )
    for module in (commands, doctor, status):
        module.register(subparsers)
    return parser


def chaos(arguments: Sequence[str]) -> int:
    """Run ``elastic-resume chaos [flags] [flags of run] -- script args…``."""
    from elastic_resume.testing import chaos as chaos_command  # noqa: PLC0415

    return chaos_command.main(arguments)


def run(arguments: Sequence[str]) -> int:
    """Run ``elastic-resume run [flags] script args…``."""
    from elastic_resume import config  # noqa: PLC0415
    from elastic_resume.schedulers import environment  # noqa: PLC0415

    # libtorch reads its log level once, when it is loaded. At the default level the agent would print C++
    # frames for each connection that a dead node breaks. Workers keep the user's level.
    level = os.environ.get("TORCH_CPP_LOG_LEVEL")
    os.environ["TORCH_CPP_LOG_LEVEL"] = level or "ERROR"
    from elastic_resume.agent import torchelastic  # noqa: PLC0415 - imports torch, seconds
    from elastic_resume.agent.main import run_agent  # noqa: PLC0415 - imports torch, seconds

    if level is None:
        del os.environ["TORCH_CPP_LOG_LEVEL"]

    args, given = config.parse_flags_and_file(torchelastic.build_parser(), arguments)
    here = environment.read_context(os.environ)
    settings = config.Settings.for_agent(args, os.environ, here)
    return run_agent(settings, args, given, here)
