# SPDX-License-Identifier: Apache-2.0
import importlib.util
import json
import os
import pathlib
import re
import subprocess
import sys

import pytest

import muster

FOLDER = pathlib.Path(muster.__file__).parent


def test_the_stub_has_what_the_extension_has():
    stub = (FOLDER / "_core.pyi").read_text()
    missing = [name for name in dir(muster._core) if not name.startswith("_") and f" {name}" not in stub and f"{name}:" not in stub]
    assert missing == []


TUTORIAL = pathlib.Path(__file__).parents[2] / "docs" / "tutorials" / "python.md"


def programs(folder):
    """Returns the typed program, the stub and the programs of the tutorial, as files."""
    found = [pathlib.Path(__file__).with_name("typed.py"), FOLDER / "_core.pyi"]
    if TUTORIAL.exists():
        saved = re.findall(r"Save this as\s`(\w+)\.py`:\n\n```python\n(.*?)```", TUTORIAL.read_text(), re.DOTALL)
        assert len(saved) > 7
        for name, source in saved:
            found.append(folder / f"tutorial_{name}.py")
            found[-1].write_text(source)
    return found


def has(package):
    return pytest.mark.skipif(importlib.util.find_spec(package) is None, reason=f"{sys.executable} has no {package}")


@has("mypy")
def test_programs_and_stubs_with_mypy(tmp_path):
    command = [sys.executable, "-m", "mypy", "--strict", "--follow-imports=silent", "--cache-dir", str(tmp_path / "cache")]
    environment = {**os.environ, "MYPYPATH": str(FOLDER.parent)}
    done = subprocess.run([*command, *programs(tmp_path)], env=environment, capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if ": note: " not in line]
    wrong = [
        'Incompatible return value type (got "str", expected "int")  [return-value]',
        '"load_shard" has incompatible type "str"; expected "int"  [arg-type]',
        'Unexpected keyword argument "base" for "verify"  [call-arg]',
    ]
    assert len(lines) == len(wrong) + 1 and all(line.endswith(words) for line, words in zip(lines, wrong)), done.stdout + done.stderr


@has("pyright")
def test_programs_and_stubs_with_pyright(tmp_path):
    files = programs(tmp_path)
    settings = {"include": [], "typeCheckingMode": "strict", "extraPaths": [str(FOLDER.parent)]}
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(settings))
    command = [sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", sys.executable, "--project", str(tmp_path)]
    done = subprocess.run([*command, *files], capture_output=True, text=True, cwd=tmp_path)
    found = [(pathlib.Path(each["file"]).name, each["message"]) for each in json.loads(done.stdout)["generalDiagnostics"]]
    wrong = ['Type "str" is not assignable to return type "int"', 'Argument of type "Literal[\'first\']"', "Return type is unknown", 'No parameter named "base"']
    assert len(found) == len(wrong) and all(file == "typed.py" and message.startswith(words) for (file, message), words in zip(found, wrong)), found


@has("pyright")
def test_all_public_types_are_known():
    command = [sys.executable, "-m", "pyright", "--verifytypes", "muster", "--ignoreexternal", "--outputjson", "--pythonpath", sys.executable]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(FOLDER.parent)})
    report = json.loads(done.stdout)["typeCompleteness"]
    unknown = [each["name"] for each in report["symbols"] if each["isExported"] and not (each["isTypeKnown"] and not each["isTypeAmbiguous"])]
    # muster.torch follows the classes of PyTorch, and muster.compat the reference systems.
    assert [name for name in unknown if not name.startswith(("muster.torch", "muster.compat"))] == []
