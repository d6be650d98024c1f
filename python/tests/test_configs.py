# SPDX-License-Identifier: Apache-2.0
import dataclasses
import math

import numpy as np
import pytest

import muster

# A group of this process only. Gathers over it copy values to a Config and back.
GROUP = muster.single_group()


class OnDevice:
    """A tensor in managed memory of a GPU. Its device must be read before its memory."""

    def __dlpack_device__(self):
        return (13, 0)

    def __dlpack__(self, **_):
        raise AssertionError("it was asked for")


class Raises:
    def __init__(self, words):
        self.words = words

    def __dlpack__(self, **_):
        raise LookupError(self.words)


def through(value):
    with muster.get_configs_parallel(value, group=GROUP) as configs:
        return configs[0]


def test_values_come_back():
    value = {
        "none": None, "yes": True, "no": False, "int": -(2**63), "large": 2**64 - 1, "real": 0.1, "minus": -0.0,
        "inf": math.inf, "-inf": -math.inf, "text": "Grüße\0", "list": [1, [2.5, "x", []]], "dict": {"": {}},
    }
    back = through(value)
    assert back == value and list(back) == list(value)
    assert math.copysign(1, back["minus"]) == -1 and type(back["yes"]) is bool and type(back["real"]) is float
    assert math.isnan(through({"nan": math.nan})["nan"])
    assert through((1, (2, 3))) == [1, [2, 3]]
    assert through({"a": np.float32(0.5), "b": np.int64(3), "c": np.bool_(True)}) == {"a": 0.5, "b": 3, "c": True}
    assert through(None) is None


def test_tensors_at_leaves():
    weight = np.arange(6, dtype="f4").reshape(2, 3)
    back = through({"layers": [{"weight": weight, "scale": muster.as_tensor(np.float64([2]))}]})
    got = back["layers"][0]
    assert np.array_equal(got["weight"].numpy(), weight) and got["scale"].dtype == "F64"
    assert np.shares_memory(got["weight"].numpy(), weight)


@dataclasses.dataclass
class Layer:
    weight: object
    name: str = "linear"
    inner: "Layer | None" = None
    _count: int = dataclasses.field(default=3, init=False)


def test_dataclasses_come_back_as_dicts():
    weight = np.ones(2, "f4")
    back = through([Layer(1.5, inner=Layer(weight, "mlp"))])
    inner = back[0].pop("inner")
    assert back == [{"weight": 1.5, "name": "linear", "_count": 3}]
    assert list(inner) == ["weight", "name", "inner", "_count"] and np.array_equal(inner["weight"].numpy(), weight)


@pytest.mark.parametrize(
    "value,words",
    [
        (Layer(1, inner=Layer({"a": 1j})), r"config\['inner'\]\['weight'\]\['a'\]: complex is not a value"),
        (Layer, "type is not a value: it takes dict with str keys, dataclass"),
        ({"layers": [0, {"scale": 1j}]}, r"config\['layers'\]\[1\]\['scale'\]: complex is not a value"),
        ({"a": {3: 1}}, r"config\['a'\]: a key is int, not str"),
        ([2**64], r"config\[0\]: an int beyond 64 bits"),
        ([-(2**63) - 1], "beyond 64 bits"),
        ({"s": "\ud800"}, r"config\['s'\]: the str is not valid Unicode"),
        ({"set": {1}}, "set is not a value"),
        ([np.array(["x"])], r"config\[0\]: there is no dtype"),
        ({"layers": [{"scale": OnDevice()}]}, r"config\['layers'\]\[0\]\['scale'\]: DLPack: the tensor is on a device \(type 13\): copy it"),
        ({"a": [Raises("torn \ud800")]}, r"config\['a'\]\[0\]: LookupError: torn \\ud800 \| File \".*test_configs.py\", line \d+, in __dlpack__ \| raise"),
        ({"a": type("Other", (), {"__array_interface__": 3})()}, r"config\['a'\]: an argument does not have the expected type"),
        ({"key": b"abc"}, r"config\['key'\]: bytes is not a value of a config: pass a str"),
        ([np.zeros(1, ">i4")], r"config\[0\]: the array is not in the byte order"),
    ],
)
def test_the_error_names_the_place_of_an_invalid_value(value, words):
    with pytest.raises(muster.InvalidArgumentError, match=words):
        through(value)
    assert through(1) == 1


def test_a_circle_is_refused():
    circle = []
    circle.append(circle)
    with pytest.raises(muster.InvalidArgumentError, match="256"):
        through(circle)
