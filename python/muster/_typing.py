# SPDX-License-Identifier: Apache-2.0
"""Types of arguments, for type checkers."""

from __future__ import annotations

import enum
import types
import typing


class SupportsDLPack(typing.Protocol):
    """An object that supports DLPack, such as a tensor of PyTorch, NumPy, JAX or Muster."""

    def __dlpack__(self) -> typing.Any: ...


class SupportsArrayInterface(typing.Protocol):
    """An object that describes its memory by `__array_interface__`."""

    @property
    def __array_interface__(self) -> typing.Any: ...


class SupportsCudaArrayInterface(typing.Protocol):
    """An object that describes its memory on a GPU by `__cuda_array_interface__`."""

    @property
    def __cuda_array_interface__(self) -> typing.Any: ...


#: A tensor argument of any call: DLPack, an array interface, or the buffer protocol.
TensorLike = typing.Union[SupportsDLPack, SupportsArrayInterface, SupportsCudaArrayInterface, bytes, bytearray, memoryview]

#: A dtype: a name ("F32", "float32", "BF16"), or a dtype of NumPy, ml_dtypes or PyTorch.
DTypeLike = typing.Any


class ReduceOp(str, enum.Enum):
    """The operation of a reduction. Each is equal to its value: `ReduceOp.SUM == "sum"`.

    AVERAGE is the sum divided by the number of ranks. It requires a floating-point dtype.
    """

    SUM = "sum"
    PRODUCT = "product"
    MIN = "min"
    MAX = "max"
    AVERAGE = "average"

    __str__ = str.__str__


#: The operation of a reduction, or its value.
ReduceOpLike = typing.Union[ReduceOp, typing.Literal["sum", "product", "min", "max", "average"]]

#: The tensors of the root in its result.
RootTensors = typing.Literal["borrow", "copy"]

#: A way to transfer tensors.
Route = typing.Literal["auto", "local", "shm", "workspace", "mpi", "tcp", "device"]

#: The memory in which the root receives tensors of GPUs.
Destination = typing.Literal["host", "device"]

_OneIndex = typing.Union[typing.SupportsIndex, slice, types.EllipsisType]
#: An index of a tensor.
Index = typing.Union[_OneIndex, tuple[_OneIndex, ...]]
