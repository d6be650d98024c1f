# SPDX-License-Identifier: Apache-2.0
"""The long form, run by hand: MUSTER_TEST_ALL=1 with a Python that has ModelOpt. ModelOpt's postprocess_model_config must
return the same results with Muster's gathers as with its own.
"""

import importlib.util
import os
import pathlib
import subprocess
import sys

import pytest

if os.environ.get("MUSTER_TEST_ALL") != "1":
    pytest.skip("the long form: MUSTER_TEST_ALL=1", allow_module_level=True)
if importlib.util.find_spec("modelopt") is None or importlib.util.find_spec("torch") is None:
    pytest.skip(f"{sys.executable} has no ModelOpt", allow_module_level=True)

CASES = pathlib.Path(__file__).with_name("modelopt_cases.py")
EXAMPLE = pathlib.Path(__file__).parents[2] / "examples" / "modelopt_export.py"
# Without GLOO_SOCKET_IFNAME, gloo finds no interface on a host whose name does not resolve.
ENVIRONMENT = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]


def ranks(*command, **options):
    done = subprocess.run([*TORCHRUN, *map(str, command)], env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=500, **options)
    assert done.returncode == 0, done.stdout[-4000:]
    return done.stdout


def test_the_same_as_with_its_own():
    lines = [line for line in ranks(CASES, 256).splitlines() if " gathers " in line]
    # One case has more than 40 tensors per layer, which ModelOpt's own gathers do not support.
    assert len(lines) == 14 and all(line.endswith("  the same") for line in lines), lines


@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="the example takes a model of transformers")
def test_the_example(tmp_path):
    ranks(EXAMPLE, "before", cwd=tmp_path)
    ranks("-m", "muster.modelopt", EXAMPLE, "after", cwd=tmp_path)
    for name in ("rank0.safetensors", "config.json"):
        assert (tmp_path / "before" / name).read_bytes() == (tmp_path / "after" / name).read_bytes()
