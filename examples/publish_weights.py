# SPDX-License-Identifier: Apache-2.0
"""A trainer of several ranks that publishes versions of its weights. Each rank has some rows of every tensor.

    python examples/make_model.py model
    muster run -n 4 -- python examples/publish_weights.py model weights 5

The readers of the versions are in pull_weights.py.
"""

import sys

import numpy as np

import muster


def rows_of(tensor, rank, size):
    """Returns the rows that a rank trains, and the position of the first one."""
    count = -(-tensor.shape[0] // size)
    return np.array(tensor[rank * count : (rank + 1) * count]), rank * count


def part_of(values, first, shape):
    return muster.Part(values, shape, (first, *(0 for _ in shape[1:])))


def train(values, random):
    """A step that changes one of a hundred values."""
    values[random.random(values.shape) < 0.01] += np.float32(0.01)


def main(model, weights, steps):
    group = muster.world()
    random = np.random.default_rng(group.rank)
    shapes, parts = {}, {}
    for name, tensor in muster.load_safetensors(f"{model}/model.safetensors").items():
        shapes[name] = tensor.shape
        parts[name] = rows_of(np.asarray(tensor), group.rank, group.size)
    with muster.Publisher(weights, base=model, group=group, full_every=4) as publisher:
        for _ in range(steps):
            for values, _ in parts.values():
                train(values, random)
            state = {name: part_of(*part, shapes[name]) for name, part in parts.items() if part[0].size != 0}
            report = publisher.publish(state)
            model_hash = muster.fingerprint(state, group=group)["hash"]
            if group.rank == 0:
                print(f"published version {report.version} ({report.kind}): model {model_hash}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
