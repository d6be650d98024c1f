# SPDX-License-Identifier: Apache-2.0
"""Tensors of NumPy and PyTorch, both ways. Neither is imported before it is needed."""

from __future__ import annotations

from . import _core, errors

# Dtypes that travel as plain numbers of the same size: what the libraries call them.
_FP8 = {"F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu"}
_ML_DTYPES = {"BF16": "bfloat16", **_FP8}
_NAMES = {name: ours for ours, name in _ML_DTYPES.items()}
# Dtypes that go to and from PyTorch as bytes: old ones refuse them.
_BYTES = {"BOOL": "bool", **_FP8}
_OF_BYTES = {name: ours for ours, name in _BYTES.items()}
# One byte an element there, half a byte here.
_UNPACKED = ("int4", "uint4", "float4_e2m1fn")
PACKED = ("F4", "U4", "I4")


def from_numpy(array):
    name = array.dtype.name
    if name in _NAMES:
        return _core.from_buffer(array.view("u2" if name == "bfloat16" else "u1")).view(_NAMES[name])
    if name in _UNPACKED:
        raise errors.ArgumentError(f"NumPy's {name} takes a byte an element: pack two into a byte, and name the dtype by as_tensor()")
    if not array.dtype.isnative:
        raise errors.ArgumentError("its bytes are not in the order of this machine")
    return _core.from_buffer(array)


def from_torch(tensor):
    tensor = tensor.detach()
    if tensor.device.type != "cpu":
        raise errors.ArgumentError(f"it is on {tensor.device}: copy it to the host first (.cpu())")
    name = str(tensor.dtype).removeprefix("torch.")
    if name in _OF_BYTES:
        import torch

        return _core.from_dlpack(tensor.view(torch.uint8)).view(_OF_BYTES[name])
    if name == "float4_e2m1fn_x2":
        import torch

        return _core.from_dlpack(tensor.contiguous().view(torch.uint8)).view("F4")
    if tensor.is_complex():
        tensor = tensor.resolve_conj()
    return _core.from_dlpack(tensor.resolve_neg() if hasattr(tensor, "resolve_neg") else tensor)


def to_numpy(tensor):
    import numpy

    array = numpy.asarray(memoryview(tensor))
    if tensor.dtype not in _ML_DTYPES:
        return array
    import ml_dtypes

    return array.view(getattr(ml_dtypes, _ML_DTYPES[tensor.dtype]))


def to_torch(tensor, copy=None):
    import torch

    if copy is False and not tensor.is_writable:
        raise BufferError("the tensor is read-only, and PyTorch does not look at that: it gets a copy only")
    if copy or not tensor.is_writable:
        tensor = tensor.copy()
    if tensor.dtype in PACKED:
        even = tensor.ndim > 0 and tensor.shape[-1] % 2 == 0
        bytes_shape = (*tensor.shape[:-1], tensor.shape[-1] // 2) if even else (tensor.nbytes,)
        return torch.from_dlpack(tensor.view("U8", bytes_shape).__dlpack__())
    # Of a capsule PyTorch asks nothing more.
    if tensor.dtype in _BYTES:
        return torch.from_dlpack(tensor.view("U8").__dlpack__()).view(getattr(torch, _BYTES[tensor.dtype]))
    return torch.from_dlpack(tensor.__dlpack__())
