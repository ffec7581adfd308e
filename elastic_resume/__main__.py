"""Run ``python -m elastic_resume``, which equals the command ``elastic-resume``."""

import sys
from typing import NoReturn


def main() -> NoReturn:
    """Run the command that this process was started for."""
    try:
        from elastic_resume import cli  # noqa: PLC0415 - its compiled file may be damaged too

        sys.exit(cli.main(owns_process=True))
    except Exception as error:
        from elastic_resume import bytecode, constants  # noqa: PLC0415

        if not (damage := bytecode.describe_damaged_bytecode(error)):
            raise
        print(f"elastic-resume: error: {damage}", file=sys.stderr)
        sys.exit(constants.EXIT_MACHINE_ERROR)


if __name__ == "__main__":
    main()
