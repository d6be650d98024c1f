# SPDX-License-Identifier: Apache-2.0
"""State files, workspaces, safetensors files, checkpoints, and the reports of the program `muster`."""

from __future__ import annotations

import os
import typing

from . import _core, errors
from ._core import Group, Tensor
from ._groups import _resolve

_Path: typing.TypeAlias = "str | os.PathLike[str]"
_Report: typing.TypeAlias = "dict[str, typing.Any]"
_Progress: typing.TypeAlias = "typing.Callable[[int, int, float], object] | None"


class State:
    """A config and named weights, as a file or a workspace contains them.

    `config` has {"$tensor": name} in place of each tensor; `tree()` inserts the weights again. `info` describes the
    writer: generation, world_size, and rank or path.
    """

    def __init__(self, config: typing.Any, weights: dict[str, Tensor], info: _Report):
        self.config = config
        self.weights = weights
        self.info = info

    def __iter__(self) -> typing.Iterator[typing.Any]:
        return iter((self.config, self.weights))

    def tree(self) -> typing.Any:
        """Returns the config with the weights as leaves."""
        return join(self.config, self.weights)


def split(config: typing.Any) -> tuple[typing.Any, dict[str, Tensor]]:
    """Returns (config without tensors, {name: tensor}), the form that files store. Local.

    The name of a weight is its path. The tensors share the memory of the caller. Raises ArgumentError if `config` is
    not a valid config.
    """
    return _core.split(config)


def join(config: typing.Any, weights: dict[str, typing.Any] | None) -> typing.Any:
    """Inserts weights into a config: `join(*split(tree))` equals the tree. Local.

    Raises CorruptError if the references in `config` and the names in `weights` do not match.
    """
    return _core.join(config, weights)


def write_state_file(
    path: _Path,
    config: typing.Any,
    weights: dict[str, typing.Any] | None = None,
    *,
    rank: int = 0,
    world_size: int = 1,
    generation: int = 0,
    zstd_level: int | None = None,
    durable: bool = True,
    progress: _Progress = None,
) -> None:
    """Writes the state of one rank as a file, which appears completely or not at all and replaces an existing one.
    Local.

    `config` is a dict, a list or a value. `weights` is {name: tensor}, of any shapes and dtypes; None: the tensors in
    `config` are the weights. `rank`, `world_size` and `generation` identify the writer. `zstd_level` None: no
    compression. `durable=False`: safe if the process is killed, but not after a power failure. `progress` is as for
    shard_model(). Raises ArgumentError, NoSpaceError, IoError.
    """
    _core.write_state_file(os.fspath(path), config, weights, rank, world_size, generation, zstd_level, durable, progress)


def read_state_file(path: _Path) -> State:
    """Returns the state in a file. Local.

    On local file systems its tensors are read-only views of the file, which remain valid after the file is deleted.
    Raises NotFoundError, CorruptError if the file differs from what was written, VersionError, IoError.
    """
    return State(*_core.read_state_file(os.fspath(path)))


class NFSWorkspace:
    """A directory that all ranks see. Each rank writes its states there and reads those of other ranks.

    All calls are local. Exception: `group` None means the world, whose first use is collective. Without a path the
    workspace is uninitialized; reads and writes then raise ArgumentError. `generations_kept` is the number of the
    newest states of this rank that are kept. `zstd_level` None: no compression. `durable=False`: safe if the process
    is killed, but not after a power failure. `timeout` is the time in seconds for which stale file handles and short
    files are retried; None: that of the group. Raises ArgumentError, IoError or NoSpaceError if the path cannot be a
    workspace.
    """

    def __init__(
        self,
        path: _Path | None = None,
        group: Group | typing.Any = None,
        *,
        zstd_level: int | None = None,
        durable: bool = True,
        generations_kept: int = 2,
        timeout: float | None = None,
    ):
        path = None if path is None else os.fspath(path)
        # Without a directory no group is needed.
        self._group = _resolve(group) if path else None
        self._core = _core.Workspace(path, self._group, zstd_level, durable, generations_kept, timeout)

    @property
    def path(self) -> str:
        """The directory; empty if the workspace is uninitialized."""
        return self._core.path

    @property
    def is_initialized(self) -> bool:
        """Whether the workspace has a directory."""
        return self._core.is_initialized

    @property
    def rank(self) -> int | None:
        """The rank of this process in the group; None if the workspace is uninitialized."""
        return None if self._group is None else self._group.rank

    def write_configs_and_weights(self, config: typing.Any, weights: dict[str, typing.Any] | None = None, step: int | None = None) -> int:
        """Writes the next state of this rank, completely or not at all, and returns its generation.

        The generation is `step`, which must increase, or a count if `step` is None. `config` and `weights` are as for
        write_state_file(). Raises ArgumentError if `step` does not increase, NoSpaceError, IoError.
        """
        return self._core.write(config, weights, step)

    def read_configs_and_weights_from_rank(
        self, rank: int, *, at_least: int = 0, step: int | None = None, on_all_ranks: bool = False, job: str = "own"
    ) -> State | None:
        """Returns the newest complete state of a rank that meets all conditions; None if no such state exists now.

        `at_least` and `step` require a generation that is at least, or equal to, that number. `on_all_ranks` requires
        that each rank of the job has a state of that generation. `job` is "own" for the states of this group, or
        "newest" for those of the job that wrote last. The call does not wait for other ranks. The tensors are
        read-only and remain valid as long as they are held. Raises CorruptError, VersionError, IoError.
        """
        if job not in ("own", "newest"):
            raise errors.ArgumentError(f"job is 'own' or 'newest', not {job!r}")
        found = self._core.read(rank, at_least, step, on_all_ranks, job == "newest")
        return None if found is None else State(*found)


def load_safetensors(path: _Path) -> dict[str, Tensor]:
    """Returns the tensors of a safetensors file by name: on local file systems, read-only views of the file. Local.

    Raises NotFoundError, CorruptError, IoError.
    """
    return _core.load_safetensors(os.fspath(path))[0]


def safetensors_metadata(path: _Path) -> dict[str, str]:
    """Returns `__metadata__` of a safetensors file. Local. Raises as load_safetensors()."""
    return _core.load_safetensors(os.fspath(path))[1]


def save_safetensors(path: _Path, tensors: dict[str, typing.Any], metadata: dict[str, str] | None = None) -> None:
    """Writes tensors ({name: tensor}) as a safetensors file. Local.

    The file appears completely or not at all, and is durable when the call returns. `metadata` is {str: str}. Raises
    ArgumentError if a value is not a tensor, NoSpaceError, IoError.
    """
    _core.save_safetensors(os.fspath(path), tensors, metadata)


def shard_model(
    model_dir: _Path,
    out: _Path,
    layout: str | int,
    plan: _Path = "auto",
    *,
    force: bool = False,
    to_workspace: bool = False,
    dry_run: bool = False,
    zstd_level: int | None = None,
    carry: str = "",
    at: str = "",
    shards: str = "",
    from_layout: str | int | None = None,
    job: str = "",
    generation: int | None = None,
    base: _Path = "",
    to_plan: _Path = "",
    abandoned_after: float | None = None,
    progress: _Progress = None,
) -> _Report:
    """Splits a model, or a self-describing third-party checkpoint, into one file per rank. Local.

    `out` appears completely or not at all.

    - `layout`: "4", or "tp=2,pp=2,ep=2".
    - `plan`: the name of a built-in plan, "auto" or a file.
    - `force`: replaces an existing `out`.
    - `to_workspace`: `out` is a workspace, with one state per rank. `zstd_level` compresses the states.
    - `dry_run`: only returns the report.
    - `carry`: the files to copy in addition to the weights: "all", "none" or globs; empty: configs, tokenizers and
      other files that are not weights.
    - `at`: for a third-party checkpoint, the key of the weights.
    - `base`: as for export_model().
    - `to_plan`: the plan that splits. `plan` then describes the source, which may be rank shards, as in
      export_model(). `shards`, `from_layout`, `job` and `generation` are as `shards`, `layout`, `job` and `generation`
      there.
    - `abandoned_after`: time in seconds after which unfinished outputs for `out` that other hosts left are deleted.
    - `progress`: `progress(bytes, total_bytes, seconds)` is called regularly on an internal thread. If it raises an
      exception, or on Ctrl-C, the work ends and no files are left behind.

    Returns a dict: tensors, bytes, bytes_written, job, left, notes, seconds. Raises ArgumentError if the layout or the
    plan does not fit the model, or if `out` exists. Raises NotFoundError, CorruptError, IoError or NoSpaceError for
    files.
    """
    options = {
        "force": force,
        "to_workspace": to_workspace,
        "dry_run": dry_run,
        "zstd_level": zstd_level,
        "carry": carry,
        "at": at,
        "shards": shards,
        "from_layout": from_layout,
        "job": job,
        "generation": generation,
        "base": os.fspath(base),
        "to_plan": os.fspath(to_plan),
        "abandoned_after": abandoned_after,
    }
    return _core.shard_model(os.fspath(model_dir), os.fspath(out), os.fspath(plan), str(layout), options, progress)


def load_shard(
    model_dir: _Path,
    plan: _Path,
    layout: str | int,
    rank: int,
    group: Group | typing.Any = None,
    *,
    at: str = "",
    shards: str = "",
    from_layout: str | int | None = None,
    base: _Path = "",
    to_plan: _Path = "",
    progress: _Progress = None,
) -> dict[str, Tensor]:
    """Returns the tensors that shard_model() would write for a rank with `layout`, in the same order.

    The call reads only the bytes that the rank needs, and memory is that of the tensors, which are writable. Local
    without `group`. With a group it is collective: each rank passes the `rank` whose tensors it receives, and each
    host reads the model once.

    `model_dir` may also contain rank shards (`shards` and `from_layout` are as `shards` and `layout` of
    export_model()). `plan` then merges and splits them; if it has views, "auto" splits. `plan`, `layout`, `at`,
    `base`, `to_plan` and `progress` are as for shard_model(). Raises as shard_model(). Raises also ArgumentError if
    the layout has no such rank, and RankMismatchError if ranks see different models or pass different plans or
    layouts.
    """
    options = {
        "at": at,
        "shards": shards,
        "from_layout": from_layout,
        "base": os.fspath(base),
        "to_plan": os.fspath(to_plan),
    }
    return _core.load_shard(os.fspath(model_dir), str(layout), rank, os.fspath(plan), options, group, progress)


def export_model(
    shards_dir: _Path,
    out: _Path,
    plan: _Path = "",
    group: Group | typing.Any = None,
    *,
    force: bool = False,
    max_shard_size: int | str = 5_000_000_000,
    memory_budget: int | str = "256MiB",
    writers: str | None = None,
    layout: str | int | None = None,
    to: str | int | None = None,
    to_plan: _Path = "",
    dtype: str | None = None,
    cast_all: bool = False,
    resume: bool = False,
    base: _Path = "",
    select: str = "",
    exclude: str = "",
    checksums: bool = False,
    job: str = "",
    generation: int | None = None,
    at: str = "",
    shards: str = "",
    carry: str = "",
    abandoned_after: float | None = None,
    progress: _Progress = None,
) -> _Report:
    """Merges rank shards into one checkpoint or, with `to`, into shards of another layout. Collective.

    Only rank 0 uses the parameters, except `group`, `shards_dir`, `job` and `generation`, which every rank passes.

    - `plan`: the name of a built-in plan, "auto" or a file; empty: the plan that the shards record.
    - `max_shard_size`, `memory_budget`: the size of one file, and of the buffers of all ranks together, in bytes or as
      text such as "256MiB".
    - `writers`: "rank0" or "all". The default is "all" for several hosts on a network file system, and for
      sources that every rank can read completely.
    - `layout`: of the shards, if they do not record it.
    - `to_plan`: the plan that splits for `to`; empty: `plan`, or "auto" if `plan` has views.
    - `dtype`: casts floating-point tensors to "F32", "F16" or "BF16". Scales are not cast, nor are tensors that the
      base keeps in F32, unless `cast_all` is set.
    - `resume`: continues an earlier export to `out`.
    - `base`: a model directory, from which config.json and all other files except weights are copied.
    - `select`, `exclude`: globs of output names, to export only these tensors or all except these.
    - `checksums`: writes a checksum file next to the checkpoint.
    - `job`, `generation`: select states of a workspace; the same on all ranks.
    - `at`: for a third-party checkpoint, the key of the weights. `shards`: the names of one file per rank,
      "rank{rank}.pt".
    - `carry`, `abandoned_after`: as for shard_model().

    `progress(bytes, total_bytes, seconds)` is called a few times per second on rank 0, on an internal thread. If it
    raises an exception, or on Ctrl-C on any rank, the export and the group end. The other ranks raise CancelledError,
    and no files are left behind, unless `resume` is set.

    Returns the report on rank 0 (account, files_resumed, bytes_resumed, writers, bytes_written, left, seconds), and {}
    on the other ranks. Errors are raised on all ranks alike. After ArgumentError, RankMismatchError, CorruptError,
    NotFoundError, IoError or NoSpaceError the group remains usable. TimeoutError and PeerLostError abort it.
    """
    options = {
        "force": force,
        "max_shard_size": max_shard_size,
        "memory_budget": memory_budget,
        "writers": writers,
        "layout": layout,
        "to": to,
        "to_plan": os.fspath(to_plan),
        "dtype": dtype,
        "cast_all": cast_all,
        "resume": resume,
        "base": os.fspath(base),
        "select": select,
        "exclude": exclude,
        "checksums": checksums,
        "job": job,
        "generation": generation,
        "at": at,
        "shards": shards,
        "carry": carry,
        "abandoned_after": abandoned_after,
    }
    return _core.export_model(os.fspath(shards_dir), os.fspath(out), os.fspath(plan), _resolve(group), options, progress)


def plan_export(
    shards_dir: _Path,
    plan: _Path = "",
    *,
    max_shard_size: int | str = 5_000_000_000,
    layout: str | int | None = None,
    to: str | int | None = None,
    to_plan: _Path = "",
    dtype: str | None = None,
    cast_all: bool = False,
    base: _Path = "",
    select: str = "",
    exclude: str = "",
    job: str = "",
    generation: int | None = None,
    at: str = "",
    shards: str = "",
) -> _Report:
    """Returns a dict of what export_model() would do with these options: every tensor of every rank, and its result.
    Local.

    It reads the headers of all shards. Raises as export_model().
    """
    options = {
        "max_shard_size": max_shard_size,
        "layout": layout,
        "to": to,
        "to_plan": os.fspath(to_plan),
        "dtype": dtype,
        "cast_all": cast_all,
        "base": os.fspath(base),
        "select": select,
        "exclude": exclude,
        "job": job,
        "generation": generation,
        "at": at,
        "shards": shards,
    }
    return _core.plan_export(os.fspath(shards_dir), os.fspath(plan), options)


def verify(
    path: _Path,
    *,
    checksums: bool = True,
    at: str = "",
    shards: str = "",
    plan: _Path = "",
    base: _Path = "",
    layout: str | int | None = None,
    progress: _Progress = None,
) -> _Report:
    """Returns a dict of all problems of a checkpoint, rank shards, a workspace or a file; "good" is true without any.
    Local.

    `checksums=False` reads only headers. `at` and `shards` are as for export_model(), for third-party checkpoints.
    With `plan`, `base` or `layout`, which are as for export_model(), an export is also planned, and tensors that do
    not fit are problems. `progress(bytes, total_bytes, seconds)` is called while tensors are read, on an internal
    thread. If it raises an exception, or on Ctrl-C, reading ends. Raises NotFoundError if there is nothing to verify,
    IoError if a directory cannot be read, VersionError if a newer Muster wrote it, ArgumentError if a plan, a base or
    a layout is invalid.
    """
    options = {
        "checksums": checksums,
        "at": at,
        "shards": shards,
        "plan": os.fspath(plan),
        "base": os.fspath(base),
        "layout": layout,
    }
    return _core.verify(os.fspath(path), options, progress)


def show(
    path: _Path,
    *,
    plan: _Path = "",
    base: _Path = "",
    pattern: str = "",
    at: str = "",
    shards: str = "",
    rank: int | None = None,
    generation: int | None = None,
    job: str = "",
) -> _Report:
    """Returns the output of `muster show --json` for a path (docs/reference/json-output.md). Local.

    `pattern` selects tensors by name. `plan` merges rank shards: the name of a built-in plan, "auto" or a file. `base`
    is a model directory with the config.json that the plan needs. `at` and `shards` are as for export_model(), for
    third-party checkpoints. `rank`, `generation` and `job` select, in a workspace, the state of one rank, its
    generation, and the job by a prefix of its number. Raises ArgumentError, NotFoundError, CorruptError, VersionError,
    IoError.
    """
    options = {"plan": os.fspath(plan), "base": os.fspath(base), "at": at, "shards": shards, "rank": rank, "generation": generation, "job": job}
    return _core.show(os.fspath(path), pattern, options)


def diff(
    a: _Path,
    b: _Path,
    *,
    plan: _Path = "",
    base: _Path = "",
    at: str = "",
    shards: str = "",
    rank: int | None = None,
    generation: int | None = None,
    job: str = "",
) -> _Report:
    """Returns the output of `muster diff --json` for two paths, as a dict; "same" is true if they are equal. Local.

    The options are those of show() and apply to both paths. Raises as show().
    """
    options = {"plan": os.fspath(plan), "base": os.fspath(base), "at": at, "shards": shards, "rank": rank, "generation": generation, "job": job}
    return _core.diff(os.fspath(a), os.fspath(b), options)
