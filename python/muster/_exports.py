# SPDX-License-Identifier: Apache-2.0
"""Exports: of shards in files, and of tensors in the memory of the ranks of a job."""

from __future__ import annotations

import atexit
import os
import typing

from . import _core, errors
from ._core import ExportWork, Group
from ._files import _Path, _Progress, _Report
from ._groups import _resolve
from ._names import checks_names
from ._parts import parts_of

class _Units:
    """The parts of the state dicts of an iterable, and the exception that it has raised."""

    def __init__(self, states):
        self._states = states
        self._iterator = None
        self.raised = None

    def next(self):
        """Returns the parts of the next state dict, or None at the end."""
        try:
            if self._iterator is None:
                self._iterator = iter(self._states)
            return parts_of(next(self._iterator))
        except StopIteration:
            return None
        except BaseException as error:
            self.raised = error
            raise


# Exports that may still run. Their groups must exist until they end.
_running: list[ExportWork] = []


def _begun(work):
    _running[:] = [other for other in _running if not other.is_done()]
    _running.append(work)
    return work


@atexit.register
def _at_exit():
    while _running:
        try:
            if _running[-1].wait(60.0):
                _running.pop()
        except KeyboardInterrupt:
            for work in _running:
                work.cancel()
        except errors.UnsupportedError:  # This is a forked child, in which no export runs.
            _running.pop()


@checks_names
def export_model(
    shards: _Path | typing.Mapping[str, typing.Any] | typing.Iterable[typing.Mapping[str, typing.Any]],
    out: _Path,
    plan: _Path = "",
    group: Group | typing.Any = None,
    *,
    force: bool = False,
    max_shard_size: int | str = 5_000_000_000,
    memory_budget: int | str = "256MiB",
    writers: str | None = None,
    source_layout: str | int | None = None,
    target_layout: str | int | None = None,
    to_plan: _Path = "",
    dtype: str | None = None,
    cast_all: bool = False,
    resume: bool = False,
    base_model: _Path = "",
    select: str = "",
    exclude: str = "",
    checksums: bool = False,
    fingerprint: bool = False,
    job_id: str = "",
    step: int | None = None,
    key: str = "",
    file_pattern: str = "",
    extra_files: str = "",
    files: typing.Mapping[str, str] | None = None,
    check_replicas: bool = True,
    stale_after: float | None = None,
    progress: _Progress = None,
    wait: bool = True,
) -> typing.Any:
    """Writes the shards of all ranks, in files or in memory, as one checkpoint in the Hugging Face layout. Collective.

    From files, it also writes shards of another layout (`target_layout`). From memory, it is a live export: the
    elements go directly from the memory of the ranks into the files, and no rank holds the whole model. Every rank
    passes `group`, `shards`, `job_id`, `step` and `wait`. Only rank 0 uses the other arguments.

    Live exports: the values of the state dict are tensors, DTensors (FSDP2, tensor parallelism), the sharded tensors of
    FSDP1 and Megatron-Core, or Part, or a list of Part. Sharded values must not be gathered first. The parts of all
    ranks must cover each tensor. A tensor without a description of its part is whole; if several ranks pass it, it must
    be equal on them. A contiguous tensor on a GPU is read in place if libmuster-cuda is
    installed; other tensors on devices are copied to the host first. `resume`, `target_layout`, `to_plan`, `job_id`,
    `step`, `key` and `file_pattern` are errors.

    Args:
        shards: A directory of rank shards, a workspace, a model or a third-party checkpoint. For a live export: the
            state dict of this rank, {name: tensor}, or an iterable of such dicts, whose tensors need to exist only
            until the next dict is requested. All parts of a tensor belong to the same dict. All ranks have the same
            number of dicts, some of which may be empty. An iterable needs `cast_all` for `dtype`. With a `plan`, the
            layer numbers in the names are those of the model on all ranks, and a weight and its scales are in one dict.
        out: The new directory. It appears completely or not at all.
        plan: The name of a built-in plan, "auto" or a file. Empty: the plan that the shards record.
        group: A muster.Group, a process group of torch.distributed, or None for the world.
        force: Replaces an existing `out`.
        max_shard_size: The size of one file, in bytes or as text such as "5GB".
        memory_budget: The size of the buffers of all ranks together, in bytes or as text such as "256MiB".
        writers: "rank0" or "all". None: "all" for several hosts on a network file system, and for sources that every
            rank can read completely, otherwise "rank0".
        source_layout: The layout of the shards, if they do not record it.
        target_layout: The layout of the result. None: the result is one checkpoint.
        to_plan: The plan that splits for `target_layout`. Empty: `plan`, or "auto" if `plan` has views.
        dtype: Casts floating-point tensors to "F32", "F16" or "BF16". Scales are not cast, and neither are tensors
            that the base keeps in F32.
        cast_all: With `dtype`, also casts the tensors that the base keeps in F32.
        resume: Continues an earlier export to `out`.
        base_model: A model directory. config.json and all other files except weights are copied from it.
        select: A glob of output names, such as `*.{weight,bias}`: exports only these tensors.
        exclude: A glob of output names: does not export these tensors.
        checksums: Writes a checksum file next to the checkpoint.
        fingerprint: Adds the fingerprint of the checkpoint to the report, from the bytes that are written. With
            `checksums`, the checksum file has the same CRCs.
        job_id: As for shard_model(), the same on all ranks.
        step: As for shard_model(), the same on all ranks.
        key: As for shard_model().
        file_pattern: As for shard_model().
        extra_files: As for shard_model().
        files: {name: text} of files that are written next to the weights, such as config.json. They replace files of the
            same name that would be copied.
        check_replicas: Live exports only. False: equal parts of several ranks are not compared.
        stale_after: As for shard_model().
        progress: `progress(bytes, total_bytes, seconds)` is called a few times per second on rank 0, on an internal
            thread. If it raises an exception, or on Ctrl-C on any rank, the export ends and the group is aborted. The
            other ranks raise CancelledError. No files are left behind, unless `resume` is set.
        wait: False: the call returns when the tensors of a state dict are copied to memory that the group keeps for
            later exports (trim() releases it). Tensors may then change while a thread writes the files. The interpreter
            waits for the export before it exits.

    Returns:
        An ExportWork if `wait` is False, whose get() returns the report. Otherwise the report: a dict on rank 0 with
        manifest (all source tensors and their results), files_resumed, bytes_resumed, writers, bytes_written, seconds,
        and skipped: (name, reason) of the files that were not copied. With `fingerprint`, also fingerprint: the result
        that fingerprint(out) would have, without "path". {} on the other ranks.

    Raises:
        Error: A rank failed. All ranks raise its error. After InvalidArgumentError, RankMismatchError, CorruptError,
            NotFoundError, IoError or OutOfSpaceError the group remains usable. TimeoutError, PeerLostError and
            CancelledError abort it.
    """
    options = {
        "force": force,
        "max_shard_size": max_shard_size,
        "memory_budget": memory_budget,
        "writers": writers,
        "source_layout": source_layout,
        "target_layout": target_layout,
        "to_plan": os.fspath(to_plan),
        "dtype": dtype,
        "cast_all": cast_all,
        "resume": resume,
        "base_model": os.fspath(base_model),
        "select": select,
        "exclude": exclude,
        "checksums": checksums,
        "fingerprint": fingerprint,
        "job_id": job_id,
        "step": step,
        "key": key,
        "file_pattern": file_pattern,
        "extra_files": extra_files,
        "files": {} if files is None else files,
        "check_replicas": check_replicas,
        "stale_after": stale_after,
    }
    group = _resolve(group)
    arguments = (os.fspath(out), os.fspath(plan), group, options, progress)
    is_path = isinstance(shards, (str, os.PathLike))
    is_iterable = not is_path and not hasattr(shards, "items") and hasattr(shards, "__iter__")
    if not wait:
        if is_path or is_iterable:
            raise errors.InvalidArgumentError("export_model: wait=False needs the tensors of a state dict. Pass a dict, or wait for the export")
        return _begun(_core.begin_export(shards, *arguments))
    if is_path:
        return _core.export_shards(os.fspath(shards), *arguments)
    if not is_iterable:
        return _core.export_tensors(shards, *arguments)
    units = _Units(shards)
    try:
        return _core.export_units(units.next, *arguments)
    except errors.Error as error:
        if units.raised is None:
            raise
        if isinstance(units.raised, Exception):
            raise error from units.raised
        raise units.raised from None  # KeyboardInterrupt


@checks_names
def plan_export(
    shards: _Path,
    plan: _Path = "",
    *,
    max_shard_size: int | str = 5_000_000_000,
    source_layout: str | int | None = None,
    target_layout: str | int | None = None,
    to_plan: _Path = "",
    dtype: str | None = None,
    cast_all: bool = False,
    base_model: _Path = "",
    select: str = "",
    exclude: str = "",
    job_id: str = "",
    step: int | None = None,
    key: str = "",
    file_pattern: str = "",
) -> _Report:
    """Returns the manifest of an export without writing anything. Local.

    The call reads the headers of all shards. The arguments and the errors are those of export_model().

    Returns:
        A dict that lists every tensor of every rank, and the tensors of the result.
    """
    options = {
        "max_shard_size": max_shard_size,
        "source_layout": source_layout,
        "target_layout": target_layout,
        "to_plan": os.fspath(to_plan),
        "dtype": dtype,
        "cast_all": cast_all,
        "base_model": os.fspath(base_model),
        "select": select,
        "exclude": exclude,
        "job_id": job_id,
        "step": step,
        "key": key,
        "file_pattern": file_pattern,
    }
    return _core.plan_export(os.fspath(shards), os.fspath(plan), options)
