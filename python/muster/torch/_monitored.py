# SPDX-License-Identifier: Apache-2.0
"""monitored_barrier: rank 0 reports the missing ranks.

The messages are those of gloo, because programs search for them.
"""

from __future__ import annotations

import time

import torch.distributed as distributed

from .. import _core


_BETWEEN_LOOKS = 0.01


def _has_come(store, key, end):
    while not store.check([key]):
        if _core.clock() >= end:
            return False
        time.sleep(_BETWEEN_LOOKS)
    return True


def monitored_barrier(store, rank, size, number, seconds, wait_all_ranks):
    """Waits for all ranks. It uses only the store, so that a late rank does not abort the group.

    1. Each rank except rank 0 sets its key.
    2. Rank 0 waits for the keys, in the order of the ranks, and sets the verdict.
    3. The other ranks wait for the verdict.
    """
    mine = f"muster/monitored/{number}/"
    end = _core.clock() + seconds
    if rank != 0:
        store.set(f"{mine}{rank}", "")
        if not _has_come(store, f"{mine}verdict", end) or store.get(f"{mine}verdict") != b"all":
            raise distributed.DistBackendError(
                f"Rank {rank} successfully reached monitoredBarrier, but received errors while waiting for send/recv from rank 0. "
                "Please check rank 0 logs for faulty rank."
            )
        return
    missing = []
    if seconds <= 0:
        raise distributed.DistBackendError("Rank 0 timed out in monitoredBarrier after 0 ms.")
    for other in range(1, size):
        if not _has_come(store, f"{mine}{other}", end):
            missing.append(other)
            if not wait_all_ranks:
                break
    store.set(f"{mine}verdict", "missing" if missing else "all")
    if missing:
        names = ", ".join(map(str, missing))
        raise distributed.DistBackendError(
            f"Rank{'s' if len(missing) > 1 or wait_all_ranks else ''} {names} failed to pass monitoredBarrier in {int(seconds * 1000)} ms"
        )
