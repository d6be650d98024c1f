# SPDX-License-Identifier: Apache-2.0
"""The calls of c10d, implemented with muster.ProcessGroup."""

from __future__ import annotations

import functools

import torch
import torch.distributed as distributed

from ._memory import NATIVE as _NATIVE, Into as _Into, flat as _flat
from ._works import Collectives, Messages

c10d = torch._C._distributed_c10d

_Op = distributed.ReduceOp.RedOpType
# By number: torch's own values are slow to look up.
_OPS = {
    _Op.SUM.value: "sum",
    _Op.AVG.value: "average",
    _Op.PRODUCT.value: "product",
    _Op.MIN.value: "min",
    _Op.MAX.value: "max",
    _Op.BAND.value: torch.bitwise_and,
    _Op.BOR.value: torch.bitwise_or,
    _Op.BXOR.value: torch.bitwise_xor,
}


def _alone(tensors):
    if len(tensors) != 1:
        raise ValueError(f"muster: this call takes one tensor per rank, not {len(tensors)}")
    return tensors[0]


class _ScaledSum(str):
    """PREMUL_SUM: each rank multiplies its tensor by its factor, and the products are added."""

    factor = None


def _op_of(op):
    """Returns the name of an operation, or a function of two tensors if muster does not implement the operation."""
    found = _OPS.get(op.op.value)
    if found is None and op.op.value == _Op.PREMUL_SUM.value and hasattr(op, "factor"):
        found = _ScaledSum("sum")
        found.factor = op.factor
    if found is None:
        raise ValueError(f"muster: {op.op} is not supported: use sum, average, product, min, max, or a bitwise operation on integers")
    return found


def _scaled(flat, op):
    """Returns the input of this rank to the operation, a copy if it has a factor."""
    if not isinstance(op, _ScaledSum):
        return flat
    if not flat.is_floating_point():
        raise ValueError(f"muster: PREMUL_SUM is not supported for {flat.dtype}")
    return flat.clone().mul_(op.factor)


def _reducible(flat, op, dtype):
    """Returns the elements in a form that muster reduces. Complex numbers are added by their parts."""
    if dtype.is_complex:
        if op not in ("sum", "average"):
            raise ValueError(f"muster: {op} is not supported for {dtype}: use sum or average")
        return flat.view(torch.float32 if dtype == torch.complex64 else torch.float64)
    if dtype not in _NATIVE:
        raise ValueError(f"muster: {op} is not supported for {dtype}")
    return flat


class Calls:
    """The calls of a group. Synchronous calls run on the thread of the caller."""

    def _begin(self, group, store, seconds):
        from .. import ProcessGroup

        self._collectives = Collectives(ProcessGroup(group, timeout=seconds))
        self._messages = Messages(ProcessGroup(group, timeout=seconds))
        self._group = group
        self._ranks = self._collectives.ranks
        self._store = store
        self._seconds = seconds
        self._number = 0
        self._barriers = 0

    def _run(self, opts, call, results):
        """Runs call(seconds) in its turn. Returns its Work, or None if `opts` does not request one."""
        seconds = opts.timeout.total_seconds()
        if seconds <= 0:
            seconds = self._seconds
        self._number += 1
        return self._collectives.run(functools.partial(call, seconds), results, seconds, not opts.asyncOp)

    # Reductions.

    def _reduce_flat(self, flat, op, seconds, root=None):
        """Reduces in place, only on `root` if it is given."""
        if isinstance(op, str):
            given = _scaled(flat, op)
            if root is None:
                self._ranks.all_reduce(given, op, timeout=seconds)
            else:
                self._ranks.reduce(given, root, op, timeout=seconds)
            if given is not flat and root in (None, self._ranks.rank):
                flat.copy_(given)
            return
        parts = [torch.empty_like(flat) for _ in range(self._ranks.size)]
        self._ranks.all_gather_into(parts, flat, timeout=seconds)
        if root is None or root == self._ranks.rank:
            flat.copy_(functools.reduce(op, parts))

    def _reduce(self, tensors, op, opts, root=None):
        op = _op_of(op)

        def call(seconds):
            into = _Into(tensors)
            for tensor, flat in zip(tensors, into.flat):
                self._reduce_flat(_reducible(flat, op, tensor.dtype), op, seconds, root)
            into.back()

        return self._run(opts, call, tensors)

    def allreduce(self, tensors, opts):
        if tensors[0].is_sparse:
            return self._allreduce_sparse(_alone(tensors), opts)
        return self._reduce(tensors, opts.reduceOp, opts)

    def allreduce_coalesced(self, tensors, opts):
        return self._reduce(tensors, opts.reduceOp, opts)

    def _allreduce_sparse(self, tensor, opts):
        if _op_of(opts.reduceOp) != "sum":
            raise ValueError("muster: allreduce of sparse tensors supports only sum")

        def call(seconds):
            own = tensor.coalesce()
            indices = torch.from_dlpack(self._ranks.all_gatherv(own.indices().contiguous(), 1, timeout=seconds))
            values = torch.from_dlpack(self._ranks.all_gatherv(own.values().contiguous(), 0, timeout=seconds))
            tensor.copy_(torch.sparse_coo_tensor(indices, values, tensor.shape).coalesce())

        return self._run(opts, call, [tensor])

    def reduce(self, tensors, opts):
        return self._reduce([_alone(tensors)], opts.reduceOp, opts, opts.rootRank)

    def _scatter_reduced(self, out, flat, sizes, op, seconds):
        """Reduces `flat` and writes the part of this rank into `out`. `sizes` has the elements of each part."""
        flat = _scaled(flat, op)
        if not isinstance(op, str):
            whole = flat.clone()
            self._reduce_flat(whole, op, seconds)
            out.copy_(whole.split(sizes)[self._ranks.rank])
        elif len(set(sizes)) == 1:
            self._ranks.reduce_scatter_into(out, flat, op, timeout=seconds)
        else:
            out.copy_(self._ranks.reduce_scatter(flat, 0, op, sizes=sizes, timeout=seconds).torch())

    def reduce_scatter(self, outputs, inputs, opts):
        out, parts, op = _alone(outputs), _alone(inputs), _op_of(opts.reduceOp)

        def call(seconds):
            into = _Into([out])
            flat = [_reducible(_flat(part), op, out.dtype) for part in parts]
            target = _reducible(into.flat[0], op, out.dtype)
            self._scatter_reduced(target, torch.cat(flat), [part.numel() for part in flat], op, seconds)
            into.back()

        return self._run(opts, call, outputs)

    def reduce_scatter_single(self, output, tensor, opts):
        return self.reduce_scatter_single_coalesced([output], [tensor], opts)

    def reduce_scatter_single_coalesced(self, outputs, inputs, opts):
        op = _op_of(opts.reduceOp)

        def call(seconds):
            into = _Into(outputs)
            for flat, tensor in zip(into.flat, inputs):
                target = _reducible(flat, op, tensor.dtype)
                sizes = [target.numel()] * self._ranks.size
                self._scatter_reduced(target, _reducible(_flat(tensor), op, tensor.dtype), sizes, op, seconds)
            into.back()

        return self._run(opts, call, outputs)

    # Transfers.

    def broadcast(self, tensors, opts):
        root = opts.rootRank

        def call(seconds):
            into = _Into(tensors)
            for flat in into.flat:
                self._ranks.broadcast(flat, root, timeout=seconds)
            if root != self._ranks.rank:
                into.back()

        return self._run(opts, call, tensors)

    def _gather_lists(self, outputs, inputs, opts):
        def call(seconds):
            for outs, tensor in zip(outputs, inputs):
                into = _Into(outs)
                self._ranks.all_gather_into(into.flat, _flat(tensor), timeout=seconds)
                into.back()

        return self._run(opts, call, [each for outs in outputs for each in outs])

    def allgather(self, outputs, inputs, opts):
        return self._gather_lists(outputs, inputs, opts)

    def allgather_coalesced(self, outputs, inputs, opts):
        return self._gather_lists([[of_rank[i] for of_rank in outputs] for i in range(len(inputs))], inputs, opts)

    def all_gather_single(self, output, tensor, opts):
        return self.all_gather_single_coalesced([output], [tensor], opts)

    def all_gather_single_coalesced(self, outputs, inputs, opts):
        def call(seconds):
            into = _Into(outputs)
            for flat, tensor in zip(into.flat, inputs):
                self._ranks.all_gather_into(flat, _flat(tensor), timeout=seconds)
            into.back()

        return self._run(opts, call, outputs)

    def gather(self, outputs, inputs, opts):
        tensor, root = _alone(inputs), opts.rootRank
        outs = _alone(outputs) if root == self._ranks.rank else []

        def call(seconds):
            into = _Into(outs)
            self._ranks.gather_into(into.flat, _flat(tensor), root, timeout=seconds)
            into.back()

        return self._run(opts, call, outs)

    def gather_single(self, output, tensor, opts):
        is_root = opts.rootRank == self._ranks.rank
        return self.gather([list(output.view(self._ranks.size, -1).unbind())] if is_root else [], [tensor.reshape(-1)], opts)

    def scatter(self, outputs, inputs, opts):
        out, root = _alone(outputs), opts.rootRank
        parts = _alone(inputs) if root == self._ranks.rank else []

        def call(seconds):
            into = _Into([out])
            self._ranks.scatter(into.flat[0], [_flat(part) for part in parts], root, timeout=seconds)
            into.back()

        return self._run(opts, call, outputs)

    def _exchange(self, outs, parts, seconds):
        """Sends one flat part to each rank, and receives one from each."""
        sent = torch.cat(parts)
        received, counts = self._ranks.all_to_allv(sent, [part.numel() for part in parts], timeout=seconds)
        wanted = [out.numel() for out in outs]
        if counts != wanted:
            raise ValueError(f"muster: the other ranks send {counts} elements, but the outputs have {wanted}")
        for out, part in zip(outs, torch.from_dlpack(received).split(counts)):
            out.copy_(part)

    def alltoall(self, outputs, inputs, opts):
        def call(seconds):
            into = _Into(outputs)
            self._exchange(into.flat, [_flat(tensor) for tensor in inputs], seconds)
            into.back()

        return self._run(opts, call, outputs)

    def all_to_all_single(self, output, tensor, output_sizes, input_sizes, opts):
        def call(seconds):
            into = _Into([output])
            out, flat = into.flat[0], _flat(tensor)
            if not output_sizes and not input_sizes:
                self._ranks.all_to_all_into(out, flat, timeout=seconds)
            else:
                self._exchange(_cut(out, output, output_sizes, self._ranks.size), _cut(flat, tensor, input_sizes, self._ranks.size), seconds)
            into.back()

        return self._run(opts, call, [output])

    def barrier(self, opts):
        return self._run(opts, lambda seconds: self._ranks.barrier(timeout=seconds), [])

    def monitored_barrier(self, timeout=None, wait_all_ranks=False):
        """Uses only the store, so the group remains usable if a rank is late. The error names that rank."""
        from ._monitored import monitored_barrier

        if timeout is not None:
            timeout = getattr(timeout, "timeout", timeout).total_seconds()
        self._barriers += 1
        seconds = self._seconds if timeout is None else timeout
        monitored_barrier(self._store, self._ranks.rank, self._ranks.size, self._barriers, seconds, wait_all_ranks)

    # Messages.

    def send(self, tensors, to, tag=0):
        flat = _flat(_alone(tensors))
        ranks, seconds = self._messages.ranks, self._seconds
        return self._messages.begin(
            lambda: ranks.isend(flat, to, tag, timeout=seconds), tensors, f"send to rank {ranks.global_rank(to)}", seconds
        )

    def recv(self, tensors, source, tag=0):
        into = _Into([_alone(tensors)])
        ranks, seconds = self._messages.ranks, self._seconds
        about = "recv from any rank" if source is None else f"recv from rank {ranks.global_rank(source)}"
        return self._messages.begin(
            lambda: ranks.irecv(into.flat[0], source, tag, timeout=seconds), tensors, about, seconds, into.back
        )

    def recv_anysource(self, tensors, tag=0):
        return self.recv(tensors, None, tag)

    # Methods of the group.

    def shutdown(self):
        self._collectives.end()
        self._messages.end("the process group is shut down while messages are in flight")

    def abort(self):
        for lane in (self._collectives, self._messages):
            lane.end("the process group was aborted")

    def set_timeout(self, timeout):
        self._seconds = timeout.total_seconds()

    _set_default_timeout = set_timeout

    def _get_sequence_number_for_group(self):
        return self._number

    def _set_sequence_number_for_group(self):
        pass

    # The names before PyTorch 2.14, and the names that C++ code looks up.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single
    gather_into_tensor = gather_single
    recvAnysource = recv_anysource


WITH_OPTIONS = (
    *("allreduce", "allreduce_coalesced", "reduce", "broadcast", "barrier", "gather", "gather_single", "gather_into_tensor", "scatter"),
    *("allgather", "allgather_coalesced", "all_gather_single", "all_gather_single_coalesced"),
    *("_allgather_base", "allgather_into_tensor_coalesced"),
    *("reduce_scatter", "reduce_scatter_single", "reduce_scatter_single_coalesced"),
    *("_reduce_scatter_base", "reduce_scatter_tensor_coalesced"),
    *("alltoall", "all_to_all_single", "alltoall_base"),
)


def _cut(flat, tensor, sizes, ranks):
    """Returns the part of each rank. `sizes` has the number of rows of each part. Empty: equal parts."""
    rows = tensor.size(0) if tensor.dim() else 1
    sizes = list(sizes) or [rows // ranks] * ranks
    if sum(sizes) != rows or len(sizes) != ranks:
        raise ValueError(f"muster: the split sizes {sizes} do not fit {rows} rows and {ranks} ranks")
    row = flat.numel() // rows if rows else 0
    return flat.split([size * row for size in sizes])
