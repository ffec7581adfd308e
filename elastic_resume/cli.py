"""The command ``elastic-resume``: one function per subcommand, each importing what it needs when called.

Promise: an error made by the user is one line on stderr, without a traceback. The exit code is 1; of ``diff``
and ``chaos`` always 2; of ``run`` before a start 2 for a `ConfigError` and 74 for a `MachineError`. ``ls``,
``verify``, ``report`` and ``status`` do not import torch.
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
        # As of these themselves: 1 says that two files differ, or that a job ended wrong.
        return constants.EXIT_USAGE if words[:1] in (["diff"], ["chaos"]) else constants.EXIT_JOB_ERROR
    except KeyboardInterrupt:
        return constants.EXIT_SIGNAL_BASE + signal.SIGINT


def exit_code_before_start(error: ElasticResumeError) -> int:
    """Return the exit code of a ``run`` that has started nothing."""
    if isinstance(error, MachineError):
        return constants.EXIT_MACHINE_ERROR  # on another machine it may do
    return constants.EXIT_USAGE if isinstance(error, ConfigError) else constants.EXIT_JOB_ERROR


def _build_parser() -> argparse.ArgumentParser:
    from elastic_resume.config import Parser  # noqa: PLC0415 - `run` of a broken set-up still says why
    from elastic_resume.report import commands, doctor, force_quorum, status  # noqa: PLC0415

    parser = Parser(
        prog=PROG, description="Wraps a PyTorch DDP job so that nothing is lost when a node dies."
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    # Its flags are torchrun's: they are listed by `run --help`, because reading them imports torch.
    subparsers.add_parser("run", help="run a training script, as torchrun does, and survive", add_help=False)
    # What follows its own flags is for `run`, so it is taken apart by itself.
    subparsers.add_parser("chaos", help="run a job on simulated nodes, break them by a plan", add_help=False)
    commands.register_diff(subparsers)
    for part in (commands, doctor, status, force_quorum):
        part.register(subparsers)
    return parser


# ---- chaos ---------------------------------------------------------------------------------------------


def chaos(arguments: Sequence[str]) -> int:
    """``elastic-resume chaos [flags] [flags of run] -- script args…``."""
    from elastic_resume.testing import chaos as breaking  # noqa: PLC0415

    return breaking.main(arguments)


# ---- run -----------------------------------------------------------------------------------------------


def run(arguments: Sequence[str]) -> int:
    """``elastic-resume run [flags] script args…``."""
    from elastic_resume.agent.workers import supervisor  # noqa: PLC0415

    supervisor.record_early_signals()
    from elastic_resume import config  # noqa: PLC0415
    from elastic_resume.schedulers import environment  # noqa: PLC0415

    # libtorch reads its log level once, when it is loaded. At the default the agent would print a stack of
    # C++ frames for every connection that a dead node breaks. Workers keep what the user set.
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
