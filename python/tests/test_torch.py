# SPDX-License-Identifier: Apache-2.0
"""The backend of torch.distributed. In the long form (MUSTER_TEST_ALL=1) also training, and PyTorch's own tests."""

import os
import pathlib
import re
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch", reason="there is no PyTorch here")
VERSION = tuple(int(number) for number in torch.__version__.split("+")[0].split(".")[:2])
if VERSION < (2, 14):
    pytest.skip(f"PyTorch {torch.__version__}: the backend needs 2.14", allow_module_level=True)

import muster
from ranks import Ranks

long_form = pytest.mark.skipif(not os.environ.get("MUSTER_TEST_ALL"), reason="in the long form: MUSTER_TEST_ALL=1")

START = """
import datetime, functools, operator, threading
import torch, torch.distributed as dist
import muster.torch
muster.torch.register()
torch.set_num_threads(1)
def start(name="muster", seconds=20):
    store = dist.FileStore(os.environ["TEST_STORE"], size)
    dist.init_process_group(name, store=store, rank=rank, world_size=size, timeout=datetime.timedelta(seconds=seconds))
def caught(call):
    try:
        call()
    except Exception as error:
        cause = error.__cause__
        return [isinstance(error, RuntimeError), str(error), getattr(cause, "rank", None), getattr(cause, "pid", None)]
"""

# Calls that gloo and muster both support. Their results are compared.
EVERYTHING = """
op = dist.ReduceOp
def everything(pg, add, any_source=True):
    def values(*shape, dtype=torch.float32):
        return (torch.arange(functools.reduce(operator.mul, shape, 1)) % 7 + rank + 1).to(dtype).reshape(shape)
    for dtype in (torch.float32, torch.float64, torch.int64, torch.int32, torch.uint8):
        for each in (op.SUM, op.PRODUCT, op.MIN, op.MAX):
            t = values(5, 3, dtype=dtype)
            dist.all_reduce(t, each, group=pg)
            add(t)
    for each in (op.BAND, op.BOR, op.BXOR):
        t = values(9, dtype=torch.int32)
        dist.all_reduce(t, each, group=pg)
        add(t)
    for dtype in (torch.float16, torch.bfloat16):
        t = values(100, dtype=dtype)
        dist.all_reduce(t, group=pg)
        add(t)
    t = values(4, 6).t()
    dist.all_reduce(t, group=pg)
    add(t)
    t = torch.sparse_coo_tensor(torch.arange(rank + 1).reshape(1, -1), torch.ones(rank + 1), [size])
    dist.all_reduce(t, group=pg)
    add(t.to_dense())
    t = values(3)
    dist.reduce(t, 1, group=pg)
    add(t if rank == 1 else t * 0)
    for dtype in (torch.complex64, torch.complex128, torch.bool, torch.float32):
        t = values(2, 2, dtype=dtype)
        dist.broadcast(t, 2, group=pg)
        add(t)
    t = torch.tensor(rank + 0.5)
    outs = [torch.zeros(()) for _ in range(size)]
    dist.all_gather(outs, t, group=pg)
    add(*outs)
    out = torch.zeros(size * 2, 3)
    dist.all_gather_into_tensor(out, values(2, 3), group=pg)
    add(out)
    objects = [None] * size
    dist.all_gather_object(objects, {"rank": rank, "x": "y" * rank}, group=pg)
    add(objects)
    objects = [{"from": rank}, None]
    dist.broadcast_object_list(objects, 1, group=pg)
    add(objects)
    outs = [torch.zeros(2) for _ in range(size)] if rank == 1 else None
    dist.gather(values(2), outs, 1, group=pg)
    add(*(outs or []))
    out = torch.zeros(2)
    dist.scatter(out, [torch.full((2,), float(i)) for i in range(size)] if rank == 0 else None, 0, group=pg)
    add(out)
    out = torch.zeros(2)
    dist.reduce_scatter(out, [values(2) * i for i in range(size)], group=pg)
    add(out)
    out = torch.zeros(2, 2)
    dist.reduce_scatter_tensor(out, values(2 * size, 2), group=pg)
    add(out)
    out = torch.zeros(size, 2)
    dist.all_to_all_single(out, values(size, 2), group=pg)
    add(out)
    # Rank r gives rank i r + i rows.
    out = torch.zeros(sum(rank + i for i in range(size)), 2)
    sizes = [rank + i for i in range(size)]
    dist.all_to_all_single(out, values(sum(sizes), 2), sizes, sizes, group=pg)
    add(out)
    dist.barrier(group=pg)
    pair = [values(3), values(4)]
    for work in [dist.all_reduce(t, async_op=True, group=pg) for t in pair]:
        work.wait()
        add(*work.get_future().value())
    # Sends to the next rank and receives from the previous one, large and small, by tag.
    after, before = (rank + 1) % size, (rank - 1) % size
    for n in (3, 100_000):
        outs = [torch.zeros(n), torch.zeros(n)]
        for work in dist.batch_isend_irecv([
            dist.P2POp(dist.isend, values(n), after, pg, 1), dist.P2POp(dist.isend, values(n) * 2, after, pg, 2),
            dist.P2POp(dist.irecv, outs[1], before, pg, 2), dist.P2POp(dist.irecv, outs[0], before, pg, 1),
        ]):
            work.wait()
        add(*outs)
    if not any_source:
        return
    if rank == 0:
        senders = []
        for _ in range(size - 1):
            out = torch.zeros(2)
            senders.append(dist.recv(out, group=pg))
        add(sorted(senders))
    else:
        dist.send(values(2), 0, group=pg)
"""


def torch_ranks(source, tmp_path, size=2):
    return Ranks(START + source, size, environment={"TEST_STORE": str(tmp_path / "store"), "GLOO_SOCKET_IFNAME": "lo"})


def test_tensors_without_capsules():
    t = torch.arange(6.0).reshape(2, 3)
    for given in (t, t.t(), t[:, 1:], torch.tensor(2), t.to(torch.bfloat16), torch.nn.Parameter(t), t.clone().requires_grad_()):
        seen = muster.as_tensor(given)
        assert torch.equal(seen.torch(), given.detach()) and seen.torch().data_ptr() == given.data_ptr()
    # Half a byte per element: torch counts pairs.
    pairs = torch.arange(12, dtype=torch.uint8).reshape(3, 4).view(torch.float4_e2m1fn_x2)
    seen = muster.as_tensor(pairs)
    assert (seen.dtype, seen.nbytes, seen.torch().data_ptr()) == ("F4", 12, pairs.data_ptr())
    assert torch.equal(muster.as_tensor(seen.torch().view(torch.float4_e2m1fn_x2)).torch(), pairs.view(torch.uint8))
    # A view whose values differ from its memory.
    z = torch.tensor([1 + 2j])
    assert muster.as_tensor(z.conj()).torch().tolist() == [1 - 2j] and muster.as_tensor(z.conj().imag).torch().tolist() == [-2]
    for wrong in (torch.ones(2, device="meta"), t.to_sparse()):
        with pytest.raises(Exception) as raised:
            muster.as_tensor(wrong)
        assert "DLConvertor" not in str(raised.value)


def test_every_call_does_what_gloo_does(tmp_path):
    source = EVERYTHING + """
start()
theirs, ours, device = [], [], []
everything(dist.new_group(backend="gloo"), lambda *results: theirs.extend(results))
everything(dist.group.WORLD, lambda *results: ours.extend(results))
everything(dist.new_group(backend="cpu:muster_cpu"), lambda *results: device.extend(results), any_source=False)
same = lambda a, b: torch.equal(a, b) if torch.is_tensor(a) else a == b
differences = [i for other in (ours, device) for i, (a, b) in enumerate(zip(other, theirs)) if not same(a, b)]
part = dist.new_group([0, 2])
if rank != 1:
    t = torch.ones(2) * (rank + 1)
    dist.all_reduce(t, op.AVG, group=part)
    if t.tolist() != [2.0, 2.0]:
        differences.append("AVG")
# A callback, while other work is in progress.
works = [dist.all_reduce(torch.ones(2), async_op=True) for _ in range(4)]
after = works[0].get_future().then(lambda _: len(works))
for work in works:
    work.wait()
after.wait()
# Two threads, each with messages that the messages of the other one depend on.
def converse(number):
    t = torch.full((50_000,), float(rank))
    if rank == number % 2:
        dist.send(t, 1 - rank, tag=number)
        dist.recv(t, 1 - rank, tag=number + 10)
    elif rank < 2:
        dist.recv(t, 1 - rank, tag=number)
        dist.send(t, 1 - rank, tag=number + 10)
threads = [threading.Thread(target=converse, args=(number,)) for number in (0, 1)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
out = torch.zeros(size, 2)
dist.all_gather_into_tensor(out, torch.full((2,), float(rank)))
if out.tolist() != [[0, 0], [1, 1], [2, 2]]:
    differences.append("stacked")
tell([len(theirs) == len(ours) == len(device) + (rank == 0), len(theirs) > 40, differences])
dist.destroy_process_group()
"""
    assert torch_ranks(source, tmp_path, 3).told() == [[[True, True, []]]] * 3


def test_failures(tmp_path):
    source = """
start(seconds=10)
told = {}
# A disagreement between ranks is an error on all ranks, and the group remains usable.
told["mismatch"] = caught(lambda: dist.all_reduce(torch.ones(2 + rank)))
dist.barrier()
# Only one rank calls: the deadline passes.
late = dist.new_group(timeout=datetime.timedelta(seconds=0.5))
if rank == 0:
    told["late"] = caught(lambda: dist.barrier(late))
    pending = dist.irecv(torch.ones(2), 1, group=late)
    told["receive"] = caught(pending.wait)
    work = dist.irecv(torch.ones(2), 1)
    told["brief"] = caught(lambda: work.wait(datetime.timedelta(seconds=0.1)))
dist.barrier()
if rank == 1:
    dist.send(torch.ones(2), 0)
if rank == 0:
    work.wait()
# A forked child cannot use the groups, and exits normally.
child = os.fork()
if child == 0:
    failures = [caught(lambda: dist.all_reduce(torch.ones(2))), caught(lambda: dist.all_reduce(torch.ones(2), async_op=True).wait()),
                caught(lambda: dist.send(torch.ones(2), (rank + 1) % size))]
    sys.exit(0 if all(failures) else 1)
told["child"] = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
dist.barrier()
pids = [None] * size
dist.all_gather_object(pids, os.getpid())
if rank == 2:
    os.kill(os.getpid(), signal.SIGKILL)
store = dist.distributed_c10d._get_default_store()
if rank == 1:
    store.wait(["rank 0 knows"])  # this rank begins when all others have failed
begun = time.monotonic()
work = dist.all_reduce(torch.ones(2), async_op=True)
message = dist.irecv(torch.ones(2), 2)
told["killed"] = caught(work.wait)[2:] == [2, pids[2]] and "rank 2" in caught(dist.barrier)[1]
told["message"] = caught(message.wait)
store.set("rank 0 knows", "")
told["in time"] = time.monotonic() - begun < 8
tell(told)
"""
    outcomes = torch_ranks(source, tmp_path, 3).told([0, 0, -9])
    for told in (outcomes[0][0], outcomes[1][0]):
        assert told["mismatch"][0] and "rank" in told["mismatch"][1]
        assert (told["child"], told["killed"], told["in time"]) == (0, True, True), told
        assert told["message"][2] == 2, told
    told = outcomes[0][0]
    assert told["late"][0] and " Timed out waiting 500ms: " in told["late"][1] and "rank 1" in told["late"][1]
    assert "Timed out" in told["receive"][1] and "recv from rank 1" in told["receive"][1]
    assert "Timed out waiting 100ms" in told["brief"][1]


@pytest.mark.skipif(VERSION < (2, 15), reason="PyTorch before 2.15 refuses split_group() of groups on the CPU")
@pytest.mark.parametrize("name", ["muster", "cpu:muster_cpu"])
def test_parts(name, tmp_path):
    source = f"""
start({name!r})
part = dist.split_group(split_ranks=[[2, 0], [1]], timeout=datetime.timedelta(seconds=10))
t = torch.ones(2) * (rank + 1)
dist.all_reduce(t, group=part)
told = [part.rank(), dist.get_process_group_ranks(part), t.tolist()]
if rank == 2:
    dist.send(torch.ones(2) * 7, 0, group=part)
if rank == 0:
    dist.recv(t, 2, group=part)
alone = []
failure = caught(lambda: alone.append(dist.split_group(split_ranks=[[0, 1]]) is dist.GroupMember.NON_GROUP_MEMBER))
dist.barrier()
tell([*told, t.tolist(), alone or "new_group" in failure[1]])
dist.destroy_process_group()
"""
    # With several backends PyTorch cannot be informed that a rank is in no part.
    in_none = [True] if name == "muster" else True
    assert [told[0] for told in torch_ranks(source, tmp_path, 3).told()] == [
        [1, [2, 0], [4.0, 4.0], [7.0, 7.0], [False]],
        [0, [1], [2.0, 2.0], [2.0, 2.0], [False]],
        [0, [2, 0], [4.0, 4.0], [4.0, 4.0], in_none],
    ]


def test_sums_with_factors(tmp_path):
    source = """
start()
told = []
op = dist.ReduceOp
for group in (dist.group.WORLD, dist.new_group(backend="cpu:muster_cpu")):
    sums = [torch.ones(2), torch.ones(2, dtype=torch.bfloat16), torch.ones(3)]
    dist.all_reduce(sums[0], op.PREMUL_SUM(rank + 2.0), group=group)
    dist.reduce(sums[1], 1, op.PREMUL_SUM(torch.tensor([0.5])), group=group)
    out = torch.zeros(1)
    dist.reduce_scatter_tensor(out, sums[2], op.PREMUL_SUM(3.0), group=group)
    told.append([sums[0].tolist(), sums[1].tolist(), sums[2].tolist(), out.tolist()])
told.append("PREMUL_SUM" in caught(lambda: dist.all_reduce(torch.ones(2, dtype=torch.int32), op.PREMUL_SUM(2.0)))[1])
tell(told)
dist.destroy_process_group()
"""
    sums = lambda root: [[9.0, 9.0], [1.5, 1.5] if root else [1.0, 1.0], [1.0, 1.0, 1.0], [9.0]]
    told = [told[0] for told in torch_ranks(source, tmp_path, 3).told()]
    assert told == [[sums(rank == 1), sums(rank == 1), True] for rank in range(3)]


def test_a_destroyed_group_is_let_go(tmp_path):
    source = """
import gc, weakref
told = []
for name in ("gloo", "muster", "cpu:muster_cpu"):
    start(name)
    os.environ["TEST_STORE"] += "-next"
    groups = [weakref.ref(dist.group.WORLD), weakref.ref(dist.new_group())]
    assert muster.world() is muster.from_process_group(groups[0]())
    with muster.get_configs_parallel(rank, None, groups[1]()) as configs:
        told.append(list(configs))
    dist.all_reduce(torch.ones(2))
    dist.destroy_process_group()
    gc.collect()
    told.append([*[group() is None for group in groups], len(muster._groups._met)])
tell(told)
"""
    for rank, told in enumerate(torch_ranks(source, tmp_path).told()):
        configs, gone = told[0][0:6:2], told[0][1:6:2]
        assert gone == [[True, True, 0]] * 3 and configs == [[[0, 1], []][rank]] * 3, told


def test_an_end_with_work_under_way(tmp_path):
    source = """
start(seconds=30)
if rank == 0:
    works = [dist.all_reduce(torch.ones(2), async_op=True), dist.irecv(torch.ones(2), 1)]
else:
    begun = time.monotonic()
    failures = [caught(lambda: dist.recv(torch.ones(2), 0))]
    failures += [caught(lambda: (dist.all_reduce(torch.ones(2)), dist.barrier()))]
    tell([[failure[2] for failure in failures], time.monotonic() - begun < 20])
"""
    assert torch_ranks(source, tmp_path).told()[1] == [[[0, 0], True]]


def test_found_by_its_entry_point(tmp_path):
    tomllib = pytest.importorskip("tomllib")
    project = tomllib.loads((pathlib.Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    (group, names), = project["entry-points"].items()
    folder = tmp_path / "muster-0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: muster\nVersion: 0\n")
    (folder / "entry_points.txt").write_text("\n".join([f"[{group}]", *(f"{name} = {value}" for name, value in names.items())]))
    source = """
import sys, torch, torch.distributed as dist
for name in ("muster", "cpu:muster_cpu"):
    dist.init_process_group(name, store=dist.HashStore(), rank=0, world_size=1)
    t = torch.ones(2)
    dist.all_reduce(t)
    dist.destroy_process_group()
    assert t.tolist() == [1, 1] and "muster.torch" in sys.modules
try:
    dist.init_process_group("cpu:muster,cuda:gloo", store=dist.HashStore(), rank=0, world_size=1)
    sys.exit("no error")
except ValueError as error:
    assert "cpu:muster_cpu" in str(error)
"""
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    subprocess.run([sys.executable, "-c", source], check=True, env={**os.environ, "PYTHONPATH": path}, timeout=60)


TRAINING = """
import torch.nn as nn, torch.nn.functional as F
import torch.distributed._functional_collectives as functional
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
def model():
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(24, 48), nn.LayerNorm(48), nn.GELU(), nn.Linear(48, 48), nn.GELU(), nn.Linear(48, 5))
def trained(net, wrap):
    net = wrap(net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    torch.manual_seed(100 + rank)
    losses = []
    for _ in range(8):
        optimizer.zero_grad()
        loss = F.cross_entropy(net(torch.randn(16, 24)), torch.randint(5, (16,)))
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses, net
def whole(parameter):
    return parameter.full_tensor().detach().clone() if isinstance(parameter, DTensor) else parameter.detach().clone()
def sharded(net, mesh):
    for layer in net:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    return fully_shard(net, mesh=mesh)
def everything_trained():
    mesh = init_device_mesh("cpu", (size,))
    found = {}
    for name, wrap in (
        ("DDP", lambda net: DistributedDataParallel(net, bucket_cap_mb=0.01)),
        ("FSDP1", lambda net: FullyShardedDataParallel(net, device_id=torch.device("cpu"))),
        ("FSDP2", lambda net: sharded(net, mesh)),
    ):
        losses, net = trained(model(), wrap)
        found[name] = losses + [whole(each) for each in net.parameters()]
    torch.manual_seed(3)
    a, b = torch.randn(6, 8), torch.randn(8, 4)
    c = distribute_tensor(a, mesh, [Shard(1)]) @ distribute_tensor(b, mesh, [Shard(0)])
    found["DTensor"] = [c.redistribute(mesh, [Replicate()]).to_local(), c.redistribute(mesh, [Shard(0)]).full_tensor()]
    t = torch.arange(8.0) + rank
    pg = dist.group.WORLD
    found["functional"] = [
        functional.all_reduce(t, "sum", pg) + 0,
        functional.all_gather_tensor(t, 0, pg) + 0,
        functional.reduce_scatter_tensor(t, "sum", 0, pg) + 0,
        functional.all_to_all_single(t, None, None, pg) + 0,
        functional.broadcast(t, 1, pg) + 0,
        *[each + 0 for each in functional.all_reduce_coalesced([t, t * 2], "sum", pg)],
        *[each + 0 for each in functional.all_gather_into_tensor_coalesced([t, t * 2], pg)],
    ]
    return found
"""


@long_form
@pytest.mark.parametrize("name", ["muster", "cpu:muster_cpu"])
def test_training_is_as_over_gloo(tmp_path, name):
    source = TRAINING + f"""
start("gloo")
theirs = everything_trained()
dist.destroy_process_group()
os.environ["TEST_STORE"] += "-2"
start("{name}")
ours = everything_trained()
tell([[name for name in theirs if len(ours[name]) != len(theirs[name]) or not all(map(torch.equal, ours[name], theirs[name]))],
      [len(each) for each in ours.values()]])
dist.destroy_process_group()
"""
    for told in torch_ranks(source, tmp_path).told():
        assert told[0][0] == [], f"{told[0][0]} differ from gloo"
        assert min(told[0][1]) > 0


@long_form
def test_two_hosts(tmp_path):
    """Mounts in namespaces, which needs root."""
    hosts = pathlib.Path(__file__).parents[2] / "tests/mpi/hosts.sh"
    script = tmp_path / "rank.py"
    script.write_text("""
import datetime, sys, torch, torch.distributed as dist, muster.torch
muster.torch.register()
rank = int(sys.argv[1])
dist.init_process_group("muster", init_method="tcp://h1:29877", rank=rank, world_size=4, timeout=datetime.timedelta(seconds=30))
t = torch.full((100_000,), float(rank))
dist.all_reduce(t)
part = dist.new_group([1, 3])
if rank == 1:
    dist.send(t, 3, group=part)
elif rank == 3:
    dist.recv(t, 1, group=part)
works = [dist.all_reduce(torch.ones(5), async_op=True) for _ in range(3)]
for work in works:
    work.wait()
dist.barrier()
assert t.tolist() == [6.0] * 100_000
print("well", flush=True)
dist.destroy_process_group()
""")
    one = f"{hosts} on h$((rank / 2 + 1)) {sys.executable} {script} $rank & ranks+=($!)"
    each = f'ranks=(); for rank in 0 1 2 3; do {one}; done; for each in "${{ranks[@]}}"; do wait "$each"; done'
    ended = subprocess.run([hosts, "with", "2", "bash", "-ec", each], capture_output=True, text=True, timeout=120)
    if ended.returncode == 77:
        pytest.skip(ended.stderr.strip())
    assert (ended.returncode, ended.stdout.count("well")) == (0, 4), ended.stderr


@long_form
@pytest.mark.parametrize("served_as", ["gloo", "muster"])
def test_pytorchs_own_tests(served_as):
    pytest.importorskip("expecttest")
    program = os.path.join(os.path.dirname(__file__), "torch_conformance.py")
    ended = subprocess.run([sys.executable, program, served_as], capture_output=True, text=True, timeout=1500)
    failed = set(re.findall(r"^(?:FAIL|ERROR): (test_\w+)", ended.stderr, re.MULTILINE))
    # The test requires the name "gloo", for which torch's C++ code then needs the class of gloo.
    assert failed == ({"test_ddp_logging_data_cpu"} if served_as == "gloo" else set()), ended.stderr[-4000:]
    ran, skipped = re.search(r"^Ran (\d+) tests", ended.stderr, re.MULTILINE), re.search(r"skipped=(\d+)", ended.stderr)
    assert int(ran[1]) - int(skipped[1]) >= (91 if served_as == "gloo" else 68)
