# SPDX-License-Identifier: Apache-2.0
"""The parts that values of a state dict describe. The objects imitate those of frameworks."""

import itertools
import math
import random
import types

import numpy as np
import pytest

import muster
from muster._parts import parts_of


class Placement:
    def __init__(self, kind, dim=None, split_factor=None):
        self.kind = kind
        if dim is not None:
            self.dim = dim
        if split_factor is not None:
            self.split_factor = split_factor

    def is_shard(self, dim=None):
        return self.kind == "S" and dim in (None, self.dim)

    def is_replicate(self):
        return self.kind == "R"

    def is_partial(self, reduce_op=None):
        return self.kind == "P"

    def __repr__(self):
        return "".join(str(value) for value in vars(self).values())


def dtensor(local, shape, placements, mesh_shape, coordinate):
    mesh = types.SimpleNamespace(shape=mesh_shape, get_coordinate=lambda: coordinate)
    return types.SimpleNamespace(shape=shape, placements=tuple(placements), device_mesh=mesh, to_local=lambda: local)


def chunk(array, count, index, dim):
    """Returns a chunk of torch.chunk, or an empty array."""
    size = -(-array.shape[dim] // count)
    return array.take(range(min(index * size, array.shape[dim]), min(index * size + size, array.shape[dim])), axis=dim)


def check(whole, ranks):
    """Each part has the elements of its position, and the parts of all ranks have all elements."""
    seen = np.zeros(whole.shape, int)
    for value in ranks:
        for name, tensor, shape, offset in parts_of({"w": value}):
            box = tuple(slice(first, first + extent) for first, extent in zip(offset or [0] * whole.ndim, tensor.shape))
            assert name == "w" and (shape or tensor.shape) == whole.shape
            assert np.array_equal(tensor.numpy(), whole[box])
            seen[box] += 1
    assert seen.all()


def test_dtensors_in_any_order_of_cuts():
    """A placement is strided if ranks of a later dimension of the mesh were cut before. FSDP over TP does that."""
    chance = random.Random(1)
    strided = 0
    for _ in range(2000):
        mesh = tuple(chance.choice([1, 2, 3, 4]) for _ in range(chance.choice([1, 2, 3])))
        shape = tuple(chance.choice([0, 1, 2, 3, 5, 7, 8, 13, 16]) for _ in range(chance.choice([0, 1, 2, 3])))
        whole = np.arange(math.prod(shape)).reshape(shape)
        dims = [chance.choice([None, *range(len(shape))]) for _ in mesh]
        order = chance.sample(range(len(mesh)), len(mesh))
        placements = []
        for axis, dim in enumerate(dims):
            earlier = [other for other in order[: order.index(axis)] if dims[other] == dim and other > axis]
            factor = math.prod(mesh[other] for other in earlier)
            strided += factor > 1 and dim is not None
            placements.append(Placement("R") if dim is None else Placement("S", dim) if factor == 1 else Placement("_S", dim, factor))
        ranks = []
        for coordinate in itertools.product(*map(range, mesh)):
            local = whole
            for axis in order:
                local = local if dims[axis] is None else chunk(local, mesh[axis], coordinate[axis], dims[axis])
            ranks.append(dtensor(local, shape, placements, mesh, coordinate))
        check(whole, ranks)
    assert strided > 100


@pytest.mark.parametrize("factor", [2, 3])
@pytest.mark.parametrize("data_parallel", [1, 2, 4])
@pytest.mark.parametrize("strided", [False, True])
def test_fused_matrices(factor, data_parallel, strided):
    """A rank has a piece of each part. Data parallelism cuts before it, or cuts the pieces if its placement is strided."""
    whole = np.arange(48 * 3).reshape(48, 3)
    ranks = []
    for data, index in itertools.product(range(data_parallel), range(2)):
        local = whole if strided else chunk(whole, data_parallel, data, 0)
        local = np.concatenate([np.array_split(part, 2)[index] for part in np.array_split(local, factor)])
        local = chunk(local, data_parallel, data, 0) if strided else local
        placements = [Placement("_S", 0, 2) if strided else Placement("S", 0), Placement("_S", 0, factor)]
        ranks.append(dtensor(local, whole.shape, placements, (data_parallel, 2), (data, index)))
    check(whole, ranks)


def test_ranks_without_a_part():
    """A rank outside of the mesh, and one whose piece is empty. PyTorch gives such a piece various shapes."""
    assert parts_of({"w": dtensor(np.zeros(0), (4,), [Placement("S", 0)], (2,), None)}) == []
    for shape in ((0,), (0, 0), (2, 0)):
        assert parts_of({"w": dtensor(np.zeros(shape), (2, 1), [Placement("R"), Placement("S", 1)], (2, 2), (0, 1))}) == []


def test_shards_of_fsdp1():
    whole = np.arange(15).reshape(5, 3)
    ranks = []
    for rows in ((0, 3), (3, 5), (5, 5)):
        shards = [types.SimpleNamespace(tensor=whole[slice(*rows)], metadata=types.SimpleNamespace(shard_offsets=[rows[0], 0]))]
        ranks.append(types.SimpleNamespace(local_shards=lambda shards=shards: shards, size=lambda: (5, 3)))
    check(whole, ranks)


def test_shards_of_megatron():
    whole = np.arange(24, dtype="f4").reshape(2, 4, 3)
    state = {
        f"layers.{layer}.w": types.SimpleNamespace(
            key="layers.w", data=whole[layer, 2:], global_shape=(2, 4, 3), global_offset=(layer, 2, 0), prepend_axis_num=1, flattened_range=None
        )
        for layer in range(2)
    }
    for layer, (name, tensor, shape, offset) in enumerate(parts_of(state)):
        assert (name, tensor.shape, shape, offset) == ("layers.w", (1, 2, 3), (2, 4, 3), (layer, 2, 0))
        assert np.array_equal(tensor.numpy()[0], whole[layer, 2:])


def test_parts_and_whole_tensors():
    rows = np.arange(6, dtype="f2").reshape(2, 3)
    state = {
        "a": rows,
        "b": muster.Part(rows, whole=(8, 3), offset=[np.int64(2), 0]),
        "c": [muster.Part(rows, (4, 3), (0, 0)), muster.Part(rows, (4, 3), (2, 0))],
        "d": [],
        "e": np.float32(3),
        "f": muster.Part(rows),
    }
    found = [(name, tensor.shape, whole, offset) for name, tensor, whole, offset in parts_of(state)]
    assert found == [
        ("a", (2, 3), (), ()),
        ("b", (2, 3), (8, 3), (2, 0)),
        ("c", (2, 3), (4, 3), (0, 0)),
        ("c", (2, 3), (4, 3), (2, 0)),
        ("e", (), (), ()),
        ("f", (2, 3), (), ()),
    ]


ONE = np.zeros((4, 2))
REFUSED = [
    ({"w": dtensor(ONE, (4, 2), [Placement("P")], (2,), (0,))}, 'tensor "w": its elements are partial sums (P). Redistribute'),
    ({"w": dtensor(ONE[0, 0], (), [Placement("P")], (2,), (0,))}, 'tensor "w": its elements are partial sums (P). Redistribute'),
    ({"w": dtensor(ONE, (4, 2), [Placement("X", 0)], (2,), (0,))}, 'tensor "w": the placement X0 is unknown. Redistribute'),
    ({"w": dtensor(ONE, (6, 2), [Placement("S", 0)], (2,), (0,))}, "describe a local tensor of shape [3, 2], but it has [4, 2]"),
    ({"w": dtensor(ONE, (10, 2), [Placement("_S", 0, 2)], (2,), (0,))}, "cuts 10 elements into 2 x 2 pieces of different sizes"),
    ({"w": dtensor(ONE, (12, 2), [Placement("_S", 0, 3), Placement("S", 0)], (2, 2), (0, 0))}, "the factor of _S03 does not match"),
    ({"w": types.SimpleNamespace(device=types.SimpleNamespace(type="meta"))}, 'tensor "w": it has no elements, because it is on the meta device. Load'),
    ({"w": types.SimpleNamespace(key="w", data=None, build_fn=None, merge_fn=None)}, "Call apply_factories()"),
    ({"w": types.SimpleNamespace(key="w", data=None, global_shape=(1,), global_offset=(0,), prepend_axis_num=0)}, "of the model, not of the optimizer"),
    ({"w": None}, 'tensor "w": NoneType is not a tensor'),
    ({"w": "text"}, 'tensor "w": str is not a tensor'),
    ({"w": {"x": ONE}}, 'tensor "w": dict is not a tensor'),
    ({"w": [ONE]}, 'tensor "w": ndarray is not a muster.Part. Pass a tensor, a part or a list of parts'),
    ({"w": np.zeros(2, "M8[s]")}, 'tensor "w": ValueError: '),
    ({1: ONE}, "state dict: the name 1 is not a str"),
    (3, "state dict: int is not a dict of tensors"),
]


@pytest.mark.parametrize("state, words", REFUSED, ids=[words[-20:] for _, words in REFUSED])
def test_refused_values(state, words):
    with pytest.raises(muster.InvalidArgumentError) as caught:
        parts_of(state)
    assert words in str(caught.value)


def test_part_refuses_shapes_that_are_not_numbers():
    for arguments, words in ((("x",), "whole: 'x' is not a list of numbers"), ((None, 3), "offset: 3 is not a list of numbers")):
        with pytest.raises(muster.InvalidArgumentError, match=words):
            muster.Part(ONE, *arguments)
