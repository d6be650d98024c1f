# SPDX-License-Identifier: Apache-2.0
"""Data-parallel training in the style of the first tutorials of torch.distributed: the program starts its own processes,
and averages the gradients itself. Only the import of `dist` differs from a program for PyTorch 0.4.

    python early_distributed.py
"""

import math
import os
import socket

import torch
import torch.multiprocessing as multiprocessing
from torch import nn

import muster.compat.torch_distributed as dist


def pass_around(rank, size):
    """Adds the numbers of all ranks in a ring. Each rank sends while it receives."""
    total, passed, received = torch.zeros(1), torch.ones(1) * rank, torch.zeros(1)
    for _ in range(size):
        total += passed
        request = dist.isend(passed, (rank + 1) % size)
        dist.recv(received, src=(rank - 1) % size)
        request.wait()
        passed = received.clone()
    return total.item()


def average_gradients(model):
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad.data, op=dist.reduce_op.SUM)
        parameter.grad.data /= dist.get_world_size()


def train(rank, size):
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 1))
    for parameter in model.parameters():
        dist.broadcast(parameter.data, src=0)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    for epoch in range(4):
        mean = torch.zeros(1)
        for _ in range(50):
            x = torch.rand(32, 1) * 2 - 1
            loss = ((model(x) - torch.sin(3 * x)) ** 2).mean()
            optimizer.zero_grad()
            loss.backward()
            average_gradients(model)
            optimizer.step()
            mean += loss.detach() / 50
        dist.reduce(mean, dst=0)
        if rank == 0:
            print(f"epoch {epoch}: loss {mean.item() / size:.4f} over {size} ranks", flush=True)
    weights = [torch.empty_like(model[0].weight) for _ in range(size)] if rank == 0 else None
    dist.gather(model[0].weight.data, dst=0, **({"gather_list": weights} if rank == 0 else {}))
    if rank == 0:
        assert all(torch.equal(each, weights[0]) for each in weights) and math.isfinite(weights[0].sum())


def run(rank, size, port):
    torch.set_num_threads(1)
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    os.environ["MASTER_PORT"] = str(port)
    dist.init_process_group("tcp", rank=rank, world_size=size)
    assert pass_around(rank, size) == size * (size - 1) / 2
    train(rank, size)
    dist.destroy_process_group()


if __name__ == "__main__":
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    multiprocessing.spawn(run, args=(2, port), nprocs=2)
