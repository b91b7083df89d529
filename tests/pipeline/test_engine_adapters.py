"""Adapters of an engine: loaded, replaced and unloaded between its steps."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import get_peft_model_state_dict

from nano_inference import EmbedParams, EngineConfig, InferenceEngine, SamplingParams
from nano_inference.bus.steps import StepPlan, StepResult
from nano_inference.bus.weights import InFlight
from nano_inference.config import AdapterError, PoolingKind
from nano_inference.pipeline.engine_requests import make_request

from ..soaking import in_soak
from ..stages.executor.encoders import vector_of
from ..stages.executor.models import make_model
from ..stages.executor.runner.adapters.making import make_adapter, merged
from .builders import finish, raises

GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
PROMPT = list(range(1, 40))

MODEL = make_model("qwen2")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made: Path = tmp_path_factory.mktemp("model")
    MODEL.save_pretrained(str(made / "qwen"))
    for name in ("one", "two"):
        make_adapter(MODEL, len(name) + ord(name[0]), made / name)
    return made


@pytest.fixture(params=["radix", in_soak("paged")])
def engine(folder: Path, request: pytest.FixtureRequest) -> Iterator[InferenceEngine]:
    config = EngineConfig(model_path=str(folder / "qwen"), cache_type=request.param)
    with InferenceEngine(config) as made:
        yield made


def say(engine: InferenceEngine, adapter: str = "") -> tuple[int, ...]:
    (sample,) = engine.generate([PROMPT], GREEDY, adapter=adapter)
    return sample.completion_tokens


def cached(engine: InferenceEngine, adapter: str) -> int:
    """Return the number of prompt tokens that a new request with the adapter finds in the cache."""
    plans: list[Any] = []
    execute = engine._executor.execute

    def watched(plan: StepPlan) -> StepResult:
        plans.append(plan)
        return execute(plan)

    engine._executor.execute = watched  # type: ignore[method-assign]
    try:
        say(engine, adapter)
    finally:
        del engine._executor.execute
    return next(new.num_cached for plan in plans for new in plan.new)


@pytest.mark.parametrize("in_flight", ["keep", "retract", "abort"])
def test_in_flight_requests_keep_or_lose_the_old_adapter(
    engine: InferenceEngine, folder: Path, in_flight: InFlight
) -> None:
    engine.load_adapter("a", folder / "one")
    engine.load_adapter("b", folder / "one")
    old, base = say(engine, "a"), say(engine)
    ids = [engine.add_request(PROMPT, GREEDY, adapter=id) for id in ("a", "b", "")]
    for _ in range(6):
        assert not engine.step()
    assert engine.load_adapter("a", folder / "two", in_flight=in_flight) == 2
    done = {}
    while engine.has_pending():
        done |= {sample.request_id: sample for sample in engine.step()}
    a, b, alone = (done[id] for id in ids)
    assert (b.completion_tokens, alone.completion_tokens) == (old, base)
    assert (a.adapter_version, b.adapter_version, alone.adapter_version) == (1, 1, 0)
    if in_flight == "abort":
        assert (a.finish_reason, a.completion_tokens) == ("abort", old[: len(a.completion_tokens)])
        return
    assert a.completion_tokens[:6] == old[:6]
    assert a.completion_tokens != old
    if in_flight == "retract":
        # What follows is what the new weights say after these tokens, in all their layers.
        (again,) = engine.generate(
            [[*PROMPT, *a.completion_tokens[:6]]],
            SamplingParams(temperature=0.0, max_tokens=18, ignore_eos=True),
            adapter="a",
        )
        assert a.completion_tokens[6:] == again.completion_tokens
    # KV of two versions is never found.
    assert cached(engine, "a") <= len(PROMPT) - 1
    fresh = say(engine, "a")
    engine.flush_cache()
    assert say(engine, "a") == fresh


def test_an_adapter_may_be_tensors_of_this_process(engine: InferenceEngine, folder: Path) -> None:
    adapted = make_adapter(MODEL, ord("o") + 3)
    config = adapted.peft_config["default"].to_dict()
    engine.load_adapter("folder", folder / "one")
    engine.load_adapter("tensors", get_peft_model_state_dict(adapted), config)
    assert say(engine, "tensors") == say(engine, "folder")
    assert [(each.id, each.version, each.rank) for each in engine.adapters()] == [
        ("folder", 1, 4),
        ("tensors", 1, 4),
    ]


def test_tensors_without_storage_are_refused(engine: InferenceEngine) -> None:
    adapted = make_adapter(MODEL, ord("o") + 3)
    config = adapted.peft_config["default"].to_dict()
    tensors = get_peft_model_state_dict(adapted)
    name = max(tensors)
    freed = tensors[name].clone()
    freed.untyped_storage().resize_(0)
    for spoiled in (tensors[name].to("meta"), tensors[name].to_sparse(), freed):
        with raises("adapter_refused", "can't be read", kind=AdapterError):
            engine.load_adapter("a", {**tensors, name: spoiled}, config)
    assert not engine.adapters()


def test_completions_are_scored_by_an_adapter(engine: InferenceEngine, folder: Path) -> None:
    engine.load_adapter("a", folder / "one")
    (sample,) = engine.generate([PROMPT], GREEDY, adapter="a")
    pair = [sample.prompt_tokens], [sample.completion_tokens]
    (scores,) = engine.score(*pair, GREEDY, adapter="a")
    assert scores == pytest.approx(sample.logprobs, abs=1e-4)
    assert engine.score(*pair, GREEDY) != [scores]
    with raises("unknown_model", "no adapter 'b' is loaded; call load_adapter"):
        engine.score(*pair, GREEDY, adapter="b")


def test_an_adapter_in_use_is_not_unloaded(engine: InferenceEngine, folder: Path) -> None:
    engine.load_adapter("a", folder / "one")
    request = engine.add_request(PROMPT, GREEDY, adapter="a")
    engine.step()
    with raises("adapter_in_use", kind=AdapterError):
        engine.unload_adapter("a")
    engine.unload_adapter("a", in_flight="abort")
    (sample,) = engine.step()
    assert (sample.request_id, sample.finish_reason) == (request, "abort")
    assert not engine.adapters()
    with raises("adapter_not_found", kind=AdapterError):
        engine.unload_adapter("a")


def test_base_weights_change_below_an_adapter(engine: InferenceEngine, folder: Path) -> None:
    engine.load_adapter("a", folder / "one")
    before = say(engine, "a")
    weights = {name: tensor.clone() for name, tensor in engine.state_dict().items()}
    engine.update_weights({name: tensor * 1.1 for name, tensor in weights.items()}, blocking=True)
    assert say(engine, "a") != before
    engine.update_weights(weights, blocking=True)
    assert say(engine, "a") == before


def test_adapters_of_the_settings_are_loaded(folder: Path) -> None:
    config = EngineConfig(model_path=str(folder / "qwen"), adapters={"one": str(folder / "one")})
    with InferenceEngine(config) as engine:
        assert say(engine, "one") != say(engine)
    with pytest.raises(AdapterError):
        InferenceEngine(EngineConfig(model_path=config.model_path, adapters={"x": "nowhere"}))


@pytest.mark.parametrize("kind", ["mean", in_soak("last"), in_soak("cls")])
def test_adapter_vectors_equal_merged_weights(
    folder: Path, kind: PoolingKind, tmp_path: Path
) -> None:
    """In chunks, beside rows of others, and after prefixes that the model alone has computed."""
    bases = {"": MODEL.base_model}
    for seed, name in enumerate(("one", "two")):
        bases[name] = merged(make_adapter(MODEL, seed, tmp_path / name)).base_model
    config = EngineConfig(
        model_path=str(folder / "qwen"), max_tokens_per_batch=16, max_batch_size=8, device="cpu"
    )
    prompts = [PROMPT, PROMPT[:7], PROMPT[5:]]
    with InferenceEngine(config) as engine:
        for name in ("one", "two"):
            engine.load_adapter(name, tmp_path / name)
        for name, base in bases.items():
            engine.add_request(PROMPT, GREEDY, adapter="one")
            found = engine.embed(prompts, pooling=kind, adapter=name)
            wanted = torch.stack([vector_of(base, prompt, kind) for prompt in prompts])
            torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5)


def test_a_vector_has_one_adapter_version(folder: Path) -> None:
    config = EngineConfig(
        model_path=str(folder / "qwen"), max_tokens_per_batch=16, max_batch_size=8, device="cpu"
    )
    embed = EmbedParams(pooling="mean")
    with InferenceEngine(config) as engine:
        engine.load_adapter("a", folder / "two")
        wanted = engine.embed([PROMPT], pooling="mean", adapter="a")
        engine.load_adapter("a", folder / "one")
        engine._queue("v", None, make_request(PROMPT, embed=embed, adapter="a"))
        assert engine.step() == []
        engine.load_adapter("a", folder / "two")
        samples = finish(engine)
    (sample,) = samples
    assert sample.adapter_version == 3
    torch.testing.assert_close(torch.tensor([sample.embedding]), wanted)
