"""Share the job's token between the nodes of a Slurm job, in a directory that all of them see.

Slurm gives a job no secret of its own. ``ROOT/.elastic_resume/JOB.STEP/token`` (mode 0600) holds one. It is
created whole and never changes, and no error shows it. Files are opened in ways that make an NFS client ask
its server.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from pathlib import Path

from elastic_resume.errors import ConfigError

DIRECTORY_NAME = ".elastic_resume"
TOKEN_FILE_NAME = "token"  # noqa: S105 - the file's name
TOKEN_TIMEOUT_S = 60.0
_POLL_S = 0.25


class SharedDir:
    """The shared directory of one job."""

    def __init__(self, root: Path, job: str) -> None:
        """Create the directory.

        Raises:
            ConfigError: it cannot be created, or belongs to another user.

        """
        self.path = root / DIRECTORY_NAME / job
        if not root.is_dir():  # to make it would be to have one on each node
            raise ConfigError(
                f"the nodes of {job} need a directory that all of them see, and there is no {root} on this "
                "one. Name another with --shared-dir."
            )
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            owner = self.path.stat().st_uid
        except OSError as error:
            raise ConfigError(
                f"the nodes of {job} need a directory that all of them see, and {self.path} cannot be made: "
                f"{error.strerror}. Name another with --shared-dir."
            ) from error
        if owner != os.geteuid():
            raise ConfigError(
                f"{self.path} belongs to another user (uid {owner}), who would know the job's token. Name "
                "another directory with --shared-dir."
            )

    def wait_for_token(self, *, create: bool, timeout_s: float = TOKEN_TIMEOUT_S) -> Path:
        """Return the path of the token's file.

        Args:
            create: create the token if there is none. Several nodes may do so at once; all get the same
                token.
            timeout_s: how long to wait for another node's token.

        Raises:
            ConfigError: it cannot be created, or does not appear in time.

        """
        path = self.path / TOKEN_FILE_NAME
        try:
            if create:
                self._create_token(path)
            limit = time.monotonic() + timeout_s
            while not _exists_on_server(path):
                if time.monotonic() >= limit:
                    raise ConfigError(
                        f"no {path} after {timeout_s:.0f} s: either the first node of the job does not run, "
                        "or this directory is not the same on all nodes. Name one that is with --shared-dir, "
                        "or set ELASTIC_RESUME_TOKEN to a secret before srun."
                    )
                time.sleep(_POLL_S)
        except OSError as error:
            raise ConfigError(
                f"{path} cannot be made: {error.strerror}. Name another directory with --shared-dir, or set "
                "ELASTIC_RESUME_TOKEN to a secret before srun."
            ) from error
        return path

    def _create_token(self, path: Path) -> None:
        """Create the token's file whole under its name: others may read it at any moment."""
        mine = path.with_name(f"{TOKEN_FILE_NAME}.{secrets.token_hex(8)}")
        descriptor = os.open(mine, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            with open(descriptor, "w") as file:
                file.write(secrets.token_hex(32) + "\n")
            with contextlib.suppress(FileExistsError):
                os.link(mine, path)
        finally:
            mine.unlink(missing_ok=True)

    def remove(self) -> None:
        """Remove the directory when the job is done. Other nodes may do so at the same time."""
        with contextlib.suppress(OSError):
            for path in self.path.iterdir():
                path.unlink(missing_ok=True)
            self.path.rmdir()  # and not its parent, in which another job may be making its own


def _exists_on_server(path: Path) -> bool:
    """Check existence by opening the file, which makes an NFS client ask the server."""
    try:
        os.close(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW))
    except FileNotFoundError:
        # A name known to be absent is remembered; a change of the directory makes it forgotten.
        with contextlib.suppress(OSError):
            list(path.parent.iterdir())
        return False
    return True
