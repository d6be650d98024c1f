# SPDX-License-Identifier: Apache-2.0
"""Arguments of calls that follow other systems: groups, and tensors of any framework, on any device."""

from __future__ import annotations

import weakref

from .._core import ProcessGroup
from ..errors import InvalidArgumentError


class Absent:
    """Takes the place of a group that this rank cannot use.

    It is not None, which would mean all ranks.
    """

    def __init__(self, cause: str):
        self.cause = cause

    def __repr__(self):
        return f"<no group: {self.cause}>"


_made: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


def process_group_of(group) -> ProcessGroup:
    """Returns the ProcessGroup of a group. The first call with a group of torch.distributed is collective over it."""
    if isinstance(group, ProcessGroup):
        return group
    if isinstance(group, Absent):
        raise InvalidArgumentError(f"group: {group.cause}")
    try:
        made = _made.get(group)
    except TypeError:
        raise InvalidArgumentError(f"group: {group!r} is not a group: pass None, a muster.ProcessGroup or a process group of torch.distributed") from None
    if made is None:
        made = _made[group] = ProcessGroup(group)
    return made


def memory_of(tensor):
    """Returns the elements of a tensor in contiguous memory of the host: its own memory if possible, otherwise a copy."""
    return tensor.detach().cpu().contiguous() if hasattr(tensor, "detach") else tensor


def write_back(tensor, memory) -> None:
    """Copies the result in `memory`, which memory_of() has returned, into its tensor, unless they are the same memory."""
    if memory is not tensor and memory.data_ptr() != tensor.data_ptr():
        tensor.detach().copy_(memory)
