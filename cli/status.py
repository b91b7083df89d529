"""`nano-inference status`: whether a pipeline is ready, and what it does."""

from __future__ import annotations

import asyncio
import sys
from typing import Annotated

import msgspec
import typer

from ..config import DEFAULT_URL, BusError, Config
from ..pipeline.status import PipelineStatus
from .answerer import DEFAULT_SERVER, Place, Server, named_server
from .bus_status import look
from .options import Options, takes_looking_options
from .status_view import rendered
from .terminal import stdout


@takes_looking_options
def status(
    options: Options,
    as_json: Annotated[bool, typer.Option("--json", help="Print it as one JSON object.")] = False,
    verbose: Annotated[
        bool,
        typer.Option("--verbose", "-v", help="Show the bus's links and clients, and all numbers."),
    ] = False,
) -> None:
    """Show whether the pipeline is ready, what is in flight, and how its stages are.

    The exit status is 0 when every stage of at least one lane is there and ready, else 1, and a
    sentence says why. It looks at Redis itself, so it works when the pipeline does not; what
    `serve` runs is looked at through its port:

        nano-inference status

        nano-inference status --url http://127.0.0.1:8000

        nano-inference status --bus redis://10.0.0.5:6379 --json

        watch nano-inference status
    """
    found = asyncio.run(look_at(place_looked_at(options), options.served))
    if as_json:
        sys.stdout.write(f"{msgspec.json.encode(found).decode()}\n")
    else:
        stdout().print(rendered(found, verbose=verbose))
    if not found.ready:
        raise typer.Exit(1)


def place_looked_at(options: Options, least: str = "warning") -> Place:
    """The server or the bus that the options name, else the bus where `up` starts its server.

    Logging is set up.

    Args:
        options: Those of the command.
        least: As `Options.client_config`, for a bus.

    Raises:
        ConfigError: They name both, or what they name is none.
    """
    return named_server(options) or options.client_config(least)


async def look_at(place: Place, model: str | None = None) -> PipelineStatus:
    """Takes one look at a server or at a bus, as `look_at_server` and `look`."""
    if isinstance(place, Server):
        # Who looks at a bus need not wait for this import.
        from .server_status import look_at_server

        return await look_at_server(place, model)
    try:
        return await look(place, model)
    except BusError as error:
        raise serving_elsewhere(place, error) from None


def serving_elsewhere(config: Config, error: BusError) -> BusError:
    """Adds how to look at what `serve` runs, for someone who has named no bus."""
    if config.bus.url != DEFAULT_URL:
        return error
    root = DEFAULT_SERVER.removesuffix("/v1")
    return BusError(f"{error.message}; what `serve` runs is seen with --url {root}")
