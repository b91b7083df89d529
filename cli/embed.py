"""`nano-inference embed` and `score`: vectors of texts, and logprobs of given completions."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from msgspec.structs import astuple

from ..bus.public import Completion, EmbedParams, ErrorInfo, GenerateRequest
from ..config import ConfigError, PoolingKind, RequestError, SamplingParams
from .clients import submitter_at
from .connection import run_with, target_of
from .options import Options, argument, option, takes_status_options
from .terminal import print_json, read_input
from .weight_log import Log, Run, engine_config


class Embedding(msgspec.Struct, frozen=True, omit_defaults=True):
    """A line of the answer, for the input with this index."""

    index: int
    embedding: tuple[float, ...] = ()
    prompt_tokens: int = 0
    weight_version: int = 0
    error: ErrorInfo | None = None


@takes_status_options
def embed(
    options: Options,
    texts: Annotated[list[str], argument("TEXT...", "Texts; - is a text from each line of input.")],
    pooling: Annotated[PoolingKind | None, option("--pooling", "Default: the model's.")] = None,
    normalize: Annotated[
        bool | None,
        option("--normalize/--no-normalize", "Scale vectors to length 1; default: the model's."),
    ] = None,
    dimensions: Annotated[int | None, option("--dimensions", "Length of vectors.", min=1)] = None,
    tenant: Annotated[str, option("--tenant NAME", "Their tenant.")] = GenerateRequest().tenant,
) -> None:
    """Print the vectors of texts, a line of JSON for each.

        nano-inference embed "98 + 25 =" "12 + 30 ="

        nano-inference embed - --pooling mean < sentences.txt > vectors.jsonl

    The line of a refused text has its error, and then the exit status is 1.
    """
    if texts == ["-"]:
        given = read_input(Path("-")).decode(errors="surrogateescape")
        texts = given.removesuffix("\n").split("\n") if given else []
    if not texts:
        raise ConfigError("there is nothing to embed; give texts, or - for lines of input")
    params = EmbedParams(pooling=pooling or "", normalize=normalize, dimensions=dimensions)
    like = GenerateRequest(tenant=tenant, model=options.served or "")
    embedded = run_with(
        submitter_at(target_of(options)),
        lambda client: client.embed(texts, params, return_errors=True, like=like),
    )
    for index, each in enumerate(embedded):
        print_json(
            Embedding(index, each.vector, each.prompt_tokens, each.weight_version, each.error)
        )
    if any(each.error for each in embedded):
        raise typer.Exit(1)


# --- score ----------------------------------------------------------------------------------------


class ScoreInput(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A line of the input: a completion to score."""

    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    temperature: float | None = None


class Score(msgspec.Struct, frozen=True):
    """A line of the answer, for a sample of a line of the input."""

    line: int
    sample_index: int
    logprobs: tuple[float, ...]
    ref_logprobs: tuple[float, ...] | None
    weight_version: int


@takes_status_options
def score(
    options: Options,
    file: Annotated[Path, argument("FILE", "One JSON object per line; - is standard input.")],
    temperature: Annotated[float, option("--temperature -t", "Of the scored policy.", min=0)] = 1.0,
    at: Annotated[
        int | None,
        option("--at VERSION", "Compute here, under a past version of a log of weights."),
    ] = None,
    log: Log = None,
    run: Run = "",
) -> None:
    """Print the logprobs of given completions under the weights in place and the reference model.

    A line is `{"prompt_token_ids": [...], "token_ids": [...]}`, perhaps with its own `temperature`,
    or an answer as `submit --json` prints it, of which all samples are scored:

        nano-inference submit "98 + 25 =" -n 4 -t 1 --json | nano-inference score -

    Each sample gives a line of JSON, in order. Logprobs of the reference model are null if the
    pipeline has none (`engine.reference_model_path`).

        nano-inference score answers.jsonl --at 17 --log /data/weights
    """
    given = list(_read(file))
    if not given:
        raise ConfigError(f"{file} holds nothing to score; write one JSON object to a line")
    params = [
        SamplingParams(temperature=temperature if each.temperature is None else each.temperature)
        for _, _, each in given
    ]
    prompts = [each.prompt_token_ids for _, _, each in given]
    completions = [each.token_ids for _, _, each in given]
    if at is not None:
        # Imports torch.
        from ..pipeline.past import engine_at

        with engine_at(engine_config(options, log), at, run=run) as engine:
            past = engine.score(prompts, completions, params)
        for (line, sample_index, _), numbers in zip(given, past, strict=True):
            print_json(Score(line, sample_index, numbers, None, at))
        return
    scored = run_with(
        submitter_at(target_of(options)),
        lambda client: client.score(
            prompts, completions, params, like=GenerateRequest(model=options.served or "")
        ),
    )
    for (line, sample_index, _), logprobs in zip(given, scored, strict=True):
        print_json(Score(line, sample_index, *astuple(logprobs)))


def _read(file: Path) -> Iterator[tuple[int, int, ScoreInput]]:
    """Yield completions with the number of their line and the index of the sample.

    Raises:
        ConfigError: The file can't be read.
        RequestError: A line has no completion.
    """
    for number, line in enumerate(read_input(file).split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            samples = _samples(msgspec.json.decode(line))
        except (ValueError, RecursionError) as error:
            # msgspec's errors and decoding errors are ValueErrors.
            raise RequestError(f"{file}, line {number}: {error}") from None
        for sample_index, given in samples:
            if not given.prompt_token_ids or not given.token_ids:
                raise RequestError(f"{file}, line {number}: give at least one token of each")
            yield number, sample_index, given


def _samples(content: object) -> list[tuple[int, ScoreInput]]:
    if not (isinstance(content, dict) and content.get("type") == "completion"):
        return [(0, msgspec.convert(content, ScoreInput))]
    completion = msgspec.convert(content, Completion)
    return [
        (sample.sample_index, ScoreInput(completion.prompt_token_ids, sample.token_ids))
        for sample in completion.samples
    ]
