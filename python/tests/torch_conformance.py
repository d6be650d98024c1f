# SPDX-License-Identifier: Apache-2.0
"""Runs PyTorch's own tests of torch.distributed over Muster: torch_conformance.py SERVED_AS [unittest arguments].

SERVED_AS is the backend name that the tests use: "gloo" (Muster in place of gloo, so that gloo's own tests run, too),
"muster", or "real-gloo" (gloo itself, for comparison). The tests come with torch; they need expecttest and pytest.
"""

import os
import sys
import tempfile
import unittest
import warnings

warnings.filterwarnings("ignore")
served = sys.argv.pop(1)
temporary = tempfile.TemporaryDirectory(prefix="muster-torch-")
os.environ.update(
    BACKEND="gloo" if served == "real-gloo" else served,
    WORLD_SIZE=os.environ.get("WORLD_SIZE", "3"),
    INIT_METHOD=f"file://{temporary.name}/meeting",
)
tempfile.tempdir = temporary.name  # objects that the tests leave behind

import torch
import torch.distributed as dist

import muster.torch

torch.set_num_threads(1)
muster.torch.register()
if served == "gloo":
    # As CUSTOM, because for the type GLOO C++ expects the class of gloo.
    plugin = dist.Backend._plugins["MUSTER"]
    dist.Backend._plugins["GLOO"] = plugin
    dist.Backend.backend_type_map["gloo"] = dist.ProcessGroup.BackendType.CUSTOM
    dist.Backend.backend_capability["gloo"] = ["cpu"]

from torch.testing._internal.common_distributed import DistTestCases

# Before the tests are imported, which decides whether they are skipped.
for feature in ("ddp", "gpu", "subgroup", "plugin"):
    DistTestCases.backend_feature[feature].add(os.environ["BACKEND"])

from torch.testing._internal.distributed import distributed_test as theirs

if served != "real-gloo":
    # These tests look for gloo's profiler events.
    theirs.PROFILING_SUPPORTED_BACKENDS.clear()
    theirs.SEND_RECV_PROFILING_SUPPORTED_BACKENDS.clear()


class TestMuster(theirs.TestDistBackend, theirs.DistributedTest._DistTestBase):
    def setUp(self):
        super().setUp()
        # Starting Python takes a second; a fork has torch already.
        self._start_processes(torch.multiprocessing.get_context("fork").Process)


if __name__ == "__main__":
    unittest.main(argv=["torch", *sys.argv[1:]])
