# SPDX-License-Identifier: Apache-2.0
"""gather_each: layer after layer of every rank to the first rank, as a generator."""

from __future__ import annotations

import atexit
import os
import typing
import weakref

from . import _core, errors
from ._core import Group
from ._groups import _resolve


class LayerPart:
    """A layer, or a part of one that is larger than the memory budget allows. It ends when the next one is asked for;
    tensors that somebody still holds stay valid, and hold their sender up.

    Each part of a layer has the same tree, with what travels in this part; every other leaf is None. Leaves that are no
    tensors come in part 0. `slices` tells where the pieces of tensors belong that are larger than a part, `tensors` (of
    part 0) has all tensors of the layer: dicts with rank, path (a JSON pointer), dtype, shape; of slices also first and
    elements.
    """

    def __init__(
        self,
        layer: int,
        part: int,
        parts: int,
        ranks: list[int],
        configs: list[typing.Any],
        slices: list[dict[str, typing.Any]],
        tensors: list[dict[str, typing.Any]],
    ):
        self.layer = layer
        self.part = part
        self.parts = parts
        self.ranks = ranks
        self.slices = slices
        self.tensors = tensors
        self._configs = configs

    @property
    def is_last(self) -> bool:
        """Whether the layer has no more parts."""
        return self.part + 1 == self.parts

    def present(self) -> list[tuple[int, typing.Any]]:
        """(rank, config) of those that are there, in the order of the list."""
        return [(rank, config) for rank, config in zip(self.ranks, self._configs) if config is not None]

    def __getitem__(self, rank: int) -> typing.Any:
        """The config of `rank` of the group; None if it has nothing in this part."""
        if rank not in self.ranks or not self._configs:
            raise KeyError(f"there is nothing of rank {rank} here: the list is {self.ranks}")
        return self._configs[self.ranks.index(rank)]

    def release(self) -> None:
        """Ends the part now. Local."""
        self._configs = []


# How to end each stream that goes on: their threads must not be inside of a call when the interpreter ends.
_live: weakref.WeakSet = weakref.WeakSet()


@atexit.register
def _at_exit():
    for end in list(_live):
        end("the Python of this rank ends while gather_each goes on")


def gather_each(
    layers: typing.Iterable[typing.Any],
    ranks: typing.Iterable[int] | None = None,
    group: Group | typing.Any = None,
    *,
    memory_budget: int | str = "256MiB",
    pipeline_depth: int = 2,
    route: str = "auto",
    timeout: float | None = None,
    workspace_path: str | os.PathLike[str] | None = None,
) -> typing.Iterator[LayerPart]:
    """Yields part after part of the layers of all ranks, on the first rank of the list; on the others it yields nothing,
    and is run through all the same: `for part in gather_each(...)`. Nothing happens before the first step.

    Collective over `group`. `layers` is an iterable of this rank's configs, as get_configs_parallel() takes them: None
    where it has nothing in a layer. All members give the same number of layers. It is iterated on the caller's thread,
    and must not use `group`. `memory_budget`: bytes, or a text such as "256MiB", for parts that are under way or being
    used. `pipeline_depth`: parts that a sender may have under way.

    `timeout`: seconds without progress of the ranks waited for. `route`, `workspace_path`: as of get_configs_parallel().

    Raises the same on all ranks: ArgumentError, RankMismatchError (lists, numbers of layers), UnsupportedError, NoSpaceError, after
    which the group goes on; TimeoutError, PeerLostError, CancelledError, which end it. What an iterable raises, or a loop that is left early, is every rank's error, with its words; the group goes on.
    """
    import queue
    import threading

    group = _resolve(group)
    source = None
    stop = _core.StopSource()
    # The call has a thread of its own; what it asks for is done here, one thing at a time.
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
            }
            _core.gather_each(lambda: ask("layer"), ranks, group, lambda part: ask("part", part), options, stop)
            asked.put(("end", None))
        except BaseException as error:
            asked.put(("end", error))

    thread = threading.Thread(target=run, name="muster.gather_each", daemon=True)
    thread.start()
    own = None  # what this rank's own iterable has raised
    is_suspended = False

    def end(words):
        if not thread.is_alive():
            return
        if not is_suspended:  # another thread of the program is in the middle of a step
            stop.request_stop()
        # If the thread waits for an answer, or asks once more.
        answers.put((None, errors.IoError(words)))
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
                    answer, own = (next(source),), None
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


def _iterator_of(layers):
    try:
        return iter(layers)
    except TypeError as error:
        raise errors.ArgumentError(f"layers: {error}") from error
