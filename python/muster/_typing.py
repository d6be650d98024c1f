# SPDX-License-Identifier: Apache-2.0
"""Types of arguments, for type checkers."""

from __future__ import annotations

import typing


class SupportsDLPack(typing.Protocol):
    """An object that supports DLPack, such as a tensor of PyTorch, NumPy, JAX or Muster."""

    def __dlpack__(self) -> typing.Any: ...


class SupportsArrayInterface(typing.Protocol):
    """An object that describes its memory by `__array_interface__`."""

    @property
    def __array_interface__(self) -> typing.Any: ...


#: A tensor argument of any call: DLPack, `__array_interface__`, or the buffer protocol.
TensorLike = typing.Union[SupportsDLPack, SupportsArrayInterface, bytes, bytearray, memoryview]

#: A dtype: a name ("F32", "float32", "BF16"), or a dtype of NumPy, ml_dtypes or PyTorch.
DTypeLike = typing.Any
