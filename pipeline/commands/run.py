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

from ...bus.codec import encode_output
from ...bus.messages import Completion
from ...config import STAGES, Config, ConfigError, nearest
from ...telemetry import setup_logging
from ..pipeline import Pipeline
from .options import BusUrl, ConfigFile, LogLevel, ModelPath, Settings, build_config
from .stdin import stdin_lines

# Lines of standard input that are answered at the same time.
_CONCURRENT_LINES = 256


def run(
    stages: Annotated[
        str,
        typer.Option(help="The stages of this process, separated by commas.", metavar="NAMES"),
    ] = ",".join(STAGES),
    bus: BusUrl = None,
    model: ModelPath = None,
    config_file: ConfigFile = None,
    settings: Settings = None,
    log_level: LogLevel = None,
    with_parent: Annotated[
        bool,
        typer.Option(
            "--with-parent", hidden=True, help="Drain when standard input closes, as `up` wants."
        ),
    ] = False,
) -> None:
    """Run stages in this process.

    Over Redis, this process runs the stages that you name, and SIGTERM drains it. Start the
    other stages elsewhere, on any machine that reaches the same Redis:

        nano-inference run --bus redis://127.0.0.1:6379

        nano-inference run --bus redis://127.0.0.1:6379 --stages executor,batching

    Without Redis, it is a filter: requests as JSON lines on standard input, outputs as JSON lines
    on standard output, done when the input ends:

        echo '{"prompt": "98 + 25 =", "sampling": {"temperature": 0}}' | nano-inference run
    """
    names = [name.strip() for name in stages.split(",") if name.strip()]
    for name in names:
        if name not in STAGES:
            raise ConfigError(f"there is no stage {name!r}{nearest(name, STAGES)}")
    config = build_config(
        config_file, bus, model, settings, log_level, **{"pipeline.stages": names}
    )
    setup_logging(config.telemetry)
    if config.bus.url == "memory":
        anyio.run(_filter, config)
    else:
        anyio.run(_serve, config, with_parent)


async def _serve(config: Config, with_parent: bool) -> None:
    with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        async with Pipeline(config) as pipeline:
            await _told_to_stop(pipeline, signals, with_parent)
            await _drain(pipeline)


async def _told_to_stop(
    pipeline: Pipeline, signals: AsyncIterator[signal.Signals], with_parent: bool
) -> None:
    """Returns on the first signal. From then on a second one kills at once."""
    async with anyio.create_task_group() as group:
        group.start_soon(pipeline.failed)
        if with_parent:
            group.start_soon(_parent_gone, group.cancel_scope)
        await anext(signals)
        group.cancel_scope.cancel()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_DFL)


async def _parent_gone(scope: anyio.CancelScope) -> None:
    """Standard input is a pipe that the parent never writes to and that closes when it dies."""
    async for _ in stdin_lines():
        pass
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
