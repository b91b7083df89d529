"""`nano-inference tail`: a line for each request, as it ends."""

from __future__ import annotations

import asyncio
import shutil
import sys
from contextlib import aclosing
from typing import Annotated

from rich.cells import cell_len

from ..bus.codec import encode_output
from ..bus.public import Completion
from ..config import Config
from ..pipeline.client import BusClient
from .connection import connected, find_served, served_names
from .options import AsJson, Options, option, takes_model_options
from .terminal import cut, one_line, total, ttft

_WIDTH_OF_PIPES = 120

_HEADING = f"{'request':<20} {'status':<9} {'tokens':>6} {'TTFT ms':>9} {'total ms':>9}  text"


@takes_model_options
def tail(
    options: Options,
    as_json: AsJson = False,
    limit: Annotated[int | None, option("--limit", "Exit after this number.", min=1)] = None,
) -> None:
    """Print every request that ends from now on, of all clients.

    One line for each: id, status, tokens, time to first token, total time, beginning of the text.

        nano-inference tail

        nano-inference tail --json --limit 100 > completions.jsonl

    With --model only the requests that this model has answered. The shared results stream is read
    and not changed. Ctrl-C ends it.
    """
    asyncio.run(_tail(options.client_config(), options.served, as_json, limit))


async def _tail(config: Config, model: str | None, as_json: bool, limit: int | None) -> None:
    async with connected(config) as client, aclosing(await client.bus.results.tail()) as ended:
        names = None if model is None else await _names_of(client, model)
        on_terminal = sys.stdout.isatty()
        if not as_json:
            _print(_HEADING)
        count = 0
        async for completion in ended:
            if names is not None and completion.model not in names:
                continue
            if as_json:
                _print(encode_output(completion).decode())
            else:
                width = shutil.get_terminal_size().columns if on_terminal else _WIDTH_OF_PIPES
                _print(_line(completion, width))
            count += 1
            if count == limit:
                return


async def _names_of(client: BusClient, model: str) -> set[str]:
    """Return the names of a model and its adapters. Raises RequestError: unknown_model."""
    found = await find_served(client, model)
    every = await client.models()
    return {name for each in every if found in ("", each.id) for name in served_names(each)}


def _line(completion: Completion, width: int) -> str:
    """Return a completion as one line of at most `width` columns."""
    if completion.error is not None:
        text = f"{completion.error.code}: {completion.error.message}"
    else:
        text = completion.samples[0].text if completion.samples else ""
    request_id = cut(one_line(completion.request_id or completion.entry_id), 20)
    request_id += " " * (20 - cell_len(request_id))
    return cut(
        f"{request_id} {completion.status:<9} {completion.usage.completion_tokens:>6} "
        f"{ttft(completion):>9} {total(completion):>9}  {one_line(text)}",
        width,
    )


def _print(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()
