"""A pipeline of stages whose model is cut into stages of layers, processes of their own."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from nano_inference import Pipeline

from . import reference, short_model
from .conftest import LIMIT_S, MakeConfig
from .test_ranks import short_bodies as bodies
from .test_roles import bits

pytestmark = pytest.mark.slow

FOLDER = short_model.folder((3, 4))
EXACT: dict[str, Any] = {"engine__model_path": str(FOLDER), "engine__deterministic": True}
STAGES: dict[str, Any] = {
    "engine__pipeline_parallel": 2,
    "engine__rank_timeout_s": 1.0,
    "pipeline__restart_backoff_s": 0.01,
}


async def test_concurrent_operations_change_no_token(make_config: MakeConfig) -> None:
    """Grammars, embeddings, cancellations, a pause, and new weights between plans in flight."""
    state = {
        name: (tensor * 1.01).clone()
        for name, tensor in reference.model(FOLDER).state_dict().items()
    }
    schema = '{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}'
    sampling = {"temperature": 1.0, "seed": 3, "max_tokens": 40}
    constrained = {
        "request_id": "json",
        "prompt": "1 + 1 =",
        "sampling": {**sampling, "constraint": {"json_schema": schema}},
    }
    vector = {"request_id": "vector", "prompt": "a text " * 30, "embed": {}}

    async def run(pipeline: Pipeline) -> list[Any]:
        found = []
        requests = [*bodies("one"), constrained, vector]
        reads = [asyncio.create_task(pipeline.complete(body)) for body in requests]
        cut = [
            asyncio.create_task(pipeline.complete({**body, "request_id": f"cut-{at}"}))
            for at, body in enumerate(bodies("cut"))
        ]
        await pipeline.client.pause("keep")
        await pipeline.client.resume()
        for each in cut:
            each.cancel()
        done = await asyncio.gather(*reads)
        found += [bits(each) for each in done[:-1]]
        found.append([sample.embedding for sample in done[-1].samples])
        running = [asyncio.create_task(pipeline.complete(body)) for body in bodies("two")]
        await pipeline.client.update_weights(state)
        await asyncio.gather(*running)
        done = await asyncio.gather(*map(pipeline.complete, bodies("three")))
        found += [bits(each) for each in done]
        versions = {sample.weight_version for each in done for sample in each.samples}
        assert versions == {1}
        return found

    async with asyncio.timeout(LIMIT_S), Pipeline(make_config(**EXACT)) as alone:
        expected = await run(alone)
    async with asyncio.timeout(LIMIT_S), Pipeline(make_config(**EXACT, **STAGES)) as pipeline:
        assert await run(pipeline) == expected
