# SPDX-License-Identifier: Apache-2.0
"""Ranks as separate processes, each of which runs a piece of source code."""

import json
import os
import subprocess
import sys
import textwrap
import uuid

PRELUDE = """
import json, os, signal, sys, time
import numpy as np
import muster
rank, size = int(os.environ["TEST_RANK"]), int(os.environ["TEST_SIZE"])
group = muster.local_group(os.environ["TEST_KEY"], rank, size, timeout=20)
def tell(value):
    print("told " + json.dumps(value), flush=True)
def failure(call):
    try:
        call()
    except Exception as error:
        return [type(error).__name__, str(error)]
    return None
"""


class Ranks:
    """Runs `source` in `size` processes, with the names `rank`, `size`, `group` and tell(value)."""

    def __init__(self, source, size=2, environment=()):
        key = uuid.uuid4().hex
        self.processes = []
        for rank in range(size):
            own = {"TEST_RANK": str(rank), "TEST_SIZE": str(size), "TEST_KEY": key}
            self.processes.append(
                subprocess.Popen(
                    [sys.executable, "-c", PRELUDE + textwrap.dedent(source)],
                    env={**os.environ, **own, **dict(environment)},
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )

    def told(self, statuses=None, longest=60):
        """Waits for all ranks, and returns the values that each rank has passed to tell(). `statuses` are the expected exit
        statuses (0), `longest` the longest wait in seconds.
        """
        outputs = [process.communicate(timeout=longest) for process in self.processes]
        for rank, (process, (_, errors)) in enumerate(zip(self.processes, outputs)):
            wanted = 0 if statuses is None else statuses[rank]
            assert process.returncode == wanted, f"rank {rank} ended with {process.returncode}:\n{errors}"
        lines = [[line for line in output.splitlines() if line.startswith("told ")] for output, _ in outputs]
        return [[json.loads(line[5:]) for line in each] for each in lines]


def run(source, size=2, longest=60, **options):
    """Returns the single value that each rank has passed to tell()."""
    return [told[0] if told else None for told in Ranks(source, size, **options).told(longest=longest)]
