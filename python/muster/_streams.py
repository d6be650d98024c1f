# SPDX-License-Identifier: Apache-2.0
"""Streams of one layer after the other from all ranks to the root: gather_each, a generator, and gather_each_async."""

from __future__ import annotations

import atexit
import os
import typing
import weakref

from . import _core, errors
from ._core import Group
from ._groups import _resolve
from ._names import checks_names
from ._typing import Route

if typing.TYPE_CHECKING:
    from ._futures import Future


class LayerPart:
    """A layer, or one part of a layer that exceeds the memory budget. It ends when the next part is requested.

    Tensors that are still held remain valid, but block their sender. All parts of a layer have the same tree. A leaf of
    another part is None here. Leaves that are not tensors are in part 0.

    `layer` is the number of the layer. `part` and `num_parts` are the number of the part and the number of parts.
    `ranks` is the list, and part[i] is the config of ranks[i]. `slices` gives the positions of slices of tensors that are larger than a part. `tensors` lists
    all tensors of the layer in part 0, and is empty in the other parts. Both are lists of dicts with rank, path (a JSON
    pointer), dtype and shape. Slices also have offset and elements.
    """

    def __init__(
        self,
        layer: int,
        part: int,
        num_parts: int,
        ranks: list[int],
        configs: list[typing.Any],
        slices: list[dict[str, typing.Any]],
        tensors: list[dict[str, typing.Any]],
    ):
        self.layer = layer
        self.part = part
        self.num_parts = num_parts
        self.ranks = ranks
        self.slices = slices
        self.tensors = tensors
        self._configs = configs

    @property
    def is_last(self) -> bool:
        """Whether this is the last part of the layer."""
        return self.part + 1 == self.num_parts

    def present(self) -> list[tuple[int, typing.Any]]:
        """Returns (rank, config) of the ranks with a config in this part, in the order of the list."""
        return [(rank, config) for rank, config in zip(self.ranks, self._configs) if config is not None]

    def __len__(self) -> int:
        return len(self._configs)

    def __iter__(self) -> typing.Iterator[typing.Any]:
        return iter(self._configs)

    def __getitem__(self, index: int) -> typing.Any:
        """Returns the config at a position of the list, or None if nothing of its rank is in this part.

        Raises:
            IndexError: The list has no such position, or the part has ended.
        """
        try:
            return self._configs[index]
        except IndexError:
            raise IndexError(f"index {index} is out of range for {len(self._configs)} entries") from None

    def by_rank(self, rank: int) -> typing.Any:
        """Returns the config of a rank of the group, or None if nothing of it is in this part.

        Raises:
            KeyError: The rank is not in the list, or the part has ended.
        """
        if rank not in self.ranks or not self._configs:
            raise KeyError(f"rank {rank} has no entry here: the list is {self.ranks}")
        return self._configs[self.ranks.index(rank)]

    def release(self) -> None:
        """Releases the part now. Local."""
        self._configs = []


# Functions that end the running streams: their threads must not be inside a call when the interpreter exits.
_live: weakref.WeakSet = weakref.WeakSet()


@atexit.register
def _at_exit():
    for end in list(_live):
        end("the interpreter of this rank exits while gather_each runs")


def gather_each(
    layers: typing.Iterable[typing.Any],
    ranks: typing.Iterable[int] | None = None,
    group: Group | typing.Any = None,
    *,
    memory_budget: int | str = "256MiB",
    pipeline_depth: int = 2,
    route: Route = "auto",
    timeout: float | None = None,
    workspace_path: str | os.PathLike[str] | None = None,
    zstd_level: int | None = None,
    detect_writes: bool = False,
) -> typing.Iterator[LayerPart]:
    """Yields the layers of all ranks, part by part, on the first rank of the list, the root.

    On the other ranks it yields nothing, but must be iterated in the same way: `for part in gather_each(...)`. Nothing
    happens before the first step. Collective over `group`. If the loop is left early on a rank, or `layers` raises an
    exception, every rank raises an error with its message, and the group remains usable.

    Args:
        layers: An iterable of the configs of this rank, as for get_configs_parallel(). None: the rank has nothing in a
            layer. All members have the same number of layers. It is iterated on the thread of the caller, and must not
            use `group`.
        ranks: As for get_configs_parallel().
        group: As for get_configs_parallel().
        memory_budget: The size of the parts that are in flight or in use, in bytes or as text such as "256MiB".
        pipeline_depth: The number of parts that a sender may have in flight.
        route: As for get_configs_parallel().
        timeout: As for get_configs_parallel().
        workspace_path: As for get_configs_parallel().
        zstd_level: As for get_configs_parallel().
        detect_writes: As for get_configs_parallel().

    Raises:
        Error: A rank failed. All ranks raise its error. After InvalidArgumentError, RankMismatchError (lists, number of
            layers), UnsupportedError or OutOfSpaceError the group remains usable. TimeoutError, PeerLostError and
            CancelledError abort it.
    """
    import queue
    import threading

    group = _resolve(group)
    source = None
    stop = _core.StopSource()
    # The call runs on a separate thread. Its requests are executed here, one at a time.
    asked: queue.SimpleQueue = queue.SimpleQueue()
    answers: queue.SimpleQueue = queue.SimpleQueue()

    def ask(*request):
        asked.put(request)
        answer, error = answers.get()
        if error is not None:
            raise error
        return answer

    def run():
        try:
            options = {
                "memory_budget": memory_budget,
                "pipeline_depth": pipeline_depth,
                "route": route,
                "timeout": timeout,
                "workspace_path": workspace_path,
                "zstd_level": zstd_level,
                "detect_writes": detect_writes,
            }
            _core.gather_each(lambda: ask("layer"), ranks, group, lambda part: ask("part", part), options, stop)
            asked.put(("end", None))
        except BaseException as error:
            asked.put(("end", error))

    thread = threading.Thread(target=run, name="muster.gather_each", daemon=True)
    thread.start()
    own = None  # the exception of this rank's iterable
    is_suspended = False

    def end(cause):
        if not thread.is_alive():
            return
        if not is_suspended:  # another thread of the program is executing a step
            stop.request_stop()
        # In case the thread waits for an answer, or makes one more request.
        answers.put((None, errors.IoError(cause)))
        thread.join()

    _live.add(end)
    try:
        while True:
            request = asked.get()
            if request[0] == "end":
                if request[1] is not None:
                    raise request[1] from own
                return
            if request[0] == "layer":
                try:
                    if source is None:
                        source = _iterator_of(layers)
                    # On this thread, because a producer of tensors on GPUs orders the stream of the calling thread.
                    answer, own = (_core.Config(next(source)),), None
                except StopIteration:
                    answer = None
                except Exception as error:
                    answer, own = None, error
                answers.put((answer, own))
                continue
            part = LayerPart(*request[1])
            del request
            is_suspended = True
            try:
                yield part
            finally:
                is_suspended = False
                part.release()
            del part
            answers.put((None, None))
    except BaseException as error:
        if not isinstance(error, (Exception, GeneratorExit)):
            stop.request_stop()
        answers.put((None, errors.IoError("the loop over gather_each was left early")))
        raise
    finally:
        thread.join()


@checks_names
def gather_each_async(
    layers: typing.Iterable[typing.Any],
    consume: typing.Callable[[LayerPart], typing.Any],
    ranks: typing.Iterable[int] | None = None,
    group: Group | typing.Any = None,
    *,
    memory_budget: int | str = "256MiB",
    pipeline_depth: int = 2,
    route: Route = "auto",
    timeout: float | None = None,
    workspace_path: str | os.PathLike[str] | None = None,
    zstd_level: int | None = None,
    detect_writes: bool = False,
) -> Future[dict[str, typing.Any]]:
    """Starts a stream as gather_each(), and returns a Future of its report.

    The rules are those of get_configs_async(). `layers` and `consume` run on a thread of the library, and must not use
    `group`. To use asyncio in `consume`, call loop.call_soon_threadsafe().

    Args:
        layers: As for gather_each(). Tensors on GPUs are rejected.
        consume: Called with each LayerPart, on the root only. The part ends when the call returns.
        ranks: As for get_configs_parallel().
        group: As for get_configs_parallel().
        memory_budget: As for gather_each().
        pipeline_depth: As for gather_each().
        route: As for get_configs_parallel().
        timeout: As for get_configs_parallel().
        workspace_path: As for get_configs_parallel().
        zstd_level: As for get_configs_parallel().
        detect_writes: As for get_configs_parallel().

    Returns:
        A Future of a dict with route, reason, layers, parts, bytes, seconds and peak_slot_bytes of this rank.

    Raises:
        InvalidArgumentError: An argument is invalid. The futures of the other ranks raise it.
        Error: The first such call of a group duplicates it, and raises the errors of duplicate().
    """
    from ._futures import Future

    source = None
    own: list[Exception] = []  # the exception of this rank's `layers` or `consume`

    def next_layer():
        nonlocal source
        try:
            if source is None:
                if not callable(consume):
                    raise errors.InvalidArgumentError(f"consume: {type(consume).__name__} is not callable: pass a function that takes a LayerPart")
                source = _iterator_of(layers)
            return (_core.Config(next(source)),)
        except StopIteration:
            return None
        except Exception as error:
            own.append(error)
            raise

    def take(values):
        part = LayerPart(*values)
        try:
            consume(part)
        except Exception as error:
            own.append(error)
            raise
        finally:
            part.release()

    options = {
        "memory_budget": memory_budget,
        "pipeline_depth": pipeline_depth,
        "route": route,
        "timeout": timeout,
        "workspace_path": workspace_path,
        "zstd_level": zstd_level,
        "detect_writes": detect_writes,
    }
    stop = _core.StopSource()
    work = _core.gather_each_async(next_layer, ranks, _resolve(group), take, options, stop)

    def get():
        try:
            return work.get()
        except errors.Error as error:
            raise error from (own[0] if own else None)

    return Future(get, lambda report: report, stop)


def _iterator_of(layers):
    try:
        return iter(layers)
    except TypeError as error:
        raise errors.InvalidArgumentError(f"layers: {error}") from error
