# SPDX-License-Identifier: Apache-2.0
"""An implementation of `modelopt.torch.export.distribute` of ModelOpt.

Use it as `import muster.modelopt as distribute`, or call `install()`, which replaces the functions of ModelOpt. The
manual is docs/howto/modelopt.md.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import operator
import os
import pathlib
import sys
import typing

from . import _files, _hook
from ._core import Group, Tensor
from ._gathers import get_configs_parallel as _gather
from ._groups import _resolve, from_process_group, initialized_distributed
from .errors import InvalidArgumentError

__all__ = ["NFSWorkspace", "get_configs_parallel", "get_tensors_parallel", "install", "install_when_imported"]

#: Seconds without progress of the awaited ranks: the timeout of barriers in torch.distributed.
TIMEOUT = 1800.0

# The key of the class of a dataclass instance, next to its fields; the value None marks a dict that has this key itself.
_CLASS = "$dataclass"


@contextlib.contextmanager
def get_tensors_parallel(tensor: typing.Any, ranks: typing.Iterable[int], group: typing.Any = None) -> typing.Iterator[list[typing.Any]]:
    """Gathers a torch.Tensor of each rank of a list on its first rank, the root. A context manager.

    Collective over `group`. At the end of the `with` block all ranks wait until the root has arrived.

    Args:
        tensor: The tensor of this rank. Shapes and dtypes may differ between ranks.
        ranks: Two or more global ranks. All members of a list pass the same list, and the lists of a call are disjoint.
        group: A process group of torch.distributed. None: all ranks.

    Yields:
        On the root, a list with the tensor of each rank, on the CPU: its own tensor itself, and private copies of the
        others, which it may write to and keep. On the other ranks, an empty list.

    Raises:
        Error: As muster.get_tensors_parallel().
    """
    with _gathered(tensor, ranks, group, None, is_needed=True) as others:
        yield [tensor.cpu(), *others] if others is not None else []


@contextlib.contextmanager
def get_configs_parallel(config: typing.Any, ranks: typing.Iterable[int], group: typing.Any = None, workspace_path: str | os.PathLike[str] | None = None) -> typing.Iterator[list[typing.Any]]:
    """Gathers a config of each rank of a list on its first rank, the root. A context manager.

    The rules and the errors are those of get_tensors_parallel().

    Args:
        config: An instance of a dataclass, a dict, a list or a value, which may contain such objects and torch tensors,
            or None.
        ranks: As for get_tensors_parallel().
        group: As for get_tensors_parallel().
        workspace_path: A directory that all ranks see, through which configs are transferred. With it the ranks may be
            on several hosts. Only the marker file of the workspace remains in it.

    Yields:
        On the root, a list: its own config itself, even if that is None, then the configs of the other ranks, as
        instances of the same classes. If another rank passes None, the list omits it. On the other ranks, an empty
        list.
    """
    with _gathered(config, ranks, group, workspace_path) as others:
        yield [config, *others] if others is not None else []


@contextlib.contextmanager
def _gathered(value, ranks, group, workspace_path, is_needed=False):
    """Yields the values of the other ranks of the list that are not None, on the root; None on the other ranks."""
    workspace_path = None if workspace_path is None else _folder(workspace_path)
    group, members = _group_of(group, workspace_path)
    tree, numbers, is_first, failure = None, [], False, None
    try:
        ranks = [operator.index(rank) for rank in ranks]
        if len(ranks) < 2:
            raise InvalidArgumentError(f"ranks: {ranks} has fewer than two ranks: pass two or more")
        if is_needed and value is None:
            raise InvalidArgumentError("get_tensors_parallel: the tensor is None: pass a tensor on every rank of the group")
        numbers = [_index(members, rank) for rank in ranks]
        is_first = group.rank == numbers[0]
        # The root already has its own value.
        tree = None if is_first else _tree(value)
    except Exception as error:
        failure = error

    def checked_ranks():
        # An exception about the arguments reaches all ranks.
        if failure is not None:
            raise failure
        yield from numbers

    with _gather(tree, checked_ranks(), group, writable=True, timeout=TIMEOUT, workspace_path=workspace_path) as entries:
        try:
            yield [_value(entry) for entry in entries if entry is not None] if is_first else None
        finally:
            group.barrier(timeout=TIMEOUT)


def _index(members, rank: int) -> int:
    if rank not in members:
        raise InvalidArgumentError(f"rank {rank} of the list is not in the group, which has the ranks {list(members)}")
    return members.index(rank)


def _group_of(group, workspace_path=None) -> tuple[Group, list[int] | range]:
    """Returns the group of a call, and the global ranks of its members."""
    distributed = initialized_distributed()
    if isinstance(group, Group) or (group is None and distributed is None):
        group = _resolve(group)
        return group, range(group.size)
    if group is None:
        group = distributed.distributed_c10d._get_default_group()
    met = from_process_group(group, workspace_path=workspace_path)
    return met, distributed.get_process_group_ranks(group)


def _folder(workspace_path) -> pathlib.Path:
    """Returns a subdirectory, because ModelOpt may store state files in the directory itself."""
    return pathlib.Path(workspace_path) / "muster"


# Most fields of a layer have these types and need no conversion.
_PLAIN = frozenset([type(None), bool, int, float, str])


def _tree(value):
    """Converts a value to the form that gathers accept: dataclasses become dicts, and tensors are copied to the CPU."""
    if type(value) in _PLAIN:
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: _tree(getattr(value, field.name)) for field in dataclasses.fields(value)}
        return {_CLASS: f"{type(value).__module__}:{type(value).__qualname__}", **fields}
    if isinstance(value, dict):
        tree = {key: _tree(each) for key, each in value.items()}
        return {_CLASS: None, "dict": tree} if _CLASS in tree else tree
    if isinstance(value, (list, tuple)):
        return [_tree(each) for each in value]
    return value.detach().cpu() if hasattr(value, "detach") else value


def _value(tree):
    """Converts a tree of another rank back to its value."""
    if type(tree) in _PLAIN:
        return tree
    if isinstance(tree, Tensor):
        return _torch(tree)
    if isinstance(tree, list):
        return [_value(each) for each in tree]
    if _CLASS in tree and tree[_CLASS] is None:
        return {key: _value(each) for key, each in tree["dict"].items()}
    fields = {key: _value(each) for key, each in tree.items()}
    if _CLASS not in fields:
        return fields
    kind = _class_named(fields.pop(_CLASS))
    late = [field.name for field in dataclasses.fields(kind) if not field.init]
    values = {name: fields.pop(name) for name in late if name in fields}
    made = kind(**fields)
    for name, each in values.items():
        object.__setattr__(made, name, each)
    return made


def _class_named(name: str):
    module, _, path = name.partition(":")
    try:
        kind = operator.attrgetter(path)(sys.modules[module])
    except (KeyError, AttributeError):
        kind = None
    if not dataclasses.is_dataclass(kind):
        raise InvalidArgumentError(f"{name}: a rank sent an instance of this class, which is not a dataclass here: import {module} on the root")
    return kind


def _torch(tensor):
    """Returns a torch tensor that may be written to and kept: the memory that the sender filled, or a copy."""
    made = tensor.torch()
    if tensor.dtype != "F4":
        return made
    import torch

    return made.view(torch.float4_e2m1fn_x2)


class NFSWorkspace:
    """A directory that all ranks see. Each rank writes its state there and reads those of other ranks.

    The state of a rank of this job exists from its write until the rank creates another NFSWorkspace of the same
    directory. Without a path the workspace is uninitialized, and reads and writes raise an exception. With a path, all
    ranks create the first object of a job; everything else is local, without a barrier.
    """

    def __init__(self, workspace_path: str | os.PathLike[str] | None = None):
        self.path: pathlib.Path = pathlib.Path("" if workspace_path is None else workspace_path)
        distributed = initialized_distributed()
        self.rank: int = 0 if distributed is None else distributed.get_rank()
        self._files = None
        if workspace_path is None:
            return
        group, _ = _group_of(None, _folder(self.path))
        self.rank = group.rank
        self._files = _files.Workspace(_folder(self.path), group, durable=False)
        if self._state(self.rank) is not None:
            # The state that this rank wrote with an earlier object no longer counts.
            self._files.write_configs_and_weights(None)

    @property
    def is_initialized(self) -> bool:
        """Whether the workspace has a directory."""
        return self._files is not None

    @property
    def state_path(self) -> pathlib.Path | None:
        """The file that contains the state of this rank. None: the rank has no state."""
        state = self._state(self.rank)
        return None if state is None else pathlib.Path(state.info["path"])

    def write_configs_and_weights(self, config_json: dict[str, typing.Any], weights: typing.Mapping[str, typing.Any]) -> None:
        """Writes the state of this rank.

        Args:
            config_json: A dict.
            weights: torch tensors by name.

        Raises:
            InvalidArgumentError: The workspace has no directory.
            Error: As muster.Workspace.write_configs_and_weights().
        """
        weights = {name: weight.detach().cpu() for name, weight in weights.items()}
        self._initialized().write_configs_and_weights({"config": config_json}, weights)

    def read_configs_and_weights_from_rank(self, target_rank: int) -> tuple[typing.Any, typing.Any]:
        """Returns (config, weights) of a rank, with writable torch tensors, or (None, None) if it has no state now.

        Args:
            target_rank: The rank.

        Raises:
            InvalidArgumentError: The workspace has no directory.
            Error: As muster.Workspace.read_configs_and_weights_from_rank().
        """
        state = self._state(target_rank)
        if state is None:
            return None, None
        return state.config["config"], {name: _torch(weight) for name, weight in state.weights.items()}

    def _state(self, rank):
        state = self._initialized().read_configs_and_weights_from_rank(rank)
        return state if state is not None and state.config is not None else None

    def _initialized(self) -> _files.Workspace:
        if self._files is None:
            raise InvalidArgumentError("this NFSWorkspace has no directory: pass a workspace_path")
        return self._files


# The names of the module up to version 0.47, and in 0.48.
_UPSTREAM = ("modelopt.torch.export.distribute", "modelopt.torch.export.trtllm.distribute")


def install() -> None:
    """Replaces the functions of ModelOpt with these in all loaded modules that refer to them by name. Local.

    Every rank calls it.

    Raises:
        ImportError: ModelOpt with such functions is not installed.
    """
    found = False
    for name in _UPSTREAM:
        try:
            module = importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{name}.".startswith(f"{error.name}."):
                raise
        else:
            found = True
            _hook.replace(module, sys.modules[__name__])
    if not found:
        names = " or ".join(_UPSTREAM)
        raise ImportError(f"muster.modelopt.install: {names} does not exist: install nvidia-modelopt, 0.48 or earlier")


def install_when_imported() -> None:
    """Replaces the functions of ModelOpt as install() does, but only when ModelOpt is imported. Local."""
    _hook.install_when_imported(dict.fromkeys(_UPSTREAM, __name__))


def main() -> None:
    """Runs an unmodified script with the functions of ModelOpt replaced: `python -m muster.modelopt SCRIPT ...`."""
    install_when_imported()
    _hook.run_script("muster.modelopt")


if __name__ == "__main__":
    # Import it under its real name: the functions of that module object replace those of ModelOpt.
    importlib.import_module("muster.modelopt").main()
