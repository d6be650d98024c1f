# SPDX-License-Identifier: Apache-2.0
"""Operations in progress: the collectives of a group in their order, and its messages."""

from __future__ import annotations

import atexit
import os
import threading
import time
import weakref

import torch
import torch.distributed as distributed

from .. import _core, errors


def torch_error(error, seconds):
    """Returns the RuntimeError that programs expect from a backend.

    Its cause is the error of muster, with rank, host and pid.
    """
    prefix = f"Timed out waiting {int(seconds * 1000)}ms: " if isinstance(error, errors.TimeoutError) else ""
    raised = distributed.DistBackendError(f"muster: {prefix}{error}")
    raised.__cause__ = error
    return raised


class Work(distributed.Work):
    """An operation that has been started. `results` are the tensors that it writes."""

    def __init__(self, results):
        super().__init__()
        self._results = results
        self._error = None
        self._has_ended = False
        self._ended = threading.Condition(threading.Lock())
        self._future = None

    def end(self, error=None):
        with self._ended:
            self._error = error
            self._has_ended = True
            future = self._future
            self._ended.notify_all()
        if future is not None:
            self._notify(future)

    def _notify(self, future):
        if self._error is None:
            future.set_result(self._results)
        else:
            future.set_exception(self._error)

    def _await(self, seconds):
        """Waits until the operation has ended, for at most `seconds`. None: the deadline of the operation applies."""
        with self._ended:
            self._ended.wait_for(lambda: self._has_ended, seconds)

    def wait(self, timeout=None):
        if not self._has_ended:
            seconds = timeout.total_seconds() if timeout is not None else 0
            self._await(seconds if seconds > 0 else None)
            if not self._has_ended:
                raise distributed.DistBackendError(f"muster: Timed out waiting {int(seconds * 1000)}ms for an operation in progress")
        if self._error is not None:
            raise self._error
        return True

    def synchronize(self):
        self.wait()

    def is_completed(self):
        return self._has_ended

    def is_success(self):
        return self._has_ended and self._error is None

    def exception(self):
        return self._error

    def result(self):
        return self._results

    def get_future(self):
        with self._ended:
            if self._future is not None:
                return self._future
            self._future = torch.futures.Future()
            has_ended = self._has_ended
        if has_ended:
            self._notify(self._future)
        return self._future


# Threads must not be inside a call when the interpreter exits. A forked child does not have these threads.
_lanes: weakref.WeakSet = weakref.WeakSet()


@atexit.register
def _at_exit():
    for lane in list(_lanes):
        lane.end("the interpreter of this rank exits while operations are in progress")


def _after_fork():
    for lane in list(_lanes):
        lane.give_up()


os.register_at_fork(after_in_child=_after_fork)


class _Lane:
    """The operations of a muster.ProcessGroup, which one thread at a time uses, and the thread that runs them."""

    def __init__(self, ranks):
        self.ranks = ranks
        self._use = threading.Lock()
        self._begin_empty()
        _lanes.add(self)

    def _begin_empty(self):
        self._under_way = []
        self._changed = threading.Condition(threading.Lock())
        self._thread = None
        self._ends = False

    def _add(self, item):
        with self._changed:
            if self._ends:
                raise distributed.DistBackendError("muster: the process group has ended in this process: create a new one")
            self._under_way.append(item)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="muster.torch", daemon=True)
                self._thread.start()
            self._changed.notify()

    def end(self, reason=None):
        """Ends the lane after its operations.

        With a reason it aborts them, so that they raise CancelledError on all ranks.
        """
        with self._changed:
            self._ends = True
            is_busy = self._is_busy()
            self._changed.notify()
        if is_busy and reason is not None:
            self.ranks.abort(reason)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def _is_busy(self):
        return bool(self._under_way)

    def give_up(self):
        self._use = threading.Lock()
        self._begin_empty()
        self._ends = True


class Collectives(_Lane):
    """Runs calls one after another.

    A call runs on the thread of a caller that waits, if no other call is queued, and otherwise on the thread of the lane.
    """

    def run(self, call, results, seconds, waits):
        """Runs a call. Returns its Work, or None after its end if the caller waits."""
        # The callback of a future runs on this thread, and its calls must not wait for the thread.
        is_own = threading.current_thread() is self._thread
        if waits and (is_own or not self._under_way) and self._use.acquire(blocking=is_own):
            try:
                self._call(call, seconds)
            finally:
                self._use.release()
            return None
        work = Work(results)
        self._add((call, work, seconds))
        if waits:
            work.wait()
            return None
        return work

    def _call(self, call, seconds):
        try:
            call()
        except errors.Error as error:
            raise torch_error(error, seconds) from error
        except Exception as error:
            # The other ranks would wait for this rank.
            self.ranks.abort(f"{type(error).__name__}: {error}")
            raise

    def _run(self):
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._under_way or self._ends)
                if not self._under_way:
                    return
                call, work, seconds = self._under_way[0]
            error = None
            with self._use:
                try:
                    self._call(call, seconds)
                except Exception as raised:
                    error = raised
            with self._changed:
                del self._under_way[0]
            work.end(error)
            del call, work, error  # and with them the tensors


class _Message(Work):
    def __init__(self, lane, tensors, about, seconds):
        super().__init__(tensors)
        self.about = about
        self.seconds = seconds
        self.begun = _core.clock()
        self.operation = None
        self.finish = None
        self.sender = None
        self._lane = lane

    def _await(self, seconds):
        self._lane.await_one(self, seconds)

    def is_completed(self):
        self._lane.look([self])
        return self._has_ended

    def source_rank(self):
        return self.sender

    _source_rank = source_rank


class Messages(_Lane):
    """Messages make progress while a thread waits for one of them. Otherwise the thread of the lane moves them."""

    # A wait of this length detects lost ranks. It also delays the start of a message of another thread.
    _SLICE = 0.1
    _BETWEEN_LOOKS = 0.002
    # An idle thread polls this many times before it sleeps, because waking it costs more.
    _IDLE_LOOKS = 200

    def __init__(self, ranks):
        super().__init__(ranks)
        self._wanting = 0

    def begin(self, start, tensors, about, seconds, finish=None):
        """Returns a Work of the operation that start() begins, also if that fails. A success calls finish()."""
        work = _Message(self, tensors, about, seconds)
        work.finish = finish
        self._wanting += 1
        try:
            with self._use:
                work.operation = start()
                self._step(work, None)
        except errors.Error as error:
            # A failure of the group may be detected here or during a wait.
            work.end(torch_error(error, seconds))
        finally:
            self._wanting -= 1
        if not work.is_success() and work.exception() is None:
            self._add(work)
        return work

    def _is_busy(self):
        return any(not work._has_ended for work in self._under_way)

    def look(self, works):
        """Moves the messages that can make progress now."""
        if self._use.acquire(blocking=False):
            try:
                for work in works:
                    self._step(work, None)
            finally:
                self._use.release()

    def await_one(self, work, seconds):
        end = None if seconds is None else _core.clock() + seconds
        while not work._has_ended:
            longest = self._SLICE if end is None else min(self._SLICE, end - _core.clock())
            if longest <= 0:
                return
            with self._use:
                self._step(work, longest)
            if self._wanting:
                time.sleep(self._BETWEEN_LOOKS)  # otherwise this thread would get the lock again at once

    def _step(self, work, longest):
        """Advances an operation. The caller holds the lock of the group."""
        if work._has_ended:
            return
        try:
            if work.operation.is_done() if longest is None else work.operation.wait(longest):
                work.sender = work.operation.get()
                if work.finish is not None:
                    work.finish()
                work.end()
            elif _core.clock() - work.begun > work.seconds:
                self.ranks.abort(f"{work.about} has not ended after {work.seconds} s")
                raise errors.TimeoutError(f"{work.about} has not ended")
        except errors.Error as error:
            work.end(torch_error(error, work.seconds))
        except Exception as error:
            work.end(error)

    def _run(self):
        idle = 0
        while True:
            with self._changed:
                self._under_way = [work for work in self._under_way if not work._has_ended]
                idle = 0 if self._under_way else idle + 1
                if idle > self._IDLE_LOOKS:
                    self._changed.wait_for(lambda: self._under_way or self._ends)
                if self._ends and not self._under_way:
                    return
                works = list(self._under_way)
            self.look(works)
            time.sleep(self._BETWEEN_LOOKS)
