"""`nano-inference score`: how likely the weights in place find completions that are given."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from ..bus.public import Completion, GenerateRequest
from ..config import ConfigError, RequestError, SamplingParams
from ..pipeline.scoring import ScoredCompletion
from .connection import connected
from .options import Options, takes_model_options


class Given(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A line: a completion to be scored."""

    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    temperature: float | None = None


class Score(msgspec.Struct, frozen=True):
    """A line of the answer; `line` and `sample_index` say what it is of."""

    line: int
    sample_index: int
    logprobs: tuple[float, ...]
    ref_logprobs: tuple[float, ...] | None
    weight_version: int


@takes_model_options
def score(
    options: Options,
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="One JSON object per line; - is standard input.")
    ],
    temperature: Annotated[
        float, typer.Option("--temperature", "-t", min=0, help="Of the policy that is scored.")
    ] = 1.0,
) -> None:
    """Print how likely the weights in place, and the reference model, find given completions.

    A line is `{"prompt_token_ids": [...], "token_ids": [...]}`, with a `temperature` of its own if
    it has one, or an answer as `submit --json` prints it, of which all samples are scored:

        nano-inference submit "98 + 25 =" -n 4 -t 1 --json | nano-inference score -

    Each is answered by a line of JSON, in order. Logprobs of the reference model are null where the
    pipeline has none (`engine.reference_model_path`).
    """
    config = options.client_config()
    given = [sample for number, line in _lines(file) for sample in _read(file, number, line)]
    if not given:
        raise ConfigError(f"{file} holds nothing to score")
    params = [
        SamplingParams(temperature=temperature if each.temperature is None else each.temperature)
        for _, _, each in given
    ]

    async def run() -> list[ScoredCompletion]:
        async with connected(config) as client:
            return await client.score(
                [each.prompt_token_ids for _, _, each in given],
                [each.token_ids for _, _, each in given],
                params,
                like=GenerateRequest(model=options.served or ""),
            )

    for (line, sample_index, _), logprobs in zip(given, asyncio.run(run()), strict=True):
        answer = Score(line, sample_index, *msgspec.structs.astuple(logprobs))
        typer.echo(msgspec.json.encode(answer).decode())


def _lines(file: Path) -> Iterator[tuple[int, bytes]]:
    """The lines that are not empty, with their numbers.

    Raises:
        ConfigError: The file can't be read.
    """
    try:
        content = sys.stdin.buffer.read() if str(file) == "-" else file.read_bytes()
    except OSError as error:
        raise ConfigError(f"can't read {file}: {error.strerror}") from None
    for number, line in enumerate(content.split(b"\n"), 1):
        if line.strip():
            yield number, line


def _read(file: Path, number: int, line: bytes) -> Iterator[tuple[int, int, Given]]:
    """What a line gives, each with the line's number and the index of the sample.

    Raises:
        RequestError: It gives nothing that could be scored.
    """
    try:
        content = msgspec.json.decode(line)
        if isinstance(content, dict) and content.get("type") == "completion":
            completion = msgspec.convert(content, Completion)
            prompt = completion.prompt_token_ids
            samples = [
                (sample.sample_index, Given(prompt, sample.token_ids))
                for sample in completion.samples
            ]
        else:
            samples = [(0, msgspec.convert(content, Given))]
    except (ValueError, RecursionError) as error:
        # msgspec's errors are ValueErrors, and so is what undecodable text raises.
        raise RequestError(f"{file}, line {number}: {error}") from None
    for sample_index, given in samples:
        if not given.prompt_token_ids or not given.token_ids:
            raise RequestError(f"{file}, line {number}: give at least one token of each")
        yield number, sample_index, given
