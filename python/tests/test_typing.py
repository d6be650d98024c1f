# SPDX-License-Identifier: Apache-2.0
import importlib.util
import os
import pathlib
import subprocess
import sys

import pytest

import muster

FOLDER = pathlib.Path(muster.__file__).parent


def test_the_stub_has_what_the_extension_has():
    stub = (FOLDER / "_core.pyi").read_text()
    missing = [name for name in dir(muster._core) if not name.startswith("_") and f" {name}" not in stub and f"{name}:" not in stub]
    assert missing == []


@pytest.mark.skipif(importlib.util.find_spec("mypy") is None, reason=f"{sys.executable} has no mypy")
def test_a_typed_program(tmp_path):
    command = [sys.executable, "-m", "mypy", "--follow-imports=silent", "--cache-dir", str(tmp_path), "--check-untyped-defs"]
    program = pathlib.Path(__file__).with_name("typed.py")
    environment = {**os.environ, "MYPYPATH": str(FOLDER.parent)}
    done = subprocess.run([*command, str(program)], env=environment, capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if ": note: " not in line]
    wrong = [
        'Incompatible return value type (got "str", expected "int")  [return-value]',
        '"load_shard" has incompatible type "str"; expected "int"  [arg-type]',
        'Unexpected keyword argument "base" for "verify"  [call-arg]',
    ]
    assert len(lines) == len(wrong) + 1 and all(line.endswith(words) for line, words in zip(lines, wrong)), done.stdout + done.stderr
