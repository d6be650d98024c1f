# SPDX-License-Identifier: Apache-2.0
"""Groups of ranks: what they are made of, and torch.distributed's."""

from __future__ import annotations

import operator
import os
import socket
import sys
import threading
import typing
import weakref

from . import _core, errors
from ._core import Group


def world() -> Group:
    """The group of all ranks of this job, made at the first call and the same later on.

    An initialised torch.distributed comes first (its default group), then what C++'s world() finds: `muster run`,
    torchrun, mpiexec, srun; else it is a group of this process alone. Collective at the first call, which raises TimeoutError
    with those who have not come, and UnsupportedError or ArgumentError where the environment is of no job that it can meet.
    """
    distributed = initialized_distributed()
    if distributed is not None:
        return from_process_group(distributed.distributed_c10d._get_default_group())
    return _core.world()


def initialized_distributed():
    """torch.distributed if this process has initialised it, else None."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    return distributed


def set_world(group: Group | None) -> None:
    """Makes the group what world() finds where torch.distributed is not initialised; None: it looks anew."""
    _core.set_world(group)


def single_group() -> Group:
    """A group of this process alone."""
    return _core.single_group()


def local_group(key: str, rank: int, size: int, *, timeout: float | None = None, numbers: typing.Iterable[int] = ()) -> Group:
    """A group of `size` processes of this host and user. Collective.

    `key` is what all ranks of the group know and no other job on this host does. `timeout` (seconds) is that of the
    meeting and the group's default after it. `numbers` is what messages call the ranks, where they are some of a larger
    job: one number a rank. Raises TimeoutError with those who have not come, RankMismatchError on ranks that disagree.
    """
    return _core.local_group(key, rank, size, timeout, list(numbers))


def tcp_group(address: str, rank: int, size: int, *, timeout: float | None = None, key: str = "", listener: socket.socket | None = None) -> Group:
    """A group of processes on any hosts, over TCP between them. Collective.

    `address` is "HOST:PORT", an address of rank 0's host and a free port there, or "file:///PATH" in a directory that
    all ranks see. `timeout`, `key`: as of local_group(). Raises as that, and IoError of sockets.

    `listener`: on rank 0, a socket that listens at the port of `address` already. The call takes it over.
    """
    return _core.tcp_group(address, rank, size, timeout, key, -1 if listener is None else listener.detach())


def file_group(directory: str | os.PathLike[str], rank: int, size: int, *, timeout: float | None = None, key: str = "") -> Group:
    """A group of processes that share nothing but a directory, which all of them see. Collective. Raises as tcp_group()."""
    return _core.file_group(os.fspath(directory), rank, size, timeout, key)


def _resolve(group) -> Group:
    """The group of a call: the world if none is named."""
    if group is None:
        return world()
    if isinstance(group, Group):
        return group
    return from_process_group(group)


def _place() -> str:
    """What processes that can share memory have in common: the boot, and the namespaces of IPC and network."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        boot = file.read().strip()
    return " ".join([boot, os.readlink("/proc/self/ns/ipc"), os.readlink("/proc/self/ns/net")])


class _Met:
    """What is known of a process group that has been met, or is being met."""

    def __init__(self, kept):
        self.kept = kept
        self.key = os.urandom(16).hex()
        self.group = None
        self.lock = threading.Lock()  # held while its ranks meet


# By the identity of what they were made of. It is kept by this only where nothing can refer to it weakly; any other
# process group that is destroyed goes, and its group with it.
_met: dict[int, _Met] = {}
_met_lock = threading.Lock()


def _met_of(pg) -> _Met:
    number = id(pg)
    with _met_lock:
        met = _met.get(number)
        if met is None:
            try:
                kept = weakref.ref(pg, lambda _: _met.pop(number, None))
            except TypeError:
                kept = pg
            met = _met[number] = _Met(kept)
        return met


def from_process_group(pg: typing.Any, *, timeout: float | None = None, workspace_path: str | os.PathLike[str] | None = None) -> Group:
    """The ranks of a torch.distributed group, in its order. Collective over it at the first call, the same as long as `pg` is there.

    `pg` may also be anything with `rank`, `world_size` (attributes, or methods `rank()` and `size()`) and `store`,
    which has torch's `set` and `get`. No collective of `pg` is called. If its ranks are on several hosts they meet over
    TCP, at the host of its rank 0 by that host's name, or over files if `workspace_path` is a directory that all of them
    see; messages call them by their ranks in `pg` then.

    Raises ArgumentError on what is no process group of this process, RankMismatchError on ranks of groups of several sizes,
    and as local_group() or tcp_group().
    """
    met = _met.get(id(pg))
    if met is None or met.group is None:
        store, rank, size, numbers = _parts_of(pg)
        # The others may still read the key where an earlier call has failed.
        met = _met_of(pg)
        # The ranks meet once, whichever thread comes first.
        with met.lock:
            if met.group is None:
                met.group = _meet(store, rank, size, timeout=timeout, numbers=numbers, key=met.key, workspace_path=workspace_path)
    return met.group


def _parts_of(pg):
    """(store, rank, size, the job's numbers of the ranks)."""
    distributed = sys.modules.get("torch.distributed")
    try:
        if hasattr(pg, "store"):
            size = getattr(pg, "world_size", None)
            size = pg.size if size is None else size
            return pg.store, _number(pg.rank), _number(size), ()
        if distributed is not None and isinstance(pg, distributed.ProcessGroup):
            c10d = distributed.distributed_c10d
            rank, size = distributed.get_rank(pg), distributed.get_world_size(pg)
            if hasattr(c10d, "_get_process_group_store"):
                return c10d._get_process_group_store(pg), rank, size, distributed.get_process_group_ranks(pg)
            # Before 2.0, where the groups of a job have one store.
            store = distributed.PrefixStore(f"muster/{c10d._pg_names[pg]}", c10d._pg_map[pg][1])
            return store, rank, size, list(c10d._pg_group_ranks[pg])
    except (AttributeError, TypeError) as error:
        why = f" ({error})"
    else:
        why = ""
    raise errors.ArgumentError(
        f"{pg!r} is no group{why}: pass a muster.Group, a process group of torch.distributed that this process is in, or an object with rank, world_size and store"
    )


def _number(value) -> int:
    return operator.index(value() if callable(value) else value)


def _meet(store, rank: int, size: int, *, timeout: float | None, numbers=(), key: str = "", workspace_path=None) -> Group:
    """The group of the ranks that have a store of torch's in common. Collective. `key`: what rank 0 calls it by."""
    if rank == 0:
        store.set("muster/key", key or os.urandom(16).hex())
    store.set(f"muster/place/{rank}", f"{size} {_place()}")
    if not 0 <= rank < size:
        raise errors.ArgumentError(f"rank {rank} in a group of {size} ranks cannot be")
    places = []
    for other in range(size):
        their_size, place = _text(store.get(f"muster/place/{other}")).split(" ", 1)
        if int(their_size) != size:
            raise errors.RankMismatchError(
                f"rank {rank} is one of {size} ranks, and rank {other} one of {their_size}: these are groups of two worlds"
            )
        places.append(place)
    key = _text(store.get("muster/key"))
    if len(set(places)) == 1:
        return local_group(key, rank, size, timeout=timeout, numbers=numbers)
    if workspace_path is not None:
        return file_group(workspace_path, rank, size, timeout=timeout, key=key)
    listener = None
    if rank == 0:
        # It listens until the group takes it over, so that no other process gets the port.
        dual = socket.has_dualstack_ipv6()
        listener = socket.create_server(("", 0), family=socket.AF_INET6 if dual else socket.AF_INET, backlog=socket.SOMAXCONN, dualstack_ipv6=dual)
        store.set("muster/address", f"{socket.gethostname()}:{listener.getsockname()[1]}")
    return tcp_group(_text(store.get("muster/address")), rank, size, timeout=timeout, key=key, listener=listener)


def _text(value) -> str:
    return value.decode() if isinstance(value, bytes) else value
