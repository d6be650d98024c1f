# SPDX-License-Identifier: Apache-2.0
import subprocess
import sys

import pytest


def test_an_import_is_light():
    source = "import sys, muster; print([name for name in ('numpy', 'torch') if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True).stdout == "[]\n"


SUBINTERPRETER = """
import sys
try:
    import _interpreters as interpreters
    each = interpreters.create("legacy")
except ImportError:
    import _xxsubinterpreters as interpreters
    each = interpreters.create()
failure = None
try:
    failure = interpreters.run_string(each, f"import sys; sys.path[:] = {sys.path!r}; import muster")
except Exception as error:
    failure = error
print(failure)
interpreters.destroy(each)
import muster
"""


@pytest.mark.parametrize(
    "source, words",
    [
        (SUBINTERPRETER, "subinterpreter"),
        ("import sys\nsys.abiflags = 't'\ntry:\n    import muster\nexcept ImportError as error:\n    print(error)", "has no GIL"),
    ],
)
def test_an_interpreter_that_cannot_be_is_refused(source, words):
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and done.stdout.count("\n") == 1 and words in done.stdout, done


@pytest.mark.parametrize(
    "failure, words",
    [
        ("No module named 'muster._core'", "this installation has _core."),
        ("/lib/x86_64-linux-gnu/libc.so.6: version `GLIBC_2.28' not found (required by _core.so)", "the extension needs GLIBC 2.28, and this system has glibc "),
        ("_core.so: undefined symbol: _Py_NewRef", "for other Pythons, and this is CPython 3."),
        ("_core.so: undefined symbol: other", "cannot be loaded by CPython 3."),
        ("libgcc_s.so.1: cannot open shared object file: No such file or directory", "(libgcc_s.so.1: cannot open"),
    ],
)
def test_an_extension_that_cannot_be_loaded_is_explained_in_one_line(failure, words):
    source = f'''
import sys

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "muster._core":
            kind = ModuleNotFoundError if "No module" in {failure!r} else ImportError
            raise kind({failure!r}, name=name)

sys.meta_path.insert(0, Finder())
try:
    import muster
except ImportError as error:
    assert error.__suppress_context__
    print(error)
'''
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=60)
    assert done.stdout.startswith("importing muster: ") and done.stdout.count("\n") == 1 and words in done.stdout, done
    assert "build from source" in done.stdout


def test_a_torch_that_is_too_old_is_refused(tmp_path):
    """The error is one line. The torch package here has only a version. The rest of muster works without it."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/__init__.py").write_text("__version__ = '2.13.1+cpu'")
    (tmp_path / "torch/distributed.py").touch()
    source = f"""
import sys
sys.path.insert(0, {str(tmp_path)!r})
import muster, muster.torch
try:
    muster.torch.register()
except ImportError as error:
    print(error)
assert muster.merge_tensor_parallel(b"ab", muster.merge.first, None, muster.single_group()).nbytes == 2
"""
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=60)
    assert done.stdout == "muster.torch needs PyTorch 2.14 or later, and this is 2.13.1+cpu: upgrade torch, or use gloo\n", done
    assert done.returncode == 0, done.stderr


def test_a_forked_child_imports_and_launches():
    source = """
import os, sys
import muster
muster.single_group()
child = os.fork()
if child == 0:
    muster.launch(["true"], 2)
    os._exit(int(muster.as_tensor(bytearray(4)).shape != (4,)))
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
