# SPDX-License-Identifier: Apache-2.0
"""muster.compat.torchgfn. The tests whose names begin with "test_defect" are about defects of torchgfn."""

import logging
import sys

import pytest

import muster
from muster.compat import torchgfn
from ranks import run

START = """
from muster.compat import torchgfn as gfn
muster.set_world(group)
"""


def test_roles_and_groups():
    told = run(
        START
        + """
context = gfn.initialize_distributed_compute("gloo", 2, 2, True)
def sum_in(group):
    values = np.array([rank, 1])
    gfn.all_reduce(values, group=group)
    return [gfn.get_rank(group=group), gfn.get_world_size(group=group), values.tolist()]
def tried(group):
    try:
        return sum_in(group)
    except muster.InvalidArgumentError as error:
        return str(error)
seen = {name: getattr(context, name) for name in (
    "my_rank", "world_size", "num_training_ranks", "agent_group_size", "agent_group_id", "assigned_buffer", "assigned_training_ranks", "coordinator_rank")}
seen["role"] = [context.is_training_rank(), context.is_buffer_rank(), context.is_coordinator_rank()]
seen["all"] = sum_in(None)
seen["training"] = tried(context.train_global_group)
seen["buffers"] = tried(context.buffer_group)
seen["agents"] = [tried(each) for each in context.agent_groups]
mpi = context.dc_mpi4py
seen["mpi"] = [mpi.is_training_rank(), mpi.is_buffer_rank(), mpi.train_global_group is context.get_train_group("mpi") is context.get_train_group("torch")]
gfn.barrier()
tell(seen)
""",
        7,
    )
    common = {"world_size": 7, "num_training_ranks": 4, "agent_group_size": 2, "coordinator_rank": 6, "all": [0, 7, [21, 7]]}
    no_training = "group: rank {} is not in the group of the training ranks"
    no_buffers = "group: rank {} is not in the group of the buffer managers"
    for rank, seen in enumerate(told):
        assert seen["my_rank"] == rank and seen["all"] == [rank, 7, [21, 7]]
        assert {name: seen[name] for name in common if name != "all"} == {name: value for name, value in common.items() if name != "all"}
        role = "training" if rank in (0, 1, 3, 4) else "coordinator" if rank == 6 else "buffer"
        assert seen["role"] == [role == "training", role == "buffer", role == "coordinator"]
        assert seen["mpi"] == [role == "training", role == "buffer", True]
        training = [0, 1, 3, 4]
        assert seen["training"] == ([training.index(rank), 4, [8, 4]] if role == "training" else no_training.format(rank))
        assert seen["buffers"] == ([[2, 5].index(rank), 2, [7, 2]] if role == "buffer" else no_buffers.format(rank))
        own = {0: 0, 1: 0, 3: 1, 4: 1}.get(rank)
        for number, members in enumerate(([0, 1], [3, 4])):
            absent = f"group: rank {rank} is not in agent group {number}"
            assert seen["agents"][number] == ([members.index(rank), 2, [sum(members), 2]] if own == number else absent)
        assert seen["agent_group_id"] == {2: 0, 5: 1, 6: 0}.get(rank, own)
        assert seen["assigned_buffer"] == {0: 2, 1: 2, 3: 5, 4: 5}.get(rank)
        assert seen["assigned_training_ranks"] == {2: [0, 1], 5: [3, 4]}.get(rank)


def test_roles_by_the_function_of_mpi4py():
    told = run(
        START
        + """
context = gfn.initialize_distributed_compute_mpi4py(1, 1, 1)
seen = [type(context).__name__, context.is_training_rank(), context.is_buffer_rank(), context.assigned_buffer, context.assigned_training_ranks]
gfn.barrier("torch")
tell(seen)
""",
        4,
    )
    name = "DistributedContextMPI4Py"
    assert told == [[name, True, False, 2, None], [name, True, False, 2, None], [name, False, True, None, [0, 1]], [name, False, False, None, None]]


def test_invalid_roles_are_an_error_on_all_ranks():
    told = run(
        START
        + """
init = gfn.initialize_distributed_compute
tell([
    failure(lambda: init("gloo", 3, 1)), failure(lambda: init("gloo", 0, 2)), failure(lambda: init("nccl" if rank == 1 else "ccl", 0, 1)),
    failure(lambda: init("mpi", "x" if rank == 2 else 1, 1)), failure(lambda: init("mpi", rank, 1)),
    failure(lambda: gfn.initialize_distributed_compute_mpi4py(0, 1, 2)), init("gloo", 1, 1).num_training_ranks])
gfn.barrier()
""",
        3,
    )
    words = [
        ("InvalidArgumentError", "no training rank"),
        ("InvalidArgumentError", "not a multiple of 2 agent groups"),
        ("InvalidArgumentError", "dist_backend: unknown backend 'nccl' (expected 'ccl', 'mpi' or 'gloo')"),
        ("InvalidArgumentError", "num_remote_buffers: str is not an int"),
        ("RankMismatchError", "1 remote buffers"),
        ("InvalidArgumentError", "num_coordinators: 2 is out of range (valid: 0 or 1)"),
    ]
    for rank in told:
        for (kind, message), (wanted, part) in zip(rank, words):
            assert kind == wanted and part in message, (kind, message)
        assert rank[-1] == 2


def test_defect_one_rank_has_groups_and_cleanup_may_be_repeated():
    """torchgfn makes no group for one rank, and its cleanup() fails."""
    (told,) = run(
        START
        + """
context = gfn.initialize_distributed_compute("mpi", 1, 2, True)
values = np.array([2.5])
gfn.all_reduce(values, group=context.train_global_group)
gfn.all_reduce(values, group=context.agent_groups[0])
seen = [values.tolist(), context.world_size, context.num_training_ranks, context.agent_group_size, context.is_training_rank(), context.buffer_group]
context.cleanup()
context.cleanup()
ended = [failure(lambda: gfn.barrier(group=group)) for group in (context.train_global_group, context.agent_groups[0], context.dc_mpi4py.train_global_group)]
# The calls without a group make a new one.
again = gfn.get_world_size()
tell([seen, ended, again])
""",
        1,
    )
    assert told[0] == [[2.5], 1, 1, 1, True, None]
    assert told[1] == [["InvalidArgumentError", "group: cleanup() has ended the groups of this rank"]] * 3
    assert told[2] == 1


def test_defect_cleanup_ends_no_other_group():
    """torchgfn finalizes MPI, so that the program can make no other group."""
    told = run(
        START
        + """
for _ in range(2):
    context = gfn.initialize_distributed_compute("mpi", 1, 1)
    gfn.barrier()
    context.cleanup()
    group.barrier()
tell(context.world_size)
""",
        3,
    )
    assert told == [3, 3, 3]


def test_collectives():
    told = run(
        START
        + """
values = [np.array([rank + 1.0]) for _ in range(3)]
gfn.all_reduce(values[0])
gfn.all_reduce(values[1], "MAX", "torch")
gfn.all_reduce(values[2], op="MIN")
copied = np.array([rank, rank])
gfn.broadcast(copied, 1)
gathered = [np.zeros(1, "i8") for _ in range(size)]
gfn.all_gather(gathered, np.array([rank]), "mpi")
gfn.barrier()
tell([[x.tolist() for x in values], copied.tolist(), [x.tolist() for x in gathered], gfn.get_rank(), gfn.get_world_size()])
""",
        3,
    )
    assert told == [[[[6.0], [3.0], [1.0]], [1, 1], [[0], [1], [2]], rank, 3] for rank in range(3)]


def test_bad_arguments_are_an_error_on_all_ranks():
    told = run(
        START
        + """
x = np.zeros(2)
tell([
    failure(lambda: gfn.all_reduce(x, "AVG" if rank == 1 else "SUM")), failure(lambda: gfn.all_reduce(x, "SUM", "nccl")),
    failure(lambda: gfn.broadcast("text" if rank == 0 else x, 0)), failure(lambda: gfn.broadcast(x, 2)),
    failure(lambda: gfn.all_gather(7 if rank == 1 else [x, x], x)), failure(lambda: gfn.barrier("gloo" if rank == 0 else "mpi")),
    failure(lambda: gfn.average_models(7 if rank == 0 else object())),
    failure(lambda: gfn.get_rank("nccl")), failure(lambda: gfn.get_rank(group="world")), failure(lambda: gfn.get_world_size("nccl"))])
gfn.barrier()
"""
    )
    words = [
        "op: unknown value 'AVG' (expected 'SUM', 'MAX' or 'MIN')",
        "backend: Unknown backend 'nccl' (expected 'mpi' or 'torch')",
        "str is not a tensor",
        "root 2 is out of range",
        "not iterable",
        "backend: Unknown backend 'gloo'",
        "has no attribute 'named_parameters'",
        "Unknown backend 'nccl'",
        "group: 'world' is not a group",
        "Unknown backend 'nccl'",
    ]
    for rank in told:
        for (kind, message), part in zip(rank, words):
            assert kind == "InvalidArgumentError" and part in message, (kind, message)


# Messages.


def test_defect_two_ranks_that_isend_to_each_other_do_not_deadlock():
    """torchgfn's isend waits until the length has been received."""
    told = run(
        START
        + """
data = np.full(4_000_000, rank, "u1")
handle = gfn.isend(data, 1 - rank)
before = handle.is_complete()
gfn.barrier()
received, source, _ = gfn._the_job().messages.result(gfn._the_job().messages.ranks.irecv_config(1 - rank, 0))
handle.wait()
handle.wait()
tell([before, source, int(received.numpy().sum()), handle.is_complete(), handle._buffer.nbytes, handle._request is not None])
"""
    )
    assert told == [[False, 1 - rank, (1 - rank) * 4_000_000, True, 4_000_000, True] for rank in range(2)]


def test_a_failed_isend_raises_its_error_again():
    told = run(
        START
        + """
import muster.compat.torchgfn
if rank == 1:
    gfn.barrier()
    tell(None)
    os._exit(0)
gfn.get_rank()
handle = gfn.isend(np.zeros(4_000_000, "u1"), 1)
gfn.barrier()
first, second = failure(handle.wait), failure(handle.wait)
tell([first[0], first == second, handle.is_complete()])
"""
    )
    assert told[0] == ["PeerLostError", True, False]


# Torch tensors: five ranks run all cases in one job, because an import of torch takes seconds.

TORCH = """
import contextlib, threading
import torch
import torch.distributed as distributed
torch.set_num_threads(1)
seen = {}

class Net(torch.nn.Module):
    def __init__(self, scale):
        super().__init__()
        self.first = torch.nn.Parameter(torch.full((2, 3), float(scale)).t())
        self.second = torch.nn.Parameter(torch.full((4,), float(scale), dtype=torch.bfloat16))
        self.unused = torch.nn.Parameter(torch.full((1,), float(scale)))

# Without roles.
model = Net(rank)
gfn.average_models(model)
seen["without roles"] = model.second.tolist()
wide = torch.full((2, 4), float(rank + 1), dtype=torch.bfloat16)
gfn.all_reduce(wide.t()[1:3])
parameter = torch.nn.Parameter(torch.full((2,), float(rank)))
gfn.broadcast(parameter, 1)
outs = [torch.zeros(2, 2)[:, 0] for _ in range(size)]
gfn.all_gather(outs, torch.full((2, 2), float(rank))[:, 1])
seen["collectives"] = [wide.tolist(), parameter.tolist(), [x.tolist() for x in outs]]

# Messages.
halves = torch.tensor([[1.5, -2.0]], dtype=torch.bfloat16)
if rank == 0:
    for backend in ("mpi", "torch"):
        gfn.send(halves, 1, backend, 5)
    gfn.send(torch.zeros(0, 3), 1, tag=4)
    gfn.isend(halves.t(), 1, "torch", 6).wait()
    gfn._the_job().messages.ranks.send_config({"a": 1}, 1, 3)
if rank == 1:
    # The receiver may use the other backend, and receive in another order.
    seen["messages"] = []
    for source, tag in ((None, 4), (0, 5), (None, 5), (0, 6)):
        sender, data = gfn.recv(source, "mpi", tag)
        seen["messages"].append([sender, str(data.dtype), data.view(torch.bfloat16).tolist() if data.numel() else list(data.shape)])
    seen["bad messages"] = [failure(lambda: gfn.recv(0, tag=3)), failure(lambda: gfn.recv(0, "gloo")), failure(lambda: gfn.send(halves, 1)),
                            failure(lambda: gfn.isend(halves, 5)), failure(lambda: gfn.send("x", 0)), failure(lambda: gfn.send(halves, 0, tag=-1))]
gfn.barrier()
# Both messages have arrived when rank 1 receives the one that was sent last.
for sender in (0, 2):
    if rank == sender:
        gfn.send(halves + rank, 1, tag=7)
    gfn.barrier()
if rank == 1:
    seen["sources"] = [gfn.recv(source, tag=7)[1].view(torch.bfloat16).tolist() for source in (2, 0)]
if rank == 0:
    found = {}
    def take(tag):
        found[tag] = [int(gfn.recv(tag=tag)[1][0]) for _ in range(20)]
    threads = [threading.Thread(target=take, args=(tag,)) for tag in range(4)]
    [thread.start() for thread in threads]
    gfn.send(np.zeros(1, "u1"), 1, tag=9)  # while they wait
    [thread.join(60) for thread in threads]
    seen["threads"] = [found[tag] for tag in range(4)]
if rank == 1:
    gfn.recv(tag=9)
    for i in range(20):
        for tag in range(4):
            gfn.send(np.full(3, 10 * tag + i % 10, "u1"), 0, tag=tag)
gfn.barrier()

# Ranks 0 to 3 train, and rank 4 manages a buffer.
context = gfn.initialize_distributed_compute("gloo", 1, 1)
def told_of(x):
    return None if x is None else [list(x.shape), str(x.dtype), float(x.double().sum())]
many = torch.full((300, 1), rank, dtype=torch.uint8)
seen["gathers"] = [told_of(x) for x in (
    gfn.gather_distributed_data(many),
    gfn.gather_distributed_data(torch.full((257 + rank, 2, 1), 1.0, dtype=torch.bfloat16).transpose(1, 2)),
    gfn.gather_distributed_data(torch.full((rank, 2), rank), size, rank),
    gfn.gather_distributed_data([rank, rank]),
    gfn.gather_distributed_data(torch.tensor([rank]), 4, rank, context.train_global_group) if rank < 4 else None,
)]
seen["bad gathers"] = [failure(lambda: gfn.gather_distributed_data(many, 2 if rank == 1 else None)), failure(lambda: gfn.gather_distributed_data(many, None, 7)),
                       failure(lambda: gfn.gather_distributed_data(torch.tensor(1)))]
if context.is_training_rank():
    model = Net(1)
    (model.first.sum() * rank + model.second.float().sum() * (rank + 1)).backward()
    gfn.average_gradients(model)
    other = Net(1)
    if rank == 0:
        other.first.sum().backward()
    seen["gradients"] = [model.first.grad.tolist(), model.second.grad.tolist(), model.unused.grad, model.first.tolist(), failure(lambda: gfn.average_gradients(other))]
gfn.barrier()
context.cleanup()

# Ranks 0 to 2 train, each in a group of its own.
group.barrier()
context = gfn.initialize_distributed_compute("gloo", 1, 3, True)
if context.is_training_rank():
    model = Net(rank)
    kept = model.first
    gfn.average_models(model, context.train_global_group)
    alone, default = Net(rank), Net(rank)
    gfn.average_models(alone, training_group=context.agent_groups[context.agent_group_id])
    gfn.average_models(default)
    seen["models"] = [model.first.tolist(), model.second.tolist(), model.unused.tolist(), model.first is kept, alone.second.tolist(), default.second.tolist()]
else:
    seen["models"] = failure(lambda: gfn.average_models(Net(rank)))
gfn.barrier()
context.cleanup()

# The world is that of torch.distributed, once it is initialized.
distributed.init_process_group("gloo", init_method="file://" + os.environ["TEST_STORE"], rank=size - 1 - rank, world_size=size)
pair = distributed.new_group([1, 2])
place = distributed.get_rank()
values = torch.tensor([float(place)])
if place in (1, 2):
    gfn.all_reduce(values, group=pair)
    gfn.all_reduce(values, group=pair)
gfn.barrier()
seen["torch groups"] = [values.item(), gfn.get_rank("torch"), gfn.get_rank(group=pair) if place in (1, 2) else None]
gfn.barrier()
tell(seen)
"""


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    pytest.importorskip("torch", reason=f"{sys.executable} has no torch")
    store = tmp_path_factory.mktemp("store") / "file"
    return run(START + TORCH, 5, longest=240, environment={"TEST_STORE": str(store), "GLOO_SOCKET_IFNAME": "lo"})


def test_tensors_with_gaps_and_parameters(told):
    for rank, each in enumerate(told):
        assert each["collectives"] == [[[rank + 1, 15, 15, rank + 1]] * 2, [1, 1], [[other, other] for other in range(5)]]


def test_defect_messages_keep_their_bytes_with_both_backends(told):
    """torchgfn converts each value to a byte if the backend is "torch"."""
    same = [0, "torch.uint8", [1.5, -2.0]]
    assert told[1]["messages"] == [[0, "torch.uint8", [0]], same, same, same]


def test_a_receiver_selects_the_sender(told):
    assert told[1]["sources"] == [[3.5, 0.0], [1.5, -2.0]]


def test_bad_messages_are_an_error(told):
    kinds = ["RankMismatchError", *["InvalidArgumentError"] * 5]
    assert [kind for kind, _ in told[1]["bad messages"]] == kinds
    words = ("recv: message of rank 0 with tag 3: expected bytes, received dict", "Unknown backend 'gloo'", "itself", "rank 5", "str is not a tensor", "tag -1")
    assert [part in message for (_, message), part in zip(told[1]["bad messages"], words)] == [True] * 6, told[1]["bad messages"]


def test_defect_threads_receive_at_the_same_time(told):
    """In torchgfn a thread may take the message that another thread has probed."""
    assert told[0]["threads"] == [[10 * tag + i % 10 for i in range(20)] for tag in range(4)]


def test_defect_gathers_of_any_dtype_shape_and_number_of_rows(told):
    """torchgfn sends the numbers of rows in the dtype of the data, needs two dimensions, and pads."""
    assert told[0]["gathers"] == [
        [[1500, 1], "torch.uint8", 3000.0],
        [[1295, 1, 2], "torch.bfloat16", 2590.0],
        [[10, 2], "torch.int64", 60.0],
        [[10], "torch.int64", 20.0],
        [[4], "torch.int64", 6.0],
    ]
    for rank, each in enumerate(told):
        assert rank == 0 or each["gathers"] == [None] * 5
        for (kind, message), part in zip(each["bad gathers"], ("world_size: 2 is not the size", "rank: 7 is not this process", "")):
            assert kind == "InvalidArgumentError" and part in message


def test_defect_average_models_divides_by_the_size_of_its_group(told):
    """torchgfn divides by the number of all ranks."""
    for rank in range(3):
        assert told[rank]["models"] == [[[1.0, 1.0]] * 3, [1.0] * 4, [1.0], True, [rank] * 4, [1.0] * 4]
    for rank in (3, 4):
        assert told[rank]["models"] == ["InvalidArgumentError", f"group: rank {rank} is not in the group of the training ranks"]


def test_defect_average_gradients_needs_no_buffer_rank_and_no_gradient(told):
    """torchgfn waits for all ranks, and fails if a parameter has no gradient."""
    for rank in range(4):
        *found, (kind, message) = told[rank]["gradients"]
        assert found == [[[1.5, 1.5]] * 3, [2.5] * 4, None, [[1.0, 1.0]] * 3]
        assert kind == "RankMismatchError" and 'parameter "first"' in message and "no gradient" in message


def test_averages_of_a_job_without_roles(told):
    assert [each["without roles"] for each in told] == [[2.0] * 4] * 5


def test_groups_of_torch_distributed(told):
    for rank, (value, place, of_pair) in enumerate(each["torch groups"] for each in told):
        assert place == 4 - rank and value == (6 if place in (1, 2) else place) and of_pair == {1: 0, 2: 1}.get(place)


# Reports, and the rest.


def logged(caplog, call):
    caplog.clear()
    with caplog.at_level(logging.INFO, logger="muster.compat.torchgfn"):
        call()
    assert {record.name for record in caplog.records} == {torchgfn.logger.name}
    return [(record.levelname, record.getMessage()) for record in caplog.records]


def test_load_imbalance(caplog):
    times = [{"walk": [1.0, 2.0], "save": 3.0}, {"walk": [3.0, 2.0], "save": [5.0]}, {"ignored": [9.0]}]
    told = logged(caplog, lambda: torchgfn.report_load_imbalance(times, 2))
    assert told == [
        ("INFO", "walk (2 times): 4.000000 s useful, 1.000000 s waiting (20.0 %)"),
        ("INFO", "save (1 times): 4.000000 s useful, 1.000000 s waiting (20.0 %)"),
        ("INFO", "all steps: 8.000000 s useful, 2.000000 s waiting (20.0 %)"),
    ]


def test_defect_reports_of_steps_and_iterations_that_ranks_lack(caplog):
    """torchgfn omits steps that rank 0 lacks, and raises IndexError for unequal numbers of iterations."""
    times = [{"walk": [1.0, 2.0]}, {"walk": [3.0], "save": [5.0]}]
    told = logged(caplog, lambda: torchgfn.report_load_imbalance(times, 2))
    assert ("INFO", "walk (1 times): 2.000000 s useful, 1.000000 s waiting (33.3 %)") in told
    warnings = [message for level, message in told if level == "WARNING"]
    assert len(warnings) == 2 and "only the first 1 iterations count" in warnings[0] + warnings[1] and "missing on ranks 0" in warnings[0] + warnings[1]


def test_time_info(caplog):
    times = [{"walk": [1.0, 2.0]}, {"walk": [6.0], "save": [5.0]}]
    assert logged(caplog, lambda: torchgfn.report_time_info(times, 2)) == [
        ("INFO", "walk, rank 0: mean 1.500000 s, total 3.000000 s"),
        ("INFO", "walk, rank 1: mean 6.000000 s, total 6.000000 s"),
        ("INFO", "walk: largest total 6.000000 s, mean total 4.500000 s"),
        ("INFO", "save, rank 1: mean 5.000000 s, total 5.000000 s"),
        ("INFO", "save: largest total 5.000000 s, mean total 5.000000 s"),
    ]


@pytest.mark.parametrize(
    "times, size, words",
    [([{}], 2, "world_size: 2 is out of range for 1 dicts"), ([{}], "1", "world_size: '1' is out of range"), ([{}, []], 2, "all_timing_dict.1.: list is not a dict"), ([{"walk": [-1.0]}], 1, "at least 0"), ([{"walk": ["x"]}], 1, "walk: str is not a number")],
)
def test_times_that_cannot_be(times, size, words):
    for report in (torchgfn.report_load_imbalance, torchgfn.report_time_info):
        with pytest.raises(muster.InvalidArgumentError, match=words):
            report(times, size)


def test_first_env(monkeypatch):
    monkeypatch.setenv("TEST_A", "")
    monkeypatch.setenv("TEST_B", "b")
    monkeypatch.delenv("TEST_C", raising=False)
    assert torchgfn._first_env("TEST_C", "TEST_A", "TEST_B") == "b"
    assert torchgfn._first_env("TEST_C", "TEST_A", default="d") == "d" and torchgfn._first_env("TEST_C") is None


def test_get_mpi(tmp_path, monkeypatch):
    (tmp_path / "mpi4py").mkdir()
    (tmp_path / "mpi4py/__init__.py").write_text("MPI = 'its module'\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in [name for name in sys.modules if name.partition(".")[0] == "mpi4py"]:
        monkeypatch.delitem(sys.modules, name)
    assert torchgfn._get_MPI() == "its module"
    monkeypatch.delitem(sys.modules, "mpi4py")


def test_group_stands_for_any_kind_of_group():
    from typing import Any

    assert torchgfn.Group is Any
