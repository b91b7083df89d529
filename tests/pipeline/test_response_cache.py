"""The response cache in a pipeline: the same results, and never stale ones."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import save_file

from nano_inference import Completion, GenerateRequest, Pipeline
from nano_inference.bus.control import TellWeightVersion, WeightsChanged
from nano_inference.bus.envelope import Envelope
from nano_inference.bus.links import CONTROL
from nano_inference.bus.public import CompletionChunk, Output, Timings, Usage
from nano_inference.bus.weights import FolderWeights
from nano_inference.stages.admission.parts.responses import Responses
from nano_inference.stages.admission.stage import AdmissionStage
from nano_inference.stages.batching.stage import BatchingStage
from nano_inference.stages.executor.changes import shell
from nano_inference.stages.executor.stage import ExecutorStage
from nano_inference.stages.streaming.parts import responses as streaming_responses
from nano_inference.telemetry.instruments import RESPONSE_BYTES, RESPONSE_LOOKUPS, RESPONSES

from ..measured import Measured
from ..soaking import in_soak
from .builders import TOKENS, State, begun, break_once, stage_of, until
from .conftest import MakeConfig, both_buses

SHORT_MODEL = True
ON = {
    "engine__deterministic": True,
    "engine__response_cache_bytes": 1 << 20,
    "pipeline__restart_backoff_s": 0.01,
}
GREEDY = {"temperature": 0, "max_tokens": 20, "ignore_eos": True}
SEEDED = {"temperature": 1.0, "seed": 7, "max_tokens": 40, "logprobs": 2}


def asking(prompt: str = "12 + 30 =", **fields: Any) -> dict[str, Any]:
    return {"prompt": prompt, "sampling": GREEDY} | fields


@pytest.fixture
async def cached(make_config: MakeConfig) -> AsyncIterator[Pipeline]:
    async with Pipeline(make_config(**ON)) as running:
        yield running


async def rest(pipeline: Pipeline) -> None:
    """Wait until admission knows the end of each request, and no step is planned."""
    admission, batching = stage_of(pipeline, AdmissionStage), stage_of(pipeline, BatchingStage)
    await until(lambda: len(admission.epochs.requests.ledger) == 0)
    await until(lambda: batching._core is not None and batching._core.idle)


async def computed(pipeline: Pipeline, request: dict[str, Any]) -> Completion:
    completion = await pipeline.complete(request)
    assert not is_served(completion)
    await rest(pipeline)
    return completion


async def served(pipeline: Pipeline, request: dict[str, Any]) -> Completion:
    completion = await pipeline.complete(request)
    assert is_served(completion)
    return completion


def is_served(completion: Completion) -> bool:
    usage = completion.usage
    assert usage.cached_completion_tokens in (0, usage.completion_tokens)
    return usage.cached_completion_tokens > 0


def plain(completion: Completion) -> Completion:
    """All of it but ids, times and the mark."""
    about: dict[str, Any] = {"request_id": "", "entry_id": "", "trace_id": ""}
    return msgspec.structs.replace(completion, timings=Timings(), usage=Usage(), **about)


def cache_of(pipeline: Pipeline) -> Responses:
    return stage_of(pipeline, AdmissionStage)._core.part(Responses)


async def outputs_of(pipeline: Pipeline, request: dict[str, Any]) -> list[Output]:
    return [output async for output in pipeline.submit(request)]


@both_buses()
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"sampling": SEEDED, "n": 3},
        {"sampling": GREEDY | {"stop": ["3", "4"], "logprobs": 1}},
        {"sampling": SEEDED | {"constraint": {"regex": "[a-z ]{5,30}"}}},
        {"stream": False, "n": 2},
    ],
    ids=["greedy", "seeded", "stop", "constraint", "whole"],
)
async def test_a_served_response_is_the_computed_one_and_no_step_runs(
    make_config: MakeConfig, steps: list[int], fields: dict[str, Any]
) -> None:
    async with Pipeline(make_config(**ON)) as pipeline:
        *_, first = await outputs_of(pipeline, asking(**fields))
        assert isinstance(first, Completion)
        assert first.status == "done"
        await rest(pipeline)
        before = sum(steps)
        assert before
        *chunks, second = await outputs_of(pipeline, asking(**fields))
        assert isinstance(second, Completion)
        assert (is_served(first), is_served(second)) == (False, True)
        assert plain(second) == plain(first)
        assert sum(steps) == before, "no row was computed"
        for sample in second.samples if fields.get("stream", True) else ():
            own = [each for each in chunks if isinstance(each, CompletionChunk)]
            own = [each for each in own if each.sample_index == sample.sample_index]
            assert "".join(chunk.text for chunk in own) == sample.text
            assert tuple(i for chunk in own for i in chunk.token_ids) == sample.token_ids
            assert tuple(p for chunk in own for p in chunk.logprobs) == sample.logprobs
            assert own[-1].finish_reason == sample.finish_reason
        assert bool(chunks) == fields.get("stream", True)
        await rest(pipeline)
        load = pipeline._actors["admission"].load()
        counts = [load[f"response{name}"] for name in ("s", "_hits", "_lookups")]
        assert counts == [1, 1, 2]


async def test_lookups_and_sizes_are_measured(cached: Pipeline) -> None:
    for _ in range(3):
        await cached.complete(asking())
        await rest(cached)
    stage, measured = stage_of(cached, AdmissionStage), Measured()
    stage.metrics = measured.metrics
    await stage.measure()
    assert measured.values(RESPONSE_LOOKUPS) == {("hit",): 2, ("miss",): 1}
    assert measured.values(RESPONSES) == {(): 1}
    assert measured.values(RESPONSE_BYTES) == {(): cache_of(cached).num_bytes}


async def test_a_burst_of_equal_requests_gets_equal_responses(cached: Pipeline) -> None:
    requests = [asking(sampling=SEEDED, n=2) for _ in range(12)]
    completions = await asyncio.gather(*map(cached.complete, requests))
    await rest(cached)
    again = await asyncio.gather(*map(cached.complete, requests))
    assert all(map(is_served, again))
    assert len({msgspec.json.encode(plain(each)) for each in (*completions, *again)}) == 1
    assert len(cache_of(cached)) == 1


# --- changes ----------------------------------------------------------------------------------


def changed(loaded: State) -> dict[str, torch.Tensor]:
    return {name: tensor * 1.5 for name, tensor in loaded.items()}


@both_buses("redis-links")
async def test_no_response_of_former_weights_comes_after_an_update(
    make_config: MakeConfig, loaded: State, tmp_path: Path
) -> None:
    """Requests go in as soon as each update has returned."""
    folders = []
    for name, state in (("changed", changed(loaded)), ("loaded", loaded)):
        folder = tmp_path / name
        folder.mkdir()
        tensors = {key: tensor.clone() for key, tensor in state.items()}
        save_file(tensors, folder / "x.safetensors")
        folders.append(str(folder))
    async with Pipeline(make_config(**ON)) as pipeline:
        original = await computed(pipeline, asking())
        for version in range(1, 7):
            await served(pipeline, asking())
            folder = folders[(version - 1) % 2]
            assert await pipeline.client.update_weights(FolderWeights(folder)) == version
            fresh = await computed(pipeline, asking())
            assert fresh.samples[0].weight_versions == ((version, 0),)
            same = fresh.samples[0].token_ids == original.samples[0].token_ids
            assert same == (version % 2 == 0)


async def test_an_update_is_answered_only_after_admission_has_it(
    cached: Pipeline, loaded: State, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And steps go on meanwhile."""
    arrived, may_go_on = asyncio.Event(), asyncio.Event()
    original = AdmissionStage.handle

    async def handle(self: AdmissionStage, envelope: Envelope) -> None:
        if isinstance(envelope.body, WeightsChanged):
            arrived.set()
            await may_go_on.wait()
        await original(self, envelope)

    monkeypatch.setattr(AdmissionStage, "handle", handle)
    updating = asyncio.create_task(cached.client.update_weights(changed(loaded)))
    await arrived.wait()
    executor = stage_of(cached, ExecutorStage)
    assert executor._changes.core.version == 1, "the weights are in place"
    await asyncio.sleep(0)
    assert not updating.done()
    may_go_on.set()
    assert await updating == 1


@pytest.mark.parametrize("executor_ends", [False, True])
async def test_a_lost_confirmation_is_requested_again(
    cached: Pipeline, loaded: State, monkeypatch: pytest.MonkeyPatch, executor_ends: bool
) -> None:
    """Also by an executor that ends meanwhile."""
    monkeypatch.setattr(shell, "_CONFIRM_S", 0.02)
    lost, original = [0], AdmissionStage.handle

    async def handle(self: AdmissionStage, envelope: Envelope) -> None:
        if isinstance(envelope.body, WeightsChanged) and lost[0] >= 0:
            lost[0] += 1
        else:
            await original(self, envelope)

    monkeypatch.setattr(AdmissionStage, "handle", handle)
    updating = asyncio.create_task(cached.client.update_weights(changed(loaded)))
    await until(lambda: lost[0] > 2)
    if executor_ends:
        executor = cached._actors["executor"]
        break_once(monkeypatch, executor, "handle", 1)
        await cached.bus.sender(CONTROL["executor"], "test").send(TellWeightVersion())
        await until(lambda: executor.closed)
    assert not updating.done()
    lost[0] = -1
    assert await updating == 1


@both_buses()
@pytest.mark.parametrize(
    "stage", ["executor", in_soak("streaming"), in_soak("batching"), "admission"]
)
async def test_after_a_failure_nothing_is_served_before_it_was_computed_again(
    cached: Pipeline, monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    """A response begun before the failure is completed and not kept."""
    before = await computed(cached, asking())
    long = asking("7 + 8 =", sampling=GREEDY | {"max_tokens": TOKENS})
    running = await begun(cached.client, msgspec.convert(long, GenerateRequest))
    epoch, failed = cached._actors["streaming"].epoch, cached._actors[stage]
    break_once(monkeypatch, failed, "handle", 1)
    if stage == "admission":
        await cached.client.cancel("nothing")
    interrupted = await running
    assert interrupted.status == "done"
    await until(lambda: cached._actors[stage] is not failed)
    await rest(cached)
    after = await computed(cached, asking())
    assert cached._actors["streaming"].epoch > epoch
    assert plain(after) == plain(before)
    again = await computed(cached, long)
    assert plain(again) == plain(interrupted)
    await served(cached, long)


async def test_a_served_response_that_streaming_loses_is_computed(
    cached: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = await computed(cached, asking())
    break_once(monkeypatch, streaming_responses, "_repeat", 1)
    after = await cached.complete(asking())
    assert not is_served(after)
    assert plain(after) == plain(before)


async def test_replicas_of_one_version_share_responses(
    make_config: MakeConfig, loaded: State
) -> None:
    async with Pipeline(make_config(pipeline__replicas=2, **ON)) as pipeline:
        await computed(pipeline, asking(n=4))
        await served(pipeline, asking(n=4))
        assert await pipeline.client.update_weights(changed(loaded)) == 1
        await computed(pipeline, asking(n=4))
        await served(pipeline, asking(n=4))
        participants = stage_of(pipeline, AdmissionStage).epochs.participants
        behind = participants.change_weights("executor.1", 2)
        assert behind is not None
        stage_of(pipeline, AdmissionStage)._core.set_capacity(behind)
        await computed(pipeline, asking(n=4))
