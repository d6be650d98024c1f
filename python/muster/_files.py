# SPDX-License-Identifier: Apache-2.0
"""State files, workspaces, safetensors files, checkpoints, and what the program `muster` says of files."""

from __future__ import annotations

import os

from . import _core
from ._core import Tensor
from ._groups import _resolve


class State:
    """A config and named weights, as a file or a workspace has them.

    `config` has {"$tensor": name} where a tensor was taken out; `tree()` puts the weights back. `info` says whose state
    it is: generation, world_size, and rank or path.
    """

    def __init__(self, config, weights: dict[str, Tensor], info: dict):
        self.config = config
        self.weights = weights
        self.info = info

    def __iter__(self):
        return iter((self.config, self.weights))

    def tree(self):
        """The config with the weights at its leaves."""
        return join(self.config, self.weights)


def split(config):
    """(config without tensors, {name: tensor}): what files hold of a tree. A weight's name is its path. Local.

    The tensors keep the caller's memory. Raises ArgumentError on what is no config.
    """
    return _core.split(config)


def join(config, weights):
    """Puts weights back: join(*split(tree)) is the tree. Local. Raises CorruptError where the two do not fit."""
    return _core.join(config, weights)


def write_state_file(path, config, weights=None, *, rank=0, world_size=1, generation=0, zstd_level=None, durable=True) -> None:
    """Writes one rank's state as a file, whole or not at all, over one that is there. Local.

    `config` is a dict, a list or a value; `weights` is {name: tensor}, of any shapes and dtypes; None: the tensors of
    `config` are them. `rank`, `world_size`, `generation` say whose it is. `zstd_level`: None does not compress.
    `durable=False`: safe from killed processes, not from a power cut. Raises ArgumentError, NoSpaceError, IoError.
    """
    _core.write_state_file(os.fspath(path), config, weights, rank, world_size, generation, zstd_level, durable)


def read_state_file(path) -> State:
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

    def __init__(self, path=None, group=None, *, zstd_level=None, durable=True, generations_kept=2, timeout=None):
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

    def write_configs_and_weights(self, config, weights=None, step: int | None = None) -> int:
        """Writes this rank's next state, whole or not at all; returns its generation: `step`, which grows, or a count.

        `config`, `weights`: as of write_state_file(). Raises ArgumentError on a step that does not grow, NoSpaceError, IoError.
        """
        return self._core.write(config, weights, step)

    def read_configs_and_weights_from_rank(self, rank, *, at_least=0, step=None, on_all_ranks=False, job="own") -> State | None:
        """A rank's newest complete state for which all of this holds; None if there is none now.

        `at_least`, `step`: the generation is at least, or is, that. `on_all_ranks`: each rank of the job has one of that
        generation. `job`: "own" for this group's states, "newest" for those of whichever job wrote last. Never waits for other
        ranks. Its tensors are read-only and stay valid as long as they are held. Raises CorruptError, VersionError, IoError.
        """
        if job not in ("own", "newest"):
            raise ValueError(f"job is 'own' or 'newest', not {job!r}")
        found = self._core.read(rank, at_least, step, on_all_ranks, job == "newest")
        return None if found is None else State(*found)


def load_safetensors(path) -> dict[str, Tensor]:
    """The tensors of a safetensors file by name: read-only views of it, on local file systems. Local.

    Raises NotFoundError, CorruptError, IoError.
    """
    return _core.load_safetensors(os.fspath(path))[0]


def safetensors_metadata(path) -> dict[str, str]:
    """`__metadata__` of a safetensors file. Local. Raises as load_safetensors()."""
    return _core.load_safetensors(os.fspath(path))[1]


def save_safetensors(path, tensors, metadata=None) -> None:
    """Writes tensors ({name: tensor}) as a safetensors file, whole or not at all, durable when it returns. Local.

    `metadata`: {str: str}. Raises ArgumentError on what is no tensor, NoSpaceError, IoError.
    """
    _core.save_safetensors(os.fspath(path), tensors, metadata)


def shard_model(
    model_dir, out, layout, plan="auto", *, force=False, to_workspace=False, dry_run=False, zstd_level=None, progress=None
) -> dict:
    """Cuts a model in HuggingFace's layout into one file a rank, which `out` has whole or not at all. Local.

    `layout`: "4", or "tp=2,pp=2,ep=2". `plan`: a built-in plan's name, "auto" or a file. `force`: an `out` that is there is
    replaced. `to_workspace`: `out` is a workspace, with a state for each rank (`zstd_level`: compressed). `dry_run`: only
    the report. `progress(bytes, total_bytes, seconds)` is called now and then, on a thread of the work; what it raises,
    and Ctrl-C, end the work, and nothing is left behind.

    Returns a dict: tensors, bytes, bytes_written, job, left, notes, seconds. Raises ArgumentError on a layout or a plan
    that does not fit the model, and on an `out` that is there; NotFoundError, CorruptError, IoError, NoSpaceError of files.
    """
    paths = os.fspath(model_dir), os.fspath(out)
    return _core.shard_model(*paths, plan, str(layout), force, to_workspace, dry_run, zstd_level, progress)


def export_model(
    shards_dir,
    out,
    plan="",
    group=None,
    *,
    force=False,
    max_shard_size=5_000_000_000,
    memory_budget="256MiB",
    writers="owners",
    layout=None,
    to=None,
    resume=False,
    checksums=False,
    job="",
    generation=None,
    progress=None,
) -> dict:
    """The ranks of a group merge shards into one checkpoint, or, with `to`, into shards of another layout. Collective.

    All parameters but `group` count on rank 0 (`shards_dir` on every rank). `plan`: a built-in plan's name, "auto" or a
    file; empty: the one that the shards were cut by. `max_shard_size`, `memory_budget`: bytes, or texts such as "256MiB",
    of one file and of all ranks' memory for what is on its way. `writers`: "owners" or "first". `layout`: of the shards,
    where they do not say. `resume`: goes on with what an earlier export to `out` left. `checksums`: writes them beside the
    checkpoint. `job`, `generation`: which states of a workspace, the same on all ranks.

    `progress(bytes, total_bytes, seconds)` is called some times a second on rank 0, on a thread of the work. What it
    raises on its rank, and Ctrl-C on any, end the export and the group: the others raise CancelledError, and nothing is
    left behind, unless `resume`.

    Returns the report on rank 0 (account, files_resumed, bytes_resumed, bytes_written, left, seconds), {} elsewhere.
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
        "resume": resume,
        "checksums": checksums,
        "job": job,
        "generation": generation,
    }
    return _core.export_model(os.fspath(shards_dir), os.fspath(out), plan, _resolve(group), options, progress)


def plan_export(shards_dir, plan="") -> dict:
    """What export_model() would do, as a dict: every tensor of every rank, and what becomes of it. Local.

    Reads the headers of all shards. Raises as export_model().
    """
    return _core.plan_export(os.fspath(shards_dir), plan)


def verify(path, *, checksums=True, progress=None) -> dict:
    """All that is wrong with a checkpoint, shards, a workspace or a file, as a dict; "good" if nothing is. Local.

    `checksums=False`: headers only. `progress(bytes, total_bytes, seconds)` is called while tensors are read, on a thread of
    the work; what it raises, and Ctrl-C, end the reading. Raises NotFoundError if there is nothing to verify, IoError if a
    directory cannot be read, VersionError on what a newer Muster wrote.
    """
    return _core.verify(os.fspath(path), checksums, progress)


def show(path, *, plan="", pattern="") -> dict:
    """What `muster show --json` says of a path (docs/inspecting.md). `pattern`: only tensors whose names match. Local.

    Raises NotFoundError, CorruptError, VersionError, IoError.
    """
    return _core.show(os.fspath(path), plan, pattern)


def diff(a, b, *, plan="") -> dict:
    """What `muster diff --json` says of two paths, as a dict; "same" if they are. Local. Raises as show().

    `plan`: a built-in plan's name or a file, where one path has shards and the other a checkpoint.
    """
    return _core.diff(os.fspath(a), os.fspath(b), plan)
