"""`nano-inference health`: one process, for probes."""

from __future__ import annotations

import asyncio
import socket
from typing import Annotated
from urllib.parse import quote

import typer

from ..config import STAGES, BusError, ConfigError, nearest, split_role
from ..pipeline.health import lanes_of, living_first, problem_of
from ..store.board import STALE_AFTER_S, StageReport
from .clients import ServerClient, Unreachable
from .connection import Server, connected, named_server
from .options import Options, option, takes_status_options
from .status import serving_elsewhere


@takes_status_options
def health(
    options: Options,
    stage: Annotated[
        list[str] | None, option("--stage", "Only this stage. Repeatable.", "NAME")
    ] = None,
    live: Annotated[bool, option("--live/--ready", "Check liveness or readiness.")] = False,
    host: Annotated[
        str | None, option("--host", "The host of the process; default: this one.")
    ] = None,
) -> None:
    """Check the stages on this host: exit status 0 if they are healthy, else 1.

    For probes such as Kubernetes' `exec`, in the container of the process:

        nano-inference health --live

        nano-inference health --ready --stage executor

        nano-inference health --url http://127.0.0.1:8000

    Live: the process has reported within the last seconds. Ready: each of its stages is in the
    lane's current epoch; of several models, those of each that runs here. While Redis is
    unreachable, a process counts as live, since a restart would not bring Redis back, and as not
    ready. With --url the probes of a server are called, such as that of `serve`; they need no key.
    """
    if (server := named_server(options)) is not None:
        if stage or host:
            raise ConfigError("--stage and --host are for a bus; a server answers for all stages")
        _check_server(server, options.served, live=live)
        return
    for name in stage or ():
        if split_role(name)[0] not in STAGES:
            raise ConfigError(f"there is no stage {name!r}{nearest(name, STAGES)}")
    config = options.client_config("error")

    async def reports() -> list[StageReport]:
        async with connected(config, options.served) as client:
            return await client.reports()

    try:
        found = asyncio.run(reports())
    except BusError as error:
        problem = serving_elsewhere(config, error).message
        typer.echo(f"{'unknown' if live else 'not ready'}: {problem}")
        raise typer.Exit(0 if live else 1) from None
    here = host or socket.gethostname()
    problems = [
        problem
        for model in sorted({report.model for report in found if report.host == here}) or [""]
        for problem in _problems(
            [report for report in found if report.model == model],
            model=model,
            lane=config.bus.lane,
            host=here,
            stages=stage or [],
            live=live,
        )
    ]
    typer.echo("\n".join(problems) if problems else "live" if live else "ready")
    if problems:
        raise typer.Exit(1)


def _check_server(server: Server, model: str | None, *, live: bool) -> None:
    """Raises typer.Exit with status 1: the probe fails, or nothing answers."""
    word = "live" if live else "ready"
    path = "/livez" if live else "/readyz"
    if model is not None and not live:
        path = f"/v2/models/{quote(model, safe='')}/ready"

    async def probe() -> str:
        async with ServerClient(server) as client:
            return await client.probe(path)

    try:
        problem = asyncio.run(probe())
    except Unreachable as error:
        problem = error.message
    typer.echo(f"not {word}: {problem}" if problem else word)
    if problem:
        raise typer.Exit(1)


def _problems(
    reports: list[StageReport], *, model: str, lane: str, host: str, stages: list[str], live: bool
) -> list[str]:
    """Return the problems of a model's stages on a host: of these, or of all there if empty."""
    where = f"lane {lane}" + (f" of model {model}" if model else "") + f" on {host}"
    # Of a process and its successor on the same host, the last one heard of.
    here: dict[str, StageReport] = {}
    for report in living_first(reports):
        if (report.lane, report.host) == (lane, host):
            here.setdefault(report.stage, report)
    silent = f"not heard of for {STALE_AFTER_S:.0f} s"
    problems = [f"the {name} stage of {where}: {silent}" for name in stages if name not in here]
    if not here and not stages:
        problems = [f"no stage of {where}: {silent}"]
    if not live:
        epochs = {each.lane: each.epoch for each in lanes_of(reports)}
        checked = (here[name] for name in stages or here if name in here)
        problems += filter(None, (problem_of(report, epochs[lane]) for report in checked))
    return problems
