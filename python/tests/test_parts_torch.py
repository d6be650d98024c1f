# SPDX-License-Identifier: Apache-2.0
"""The parts of DTensors of PyTorch. Each is compared with the tensor from which the DTensor was made, because
full_tensor() loses rows of some of them. In the long form, on meshes of up to 2 x 4 ranks.
"""

import os

import pytest

torch = pytest.importorskip("torch", reason="there is no PyTorch here")
if tuple(int(number) for number in torch.__version__.split("+")[0].split(".")[:2]) < (2, 9):
    pytest.skip(f"PyTorch {torch.__version__}: the tests need 2.9", allow_module_level=True)

import muster
from muster._parts import parts_of
from ranks import run

START = """
import itertools, random
import torch, torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard
from muster._parts import parts_of
torch.set_num_threads(1)
dist.init_process_group("gloo", store=dist.FileStore(os.environ["TEST_STORE"], size), rank=rank, world_size=size)
counts, wrong = [0, 0], []
def check(name, value, whole):
    # Each part has the elements of its position, and the parts of all ranks have all elements.
    seen, right, strided = torch.zeros(whole.shape, dtype=torch.int32), True, False
    for _, tensor, shape, offset in parts_of({"w": value}):
        box = tuple(slice(first, first + extent) for first, extent in zip(offset or (0,) * whole.ndim, tensor.shape))
        right = right and shape in ((), tuple(whole.shape)) and torch.equal(tensor.torch(copy=True), whole[box])
        seen[box] += 1
    counts[0] += 1
    counts[1] += any(hasattr(each, "split_factor") for each in getattr(value, "placements", ()))
    dist.all_reduce(seen)
    flag = torch.tensor(int(right))
    dist.all_reduce(flag, op=dist.ReduceOp.MIN)
    if not flag or not (seen > 0).all():
        wrong.append([name, list(whole.shape), str(getattr(value, "placements", ""))])
def filled(module):
    wholes = {name: torch.arange(each.numel(), dtype=torch.float32).reshape(each.shape) for name, each in module.named_parameters()}
    with torch.no_grad():
        for name, each in module.named_parameters():
            each.copy_(wholes[name])
    return wholes
def end():
    tell([counts, wrong])
    dist.destroy_process_group()
"""

# Every mesh of the ranks with one or two dimensions, and some with three.
ANY_PLACEMENT = """
chance = random.Random(5)
meshes = [(size,)] + [(n, size // n) for n in range(1, size + 1) if size % n == 0] + [(n, 2, size // n // 2) for n in (1, 2) if size % (2 * n) == 0]
for shape in meshes:
    mesh = init_device_mesh("cpu", shape)
    for _ in range(40):
        extents = tuple(chance.choice([0, 1, 2, 3, 5, 7, 8, 10, 13, 16]) for _ in range(chance.choice([0, 1, 2, 3])))
        whole = torch.arange(torch.tensor(extents).prod().item() if extents else 1, dtype=torch.int64).reshape(extents)
        placements = [chance.choice([Replicate(), *map(Shard, range(len(extents)))]) for _ in shape]
        check("distribute_tensor", distribute_tensor(whole, mesh, placements), whole)
end()
"""

# FSDP2 over tensor parallelism, with extents that the ranks do not divide; HSDP; FSDP1; fused matrices.
FRAMEWORKS = """
for rows, columns in [(8, 8), (9, 7), (10, 6), (13, 5), (14, 10), (26, 3), (7, 10), (1, 2)]:
    for shape in [(n, size // n) for n in range(1, size + 1) if size % n == 0]:
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("outer", "inner"))
        model = nn.ModuleDict({name: nn.Linear(columns, rows) for name in ("column", "row", "plain")})
        wholes = filled(model)
        parallelize_module(model, mesh["inner"], {"column": ColwiseParallel(), "row": RowwiseParallel()})
        for each in model.values():
            fully_shard(each, mesh=mesh["outer"])
        for name, each in model.state_dict().items():
            check(f"FSDP2 over TP {shape} {name}", each, wholes[name])
        model = nn.Linear(columns, rows)
        wholes = filled(model)
        fully_shard(model, mesh=mesh)
        for name, each in model.state_dict().items():
            check(f"HSDP {shape} {name}", each, wholes[name])
mesh = init_device_mesh("cpu", (size,))
for rows, factor in itertools.product((size * 6, size * 12), (2, 3)):
    whole = torch.arange(rows * 3).reshape(rows, 3)
    local = torch.cat([part.chunk(size)[rank] for part in whole.chunk(factor)])
    fused = DTensor.from_local(local, mesh, [_StridedShard(0, split_factor=factor)], run_check=False, shape=whole.shape, stride=whole.stride())
    check("fused", fused, whole)
end()
"""

VALUES = """
mesh = init_device_mesh("cpu", (size,))
refused = []
def refuse(value):
    refused.append(failure(lambda: parts_of({"w": value})))
refuse(DTensor.from_local(torch.ones(2), mesh, [Partial()]))
refuse(torch.ones(2, device="meta"))
with torch.device("meta"):
    model = nn.Linear(8, 8)
fully_shard(model)
refuse(model.weight)
refuse(DTensor.from_local(torch.ones(5, 1), mesh, [_StridedShard(0, split_factor=3)], run_check=False, shape=(10, 1), stride=(1, 1)))
class Wrapper(torch.Tensor):
    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        return args[0]
refuse(Wrapper(torch.ones(2)))
import torch.distributed._functional_collectives as collectives
running = collectives.all_reduce(torch.full((2,), rank + 1.0), "sum", mesh)
summed = [tensor.numpy().tolist() for _, tensor, _, _ in parts_of({"tensor": running, "dtensor": DTensor.from_local(running, mesh, [Replicate()], run_check=False)})]
fp8 = torch.arange(6).to(torch.float8_e4m3fn).reshape(2, 3)
fp4 = torch.arange(8, dtype=torch.uint8).reshape(4, 2).view(torch.float4_e2m1fn_x2)
kept = [[name, each.dtype, each.shape, whole, offset] for name, each, whole, offset in parts_of({
    "fp8": fp8, "fp4": muster.Part(fp4, (8, 2), (4, 0)), "grad": nn.Parameter(torch.ones(2))[1:] * 1, "column": torch.ones(3, 4)[:, 1:2]})]
from torch.distributed.fsdp import StateDictType
dist.barrier()
model = nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 7))
wholes = filled(model)
sharded = FullyShardedDataParallel(model, device_id=torch.device("cpu"))
with FullyShardedDataParallel.state_dict_type(sharded, StateDictType.SHARDED_STATE_DICT):
    for name, each in sharded.state_dict().items():
        check(f"FSDP1 {type(each).__name__} {name}", each, wholes[name])
tell([refused, summed, kept, counts, wrong])
dist.destroy_process_group()
"""


def run_torch(source, size, tmp_path):
    return run(START + source, size, longest=600, environment={"TEST_STORE": str(tmp_path / "store"), "GLOO_SOCKET_IFNAME": "lo"})


SIZES = [2, 4, 8] if os.environ.get("MUSTER_TEST_ALL") else [2]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("source, least, least_strided", [(ANY_PLACEMENT, 80, 0), (FRAMEWORKS, 60, 20)], ids=["placements", "frameworks"])
def test_parts_are_the_elements_of_their_positions(size, source, least, least_strided, tmp_path):
    for (checked, strided), wrong in run_torch(source, size, tmp_path):
        assert wrong == []
        assert checked >= least and strided >= least_strided


def test_values_of_torch(tmp_path):
    for refused, summed, kept, (checked, _), wrong in run_torch(VALUES, 2, tmp_path):
        assert wrong == [] and checked == 4 and summed == [[3.0, 3.0]] * 2
        for (kind, message), words in zip(refused, ("partial sums", "on the meta device", "on the meta device", "pieces of different sizes", "Wrapper has no memory of its own"), strict=True):
            assert kind == "InvalidArgumentError" and message.startswith('tensor "w": ') and words in message
        assert kept == [
            ["fp8", "F8_E4M3", [2, 3], [], []],
            ["fp4", "F4", [4, 4], [8, 4], [4, 0]],
            ["grad", "F32", [1], [], []],
            ["column", "F32", [3, 1], [], []],
        ]


def test_shards_of_megatron_core():
    mapping = pytest.importorskip("megatron.core.dist_checkpointing.mapping", reason="there is no Megatron-Core here")
    whole = torch.arange(4 * 4 * 6).reshape(4, 4, 6)
    for layer, row, column in ((1, 0, 1), (3, 1, 0)):
        local = whole[layer, 2 * row : 2 * row + 2, 3 * column : 3 * column + 3]
        value = mapping.ShardedTensor.from_rank_offsets("layers.w", local, (0, layer, 4), (1, row, 2), (2, column, 2), prepend_axis_num=1)
        [(name, tensor, shape, offset)] = parts_of({"layers.0.w": value})
        assert (name, shape, offset) == ("layers.w", whole.shape, (layer, 2 * row, 3 * column))
        assert torch.equal(tensor.torch(copy=True)[0], local)
    factory = mapping.ShardedTensorFactory("layers.w", local, None, None)
    for refused in (value.without_data(), factory, mapping.ShardedObject("layers.extra", b"", (1,), (0,))):
        with pytest.raises(muster.InvalidArgumentError):
            parts_of({"w": refused})
