"""What processes that serve share: how they begin, how long they run, how they stop."""

from __future__ import annotations

import os
import resource
import signal
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import suppress
from typing import Any, NamedTuple

import anyio

from ..config.logger import get_logger
from ..pipeline.pipeline import Pipeline
from .process_memory import give_back_forever
from .stdin import stdin_lines

DRAIN = b"drain\n"
"""What `up` writes to a child's standard input when the whole pipeline is to stop."""


class Told(NamedTuple):
    """Why a process is to stop.

    Attributes:
        asked: The signal, None where there was none.
        words: What its parent has said. Without that and a signal, the parent is gone.
    """

    asked: signal.Signals | None
    words: list[bytes]


async def until_told_to_stop(
    signals: AsyncIterator[signal.Signals],
    *beside: Callable[[], Coroutine[Any, Any, None]],
    with_parent: bool = False,
) -> Told:
    """Waits until this process is to stop. From then on a second signal kills at once.

    Args:
        signals: The first of them is what it waits for.
        beside: What runs meanwhile; an error that it raises comes out.
        with_parent: Whether its parent may tell it by its standard input, as `up` does.
    """
    words: list[bytes] = []
    asked: signal.Signals | None = None
    async with anyio.create_task_group() as group:
        for work in beside:
            group.start_soon(work)
        group.start_soon(give_back_forever)
        if with_parent:
            group.start_soon(_hear_parent, words, group.cancel_scope)
        asked = await anext(signals)
        group.cancel_scope.cancel()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    return Told(asked, words)


async def _hear_parent(words: list[bytes], scope: anyio.CancelScope) -> None:
    """Standard input is a pipe: one word comes when all is to stop, and it closes when the parent
    dies."""
    async for word in stdin_lines():
        if word:
            words.append(word)
            scope.cancel()
            return
    # It read our logs too; a write to nobody would be an error.
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        os.dup2(nowhere, stream.fileno())
    scope.cancel()


async def drain(pipeline: Pipeline, timeout_s: float | None = None) -> None:
    """As `Pipeline.drain`, and says in the log how it ended."""
    log = get_logger()
    if await pipeline.drain(timeout_s):
        log.info("stopped", brief="stopped")
    else:
        log.error("stopped_undrained", lost="requests without an answer stay on the stream")


def forbid_torch() -> None:
    """Lets nothing in this process import torch, which only the executor uses.

    Transformers would, as soon as admission and streaming load a tokenizer, merely because it is
    installed. That takes longer than all else at the start of a process. Without torch, tokenizers
    are the same, and Transformers knows how to do without.
    """
    if "torch" not in sys.modules:
        sys.modules["torch"] = None  # type: ignore[assignment]  # so Python says that there is none
        # It would advise to install it.
        os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")


def raise_file_limit() -> None:
    """Lets this process have as many open files, and so connections, as it may."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # Some systems say "unlimited" and do not mean it.
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
