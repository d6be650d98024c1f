# SPDX-License-Identifier: Apache-2.0
"""Starts the ranks of a Python peer and measures its times, as the C++ benches do for the floor.

Each rank is forked from a process that has imported all modules. The clock of a peer starts when the last rank has left
the barrier. So the figures of peers do not include the wake-up from the barrier; the figures of floor and library do.
"""

import argparse
import json
import mmap
import multiprocessing
import os
import socket
import sys
import time
from multiprocessing import resource_tracker

WORD = 8


def say_skipped(scenario, series, ranks, size, reason):
    print(json.dumps({"scenario": scenario, "series": series, "ranks": ranks, "bytes": size, "skipped": reason}),
          flush=True)


def arguments(description):
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--bytes", default="1048576", help="bytes of one rank, separated by commas")
    parser.add_argument("--scenarios", default="gather,small,many")
    parser.add_argument("--many-tensors", type=int, default=10000)
    parser.add_argument("--seconds", type=float, default=6, help="of each series, after which no repetition begins")
    parser.add_argument("--most", type=int, default=21, help="repetitions of each series")
    parser.add_argument("--workspace", help="a directory for peers that go through files")
    options = parser.parse_args()
    options.bytes = [int(size) for size in options.bytes.split(",")]
    options.scenarios = options.scenarios.split(",")
    return options


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Rank:
    """The barrier, the clock and the torch.distributed group of one rank."""

    def __init__(self, rank, size, barrier, words, options):
        self.rank = rank
        self.size = size
        self.ranks = list(range(size))
        self.barrier = barrier
        self.words = words
        self.options = options

    def measure(self, scenario, series, size, move, read=None):
        """`move(consume)` calls consume(result) when the root has access; `read(result)` checks and reads it.

        Two repetitions warm up. Prints a line on the first rank."""
        access, reads = [], []
        began = time.monotonic()
        repetition = 0
        while True:
            if not self._another(repetition, began):
                break
            self.words[self.rank] = time.monotonic_ns()
            marks = []

            def consume(result):
                marks.append(time.monotonic_ns())
                if self.rank == 0 and read is not None:
                    read(result)
                    marks.append(time.monotonic_ns())

            move(consume)
            self.barrier.wait()
            if self.rank == 0 and repetition >= 2:
                start = max(self.words[rank] for rank in self.ranks)
                access.append((marks[0] - start) * 1e-9)
                if read is not None:
                    reads.append((marks[1] - start) * 1e-9)
            repetition += 1
        if self.rank == 0:
            print(json.dumps({"scenario": scenario, "series": series, "ranks": self.size, "bytes": size,
                              "access": access, "read": reads}), flush=True)

    def _another(self, repetition, began):
        """Returns whether there is another repetition, which the root decides. At least five run, and three count."""
        if self.rank == 0:
            late = time.monotonic() - began > self.options.seconds
            self.words[self.size] = int(repetition < 5 or (repetition < self.options.most + 2 and not late))
        self.barrier.wait()
        another = bool(self.words[self.size])
        self.barrier.wait()  # all ranks have read the value before it is written again
        return another


def _rank_main(rank, size, barrier, words, options, port, body):
    import torch
    import torch.distributed

    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size), MASTER_ADDR="127.0.0.1",
                      MASTER_PORT=str(port))
    torch.distributed.init_process_group("gloo", rank=rank, world_size=size)
    body(Rank(rank, size, barrier, words, options))
    torch.distributed.destroy_process_group()


def run(options, body):
    """Runs `body(rank)` in every rank. Returns the worst exit status."""
    # One resource tracker for all ranks: the tracker of a reader would remove the writers' segments, or warn about
    # them.
    resource_tracker.ensure_running()
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(options.ranks)
    words = memoryview(mmap.mmap(-1, (options.ranks + 1) * WORD)).cast("q")
    port = free_port()
    ranks = [context.Process(target=_rank_main, args=(rank, options.ranks, barrier, words, options, port, body))
             for rank in range(options.ranks)]
    for process in ranks:
        process.start()
    worst = 0
    waiting = list(ranks)
    while waiting:
        for process in list(waiting):
            process.join(0.05)
            if process.exitcode is None:
                continue
            waiting.remove(process)
            if process.exitcode != 0 and worst == 0:
                worst = process.exitcode
                for other in waiting:
                    other.kill()
    return 1 if worst else 0


def source(rank, size):
    """Returns the tensor of a rank. All of its pages are touched, and its values depend on the rank."""
    import torch

    return torch.full((size,), rank + 1, dtype=torch.uint8)


def read_all(size):
    """Returns a function that reads every byte of all tensors and checks their sums."""
    import torch

    def read(tensors):
        for rank, tensor in enumerate(tensors):
            expected = (size // WORD) * int.from_bytes(bytes([rank + 1]) * WORD, "little", signed=True)
            total = int(tensor.view(torch.int64).sum())
            wrapped = (expected + 2**63) % 2**64 - 2**63
            if total != wrapped:
                sys.exit(f"rank {rank}'s bytes did not arrive as they were sent")

    return read
