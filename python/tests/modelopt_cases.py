# SPDX-License-Identifier: Apache-2.0
"""One of four ranks that merge configs by ModelOpt's postprocess_model_config, first with ModelOpt's gathers, then with
Muster's, and compare: `torchrun --nproc-per-node 4 modelopt_cases.py [HIDDEN [CASE ...]]`. Prints a table on rank 0.
"""

import contextlib
import copy
import dataclasses
import importlib
import os
import shutil
import sys
import tempfile
import time

import torch
import torch.distributed as distributed

distributed.init_process_group("gloo")
RANK, SIZE = distributed.get_rank(), distributed.get_world_size()
try:
    package = "modelopt.torch.export.trtllm"
    postprocess = importlib.import_module(f"{package}.postprocess")
except ModuleNotFoundError:
    package = "modelopt.torch.export"
    postprocess = importlib.import_module(f"{package}.postprocess")
configs = importlib.import_module(f"{package}.model_config")

import muster.modelopt

# name: (quantisation, pipeline of the ranks, tensor parallel of the result, by a workspace, ModelOpt's own can do it)
CASES = {
    "none tp4-1": (None, 1, 1, False, True),
    "fp8 tp4-1": ("fp8", 1, 1, False, True),
    "fp8 tp4-2": ("fp8", 1, 2, False, True),
    "int8_sq tp4-1": ("int8_sq", 1, 1, False, True),
    "int4_awq tp4-1": ("int4_awq", 1, 1, False, True),
    "int4_awq tp4-2": ("int4_awq", 1, 2, False, True),
    "w4a8_awq tp4-1": ("w4a8_awq", 1, 1, False, True),
    "fp8 pp4": ("fp8", 4, 1, False, True),
    "int4_awq pp4": ("int4_awq", 4, 1, False, True),
    "fp8 pp4 workspace": ("fp8", 4, 1, True, True),
    "fp8 pp2 tp2": ("fp8", 2, 2, False, True),
    "w4a8_awq pp4": ("w4a8_awq", 4, 1, False, False),
    "w4a8_awq pp4 workspace": ("w4a8_awq", 4, 1, True, True),
}
LAYERS, TURNS = 2, 7
BLOCK = 128


def linear(random, kind, quantization, rows, columns):
    """A part of a linear layer with the tensors that its quantisation has."""
    def numbers(*shape):
        return torch.rand(shape, generator=random) + 0.5

    made = configs.LinearConfig(quantization=quantization, linear_type=kind, weight=numbers(rows, columns).bfloat16(), bias=numbers(rows).bfloat16())
    if quantization in ("fp8", "int8_sq", "w4a8_awq"):
        made.activation_scaling_factor = numbers(1)
    if quantization == "fp8":
        made.weights_scaling_factor = numbers(1)
        # Scales come of buffers, weights of parameters.
        made.weight = torch.nn.Parameter(made.weight)
    if quantization == "int8_sq":
        made.weights_scaling_factor = numbers(rows)
        made.prequant_scaling_factor = numbers(columns) if kind == configs.LINEAR_ROW else None
    if quantization in ("int4_awq", "w4a8_awq"):
        made.weights_scaling_factor = numbers(rows, columns // BLOCK)
        made.prequant_scaling_factor = numbers(columns)
        made.awq_block_size = BLOCK
    if quantization == "w4a8_awq":
        made.weights_scaling_factor_2 = numbers(1)
    return made


def model(rank, hidden, quantization, pipeline):
    random = torch.Generator().manual_seed(rank)
    parts = SIZE // pipeline
    own = max(BLOCK, hidden // parts)

    def norm():
        return configs.LayernormConfig(weight=torch.rand(hidden, generator=random), bias=torch.rand(hidden, generator=random))

    def column():
        return linear(random, configs.LINEAR_COLUMN, quantization, own, hidden)

    def row():
        return linear(random, configs.LINEAR_ROW, quantization, hidden, own)

    made = configs.ModelConfig(quantization=quantization, dtype="bfloat16", vocab_size=256, rank=rank, tensor_parallel=parts, pipeline_parallel=pipeline)
    if rank < parts:
        made.vocab_embedding = configs.EmbeddingConfig(weight=torch.rand(256, hidden, generator=random).bfloat16())
    if rank >= SIZE - parts:
        made.ln_f = norm()
        made.lm_head = configs.LinearConfig(weight=torch.rand(256, hidden, generator=random).bfloat16())
    for _ in range(LAYERS):
        attention = configs.AttentionConfig(qkv=configs.QKVConfig(column(), column(), column()), dense=row())
        mlp = configs.MLPConfig(fc=column(), gate=column(), proj=row(), hidden_act="silu")
        made.layers.append(configs.DecoderLayerConfig(decoder_type="llama", input_layernorm=norm(), post_layernorm=norm(), attention=attention, mlp=mlp))
    return made


def difference(a, b, place="config"):
    """Where two results are not the same, bit for bit; None if they are."""
    if type(a) is not type(b) and not (isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)):
        return f"{place}: {type(a).__name__}, {type(b).__name__}"
    if isinstance(a, torch.Tensor):
        same = a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.detach().contiguous().view(-1).view(torch.uint8), b.detach().contiguous().view(-1).view(torch.uint8))
        return None if same else f"{place}: {a.dtype} {list(a.shape)}, {b.dtype} {list(b.shape)}"
    if dataclasses.is_dataclass(a):
        a, b = vars(a), vars(b)
    if isinstance(a, dict):
        if a.keys() != b.keys():
            return f"{place}: {list(a)}, {list(b)}"
        return next(filter(None, (difference(a[key], b[key], f"{place}.{key}") for key in a)), None)
    if isinstance(a, list):
        if len(a) != len(b):
            return f"{place}: {len(a)} items, {len(b)}"
        return next(filter(None, (difference(x, y, f"{place}[{i}]") for i, (x, y) in enumerate(zip(a, b)))), None)
    return None if a == b else f"{place}: {a!r}, {b!r}"


class Clock:
    """Seconds in the beginnings and ends of gathers, not in what is done with them."""

    def __init__(self):
        self.seconds, self.count = 0.0, 0

    def around(self, call):
        @contextlib.contextmanager
        def timed(*arguments, **options):
            begun = time.perf_counter()
            context = call(*arguments, **options)
            value = context.__enter__()
            self.seconds += time.perf_counter() - begun
            try:
                yield value
            finally:
                begun = time.perf_counter()
                context.__exit__(None, None, None)
                self.seconds += time.perf_counter() - begun
                self.count += 1

        return timed


def merged(made, pipeline, parts, workspace, gathers):
    """(result, seconds in gathers, gathers)."""
    clock = Clock()
    postprocess.get_tensors_parallel = clock.around(gathers.get_tensors_parallel)
    postprocess.get_configs_parallel = clock.around(gathers.get_configs_parallel)
    distributed.barrier()
    result = postprocess.postprocess_model_config(made, parts, 1, pipeline, workspace_path=workspace)
    distributed.barrier()
    return result, clock.seconds, clock.count


def main():
    hidden = int(sys.argv[1]) if len(sys.argv) > 1 else 512
    chosen = sys.argv[2:] or [name for name, case in CASES.items() if case[4]]
    upstream = importlib.import_module(f"{package}.distribute")
    theirs = type("Theirs", (), {name: staticmethod(getattr(upstream, name)) for name in ("get_tensors_parallel", "get_configs_parallel")})
    for name in chosen:
        quantization, pipeline, parts, by_workspace, possible = CASES[name]
        folder = [tempfile.mkdtemp(prefix="modelopt-cases-") if RANK == 0 else None]
        distributed.broadcast_object_list(folder)
        made = model(RANK, hidden, quantization, pipeline)
        rows, results = [], []
        for gathers in (theirs, muster.modelopt):
            seconds = []
            for turn in range(TURNS):
                workspace = os.path.join(folder[0], f"{gathers.__name__}{turn}") if by_workspace else None
                if workspace is not None and RANK == 0:
                    os.mkdir(workspace)
                with contextlib.redirect_stdout(None):
                    result, each, count = merged(copy.deepcopy(made), pipeline, parts, workspace, gathers)
                seconds.append(each)
            rows.append(min(seconds))
            results.append(result)
        wrong = [None] * SIZE
        distributed.all_gather_object(wrong, difference(*results))
        if RANK == 0:
            shutil.rmtree(folder[0])
            words = "the same" if not any(wrong) else f"DIFFERENT: {wrong}"
            print(f"{name:24} {count:4} gathers  ModelOpt {1000 * rows[0]:8.1f} ms  Muster {1000 * rows[1]:8.1f} ms  {rows[0] / rows[1]:6.1f} x  {words}", flush=True)


main()
