"""Run ``python -m elastic_resume``, which equals the command ``elastic-resume``."""

import sys

from elastic_resume.cli import main

if __name__ == "__main__":
    sys.exit(main())
