"""An asyncio event loop in simulated time, with processes that can be killed and paused."""

from __future__ import annotations

import asyncio
import heapq
from asyncio import events
from collections.abc import Callable, Coroutine, Iterable
from contextvars import Context, ContextVar, copy_context
from functools import partial
from random import Random
from typing import Any

EVENT_NS = 2_000
"""Processor time of one callback."""


class SimulatedProcess:
    """A process: the tasks and callbacks begun in its context.

    Attributes:
        name: Name of its program, for the trace.
        pid: Its number; a program that starts again has another.
        alive: False once it was killed: its callbacks never run again.
        paused: While true its callbacks are held back, as by SIGSTOP.
        wall_offset_ns: How far its wall clock is ahead of simulated time.
    """

    def __init__(self, name: str, pid: int) -> None:
        self.name = name
        self.pid = pid
        self.alive = True
        self.paused = False
        self.wall_offset_ns = 0
        self.held: list[Handle] = []
        # Kept, since the end of a killed process runs no `finally` clause.
        self._tasks: list[asyncio.Task[Any]] = []
        self._most_tasks = 64

    @property
    def host(self) -> str:
        """The name of its host: one for each lane, and one for each further replica."""
        lane, _, role = self.name.partition("/")
        _, dot, replica = role.partition(".")
        return f"{lane}{dot}{replica}"

    def add(self, task: asyncio.Task[Any]) -> None:
        """Note a task of this process."""
        self._tasks.append(task)
        if len(self._tasks) > self._most_tasks:
            self._tasks = [each for each in self._tasks if not each.done()]
            self._most_tasks = 2 * len(self._tasks) + 64

    def drop(self) -> None:
        """Forget all tasks."""
        self._tasks.clear()
        self.held.clear()


PROCESS: ContextVar[SimulatedProcess | None] = ContextVar("process", default=None)
"""The process of the running code; None outside all of them."""


class Handle:
    """A callback and its process; with the interface of asyncio's, and half of its cost."""

    __slots__ = ("args", "callback", "context", "process", "when_ns")

    def __init__(
        self,
        when_ns: int,
        callback: Callable[..., object],
        args: tuple[Any, ...],
        context: Context | None,
    ) -> None:
        if context is None:
            context = copy_context()
        self.process = context.get(PROCESS)
        self.context = context
        self.when_ns = when_ns
        self.callback: Callable[..., object] | None = callback
        self.args = args

    def cancel(self) -> None:
        self.callback, self.args = None, ()

    def cancelled(self) -> bool:
        return self.callback is None

    def when(self) -> float:
        return self.when_ns / 1e9


class OrderedSet(dict[Any, None]):
    """A set whose order is that of its additions, for sets of objects whose hash is an address."""

    def __init__(self, items: Iterable[Any] = ()) -> None:
        super().__init__(dict.fromkeys(items))

    def add(self, item: Any) -> None:
        self[item] = None

    def discard(self, item: Any) -> None:
        self.pop(item, None)

    def remove(self, item: Any) -> None:
        del self[item]


class _Task(asyncio.Task):  # type: ignore[type-arg]
    """A task whose hash is a number, so that the order of a set of tasks is the same each time."""

    def __init__(self, program: Coroutine[Any, Any, Any], *, loop: Any, **more: Any) -> None:
        self.number: int = loop.next_number()  # first, since asyncio puts the task into a set
        super().__init__(program, loop=loop, **more)

    def __hash__(self) -> int:
        return self.number

    def __eq__(self, other: object) -> bool:
        return self is other


class SimulatedLoop(asyncio.BaseEventLoop):
    """Runs callbacks in an order drawn from a generator; time passes when none is ready.

    There is no I/O and no thread. Functions for an executor run at once.

    Attributes:
        now_ns: Simulated time since the beginning.
        num_events: Callbacks run so far.
        most_events: A simulation that runs more callbacks doesn't end.
        check: Called after every `check_every` callbacks; 0 for never.
        unhandled: Errors in callbacks, and of tasks that no one awaits.
    """

    def __init__(self, random: Random, *, shuffled: bool = True) -> None:
        """`shuffled`: any ready callback may be next; else they run in the order of asyncio."""
        super().__init__()
        self._random = random.random
        self._shuffled = shuffled
        self._queue: list[Handle] = []
        self._timers: list[tuple[int, int, Handle]] = []
        self._sequence = 0
        self._numbers = 0
        self.now_ns = 0
        self.num_events = 0
        self.most_events = 1 << 62
        self.check_every = 0
        self.check: Callable[[], object] = lambda: None
        self.unhandled: list[str] = []
        self.set_task_factory(_make_task)  # type: ignore[arg-type]
        self.create_future = partial(asyncio.Future, loop=self)  # type: ignore[method-assign]

    # --- asyncio's interface ------------------------------------------------------------------

    get_debug = bool  # False, without code of ours: each future asks

    def time(self) -> float:
        return self.now_ns / 1e9

    def call_soon(  # type: ignore[override]
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> events.Handle:
        handle = Handle(self.now_ns, callback, args, context)
        self._queue.append(handle)
        return handle  # type: ignore[return-value]

    def call_soon_threadsafe(  # type: ignore[override]
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> events.Handle:
        return self.call_soon(callback, *args, context=context)

    def call_later(  # type: ignore[override]
        self,
        delay: float,
        callback: Callable[..., object],
        *args: Any,
        context: Context | None = None,
    ) -> events.TimerHandle:
        when_ns = self.now_ns + max(1, int(delay * 1e9))
        handle = Handle(when_ns, callback, args, context)
        self._sequence += 1
        heapq.heappush(self._timers, (when_ns, self._sequence, handle))
        return handle  # type: ignore[return-value]

    def call_at(  # type: ignore[override]
        self,
        when: float,
        callback: Callable[..., object],
        *args: Any,
        context: Context | None = None,
    ) -> events.TimerHandle:
        return self.call_in(int(when * 1e9) - self.now_ns, callback, *args, context=context)

    def call_in(
        self,
        delay_ns: int,
        callback: Callable[..., object],
        *args: Any,
        context: Context | None = None,
    ) -> events.TimerHandle:
        """Call a function after a delay; a delay of 0 or less takes its turn with others."""
        when_ns = self.now_ns + max(1, delay_ns)
        handle = Handle(when_ns, callback, args, context)
        self._sequence += 1
        heapq.heappush(self._timers, (when_ns, self._sequence, handle))
        return handle  # type: ignore[return-value]

    def run_in_executor(  # type: ignore[override]
        self, executor: object, function: Callable[..., Any], *args: Any
    ) -> asyncio.Future[Any]:
        future = self.create_future()
        try:
            future.set_result(function(*args))
        except Exception as error:  # noqa: BLE001  (the future carries it)
            future.set_exception(error)
        return future

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """Note errors that no one has handled; killed processes leave pending tasks."""
        error = context.get("exception")
        if error is not None:
            self.unhandled.append(f"{context.get('message')}: {error!r}")

    # --- running ------------------------------------------------------------------------------

    def run_until(self, done: Callable[[], bool], limit_ns: int, every: int = 16) -> bool:
        """Run callbacks until `done`; returns false if it isn't by `limit_ns`, or by too many.

        Args:
            done: Called after every so many callbacks.
            limit_ns: In simulated time.
            every: The number of callbacks.
        """
        events._set_running_loop(self)
        try:
            while not done():
                if self.num_events > self.most_events:
                    return False
                if not self._run(every, limit_ns):
                    return done()
            return True
        finally:
            events._set_running_loop(None)

    def _run(self, number: int, limit_ns: int) -> bool:
        """Run so many callbacks; returns false if none is left before the limit."""
        queue, timers, random, shuffled = self._queue, self._timers, self._random, self._shuffled
        pop, check_every = heapq.heappop, self.check_every
        while number:
            now = self.now_ns
            while timers and timers[0][0] <= now:
                queue.append(pop(timers)[2])
            if not queue:
                if not timers or timers[0][0] > limit_ns:
                    return False
                self.now_ns = timers[0][0]
                continue
            if not shuffled:
                handle = queue.pop(0)
            elif (last := len(queue) - 1) > 0:
                index = int(random() * (last + 1))
                handle, queue[index] = queue[index], queue[last]
                queue.pop()
            else:
                handle = queue.pop()
            callback, process = handle.callback, handle.process
            if callback is None:
                continue
            if process is not None:
                if not process.alive:
                    continue
                if process.paused:
                    process.held.append(handle)
                    continue
            self.now_ns = now + EVENT_NS
            self.num_events += 1
            number -= 1
            try:
                handle.context.run(callback, *handle.args)
            except Exception as error:  # noqa: BLE001  (as asyncio does)
                self.call_exception_handler({"message": "in a callback", "exception": error})
            if check_every and self.num_events % check_every == 0:
                self.check()
        return True

    # --- processes ----------------------------------------------------------------------------

    def start(self, process: SimulatedProcess, program: Coroutine[Any, Any, Any]) -> _Task:
        """Run a program as the main task of a process."""
        token = PROCESS.set(process)
        try:
            return _make_task(self, program)
        finally:
            PROCESS.reset(token)

    def pause(self, process: SimulatedProcess) -> None:
        """Hold back all callbacks of a process."""
        process.paused = True

    def resume(self, process: SimulatedProcess) -> None:
        """Run what was held back."""
        process.paused = False
        self._queue += process.held
        process.held = []

    def drop(self) -> None:
        """Forget all callbacks."""
        self._queue.clear()
        self._timers.clear()

    def next_number(self) -> int:
        """Return the next number, from 1."""
        self._numbers += 1
        return self._numbers


def _make_task(
    loop: Any, program: Coroutine[Any, Any, Any], context: Context | None = None, **more: Any
) -> _Task:
    task = _Task(program, loop=loop, context=context, **more)
    process = PROCESS.get() if context is None else context.get(PROCESS)
    if process is not None:
        process.add(task)
    return task
