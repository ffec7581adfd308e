"""Run the command ``elastic-resume``. Each subcommand is a function that imports its modules when called.

A user's error is one line on stderr without a traceback. The exit code is then 1. It is 2 after a
`ConfigError`, such as an unknown command or flag, and always for ``diff``, ``chaos`` and ``rehearse``. A
``run`` that has not started exits with 74 after a `MachineError`.
``ls``, ``verify``, ``report`` and ``status`` do not import torch.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from elastic_resume import __version__, constants, machine
from elastic_resume.errors import ConfigError, ElasticResumeError, MachineError

if TYPE_CHECKING:
    from elastic_resume.commands.job_file import Row
    from elastic_resume.config import Parser, Settings
    from elastic_resume.config_file import ConfigFile
    from elastic_resume.schedulers.environment import SchedulerContext

PROG = "elastic-resume"


def main(argv: Sequence[str] | None = None, *, owns_process: bool = False) -> int:
    """Run one subcommand and return its exit code.

    With ``owns_process``, ``run`` ends this process, and forks workers that end like it.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        if words[:1] == ["run"]:
            exit_code = run(words[1:], owns_process=owns_process)
            if owns_process:
                from elastic_resume.agent.workers import run_main  # noqa: PLC0415 - only for `run`

                run_main.exit_without_freeing(exit_code)
            return exit_code
        if words[:1] == ["chaos"]:
            return chaos(words[1:])
        if words[:1] == ["rehearse"]:
            return rehearse(words[1:])
        if words[:1] == ["init"]:
            return init(words[1:])
        args = _build_parser({}).parse_args(words)
        args.read_config = _read_config
        function: Callable[[argparse.Namespace], int] = args.function
        return function(args)
    except ElasticResumeError as error:
        print(f"{PROG}: error: {error}", file=sys.stderr)
        if words[:1] in (["diff"], ["chaos"], ["rehearse"]):
            return constants.EXIT_USAGE  # they use 1 to report that two files differ, or that a job failed
        if isinstance(error, MachineError) and words[:1] != ["run"]:
            return constants.EXIT_JOB_ERROR
        return exit_code_before_start(error)
    except (RuntimeError, BlockingIOError) as error:
        # An error of a fork has no characters_written; one of a write to a full pipe has.
        is_of_fork = isinstance(error, BlockingIOError) and not hasattr(error, "characters_written")
        if not is_of_fork and "can't start new thread" not in str(error):
            raise
        print(
            f"{PROG}: error: the kernel refuses more processes and threads (ulimit -u, pids.max): "
            f"{machine.PROCESS_LIMIT_REMEDY}.",
            file=sys.stderr,
        )
        return constants.EXIT_MACHINE_ERROR
    except KeyboardInterrupt:
        return constants.EXIT_SIGNAL_BASE + signal.SIGINT


def exit_code_before_start(error: ElasticResumeError) -> int:
    """Return the exit code of a ``run`` that failed before it started anything."""
    if isinstance(error, MachineError):
        return constants.EXIT_MACHINE_ERROR  # the command may succeed on another machine
    return constants.EXIT_USAGE if isinstance(error, ConfigError) else constants.EXIT_JOB_ERROR


def build_parser() -> argparse.ArgumentParser:
    """Return a parser of all commands with all their flags, for documentation. It imports torch."""
    from elastic_resume.agent import torchelastic  # noqa: PLC0415 - imports torch, seconds
    from elastic_resume.testing import chaos as chaos_command  # noqa: PLC0415
    from elastic_resume.testing import rehearsal  # noqa: PLC0415

    return _build_parser(
        {
            "run": torchelastic.build_parser(),
            "rehearse": rehearsal.build_parser(),
            "chaos": chaos_command.build_parser(),
            "init": _build_init_parser(),
        }
    )


def _build_parser(parents: Mapping[str, Parser]) -> argparse.ArgumentParser:
    """Build the parser. `main` parses the commands of ``parents`` elsewhere, so it needs none for them."""
    from elastic_resume.commands import doctor, job_status, run_directory  # noqa: PLC0415
    from elastic_resume.config import Parser  # noqa: PLC0415 - `run` reports a broken set-up without it

    parser = Parser(
        prog=PROG,
        description="Wraps a PyTorch DDP or FSDP2 job so that it survives the death of workers and nodes.",
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name, text in (
        ("run", "run a training script as torchrun does, and restart it after failures"),
        ("rehearse", "interrupt a script on purpose, and compare what it then computes"),
        ("chaos", "run a job on simulated nodes and inject faults by a plan"),
        ("init", "write the flags of a job into a file for run --config"),
    ):
        parent = parents.get(name)
        subparsers.add_parser(
            name,
            help=text,
            add_help=False,
            parents=[parent] if parent else [],
            usage=parent.usage if parent else None,
            description=parent.description if parent else None,
            epilog=parent.epilog if parent else None,
        )
    for module in (run_directory, doctor, job_status):
        module.register(subparsers)
    return parser


def chaos(arguments: Sequence[str]) -> int:
    """Run ``elastic-resume chaos [flags] [flags of run] -- script args…``."""
    from elastic_resume.testing import chaos as chaos_command  # noqa: PLC0415

    return chaos_command.main(arguments)


def rehearse(arguments: Sequence[str]) -> int:
    """Run ``elastic-resume rehearse [flags of run] script args…``."""
    from elastic_resume.testing import rehearsal  # noqa: PLC0415

    return rehearsal.main(arguments)


def init(arguments: Sequence[str]) -> int:
    """Run ``elastic-resume init [--output FILE] [--overwrite] [flags of run] [script args…]``."""
    from elastic_resume.checkpoint import node_dir  # noqa: PLC0415
    from elastic_resume.commands import job_file  # noqa: PLC0415
    from elastic_resume.report.formatting import write_stdout  # noqa: PLC0415

    path = job_file.write_file(_build_init_parser(), arguments)
    write_stdout(f"{path} is written; start the job with {PROG} run --config {path}\n")
    if node_dir.mask_secrets(arguments) != list(arguments):
        write_stdout(
            f"A word of the script in {path} looks like a secret, and is there in clear: let the script read "
            "a variable or a file, or keep the file out of git.\n"
        )
    return constants.EXIT_SUCCESS


def _build_init_parser() -> Parser:
    from elastic_resume.agent import torchelastic  # noqa: PLC0415 - imports torch, seconds
    from elastic_resume.commands import job_file  # noqa: PLC0415

    parser = torchelastic.build_parser()
    parser.prog, parser.description = f"{PROG} init", "Write flags of `elastic-resume run` into a file."
    job_file.add_flags(parser)
    return parser


def _read_config(path: str) -> list[Row]:
    """Return the settings of a start with a file; check what `run` checks before it starts anything.

    Raises:
        ConfigError: such a start would fail.

    """
    from elastic_resume.agent import options, torchelastic  # noqa: PLC0415 - imports torch, seconds
    from elastic_resume.config import parse_flags  # noqa: PLC0415
    from elastic_resume.config_file import FLAG  # noqa: PLC0415
    from elastic_resume.schedulers import environment  # noqa: PLC0415

    parser = torchelastic.build_parser()
    args, given = parse_flags(parser, [FLAG, path])
    options.check_torchrun_values(args)
    options.check_script(args)
    torchelastic.count_workers(args)
    return _list_settings(parser, args, given, environment.read_context(os.environ))[1]


def _list_settings(
    parser: Parser, args: argparse.Namespace, given: set[str], here: SchedulerContext
) -> tuple[Settings, list[Row]]:
    """Return the settings, and each with its source, as the scheduler fills them in."""
    from elastic_resume import config  # noqa: PLC0415
    from elastic_resume.agent import options, torchelastic  # noqa: PLC0415 - imports torch, seconds
    from elastic_resume.commands import job_file  # noqa: PLC0415

    settings = config.Settings.for_agent(args, os.environ, here)
    filled = argparse.Namespace(**vars(args))
    given = torchelastic.list_given_flags(args, given, here)
    options.fill_from_scheduler(filled, given, here, share_token=False)
    changed = {name: str(value) for name, value in vars(filled).items() if value != getattr(args, name)}
    return settings, job_file.list_settings(parser, args, settings, {**changed, "scheduler": here.scheduler})


def run(arguments: Sequence[str], *, owns_process: bool = False) -> int:
    """Run ``elastic-resume run [flags] script args…``; see `main`.

    A worker that was forked here leaves by SystemExit, at the end of its script.
    """
    from elastic_resume import config, config_file  # noqa: PLC0415
    from elastic_resume.agent import options, run_help  # noqa: PLC0415
    from elastic_resume.commands import job_file  # noqa: PLC0415
    from elastic_resume.report.formatting import write_stdout  # noqa: PLC0415
    from elastic_resume.schedulers import environment  # noqa: PLC0415

    if arguments[:1] in (["-h"], ["--help"]):  # without the import of torch
        write_stdout(run_help.format_help())
        return constants.EXIT_SUCCESS
    if arguments and arguments[0].replace("_", "-").startswith("--print-completion"):
        raise ConfigError("--print-completion writes completions for the name torchrun: call torchrun.")

    is_nested = config.forget_outer_agent(os.environ) or constants.ENV_OUTER_JOB in os.environ
    path = config_file.find_path(arguments, os.environ, config.SWITCHES)
    file = config_file.read_file(path, os.environ) if path else config_file.ConfigFile()
    file.set_environment(os.environ)  # before the import of torch, which reads some
    with _omp_threads_of_workers(arguments, file):
        gc.disable()  # imports create no garbage, and take a fifth less time without the collector
        from elastic_resume.agent import torchelastic  # noqa: PLC0415 - imports torch, seconds
        from elastic_resume.agent.main import run_agent  # noqa: PLC0415 - imports torch, seconds
        from elastic_resume.agent.workers import forkserver_manager  # noqa: PLC0415

        can_fork = owns_process and not _has_interpreter_flags()
        fork_server = forkserver_manager.prefork() if can_fork else None
        gc.enable()
    try:
        parser = torchelastic.build_parser()
        args, given = config.parse_flags(parser, arguments, file=file)
        options.check_torchrun_values(args)
        # The scheduler's nodes belong to the job around this one.
        here = environment.read_context({} if is_nested else os.environ)
        settings, rows = _list_settings(parser, args, given, here)
        if args.show_config:
            write_stdout(job_file.format_settings(rows))
            return constants.EXIT_SUCCESS
        args.settings_text, args.given_settings = job_file.format_settings(rows), job_file.list_given(rows)
        return run_agent(settings, args, given, here, fork_server)
    finally:
        if fork_server is not None:
            fork_server.close()


def _has_interpreter_flags() -> bool:
    """Return whether Python was started with flags such as -P or -O, which a worker must not inherit."""
    flags = [word for word in sys.orig_argv[1:2] if word.startswith("-")]
    return bool(set(flags) - {"-u", "-m"})


@contextlib.contextmanager
def _omp_threads_of_workers(arguments: Sequence[str], file: ConfigFile) -> Iterator[None]:
    """Set OMP_NUM_THREADS within the context as torchrun sets it for workers: to 1 if there are several.

    OpenMP reads it once, when torch is imported, and workers are forked from this process. torchrun's parser
    is in torch, so this one reads a single flag. Where the script's own words say otherwise, the workers'
    fork server is a new process.
    """
    from elastic_resume.config import Parser  # noqa: PLC0415

    parser = Parser(prog=f"{PROG} run", add_help=False, allow_abbrev=False)
    in_file = file.settings.get("nproc-per-node")
    default = os.environ.get("PET_NPROC_PER_NODE", in_file.text if in_file else "1")
    parser.add_argument("--nproc-per-node", "--nproc_per_node", nargs="?", const="1", default=default)
    workers = parser.parse_known_args(arguments)[0].nproc_per_node
    agent = os.getpid()
    if "OMP_NUM_THREADS" in os.environ or workers == "1":
        yield
        return
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        yield
    finally:
        if os.getpid() == agent:  # a worker passes here too, at the end of its script
            del os.environ["OMP_NUM_THREADS"]
