"""What a DDP module does that no checkpoint keeps is named at the first step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

from elastic_resume.errors import UsageError
from elastic_resume.training.ddp_check import DDPCheck
from elastic_resume.training.rank0_buffers import Rank0Buffers
from tests.support.thread_ranks import ThreadCollectives, run_ranks
from tests.unit.restore.test_replica_check import make_context


def make_wrapper(*, buffers: bool = True, hook: Any = None, join: Any = None) -> Any:
    """Return what the check reads of a DistributedDataParallel; ``join``: throw_on_early_termination."""
    config = SimpleNamespace(enable=join is not None, throw_on_early_termination=bool(join))
    return SimpleNamespace(broadcast_buffers=buffers, _comm_hooks=[hook] if hook else [], _join_config=config)


def check(wrapper: Any, *, differs: bool = False, ranks: int = 2) -> None:
    """Take two steps on each rank."""

    def step(collectives: ThreadCollectives) -> None:
        model = nn.BatchNorm1d(2)
        model.get_buffer("running_mean").fill_(collectives.rank if differs else 0)
        context = make_context(collectives, "ab")
        ddp_check = DDPCheck(context, [wrapper], Rank0Buffers(context, {"model": model}))
        ddp_check.before_buffers()
        ddp_check.before_buffers()

    run_ranks(ranks, step)


POWER = (powerSGD_hook, PowerSGDState(None))


@pytest.mark.parametrize(
    ("wrapper", "differs", "text"),
    [
        (make_wrapper(hook=POWER), False, "communication hook powerSGD_hook keeps a PowerSGDState, which no"),
        (make_wrapper(hook=(bf16_compress_hook, None)), False, ""),
        (
            make_wrapper(buffers=False),
            True,
            "broadcast_buffers=False, and the buffer 'model/running_mean' differs",
        ),
        (make_wrapper(buffers=False), False, ""),
        (make_wrapper(), True, ""),
        (make_wrapper(join=True), False, ""),
    ],
)
def test_state_of_each_rank_is_named_once(
    wrapper: Any, differs: bool, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Equal buffers, as of SyncBatchNorm or masks, and hooks without state lose nothing."""
    check(wrapper, differs=differs)
    assert [text in message for message in caplog.messages] == ([True] if text else [])


def test_steps_within_join_are_refused() -> None:
    """Ranks would wait for one that has no batch left. One rank alone waits for nobody."""
    with pytest.raises(UsageError, match="within torch's Join, where ranks may take different numbers"):
        check(make_wrapper(join=False))
    check(make_wrapper(join=False), ranks=1)
