# SPDX-License-Identifier: Apache-2.0
import subprocess
import sys


def test_an_import_is_light():
    source = "import sys, muster; print([name for name in ('numpy', 'torch') if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True).stdout == "[]\n"
