# SPDX-License-Identifier: Apache-2.0
"""A model in the style of vLLM: two stages of pipeline parallelism, each of two ranks of tensor parallelism. The groups
are GroupCoordinator objects. Only the import differs from a program for vLLM.

    muster run -n 4 python tensor_parallel.py
"""

import os

import torch

from muster.compat.vllm import GroupCoordinator

RANK, LOCAL_RANK = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
HIDDEN, INNER = 8, 16


def group_of(ranks, name):
    return GroupCoordinator(
        group_ranks=ranks,
        local_rank=LOCAL_RANK,
        torch_distributed_backend="gloo",
        use_device_communicator=False,
        use_message_queue_broadcaster=name == "tp",
        group_name=name,
    )


def weights_of(layer):
    random = torch.Generator().manual_seed(layer)
    return torch.randn(INNER, HIDDEN, generator=random), torch.randn(HIDDEN, INNER, generator=random)


def mlp(x, layer, tp):
    """Each rank has rows of the first matrix and columns of the second. The sum of all ranks is the result."""
    up, down = (each.chunk(tp.world_size, dim)[tp.rank_in_group] for dim, each in enumerate(weights_of(layer)))
    return tp.all_reduce(torch.relu(x @ up.t()) @ down.t())


def main():
    torch.set_num_threads(1)
    tp = group_of([[0, 1], [2, 3]], "tp")
    pp = group_of([[0, 2], [1, 3]], "pp")
    request = tp.broadcast_object({"prompt": "one two three", "steps": (1, 2)} if tp.is_first_rank else None)
    if pp.is_first_rank:
        x = torch.arange(3.0 * HIDDEN).reshape(3, HIDDEN) / 10
        pp.send_tensor_dict({"hidden_states": mlp(x, 0, tp), "residual": x, "tokens": 3}, all_gather_group=tp)
        result = pp.recv_object(src=1)
    else:
        received = pp.recv_tensor_dict(all_gather_group=tp)
        x = received["hidden_states"] + received["residual"]
        logits = tp.gather(mlp(x, 1, tp).chunk(tp.world_size, -1)[tp.rank_in_group])
        best = tp.broadcast_object([] if logits is None else logits.argmax(-1).tolist())
        pp.send_object({"tokens": best, "steps": request["steps"]}, dst=0)
        result = None
    if RANK == 0:
        x = x + torch.relu(x @ weights_of(0)[0].t()) @ weights_of(0)[1].t()
        wanted = (torch.relu(x @ weights_of(1)[0].t()) @ weights_of(1)[1].t()).argmax(-1).tolist()
        print(f"tokens {result['tokens']} after steps {result['steps']}; one rank finds {wanted}", flush=True)
        assert result == {"tokens": wanted, "steps": (1, 2)}
    tp.barrier()
    pp.destroy()
    tp.destroy()


if __name__ == "__main__":
    main()
