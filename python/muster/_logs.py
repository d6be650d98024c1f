# SPDX-License-Identifier: Apache-2.0
"""The messages of the library in the module logging."""

from __future__ import annotations

import atexit
import os
import sys
import threading
import typing

from . import _core, errors

# Seconds for which the exit of the interpreter waits for the handlers of the last messages.
_LAST = 10.0

_queue: _core.LogQueue | None = None
_thread: threading.Thread | None = None
_lock = threading.Lock()


def use_logging(level: typing.Literal["debug", "info", "warning", "error"] | None = "info") -> None:
    """Passes the messages of the library to the logger "muster" of the module logging, instead of to standard error.

    Messages of any thread of the library arrive in their order, on a separate thread. If 10,000 messages wait, further
    ones are dropped, and a later warning states their number. The exit of the interpreter waits for the messages. A
    forked child writes to standard error again.

    Args:
        level: Messages below this level are dropped. The logger and its handlers then apply their own levels. None
            restores standard error.

    Raises:
        InvalidArgumentError: The level is unknown.
    """
    global _queue, _thread
    import logging

    with _lock:
        if level is None:
            _core.reset_log_hook()
            _end()
            return
        queue = _core.LogQueue()
        queue.install(level)
        _end()
        logger = logging.getLogger("muster")

        def run():
            while messages := queue.take():
                for name, message in messages:
                    try:
                        logger.log(getattr(logging, name.upper()), message)
                    except Exception:  # by a filter of the program: the later messages still arrive
                        sys.excepthook(*sys.exc_info())

        _queue, _thread = queue, threading.Thread(target=run, name="muster.logging", daemon=True)
        _thread.start()
        # After that of the module logging, so that it runs before the handlers are closed.
        atexit.unregister(_at_exit)
        atexit.register(_at_exit)


def _end():
    """Ends the thread after the messages that wait."""
    global _queue, _thread
    if _queue is not None and _thread is not None:
        _queue.close()
        if _thread is not threading.current_thread():
            _thread.join(_LAST)
    _queue = _thread = None


def _at_exit():
    if _queue is not None:
        _core.reset_log_hook()
    _end()


def _in_child():
    global _queue, _thread, _lock
    was_used, _queue, _thread, _lock = _queue is not None, None, None, threading.Lock()
    if was_used:
        try:
            _core.reset_log_hook()
        except errors.Error:  # a thread of the parent was writing a message: the library then uses standard error
            pass


os.register_at_fork(after_in_child=_in_child)
