# SPDX-License-Identifier: Apache-2.0
"""The process group "muster" and the backend "muster_cpu".

The process group has the least overhead. The backend allows other backends for other devices.
"""

from __future__ import annotations

import datetime

import torch
import torch.distributed as distributed

from .._groups import _meet
from ._calls import WITH_OPTIONS, Calls, c10d

_CPU = torch.device("cpu")


class MusterBackend(Calls, distributed.distributed_c10d.C10DBackend):
    """The backend for the CPU tensors of a process group. torch calls it through C++."""

    # torch would query the object for them again, in an endless recursion.
    supports_splitting = True
    supports_coalescing = supports_shrinking = False
    supports_reconfigure = supports_window = _supports_time_estimate = False

    def __init__(self, group, store, timeout):
        super().__init__(group.rank, group.size)
        self._begin(group, store, timeout.total_seconds())
        self._options = distributed.distributed_c10d.C10DBackend.Options("muster_cpu", timeout)

    def getBackendName(self):
        return "muster"

    def name(self):
        return self.getBackendName()

    @property
    def options(self):
        return self._options

    def split(self, store, ranks, opts):
        """Returns the backend of the ranks of a list. split_group() calls it for each device. Collective."""
        group = self._group.split(list(ranks), opts._timeout.total_seconds())
        if group is None:
            # The C++ code of torch does not accept None.
            raise ValueError("muster_cpu: this rank is in no list of split_group(): add it to one, or use new_group()")
        return _kept_backend(group, store, opts._timeout)

    def shutdown(self):
        super().shutdown()
        _kept.discard(self)


class MusterGroup(Calls, distributed.ProcessGroup):
    """A process group for tensors on the CPU. torch calls its methods directly."""

    def __init__(self, group, store, timeout):
        super().__init__(store, group.rank, group.size)
        # C++ code queries the backend of a device for names and sizes, and calls the methods of this object.
        self._backend = MusterBackend(group, store, timeout)
        self.__dict__.update(self._backend.__dict__)  # both objects use one group
        self._set_default_backend(distributed.ProcessGroup.BackendType.CUSTOM)
        self._register_backend(_CPU, distributed.ProcessGroup.BackendType.CUSTOM, self._backend)

    def getBackendName(self):
        return "muster"

    def split_group(self, new_ranks, timeout=None, opts=None, group_name=None, group_desc=None, device_types=None):
        """Returns the group of the ranks of a list, in its order; None on a rank that is in no list. Collective."""
        timeout = timeout or datetime.timedelta(seconds=self._seconds)
        group = self._group.split(list(new_ranks), timeout.total_seconds())
        if group is None:
            return None
        made = MusterGroup(group, distributed.PrefixStore(f"{group_name}/", self._store), timeout)
        made._set_group_name(group_name)
        made._set_group_desc(group_desc or "undefined")
        return made


def _overload(name):
    """Returns a method that accepts all overloads.

    This package implements the overload with options. torch converts the others (a tensor, an operation) to it.
    """
    ours, theirs = getattr(Calls, name), getattr(distributed.ProcessGroup, name)

    def call(self, *arguments, **named):
        last = named.get("opts") if named else arguments[-1] if arguments else None
        return (ours if type(last) in _OPTIONS else theirs)(self, *arguments, **named)

    return call


_OPTIONS = {getattr(c10d, name) for name in dir(c10d) if name.endswith("Options")}
for _name in WITH_OPTIONS:
    setattr(MusterGroup, _name, _overload(_name))


def _met(opts):
    seconds = opts.timeout.total_seconds()
    return _meet(opts.store, opts.group_rank, opts.group_size, timeout=seconds, global_ranks=opts.global_ranks_in_group)


# torch stores a backend as a C++ pointer, which does not keep the Python object alive.
_kept: set = set()


def _kept_backend(group, store, timeout):
    made = MusterBackend(group, store, timeout)
    _kept.add(made)
    return made


def make_backend(opts, _):
    return _kept_backend(_met(opts), opts.store, opts.timeout)


def make_group(opts, _):
    if opts.process_group._get_backend_name() != "custom":
        raise ValueError('"muster" does not support other backends in the same process group: use "muster_cpu", as in "cpu:muster_cpu,cuda:nccl"')
    return MusterGroup(_met(opts), opts.store, opts.timeout)
