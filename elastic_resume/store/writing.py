"""Writing one checkpoint, and the commit.

As bbolt does it: write the data under a temporary name, fsync; write the manifest with the digest of every
block, fsync; fsync the temporary directory; rename; fsync the parent. The rename is the commit.

Promise: after a crash at any point, a directory under its final name is whole, and the older ones are
untouched.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import replace
from pathlib import Path
from types import TracebackType

import xxhash

from elastic_resume import contract, failpoints
from elastic_resume.errors import CheckpointError, ForeignError, MachineError, NewerFormatError
from elastic_resume.store.checkpoint import deep_check, name_of
from elastic_resume.store.durable import DISK, Disk, machine, temporary_name
from elastic_resume.store.manifest import BLOCK_BYTES, Manifest
from elastic_resume.store.quarantine import discard, quarantine


class Writer:
    """Writes one checkpoint. As a context manager it aborts what was not committed.

    Raises MachineError when the disk refuses; nothing is left behind then, and older copies are whole.
    """

    def __init__(
        self,
        node_dir: Path,
        generation: int,
        step: int,
        disk: Disk = DISK,
        *,
        block_bytes: int = BLOCK_BYTES,
    ) -> None:
        """Open a temporary directory under ``node_dir``."""
        self._disk = disk
        self._node_dir = node_dir
        self._order = (generation, step)
        self._final = node_dir / name_of(generation, step)
        self._temporary = node_dir / temporary_name(self._final.name)
        self._block_bytes = block_bytes
        self._blocks: list[str] = []
        self._digest = xxhash.xxh3_128()
        self._bytes = 0
        self._descriptor = -1
        self._superseded: Path | None = None  # by this one, once it is durable
        self._open = True
        try:
            self._hit("commit.before-data")
            disk.mkdir(self._temporary)
            self._descriptor = disk.create(self._temporary / contract.STATE_FILE)
        except BaseException:
            self.abort()
            raise

    def __enter__(self) -> Writer:  # noqa: PYI034  typing.Self needs Python 3.11
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.abort()

    def write(self, block: memoryview | bytes) -> None:
        """Append bytes of the image, any number of them."""
        view = memoryview(block).cast("B")
        while view:
            room = self._block_bytes - self._bytes % self._block_bytes
            piece, view = view[:room], view[room:]
            self._digest.update(piece)
            self._disk.write(self._descriptor, piece, self._temporary / contract.STATE_FILE)
            self._bytes += len(piece)
            if len(piece) == room:
                self._end_block()

    def commit(self, manifest: Manifest) -> Path:
        """Make the checkpoint exist and return its directory.

        ``manifest`` gets its blocks and sizes from here. When a whole copy with the same content is there
        already, that one stays. What is damaged or cannot be read, or has other content, makes room by
        going to quarantine (and away, where it is whole and not as far in its epoch as this one); what is
        not this job's does not, and the commit fails with a MachineError.
        """
        if manifest.order != self._order:
            raise ValueError(f"manifest of {manifest.order} for a checkpoint of {self._order}")
        if self._bytes % self._block_bytes:
            self._end_block()
        manifest = replace(
            manifest, file_bytes=self._bytes, block_bytes=self._block_bytes, blocks=tuple(self._blocks)
        )
        self._finish_data()
        self._put_manifest(manifest)
        if self._is_there_already(manifest):
            self.abort()
        else:
            self._publish()
        return self._final

    def abort(self) -> None:
        """Remove what was written, unless it was committed. Never raises: the first error is the story."""
        if not self._open:
            return
        self._open = False
        with contextlib.suppress(MachineError):
            self._close_data()
        with contextlib.suppress(MachineError):
            if self._temporary.exists():
                self._disk.remove_tree(self._temporary)

    def _finish_data(self) -> None:
        self._hit("commit.after-data")
        self._disk.sync_file(self._descriptor, self._temporary / contract.STATE_FILE)
        self._close_data()

    def _put_manifest(self, manifest: Manifest) -> None:
        self._hit("commit.before-manifest")
        self._disk.write_file(self._temporary / contract.MANIFEST_FILE, manifest.to_bytes())
        self._disk.sync_dir(self._temporary)

    def _publish(self) -> None:
        self._hit("commit.before-rename")
        self._disk.rename(self._temporary, self._final)
        self._open = False
        self._hit("commit.after-rename")
        self._disk.sync_dir(self._node_dir)
        if self._superseded is not None:
            with contextlib.suppress(MachineError):  # then it stays for a person to look at: no harm
                discard(self._superseded, self._disk)

    def _is_there_already(self, manifest: Manifest) -> bool:
        """Whether the final name holds this very content; what else stands there goes to quarantine."""
        if not os.path.lexists(self._final):
            return False
        try:
            present = deep_check(self._final, manifest.run_id)
        except (ForeignError, NewerFormatError) as error:
            raise MachineError(f"cannot commit: the name is taken. {error} Move it elsewhere.") from error
        except CheckpointError as error:
            quarantine(self._node_dir, self._final, str(error), self._disk)
            return False
        if present.content == manifest.content and present.position == manifest.position:
            self._disk.sync_dir(self._node_dir)  # whoever renamed it may have died before this
            return True
        # The last step of an epoch has two positions: when it has ended, and after what the script does then.
        is_later = manifest.place > present.place
        reason = "written again at the end of its epoch" if is_later else "written again with other content"
        aside = quarantine(self._node_dir, self._final, reason, self._disk)
        self._superseded = aside if is_later else None
        return False

    def _end_block(self) -> None:
        self._blocks.append(self._digest.hexdigest())
        self._digest.reset()

    def _close_data(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            self._disk.close(descriptor, self._temporary / contract.STATE_FILE)

    def _hit(self, point: str) -> None:
        with machine("commit", self._final):
            failpoints.hit(point)
