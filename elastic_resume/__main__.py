"""Run ``python -m elastic_resume``, which equals the command ``elastic-resume``, or ``torchrun`` by name."""

import os
import sys
from typing import NoReturn

from elastic_resume import cli, console, constants


def main() -> NoReturn:
    """Run the command that this process was started for."""
    if console.is_torchrun() and os.environ.get(constants.ENV_TORCHRUN) == "0":
        from torch.distributed.run import main as run_torchrun  # noqa: PLC0415 - imports torch, seconds

        sys.exit(run_torchrun())
    sys.exit(cli.main(owns_process=True))


if __name__ == "__main__":
    main()
