# SPDX-License-Identifier: Apache-2.0
"""Starting ranks: commands, and functions by their names."""

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

    `target`: a list of texts is a command, which finds RANK, WORLD_SIZE ... and MUSTER_JOB in its environment, so that
    world() is the group of these ranks. A function, or its name "package.module:name", is called in `ranks` (1 to 4096)
    new processes of this interpreter, as name(**arguments), when all of them have met. They import its module: it is
    one's that can be imported, or the program's own file, which then starts nothing unless `__name__` is "__main__".
    `arguments` are a config without tensors (dict, list, str, int, float, bool, None); what it returns is not looked at.

    `environment`: added to the ranks' environment. `output`: where the ranks' output goes by whole lines, "lines" to
    standard output and error of this process (its descriptors 1 and 2), "prefixed" likewise with "[rank] " before each
    line, "live" on a terminal one line a rank. `log_directory`: into rank-N.out and rank-N.err there instead; `tee`: and
    to `output`, too. `timeout`: seconds that the job may take; None: for ever. `grace`: seconds that the other ranks
    have after one failed, before SIGTERM, and again before SIGKILL; `kill_after`: from a signal to end to SIGKILL.

    Raises what a rank raised, with its class if it is a muster.Error, else PeerLostError, with `rank`, `host`, `pid`, and
    the end of its traceback in its words; of several ranks that failed, that of one that blames no other. A rank that was
    killed, or ended with a status, is a PeerLostError that says so. TimeoutError after `timeout`; NotFoundError if there is
    no such command; ArgumentError, before anything is started, on what cannot be. Ctrl-C raises KeyboardInterrupt when the
    ranks have ended: those that it did not reach get SIGTERM after `grace`. No process is left. In any thread; this process
    is not forked, but the interpreter is started again.
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
    # Ranks import what this process can.
    start = f"import sys; sys.path[:] = {sys.path!r}; from muster import _core; sys.exit(_core.run_if_launched())"
    _core.launch([sys.executable, "-c", start], command, None if is_command else arguments or {}, ranks, options)


def _refuse(words):
    raise errors.ArgumentError(f"launch: {words}")


def _name_of(target) -> str:
    """What a rank finds the function by: "package.module:name", or "/path/program.py:name"."""
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


#: Whether this process is a rank that imports the program of its function.
_is_loading = False


class _MissingGuard(errors.ArgumentError):
    """A program that starts a job while its ranks import it."""


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
    # As a name that is not "__main__", so that the program does not start all over.
    name = "__muster_main__"
    spec = importlib.util.spec_from_file_location(name, module)
    loaded = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


def _call(target: str, arguments: dict) -> None:
    """In a rank."""
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
        # The launcher raises it once. A traceback of each rank would hide it.
        raise
    except BaseException:
        # The end of what a rank writes to standard error is part of its failure's words.
        traceback.print_exc()
        raise
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
