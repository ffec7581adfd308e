"""A store for a process group under torchrun, without what an earlier start of the workers has left in it.

With torch 2.13, torchrun's workers use the store of its rendezvous after a restart too, and without a prefix.
Gloo then finds the addresses of dead processes there, and waits for them. The number of restarts is no
prefix: each agent counts its own. So the ranks agree on a prefix that nobody has used::

    rank r   hello/r = nonce of r                           ack/TOKEN/r = 1
    rank 0                  welcome/NONCE of each r = TOKEN              ... until all have acknowledged

Rank 0 may read the nonce of an earlier start first; it looks again until each rank has acknowledged.
"""

from __future__ import annotations

import os
import secrets
import time
from datetime import timedelta
from typing import Any

from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

_ROOT = "elastic_resume"
_POLL_S = 0.01
TIMEOUT_S = 600.0  # as long as torch waits for a group


def open_store() -> Any:
    """Return a store of this start of the workers, or None if no agent of torchrun keeps one.

    Raises:
        TimeoutError: a rank has not come in time.

    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True" or "MASTER_PORT" not in os.environ:
        return None
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = TCPStore(host, port, size, is_master=False, timeout=timedelta(seconds=TIMEOUT_S))
    token = _agree(store, rank, size)
    return PrefixStore(f"{_ROOT}/{token}", store)


def _agree(store: Any, rank: int, size: int) -> str:
    nonce = secrets.token_hex(16)
    deadline = time.monotonic() + TIMEOUT_S
    if rank:
        store.set(f"{_ROOT}/hello/{rank}", nonce)
        token = bytes(store.get(f"{_ROOT}/welcome/{nonce}")).decode()
        store.set(f"{_ROOT}/ack/{token}/{rank}", "1")
        return token
    missing, greeted = set(range(1, size)), set()
    while missing:
        for other in sorted(missing):
            key = f"{_ROOT}/hello/{other}"
            if store.check([key]) and (hello := bytes(store.get(key)).decode()) not in greeted:
                greeted.add(hello)
                store.set(f"{_ROOT}/welcome/{hello}", nonce)
            if store.check([f"{_ROOT}/ack/{nonce}/{other}"]):
                missing.discard(other)
        if time.monotonic() > deadline:
            names = ", ".join(map(str, sorted(missing)[:8]))
            raise TimeoutError(f"ranks {names} have not come to er.resume() in {TIMEOUT_S:.0f} s.")
        time.sleep(_POLL_S)
    return nonce
