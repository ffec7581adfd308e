"""Let `save_state` and `load_state` of Accelerate work in a run whose state `er.resume` restores.

- ``save_state`` may be called on all ranks, or on the main process only. No rank finishes the step before all
  have come to ``run.step()``: `SavedFolders` takes part in the exchange of each step boundary.
- Folders of steps that are repeated are set aside (`lost_steps`). A script that counts its folders, or
  Accelerate's own ``total_limit``, then finds what it would have found without a failure.
- ``load_state`` before the training gives a new job its first values. In a resumed job it is left out: a
  script that looks for its newest folder finds its own.
"""

from __future__ import annotations

import contextlib
import json
import logging
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from elastic_resume import constants
from elastic_resume.checkpoint.atomic_io import translate_os_errors
from elastic_resume.data.elastic_sampler import has_our_batches
from elastic_resume.data.rank_values import RankState
from elastic_resume.errors import UsageError
from elastic_resume.integrations import WAIT_LIMIT_S, lost_steps, set_known
from elastic_resume.training.run import Run

logger = logging.getLogger(__name__)

NEW_JOB = -1  # an order before that of everything the job writes


class SaveIteration:
    """The number of Accelerate's next folder with ``automatic_checkpoint_naming=True``."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._project = accelerator.project_configuration

    def state_dict(self) -> dict[str, int]:
        """Return the number."""
        return {"iteration": self._project.iteration}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Set the number."""
        set_known(self._project, "iteration", state["iteration"])


class SavedFolders(RankState):
    """The folders of ``save_state`` in one run, and what they have to do with its steps."""

    def __init__(self, accelerator: Accelerator, run: Run) -> None:
        """Set aside the folders of steps that are repeated. Called on all ranks, after `er.resume`."""
        super().__init__()
        self._accelerator, self._run = accelerator, run
        self._class = type(accelerator)
        self.is_in_step = False  # gradients were computed since the last step boundary
        self._has_begun = False  # the training
        self._logged: set[str] = set()
        self._busy = contextlib.ExitStack()
        run._script_hooks.add(self._begin)  # noqa: SLF001  not for scripts, as below
        run._generation.rank_values.append(self)  # noqa: SLF001
        self._context = run._generation.context  # noqa: SLF001
        self._known_file = self._context.node_dir / constants.SAVED_FOLDERS_FILE
        gathered = self._context.collectives.gather(self._read_known())
        self._bases = {Path(base) for bases in gathered for base in bases}
        self._set_aside()

    # ---- at each step boundary -------------------------------------------------------------------------

    def read_own(self) -> None:
        """Let trackers write what they have. Nothing is exchanged: the ranks wait for each other."""
        for tracker in self._accelerator.trackers:
            if callable(flush := getattr(getattr(tracker, "writer", None), "flush", None)):
                flush()  # of TensorBoard, on the main process: a kill loses what waits in memory

    def load_rows(self, rows: list[Any]) -> None:
        """Take nothing."""

    def set_rows(self, rows: list[Any]) -> None:  # noqa: ARG002
        """Note that all ranks have come to the boundary."""
        self.is_in_step = False
        self._busy.close()

    def _begin(self) -> None:
        self._has_begun = True

    # ---- replaced methods of the accelerator -----------------------------------------------------------

    def save_state(self, output_dir: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Save. The ranks wait for each other at the end of the step."""
        place = self._find_place(output_dir)
        if place is not None and self._context.is_local_leader:
            self._note(*place)
        with contextlib.ExitStack() as busy:
            busy.enter_context(self._run.busy("accelerator.save_state", WAIT_LIMIT_S))
            saved = self._class.save_state(self._accelerator, output_dir, *args, **kwargs)
            if place is not None and self._context.is_local_leader:
                lost_steps.drop_replaced(*place)
            if not self._is_over():
                self._busy.push(busy.pop_all())
        return saved

    def load_state(self, input_dir: Any = None, *args: Any, **kwargs: Any) -> None:
        """Load a folder before the training of a new job, or after the training."""
        if self._has_begun and not self._is_over():
            raise UsageError(
                "accelerator.load_state() in the training would put an older state in the place of the one "
                "that is being trained, and a restart would not know of it. Call it before run.epochs(), to "
                "start from a folder, or after the loop."
            )
        if not self._has_begun and self._run.plan.kind == "resumed":
            self._log_once(
                f"accelerator.load_state({input_dir or ''}) is left out: the newer state of step "
                f"{self._step} of this job is restored already. Count from run.position.step, and not "
                "from the name of that folder"
            )
            return
        self._class.load_state(self._accelerator, input_dir, *args, **kwargs)
        if not self._has_begun:
            self._log_once(
                f"the training starts at step 0 with the values of accelerator.load_state({input_dir or ''})"
            )

    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> Any:
        """Return the loader of the run, which continues at its next batch; skip batches of another one."""
        if not has_our_batches(dataloader):
            return self._class.skip_first_batches(self._accelerator, dataloader, num_batches)
        if num_batches and self._run.plan.kind != "resumed":
            raise UsageError(
                f"accelerator.skip_first_batches() was given the loader of the run and {num_batches} batches "
                "to skip, and the training starts at step 0 of an order of its own. To start from a folder "
                "of another job, load its values only; a restart finds the next batch by itself."
            )
        return dataloader

    # ---- internals -------------------------------------------------------------------------------------

    @property
    def _step(self) -> int:
        return self._run._generation.progress.position.step  # noqa: SLF001  a script that reads it is noted

    def _is_over(self) -> bool:
        """Return whether the loop over epochs has ended."""
        run = self._run
        is_loop = self._has_begun and run._generation.first_steps.is_loop_over_epochs  # noqa: SLF001
        return run._open is None or (is_loop and not run._generation.unfinished_loop)  # noqa: SLF001

    def _log_once(self, text: str) -> None:
        if self._run.rank == 0 and text not in self._logged:
            self._logged.add(text)
            logger.info(text)

    def _find_place(self, output_dir: Any) -> tuple[Path, str] | None:
        """Return the directory with the journal, and the folder's name in it."""
        project = self._accelerator.project_configuration
        if project.automatic_checkpoint_naming:  # Accelerate expects nothing else beside its folders
            return Path(project.project_dir).absolute(), f"checkpoints/checkpoint_{project.iteration}"
        if output_dir is None:
            return None
        folder = Path(output_dir).absolute()
        return folder.parent, folder.name

    def _note(self, base: Path, name: str) -> None:
        """Note the step in which a folder is written first."""
        if base not in self._bases:
            self._bases.add(base)
            with translate_os_errors("write", self._known_file):
                self._known_file.write_text(json.dumps(sorted(map(str, self._bases))))
            lost_steps.forget(base)
        progress = self._run._generation.progress  # noqa: SLF001
        after = 2 if self.is_in_step else progress.has_no_batch_left
        lost_steps.note(base, name, 2 * self._step + after)

    def _set_aside(self) -> None:
        position = self._run._generation.progress.position  # noqa: SLF001
        order = 2 * position.step + (position.step_in_epoch == 0)
        if self._context.is_local_leader:
            for base in self._bases:
                lost_steps.set_newer_aside(base, order if self._run.plan.kind == "resumed" else NEW_JOB)
        self._context.collectives.gather(None)  # no rank lists its folders earlier

    def _read_known(self) -> list[str]:
        """Return the directories in which this node's ranks have written, in this run."""
        try:
            known = json.loads(self._known_file.read_text())
        except (OSError, ValueError):
            return []
        return [base for base in known if isinstance(base, str)] if isinstance(known, list) else []
