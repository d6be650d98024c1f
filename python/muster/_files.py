# SPDX-License-Identifier: Apache-2.0
"""State files, workspaces, safetensors files, checkpoints, and what the program `muster` says of files."""

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
    """A config and named weights, as a file or a workspace has them.

    `config` has {"$tensor": name} where a tensor was taken out; `tree()` puts the weights back. `info` says whose state
    it is: generation, world_size, and rank or path.
    """

    def __init__(self, config: typing.Any, weights: dict[str, Tensor], info: _Report):
        self.config = config
        self.weights = weights
        self.info = info

    def __iter__(self) -> typing.Iterator[typing.Any]:
        return iter((self.config, self.weights))

    def tree(self) -> typing.Any:
        """The config with the weights at its leaves."""
        return join(self.config, self.weights)


def split(config: typing.Any) -> tuple[typing.Any, dict[str, Tensor]]:
    """(config without tensors, {name: tensor}): what files hold of a tree. A weight's name is its path. Local.

    The tensors keep the caller's memory. Raises ArgumentError on what is no config.
    """
    return _core.split(config)


def join(config: typing.Any, weights: dict[str, typing.Any] | None) -> typing.Any:
    """Puts weights back: join(*split(tree)) is the tree. Local. Raises CorruptError where the two do not fit."""
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
    """Writes one rank's state as a file, whole or not at all, over one that is there. Local.

    `config` is a dict, a list or a value; `weights` is {name: tensor}, of any shapes and dtypes; None: the tensors of
    `config` are them. `rank`, `world_size`, `generation` say whose it is. `zstd_level`: None does not compress.
    `durable=False`: safe from killed processes, not from a power cut. `progress`: as of shard_model(). Raises
    ArgumentError, NoSpaceError, IoError.
    """
    _core.write_state_file(os.fspath(path), config, weights, rank, world_size, generation, zstd_level, durable, progress)


def read_state_file(path: _Path) -> State:
    """The state in a file. Local. Tensors are read-only views of it, on local file systems, and outlive its removal.

    Raises NotFoundError, CorruptError (what was written is not what is there), VersionError, IoError.
    """
    return State(*_core.read_state_file(os.fspath(path)))


class NFSWorkspace:
    """A directory that all ranks see, where each puts its states and reads those of others.

    All calls are local; but `group` None is the world, whose first use is collective. Without a path it is not initialised,
    and writing and reading raise ArgumentError. `generations_kept`: how many of this rank's newest states stay.
    `zstd_level`: None does not compress. `durable=False`: safe from killed processes, not from a power cut. `timeout`: seconds for which stale handles and short files are tried again; None: the group's.
    Raises ArgumentError, IoError, NoSpaceError on a path that cannot be one.
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
        # Nobody has to be met where there is no directory.
        self._group = _resolve(group) if path else None
        self._core = _core.Workspace(path, self._group, zstd_level, durable, generations_kept, timeout)

    @property
    def path(self) -> str:
        """The directory; empty if there is none."""
        return self._core.path

    @property
    def is_initialized(self) -> bool:
        """Whether there is a directory."""
        return self._core.is_initialized

    @property
    def rank(self) -> int | None:
        """Of this process in the group; None without a directory."""
        return None if self._group is None else self._group.rank

    def write_configs_and_weights(self, config: typing.Any, weights: dict[str, typing.Any] | None = None, step: int | None = None) -> int:
        """Writes this rank's next state, whole or not at all; returns its generation: `step`, which grows, or a count.

        `config`, `weights`: as of write_state_file(). Raises ArgumentError on a step that does not grow, NoSpaceError, IoError.
        """
        return self._core.write(config, weights, step)

    def read_configs_and_weights_from_rank(
        self, rank: int, *, at_least: int = 0, step: int | None = None, on_all_ranks: bool = False, job: str = "own"
    ) -> State | None:
        """A rank's newest complete state for which all of this holds; None if there is none now.

        `at_least`, `step`: the generation is at least, or is, that. `on_all_ranks`: each rank of the job has one of that
        generation. `job`: "own" for this group's states, "newest" for those of whichever job wrote last. Never waits for other
        ranks. Its tensors are read-only and stay valid as long as they are held. Raises CorruptError, VersionError, IoError.
        """
        if job not in ("own", "newest"):
            raise errors.ArgumentError(f"job is 'own' or 'newest', not {job!r}")
        found = self._core.read(rank, at_least, step, on_all_ranks, job == "newest")
        return None if found is None else State(*found)


def load_safetensors(path: _Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file by name: read-only views of it, on local file systems. Local.

    Raises NotFoundError, CorruptError, IoError.
    """
    return _core.load_safetensors(os.fspath(path))[0]


def safetensors_metadata(path: _Path) -> dict[str, str]:
    """`__metadata__` of a safetensors file. Local. Raises as load_safetensors()."""
    return _core.load_safetensors(os.fspath(path))[1]


def save_safetensors(path: _Path, tensors: dict[str, typing.Any], metadata: dict[str, str] | None = None) -> None:
    """Writes tensors ({name: tensor}) as a safetensors file, whole or not at all, durable when it returns. Local.

    `metadata`: {str: str}. Raises ArgumentError on what is no tensor, NoSpaceError, IoError.
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
    """Cuts a model, or a foreign checkpoint that is whole, into one file a rank, which `out` has whole or not at all. Local.

    `layout`: "4", or "tp=2,pp=2,ep=2". `plan`: a built-in plan's name, "auto" or a file. `force`: an `out` that is there is
    replaced. `to_workspace`: `out` is a workspace, with a state for each rank (`zstd_level`: compressed). `dry_run`: only
    the report. `carry`: which files that are no weights go along: "all", "none" or globs; empty: the ordinary ones. `at`: of a
    foreign checkpoint, the key that has the weights. `base`: as of export_model(). `to_plan`: the plan that cuts; `plan` reads
    what is there then, which may be ranks' shards, as export_model() does (`shards`, `from_layout`, `job`, `generation`: as
    `shards`, `layout`, `job` and `generation` there). `abandoned_after`: seconds, after which unfinished
    outputs for `out` that other hosts left are removed. `progress(bytes, total_bytes, seconds)` is called now and then, on a thread of the work; what it
    raises, and Ctrl-C, end the work, and nothing is left behind.

    Returns a dict: tensors, bytes, bytes_written, job, left, notes, seconds. Raises ArgumentError on a layout or a plan
    that does not fit the model, and on an `out` that is there; NotFoundError, CorruptError, IoError, NoSpaceError of files.
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
    """The tensors that a rank's shard would have if shard_model() cut the model for `layout`, in the same order.

    Only what the rank needs is read, and only the tensors are in memory; they may be written to. Local without `group`. With
    one, collective over it: each rank names the part that it wants, and the model is read once on each host. `model_dir`
    may have shards of ranks, too (`shards`, `from_layout`: as `shards` and `layout` of export_model()); `plan` reads and cuts
    them then, or "auto" cuts if `plan` has views. `plan`, `layout`, `at`, `base`, `to_plan`, `progress`: as of shard_model().
    Raises as that, ArgumentError if the layout has no such rank, and RankMismatchError if ranks see other models or give
    other plans or layouts.
    """
    options = {
        "at": at,
        "shards": shards,
        "from_layout": from_layout,
        "base": os.fspath(base),
        "to_plan": os.fspath(to_plan),
    }
    return _core.load_shard(os.fspath(model_dir), os.fspath(plan), str(layout), rank, options, group, progress)


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
    """The ranks of a group merge shards into one checkpoint, or, with `to`, into shards of another layout. Collective.

    All parameters but `group` count on rank 0 (`shards_dir` on every rank). `plan`: a built-in plan's name, "auto" or a
    file; empty: the one that the shards were cut by. `max_shard_size`, `memory_budget`: bytes, or texts such as "256MiB",
    of one file and of all ranks' memory for what is on its way. `writers`: "first", or "owners", the default for several hosts on a network
    file system and for what every rank can read whole. `layout`: of the shards,
    where they do not say. `to_plan`: that cuts for `to`; else `plan`, or "auto" if `plan` has views. `dtype`: floating point
    tensors are cast to "F32", "F16" or "BF16", but for scales and, unless `cast_all`, for what the base keeps in F32. `resume`: goes on with what an earlier export to `out` left. `base`: a model's directory, from which config.json and all other files beside the weights
    come. `select`, `exclude`: globs of the result's names: only these tensors, not these. `checksums`: writes them beside
    the checkpoint. `job`, `generation`: which states of a workspace, the same on all ranks. Of a foreign checkpoint `at`: the
    key that has the weights; `shards`: the names of ranks' files, "rank{rank}.pt". `carry`, `abandoned_after`: as of shard_model().

    `progress(bytes, total_bytes, seconds)` is called some times a second on rank 0, on a thread of the work. What it
    raises on its rank, and Ctrl-C on any, end the export and the group: the others raise CancelledError, and nothing is
    left behind, unless `resume`.

    Returns the report on rank 0 (account, files_resumed, bytes_resumed, writers, bytes_written, left, seconds), {} elsewhere.
    Raises the same on all ranks: ArgumentError, RankMismatchError, CorruptError, NotFoundError, IoError, NoSpaceError,
    after which the group is usable; TimeoutError and PeerLostError, which end it.
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
    """What export_model() would do with these options, as a dict: every tensor of every rank, and what becomes of it. Local.

    Reads the headers of all shards. Raises as export_model().
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
    """All that is wrong with a checkpoint, shards, a workspace or a file, as a dict; "good" if nothing is. Local.

    `checksums=False`: headers only. `at`, `shards`: of a foreign checkpoint, as of export_model(). With `plan`, `base` or
    `layout`, as of that, too, an export with them is planned, and misfits are problems. `progress(bytes, total_bytes,
    seconds)` is called while tensors are read, on a thread of the work; what it raises, and Ctrl-C, end the reading. Raises
    NotFoundError if there is nothing to verify, IoError if a directory cannot be read, VersionError on what a newer Muster wrote,
    ArgumentError on a plan, a base or a layout that cannot be used.
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
    """What `muster show --json` says of a path (docs/inspecting.md). `pattern`: only tensors whose names match. Local.

    `plan`: merges the shards of ranks: a built-in plan's name, "auto" or a file. `base`: a model's directory whose config.json
    the plan needs. `at`, `shards`: of a foreign checkpoint, as of
    export_model(). `rank`, `generation`, `job`: of a workspace, this rank's state alone, of that generation, of the job whose
    number begins so. Raises ArgumentError, NotFoundError, CorruptError, VersionError, IoError.
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
    """What `muster diff --json` says of two paths, as a dict; "same" if they are. Local.

    Options are those of show(), and count for both paths. Raises as show().
    """
    options = {"plan": os.fspath(plan), "base": os.fspath(base), "at": at, "shards": shards, "rank": rank, "generation": generation, "job": job}
    return _core.diff(os.fspath(a), os.fspath(b), options)
