"""Refusal of a lane that another process serves, by the reports of its stages."""

from __future__ import annotations

import os
import time
from collections.abc import Collection
from contextlib import aclosing

import anyio

from ..bus import open_bus
from ..bus.links import MODEL_MANAGER
from ..config import BusConfig, BusError, ConfigError, redact
from ..store.board import STALE_AFTER_S, StageReport
from .running import found
from .terminal import complain

# A process on another host that reports after this time has not just ended.
_REPORTS_AFTER_S = 1.5
_LOOK_S = 0.25


async def refuse_if_served(config: BusConfig, roles: Collection[str]) -> None:
    """Return if no living process runs one of these roles in the lane.

    The kernel shows at once whether a process of this machine runs. One of another machine may have
    just ended, as before a restart in its place, so this waits until the process reports again or
    its last report is `STALE_AFTER_S` old.

    Args:
        config: The bus, with the lane.
        roles: Roles that the caller would start.

    Raises:
        ConfigError: A living process runs one.
        BusError: The bus can't be reached.
    """
    begun, has_said = time.monotonic(), False
    async with aclosing(open_bus(config)) as bus:
        while True:
            passed_s = time.monotonic() - begun
            there = _present(await bus.store.board.read(), config.lane, {*roles, MODEL_MANAGER})
            for report in there:
                if is_alive(report, passed_s):
                    raise ConfigError(
                        f"lane {config.lane} is served by {server_of(report, config)} on this "
                        "Redis; stop it, give this pipeline a bus.lane or bus.prefix of its own, "
                        "or replace it with --take-over"
                    )
            if not there:
                return
            if not has_said:
                complain(
                    f"lane {config.lane} was served from {there[0].host} a moment ago; waiting up "
                    f"to {STALE_AFTER_S:.0f} s until its stages report or count as gone"
                )
                has_said = True
            await anyio.sleep(_LOOK_S)


def is_alive(report: StageReport, passed_s: float) -> bool:
    """Return whether the process of a report lives, `passed_s` after the caller began to read."""
    here = report.process_state in ("running", "stopped")
    return here or report.age_s < passed_s - _REPORTS_AFTER_S


async def successor(config: BusConfig, role: str, pid: int) -> str:
    """Return the server that has replaced process `pid` in a role, as PID@HOST; "" if unknown."""
    try:
        async with aclosing(open_bus(config)) as bus:
            there = _present(await bus.store.board.read(), config.lane, {role})
    except BusError:
        return ""
    return next((server_of(each, config) for each in there if each.pid != pid), "")


def server_of(report: StageReport, config: BusConfig) -> str:
    """Return the server of a stage as PID@HOST; of one on another host the process of the stage."""
    pid = report.pid
    if report.process_state in ("running", "stopped"):
        at = (redact(config.url), config.prefix)
        servers = [
            each.pid
            for each in found()
            if each.command != "gateway" and (each.bus, each.prefix) == at
            if each.pid != os.getpid()
        ]
        pid = servers[0] if len(servers) == 1 else pid
    return f"{pid}@{report.host}"


def _present(
    reports: Collection[StageReport], lane: str, roles: Collection[str]
) -> list[StageReport]:
    return [
        each
        for each in reports
        if (each.lane, each.process_state != "gone") == (lane, True) and each.stage in roles
    ]
