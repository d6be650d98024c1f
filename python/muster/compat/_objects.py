# SPDX-License-Identifier: Apache-2.0
"""Python objects as configs, for calls that send any object.

A receiver uses only enums, named tuples and dataclasses that it has already imported, and calls nothing else that a
message names. So no pickle is used.
"""

from __future__ import annotations

import dataclasses
import enum
import operator
import sys

import torch

from .. import Tensor, as_tensor
from ..errors import InvalidArgumentError

_PLAIN = frozenset([type(None), bool, float, str])
_SEQUENCES = {kind.__name__: kind for kind in (tuple, set, frozenset, torch.Size)}
_BYTES = {kind.__name__: kind for kind in (bytes, bytearray)}
#: The key of a dict that represents a value of another type, and of its content.
_KIND, _CONTENT = "muster.compat:kind", "content"


def packed(value, path="object"):
    """Returns a value as a config.

    Args:
        value: A number, a text, bytes, a tensor, an array, a torch.dtype or torch.device, an enum, or a list, tuple,
            set, dict, named tuple or dataclass of such values.
        path: The name of the value in error messages.

    Raises:
        InvalidArgumentError: A part of the value has another type. The message has its path.
    """
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind is int:
        return value if -(2**63) <= value < 2**64 else _of("int", str(value))
    if kind is list:
        return _items(value, path)
    if kind is dict:
        if _KIND not in value and all(type(key) is str for key in value):
            return {key: packed(each, f"{path}[{key!r}]") for key, each in value.items()}
        return _of("dict", [[packed(key, f"{path}.keys()"), packed(each, f"{path}[{key!r}]")] for key, each in value.items()])
    if kind.__name__ in _SEQUENCES and kind is _SEQUENCES[kind.__name__]:
        return _of(kind.__name__, _items(value, path))
    if kind.__name__ in _BYTES and kind is _BYTES[kind.__name__]:
        return _of(kind.__name__, as_tensor(value))
    return _packed_instance(value, path)


def _packed_instance(value, path):
    if isinstance(value, torch.Tensor):
        return value.detach().cpu()
    if isinstance(value, Tensor):
        return _of("muster", value)
    if isinstance(value, (torch.dtype, torch.device)):
        return _of(type(value).__name__, str(value).removeprefix("torch."))
    if isinstance(value, enum.Enum):
        return _of("enum", [_name_of(value), packed(value.value, f"{path}.value")])
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [field.name for field in dataclasses.fields(value) if hasattr(value, field.name)]
        return _of("dataclass", [_name_of(value), {name: packed(getattr(value, name), f"{path}.{name}") for name in fields}])
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return _of("namedtuple", [_name_of(value), _items(value, path)])
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.ndarray):
        return _of("ndarray", value)
    # longdouble has no number of Python.
    if numpy is not None and isinstance(value, numpy.generic) and not isinstance(item := value.item(), numpy.generic):
        return packed(item, path)
    raise InvalidArgumentError(
        f"{path}: {type(value).__qualname__} cannot be sent: pass numbers, texts, bytes, tensors, enums, or lists, dicts and dataclasses of them"
    )


def unpacked(tree):
    """Returns the value that packed() has converted. Tensors become torch tensors in memory of the host."""
    if isinstance(tree, Tensor):
        return tree.torch()
    if isinstance(tree, list):
        return [unpacked(each) for each in tree]
    if not isinstance(tree, dict):
        return tree
    kind = tree.get(_KIND)
    if kind is None:
        return {key: unpacked(each) for key, each in tree.items()}
    content = tree[_CONTENT]
    if kind in _SEQUENCES:
        return _SEQUENCES[kind](unpacked(content))
    if kind in _BYTES:
        return _BYTES[kind](bytes(content))
    return _UNPACK[kind](content)


def _of(kind, content):
    return {_KIND: kind, _CONTENT: content}


def _items(values, path):
    return [packed(each, f"{path}[{index}]") for index, each in enumerate(values)]


def _name_of(value) -> str:
    return f"{type(value).__module__}:{type(value).__qualname__}"


def _class_named(name: str, is_expected):
    module, _, path = name.partition(":")
    try:
        kind = operator.attrgetter(path)(sys.modules[module])
    except (KeyError, AttributeError):
        kind = None
    if not isinstance(kind, type) or not is_expected(kind):
        raise InvalidArgumentError(f"{name}: a rank sent an instance of this class, which this rank does not have: import {module} here")
    return kind


def _dataclass(content):
    name, fields = content
    kind = _class_named(name, dataclasses.is_dataclass)
    made = object.__new__(kind)
    for field, value in fields.items():
        object.__setattr__(made, field, unpacked(value))
    return made


def _enum(content):
    name, value = content
    return _class_named(name, lambda kind: issubclass(kind, enum.Enum))(unpacked(value))


def _namedtuple(content):
    name, items = content
    kind = _class_named(name, lambda kind: issubclass(kind, tuple) and hasattr(kind, "_fields"))
    return tuple.__new__(kind, unpacked(items))


def _dtype(content):
    dtype = getattr(torch, content)
    if not isinstance(dtype, torch.dtype):
        raise InvalidArgumentError(f"torch.{content}: a rank sent this name as a dtype, and it is not one here: use the same version of torch")
    return dtype


_UNPACK = {
    "int": int,
    "dict": lambda content: {unpacked(key): unpacked(each) for key, each in content},
    "muster": lambda content: content,
    "dtype": _dtype,
    "device": torch.device,
    "enum": _enum,
    "dataclass": _dataclass,
    "namedtuple": _namedtuple,
    "ndarray": lambda content: content.copy().numpy(),
}
