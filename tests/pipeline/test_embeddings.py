"""Embeddings over a bus: Transformers' vectors, whatever fails or is cancelled meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
import torch

from nano_inference import (
    Completion,
    EmbedParams,
    GenerateRequest,
    Pipeline,
    RequestError,
    SamplingParams,
)
from nano_inference.config import Config, EngineConfig
from nano_inference.pipeline.embedding import EmbeddedPrompt
from nano_inference.stages.batching import BatchingCore
from nano_inference.stages.executor.core import ExecutorCore
from nano_inference.stages.streaming.core import StreamingCore

from ..stages.executor.encoders import make_base, vector_of
from . import reference
from .builders import error_code, refused
from .conftest import MakeConfig
from .test_life import LIMIT_S, break_once

TEXTS = ["98 + 25 =", "Story about Emma, a dog and", "12 + 30 =", "Once upon a time " * 20]
MEAN = EmbedParams(pooling="mean")
# So that a prompt takes several steps.
SMALL = {
    "pipeline__restart_backoff_s": 0.01,
    "engine__max_tokens_per_batch": 40,
    "engine__max_batch_size": 16,
}
in_module_loop = pytest.mark.asyncio(loop_scope="module")


def hold(found: list[EmbeddedPrompt], texts: list[str]) -> None:
    """They are the vectors that Transformers' base model gives of these texts, one by one."""
    for text, each in zip(texts, found, strict=True):
        ids = reference.tokenizer()(text)["input_ids"]
        wanted = vector_of(reference.model().base_model, ids, "mean")
        torch.testing.assert_close(torch.tensor(each.vector), wanted, rtol=0, atol=1e-5)
        assert (each.prompt_tokens, each.error) == (len(ids), None)


@pytest.mark.parametrize(
    ("make_config", "owner", "method", "after"),
    [
        ("memory", ExecutorCore, "execute", 4),
        ("redis-links", ExecutorCore, "execute", 4),
        ("redis-links", BatchingCore, "absorb", 3),
        ("memory", StreamingCore, "absorb", 3),
        ("redis-links", StreamingCore, "absorb", 3),
    ],
    indirect=["make_config"],
)
async def test_a_failed_stage_is_replaced_and_every_vector_comes(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch, owner: type, method: str, after: int
) -> None:
    async with asyncio.timeout(LIMIT_S), Pipeline(make_config(**SMALL)) as pipeline:
        break_once(monkeypatch, owner, method, after)
        generating = asyncio.create_task(
            pipeline.complete({"prompt": TEXTS[0], "sampling": {"temperature": 0.0}})
        )
        hold(await pipeline.embed(TEXTS * 3, MEAN), TEXTS * 3)
        assert (await generating).status == "done"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def tiny() -> AsyncIterator[Pipeline]:
    config = Config(engine=EngineConfig(dtype="float32", reference_model_path="tiny"))
    async with Pipeline(config) as pipeline:
        yield pipeline


@in_module_loop
async def test_a_refused_input_fails_alone(
    tiny: Pipeline,
) -> None:
    found = await tiny.embed([TEXTS[0], "", [99_999], TEXTS[1]], MEAN, return_errors=True)
    hold([found[0], found[3]], TEXTS[:2])
    errors = [each.error for each in found]
    assert [error and error.code for error in errors] == [
        None,
        "empty_prompt",
        "invalid_token_ids",
        None,
    ]
    assert found[1].vector == ()
    with refused(RequestError, "empty_prompt"):
        await tiny.embed([TEXTS[0], ""], MEAN)


@in_module_loop
async def test_request_log_has_model_and_usage(tiny: Pipeline) -> None:
    """Also one that would stream, and where each sample is scored."""
    request = GenerateRequest(prompt=TEXTS[0], embed=MEAN, request_id="one")
    outputs = [output async for output in tiny.submit(request)]
    (completion,) = outputs
    assert isinstance(completion, Completion)
    (sample,) = completion.samples
    assert (completion.status, sample.token_ids, sample.finish_reason) == ("done", (), "stop")
    assert len(sample.embedding or ()) == 128
    assert completion.usage.prompt_tokens == len(completion.prompt_token_ids)
    assert completion.usage.completion_tokens == 0
    stages = [held.stage for held in completion.timings.stages]
    assert stages == ["admission", "fairness", "batching", "executor", "streaming"]


@in_module_loop
@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"sampling": SamplingParams(logprobs=2)}, "invalid_embed"),
        ({"embed": {"pooling": "max"}}, "invalid_request"),
        ({"embed": {"dimensions": float("nan")}}, "invalid_request"),
        ({"embed": {"dimension": 3}}, "invalid_request"),
        ({"embed": {"dimensions": 10**30}}, "invalid_request"),
        ({"budget_ns": 0}, "expired"),
    ],
)
async def test_a_bad_request_ends_with_its_error(
    fields: dict[str, object], code: str, tiny: Pipeline
) -> None:
    completion = await tiny.complete({"prompt": "x", "embed": {}} | fields)
    assert completion.error is not None
    assert (completion.error.code, completion.samples) == (code, ())


async def test_a_cancelled_and_a_late_request_leave_nothing_behind(make_config: MakeConfig) -> None:
    """Batching is paused, so that they wait there."""
    async with asyncio.timeout(LIMIT_S), Pipeline(make_config(**SMALL)) as pipeline:
        await pipeline.client.pause()
        late = asyncio.create_task(
            pipeline.complete({"prompt": TEXTS[3], "embed": {}, "budget_ns": 50_000_000})
        )
        entry_id = await pipeline.client.publish(
            {"prompt": TEXTS[3], "embed": {}, "request_id": "cancelled"}
        )
        cancelled = asyncio.create_task(
            anext(pipeline.client.follow("cancelled", entry_id))  # type: ignore[arg-type]
        )
        await pipeline.client.cancel("cancelled", entry_id)
        ends = [await cancelled, await late]
        assert [end.status for end in ends] == ["cancelled", "expired"]  # type: ignore[union-attr]
        await pipeline.client.resume()
        hold(await pipeline.embed(TEXTS, MEAN), TEXTS)


async def test_an_encoder_without_a_tokenizer_embeds_token_ids_and_generates_nothing(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    base = make_base("bert")
    base.save_pretrained(tmp_path)
    prompts = [[5, 6, 7], [9] * 60, [8, 7]]
    config = make_config(engine__model_path=str(tmp_path), engine__pooling="cls")
    async with asyncio.timeout(LIMIT_S), Pipeline(config) as pipeline:
        found = await pipeline.embed(prompts)
        for prompt, each in zip(prompts, found, strict=True):
            wanted = vector_of(base, prompt, "cls")
            torch.testing.assert_close(torch.tensor(each.vector), wanted, rtol=0, atol=1e-5)
        refused = await pipeline.complete({"prompt_token_ids": [5, 6]})
        assert error_code(refused) == "cannot_generate"
