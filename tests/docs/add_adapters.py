# SPDX-License-Identifier: Apache-2.0
"""Adds adapters to the model of examples/make_model.py, for docs/howto/write-a-plan.md: add_adapters.py DIRECTORY"""

import pathlib
import sys

import numpy as np

import muster

path = pathlib.Path(sys.argv[1]) / "model.safetensors"
tensors = {name: tensor.copy() for name, tensor in muster.load_safetensors(path).items()}
for layer in (0, 1):
    tensors[f"model.layers.{layer}.adapter.weight"] = np.ones((64, 8), "float32")
muster.save_safetensors(path, tensors)
