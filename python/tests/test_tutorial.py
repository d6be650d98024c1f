# SPDX-License-Identifier: Apache-2.0
"""Runs the examples of docs/python-tutorial.md on four ranks: the program, and each function."""

import pathlib
import re
import subprocess
import sys

import pytest

import muster
import test_files

TUTORIAL = pathlib.Path(__file__).parents[2] / "docs" / "python-tutorial.md"
PROGRAM = "\n\n".join(re.findall(r"^```python\n(.*?)^```$", TUTORIAL.read_text(), re.MULTILINE | re.DOTALL))


ON_FOUR_RANKS = [name for name in re.findall(r"^def (\w+)\(\):", PROGRAM, re.MULTILINE) if name not in ("main", "fail", "supervise")]


@pytest.fixture
def place(tmp_path, monkeypatch):
    start = 'if __name__ == "__main__":\n    muster.launch(main, 4)\n'
    assert start in PROGRAM
    together = "def together():\n" + "".join(f"    {name}()\n" for name in ON_FOUR_RANKS)
    (tmp_path / "tutorial.py").write_text("\n\n".join([PROGRAM.replace(start, ""), together, start]))
    test_files.model(tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def test_the_program(place):
    done = subprocess.run([sys.executable, "tutorial.py"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "[3. 3. 3.]]" in done.stdout, done.stderr


def test_the_functions(place, capfd):
    assert len(ON_FOUR_RANKS) >= 7
    muster.launch("tutorial:together", 4, timeout=60)
    assert (place / "exported").exists() and (place / "merged.safetensors").exists()
    assert "shm" in capfd.readouterr().out


def test_the_failure(place, capfd):
    muster.launch("tutorial:supervise", 1, timeout=60)
