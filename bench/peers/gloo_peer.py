#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Measures torch.distributed with gloo: gather of tensors, gather_object."""

import sys

import harness


def body(rank):
    import torch
    import torch.distributed

    def gather(tensor, size):
        targets = [torch.ones(size, dtype=torch.uint8) for _ in rank.ranks] if rank.rank == 0 else None

        def move(consume):
            torch.distributed.gather(tensor, targets, dst=0)
            consume(targets)

        return move

    def gather_object(value):
        def move(consume):
            results = [None] * rank.size if rank.rank == 0 else None
            torch.distributed.gather_object(value, results, dst=0)
            consume(results)

        return move

    if "gather" in rank.options.scenarios:
        for size in rank.options.bytes:
            tensor = harness.source(rank.rank, size)
            rank.measure("gather", "gloo-gather", size, gather(tensor, size), harness.read_all(size))
            rank.measure("gather", "gloo-gather-object", size, gather_object(tensor), harness.read_all(size))
    if "small" in rank.options.scenarios:
        config = {"quantization": "fp8", "group_size": 128, "scales": harness.source(rank.rank, 2048)}
        rank.measure("small", "gloo-gather-object", 2048, gather_object(config))
    if "many" in rank.options.scenarios:
        count = rank.options.many_tensors
        config = {f"model.layers.{i}.scale": harness.source(rank.rank, 1024) for i in range(count)}
        rank.measure("many", "gloo-gather-object", count * 1024, gather_object(config))


def main():
    options = harness.arguments(__doc__)
    try:
        import torch.distributed  # noqa: F401
    except ImportError as error:
        harness.say_skipped("gather", "gloo", options.ranks, 0, f"torch is not installed ({error})")
        return 0
    return harness.run(options, body)


if __name__ == "__main__":
    sys.exit(main())
