# SPDX-License-Identifier: Apache-2.0
"""Ranks started by other launchers. In the long form (MUSTER_TEST_ALL=1) also by torchrun, accelerate and torch.multiprocessing."""

import importlib.util
import os
import pathlib
import shutil
import subprocess
import sys

import pytest

PROGRAM = str(pathlib.Path(__file__).with_name("starters.py"))
MPIEXEC = shutil.which("mpiexec.mpich") or shutil.which("mpiexec")

# The command, the module that it needs, and the kind of the group.
ALONE = {
    "spawn": ([sys.executable, PROGRAM, "spawn"], None, "local"),
    "forkserver": ([sys.executable, PROGRAM, "forkserver"], None, "local"),
    "mpiexec": ([MPIEXEC, "-n", "3", sys.executable, PROGRAM, "rank"], None, "mpi"),
}
ACCELERATE = [
    *[sys.executable, "-m", "accelerate.commands.launch", "--num_processes", "3", "--num_machines", "1"],
    *["--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0"],
]
WITH_TORCH = {
    "torch.multiprocessing": ([sys.executable, PROGRAM, "torch"], "torch", "local"),
    "torchrun": ([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3", PROGRAM, "rank"], "torch", "local"),
    # --multi_gpu is accelerate's name for torchrun, and does not look for a GPU.
    "accelerate": ([*ACCELERATE, "--multi_gpu", PROGRAM, "rank"], "accelerate", "local"),
    "accelerate by mpirun": ([*ACCELERATE, "--cpu", "--mpirun_hostfile", "hosts", PROGRAM, "rank"], "accelerate", "mpi"),
}


@pytest.mark.parametrize("way", [*ALONE, *WITH_TORCH])
def test_ranks_that_others_start(way, tmp_path):
    command, needs, kind = {**ALONE, **WITH_TORCH}[way]
    if way in WITH_TORCH and not os.environ.get("MUSTER_TEST_ALL"):
        pytest.skip("in the long form: MUSTER_TEST_ALL=1")
    if needs is not None and importlib.util.find_spec(needs) is None:
        pytest.skip(f"there is no {needs} here")
    if kind == "mpi" and MPIEXEC is None:
        pytest.skip("there is no mpiexec here")
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    (tmp_path / "hosts").write_text("localhost\n")
    done = subprocess.run([*command, str(tmp_path)], cwd=tmp_path, capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0, done.stderr
    assert eval((tmp_path / "told").read_text()) == [[[rank, 1 << 16] for rank in range(3)], kind]
