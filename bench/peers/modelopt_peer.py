#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Measures get_tensors_parallel and get_configs_parallel of ModelOpt, the latter with shared memory and with files.

Its shared memory has fixed names (rank_1, rank_1_config), so only one run per host is possible at a time.
"""

import os
import shutil
import sys
import tempfile
import warnings

import harness


def body(rank):
    from modelopt.torch.export.distribute import get_configs_parallel, get_tensors_parallel
    from modelopt.torch.export.model_config import LayernormConfig, LinearConfig

    def tensors(tensor):
        def move(consume):
            with get_tensors_parallel(tensor, rank.ranks) as result:
                consume(result)

        return move

    def configs(config, workspace=None):
        def move(consume):
            with get_configs_parallel(config, rank.ranks, None, workspace_path=workspace) as result:
                consume(result)

        return move

    def read_weights(size):
        read = harness.read_all(size)
        return lambda result: read([config.weight for config in result])

    def both_ways(scenario, config, size, read=None):
        rank.measure(scenario, "modelopt-configs-shm", size, configs(config), read)
        rank.measure(scenario, "modelopt-configs-files", size, configs(config, rank.options.workspace), read)

    if "gather" in rank.options.scenarios:
        for size in rank.options.bytes:
            tensor = harness.source(rank.rank, size)
            rank.measure("gather", "modelopt-tensors", size, tensors(tensor), harness.read_all(size))
            both_ways("gather", LinearConfig(weight=tensor), size, read_weights(size))
    if "small" in rank.options.scenarios:
        part = [harness.source(rank.rank, 512) for _ in range(4)]
        both_ways("small", LinearConfig(quantization="fp8", weight=part[0], bias=part[1],
                                        activation_scaling_factor=part[2], weights_scaling_factor=part[3]), 2048)
    if "many" in rank.options.scenarios:
        # The shared-memory version fails with 40 or more tensors: the gaps that it leaves between them confuse its own
        # reader.
        count = rank.options.many_tensors
        weights = {f"model.layers.{i}.scale": harness.source(rank.rank, 1024) for i in range(count)}
        rank.measure("many", "modelopt-configs-files", count * 1024,
                     configs(LayernormConfig(weight=weights), rank.options.workspace))


def leftovers():
    try:
        return [name for name in os.listdir("/dev/shm") if name.startswith("rank_")]
    except OSError:
        return []


def main():
    options = harness.arguments(__doc__)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import modelopt.torch.export.distribute  # noqa: F401
    except ImportError as error:
        harness.say_skipped("gather", "modelopt", options.ranks, 0, f"nvidia-modelopt does not work here ({error})")
        return 0
    if leftovers():
        names = ", ".join(leftovers())
        harness.say_skipped("gather", "modelopt", options.ranks, 0,
                            f"/dev/shm holds {names}, names that it uses itself: remove them when no job owns them")
        return 0
    made = None if options.workspace else tempfile.mkdtemp(prefix="muster-bench-")
    options.workspace = options.workspace or made
    try:
        return harness.run(options, body)
    finally:
        if made:
            shutil.rmtree(made, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
