# SPDX-License-Identifier: Apache-2.0
"""Former names, so that an error about one gives the present name."""

from __future__ import annotations

import functools
import inspect
import typing

_P = typing.ParamSpec("_P")
_R = typing.TypeVar("_R")

# Keyword arguments. If there are several present names, those of the function apply.
_ARGUMENTS = {
    "abandoned_after": ("stale_after",),
    "at": ("key",),
    "at_least": ("min_step",),
    "base": ("base_model",),
    "carry": ("extra_files",),
    "from_layout": ("source_layout",),
    "generation": ("step",),
    "generations_kept": ("steps_kept",),
    "job": ("job_id",),
    "layout": ("source_layout", "target_layout"),
    "model_dir": ("model",),
    "numbers": ("global_ranks",),
    "own": ("root_tensors",),
    "pattern": ("select",),
    "shards": ("file_pattern",),
    "shards_dir": ("shards",),
    "to": ("target_layout",),
}

# Attributes of the package.
_ATTRIBUTES = {
    "ArgumentError": "InvalidArgumentError",
    "Gathered": "GatherResult",
    "NoSpaceError": "OutOfSpaceError",
    "queue_handle": "make_queue_handle",
    **{name: f"merge.{name}" for name in ("concat", "first", "max", "same", "stack", "sum")},
}


def checks_names(function: typing.Callable[_P, _R]) -> typing.Callable[_P, _R]:
    """Decorates a function: its TypeError about a former keyword argument gives the present name."""
    names = list(inspect.signature(function).parameters)

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        try:
            return function(*args, **kwargs)
        except TypeError:
            # The names of parameters that were not passed by position.
            free = names[len(args) :]
            for old in kwargs:
                new = [name for name in _ARGUMENTS.get(old, ()) if name in free]
                if old not in free and new:
                    present = " or ".join(f"'{name}'" for name in new)
                    raise TypeError(f"{function.__qualname__}: '{old}' was renamed: use {present}") from None
            raise

    return call


def missing_attribute(name: str) -> AttributeError:
    """Returns the error for an attribute that the package does not have."""
    new = _ATTRIBUTES.get(name)
    remedy = f": use muster.{new}" if new else ""
    return AttributeError(f"module 'muster' has no attribute '{name}'{remedy}", name=name)
