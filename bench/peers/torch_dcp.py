#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Makes a torch.distributed.checkpoint save with two ranks, and exports it as scripts do today.

  torch_dcp.py save DIR GIB       BF16 matrices of 32 MiB, sharded by rows
  torch_dcp.py export DIR OUT     dcp_to_torch_save, torch.load, save_file and sync; prints seconds without imports
"""

import os
import sys
import tempfile
import time

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from safetensors.torch import save_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

RANKS, ROWS, COLUMNS = 2, 2048, 8192


def save(rank, directory, count, meeting):
    dist.init_process_group("gloo", init_method=f"file://{meeting}/file", rank=rank, world_size=RANKS)
    mesh = init_device_mesh("cpu", (RANKS,))
    torch.manual_seed(rank)
    state = {f"layers.{i}.weight": DTensor.from_local(
        torch.randn(ROWS // RANKS, COLUMNS, dtype=torch.bfloat16), mesh, [Shard(0)]) for i in range(count)}
    dcp.save({"model": state}, checkpoint_id=directory)
    dist.destroy_process_group()


def export(directory, out):
    begin = time.perf_counter()
    os.mkdir(out)
    dcp_to_torch_save(directory, f"{out}/whole.pt")
    save_file(torch.load(f"{out}/whole.pt")["model"], f"{out}/model.safetensors", metadata={"format": "pt"})
    with open(f"{out}/model.safetensors", "rb") as file:
        os.fsync(file.fileno())
    print(f"{time.perf_counter() - begin:.6f}")


if __name__ == "__main__":
    if sys.argv[1] == "export":
        export(*sys.argv[2:])
    else:
        with tempfile.TemporaryDirectory() as meeting:
            number = max(1, round(float(sys.argv[3]) * (1 << 30) / (2 * ROWS * COLUMNS)))
            mp.spawn(save, (sys.argv[2], number, meeting), RANKS)
