# SPDX-License-Identifier: Apache-2.0
import asyncio

import numpy as np

import muster
from ranks import Ranks, run


def test_gathers_in_the_background():
    told = run(
        """
        weight = np.full(1 << 16, rank, "f4")
        futures = [
            muster.get_tensors_async(weight, None, group), muster.get_configs_async({"rank": rank}, [1, 0], group),
            muster.merge_tensor_async(weight, muster.merge.sum, group=group), muster.get_tensors_async(weight, None, group, root_tensors="copy"),
        ]
        group.barrier()  # calls of the group are independent
        parts, configs, merged, copied = [future.result(timeout=20) for future in futures]
        with parts:
            found = [[part[0].item() for part in parts], "route" in parts.explain()]
        found += [failure(lambda: len(parts)), failure(parts.__enter__)]
        found += [[each["rank"] for each in configs], configs.ranks, merged and merged[0].item(), [part[5].item() for part in copied]]
        tell([*found, [future.done() for future in futures], futures[0].cancel()])
        """
    )
    ended = [["RuntimeError", "this gather has ended"], ["RuntimeError", "a gather is made once: call it again for the next one"]]
    assert told[0] == [[0.0, 1.0], True, *ended, [], [1, 0], 1.0, [0.0, 1.0], [True] * 4, False]
    assert told[1] == [[], True, *ended, [1, 0], [1, 0], None, [], [True] * 4, False]


def test_futures_are_awaitable_and_compatible():
    told = run(
        """
        import asyncio, concurrent.futures
        weight = np.full(4, rank + 1, "f4")
        async def main():
            merged, configs = await asyncio.gather(muster.merge_tensor_async(weight, muster.merge.max, group=group), muster.get_configs_async(rank, None, group))
            with await muster.get_tensors_async(weight, None, group) as parts:
                values = [part.tolist()[0] for part in parts]
            try:
                await muster.get_tensors_async(np.zeros(3 + rank), None, group)
            except muster.RankMismatchError as error:
                failure = str(error)
            return [merged and merged.tolist()[0], list(configs), values, "[3]" in failure and "[4]" in failure]
        found = asyncio.run(main())
        futures = [muster.get_configs_async(number, None, group) for number in range(3)]
        done, left = concurrent.futures.wait(futures, timeout=20)
        called = []
        futures[0].add_done_callback(called.append)
        found += [len(done), len(left), called == futures[:1], isinstance(futures[0], muster.Future) and isinstance(futures[0], concurrent.futures.Future)]
        tell(found)
        group.barrier()
        """
    )
    assert told == [[2.0, [0, 1], [1.0, 2.0], True, 3, 0, True, True], [None, [], [], True, 3, 0, True, True]]


def test_wrong_arguments_reach_all_ranks_in_order():
    told = run(
        """
        first = muster.get_configs_async(1, None, group)
        found = []
        for bad in (lambda: muster.get_configs_async(1j if rank else 1, None, group), lambda: muster.get_tensors_async(np.ones(1), None, group, route="x" if rank else "auto"),
                    lambda: muster.merge_tensor_async(np.ones(1), "sum" if rank else muster.merge.sum, group=group), lambda: muster.get_configs_async(1, None, group, timeout=0 if rank else 9)):
            if rank:
                found.append(failure(bad))
            else:
                found.append(failure(bad().result))
        last = muster.get_configs_async(2, None, group)
        tell([found, list(first.result()), list(last.result())])
        """
    )
    for each in told:
        assert [kind for kind, _ in each[0]] == ["InvalidArgumentError"] * 4, each[0]
        for (_, message), words in zip(each[0], ("complex is not a value", "route: unknown value 'x'", "'sum' is not a merge", "timeout: 0 s")):
            assert words in message
    assert told[0][1:] == [[1, 1], [2, 2]]


def test_streams_in_the_background():
    told = run(
        """
        import asyncio, weakref
        seen, held = [], []
        def layers():
            for layer in range(4):
                yield None if rank == 1 and layer == 2 else {"w": np.full((64, 64), 10 * layer + rank, "f4")}
        def consume(part):
            held.append(part)
            for r, config in part.present():
                w = config["w"]
                seen.append([part.layer, r, None if w is None else float(w.numpy().max())])
        last = weakref.ref(consume)
        stream = muster.gather_each_async(layers(), consume, None, group, memory_budget="1MiB")
        after = muster.get_configs_async(rank, [1, 0], group)
        group.barrier()
        report = stream.result(timeout=20)
        found = [seen, [len(part) for part in held], [report["layers"], report["parts"] > 0, stream.cancel()], list(after.result())]
        async def main():
            return (await muster.gather_each_async([{}], lambda part: None, [1, 0], group))["layers"]
        found.append(asyncio.run(main()))
        # Nothing of the library keeps the functions.
        del consume
        found.append(last() is None)
        tell(found)
        """
    )
    rows = [[layer, rank, 10.0 * layer + rank] for layer in range(4) for rank in range(2) if (layer, rank) != (2, 1)]
    assert told[0] == [rows, [0] * 4, [4, True, False], [], 1, True]
    assert told[1] == [[], [], [4, True, False], [1, 0], 1, True]


def test_streams_in_the_background_that_fail():
    told = run(
        """
        def raises():
            yield {"a": 1}
            if rank == 1:
                raise LookupError("the tape is torn")
            yield {"a": 2}
        def refuses(part):
            raise ValueError("no room on the shelf")
        bad = lambda value, good: value if rank == 1 else good
        ignore = lambda part: None
        def causes(call):
            try:
                call()
            except muster.Error as error:
                return [type(error).__name__, str(error), type(error.__cause__).__name__]
        failures = [causes(lambda: call().result(timeout=20)) for call in (
            lambda: muster.gather_each_async(raises(), ignore, None, group),
            lambda: muster.gather_each_async([{}], refuses, None, group),
            lambda: muster.gather_each_async(bad([{"x": 1j}], [{}]), ignore, None, group),
            lambda: muster.gather_each_async(bad(5, []), ignore, None, group),
            lambda: muster.gather_each_async([], ignore, None, group, memory_budget=bad("lots", "1MiB")),
            lambda: muster.gather_each_async([], bad(None, ignore), None, group),
        )]
        tell([failures, muster.gather_each_async([{}], ignore, None, group).result(timeout=20)["layers"]])
        """
    )
    words = [
        ("IoError", "LookupError: the tape is torn", 1), ("IoError", "ValueError: no room on the shelf", 0), ("InvalidArgumentError", "config['x']: complex", 1),
        ("InvalidArgumentError", "layers: 'int' object is not iterable", 1), ("InvalidArgumentError", "'lots' is not a size", None), ("InvalidArgumentError", "consume: NoneType", 1),
    ]
    for rank, (failures, layers) in enumerate(told):
        assert layers == 1
        for (kind, message, cause), (wanted, text, origin) in zip(failures, words):
            assert kind == wanted and text in message and (cause != "NoneType") == (rank == origin), (rank, kind, message, cause)


CANCEL = """
        import asyncio, concurrent.futures
        muster.get_configs_async(0, None, group).result()
        if rank == 0:
            {start}
            tell(found)
        else:
            time.sleep(0.5)
            tell(failure(lambda: muster.get_configs_async(1, None, group).result()))
        """


def test_cancel_aborts_the_group():
    start = """
            future = muster.get_configs_async(1, None, group)
            time.sleep(0.1)
            found = [future.done(), future.cancel(), future.cancelled(), future.cancel()]
            try:
                future.result()
            except concurrent.futures.CancelledError:
                found.append("cancelled")
            begun = time.monotonic()
            found.append(failure(lambda: muster.get_configs_async(1, None, group).result())[0])
            found.append(time.monotonic() - begun < 10)
            """
    told = run(CANCEL.format(start=start))
    assert told[0] == [False, True, True, True, "cancelled", "CancelledError", True]
    assert told[1][0] == "CancelledError" and "rank 0" in told[1][1]


def test_a_task_that_times_out_cancels_its_gather():
    start = """
            async def main():
                try:
                    await asyncio.wait_for(muster.get_configs_async(1, None, group), 0.1)
                except asyncio.TimeoutError:
                    return "timeout"
            found = asyncio.run(main())
            """
    told = run(CANCEL.format(start=start))
    assert told[0] == "timeout" and told[1][0] == "CancelledError"


def test_the_exit_waits_for_calls_in_the_background():
    told = run(
        """
        muster.get_configs_async(0, None, group).result()
        mine = np.ones(1 << 20)
        if rank == 1:
            time.sleep(0.5)
        future = muster.get_tensors_async(mine, None, group)
        del future, mine
        import atexit
        atexit.register(lambda: tell("exit"))
        """
    )
    assert told == ["exit", "exit"]


def test_the_exit_ends_if_the_other_rank_has_left():
    told = run(
        """
        muster.get_configs_async(0, None, group).result()
        future = muster.get_tensors_async(np.ones(1 << 16), None, group) if rank == 0 else None
        tell(None)
        """
    )
    assert told == [None, None]


def test_ctrl_c_ends_the_wait_of_the_exit():
    told = Ranks(
        """
        muster.get_configs_async(0, None, group).result()
        if rank == 0:
            future = muster.get_tensors_async(np.ones(1 << 16), None, group)
            import threading
            timer = threading.Timer(0.7, lambda: os.kill(os.getpid(), signal.SIGINT))
            timer.daemon = True
            timer.start()
            tell(None)
        else:
            tell(failure(lambda: (time.sleep(1.5), group.barrier())))
        """
    ).told()
    assert told[0] == [None] and told[1][0][0] == "CancelledError"


def test_an_export_is_awaitable(tmp_path):
    async def main():
        work = muster.export_model({"a": np.ones(4, "f4")}, tmp_path / "out", group=muster.single_group(), wait=False)
        return await work

    report = asyncio.run(main())
    assert report["manifest"]["out"]["tensors"] == 1 and (tmp_path / "out" / "model.safetensors").exists()
