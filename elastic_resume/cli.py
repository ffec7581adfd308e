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
from typing import TYPE_CHECKING

from elastic_resume import __version__, constants
from elastic_resume.errors import ConfigError, ElasticResumeError, MachineError

if TYPE_CHECKING:
    from elastic_resume.config import Parser

PROG = "elastic-resume"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand and return its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        if words[:1] == ["run"]:
            return run(words[1:])
        if words[:1] == ["chaos"]:
            return chaos(words[1:])
        args = _parse(words)
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


def _parse(words: Sequence[str]) -> argparse.Namespace:
    from elastic_resume.report import doctor  # noqa: PLC0415 - `run` reports a broken set-up without it

    parser = _build_parser(run_parents=[], chaos_parents=[])
    args, unknown = parser.parse_known_args(words)
    if unknown and args.function is doctor.doctor:
        doctor.refuse_arguments(unknown)
    return parser.parse_args(words) if unknown else args


def exit_code_before_start(error: ElasticResumeError) -> int:
    """Return the exit code of a ``run`` that failed before it started anything."""
    if isinstance(error, MachineError):
        return constants.EXIT_MACHINE_ERROR  # the command may succeed on another machine
    return constants.EXIT_USAGE if isinstance(error, ConfigError) else constants.EXIT_JOB_ERROR


def build_parser() -> argparse.ArgumentParser:
    """Return a parser of all commands with all their flags, for documentation. It imports torch."""
    from elastic_resume.agent import torchelastic  # noqa: PLC0415 - imports torch, seconds
    from elastic_resume.testing import chaos as chaos_command  # noqa: PLC0415

    return _build_parser(
        run_parents=[torchelastic.build_parser()], chaos_parents=[chaos_command.build_parser()]
    )


def _build_parser(
    *, run_parents: Sequence[Parser], chaos_parents: Sequence[Parser]
) -> argparse.ArgumentParser:
    """Build the parser. `main` parses ``run`` and ``chaos`` elsewhere, so it needs no parents for them."""
    from elastic_resume.config import Parser  # noqa: PLC0415 - `run` reports a broken set-up without it
    from elastic_resume.report import commands, doctor, status  # noqa: PLC0415

    parser = Parser(
        prog=PROG, description="Wraps a PyTorch DDP job so that it survives the death of workers and nodes."
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name, text, parents in (
        ("run", "run a training script as torchrun does, and restart it after failures", run_parents),
        ("chaos", "run a job on simulated nodes and inject faults by a plan", chaos_parents),
    ):
        subparsers.add_parser(
            name,
            help=text,
            add_help=False,
            parents=parents,
            usage=parents[0].usage if parents else None,
            description=parents[0].description if parents else None,
            epilog=parents[0].epilog if parents else None,
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
    from elastic_resume.agent import run_help  # noqa: PLC0415
    from elastic_resume.schedulers import environment  # noqa: PLC0415

    if arguments[:1] in (["-h"], ["--help"]):  # without the import of torch
        print(run_help.format_help(), end="")
        return constants.EXIT_SUCCESS

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
