# SPDX-License-Identifier: Apache-2.0
"""`python -m muster`: the program `muster` of this installation."""

import os
import shutil
import sys


def program() -> str | None:
    """MUSTER_PROGRAM, the one beside this interpreter, or the first on PATH."""
    beside = os.path.join(os.path.dirname(sys.executable), "muster")
    named = os.environ.get("MUSTER_PROGRAM")
    return named or (beside if os.access(beside, os.X_OK) else shutil.which("muster"))


def main() -> None:
    found = program()
    if found is None:
        sys.exit("muster: the program is not there: neither beside this Python nor on PATH")
    os.execv(found, [found, *sys.argv[1:]])


if __name__ == "__main__":
    main()
