"""Supervision of one stage: start, restart after failures, stop past a budget."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from importlib import import_module
from typing import cast

import anyio

from ..config import (
    BusError,
    ConfigError,
    LaneReplaced,
    ModelError,
    NanoInferenceError,
    PipelineConfig,
    cut,
)
from ..config.collector import collector_paused
from ..config.logger import get_logger
from ..stages.actor import Actor

LONGEST_WAIT_S = 10.0
"""Longest wait before a restart."""


class StageFailed(NanoInferenceError):
    """A stage failed more often than its restart budget allows."""

    code = "stage_failed"


def actor_class(stage: str) -> type[Actor]:
    """Return the class of a stage. Only a process that runs the executor imports its kernels."""
    with collector_paused():
        module = import_module(f"..stages.{stage}.stage", __package__)
    return cast(type[Actor], getattr(module, f"{stage.title()}Stage"))


class RestartBudget:
    """The number of failures within a time, and the growing waits between restarts."""

    def __init__(self, name: str, config: PipelineConfig) -> None:
        self._name = name
        self._config = config
        self._failures: deque[float] = deque()

    def failed(self, now_s: float) -> float:
        """Count a failure.

        Args:
            now_s: A monotonic clock.

        Returns:
            Seconds to wait before the restart: none for the first failure within the window; then
            doubling, up to `LONGEST_WAIT_S`.

        Raises:
            StageFailed: The budget is used up.
        """
        config = self._config
        self._failures.append(now_s)
        while self._failures[0] < now_s - config.restart_window_s:
            self._failures.popleft()
        count = len(self._failures)
        if count > config.max_restarts:
            raise StageFailed(
                f"the {self._name} stage failed {count} times within "
                f"{config.restart_window_s:g} s; its errors are in the log above"
            )
        if count == 1:
            return 0.0
        # A float overflows at 2**1024.
        return float(min(LONGEST_WAIT_S, config.restart_backoff_s * 2 ** min(count - 2, 30)))


async def supervise(
    make: Callable[[], Actor],
    config: PipelineConfig,
    on_restart: Callable[[str], None] = lambda cause: None,
) -> None:
    """Run a stage until cancelled; call `on_restart` with the cause of each restart.

    Each failure is logged with its traceback and reported to admission, which ends the requests in
    flight. Then, after a wait, a new stage object starts.

    Raises:
        StageFailed: The restart budget is used up.
        ModelError, ConfigError: The stage can't start, and a restart would not help. Once it has
            run, this counts as a failure: files may be unreadable for a while, for instance for
            want of descriptors.
        LaneReplaced: Another process serves its lane; a restart would displace that process.
    """
    budget: RestartBudget | None = None
    last, has_opened = "", False
    while True:
        actor = make()
        budget = budget or RestartBudget(actor.name, config)
        log = get_logger().bind(stage=actor.name)
        try:
            await actor.run()
        except Exception as error:
            actor.failed = True
            cause = _only_cause(error)
            if isinstance(cause, LaneReplaced):
                log.error("lane_replaced", reason=str(cause))
                raise cause from None
            has_opened = has_opened or actor.opened
            if isinstance(cause, ModelError | ConfigError) and not has_opened:
                raise cause from None
            reason = cut(repr(cause))
            # The same error is logged without its traceback the second time.
            log.error("stage_failed", error=reason, exc_info=reason != last and cause)
            last = reason
            await _announce(actor, reason)
        wait_s = budget.failed(time.monotonic())
        on_restart(last)
        log.warning("stage_restarts", wait_s=round(wait_s, 3))
        await anyio.sleep(wait_s)


async def _announce(actor: Actor, reason: str) -> None:
    """Notify admission at once; if that fails, the restarted stage does it."""
    try:
        with anyio.move_on_after(1.0):
            await actor.leave(reason, failed=True)
    except BusError as error:
        actor.log.warning("failure_not_announced", error=str(error))


def _only_cause(error: Exception) -> BaseException:
    """Return the error of a task group with one failed task."""
    cause: BaseException = error
    while isinstance(cause, BaseExceptionGroup):
        replaced = cause.subgroup(LaneReplaced)  # several tasks may raise it
        if replaced is None and len(cause.exceptions) != 1:
            break
        cause = (replaced or cause).exceptions[0]
    return cause
