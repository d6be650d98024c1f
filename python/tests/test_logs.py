# SPDX-License-Identifier: Apache-2.0
import os
import subprocess
import sys

import pytest

import muster


def run(source, **options):
    """Returns the lines that a program writes to standard output and standard error."""
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=60, **options)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines(), done.stderr.splitlines()


def test_messages_reach_the_logger():
    out, errors = run(
        """
import logging, sys, muster
logging.basicConfig(stream=sys.stdout, level=logging.DEBUG, format="%(name)s %(levelname)s %(message)s")
muster._core.log("warning", "before")
muster.use_logging("info")
for level in ("debug", "info", "warning", "error"):
    muster._core.log(level, "100 %s of " + level)
muster.use_logging("error")
muster._core.log("warning", "not passed on")
muster._core.log("error", "later")
muster.use_logging(None)
muster._core.log("error", "after")
muster.use_logging("debug")
muster._core.log("debug", "the last, before the exit")
"""
    )
    assert out == [*(f"muster {level.upper()} 100 %s of {level}" for level in ("info", "warning", "error")), "muster ERROR later", "muster DEBUG the last, before the exit"]
    assert errors == ["muster: warning: before", "muster: error: after"]


def test_messages_of_the_library_reach_the_logger():
    out, _ = run(
        """
import logging, sys, muster
logging.basicConfig(stream=sys.stdout, level=logging.DEBUG)
muster.use_logging("debug")
with muster.get_configs_parallel(1, group=muster.single_group()):
    pass
arena = muster.SharedArena("1MiB")
tensor = arena.allocate("U8", (8,))
with muster.get_tensors_parallel(tensor, group=muster.single_group(), detect_writes=True):
    tensor.numpy()[:] = 1
del tensor
"""
    )
    assert out and all(":muster:" in line for line in out)


def test_a_wrong_level_is_an_error_and_changes_nothing():
    with pytest.raises(muster.InvalidArgumentError, match="level: unknown value 'loud'"):
        muster.use_logging("loud")
    assert muster._logs._queue is None


def test_a_log_from_many_threads_neither_blocks_nor_is_lost():
    """Threads of Python that hold the GIL log at the same time as a handler that releases it, and the interpreter exits."""
    out, errors = run(
        """
import logging, sys, threading, time, muster
class Slow(logging.Handler):
    count = 0
    def emit(self, record):
        Slow.count += 1
        if Slow.count % 100 == 0:
            time.sleep(0.001)
            muster._core.log("debug", "from a handler, below the level")
logging.getLogger("muster").addHandler(Slow())
logging.getLogger("muster").setLevel(logging.INFO)
logging.getLogger("muster").propagate = False
sys.setswitchinterval(1e-5)
muster.use_logging()
def write():
    for _ in range(500):
        muster._core.log("info", "x")
threads = [threading.Thread(target=write) for _ in range(8)]
for thread in threads: thread.start()
for thread in threads: thread.join()
muster.use_logging(None)
print(Slow.count)
def forever():
    while True:
        muster._core.log("info", "x")
muster.use_logging()
for _ in range(4): threading.Thread(target=forever, daemon=True).start()
time.sleep(0.1)
logging.getLogger("muster").setLevel(logging.ERROR)
"""
    )
    assert (out, errors) == (["4000"], [])


def test_a_filter_that_raises_does_not_stop_later_messages():
    out, errors = run(
        """
import logging, sys, muster
logging.basicConfig(stream=sys.stdout, level=logging.INFO)
def check(record):
    if "bad" in record.getMessage():
        raise LookupError("the filter failed")
    return True
logging.getLogger("muster").addFilter(check)
muster.use_logging()
muster._core.log("info", "bad")
muster._core.log("info", "good")
"""
    )
    assert out == ["INFO:muster:good"] and errors[-1] == "LookupError: the filter failed"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_forked_child_writes_to_standard_error():
    out, errors = run(
        """
import logging, os, sys, muster
logging.basicConfig(stream=sys.stdout, level=logging.INFO)
muster.use_logging()
child = os.fork()
if child == 0:
    muster._core.log("warning", "of the child")
    sys.exit(0)
assert os.waitpid(child, 0)[1] == 0
muster._core.log("warning", "of the parent")
"""
    )
    assert out == ["WARNING:muster:of the parent"]
    assert [line for line in errors if line.endswith("of the child")] == ["muster: warning: of the child"]


def test_dropped_messages_are_counted():
    out, _ = run(
        """
import logging, sys, threading, muster
begun, goes_on = threading.Event(), threading.Event()
class Slow(logging.Handler):
    def emit(self, record):
        begun.set()
        goes_on.wait(30)
        print(record.getMessage())
logging.getLogger("muster").addHandler(Slow())
muster.use_logging("info")
muster._core.log("error", "first")
begun.wait(30)
for number in range(10_007):
    muster._core.log("error", str(number))
goes_on.set()
muster.use_logging(None)
"""
    )
    # Messages of the first call may have been taken together with some of the others.
    assert out[0] == "first" and out[1] == "0" and "dropped" in out[-1]
    assert len(out) - 2 + int(out[-1].split()[0]) == 10_007
