# SPDX-License-Identifier: Apache-2.0
"""The exceptions of the package, one class per kind of failure.

A class also derives from the built-in exception that matches its kind, if there is one.
"""

from __future__ import annotations

import builtins
import os


class Error(Exception):
    """A failure. The message contains the attempted operation, its object, the cause and the remedy.

    If one rank fails in a collective call, all ranks raise its error.
    """

    #: The name of the kind, such as "peer lost".
    kind: str = ""
    #: The global rank where the failure began, the number of the rank in its job. None: unknown.
    rank: int | None = None
    #: The host of that rank. Empty: unknown.
    host: str = ""
    #: The process ID of that rank. None: unknown.
    pid: int | None = None
    #: The file that the failure is about. Empty: the failure is not about a file.
    path: str = ""
    #: errno of the system call that failed. 0: no system call failed.
    os_error: int = 0

    def __str__(self) -> str:
        # If OSError is the second base, its __str__ would add errno in front of the message.
        return str(self.args[0]) if self.args else ""


class InvalidArgumentError(Error, ValueError):
    """The caller passed an invalid argument."""

    kind = "invalid argument"


class NotFoundError(Error, FileNotFoundError):
    """A file, a name or a rank does not exist."""

    kind = "not found"


class CorruptError(Error, ValueError):
    """External data contradicts its format."""

    kind = "corrupt"


class VersionError(Error):
    """Data or a rank belongs to another version of the library or of a format."""

    kind = "version"


class TimeoutError(Error, builtins.TimeoutError):
    """A deadline passed. The message names the missing ranks."""

    kind = "timeout"


class PeerLostError(Error, ConnectionError):
    """Another rank died or left."""

    kind = "peer lost"


class OutOfSpaceError(Error, OSError):
    """Memory or disk space is insufficient. The message gives the needed and the available bytes."""

    kind = "out of space"


class IoError(Error, OSError):
    """A system call failed, or a callback of a rank raised an exception. `os_error` is errno of the system call."""

    kind = "io"


class UnsupportedError(Error, NotImplementedError):
    """This build or this machine does not support the operation."""

    kind = "unsupported"


class RankMismatchError(Error, ValueError):
    """The ranks disagree about lists, shapes or calls."""

    kind = "rank mismatch"


class CancelledError(Error):
    """A stop request or an interrupt ended a wait."""

    kind = "cancelled"


_BY_KIND = {each.kind: each for each in Error.__subclasses__()}


def _make(kind, message, rank, host, pid, path, os_error):
    error = _BY_KIND.get(kind, Error)(message)
    error.kind, error.rank, error.host, error.pid, error.path, error.os_error = kind, rank, host, pid, path, os_error
    if os_error and isinstance(error, OSError):
        error.errno = os_error
    return error


# Limits of the traceback in a message: a round truncates the message of a rank after about 640 bytes.
_MOST_FRAMES = 3
_MOST_LETTERS = 300


def _describe(raised, with_traceback):
    """Returns the description of an exception for other ranks: (kind or None, message in UTF-8). The traceback lines
    are those of the files of the caller.
    """
    has_kind = isinstance(raised, Error)
    name = type(raised).__name__
    try:
        message = str(raised)
    except Exception as failure:
        message = f"its message is not available: {type(failure).__name__}"
    if not has_kind:
        message = f"{name}: {message}" if message else name
    if with_traceback:
        message = " | ".join([message, *_last_lines(raised)])
    return raised.kind if has_kind else None, message.encode("utf-8", "backslashreplace")


def _last_lines(raised):
    import traceback

    lines, left = [], _MOST_LETTERS
    ours = os.path.dirname(__file__) + os.sep
    frames = [frame for frame in traceback.extract_tb(raised.__traceback__) if not frame.filename.startswith(ours)]
    for frame in reversed(frames[-_MOST_FRAMES:]):
        text = f'File "{frame.filename}", line {frame.lineno}, in {frame.name}'
        text += f" | {frame.line}" if frame.line else ""
        left -= len(text)
        if lines and left < 0:
            break
        lines.insert(0, text)
    return lines
