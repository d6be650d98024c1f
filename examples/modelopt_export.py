# SPDX-License-Identifier: Apache-2.0
"""Quantises a small Llama that is sharded over the ranks, and exports it with ModelOpt as one TensorRT-LLM checkpoint,
on the CPU. The export uses the gathers of ModelOpt or of Muster:

    torchrun --nproc-per-node 4 modelopt_export.py before
    torchrun --nproc-per-node 4 -m muster.modelopt modelopt_export.py after
    cmp before/rank0.safetensors after/rank0.safetensors
"""

import sys
import time

import modelopt.torch.quantization as mtq
import torch
import torch.distributed as distributed
from modelopt.torch.export import export_tensorrt_llm_checkpoint
from transformers import LlamaConfig, LlamaForCausalLM

distributed.init_process_group("gloo")
rank, ranks = distributed.get_rank(), distributed.get_world_size()

# Each rank has its own heads, its part of the MLP and its rows of the vocabulary.
torch.manual_seed(rank)
model = LlamaForCausalLM(
    LlamaConfig(
        hidden_size=1024,
        head_dim=64,
        num_attention_heads=16 // ranks,
        num_key_value_heads=16 // ranks,
        intermediate_size=4096 // ranks,
        num_hidden_layers=4,
        vocab_size=4096 // ranks,
        torch_dtype="bfloat16",
        architectures=["LlamaForCausalLM"],
    )
).to(torch.bfloat16)


class ParallelEmbedding(torch.nn.Embedding):
    """Holds the rows of this rank. ModelOpt would cut an embedding whose class name does not contain Parallel."""


def calibrate(model):
    model(torch.arange(64).reshape(1, 64))


model.model.embed_tokens.__class__ = ParallelEmbedding
mtq.quantize(model, mtq.FP8_DEFAULT_CFG, calibrate)
begun = time.perf_counter()
export_tensorrt_llm_checkpoint(model, "llama", torch.bfloat16, sys.argv[1], inference_tensor_parallel=1)
if rank == 0:
    print(f"exported to {sys.argv[1]} in {time.perf_counter() - begun:.2f} s")
distributed.destroy_process_group()
