# SPDX-License-Identifier: Apache-2.0
# What a type checker has to accept, and to know: checked by test_typing.py, not run.
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


def wrong(weight: muster.Tensor) -> int:
    return weight.dtype  # not an int
