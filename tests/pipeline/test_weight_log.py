"""The log of weights: executors catch up, past tokens are computed again, weights roll back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import load_file

from nano_inference import (
    Completion,
    GenerateRequest,
    InferenceEngine,
    PastWeights,
    Pipeline,
    SamplingParams,
    WeightDelta,
    WeightLog,
    WeightsError,
)
from nano_inference.pipeline.past import engine_at, export_version
from nano_inference.stages.executor.core import ExecutorCore

from .. import oracle
from .builders import State, break_once, check_stamps, greedy, raises, whole_stream
from .conftest import MakeConfig
from .test_weight_deltas import spelling

SHORT_MODEL = True


@pytest.fixture
async def logging(make_config: MakeConfig, tmp_path: Path) -> AsyncIterator[Pipeline]:
    """A pipeline with a log."""
    config = make_config(
        pipeline__restart_backoff_s=0.01,
        engine__weight_log=str(tmp_path / "log"),
        engine__weight_log_snapshot_every=3,
    )
    async with Pipeline(config) as pipeline:
        yield pipeline


async def test_a_restarted_executor_has_the_version_of_its_lane(
    logging: Pipeline, loaded: State, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After updates from memory, which can't be read again; and deltas go on from there."""
    client = logging.client
    await client.update_weights(oracle.announcing(loaded, 1))
    await client.update_weights(spelling(loaded, 2))
    break_once(monkeypatch, ExecutorCore, "execute", after=1)
    check_stamps(await logging.complete(greedy(0, 5)))
    assert await client.weight_version() == 2
    await client.update_weights(spelling(loaded, 3))
    completion = await logging.complete(greedy(0, 5))
    assert check_stamps(completion) == 1
    assert completion.samples[0].weight_version == 3
    log = WeightLog(logging.config.engine.weight_log)
    assert [each.version for each in log.versions()] == [0, 1, 2, 3]


async def test_weights_roll_back_as_a_new_version(logging: Pipeline, loaded: State) -> None:
    client = logging.client
    for version in (1, 2):
        await client.update_weights(oracle.announcing(loaded, version))
    assert await client.update_weights(PastWeights(1)) == 3
    sample = (await logging.complete(greedy(0, 5))).samples[0]
    assert (sample.weight_version, {*sample.token_ids}) == (3, {oracle.token_of(1)})
    assert await client.update_weights(PastWeights(0)) == 4
    await whole_stream(logging, 3)
    with raises("weights_unlogged", kind=WeightsError):
        await client.update_weights(PastWeights(9))


def trained(weights: State, version: int) -> State:
    """A few elements of each tensor change, as in a step of an optimizer."""
    dice = torch.Generator().manual_seed(version)
    new = {name: tensor.clone() for name, tensor in weights.items() if name != "lm_head.weight"}
    for tensor in new.values():
        chosen = torch.rand(tensor.shape, generator=dice) < 0.01
        tensor[chosen] *= 1.5
    return new


@pytest.mark.soak
async def test_past_tokens_are_computed_again_to_the_bit(
    logging: Pipeline, loaded: State, soak: bool
) -> None:
    client, weights, recorded = logging.client, loaded, dict[int, list[Completion]]()
    versions, length = (5, 40) if soak else (2, 12)
    for version in range(versions):
        if version:
            new = trained(weights, version)
            delta = WeightDelta.between(weights, new, base_version=version - 1)
            assert await client.update_weights(delta) == version
            weights = weights | new
        sampling = SamplingParams(max_tokens=length, ignore_eos=True, seed=version)
        requests = [
            GenerateRequest(prompt=f"{number} + 25 =", sampling=sampling) for number in range(5)
        ]
        recorded[version] = [*await asyncio.gather(*map(logging.complete, requests))]
    tokens = 0
    for version, completions in recorded.items():
        with engine_at(logging.config.engine, version) as engine:
            for completion in completions:
                result = engine.replay(completion)
                assert result.verdict == "equal", result.summary
                tokens += result.tokens
    assert tokens == versions * length * 5


async def test_the_log_is_of_one_model_and_dtype(logging: Pipeline, loaded: State) -> None:
    await logging.client.update_weights(oracle.announcing(loaded, 1))
    engine = logging.config.engine
    with raises("weights_refused", "engine.dtype", kind=WeightsError):
        engine_at(replace(engine, dtype="bfloat16"), 1)
    with InferenceEngine(engine) as own:
        own.update_weights(oracle.announcing(loaded, 7), blocking=True)
        own.update_weights(PastWeights(0), blocking=True)
        assert own.get_weight_version() == 2
    assert len(WeightLog(engine.weight_log).runs()) == 2


async def test_a_past_version_is_a_models_folder(
    logging: Pipeline, loaded: State, tmp_path: Path
) -> None:
    await logging.client.update_weights(oracle.announcing(loaded, 1))
    await logging.client.update_weights(spelling(loaded, 2))
    engine = logging.config.engine
    for version in (0, 1):
        export_version(engine, version, tmp_path / str(version))
        wanted = WeightLog(engine.weight_log).weights(version)
        found = load_file(tmp_path / str(version) / "model.safetensors")
        assert wanted.keys() == found.keys()
        assert all(torch.equal(found[name], wanted[name]) for name in found)
    assert (tmp_path / "1" / "tokenizer.json").is_file()
    with raises("weights_refused", "exists", kind=WeightsError):
        export_version(engine, 1, tmp_path / "1")
