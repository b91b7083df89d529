"""`nano-inference embed`: the vectors of texts."""

from __future__ import annotations

import asyncio
import sys
from typing import Annotated

import msgspec
import typer

from ..bus.public import EmbedParams, ErrorInfo, GenerateRequest
from ..config import ConfigError, PoolingKind
from ..pipeline.embedding import EmbeddedPrompt
from .connection import connected
from .options import Options, argument, option, takes_client_options
from .terminal import print_json


class Embedding(msgspec.Struct, frozen=True, omit_defaults=True):
    """A line of the answer, for the input with this index."""

    index: int
    embedding: tuple[float, ...] = ()
    prompt_tokens: int = 0
    weight_version: int = 0
    error: ErrorInfo | None = None


@takes_client_options
def embed(
    options: Options,
    texts: Annotated[list[str], argument("TEXT...", "Texts; - is a text from each line of input.")],
    pooling: Annotated[
        PoolingKind | None, option("--pooling", "mean, last or cls; default: the model's.")
    ] = None,
    normalize: Annotated[
        bool | None,
        option("--normalize/--no-normalize", "Scale vectors to length 1; default: the model's."),
    ] = None,
    dimensions: Annotated[
        int | None, option("--dimensions", "Length of the vectors.", min=1)
    ] = None,
    tenant: Annotated[str, option("--tenant", "Their tenant.", "NAME")] = GenerateRequest().tenant,
) -> None:
    """Print the vectors of texts, a line of JSON for each.

        nano-inference embed "98 + 25 =" "12 + 30 ="

        nano-inference embed - --pooling mean < sentences.txt > vectors.jsonl

    The line of a refused text has its error, and then the exit status is 1.
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
        print_json(
            Embedding(index, each.vector, each.prompt_tokens, each.weight_version, each.error)
        )
    if any(each.error for each in embedded):
        raise typer.Exit(1)
