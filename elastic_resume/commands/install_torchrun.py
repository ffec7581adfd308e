"""Run ``elastic-resume install-torchrun``: write a program ``torchrun`` that is ``elastic-resume run``.

Kubeflow's SDK, LLaMA-Factory and many scripts start ``torchrun`` by name. Processes with the program's
directory first on PATH start it. PyTorch's torchrun stays where it is.
"""

from __future__ import annotations

import argparse
import secrets
import shlex
import sys
from pathlib import Path
from typing import Any

from elastic_resume import constants
from elastic_resume.errors import UsageError
from elastic_resume.report.formatting import write_stdout

MARK = "# Written by `elastic-resume install-torchrun`."
# The second line is a command to sh and a string to Python: a #! line has no room for a long path.
FILE = """#!/bin/sh
'''exec' {python} "$0" "$@"
' '''
{mark}
import os
if __name__ == "__main__":
    if os.environ.get("{variable}") == "0":
        from torch.distributed.run import main
    else:
        from elastic_resume.__main__ import main
    main()
"""


def register(subparsers: argparse._SubParsersAction[Any]) -> None:
    """Add the command's parser."""
    parser = subparsers.add_parser(
        "install-torchrun",
        help="write a program torchrun that is elastic-resume run",
        description="Writes DIR/torchrun, a program that is elastic-resume run. Put DIR first on PATH: then "
        "all that starts torchrun by name starts elastic_resume. PyTorch's torchrun stays where it is.",
    )
    parser.add_argument("directory", type=Path, metavar="DIR", help="where to write it; made if missing")
    parser.set_defaults(function=install_torchrun)


def install_torchrun(args: argparse.Namespace) -> int:
    """Write the file, print what to do with it, and return the exit code."""
    path = args.directory.absolute() / "torchrun"
    python = shlex.quote(sys.executable)
    text = FILE.format(python=python, mark=MARK, variable=constants.ENV_TORCHRUN)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # A dangling link does not exist, and its target would be written.
        if path.is_symlink() or (path.exists() and MARK not in path.read_text(errors="replace")):
            raise UsageError(
                f"{path} was not written by install-torchrun, so it is not replaced. Name another directory."
            )
        # Whole or not at all: several nodes may install it in one shared directory, and start it meanwhile.
        new = path.with_name(f".torchrun-{secrets.token_hex(8)}")
        try:
            new.write_text(text)
            new.chmod(0o755)
            new.replace(path)
        finally:
            new.unlink(missing_ok=True)
    except OSError as error:
        reason = error.strerror or error
        raise UsageError(f"{path} cannot be written: {reason}. Name a directory that is yours.") from error
    write_stdout(
        f"{path} runs elastic_resume with {sys.executable}.\nPut its directory first on PATH:\n"
        f"  export PATH={shlex.quote(str(path.parent))}:$PATH\n"
        f"With {constants.ENV_TORCHRUN}=0 it runs PyTorch's torchrun.\n"
    )
    return constants.EXIT_SUCCESS
