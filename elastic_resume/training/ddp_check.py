"""Name, at the first step of a generation, what a DDP module of the script does that no checkpoint keeps."""

from __future__ import annotations

import logging
from collections.abc import Collection
from itertools import chain

from torch.distributed import ProcessGroup
from torch.nn.parallel import DistributedDataParallel

from elastic_resume.errors import UsageError
from elastic_resume.ranks.rank_context import RankContext
from elastic_resume.restore.replica_check import find_first_difference
from elastic_resume.state import state_dict
from elastic_resume.training.rank0_buffers import Rank0Buffers

logger = logging.getLogger(__name__)


class DDPCheck:
    """Looks at the DDP modules of a run once. Every rank has the same ones."""

    def __init__(
        self, context: RankContext, wrappers: Collection[DistributedDataParallel], buffers: Rank0Buffers
    ) -> None:
        """``wrappers`` are looked at with the first step, since a script may make them late."""
        self._context, self._wrappers, self._buffers = context, wrappers, buffers
        self._is_over = context.collectives.size == 1

    def before_buffers(self) -> None:
        """Look, if this is the first step. Call it before all ranks get rank 0's buffers.

        Raises:
            UsageError: on all ranks; the step is within torch's `Join`.

        """
        if self._is_over:
            return
        self._is_over = True
        self._refuse_join()
        self._log_hook_state()
        if any(not wrapper.broadcast_buffers for wrapper in self._wrappers):
            self._log_own_buffers()

    def _refuse_join(self) -> None:
        for wrapper in self._wrappers:
            join = getattr(wrapper, "_join_config", None)
            if join is not None and join.enable and not join.throw_on_early_termination:
                raise UsageError(
                    "run.step() was called within torch's Join, where ranks may take different numbers of "
                    "steps, but all ranks take part in each run.step(). Leave Join out, and read a loader "
                    "with an er.ElasticSampler, which gives all ranks as many batches; or give "
                    "Join(..., throw_on_early_termination=True)."
                )

    def _log_hook_state(self) -> None:
        hooks = chain.from_iterable(getattr(wrapper, "_comm_hooks", ()) for wrapper in self._wrappers)
        for hook, state in hooks:
            if state is None or isinstance(state, ProcessGroup) or self._context.collectives.rank:
                continue
            name = getattr(hook, "__name__", type(hook).__name__)
            logger.warning(
                f"WARNING: DDP's communication hook {name} keeps a {type(state).__name__}, which no "
                "checkpoint holds: each rank has its own. It begins anew after a restart, so the run then "
                "differs from an undisturbed one. A hook without state, such as bf16_compress_hook, is exact."
            )

    def _log_own_buffers(self) -> None:
        difference = find_first_difference(
            self._context, lambda: state_dict.digest_tensors(self._buffers.iter_named())
        )
        if difference is not None and self._context.collectives.rank == 0:
            logger.warning(
                f"WARNING: the model has broadcast_buffers=False, and the buffer {difference.name!r} differs "
                f"between ranks ({difference.ranks_text}). run.step() gives all ranks rank 0's, because a "
                "snapshot holds one rank's, so the run differs from one without elastic_resume. A buffer "
                "with persistent=False stays each rank's own, and begins anew after a restart."
            )
