# SPDX-License-Identifier: Apache-2.0
"""Gathers layer configs and tensors of all ranks of a list on the first rank of the list, the root."""

from __future__ import annotations

import functools
import os
import typing

from . import _core
from ._core import Group, Tensor
from ._groups import _resolve
from ._names import checks_names
from ._typing import Destination, DTypeLike, RootTensors, Route, TensorLike
from .merge import Merge

if typing.TYPE_CHECKING:
    from ._futures import Future

_T = typing.TypeVar("_T")
_P = typing.ParamSpec("_P")
_R_co = typing.TypeVar("_R_co", covariant=True)
_Self = typing.TypeVar("_Self", bound="GatherResult[typing.Any]")


class _Startable(typing.Protocol[_R_co]):
    """A call that can run in the background."""

    def _begin(self, stop: _core.StopSource | None) -> typing.Any:
        """Runs the exchange, or starts it in the background if there is a `stop`."""

    def _finish(self, got: typing.Any) -> _R_co:
        """Returns the result of the Future, from that of the background call."""


class GatherResult(typing.Generic[_T]):
    """The result of a gather, and its context manager: entering the `with` block runs the exchange.

    On the root (the first rank of the list) it is true and has one entry per rank, in the order of the list: result[i]
    is the value of ranks[i]. On the other ranks it is false and empty. The end of the block releases it, which is
    local. Tensors that are still held remain valid afterwards. Their senders get the memory back when the tensors are
    destroyed.
    """

    def __init__(self, call: typing.Any, value: typing.Any, ranks: typing.Any, group: typing.Any, options: dict[str, typing.Any]):
        self._call = call
        self._arguments = (value, ranks, group, options)
        self._exchange = None
        self._entries = None
        self._is_from_future = False

    def __enter__(self: _Self) -> _Self:
        if self._is_from_future:
            self._is_from_future = False
            return self
        self._exchange, self._entries = self._begin(None)
        return self

    def _begin(self, stop: _core.StopSource | None) -> typing.Any:
        if self._arguments is None:
            raise RuntimeError("a gather is made once: call it again for the next one")
        value, ranks, group, options = self._arguments
        self._arguments = None
        return self._call(value, ranks, _resolve(group), options, stop)

    def _finish(self: _Self, got: typing.Any) -> _Self:
        self._exchange, self._entries = got
        self._is_from_future = True
        return self

    def __exit__(self, *_: object) -> None:
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

    def __iter__(self) -> typing.Iterator[_T]:
        return iter(self._list())

    @typing.overload
    def __getitem__(self, index: int) -> _T: ...

    @typing.overload
    def __getitem__(self, index: slice) -> list[_T]: ...

    def __getitem__(self, index: int | slice) -> _T | list[_T]:
        """Returns the value at a position of the list, or None if its rank passed None.

        Raises:
            IndexError: The list has no such position, or this rank is not the root.
        """
        entries = self._list()
        try:
            return entries[index]
        except IndexError:
            raise IndexError(f"index {index} is out of range for {len(entries)} entries: the list is {self._exchange.ranks}, and only the root has the result") from None

    def by_rank(self, rank: int) -> _T:
        """Returns the value of a rank of the group, or None if it passed None.

        Raises:
            KeyError: The rank is not in the list, or this rank is not the root.
        """
        entries = self._list()
        try:
            return entries[self._exchange.ranks.index(rank)]
        except (ValueError, IndexError):
            raise KeyError(f"rank {rank} has no entry here: the list is {self._exchange.ranks}, and only the root has the result") from None

    def present(self) -> list[tuple[int, _T]]:
        """Returns (rank, value) of the ranks that passed a value, in the order of the list."""
        return [(rank, entry) for rank, entry in zip(self.ranks, self._list()) if entry is not None]

    def explain(self) -> str:
        """Returns a one-line summary with the route, the reason for it, the bytes and the seconds."""
        self._list()
        return self._exchange.explain()

    def report(self) -> dict[str, typing.Any]:
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


class GatheredConfigs(GatherResult[typing.Any]):
    """The configs of the ranks: dicts, lists and values, with muster.Tensor as leaves."""


class GatheredTensors(GatherResult[Tensor]):
    """The tensors of the ranks."""

    def numpy(self) -> list[typing.Any]:
        """Returns all tensors as read-only NumPy arrays, in the order of the list, without a copy."""
        return [tensor.numpy() for tensor in self._list()]

    def torch(self, copy: bool | None = None) -> list[typing.Any]:
        """Returns all tensors as torch tensors, in the order of the list.

        Args:
            copy: As for Tensor.torch().
        """
        return [tensor.torch(copy=copy) for tensor in self._list()]


class _MergeCall:
    """A merge that has not begun."""

    def __init__(self, *arguments: typing.Any):
        self._arguments = arguments

    def _begin(self, stop: _core.StopSource | None) -> typing.Any:
        tensor, merge, ranks, group, options = self._arguments
        return _core.merge_tensor(tensor, merge, ranks, _resolve(group), options, stop)

    def _finish(self, got: typing.Any) -> Tensor | None:
        return got[1]


def _options(**given: typing.Any) -> dict[str, typing.Any]:
    """Returns the options of a call of the extension. The names are those of the parameters."""
    return {"writable": False, "into": None, "keep_files": False, "zstd_level": None, **given}


@checks_names
def get_configs_parallel(
    config: typing.Any,
    ranks: typing.Iterable[int] | None = None,
    group: Group | typing.Any = None,
    *,
    root_tensors: RootTensors = "borrow",
    writable: bool = False,
    timeout: float | None = None,
    route: Route = "auto",
    pipeline_depth: int = 2,
    memory_budget: int | str | None = None,
    pool_limit: int | str | None = None,
    workspace_path: str | os.PathLike[str] | None = None,
    keep_files: bool = False,
    zstd_level: int | None = None,
    destination: Destination = "host",
    detect_writes: bool = False,
) -> GatheredConfigs:
    """Gathers the config of each rank of a list on its first rank, the root.

    Collective over `group`: each rank makes one call. The exchange runs when the `with` block begins. A rank that is
    not in the list it passes only takes part in the rounds.

    Args:
        config: A dict, a dataclass, a list or a value, with tensors as any leaves. None: this rank passes no config.
        ranks: The list, the same on all of its members. None: all ranks.
        group: A muster.Group, a process group of torch.distributed, or None for the world.
        root_tensors: How the tensors of the root appear in its result: "borrow" for its own memory, or "copy".
        writable: Whether the root may write to the tensors of the other ranks while it holds them. No other rank sees
            these writes. Tensors of arenas, and of routes other than shared memory, remain read-only.
        timeout: The longest wait without progress of the awaited ranks, in seconds. None: the default of the group.
        route: How bytes are transferred: "auto", "local", "shm", "workspace", "mpi", "tcp" or "device". The same on all
            ranks.
        pipeline_depth: The number of results that the root may hold before senders allocate more memory.
        memory_budget: The limit of the shared memory of this rank, in bytes or as text such as "4GiB". None: no limit.
        pool_limit: The limit of the free memory that this rank keeps for the next call. None: no limit.
        workspace_path: A directory that all ranks see, through which the data is then transferred.
        keep_files: Whether the files of all members remain in `workspace_path`. The same on all members.
        zstd_level: The compression level of the files. None: no compression.
        destination: The memory in which the root receives tensors of GPUs: "host", or the "device" of its own tensors.
            The same on all ranks.
        detect_writes: Whether tensors of arenas are compared at release, and writes in between are logged. It takes
            time.

    Returns:
        A context manager, whose `with` block receives the result.

    Raises:
        Error: A rank failed. All ranks raise its error when the `with` block begins. After InvalidArgumentError,
            RankMismatchError, UnsupportedError, OutOfSpaceError or IoError the group remains usable. TimeoutError,
            PeerLostError and CancelledError abort it.
    """
    options = _options(
        root_tensors=root_tensors,
        writable=writable,
        timeout=timeout,
        route=route,
        pipeline_depth=pipeline_depth,
        memory_budget=memory_budget,
        pool_limit=pool_limit,
        workspace_path=workspace_path,
        keep_files=keep_files,
        zstd_level=zstd_level,
        destination=destination,
        detect_writes=detect_writes,
    )
    return GatheredConfigs(_core.get_configs, config, ranks, group, options)


@checks_names
def get_tensors_parallel(
    tensor: TensorLike,
    ranks: typing.Iterable[int] | None = None,
    group: Group | typing.Any = None,
    *,
    root_tensors: RootTensors = "borrow",
    writable: bool = False,
    into: typing.Iterable[TensorLike] | None = None,
    timeout: float | None = None,
    route: Route = "auto",
    pipeline_depth: int = 2,
    memory_budget: int | str | None = None,
    pool_limit: int | str | None = None,
    workspace_path: str | os.PathLike[str] | None = None,
    keep_files: bool = False,
    zstd_level: int | None = None,
    destination: Destination = "host",
    detect_writes: bool = False,
) -> GatheredTensors:
    """Gathers one tensor of each rank of a list on its first rank, the root.

    The tensors have the same dtype and shape. The rules, the other arguments and the errors are those of
    get_configs_parallel().

    Args:
        tensor: A muster.Tensor, a torch.Tensor, a NumPy array, or any object with DLPack, a buffer,
            `__array_interface__` or `__cuda_array_interface__`.
        into: On the root, writable contiguous tensors, one per rank of the list, that receive the results, the root's
            own included. They are then the result, and the memory of the senders is released when the `with` block
            begins.

    Returns:
        A context manager, whose `with` block receives the result.
    """
    options = _options(
        root_tensors=root_tensors,
        writable=writable,
        into=into,
        timeout=timeout,
        route=route,
        pipeline_depth=pipeline_depth,
        memory_budget=memory_budget,
        pool_limit=pool_limit,
        workspace_path=workspace_path,
        keep_files=keep_files,
        zstd_level=zstd_level,
        destination=destination,
        detect_writes=detect_writes,
    )
    return GatheredTensors(_core.get_tensors, tensor, ranks, group, options)


def _merge_call(
    tensor: TensorLike,
    merge: Merge,
    ranks: typing.Iterable[int] | None = None,
    group: Group | typing.Any = None,
    *,
    root_tensors: RootTensors = "borrow",
    into: TensorLike | None = None,
    timeout: float | None = None,
    route: Route = "auto",
    pipeline_depth: int = 2,
    memory_budget: int | str | None = None,
    pool_limit: int | str | None = None,
    workspace_path: str | os.PathLike[str] | None = None,
    keep_files: bool = False,
    zstd_level: int | None = None,
    detect_writes: bool = False,
) -> _MergeCall:
    options = _options(
        root_tensors=root_tensors,
        into=None if into is None else [into],
        timeout=timeout,
        route=route,
        pipeline_depth=pipeline_depth,
        memory_budget=memory_budget,
        pool_limit=pool_limit,
        workspace_path=workspace_path,
        keep_files=keep_files,
        zstd_level=zstd_level,
        destination="host",
        detect_writes=detect_writes,
    )
    return _MergeCall(tensor, merge, ranks, group, options)


def _like(begin: typing.Callable[..., typing.Any], described: typing.Callable[[], None], call: typing.Callable[_P, _T]) -> typing.Callable[_P, _T]:
    """Returns `call` with the signature of `begin`, and with the name and the docstring of `described`."""
    functools.update_wrapper(call, begin)
    call.__name__, call.__qualname__, call.__doc__ = described.__name__, described.__qualname__, described.__doc__
    return checks_names(call)


def _blocking(begin: typing.Callable[_P, _Startable[_R_co]]) -> typing.Callable[[typing.Callable[[], None]], typing.Callable[_P, _R_co]]:
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R_co:
        made = begin(*args, **kwargs)
        return made._finish(made._begin(None))

    return lambda described: _like(begin, described, call)


def _in_background(begin: typing.Callable[_P, _Startable[_R_co]]) -> typing.Callable[[typing.Callable[[], None]], typing.Callable[_P, Future[_R_co]]]:
    def call(*args: _P.args, **kwargs: _P.kwargs) -> Future[_R_co]:
        from ._futures import Future

        made = begin(*args, **kwargs)
        stop = _core.StopSource()
        return Future(made._begin(stop).get, made._finish, stop)

    return lambda described: _like(begin, described, call)


@_blocking(_merge_call)
def merge_tensor_parallel() -> None:
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


@_in_background(get_configs_parallel)
def get_configs_async() -> None:
    """Starts get_configs_parallel(), and returns a Future of its result.

    The result may be used without `with`; release() or the end of its `with` block releases it. Collective: all ranks
    start the same calls in the same order. The calls of a group run one after the other on a thread of the library,
    independently of its other calls. Inputs must not change until the Future is done. Tensors on GPUs are rejected.

    Raises:
        InvalidArgumentError: An argument is invalid. The futures of the other ranks raise it.
        Error: The first such call of a group duplicates it, and raises the errors of duplicate().
    """


@_in_background(get_tensors_parallel)
def get_tensors_async() -> None:
    """Starts get_tensors_parallel(), and returns a Future of its result. The rules are those of get_configs_async()."""


@_in_background(_merge_call)
def merge_tensor_async() -> None:
    """Starts merge_tensor_parallel(), and returns a Future of its result. The rules are those of get_configs_async()."""


def as_tensor(object: TensorLike, dtype: DTypeLike | None = None, shape: typing.Iterable[int] | None = None) -> Tensor:
    """Returns a muster.Tensor of the memory of an object, without a copy. The tensor keeps the object alive.

    Args:
        object: A muster.Tensor, or an object with DLPack, a buffer, `__array_interface__` or `__cuda_array_interface__`.
        dtype: If given, the bytes are interpreted as this dtype: `as_tensor(bytes_of_fp8, "F8_E4M3")`.
        shape: If given, the bytes are interpreted with this shape. It counts elements, also for packed dtypes ("F4",
            "U4", "I4", "F6_E2M3", "F6_E3M2"), whose elements share bytes.

    Raises:
        InvalidArgumentError: The object is not a tensor, or does not have that number of bytes.
        UnsupportedError: The object is on a GPU, and libmuster-cuda is not installed.
    """
    return _core.as_tensor(object, dtype, None if shape is None else list(shape))


def empty(dtype: DTypeLike, shape: typing.Iterable[int]) -> Tensor:
    """Returns a writable, uninitialized tensor in new memory.

    Args:
        dtype: A name such as "F32" or "BF16", or a dtype of NumPy, ml_dtypes or PyTorch.
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
