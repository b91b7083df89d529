"""Parts that long-running processes share: standard input, signals, memory, limits."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from types import FrameType
from typing import Any, NamedTuple

import anyio

from ..config.logger import get_logger
from ..pipeline.pipeline import Pipeline
from ..text.transformers_models import import_models

DRAIN = b"drain\n"
"""Sent by `up` to a child's standard input when the whole pipeline is to stop."""

TAKE_OVER = b"take over\n"
"""Sent by `up` to the standard input of a standby when the process that it replaces has ended."""

LOOK_S = 3.0

IDLE_SHARE = 0.1
"""Share of a core's time below which a garbage collection does not delay the process's work."""

WORTH_S = 0.3
"""CPU time since the last garbage collection that makes another one worthwhile."""

_CURSOR_SHOWN = "\r\x1b[K\x1b[?25h"

_READ_AHEAD = 256
_READ_BYTES = 1 << 16


class StopReason(NamedTuple):
    """Why a process stops.

    Attributes:
        signal: None without one.
        words: Sent by its parent. Without a word and a signal, the parent has ended.
    """

    signal: signal.Signals | None
    words: list[bytes]


def stop_signals() -> AbstractContextManager[AsyncIterator[signal.Signals]]:
    """Receive the signals that end a server: SIGTERM, SIGINT, and SIGHUP unless `nohup` is used."""
    hangs_up = signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN
    return anyio.open_signal_receiver(
        signal.SIGTERM, signal.SIGINT, *((signal.SIGHUP,) if hangs_up else ())
    )


@contextmanager
def ending_at_once() -> Iterator[None]:
    """While a model is loaded, let Ctrl-C end the process, as SIGTERM does.

    Nothing is in flight yet, and an event loop would receive Ctrl-C after seconds of imports.
    """
    before = signal.getsignal(signal.SIGINT)
    if before is signal.SIG_IGN or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGINT, _end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _end(number: int, frame: FrameType | None) -> None:
    for stream in (sys.stdout, sys.stderr):
        if stream.isatty():
            stream.write(_CURSOR_SHOWN)  # a progress bar hides it
            stream.flush()
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


async def until_stopped(
    signals: AsyncIterator[signal.Signals],
    *work: Callable[[], Coroutine[Any, Any, None]],
    with_parent: bool = False,
    take_over: Callable[[], None] = lambda: None,
) -> StopReason:
    """Wait until this process is to stop. After that, a second signal kills at once.

    A second SIGHUP is ignored: a shell and the system both send one when a terminal closes.

    Args:
        signals: The first of them ends the wait.
        work: Runs meanwhile; its errors are raised.
        with_parent: Whether the parent may end it by standard input, as `up` does.
        take_over: Called when the parent sends this word.
    """
    words: list[bytes] = []
    number: signal.Signals | None = None
    async with anyio.create_task_group() as group:
        for each in work:
            group.start_soon(each)
        group.start_soon(trim_memory_forever)
        if with_parent:
            group.start_soon(_hear_parent, words, take_over, group.cancel_scope)
        number = await anext(signals)
        group.cancel_scope.cancel()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    return StopReason(number, words)


async def _hear_parent(
    words: list[bytes], take_over: Callable[[], None], scope: anyio.CancelScope
) -> None:
    """Cancel when the parent sends another word on standard input, or dies, which closes it."""
    async for word in stdin_lines():
        if word == TAKE_OVER.strip():
            take_over()
        elif word:
            words.append(word)
            scope.cancel()
            return
    # The parent also read our logs; without a reader, writing would be an error.
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        os.dup2(nowhere, stream.fileno())
    scope.cancel()


async def drain(pipeline: Pipeline, timeout_s: float | None = None) -> None:
    """Drain a pipeline, and log the result."""
    log = get_logger()
    if await pipeline.drain(timeout_s):
        log.info("stopped", brief="stopped")
    else:
        log.error("stopped_undrained", lost="requests without an answer stay on the stream")


async def stdin_lines() -> AsyncIterator[bytes]:
    """Yield the lines of standard input, without line ends; cancelling never blocks."""
    loop = asyncio.get_running_loop()
    lines: asyncio.Queue[bytes | None] = asyncio.Queue()
    # Bounds the queue in the reader's thread.
    room = threading.Semaphore(_READ_AHEAD)

    def put(line: bytes | None) -> None:
        room.acquire()
        loop.call_soon_threadsafe(lines.put_nowait, line)

    # A daemon thread: a blocking read from a terminal can't be cancelled, and Ctrl-C must not wait
    # for it. It reads the descriptor, since a lock held on sys.stdin at exit is fatal.
    threading.Thread(target=_read_lines, args=(put,), name="stdin", daemon=True).start()
    while (line := await lines.get()) is not None:
        room.release()
        yield line


def _read_lines(put: Callable[[bytes | None], None]) -> None:
    rest = b""
    try:
        while chunk := os.read(0, _READ_BYTES):
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                put(line)
        put(rest)
        put(None)
    except RuntimeError:
        return  # the loop has ended


def freeze_memory() -> None:
    """Exclude the objects made so far from garbage collection, which stops everything."""
    gc.collect()
    gc.freeze()


async def trim_memory_forever() -> None:
    """Return memory to the system when the process is idle after work.

    Otherwise much memory of ended requests stays: cycles wait for the collector, which runs when
    more is allocated, and the allocator keeps free memory.
    """
    collected_s = used_s = 0.0
    while True:
        await anyio.sleep(LOOK_S)
        before_s, used_s = used_s, time.process_time()
        if used_s - before_s < IDLE_SHARE * LOOK_S and used_s - collected_s >= WORTH_S:
            collected_s = used_s
            gc.collect()
            if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):  # glibc's
                trim(0)


def forbid_torch() -> None:
    """Make importing torch fail in this process.

    With tokenizers, Transformers would import torch merely because it is installed, which takes
    longer than the rest of a start. Tokenizers work the same without.
    """
    if "torch" not in sys.modules:
        sys.modules["torch"] = None  # type: ignore[assignment]  # so that the import fails
        # It would advise to install torch.
        os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")


def import_tokenizers() -> None:
    """Import Transformers' tokenizers, which takes seconds of CPU time, before the first call."""
    import_models()
    from transformers import AutoTokenizer, PreTrainedTokenizerFast  # noqa: F401


def raise_file_limit() -> None:
    """Raise the limit of open files, and so of connections, to the most that is allowed."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # Some systems report "unlimited" and refuse it.
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
