"""Deltas: over every transport, under load, for several executors and ranks."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest
from torch import Tensor

from nano_inference import (
    EngineConfig,
    InferenceEngine,
    Pipeline,
    SharedWeights,
    WeightDelta,
    WeightsError,
    WeightsGroup,
)
from nano_inference.bus.control import UpdateWeights
from nano_inference.bus.weights import ArcWeights, DeltaWeights, PastWeights, StagedWeights
from nano_inference.pipeline import stage_control

from .. import oracle
from . import short_model
from .builders import State, check_stamps, greedy, raises
from .test_engine_weights import LIMIT_S, spells
from .test_weights import under_load

SHORT_MODEL = True


def spelling(loaded: Mapping[str, Tensor], version: int) -> WeightDelta:
    """The delta to weights that spell a version, from those that spell the one before."""
    before = oracle.announcing(loaded, version - 1) if version > 1 else loaded
    return WeightDelta.between(before, oracle.announcing(loaded, version), base_version=version - 1)


def by_itself(engine: InferenceEngine, delta: WeightDelta, folder: Path, ranks: int) -> None:
    engine.update_weights(delta)


def blocking(engine: InferenceEngine, delta: WeightDelta, folder: Path, ranks: int) -> None:
    engine.update_weights(delta, blocking=True)


def as_a_state_dict(engine: InferenceEngine, delta: WeightDelta, folder: Path, ranks: int) -> None:
    engine.update_weights(dict(delta), blocking=True)


def as_a_file(engine: InferenceEngine, delta: WeightDelta, folder: Path, ranks: int) -> None:
    engine.update_weights(delta.save(folder / "delta.safetensors"))


def in_shared_memory(engine: InferenceEngine, delta: WeightDelta, folder: Path, ranks: int) -> None:
    with SharedWeights(delta) as shared:
        engine.update_weights(shared.source)


def to_a_group(engine: InferenceEngine, delta: WeightDelta, folder: Path, ranks: int) -> None:
    with WeightsGroup("127.0.0.1:0", ranks + 1, timeout_s=LIMIT_S) as group:
        engine.join_weights_group("weights", group.address, ranks + 1, timeout_s=LIMIT_S)
        sending = group.broadcast(delta)
        engine.update_weights(sending.source, timeout_s=LIMIT_S)
        sending.result()


WAYS = [by_itself, blocking, as_a_state_dict, as_a_file, in_shared_memory, to_a_group]


@pytest.mark.parametrize(
    "more",
    [
        pytest.param({}, id="plain"),
        pytest.param({"tensor_parallel": 2}, id="ranks", marks=pytest.mark.soak(only=True)),
        pytest.param(
            {"quantization": "int8", "reference_model_path": "unquantized"},
            id="codes",
            marks=pytest.mark.soak(only=True),
        ),
    ],
)
def test_a_delta_comes_over_every_transport(
    more: dict[str, Any], loaded: State, tmp_path: Path
) -> None:
    ranks = more.get("tensor_parallel", 1)
    config = EngineConfig(
        model_path=str(short_model.folder()), dtype="bfloat16", max_model_len=64, **more
    )
    weights = {name: tensor.bfloat16() for name, tensor in loaded.items()}
    with InferenceEngine(config) as engine:
        for version, send in enumerate(WAYS, 1):
            send(engine, spelling(weights, version), tmp_path, ranks)
            assert spells(engine) == (version, oracle.token_of(version))
        stale = spelling(weights, 2)
        with raises("weights_base", kind=WeightsError):
            engine.update_weights(stale)
        assert spells(engine) == (len(WAYS), oracle.token_of(len(WAYS)))


@pytest.mark.soak
async def test_tokens_have_their_version_while_deltas_come(
    running: Pipeline, loaded: State, soak: bool
) -> None:
    """The first update is a whole one."""

    def delta(weights: Mapping[str, Tensor], version: int) -> Any:
        weights = {name: tensor.bfloat16() for name, tensor in weights.items()}
        return spelling(weights, version)

    assert await under_load(running, loaded, delta, "keep", 51 if soak else 8, check_stamps)


async def test_parts_of_deltas_change_together(running: Pipeline, loaded: State) -> None:
    client = running.client
    weights = {name: tensor.bfloat16() for name, tensor in loaded.items()}
    whole = spelling(weights, 1)
    new = whole.apply(weights)
    halves = [
        WeightDelta.between(weights, {name: new[name] for name in [*new][first::2]}, base_version=0)
        for first in range(2)
    ]
    for half in halves:
        await client.stage_weights("u", half.source)
    assert await client.weight_version() == 0
    assert await client.update_weights(StagedWeights("u", 2)) == 1
    check_stamps(await running.complete(greedy(0, 3)))
    # They are of version 0.
    with raises("weights_base", kind=WeightsError):
        await client.stage_weights("u", halves[0].source)
    # The changes of a tensor come at once.
    with raises("weights_delta", kind=WeightsError):
        for half in (spelling(weights, 2), spelling(weights, 2)):
            await client.stage_weights("v", half.source)
    assert await client.weight_version() == 1


@pytest.mark.parametrize(
    "source", [DeltaWeights((("a", b"1"),)), ArcWeights("/d", 3), PastWeights(4, "run")]
)
def test_sources_travel_in_messages(source: Any) -> None:
    update = UpdateWeights(source)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(update), type=UpdateWeights) == update


def test_a_delta_in_a_message_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a bus with a server, which passes one message at a time."""
    source = DeltaWeights((("a", b"12"),))
    stage_control._check_size(Mock(durable=True), source)
    monkeypatch.setattr(stage_control, "MOST_DELTA_BYTES", 1)
    stage_control._check_size(Mock(durable=False), source)
    with raises("weights_refused", "delta.save", kind=WeightsError):
        stage_control._check_size(Mock(durable=True), source)
