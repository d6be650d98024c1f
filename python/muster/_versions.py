# SPDX-License-Identifier: Apache-2.0
"""Versions of weights: a trainer publishes them in a directory, and hosts of engines pull them."""

from __future__ import annotations

import dataclasses
import os
import typing

from . import _core
from ._core import Group
from ._files import _Path, _Progress
from ._groups import _resolve
from ._names import checks_names

VersionKind: typing.TypeAlias = 'typing.Literal["full", "delta"]'
DeltaEncoding: typing.TypeAlias = 'typing.Literal["xor", "overwrite"]'
Durability: typing.TypeAlias = 'typing.Literal["boot", "synced"]'


@dataclasses.dataclass(frozen=True)
class PublishReport:
    """The result of publishing a version. Rank 0 has all fields. The other ranks have `version` and defaults.

    `tensors` and `bytes` are those of the model, and `changed_tensors` counts the tensors in the version. For a full
    version, `changed_elements` is 0, and `reason` has the reason why it is not a delta. `removed` has the numbers of
    old versions that were deleted. `skipped` has (name, reason) of tensors and files that are not in the version.
    """

    version: int
    kind: VersionKind | None = None
    path: str = ""
    tensors: int = 0
    bytes: int = 0
    changed_tensors: int = 0
    changed_elements: int = 0
    bytes_written: int = 0
    files: int = 0
    reason: str | None = None
    removed: tuple[int, ...] = ()
    skipped: tuple[tuple[str, str], ...] = ()
    notes: tuple[str, ...] = ()
    seconds: float = 0.0


@dataclasses.dataclass(frozen=True)
class PullReport:
    """The result of pull().

    `previous` is the version that `local` had before, or None. `is_changed` is False if `local` already had the
    version. `begun_at` is "local", "base" or the name of the full version that was copied. `applied` has the numbers of
    the deltas. `bytes_linked` counts the files that the copy shares with its predecessor.
    """

    version: int
    previous: int | None
    is_changed: bool
    local: str
    begun_at: str | None
    applied: tuple[int, ...]
    changed_tensors: int
    bytes_read: int
    bytes_written: int
    bytes_linked: int
    skipped: tuple[tuple[str, str], ...]
    notes: tuple[str, ...]
    seconds: float


@dataclasses.dataclass(frozen=True)
class VersionInfo:
    """A version in a directory. Facts that its publisher has not recorded are None.

    `kind` is None if the version cannot be read. `begins_at` is the full version at which its chain begins, 0 for the
    base, and None if no chain reaches it. `published` is a Unix time. `problems` has the defects that were found.
    """

    version: int
    path: str
    kind: VersionKind | None
    base_version: int | None
    begins_at: int | None
    encoding: DeltaEncoding | None
    checksum_format: str | None
    tensors: int
    files: int
    bytes: int
    elements: int | None
    changed_elements: int | None
    stream: str | None
    publisher: str | None
    ranks: int | None
    digest: str | None
    published: float
    problems: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class LocalVersion:
    """A copy of a version on this host.

    `version` is that of its marker, or None. `has_record` says whether the next pull can begin at the copy; if not,
    `reason` has the cause.
    """

    path: str
    version: int | None
    has_record: bool
    reason: str | None


@dataclasses.dataclass(frozen=True)
class VersionLog:
    """The versions of a directory in ascending order, other names in it, and defects of the chain.

    `is_sound` is True if neither the chain nor a version has problems. `unfinished` has the names of directories that
    publishers have not completed.
    """

    source: str
    is_sound: bool
    verified: bool
    versions: tuple[VersionInfo, ...]
    unfinished: tuple[str, ...]
    other_names: tuple[str, ...]
    local: LocalVersion | None
    problems: tuple[str, ...]


def _made(kind, facts):
    """Returns a dataclass from the keys of a report."""
    names = {field.name for field in dataclasses.fields(kind)}
    values = {}
    for name, value in facts.items():
        if name == "skipped":
            value = tuple((each["file"], each["reason"]) for each in value)
        if name in names:
            values[name] = tuple(value) if isinstance(value, list) else value
    return kind(**values)


def _publisher_options(base, plan, source_layout, encoding, full_every, base_copy, keep, keep_for, stale_after, check_replicas):
    return {
        "base": os.fspath(base),
        "plan": os.fspath(plan),
        "source_layout": source_layout,
        "encoding": encoding,
        "full_every": full_every,
        "base_copy": os.fspath(base_copy),
        "keep": keep,
        "keep_for": keep_for,
        "stale_after": stale_after,
        "check_replicas": check_replicas,
    }


class Publisher:
    """Publishes version after version of the weights in the memory of the ranks of a group. Collective.

    A version is a directory in `source`, which appears in one step. It is a delta with the changes since the previous
    version, or a full checkpoint. The format is that of slime, miles and SGLang (docs/reference/versions.md). Each rank
    keeps its share of the newest version in host memory, unless `base_copy` is set. The publisher continues after the
    newest version in `source`, so a restarted trainer makes a new one with the same arguments.

    All ranks pass `source`, `base`, `group` and `base_copy`. Only rank 0 uses the other arguments.

    Args:
        source: The directory of the versions, which all hosts see. It is created if it does not exist.
        base: The model directory with which the trainer and the engines begin, version 0. All ranks can read it.
        group: A muster.Group, a process group of torch.distributed, or None for the world.
        plan: As for export_model(). Empty: each part states its place in its tensor.
        source_layout: The layout of the ranks for the plan, as for export_model().
        encoding: The form of changes: "xor" or "overwrite", which is for tensors of less than 4 GiB.
        full_every: Every version whose number is a multiple of it is full. 0: only if a delta is not possible.
        base_copy: A directory on each host of the trainer, for a copy of the newest version. The next version is
            compared with it.
        keep: A version is deleted only if at least this many versions are newer, and one of the newer ones is full.
        keep_for: A version is deleted only if it was published more than this many seconds ago.
        stale_after: Unfinished versions of other hosts are also deleted if they have not changed for this many seconds.
            None: only those of processes of this host that have ended.
        check_replicas: False: equal parts of several ranks are not compared.

    Raises:
        InvalidArgumentError: An argument is invalid.
        NotFoundError: The base, or the parent of `source`, does not exist.
    """

    def __init__(
        self,
        source: _Path,
        *,
        base: _Path,
        group: Group | typing.Any = None,
        plan: _Path = "",
        source_layout: str | int | None = None,
        encoding: DeltaEncoding = "xor",
        full_every: int = 0,
        base_copy: _Path = "",
        keep: int = 8,
        keep_for: float = 600.0,
        stale_after: float | None = None,
        check_replicas: bool = True,
    ) -> None:
        options = _publisher_options(base, plan, source_layout, encoding, full_every, base_copy, keep, keep_for, stale_after, check_replicas)
        self._source = os.fspath(source)
        self._open = _core.OpenPublisher(self._source, _resolve(group), options)

    @property
    def source(self) -> str:
        """The directory of the versions."""
        return self._source

    def publish(
        self, tensors: typing.Any, *, full: bool = False, version: int | None = None, progress: _Progress = None
    ) -> PublishReport:
        """Publishes the tensors as the next version. Collective: each rank passes its own.

        The version is full if `full` or `full_every` requests it, or if its tensors do not have the names, dtypes and
        shapes of the previous version. Otherwise it is a delta. When the call returns, the version is durable and
        visible in `source`. The tensors must not change during the call. If the call fails, no version appears, and the
        next call may try again.

        Args:
            tensors: The state dict of this rank, as for a live export (export_model), or a module that has one. A rank
                without tensors passes {}.
            full: Publishes all tensors, even if a delta is possible.
            version: The expected number. The call fails if the next version has another number.
            progress: As for export_model(), on rank 0.

        Returns:
            A PublishReport.

        Raises:
            Error: A rank failed. All ranks raise its error. After InvalidArgumentError, RankMismatchError,
                NotFoundError, CorruptError, IoError, OutOfSpaceError or UnsupportedError the group remains usable.
                TimeoutError, PeerLostError and CancelledError abort it.
        """
        if not hasattr(tensors, "items") and callable(getattr(tensors, "state_dict", None)):
            tensors = tensors.state_dict()
        return _made(PublishReport, self._open.publish(tensors, {"full": full, "version": version}, progress))

    def close(self) -> None:
        """Releases the memory of the publisher. Local. It may be called again."""
        self._open.close()

    def __enter__(self) -> Publisher:
        return self

    def __exit__(self, *args: object) -> None:
        self.close()


@checks_names
def publish(
    model_or_shards: _Path,
    source: _Path,
    *,
    base: _Path,
    group: Group | typing.Any = None,
    plan: _Path = "",
    source_layout: str | int | None = None,
    encoding: DeltaEncoding = "xor",
    full_every: int = 0,
    base_copy: _Path = "",
    keep: int = 8,
    keep_for: float = 600.0,
    stale_after: float | None = None,
    check_replicas: bool = True,
    full: bool = False,
    version: int | None = None,
    progress: _Progress = None,
) -> PublishReport:
    """Publishes a model, or the shards of ranks, from files as the next version. Collective: the ranks share the work.

    Without `base_copy`, each call computes the previous version from the newest full version, or the base, and the
    deltas. The other arguments are those of Publisher.

    Args:
        model_or_shards: A model directory, a directory of rank shards, a workspace or a third-party checkpoint.
        source: As for Publisher.
        base: As for Publisher.
        group: As for Publisher.
        plan: As for export_model(). Empty: the plan that the shards record.
        source_layout: As for Publisher.
        encoding: As for Publisher.
        full_every: As for Publisher.
        base_copy: As for Publisher.
        keep: As for Publisher.
        keep_for: As for Publisher.
        stale_after: As for Publisher.
        check_replicas: As for Publisher.
        full: As for Publisher.publish().
        version: As for Publisher.publish().
        progress: As for Publisher.publish().

    Returns:
        A PublishReport.

    Raises:
        Error: As for Publisher.publish().
    """
    options = _publisher_options(base, plan, source_layout, encoding, full_every, base_copy, keep, keep_for, stale_after, check_replicas)
    made = {"full": full, "version": version}
    facts = _core.publish_files(os.fspath(model_or_shards), os.fspath(source), _resolve(group), options, made, progress)
    return _made(PublishReport, facts)


@checks_names
def pull(
    source: _Path,
    local: _Path,
    *,
    base: _Path = "",
    version: int | None = None,
    wait: float = 0.0,
    lock_timeout: float = 1800.0,
    durability: Durability = "boot",
    progress: _Progress = None,
) -> PullReport:
    """Brings a directory of this host to a version. Local.

    Any number of processes of a host may call it at the same time: one of them pulls, and the others wait and find the
    work done. At any moment `local` is the old version or the new one (docs/reference/versions.md names the exception).
    A process keeps the files of the old version that it has open. If the call fails, `local` is unchanged.

    Args:
        source: The directory of the versions.
        local: The model directory to bring to the version. It is created if it does not exist.
        base: The model directory that is version 0. It may be empty if the pull can begin at a full version or `local`.
        version: The version. 0: the base. None: the newest one, or the base if `source` has no version.
        wait: How long to wait, in seconds, for the version, and for files that a network file system does not show yet.
        lock_timeout: How long to wait, in seconds, for another process of this host that pulls to the same directory.
        durability: "boot": the copy is usable until the host restarts. "synced": after a power failure, too.
        progress: As for shard_model(). If it raises an exception, or on Ctrl-C, the call ends and `local` is unchanged.

    Returns:
        A PullReport.

    Raises:
        CorruptError: A version contradicts the format, or a checksum does not match.
        NotFoundError: The version, or a version of its chain, does not exist after `wait`.
        TimeoutError: Another process still pulls after `lock_timeout`.
        InvalidArgumentError: `local` is the base, a mount point, or has files of other programs; or `base` is missing.
        UnsupportedError: This build cannot read the format of a version.
        OutOfSpaceError: Disk space is insufficient.
        IoError: A system call failed.
    """
    options = {
        "base": os.fspath(base),
        "version": version,
        "wait": wait,
        "lock_timeout": lock_timeout,
        "durability": durability,
    }
    facts = _core.pull_version(os.fspath(source), os.fspath(local), options, progress)
    return _made(PullReport, {**facts, "is_changed": facts["changed"]})


@checks_names
def versions(source: _Path, *, base: _Path = "", local: _Path = "", verify: bool = False, progress: _Progress = None) -> VersionLog:
    """Returns all versions in a directory. Local. Defects are results, not errors.

    Args:
        source: The directory of the versions.
        base: The model directory that is version 0. `verify` needs it if version 1 is a delta.
        local: A copy on this host to report on.
        verify: Reads all files, applies the deltas in memory piece by piece, and compares the checksums.
        progress: As for shard_model().

    Returns:
        A VersionLog.

    Raises:
        NotFoundError: The directory does not exist.
        InvalidArgumentError: `verify` needs a base.
        IoError: Reading failed.
    """
    facts = _core.read_versions(os.fspath(source), {"base": os.fspath(base), "local": os.fspath(local), "verify": verify}, progress)
    return _made(
        VersionLog,
        {
            **facts,
            "is_sound": facts["sound"],
            "versions": [_made(VersionInfo, each) for each in facts["versions"]],
            "local": None if facts["local"] is None else _made(LocalVersion, facts["local"]),
        },
    )
