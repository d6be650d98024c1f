# SPDX-License-Identifier: Apache-2.0
"""`python -m muster`: runs the program `muster` of this installation."""

import os
import shutil
import sys


def program() -> str | None:
    """Returns the path of the program: MUSTER_PROGRAM, else the one in this package, else the first one on PATH."""
    inside = os.path.join(os.path.dirname(__file__), "muster")
    named = os.environ.get("MUSTER_PROGRAM")
    return named or (inside if os.access(inside, os.X_OK) else shutil.which("muster"))


def main() -> None:
    """Replaces this process with the program. Exits with an error if it does not exist."""
    found = program()
    if found is None:
        sys.exit("muster: the program is neither in the package nor on PATH: set MUSTER_PROGRAM to its path")
    os.execv(found, [found, *sys.argv[1:]])


if __name__ == "__main__":
    main()
