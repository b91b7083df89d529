"""`nano-inference run`: stages in this process, until a signal says stop."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Annotated

import anyio
import structlog
import typer

from ..bus.codec import encode_output
from ..bus.public import Completion
from ..config import STAGES, Config, ConfigError, nearest
from ..pipeline.pipeline import Pipeline
from ..stages.temporary import sweep
from ..telemetry import setup_logging
from .options import ENGINE_OPTIONS, Options, WithParent, takes_options
from .process_memory import give_back_forever, spare_collector
from .stdin import stdin_lines

DRAIN = b"drain\n"
"""What `up` writes to a child's standard input when the whole pipeline is to stop."""

# Lines of standard input that are answered at the same time.
_CONCURRENT_LINES = 256


@takes_options("reference", *ENGINE_OPTIONS)
def run(
    options: Options,
    stages: Annotated[
        str,
        typer.Option(help="The stages of this process, separated by commas.", metavar="NAMES"),
    ] = ",".join(STAGES),
    with_parent: WithParent = False,
) -> None:
    """Run stages in this process.

    Over Redis, this process runs the stages that you name. Start the other stages elsewhere, on
    any machine that reaches the same Redis:

        nano-inference run --bus redis://127.0.0.1:6379

        nano-inference run --bus redis://127.0.0.1:6379 --stages executor,batching

    SIGTERM ends it in good order. With all five stages here, requests in flight may finish first.
    With some of them it leaves at once: nothing is lost, and the requests go on as soon as another
    process runs these stages. Ctrl-C lets requests in flight finish in either case.

    Without Redis, it is a filter: requests as JSON lines on standard input, outputs as JSON lines
    on standard output, done when the input ends:

        echo '{"prompt": "98 + 25 =", "sampling": {"temperature": 0}}' | nano-inference run
    """
    names = [name.strip() for name in stages.split(",") if name.strip()]
    for name in names:
        if name not in STAGES:
            raise ConfigError(f"there is no stage {name!r}{nearest(name, STAGES)}")
    config = options.config(**{"pipeline.stages": names})
    setup_logging(config.telemetry)
    if not with_parent:  # which has done it
        sweep()
    if "executor" not in names:
        forbid_torch()
    if config.bus.url == "memory":
        anyio.run(_filter, config)
    else:
        anyio.run(_serve, config, with_parent)


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


async def _serve(config: Config, with_parent: bool) -> None:
    with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        # A child may be started again while Redis is away; `up` has seen it before the first one.
        async with Pipeline(config, wait_for_bus=with_parent) as pipeline:
            spare_collector()
            if await _told_to_drain(pipeline, signals, with_parent):
                await _drain(pipeline)
            else:
                structlog.get_logger().info("leaving")


async def _told_to_drain(
    pipeline: Pipeline, signals: AsyncIterator[signal.Signals], with_parent: bool
) -> bool:
    """Waits until this process is to stop. From then on a second signal kills at once.

    Returns:
        Whether requests in flight shall finish first. By SIGTERM a process is replaced as often
        as stopped for good. When others have the rest of the stages it leaves at once, since a
        successor takes up what it held, and the sooner the better.
    """
    words: list[bytes] = []
    asked: signal.Signals | None = None
    async with anyio.create_task_group() as group:
        group.start_soon(pipeline.failed)
        group.start_soon(give_back_forever)
        if with_parent:
            group.start_soon(hear_parent, words, group.cancel_scope)
        asked = await anext(signals)
        group.cancel_scope.cancel()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    alone = set(pipeline.config.pipeline.stages) == set(STAGES)
    return alone or asked == signal.SIGINT or DRAIN.strip() in words


async def hear_parent(words: list[bytes], scope: anyio.CancelScope) -> None:
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


async def _drain(pipeline: Pipeline) -> None:
    log = structlog.get_logger()
    if await pipeline.drain():
        log.info("stopped")
    else:
        log.error("stopped_undrained", lost="requests without an answer stay on the stream")


async def _filter(config: Config) -> None:
    """Answers the lines of standard input; leaves when all are answered."""
    limit = anyio.CapacityLimiter(_CONCURRENT_LINES)
    with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        async with Pipeline(config) as pipeline, anyio.create_task_group() as group:
            group.start_soon(_drain_on_signal, signals, pipeline, group.cancel_scope)
            async with anyio.create_task_group() as answers:
                async for line in stdin_lines():
                    if line.strip():
                        await limit.acquire_on_behalf_of(line_token := object())
                        answers.start_soon(_answer, pipeline, line, limit, line_token)
            group.cancel_scope.cancel()


async def _drain_on_signal(
    signals: AsyncIterator[signal.Signals], pipeline: Pipeline, scope: anyio.CancelScope
) -> None:
    await anext(signals)
    await _drain(pipeline)
    scope.cancel()


async def _answer(
    pipeline: Pipeline, line: bytes, limit: anyio.CapacityLimiter, line_token: object
) -> None:
    try:
        async with aclosing(pipeline.submit(line)) as outputs:
            async for output in outputs:
                sys.stdout.buffer.write(encode_output(output) + b"\n")
                if isinstance(output, Completion):
                    sys.stdout.buffer.flush()
    finally:
        limit.release_on_behalf_of(line_token)
