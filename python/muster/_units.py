# SPDX-License-Identifier: Apache-2.0
"""Sizes as people write them."""

_UNITS = {"": 1, "B": 1, "KB": 1000, "MB": 1000**2, "GB": 1000**3, "TB": 1000**4}
_UNITS.update({"KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40})


def bytes_of(size):
    """The bytes of an int, or of a text such as "256MiB" or "4 GB"."""
    if not isinstance(size, str):
        return size
    text = size.strip()
    digits = text.rstrip("KMGTIBkmgtib ")
    unit = text[len(digits):].strip().upper()
    try:
        return int(float(digits) * _UNITS[unit])
    except (KeyError, ValueError, OverflowError):
        raise ValueError(f"{size!r} is no size: write a number of bytes, or one with a unit, such as '256MiB'") from None
