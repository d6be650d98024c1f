# SPDX-License-Identifier: Apache-2.0
"""Starts ranks: commands, and functions by name."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import traceback
import typing

from . import _core, errors


def launch(
    target: typing.Callable[..., typing.Any] | str | typing.Sequence[str | os.PathLike[str]],
    ranks: int,
    arguments: typing.Mapping[str, typing.Any] | None = None,
    *,
    environment: typing.Mapping[str, str] | None = None,
    output: typing.Literal["lines", "prefixed", "live"] = "lines",
    log_directory: str | os.PathLike[str] | None = None,
    tee: bool = False,
    timeout: float | None = None,
    grace: float = 5.0,
    kill_after: float = 30.0,
) -> None:
    """Starts a command or a function as the ranks of a job on this host, and waits until all have ended. Local.

    A command receives RANK, WORLD_SIZE ... and MUSTER_JOB in its environment, so world() is the group of these ranks. A
    function is called as `target(**arguments)` in new processes of this interpreter, after all of them have met. They
    import the module of the function. It must be importable, or be the file of the program, which must not start
    anything unless `__name__` is "__main__". The return value is ignored.

    The call may be made in any thread. This process is not forked. After the call no process is left behind. Ctrl-C
    raises KeyboardInterrupt after the ranks have ended; ranks that it did not reach receive SIGTERM after `grace`.

    Args:
        target: A list of texts is a command. Otherwise a function, or its name "package.module:name".
        ranks: The number of ranks, 1 to 4096.
        arguments: The arguments of the function: a dict of values without tensors.
        environment: Variables that are added to the environment of the ranks.
        output: The destination of the output of the ranks, by whole lines. "lines" uses the standard output and error
            of this process (descriptors 1 and 2). "prefixed" adds "[rank] " in front of each line. "live" shows one
            line per rank on a terminal.
        log_directory: A directory for files rank-N.out and rank-N.err, which receive the output instead.
        tee: Whether `output` receives the output in addition to the files.
        timeout: The longest duration of the job in seconds. None: no limit.
        grace: The seconds that the other ranks have after one failed, before SIGTERM, and again before SIGKILL.
        kill_after: The seconds between a terminating signal and SIGKILL.

    Raises:
        Error: A rank failed. The exception has its class if that is a muster.Error, else it is a PeerLostError. It has
            `rank`, `host` and `pid`, and its message contains the end of the traceback. If several ranks failed, it is
            an exception that does not name another rank as the cause.
        PeerLostError: A rank was killed, or exited with a status.
        TimeoutError: The job did not end within `timeout`.
        NotFoundError: The command does not exist.
        InvalidArgumentError: An argument is invalid. No rank was started.
    """
    check_guard("launch", "muster.launch()")
    is_command = isinstance(target, (list, tuple))
    if is_command and arguments is not None:
        _refuse("a command has no `arguments`: add them to its list")
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
    _core.launch(rank_program(), command, None if is_command else arguments or {}, ranks, options)


def rank_program() -> list[str]:
    """Returns the command of a rank that calls a function. It can import the same modules as this process."""
    start = f"import sys; sys.path[:] = {sys.path!r}; from muster import _core; sys.exit(_core.run_if_launched())"
    return [sys.executable, "-c", start]


def check_guard(call: str, function: str) -> None:
    """Raises an exception in a rank that imports the program of its function."""
    if _is_loading:
        raise _MissingGuard(
            f"{call}: a rank of this job imports the program, and the program starts a job while it is imported: put "
            f'the call of {function} under `if __name__ == "__main__":`'
        )


def _refuse(cause):
    raise errors.InvalidArgumentError(f"launch: {cause}")


def _name_of(target) -> str:
    """Returns the name by which a rank finds the function: "package.module:name", or "/path/program.py:name"."""
    if isinstance(target, str):
        module, colon, name = target.rpartition(":")
        if not colon or not module or not name:
            _refuse(f"{target!r} is not the name of a function: pass 'package.module:name', or a list for a command")
        return target
    module, name = getattr(target, "__module__", None), getattr(target, "__qualname__", None)
    if not callable(target) or not module or not name:
        _refuse(f"{target!r} is not a target: pass a function, its name, or a list of texts")
    if "<" in name:
        _refuse(f"ranks cannot import {name}: define it at the top of a module")
    if module == "__main__":
        main = sys.modules["__main__"]
        if getattr(main, "__spec__", None) is not None:
            module = main.__spec__.name
        elif getattr(main, "__file__", None):
            module = os.path.abspath(main.__file__)
        else:
            _refuse(f"ranks cannot import {name}, because its program has no file: put it into a module")
    return f"{module}:{name}"


#: True while this process is a rank that imports the program of its function.
_is_loading = False


class _MissingGuard(errors.InvalidArgumentError):
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
