# SPDX-License-Identifier: Apache-2.0
"""The results of calls that run in the background. Imported only when such a call starts."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
import typing

from . import _core

_T = typing.TypeVar("_T")


class Future(concurrent.futures.Future[_T]):
    """The result of a call that runs in the background.

    It has the methods of concurrent.futures.Future, and `await` returns its result. Callbacks run on a separate thread.
    """

    def __init__(self, get: typing.Callable[[], typing.Any], finish: typing.Callable[[typing.Any], _T], stop: _core.StopSource):
        super().__init__()
        self._stop = stop
        # The interpreter does not wait for this thread. The group waits for its calls when it is destroyed.
        threading.Thread(target=self._run, args=(get, finish), name="muster.Future", daemon=True).start()

    def _run(self, get, finish):
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
        """Cancels the call, unless it has ended. Its group is then aborted, so that all ranks raise CancelledError.

        Returns:
            Whether it was cancelled. result() then raises concurrent.futures.CancelledError.
        """
        is_cancelled = super().cancel()
        if is_cancelled:
            self._stop.request_stop()
        return is_cancelled

    def __await__(self) -> typing.Generator[typing.Any, None, _T]:
        return asyncio.wrap_future(self).__await__()


def await_work(work):
    """Implements `await` of a work: a thread waits for it."""
    return asyncio.to_thread(work.get).__await__()
