"""New weights for the engine on its caller's thread: from everywhere, whole, or not at all."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from nano_inference import (
    EngineConfig,
    FolderWeights,
    InferenceEngine,
    SamplingParams,
    SharedWeights,
    WeightsError,
    WeightsGroup,
)
from nano_inference.bus.weights import source_of

from .. import oracle
from .builders import State, raises

PROMPT = [60, 61, 62]
GREEDY = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
LIMIT_S = 60.0


@pytest.mark.parametrize(
    ("weights", "says"),
    [
        (torch.nn.Linear(1, 1), r"pass model.state_dict\(\)"),
        (torch.nn.Linear(1, 1).named_parameters(), r"pass dict\(…\)"),
        (7, "pass one of these"),
    ],
)
def test_other_forms_of_weights_are_refused_with_the_form_here(weights: Any, says: str) -> None:
    with pytest.raises(WeightsError, match=says), source_of(weights):
        pass


@pytest.fixture
def engine() -> Iterator[InferenceEngine]:
    with InferenceEngine(EngineConfig(dtype="float32", max_model_len=64)) as engine:
        yield engine


def spelling(engine: InferenceEngine, version: int) -> State:
    return oracle.announcing(engine.state_dict(), version)


def spells(engine: InferenceEngine) -> tuple[int, int]:
    """The version that tokens are stamped with, and the token that its weights sample."""
    (sample,) = engine.generate([PROMPT], GREEDY)
    (token,) = set(sample.completion_tokens)
    return sample.weight_version, token


def from_folder(engine: InferenceEngine, weights: State, folder: Path) -> None:
    save_file(weights, folder / "model.safetensors")
    engine.update_weights(FolderWeights(str(folder)))


def from_shared_memory(engine: InferenceEngine, weights: State, folder: Path) -> None:
    with SharedWeights(weights) as shared:
        engine.update_weights(shared.source)


def from_group(engine: InferenceEngine, weights: State, folder: Path) -> None:
    with WeightsGroup("127.0.0.1:0", 2, timeout_s=LIMIT_S) as group:
        engine.join_weights_group("weights", group.address, 2, timeout_s=LIMIT_S)
        sending = group.broadcast(weights)
        engine.update_weights(sending.source, timeout_s=LIMIT_S)
        sending.result()


Send = Callable[[InferenceEngine, State, Path], None]
SOURCES: list[Send] = [from_folder, from_shared_memory, from_group]


@pytest.mark.parametrize("send", SOURCES)
def test_weights_come_from_where_the_pipelines_do(
    engine: InferenceEngine, send: Send, tmp_path: Path
) -> None:
    """They are fetched before the call returns, so that their place may be given up."""
    send(engine, spelling(engine, 5), tmp_path)
    assert engine.get_weight_version() == 0, "before the next step, and not at once"
    assert spells(engine) == (1, oracle.token_of(5))


@pytest.mark.parametrize("blocking", [False, True])
def test_a_state_dict_is_held_against_the_models_dtype(blocking: bool) -> None:
    """The largest number of float32 is infinity in bfloat16."""
    with InferenceEngine(EngineConfig(dtype="bfloat16", max_model_len=64)) as engine:
        weights = {name: tensor.float() for name, tensor in spelling(engine, 1).items()}
        engine.update_weights(weights, blocking)
        assert spells(engine) == (1, oracle.token_of(1))
        weights["model.norm.weight"][0] = torch.finfo(torch.float32).max
        with raises("weights_not_finite", kind=WeightsError):
            engine.update_weights(weights, blocking)
        assert spells(engine) == (1, oracle.token_of(1))


def test_nan_that_torch_does_not_see_written_is_not_put_in_place(engine: InferenceEngine) -> None:
    """As by an optimizer that writes to `data`."""
    new = {name: tensor.clone() for name, tensor in spelling(engine, 5).items()}
    engine.update_weights(new)
    new["model.norm.weight"].data[0] = torch.nan
    with pytest.raises(WeightsError, match=r"changed before they were .* have NaN or infinity"):
        engine.step()
    assert engine.get_weight_version() == 0


def test_freed_pending_weights_are_dropped(engine: InferenceEngine) -> None:
    """The step that was to put them in place tells, and the next ones run with those before."""
    engine.update_weights(spelling(engine, 4), blocking=True)
    engine.add_request(PROMPT, GREEDY)
    engine.step()
    new = spelling(engine, 5)
    engine.update_weights(new)
    for tensor in new.values():
        tensor.untyped_storage().resize_(0)
    with pytest.raises(WeightsError, match="changed before they were in place"):
        engine.step()
    samples = []
    while engine.has_pending():
        samples += engine.step()
    assert samples[0].weight_versions == ((1, 0),)
    assert set(samples[0].completion_tokens) == {oracle.token_of(4)}
    engine.update_weights(spelling(engine, 6))
    assert spells(engine) == (2, oracle.token_of(6))


def test_a_broadcast_during_a_pending_update_is_skipped(engine: InferenceEngine) -> None:
    with WeightsGroup("127.0.0.1:0", 2, timeout_s=LIMIT_S) as group:
        engine.join_weights_group("weights", group.address, 2, timeout_s=LIMIT_S)
        engine.update_weights(spelling(engine, 1))
        with raises("weights_busy", r"call step\(\), or pass blocking=True", kind=WeightsError):
            engine.update_weights(group.broadcast(spelling(engine, 2)).source)
        assert spells(engine) == (1, oracle.token_of(1))
        with pytest.raises(WeightsError, match="join it first"):
            engine.update_weights(group.broadcast(spelling(engine, 3)).source)
    assert spells(engine) == (1, oracle.token_of(1))


@pytest.mark.parametrize("way", ["leave", "shut down"])
def test_a_trainer_is_not_kept_waiting_by_an_engine_that_has_gone(
    engine: InferenceEngine, way: str
) -> None:
    with WeightsGroup("127.0.0.1:0", 2, timeout_s=LIMIT_S) as group:
        engine.join_weights_group("weights", group.address, 2, timeout_s=LIMIT_S)
        weights = spelling(engine, 1)
        if way == "leave":
            engine.leave_weights_group("weights")
            engine.leave_weights_group("never joined")
        else:
            engine.shutdown()
        with raises("weights_interrupted", kind=WeightsError):
            group.broadcast(weights).result()


@pytest.mark.parametrize("wrong", [{"timeout_s": 0.0}, {"version": 1 << 63}, {"in_flight": "x"}])
def test_arguments_of_an_update_are_checked_for_a_state_dict_too(
    engine: InferenceEngine, wrong: dict[str, Any]
) -> None:
    with pytest.raises(WeightsError, match=next(iter(wrong))):
        engine.update_weights(spelling(engine, 1), **wrong)
    assert engine.get_weight_version() == 0
    engine.update_weights(spelling(engine, 2), blocking=True)
    assert spells(engine) == (1, oracle.token_of(2))
