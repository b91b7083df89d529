"""Samples that get too old while they are generated: flagged, cut, or begun anew."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from nano_inference import (
    EngineConfig,
    GenerateRequest,
    InferenceEngine,
    Pipeline,
    SamplingParams,
    TrainingSample,
    digest,
    digests,
)
from nano_inference.bus.public import CompletionChunk, VersionLag
from nano_inference.config import RequestError

from .. import oracle
from . import short_model
from .builders import State, check_stamps, error_code

SHORT_MODEL = True
PROMPT = (60, 61, 62)
GREEDY = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
LONG = SamplingParams(temperature=0, max_tokens=1500, ignore_eos=True)


@pytest.fixture(scope="module")
def engine() -> Iterator[InferenceEngine]:
    config = EngineConfig(model_path=str(short_model.folder()), dtype="float32", max_model_len=64)
    with InferenceEngine(config) as engine:
        yield engine


def updated_midway(engine: InferenceEngine, updates: int, **lag: Any) -> list[TrainingSample]:
    """The samples of a request during which the weights change so many times."""
    engine.add_request(PROMPT, GREEDY, 2, **lag)
    samples: list[TrainingSample] = []
    for step in range(100):
        if step in range(5, 5 * updates + 1, 5):
            version = engine.get_weight_version() + 1
            engine.update_weights(oracle.announcing(engine.state_dict(), version))
        samples += engine.step()
        if not engine.has_pending():
            break
    for sample in samples:
        versions = [sample.weight_version] * len(sample.completion_tokens)
        for version, begin in sample.weight_versions:
            versions[begin:] = [version] * (len(versions) - begin)
        if versions[0]:  # the first weights announce nothing
            assert list(sample.completion_tokens) == [oracle.token_of(each) for each in versions]
    return samples


def test_samples_of_an_engine_keep_to_their_limit(engine: InferenceEngine) -> None:
    for plain in updated_midway(engine, 3):
        assert plain.version_lag is None
        assert len(plain.weight_versions) == 4
    for within in updated_midway(engine, 1, max_version_lag=1, on_version_lag="cut"):
        assert within.version_lag == VersionLag(versions=1)
        assert len(within.completion_tokens) == 30
    for flagged in updated_midway(engine, 3, max_version_lag=1):
        assert flagged.version_lag == VersionLag(versions=3, outcome="flagged")
        assert len(flagged.weight_versions) == 4
    for cut in updated_midway(engine, 3, max_version_lag=1, on_version_lag="cut"):
        assert cut.version_lag == VersionLag(versions=2, outcome="cut")
        assert (cut.finish_reason, len(cut.weight_versions)) == ("abort", 2)
        assert 5 < len(cut.completion_tokens) < 15
    for anew in updated_midway(engine, 3, max_version_lag=0, on_version_lag="retract"):
        assert anew.version_lag == VersionLag(versions=0, outcome="retracted", num_retractions=3)
        assert len(anew.completion_tokens) == 30
        assert anew.weight_versions == ((engine.get_weight_version(), 0),)
    assert not engine._streaming._running
    engine._batching.check()


def test_each_version_of_a_run_has_a_digest(engine: InferenceEngine) -> None:
    first = engine.get_weight_version()
    samples = [*updated_midway(engine, 0), *updated_midway(engine, 1)]
    later = updated_midway(engine, 0)
    found = digests([*later, *samples])
    assert list(found) == [first, first + 1]
    assert found[first].digest == digest(samples)
    assert found[first + 1].digest == digest(later)
    assert (found[first].samples, found[first].tokens) == (4, 120)
    for cut in updated_midway(engine, 1, max_version_lag=0, on_version_lag="cut"):
        assert digests([cut])[first + 1].tokens == len(cut.completion_tokens)


@pytest.mark.parametrize(
    ("lag", "hint"),
    [
        ({"max_version_lag": -1}, "0 or more"),
        ({"max_version_lag": 2.5}, "must be an integer"),
        ({"on_version_lag": "cut"}, "takes max_version_lag"),
    ],
)
def test_limits_without_a_meaning_are_refused(
    engine: InferenceEngine, lag: dict[str, Any], hint: str
) -> None:
    with pytest.raises(RequestError, match=hint) as refused:
        engine.add_request(PROMPT, GREEDY, **lag)
    assert refused.value.code == "invalid_version_lag"


async def test_samples_of_a_pipeline_keep_to_their_limit(running: Pipeline, loaded: State) -> None:
    def request(**fields: Any) -> GenerateRequest:
        return GenerateRequest(prompt_token_ids=PROMPT, **{"sampling": LONG, **fields})

    async def update(version: int) -> None:
        await running.client.update_weights(oracle.announcing(loaded, version))

    await update(1)
    refused = request(max_version_lag=0, on_version_lag="retract")
    assert error_code(await running.complete(refused)) == "invalid_version_lag"
    cut = asyncio.create_task(
        running.complete(request(max_version_lag=0, on_version_lag="cut", n=2))
    )
    short = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
    anew = request(max_version_lag=0, on_version_lag="retract", stream=False, sampling=short)
    retracted = asyncio.create_task(running.complete(anew))
    async for output in running.submit(request()):
        if isinstance(output, CompletionChunk) and output.token_offset == 20:
            await update(2)
        if isinstance(output, CompletionChunk) and output.token_offset == 40:
            break
    first, second = await cut, await retracted
    assert check_stamps(first) == check_stamps(second) == 1
    for sample in first.samples:
        assert sample.version_lag == VersionLag(versions=1, outcome="cut")
        assert sample.finish_reason == "abort"
    (sample,) = second.samples
    assert sample.version_lag == VersionLag(versions=0, outcome="retracted", num_retractions=1)
    assert (sample.weight_version, len(sample.token_ids)) == (2, 200)
    usage = second.usage
    assert usage.time is not None
    assert sum(usage.time.values()) == second.timings.finished_ns - second.timings.published_ns
