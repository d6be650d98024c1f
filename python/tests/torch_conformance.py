# SPDX-License-Identifier: Apache-2.0
"""PyTorch's own tests of torch.distributed, over Muster: torch_conformance.py SERVED_AS [unittest arguments].

SERVED_AS is the name that the tests ask for: "gloo" (Muster in gloo's place, so that tests of gloo alone run, too), "muster", or
"real-gloo" (gloo itself, to compare with). The tests come with torch; they need expecttest and pytest.
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
tempfile.tempdir = temporary.name  # of what the tests leave behind

import torch
import torch.distributed as dist

import muster.torch

torch.set_num_threads(1)
muster.torch.register()
if served == "gloo":
    # As CUSTOM: C++ takes a backend of the type GLOO for gloo's own class.
    plugin = dist.Backend._plugins["MUSTER"]
    dist.Backend._plugins["GLOO"] = plugin
    dist.Backend.backend_type_map["gloo"] = dist.ProcessGroup.BackendType.CUSTOM
    dist.Backend.backend_capability["gloo"] = ["cpu"]

from torch.testing._internal.common_distributed import DistTestCases

# Before the tests are read: whether they skip is decided then.
for feature in ("ddp", "gpu", "subgroup", "plugin"):
    DistTestCases.backend_feature[feature].add(os.environ["BACKEND"])

from torch.testing._internal.distributed import distributed_test as theirs

if served != "real-gloo":
    # The events that these look for are gloo's.
    theirs.PROFILING_SUPPORTED_BACKENDS.clear()
    theirs.SEND_RECV_PROFILING_SUPPORTED_BACKENDS.clear()


class TestMuster(theirs.TestDistBackend, theirs.DistributedTest._DistTestBase):
    def setUp(self):
        super().setUp()
        # Python starts a second; a fork has torch already.
        self._start_processes(torch.multiprocessing.get_context("fork").Process)


if __name__ == "__main__":
    unittest.main(argv=["torch", *sys.argv[1:]])
