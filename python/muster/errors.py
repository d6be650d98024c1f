# SPDX-License-Identifier: Apache-2.0
"""What calls raise: one class for each kind of failure, each also one of Python's own where there is one."""

from __future__ import annotations

import builtins
import os


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


# Of a traceback: the words of a rank that travel in a round are cut after some 640 bytes.
_MOST_FRAMES = 3
_MOST_LETTERS = 300


def _told(raised, with_traceback):
    """What other ranks hear of an exception: (kind or None, words, in UTF-8). The traceback's last lines are those of the caller's own files."""
    is_ours = isinstance(raised, Error)
    name = type(raised).__name__
    try:
        words = str(raised)
    except Exception as failure:
        words = f"its words cannot be told: {type(failure).__name__}"
    if not is_ours:
        words = f"{name}: {words}" if words else name
    if with_traceback:
        words = " | ".join([words, *_last_lines(raised)])
    return raised.kind if is_ours else None, words.encode("utf-8", "backslashreplace")


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
