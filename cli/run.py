"""`nano-inference run`: stages in this process, until a signal says stop."""

from __future__ import annotations

import signal
import sys
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Annotated

import anyio
import typer

from ..bus.codec import encode_output
from ..bus.public import Completion
from ..config import STAGES, Config, ConfigError, nearest
from ..config.logger import get_logger
from ..config.temporary import sweep
from ..pipeline.pipeline import Pipeline
from ..telemetry import setup_logging
from .model_paths import check_model_files
from .options import ENGINE_OPTIONS, Options, WithParent, takes_options
from .process import DRAIN, drain, forbid_torch, until_told_to_stop
from .process_memory import spare_collector
from .stdin import stdin_lines

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
    if "executor" in names:
        check_model_files(config, options.model)
    setup_logging(config.telemetry)
    if not with_parent:  # which has done it
        sweep()
    if "executor" not in names:
        forbid_torch()
    if config.bus.url == "memory":
        anyio.run(_filter, config)
    else:
        anyio.run(_serve, config, with_parent)


async def _serve(config: Config, with_parent: bool) -> None:
    with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        # A child may be started again while Redis is away; `up` has seen it before the first one.
        async with Pipeline(config, wait_for_bus=with_parent) as pipeline:
            spare_collector()
            told = await until_told_to_stop(signals, pipeline.failed, with_parent=with_parent)
            # By SIGTERM a process is replaced as often as stopped for good. When others have the
            # rest of the stages it leaves at once, since a successor takes up what it held, and
            # the sooner the better.
            alone = set(config.pipeline.stages) == set(STAGES)
            if alone or told.asked == signal.SIGINT or DRAIN.strip() in told.words:
                await drain(pipeline)
            else:
                get_logger().info("leaving", brief="leaving")


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
    await drain(pipeline)
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
