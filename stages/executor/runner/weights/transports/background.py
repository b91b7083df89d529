"""A thread for what may hang."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, ParamSpec, TypeVar

_P = ParamSpec("_P")
_R = TypeVar("_R")


class Background:
    """Runs functions one after the other, on a thread for which the end of a program does not wait.

    Python's own executors are waited for, and one of these functions may be waiting for a peer
    that is no more.
    """

    def __init__(self, name: str, first: Callable[[], object] = lambda: None) -> None:
        """Args: the thread's name, and what it does first. It starts with the first function."""
        self._tasks: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._tasks.put(first)
        self._thread = threading.Thread(target=self._run, daemon=True, name=name)

    def submit(self, function: Callable[_P, _R], *args: _P.args, **kwargs: _P.kwargs) -> Future[_R]:
        """Lets it run, after those before."""
        future: Future[_R] = Future()

        def task() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                result = function(*args, **kwargs)
            except BaseException as error:  # noqa: BLE001  (whoever waits for it gets it)
                future.set_exception(error)
            else:
                future.set_result(result)

        self._tasks.put(task)
        if self._thread.ident is None:
            self._thread.start()
        return future

    def close(self) -> None:
        """Ends the thread when it has done all that was submitted."""
        self._tasks.put(None)

    def _run(self) -> None:
        task: Any
        while (task := self._tasks.get()) is not None:
            task()
            del task  # and with it what the function was given
