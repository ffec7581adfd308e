"""The command ``elastic-resume``, and ``python -m elastic_resume``: the same."""

import sys


def main() -> int:
    """Run the command line; in a container's first process no signal is lost from here on."""
    if sys.argv[1:2] == ["run"]:
        from elastic_resume.agent import first  # noqa: PLC0415

        first.hold_if_first()
    from elastic_resume import cli  # noqa: PLC0415 - takes longer than a signal may be lost for

    return cli.main()


if __name__ == "__main__":
    sys.exit(main())
