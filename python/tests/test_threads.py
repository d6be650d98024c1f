# SPDX-License-Identifier: Apache-2.0
"""Threads of the interpreter: spans, waits at interpreter exit, and calls that must not stop other threads."""

import subprocess
import sys
import textwrap
import threading
import time

import numpy as np
import pytest

import muster
from ranks import Ranks


def test_spans_end_in_any_order_and_only_on_their_thread():
    spans = [muster.TraceSpan(f"span {number}") for number in range(6)]
    for order in ([0, 1, 2, 3, 4, 5], [3, 0, 5, 1, 4, 2], [5, 4, 3, 2, 1, 0]):
        for span in spans:
            span.__enter__()
        for number in order:
            spans[number].__exit__(None, None, None)
            with muster.TraceSpan("inside"):
                pass
    outer = muster.TraceSpan("of the main thread")
    outer.__enter__()
    caught = []

    def leave():
        with pytest.raises(muster.InvalidArgumentError, match="another thread") as raised:
            outer.__exit__(None, None, None)
        caught.append(raised)

    thread = threading.Thread(target=leave)
    thread.start()
    thread.join()
    assert len(caught) == 1
    # Another thread destroys spans that this one has begun.
    kept = [muster.TraceSpan("lost") for _ in range(3)]
    for span in kept:
        span.__enter__()
    del span
    thread = threading.Thread(target=kept.clear)
    thread.start()
    thread.join()
    for _ in range(100):
        with muster.TraceSpan("after"):
            pass
    outer.__exit__(None, None, None)


WAITS = {
    "barrier": "group.barrier()",
    "gather": "with muster.get_tensors_parallel(np.ones(3), None, group): pass",
    "collective": "ranks.all_reduce(np.ones(3))",
    "recv": "ranks.recv(np.ones(3), 1)",
    "queue": "queue.get()",
}


@pytest.mark.parametrize("wait", WAITS)
def test_a_daemon_thread_that_waits_does_not_abort_the_end_of_the_interpreter(wait):
    source = f"""
        import threading
        ranks = muster.ProcessGroup(group)
        queue = muster.MessageQueue(group, 1)
        if rank == 0:
            def wait():
                try:
                    {WAITS[wait]}
                except muster.Error:
                    pass
            threading.Thread(target=wait, daemon=True).start()
            time.sleep(0.05)
        else:
            time.sleep(0.3)  # rank 0 ends first, and the end of this rank wakes its thread
        tell(rank)
        os._exit(0) if rank == 1 else None
    """
    for _ in range(4):
        assert Ranks(source).told() == [[0], [1]]


def longest_pause(work):
    """Returns the longest pause of another thread while `work` ran, as a share of the run time."""
    gaps, stop = [], threading.Event()

    def look():
        last = time.perf_counter()
        while not stop.is_set():
            time.sleep(0.001)
            now = time.perf_counter()
            gaps.append(now - last)
            last = now

    thread = threading.Thread(target=look)
    thread.start()
    begin = time.perf_counter()
    work()
    taken = time.perf_counter() - begin
    stop.set()
    thread.join()
    return max(gaps) / taken


def test_work_on_many_bytes_does_not_stop_other_threads():
    tensor = muster.as_tensor(np.ones(96 << 20, "u1"))
    for work in (tensor.copy, lambda: muster._core.bitwise_equal(tensor, tensor.copy()), lambda: np.from_dlpack(tensor, copy=True)):
        # A pause as long as the work itself would be caused by the interpreter's lock. Noise of a busy machine is
        # allowed.
        assert min(longest_pause(work) for _ in range(5)) < 0.7


def test_world_and_set_world_on_two_threads_do_not_lock_up():
    source = textwrap.dedent(
        """
        import threading, muster
        def take():
            for _ in range(2000):
                muster.world()
        def put():
            for _ in range(2000):
                muster.set_world(muster.single_group())
        threads = [threading.Thread(target=each) for each in (take, put, take, put)]
        [each.start() for each in threads]
        [each.join() for each in threads]
        print("done")
        """
    )
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=60)
    assert done.stdout == "done\n", done.stderr
