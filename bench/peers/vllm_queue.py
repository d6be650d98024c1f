#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Measures the MessageQueue of vLLM with one writer and readers on all other ranks, messages back to back:
vllm_queue.py RANKS queue U8 MILLISECONDS BYTES..."""

import multiprocessing
import os
import sys
import time

from vllm.distributed.device_communicators.shm_broadcast import MessageQueue


def run(queue, rank, messages, meet):
    """Returns the seconds per message on this rank."""
    meet.wait()
    begin = time.perf_counter()
    for message in messages:
        queue.enqueue(message) if rank == 0 else queue.dequeue()
    return (time.perf_counter() - begin) / len(messages)


def rank_main(rank, ranks, handles, meet, slowest, seconds, sizes):
    if ranks <= os.cpu_count():
        os.sched_setaffinity(0, {rank})
    if rank == 0:
        queue = MessageQueue(ranks - 1, ranks - 1)
        for _ in range(ranks - 1):
            handles.put(queue.export_handle())
    else:
        queue = MessageQueue.create_from_handle(handles.get(), rank - 1)
    queue.wait_until_ready()
    for size in sizes:
        once = run(queue, rank, [bytes(size)] * 50, meet)
        with slowest.get_lock():
            slowest.value = max(slowest.value, once)
        meet.wait()
        count = min(20000, max(50, int(seconds / slowest.value)))
        meet.wait()
        slowest.value = 0
        took = run(queue, rank, [bytes(size)] * count, meet)
        with slowest.get_lock():
            slowest.value = max(slowest.value, took)
        meet.wait()
        if rank == 0:
            print("queue", size, f"{slowest.value * 1e6:.3f}", flush=True)
        meet.wait()
        slowest.value = 0
    meet.wait()


def main():
    ranks, operation, _, milliseconds, *sizes = sys.argv[1:]
    if operation != "queue":
        return
    ranks = int(ranks)
    fork = multiprocessing.get_context("fork")
    handles, meet, slowest = fork.Queue(), fork.Barrier(ranks), fork.Value("d", 0.0)
    children = [
        fork.Process(target=rank_main, args=(rank, ranks, handles, meet, slowest, float(milliseconds) * 1e-3,
                                             [int(size) for size in sizes]))
        for rank in range(ranks)
    ]
    for child in children:
        child.start()
    for child in children:
        child.join()
    sys.exit(max(child.exitcode != 0 for child in children))


if __name__ == "__main__":
    main()
