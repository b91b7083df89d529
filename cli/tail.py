"""`nano-inference tail`: a line for each request that ends, as it ends."""

from __future__ import annotations

import asyncio
import shutil
import sys
from contextlib import aclosing
from typing import Annotated

import typer
from rich.cells import cell_len

from ..bus.codec import encode_output
from ..bus.public import Completion
from ..config import Config
from ..pipeline.client import BusClient
from .connection import connected, find_served, served_names
from .options import Options, takes_model_options
from .terminal import cut, milliseconds, one_line

# Where standard output is not a terminal, so that its width is nobody's business.
_WIDTH_OF_PIPES = 120

_HEADING = f"{'request':<20} {'status':<9} {'tokens':>6} {'TTFT ms':>9} {'total ms':>9}  text"


@takes_model_options
def tail(
    options: Options,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print each Completion as a line of JSON.")
    ] = False,
    limit: Annotated[
        int | None,
        typer.Option("--limit", min=1, help="Leave after so many.", show_default=False),
    ] = None,
) -> None:
    """Print every request that ends from now on, whoever sent it.

    One line for each: id, status, tokens, time to first token, total time, beginning of the text.

        nano-inference tail

        nano-inference tail --json --limit 100 > completions.jsonl

    With --model only those that it has answered. It reads the shared results stream and takes
    nothing away from anybody. Ctrl-C leaves.
    """
    config = options.client_config()
    asyncio.run(_tail(config, options.served, as_json, limit))


async def _tail(config: Config, model: str | None, as_json: bool, limit: int | None) -> None:
    async with connected(config) as client, aclosing(await client.bus.results.tail()) as ended:
        shown = None if model is None else await _names_of(client, model)
        on_terminal = sys.stdout.isatty()
        if not as_json:
            _print(_HEADING)
        count = 0
        async for completion in ended:
            if shown is not None and completion.model not in shown:
                continue
            if as_json:
                _print(encode_output(completion).decode())
            else:
                width = shutil.get_terminal_size().columns if on_terminal else _WIDTH_OF_PIPES
                _print(line_of(completion, width))
            count += 1
            if count == limit:
                return


async def _names_of(client: BusClient, model: str) -> set[str]:
    """What completions call a model, or its adapters. Raises RequestError as `find_served`."""
    found = await find_served(client, model)
    every = await client.models()
    return {name for each in every if found in ("", each.id) for name in served_names(each)}


def line_of(completion: Completion, width: int) -> str:
    """A completion as one line of at most `width` columns."""
    timings = completion.timings
    received_ns = timings.received_ns
    ttft = milliseconds(timings.first_token_ns - received_ns) if timings.first_token_ns else "-"
    total = milliseconds(timings.finished_ns - received_ns) if received_ns else "-"
    if completion.error is not None:
        text = f"{completion.error.code}: {completion.error.message}"
    else:
        text = completion.samples[0].text if completion.samples else ""
    request_id = cut(one_line(completion.request_id or completion.entry_id), 20)
    padding = " " * (20 - cell_len(request_id))
    facts = (
        f"{request_id}{padding} {completion.status:<9} {completion.usage.completion_tokens:>6} "
        f"{ttft:>9} {total:>9}"
    )
    return cut(f"{facts}  {one_line(text)}", width)


def _print(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()
