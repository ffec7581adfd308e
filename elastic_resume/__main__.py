"""Run ``python -m elastic_resume``, which equals the command ``elastic-resume``."""

import sys
from typing import NoReturn

from elastic_resume import cli


def main() -> NoReturn:
    """Run the command that this process was started for."""
    sys.exit(cli.main(owns_process=True))


if __name__ == "__main__":
    main()
