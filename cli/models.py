"""`nano-inference models`: what can be asked."""

from __future__ import annotations

import asyncio
import sys
from typing import Annotated

import msgspec
import typer

from .answerer import Place, ServedModel, answerer_at, place_of
from .asking import failures_told
from .options import Options, takes_asking_options


@takes_asking_options
def models(
    options: Options,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print each model as a line of JSON.")
    ] = False,
) -> None:
    """Print the models that a server, or a pipeline, serves.

    One a line, with the most tokens of a prompt and its answer together where that is told:

        nano-inference models

        nano-inference models --url http://127.0.0.1:8000/v1

        nano-inference models --bus redis://127.0.0.1:6390
    """
    with failures_told():
        for model in asyncio.run(_models(place_of(options))):
            line = msgspec.json.encode(model).decode() if as_json else _line(model)
            sys.stdout.write(f"{line}\n")


async def _models(place: Place) -> list[ServedModel]:
    async with answerer_at(place) as answerer:
        return await answerer.models()


def _line(model: ServedModel) -> str:
    length = model.max_model_len
    return model.id if length is None else f"{model.id}  {length} tokens"
