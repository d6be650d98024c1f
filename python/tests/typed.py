# SPDX-License-Identifier: Apache-2.0
# Code that a type checker must accept, and types that it must infer. test_typing.py checks this file; it is not run.
import pathlib

import muster


def weights(group: muster.Group, weight: muster.Tensor) -> dict[int, muster.Tensor]:
    found: dict[int, muster.Tensor] = {}
    with muster.get_configs_parallel({"weight": weight}, [0, 1], group, writable=True, timeout=30) as layers:
        for rank, config in layers.present():
            found[rank] = config["weight"]
        explained: str = layers.explain()
    with muster.get_tensors_parallel(weight, None, group) as parts:
        number: int = len(parts) + len(explained)
    assert number
    return found


def merged(group: muster.Group, weight: muster.Tensor) -> str:
    whole = muster.merge_tensor_parallel(weight, muster.concat(0), None, group)
    return "" if whole is None else whole.dtype


def files(folder: pathlib.Path, group: muster.Group, weight: muster.Tensor) -> str:
    muster.write_state_file(folder / "state.h5", {"weight": weight}, progress=lambda done, total, seconds: None)
    config, weights = muster.read_state_file(folder / "state.h5")
    muster.save_safetensors(folder / "model.safetensors", weights)
    shard = muster.load_shard(folder, "tp=2", 0, "auto", group)
    for part in muster.gather_each(iter([config]), [0, 1], group, memory_budget="1MiB"):
        for rank, layer in part.present():
            shard[f"{rank}.{part.layer}"] = muster.as_tensor(layer["weight"], "U8", (4,))
    good: bool = muster.verify(folder)["good"]
    return "good" if good else shard["0.0"].dtype


def wrong(weight: muster.Tensor) -> int:
    return weight.dtype  # not an int


def wrong_rank(folder: pathlib.Path) -> dict[str, muster.Tensor]:
    return muster.load_shard(folder, "tp=2", "first", "auto")
