"""`nano-inference embed`: the vectors of texts."""

from __future__ import annotations

import asyncio
import sys
from typing import Annotated

import msgspec
import typer

from ..bus.public import EmbedParams, ErrorInfo, GenerateRequest
from ..config import ConfigError, PoolingKind
from ..pipeline.scoring import EmbeddedPrompt
from .connection import connected
from .options import Options, takes_client_options


class Embedding(msgspec.Struct, frozen=True, omit_defaults=True):
    """A line of the answer: of the input with this number, from 0."""

    index: int
    embedding: tuple[float, ...] = ()
    prompt_tokens: int = 0
    weight_version: int = 0
    error: ErrorInfo | None = None


@takes_client_options
def embed(
    options: Options,
    texts: Annotated[
        list[str],
        typer.Argument(metavar="TEXT...", help="Texts; - is a text from each line of input."),
    ],
    pooling: Annotated[
        PoolingKind | None,
        typer.Option("--pooling", help="mean, last or cls; the model's own by default."),
    ] = None,
    normalize: Annotated[
        bool | None,
        typer.Option(
            "--normalize/--no-normalize",
            help="Whether vectors get the length 1; the model's own by default.",
        ),
    ] = None,
    dimensions: Annotated[
        int | None,
        typer.Option("--dimensions", min=1, help="How many numbers of each are wanted."),
    ] = None,
    tenant: Annotated[
        str, typer.Option("--tenant", metavar="NAME", help="Whose requests they are.")
    ] = GenerateRequest().tenant,
) -> None:
    """Print the vectors of texts, a line of JSON for each.

        nano-inference embed "98 + 25 =" "12 + 30 ="

        nano-inference embed - --pooling mean < sentences.txt > vectors.jsonl

    A text that is refused has its error on its line, and then the exit status is 1.
    """
    config = options.client_config()
    if texts == ["-"]:
        given = sys.stdin.buffer.read().decode(errors="surrogateescape")
        texts = given.removesuffix("\n").split("\n") if given else []
    if not texts:
        raise ConfigError("there is nothing to embed; give texts, or - for lines of input")
    params = EmbedParams(pooling=pooling or "", normalize=normalize, dimensions=dimensions)

    async def run() -> list[EmbeddedPrompt]:
        async with connected(config) as client:
            like = GenerateRequest(tenant=tenant)
            return await client.embed(texts, params, return_errors=True, like=like)

    embedded = asyncio.run(run())
    for index, each in enumerate(embedded):
        fields = (each.vector, each.prompt_tokens, each.weight_version, each.error)
        typer.echo(msgspec.json.encode(Embedding(index, *fields)).decode())
    if any(each.error for each in embedded):
        raise typer.Exit(1)
