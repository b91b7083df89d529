"""`nano-inference run`: stages in this process, until a signal."""

from __future__ import annotations

import signal
import sys
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Annotated

import anyio
import msgspec

from ..bus.codec import encode_output
from ..bus.public import Completion
from ..config import STAGES, Config, ConfigError, nearest
from ..config.logger import get_logger
from ..config.temporary import sweep
from ..pipeline.pipeline import Pipeline
from ..store.board import Restarts
from ..telemetry import setup_logging
from .model_files import check_model_files
from .options import Options, Restarted, Standby, WithParent, option, takes_engine_options
from .process import (
    DRAIN,
    drain,
    forbid_torch,
    freeze_memory,
    stdin_lines,
    stop_signals,
    until_stopped,
)

_CONCURRENT_LINES = 256


@takes_engine_options
def run(
    options: Options,
    stages: Annotated[
        str, option("--stages NAMES", "The stages of this process, separated by commas.")
    ] = ",".join(STAGES),
    with_parent: WithParent = False,
    standby: Standby = False,
    restarted: Restarted = "{}",
) -> None:
    """Run stages in this process.

    Over Redis, this process runs the stages that you name. Start the other stages elsewhere, on
    any machine that reaches the same Redis:

        nano-inference run --bus redis://127.0.0.1:6379

        nano-inference run --bus redis://127.0.0.1:6379 --stages executor,batching

    On SIGTERM, a process with all five stages drains requests in flight. With some of them it exits
    at once: no request is lost, and requests continue when another process runs these stages.
    Ctrl-C drains in either case.

    Without Redis, it is a filter: requests as JSON lines on standard input, outputs as JSON lines
    on standard output, until the input ends:

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
    if not with_parent:  # the parent has done it
        sweep()
    if "executor" not in names:
        forbid_torch()
    if config.bus.url == "memory":
        anyio.run(_filter, config)
    else:
        restarts = msgspec.json.decode(restarted, type=Restarts)
        anyio.run(_serve, config, with_parent, standby, restarts)


async def _serve(config: Config, with_parent: bool, standby: bool, restarts: Restarts) -> None:
    with stop_signals() as signals:
        # It may be restarted while Redis is away; `up` has checked it before the first start.
        async with Pipeline(
            config, wait_for_bus=with_parent, standby=standby, restarts=restarts
        ) as pipeline:
            freeze_memory()
            reason = await until_stopped(
                signals, pipeline.failed, with_parent=with_parent, take_over=pipeline.take_over
            )
            # SIGTERM often means that the process is replaced. If others have the rest of the
            # stages it exits at once, since a successor takes over its requests.
            alone = set(config.pipeline.stages) == set(STAGES)
            by_user = reason.signal in (signal.SIGINT, signal.SIGHUP)
            if alone or by_user or DRAIN.strip() in reason.words:
                await drain(pipeline)
            else:
                get_logger().info("leaving", brief="leaving")


async def _filter(config: Config) -> None:
    """Answer the lines of standard input; return when all are answered."""
    limit = anyio.Semaphore(_CONCURRENT_LINES)
    with stop_signals() as signals:
        async with Pipeline(config) as pipeline, anyio.create_task_group() as group:
            group.start_soon(_drain_on_signal, signals, pipeline, group.cancel_scope)
            async with anyio.create_task_group() as answers:
                async for line in stdin_lines():
                    if line.strip():
                        await limit.acquire()
                        answers.start_soon(_answer, pipeline, line, limit)
            group.cancel_scope.cancel()


async def _drain_on_signal(
    signals: AsyncIterator[signal.Signals], pipeline: Pipeline, scope: anyio.CancelScope
) -> None:
    await anext(signals)
    await drain(pipeline)
    scope.cancel()


async def _answer(pipeline: Pipeline, line: bytes, limit: anyio.Semaphore) -> None:
    try:
        async with aclosing(pipeline.submit(line)) as outputs:
            async for output in outputs:
                sys.stdout.buffer.write(encode_output(output) + b"\n")
                if isinstance(output, Completion):
                    sys.stdout.buffer.flush()
    finally:
        limit.release()
