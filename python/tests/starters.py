# SPDX-License-Identifier: Apache-2.0
"""A rank, and common ways to start ranks from Python: `starters.py WAY FOLDER`, or started by another launcher."""

import os
import pathlib
import sys

SIZE = 3


def gather(folder, group):
    """Gathers a value from all ranks, and writes the result on rank 0 into a file."""
    import muster

    with muster.get_configs_parallel({"rank": group.rank, "bytes": bytearray(1 << 16)}, None, group) as configs:
        if configs:
            told = [[config["rank"], config["bytes"].nbytes] for _, config in configs.present()]
            pathlib.Path(folder, "told").write_text(repr([told, group.kind]))


def with_a_key(rank, folder):
    import muster

    gather(folder, muster.local_group(folder, rank, SIZE, timeout=30))


def with_torch(rank, folder, port):
    """Starts with torch's own store over TCP."""
    import torch.distributed as dist

    import muster

    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=SIZE)
    gather(folder, muster.world())
    dist.destroy_process_group()


def start(way, folder):
    if way == "torch":
        import socket

        import torch.multiprocessing

        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        torch.multiprocessing.spawn(with_torch, (folder, port), nprocs=SIZE)
        return
    import multiprocessing

    context = multiprocessing.get_context(way)
    ranks = [context.Process(target=with_a_key, args=(rank, folder)) for rank in range(SIZE)]
    [rank.start() for rank in ranks]
    [rank.join() for rank in ranks]
    sys.exit(max(abs(rank.exitcode) for rank in ranks))


if __name__ == "__main__":
    if sys.argv[1] == "rank":
        import muster

        gather(sys.argv[2], muster.world())
    else:
        start(*sys.argv[1:])
