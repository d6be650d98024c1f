# SPDX-License-Identifier: Apache-2.0
"""Groups of ranks: how they are formed, and groups of torch.distributed."""

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
from ._names import checks_names


def world() -> Group:
    """Returns the group of all ranks of this job. The first call forms the group and is collective.

    If torch.distributed is initialized, the world is the group of its default process group. Otherwise world() follows
    the same rules as in C++: `muster run`, torchrun, mpiexec, srun, or a group of this process alone.

    Raises:
        TimeoutError: Ranks did not arrive. The message names them.
        UnsupportedError: The ranks of this job cannot reach each other.
        InvalidArgumentError: Environment variables are malformed or contradict each other.
    """
    distributed = initialized_distributed()
    if distributed is not None:
        return from_process_group(distributed.distributed_c10d._get_default_group())
    return _core.world()


def initialized_distributed():
    """Returns torch.distributed if this process has initialized it, else None."""
    distributed = sys.modules.get("torch.distributed")
    # Programs may have replaced the functions of torch.distributed (muster.compat.install), not those of this module.
    c10d = getattr(distributed, "distributed_c10d", None)
    return distributed if c10d is not None and c10d.is_initialized() else None


def set_world(group: Group | None) -> None:
    """Sets the group that world() returns if torch.distributed is not initialized.

    Args:
        group: The group. None: the next call of world() reads the environment again.
    """
    _core.set_world(group)


def single_group() -> Group:
    """Returns a group of this process alone."""
    return _core.single_group()


@checks_names
def local_group(key: str, rank: int, size: int, *, timeout: float | None = None, global_ranks: typing.Iterable[int] = ()) -> Group:
    """Returns a group of processes of this host and user. Collective.

    Args:
        key: Identifies the group. It is the same on all its ranks and different from other jobs on this host.
        rank: The rank of this process.
        size: The number of ranks.
        timeout: The longest wait for the other ranks in seconds, afterwards the default timeout of the group. None:
            MUSTER_TIMEOUT, or 10 minutes.
        global_ranks: The numbers of the ranks in their job, one per rank, for error messages. Empty: 0, 1, ...

    Raises:
        TimeoutError: Ranks did not arrive. The message names them.
        RankMismatchError: The ranks disagree about the size, or two of them have the same number.
        InvalidArgumentError: The key is empty, or the rank is out of range.
    """
    return _core.local_group(key, rank, size, timeout, list(global_ranks))


def tcp_group(address: str, rank: int, size: int, *, timeout: float | None = None, key: str = "", listener: socket.socket | None = None) -> Group:
    """Returns a group of processes on any hosts, connected by TCP. Collective.

    Args:
        address: "HOST:PORT", an address of the host of rank 0 with a free port, or "file:///PATH" in a directory that
            all ranks see.
        rank: The rank of this process.
        size: The number of ranks.
        timeout: As for local_group().
        key: As for local_group().
        listener: On rank 0, a socket that already listens at the port of `address`. The call takes ownership of it.

    Raises:
        IoError: A socket failed.
        Error: As local_group().
    """
    return _core.tcp_group(address, rank, size, timeout, key, -1 if listener is None else listener.detach())


def file_group(directory: str | os.PathLike[str], rank: int, size: int, *, timeout: float | None = None, key: str = "") -> Group:
    """Returns a group of processes that share only a directory, which all of them see. Collective.

    Args:
        directory: A directory, which is created if it does not exist.
        rank: The rank of this process.
        size: The number of ranks.
        timeout: As for local_group().
        key: As for local_group(). It is required if several jobs may start in the directory at the same time.

    Raises:
        IoError: The directory cannot be used.
        OutOfSpaceError: The directory has no space for the files of the group.
        Error: As local_group().
    """
    return _core.file_group(os.fspath(directory), rank, size, timeout, key)


def _resolve(group) -> Group:
    """Returns the group of a call. None means the world."""
    if group is None:
        return world()
    if isinstance(group, Group):
        return group
    return from_process_group(group)


def _place() -> str:
    """Returns an identifier that processes have in common if they can share memory: the boot, and the namespaces of
    IPC and network.
    """
    with open("/proc/sys/kernel/random/boot_id") as file:
        boot = file.read().strip()
    return " ".join([boot, os.readlink("/proc/self/ns/ipc"), os.readlink("/proc/self/ns/net")])


class _Met:
    """The state of a process group whose ranks have met, or are meeting."""

    def __init__(self, kept):
        self.kept = kept
        self.key = os.urandom(16).hex()
        self.group = None
        self.times = 0  # how often its ranks have met before
        self.lock = threading.Lock()  # held during the rendezvous of its ranks


# By the identity of the process group. The dict keeps a process group alive only if it does not support weak
# references. Otherwise the entry and its group are deleted with the process group.
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
    """Returns a group of the ranks of a torch.distributed group, in its order. The first call is collective over `pg`.

    Later calls return the same group as long as `pg` exists and the
    group is not closed. The call uses the store of `pg`, and none of its
    collectives. If the ranks of `pg` are on several hosts, they meet over TCP at the host name of its rank 0, or over
    files. Messages then use the ranks in `pg`.

    Args:
        pg: A process group of torch.distributed. It may also be any object with `rank`, `world_size` (attributes, or
            methods `rank()` and `size()`) and `store`, which has `set` and `get` as the stores of torch.
        timeout: As for local_group().
        workspace_path: A directory that all ranks see. Ranks on several hosts then meet over files.

    Raises:
        InvalidArgumentError: `pg` is not a process group of this process.
        RankMismatchError: The ranks pass groups of different sizes.
        Error: As local_group() or tcp_group().
    """
    met = _met.get(id(pg))
    if met is None or met.group is None or met.group.is_closed:
        store, rank, size, global_ranks = _parts_of(pg)
        # If an earlier call has failed, the other ranks may still read its key.
        met = _met_of(pg)
        # Only the first thread runs the rendezvous.
        with met.lock:
            if met.group is not None and met.group.is_closed:
                # The store still has the names of the last rendezvous.
                met.group, met.key, met.times = None, os.urandom(16).hex(), met.times + 1
            if met.group is None:
                prefix = f"muster/{met.times}" if met.times else "muster"
                met.group = _meet(store, rank, size, timeout=timeout, global_ranks=global_ranks, key=met.key, workspace_path=workspace_path, prefix=prefix)
    return met.group


def _parts_of(pg):
    """Returns (store, rank, size, global ranks)."""
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
            # Before PyTorch 2.0 the groups of a job share one store.
            store = distributed.PrefixStore(f"muster/{c10d._pg_names[pg]}", c10d._pg_map[pg][1])
            return store, rank, size, list(c10d._pg_group_ranks[pg])
    except (AttributeError, TypeError) as error:
        cause = f" ({error})"
    else:
        cause = ""
    raise errors.InvalidArgumentError(
        f"group: {pg!r} is not a group{cause}: pass a muster.Group, a process group of torch.distributed that contains this process, or an object with rank, world_size and store"
    )


def _number(value) -> int:
    return operator.index(value() if callable(value) else value)


def _meet(store, rank: int, size: int, *, timeout: float | None, global_ranks=(), key: str = "", workspace_path=None, prefix: str = "muster") -> Group:
    """Returns the group of the ranks that share a torch store. Collective. `key` identifies the group and is used on
    rank 0.
    """
    if rank == 0:
        store.set(f"{prefix}/key", key or os.urandom(16).hex())
    store.set(f"{prefix}/place/{rank}", f"{size} {_place()}")
    if not 0 <= rank < size:
        raise errors.InvalidArgumentError(f"from_process_group: rank {rank} is out of range for size {size} (valid: 0 to {size - 1})")
    places = []
    for other in range(size):
        their_size, place = _text(store.get(f"{prefix}/place/{other}")).split(" ", 1)
        if int(their_size) != size:
            raise errors.RankMismatchError(
                f"from_process_group: the sizes differ: rank {rank} has {size} ranks, and rank {other} has {their_size}: pass the same group on all ranks"
            )
        places.append(place)
    key = _text(store.get(f"{prefix}/key"))
    if len(set(places)) == 1:
        return local_group(key, rank, size, timeout=timeout, global_ranks=global_ranks)
    if workspace_path is not None:
        return file_group(workspace_path, rank, size, timeout=timeout, key=key)
    listener = None
    if rank == 0:
        # It listens until the group takes ownership of it, so no other process can take the port.
        dual = socket.has_dualstack_ipv6()
        listener = socket.create_server(("", 0), family=socket.AF_INET6 if dual else socket.AF_INET, backlog=socket.SOMAXCONN, dualstack_ipv6=dual)
        store.set(f"{prefix}/address", f"{socket.gethostname()}:{listener.getsockname()[1]}")
    return tcp_group(_text(store.get(f"{prefix}/address")), rank, size, timeout=timeout, key=key, listener=listener)


def _text(value) -> str:
    return value.decode() if isinstance(value, bytes) else value
