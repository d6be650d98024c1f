# SPDX-License-Identifier: Apache-2.0
"""Gathers layer configs and tensors of all ranks of a list on the first rank of the list, the root."""

from __future__ import annotations

import os
import typing

from . import _core
from ._core import Group, Tensor
from ._groups import _resolve


_Self = typing.TypeVar("_Self", bound="Gathered")


class Gathered:
    """A gather: a call creates it, `__enter__` runs the exchange, and the end of the `with` block releases it.

    On the root (the first rank of the list) it is true and has one entry per rank. On the other ranks it is false and
    empty. Its release is local. Tensors that are still held remain valid afterwards; their senders get the memory back
    when the tensors are destroyed.
    """

    def __init__(self, call, value, ranks, group, options):
        self._call = call
        self._arguments = (value, ranks, group, options)
        self._exchange = None
        self._entries = None

    def __enter__(self: _Self) -> _Self:
        if self._arguments is None:
            raise RuntimeError("a gather is made once: call it again for the next one")
        value, ranks, group, options = self._arguments
        self._arguments = None
        self._exchange, self._entries = self._call(value, ranks, _resolve(group), options)
        return self

    def __exit__(self, *_) -> None:
        self.release()

    def release(self) -> None:
        """Releases the result now. Local."""
        self._entries = None

    def _list(self):
        if self._entries is None:
            words = "has ended" if self._exchange is not None else "has not begun: use it in `with`"
            raise RuntimeError(f"this gather {words}")
        return self._entries

    @property
    def ranks(self) -> list[int]:
        """The list of this rank; empty if it was in no list."""
        self._list()
        return self._exchange.ranks

    def __len__(self) -> int:
        return len(self._list())

    def __iter__(self) -> typing.Iterator[typing.Any]:
        return iter(self._list())

    def __getitem__(self, rank: int) -> typing.Any:
        """Returns the value of `rank` of the group; None if it passed none."""
        entries = self._list()
        try:
            return entries[self._exchange.ranks.index(rank)]
        except (ValueError, IndexError):
            raise KeyError(f"there is nothing of rank {rank} here: the list is {self._exchange.ranks}") from None

    def present(self) -> list[tuple[int, typing.Any]]:
        """Returns (rank, value) of the ranks that passed a value, in the order of the list."""
        return [(rank, entry) for rank, entry in zip(self.ranks, self._list()) if entry is not None]

    def explain(self) -> str:
        """Returns a one-line summary: route, reason, bytes and seconds."""
        self._list()
        return self._exchange.explain()

    def report(self) -> dict:
        """Returns measurements of the exchange on this rank."""
        self._list()
        return self._exchange.report()

    def wait_released(self, timeout: float) -> bool:
        """On a sender: waits until the root has released the bytes of this rank.

        Returns False after `timeout` seconds.
        """
        self._list()
        return self._exchange.wait_released(timeout)


class GatheredConfigs(Gathered):
    """Configs by rank: dicts, lists and values, with muster.Tensor as leaves."""


class GatheredTensors(Gathered):
    """Tensors by rank."""

    def numpy(self) -> list:
        """Returns all tensors as read-only NumPy arrays, in the order of the list, without a copy."""
        return [tensor.numpy() for tensor in self._list()]

    def torch(self, copy: bool | None = None) -> list:
        """Returns all tensors as torch tensors, in the order of the list. `copy` is as for Tensor.torch()."""
        return [tensor.torch(copy=copy) for tensor in self._list()]


def _options(own, timeout, route, workspace_path=None, writable=False, into=None):
    return {
        "own": own,
        "writable": writable,
        "into": into,
        "timeout": timeout,
        "route": route,
        "workspace_path": workspace_path,
    }


def get_configs_parallel(
    config: typing.Any,
    ranks: typing.Iterable[int] | None = None,
    group: Group | typing.Any = None,
    *,
    own: str = "borrow",
    writable: bool = False,
    timeout: float | None = None,
    route: str = "auto",
    workspace_path: str | os.PathLike[str] | None = None,
) -> GatheredConfigs:
    """Gathers the config of each rank of a list on its first rank, the root. Returns a context manager.

    Collective over `group`: each rank makes one call. `config` is a dict, a list or a value, with tensors as any
    leaves. None: this rank passes no config. `ranks` is the list, the same on all of its members; None: all ranks. A
    rank that is not in the list it passes only takes part in the rounds. `group` is a muster.Group, a process group of
    torch.distributed, or None for the world.

    `own`: the root's own tensors in its result are "borrow" (its own memory) or "copy". `writable`: the root may write
    to the tensors of the other ranks while it holds them, and no other rank sees the writes. Tensors of arenas, and of
    routes other than shared memory, remain read-only. `timeout`: seconds without progress of the awaited ranks.
    `route`: how bytes are transferred, "auto", "shm", "tcp", "workspace", ... `workspace_path`: a directory that all
    ranks see, through which the data is then transferred.

    The exchange runs when the `with` block begins. Errors are raised on all ranks alike, with the message of the rank
    that failed. After ArgumentError, RankMismatchError, UnsupportedError, NoSpaceError or IoError the group remains
    usable. TimeoutError, PeerLostError and CancelledError abort it.
    """
    return GatheredConfigs(_core.get_configs, config, ranks, group, _options(own, timeout, route, workspace_path, writable))


def get_tensors_parallel(
    tensor: typing.Any,
    ranks: typing.Iterable[int] | None = None,
    group: Group | typing.Any = None,
    *,
    own: str = "borrow",
    writable: bool = False,
    into: typing.Iterable[typing.Any] | None = None,
    timeout: float | None = None,
    route: str = "auto",
    workspace_path: str | os.PathLike[str] | None = None,
) -> GatheredTensors:
    """Gathers one tensor per rank, all of the same dtype and shape. Otherwise as get_configs_parallel().

    A tensor is a muster.Tensor, a torch.Tensor, a NumPy array, or any object with DLPack, a buffer or
    `__array_interface__`, in host memory.

    `into`, on the root: writable contiguous tensors, one per rank of the list, that receive the results, the root's
    own included. They are then the result. The memory of the senders is released when the `with` block begins.
    """
    options = _options(own, timeout, route, workspace_path, writable, into)
    return GatheredTensors(_core.get_tensors, tensor, ranks, group, options)


def concat(dim: int, blocks: typing.Iterable[int] = ()) -> tuple[typing.Any, ...]:
    """Returns a merge that concatenates the tensors of the ranks along `dim`; a negative `dim` counts from the end.

    `blocks` has the relative sizes of fused tensors along `dim`, each of which is concatenated separately.
    """
    return ("concat", dim, list(blocks))


#: Stacks the tensors along a new outermost dimension.
stack = ("stack",)
#: Adds each element in rank order.
sum = ("sum",)
#: Takes the largest value of each element; NaN of any rank gives NaN.
max = ("max",)
#: Requires that all ranks have the same tensor, and compares them.
same = ("same",)
#: Takes the tensor of the root and ignores those of the other ranks.
first = ("first",)


def merge_tensor_parallel(
    tensor: typing.Any,
    merge: tuple[typing.Any, ...],
    ranks: typing.Iterable[int] | None = None,
    group: Group | typing.Any = None,
    *,
    own: str = "borrow",
    into: typing.Any = None,
    timeout: float | None = None,
    route: str = "auto",
) -> Tensor | None:
    """Merges the tensors of all ranks of a list on its first rank, the root. Returns None on the other ranks.

    Collective, by the rules of get_tensors_parallel(). `merge` is concat(dim), stack, sum, max, same or first. Each
    rank writes its part directly into the result. dtypes and shapes are the same on all ranks, except the extents
    along `dim` of concat. The result is read-only and remains valid as long as it is held. `into`, on the root: a
    writable contiguous tensor that receives the result and is then returned.
    """
    options = _options(own, timeout, route, into=None if into is None else [into])
    return _core.merge_tensor(tensor, merge, ranks, _resolve(group), options)[1]


def as_tensor(object: typing.Any, dtype: str | None = None, shape: typing.Iterable[int] | None = None) -> Tensor:
    """Returns a muster.Tensor of the memory of an object, which it keeps alive. Nothing is copied.

    With a dtype or a shape, the same bytes are interpreted accordingly: `as_tensor(bytes_of_fp8, "F8_E4M3")`. Elements
    of packed dtypes ("F4", "U4", "I4", "F6_E2M3", "F6_E3M2") share bytes, and the shape counts elements. Raises
    ArgumentError if the object is not a tensor, is on a GPU, or does not have that number of bytes.
    """
    return _core.as_tensor(object, dtype, None if shape is None else list(shape))


def empty(dtype: str, shape: typing.Iterable[int]) -> Tensor:
    """Returns a tensor of new memory, writable and uninitialized. `dtype`: "F32", "BF16" ...

    Raises ArgumentError, NoSpaceError.
    """
    return _core.empty(dtype, list(shape))


def trim(group: Group | typing.Any = None) -> int:
    """Returns the free shared memory of this rank's pool to the system, and returns the number of bytes. Local."""
    return _core.trim(_resolve(group))
