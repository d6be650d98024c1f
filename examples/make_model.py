#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Makes a small model of random numbers in Hugging Face layout, for the tutorials: make_model.py DIRECTORY

The model is a Llama of two layers, and the same every time. It takes 0.6 MB.
"""

import json
import pathlib
import random
import struct
import sys

HIDDEN, HEADS, KEY_VALUE_HEADS, INTERMEDIATE, VOCABULARY, LAYERS = 64, 4, 4, 128, 512, 2
KEYS = HIDDEN // HEADS * KEY_VALUE_HEADS

tensors = {"model.embed_tokens.weight": [VOCABULARY, HIDDEN]}
for layer in range(LAYERS):
    prefix = f"model.layers.{layer}."
    tensors[prefix + "self_attn.q_proj.weight"] = [HIDDEN, HIDDEN]
    tensors[prefix + "self_attn.k_proj.weight"] = [KEYS, HIDDEN]
    tensors[prefix + "self_attn.v_proj.weight"] = [KEYS, HIDDEN]
    tensors[prefix + "self_attn.o_proj.weight"] = [HIDDEN, HIDDEN]
    tensors[prefix + "mlp.gate_proj.weight"] = [INTERMEDIATE, HIDDEN]
    tensors[prefix + "mlp.up_proj.weight"] = [INTERMEDIATE, HIDDEN]
    tensors[prefix + "mlp.down_proj.weight"] = [HIDDEN, INTERMEDIATE]
    tensors[prefix + "input_layernorm.weight"] = [HIDDEN]
    tensors[prefix + "post_attention_layernorm.weight"] = [HIDDEN]
tensors["model.norm.weight"] = [HIDDEN]
tensors["lm_head.weight"] = [VOCABULARY, HIDDEN]

generator = random.Random(0)
header, data = {}, bytearray()
for name, shape in tensors.items():
    count = shape[0] * (shape[1] if len(shape) == 2 else 1)
    begin = len(data)
    data += struct.pack(f"<{count}f", *(generator.gauss(0, 0.02) for _ in range(count)))
    header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [begin, len(data)]}
text = json.dumps(header).encode()
text += b" " * (-len(text) % 8)

directory = pathlib.Path(sys.argv[1])
directory.mkdir()
(directory / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + data)
(directory / "config.json").write_text(json.dumps({
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": INTERMEDIATE,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KEY_VALUE_HEADS,
    "num_hidden_layers": LAYERS,
    "vocab_size": VOCABULARY,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}, indent=2) + "\n")
print(f"{directory}: a Llama of {LAYERS} layers, {len(tensors)} tensors, {len(data)} bytes")
