# SPDX-License-Identifier: Apache-2.0
"""Starts ranks: commands, and functions by name."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import traceback

from . import _core, errors


def launch(
    target,
    ranks: int,
    arguments: dict | None = None,
    *,
    environment: dict | None = None,
    output: str = "lines",
    log_directory=None,
    tee: bool = False,
    timeout: float | None = None,
    grace: float = 5.0,
    kill_after: float = 30.0,
) -> None:
    """Starts a command or a function as the ranks of a job on this host, and waits until all have ended. Local.

    `target`: a list of texts is a command. It receives RANK, WORLD_SIZE ... and MUSTER_JOB in its environment, so
    world() is the group of these ranks. A function, or its name "package.module:name", is called as
    `name(**arguments)` in `ranks` (1 to 4096) new processes of this interpreter, after all of them have met. The
    processes import the module of the function. It must be importable, or be the file of the program, which must not start anything unless
    `__name__` is "__main__". `arguments` are a config without tensors (dict, list, str, int, float, bool, None). The
    return value is ignored.

    `environment` is added to the environment of the ranks. `output` is the destination of their output, by whole
    lines: "lines" uses the standard output and error of this process (descriptors 1 and 2). "prefixed" adds "[rank] "
    in front of each line. "live" shows one line per rank on a terminal. `log_directory`: output is written to
    rank-N.out and rank-N.err in this directory instead; with `tee`, to `output` as well. `timeout`: the longest
    duration of the job in seconds; None: no limit. `grace`: seconds that the other ranks have after one failed, before
    SIGTERM, and again before SIGKILL. `kill_after`: seconds between a terminating signal and SIGKILL.

    Raises the exception of a failed rank, with its class if it is a muster.Error, else as PeerLostError. It has
    `rank`, `host` and `pid`, and its message contains the end of the traceback. If several ranks failed, it is the
    exception that does not name another rank as the cause. A rank that was killed or exited with a status raises
    PeerLostError. Raises TimeoutError after `timeout`, and NotFoundError if the command does not exist. Raises
    ArgumentError, before anything is started, if an argument is invalid. Ctrl-C raises KeyboardInterrupt after the
    ranks have ended; ranks that it did not reach receive SIGTERM after `grace`. No process is left behind. It may be
    called in any thread. This process is not forked; the interpreter is started again.
    """
    if _is_loading:
        raise _MissingGuard(
            "launch: a rank of this job imports the program, and the program starts a job while it is imported: put "
            'the call of muster.launch() under `if __name__ == "__main__":`'
        )
    is_command = isinstance(target, (list, tuple))
    if is_command and arguments is not None:
        _refuse("arguments are for functions: a command has them in its list")
    command = [os.fspath(each) for each in target] if is_command else [_name_of(target)]
    options = {
        "environment": {} if environment is None else dict(environment),
        "output": output,
        "log_directory": "" if log_directory is None else os.fspath(log_directory),
        "tee": tee,
        "timeout": timeout,
        "grace": grace,
        "kill_after": kill_after,
    }
    # Ranks can import the same modules as this process.
    start = f"import sys; sys.path[:] = {sys.path!r}; from muster import _core; sys.exit(_core.run_if_launched())"
    _core.launch([sys.executable, "-c", start], command, None if is_command else arguments or {}, ranks, options)


def _refuse(words):
    raise errors.ArgumentError(f"launch: {words}")


def _name_of(target) -> str:
    """Returns the name by which a rank finds the function: "package.module:name", or "/path/program.py:name"."""
    if isinstance(target, str):
        module, colon, name = target.rpartition(":")
        if not colon or not module or not name:
            _refuse(f"{target!r} is no function's name: 'package.module:name'; a command is a list")
        return target
    module, name = getattr(target, "__module__", None), getattr(target, "__qualname__", None)
    if not callable(target) or not module or not name:
        _refuse(f"{target!r} is neither a function, nor the name of one, nor a list of texts")
    if "<" in name:
        _refuse(f"{name} has no name that ranks could import it by: define it at the top of a module")
    if module == "__main__":
        main = sys.modules["__main__"]
        if getattr(main, "__spec__", None) is not None:
            module = main.__spec__.name
        elif getattr(main, "__file__", None):
            module = os.path.abspath(main.__file__)
        else:
            _refuse(f"{name} is of a program without a file, which ranks cannot import: put it into a module")
    return f"{module}:{name}"


#: True while this process is a rank that imports the program of its function.
_is_loading = False


class _MissingGuard(errors.ArgumentError):
    """The program of a function starts a job while a rank imports it."""


def _load(module: str):
    global _is_loading
    _is_loading = True
    try:
        return _imported(module)
    finally:
        _is_loading = False


def _imported(module: str):
    if not module.endswith(".py"):
        return importlib.import_module(module)
    # The name is not "__main__", so that the program does not start again.
    name = "__muster_main__"
    spec = importlib.util.spec_from_file_location(name, module)
    loaded = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


def _call(target: str, arguments: dict) -> None:
    """Calls the function in a rank."""
    module, _, name = target.rpartition(":")
    try:
        function = _load(module)
        for part in name.split("."):
            function = getattr(function, part)
        function(**arguments)
    except SystemExit as left:
        if left.code not in (None, 0):
            raise
    except _MissingGuard:
        # The launcher raises it once. One traceback per rank would hide it.
        raise
    except BaseException:
        # The error message of a failed rank contains the end of its standard error.
        traceback.print_exc()
        raise
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
