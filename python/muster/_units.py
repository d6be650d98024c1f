# SPDX-License-Identifier: Apache-2.0
"""Sizes in bytes, as numbers or as text with a unit."""

import operator

from . import errors

_UNITS = {"": 1, "B": 1, "KB": 1000, "MB": 1000**2, "GB": 1000**3, "TB": 1000**4}
_UNITS.update({"KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40})


def bytes_of(size):
    """Returns the number of bytes of an int, or of text such as "256MiB" or "4 GB"."""
    try:
        number = _number_of(size.strip()) if isinstance(size, str) else operator.index(size)
    except (KeyError, TypeError, ValueError, OverflowError):
        number = -1
    if not 0 <= number < 1 << 64:
        raise errors.InvalidArgumentError(f"{size!r} is not a size: write a number of bytes, or one with a unit, such as '256MiB'")
    return number


def _number_of(text):
    digits = text.rstrip("KMGTIBkmgtib ")
    return int(float(digits) * _UNITS[text[len(digits) :].strip().upper()])
