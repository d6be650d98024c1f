# SPDX-License-Identifier: Apache-2.0
"""The results of calls that run in the background. Imported only when such a call starts."""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import threading
import typing

from . import _core

_T = typing.TypeVar("_T")

# Futures whose calls may still run.
_running: set[Future[typing.Any]] = set()


class Future(concurrent.futures.Future[_T]):
    """The result of a call that runs in the background.

    It has the methods of concurrent.futures.Future, and `await` returns its result. Callbacks run on a separate thread.
    """

    def __init__(self, get: typing.Callable[[], typing.Any], finish: typing.Callable[[typing.Any], _T], stop: _core.StopSource):
        super().__init__()
        self._stop = stop
        self._thread = threading.Thread(target=self._run, args=(get, finish), name="muster.Future", daemon=True)
        _running.add(self)
        self._thread.start()

    def _run(self, get, finish):
        try:
            self._settle(get, finish)
        finally:
            _running.discard(self)

    def _settle(self, get, finish):
        try:
            result, error = finish(get()), None
        except BaseException as raised:
            result, error = None, raised
        # Only now, so that cancel() works until the end.
        if not self.set_running_or_notify_cancel():
            return
        if error is None:
            self.set_result(result)
        else:
            self.set_exception(error)

    def cancel(self) -> bool:
        """Cancels the call, unless it has ended. Its group is then aborted, and the other ranks raise
        muster.CancelledError.

        Returns:
            Whether it was cancelled. On this rank, result() then raises concurrent.futures.CancelledError.
        """
        is_cancelled = super().cancel()
        if is_cancelled:
            self._stop.request_stop()
        return is_cancelled

    def __await__(self) -> typing.Generator[typing.Any, None, _T]:
        return asyncio.wrap_future(self).__await__()


@atexit.register
def _at_exit():
    """Waits for the calls: after this, their thread could no longer release objects of Python."""
    while _running:
        future = next(iter(_running))
        try:
            future._thread.join()
        except KeyboardInterrupt:
            for each in list(_running):
                each._stop.request_stop()
        except RuntimeError:  # the thread could not be started
            pass
        if not future._thread.is_alive():
            _running.discard(future)


def await_work(work):
    """Implements `await` of a work: a thread waits for it."""
    return asyncio.to_thread(work.get).__await__()
