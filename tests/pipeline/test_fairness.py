"""Tenants, time slices and preemption on the whole pipeline: streams pause, and nothing is lost."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import Any

import pytest_asyncio
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from nano_inference import Completion, Pipeline
from nano_inference.config import TelemetryConfig, load_config
from nano_inference.pipeline.scoring import Request
from nano_inference.stages.fairness import Counts
from nano_inference.stages.fairness.stage import FairnessStage
from nano_inference.telemetry import names, setup_tracing

from . import short_model
from .builders import asking, stage_of, until
from .conftest import MakeConfig, both_buses

SHORT_MODEL = True
LIMIT_S = 240
# More than two time slices of ten.
LONG_TOKENS = 24


def long_request(index: int, **fields: Any) -> dict[str, Any]:
    request = asking(f"Story about Ana, a cat and {index} balls:", LONG_TOKENS, **fields)
    request["sampling"] |= {"temperature": 1.0, "seed": index}
    return request | {"n": 1 + index % 2}


def urgent_request(index: int) -> dict[str, Any]:
    return asking(f"{index} + 4 =", 4, priority=8)


def fairness_of(pipeline: Pipeline) -> FairnessStage:
    return stage_of(pipeline, FairnessStage)


def counts_of(pipeline: Pipeline) -> Counts:
    return fairness_of(pipeline)._core.counts


async def tokens_of(pipeline: Pipeline, request: Request) -> list[tuple[int, ...]]:
    """A request's tokens, from its chunks, whose offsets must have no gap."""
    made: dict[int, list[int]] = {}
    async with aclosing(pipeline.submit(request)) as outputs:
        async for output in outputs:
            if isinstance(output, Completion):
                assert output.status == "done", output.error
                samples = [sample.token_ids for sample in output.samples]
                assert samples == [tuple(made[index]) for index in sorted(made)]
                return samples
            own = made.setdefault(output.sample_index, [])
            assert output.token_offset == len(own)
            own += output.token_ids
    raise AssertionError("no terminal message")


async def all_tokens(pipeline: Pipeline) -> list[list[tuple[int, ...]]]:
    """Long requests of two tenants; while they run, urgent ones come again and again."""

    async def urgent() -> list[list[tuple[int, ...]]]:
        return [await tokens_of(pipeline, urgent_request(index)) for index in range(6)]

    tenants = ["a", "b"]
    long = [tokens_of(pipeline, long_request(i, tenant=tenants[i % 2])) for i in range(8)]
    *results, last = await asyncio.gather(*long, urgent())
    return [*results, *last]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def wanted() -> list[list[tuple[int, ...]]]:
    """The result of `all_tokens` without preemption."""
    model = {"engine.dtype": "float32", "engine.model_path": str(short_model.folder())}
    async with Pipeline(load_config(env={}, overrides=model)) as pipeline:
        tokens = await all_tokens(pipeline)
        assert counts_of(pipeline) == Counts(tokens=counts_of(pipeline).tokens)
        return tokens


@both_buses("redis-links")
async def test_paused_streams_equal_undisturbed_ones(
    make_config: MakeConfig, wanted: list[list[tuple[int, ...]]]
) -> None:
    config = make_config(
        engine__max_batch_size=3,
        fairness__enable_preemption=True,
        fairness__max_timeslice_tokens=10,
    )
    async with Pipeline(config) as pipeline:
        assert await all_tokens(pipeline) == wanted
        # The last step's tokens may be counted after they have been delivered.
        await until(lambda: counts_of(pipeline).tokens == {0: 8 * LONG_TOKENS * 3 // 2, 8: 24})
        counts = counts_of(pipeline)
        assert counts.yields > 4
        assert counts.preemptions > 0
        assert counts.resumes == counts.yields + counts.preemptions
        # Each time at most the block that was not full, and a partly shared one.
        assert counts.recomputed_tokens <= counts.resumes * config.engine.block_size
        fairness = fairness_of(pipeline)
        assert (fairness._core.num_queued, fairness._core.num_paused) == (0, 0)


async def test_traces_show_pauses_and_the_reason_of_a_wait(make_config: MakeConfig) -> None:
    exporter = InMemorySpanExporter()
    tracing = setup_tracing(TelemetryConfig(), "test", exporter)
    config = make_config(
        engine__max_batch_size=1,
        fairness__enable_preemption=True,
        fairness__max_timeslice_tokens=10,
    )
    async with Pipeline(config, tracing=tracing) as pipeline:
        await all_tokens(pipeline)
        counts = counts_of(pipeline)
    tracing.shutdown()
    spans = exporter.get_finished_spans()
    yields = [span for span in spans if span.name == names.FAIRNESS_YIELD]
    resumes = [span for span in spans if span.name == names.FAIRNESS_RESUME]
    assert len(yields) == counts.yields + counts.preemptions
    assert len(resumes) == counts.resumes
    assert {(s.attributes or {})[names.YIELD_REASON] for s in yields} == {"preempted", "time slice"}
    assert all(span.parent is not None for span in yields + resumes)
    waited = [dict(span.attributes or {}) for span in spans if span.name == "fairness"]
    assert any(each[names.PASSED_BY_TENANTS] for each in waited)
    assert any(each[names.PASSED_BY_PRIORITIES] for each in waited)
