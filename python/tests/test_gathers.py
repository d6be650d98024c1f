# SPDX-License-Identifier: Apache-2.0
import inspect
import os
import pathlib
import re
import signal
import subprocess
import sys
import time
import types

import numpy as np
import pytest

import muster
from ranks import Ranks, run


def test_configs_of_three_ranks():
    told = run(
        """
        config = None if rank == 1 else {"rank": rank, "weight": np.full((2, 3), rank, "f4")}
        with muster.get_configs_parallel(config, [2, 1, 0], group) as layers:
            here = [(r, c["rank"], c["weight"].numpy().sum().item()) for r, c in layers.present()]
            found = [layers[0]["rank"], layers[1], layers.by_rank(0)["rank"]] if layers else [failure(lambda: layers[0])[0], failure(lambda: layers.by_rank(2))[0]]
            tell([bool(layers), layers.ranks, here, found, "route" in layers.explain()])
        """,
        3,
    )
    assert told[2] == [True, [2, 1, 0], [[2, 2, 12.0], [0, 0, 0.0]], [2, None, 0], True]
    assert told[0] == told[1] == [False, [2, 1, 0], [], ["IndexError", "KeyError"], True]


def test_parts_of_streams_are_indexed_by_position():
    told = run(
        """
        found = []
        for part in muster.gather_each([{"rank": rank}], [1, 0], group):
            found = [len(part), part[0]["rank"], part[-1]["rank"], part.by_rank(0)["rank"], [each["rank"] for each in part]]
            found += [failure(lambda: part[2]), failure(lambda: part.by_rank(2))]
        tell(found)
        """
    )
    assert told[0] == [] and told[1][:5] == [2, 1, 0, 0, [1, 0]] and [kind for kind, _ in told[1][5:]] == ["IndexError", "KeyError"]


def test_every_option_of_the_header_is_a_parameter():
    header = pathlib.Path(__file__).parents[2] / "include" / "muster"
    if not header.is_dir():
        pytest.skip("the tests are outside of the source tree")

    def members(file, name):
        text = re.sub(r" *//.*", "", (header / file).read_text())
        body = re.search(rf"\nstruct {name} \{{\n(.*?)\n\}};", text, re.DOTALL)[1]
        found = re.findall(r"^ +(?:[\w:<>]+|std::optional<[\w:]+>|std::vector<\w+>) (\w+) = ", body, re.MULTILINE)
        assert len(found) > 8, found
        return set(found) - {"workspace", "devices", "debug"}

    # A stop request is Future.cancel().
    gathers = {"workspace_path" if name == "path" else name for name in members("gather.hpp", "GatherOptions")} - {"stop"}
    configs, tensors, merge, stream = (
        set(inspect.signature(call).parameters)
        for call in (muster.get_configs_parallel, muster.get_tensors_parallel, muster.merge_tensor_parallel, muster.gather_each)
    )
    assert gathers - configs == {"into"} and gathers - tensors == set()
    assert gathers - merge == {"writable", "destination"}  # they have no effect on merges
    # `debug` of a stream is that of a gather.
    assert {"workspace_path" if name == "path" else name for name in members("gather_each.hpp", "StreamOptions")} - {"stop"} - stream == set()
    assert "detect_writes" in stream
    background = inspect.signature(muster.gather_each_async).parameters
    assert set(background) - stream == {"consume"} and stream <= set(background)
    for name, parallel in (("get_configs", muster.get_configs_parallel), ("get_tensors", muster.get_tensors_parallel), ("merge_tensor", muster.merge_tensor_parallel)):
        assert inspect.signature(getattr(muster, f"{name}_async")) == inspect.signature(parallel)


def test_options_reach_the_library(tmp_path):
    told = run(
        f"""
        weight = np.full(1 << 18, rank, "f4")
        def gather(**options):
            with muster.get_tensors_parallel(weight, None, group, **options) as parts:
                return [float(part.numpy()[0]) for part in parts]
        kept = gather(workspace_path={str(tmp_path)!r}, keep_files=True, zstd_level=3)
        refused = [
            failure(lambda: gather(memory_budget="1KiB")), failure(lambda: gather(pipeline_depth=-1)), failure(lambda: gather(memory_budget="much")),
            failure(lambda: gather(destination="disk")), failure(lambda: gather(zstd_level="x")), failure(lambda: gather(pool_limit=-1)),
        ]
        group.barrier()
        muster.trim(group)
        with muster.get_tensors_parallel(weight, None, group, pool_limit=0) as parts:
            pass
        group.barrier()
        tell([kept, refused, gather(memory_budget="64MiB", pipeline_depth=1, detect_writes=True), muster.trim(group)])
        """
    )
    assert told[0][0] == told[0][2] == [0.0, 1.0]
    for each in told:
        assert [kind for kind, _ in each[1]] == ["OutOfSpaceError", *["InvalidArgumentError"] * 5], each[1]
    assert list(tmp_path.rglob("*.h5")), list(tmp_path.rglob("*"))


def test_tensors_stay_valid_and_may_be_written_to():
    """Arrays made from a gathered tensor can be written in place, and the writes do not reach the sender."""
    told = run(
        """
        weight = np.full(1 << 18, rank + 1, "f4")
        with muster.get_tensors_parallel(weight, None, group, root_tensors="copy") as parts:
            held = parts[1] if parts else None
            arrays = parts.numpy()
            given = [np.from_dlpack(part) for part in parts] if parts else []
        for array in given:
            array += 1
        flags = [array.flags.writeable for array in arrays]
        with muster.get_tensors_parallel(np.full(1 << 18, 9, "f4"), None, group) as other:
            pass
        sums = [float(held.numpy().max()), float(given[1].max()), float(given[0].max())] if rank == 0 else []
        group.barrier()
        tell([flags, sums, float(weight.max())])
        """
    )
    assert told == [[[True, False], [2.0, 3.0, 2.0], 1.0], [[], [], 2.0]]


def test_results_are_writable_on_request():
    told = run(
        """
        weight = np.full(1 << 18, rank + 1, "f4")
        with muster.get_tensors_parallel(weight, None, group, writable=True) as parts:
            arrays = parts.numpy()
        for array in arrays[1:]:
            array += 10
        with muster.get_configs_parallel({"w": weight}, None, group) as other:
            again = [config["w"].is_writable for _, config in other.present()]
        tell([[float(array.max()) for array in arrays], again, float(weight.max())])
        """
    )
    assert told == [[[1.0, 12.0], [True, False], 1.0], [[], [], 2.0]]


def test_results_into_tensors_of_the_caller():
    told = run(
        """
        parts = [np.zeros(1000, "f4") for _ in range(size)] if rank == 0 else None
        with muster.get_tensors_parallel(np.full(1000, rank + 1, "f4"), None, group, into=parts):
            pass
        whole = np.zeros((2, 1000), "f4") if rank == 0 else None
        muster.merge_tensor_parallel(np.full(1000, rank + 1, "f4"), muster.merge.stack, None, group, into=whole)
        small = failure(lambda: muster.get_tensors_parallel(np.ones(2), None, group, into=parts).__enter__())
        none = failure(lambda: muster.get_tensors_parallel(np.ones(2), None, group, into=[1] if rank == 0 else None).__enter__())
        group.barrier()
        tell([rank == 0 and [[float(part.max()) for part in parts], whole.max(1).tolist()], small[0], none[0]])
        """
    )
    assert told == [[[[1.0, 2.0]] * 2, "InvalidArgumentError", "InvalidArgumentError"], [False, "InvalidArgumentError", "InvalidArgumentError"]]


def test_spans_of_the_program_are_in_the_trace(tmp_path):
    run(
        """
        with muster.TraceSpan("load weights") as span:
            span.add_bytes(1 << 20)
            group.barrier()
        again = failure(lambda: [each.__enter__() for each in [span, span]])
        tell([muster.is_tracing(), again[0]])
        """,
        environment={"MUSTER_TRACE": str(tmp_path)},
    )
    out = tmp_path / "trace.json"
    subprocess.run([os.environ["MUSTER_PROGRAM"], "trace", str(tmp_path), "--out", str(out)], check=True, timeout=60)
    assert '"load weights"' in out.read_text()


def test_merges():
    told = run(
        """
        mine = np.arange(4, dtype="f4").reshape(2, 2) + 10 * rank
        results = []
        for merge in (muster.merge.concat(1), muster.merge.stack, muster.merge.sum, muster.merge.max, muster.merge.first):
            whole = muster.merge_tensor_parallel(mine, merge, None, group)
            results.append(None if whole is None else whole.numpy().tolist())
        same = muster.merge_tensor_parallel(np.ones(2), muster.merge.same, None, group)
        differ = failure(lambda: muster.merge_tensor_parallel(np.full(2, rank), muster.merge.same, None, group))
        bad = ["sum", (), (1,), ("concat", 0), ("concat", "x", []), ("concat", 0, 5), ("sum", 1), ("mean", 0, ()), None]
        wrong = [failure(lambda: muster.merge_tensor_parallel(mine, each if rank else muster.merge.sum, None, group)) for each in bad]
        tell([results, same is not None, differ[0], [each and each[0] for each in wrong]])
        """
    )
    a, b = [[0.0, 1.0], [2.0, 3.0]], [[10.0, 11.0], [12.0, 13.0]]
    assert told[0][0] == [
        [[0.0, 1.0, 10.0, 11.0], [2.0, 3.0, 12.0, 13.0]], [a, b], [[10.0, 12.0], [14.0, 16.0]], b, a,
    ]
    assert told[0][1:] == [True, "RankMismatchError", ["InvalidArgumentError"] * 9]
    assert told[1] == [[None] * 5, False, "RankMismatchError", ["InvalidArgumentError"] * 9]


def test_one_ranks_failure_is_everybodys():
    told = run(
        """
        class Torn:
            def __dlpack__(self, **_):
                raise LookupError("torn \\ud800" + "ü" * 400)
        class Silent(Exception):
            def __str__(self):
                raise ValueError
        class Mute:
            def __dlpack__(self, **_):
                raise Silent
        def configs(value, ranks=None, **options):
            with muster.get_configs_parallel(value, ranks, group, **options):
                pass
        def tensors(value):
            with muster.get_tensors_parallel(value, None, group):
                pass
        bad = lambda value, good: value if rank == 1 else good
        failures = [failure(call) for call in (
            lambda: configs(bad({"layers": [{"scale": 1j}]}, {})),
            lambda: tensors(np.zeros(rank)),
            lambda: tensors(bad("text", np.zeros(2))),
            lambda: configs({}, route=bad("pigeon", "auto")),
            lambda: configs({}, timeout=bad("long", None)),
            lambda: configs({}, root_tensors=bad(3, "copy")),
            lambda: configs({}, bad([0, 7], [0, 1])),
            lambda: configs({}, bad([0.7], [0])),
            lambda: configs({}, bad("0", [0])),
            lambda: configs({}, bad(["0"], [0])),
            lambda: configs({}, bad([1 << 40], [0])),
            lambda: configs({}, bad(0, [0])),
            lambda: configs({}, bad((muster.make_queue_handle(0) for _ in [0]), [0])),
            lambda: configs(bad({"a": [Torn()]}, {})),
            lambda: configs(bad({"b": Mute()}, {})),
        )]
        configs({}, [np.int64(0), True])
        tell(failures)
        """
    )
    kinds, words = zip(*told[0])
    assert kinds == ("InvalidArgumentError", "RankMismatchError", *["InvalidArgumentError"] * 13)
    for found, wanted in zip(words, (
        r"rank 1 .*: config\['layers'\]\[0\]\['scale'\]: complex is not a value", "", "str is not a tensor", "route: unknown value 'pigeon'",
        "timeout: str is not a number", "root_tensors: int is not a str", r"rank 7", "ranks: float is not an int", "ranks: str is not a list",
        "ranks: str is not an int", "ranks: int is not one of 32 bits", "ranks: int is not a list", "queue handle: 0 ranks",
        r"config\['a'\]\[0\]: LookupError: torn \\ud800ü+", r"config\['b'\]: Silent: its message is not available: ValueError",
    )):
        assert re.search(wanted, found), found
    # The sent text is truncated, even in the middle of a character.
    assert [kind for kind, _ in told[1]] == list(kinds) and all(a[:400] == b[:400] for (_, a), (_, b) in zip(*told))


def test_a_lost_rank_has_a_name():
    told = Ranks(
        """
        if rank == 1:
            os._exit(7)
        try:
            group.barrier()
        except muster.PeerLostError as error:
            tell([error.rank, error.pid > 0, error.host != "", error.kind, isinstance(error, ConnectionError)])
        """
    ).told([0, 7])
    assert told[0] == [[1, True, True, "peer lost", True]]


def test_a_deadline_is_a_timeout_error():
    told = run(
        """
        if rank == 0:
            try:
                group.barrier(timeout=0.3)
            except TimeoutError as error:
                tell([isinstance(error, muster.TimeoutError), error.rank, str(error)])
        else:
            sys.stdin.read()
            tell(failure(group.barrier)[0])
        """
    )
    assert told[0][:2] == [True, 1] and "rank 1" in told[0][2] and told[1] == "TimeoutError"


# The call of rank 0 when Ctrl-C arrives, the call of rank 1 at that time, and the error on rank 1. Rank 2 does not
# exist.
LATER = "sys.stdin.read() or group.barrier()"
TCP = "muster.tcp_group('file://' + folder + '/address', rank, 3, timeout=30)"
FILES = "muster.file_group(folder, rank, 3, timeout=30)"
WAITS = {
    "barrier": ("group.barrier()", LATER, "CancelledError .*rank 0.*interrupted"),
    "gather": ("muster.get_tensors_parallel(np.ones(1 << 20), None, group).__enter__()", LATER, "CancelledError .*rank 0.*interrupted"),
    "stream": ("list(muster.gather_each(iter([{}, {}]), None, group))", LATER, "CancelledError .*rank 0"),
    "meeting": (*["muster.local_group(folder, rank, 3, timeout=30)"] * 2, "CancelledError .*rank 0.*interrupted"),
    "meeting over TCP": (TCP, TCP, "CancelledError .*rank 0.*interrupted"),
    "meeting over files": (FILES, FILES, "CancelledError .*rank 0.*interrupted"),
    "waiting for rank 0": ("muster.local_group(folder, 1, 2, timeout=30)", LATER, "PeerLostError .*rank 0"),
    "waiting for rank 0 over TCP": ("muster.tcp_group('file://' + folder + '/address', 1, 2, timeout=30)", LATER, "PeerLostError .*rank 0"),
    "waiting for an answer over TCP": ("muster.tcp_group('127.0.0.1:%d' % listener.getsockname()[1], 1, 2, timeout=30)", LATER, "PeerLostError .*rank 0"),
    "waiting for rank 0 over files": ("muster.file_group(folder, 1, 2, timeout=30)", LATER, "PeerLostError .*rank 0"),
}


@pytest.mark.parametrize("name", WAITS)
def test_ctrl_c_ends_a_wait_and_the_others_hear_of_it(name, tmp_path):
    # On a busy machine one attempt may take longer.
    seconds = []
    while len(seconds) < 3 and (not seconds or seconds[-1] > 0.2):
        seconds.append(seconds_after_ctrl_c(*WAITS[name], tmp_path / str(len(seconds))))
    assert seconds[-1] <= 0.2, seconds


def seconds_after_ctrl_c(first, second, words, folder):
    ranks = Ranks(
        f"""
        import socket
        folder = {str(folder)!r}
        os.makedirs(folder, exist_ok=True)
        listener = socket.create_server(("127.0.0.1", 0))
        tell("ready")
        if rank == 0:
            try:
                {first}
            except KeyboardInterrupt:
                tell(time.monotonic())
        else:
            tell(failure(lambda: {second}))
        """
    )
    for process in ranks.processes:
        assert process.stdout.readline() == 'told "ready"\n'
    # The ranks wait if they are asleep in ten successive checks.
    asleep, deadline = 0, time.monotonic() + 10
    while asleep < 10 and time.monotonic() < deadline:
        states = [open(f"/proc/{process.pid}/stat").read().rsplit(")", 1)[1].split()[0] for process in ranks.processes]
        asleep = asleep + 1 if set(states) == {"S"} else 0
        time.sleep(0.01)
    sent = time.monotonic()
    ranks.processes[0].send_signal(signal.SIGINT)
    told = ranks.told()
    assert re.match(words, " ".join(told[1][0])), told
    return told[0][0] - sent


def test_a_stream():
    told = run(
        """
        def layers():
            for layer in range(5):
                yield None if rank == 1 and layer == 2 else {"layer": layer, "w": np.full((256, 128), 10 * layer + rank, "f4")}
        seen = []
        for part in muster.gather_each(layers(), None, group, memory_budget="128KiB"):
            for r, config in part.present():
                w = config["w"]
                seen.append([part.layer, part.part, r, config.get("layer"), None if w is None else float(w.numpy().max())])
        group.barrier()
        tell(seen)
        """
    )
    assert told[1] == []
    for layer in range(5):
        for rank in range(2):
            rows = [row for row in told[0] if row[0] == layer and row[2] == rank]
            if (layer, rank) == (2, 1):
                assert rows == []
                continue
            assert rows[0][3] == layer and {row[4] for row in rows} - {None} == {10.0 * layer + rank}


def test_a_stream_that_fails():
    told = run(
        """
        def raises():
            yield {"a": 1}
            if rank == 1:
                raise LookupError("the tape is torn")
            yield {"a": 2}
        def left():
            for part in muster.gather_each([{}, {}, {}], None, group):
                break
        def run_through(layers, **options):
            for part in muster.gather_each(layers, None, group, **options):
                pass
        bad = lambda value, good: value if rank == 1 else good
        failures = [failure(call) for call in (
            lambda: run_through(raises()),
            lambda: run_through(bad([{"x": 1j}], [{}])),
            lambda: run_through([], memory_budget=bad("lots", "1MiB")),
            lambda: run_through([], memory_budget=bad(-1, "1MiB")),
            lambda: run_through([], pipeline_depth=bad("2", 2)),
            lambda: run_through(bad(5, [])),
            left,
        )]
        group.barrier()
        tell(failures)
        """
    )
    words = (
        r"IoError .*rank 1 .*: LookupError: the tape is torn \| File \"<string>\", line \d+, in raises",
        r"InvalidArgumentError .*rank 1 .*: config\['x'\]: complex", r"InvalidArgumentError .*rank 1 .*: 'lots' is not a size",
        "InvalidArgumentError .*rank 1 .*: -1 is not a size", "InvalidArgumentError .*rank 1 .*: pipeline_depth: str is not an int",
        "InvalidArgumentError .*rank 1 .*: layers: 'int' object is not iterable",
    )
    for each in told:
        for found, wanted in zip(each, words):
            assert re.fullmatch(wanted + ".*", " ".join(found)), found
    assert told[0][-1] is None and re.search(r"\): the (source|consumer) .*: the loop over gather_each was left early", told[1][-1][1]), told


def test_an_arena_moves_names_only():
    told = run(
        """
        arena = muster.SharedArena("4MiB")
        tensor = arena.allocate("F32", (1 << 18,))
        tensor.numpy()[:] = rank
        with muster.get_tensors_parallel(tensor, None, group) as parts:
            got = float(parts[1].numpy().max()) if parts else None
            bytes_there = parts.report()["arena_bytes"]
            group.barrier()
        tell([got, bytes_there])
        """
    )
    assert told[0][0] == 1.0 and told[1][1] == 1 << 20


def test_after_a_fork_the_child_is_told_so():
    told = run(
        """
        with muster.get_tensors_parallel(np.ones(4), None, group) as parts:
            held = list(parts)
        child = os.fork()
        if child == 0:
            name = failure(group.barrier)
            ok = name is not None and name[0] == "UnsupportedError" and all(t.numpy().sum() == 4 for t in held)
            os._exit(0 if ok else 1)
        status = os.waitpid(child, 0)[1]
        group.barrier()
        tell(status)
        """
    )
    assert told == [0, 0]


def test_workers_of_a_pool_have_tensors_and_no_groups():
    """Like the workers of a DataLoader: forked from a rank that continues to run."""
    told = run(
        """
        import multiprocessing, warnings
        warnings.simplefilter("ignore")
        with muster.get_tensors_parallel(np.full(1 << 16, rank + 1, "f4"), None, group, root_tensors="copy") as parts:
            held = list(parts)
        arena = muster.SharedArena("1MiB").allocate("F32", (4,))
        arena.numpy()[:] = rank
        def work(item):
            own = muster.as_tensor(np.full(3, item, "i4"))
            refused = failure(lambda: muster.get_tensors_parallel(own, None, group).__enter__())
            return [int(own.numpy().sum()), sum(float(t.numpy().max()) for t in held), float(arena.numpy().max()), refused[0]]
        with multiprocessing.get_context("fork").Pool(2) as pool:
            items = pool.map_async(work, range(6))
            for i in range(50):
                with muster.get_tensors_parallel(np.full(3, i), None, group) as others:
                    got = [part.numpy().tolist() for part in others]
            items = items.get(30)
        group.barrier()
        tell([items, got])
        """
    )
    for rank, (items, got) in enumerate(told):
        assert items == [[3 * item, 0.0 if rank else 3.0, float(rank), "UnsupportedError"] for item in range(6)]
        assert got == ([] if rank else [[49] * 3] * 2)


def test_threads_with_a_group_each():
    told = run(
        """
        from concurrent.futures import ThreadPoolExecutor
        groups = [group.duplicate(), muster.local_group(os.environ["TEST_KEY"] + "t", rank, size, timeout=20)]
        def work(number, own):
            found = set()
            for i in range(200):
                with muster.get_configs_parallel({"i": i, "t": np.full(100, number + rank)}, None, own) as configs:
                    found |= {(number, rank, int(config["t"].numpy().max()), config["i"] == i) for rank, config in configs.present()}
                whole = muster.merge_tensor_parallel(np.full(2, number), muster.merge.sum, None, own)
                found.add(whole and float(whole.numpy().max()))
            for part in muster.gather_each([{"n": number}] * 3, None, own):
                found |= {("stream", config["n"]) for _, config in part.present()}
            return sorted(map(str, found))
        with ThreadPoolExecutor(2) as pool:
            results = list(pool.map(work, [10, 20], groups))
        for each in groups:
            each.barrier()
        tell(results)
        """
    )
    assert told[0] == [
        sorted(map(str, {(n, 0, n, True), (n, 1, n + 1, True), 2.0 * n, ("stream", n)})) for n in (10, 20)
    ]
    assert told[1] == [["None"]] * 2


def test_ten_thousand_exchanges_do_not_grow():
    """Memory, descriptors, Python objects and references to the passed tensor must not grow."""
    told = run(
        """
        import gc
        weight = np.ones((64, 64), "f4")
        def state():
            gc.collect()
            resident = int(open("/proc/self/statm").read().split()[1])
            return [resident, len(os.listdir("/proc/self/fd")), len(gc.get_objects()), sys.getrefcount(weight)]
        for i in range(5000):
            with muster.get_configs_parallel({"i": i, "w": weight}, None, group) as configs:
                held = [config["w"] for _, config in configs.present()]
            with muster.get_tensors_parallel(weight, None, group, root_tensors="copy") as parts:
                arrays = parts.numpy()
            if i == 500:
                before = state()
        tell([now - then for now, then in zip(state(), before)])
        """
    )
    for resident, descriptors, objects, references in told:
        assert resident < 300 and (descriptors, references) == (0, 0) and objects < 50, told


def test_an_interpreter_ends_while_results_are_held():
    """Results kept in globals, in an uncollected cycle, and by a thread."""
    ranks = Ranks(
        """
        import gc, threading
        gc.disable()
        weight = np.full(1 << 16, rank, "f4")
        gathered = muster.get_configs_parallel({"w": weight}, None, group)
        layers = gathered.__enter__()
        with muster.get_tensors_parallel(weight, None, group) as parts:
            held = [*parts, *parts.numpy(), *[np.from_dlpack(part) for part in parts], *map(memoryview, parts)]
        cycle = [parts, group]
        cycle.append(cycle)
        ranks, arena = muster.ProcessGroup(group), muster.SharedArena("1MiB")
        work, tensor = ranks.irecv(np.zeros(4), 1 - rank), arena.allocate("F32", (4,))
        threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
        def hold(part=parts):
            time.sleep(0.2)
            held.append(part)
        threading.Thread(target=hold).start()
        tell(len(held))
        """
    )
    ended = [(*process.communicate(timeout=60), process.returncode) for process in ranks.processes]
    assert ended == [("told 8\n", "", 0), ("told 0\n", "", 0)]


# The step of rank 0 when its interpreter exits, and the error on rank 1.
STEPS = {
    "between two steps": ("muster.gather_each(layers, [0, 1], group); next(stream)", "IoError .*rank 0.*the interpreter of this rank exits"),
    "in a step of another thread": ("on_a_thread(layers)", "CancelledError .*rank 0"),
    "in the iterable": ("on_a_thread(map(time.sleep, [0, 60]))", ".*rank 0"),
}


@pytest.mark.parametrize("step", STEPS)
def test_an_interpreter_ends_in_the_middle_of_a_stream(step):
    source, words = STEPS[step]
    told = run(
        f"""
        import threading
        layers = [{{}}] * 1000
        def on_a_thread(items):
            has_begun = threading.Event()
            stream = muster.gather_each((has_begun.set() or item for item in items), [1, 0], group)
            threading.Thread(target=failure, args=(lambda: list(stream),), daemon=True).start()
            has_begun.wait()
        if rank == 0:
            stream = {source}
        else:
            stream = muster.gather_each(layers, {[0, 1] if "between" in step else [1, 0]}, group)
            tell(failure(lambda: [time.sleep(0.01) for part in stream]))
        """
    )
    assert re.match(words, " ".join(told[1])), told


@pytest.mark.parametrize("kind", ["tcp", "file"])
def test_other_groups(kind, tmp_path):
    make = {
        "tcp": f"muster.tcp_group('file://{tmp_path}/address', rank, size, timeout=20, key='k')",
        "file": f"muster.file_group('{tmp_path}', rank, size, timeout=20, key='k')",
    }[kind]
    told = run(
        f"""
        other = {make}
        with muster.get_tensors_parallel(np.full(10, rank), [1, 0], other) as parts:
            values = [int(part.numpy()[0]) for part in parts]
        double = other.duplicate()
        double.barrier()
        part = group.split([1])
        tell([values, other.kind, other.rank, part is None, other.info(1)["global_rank"]])
        """
    )
    assert told == [[[], told[0][1], 0, True, 1], [[1, 0], told[0][1], 1, False, 1]]


def test_ranks_of_the_program(tmp_path):
    source = """
import muster
group = muster.world()
with muster.get_configs_parallel({"rank": group.rank}) as configs:
    if configs:
        print([config["rank"] for _, config in configs.present()])
"""
    script = tmp_path / "script.py"
    script.write_text(source)
    command = [os.environ["MUSTER_PROGRAM"], "run", "-n", "3", sys.executable, str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "[0, 1, 2]" in done.stdout


def test_a_process_group_by_its_store(tmp_path):
    """A process group with only the attributes that from_process_group needs, without PyTorch."""
    told = run(
        f"""
        class Store:
            def __init__(self, name):
                self.folder = {str(tmp_path)!r} + "/" + name
            def set(self, key, value):
                name = self.folder + key.replace("/", "_")
                open(name + str(rank), "w").write(value)
                os.rename(name + str(rank), name)
            def get(self, key):
                while True:
                    try:
                        return open(self.folder + key.replace("/", "_"), "rb").read()
                    except FileNotFoundError:
                        time.sleep(0.01)
        import collections, dataclasses, types
        @dataclasses.dataclass
        class Process:
            rank: int
            world_size: int
            store: object
        pg = Process(rank, size, Store("here"))
        with muster.get_configs_parallel(rank, None, pg) as configs:
            values = list(configs)
        # Groups that are equal but not identical, and groups that are neither hashable nor weakly referenceable.
        twin = muster.from_process_group(Process(rank, size, Store("twin")))
        equal = [collections.namedtuple("Group", "rank size store")(lambda: rank, lambda: size, Store(name)) for name in ("a", "b")]
        plain = types.SimpleNamespace(rank=rank, world_size=size, store=Store("plain"))
        groups = [muster.from_process_group(each) for each in (*equal, plain, pg, *equal, plain)] + [twin]
        kinds = [len(set(map(id, groups))), groups[:3] == groups[4:7]]
        apart = Process(rank, size, Store("apart"))
        # A closed group meets anew.
        closed = Process(rank, size, Store("closed"))
        for turn in range(3):
            with muster.from_process_group(closed) as again:
                again.barrier()
        muster._groups._place = lambda: f"host {{rank}}"
        with muster.get_configs_parallel(rank, None, apart) as configs:
            others = list(configs)
        sizes = failure(lambda: muster.from_process_group(Process(rank, size + rank, Store("sizes"))))
        world = failure(lambda: muster.from_process_group(Process(rank, 1 if rank else size, Store("world"))))
        tell([values, muster.from_process_group(pg) is muster.from_process_group(pg), others, muster.from_process_group(apart).kind, kinds, sizes, world])
        """
    )
    for rank, (values, is_same, others, kind, kinds, sizes, world) in enumerate(told):
        assert (values, is_same, others, kinds) == ([0, 1] if rank == 0 else [], True, values, [5, True])
        assert sizes[0] == "RankMismatchError" and re.search("rank . has [23] ranks, and rank . has [23]", sizes[1])
        # The rank's own numbers are invalid.
        assert world[0] == ("InvalidArgumentError" if rank else "RankMismatchError")
        # The ranks claim to be on several hosts, but detect that they share one.
        assert kind != "local"


def test_results_outside_of_with():
    gather = muster.get_configs_parallel(1, group=muster.single_group())
    with pytest.raises(RuntimeError, match="not begun"):
        len(gather)
    with gather as configs:
        assert configs[0] == configs[-1] == configs.by_rank(0) == 1 and list(configs) == configs[:] == [1]
        with pytest.raises(IndexError, match=r"index 3 is out of range for 1 entries: the list is \[0\]"):
            configs[3]
        with pytest.raises(KeyError, match=r"rank 3 has no entry here: the list is \[0\]"):
            configs.by_rank(3)
    with pytest.raises(RuntimeError, match="ended"):
        configs[0]
    with pytest.raises(RuntimeError, match="once"):
        gather.__enter__()
    for group in (0, "world", object(), 1.5, types.SimpleNamespace(store=1, rank=0), types.SimpleNamespace(store=1, rank="0", world_size=1)):
        with pytest.raises(muster.InvalidArgumentError, match="is not a group.*: pass a muster.Group"):
            with muster.get_configs_parallel(1, group=group):
                pass
