# SPDX-License-Identifier: Apache-2.0
"""Why the extension cannot be loaded, in one line with a remedy. Imported only after such a failure."""

from __future__ import annotations

import os
import platform
import re
import sys

_REMEDY = "install a wheel for it, or build from source (pip install . in the source tree)"


def explained(error: ImportError) -> ImportError:
    """Returns the error to raise instead. Errors of the extension itself already have a cause and a remedy."""
    words = str(error)
    if words.startswith("importing muster:"):
        return error
    here = f"{platform.python_implementation()} {platform.python_version()}{'t' if 't' in getattr(sys, 'abiflags', '') else ''} on {platform.machine()}"
    is_missing = isinstance(error, ModuleNotFoundError) and error.name == "muster._core"
    # The name abi3 fits Pythons that lack a part of the stable ABI.
    if is_missing or re.search("undefined symbol: _?Py", words):
        found = sorted(name for name in os.listdir(os.path.dirname(__file__)) if name.startswith("_core.") and name.endswith(".so"))
        return ImportError(f"importing muster: this installation has {', '.join(found) or 'no extension'} for other Pythons, and this is {here}: {_REMEDY}")
    if needed := re.search(r"version `(GLIBC_[0-9.]+)' not found", words):
        libc = " ".join(platform.libc_ver()).strip() or "another libc"
        return ImportError(f"importing muster: the extension needs {needed[1].replace('_', ' ')}, and this system has {libc}: use a newer system, or build from source (pip install . in the source tree)")
    return ImportError(f"importing muster: the extension cannot be loaded by {here} ({' '.join(words.split())}): {_REMEDY}")
