# SPDX-License-Identifier: Apache-2.0
"""Inputs of `muster report`: models, shards, a workspace, a state file and a trace, made with Python's library alone."""

import json
import math
import os
import random
import struct
import subprocess
import sys
import textwrap
from pathlib import Path

# Every character here is valid in a tensor's name, and none may take effect in a page or a terminal.
HOSTILE_NAMES = [
    "</script><script>window.broken = 1</script>",
    "<img src=x onerror=\"window.broken = 2\">.weight",
    "layers.0.<b>bold</b>&amp;.weight",
    "layers.1.\u202egnp.thgiew",
    "layers.2.a\u0000b\u001b[31mred\u0007",
    "layers.3.zero\u200bwidth\ufeff",
    "'\"`${window.broken = 3}\\",
    "__proto__.constructor",
    "layers.4." + "long" * 500,
    "<!--",
    "]]>",
    "\u2028\u2029",
]


def bf16(value):
    return struct.pack("<f", value)[2:]


def write_safetensors(path, tensors, metadata=None):
    """`tensors`: {name: (dtype, shape, bytes)}."""
    header, at = {}, 0
    if metadata:
        header["__metadata__"] = metadata
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + len(data)]}
        at += len(data)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for _, _, data in tensors.values():
            file.write(data)


def layered(layers, width=16, seed=1, dead=(), spoiled=()):
    """A model of `layers` layers in F32. The MLP of a dead layer is zero; a spoiled one has NaN and an infinity."""
    rng = random.Random(seed)
    tensors = {"embed.weight": ("F32", [64, width], struct.pack(f"<{64 * width}f", *(rng.gauss(0, 1) for _ in range(64 * width))))}
    for layer in range(layers):
        for kind in ("attention.q.weight", "attention.k.weight", "attention.v.weight", "mlp.up.weight", "mlp.down.weight", "norm.weight"):
            shape = [width] if kind.startswith("norm") else [width, width]
            count = math.prod(shape)
            values = [rng.gauss(0, 0.02 * (layer + 1)) for _ in range(count)]
            if layer in dead and kind.startswith("mlp"):
                values = [0.0] * count
            if layer in spoiled and kind == "mlp.up.weight":
                values[0], values[1] = math.nan, math.inf
            tensors[f"layers.{layer}.{kind}"] = ("F32", shape, struct.pack(f"<{count}f", *values))
    return tensors


def write_layered(path, **arguments):
    path.mkdir()
    write_safetensors(path / "model.safetensors", layered(**arguments), {"format": "pt"})


def write_experts(path, tensors):
    """A mixture of experts with this many tensors, of 4 values each. One expert is zero."""
    path.mkdir()
    rng = random.Random(2)
    kinds = ("gate_proj", "up_proj", "down_proj")
    layers = 50
    experts = tensors // layers // len(kinds) + 1
    names = [f"model.layers.{layer}.self_attn.{kind}_proj.weight" for layer in range(layers) for kind in "qkvo"]
    names += [
        f"model.layers.{layer}.mlp.experts.{expert}.{kind}.weight"
        for layer in range(layers)
        for expert in range(experts)
        for kind in kinds
    ]
    names = names[:tensors]
    zero = "model.layers.3.mlp.experts.17.up_proj.weight"
    write_safetensors(
        path / "model.safetensors",
        {
            name: ("BF16", [2, 2], b"\0" * 8 if name == zero else b"".join(bf16(rng.gauss(0, 1)) for _ in range(4)))
            for name in names
        },
    )


def write_mixture(path):
    """A mixture of four experts with the names of Mixtral, which the plan `moe` splits."""
    path.mkdir()
    shapes = {"model.embed_tokens.weight": [8, 8], "lm_head.weight": [8, 8], "model.norm.weight": [8]}
    for layer in range(4):
        prefix = f"model.layers.{layer}."
        shapes |= {f"{prefix}self_attn.{kind}_proj.weight": [8, 8] for kind in "qkvo"}
        shapes |= {f"{prefix}input_layernorm.weight": [8], f"{prefix}block_sparse_moe.gate.weight": [4, 8]}
        for expert in range(4):
            shapes |= {f"{prefix}block_sparse_moe.experts.{expert}.w{i}.weight": [8, 8] for i in (1, 2, 3)}
    tensors = {name: ("BF16", shape, bf16(1.0) * math.prod(shape)) for name, shape in shapes.items()}
    write_safetensors(path / "model.safetensors", tensors, {"format": "pt"})
    config = {"model_type": "mixtral", "hidden_size": 8, "num_attention_heads": 4, "num_hidden_layers": 4, "num_local_experts": 4}
    (path / "config.json").write_text(json.dumps(config | {"vocab_size": 8}))


def write_hostile(path):
    tensors = {}
    for i, name in enumerate(HOSTILE_NAMES):
        values = [math.nan, math.inf, -math.inf, float(i)] if i % 2 else [1e308 * 10, -0.0, 5e-324, -1e308]
        tensors[name] = ("F64", [4], struct.pack("<4d", *values))
    tensors["layers.5.all.nan"] = ("F32", [2], struct.pack("<2f", math.nan, math.nan))
    tensors["layers.6.extreme"] = ("F64", [2], struct.pack("<2d", 1.7e308, -1.7e308))
    tensors["layers.7.none"] = ("F32", [0], b"")
    metadata = {"</script><img src=x onerror=\"window.broken = 4\">": "<script>window.broken = 5</script>"}
    write_safetensors(path, tensors, metadata)


class Muster:
    """Runs the program."""

    def __init__(self, program):
        self.program = program

    def __call__(self, *arguments, status=0, **options):
        run = subprocess.run([self.program, *map(str, arguments)], capture_output=True, text=True, timeout=300, **options)
        if run.returncode != status:
            sys.exit(f"FAILED: muster {' '.join(map(str, arguments))}: status {run.returncode}\n{run.stdout}{run.stderr}")
        return run.stdout if status == 0 else run.stderr

    def json(self, *arguments, status=0):
        run = subprocess.run([self.program, *map(str, arguments), "--json"], capture_output=True, text=True, timeout=300)
        if run.returncode != status:
            sys.exit(f"FAILED: muster {' '.join(map(str, arguments))} --json: status {run.returncode}\n{run.stderr}")
        return json.loads(run.stdout)


def write_trace(muster, place, rank_program):
    """Traces of three ranks, of which rank 2 is slow before each barrier."""
    place.mkdir()
    environment = {**os.environ, "MUSTER_TRACE": str(place)}
    muster("run", "-n", "3", "--", rank_program, env=environment)
