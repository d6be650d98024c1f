# SPDX-License-Identifier: Apache-2.0
"""Converts the values of a state dict to the parts of tensors that this rank has.

Values are recognized by their attributes, so that no framework is imported:

1. `placements`, `device_mesh` and `to_local()`: DTensor. This includes FSDP2 and tensor parallelism.
2. `local_shards()`: ShardedTensor of torch. This includes FSDP1.
3. `key`, `global_shape`, `global_offset`, `prepend_axis_num` and `data`: ShardedTensor of Megatron-Core.
4. Any other tensor is whole.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import operator
import typing

from . import _core, errors
from ._core import Tensor

#: The name of a tensor, the part of this rank, the shape of the tensor and the offset of the part in it.
_NamedPart = typing.Tuple[str, Tensor, typing.Tuple[int, ...], typing.Tuple[int, ...]]


class Part:
    """A part of a tensor, as a value of a state dict for export_model(). A list of parts is also such a value.

    Args:
        tensor: The elements, as for as_tensor().
        whole: The shape of the whole tensor. None: `tensor` is the whole tensor.
        offset: The position of the first element of `tensor` in the whole tensor. None: the position is zero.

    Raises:
        InvalidArgumentError: `whole` or `offset` is not a list of numbers.
    """

    def __init__(self, tensor: typing.Any, whole: typing.Iterable[int] | None = None, offset: typing.Iterable[int] | None = None):
        self.tensor: typing.Any = tensor
        self.whole: tuple[int, ...] | None = None if whole is None else _numbers("whole", whole)
        self.offset: tuple[int, ...] | None = None if offset is None else _numbers("offset", offset)


def parts_of(state: typing.Any) -> list[_NamedPart]:
    """Returns the parts that the values of a state dict describe. Values without elements on this rank give no part.

    Raises:
        InvalidArgumentError: A value is not a tensor in memory, or its parts cannot be determined.
    """
    if not hasattr(state, "items"):
        raise errors.InvalidArgumentError(f"state dict: {type(state).__name__} is not a dict of tensors")
    parts: list[_NamedPart] = []
    for name, value in state.items():
        if not isinstance(name, str):
            raise errors.InvalidArgumentError(f"state dict: the name {name!r} is not a str")
        try:
            for key, tensor, whole, offset in _described(name, value):
                parts.append((key, *_converted(tensor, whole, offset)))
        except Exception as error:
            cause = str(error) if isinstance(error, errors.Error) else f"{type(error).__name__}: {error}"
            raise errors.InvalidArgumentError(f'tensor "{name}": {cause}') from error
    return parts


def _numbers(name, values):
    try:
        return tuple(operator.index(value) for value in values)
    except TypeError as error:
        raise errors.InvalidArgumentError(f"{name}: {values!r} is not a list of numbers") from error


def _described(name, value):
    """Yields (name, tensor, whole or None, offset or None) of each part."""
    if isinstance(value, Part):
        yield name, value.tensor, value.whole, value.offset
    elif isinstance(value, (list, tuple)):
        for each in value:
            if not isinstance(each, Part):
                raise errors.InvalidArgumentError(f"{type(each).__name__} is not a muster.Part. Pass a tensor, a part or a list of parts")
            yield from _described(name, each)
    elif _has(value, "placements", "device_mesh", "to_local"):
        for part in _parts_of_dtensor(value):
            yield name, *part
    elif _has(value, "local_shards", "size"):
        whole = tuple(value.size())
        for shard in value.local_shards():
            yield name, shard.tensor, whole, tuple(shard.metadata.shard_offsets)
    elif _has(value, "key", "global_shape", "global_offset", "prepend_axis_num", "data"):
        if value.data is None or getattr(value, "flattened_range", None) is not None:
            raise errors.InvalidArgumentError("Megatron-Core gives no part with a shape. Pass the sharded state dict of the model, not of the optimizer")
        # The prepended axes number copies of a module, such as layers. The tensor of a rank belongs to one of them.
        yield value.key, value.data[(None,) * value.prepend_axis_num], tuple(value.global_shape), tuple(value.global_offset)
    elif _has(value, "build_fn", "merge_fn"):
        raise errors.InvalidArgumentError("Megatron-Core has not made its parts yet. Call apply_factories() on the state dict first")
    else:
        yield name, value, None, None


def _has(value, *names):
    return all(hasattr(value, name) for name in names)


def _converted(tensor, whole, offset):
    """Returns (muster.Tensor, whole, offset). The two shapes are empty for a whole tensor."""
    device = getattr(getattr(tensor, "device", None), "type", "cpu")
    if device == "meta":
        raise errors.InvalidArgumentError("it has no elements, because it is on the meta device. Load its values first, or leave it out")
    if hasattr(tensor, "trigger_wait"):  # the result of a collective that may still run
        tensor = tensor.wait()
    if hasattr(tensor, "detach"):
        tensor = tensor.detach()
    if _has(tensor, "data_ptr", "numel") and tensor.numel() != 0 and tensor.data_ptr() == 0:
        raise errors.InvalidArgumentError(f"{type(tensor).__name__} has no memory of its own. Pass the tensors that it consists of")
    if device != "cpu":
        tensor = _readable(tensor, device)
    whole = () if whole is None else whole
    offset = () if offset is None else offset
    # PyTorch counts pairs of elements in this dtype.
    if str(getattr(tensor, "dtype", "")) == "torch.float4_e2m1fn_x2":
        whole, offset = ((*each[:-1], each[-1] * 2) if each else () for each in (whole, offset))
    return _core.as_tensor(tensor, None, None), whole, offset


def _readable(tensor, device):
    """Returns a tensor on a GPU in a form that the export copies piece by piece, or else a copy on the host."""
    if device == "cuda" and tensor.is_contiguous():
        # libmuster-cuda may be missing, or the memory may be managed.
        with contextlib.suppress(Exception):
            return _core.as_tensor(tensor, None, None)
    return tensor.cpu()


def _parts_of_dtensor(value):
    """Yields (tensor, whole, offset) of each box of a DTensor that this rank has."""
    for placement in value.placements:
        _check(placement)
    whole, mesh = tuple(value.shape), value.device_mesh
    coordinate = mesh.get_coordinate()
    if coordinate is None:  # this rank is not in the mesh
        return
    local = value.to_local()
    if math.prod(whole) == 0:
        yield local.reshape(whole), None, None
        return
    placements = list(zip(value.placements, tuple(mesh.shape), coordinate))
    segments = [_segments_of(extent, dim, placements) for dim, extent in enumerate(whole)]
    shape = tuple(sum(count for _, count in each) for each in segments)
    if math.prod(shape) == math.prod(local.shape) == 0:  # PyTorch gives empty local tensors various shapes
        return
    if tuple(local.shape) != shape:
        raise errors.InvalidArgumentError(
            f"the placements {tuple(value.placements)} of {list(whole)} describe a local tensor of shape {list(shape)}, but it has {list(local.shape)}. {_REMEDY}"
        )
    if all(len(each) == 1 for each in segments):
        yield local, whole, tuple(each[0][0] for each in segments)
        return
    for box in itertools.product(*map(_slices_of, segments)):
        yield local[tuple(part for part, _ in box)], whole, tuple(first for _, first in box)


_REMEDY = "Redistribute it to Shard and Replicate first"


def _check(placement):
    if placement.is_partial():
        raise errors.InvalidArgumentError(f"its elements are partial sums ({placement}). {_REMEDY}")
    is_known = placement.is_replicate() or placement.is_shard() or hasattr(placement, "split_factor")
    if not is_known:
        raise errors.InvalidArgumentError(f"the placement {placement} is unknown. {_REMEDY}")


def _segments_of(extent, dim, placements):
    """Returns the elements along a dimension that this rank has, in the order of its local tensor, as (first, count).

    `placements` has (placement, ranks, index of this rank) for each dimension of the mesh.
    """
    segments = [(0, extent)]
    for ranks, index, parts in _cuts_of(dim, placements):
        length = sum(count for _, count in segments)
        if parts > 1 and ranks > 1 and length % (parts * ranks) != 0:
            raise errors.InvalidArgumentError(f"a strided placement cuts {length} elements into {parts} x {ranks} pieces of different sizes. {_REMEDY}")
        pieces = [_cut(segments, *_chunk(length, parts * ranks, part * ranks + index)) for part in range(parts)]
        segments = _joined(itertools.chain.from_iterable(pieces))
    return segments


def _cuts_of(dim, placements):
    """Returns the cuts along a dimension in the order in which they are made: (ranks, index of this rank, parts).

    A cut divides each of `parts` equal parts among the ranks. `parts` is more than one for fused matrices.
    """
    cuts: list[tuple[int, int, int]] = []
    for placement, ranks, index in reversed(placements):
        if placement.is_replicate() or placement.dim != dim:
            continue
        factor = getattr(placement, "split_factor", 1)
        # The cuts that were made before this one, among those of later placements, have made `factor` pieces. So a
        # factor places FSDP after tensor parallelism. One that fits nowhere is that of a fused matrix.
        made = [1, *itertools.accumulate((size for size, _, _ in cuts), operator.mul)]
        if factor in made:
            cuts.insert(made.index(factor), (ranks, index, 1))
        elif not cuts:
            cuts.append((ranks, index, factor))
        else:
            raise errors.InvalidArgumentError(f"the factor of {placement} does not match the placements after it. {_REMEDY}")
    return cuts


def _chunk(length, count, index):
    """Returns (begin, end) of a chunk of torch.chunk. All chunks have the same size, except for the last ones."""
    size = -(-length // count)
    return min(index * size, length), min((index + 1) * size, length)


def _cut(segments, begin, end):
    """Returns the elements from `begin` to `end` of segments that are counted as one sequence."""
    cut, position = [], 0
    for first, count in segments:
        low, high = max(begin - position, 0), min(end - position, count)
        if low < high:
            cut.append((first + low, high - low))
        position += count
    return cut


def _joined(segments):
    """Returns segments in which adjacent ones are joined."""
    joined: list[tuple[int, int]] = []
    for first, count in segments:
        if joined and sum(joined[-1]) == first:
            joined[-1] = (joined[-1][0], joined[-1][1] + count)
        else:
            joined.append((first, count))
    return joined


def _slices_of(segments):
    """Returns (slice of the local tensor, first element in the whole tensor) of each segment."""
    ends = itertools.accumulate(count for _, count in segments)
    return [(slice(end - count, end), first) for end, (first, count) in zip(ends, segments)]
