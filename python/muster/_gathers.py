# SPDX-License-Identifier: Apache-2.0
"""Gathers layer configs and tensors of all ranks of a list on the first rank of the list, the root."""

from __future__ import annotations

import os
import typing

from . import _core
from ._core import Group, Tensor
from ._groups import _resolve
from ._names import checks_names
from .merge import Merge


_Self = typing.TypeVar("_Self", bound="GatherResult")


class GatherResult:
    """The result of a gather, and its context manager: entering the `with` block runs the exchange.

    On the root (the first rank of the list) it is true and has one entry per rank. On the other ranks it is false and
    empty. The end of the block releases it, which is local. Tensors that are still held remain valid afterwards. Their
    senders get the memory back when the tensors are destroyed.
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
            cause = "has ended" if self._exchange is not None else "has not begun: use it in `with`"
            raise RuntimeError(f"this gather {cause}")
        return self._entries

    @property
    def ranks(self) -> list[int]:
        """The list of this rank. It is empty if this rank was in no list."""
        self._list()
        return self._exchange.ranks

    def __len__(self) -> int:
        return len(self._list())

    def __iter__(self) -> typing.Iterator[typing.Any]:
        return iter(self._list())

    def __getitem__(self, rank: int) -> typing.Any:
        """Returns the value of a rank of the group, or None if it passed None.

        Raises:
            KeyError: The rank is not in the list, or this rank is not the root.
        """
        entries = self._list()
        try:
            return entries[self._exchange.ranks.index(rank)]
        except (ValueError, IndexError):
            raise KeyError(f"rank {rank} has no entry here: the list is {self._exchange.ranks}") from None

    def present(self) -> list[tuple[int, typing.Any]]:
        """Returns (rank, value) of the ranks that passed a value, in the order of the list."""
        return [(rank, entry) for rank, entry in zip(self.ranks, self._list()) if entry is not None]

    def explain(self) -> str:
        """Returns a one-line summary with the route, the reason for it, the bytes and the seconds."""
        self._list()
        return self._exchange.explain()

    def report(self) -> dict:
        """Returns measurements of the exchange on this rank.

        Returns:
            A dict with route, reason, payload_bytes, arena_bytes, network_bytes, pool_bytes, rounds, and phases: a list
            of dicts with name, seconds and bytes.
        """
        self._list()
        return self._exchange.report()

    def wait_released(self, timeout: float) -> bool:
        """Waits, on a sender, until the root has released the bytes of this rank.

        Args:
            timeout: The longest wait in seconds.

        Returns:
            Whether the root has released them. True at once on a rank that is not a sender.
        """
        self._list()
        return self._exchange.wait_released(timeout)


class GatheredConfigs(GatherResult):
    """The configs of the ranks: dicts, lists and values, with muster.Tensor as leaves."""


class GatheredTensors(GatherResult):
    """The tensors of the ranks."""

    def numpy(self) -> list:
        """Returns all tensors as read-only NumPy arrays, in the order of the list, without a copy."""
        return [tensor.numpy() for tensor in self._list()]

    def torch(self, copy: bool | None = None) -> list:
        """Returns all tensors as torch tensors, in the order of the list.

        Args:
            copy: As for Tensor.torch().
        """
        return [tensor.torch(copy=copy) for tensor in self._list()]


def _options(root_tensors, timeout, route, workspace_path=None, writable=False, into=None):
    return {
        "root_tensors": root_tensors,
        "writable": writable,
        "into": into,
        "timeout": timeout,
        "route": route,
        "workspace_path": workspace_path,
    }


@checks_names
def get_configs_parallel(
    config: typing.Any,
    ranks: typing.Iterable[int] | None = None,
    group: Group | typing.Any = None,
    *,
    root_tensors: str = "borrow",
    writable: bool = False,
    timeout: float | None = None,
    route: str = "auto",
    workspace_path: str | os.PathLike[str] | None = None,
) -> GatheredConfigs:
    """Gathers the config of each rank of a list on its first rank, the root.

    Collective over `group`: each rank makes one call. The exchange runs when the `with` block begins. A rank that is
    not in the list it passes only takes part in the rounds.

    Args:
        config: A dict, a list or a value, with tensors as any leaves. None: this rank passes no config.
        ranks: The list, the same on all of its members. None: all ranks.
        group: A muster.Group, a process group of torch.distributed, or None for the world.
        root_tensors: How the tensors of the root appear in its result: "borrow" for its own memory, or "copy".
        writable: Whether the root may write to the tensors of the other ranks while it holds them. No other rank sees
            these writes. Tensors of arenas, and of routes other than shared memory, remain read-only.
        timeout: The longest wait without progress of the awaited ranks, in seconds. None: the default of the group.
        route: How bytes are transferred: "auto", "local", "shm", "workspace", "mpi", "tcp" or "device".
        workspace_path: A directory that all ranks see, through which the data is then transferred.

    Returns:
        A context manager, whose `with` block receives the result.

    Raises:
        Error: A rank failed. All ranks raise its error when the `with` block begins. After InvalidArgumentError,
            RankMismatchError, UnsupportedError, OutOfSpaceError or IoError the group remains usable. TimeoutError,
            PeerLostError and CancelledError abort it.
    """
    return GatheredConfigs(_core.get_configs, config, ranks, group, _options(root_tensors, timeout, route, workspace_path, writable))


@checks_names
def get_tensors_parallel(
    tensor: typing.Any,
    ranks: typing.Iterable[int] | None = None,
    group: Group | typing.Any = None,
    *,
    root_tensors: str = "borrow",
    writable: bool = False,
    into: typing.Iterable[typing.Any] | None = None,
    timeout: float | None = None,
    route: str = "auto",
    workspace_path: str | os.PathLike[str] | None = None,
) -> GatheredTensors:
    """Gathers one tensor of each rank of a list on its first rank, the root.

    The tensors have the same dtype and shape. The rules, the other arguments and the errors are those of
    get_configs_parallel().

    Args:
        tensor: A muster.Tensor, a torch.Tensor, a NumPy array, or any object with DLPack, a buffer or
            `__array_interface__`, in host memory.
        into: On the root, writable contiguous tensors, one per rank of the list, that receive the results, the root's
            own included. They are then the result, and the memory of the senders is released when the `with` block
            begins.

    Returns:
        A context manager, whose `with` block receives the result.
    """
    options = _options(root_tensors, timeout, route, workspace_path, writable, into)
    return GatheredTensors(_core.get_tensors, tensor, ranks, group, options)


@checks_names
def merge_tensor_parallel(
    tensor: typing.Any,
    merge: Merge,
    ranks: typing.Iterable[int] | None = None,
    group: Group | typing.Any = None,
    *,
    root_tensors: str = "borrow",
    into: typing.Any = None,
    timeout: float | None = None,
    route: str = "auto",
) -> Tensor | None:
    """Merges the tensors of all ranks of a list into one tensor on its first rank, the root.

    Collective. Each rank writes its part directly into the result. The other arguments and the errors are those of
    get_tensors_parallel().

    Args:
        tensor: The tensor of this rank. All ranks have the same dtype and shape, except for the extents along `dim` of
            merge.concat().
        merge: A kind of merge of muster.merge: concat(dim), stack, sum, max, same or first.
        into: On the root, a writable contiguous tensor that receives the result and is then returned.

    Returns:
        The result on the root, read-only and valid as long as it is held. None on the other ranks.
    """
    options = _options(root_tensors, timeout, route, into=None if into is None else [into])
    return _core.merge_tensor(tensor, merge, ranks, _resolve(group), options)[1]


def as_tensor(object: typing.Any, dtype: str | None = None, shape: typing.Iterable[int] | None = None) -> Tensor:
    """Returns a muster.Tensor of the memory of an object, without a copy. The tensor keeps the object alive.

    Args:
        object: A muster.Tensor, or an object with DLPack, a buffer or `__array_interface__`.
        dtype: If given, the bytes are interpreted as this dtype: `as_tensor(bytes_of_fp8, "F8_E4M3")`.
        shape: If given, the bytes are interpreted with this shape. It counts elements, also for packed dtypes ("F4",
            "U4", "I4", "F6_E2M3", "F6_E3M2"), whose elements share bytes.

    Raises:
        InvalidArgumentError: The object is not a tensor, is on a GPU, or does not have that number of bytes.
    """
    return _core.as_tensor(object, dtype, None if shape is None else list(shape))


def empty(dtype: str, shape: typing.Iterable[int]) -> Tensor:
    """Returns a writable, uninitialized tensor in new memory.

    Args:
        dtype: The dtype, such as "F32" or "BF16".
        shape: The extents of the dimensions.

    Raises:
        InvalidArgumentError: The dtype or the shape is invalid.
        OutOfSpaceError: Memory is insufficient.
    """
    return _core.empty(dtype, list(shape))


def trim(group: Group | typing.Any = None) -> int:
    """Returns the free shared memory in the pool of this rank to the system. Local.

    Args:
        group: A muster.Group, a process group of torch.distributed, or None for the world.

    Returns:
        The number of bytes.
    """
    return _core.trim(_resolve(group))
