"""`nano-inference shards`: read and change the number of shards of the requests stream."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from ..bus.shards import Layout
from ..pipeline.client import BusClient
from .connection import operate
from .options import AsJson, Options, argument, takes_client_options
from .terminal import print_json


@takes_client_options
def shards(
    options: Options,
    number: Annotated[int | None, argument("[NUMBER]", "The new number, 1 to 64.")] = None,
    as_json: AsJson = False,
) -> None:
    """Print the number of shards of the requests stream, or change it while requests run.

    nano-inference shards 4

    See docs/redis.md. Tenants that move wait for a moment; no request is lost or reordered.
    """
    found = operate(options, lambda client: _shards(client, number))
    if as_json:
        print_json(found)
        return
    before = f", changing from {found['before']}" if found["moving"] else ""
    lengths = ", ".join(map(str, found["requests"]))
    typer.echo(f"{found['shards']}{before}; requests on each: {lengths}")


async def _shards(client: BusClient, number: int | None) -> dict[str, Any]:
    layout: Layout = await (client.shards() if number is None else client.set_shards(number))
    return {
        "shards": layout.shards,
        "before": layout.before,
        "moving": layout.moving,
        "requests": await client.bus.requests.shard_lengths(),
    }
