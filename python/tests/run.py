# SPDX-License-Identifier: Apache-2.0
"""Runs the tests of a folder with pytest. Without pytest or NumPy it prints the reason and exits with status 77."""

import importlib.util
import signal
import sys

for package in ("pytest", "numpy"):
    if importlib.util.find_spec(package) is None:
        print(f"skipped: {sys.executable} has no {package}")
        sys.exit(77)

import pytest

# A shell ignores SIGINT in background jobs, and all ranks would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.exit(pytest.main(["-q", "-rs", "-p", "no:cacheprovider", "--durations=5", *sys.argv[1:]]))
