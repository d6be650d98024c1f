# SPDX-License-Identifier: Apache-2.0
"""Conversions between tensors of Muster and those of NumPy and PyTorch, which are imported only when needed."""

from __future__ import annotations

import pickle

from . import _core, errors

# Library names of the dtypes that are converted as plain numbers of the same size.
_FP8 = {
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
}
_ML_DTYPES = {"BF16": "bfloat16", **_FP8}
_NAMES = {name: ours for ours, name in _ML_DTYPES.items()}
# Dtypes that are exchanged with PyTorch as bytes, because old versions reject them in DLPack.
_BYTES = {"BOOL": "bool", **_FP8}
_OF_BYTES = {name: ours for ours, name in _BYTES.items()}
# These use one byte per element in NumPy, and a part of a byte in Muster.
_UNPACKED = ("int4", "uint4", "float4_e2m1fn", "float6_e2m3fn", "float6_e3m2fn")
# Dtypes whose elements share bytes: (elements, bytes) of the smallest group.
PACKED = {"F4": (2, 1), "U4": (2, 1), "I4": (2, 1), "F6_E2M3": (4, 3), "F6_E3M2": (4, 3)}


def from_numpy(array):
    name = array.dtype.name
    if name in _NAMES:
        return _core.from_buffer(array.view("u2" if name == "bfloat16" else "u1")).view(_NAMES[name])
    if name in _UNPACKED:
        raise errors.InvalidArgumentError(f"NumPy stores {name} in one byte per element: pack the elements, and pass the dtype to as_tensor()")
    if not array.dtype.isnative:
        raise errors.InvalidArgumentError("the array is not in the byte order of this machine: convert it first")
    return _core.from_buffer(array)


def from_torch(tensor, takes_devices=False):
    tensor = tensor.detach()
    if tensor.device.type != "cpu" and not (takes_devices and tensor.device.type == "cuda"):
        raise errors.InvalidArgumentError(f"the tensor is on {tensor.device}: copy it to the host first (.cpu())")
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


# Names of dtypes in NumPy, ml_dtypes and PyTorch.
_OTHER_NAMES = {
    "bool": "BOOL",
    "bool_": "BOOL",  # numpy.bool_.__name__ before NumPy 2
    "half": "F16",
    "double": "F64",
    "complex64": "C64",
    **{f"{prefix}int{bits}": f"{letter}{bits}" for prefix, letter in (("u", "U"), ("", "I")) for bits in (8, 16, 32, 64)},
    **{f"float{bits}": f"F{bits}" for bits in (16, 32, 64)},
    **_NAMES,
}

_NUMPY_NAMES = {"BOOL": "bool", "C64": "complex64", **{ours: name for name, ours in _OTHER_NAMES.items() if name[-1].isdigit() and name not in _NAMES}}


def dtype_name(dtype):
    """Returns the Muster name of a dtype, from a name or from a dtype of NumPy, ml_dtypes or PyTorch."""
    if isinstance(dtype, str):
        name = dtype
    elif dtype in (float, int):
        name = "F64" if dtype is float else "I64"
    else:
        # A numpy.dtype has a name, NumPy scalar types have __name__, and PyTorch dtypes print as "torch.float32".
        name = getattr(dtype, "name", None) or getattr(dtype, "__name__", None) or str(dtype)
        if not isinstance(name, str):
            name = str(dtype)
        if not getattr(dtype, "isnative", True):
            raise errors.InvalidArgumentError(f"{dtype!r} is not in the byte order of this machine: convert the array first")
    name = name.removeprefix("torch.")
    return _OTHER_NAMES.get(name.lower(), name)


def to_numpy(tensor, dtype=None):
    import numpy

    if tensor.device != "host":
        raise errors.InvalidArgumentError(f"numpy: {tensor!r} is on a GPU: use copy_to_host() first")
    if dtype is not None and (tensor.dtype in PACKED or dtype_name(dtype) != tensor.dtype):
        is_small = tensor.dtype in PACKED or tensor.dtype in _ML_DTYPES
        array = numpy.asarray(memoryview(_core.widened(tensor) if is_small else tensor))
        return array.astype(_numpy_dtype(dtype))
    if tensor.dtype in PACKED:
        return numpy.asarray(memoryview(tensor.view("U8", (tensor.nbytes,))))
    if tensor.dtype not in _ML_DTYPES:
        return numpy.asarray(memoryview(tensor))
    same_size = "U16" if tensor.dtype == "BF16" else "U8"
    return numpy.asarray(memoryview(tensor.view(same_size))).view(_numpy_dtype(tensor.dtype))


def _numpy_dtype(dtype):
    import numpy

    name = dtype_name(dtype)
    if name in _ML_DTYPES:
        try:
            import ml_dtypes
        except ModuleNotFoundError:
            raise errors.UnsupportedError(f"NumPy has {name} only with ml_dtypes: install it, or pass a dtype to numpy(), such as 'float32'") from None

        return numpy.dtype(getattr(ml_dtypes, _ML_DTYPES[name]))
    try:
        return numpy.dtype(_NUMPY_NAMES.get(name, dtype))
    except TypeError:
        raise errors.InvalidArgumentError(f"dtype: {dtype!r} is not a dtype of NumPy") from None


def to_array(tensor, dtype=None, copy=None):
    """Implements numpy.asarray() for dtypes that the buffer protocol cannot describe."""
    if tensor.dtype in PACKED and dtype is None:
        raise errors.InvalidArgumentError(f"NumPy has no dtype for {tensor.dtype}: use numpy(), which returns the bytes that the elements share, or pass a dtype")
    if copy is False and dtype is not None and dtype_name(dtype) != tensor.dtype:
        raise ValueError(f"{tensor.dtype} as {dtype} needs a copy")
    array = to_numpy(tensor, dtype)
    return array.copy() if copy and array.base is not None else array


def iterate(tensor):
    """Implements iter(): the parts of dimension 0."""
    return (tensor[number] for number in range(len(tensor)))


def reduced(tensor, protocol):
    """Implements pickling: the bytes, which protocol 5 may pass outside of the pickle."""
    whole = tensor if tensor.is_contiguous else tensor.copy()
    data = memoryview(whole.view("U8", (whole.nbytes,)))
    return restored, (tensor.dtype, tensor.shape, pickle.PickleBuffer(data) if protocol >= 5 else bytes(data))


def restored(dtype, shape, data):
    tensor = _core.as_tensor(data, dtype, list(shape))
    return tensor if tensor.is_writable else tensor.copy()


def to_torch(tensor, copy=None):
    import torch

    if tensor.device != "host":
        # With the stream protocol, and in the same memory: results on GPUs belong to this process.
        name = _BYTES.get(tensor.dtype)
        made = torch.from_dlpack(tensor.view("U8") if name else tensor)
        made = made.view(getattr(torch, name)) if name else made
        return made.clone() if copy else made
    if copy is False and not tensor.is_writable:
        raise BufferError("the tensor is read-only, which PyTorch ignores: allow a copy")
    if copy or not tensor.is_writable:
        tensor = tensor.copy()
    if tensor.dtype in PACKED:
        elements, size = PACKED[tensor.dtype]
        whole = tensor.ndim > 0 and tensor.shape[-1] % elements == 0
        bytes_shape = (*tensor.shape[:-1], tensor.shape[-1] // elements * size) if whole else (tensor.nbytes,)
        return torch.from_dlpack(tensor.view("U8", bytes_shape).__dlpack__())
    # PyTorch accepts a capsule without further checks.
    if tensor.dtype in _BYTES:
        return torch.from_dlpack(tensor.view("U8").__dlpack__()).view(getattr(torch, _BYTES[tensor.dtype]))
    return torch.from_dlpack(tensor.__dlpack__())
