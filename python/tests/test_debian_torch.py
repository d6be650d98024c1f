# SPDX-License-Identifier: Apache-2.0
"""The oldest supported torch, Debian's python3-torch, if this Python can import it."""

import importlib.util
import pathlib
import sysconfig

import pytest

from ranks import run

FOLDER = pathlib.Path("/usr/lib/python3/dist-packages")
if importlib.util.find_spec("torch") is not None:
    pytest.skip("this Python has a torch of its own", allow_module_level=True)
if not (FOLDER / f"torch/_C{sysconfig.get_config_var('EXT_SUFFIX')}").exists():
    pytest.skip("Debian's python3-torch is not installed, or is for another Python", allow_module_level=True)


def test_tensors_process_groups_and_no_backend(tmp_path):
    # Debian's folder comes last, so that everything else is from this Python. If NumPy is too new for it, torch has no
    # numpy(), and warns.
    told = run(
        f"""
        import warnings
        warnings.simplefilter("ignore")
        sys.path.append({str(FOLDER)!r})
        import torch, torch.distributed as dist
        both = []
        for dtype in ("bool", "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64", "complex64"):
            for tensor in (torch.arange(12).reshape(3, 4).to(getattr(torch, dtype)), torch.zeros(0, 2).to(getattr(torch, dtype))):
                for each in (tensor, tensor.t(), tensor[1:]):
                    ours = muster.as_tensor(each)
                    both.append(ours.torch().equal(each) and ours.torch().dtype == each.dtype and (each.numel() == 0 or ours.torch().data_ptr() == each.data_ptr()))
        dist.init_process_group("gloo", store=dist.FileStore({str(tmp_path / "store")!r}, size), rank=rank, world_size=size)
        weight = torch.full((4,), rank + 1, dtype=torch.bfloat16)
        weight.requires_grad_(True)
        found = []
        for each in (None, dist.new_group([1, 0])):
            with muster.get_configs_parallel({{"w": weight}}, None, each) as layers:
                held = [config["w"].torch() for _, config in layers.present()]
            for tensor in held[1:]:
                tensor += 10
            found.append([tensor.tolist() for tensor in held])
        import muster.torch
        tell([all(both), found, weight.tolist(), failure(muster.torch.register)])
        """,
        environment={"GLOO_SOCKET_IFNAME": "lo"},
    )
    sent = [[1.0] * 4, [12.0] * 4]
    for rank, (both, found, weight, refused) in enumerate(told):
        assert both and found == ([[], []] if rank else [sent, sent]) and weight == [rank + 1.0] * 4
        assert refused[0] == "ImportError" and refused[1].startswith("muster.torch needs PyTorch 2.14 or later, and this is 1.13")
