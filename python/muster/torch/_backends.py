# SPDX-License-Identifier: Apache-2.0
"""What torch.distributed is given: a process group, which costs least, and a backend, which can stand beside others."""

from __future__ import annotations

import torch
import torch.distributed as distributed

from .._groups import _meet
from ._calls import WITH_OPTIONS, Calls, c10d

_CPU = torch.device("cpu")


class MusterBackend(Calls, distributed.distributed_c10d.C10DBackend):
    """For one device of a process group: torch calls it through C++."""

    # torch would ask the object for them again, without end.
    supports_coalescing = supports_splitting = supports_shrinking = False
    supports_reconfigure = supports_window = _supports_time_estimate = False

    def __init__(self, rank, size, timeout):
        super().__init__(rank, size)
        self._options = distributed.distributed_c10d.C10DBackend.Options("muster_cpu", timeout)

    def getBackendName(self):
        return "muster"

    def name(self):
        return self.getBackendName()

    @property
    def options(self):
        return self._options

    def shutdown(self):
        super().shutdown()
        _kept.discard(self)


class MusterGroup(Calls, distributed.ProcessGroup):
    """A whole process group, of tensors on the CPU: its calls are torch's own calls."""

    def __init__(self, store, rank, size, timeout):
        super().__init__(store, rank, size)
        # C++ asks the backend of a device for names and sizes; the calls it makes are those here.
        self._backend = MusterBackend(rank, size, timeout)
        self._set_default_backend(distributed.ProcessGroup.BackendType.CUSTOM)
        self._register_backend(_CPU, distributed.ProcessGroup.BackendType.CUSTOM, self._backend)

    def getBackendName(self):
        return "muster"


def _as_torch_takes_it(name):
    """Of the ways to call it the one with options is ours. torch turns the others (a tensor, an operation) into that one."""
    ours, theirs = getattr(Calls, name), getattr(distributed.ProcessGroup, name)

    def call(self, *arguments, **named):
        last = named.get("opts") if named else arguments[-1] if arguments else None
        return (ours if type(last) in _OPTIONS else theirs)(self, *arguments, **named)

    return call


_OPTIONS = {getattr(c10d, name) for name in dir(c10d) if name.endswith("Options")}
for _name in WITH_OPTIONS:
    setattr(MusterGroup, _name, _as_torch_takes_it(_name))


def _begin(calls, opts):
    seconds = opts.timeout.total_seconds()
    group = _meet(
        opts.store, opts.group_rank, opts.group_size, timeout=seconds, numbers=opts.global_ranks_in_group
    )
    calls._begin(group, opts.store, seconds)


# torch keeps a backend by a pointer of C++ alone, which does not keep what is of Python.
_kept: set = set()


def make_backend(opts, _):
    made = MusterBackend(opts.group_rank, opts.group_size, opts.timeout)
    _begin(made, opts)
    _kept.add(made)
    return made


def make_group(opts, _):
    if opts.process_group._get_backend_name() != "custom":
        raise ValueError('"muster" is a whole process group: beside other backends name "muster_cpu", as in "cpu:muster_cpu,cuda:nccl"')
    made = MusterGroup(opts.store, opts.group_rank, opts.group_size, opts.timeout)
    _begin(made._backend, opts)
    made.__dict__.update(made._backend.__dict__)  # one group, two faces
    return made
