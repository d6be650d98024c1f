# SPDX-License-Identifier: Apache-2.0
"""Functions that test_launch.py launches."""

import os
import pathlib
import subprocess
import sys
import time

import numpy as np

import muster


def add_up(folder, scale):
    group = muster.world()
    total = muster.ProcessGroup(group).all_reduce_shared(np.full(2, group.rank * scale)).numpy().tolist()
    words = [group.rank, group.size, total, os.environ["LOCAL_RANK"], os.environ.get("WORD")]
    pathlib.Path(folder, f"rank-{group.rank}").write_text(repr(words))
    print(f"I am {group.rank}")


class Holder:
    @staticmethod
    def inside():
        print("called inside")


def fail(how):
    group = muster.world()
    if group.rank == 1:
        if how == "raise":
            raise ValueError("shard 1 is blue")
        if how == "error":
            raise muster.CorruptError("shard 1 is torn")
        if how == "exit":
            sys.exit(3)
        if how == "kill":
            os.kill(os.getpid(), 9)
    group.barrier()


def leave_quietly():
    sys.exit()


def stay(folder):
    pathlib.Path(folder, f"rank-{muster.world().rank}").write_text(str(os.getpid()))
    child = subprocess.Popen(["sleep", "600"])
    pathlib.Path(folder, f"child-{muster.world().rank}").write_text(str(child.pid))
    while True:
        time.sleep(600)
