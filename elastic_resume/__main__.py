"""``python -m elastic_resume``: the same as the command ``elastic-resume``."""

import sys

from elastic_resume.cli import main

if __name__ == "__main__":
    sys.exit(main())
