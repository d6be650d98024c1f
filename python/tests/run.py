# SPDX-License-Identifier: Apache-2.0
"""Runs the tests of a folder by pytest; says why, and ends with 77, where there is no pytest or no NumPy."""

import importlib.util
import signal
import sys

for package in ("pytest", "numpy"):
    if importlib.util.find_spec(package) is None:
        print(f"skipped: {sys.executable} has no {package}")
        sys.exit(77)

import pytest

# Background jobs of a shell ignore it, and so would all ranks.
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.exit(pytest.main(["-q", "-rs", "-p", "no:cacheprovider", "--durations=5", *sys.argv[1:]]))
