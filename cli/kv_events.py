"""`nano-inference kv-events`: which KV blocks are stored and removed, as they are."""

from __future__ import annotations

import asyncio
import sys
from contextlib import aclosing
from typing import Annotated

from ..config import Config
from .connection import connected, find_served
from .options import Options, option, takes_model_options
from .terminal import print_json


@takes_model_options
def kv_events(
    options: Options,
    kept: Annotated[
        bool, option("--kept", "Begin with the oldest entry that the stream keeps.")
    ] = False,
    limit: Annotated[int | None, option("--limit", "Exit after this number.", min=1)] = None,
) -> None:
    """Print the KV events of a pipeline that runs with engine.kv_events, one JSON object a line.

    Each has the lane and replica whose cache it is, a sequence number, the number of entries that
    were missed before it, and the events.

        nano-inference kv-events

        nano-inference kv-events --kept --limit 100 > events.jsonl

    The stream is read and not changed. Ctrl-C ends it.
    """
    asyncio.run(_kv_events(options.client_config(), options.served, kept, limit))


async def _kv_events(config: Config, model: str | None, kept: bool, limit: int | None) -> None:
    async with connected(config) as client, aclosing(await client.kv_events(kept=kept)) as entries:
        wanted = "" if model is None else await find_served(client, model)
        count = 0
        async for entry in entries:
            if wanted not in ("", entry.model):
                continue
            print_json(entry)
            sys.stdout.flush()
            count += 1
            if count == limit:
                return
