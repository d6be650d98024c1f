# SPDX-License-Identifier: Apache-2.0
"""One of four ranks that merge configs with ModelOpt's postprocess_model_config, first with ModelOpt's gathers, then with
Muster's, and compare the results: `torchrun --nproc-per-node 4 modelopt_cases.py [HIDDEN [CASE ...]]`. Rank 0 prints a
table: its time in gathers, the total time of the merge, and the CPU time of all ranks in gathers.
"""

import contextlib
import copy
import dataclasses
import importlib
import importlib.util
import os
import shutil
import sys
import tempfile
import time
import types

import torch
import torch.distributed as distributed

if importlib.util.find_spec("torch.onnx._globals") is None:
    # ModelOpt 0.17 imports this module, which PyTorch no longer has.
    old = types.ModuleType("torch.onnx._globals")
    old.GLOBALS = types.SimpleNamespace()
    sys.modules[old.__name__] = old

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

# name: (quantization, pipeline size of the ranks, tensor parallelism of the result, whether a workspace is used,
# whether ModelOpt's own gathers support the case)
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
    "fp8 pp2 tp2-2": ("fp8", 2, 2, False, True),
    "fp8 pp2 tp2-1": ("fp8", 2, 1, False, True),
    "w4a8_awq pp4": ("w4a8_awq", 4, 1, False, False),
    "w4a8_awq pp4 workspace": ("w4a8_awq", 4, 1, True, True),
}
LAYERS, TURNS = 2, 5
BLOCK = 128
GATHERS = ("get_tensors_parallel", "get_configs_parallel")


def linear(random, kind, quantization, rows, columns):
    """Returns a part of a linear layer with the tensors of its quantization."""
    def numbers(*shape):
        return torch.rand(shape, generator=random) + 0.5

    made = configs.LinearConfig(linear_type=kind, weight=numbers(rows, columns).bfloat16(), bias=numbers(rows).bfloat16())
    if hasattr(made, "quantization"):  # not in 0.17
        made.quantization = quantization
    if quantization in ("fp8", "int8_sq", "w4a8_awq"):
        made.activation_scaling_factor = numbers(1)
    if quantization == "fp8":
        made.weights_scaling_factor = numbers(1)
        # Scales are buffers, weights are parameters.
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
    """Returns the first place at which two results differ, bit for bit; None if they are the same."""
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
    """Measures the wall-clock and CPU time at the beginnings and ends of gathers, without the time in which their results
    are used.
    """

    def __init__(self):
        self.seconds, self.cores, self.count = 0.0, 0.0, 0

    @contextlib.contextmanager
    def running(self):
        begun, worked = time.perf_counter(), time.process_time()
        yield
        self.seconds += time.perf_counter() - begun
        self.cores += time.process_time() - worked

    def around(self, call):
        @contextlib.contextmanager
        def timed(*arguments, **options):
            with self.running():
                context = call(*arguments, **options)
                value = context.__enter__()
            try:
                yield value
            finally:
                with self.running():
                    context.__exit__(None, None, None)
                self.count += 1

        return timed


def merged(made, pipeline, parts, workspace, gathers):
    """Returns (result, (seconds in gathers, total seconds, CPU seconds in gathers), number of gathers)."""
    clock = Clock()
    for name in GATHERS:
        setattr(postprocess, name, clock.around(getattr(gathers, name)))
    distributed.barrier()
    begun = time.perf_counter()
    result = postprocess.postprocess_model_config(made, parts, 1, pipeline, workspace_path=workspace)
    whole = time.perf_counter() - begun
    distributed.barrier()
    return result, (clock.seconds, whole, clock.cores), clock.count


def expected(hidden, quantization):
    """Returns the expected merge of a pipeline of all ranks: the layers of all, and the end of the last."""
    if RANK != 0:
        return []
    parts = [model(rank, hidden, quantization, SIZE) for rank in range(SIZE)]
    made = parts[0]
    made.layers = [layer for part in parts for layer in part.layers]
    made.ln_f, made.lm_head, made.pipeline_parallel = parts[-1].ln_f, parts[-1].lm_head, 1
    return [made]


def best(made, case, folder, gathers):
    """Returns (result, the times of the turn with the least time in gathers, number of gathers). The CPU time is the sum
    over all ranks.
    """
    _, pipeline, parts, by_workspace, _ = case
    seconds = []
    for turn in range(TURNS):
        workspace = os.path.join(folder, f"{gathers.__name__}{turn}") if by_workspace else None
        if workspace is not None and RANK == 0:
            os.mkdir(workspace)
        with contextlib.redirect_stdout(None):
            result, each, count = merged(copy.deepcopy(made), pipeline, parts, workspace, gathers)
        seconds.append(each)
    took, whole, _ = min(seconds)
    cores = [None] * SIZE
    distributed.all_gather_object(cores, min(cores for _, _, cores in seconds))
    return result, (took, whole, sum(cores)), count


def spelled(seconds):
    took, whole, cores = (1000 * each for each in seconds)
    return f"{took:8.1f} of {whole:6.1f} ms, {cores:6.1f} of cores"


def main():
    hidden = int(sys.argv[1]) if len(sys.argv) > 1 else 512
    upstream = importlib.import_module(f"{package}.distribute")
    theirs = types.SimpleNamespace(**{"__name__": "theirs"}, **{name: getattr(upstream, name) for name in GATHERS})
    for name in sys.argv[2:] or CASES:
        case = CASES[name]
        folder = [tempfile.mkdtemp(prefix="modelopt-cases-") if RANK == 0 else None]
        distributed.broadcast_object_list(folder)
        made = model(RANK, hidden, case[0], case[1])
        if case[4]:
            wanted, before, _ = best(made, case, folder[0], theirs)
            words = f"ModelOpt {spelled(before)}"
        else:
            wanted, words = expected(hidden, case[0]), "ModelOpt" + " cannot".ljust(39)
        result, seconds, count = best(made, case, folder[0], muster.modelopt)
        wrong = [None] * SIZE
        distributed.all_gather_object(wrong, difference(wanted, result))
        if RANK == 0:
            shutil.rmtree(folder[0])
            ratio = f"{before[0] / seconds[0]:6.1f} x" if case[4] else " " * 8
            same = "the same" if not any(wrong) else f"DIFFERENT: {wrong}"
            print(f"{name:24} {count:4} gathers  {words}  Muster {spelled(seconds)}  {ratio}  {same}", flush=True)


main()
