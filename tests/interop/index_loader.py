#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Reads an export like a loader of the field: the index names the files, and Python's safetensors package opens them. Every
tensor must have the bytes that it had before the model was cut.

  index_loader.py MUSTER DEMO_MODEL
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import checks
from checks import check

try:
    import safetensors
except ImportError as error:
    print(f"skipped: {error}; MUSTER_TEST_PYTHON names a Python that has safetensors")
    sys.exit(77)


def tensors_of(path):
    """{name: (dtype, shape, bytes)} of one file, read by the package itself."""
    return {name: (view["dtype"], view["shape"], bytes(view["data"])) for name, view in safetensors.deserialize(path.read_bytes())}


def load(directory):
    """Loads a sharded checkpoint like transformers: the index, then file by file."""
    index_path = directory / "model.safetensors.index.json"
    if not index_path.exists():
        return tensors_of(directory / "model.safetensors")
    index = json.loads(index_path.read_text())
    weight_map = index["weight_map"]
    files = sorted(set(weight_map.values()))
    check(files == sorted(path.name for path in directory.glob("*.safetensors")), f"the index names {files}")
    loaded = {}
    for name in files:
        with safetensors.safe_open(directory / name, framework="np") as file:
            check(file.metadata().get("format") == "pt", f"{name} has no format in its metadata")
            check(sorted(file.keys()) == sorted(key for key, value in weight_map.items() if value == name), f"keys of {name}")
        loaded.update(tensors_of(directory / name))
    check(sorted(loaded) == sorted(weight_map), "the index and the files have other names")
    check(sum(len(data) for _, _, data in loaded.values()) == index["metadata"]["total_size"], "total_size")
    return loaded


def main():
    muster, demo_model = sys.argv[1:]

    def run(*command):
        subprocess.run([str(part) for part in command], check=True, stdout=subprocess.DEVNULL)

    with tempfile.TemporaryDirectory(prefix="muster-index-") as work:
        work = Path(work)
        run(demo_model, work / "model", "--megabytes", 5)
        original = load(work / "model")
        run(muster, "shard", work / "model", "--to", 3, "--plan", "auto", "--out", work / "shards")
        for writers in ("rank0", "all"):
            for size in ("500KB", "5GB"):
                out = work / f"{writers}-{size}"
                run(muster, "run", "-n", 3, "--", muster, "export", work / "shards", "--plan", "auto", "--writers", writers,
                    "--max-shard-size", size, "--out", out)
                check(load(out) == original, f"{out.name} differs")
        run(muster, "export", work / "shards", "--plan", "auto", "--to", 2, "--out", work / "two")
        for path in sorted((work / "two").glob("*.safetensors")):
            check(len(tensors_of(path)) == len(original), f"{path.name} has other tensors")
    print(f"{checks.count} checks passed")


if __name__ == "__main__":
    main()
