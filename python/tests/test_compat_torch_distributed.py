# SPDX-License-Identifier: Apache-2.0
"""torch.distributed of PyTorch 0.3 and 0.4, on Muster. Tests of defects of the original are named after them."""

import os
import pathlib
import re
import socket
import subprocess
import sys
import textwrap

import pytest

pytest.importorskip("torch", reason="there is no PyTorch here")

from ranks import Ranks, run

long_form = pytest.mark.skipif(not os.environ.get("MUSTER_TEST_ALL"), reason="in the long form: MUSTER_TEST_ALL=1")
EXAMPLE = pathlib.Path(__file__).parents[2] / "examples" / "early_distributed.py"

START = """
import torch
torch.set_num_threads(1)
import muster.compat.torch_distributed as dist
muster.set_world(group)
def ones(value=1.0, n=2):
    return torch.full((n,), float(value))
def start():
    dist.init_process_group("shm")
"""


def run_started(source, size=3):
    return run(START + "start()\n" + textwrap.dedent(source), size)


# Calls in place on the tensor t, which is [rank + 1, rank + 1], and the values of t on the ranks 0, 1 and 2 afterwards.
IN_PLACE = {
    "broadcast": ("dist.broadcast(t, 1)", [2, 2, 2]),
    "broadcast in a group": ("dist.broadcast(t, 2, later) if rank else None", [1, 3, 3]),
    "broadcast by keyword": ("dist.broadcast(tensor=t, src=0, group=dist.group.WORLD)", [1, 1, 1]),
    "all_reduce": ("dist.all_reduce(t)", [6, 6, 6]),
    "all_reduce PRODUCT": ("dist.all_reduce(t, dist.reduce_op.PRODUCT)", [6, 6, 6]),
    "all_reduce MAX": ("dist.all_reduce(t, op=dist.reduce_op.MAX)", [3, 3, 3]),
    "all_reduce MIN": ("dist.all_reduce(t, op=dist.reduce_op.MIN)", [1, 1, 1]),
    "all_reduce SUM in a group": ("dist.all_reduce(t, dist.reduce_op.SUM, later) if rank else None", [1, 5, 5]),
    "reduce": ("dist.reduce(t, 2)", [1, 2, 6]),
    "reduce in a group": ("dist.reduce(t, 2, dist.reduce_op.PRODUCT, later) if rank else None", [1, 2, 6]),
    "gaps": ("dist.all_reduce(torch.stack([t, t], 1)[:, 0]); dist.all_reduce(t.expand(1, 2).t())", [6, 6, 6]),
    "a parameter": ("p = torch.nn.Parameter(t.clone()); dist.all_reduce(p); t.copy_(p.detach())", [6, 6, 6]),
    "scatter": ("dist.scatter(t, src=1, scatter_list=[ones(i) for i in (7, 8, 9)] if rank == 1 else None)", [7, 8, 9]),
    "scatter with an empty list": ("dist.scatter(t, src=1, scatter_list=[ones(i) for i in (7, 8, 9)] if rank == 1 else [])", [7, 8, 9]),
    "scatter in a group": ("dist.scatter(t, src=2, group=later, **({'scatter_list': [ones(4), ones(5)]} if rank == 2 else {})) if rank else None", [1, 5, 4]),
    "send and recv": ("dist.send(t, 1) if rank == 0 else dist.recv(t, 0) if rank == 1 else None", [1, 1, 3]),
    "isend and irecv": ("(dist.isend(t, 2) if rank == 0 else dist.irecv(t, 0)).wait() if rank != 1 else None", [1, 2, 1]),
    "irecv with gaps": ("(dist.isend(t, 2) if rank == 0 else dist.irecv(t.expand(1, 2).t(), 0)).wait() if rank != 1 else None", [1, 2, 1]),
    "barrier": ("dist.barrier(); dist.barrier(later) if rank else None", [1, 2, 3]),
    "_clear_group_cache": ("dist._clear_group_cache(); dist._clear_group_cache(dist.group.WORLD)", [1, 2, 3]),
    "_register_stream": ("dist._register_stream(None)", [1, 2, 3]),
}


def test_calls_in_place():
    told = run_started(
        f"""
        later = dist.new_group([2, 1])
        everyone = dist.new_group()
        told = []
        for source in {[source for source, _ in IN_PLACE.values()]!r}:
            t = ones(rank + 1)
            exec(source)
            told.append(t.tolist())
        t = ones(rank)
        dist.all_reduce(t, group=everyone)
        tell([told, t.tolist(), dist.get_rank(), dist.get_world_size(), dist.is_available(), dist.is_initialized()])
        """
    )
    for rank, (values, of_everyone, *rest) in enumerate(told):
        for (name, (_, wanted)), found in zip(IN_PLACE.items(), values):
            assert found == [wanted[rank]] * 2, (name, rank)
        assert of_everyone == [3.0, 3.0]
        assert rest == [rank, 3, True, True]


def test_lists_of_tensors():
    told = run_started(
        """
        later = dist.new_group([2, 1])
        def zeros(n=3):
            return [torch.zeros(2) for _ in range(n)]
        everywhere = zeros()
        dist.all_gather(everywhere, ones(rank))
        gathered = zeros() if rank == 2 else None
        dist.gather(ones(rank), dst=2, gather_list=gathered)
        of_group = zeros(2) if rank == 1 else []
        columns = torch.zeros(2, 2)
        if rank:
            # A root may omit its own rank.
            dist.gather(ones(rank), group=later, **({"gather_list": of_group} if rank == 1 else {"dst": 1}))
            dist.all_gather(list(columns.t()), ones(rank), later)
        tell([[t.tolist() for t in each or []] for each in (everywhere, gathered, of_group)] + [columns.tolist()])
        """
    )
    for rank, (everywhere, gathered, of_group, columns) in enumerate(told):
        assert everywhere == [[0, 0], [1, 1], [2, 2]]
        assert gathered == (everywhere if rank == 2 else [])
        assert of_group == ([[2, 2], [1, 1]] if rank == 1 else [])
        assert columns == ([[2, 1], [2, 1]] if rank else [[0, 0], [0, 0]])


def test_requests_and_receiving_from_any_rank():
    told = run_started(
        """
        if rank == 0:
            t, u = ones(0), ones(0)
            request = dist.irecv(u, 2)
            assert isinstance(request, dist._DistributedRequest)
            told = [request.is_completed()]
            dist.send(t, 2)
            request.wait()
            # The second wait of a message blocks in a later version of the original.
            request.wait()
            told += [u.tolist(), request.is_completed(), sorted(dist.recv(t) for _ in range(2))]
        else:
            if rank == 2:
                dist.recv(ones(), 0)
                dist.isend(ones(9), 0).wait()
            request = dist.isend(ones(rank), 0)
            request.wait()
            request.wait()
            told = request.is_completed()
        dist.barrier()
        tell(told)
        """
    )
    assert told == [[False, [9.0, 9.0], True, [1, 2]], True, True]


# Calls with a wrong argument on rank 1, and a part of the message. All ranks of the call raise it.
WRONG = {
    "tensor": ("dist.all_reduce(bad('x', t))", "tensor: str is not a torch tensor"),
    "dtype without arithmetic": ("dist.all_reduce(t.to(torch.complex64))", "complex64 cannot be reduced"),
    "op": ("dist.all_reduce(t, bad('mean', dist.reduce_op.SUM))", "mean"),
    "src": ("dist.broadcast(t, bad(3, 0))", "src: rank 3 is not in this group"),
    "negative src": ("dist.broadcast(t, bad(-1, 0))", "src: rank -1 is not in this group"),
    "src of text": ("dist.broadcast(t, bad('0', 0))", "src: str is not an int"),
    "dst": ("dist.reduce(t, bad(0.5, 0))", "dst: float is not an int"),
    "tensor_list": ("dist.all_gather(bad(t, [t, t]), t)", "tensor_list: Tensor is not a list"),
    "no gather_list on the root": ("dist.gather(t, dst=1)", "gather_list: missing on rank 1"),
    "a gather_list elsewhere": ("dist.gather(t, dst=0, gather_list=[t.clone(), t.clone()])", "gather_list: given on rank 1"),
    "no scatter_list on the root": ("dist.scatter(t, src=1)", "scatter_list: missing on rank 1"),
    "keyword": ("dist.gather(t, dst=0, gather_list=None if rank else [t.clone(), t.clone()], **bad({'tag': 1}, {}))", "tag: unexpected keyword"),
    "ranks": ("dist.new_group(bad('01', [0, 1]))", "ranks: str is not a list"),
}


def test_wrong_arguments_are_errors_on_all_ranks_and_the_group_remains_usable():
    told = run_started(
        f"""
        bad = lambda value, good: value if rank == 1 else good
        told = []
        for source in {[source for source, _ in WRONG.values()]!r}:
            t = ones(rank)
            told.append(failure(lambda: eval(source)))
            dist.all_reduce(t)
            assert t.tolist() == [1, 1], source
        only = dist.new_group([1])
        local = [failure(lambda: dist.send(ones(), 2)), failure(lambda: dist.isend(ones(), rank)),
                 failure(lambda: dist.irecv("x", 0)), failure(lambda: dist.recv(ones(), 0.5)),
                 failure(lambda: dist.recv(ones(), -1)), failure(lambda: dist.irecv(ones(), 2))]
        others = [failure(lambda: dist.barrier(only)), failure(lambda: dist.barrier(None))]
        tell([told, local, others])
        """,
        2,
    )
    for rank, (found, local, others) in enumerate(told):
        for (name, (_, words)), each in zip(WRONG.items(), found):
            assert each and each[0] == "InvalidArgumentError" and words in each[1], (name, each)
        assert [each and each[0] for each in local] == ["InvalidArgumentError"] * 6, local
        assert (others[0] is None) == (rank == 1) and others[1][0] == "InvalidArgumentError"
    assert "rank 0 is not in this group" in told[0][2][0][1]


def test_gather_without_dst_is_an_error_instead_of_a_hang():
    """In the original every rank is a root, and all wait for each other."""
    told = run_started(
        """
        lists = {"gather_list": [torch.zeros(2) for _ in range(2)]}
        tell([failure(lambda: dist.gather(ones())), failure(lambda: dist.scatter(ones())), failure(lambda: dist.gather(ones(), **lists))])
        dist.barrier()
        """,
        2,
    )
    for without_lists, scattered, with_lists in told:
        assert without_lists[0] == scattered[0] == "InvalidArgumentError"
        assert "dst: missing" in without_lists[1] and "src: missing" in scattered[1]
        assert with_lists[0] == "RankMismatchError"


def test_checks_are_exceptions_instead_of_asserts():
    """python -O removes the checks of the original."""
    source = """
import muster, muster.compat.torch_distributed as dist, torch
names = []
for call in (dist.get_rank, dist.get_world_size, dist.barrier, dist.new_group, lambda: dist.send(torch.ones(1), 0),
             lambda: dist._register_stream(None), dist._clear_group_cache, lambda: dist.init_process_group('shm', ranks=2),
             lambda: dist.init_process_group('bgp'), lambda: dist.init_process_group('shm', 'http://x'),
             lambda: dist.init_process_group('shm', rank='0'), lambda: dist.init_process_group(3)):
    try:
        call()
    except muster.InvalidArgumentError as error:
        names.append(str(error))
assert len(names) == 12, names
try:
    dist.init_process_group('nccl')
except muster.UnsupportedError:
    names.append('nccl')
assert names.pop() == 'nccl' and 'ranks: unexpected keyword argument' in names[7] and 'bgp' in names[8] and 'http' in names[9], names
assert not dist.is_initialized() and dist._backend == dist.dist_backend.UNDEFINED
dist.init_process_group('gloo')
assert dist.is_initialized() and dist._backend == dist.dist_backend.GLOO and dist.get_world_size() == 1
t = torch.ones(2)
dist.all_reduce(t)
assert t.tolist() == [1, 1]
"""
    subprocess.run([sys.executable, "-O", "-c", source], check=True, timeout=60, env={**os.environ, "MUSTER_STANDALONE": "1"})


def test_a_program_may_initialize_again():
    told = run(
        START
        + textwrap.dedent("""
        told = []
        for backend in ("shm", "tcp"):
            dist.init_process_group(backend=backend, world_size=size, rank=rank)
            told += [failure(lambda: dist.init_process_group("shm")), failure(lambda: dist.init_master_worker("shm"))]
            t = ones(rank)
            dist.all_reduce(t)
            told.append([dist._backend, t.tolist()])
            dist.destroy_process_group()
            dist.destroy_process_group()
            told.append(dist.is_initialized())
        told.append(failure(lambda: dist.init_process_group("shm", world_size=size + 1, rank=rank)))
        tell(told)
        """),
        2,
    )
    for each in told:
        assert [each[i][0] for i in (0, 1, 4, 5, 8)] == ["InvalidArgumentError"] * 5
        assert "already initialized" in each[0][1] and "world_size" in each[8][1]
        assert each[2:4] == [[-1, [1.0, 1.0]], False] and each[6:8] == [[0, [1.0, 1.0]], False]


METHODS = """
import os, sys, torch
import muster.compat.torch_distributed as dist
torch.set_num_threads(1)
rank, method = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("tcp", method, rank=rank, world_size=2, group_name="x", timeout=30)
t = torch.ones(2) * rank
dist.all_reduce(t)
assert t.tolist() == [1, 1] and dist._backend == dist.dist_backend.TCP
"""


@long_form
@pytest.mark.parametrize("method", ["file", "the address alone"])
def test_init_methods(method, tmp_path):
    """Programs that start their own processes set only MASTER_ADDR and MASTER_PORT, and pass the rank."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    hidden = ("RANK", "WORLD_SIZE", "MUSTER_STANDALONE")
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    given = f"file://{tmp_path}/meeting"
    if method != "file":
        environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        given = "env://"
    ranks = [subprocess.Popen([sys.executable, "-c", METHODS, str(rank), given], env=environment) for rank in range(2)]
    assert [rank.wait(timeout=180) for rank in ranks] == [0, 0]


def test_multigpu_functions_refuse_tensors_in_host_memory_on_all_ranks():
    told = run_started(
        """
        outs = [[torch.zeros(2) for _ in range(2)]]
        told = [failure(lambda: dist.broadcast_multigpu([ones()], 0)), failure(lambda: dist.all_reduce_multigpu([ones()])),
                failure(lambda: dist.reduce_multigpu([ones()], 0)), failure(lambda: dist.all_gather_multigpu(outs, [ones()])),
                failure(lambda: dist.all_reduce_multigpu([]))]
        dist.barrier()
        tell(told)
        """,
        2,
    )
    for each in told:
        assert [kind for kind, _ in each] == ["InvalidArgumentError"] * 5
        assert all("on cpu: pass tensors on GPUs" in words for _, words in each[:4]) and "the list is empty" in each[4][1]


@long_form
def test_multigpu_functions():
    """The order of all_gather_multigpu is [i][k * n + j], unlike in the text of the original."""
    told = run_started(
        """
        # Tensors in host memory stand for those of two GPUs.
        dist._on_devices = dist._tensors
        def pair(a=rank + 1, b=10 * (rank + 1)):
            return [ones(a), ones(b)]
        def values(tensors):
            return [t[0].item() for t in tensors]
        told = []
        tensors = pair()
        dist.broadcast_multigpu(tensors, 1)
        told.append(values(tensors))
        for op in (dist.reduce_op.SUM, dist.reduce_op.MAX, dist.reduce_op.MIN, dist.reduce_op.PRODUCT):
            tensors = pair()
            dist.all_reduce_multigpu(tensors, op, dist.group.WORLD)
            told.append(values(tensors))
        tensors = pair()
        dist.reduce_multigpu(tensors, 1)
        told.append(values(tensors))
        outs = [[torch.zeros(2) for _ in range(4)] for _ in range(2)]
        dist.all_gather_multigpu(outs, pair())
        told += [values(each) for each in outs]
        failures = [failure(lambda: dist.all_reduce_multigpu(pair()[: rank + 1])), failure(lambda: dist.all_gather_multigpu(outs, pair()[:1])),
                    failure(lambda: dist.all_reduce_multigpu(pair(), "mean"))]
        tell([told, failures])
        """,
        2,
    )
    for rank, (values, failures) in enumerate(told):
        assert values[0] == [2, 2]
        assert values[1:5] == [[33, 33], [20, 20], [1, 1], [400, 400]]
        assert values[5] == ([33, 20] if rank else [1, 10])
        assert values[6:] == [[1, 10, 2, 20]] * 2
        assert [kind for kind, _ in failures] == ["InvalidArgumentError"] * 3


def test_the_master_worker_mode():
    told = run(
        START
        + textwrap.dedent("""
        ranks = dist.init_master_worker("shm")
        told = [dist.is_initialized(), dist.get_rank(), dist.get_world_size(), ranks.is_master]
        told += [failure(lambda: dist.barrier())[0], failure(lambda: dist.init_process_group("shm"))[0]]
        if rank:
            told.append(failure(lambda: ranks.make(1, "F32", [2]))[0])
            ranks.serve()
        else:
            a = ranks.make(1, torch.float32, [3])
            b = ranks.make(2, "F32", (3,))
            assert isinstance(a, dist.RemoteTensor) and isinstance(ranks, dist.MasterWorker)
            told.append([a.worker, a.dtype, list(a.shape)])
            ranks.fill(a, 2)
            ranks.copy(b, torch.arange(3.0))
            c = ranks.make(1, "F32", [3])
            ranks.copy(c, b)
            ranks.add(c, a)
            ranks.fill(b, torch.tensor(7.0))
            ranks.wait(1)
            ranks.wait()
            ranks.progress()
            told.append([ranks.fetch(each).tolist() for each in (a, b, c)])
            told += [failure(lambda: ranks.add(a, b))[0], failure(lambda: ranks.make(0, "F32", [1]))[0], failure(lambda: ranks.serve())[0],
                     failure(lambda: ranks.fill(ranks.make(1, "F8_E5M2", [1]), 1))[0]]
            ranks.shutdown()
        dist.destroy_process_group()
        dist.init_process_group("shm")
        dist.barrier()
        tell(told)
        """),
        3,
    )
    wrong = "InvalidArgumentError"
    for rank, each in enumerate(told):
        assert each[:6] == [False, rank, 3, rank == 0, wrong, wrong]
    assert told[0][6:] == [[1, "F32", [3]], [[2, 2, 2], [7, 7, 7], [2, 3, 4]], wrong, wrong, wrong, wrong]
    assert told[1][6:] == told[2][6:] == [wrong]


@long_form
def test_a_rank_that_dies_is_an_error_within_the_deadline():
    ranks = Ranks(START + "start()\nif rank == 1: os._exit(3)\ntell(failure(lambda: dist.all_reduce(ones())))", 2)
    told = ranks.told(statuses=[0, 3])
    assert told[0][0][0] == "PeerLostError"


@long_form
def test_the_example():
    hidden = ("RANK", "WORLD_SIZE", "MUSTER_STANDALONE")
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    done = subprocess.run([sys.executable, str(EXAMPLE)], capture_output=True, text=True, timeout=180, env=environment)
    assert done.returncode == 0, done.stderr
    losses = [float(loss) for loss in re.findall(r"loss ([0-9.]+) over 2 ranks", done.stdout)]
    assert len(losses) == 4 and losses[3] < losses[0] / 2, losses
