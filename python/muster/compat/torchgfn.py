# SPDX-License-Identifier: Apache-2.0
"""The module gfn.utils.distributed of torchgfn: roles of ranks, messages of bytes, collectives and averages.

Names, parameters and defaults are those of torchgfn. The ranks are those of muster.world(), whichever launcher started
them. The first call forms their groups and is collective. `backend` is "mpi" or "torch", and both use the transport of
Muster. `group` is a group of a DistributedContext, a muster.ProcessGroup or a process group of torch.distributed. None
means all ranks. Tensors may be on any device. docs/reference/compat.md lists the deviations.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import threading
import time
import typing

from .. import _core, _gathers, _groups, errors
from .._core import ProcessGroup, Tensor
from . import _tensors

__all__ = [
    "AsyncSendHandle",
    "DistributedContext",
    "DistributedContextMPI4Py",
    "Group",
    "_first_env",
    "_get_MPI",
    "all_gather",
    "all_reduce",
    "average_gradients",
    "average_models",
    "barrier",
    "broadcast",
    "default_backend",
    "gather_distributed_data",
    "get_rank",
    "get_world_size",
    "initialize_distributed_compute",
    "initialize_distributed_compute_mpi4py",
    "isend",
    "logger",
    "recv",
    "report_load_imbalance",
    "report_time_info",
    "send",
]

logger = logging.getLogger(__name__)

#: The backend of calls that name none.
default_backend = "mpi"

Group = typing.Any


def _first_env(*names: str, default: str | None = None) -> str | None:
    """Returns the value of the first of these environment variables that is set and not empty, else `default`."""
    return next((value for value in map(os.environ.get, names) if value), default)


def _get_MPI():
    """Returns mpi4py.MPI, which Muster itself does not need.

    Raises:
        ImportError: mpi4py is not installed.
    """
    from mpi4py import MPI

    return MPI


# The state of this process: the groups of all ranks.


class _Messages:
    """The messages of this rank. Several threads may wait for messages at the same time."""

    # A wait of this length detects lost ranks. It also delays the calls of another thread.
    _SLICE = 0.1
    _PAUSE = 0.002
    # The timeout of get() at the end, which holds the lock. It is longer than a slice.
    LAST = 1.0

    def __init__(self, ranks: ProcessGroup, timeout: float):
        self.ranks = ranks
        self._timeout = timeout
        self._use = threading.Lock()
        self._wanting = 0

    def call(self, function):
        """Returns function(), which does not wait, while no other thread uses the group."""
        self._wanting += 1
        try:
            with self._use:
                return function()
        finally:
            self._wanting -= 1

    def result(self, work):
        """Waits until an operation has ended, and returns its result."""
        end = _core.clock() + self._timeout
        while True:
            with self._use:
                if work.wait(self._SLICE) or _core.clock() > end:
                    return work.get()
            if self._wanting:
                time.sleep(self._PAUSE)  # otherwise this thread would get the lock again at once


class _Job:
    """The groups of all ranks. They end with cleanup()."""

    def __init__(self, group):
        self.world = ProcessGroup(group)
        self.messages = _Messages(ProcessGroup(group), group.timeout)
        # The ranks that have a model.
        self.training: typing.Any = self.world


_job: _Job | None = None


def _the_job() -> _Job:
    global _job
    if _job is None:
        _job = _Job(_groups.world())
    return _job


def _ranks_of(group, otherwise=None) -> ProcessGroup:
    return _tensors.process_group_of((otherwise or _the_job().world) if group is None else group)


def _check_backend(backend) -> None:
    if backend not in ("mpi", "torch"):
        raise errors.InvalidArgumentError(f"backend: Unknown backend {backend!r} (expected 'mpi' or 'torch')")


# Roles.


@dataclasses.dataclass
class _Role:
    """The values that both contexts have."""

    my_rank: int
    world_size: int
    num_training_ranks: int
    agent_group_size: int
    agent_groups: typing.Optional[typing.List[Group]] = None
    agent_group_id: typing.Optional[int] = None
    train_global_group: Group = None
    assigned_buffer: typing.Optional[int] = None
    buffer_group: Group = None
    assigned_training_ranks: typing.Optional[typing.List[int]] = None

    def is_buffer_rank(self) -> bool:
        """Returns whether this rank manages a replay buffer."""
        return self.assigned_training_ranks is not None


@dataclasses.dataclass
class DistributedContextMPI4Py(_Role):
    """The role of this rank, and its groups."""

    _coordinator_rank: typing.Optional[int] = dataclasses.field(default=None, repr=False)

    def is_training_rank(self) -> bool:
        """Returns whether this rank trains."""
        return not self.is_buffer_rank() and self.my_rank != self._coordinator_rank


@dataclasses.dataclass
class DistributedContext(_Role):
    """The role of this rank, and its groups.

    A group that this rank is not in is an object that every call refuses.
    """

    dc_mpi4py: typing.Optional[DistributedContextMPI4Py] = None
    coordinator_rank: typing.Optional[int] = None

    def is_training_rank(self) -> bool:
        """Returns whether this rank trains."""
        return not self.is_buffer_rank() and not self.is_coordinator_rank()

    def is_coordinator_rank(self) -> bool:
        """Returns whether this rank is the coordinator."""
        return self.my_rank == self.coordinator_rank

    def get_train_group(self, backend: str = "mpi") -> Group:
        """Returns the group of the training ranks.

        Args:
            backend: "mpi" or "torch". Both have the same group.

        Raises:
            InvalidArgumentError: The backend is unknown.
        """
        _check_backend(backend)
        return self.train_global_group

    def cleanup(self) -> None:
        """Ends the groups of this rank, and may be called repeatedly. Local.

        The other ranks observe that this rank has left. If the ranks end at different times, call barrier() before.
        """
        global _job
        gone = _tensors.Absent("cleanup() has ended the groups of this rank")
        for each in (self, self.dc_mpi4py):
            if each is not None:
                each.train_global_group = gone
                each.agent_groups = [gone] * len(each.agent_groups or ())
                each.buffer_group = None if each.buffer_group is None else gone
        _job = None


def initialize_distributed_compute(dist_backend: str, num_remote_buffers: int, num_agent_groups: int, use_coordinator: bool = False) -> DistributedContext:
    """Divides the ranks of the job into training ranks, managers of replay buffers and a coordinator. Collective.

    A job of one rank has one training rank, whatever the numbers are.

    Args:
        dist_backend: "ccl", "mpi" or "gloo". The launcher of the job determines the transport.
        num_remote_buffers: The number of ranks that manage a replay buffer.
        num_agent_groups: The number of groups of equal size that the training ranks are divided into.
        use_coordinator: Whether the last rank becomes the coordinator.

    Raises:
        InvalidArgumentError: The numbers do not fit the ranks. All ranks raise it.
        RankMismatchError: The ranks pass different numbers. All ranks raise it.
        Error: As muster.world().
    """
    return _initialize(dist_backend, num_remote_buffers, num_agent_groups, use_coordinator)


def _initialize(dist_backend, num_remote_buffers, num_agent_groups, num_coordinators) -> DistributedContext:
    global _job

    def sizes():
        if num_coordinators not in (0, 1):
            raise errors.InvalidArgumentError(f"num_coordinators: {num_coordinators!r} is out of range (valid: 0 or 1)")
        if dist_backend not in ("ccl", "mpi", "gloo"):
            raise errors.InvalidArgumentError(f"dist_backend: unknown backend {dist_backend!r} (expected 'ccl', 'mpi' or 'gloo')")
        return (0, 1, False) if group.size == 1 else (num_remote_buffers, num_agent_groups, bool(num_coordinators))

    group = _groups.world()
    layout = _core.role_layout(group, sizes)
    _job = _Job(group)
    rank = group.rank

    def absent(name):
        return _tensors.Absent(f"rank {rank} is not in {name}")

    is_coordinator = rank == layout["coordinator_rank"]
    is_manager = rank in layout["buffer_ranks"]
    # One split makes the two groups, which have no rank in common.
    own = _job.world.split([] if is_coordinator else layout["buffer_ranks"] if is_manager else layout["training_ranks"])
    is_training = not is_coordinator and not is_manager
    training = own if is_training else absent("the group of the training ranks")
    agent_groups = [absent(f"agent group {number}") for number in range(len(layout["agent_groups"]))]
    if is_training:
        number, size = layout["agent_group_id"], layout["agent_group_size"]
        agent_groups[number] = own if len(agent_groups) == 1 else own.split(list(range(number * size, (number + 1) * size)))
    buffers = None if not layout["buffer_ranks"] else own if is_manager else absent("the group of the buffer managers")
    _job.training = training
    common = {
        "my_rank": rank,
        "world_size": group.size,
        "num_training_ranks": len(layout["training_ranks"]),
        "agent_group_size": layout["agent_group_size"],
        "agent_groups": agent_groups,
        "agent_group_id": layout["agent_group_id"],
        "train_global_group": training,
        "assigned_buffer": layout["assigned_buffer"],
        "buffer_group": buffers,
        "assigned_training_ranks": layout["assigned_training_ranks"] or None,
    }
    of_mpi = DistributedContextMPI4Py(**common, _coordinator_rank=layout["coordinator_rank"])
    return DistributedContext(**common, dc_mpi4py=of_mpi, coordinator_rank=layout["coordinator_rank"])


def initialize_distributed_compute_mpi4py(num_remote_buffers: int, num_agent_groups: int, num_coordinators: int = 0) -> DistributedContextMPI4Py:
    """Does the same as initialize_distributed_compute(). Collective.

    Args:
        num_remote_buffers: The number of ranks that manage a replay buffer.
        num_agent_groups: The number of groups of equal size that the training ranks are divided into.
        num_coordinators: 0 or 1.

    Raises:
        Error: As initialize_distributed_compute().
    """
    return _initialize("mpi", num_remote_buffers, num_agent_groups, num_coordinators).dc_mpi4py


# Messages.


def _bytes_of(data) -> Tensor:
    tensor = _gathers.as_tensor(_tensors.memory_of(data))
    return tensor.view("U8", (tensor.nbytes,))


def send(data, dst_rank: int, backend: str = default_backend, tag: int = 0) -> None:
    """Sends the bytes of a tensor to one rank.

    Args:
        data: The tensor, of any dtype and shape.
        dst_rank: The rank in the world.
        backend: "mpi" or "torch".
        tag: 0 or more. The receiver passes the same one.

    Raises:
        InvalidArgumentError: An argument is invalid.
        Error: As muster.ProcessGroup.send().
    """
    isend(data, dst_rank, backend, tag).wait()


@dataclasses.dataclass
class AsyncSendHandle:
    """A message that is being sent. It is sent even if the handle is dropped."""

    _request: typing.Any
    _buffer: typing.Any

    def is_complete(self) -> bool:
        """Returns whether the message has been sent, without waiting for that.

        Returns False after wait() has raised an exception.
        """
        return self._request.is_done()

    def wait(self) -> None:
        """Waits until the message has been sent.

        Raises:
            Error: As muster.ProcessGroup.send(). A later call raises the same exception again.
        """
        self._request.wait()


class _Sending:
    """The operation of an AsyncSendHandle."""

    def __init__(self, messages: _Messages, work):
        self._messages, self._work, self._failure = messages, work, None

    def is_done(self) -> bool:
        if self._failure is not None:
            return False
        return self._work is None or self._messages.call(self._work.is_done)

    def wait(self) -> None:
        if self._failure is not None:
            raise self._failure
        if self._work is None:
            return
        try:
            self._messages.result(self._work)
        except errors.Error as error:
            self._failure = error
            raise
        self._work = None


def isend(data, dst_rank: int, backend: str = default_backend, tag: int = 0) -> AsyncSendHandle:
    """Starts to send the bytes of a tensor to one rank, and returns without waiting.

    The elements must not change until the message has been sent.

    Args:
        data: The tensor, of any dtype and shape.
        dst_rank: The rank in the world.
        backend: "mpi" or "torch".
        tag: 0 or more. The receiver passes the same one.

    Raises:
        InvalidArgumentError: An argument is invalid.
        Error: As muster.ProcessGroup.send().
    """
    _check_backend(backend)
    messages, buffer = _the_job().messages, _bytes_of(data)
    work = messages.call(lambda: messages.ranks.isend(buffer, dst_rank, tag, timeout=messages.LAST))
    return AsyncSendHandle(_Sending(messages, work), buffer)


def recv(src_rank: int | None = None, backend: str = default_backend, tag: int = 0):
    """Receives the oldest message with a tag.

    Args:
        src_rank: The rank in the world that sends. None: any rank.
        backend: "mpi" or "torch".
        tag: The tag of the message.

    Returns:
        The rank of the sender, and the bytes as a torch tensor of uint8.

    Raises:
        InvalidArgumentError: An argument is invalid.
        RankMismatchError: The message is not a tensor.
        Error: As muster.ProcessGroup.recv().
    """
    _check_backend(backend)
    messages = _the_job().messages
    work = messages.call(lambda: messages.ranks.irecv_config(src_rank, tag, timeout=messages.LAST))
    received, source, _ = messages.result(work)
    if not isinstance(received, Tensor):
        raise errors.RankMismatchError(f"recv: message of rank {source} with tag {tag}: expected bytes, received {type(received).__name__}")
    return source, _bytes_of(received).torch()


# Collectives.


def _collective(backend, group) -> ProcessGroup:
    ranks = _ranks_of(group)
    _core.made_in(ranks, lambda: _check_backend(backend))
    return ranks


def barrier(backend: str = default_backend, group: Group = None) -> None:
    """Waits until all ranks have entered the barrier. Collective.

    Args:
        backend: "mpi" or "torch".
        group: The group. None: all ranks.

    Raises:
        Error: As muster.ProcessGroup.barrier().
    """
    _collective(backend, group).barrier()


def get_rank(backend: str = default_backend, group: Group = None) -> int:
    """Returns the rank of this process in a group. Local.

    Args:
        backend: "mpi" or "torch".
        group: The group. None: all ranks.

    Raises:
        InvalidArgumentError: The backend is unknown, or this process is not in the group.
    """
    _check_backend(backend)
    return _ranks_of(group).rank


def get_world_size(backend: str = default_backend, group: Group = None) -> int:
    """Returns the number of ranks of a group. Local.

    Args:
        backend: "mpi" or "torch".
        group: The group. None: all ranks.

    Raises:
        InvalidArgumentError: As get_rank().
    """
    _check_backend(backend)
    return _ranks_of(group).size


_OPS = {"SUM": "sum", "MAX": "max", "MIN": "min"}


def all_reduce(tensor, op: str = "SUM", backend: str = default_backend, group: Group = None) -> None:
    """Reduces the tensors of all ranks in place, with the same bits on all ranks. Collective.

    Args:
        tensor: The tensor.
        op: "SUM", "MAX" or "MIN".
        backend: "mpi" or "torch".
        group: The group. None: all ranks.

    Raises:
        Error: As muster.ProcessGroup.all_reduce().
    """
    ranks = _collective(backend, group)

    def make():
        if op not in _OPS:
            raise errors.InvalidArgumentError(f"op: unknown value {op!r} (expected 'SUM', 'MAX' or 'MIN')")
        return _tensors.memory_of(tensor)

    memory = _core.made_in(ranks, make)
    ranks.all_reduce(memory, _OPS[op])
    _tensors.write_back(tensor, memory)


def all_gather(output_list, tensor, backend: str = default_backend, group: Group = None) -> None:
    """Copies the tensor of each rank into `output_list`. Collective.

    Args:
        output_list: One tensor per rank.
        tensor: The tensor of this rank.
        backend: "mpi" or "torch".
        group: The group. None: all ranks.

    Raises:
        Error: As muster.ProcessGroup.all_gather_into().
    """
    ranks = _collective(backend, group)
    outs, memory = _core.made_in(ranks, lambda: ([_tensors.memory_of(each) for each in output_list], _tensors.memory_of(tensor)))
    ranks.all_gather_into(outs, memory)
    for each, out in zip(output_list, outs):
        _tensors.write_back(each, out)


def broadcast(tensor, src: int, backend: str = default_backend, group: Group = None) -> None:
    """Copies the elements of one rank into the tensors of all ranks. Collective.

    Args:
        tensor: The tensor.
        src: The rank in the group that sends.
        backend: "mpi" or "torch".
        group: The group. None: all ranks.

    Raises:
        Error: As muster.ProcessGroup.broadcast().
    """
    ranks = _collective(backend, group)
    memory = _core.made_in(ranks, lambda: _tensors.memory_of(tensor))
    ranks.broadcast(memory, src)
    if ranks.rank != src:
        _tensors.write_back(tensor, memory)


def gather_distributed_data(local_tensor, world_size: int | None = None, rank: int | None = None, training_group: Group = None):
    """Returns the rows of all ranks, in rank order, on rank 0 of the group, and None on the other ranks. Collective.

    Args:
        local_tensor: The rows of this rank: a tensor, or a list from which a tensor is made. Ranks may have different
            numbers of rows.
        world_size: The number of ranks of the group, which is checked. None: not checked.
        rank: The rank of this process in the group or in the world, which is checked. None: not checked.
        training_group: The group. None: all ranks.

    Raises:
        InvalidArgumentError: An argument is invalid. All ranks raise it.
        Error: As muster.ProcessGroup.gatherv().
    """
    ranks = _ranks_of(training_group)

    def make():
        if world_size not in (None, ranks.size):
            raise errors.InvalidArgumentError(f"world_size: {world_size} is not the size of the group, which has {ranks.size} ranks")
        if rank not in (None, ranks.rank, ranks.global_rank(ranks.rank)):
            raise errors.InvalidArgumentError(f"rank: {rank} is not this process, which has rank {ranks.rank} of the group: pass None")
        tensor = _tensor_of(local_tensor)
        return tensor, _tensors.memory_of(tensor)

    tensor, memory = _core.made_in(ranks, make)
    gathered = ranks.gatherv(memory, 0)
    return None if gathered is None else gathered.torch().to(tensor.device)


def _tensor_of(data):
    if hasattr(data, "detach"):
        return data
    import torch

    return torch.as_tensor(data)


# Averages.


def average_gradients(model) -> None:
    """Averages the gradients of a model over the training ranks, in place. Collective over these ranks.

    A parameter without a gradient is skipped. The same parameters have one on all ranks.

    Args:
        model: A torch.nn.Module.

    Raises:
        InvalidArgumentError: A gradient cannot be averaged, or this rank is not a training rank.
        RankMismatchError: The parameters of the ranks differ. The message names the first such parameter.
        Error: As muster.ProcessGroup.all_reduce().
    """
    _average(model, _ranks_of(None, _the_job().training), lambda parameter: parameter.grad, True)


def average_models(model, training_group: Group = None) -> None:
    """Averages the parameters of a model over the ranks of a group, in place. Collective.

    Args:
        model: A torch.nn.Module.
        training_group: The group. None: all training ranks.

    Raises:
        Error: As average_gradients().
    """
    _average(model, _ranks_of(training_group, _the_job().training), lambda parameter: parameter, False)


def _average(model, ranks: ProcessGroup, values, of_gradients: bool) -> None:
    def make():
        tensors = [(name, values(parameter)) for name, parameter in model.named_parameters()]
        return tensors, [(name, None if tensor is None else _tensors.memory_of(tensor)) for name, tensor in tensors]

    tensors, memories = _core.made_in(ranks, make)
    _core.average(ranks, memories, of_gradients)
    for (_, tensor), (_, memory) in zip(tensors, memories):
        if tensor is not None:
            _tensors.write_back(tensor, memory)


# Reports.


def _times(all_timing_dict, world_size: int):
    """Returns the dicts of the ranks, in which a single number has become a list."""
    most = len(all_timing_dict)
    if not isinstance(world_size, int) or not 0 < world_size <= most:
        raise errors.InvalidArgumentError(f"world_size: {world_size!r} is out of range for {most} dicts in all_timing_dict (valid: 1 to {most})")
    ranks = all_timing_dict[:world_size]
    for rank, each in enumerate(ranks):
        if not isinstance(each, dict):
            raise errors.InvalidArgumentError(f"all_timing_dict[{rank}]: {type(each).__name__} is not a dict")
    return [{step: times if isinstance(times, (list, tuple)) else [times] for step, times in each.items()} for each in ranks]


def report_load_imbalance(all_timing_dict, world_size: int) -> None:
    """Logs for each step the useful time, the mean over the ranks, and the time of waiting for the slowest rank. Local.

    Args:
        all_timing_dict: One dict per rank, which has the seconds of each iteration by the name of the step.
        world_size: The number of ranks.

    Raises:
        InvalidArgumentError: A time is negative or not a number, or `world_size` is out of range.
    """
    text, warnings = _core.report_load_imbalance(_times(all_timing_dict, world_size))
    for line in text.splitlines():
        logger.info("%s", line)
    for line in warnings:
        logger.warning("%s", line)


def report_time_info(all_timing_dict, world_size: int) -> None:
    """Logs for each step the mean and the total of each rank, and the largest and the mean total. Local.

    Args:
        all_timing_dict: As for report_load_imbalance().
        world_size: The number of ranks.

    Raises:
        InvalidArgumentError: As report_load_imbalance().
    """
    for line in _core.report_time_info(_times(all_timing_dict, world_size)).splitlines():
        logger.info("%s", line)
