"""The replay of DDP's bucket order, in a world of this process alone."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from elastic_resume.state.bucket_order import BucketOrder

pytestmark = pytest.mark.usefixtures("process_group")


def test_frozen_teacher_in_ddp_has_no_order_to_replay() -> None:
    """DINO freezes its teacher after wrapping it, so no gradient of it was ever ready."""

    def start(order: BucketOrder) -> DistributedDataParallel:
        student, teacher = (DistributedDataParallel(nn.Linear(2, 2)) for _ in range(2))
        teacher.requires_grad_(False)
        order.prepare("student", student.module, student)
        order.prepare("teacher", teacher.module, teacher)
        return student

    first, second = BucketOrder(), BucketOrder()
    start(first)(torch.ones(2, 2)).sum().backward()
    first.end_step()
    assert first.get_keys("teacher") == []
    second.load_state_dict(first.state_dict())
    start(second)
    assert second.state_dict() == first.state_dict()
