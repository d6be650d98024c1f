# SPDX-License-Identifier: Apache-2.0
"""Learning from a replay buffer, as a program for torchgfn: the import lines name torchgfn alone.

Training ranks send samples to a buffer manager, which sends back samples of all of them. The gradients are averaged
over the training ranks. The coordinator prints the loss. Without torchgfn:

    muster run -n 4 -- python -m muster.compat examples/torchgfn_replay.py
"""

import logging
import time

import torch
from gfn.utils.distributed import (
    all_reduce,
    average_gradients,
    average_models,
    barrier,
    gather_distributed_data,
    initialize_distributed_compute,
    isend,
    recv,
    report_load_imbalance,
    report_time_info,
    send,
)

STEPS = 200
SAMPLES, REQUESTS, BATCHES, LOSSES = range(4)  # tags


def to_bytes(tensor):
    return tensor.contiguous().view(torch.uint8).reshape(-1)


def train(context):
    torch.manual_seed(context.my_rank)
    model = torch.nn.Linear(2, 1)
    group = context.get_train_group()
    average_models(model, group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    times = {"learn": []}
    sent = None
    for _ in range(STEPS):
        begin = time.perf_counter()
        points = torch.rand(32, 2)
        if sent is not None:
            sent.wait()
        sent = isend(to_bytes(points), context.assigned_buffer, tag=SAMPLES)
        send(torch.tensor([32], dtype=torch.uint8), context.assigned_buffer, tag=REQUESTS)
        batch = recv(context.assigned_buffer, tag=BATCHES)[1].view(torch.float32).reshape(-1, 2)
        loss = ((model(batch)[:, 0] - (3 * batch[:, 0] - batch[:, 1] + 0.5)) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        average_gradients(model)
        optimizer.step()
        times["learn"].append(time.perf_counter() - begin)
    sent.wait()
    loss = loss.detach()
    all_reduce(loss, "MAX", group=group)
    weights = gather_distributed_data(torch.nn.utils.parameters_to_vector(model.parameters())[None].detach(), training_group=group)
    if weights is not None:
        same = bool((weights == weights[0]).all())
        send(torch.tensor([loss.item(), float(same)]), context.coordinator_rank, tag=LOSSES)
        report_load_imbalance([times], 1)
        report_time_info([times], 1)


def manage_buffer(context):
    torch.manual_seed(0)
    stored = torch.empty(0, 2)
    for _ in range(STEPS * len(context.assigned_training_ranks)):
        source, data = recv(tag=SAMPLES)
        stored = torch.cat([stored, data.view(torch.float32).reshape(-1, 2)])[-1000:]
        count = int(recv(source, tag=REQUESTS)[1].item())
        send(to_bytes(stored[torch.randint(len(stored), (count,))]), source, tag=BATCHES)


def main():
    logging.basicConfig(level=logging.INFO)
    context = initialize_distributed_compute("mpi", num_remote_buffers=1, num_agent_groups=1, use_coordinator=True)
    if context.is_training_rank():
        train(context)
    if context.is_buffer_rank():
        manage_buffer(context)
    if context.is_coordinator_rank():
        loss, same = recv(tag=LOSSES)[1].view(torch.float32).tolist()
        print(f"loss {loss:.6f}, equal weights on {context.num_training_ranks} ranks: {bool(same)}")
    barrier()
    context.cleanup()


if __name__ == "__main__":
    main()
