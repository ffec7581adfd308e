"""Make ``torchrun --rdzv-backend elastic_resume`` the same as ``elastic-resume run``.

This is the entry point ``torchrun.handlers`` of this package. Torch calls `get_handler` whenever a process
imports its rendezvous, so this module imports nothing. `take_over` is called in place of a rendezvous: it
runs the job here with the same flags, and ends the process as the job ends.
"""

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable
    from typing import NoReturn

DEFAULT_MASTER_PORT = 29500  # torchrun's `run` writes it into the arguments if none was given


def get_handler() -> "Callable[[object], NoReturn]":
    """Return what torch calls for the backend ``elastic_resume``."""
    return take_over


def take_over(parameters: object) -> "NoReturn":
    """Run the job that torchrun was started for, and end this process.

    Raises:
        ConfigError: the launcher is none that can hand a job over.

    """
    import sys  # noqa: PLC0415

    from elastic_resume import cli  # noqa: PLC0415

    del parameters  # only a part of torchrun's flags
    sys.exit(cli.main(["run", *list_words(find_arguments(), sys.argv[1:])], owns_process=True))


def find_arguments() -> "argparse.Namespace":
    """Return the arguments of the function ``run`` of torchrun that has called us.

    Torch passes them on to no rendezvous, and a frame is no public interface: `test_torchrun` pins it.

    Raises:
        ConfigError: another launcher has called us.

    """
    import argparse  # noqa: PLC0415
    import sys  # noqa: PLC0415

    from torch.distributed import run as torchrun  # noqa: PLC0415

    from elastic_resume.errors import ConfigError  # noqa: PLC0415

    frame = sys._getframe()  # noqa: SLF001
    while frame.f_back is not None:
        frame = frame.f_back
        args = frame.f_locals.get("args")
        is_torchruns = (frame.f_code.co_filename, frame.f_code.co_name) == (torchrun.__file__, "run")
        # torch.distributed.launch has this one; it gives scripts --local-rank, which `run` does not.
        if is_torchruns and isinstance(args, argparse.Namespace) and getattr(args, "use_env", True):
            return args
    raise ConfigError(
        "the rendezvous backend elastic_resume: only torchrun, python -m torch.distributed.run and "
        "accelerate launch hand a job over, and this is another launcher. Start the script by elastic-resume "
        "run in its place."
    )


def list_words(args: "argparse.Namespace", argv: "list[str]") -> "list[str]":
    """Return the words of ``elastic-resume run`` that equal ``args`` of torchrun.

    These are ``argv``, the words of this command, unless it is accelerate's, which has made ``args`` itself:
    values that equal the defaults of torchrun's parser are left out then.
    """
    import contextlib  # noqa: PLC0415
    import io  # noqa: PLC0415

    from torch.distributed.run import get_args_parser  # noqa: PLC0415

    from elastic_resume import config  # noqa: PLC0415

    parser = get_args_parser()
    with contextlib.suppress(SystemExit), contextlib.redirect_stderr(io.StringIO()):
        parsed = parser.parse_args(argv)
        parsed.master_port = args.master_port if parsed.master_port is None else parsed.master_port
        if parsed == args:
            return argv
    words = []
    for action in dict.fromkeys(config.actions_by_flag(parser).values()):
        value = getattr(args, action.dest, None)
        is_filled_in = action.dest == "master_port" and value == DEFAULT_MASTER_PORT  # a given one is a text
        if value is None or str(value) == str(action.default) or is_filled_in:
            continue
        flag = max(action.option_strings, key=len)
        if action.nargs != 0:
            words.append(f"{flag}={value}")
        elif value:
            words.append(flag)
    return [*words, args.training_script, *args.training_script_args]
