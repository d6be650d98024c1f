# SPDX-License-Identifier: Apache-2.0
import muster
from ranks import run


def test_collectives_in_place():
    told = run(
        """
        ranks = muster.ProcessGroup(group)
        a = np.full(4, rank + 1, "f4")
        ranks.all_reduce(a)
        b = np.zeros(4, "f4")
        ranks.all_reduce_into(b, np.full(4, rank + 1, "f4"), "max")
        c = np.full(2, rank, "i8")
        ranks.broadcast(c, 2)
        d = np.full(2, rank + 1, "i4")
        ranks.reduce(d, 1, "product")
        e = np.zeros((3, 2), "i4")
        ranks.all_gather_into(e, np.full((1, 2), rank, "i4"))
        f = [np.zeros(1, "i4") for _ in range(3)]
        ranks.all_gather_into(f, np.full(1, rank, "i4"))
        g = np.zeros(1, "f4")
        ranks.reduce_scatter_into(g, np.arange(3, dtype="f4"))
        h = np.zeros(2, "i4")
        ranks.scatter(h, [np.full(2, i, "i4") for i in range(3)] if rank == 0 else None, 0)
        i = np.zeros(3, "i4")
        ranks.all_to_all_into(i, np.arange(3, dtype="i4") + 10 * rank)
        j = [np.zeros(1, "i4") for _ in range(3)] if rank == 2 else None
        ranks.gather_into(j, np.full(1, rank, "i4"), 2)
        ranks.barrier()
        tell([x.tolist() for x in (a, b, c, d, e, *f, g, h, i)] + [[x.tolist() for x in j or []]])
        """,
        3,
    )
    for rank, each in enumerate(told):
        assert each[:3] == [[6.0] * 4, [3.0] * 4, [2, 2]]
        assert each[3] == ([6, 6] if rank == 1 else [rank + 1] * 2)
        assert each[4:8] == [[[0, 0], [1, 1], [2, 2]], [0], [1], [2]]
        assert each[8:11] == [[3.0 * rank], [rank, rank], [rank, 10 + rank, 20 + rank]]
        assert each[11] == ([[0], [1], [2]] if rank == 2 else [])


def test_collectives_with_results():
    told = run(
        """
        ranks = muster.ProcessGroup(group, timeout=20)
        mine = np.full((1, 2), rank, "f4")
        results = [
            ranks.all_reduce_shared(mine, "average"), ranks.all_gather_shared(mine), ranks.all_gather(mine, 1),
            ranks.all_gatherv(np.full(rank + 1, rank, "f4")), ranks.reduce_scatter(np.ones(4, "f4")),
            ranks.reduce_scatter(np.ones(3, "f4"), sizes=[1, 2]), ranks.gather(mine, 0), ranks.gatherv(mine, 1),
            ranks.all_to_all(np.arange(2, dtype="f4")), ranks.all_to_allv(np.full(2, rank, "f4"), [rank, 2 - rank])[0],
        ]
        configs = [ranks.broadcast_config({"from": rank}, 1), ranks.all_gather_config([rank]), ranks.gather_config(rank, 0)]
        part = ranks.split([1])
        names = [ranks.global_rank(1), ranks.group_rank(7), part is None or part.size, ranks.backend]
        tell([[None if x is None else x.numpy().tolist() for x in results], configs, names])
        """
    )
    common = [[[0.5, 0.5]], [[0.0, 0.0], [1.0, 1.0]], [[0.0, 0.0, 1.0, 1.0]], [0.0, 1.0, 1.0], [2.0, 2.0]]
    both = [[0.0, 0.0], [1.0, 1.0]]
    assert told[0] == [
        [*common, [2.0], both, None, [0.0, 0.0], [1.0]],
        [{"from": 1}, [[0], [1]], [0, 1]], [1, None, True, "shared memory"],
    ]
    assert told[1] == [
        [*common, [2.0, 2.0], None, both, [1.0, 1.0], [0.0, 0.0, 1.0]],
        [{"from": 1}, [[0], [1]], []], [1, None, 1, "shared memory"],
    ]


def test_messages():
    told = run(
        """
        ranks = muster.ProcessGroup(group)
        other = 1 - rank
        out = np.zeros(3, "i4")
        work = ranks.irecv(out, other)
        sent = ranks.isend(np.full(3, rank, "i4"), other)
        sender = work.get()
        sent.get()
        config = ranks.irecv_config(None, None)
        ranks.isend_config({"n": rank}, other, 5).get()
        received = config.get()
        if rank == 0:
            ranks.send(np.ones(1), 1, 3)
            ranks.send_config("x", 1)
            more = None
        else:
            more = [ranks.recv_config(0), ranks.probe(None)[:2], ranks.recv(np.zeros(1), None, 3), ranks.probe(0)]
        tell([out.tolist(), sender, received, more])
        """
    )
    assert told[0] == [[1, 1, 1], 1, [{"n": 1}, 1, 5], None]
    assert told[1] == [[0, 0, 0], 0, [{"n": 0}, 0, 5], [["x", 0, 0], [0, 3], 0, None]]


def test_failures():
    told = run(
        """
        ranks = muster.ProcessGroup(group)
        read_only = np.ones(2)
        read_only.flags.writeable = False
        failures = [failure(lambda: ranks.all_reduce(read_only if rank else np.ones(2))),
                    failure(lambda: ranks.all_reduce(np.ones(2 + rank))),
                    failure(lambda: ranks.broadcast(np.ones(2), 5))]
        ranks.barrier()
        failures.append(failure(lambda: ranks.all_reduce("text" if rank else np.ones(2))))
        ranks.barrier()
        tell(failures)
        """
    )
    kinds = ["InvalidArgumentError", "RankMismatchError", "InvalidArgumentError", "InvalidArgumentError"]
    for each in told:
        assert [kind for kind, _ in each] == kinds
        assert "str is not a tensor" in each[3][1]


# Calls with a wrong argument on rank 1, and the message that all ranks raise.
WRONG = {
    "root": ("ranks.broadcast(t, bad('0', 0))", "root: str is not an int"),
    "no root": ("ranks.gather(t, bad(None, 0))", "root: NoneType is not an int"),
    "op": ("ranks.all_reduce(t, bad(3, 'sum'))", "op: int is not a str"),
    "unknown op": ("ranks.all_reduce(t, bad('mean', 'sum'))", "op: unknown value 'mean'"),
    "no tensor": ("ranks.all_reduce(bad(None, t))", "NoneType is not a tensor"),
    "timeout": ("ranks.all_gather(t, timeout=bad(0, 20))", "timeout: 0 s is not more than 0"),
    "timeout of text": ("ranks.barrier(timeout=bad('1', 20))", "timeout: str is not a number"),
    "dim": ("ranks.all_gather(t, bad(0.5, 0))", "dim: float is not an int"),
    "sizes": ("ranks.reduce_scatter(t, sizes=bad(['1'], [1, 1]))", "sizes: str is not an int"),
    "rows": ("ranks.all_to_allv(t, bad(1, [1, 1]))", "rows: int is not a list"),
    "parts": ("ranks.all_gather_into(bad([t, 1], [t, t]), t)", "int is not a tensor"),
    "config": ("ranks.all_gather_config(bad(1j, 1))", "config: complex is not a value"),
    "ranks": ("ranks.split(bad('01', [0, 1]))", "ranks: str is not a list"),
    "queue writer": ("muster.MessageQueue(ranks.made_of, bad('1', 1))", "writer: str is not an int"),
    "queue reader": ("muster.MessageQueue(ranks.made_of, 1, reader=bad(0.5, 0))", "reader: float is not an int"),
    "queue capacity": ("muster.MessageQueue(ranks.made_of, capacity=bad('much', '1MiB'))", "not a size"),
    "queue dead_reader": ("muster.MessageQueue(ranks.made_of, dead_reader=bad('dorp', 'drop'))", "dead_reader: unknown value"),
    "queue handle": ("muster.MessageQueue(ranks.made_of, external_writer=bad(7, ''))", "external_writer: int is not a str"),
    "queue timeout": ("muster.MessageQueue(ranks.made_of, timeout=bad(0, 20))", "timeout: 0 s is not more than 0"),
    "a group's duplicate": ("ranks.made_of.duplicate(bad(0, 20))", "timeout: 0 s is not more than 0"),
    "a group's split": ("ranks.made_of.split(bad([0.5], [0, 1]))", "ranks: float is not an int"),
    "group": ("muster.ProcessGroup(ranks.made_of, timeout=bad(-1, 20))", "timeout: -1 s is not more than 0"),
}


def test_wrong_arguments_are_errors_on_all_ranks_and_the_groups_remain_usable():
    told = run(
        f"""
        bad = lambda value, good: value if rank == 1 else good
        t = np.ones(2, "f4")
        class Ranks(muster.ProcessGroup):
            def __init__(self):
                self.made_of = group.duplicate()
                super().__init__(self.made_of)
        told = []
        ranks = Ranks()
        for source in {[source for source, _ in WRONG.values()]!r}:
            told.append(failure(lambda: eval(source)))
            assert ranks.all_reduce_shared(t).numpy().tolist() == [2, 2]
            ranks.made_of.barrier()
        # A barrier carries no error.
        only_here = failure(lambda: ranks.made_of.barrier(bad('1', 20)))
        assert (only_here is None) == (rank == 0), only_here
        ranks.made_of.barrier()
        # A message has no other rank that could receive the error.
        told += [failure(lambda: ranks.send(t, "1")), failure(lambda: ranks.irecv(t, 0, tag="x"))]
        tell(told)
        """
    )
    for each in told:
        for name, (_, words), found in zip(WRONG, WRONG.values(), each):
            assert found and found[0] == "InvalidArgumentError" and "rank 1" in found[1] and words in found[1], (name, found)
        assert [kind for kind, _ in each[len(WRONG):]] == ["InvalidArgumentError"] * 2


def test_reduce_op():
    assert muster.ReduceOp.SUM == "sum" and f"{muster.ReduceOp.AVERAGE}" == "average" and len(muster.ReduceOp) == 5
    told = run(
        """
        ranks = muster.ProcessGroup(group)
        mine = np.full(2, rank + 2, "f4")
        out = np.zeros(2, "f4")
        found = []
        for op in muster.ReduceOp:
            for each in (op, op.value):
                ranks.all_reduce_into(out, mine, each)
                ranks.all_reduce(own := mine.copy(), each)
                ranks.reduce(at_root := mine.copy(), 0, each)
                ranks.reduce_scatter_into(part := np.zeros(1, "f4"), mine, each)
                parts = [ranks.all_reduce_shared(mine, each).tolist(), ranks.reduce_scatter(mine, op=each).tolist()]
                values = {*out.tolist(), *own.tolist(), *part.tolist(), *parts[0], *parts[1], *(at_root.tolist() if rank == 0 else [])}
                assert len(values) == 1, values
            found.append(values.pop())
        tell(found)
        """
    )
    assert told == [[5.0, 6.0, 2.0, 3.0, 2.5]] * 2  # in the order of the class


def test_closed_groups():
    told = run(
        """
        def of_closed(thing, calls):
            assert thing.is_closed
            thing.close()
            return sorted({str(failure(call)) for call in calls})
        with group.duplicate() as other:
            other.barrier()
            with muster.ProcessGroup(other) as ranks, muster.MessageQueue(other) as queue:
                queue.put(b"last") if rank == 0 else None
                shared = ranks.all_reduce_shared(np.ones(1 << 16, "f4"))
                work = ranks.irecv(np.zeros(1), 1 - rank)
                other.close()
                ranks.barrier()  # has memory of its own
                got = [queue.get().decode() if rank else None, shared[0].item()]
        messages = of_closed(ranks, [ranks.barrier, lambda: ranks.rank, lambda: ranks.send(np.ones(1), 0), lambda: ranks.all_reduce(np.ones(1)), lambda: ranks.split([0])])
        messages += of_closed(queue, [queue.has_message, lambda: queue.put(b""), lambda: queue.get_config()])
        use = lambda group: muster.get_configs_parallel(1, None, group).__enter__()
        messages += of_closed(other, [other.barrier, other.duplicate, lambda: other.size, lambda: use(other), lambda: muster.ProcessGroup(other), lambda: muster.set_world(other)])
        messages += [str(failure(work.get)), repr(other), got]
        group.barrier()
        tell(messages)
        """
    )
    closed = [str(["InvalidArgumentError", f"{name}: it was closed: use it before close(), or make a new one"]) for name in ("ProcessGroup", "MessageQueue", "Group")]
    for rank, each in enumerate(told):
        assert each[:3] == closed and "group has been destroyed" in each[3] and each[4:] == ["muster.Group(closed)", [["last"], [None]][rank == 0] + [2.0]]


def test_a_rank_that_closes_its_group_has_left():
    told = run(
        """
        other = group.duplicate()
        if rank == 0:
            other.close()
            tell(None)
        else:
            tell(failure(other.barrier))
        group.barrier()
        """
    )
    assert told[0] is None and told[1][0] == "PeerLostError" and "rank 0" in told[1][1]


def test_a_closed_group_returns_its_memory_and_a_closed_world_can_be_formed_again():
    told = run(
        """
        first = group.duplicate()
        muster.set_world(first)
        assert muster.world() is first
        with muster.get_tensors_parallel(np.ones(1 << 22, "f4")) as parts:
            held = [part.numpy() for part in parts]
        first.barrier()
        def mapped():
            return sum("memfd" in line or "muster" in line for line in open("/proc/self/maps"))
        before = mapped()
        del held, parts
        first.close()
        after = mapped()
        second = muster.world()  # no launcher: a group of this process
        muster.set_world(group)
        assert muster.world() is group
        tell([after < before, second.size, second is muster.world(), first.is_closed])
        group.barrier()
        """
    )
    assert told == [[True, 1, False, True]] * 2


def test_a_group_that_is_closed_during_a_call_of_another_thread():
    told = run(
        """
        import threading
        other = group.duplicate()
        results = []
        thread = threading.Thread(target=lambda: results.append(failure(other.barrier)))
        if rank == 0:
            thread.start()
            time.sleep(0.3)
            other.close()  # the call keeps the group
            group.barrier()
            thread.join()
        else:
            group.barrier()
            other.barrier()
        tell([results, failure(other.barrier)])
        group.barrier()
        """
    )
    assert told[0][0] == [None] and told[0][1][0] == "InvalidArgumentError"


def test_queue():
    told = run(
        """
        import subprocess, sys
        queue = muster.MessageQueue(group, 1)
        if rank == 1:
            queue.put(b"abc")
            queue.put(b"x" * (9 << 20))
            queue.put_config({"a": np.arange(3, dtype="i4"), "b": None})
            got = []
        else:
            got = [queue.get().decode(), len(queue.get())]
            config = queue.get_config()
            got += [config["a"].numpy().tolist(), config["b"], queue.has_message()]
        for bad in (lambda: muster.MessageQueue(group, 9), lambda: muster.MessageQueue(group, capacity="1KiB"), lambda: muster.MessageQueue(group, dead_reader="x")):
            try:
                bad()
            except muster.InvalidArgumentError:
                got.append("refused")
        handle = muster.ProcessGroup(group).broadcast_config(muster.make_queue_handle(3) if rank == 0 else None, 0)
        outside = "import muster, sys; muster.MessageQueue.attach_writer(sys.argv[1]).put(b'from outside')"
        writer = subprocess.Popen([sys.executable, "-c", outside, handle]) if rank == 0 else None
        got.append(muster.MessageQueue(group, external_writer=handle).get().decode())
        if writer:
            got.append(writer.wait())
        tell(got)
        """,
        3,
    )
    read = ["abc", 9 << 20, [0, 1, 2], None, False]
    ends = ["refused"] * 3 + ["from outside"]
    assert told == [[*read, *ends, 0], ends, [*read, *ends]]
