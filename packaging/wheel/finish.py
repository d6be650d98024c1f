# SPDX-License-Identifier: Apache-2.0
"""Adds the licences of bundled libraries to a wheel, and tags one with the stable ABI.

usage: finish.py FOLDER LICENCES VENV [WHEEL]. FOLDER contains the wheel, which is replaced. If it is for another processor,
no Python of this machine could read the types of its extension. WHEEL, which has the same extension, then gives its stub.
"""

import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

EXPRESSION = "Apache-2.0 AND BSD-2-Clause AND BSD-3-Clause AND BSL-1.0 AND MIT AND Zlib AND (GPL-3.0-or-later WITH GCC-exception-3.1)"

# The plotting library in the pages of `muster report`.
ECHARTS = Path(__file__).resolve().parents[2] / "src/report/page/vendor"


def wheel(*arguments):
    subprocess.run([sys.executable, "-m", "wheel", *map(str, arguments)], check=True, stdout=subprocess.DEVNULL)


def main():
    folder, licences, venv, *same = map(Path, sys.argv[1:])
    (before,) = folder.glob("*.whl")
    with tempfile.TemporaryDirectory() as place:
        wheel("unpack", before, "--dest", place)
        (content,) = Path(place).iterdir()
        (info,) = content.glob("*.dist-info")
        third = info / "licenses" / "third-party"
        shutil.copytree(licences, third)
        (nanobind,) = venv.glob("lib/python3*/site-packages/nanobind*/**/LICENSE")
        shutil.copy(nanobind, third / "nanobind")
        for name in ("LICENSE", "NOTICE", "LICENSE-d3"):
            shutil.copy(ECHARTS / name, third / f"echarts-{name}")
        for wheel_with_stub in same:
            with zipfile.ZipFile(wheel_with_stub) as archive:
                archive.extract("muster/_core.pyi", content)
        metadata = (info / "METADATA").read_text()
        head, _, text = metadata.partition("\n\n")
        lines = [line for line in head.split("\n") if not line.startswith("License-Expression:")]
        lines += [f"License-Expression: {EXPRESSION}"]
        lines += [f"License-File: third-party/{name.name}" for name in sorted(third.iterdir())]
        (info / "METADATA").write_text("\n".join(lines) + "\n\n" + text)
        is_stable = any(content.glob("muster/_core.abi3.so"))
        before.unlink()
        wheel("pack", content, "--dest-dir", folder)
    if is_stable:
        (packed,) = folder.glob("*.whl")
        wheel("tags", "--python-tag", "cp312", "--abi-tag", "abi3", "--remove", packed)


if __name__ == "__main__":
    main()
