# SPDX-License-Identifier: Apache-2.0
"""The gathers: layer configs and tensors of all ranks to the first rank of a list."""

from __future__ import annotations

import os
import typing

from . import _core
from ._core import Group, Tensor
from ._groups import _resolve


_Self = typing.TypeVar("_Self", bound="Gathered")


class Gathered:
    """A gather: made by a call, exchanged at `__enter__`, ended by the end of the `with`.

    On the first rank of the list it is true and has an entry for each rank; elsewhere it is false and empty. Its end is
    local. Tensors that somebody still holds stay valid after it; their sender gets their memory back when they go.
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
        """Ends the result now. Local."""
        self._entries = None

    def _list(self):
        if self._entries is None:
            words = "has ended" if self._exchange is not None else "has not begun: use it in `with`"
            raise RuntimeError(f"this gather {words}")
        return self._entries

    @property
    def ranks(self) -> list[int]:
        """The list this rank was in; empty if it was in none."""
        self._list()
        return self._exchange.ranks

    def __len__(self) -> int:
        return len(self._list())

    def __iter__(self) -> typing.Iterator[typing.Any]:
        return iter(self._list())

    def __getitem__(self, rank: int) -> typing.Any:
        """What `rank` of the group gave; None if it gave nothing."""
        entries = self._list()
        try:
            return entries[self._exchange.ranks.index(rank)]
        except (ValueError, IndexError):
            raise KeyError(f"there is nothing of rank {rank} here: the list is {self._exchange.ranks}") from None

    def present(self) -> list[tuple[int, typing.Any]]:
        """(rank, value) of those that gave one, in the order of the list."""
        return [(rank, entry) for rank, entry in zip(self.ranks, self._list()) if entry is not None]

    def explain(self) -> str:
        """One line: route, why, bytes, seconds."""
        self._list()
        return self._exchange.explain()

    def report(self) -> dict:
        """The figures of the exchange on this rank."""
        self._list()
        return self._exchange.report()

    def wait_released(self, timeout: float) -> bool:
        """On a sender: waits until the first rank no longer holds this rank's bytes. False at the deadline."""
        self._list()
        return self._exchange.wait_released(timeout)


class GatheredConfigs(Gathered):
    """Configs by rank: dicts, lists and values, with muster.Tensor at their leaves."""


class GatheredTensors(Gathered):
    """Tensors by rank."""

    def numpy(self) -> list:
        """NumPy arrays of all, in the order of the list, without a copy and read-only."""
        return [tensor.numpy() for tensor in self._list()]

    def torch(self, copy: bool | None = None) -> list:
        """torch tensors of all, in the order of the list: as Tensor.torch()."""
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
    """Gathers a config of each rank of a list to its first rank: a context manager.

    Collective over `group`, one call by each rank. `config` is a dict, a list or a value, with tensors at any leaves, or
    None: then this rank gives nothing. `ranks` is the list, the same on all of its members; None: all ranks. A rank
    that is not in the list it passes only takes part in the rounds. `group`: a muster.Group, a process group of
    torch.distributed, or None for the world.

    `own`: what the first rank's own tensors are in its result, "borrow" (its own memory) or "copy". `writable`: the
    first rank may write to the others' tensors, as long as it holds them, and no other rank sees that; those of arenas
    and of routes other than shared memory are read-only all the same. `timeout`: seconds without progress of the ranks
    waited for. `route`: how bytes travel, "auto", "shm", "tcp", "workspace", ... `workspace_path`: a directory that all
    ranks see, through which they go then.

    The exchange is made when the `with` begins, which raises the same on all ranks, with the words of the rank that cannot
    go on: ArgumentError, RankMismatchError, UnsupportedError, NoSpaceError, IoError, after which the group goes on;
    TimeoutError, PeerLostError, CancelledError, which end it.
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
    """get_configs_parallel() with one tensor a rank, all of the same dtype and shape. Raises as that.

    A tensor is a muster.Tensor, a torch.Tensor, a NumPy array, or any object with DLPack, a buffer or
    `__array_interface__`, in host memory.

    `into`, on the first rank: writable contiguous tensors, one for each rank of the list, that the results are copied to,
    its own too, and that then are the results. The senders' memory is free when the `with` has begun.
    """
    options = _options(own, timeout, route, workspace_path, writable, into)
    return GatheredTensors(_core.get_tensors, tensor, ranks, group, options)


def concat(dim: int, blocks: typing.Iterable[int] = ()) -> tuple[typing.Any, ...]:
    """A merge: the ranks' tensors one after the other along `dim`, negative from the end. `blocks`: the relative sizes of fused tensors along it."""
    return ("concat", dim, list(blocks))


#: The tensors along a new outermost dimension.
stack = ("stack",)
#: The sum of each element, in the order of the ranks.
sum = ("sum",)
#: The largest value of each element; NaN of any rank gives NaN.
max = ("max",)
#: All have the same tensor; it is compared.
same = ("same",)
#: The first rank's tensor, whatever the others have.
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
    """The tensors of all ranks of a list as one, on its first rank; None elsewhere.

    Collective, by the rules of get_tensors_parallel(). `merge` is concat(dim), stack, sum, max, same or first. Each rank
    writes its part where it belongs. dtypes and shapes are the same on all, but for sizes along `dim` of concat. The result is read-only; it stays as long as it is held. `into`, on the first rank:
    a writable contiguous tensor that the result is put into, and that then is the result.
    """
    options = _options(own, timeout, route, into=None if into is None else [into])
    return _core.merge_tensor(tensor, merge, ranks, _resolve(group), options)[1]


def as_tensor(object: typing.Any, dtype: str | None = None, shape: typing.Iterable[int] | None = None) -> Tensor:
    """The muster.Tensor of an object's memory, which it keeps. Nothing is copied.

    With a dtype or a shape, the same bytes are elements of that: `as_tensor(bytes_of_fp8, "F8_E4M3")`. Packed dtypes
    ("F4", "U4", "I4", "F6_E2M3", "F6_E3M2") share bytes among elements, and have their own shape. Raises ArgumentError on
    what is no tensor, is on a device, or has not these bytes.
    """
    return _core.as_tensor(object, dtype, None if shape is None else list(shape))


def empty(dtype: str, shape: typing.Iterable[int]) -> Tensor:
    """A tensor of fresh memory, writable and not initialised. `dtype`: "F32", "BF16" ... Raises ArgumentError, NoSpaceError."""
    return _core.empty(dtype, list(shape))


def trim(group: Group | typing.Any = None) -> int:
    """Gives the free shared memory of this rank's pool back to the system; returns the bytes. Local."""
    return _core.trim(_resolve(group))
