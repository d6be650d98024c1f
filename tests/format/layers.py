#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Checks that no source file includes a header of a later layer: layers.py SOURCE-ROOT.

Each folder that contains sources is one layer. The order of the layers is the order in which src/meson.build, with the
files of its subdir() calls, lists the sources. A folder can appear several times in that order. Each appearance is then
a layer of its own, and a file belongs to the appearance that lists it. A header belongs to the appearance that lists
the source file of the same name. If no such file exists, the header belongs to the first appearance of its folder.
"""

import os.path
import re
import sys
from pathlib import Path

# Headers without a source file of the same name, in a folder with several appearances: the source file that decides.
BESIDE: dict[str, str] = {}
# Permitted includes of a later layer: the including file, and the header.
PERMITTED = {
    # Both headers declare only the data that two programs or libraries exchange.
    ("checkpoint/thirdparty/hdf5/file.hpp", "checkpoint/thirdparty/hdf5/reader.hpp"),
    ("statefile/format.hpp", "hdf5/metadata_plan.hpp"),
}

TOKEN = re.compile(r"#[^\n]*|\bsubdir\(\s*'([^']+)'\s*\)|'([^'\n]+\.cpp)'")
INCLUDE = re.compile(r'[ \t]*#[ \t]*include[ \t]+"src/([^"]+)"')


def listed(src, folder=""):
    """Returns the source files of a folder's meson.build, relative to src, in their order."""
    files = []
    for subdir, name in TOKEN.findall((src / folder / "meson.build").read_text()):
        if subdir:
            files += listed(src, f"{folder}{subdir}/")
        elif name and (src / folder / name).exists():  # Generated sources do not exist here.
            files.append(os.path.normpath(folder + name))
    return files


def main(root):
    src = Path(root) / "src"
    appearance, first, number, previous = {}, {}, -1, None
    for name in listed(src):
        if name.rpartition("/")[0] != previous:
            previous = name.rpartition("/")[0]
            number += 1
            first.setdefault(previous, number)
        appearance.setdefault(name, number)

    def layer(name):
        source = BESIDE.get(name, name.rpartition(".")[0] + ".cpp")
        return appearance.get(source, first.get(name.rpartition("/")[0]))

    problems, used, includes = [], set(), 0
    for path in sorted([*src.rglob("*.cpp"), *src.rglob("*.hpp")]):
        name = path.relative_to(src).as_posix()
        if layer(name) is None or (path.suffix == ".cpp" and name not in appearance):
            problems.append(f'"src/{name}": not listed in a meson.build of src/. Add the file to the list of its layer.')
            continue
        for line_number, line in enumerate(path.read_text().splitlines(), 1):
            found = INCLUDE.match(line)
            if not found or not (src / found.group(1)).exists():  # The build makes some headers.
                continue
            includes += 1
            header, place = found.group(1), f'"src/{name}":{line_number}'
            if layer(header) is None:
                problems.append(f'{place}: includes "src/{header}": src/meson.build lists no source of that folder.')
            elif layer(header) > layer(name):
                used.add((name, header))
                if (name, header) not in PERMITTED:
                    problems.append(
                        f'{place}: includes "src/{header}" of a later layer (the order is in src/meson.build). '
                        "Move the declaration or the file."
                    )
    for name, header in sorted(PERMITTED - used):
        problems.append(f'layers.py: permits "src/{name}" to include "src/{header}": not needed. Delete the entry.')
    for name, source in sorted(BESIDE.items()):
        if not (src / name).exists() or source not in appearance:
            problems.append(f'layers.py: "{name}" beside "{source}": one of them does not exist. Correct the entry.')
    for problem in problems:
        print(problem)
    print(f"{len(appearance)} sources in {len(first)} layers, {includes} private includes, {len(problems)} problems")
    return 1 if problems or not includes else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
