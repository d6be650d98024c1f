# SPDX-License-Identifier: Apache-2.0
"""torch.distributed of PyTorch 0.3 and 0.4, on Muster: `import muster.compat.torch_distributed as dist`.

Ranks are those of the world, also in calls with a group. Results are written into the tensors of the caller. All ranks
of a collective call raise an error about the arguments of one of them, and the group remains usable. The deviations from
the original are listed in docs/reference/compat.md.
"""

from __future__ import annotations

import functools
import operator
import os
import threading

import torch

from .. import ProcessGroup, _core
from .._core import RemoteTensor
from ..errors import InvalidArgumentError
from ..torch import _memory

__all__ = [
    "MasterWorker",
    "RemoteTensor",
    "all_gather",
    "all_gather_multigpu",
    "all_reduce",
    "all_reduce_multigpu",
    "barrier",
    "broadcast",
    "broadcast_multigpu",
    "destroy_process_group",
    "dist_backend",
    "gather",
    "get_rank",
    "get_world_size",
    "group",
    "init_master_worker",
    "init_process_group",
    "irecv",
    "is_available",
    "is_initialized",
    "isend",
    "new_group",
    "recv",
    "reduce",
    "reduce_multigpu",
    "reduce_op",
    "scatter",
    "send",
]


class dist_backend:
    """The numbers of the backends."""

    UNDEFINED = -1
    TCP = 0
    MPI = 1
    GLOO = 2
    NCCL = 3


class reduce_op:
    """The reductions. Calls also accept those of muster.ProcessGroup."""

    SUM = "sum"
    PRODUCT = "product"
    MAX = "max"
    MIN = "min"


class group:
    """WORLD is the group of all ranks."""

    WORLD = object()


_INITIALIZED_PG = 1
_INITIALIZED_MW = 2
_initialized = 0
_backend = dist_backend.UNDEFINED
_world: ProcessGroup | None = None
_place = (-1, -1)  # the rank of this process and the number of ranks
_starting = threading.Lock()  # held during the rendezvous


class _Group:
    """A group of ranks of the world. `ranks` is None on a rank that is not in it."""

    def __init__(self, ranks: ProcessGroup | None):
        self.ranks = ranks


class _DistributedRequest:
    """A message that has been started.

    Args:
        request: The work of muster.ProcessGroup.
    """

    def __init__(self, request):
        self.request = request
        self._into = None
        self._has_ended = False

    def is_completed(self):
        """Returns whether the message has been transferred. It does not wait."""
        return self._has_ended or self.request.is_done()

    def wait(self):
        """Waits until the message has been transferred. After that, later calls return at once.

        Raises:
            Error: As send() and recv().
        """
        if self._has_ended:
            return
        self.request.get()
        self._has_ended = True
        if self._into is not None:
            self._into.back()


def is_available():
    """Returns True."""
    return True


def is_initialized():
    """Returns whether this process has a process group. In the master-worker mode it has none."""
    return _initialized == _INITIALIZED_PG


def init_process_group(backend, init_method="env://", **kwargs):
    """Creates the process group of the program. Collective over the job.

    Args:
        backend: "shm" if all ranks are on this host; "tcp" or "gloo" for ranks on any hosts; "mpi" for a job that MPI
            has started. Ranks of one host use shared memory with each of them.
        init_method: "env://", "tcp://HOST:PORT" with an address of the host of rank 0, or "file:///PATH" with a file
            that does not exist, in a directory that all ranks see. With env:// the ranks meet as those of
            muster.world(). If only MASTER_ADDR and MASTER_PORT are set, pass `rank` and `world_size`. The ranks
            then meet at that address.
        kwargs: `world_size`, the number of ranks, and `rank`, the rank of this process, which may be omitted with
            env://. `group_name` distinguishes jobs that meet at one address. `timeout` is the longest wait for the
            other ranks in seconds, and afterwards the default of the group (None: MUSTER_TIMEOUT, or 10 minutes).

    Raises:
        InvalidArgumentError: This process is already initialized, or an argument is invalid.
        UnsupportedError: The backend does not reach all ranks.
        TimeoutError: Ranks did not arrive. The message names them.
    """
    _start(_INITIALIZED_PG, backend, init_method, kwargs, ProcessGroup)


def init_master_worker(backend, init_method="env://", **kwargs):
    """Starts the master-worker mode in place of a process group. Collective over the job.

    In this mode get_rank() and get_world_size() work, and the collectives do not. It lasts until
    destroy_process_group().

    Args:
        backend: As for init_process_group().
        init_method: As for init_process_group().
        kwargs: As for init_process_group().

    Returns:
        A MasterWorker. Rank 0 is the master. The other ranks call serve().

    Raises:
        Error: As init_process_group().
    """
    return _start(_INITIALIZED_MW, backend, init_method, kwargs, MasterWorker)


def _start(mode, backend, init_method, kwargs, make):
    global _initialized, _backend, _world, _place
    options = {"world_size": -1, "rank": -1, "group_name": "", "timeout": None}
    unknown = [name for name in kwargs if name not in options]
    if unknown:
        raise InvalidArgumentError(f"{unknown[0]}: unexpected keyword argument: pass {', '.join(options)}")
    options.update(kwargs)
    with _starting:
        if _initialized:
            raise InvalidArgumentError("the process group is already initialized: call destroy_process_group() first")
        method = _method(backend, init_method, options)
        members = _core.init_group(backend, method, **options)
        made = make(members)
        if mode == _INITIALIZED_PG:
            _world = made
        _place = members.rank, members.size
        _backend = getattr(dist_backend, backend.upper(), dist_backend.UNDEFINED)
        _initialized = mode
    return made


def _method(backend, init_method, options):
    """Returns the init method. Programs that start their own processes set only the address in the environment."""
    address, port = (os.environ.get(name) for name in ("MASTER_ADDR", "MASTER_PORT"))
    is_given = -1 not in (options["rank"], options["world_size"])
    if init_method != "env://" or backend == "mpi" or not (address and port and is_given) or {"RANK", "WORLD_SIZE"} & os.environ.keys():
        return init_method
    return f"tcp://[{address}]:{port}" if ":" in address else f"tcp://{address}:{port}"


def destroy_process_group():
    """Ends the process group or the master-worker mode, so that either may be initialized again. Local."""
    global _initialized, _backend, _world, _place
    if _world is not None:
        _core.forget_failed_world(_world)
    _initialized, _backend, _world, _place = 0, dist_backend.UNDEFINED, None, (-1, -1)


def get_rank():
    """Returns the rank of this process in the world, in either mode.

    Raises:
        InvalidArgumentError: Neither mode is initialized.
    """
    _check_initialized()
    return _place[0]


def get_world_size():
    """Returns the number of ranks of the world, in either mode.

    Raises:
        InvalidArgumentError: Neither mode is initialized.
    """
    _check_initialized()
    return _place[1]


def _check_initialized():
    if not _initialized:
        raise InvalidArgumentError("the process group is not initialized: call init_process_group() first")


def _all_ranks() -> ProcessGroup:
    _check_initialized()
    if _world is None:
        raise InvalidArgumentError("the master-worker mode has no collectives: call destroy_process_group(), then init_process_group()")
    return _world


def _ranks_of(handle) -> ProcessGroup:
    """Returns the process group of a handle."""
    world = _all_ranks()
    if handle is group.WORLD:
        return world
    if not isinstance(handle, _Group):
        raise InvalidArgumentError(f"group: {handle!r} is not a group: pass group.WORLD, or the result of new_group()")
    if handle.ranks is None:
        raise InvalidArgumentError(f"group: rank {world.rank} is not in this group: call it only on the ranks of the list")
    return handle.ranks


def _tensor(name, value):
    if not isinstance(value, torch.Tensor):
        raise InvalidArgumentError(f"{name}: {type(value).__name__} is not a torch tensor")
    return value.detach()


def _tensors(name, values):
    if isinstance(values, torch.Tensor) or not hasattr(values, "__iter__"):
        raise InvalidArgumentError(f"{name}: {type(values).__name__} is not a list of tensors")
    return [_tensor(name, value) for value in values]


def _reducible(name, value):
    tensor = _tensor(name, value)
    if tensor.dtype not in _memory.NATIVE:
        raise InvalidArgumentError(f"{name}: {tensor.dtype} cannot be reduced: convert it to a dtype with arithmetic")
    return tensor


def _number(name, value):
    try:
        return operator.index(value)
    except TypeError:
        raise InvalidArgumentError(f"{name}: {type(value).__name__} is not an int") from None


def _root(ranks, name, rank):
    """Returns the rank in the group of a rank of the world."""
    rank, world = _number(name, rank), _all_ranks()
    found = ranks.group_rank(world.global_rank(rank)) if 0 <= rank < world.size else None
    if found is None:
        raise InvalidArgumentError(f"{name}: rank {rank} is not in this group, which has {ranks.size} of {world.size} ranks")
    return found


def isend(tensor, dst):
    """Starts to send a tensor.

    Args:
        tensor: The tensor. It must not change until the request is completed.
        dst: The rank that receives it.

    Returns:
        A request with is_completed() and wait().

    Raises:
        Error: As send().
    """
    return _DistributedRequest(_all_ranks().isend(_memory.flat(_tensor("tensor", tensor)), _number("dst", dst)))


def irecv(tensor, src):
    """Starts to receive a tensor.

    Args:
        tensor: The tensor to fill. Use it after wait() of the request.
        src: The rank that sends it.

    Returns:
        A request with is_completed() and wait().

    Raises:
        Error: As recv().
    """
    into = _memory.Into([_tensor("tensor", tensor)])
    request = _DistributedRequest(_all_ranks().irecv(into.flat[0], _number("src", src)))
    request._into = into
    return request


def send(tensor, dst):
    """Sends a tensor.

    Args:
        tensor: The tensor.
        dst: The rank that receives it.

    Raises:
        InvalidArgumentError: An argument is invalid. Only this rank raises it.
        PeerLostError: The other rank died or left.
        TimeoutError: The other rank made no progress.
    """
    _all_ranks().send(_memory.flat(_tensor("tensor", tensor)), _number("dst", dst))


def recv(tensor, src=None):
    """Receives a tensor.

    Args:
        tensor: The tensor to fill. It has the dtype and the number of elements of the sent tensor.
        src: The rank that sends it. None: any rank.

    Returns:
        The rank of the sender.

    Raises:
        RankMismatchError: The tensor does not match the message.
        Error: As send().
    """
    into = _memory.Into([_tensor("tensor", tensor)])
    sender = _all_ranks().recv(into.flat[0], None if src is None else _number("src", src))
    into.back()
    return sender


def broadcast(tensor, src, group=group.WORLD):
    """Copies the elements of the tensor of `src` into the tensor of every rank.

    Args:
        tensor: The tensor to send or to fill.
        src: The rank of the world that sends.
        group: The group of the call.
    """
    ranks = _ranks_of(group)
    into, root = _core.made_in(ranks, lambda: (_memory.Into([_tensor("tensor", tensor)]), _root(ranks, "src", src)))
    ranks.broadcast(into.flat[0], root)
    if ranks.rank != root:
        into.back()


def all_reduce(tensor, op=reduce_op.SUM, group=group.WORLD):
    """Reduces the tensors of all ranks in place, with the same bits on all ranks.

    Args:
        tensor: The tensor of this rank, which receives the result.
        op: A value of reduce_op.
        group: The group of the call.
    """
    ranks = _ranks_of(group)
    into = _core.made_in(ranks, lambda: _memory.Into([_reducible("tensor", tensor)]))
    ranks.all_reduce(into.flat[0], op)
    into.back()


def reduce(tensor, dst, op=reduce_op.SUM, group=group.WORLD):
    """Reduces the tensors of all ranks into the tensor of `dst`. The other tensors are not changed.

    Args:
        tensor: The tensor of this rank.
        dst: The rank of the world that receives the result.
        op: A value of reduce_op.
        group: The group of the call.
    """
    ranks = _ranks_of(group)
    into, root = _core.made_in(ranks, lambda: (_memory.Into([_reducible("tensor", tensor)]), _root(ranks, "dst", dst)))
    ranks.reduce(into.flat[0], root, op)
    if ranks.rank == root:
        into.back()


def all_gather(tensor_list, tensor, group=group.WORLD):
    """Copies the tensor of each rank into `tensor_list` on all ranks.

    Args:
        tensor_list: One tensor per rank of the group, in its order, to fill.
        tensor: The tensor of this rank.
        group: The group of the call.
    """
    ranks = _ranks_of(group)
    into, own = _core.made_in(ranks, lambda: (_memory.Into(_tensors("tensor_list", tensor_list)), _memory.flat(_tensor("tensor", tensor))))
    ranks.all_gather_into(into.flat, own)
    into.back()


def gather(tensor, **kwargs):
    """Copies the tensor of each rank into `gather_list` on the rank `dst`.

    Args:
        tensor: The tensor of this rank.
        kwargs: `dst`, the rank of the world that receives. It may be omitted only on that rank, which passes
            `gather_list`, one tensor per rank of the group, to fill. That list is None or empty on the other ranks.
            `group` is the group of the call.

    Raises:
        InvalidArgumentError: `dst` is missing, or `gather_list` is missing on `dst` or given elsewhere.
    """
    ranks, root, outs = _rooted(kwargs, "dst", "gather_list")
    into, own = _core.made_in(ranks, lambda: (_memory.Into(outs()), _memory.flat(_tensor("tensor", tensor))))
    ranks.gather_into(into.flat, own, root)
    into.back()


def scatter(tensor, **kwargs):
    """Copies the parts of `scatter_list` of the rank `src` into the tensors of the ranks.

    Args:
        tensor: The tensor to fill.
        kwargs: `src`, the rank of the world that sends. It may be omitted only on that rank, which passes
            `scatter_list`, one tensor per rank of the group. That list is None or empty on the other ranks. `group` is
            the group of the call.

    Raises:
        InvalidArgumentError: `src` is missing, or `scatter_list` is missing on `src` or given elsewhere.
    """
    ranks, root, parts = _rooted(kwargs, "src", "scatter_list")
    into, given = _core.made_in(ranks, lambda: (_memory.Into([_tensor("tensor", tensor)]), [_memory.flat(part) for part in parts()]))
    ranks.scatter(into.flat[0], given, root)
    into.back()


def _rooted(kwargs, name, list_name):
    """Returns (ranks, root, tensors) of gather() and scatter(). tensors() returns the tensors of the list."""
    kwargs = dict(kwargs)
    ranks = _ranks_of(kwargs.pop("group", group.WORLD))
    given = kwargs.pop(list_name, None)
    number = kwargs.pop(name, None)

    def root():
        if kwargs:
            raise InvalidArgumentError(f"{next(iter(kwargs))}: unexpected keyword argument: pass {name}, {list_name} or group")
        if number is None and not given:
            raise InvalidArgumentError(f"{name}: missing: pass it on every rank without a {list_name}")
        found = ranks.rank if number is None else _root(ranks, name, number)
        if found == ranks.rank and given is None:
            raise InvalidArgumentError(f"{list_name}: missing on rank {get_rank()}, which is {name}: pass one tensor per rank")
        if found != ranks.rank and given:
            raise InvalidArgumentError(f"{list_name}: given on rank {get_rank()}, but {name} is {number}: pass it only there")
        return found

    return ranks, _core.made_in(ranks, root), lambda: _tensors(list_name, given or [])


def barrier(group=group.WORLD):
    """Waits until all ranks of the group have entered the barrier.

    Args:
        group: The group of the call.
    """
    _ranks_of(group).barrier()


def new_group(ranks=None):
    """Returns a group of some ranks of the world. Collective over all ranks of the world, also those not in the list.

    Args:
        ranks: The ranks, the same list on all ranks. None: all ranks.

    Raises:
        InvalidArgumentError: A rank does not exist or occurs twice. All ranks raise it.
        RankMismatchError: The lists differ. All ranks raise it.
    """
    world = _all_ranks()
    return _Group(world.split(range(world.size) if ranks is None else ranks))


# Several tensors per rank. Each step is a call with one tensor per rank in memory of the host, so the tensors of a rank
# are combined on it.

_FUNCTIONS = {reduce_op.SUM: torch.add, reduce_op.PRODUCT: torch.mul, reduce_op.MAX: torch.maximum, reduce_op.MIN: torch.minimum}


def _on_devices(name, values):
    """Returns the tensors of a rank, each of which is on another GPU."""
    tensors = _tensors(name, values)
    if not tensors:
        raise InvalidArgumentError(f"{name}: the list is empty: pass one tensor per GPU")
    for tensor in tensors:
        if not tensor.is_cuda:
            raise InvalidArgumentError(f"{name}: a tensor is on {tensor.device}: pass tensors on GPUs, or call the function for one tensor per rank")
        if (tensor.dtype, tensor.shape) != (tensors[0].dtype, tensors[0].shape):
            raise InvalidArgumentError(f"{name}: {tensor.dtype} {list(tensor.shape)} differs from {tensors[0].dtype} {list(tensors[0].shape)} of the first tensor")
    if len({tensor.device for tensor in tensors}) < len(tensors):
        raise InvalidArgumentError(f"{name}: two tensors are on one GPU: pass one tensor per GPU")
    return tensors


def _reduced(tensors, op):
    """Returns the reduction of the tensors of this rank, as a new tensor in memory of the host."""
    if op not in _FUNCTIONS:
        raise InvalidArgumentError(f"op: unknown value {op!r}: pass a value of reduce_op")
    first = _reducible("tensor_list", tensors[0])
    return functools.reduce(_FUNCTIONS[op], (tensor.to(first.device) for tensor in tensors[1:]), first.clone()).cpu()


def _same_count(ranks, tensors):
    """All ranks raise an error if they have different numbers of tensors."""
    counts = ranks.all_gather_config(len(tensors))
    if len(set(counts)) != 1:
        raise InvalidArgumentError(f"tensor_list: the ranks pass {counts} tensors: pass the same number on all ranks")


def _reduced_here(ranks, tensor_list, op):
    """Returns the tensors of this rank and their reduction."""
    tensors, result = _core.made_in(ranks, lambda: (made := _on_devices("tensor_list", tensor_list), _reduced(made, op)))
    _same_count(ranks, tensors)
    return tensors, result


def broadcast_multigpu(tensor_list, src, group=group.WORLD):
    """Copies the first tensor of `src` into all tensors of all ranks.

    Args:
        tensor_list: One tensor per GPU of this rank.
        src: The rank of the world that sends.
        group: The group of the call.

    Raises:
        InvalidArgumentError: A tensor is not on a GPU. All ranks raise it.
    """
    ranks = _ranks_of(group)
    tensors = _core.made_in(ranks, lambda: _on_devices("tensor_list", tensor_list))
    _same_count(ranks, tensors)
    first = tensors[0].cpu()
    broadcast(first, src, group)
    for tensor in tensors:
        tensor.copy_(first)


def all_reduce_multigpu(tensor_list, op=reduce_op.SUM, group=group.WORLD):
    """Reduces all tensors of all ranks, and writes the result into each of them.

    Args:
        tensor_list: One tensor per GPU of this rank.
        op: A value of reduce_op.
        group: The group of the call.

    Raises:
        InvalidArgumentError: A tensor is not on a GPU. All ranks raise it.
    """
    ranks = _ranks_of(group)
    tensors, result = _reduced_here(ranks, tensor_list, op)
    all_reduce(result, op, group)
    for tensor in tensors:
        tensor.copy_(result)


def reduce_multigpu(tensor_list, dst, op=reduce_op.SUM, group=group.WORLD):
    """Reduces all tensors of all ranks into the first tensor of `dst`. The other tensors are not changed.

    Args:
        tensor_list: One tensor per GPU of this rank.
        dst: The rank of the world that receives the result.
        op: A value of reduce_op.
        group: The group of the call.

    Raises:
        InvalidArgumentError: A tensor is not on a GPU. All ranks raise it.
    """
    ranks = _ranks_of(group)
    tensors, result = _reduced_here(ranks, tensor_list, op)
    reduce(result, dst, op, group)
    if get_rank() == dst:
        tensors[0].copy_(result)


def all_gather_multigpu(output_tensor_lists, input_tensor_list, group=group.WORLD):
    """Copies tensor j of rank k of the group into output_tensor_lists[i][k * n + j], for all of n tensors per rank.

    Args:
        output_tensor_lists: For each tensor of this rank, a list of one tensor per tensor of all ranks, on its GPU.
        input_tensor_list: One tensor per GPU of this rank.
        group: The group of the call.

    Raises:
        InvalidArgumentError: A tensor is not on a GPU, or a list does not match. All ranks raise it.
    """
    ranks = _ranks_of(group)

    def arguments():
        tensors = _on_devices("input_tensor_list", input_tensor_list)
        lists = [_tensors("output_tensor_lists", outs) for outs in output_tensor_lists]
        wanted = [ranks.size * len(tensors)] * len(tensors)
        if [len(outs) for outs in lists] != wanted:
            raise InvalidArgumentError(f"output_tensor_lists: {len(lists)} lists of {[len(outs) for outs in lists]} tensors: pass lists of {wanted}")
        return tensors, lists

    tensors, lists = _core.made_in(ranks, arguments)
    _same_count(ranks, tensors)
    for index, tensor in enumerate(tensors):
        held = tensor.cpu()
        outs = [torch.empty_like(held) for _ in range(ranks.size)]
        all_gather(outs, held, group)
        for rank, received in enumerate(outs):
            for each in lists:
                each[rank * len(tensors) + index].copy_(received)


def _clear_group_cache(group=group.WORLD):
    """Checks the group. Groups have no caches that must be cleared.

    Args:
        group: A group of this rank.
    """
    _ranks_of(group)


def _register_stream(stream):
    """Checks that the program is initialized. Muster needs no list of streams.

    Args:
        stream: It is not used.
    """
    _check_initialized()


# The names of the dtypes of Muster whose elements fill() makes from a number.
_DTYPES = {"F32": "float32", "F64": "float64", "F16": "float16", "BF16": "bfloat16", "BOOL": "bool", "U8": "uint8"}
_DTYPES.update({f"I{bits}": f"int{bits}" for bits in (8, 16, 32, 64)})


class MasterWorker(_core.MasterWorker):
    """A master, rank 0, that controls tensors on the other ranks. init_master_worker() returns it.

    The docstrings of muster._core.MasterWorker describe make(), copy(), add(), wait(), shutdown() and serve().
    """

    def fill(self, tensor: RemoteTensor, element, *, timeout: float | None = None) -> None:
        """Sets all elements of a remote tensor.

        Args:
            tensor: The remote tensor.
            element: A number, or a tensor of one element of the same dtype.
            timeout: The longest wait in seconds. None: the default of the group.

        Raises:
            InvalidArgumentError: The element does not match the dtype.
        """
        if isinstance(element, (int, float)):
            if tensor.dtype not in _DTYPES:
                raise InvalidArgumentError(f"element: a number has no form as {tensor.dtype}: pass a tensor of one element")
            element = torch.full((), element, dtype=getattr(torch, _DTYPES[tensor.dtype]))
        super().fill(tensor, element, timeout=timeout)

    def fetch(self, tensor: RemoteTensor, *, timeout: float | None = None) -> torch.Tensor:
        """Returns a copy of a remote tensor.

        Args:
            tensor: The remote tensor.
            timeout: The longest wait in seconds. None: the default of the group.

        Raises:
            Error: A request of the worker has failed.
        """
        return super().fetch(tensor, timeout=timeout).torch()
