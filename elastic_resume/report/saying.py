"""What a command answers, on stdout.

Promise: all of it is written, or an error tells why not; what the terminal's encoding lacks is escaped.
"""

from __future__ import annotations

import os
import sys

from elastic_resume.errors import MachineError


def say(text: str) -> bool:
    """Write to stdout at once, in its own encoding; whether anybody reads it.

    A reader that has gone away (``| head``) is no error.

    Raises:
        MachineError: stdout is closed or takes no more, as a full disk.

    """
    if sys.stdout is None:
        raise MachineError("stdout is closed: there is nowhere to write the answer.")
    encoding = sys.stdout.encoding or "utf-8"
    try:
        sys.stdout.write(text.encode(encoding, "backslashreplace").decode(encoding))
        sys.stdout.flush()
    except BrokenPipeError:
        _be_silent()
        return False
    except OSError as error:
        _be_silent()
        raise MachineError(f"stdout cannot be written: {error.strerror or error}.") from error
    return True


def _be_silent() -> None:
    """Python would complain once more when it closes stdout at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
