"""Shared parts of the tests: requests, streams, failures, checks of tokens and errors."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import pytest
from safetensors.torch import save_file
from torch import Tensor

from nano_inference import (
    BusClient,
    Completion,
    EngineConfig,
    GenerateRequest,
    InferenceEngine,
    Pipeline,
    SamplingParams,
    TrainingSample,
)
from nano_inference.bus.public import CompletionChunk, Output
from nano_inference.config import role_of
from nano_inference.stages.actor import Actor

from .. import oracle
from ..errors import raises as raises
from . import reference, short_model

StageT = TypeVar("StageT", bound=Actor)


def error_code(completion: Completion) -> str:
    """Return the code of a completion's error, which it must have."""
    assert completion.error is not None
    return completion.error.code


async def end_of(outputs: AsyncIterator[Output]) -> Completion:
    """Read a stream to its end and return its terminal message."""
    *_, last = [output async for output in outputs]
    assert isinstance(last, Completion)
    return last


def finish(engine: InferenceEngine) -> list[TrainingSample]:
    """Step an engine until nothing is pending, and return all samples."""
    samples: list[TrainingSample] = []
    while engine.has_pending():
        samples += engine.step()
    return samples


GOOD = {"prompt": "12 + 30 =", "sampling": {"temperature": 0}}


LONG = {"prompt": "12 + 30 =", "sampling": {"max_tokens": 1500, "ignore_eos": True}}


def asking(prompt: str = "12 + 30 =", tokens: int = 8, **fields: Any) -> dict[str, Any]:
    """A greedy request for so many tokens."""
    sampling = {"temperature": 0, "max_tokens": tokens, "ignore_eos": True}
    return {"prompt": prompt, "sampling": sampling, **fields}


# Tokens of a stream: enough to be hit by a failure in this process, and by one in another.
TOKENS, MORE_TOKENS = 60, 120


def stream_request(index: int, max_tokens: int = TOKENS) -> dict[str, Any]:
    """A greedy request."""
    return asking(f"{index} + {7 * index} =", max_tokens, stream=index % 4 != 3)


async def whole_stream(pipeline: Pipeline, index: int) -> None:
    """Submits one request and holds what comes against an undisturbed run."""
    outputs = [output async for output in pipeline.submit(stream_request(index))]
    check_stream(index, outputs, folder=pipeline.config.engine.model_folder)


async def whole_streams(pipeline: Pipeline, number: int = 8) -> None:
    await asyncio.gather(*(whole_stream(pipeline, index) for index in range(number)))


def check_stream(
    index: int, outputs: Sequence[Output], max_tokens: int = TOKENS, folder: Path = reference.FOLDER
) -> None:
    """No token is missing, none comes twice, and all are those of an undisturbed run.

    Args:
        folder: Folder of the model.
    """
    *chunks, completion = outputs
    assert completion.status == "done", completion.error
    (sample,) = completion.samples
    prompt = reference.tokenizer().encode(stream_request(index)["prompt"])
    assert completion.prompt_token_ids == tuple(prompt)
    wanted = reference.generate(
        prompt, max_tokens, ignore_eos=True, claimed=sample.token_ids, folder=folder
    )
    assert list(sample.token_ids) == wanted
    token_ids: list[int] = []
    text = ""
    for chunk in chunks:
        assert isinstance(chunk, CompletionChunk)
        assert chunk.token_offset == len(token_ids)
        token_ids += chunk.token_ids
        text += chunk.text
    if stream_request(index)["stream"]:
        assert (tuple(token_ids), text) == (sample.token_ids, sample.text)
    else:
        assert not chunks
    assert text in ("", sample.text)


async def until(holds: Callable[[], bool]) -> None:
    """Polls; the test's own time limit bounds it."""
    while not holds():  # noqa: ASYNC110  (the condition has no event)
        await asyncio.sleep(0.01)


def stage_of(pipeline: Pipeline, kind: type[StageT], replica: int = 0) -> StageT:
    """A stage of the pipeline as it is now; one that fails is replaced."""
    name = kind.__name__.removesuffix("Stage").lower()
    stage = pipeline._actors[role_of(name, replica)]
    assert isinstance(stage, kind)
    return stage


async def until_batched(pipeline: Pipeline, number: int, state: str = "running") -> None:
    """Until batching has so many sequences running, or waiting."""
    await until(lambda: pipeline._actors["batching"].load().get(state) == number)


class Boom(Exception):
    """The exception of a broken stage."""


def break_once(monkeypatch: pytest.MonkeyPatch, owner: Any, method: str, after: int) -> None:
    """Make the given call of a class's or an object's method fail, and only that one."""
    original, calls = getattr(owner, method), count(1)

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == after:
            raise Boom(f"{method} was told to fail")
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, method, wrapper)


# What weights spell is the same in it, and steps take a third of the time.
DTYPE = "bfloat16"


State = dict[str, Tensor]


def find_pure_logprob(loaded: State, dtype: str) -> float:
    """Return the logprob of a token that rests on KV of its own version alone."""
    with InferenceEngine(EngineConfig(model_path=str(short_model.folder()), dtype=dtype)) as engine:
        engine.update_weights(oracle.remembering(loaded, 1), blocking=True)
        (sample,) = engine.generate([[5, 6, 7]], SamplingParams(temperature=0, max_tokens=1))
    return sample.logprobs[0]


def greedy(number: int, max_tokens: int, n: int = 1) -> GenerateRequest:
    """Return a greedy request with one of a few prompts, so that most find a beginning in the
    prefix cache.
    """
    prompt = [5 + number % 3] * 40 + [9] * (number % 5)
    sampling = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    return GenerateRequest(prompt_token_ids=tuple(prompt), sampling=sampling, n=n)


async def begun(client: BusClient, request: GenerateRequest) -> asyncio.Task[Completion]:
    """A request that has had its first token, and is far from its last."""

    outputs = client.submit(msgspec.structs.replace(request, stream=True))
    assert not isinstance(await anext(outputs), Completion)
    return asyncio.create_task(end_of(outputs))


def versions_of(completion: Completion, index: int = 0) -> list[int]:
    """The version that each token of a sample is stamped with."""
    sample = completion.samples[index]
    starts = [start for _, start in sample.weight_versions] + [len(sample.token_ids)]
    assert starts[0] == 0
    assert starts == sorted(set(starts))
    spans = zip(sample.weight_versions, starts[1:], strict=True)
    versions = [version for (version, start), stop in spans for _ in range(start, stop)]
    assert versions == sorted(versions)
    assert sample.weight_version == versions[0]
    return versions


def check_stamps(completion: Completion) -> int:
    """Tokens of weights that announce their version; returns how many spans there are."""
    assert completion.status == "done", completion.error
    for index, sample in enumerate(completion.samples):
        wanted = [oracle.token_of(version) for version in versions_of(completion, index)]
        assert list(sample.token_ids) == wanted
    return max(len(sample.weight_versions) for sample in completion.samples)


def check_purity(completion: Completion, pure_logprob: float, *, whole: bool) -> int:
    """Tokens of weights that remember: as long as the first version lasts (`whole`: always), all
    KV was made by the version that is stamped. Returns how many spans there are."""
    assert completion.status == "done", completion.error
    for index, sample in enumerate(completion.samples):
        versions = versions_of(completion, index)
        rows = zip(versions, sample.token_ids, sample.logprobs, strict=True)
        for version, token_id, logprob in rows:
            if whole or version == versions[0]:
                assert token_id == oracle.token_of(version)
                assert oracle.is_pure(logprob, pure_logprob)
    return max(len(sample.weight_versions) for sample in completion.samples)


async def kill(pipeline: Pipeline) -> None:
    """Ends a pipeline without a word to anybody, as a lost machine does."""
    pipeline._stages_task.cancel()
    await asyncio.wait({pipeline._stages_task})
    await pipeline._heart.last_word()
    await pipeline.bus.aclose()


async def begin(pipeline: Pipeline) -> Pipeline:
    """Enters the context for good; `kill` ends it."""
    return await pipeline.__aenter__()


def in_halves(weights: State, parent: Path) -> list[Path]:
    """Save half of the weights each in two folders."""
    names = sorted(weights)
    folders = [parent / "first", parent / "second"]
    for folder, own in zip(folders, (names[::2], names[1::2]), strict=True):
        folder.mkdir(parents=True)
        save_file({name: weights[name] for name in own}, folder / "x.safetensors")
    return folders


class Streams:
    """Eight streams of one client, all of which have begun."""

    def __init__(self, client: BusClient) -> None:
        self._streams = [client.submit(stream_request(index, MORE_TOKENS)) for index in range(8)]
        self._outputs: list[list[Output]] = [[] for _ in self._streams]

    async def begin(self, most: int = 6) -> None:
        """Waits for the first output of so many; two of them give none before the end."""
        self._rest = [
            asyncio.create_task(self._read(index, stream))
            for index, stream in enumerate(self._streams)
        ]
        await until(lambda: sum(map(bool, self._outputs)) >= most)

    async def finish(self) -> None:
        """Every stream is complete, without gap or repetition, as if nothing had happened."""
        await asyncio.gather(*self._rest)
        for index, outputs in enumerate(self._outputs):
            check_stream(index, outputs, MORE_TOKENS, short_model.folder())

    async def _read(self, index: int, stream: AsyncGenerator[Output, None]) -> None:
        async for output in stream:
            self._outputs[index].append(output)
