"""A thread for calls that may hang."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, ParamSpec, TypeVar

import torch

_P = ParamSpec("_P")
_R = TypeVar("_R")


class Background:
    """Runs functions one after the other, on a daemon thread.

    Python's own executors delay the end of a program until their threads end, and a function here
    may wait for a dead peer.
    """

    def __init__(self, name: str, first: Callable[[], object] = lambda: None) -> None:
        """`first`: runs before all functions. The thread starts with the first of them."""
        self._tasks: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._tasks.put(first)
        self._thread = threading.Thread(target=self._run, daemon=True, name=name)

    def submit(self, function: Callable[_P, _R], *args: _P.args, **kwargs: _P.kwargs) -> Future[_R]:
        """Queue a function."""
        future: Future[_R] = Future()

        def task() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                result = function(*args, **kwargs)
            except BaseException as error:  # noqa: BLE001  (the future carries it)
                future.set_exception(error)
            else:
                future.set_result(result)

        self._tasks.put(task)
        if self._thread.ident is None:
            self._thread.start()
        return future

    def close(self) -> None:
        """End the thread after all queued functions."""
        self._tasks.put(None)

    def _run(self) -> None:
        task: Any
        while (task := self._tasks.get()) is not None:
            task()
            del task  # frees the function's arguments


def stay_single() -> None:
    """Forbid parallel regions of torch on this thread.

    Steps run on another thread, and two threads can't each have a team of OpenMP's workers without
    loss.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    # This also changed the default of threads that have not used torch yet. Undo that.
    undoing = threading.Thread(target=torch.set_num_threads, args=(threads,))
    undoing.start()
    undoing.join()
