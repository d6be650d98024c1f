# SPDX-License-Identifier: Apache-2.0
"""The kinds of merges that combine the tensors of several ranks into one: merge_tensor_parallel() takes them."""

from __future__ import annotations

import typing

__all__ = ["Merge", "concat", "first", "max", "same", "stack", "sum"]


class Merge(typing.NamedTuple):
    """A kind of merge. Use a constant of this module, or concat().

    `name` is "concat", "first", "max", "same", "stack" or "sum". `dim` and `blocks` are those of concat().
    """

    name: str
    dim: int = 0
    blocks: tuple[int, ...] = ()


def concat(dim: int, blocks: typing.Iterable[int] = ()) -> Merge:
    """Returns a merge that concatenates the tensors of the ranks along a dimension.

    The dtype and the other extents must be equal.

    Args:
        dim: The dimension. A negative one counts from the end.
        blocks: For tensors that consist of several tensors along `dim`, such as query, key and value: their relative
            sizes along `dim`, the same on every rank. The merge concatenates each of them separately.
    """
    return Merge("concat", dim, tuple(blocks))


#: Stacks the tensors of the ranks, of one dtype and shape, along a new outermost dimension.
stack: Merge = Merge("stack")
#: Adds each element in rank order. Integers wrap around. Floats narrower than 32 bits are added in 32 bits and rounded
#: once. Bool is rejected.
sum: Merge = Merge("sum")
#: Takes the largest value of each element. NaN of any rank gives NaN.
max: Merge = Merge("max")
#: Requires that every rank has the same tensor, and compares all of them bit by bit.
same: Merge = Merge("same")
#: Takes the tensor of the root and ignores those of the other ranks.
first: Merge = Merge("first")
