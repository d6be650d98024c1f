# SPDX-License-Identifier: Apache-2.0
"""Run by hand: PyTorch's own tests of torch.distributed 0.4.1, over muster.compat.torch_distributed. MUSTER_TEST_PYTORCH_0_4
is the path of test/test_distributed.py of that version, which is not part of this project.
"""

import os
import pathlib
import socket
import subprocess
import sys

import pytest

pytest.importorskip("torch", reason="there is no PyTorch here")
if not os.environ.get("MUSTER_TEST_PYTORCH_0_4"):
    pytest.skip("by hand: MUSTER_TEST_PYTORCH_0_4=.../test/test_distributed.py", allow_module_level=True)

# The class of the same name in PyTorch compares tensors.
COMMON = """
import unittest, torch
class TestCase(unittest.TestCase):
    def assertEqual(self, first, second, message=None):
        if isinstance(first, torch.Tensor):
            first, second = first.tolist(), torch.as_tensor(second).tolist()
        super().assertEqual(first, second, message)
"""


def test_the_tests_of_pytorch(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    source = pathlib.Path(os.environ["MUSTER_TEST_PYTORCH_0_4"]).read_text()
    for old, new in (
        ("import torch.distributed as dist", "import muster.compat.torch_distributed as dist"),
        ("DEFAULT_TIMEOUT = 15", "DEFAULT_TIMEOUT = 60"),
        ("MASTER_PORT = '29500'", f"MASTER_PORT = '{port}'"),
        # DistributedDataParallelCPU of this PyTorch calls the present torch.distributed.
        ("def test_DistributedDataParallelCPU", "def of_another_version"),
    ):
        assert old in source
        source = source.replace(old, new)
    (tmp_path / "theirs.py").write_text(source)
    (tmp_path / "common.py").write_text(COMMON)
    for name in ("barrier", "test_dir"):
        (tmp_path / name).mkdir()
    environment = {**os.environ, "BACKEND": "tcp", "WORLD_SIZE": "3", "TEMP_DIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, str(tmp_path / "theirs.py"), "-v"], env=environment, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr.count("... ok\n") == 31, done.stderr
