# SPDX-License-Identifier: Apache-2.0
"""What calls raise: one class for each kind of failure, each also one of Python's own where there is one."""

from __future__ import annotations

import builtins


class Error(Exception):
    """A failure: what was attempted, on what, what came back and what to do. One rank's failure is raised on all."""

    #: The kind's name, such as "peer lost".
    kind: str = ""
    #: The rank where it began, in the group of the call; None: not known.
    rank: int | None = None
    #: That rank's host; empty: not known.
    host: str = ""
    #: That rank's process.
    pid: int | None = None
    #: The file that it is about; empty: none.
    path: str = ""
    #: errno of the system call that failed; 0: none did.
    os_error: int = 0

    def __str__(self):
        # OSError, where it is the second base, would put numbers before the words.
        return str(self.args[0]) if self.args else ""


class ArgumentError(Error, ValueError):
    """The caller passed something that cannot be."""

    kind = "argument"


class NotFoundError(Error, FileNotFoundError):
    """A file, a name or a rank is not there."""

    kind = "not found"


class CorruptError(Error, ValueError):
    """Bytes from outside contradict their format."""

    kind = "corrupt"


class VersionError(Error):
    """Another version of the library or of a format."""

    kind = "version"


class TimeoutError(Error, builtins.TimeoutError):
    """A deadline passed; the message names who is missing."""

    kind = "timeout"


class PeerLostError(Error, ConnectionError):
    """Another rank died or left."""

    kind = "peer lost"


class NoSpaceError(Error, OSError):
    """Memory or disk is too small; the message says needed and available."""

    kind = "no space"


class IoError(Error, OSError):
    """A system call failed, or what another rank called did; os_error has errno."""

    kind = "io"


class UnsupportedError(Error, NotImplementedError):
    """This build or this machine cannot do it."""

    kind = "unsupported"


class RankMismatchError(Error, ValueError):
    """The ranks disagree about lists, shapes or calls."""

    kind = "rank mismatch"


class CancelledError(Error):
    """A wait was cancelled or interrupted."""

    kind = "cancelled"


_BY_KIND = {each.kind: each for each in Error.__subclasses__()}


def _make(kind, message, rank, host, pid, path, os_error):
    error = _BY_KIND.get(kind, Error)(message)
    error.kind, error.rank, error.host, error.pid, error.path, error.os_error = kind, rank, host, pid, path, os_error
    if os_error and isinstance(error, OSError):
        error.errno = os_error
    return error
