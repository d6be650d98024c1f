# SPDX-License-Identifier: Apache-2.0
"""muster.modelopt without ModelOpt: four ranks with torch.distributed run all cases, and report the results."""

import importlib.util
import os
import subprocess
import sys

import pytest

from ranks import Ranks

if importlib.util.find_spec("torch") is None:
    pytest.skip(f"{sys.executable} has no torch", allow_module_level=True)

SOURCE = """
import contextlib, dataclasses, math
import torch
import torch.distributed as distributed
distributed.init_process_group("gloo", init_method="file://" + os.environ["TEST_STORE"], rank=rank, world_size=size)
sys.modules["here"] = sys.modules["__main__"]
import muster.modelopt as modelopt

@dataclasses.dataclass
class Linear:
    weight: torch.Tensor = None
    bias: torch.Tensor = None
    kind: str = "column"

@dataclasses.dataclass
class Layer:
    qkv: Linear = None
    experts: list = None
    rotary_dim: int = -math.inf
    extra: dict = None
    derived: int = dataclasses.field(init=False, default=0)

seen = {}
def layer(value):
    made = Layer(Linear(torch.full((2, 2), float(value)), kind="row"), [Linear(torch.ones(1)), None], extra={"$dataclass": "x", "t": (1, 2)})
    made.derived = value
    return made

# Subsets in any order; no exchange before the with statement; tensors that outlive it, and are writable.
call = modelopt.get_tensors_parallel(torch.nn.Parameter(torch.full((3,), float(rank))), [2, 0, 3])
with call as tensors:
    inside = [type(tensors).__name__, [t.tolist() for t in tensors]]
for tensor in tensors[1:]:
    tensor += 100
seen["subset"] = inside + [[t.tolist() for t in tensors[1:]]]

# The root gets its own object; shapes and dtypes may differ; views of a larger storage.
mine = torch.arange(100.0)[rank:2 * rank + 1].to(torch.float64 if rank == 1 else torch.float32)
with modelopt.get_tensors_parallel(mine, [0, 1, 2, 3]) as tensors:
    seen["unequal"] = [[list(t.shape), str(t.dtype), float(t.sum())] for t in tensors] + [bool(tensors) and tensors[0] is mine]

dtypes = [torch.float8_e4m3fn, torch.bfloat16, torch.int8, torch.bool]
seen["dtypes"] = []
for dtype in dtypes:
    with modelopt.get_tensors_parallel(torch.ones(2, 2).t().to(dtype), [0, 1]) as tensors:
        seen["dtypes"].append([str(t.dtype) for t in tensors] == [str(dtype)] * 2 and tensors[1].float().sum().item() == 4 if rank == 0 else tensors)

# Disjoint lists in one call of the world.
with modelopt.get_tensors_parallel(torch.tensor(rank), [0, 2] if rank % 2 == 0 else [3, 1], None) as tensors:
    seen["disjoint"] = [t.item() for t in tensors]

# Global ranks in a group of some of them; the other ranks do not call.
part = distributed.new_group([1, 3])
if rank in (1, 3):
    with modelopt.get_configs_parallel(rank, [3, 1], part) as configs:
        seen["group"] = list(configs)

# Dataclasses; one gather inside another.
own = layer(rank)
with modelopt.get_configs_parallel(own, [1, 0, 2, 3], None) as configs:
    with modelopt.get_tensors_parallel(torch.ones(1), [0, 1]) as inner:
        pass
seen["configs"] = [
    [type(c).__name__, type(c.qkv).__name__, c.qkv.weight.tolist(), c.qkv.kind, type(c.experts[0]).__name__, c.experts[1],
     str(c.rotary_dim), c.extra, c.derived, c.qkv.weight.add_(1) is c.qkv.weight] for c in configs]
seen["same"] = bool(configs) and configs[0] is own

# None of other ranks is left out, and that of the root is kept.
with modelopt.get_configs_parallel(rank if rank == 2 else None, [0, 1, 2, 3], None) as configs:
    seen["none"] = configs
with modelopt.get_configs_parallel(None, [0, 1, 2, 3], None) as configs:
    seen["all none"] = [configs, bool(configs)]

# Many small tensors; no tensors; a text that equals a tensor's name.
with modelopt.get_configs_parallel({f"t{i}": torch.tensor([i]) for i in range(200)} | {"text": "transformer.t0"}, [0, 3], None) as configs:
    seen["many"] = [sum(v.item() for k, v in c.items() if k != "text") for c in configs] + [c["text"] for c in configs]
with modelopt.get_configs_parallel({"a": []}, [0, 1], None) as configs:
    seen["no tensor"] = configs

# A workspace: only its marker file remains.
path = os.environ["TEST_STORE"] + ".workspace/deep"
with modelopt.get_configs_parallel(layer(rank), [0, 1, 2, 3], None, workspace_path=path) as configs:
    seen["workspace"] = [c.qkv.weight.sum().item() for c in configs]
distributed.barrier()
seen["files"] = [name for _, _, names in os.walk(path) for name in names]

# A failure of one rank is raised on all, and the group remains usable.
def gather(value, ranks=(0, 1, 2, 3), **options):
    with modelopt.get_configs_parallel(value, ranks, None, **options):
        pass
seen["bad value"] = failure(lambda: gather(Linear(1j) if rank == 2 else None))
seen["bad rank"] = failure(lambda: gather(None, [0, 7]))
seen["one rank"] = failure(lambda: gather(None, [rank] if rank == 1 else (0, 2, 3)))
seen["no tensor here"] = failure(lambda: modelopt.get_tensors_parallel(None if rank == 3 else torch.ones(1), [0, 1, 2, 3]).__enter__())
def unknown():
    class Hidden:
        pass
    gather(dataclasses.make_dataclass("Made", [("x", int)])(1) if rank == 1 else None)
seen["unknown class"] = failure(unknown)
def raised_inside():
    with modelopt.get_configs_parallel(rank, [0, 1, 2, 3], None):
        if rank == 0:
            raise LookupError("inside")
seen["inside"] = failure(raised_inside)

# NFSWorkspace.
none = modelopt.NFSWorkspace()
seen["uninitialised"] = [none.is_initialized, none.rank, str(none.path), failure(lambda: none.read_configs_and_weights_from_rank(0))[0],
                         failure(lambda: none.write_configs_and_weights({}, {}))[0]]
files = modelopt.NFSWorkspace(path)
seen["empty"] = files.read_configs_and_weights_from_rank(rank) == (None, None) and files.state_path is None
files.write_configs_and_weights({"rank": rank}, {"w": torch.nn.Parameter(torch.full((2,), float(rank)))})
distributed.barrier()
config, weights = files.read_configs_and_weights_from_rank((rank + 1) % size)
seen["read"] = [config, {name: (weight + 1).tolist() for name, weight in weights.items()}, files.state_path.exists(), files.is_initialized, files.rank]
distributed.barrier()
again = modelopt.NFSWorkspace(path)
distributed.barrier()
seen["again"] = again.read_configs_and_weights_from_rank((rank + 1) % size)
distributed.barrier()

# Ranks of several hosts rendezvous over TCP, or in the workspace.
place = muster._groups._place
muster._groups._place = lambda: f"host {rank // 2}"
def apart(group, **options):
    with modelopt.get_configs_parallel({"rank": torch.tensor(rank)}, [3, 0, 1], group, **options) as configs:
        return [c["rank"].item() for c in configs]
away = distributed.new_group([0, 1, 2, 3])
seen["apart"] = [apart(distributed.new_group([0, 1, 2, 3])), apart(away, workspace_path=path), apart(away, workspace_path=path)]
muster._groups._place = place
distributed.barrier()
tell(seen)
"""


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    store = tmp_path_factory.mktemp("modelopt") / "store"
    # Without GLOO_SOCKET_IFNAME, gloo finds no interface on a host whose name does not resolve.
    environment = {"TEST_STORE": str(store), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    return [rank[0] for rank in Ranks(SOURCE, 4, environment=environment).told()]


def of(told, name):
    return [rank[name] for rank in told]


def test_tensors(told):
    assert told[2]["subset"] == ["list", [[2.0] * 3, [0.0] * 3, [3.0] * 3], [[100.0] * 3, [103.0] * 3]]
    assert told[0]["subset"] == told[1]["subset"] == ["list", [], []]
    assert told[0]["unequal"] == [
        [[1], "torch.float32", 0.0], [[2], "torch.float64", 3.0], [[3], "torch.float32", 9.0], [[4], "torch.float32", 18.0], True,
    ]
    assert of(told, "dtypes") == [[True] * 4, [[]] * 4, [[]] * 4, [[]] * 4]
    assert of(told, "disjoint") == [[0, 2], [], [], [3, 1]]
    assert told[3]["group"] == [3, 1] and told[1]["group"] == []


def test_configs(told):
    extra = {"$dataclass": "x", "t": [1, 2]}
    for rank, row in zip((0, 2, 3), told[1]["configs"][1:]):
        assert row == ["Layer", "Linear", [[float(rank)] * 2] * 2, "row", "Linear", None, "-inf", extra, rank, True]
    assert of(told, "same") == [False, True, False, False] and of(told, "configs")[0] == []
    assert of(told, "none") == [[None, 2], [], [], []] and of(told, "all none") == [[[None], True]] + [[[], False]] * 3
    assert told[0]["many"] == [19900, 19900, "transformer.t0", "transformer.t0"]
    assert of(told, "no tensor") == [[{"a": []}, {"a": []}], [], [], []]


def test_a_workspace(told):
    assert of(told, "workspace") == [[0.0, 4.0, 8.0, 12.0], [], [], []] and of(told, "files") == [["muster-workspace.json"]] * 4
    for rank, each in enumerate(told):
        assert each["uninitialised"] == [False, rank, ".", "InvalidArgumentError", "InvalidArgumentError"] and each["empty"]
        other = (rank + 1) % 4
        assert each["read"] == [{"rank": other}, {"w": [other + 1.0] * 2}, True, True, rank]
        assert each["again"] == [None, None]


def test_ranks_of_several_hosts_meet_in_the_workspace(told):
    assert of(told, "apart") == [[[]] * 3] * 3 + [[[3, 0, 1]] * 3]


def test_one_ranks_failure_is_everybodys(told):
    assert len({str(each) for each in of(told, "bad value")}) == 1
    assert told[0]["bad value"][0] == "InvalidArgumentError" and "config['weight']: complex is not a value" in told[0]["bad value"][1]
    assert "rank 2" in told[0]["bad value"][1]
    for each in told:
        assert each["bad rank"][0] == "InvalidArgumentError" and "rank 7 of the list is not in the group, which has the ranks [0, 1, 2, 3]" in each["bad rank"][1]
        assert each["one rank"][0] == "InvalidArgumentError" and "ranks: [1] has fewer than two ranks" in each["one rank"][1]
        assert each["no tensor here"][0] == "InvalidArgumentError" and "rank 3" in each["no tensor here"][1]
    assert "which is not a dataclass here" in told[0]["unknown class"][1] and of(told, "unknown class")[1:] == [None] * 3
    assert of(told, "inside") == [["LookupError", "inside"], None, None, None]


# A package with the layout of ModelOpt, up to 0.47 and from 0.48 on.
UPSTREAM = {
    "modelopt/__init__.py": "",
    "modelopt/torch/__init__.py": "",
    "modelopt/torch/export/__init__.py": "",
    "distribute.py": "def get_tensors_parallel(): pass\ndef get_configs_parallel(): pass\nclass NFSWorkspace: pass\n",
    "postprocess.py": "from .distribute import get_configs_parallel, get_tensors_parallel\n",
}
WAYS = {
    "install": ("import muster.modelopt; muster.modelopt.install()", [], {}),
    "late": ("import muster.modelopt\nimport NAME.postprocess\nfrom NAME.distribute import NFSWorkspace as kept\nmuster.modelopt.install()\nassert kept is muster.modelopt.NFSWorkspace", [], {}),
    "environment": ("import muster", [], {"MUSTER_MODELOPT": "1"}),
    "program": ("", ["-m", "muster.modelopt"], {}),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("package", ["modelopt.torch.export", "modelopt.torch.export.trtllm"])
def test_installing(package, way, tmp_path):
    for name, text in UPSTREAM.items():
        path = tmp_path / (name if "/" in name else f"{package.replace('.', '/')}/{name}")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (tmp_path / package.replace(".", "/") / "__init__.py").touch()
    source, arguments, environment = WAYS[way]
    script = tmp_path / "script.py"
    script.write_text(
        f"""{source.replace("NAME", package)}
import sys
assert "torch" not in sys.modules
import {package}.postprocess as postprocess, {package}.distribute as distribute
import muster.modelopt as ours
print(postprocess.get_configs_parallel is ours.get_configs_parallel, postprocess.get_tensors_parallel is ours.get_tensors_parallel,
      distribute.NFSWorkspace is ours.NFSWorkspace, distribute.get_configs_parallel is ours.get_configs_parallel, __name__, sys.argv[1:])
"""
    )
    path = os.pathsep.join([str(tmp_path), os.environ["PYTHONPATH"]])
    done = subprocess.run(
        [sys.executable, *arguments, str(script), "word"], env={**os.environ, **environment, "PYTHONPATH": path}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "True True True True __main__ ['word']\n"


def test_there_is_nothing_to_install(tmp_path):
    (tmp_path / "modelopt").mkdir()
    (tmp_path / "modelopt/__init__.py").touch()
    path = os.pathsep.join([str(tmp_path), os.environ["PYTHONPATH"]])
    source = "import muster.modelopt; muster.modelopt.install()"
    done = subprocess.run([sys.executable, "-c", source], env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True)
    assert "ImportError: muster.modelopt.install: modelopt.torch.export.distribute or modelopt.torch.export.trtllm.distribute does not exist" in done.stderr
