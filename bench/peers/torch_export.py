#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Exports as scripts do today: loads all shards with safetensors, concatenates with torch, saves with safetensors and
syncs. Prints seconds without imports.

  torch_export.py SHARDS_DIR OUT_DIR
"""

import os
import re
import shutil
import sys
import time
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

BY_ROWS = re.compile(r".*(embed_tokens|lm_head|[qkv]_proj|gate_proj|up_proj)\.(weight|bias)")
BY_COLUMNS = re.compile(r".*(o_proj|down_proj)\.weight")


def main():
    shards_dir, out = Path(sys.argv[1]), Path(sys.argv[2])
    begin = time.perf_counter()
    shards = [load_file(path) for path in sorted(shards_dir.glob("rank-*.safetensors"))]
    merged = {}
    for name in list(shards[0]):
        pieces = [shard.pop(name) for shard in shards]
        if BY_ROWS.fullmatch(name):
            merged[name] = torch.cat(pieces, 0)
        elif BY_COLUMNS.fullmatch(name):
            merged[name] = torch.cat(pieces, 1)
        else:
            merged[name] = pieces[0]
    out.mkdir()
    save_file(merged, out / "model.safetensors", metadata={"format": "pt"})
    shutil.copy(shards_dir / "config.json", out)
    with open(out / "model.safetensors", "rb") as file:
        os.fsync(file.fileno())
    print(f"{time.perf_counter() - begin:.6f}")


if __name__ == "__main__":
    main()
