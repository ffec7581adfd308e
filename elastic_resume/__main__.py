"""The command ``elastic-resume``, and ``python -m elastic_resume``: the same."""

import sys

from elastic_resume.cli import main

if __name__ == "__main__":
    sys.exit(main())
