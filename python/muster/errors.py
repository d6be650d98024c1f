# SPDX-License-Identifier: Apache-2.0
"""What calls raise: one class for each kind of failure, each also one of Python's own where there is one."""

from __future__ import annotations

import builtins

__all__ = [
    "Error",
    "ArgumentError",
    "NotFoundError",
    "CorruptError",
    "VersionError",
    "TimeoutError",
    "PeerLostError",
    "NoSpaceError",
    "IoError",
    "UnsupportedError",
    "RankMismatchError",
    "CancelledError",
]


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


class NotFoundError(Error, FileNotFoundError):
    """A file, a name or a rank is not there."""


class CorruptError(Error, ValueError):
    """Bytes from outside contradict their format."""


class VersionError(Error):
    """Another version of the library or of a format."""


class TimeoutError(Error, builtins.TimeoutError):
    """A deadline passed; the message names who is missing."""


class PeerLostError(Error, ConnectionError):
    """Another rank died or left."""


class NoSpaceError(Error, OSError):
    """Memory or disk is too small; the message says needed and available."""


class IoError(Error, OSError):
    """A system call failed, or what another rank called did; os_error has errno."""


class UnsupportedError(Error, NotImplementedError):
    """This build or this machine cannot do it."""


class RankMismatchError(Error, ValueError):
    """The ranks disagree about lists, shapes or calls."""


class CancelledError(Error):
    """A wait was cancelled or interrupted."""


_BY_KIND = {
    "argument": ArgumentError,
    "not found": NotFoundError,
    "corrupt": CorruptError,
    "version": VersionError,
    "timeout": TimeoutError,
    "peer lost": PeerLostError,
    "no space": NoSpaceError,
    "io": IoError,
    "unsupported": UnsupportedError,
    "rank mismatch": RankMismatchError,
    "cancelled": CancelledError,
}
# Also of those that a program raises itself.
for _kind, _class in _BY_KIND.items():
    _class.kind = _kind


def _make(kind, message, rank, host, pid, path, os_error):
    error = _BY_KIND.get(kind, Error)(message)
    error.kind, error.rank, error.host, error.pid, error.path, error.os_error = kind, rank, host, pid, path, os_error
    if os_error and isinstance(error, OSError):
        error.errno = os_error
    return error
