# SPDX-License-Identifier: Apache-2.0
"""keeper.py COMMAND...: runs a test, and ends every process that outlives it. SIGTERM ends the test, too."""
import ctypes
import os
import signal
import subprocess
import sys

PR_SET_CHILD_SUBREAPER = 36


def children():
    found = []
    for name in os.listdir("/proc"):
        try:
            if name.isdigit() and int(open(f"/proc/{name}/stat").read().rpartition(")")[2].split()[1]) == os.getpid():
                found.append(int(name))
        except (OSError, IndexError):
            pass  # the process has ended
    return found


def main():
    # Orphans of the test become children of this process.
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    process = subprocess.Popen(sys.argv[1:])
    signal.signal(signal.SIGTERM, lambda *_: os.kill(process.pid, signal.SIGKILL))
    status = None
    while status is None:
        pid, ended = os.wait()
        if pid == process.pid:
            status = os.waitstatus_to_exitcode(ended)
    while left := children():
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        for pid in left:
            os.waitpid(pid, 0)
    return status if status >= 0 else 128 - status


if __name__ == "__main__":
    sys.exit(main())
