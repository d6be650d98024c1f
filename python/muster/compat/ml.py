# SPDX-License-Identifier: Apache-2.0
"""The module ml.utils.torch_distributed of ml-starter: starts a function as the ranks of a job.

Names, parameters and defaults are those of ml-starter. If PyTorch is loaded when the ranks meet, torch.distributed is
initialized as well: with the backend "muster" (PyTorch 2.14 or later), else with gloo. docs/reference/compat.md lists
the deviations.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import functools
import os
import pickle
import socket
import sys
import typing
import weakref

from .. import _core, _groups, _launch, errors
from .._core import ProcessGroup
from . import _tensors

__all__ = [
    "MultiprocessConfig",
    "all_to_all",
    "default_backend",
    "get_distributed_backend",
    "init_and_run",
    "init_dist",
    "init_process_group_from_backend",
    "launch_subprocesses",
    "set_distributed_backend",
]

# The value of a field that resolve() has to fill in, as in OmegaConf.
_MISSING: typing.Any = "???"
_LAUNCH_METHODS = ("forkserver", "spawn", "fork")


@dataclasses.dataclass
class MultiprocessConfig:
    """The place of a rank in its job, or -1 in a launcher, and the sizes and backends of the job."""

    rank: int = -1
    local_rank: int = -1
    world_size: int = _MISSING
    local_world_size: int = _MISSING
    master_addr: str = "127.0.0.1"
    master_port: int = _MISSING
    init_method: str = "env://"
    model_parallelism: int = 1
    pipeline_parallelism: int = 1
    backend: typing.Optional[str] = None
    model_parallel_backend: typing.Optional[str] = None
    pipeline_parallel_backend: typing.Optional[str] = None
    data_parallel_backend: typing.Optional[str] = None
    launch_method: str = "forkserver"

    @classmethod
    def resolve(cls, config: MultiprocessConfig) -> None:
        """Fills in the missing fields of a config. Local.

        `world_size` becomes the number of GPUs, or 1, `local_world_size` becomes `world_size`, and `backend` becomes
        get_distributed_backend(). `master_port` becomes 29500, or another free port if that is in use. The port stays
        reserved as long as the config exists.

        Args:
            config: The config.

        Raises:
            InvalidArgumentError: The fields contradict each other, or a backend is unknown.
        """
        _check_launch_method(config.launch_method)
        fields, holder = _core.resolved_config({**_fields(config), "backend": config.backend or get_distributed_backend()})
        for name, value in fields.items():
            setattr(config, name, value)
        if holder is not None:
            # An attribute would prevent the config from being pickled.
            weakref.finalize(config, id, holder)


def _check_launch_method(name) -> None:
    if name not in _LAUNCH_METHODS:
        raise errors.InvalidArgumentError(f"MultiprocessConfig: launch_method: unknown value {name!r} (expected 'forkserver', 'spawn' or 'fork')")


def _fields(config) -> dict:
    """Returns the fields that the library reads. Missing values are None."""
    fields = {field.name: getattr(config, field.name) for field in dataclasses.fields(MultiprocessConfig) if field.name != "launch_method"}
    return {name: None if isinstance(value, str) and value == _MISSING else value for name, value in fields.items()}


# Backends.


def default_backend() -> str:
    """Returns TORCH_DISTRIBUTED_BACKEND if Muster knows that backend, else "gloo". Local."""
    name = _core.default_backend()
    # Programs also pass the name to torch.distributed.
    return "gloo" if name == "tcp" else name


def get_distributed_backend() -> str:
    """Returns the backend of calls that name none: default_backend(). Local."""
    return default_backend()


def set_distributed_backend(backend: str) -> None:
    """Sets the backend of calls that name none, in TORCH_DISTRIBUTED_BACKEND. Local.

    Args:
        backend: "gloo", "shm", "tcp" or "mpi".

    Raises:
        InvalidArgumentError: The backend is unknown.
        UnsupportedError: The backend is "nccl".
    """
    _core.check_backend_name(backend)
    os.environ["TORCH_DISTRIBUTED_BACKEND"] = backend


# The process group.

# The group of all ranks. None: not initialized.
_ranks: ProcessGroup | None = None
# Whether this module has initialized torch.distributed.
_owns_torch = False


def init_process_group_from_backend(backend: str | None = None) -> None:
    """Makes this process a rank of the job that its environment describes. Collective.

    Args:
        backend: The backend. None: get_distributed_backend().

    Raises:
        InvalidArgumentError: The backend is unknown, or the process group is already initialized.
        Error: As muster.world().
    """
    _core.init_process_group(backend or get_distributed_backend())
    _begin()


def init_dist(
    rank: int,
    local_rank: int,
    world_size: int,
    local_world_size: int,
    master_addr: str,
    master_port: int,
    init_method: str,
    backend: str | None = None,
) -> None:
    """Makes this process a rank of a job. Collective.

    It sets RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT, and selects the GPU
    `local_rank` if PyTorch is loaded.

    Args:
        rank: The rank of this process.
        local_rank: The rank among the ranks of this host.
        world_size: The number of ranks.
        local_world_size: The number of ranks of this host.
        master_addr: The host of rank 0.
        master_port: A port of that host.
        init_method: "env://", "tcp://HOST:PORT" or "file:///PATH".
        backend: The backend. None: get_distributed_backend().

    Raises:
        Error: As init_process_group_from_backend().
    """
    config = MultiprocessConfig(rank, local_rank, world_size, local_world_size, master_addr, master_port, init_method)
    fields = {**_fields(config), "backend": backend or get_distributed_backend()}
    # The library sets them only for C code.
    for name in ("rank", "local_rank", "world_size", "local_world_size", "master_addr", "master_port"):
        if fields[name] is not None:
            os.environ[name.upper()] = str(fields[name])
    _core.init_dist(fields)
    _begin()


def _begin() -> None:
    """Completes the initialization, after the ranks have met. Collective."""
    global _ranks
    try:
        _ranks = ProcessGroup(_core.dist_group())
        if "torch" in sys.modules:
            _begin_torch(sys.modules["torch"], _ranks)
    except BaseException:
        _end()
        raise


def _begin_torch(torch, ranks: ProcessGroup) -> None:
    """Selects the GPU of this rank, and initializes torch.distributed. Collective.

    Its store has a port of its own, because the port of `init_method` may belong to Muster's rendezvous.
    """
    global _owns_torch
    distributed, local_rank = torch.distributed, os.environ.get("LOCAL_RANK")
    if local_rank is not None and torch.cuda.is_available():
        torch.cuda.set_device(int(local_rank) % torch.cuda.device_count())
    if not distributed.is_available() or distributed.is_initialized():
        return

    places = ranks.all_gather_config([_groups._place(), os.environ.get("MASTER_ADDR") or socket.gethostname()])
    host = "127.0.0.1" if len({place for place, _ in places}) == 1 else places[0][1]

    def listen():
        return distributed.TCPStore(host, 0, is_master=True, wait_for_workers=False) if ranks.rank == 0 else None

    first = _core.made_in(ranks, listen)
    port = ranks.broadcast_config(None if first is None else first.port, 0)
    # All ranks raise the error of a rank that cannot connect.
    store = _core.made_in(ranks, lambda: first or distributed.TCPStore(host, port, wait_for_workers=False))
    ranks.barrier()
    distributed.init_process_group(_torch_backend(), store=store, rank=ranks.rank, world_size=ranks.size)
    _owns_torch = True


def _torch_backend() -> str:
    try:
        from ..torch import register

        register()
    except ImportError:
        return "gloo"
    return "muster"


def _end() -> None:
    """Ends the process group of this rank. Local."""
    global _ranks, _owns_torch
    owned, _ranks, _owns_torch = _owns_torch, None, False
    try:
        # The program may have ended it.
        if owned and sys.modules["torch"].distributed.is_initialized():
            sys.modules["torch"].distributed.destroy_process_group()
    finally:
        _core.end_dist()


# Launches.


def init_and_run(func: typing.Callable[..., None], cfg: MultiprocessConfig, *args: typing.Any, **kwargs: typing.Any) -> None:
    """Calls init_dist(), makes the parallel groups, and calls a function. At its end the groups are destroyed. Collective.

    Args:
        func: The function.
        cfg: A resolved config with the rank of this process.
        args: The positional arguments of the function.
        kwargs: The keyword arguments of the function.

    Raises:
        Error: As init_dist(). Exceptions of the function are passed on.
    """
    init_dist(cfg.rank, cfg.local_rank, cfg.world_size, cfg.local_world_size, cfg.master_addr, cfg.master_port, cfg.init_method, cfg.backend)
    try:
        _core.init_parallelism(_fields(cfg))
        func(*args, **kwargs)
    finally:
        _end()


class _RankFailure(errors.Error, RuntimeError):
    """A function failed in a rank. The cause is the exception of muster.launch()."""


def launch_subprocesses(
    func: typing.Callable[..., None],
    cfg: MultiprocessConfig,
    setup: typing.Callable[[], None] | None = None,
    rank_offset: int = 0,
    *args: typing.Any,
    **kwargs: typing.Any,
) -> None:
    """Calls a function in `cfg.local_world_size` new processes, which are ranks of a job, and waits until all have ended.

    A rank imports the function by name, as with muster.launch(). A single rank also has its own process. If a rank
    fails, the others are ended.

    Args:
        func: The function.
        cfg: The config, which is resolved first.
        setup: A function that each rank calls before it meets the others.
        rank_offset: The rank of the first process. Other launchers start the other ranks of the job.
        args: The positional arguments of the function, which are pickled.
        kwargs: The keyword arguments of the function, which are pickled.

    Raises:
        RuntimeError: A rank failed. The exception is also a muster.Error with the kind, rank, host and pid of that
            rank, and its message contains the end of the traceback.
        InvalidArgumentError: An argument is invalid. No rank was started.
    """
    _launch.check_guard("launch_subprocesses", "launch_subprocesses()")
    MultiprocessConfig.resolve(cfg)
    try:
        pickled = pickle.dumps((args, kwargs))
    except Exception as error:
        raise errors.InvalidArgumentError(f"launch_subprocesses: the arguments of {func!r} cannot be pickled: {error}") from error
    arguments = {
        "function": _launch._name_of(func),
        "setup": "" if setup is None else _launch._name_of(setup),
        "program": _program_of(pickled),
        "arguments": base64.b64encode(pickled).decode(),
    }
    calls = [f"{__name__}:{name}" for name in ("_run_function", "_run_setup")]
    try:
        _core.launch_ranks(_launch.rank_program(), calls[0], arguments, calls[1] if setup is not None else "", _fields(cfg), rank_offset)
    except errors.Error as error:
        if error.rank is None:
            raise
        failure = _RankFailure(str(error))
        failure.kind, failure.rank, failure.host, failure.pid = error.kind, error.rank, error.host, error.pid
        raise failure from error


def _program_of(pickled: bytes) -> str:
    """Returns the module of this program if the arguments refer to its classes, else an empty text."""
    if b"__main__" not in pickled:
        return ""

    def main():
        pass

    main.__module__, main.__qualname__ = "__main__", "main"
    return _launch._name_of(main).rpartition(":")[0]


def _loaded(module: str):
    """Imports a module in a rank. The file of the program is imported once."""
    program = sys.modules.get("__muster_main__") if module.endswith(".py") else None
    return _launch._load(module) if program is None else program


def _function_of(name: str):
    module, _, path = name.rpartition(":")
    return functools.reduce(getattr, path.split("."), _loaded(module))


def _run_setup(function, setup, program, arguments) -> None:
    """Runs in a rank, before it meets the others."""
    _function_of(setup)()


def _run_function(function, setup, program, arguments) -> None:
    """Runs in a rank that is already a part of its job."""
    call = _function_of(function)
    if program:
        sys.modules["__main__"] = _loaded(program)
    args, kwargs = pickle.loads(base64.b64decode(arguments))
    with contextlib.ExitStack() as stack:
        stack.callback(_end)
        _begin()
        call(*args, **kwargs)


# Collectives.


def all_to_all(input, group):
    """Splits dimension 0 into equal slices, and sends slice r to rank r. Collective.

    The result is differentiable if `input` is a torch tensor. Before the process group is initialized, `input` itself
    is returned.

    Args:
        input: The tensor.
        group: A muster.ProcessGroup, or a process group of torch.distributed. None: all ranks.

    Returns:
        The slices that this rank has received, in rank order, with the shape of `input`.

    Raises:
        Error: As muster.ProcessGroup.all_to_all().
    """
    if group is None and _ranks is None:
        return input
    ranks = _ranks if group is None else _tensors.process_group_of(group)
    return _differentiable().apply(input, ranks) if hasattr(input, "requires_grad") else ranks.all_to_all(input)


@functools.cache
def _differentiable():
    import torch

    class AllToAll(torch.autograd.Function):
        """The gradient of an exchange is the exchange of the gradients."""

        @staticmethod
        def forward(ctx, tensor, ranks):
            ctx.ranks = ranks
            return ranks.all_to_all(_core.made_in(ranks, lambda: _tensors.memory_of(tensor))).torch().to(tensor.device)

        @staticmethod
        def backward(ctx, gradient):
            return AllToAll.apply(gradient, ctx.ranks), None

    return AllToAll
