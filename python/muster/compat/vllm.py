# SPDX-License-Identifier: Apache-2.0
"""GroupCoordinator of vLLM (vllm.distributed.parallel_state) on Muster, for torch tensors.

The deviations from the original are listed in docs/reference/compat.md.
"""

from __future__ import annotations

import contextlib
import dataclasses
import typing

import torch

from .. import _core
from .._core import Group, ProcessGroup
from .._groups import _resolve, world
from ..errors import InvalidArgumentError, RankMismatchError, UnsupportedError
from ..torch import _memory
from ._objects import packed, unpacked

__all__ = ["GraphCaptureContext", "GroupCoordinator", "MessageQueue"]

# The bytes that the slowest reader of a queue may be behind: those of the six chunks of vLLM's queue.
_CAPACITY = 6 * (4 << 20)


@dataclasses.dataclass
class GraphCaptureContext:
    """The stream of a capture."""

    stream: typing.Any


class MessageQueue:
    """A queue of objects in shared memory: one rank writes, and the others read every object in order.

    Args:
        queue: A muster.MessageQueue.
    """

    def __init__(self, queue: _core.MessageQueue):
        self._queue = queue

    def enqueue(self, obj: typing.Any, timeout: float | None = None) -> None:
        """Writes an object. It waits only while the slowest reader is too far behind.

        Args:
            obj: The object, as for GroupCoordinator.broadcast_object().
            timeout: The longest wait in seconds. None: the default of the group.

        Raises:
            InvalidArgumentError: The object cannot be sent. The readers raise the error too.
            Error: As muster.MessageQueue.put().
        """
        try:
            # A tensor that cannot be sent is found here.
            self._queue.put_config({"object": packed(obj)}, timeout=timeout)
        except (InvalidArgumentError, UnsupportedError, RecursionError) as error:
            self._queue.put_config({"error": str(error).encode(errors="replace").decode()}, timeout=timeout)
            raise

    def dequeue(self, timeout: float | None = None) -> typing.Any:
        """Returns the next object.

        Args:
            timeout: The longest wait in seconds. None: the default of the group.

        Raises:
            InvalidArgumentError: The writer could not send its object.
            Error: As muster.MessageQueue.get().
        """
        message = self._queue.get_config(timeout=timeout)
        if "error" in message:
            raise InvalidArgumentError(f"the writer of the queue: {message['error']}")
        return unpacked(message["object"])

    def wait_until_ready(self) -> None:
        """Returns at once, because a queue is ready on all ranks when it exists."""


class GroupCoordinator:
    """One of the groups that the ranks of a job are divided into, such as those of tensor parallelism.

    Creating it is collective over muster.world(). `src` and `dst` are ranks in the group. `rank`, `ranks`, first_rank,
    last_rank, next_rank and prev_rank are ranks of the world. Calls are collective over the group, except those that
    send or receive. Except for broadcast(), results are new tensors. Calls raise the errors of muster.ProcessGroup: all ranks raise an error
    about the arguments of one of them, and the group remains usable.

    Args:
        group_ranks: The lists of all groups, the same on all ranks. Each rank of the world is in exactly one of them.
        local_rank: The rank on this host. It is only stored.
        torch_distributed_backend: It is not used, because the world determines the transport.
        use_device_communicator: It is not used. `device_communicator` is None.
        use_message_queue_broadcaster: Whether broadcast_object() from rank 0 uses a queue, whose writer waits only
            if the slowest reader is 24 MiB behind. The ranks of each group must then share memory.
        group_name: The first part of `unique_name`. None: "anonymous".

    Raises:
        InvalidArgumentError: A rank is in no list or in two.
        RankMismatchError: The ranks pass different lists.
        UnsupportedError: The ranks of a group do not share memory, and a queue is requested.
    """

    def __init__(
        self,
        group_ranks: list[list[int]],
        local_rank: int,
        torch_distributed_backend: typing.Any,
        use_device_communicator: bool,
        use_message_queue_broadcaster: bool = False,
        group_name: str | None = None,
    ):
        members = world()
        made = _core.GroupCoordinator(group_ranks, members, "anonymous" if group_name is None else group_name)
        self._made: _core.GroupCoordinator | None = made
        self.unique_name = made.unique_name
        self.rank = members.rank
        self.ranks = list(made.ranks)
        self.local_rank = local_rank
        self.rank_in_group = made.process_group.rank
        self.world_size = made.process_group.size
        self.cpu_group: Group | None = made.group
        self.device_group = self.cpu_group
        self.device = torch.device("cpu")
        self.use_device_communicator = use_device_communicator
        self.device_communicator = None
        # By the identity of a group that a call was given: the group, and the object that was made for it.
        self._process_groups: dict[int, tuple[typing.Any, ProcessGroup]] = {}
        self._coordinators: dict[int, tuple[typing.Any, _core.GroupCoordinator]] = {}
        self._rows: list[int] | None = None  # of all ranks, in the last dispatch()
        self.mq_broadcaster = self.create_mq_broadcaster() if use_message_queue_broadcaster else None

    @property
    def first_rank(self) -> int:
        """The first rank of the list."""
        return self.ranks[0]

    @property
    def last_rank(self) -> int:
        """The last rank of the list."""
        return self.ranks[-1]

    @property
    def is_first_rank(self) -> bool:
        """Whether this rank is the first of the list."""
        return self.rank == self.first_rank

    @property
    def is_last_rank(self) -> bool:
        """Whether this rank is the last of the list."""
        return self.rank == self.last_rank

    @property
    def next_rank(self) -> int:
        """The next rank of the list. The last rank is followed by the first."""
        return self.ranks[(self.rank_in_group + 1) % self.world_size]

    @property
    def prev_rank(self) -> int:
        """The previous rank of the list. The first rank is preceded by the last."""
        return self.ranks[self.rank_in_group - 1]

    @property
    def _native(self) -> _core.GroupCoordinator:
        if self._made is None:
            raise InvalidArgumentError(f"{self.unique_name}: this group was destroyed: create a new GroupCoordinator")
        return self._made

    @property
    def _ranks(self) -> ProcessGroup:
        return self._native.process_group

    def _process_group(self, group) -> ProcessGroup:
        """Returns the process group of an argument. The first call with a group is collective over it."""
        if group is None or group is self or group is self.cpu_group:
            return self._ranks
        if isinstance(group, ProcessGroup):
            return group
        if isinstance(group, GroupCoordinator):
            return group._ranks
        if id(group) not in self._process_groups:
            self._process_groups[id(group)] = group, ProcessGroup(_resolve(group))
        return self._process_groups[id(group)][1]

    def _coordinator(self, group) -> _core.GroupCoordinator | None:
        """Returns the coordinator of the slices of a dict. The first call with a group is collective over it."""
        if group is None or isinstance(group, GroupCoordinator):
            return None if group is None else group._native
        if id(group) not in self._coordinators:
            members = _resolve(group)
            self._coordinators[id(group)] = group, _core.GroupCoordinator([list(range(members.size))], members, "slices")
        return self._coordinators[id(group)][1]

    # Collectives.

    def all_reduce(self, input_: torch.Tensor) -> torch.Tensor:
        """Returns the sum of the tensors of all ranks. `input_` is not changed.

        Args:
            input_: The tensor of this rank.
        """
        return self._all_reduce_out_place(input_)

    def _all_reduce_out_place(self, input_):
        """Returns the sum of the tensors of all ranks."""
        return self._native.all_reduce(input_).torch()

    def all_gather(self, input_: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """Returns the tensors of all ranks, of one shape, concatenated along a dimension.

        Args:
            input_: The tensor of this rank.
            dim: The dimension. A negative one counts from the end.
        """
        return self._all_gather_out_place(input_, dim)

    def _all_gather_out_place(self, input_, dim):
        """Returns the tensors of all ranks, concatenated along `dim`."""
        return self._ranks.all_gather(input_, dim).torch()

    def all_gatherv(self, input_, dim: int = 0, sizes: list[int] | None = None):
        """Returns the tensors of all ranks, whose extents along a dimension may differ, concatenated along it.

        Args:
            input_: The tensor of this rank, or a list of tensors.
            dim: The dimension.
            sizes: The extents of all ranks. None: they are exchanged.

        Returns:
            A tensor, or a list of tensors.
        """
        if isinstance(input_, (list, tuple)):
            return [self.all_gatherv(each, dim, sizes) for each in input_]
        return self._ranks.all_gatherv(input_, dim, sizes=sizes).torch()

    def reduce_scatter(self, input_: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """Adds the tensors of all ranks, and returns the equal slice of this rank along a dimension.

        Args:
            input_: The tensor of this rank. Its extent along `dim` is divisible by the number of ranks.
            dim: The dimension.
        """
        return self._reduce_scatter_out_place(input_, dim)

    def _reduce_scatter_out_place(self, input_, dim):
        """Returns the slice of this rank of the sum along `dim`."""
        return self._ranks.reduce_scatter(input_, dim).torch()

    def reduce_scatterv(self, input_: torch.Tensor, dim: int = -1, sizes: list[int] | None = None) -> torch.Tensor:
        """Adds the tensors of all ranks, and returns the slice of this rank along a dimension.

        Args:
            input_: The tensor of this rank.
            dim: The dimension.
            sizes: The extents of the slices of all ranks. None: they are equal.
        """
        return self._ranks.reduce_scatter(input_, dim, sizes=sizes).torch()

    def gather(self, input_: torch.Tensor, dst: int = 0, dim: int = -1) -> torch.Tensor | None:
        """Returns the tensors of all ranks, concatenated along a dimension, on `dst`, and None on the other ranks.

        Args:
            input_: The tensor of this rank.
            dst: The rank that receives.
            dim: The dimension.
        """
        gathered = self._ranks.gather(input_, dst, dim)
        return None if gathered is None else gathered.torch()

    def broadcast(self, input_: torch.Tensor, src: int = 0) -> torch.Tensor:
        """Copies the elements of the tensor of `src` into the tensor of every rank, and returns the tensor.

        Args:
            input_: The tensor to send or to fill.
            src: The rank that sends.
        """
        ranks = self._ranks
        into = _core.made_in(ranks, lambda: _memory.Into([_tensor(input_)]))
        ranks.broadcast(into.flat[0], src)
        if src != self.rank_in_group:
            into.back()
        return input_

    def barrier(self) -> None:
        """Waits until all ranks of the group have entered the barrier."""
        self._ranks.barrier()

    # Objects.

    def broadcast_object(self, obj: typing.Any = None, src: int = 0) -> typing.Any:
        """Returns the object of `src` on all ranks.

        Args:
            obj: On `src`, a number, a text, bytes, a tensor, an array, an enum, or a list, tuple, set, dict or dataclass
                of such values. It is ignored on the other ranks.
            src: The rank that sends.

        Raises:
            InvalidArgumentError: The object contains a value of another type. All ranks raise it.
        """
        if self.mq_broadcaster is None or src != 0:
            return self._broadcast(self._ranks, obj, src)
        if self.rank_in_group != 0:
            return self.mq_broadcaster.dequeue()
        self.mq_broadcaster.enqueue(obj)
        return obj

    def _broadcast(self, ranks, obj, src, pack=packed, unpack=unpacked):
        config = _core.made_in(ranks, lambda: pack(obj) if src == ranks.rank else None)
        received = ranks.broadcast_config(config, src)
        return obj if src == ranks.rank else unpack(received)

    def broadcast_object_list(self, obj_list: list, src: int = 0, group=None) -> list:
        """Replaces the objects of a list by those of `src`, and returns the list.

        Args:
            obj_list: The list, of the same length on all ranks.
            src: The rank of `group` that sends.
            group: The group of the call: a GroupCoordinator, or any group that muster accepts. None: this group.

        Raises:
            InvalidArgumentError: As broadcast_object(). All ranks raise it.
            RankMismatchError: The lists have different lengths. All ranks raise it.
        """
        ranks = self._process_group(group)
        lengths = ranks.all_gather_config(_core.made_in(ranks, lambda: len(obj_list)))
        if len(set(lengths)) != 1:
            raise RankMismatchError(f"obj_list: the ranks pass lists of {lengths} objects: pass lists of the same length")
        obj_list[:] = self._broadcast(ranks, obj_list, src)
        return obj_list

    def broadcast_tensor_dict(self, tensor_dict: dict | None = None, src: int = 0, group=None, metadata_group=None) -> dict:
        """Returns the dict of `src` on all ranks, in its order of keys.

        Args:
            tensor_dict: On `src`, a dict of tensors and of objects as for broadcast_object(). Its keys are texts. It is
                ignored on the other ranks.
            src: The rank that sends, in the group of the call.
            group: The group of the call, as for broadcast_object_list(). None: this group.
            metadata_group: The group of everything that is in memory of the host, which is the whole dict. None: `group`.

        Raises:
            InvalidArgumentError: As broadcast_object(). All ranks raise it.
        """
        ranks = self._process_group(group if metadata_group is None else metadata_group)
        return self._broadcast(ranks, tensor_dict, src, _packed_dict, _unpacked_dict)

    # Messages.

    def send_object(self, obj: typing.Any, dst: int) -> None:
        """Sends an object to another rank.

        Args:
            obj: The object, as for broadcast_object().
            dst: The rank that receives it.

        Raises:
            InvalidArgumentError: An argument is invalid. Only this rank raises it.
        """
        self._ranks.send_config(packed(obj), dst)

    def recv_object(self, src: int) -> typing.Any:
        """Returns the next object from another rank.

        Args:
            src: The rank that sends it.
        """
        return unpacked(self._ranks.recv_config(_one_rank(src))[0])

    def send_tensor_dict(self, tensor_dict: dict, dst: int | None = None, all_gather_group=None, all_gather_tensors: dict[str, bool] | None = None) -> None:
        """Sends a dict to another rank.

        Args:
            tensor_dict: A dict as for broadcast_tensor_dict().
            dst: The rank that receives it. None: the next rank.
            all_gather_group: A group whose ranks have the same tensors: a GroupCoordinator, or any group that muster
                accepts. Each of its ranks sends only a slice of each tensor, to the rank with the same number in the
                next stage.
            all_gather_tensors: Whether to send slices of a tensor, by key. Other tensors are sent in slices if the
                number of their elements is divisible.

        Raises:
            InvalidArgumentError: An argument is invalid. Only this rank raises it.
        """
        self._native.send_tensor_dict(_packed_dict(tensor_dict), dst, self._coordinator(all_gather_group), all_gather_tensors)

    def recv_tensor_dict(self, src: int | None = None, all_gather_group=None, all_gather_tensors: dict[str, bool] | None = None) -> dict:
        """Returns the next dict from another rank.

        Args:
            src: The rank that sends it. None: the previous rank.
            all_gather_group: The group that gathers the slices. The sender passes a group of the same size.
            all_gather_tensors: As the sender passes it.

        Raises:
            RankMismatchError: The ranks of the stages pass different options. All ranks of the group of the slices
                raise it.
        """
        return _unpacked_dict(self._native.recv_tensor_dict(src, self._coordinator(all_gather_group), all_gather_tensors))

    def send(self, tensor: torch.Tensor, dst: int | None = None) -> None:
        """Sends a tensor to another rank.

        Args:
            tensor: The tensor.
            dst: The rank that receives it. None: the next rank.

        Raises:
            InvalidArgumentError: An argument is invalid. Only this rank raises it.
        """
        self._ranks.send(tensor, (self.rank_in_group + 1) % self.world_size if dst is None else dst)

    def recv(self, size: torch.Size, dtype: torch.dtype, src: int | None = None) -> torch.Tensor:
        """Returns the next tensor from another rank.

        Args:
            size: The shape of the tensor.
            dtype: The dtype of the tensor.
            src: The rank that sends it. None: the previous rank.

        Raises:
            RankMismatchError: The tensor has another dtype or shape.
        """
        tensor = torch.empty(size, dtype=dtype, device=self.device)
        self._ranks.recv(tensor, (self.rank_in_group - 1) % self.world_size if src is None else src)
        return tensor

    # Queues.

    def create_mq_broadcaster(self, writer_rank: int = 0, external_writer_handle: str | None = None, blocking: bool = True) -> MessageQueue:
        """Returns a queue that one rank writes and all other ranks read. Collective.

        Args:
            writer_rank: The rank that writes.
            external_writer_handle: On that rank, the handle (muster.make_queue_handle()) of a queue that a process
                outside of the group writes.
            blocking: It is not used, because the queue is ready on all ranks when the call returns.

        Raises:
            UnsupportedError: The ranks do not share memory.
        """
        return MessageQueue(self._native.create_mq_broadcaster(writer_rank, external_writer_handle, _CAPACITY))

    def create_single_reader_mq_broadcasters(self, reader_rank_in_group: int = 0, blocking: bool = False) -> tuple[MessageQueue, list[MessageQueue]]:
        """Creates one queue from each rank to a single reader. Collective.

        Args:
            reader_rank_in_group: The rank that reads.
            blocking: It is not used, because the queues are ready on all ranks when the call returns.

        Returns:
            The queue that this rank writes, and on the reader the queues of all ranks in their order.
        """
        own, queues = self._native.create_single_reader_mq_broadcasters(reader_rank_in_group, _CAPACITY)
        return MessageQueue(own), [MessageQueue(each) for each in queues]

    # Mixtures of experts, graphs and buffers.

    def dispatch(self, hidden_states: torch.Tensor, router_logits: torch.Tensor, is_sequence_parallel: bool = False, extra_tensors: list | None = None):
        """Gathers the rows of all ranks, of tensors that have the same number of rows on a rank.

        Args:
            hidden_states: The rows of this rank.
            router_logits: The same number of rows.
            is_sequence_parallel: It is not used, because the ranks of this group take part.
            extra_tensors: More tensors with the same number of rows. All ranks pass the same number of tensors.

        Returns:
            The gathered hidden states and logits, and a list of the extra tensors if they are given.
        """
        ranks = self._ranks
        tensors = [hidden_states, router_logits, *(extra_tensors or [])]
        self._rows = ranks.all_gather_config(_core.made_in(ranks, lambda: _rows_of(tensors)))
        hidden, logits, *extra = self.all_gatherv(tensors, 0, self._rows)
        return (hidden, logits) if extra_tensors is None else (hidden, logits, extra)

    def combine(self, hidden_states: torch.Tensor, is_sequence_parallel: bool = False) -> torch.Tensor:
        """Reverses the last dispatch(): returns the sum over all ranks of the rows that belong to this rank.

        Args:
            hidden_states: The rows of all ranks.
            is_sequence_parallel: It is not used, because the ranks of this group take part.

        Raises:
            InvalidArgumentError: dispatch() was not called, or the number of rows differs. All ranks raise it.
        """
        rows = self._rows
        if rows is None:
            raise InvalidArgumentError("combine: the rows of the ranks are unknown: call dispatch() first")
        return self.reduce_scatterv(hidden_states, 0, rows)

    @contextlib.contextmanager
    def graph_capture(self, graph_capture_context: GraphCaptureContext | None = None):
        """A context manager that makes a stream current for the capture of a CUDA graph.

        Args:
            graph_capture_context: The stream. None: a new stream.

        Raises:
            UnsupportedError: torch has no GPU.
        """
        if not torch.cuda.is_available():
            raise UnsupportedError("graph_capture: torch has no GPU: run the model without graphs")
        context = GraphCaptureContext(torch.cuda.Stream()) if graph_capture_context is None else graph_capture_context
        current = torch.cuda.current_stream()
        if current != context.stream:
            # The graph must not run before the work that is already queued.
            context.stream.wait_stream(current)
        with torch.cuda.stream(context.stream):
            yield context

    def prepare_communication_buffer_for_model(self, model: torch.nn.Module) -> None:
        """Reserves shared memory for results of the size of the largest parameter of a model. Collective.

        Args:
            model: The model, the same on all ranks.
        """
        self._native.prepare(lambda: [(parameter.dtype, tuple(parameter.shape)) for parameter in model.parameters()])

    def destroy(self) -> None:
        """Releases the group and its queue. Ranks that wait for this rank raise an error. Local."""
        self._made = self.cpu_group = self.device_group = self.mq_broadcaster = None
        self._process_groups.clear()
        self._coordinators.clear()


def _packed_dict(tensor_dict):
    """Returns a dict with text keys as a config, whose tensors are leaves of the dict itself."""
    if not isinstance(tensor_dict, dict):
        raise InvalidArgumentError(f"tensor_dict: {type(tensor_dict).__name__} is not a dict")
    for key in tensor_dict:
        if type(key) is not str:
            raise InvalidArgumentError(f"tensor_dict: the key {key!r} is not a str")
    return {key: packed(value, f"tensor_dict[{key!r}]") for key, value in tensor_dict.items()}


def _unpacked_dict(config):
    return {key: unpacked(value) for key, value in config.items()}


def _tensor(value):
    if not isinstance(value, torch.Tensor):
        raise InvalidArgumentError(f"input_: {type(value).__name__} is not a torch tensor")
    return value.detach()


def _one_rank(src):
    if src is None:
        raise InvalidArgumentError("src: None is not a rank: pass the rank that sends")
    return src


def _rows_of(tensors):
    rows = [tensor.shape[0] if tensor.dim() > 0 else None for tensor in tensors]
    if None in rows or len(set(rows)) != 1:
        raise InvalidArgumentError(f"dispatch: the tensors have {rows} rows: pass tensors with the same number of rows")
    return rows[0]
