"""`nano-inference health`: one process, for probes."""

from __future__ import annotations

import asyncio
import socket
from typing import Annotated
from urllib.parse import quote

import typer

from ..config import STAGES, BusError, Config, ConfigError, nearest, split_role
from ..pipeline.health import lanes_of, living_first, problem_of
from ..store.board import STALE_AFTER_S, StageReport
from .answerer import Server, named_server
from .connection import connected_to
from .http_calls import Unreachable
from .options import Options, takes_looking_options
from .status import serving_elsewhere


@takes_looking_options
def health(
    options: Options,
    stage: Annotated[
        list[str] | None,
        typer.Option(
            "--stage", metavar="NAME", help="Only this stage. Repeatable.", show_default=False
        ),
    ] = None,
    live: Annotated[
        bool,
        typer.Option("--live/--ready", help="What is asked: does it live, or does it take part?"),
    ] = False,
    host: Annotated[
        str | None,
        typer.Option(help="Where the process runs; here, by default.", show_default=False),
    ] = None,
) -> None:
    """Ask how the stages on this host are: exit status 0 when they are well, else 1.

    For probes, as those of Kubernetes (`exec`), in the container of the process:

        nano-inference health --live

        nano-inference health --ready --stage executor

        nano-inference health --url http://127.0.0.1:8000

    Live: the process was heard of within the last seconds. Ready: each of its stages takes part in
    the lane's current epoch; of several models, those of each that runs here. While Redis is away
    nobody can tell; a process counts as live then, since starting it again would not bring Redis
    back, and as not ready. With --url the probes of a server are asked, such as that of `serve`;
    they need no key.
    """
    if (server := named_server(options)) is not None:
        if stage or host:
            raise ConfigError("--stage and --host are for a bus; a server answers for all stages")
        _ask_server(server, options.served, live=live)
        return
    for name in stage or ():
        if split_role(name)[0] not in STAGES:
            raise ConfigError(f"there is no stage {name!r}{nearest(name, STAGES)}")
    config = options.client_config("error")
    try:
        reports = asyncio.run(_read(config, options.served))
    except BusError as error:
        problem = serving_elsewhere(config, error).message
        typer.echo(f"{'unknown' if live else 'not ready'}: {problem}")
        raise typer.Exit(0 if live else 1) from None
    here = host or socket.gethostname()
    problems = problems_of(reports, config.bus.lane, here, stage or [], live=live)
    for problem in problems:
        typer.echo(problem)
    if problems:
        raise typer.Exit(1)
    typer.echo("live" if live else "ready")


def _ask_server(server: Server, model: str | None, *, live: bool) -> None:
    """Raises typer.Exit with status 1: it says no, or nothing answers."""
    # Who asks a bus need not wait for this import.
    from .server_status import probe

    word = "live" if live else "ready"
    path = "/livez" if live else "/readyz"
    if model is not None and not live:
        path = f"/v2/models/{quote(model, safe='')}/ready"
    try:
        problem = asyncio.run(probe(server, path))
    except Unreachable as error:
        problem = error.message
    typer.echo(f"not {word}: {problem}" if problem else word)
    if problem:
        raise typer.Exit(1)


async def _read(config: Config, model: str | None) -> list[StageReport]:
    async with connected_to(config, model) as client:
        return await client.reports()


def problems_of(
    reports: list[StageReport], lane: str, host: str, stages: list[str], *, live: bool
) -> list[str]:
    """What is wrong with the stages of a lane on a host, of each model that has one there; with all
    that are there when none is named."""
    models = sorted({report.model for report in reports if report.host == host}) or [""]
    return [
        problem
        for model in models
        for problem in _problems_of_model(
            [report for report in reports if report.model == model],
            f"lane {lane}" + (f" of model {model}" if model else ""),
            *(lane, host, stages),
            live=live,
        )
    ]


def _problems_of_model(
    reports: list[StageReport], called: str, lane: str, host: str, stages: list[str], *, live: bool
) -> list[str]:
    lanes = {health.lane: health for health in lanes_of(reports)}
    # Of a process and its successor on the same host, the one heard of last.
    here: dict[str, StageReport] = {}
    for report in living_first(reports):
        if (report.lane, report.host) == (lane, host):
            here.setdefault(report.stage, report)
    problems = [
        f"the {name} stage of {called} on {host} was not heard of for {STALE_AFTER_S:.0f} s"
        for name in stages
        if name not in here
    ]
    if not here and not stages:
        problems = [f"no stage of {called} on {host} was heard of for {STALE_AFTER_S:.0f} s"]
    if not live:
        wanted = stages or list(here)
        reasons = [problem_of(here[name], lanes[lane].epoch) for name in wanted if name in here]
        problems += filter(None, reasons)
    return problems
