# SPDX-License-Identifier: Apache-2.0
"""Data-parallel training, as a program for ml-starter: the import lines name ml-starter and PyTorch alone.

    python -m muster.compat examples/ml_launch.py
"""

import torch
import torch.distributed as dist
from ml.utils.torch_distributed import MultiprocessConfig, all_to_all, launch_subprocesses


def prepare():
    torch.set_num_threads(1)


def train(steps, rate):
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 1)
    torch.manual_seed(rank)
    for _ in range(steps):
        points = all_to_all(torch.rand(32 * size, 2), None)
        loss = ((model(points)[:, 0] - (3 * points[:, 0] - points[:, 1] + 0.5)) ** 2).mean()
        model.zero_grad()
        loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.data -= rate / size * parameter.grad
    if rank == 0:
        print(f"loss {loss.item():.6f} on {size} ranks")


if __name__ == "__main__":
    launch_subprocesses(train, MultiprocessConfig(world_size=2), prepare, 0, 60, rate=0.1)
