# SPDX-License-Identifier: Apache-2.0
"""The long form, run by hand: torchgfn's own tests of gfn.utils.distributed, by the import hook.

MUSTER_TEST_TORCHGFN is a checkout of torchgfn. A stub takes the place of mpi4py, so that its tests of that backend run.
"""

import importlib.util
import os
import pathlib
import shutil
import subprocess
import sys

import pytest

CHECKOUT = os.environ.get("MUSTER_TEST_TORCHGFN")
if not CHECKOUT:
    pytest.skip("the long form: MUSTER_TEST_TORCHGFN=CHECKOUT", allow_module_level=True)
if importlib.util.find_spec("torch") is None:
    pytest.skip(f"{sys.executable} has no torch", allow_module_level=True)


def test_the_tests_of_torchgfn(tmp_path):
    name = "test_distributed_wrappers.py"
    shutil.copy(pathlib.Path(CHECKOUT) / "testing" / name, tmp_path)
    (tmp_path / "mpi4py.py").write_text("MPI = None\n")
    (tmp_path / "run.py").write_text(f"import sys, pytest\nsys.exit(pytest.main(['-q', '-p', 'no:cacheprovider', {name!r}]))\n")
    done = subprocess.run([sys.executable, "-m", "muster.compat", "run.py"], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and " passed" in done.stdout and "skipped" not in done.stdout, done.stdout
