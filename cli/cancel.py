"""`nano-inference cancel`: ends a request."""

from __future__ import annotations

import asyncio
from typing import Annotated

import typer

from ..config import ConfigError
from .answerer import Place, answerer_at, place_of
from .asking import failures_told
from .options import Options, takes_asking_options


@takes_asking_options
def cancel(
    options: Options,
    request_id: Annotated[
        str, typer.Argument(metavar="ID", help="The request's id, or that of its answer.")
    ],
) -> None:
    """End a request that is in flight. Its client gets what there is of its answer.

        nano-inference cancel chatcmpl-6c57ddeed9564f79a77b142870c43455

        nano-inference cancel 1795185430038-0 --bus redis://127.0.0.1:6390

    One that has ended is left alone, and so is an id that nobody knows: the exit status is 0 when
    those who serve have been told.
    """
    if not request_id:
        raise ConfigError("give the id of a request")
    with failures_told():
        asyncio.run(_cancel(place_of(options), request_id))


async def _cancel(place: Place, request_id: str) -> None:
    async with answerer_at(place) as answerer:
        await answerer.cancel(request_id)
