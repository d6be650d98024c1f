# SPDX-License-Identifier: Apache-2.0
"""GroupCoordinator of vLLM, on Muster. Tests of defects of the original are named after them."""

import os
import pathlib
import sys
import textwrap

import pytest

torch = pytest.importorskip("torch", reason="there is no PyTorch here")

import muster
from ranks import run

long_form = pytest.mark.skipif(not os.environ.get("MUSTER_TEST_ALL"), reason="in the long form: MUSTER_TEST_ALL=1")
EXAMPLE = pathlib.Path(__file__).parents[2] / "examples" / "tensor_parallel.py"

START = """
import dataclasses, enum, typing, torch
torch.set_num_threads(1)
from muster.compat.vllm import GroupCoordinator, MessageQueue
muster.set_world(group)
def coordinator(lists=None, **options):
    return GroupCoordinator(lists or [list(range(size))], rank, "gloo", False, **options)
def range_of(*shape):
    return torch.arange(float(torch.Size(shape).numel())).reshape(shape)
def listed(value):
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return {key: listed(each) for key, each in value.items()}
    return [listed(each) for each in value] if isinstance(value, (list, tuple)) else value
"""


def run_started(source, size=3):
    return run(START + textwrap.dedent(source), size)


def test_ranks_and_names():
    told = run_started(
        """
        columns = [[0, 2], [3, 1]]
        groups = [coordinator(columns, group_name="pp"), coordinator(columns, group_name="pp"), coordinator()]
        names = ("rank", "ranks", "local_rank", "rank_in_group", "world_size", "first_rank", "last_rank", "is_first_rank",
                 "is_last_rank", "next_rank", "prev_rank", "unique_name", "device_communicator", "mq_broadcaster")
        failures = [failure(lambda: coordinator(bad)) for bad in ([[0, 1], [2]], [[0, 1, 2, 3], [3]], [[0, 1, 2, "3"]], 7)]
        failures.append(failure(lambda: coordinator(columns if rank else [[0, 1, 2, 3]])))
        groups[0].barrier()
        tell([[getattr(each, name) for name in names] for each in groups] + [failures])
        """,
        4,
    )
    in_group = [(0, [0, 2], 0), (1, [3, 1], 1), (2, [0, 2], 1), (3, [3, 1], 0)]
    for (rank, ranks, index), (first, second, whole, failures) in zip(in_group, told):
        other = ranks[1 - index]
        wanted = [rank, ranks, rank, index, 2, *ranks, index == 0, index == 1, other, other]
        assert first == [*wanted, "pp:0", None, None] and second == [*wanted, "pp:1", None, None]
        assert whole[1] == [0, 1, 2, 3] and whole[9:] == [(rank + 1) % 4, (rank - 1) % 4, "anonymous:0", None, None]
        assert [kind for kind, _ in failures] == ["InvalidArgumentError"] * 4 + ["RankMismatchError"], failures


# Calls on x, which is range_of(2, 2) + 100 * rank, and their results on the ranks 0, 1 and 2, or one for all ranks.
ALL = [[[i, i + 1], [i + 2, i + 3]] for i in (0, 100, 200)]
COLUMNS = [[0, 1, 100, 101, 200, 201], [2, 3, 102, 103, 202, 203]]
ROWS = [row for each in ALL for row in each]
SUM = [[300, 303], [306, 309]]
UNEVEN = [[0.0], [1.0], [1.0], [2.0], [2.0], [2.0]]
CALLS = {
    "all_reduce": ("c.all_reduce(x)", SUM),
    "_all_reduce_out_place": ("c._all_reduce_out_place(input_=x)", SUM),
    "all_gather": ("c.all_gather(x)", COLUMNS),
    "all_gather along 0": ("c.all_gather(x, 0)", ROWS),
    "all_gather along -2": ("c.all_gather(input_=x, dim=-2)", ROWS),
    "_all_gather_out_place": ("c._all_gather_out_place(x, 1)", COLUMNS),
    "all_gather of gaps": ("c.all_gather(x.t(), 1)", [[i + j for i in (0, 100, 200) for j in (0, 2)], [i + j for i in (0, 100, 200) for j in (1, 3)]]),
    "all_gatherv": ("c.all_gatherv(rows)", UNEVEN),
    "all_gatherv with sizes": ("c.all_gatherv(rows, 0, [1, 2, 3])", UNEVEN),
    "all_gatherv along 1": ("c.all_gatherv(rows.t(), dim=-1, sizes=[1, 2, 3])", [[row[0] for row in UNEVEN]]),
    "all_gatherv of a list": ("c.all_gatherv([rows, x], 0)", [UNEVEN, ROWS]),
    "reduce_scatter": ("c.reduce_scatter(range_of(2, 3))", *[[[[3 * i], [3 * i + 9]] for i in range(3)]]),
    "_reduce_scatter_out_place": ("c._reduce_scatter_out_place(range_of(3, 2), 0)", [[[6 * i, 6 * i + 3]] for i in range(3)]),
    "reduce_scatterv": ("c.reduce_scatterv(range_of(1, 6), sizes=[1, 2, 3])", [[[0]], [[3, 6]], [[9, 12, 15]]]),
    "reduce_scatterv of equal slices": ("c.reduce_scatterv(range_of(3, 1), 0)", [[[3 * i]] for i in range(3)]),
    "gather": ("c.gather(x)", [COLUMNS, None, None]),
    "gather to 1 along 0": ("c.gather(x, 1, 0)", [None, ROWS, None]),
    "broadcast": ("c.broadcast(x)", ALL[0]),
    "broadcast in place": ("c.broadcast(input_=x, src=2) is x and x", ALL[2]),
    "broadcast of gaps": ("c.broadcast(x[:, 0], 1) is None or x", [[[100, 1], [102, 3]], ALL[1], [[100, 201], [102, 203]]]),
    "broadcast of a parameter": ("c.broadcast(torch.nn.Parameter(x), 2) is None or x", ALL[2]),
    "barrier": ("c.barrier()", None),
    "bfloat16": ("c.all_reduce(torch.ones(2, dtype=torch.bfloat16)).dtype == torch.bfloat16", True),
    "fp8": ("c.all_gather(torch.ones(2).to(torch.float8_e5m2), 0).to(torch.float32)", [1] * 6),
    "broadcast_object": ("c.broadcast_object({'a': (rank, None)})", {"a": [0, None]}),
    "broadcast_object from 2": ("c.broadcast_object([rank, 'x'] if rank == 2 else None, 2)", [2, "x"]),
    "send and recv": ("c.send(x) if rank == 0 else c.recv(x.shape, x.dtype) if rank == 1 else None", [None, ALL[0], None]),
    "send to 0": ("c.send(x, 0) if rank == 2 else c.recv(torch.Size([2, 2]), torch.float32, src=2) if rank == 0 else None", [ALL[2], None, None]),
    "send_object": ("c.send_object({1: x}, 2) if rank == 0 else c.recv_object(0)[1] if rank == 2 else None", [None, None, ALL[0]]),
}
PER_RANK = {"reduce_scatter", "_reduce_scatter_out_place", "reduce_scatterv", "reduce_scatterv of equal slices", "gather", "gather to 1 along 0",
            "broadcast of gaps", "send and recv", "send to 0", "send_object"}


def test_calls():
    told = run_started(
        f"""
        c = coordinator()
        rows = torch.full((rank + 1, 1), float(rank))
        told = []
        for source in {[source for source, _ in CALLS.values()]!r}:
            x = range_of(2, 2) + 100 * rank
            told.append(listed(eval(source)))
        tell(told)
        """
    )
    for rank, each in enumerate(told):
        for (name, (_, wanted)), found in zip(CALLS.items(), each):
            assert found == (wanted[rank] if name in PER_RANK else wanted), (name, rank)


@long_form
def test_groups_beside_each_other_and_a_group_of_one():
    """The original returns the argument itself in a group of one, and recv_tensor_dict returns None."""
    told = run_started(
        """
        alone, c = coordinator([[0], [1, 2]], use_message_queue_broadcaster=True), None
        x = torch.ones(2, 2) * (rank + 1)
        results = [alone.all_reduce(x), alone.all_gather(x), alone.reduce_scatterv(x, 0, [2] if rank == 0 else [1, 1]), alone.gather(x), alone.all_gatherv(x)]
        objects = [alone.broadcast_object([rank]), alone.broadcast_tensor_dict({"x": x})["x"]]
        failures = [failure(lambda: alone.send(x)), failure(lambda: alone.recv_tensor_dict()), failure(lambda: alone.send_object(1, 0))] if rank == 0 else []
        tell([listed(results), listed(objects), failures, [each is not x for each in results]])
        """
    )
    one = [[1.0, 1.0]] * 2
    assert told[0][:2] == [[one] * 5, [[0], one]]
    assert [kind for kind, _ in told[0][2]] == ["InvalidArgumentError"] * 3 and all(told[0][3])
    assert told[1][0][0] == told[2][0][0] == [[5.0, 5.0]] * 2
    assert told[1][1] == told[2][1] == [[1], [[2.0, 2.0]] * 2]


def test_all_reduce_does_not_change_its_argument():
    """The original reduces the argument in place on the CPU, although it documents a new tensor."""
    told = run_started("c = coordinator(); x = torch.ones(2); y = c.all_reduce(x); tell([x.tolist(), y.tolist()])", 2)
    assert told == [[[1, 1], [2, 2]]] * 2


def test_reduce_scatter_is_correct_along_each_dimension():
    """The original moves the wrong dimension for three dimensions and more."""
    told = run_started(
        """
        c = coordinator()
        x = range_of(2, 4, 2, 6)
        told = []
        for dim in (0, 1, 2, 3, -1, -2):
            whole = (2 * x).chunk(2, dim)[rank]
            found = [c.reduce_scatter(x, dim), c.reduce_scatterv(x, dim, [x.shape[dim] // 2] * 2)]
            told += [torch.equal(each, whole) for each in found]
        found = c.reduce_scatterv(x, 2, [2, 0])
        told.append(torch.equal(found, 2 * x if rank == 0 else x[:, :, :0]))
        tell(told)
        """,
        2,
    )
    assert told == [[True] * 13] * 2


# Calls with a wrong argument on rank 1, and a part of the message. All ranks raise it.
WRONG = {
    "shapes of all_gather, which the original does not check": ("c.all_gather(torch.ones(2 + rank))", "RankMismatchError", ""),
    "src -1, which the original accepts": ("c.broadcast(x, bad(-1, 0))", "InvalidArgumentError", "root -1"),
    "src": ("c.broadcast_object(1, bad(5, 0))", "InvalidArgumentError", "root 5"),
    "dst": ("c.gather(x, bad(2, 0))", "InvalidArgumentError", "root 2"),
    "dim": ("c.all_gather(x, bad(2, 0))", "InvalidArgumentError", "2"),
    "tensor": ("c.all_reduce(bad('x', x))", "InvalidArgumentError", "str is not a tensor"),
    "tensor to fill": ("c.broadcast(bad(None, x))", "InvalidArgumentError", "NoneType is not a torch tensor"),
    "indivisible": ("c.reduce_scatter(torch.ones(3))", "InvalidArgumentError", "3"),
    "sizes": ("c.all_gatherv(x, 0, [1, 1])", "InvalidArgumentError", "sizes"),
    "sum of sizes": ("c.reduce_scatterv(x, 0, [1, 2])", "InvalidArgumentError", "do not add up"),
    "object": ("c.broadcast_object([bad(open, 1)], 1)", "InvalidArgumentError", "object[0]"),
    "nested object": ("c.broadcast_object({'a': (1, {bad(1, 2): lambda: 1})}, 1)", "InvalidArgumentError", "object['a'][1][1]"),
    "object in a queue": ("q.broadcast_object([open])", "InvalidArgumentError", "object[0]"),
    "object list": ("c.broadcast_object_list([1] * (rank + 1))", "RankMismatchError", "[1, 2]"),
    "no object list": ("c.broadcast_object_list(bad(3, [1]))", "InvalidArgumentError", "int"),
    "dict": ("c.broadcast_tensor_dict(bad([1], {}), 1)", "InvalidArgumentError", "tensor_dict: list is not a dict"),
    "key": ("c.broadcast_tensor_dict({bad(1, 'a'): x}, 1)", "InvalidArgumentError", "the key 1"),
    "writer": ("c.create_mq_broadcaster(bad('1', 0))", "InvalidArgumentError", "writer_rank: str"),
    "reader": ("c.create_single_reader_mq_broadcasters(bad(0.5, 0))", "InvalidArgumentError", "reader_rank_in_group: float"),
    "rows": ("c.dispatch(x, torch.ones(bad(1, 2)))", "InvalidArgumentError", "[2, 1] rows"),
    "combine before dispatch": ("c.combine(x)", "InvalidArgumentError", "call dispatch() first"),
    "model": ("c.prepare_communication_buffer_for_model(bad(None, torch.nn.Linear(1, 1)))", "InvalidArgumentError", "parameters"),
}


def test_wrong_arguments_are_errors_on_all_ranks_and_the_group_remains_usable():
    told = run_started(
        f"""
        c, q = coordinator(), coordinator(use_message_queue_broadcaster=True)
        bad = lambda value, good: value if rank == 1 else good
        told = []
        for source in {[source for source, *_ in WRONG.values()]!r}:
            x = torch.ones(2)
            told.append(failure(lambda: eval(source)))
            assert c.all_reduce(x).tolist() == [2, 2], source
        local = [failure(lambda: c.send(x, rank)), failure(lambda: c.send_object(1, 2)), failure(lambda: c.send_object(open, 1 - rank)),
                 failure(lambda: c.recv_object(None)), failure(lambda: c.recv_object(rank)), failure(lambda: c.send_tensor_dict([], 1 - rank)),
                 failure(lambda: c.send_tensor_dict({{}}, 1 - rank, None, {{"a": 1}})), failure(lambda: c.broadcast_object_list([1], group=3)),
                 failure(lambda: c.send(x, -1)), failure(lambda: c.recv(x.shape, x.dtype, -1)), failure(lambda: c.recv_object(-1)),
                 failure(lambda: c.recv_tensor_dict(-1)), failure(lambda: c.send_tensor_dict({{}}, -1))]
        tell([told, local])
        """,
        2,
    )
    for found, local in told:
        for (name, (_, kind, words)), each in zip(WRONG.items(), found):
            assert each and each[0] == kind and words in each[1], (name, each)
        assert [each and each[0] for each in local] == ["InvalidArgumentError"] * len(local), local


OBJECTS = """
import collections
class Color(enum.Enum):
    RED = 1
class Bits(enum.IntFlag):
    A = 1
    B = 2
class Point(typing.NamedTuple):
    x: int
    y: typing.Any
@dataclasses.dataclass(frozen=True)
class Plan:
    steps: list
    name: str = "p"
    inner: typing.Any = None
OBJECTS = [None, True, 1, -1, 2**63, 2**70, -(2**70), 1.5, float("inf"), "text", "", b"bytes", bytearray(b"b"), [], [1, [2]], (), (1, (2,)),
           {}, {"a": {"b": 1}}, {1: "x", (2, 3): [4]}, {"muster.compat:kind": 1}, {1, 2}, frozenset([3]), Color.RED, Bits.A | Bits.B,
           Point(1, (2,)), Plan([1, (2,)], inner=Plan([])), torch.float8_e5m2, torch.Size([2, 3]), torch.device("cpu"), np.int64(3)]
"""


def test_objects():
    """No object is a pickle: a receiver calls no function that a message names."""
    told = run_started(
        OBJECTS
        + textwrap.dedent("""
        c, q = coordinator(), coordinator(use_message_queue_broadcaster=True)
        def same(a, b):
            return type(a) is type(b) and a == b
        ours = None if rank else OBJECTS
        found = [c.broadcast_object(ours), q.broadcast_object(ours), c.broadcast_object(OBJECTS if rank else None, 1)]
        c.send_object(OBJECTS, 1) if rank == 0 else found.append(c.recv_object(0))
        wrong = [repr(b) for each in found for a, b in zip(OBJECTS, each) if not same(a, b) and not isinstance(a, np.generic)]
        tensors = [torch.arange(3), torch.ones(2, 2, dtype=torch.bfloat16).t(), torch.zeros(0, 3), torch.tensor(True), torch.ones(100000)]
        for each in (c, q):
            got = each.broadcast_object([tensors, np.arange(4, dtype="i4")] if rank == 0 else None)
            if not all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(tensors, got[0])) or got[1].tolist() != [0, 1, 2, 3]:
                wrong.append(str(got))
            if rank:
                # Received tensors and arrays are writable.
                got[0][0] += 1
                got[1][0] += 1
        class Evil:
            def __reduce__(self):
                return os._exit, (1,)
        refused = failure(lambda: c.broadcast_object(Evil()))
        if rank == 0:
            @dataclasses.dataclass
            class Local:
                a: int = 1
        refused_here = failure(lambda: c.send_object(Local(), 1) if rank == 0 else c.recv_object(0))
        # Objects whose leaves cannot be sent: the readers of the queue raise the error, too.
        leaves = [failure(lambda: q.broadcast_object(each if rank == 0 else None)) for each in
                  ({"x": torch.zeros(2, dtype=torch.complex128)}, np.longdouble(1), torch.zeros(2, 2).to_sparse(), np.array(["a"]))]
        tell([wrong, refused, refused_here, leaves, q.broadcast_object("end" if rank == 0 else None)])
        """),
        2,
    )
    for wrong, refused, _, leaves, end in told:
        assert wrong == [] and refused[0] == "InvalidArgumentError" and "Evil" in refused[1] and end == "end"
        assert [kind for kind, _ in leaves] == ["InvalidArgumentError"] * 4
    assert told[0][2] is None and told[1][2][0] == "InvalidArgumentError" and "Local" in told[1][2][1]


@long_form
def test_broadcast_of_lists_and_dicts_uses_the_group_that_is_passed():
    """The original ignores `group` of lists, and replaces both groups of dicts."""
    told = run_started(
        """
        c = coordinator([[0, 1], [2]])
        pair = group.split([0, 2] if rank != 1 else [1])
        whole = coordinator()
        told = []
        for given in (pair, muster.ProcessGroup(pair), coordinator([[0, 2], [1]])):
            objects = [rank, "x"]
            assert c.broadcast_object_list(objects, 0, given) is objects
            by_group = c.broadcast_tensor_dict({"r": rank} if rank != 2 else None, 0, given)
            by_metadata = c.broadcast_tensor_dict({"r": rank} if rank != 2 else None, group=c.cpu_group, metadata_group=given)
            told.append([objects, by_group, by_metadata])
        mine = c.broadcast_object_list([rank])
        last = whole.broadcast_object_list([rank, "a", None], src=2, group=whole.device_group)
        tell([told, mine, last])
        """
    )
    for rank, (by_group, mine, last) in enumerate(told):
        source = 1 if rank == 1 else 0
        assert by_group == [[[source, "x"], {"r": source}, {"r": source}]] * 3
        assert mine == [0 if rank < 2 else 2] and last == [2, "a", None]


DICT = """
DICT = {"z": torch.arange(12.0).reshape(3, 4), "odd": torch.ones(5, 7, dtype=torch.bfloat16), "empty": torch.zeros(0, 3), "step": 7,
        "nested": {"a": (1, None)}, "kept": torch.arange(6, dtype=torch.uint8), "a": torch.tensor(2)}
def is_dict(found):
    return list(found) == list(DICT) and all(torch.equal(a, found[k]) and a.dtype == found[k].dtype and a.shape == found[k].shape
        if isinstance(a, torch.Tensor) else a == found[k] for k, a in DICT.items())
"""


def test_dicts_of_tensors_from_stage_to_stage():
    """In the original the path through shared memory ignores all_gather_group, and takes at most eight tensors."""
    told = run_started(
        DICT
        + textwrap.dedent("""
        stages, slices = coordinator([[0, 2], [1, 3]], group_name="pp"), coordinator([[0, 1], [2, 3]], group_name="tp")
        same_group = group.split([0, 1] if rank < 2 else [2, 3])
        many = {f"t{i}": torch.full((4,), float(i)) for i in range(40)}
        told = [is_dict(slices.broadcast_tensor_dict(DICT if slices.rank_in_group == 1 else None, src=1))]
        if stages.is_first_rank:
            assert stages.send_tensor_dict(DICT) is None
            stages.send_tensor_dict(DICT, 1, slices, {"kept": False})
            stages.send_tensor_dict(tensor_dict=DICT, all_gather_group=same_group)
            stages.send_tensor_dict(many)
            # The original fails in a reshape.
            told.append(failure(lambda: stages.send_tensor_dict(DICT, 1, slices, {"odd": True})))
            stages.send_tensor_dict({}, 1, slices)
            stages.send_tensor_dict(DICT, 1, slices)
            stages.send_tensor_dict(DICT, 1, slices)
        else:
            told += [is_dict(stages.recv_tensor_dict()), is_dict(stages.recv_tensor_dict(0, slices, {"kept": False})),
                     is_dict(stages.recv_tensor_dict(all_gather_group=same_group)), len(stages.recv_tensor_dict()),
                     stages.recv_tensor_dict(0, slices), failure(lambda: stages.recv_tensor_dict(0)),
                     failure(lambda: stages.recv_tensor_dict("0" if rank == 3 else 0, slices))]
        tell(told)
        """),
        4,
    )
    for rank, each in enumerate(told):
        assert each[0] is True
        if rank < 2:
            assert each[1][0] == "InvalidArgumentError" and "35 elements" in each[1][1]
        else:
            assert each[1:6] == [True, True, True, 40, {}] and each[6][0] == "RankMismatchError"
            assert each[7][0] == "InvalidArgumentError" and "src: str is not" in each[7][1]


@long_form
def test_queues():
    told = run_started(
        """
        c = coordinator(use_message_queue_broadcaster=True)
        told = [isinstance(c.mq_broadcaster, MessageQueue)]
        # The writer does not wait for the readers.
        for i in range(100):
            last = c.broadcast_object({"i": i} if rank == 0 else None)
        told += [last, c.broadcast_object("from 2" if rank == 2 else None, 2)]
        queue = c.create_mq_broadcaster(writer_rank=1, blocking=False)
        queue.wait_until_ready()
        queue.enqueue([1, (2,)]) if rank == 1 else told.append(listed(queue.dequeue(timeout=20)))
        own, queues = c.create_single_reader_mq_broadcasters(2)
        own.enqueue(rank)
        told += [each.dequeue() for each in queues]
        handle = muster.make_queue_handle(3) if rank == 1 else None
        if rank == 0:
            import subprocess
            c.send_object(1, 1)
            outside = "import sys, muster; muster.MessageQueue.attach_writer(sys.argv[1], capacity=24 << 20).put_config({'object': 5})"
            writer = subprocess.Popen([sys.executable, "-c", outside, c.recv_object(1)])
        if rank == 1:
            c.recv_object(0)
            c.send_object(handle, 0)
        told.append(c.create_mq_broadcaster(1, handle).dequeue(timeout=20))
        if rank == 0:
            assert writer.wait(20) == 0
        tell(told)
        """
    )
    common = [True, {"i": 99}, "from 2"]
    assert told == [[*common, [1, [2]], 5], [*common, 5], [*common, [1, [2]], 0, 1, 2, 5]]


def test_destroy_closes_the_queue():
    """In the original the readers of a destroyed group wait for its queue without an end."""
    told = run_started(
        """
        c = coordinator(use_message_queue_broadcaster=True)
        c.broadcast_object(1)
        if rank == 0:
            c.destroy()
            c.destroy()
            tell(failure(lambda: c.barrier()))
        else:
            tell(failure(lambda: c.broadcast_object()))
        group.barrier()
        """,
        2,
    )
    assert told[0][0] == "InvalidArgumentError" and "was destroyed" in told[0][1]
    assert told[1][0] == "PeerLostError"


@long_form
def test_experts():
    told = run_started(
        """
        c = coordinator()
        hidden, logits = torch.full((rank + 1, 2), float(rank)), torch.full((rank + 1, 1), 10.0 * rank)
        pair = c.dispatch(hidden, logits)
        triple = c.dispatch(hidden_states=hidden, router_logits=logits, is_sequence_parallel=True, extra_tensors=[hidden.long()])
        back = c.combine(pair[0], is_sequence_parallel=True)
        wrong = failure(lambda: c.combine(hidden))
        model = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.Linear(4, 2).to(torch.bfloat16))
        c.prepare_communication_buffer_for_model(model)
        c.prepare_communication_buffer_for_model(torch.nn.Identity())
        tell([listed(pair), len(triple), listed(triple[2]), back.tolist(), wrong])
        """
    )
    rows = [0, 1, 1, 2, 2, 2]
    for rank, (pair, count, extra, back, wrong) in enumerate(told):
        assert pair == [[[r, r] for r in rows], [[10 * r] for r in rows]] and count == 3
        assert extra == [[[r, r] for r in rows]]
        assert back == [[3.0 * rank] * 2] * (rank + 1)
        assert wrong[0] == "InvalidArgumentError"


def test_graph_capture(monkeypatch):
    """The test replaces the streams of torch."""
    import contextlib

    from muster.compat.vllm import GraphCaptureContext, GroupCoordinator

    muster.set_world(muster.single_group())
    group = GroupCoordinator([[0]], 0, "nccl", True)
    with pytest.raises(muster.UnsupportedError), group.graph_capture():
        pass
    calls = []

    class Stream:
        def wait_stream(self, other):
            calls.append(("wait", other))

    @contextlib.contextmanager
    def stream(given):
        calls.append(("enter", given))
        yield
        calls.append(("exit", given))

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: "current")
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", stream)
    given = GraphCaptureContext(Stream())
    with group.graph_capture(given) as context:
        assert context is given and calls == [("wait", "current"), ("enter", given.stream)]
    with group.graph_capture() as context:
        assert isinstance(context.stream, Stream) and context.stream is not given.stream
    muster.set_world(None)


@long_form
def test_the_example(tmp_path):
    muster.launch([sys.executable, str(EXAMPLE)], 4, log_directory=tmp_path, timeout=180)
    assert (tmp_path / "rank-0.out").read_text().startswith("tokens [")
