#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Measures collectives of torch.distributed with gloo, with the loop of collectives_loop.hpp:
gloo_collectives.py RANKS OPERATION DTYPE MILLISECONDS BYTES..."""

import os
import sys
import tempfile
import time


def loop(seconds, written, call):
    """Returns the seconds per call of the slowest rank."""
    import torch
    import torch.distributed as dist

    def run(count, calls):
        dist.barrier()
        begin = time.perf_counter()
        for i in range(count):
            written.fill_(i & 1)
            if calls:
                call()
        took = torch.tensor([(time.perf_counter() - begin) / count], dtype=torch.float64)
        dist.all_reduce(took, op=dist.ReduceOp.MAX)
        return took.item()

    once = run(3, True)
    count = min(20000, max(3, int(seconds / max(once, 1e-7))))
    return run(count, True) - run(count, False)


def rank_main(rank, ranks, store, operation, dtype, seconds, sizes):
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    if ranks <= os.cpu_count():
        os.sched_setaffinity(0, {rank})
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    kind = {"F32": torch.float32, "BF16": torch.bfloat16}[dtype]
    for size in sizes:
        count = size // kind.itemsize
        whole = torch.zeros(count, dtype=kind)
        part = torch.zeros(count // ranks, dtype=kind)
        root = [0]

        def broadcast():
            dist.broadcast(whole, root[0] % ranks)
            root[0] += 1

        calls = {
            "all_reduce": (whole, lambda: dist.all_reduce(whole)),
            "all_gather": (part, lambda: dist.all_gather_into_tensor(whole[: part.numel() * ranks], part)),
            "reduce_scatter": (whole, lambda: dist.reduce_scatter_tensor(part, whole[: part.numel() * ranks])),
            "broadcast": (whole, broadcast),
        }
        took = loop(seconds, *calls[operation])
        if rank == 0:
            print(operation, size, f"{took * 1e6:.3f}", flush=True)
    dist.destroy_process_group()


def main():
    ranks, operation, dtype, milliseconds, *sizes = sys.argv[1:]
    with tempfile.TemporaryDirectory() as folder:
        children = []
        for rank in range(int(ranks)):
            child = os.fork()
            if child == 0:
                rank_main(rank, int(ranks), f"{folder}/store", operation, dtype, float(milliseconds) * 1e-3,
                          [int(size) for size in sizes])
                os._exit(0)
            children.append(child)
        sys.exit(max(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != 0 for child in children))


if __name__ == "__main__":
    main()
