# SPDX-License-Identifier: Apache-2.0
"""State files, workspaces, safetensors files, checkpoints, and the reports of the program `muster`."""

from __future__ import annotations

import os
import typing

from . import _core, errors
from ._core import Group, Tensor
from ._groups import _resolve
from ._names import checks_names

_Path: typing.TypeAlias = "str | os.PathLike[str]"
_Report: typing.TypeAlias = "dict[str, typing.Any]"
_Progress: typing.TypeAlias = "typing.Callable[[int, int, float], object] | None"


class State:
    """A config and named weights, as a file or a workspace contains them.

    `config` has {"$tensor": name} in place of each tensor. `weights` is {name: tensor}. `info` describes the writer:
    step, world_size, and rank or path.
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
    """Splits a config into the form that files store. Local.

    Args:
        config: A dict, a list or a value, with tensors as any leaves.

    Returns:
        (config without tensors, {name: tensor}). The name of a tensor is its path. The tensors share the memory of the
        caller.

    Raises:
        InvalidArgumentError: `config` is not a valid config.
    """
    return _core.split(config)


def join(config: typing.Any, weights: dict[str, typing.Any] | None) -> typing.Any:
    """Inserts weights into a config, as the inverse of split(). Local.

    Args:
        config: A config with {"$tensor": name} in place of each tensor.
        weights: {name: tensor}.

    Returns:
        The config with the weights as leaves.

    Raises:
        CorruptError: The references in `config` and the names in `weights` do not match.
    """
    return _core.join(config, weights)


@checks_names
def write_state_file(
    path: _Path,
    config: typing.Any,
    weights: dict[str, typing.Any] | None = None,
    *,
    rank: int = 0,
    world_size: int = 1,
    step: int = 0,
    zstd_level: int | None = None,
    durable: bool = True,
    progress: _Progress = None,
) -> None:
    """Writes the state of one rank as a file. Local.

    The file appears completely or not at all, and replaces an existing one.

    Args:
        path: The file.
        config: A dict, a list or a value.
        weights: {name: tensor}, of any shapes and dtypes. None: the tensors in `config` are the weights.
        rank: The rank of the writer.
        world_size: The number of ranks of its job.
        step: The step of the state.
        zstd_level: The compression level. None: no compression.
        durable: False: the file is safe if the process is killed, but not after a power failure.
        progress: As for shard_model().

    Raises:
        InvalidArgumentError: An argument is invalid, or a name occurs twice.
        OutOfSpaceError: Disk space is insufficient.
        IoError: Writing failed.
    """
    _core.write_state_file(os.fspath(path), config, weights, rank, world_size, step, zstd_level, durable, progress)


def read_state_file(path: _Path) -> State:
    """Returns the state in a file. Local.

    On local file systems its tensors are read-only views of the file, which remain valid after the file is deleted.

    Args:
        path: The file.

    Raises:
        NotFoundError: The file does not exist.
        CorruptError: The file differs from the written one.
        VersionError: A newer Muster wrote the file.
        IoError: Reading failed.
    """
    return State(*_core.read_state_file(os.fspath(path)))


class Workspace:
    """A directory that all ranks see. Each rank writes its states there and reads those of other ranks.

    All calls are local. Exception: `group` None means the world, whose first use is collective. Without a path the
    workspace is uninitialized, and reads and writes raise InvalidArgumentError.

    Args:
        path: The directory, which is created if it does not exist.
        group: A muster.Group, a process group of torch.distributed, or None for the world.
        zstd_level: The compression level of states. None: no compression.
        durable: False: states are safe if the process is killed, but not after a power failure.
        steps_kept: How many of the newest states of this rank are kept.
        timeout: How long stale file handles and short files are retried, in seconds. None: the timeout of the group.

    Raises:
        InvalidArgumentError: The path cannot be a workspace.
        IoError: The directory cannot be used.
        OutOfSpaceError: The directory has no space.
    """

    @checks_names
    def __init__(
        self,
        path: _Path | None = None,
        group: Group | typing.Any = None,
        *,
        zstd_level: int | None = None,
        durable: bool = True,
        steps_kept: int = 2,
        timeout: float | None = None,
    ):
        path = None if path is None else os.fspath(path)
        # Without a directory no group is needed.
        self._group = _resolve(group) if path else None
        self._core = _core.Workspace(path, self._group, zstd_level, durable, steps_kept, timeout)

    @property
    def path(self) -> str:
        """The directory. It is empty if the workspace is uninitialized."""
        return self._core.path

    @property
    def is_initialized(self) -> bool:
        """Whether the workspace has a directory."""
        return self._core.is_initialized

    @property
    def rank(self) -> int | None:
        """The rank of this process in the group, or None if the workspace is uninitialized."""
        return None if self._group is None else self._group.rank

    def write_configs_and_weights(self, config: typing.Any, weights: dict[str, typing.Any] | None = None, step: int | None = None) -> int:
        """Writes the next state of this rank, completely or not at all.

        Args:
            config: As for write_state_file().
            weights: As for write_state_file().
            step: The step of the state, which must be larger than those that this rank has written. None: one more than
                the last one.

        Returns:
            The step of the state.

        Raises:
            InvalidArgumentError: The workspace is uninitialized, or `step` does not increase.
            OutOfSpaceError: Disk space is insufficient.
            IoError: Writing failed.
        """
        return self._core.write(config, weights, step)

    @checks_names
    def read_configs_and_weights_from_rank(
        self, rank: int, *, min_step: int = 0, step: int | None = None, on_all_ranks: bool = False, job: str = "own"
    ) -> State | None:
        """Returns the newest complete state of a rank that meets all conditions. The call does not wait for one.

        Args:
            rank: The rank of the writer.
            min_step: The state has this step or a later one.
            step: The state has exactly this step.
            on_all_ranks: Each rank of the job has a state of that step.
            job: "own" for the states of this group, or "newest" for those of the job that wrote last.

        Returns:
            The state, or None if no such state exists now. Its tensors are read-only and remain valid as long as they
            are held.

        Raises:
            InvalidArgumentError: The workspace is uninitialized, or the group has no such rank.
            NotFoundError: The directory no longer exists.
            CorruptError: The state is damaged.
            VersionError: A newer Muster wrote the state.
            IoError: Reading failed.
        """
        if job not in ("own", "newest"):
            raise errors.InvalidArgumentError(f"job: unknown value {job!r} (expected 'own' or 'newest')")
        found = self._core.read(rank, min_step, step, on_all_ranks, job == "newest")
        return None if found is None else State(*found)


#: The name of the class in ModelOpt.
NFSWorkspace = Workspace


def load_safetensors(path: _Path) -> dict[str, Tensor]:
    """Returns the tensors of a safetensors file by name. Local.

    On local file systems they are read-only views of the file.

    Args:
        path: The file.

    Raises:
        NotFoundError: The file does not exist.
        CorruptError: The file contradicts its format.
        IoError: Reading failed.
    """
    return _core.load_safetensors(os.fspath(path))[0]


def safetensors_metadata(path: _Path) -> dict[str, str]:
    """Returns `__metadata__` of a safetensors file. Local.

    Args:
        path: The file.

    Raises:
        Error: As load_safetensors().
    """
    return _core.load_safetensors(os.fspath(path))[1]


def save_safetensors(path: _Path, tensors: dict[str, typing.Any], metadata: dict[str, str] | None = None) -> None:
    """Writes tensors as a safetensors file. Local.

    The file appears completely or not at all, and is durable when the call returns.

    Args:
        path: The file.
        tensors: {name: tensor}.
        metadata: The `__metadata__` of the file, {str: str}.

    Raises:
        InvalidArgumentError: A value is not a tensor, or a name or the metadata is not text.
        OutOfSpaceError: Disk space is insufficient.
        IoError: Writing failed.
    """
    _core.save_safetensors(os.fspath(path), tensors, metadata)


@checks_names
def shard_model(
    model: _Path,
    out: _Path,
    target_layout: str | int,
    plan: _Path = "auto",
    *,
    force: bool = False,
    to_workspace: bool = False,
    dry_run: bool = False,
    zstd_level: int | None = None,
    select: str = "",
    exclude: str = "",
    extra_files: str = "",
    key: str = "",
    file_pattern: str = "",
    source_layout: str | int | None = None,
    job_id: str = "",
    step: int | None = None,
    base_model: _Path = "",
    to_plan: _Path = "",
    stale_after: float | None = None,
    progress: _Progress = None,
) -> _Report:
    """Splits a model, or a self-describing third-party checkpoint, into one file per rank. Local.

    Args:
        model: The directory of the model. With `to_plan`, it may also be rank shards.
        out: The new directory. It appears completely or not at all.
        target_layout: The layout of the result: "4", or "tp=2,pp=2,ep=2".
        plan: The name of a built-in plan, "auto" or a file.
        force: Replaces an existing `out`.
        to_workspace: Treats `out` as a workspace, and writes one state per rank.
        dry_run: Only returns the report.
        zstd_level: The compression level of the states. None: no compression.
        select: As for export_model().
        exclude: As for export_model().
        extra_files: The files to copy in addition to the weights: "all", "none" or globs. Empty: configs, tokenizers
            and other files that are not weights.
        key: For a third-party checkpoint, the key of the weights.
        file_pattern: For one file per rank, the names of the files, such as "rank{rank}.pt".
        source_layout: The layout of the source, if it is rank shards that do not record it.
        job_id: For a workspace with the states of several jobs, a prefix of the job ID.
        step: For a workspace, the step. None: the newest one that all ranks have.
        base_model: A model directory. config.json and all other files except weights are copied from it.
        to_plan: The plan that splits. `plan` then describes the source, as in export_model().
        stale_after: Unfinished outputs for `out` that other hosts left are deleted if they have not changed for this
            time in seconds.
        progress: `progress(bytes, total_bytes, seconds)` is called regularly on an internal thread. If it raises an
            exception, or on Ctrl-C, the work ends and no files are left behind.

    Returns:
        A dict with tensors, bytes, bytes_written, job, notes, seconds, and skipped: (name, reason) of the files that
        were not copied.

    Raises:
        InvalidArgumentError: The layout or the plan does not fit the model, or `out` exists.
        NotFoundError: A file does not exist.
        CorruptError: A file contradicts its format.
        IoError: Reading or writing failed.
        OutOfSpaceError: Disk space is insufficient.
    """
    options = {
        "force": force,
        "to_workspace": to_workspace,
        "dry_run": dry_run,
        "zstd_level": zstd_level,
        "select": select,
        "exclude": exclude,
        "extra_files": extra_files,
        "key": key,
        "file_pattern": file_pattern,
        "source_layout": source_layout,
        "job_id": job_id,
        "step": step,
        "base_model": os.fspath(base_model),
        "to_plan": os.fspath(to_plan),
        "stale_after": stale_after,
    }
    return _core.shard_model(os.fspath(model), os.fspath(out), str(target_layout), os.fspath(plan), options, progress)


@checks_names
def load_shard(
    model: _Path,
    target_layout: str | int,
    rank: int,
    plan: _Path,
    group: Group | typing.Any = None,
    *,
    key: str = "",
    file_pattern: str = "",
    source_layout: str | int | None = None,
    base_model: _Path = "",
    to_plan: _Path = "",
    progress: _Progress = None,
) -> dict[str, Tensor]:
    """Returns the tensors that shard_model() would write for a rank, in the same order, without writing files.

    The call reads only the bytes that the rank needs. Memory is that of the tensors, which are writable. Local without
    `group`, collective with it: each rank passes the `rank` whose tensors it receives, and each host reads the model
    once. The options are those of shard_model().

    Args:
        model: The directory of the model. It may also contain rank shards: `plan` then merges and splits them, or
            "auto" splits them if `plan` has views.
        target_layout: The layout that the model is split for.
        rank: The rank whose tensors this process receives, in `target_layout`.
        plan: The name of a built-in plan, "auto" or a file.
        group: A muster.Group, a process group of torch.distributed, or None for a local call.

    Raises:
        InvalidArgumentError: The layout has no such rank.
        RankMismatchError: The ranks see different models, or pass different plans or layouts.
        Error: As shard_model().
    """
    options = {
        "key": key,
        "file_pattern": file_pattern,
        "source_layout": source_layout,
        "base_model": os.fspath(base_model),
        "to_plan": os.fspath(to_plan),
    }
    return _core.load_shard(os.fspath(model), str(target_layout), rank, os.fspath(plan), options, group, progress)


@checks_names
def verify(
    path: _Path,
    *,
    checksums: bool = True,
    key: str = "",
    file_pattern: str = "",
    plan: _Path = "",
    base_model: _Path = "",
    source_layout: str | int | None = None,
    select: str = "",
    exclude: str = "",
    progress: _Progress = None,
) -> _Report:
    """Finds all problems of a checkpoint, rank shards, a workspace or a file. Local.

    With `plan`, `base_model` or `source_layout`, the call also plans an export, and tensors that do not fit are
    problems.

    Args:
        path: The directory or file.
        checksums: False: reads only headers.
        key: As for export_model(), for a third-party checkpoint.
        file_pattern: As for export_model(), for a third-party checkpoint.
        plan: As for export_model().
        base_model: As for export_model().
        source_layout: As for export_model().
        select: A glob of tensor names: only these tensors are read and counted. Problems of whole files are always
            reported.
        exclude: A glob of tensor names: these tensors are neither read nor counted.
        progress: `progress(bytes, total_bytes, seconds)` is called while tensors are read, on an internal thread. If it
            raises an exception, or on Ctrl-C, the call ends.

    Returns:
        The output of `muster verify --json` (docs/reference/json-output.md) as a dict. "good" is true without problems.

    Raises:
        NotFoundError: The path does not exist, or contains nothing that can be verified.
        IoError: A directory cannot be read.
        VersionError: A newer Muster wrote it.
        InvalidArgumentError: A plan, a base or a layout is invalid.
    """
    options = {
        "checksums": checksums,
        "key": key,
        "file_pattern": file_pattern,
        "plan": os.fspath(plan),
        "base_model": os.fspath(base_model),
        "source_layout": source_layout,
        "select": select,
        "exclude": exclude,
    }
    return _core.verify(os.fspath(path), options, progress)


def _source_options(plan, base_model, select, exclude, key, file_pattern, rank, step, job_id):
    return {
        "select": select,
        "exclude": exclude,
        "plan": os.fspath(plan),
        "base_model": os.fspath(base_model),
        "key": key,
        "file_pattern": file_pattern,
        "rank": rank,
        "step": step,
        "job_id": job_id,
    }


@checks_names
def show(
    path: _Path,
    *,
    plan: _Path = "",
    base_model: _Path = "",
    select: str = "",
    exclude: str = "",
    key: str = "",
    file_pattern: str = "",
    rank: int | None = None,
    step: int | None = None,
    job_id: str = "",
) -> _Report:
    """Lists the tensors of a file, a checkpoint, rank shards or a workspace. Local.

    Args:
        path: The directory or file.
        plan: Merges rank shards: the name of a built-in plan, "auto" or a file.
        base_model: A model directory with the config.json that the plan needs.
        select: A glob of tensor names, such as `*.{weight,bias}`: only these tensors.
        exclude: A glob of tensor names: all except these tensors.
        key: As for export_model(), for a third-party checkpoint.
        file_pattern: As for export_model(), for a third-party checkpoint.
        rank: For a workspace, the rank whose state is listed. None: all ranks.
        step: For a workspace, the step. None: the newest complete one.
        job_id: For a workspace with the states of several jobs, a prefix of the job ID.

    Returns:
        The output of `muster show --json` (docs/reference/json-output.md) as a dict.

    Raises:
        InvalidArgumentError: An option does not fit the path.
        NotFoundError: The path, or the requested rank, step or job, does not exist.
        CorruptError: A file contradicts its format.
        VersionError: A newer Muster wrote it.
        IoError: Reading failed.
    """
    options = _source_options(plan, base_model, select, exclude, key, file_pattern, rank, step, job_id)
    return _core.show(os.fspath(path), options)


@checks_names
def diff(
    a: _Path,
    b: _Path,
    *,
    plan: _Path = "",
    base_model: _Path = "",
    select: str = "",
    exclude: str = "",
    key: str = "",
    file_pattern: str = "",
    rank: int | None = None,
    step: int | None = None,
    job_id: str = "",
) -> _Report:
    """Compares the tensors, configs and other files of two paths. Local.

    The options are those of show(), and apply to both paths. The errors are those of show().

    Args:
        a: A directory or file.
        b: The other directory or file.

    Returns:
        The output of `muster diff --json` (docs/reference/json-output.md) as a dict. "same" is true if they are equal.
    """
    options = _source_options(plan, base_model, select, exclude, key, file_pattern, rank, step, job_id)
    return _core.diff(os.fspath(a), os.fspath(b), options)


@checks_names
def fingerprint(
    path: _Path | typing.Mapping[str, typing.Any],
    *,
    group: Group | typing.Any = None,
    plan: _Path = "",
    base_model: _Path = "",
    select: str = "",
    exclude: str = "",
    dtype: str | None = None,
    cast_all: bool = False,
    key: str = "",
    file_pattern: str = "",
    rank: int | None = None,
    step: int | None = None,
    job_id: str = "",
    source_layout: str | int | None = None,
    progress: _Progress = None,
) -> _Report:
    """Returns a CRC of each tensor of a path, or of the state dicts of all ranks, and a hash of them all.

    Two models with the same hash have the same names, dtypes, shapes and elements, for any number of files or ranks.
    For a path, the call is local, and the other options are those of show().

    A state dict makes the call collective over `group`. Each rank passes its state dict, with the values that
    export_model() takes, and all ranks get the result. The parts of all ranks must cover each tensor, and parts that
    overlap must be equal. With `plan` or `dtype`, the result is the fingerprint of the checkpoint that export_model()
    would write, but a tied output head is not left out, and without `cast_all` the base does not decide which tensors
    remain F32. Ranks then exchange elements. Otherwise no elements of tensors in host memory are sent. Each rank passes `progress`, and only
    rank 0 uses the other options. `key`, `file_pattern`, `rank`, `step` and `job_id` are for paths.

    Args:
        path: The directory or file, or the state dict of this rank.
        group: For a state dict: a muster.Group, a process group of torch.distributed, or None for the world.
        dtype: As for export_model(): casts floating-point tensors before they are compared.
        cast_all: As for export_model().
        source_layout: As for export_model(): the layout of the shards, or of the ranks with a plan.
        progress: As for verify().

    Returns:
        The output of `muster fingerprint --json` (docs/reference/json-output.md) as a dict. "hash" is the hash. A state
        dict has no "path". "text" has the lines that `muster fingerprint --check` reads.

    Raises:
        NotFoundError: The path does not exist, or no name matches `select`.
        CorruptError: A file is damaged.
        UnsupportedError: A tensor cannot be read; `dtype` is set for a state file or HDF5 file; or an option is set
            that a state dict does not have.
        InvalidArgumentError: Shards have no plan; the plan or dtype does not fit; or elements are in no part.
        RankMismatchError: Ranks that must have the same values differ.
    """
    options = {**_source_options(plan, base_model, select, exclude, key, file_pattern, rank, step, job_id), "dtype": dtype, "cast_all": cast_all, "source_layout": source_layout}
    if isinstance(path, (str, os.PathLike)):
        if group is not None:
            raise errors.InvalidArgumentError("fingerprint: group: a path is read by this process alone. Leave it out")
        return _core.fingerprint(os.fspath(path), options, progress)
    return _core.fingerprint_tensors(path, _resolve(group), options, progress)
