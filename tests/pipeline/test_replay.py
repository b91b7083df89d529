"""Replay: a finished request computed again has the same bits, or it is said where it parts."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from nano_inference import (
    Completion,
    EngineConfig,
    GenerateRequest,
    InferenceEngine,
    Pipeline,
    SamplingParams,
    TrainingSample,
)
from nano_inference.bus.codec import decode_output, encode_output
from nano_inference.bus.public import CompletionSample, ErrorInfo, Fingerprint, Recipe
from nano_inference.config import Constraint
from nano_inference.pipeline.replay import Difference, Replay, replay
from nano_inference.stages.admission.participants import fingerprints_of
from nano_inference.stages.executor.core import ExecutorCore
from nano_inference.stages.executor.fingerprint import kv_digest, sampled_digest

from ..stages.executor.runner.adapters.making import make_adapter
from . import reference, short_model
from .builders import State, asking, raises
from .conftest import MakeConfig

SHORT_MODEL = True

PROMPT = [5, 6, 7, 8]
SAMPLED = SamplingParams(max_tokens=12, ignore_eos=True, temperature=0.9)


@pytest.fixture(scope="module")
def engine() -> Iterator[InferenceEngine]:
    config = EngineConfig(
        model_path=str(short_model.folder()),
        dtype="float32",
        deterministic=True,
        response_cache_bytes=1 << 20,
    )
    with InferenceEngine(config) as made:
        yield made


def one(engine: InferenceEngine, params: SamplingParams = SAMPLED) -> TrainingSample:
    (sample,) = engine.generate([PROMPT], params)
    return sample


@pytest.mark.parametrize(
    "params",
    [
        SAMPLED,
        replace(SAMPLED, temperature=0),
        replace(SAMPLED, seed=3, logprobs=2, prompt_logprobs=1, top_p=0.9),
        replace(SAMPLED, repetition_penalty=1.2, logit_bias={9: 2.0}, min_tokens=4),
        replace(SAMPLED, constraint=Constraint(regex="[a-z ]{5,30}"), ignore_eos=False),
        replace(SAMPLED, stop=("e", "a"), max_tokens=40),
    ],
    ids=["unseeded", "greedy", "seeded", "penalties", "constraint", "stop"],
)
def test_samples_are_computed_again_to_the_bit(
    engine: InferenceEngine, params: SamplingParams
) -> None:
    for sample in engine.generate([PROMPT], params, 2):
        replay = engine.replay(sample)
        tokens = len(sample.completion_tokens)
        assert replay.summary == f"equal: {tokens} tokens, {tokens} logprobs to the bit"
        assert (replay.verdict, replay.differences, replay.reasons) == ("equal", (), ())
        assert all(each.finish_reason == sample.finish_reason for each in replay.samples)


def test_a_response_from_the_cache_is_computed_by_its_replay(
    engine: InferenceEngine, steps: list[int]
) -> None:
    params = replace(SAMPLED, temperature=0, max_tokens=3)
    one(engine, params)
    served = one(engine, params)
    assert served.from_response_cache
    before = sum(steps)
    assert engine.replay(served).verdict == "equal"
    assert sum(steps) > before


def test_an_other_token_is_found_and_the_recorded_ones_are_scored(engine: InferenceEngine) -> None:
    sample = one(engine)
    tokens = [*sample.completion_tokens]
    tokens[5] = (tokens[5] + 1) % 100
    replay = engine.replay(replace(sample, completion_tokens=tuple(tokens)))
    (found,) = replay.samples
    assert found.parting is not None
    assert found.parting.position == found.equal_tokens == 5
    assert found.parting.recorded is not None
    assert found.parting.computed is not None
    assert found.parting.recorded.token_id == tokens[5]
    assert found.parting.computed.token_id == sample.completion_tokens[5]
    # The record's logprobs are those of other tokens from there on.
    assert (found.compared_logprobs, found.equal_logprobs) == (12, 5)
    scores = engine.score([PROMPT], [tokens], SAMPLED)[0]
    gaps = [abs(old - new) for old, new in zip(sample.logprobs, scores, strict=True)]
    assert found.largest_difference == max(gaps)
    assert replay.summary.startswith(f"parts at sample 0, token 5: recorded {tokens[5]} (")
    assert "please report it" in replay.reasons[-1]


def test_logprobs_after_another_token_are_not_compared_with_scores_of_another_distribution(
    engine: InferenceEngine,
) -> None:
    sample = one(engine, replace(SAMPLED, presence_penalty=0.5))
    changed = (sample.completion_tokens[0] + 1, *sample.completion_tokens[1:])
    replay = engine.replay(replace(sample, completion_tokens=changed))
    assert replay.samples[0].compared_logprobs == 0
    assert "12 logprobs" in replay.reasons[0]
    assert "presence_penalty" in replay.reasons[0]


def test_one_bit_of_a_logprob_is_a_difference(engine: InferenceEngine) -> None:
    sample = one(engine)
    logprobs = [*sample.logprobs]
    logprobs[7] = float(np.nextafter(np.float32(logprobs[7]), np.float32(0)))
    replay = engine.replay(replace(sample, logprobs=tuple(logprobs)))
    (found,) = replay.samples
    assert (found.equal_tokens, found.compared_logprobs, found.equal_logprobs) == (12, 12, 11)
    assert found.parting is not None
    assert found.parting.position == 7
    assert 0 < found.largest_difference < 1e-5


def test_other_weights_are_named(loaded: State) -> None:
    config = EngineConfig(model_path=str(short_model.folder()), dtype="float32")
    with InferenceEngine(config) as engine:
        before = one(engine)
        changed = {
            name: tensor * 1.5 if "mlp" in name else tensor for name, tensor in loaded.items()
        }
        engine.update_weights(changed, blocking=True)
        replay = engine.replay(before)
        assert replay.verdict == "different"
        version = Difference(name="weight_version", recorded=0, present=1)
        assert replay.differences == (version,)
        assert "version 0 of the weights" in replay.reasons[0]
        (span,) = replay.samples[0].spans
        assert (span.weight_version, span.comparable, span.stop) == (0, False, 12)
        # Of a checkpoint that a process has loaded as its first version.
        now = one(engine)
        assert now.weight_version == 1
        assert engine.replay(now).verdict == "equal"
        engine.update_weights(loaded, blocking=True)
        again = engine.replay(before, at=0)
        assert (again.verdict, again.differences) == ("equal", ())


def test_fields_of_the_fingerprint_that_differ_are_named(engine: InferenceEngine) -> None:
    sample = one(engine)
    assert sample.recipe is not None
    (made,) = sample.recipe.executors
    other = replace(made, digest="f", torch="2.0", settings={"tensor_parallel": 2})
    recipe = replace(sample.recipe, executors=(other,))
    # Equal bits are equal, and what is different now is told.
    replay = engine.replay(replace(sample, recipe=recipe))
    assert replay.verdict == "equal"
    assert {each.name: (each.recorded, each.present) for each in replay.differences} == {
        "torch": ("2.0", made.torch),
        "settings.tensor_parallel": (2, None),
    }
    logprobs = (0.5, *sample.logprobs[1:])
    replay = engine.replay(replace(sample, recipe=recipe, logprobs=logprobs))
    assert "it differs in: settings.tensor_parallel, torch" in replay.reasons[0]


def test_a_recipe_that_can_not_be_computed_again_is_refused(engine: InferenceEngine) -> None:
    sample = one(engine)
    with raises("not_replayable", "has no recipe"):
        engine.replay(replace(sample, recipe=None))
    with raises("not_replayable", "no result"):
        engine.replay(replace(sample, completion_tokens=(), logprobs=()))


def test_the_fingerprint_follows_weights_configuration_and_settings(tmp_path: Path) -> None:
    def of(**settings: Any) -> Fingerprint:
        own = {"model_path": str(short_model.folder()), "dtype": "float32"} | settings
        core = ExecutorCore(EngineConfig(**own))
        (found,) = fingerprints_of(core.capacity())
        core.close()
        return found

    usual = of()
    assert of(cache_type="paged", block_size=8) == usual, "these change no bit in this mode"
    assert usual.digest
    assert {usual: 1}[usual] == 1, "rollouts may be keys"
    folder = shutil.copytree(short_model.folder(), tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "transformers_version": "0"}))
    assert of(model_path=str(folder)) == usual
    (folder / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 0.01}))
    other = of(model_path=str(folder))
    assert replace(other, config=usual.config, digest=usual.digest) == usual != other
    raw = of(logprobs_mode="raw")
    assert kv_digest(raw) == kv_digest(usual) != kv_digest(other)
    names = ("torch", "transformers", "package", "machine", "code")
    digests = {kv_digest(replace(usual, **{name: "other"})) for name in names}
    assert len({kv_digest(usual), *digests}) == 6
    assert (raw.settings, raw.weights) == ({"logprobs_mode": "raw"}, usual.weights)
    assert raw.digest != usual.digest
    layer = torch.nn.Linear(4, 4)
    before = sampled_digest(layer)
    with torch.no_grad():
        layer.weight.mul_(1.5)
    assert sampled_digest(layer) != before


async def test_a_pipeline_replays_records_of_its_bus(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    """A request with an adapter and several samples, and a vector."""
    make_adapter(reference.model(short_model.folder()), 1, tmp_path)
    config = make_config(
        engine__deterministic=True,
        engine__adapters={"poet": str(tmp_path)},
    )
    sampling = {"temperature": 0.8, "max_tokens": 16, "ignore_eos": True, "logprobs": 1}
    async with Pipeline(config) as pipeline:
        request = asking(sampling=sampling, n=2, model="poet", request_id="one", tenant="anna")
        done = await pipeline.complete(request)
        assert done.status == "done"
        (found,) = await pipeline.recorded("one")
        assert found == done
        assert found.recipe is not None
        assert (found.recipe.tenant, found.recipe.adapter) == ("anna", "poet")
        again = await pipeline.replay(decode_output(encode_output(found)))
        assert again.summary == "equal: 32 tokens, 32 logprobs to the bit"
        vector = await pipeline.complete({"prompt": "12 + 30 =", "embed": {"dimensions": 8}})
        replay = await pipeline.replay(vector)
        assert replay.summary == "equal: a vector of 8 numbers, to the bit"
        with raises("unknown_request"):
            await pipeline.recorded("two")


async def test_recipes_can_be_left_out(make_config: MakeConfig) -> None:
    async with Pipeline(make_config(admission__recipes=False)) as pipeline:
        assert (await pipeline.complete(asking())).recipe is None


# --- comparisons, of made completions ------------------------------------------------------------


def made(*token_ids: int, versions: tuple[tuple[int, int], ...] = ((4, 0),), **fields: Any) -> Any:
    """A completion of one sample; the logprob of each token is its negative."""
    sample = CompletionSample(
        sample_index=0,
        text="",
        token_ids=token_ids,
        logprobs=tuple(-float(each) for each in token_ids),
        finish_reason=fields.pop("finish_reason", "length"),
        weight_version=versions[0][0],
        weight_versions=versions,
    )
    recipe = Recipe(sampling=SAMPLED, seeds=(7,), executors=(Fingerprint(digest="a"),))
    own = {"status": "done", "prompt_token_ids": (1, 2), "recipe": recipe} | fields
    return Completion(request_id="r", entry_id="", samples=(sample,), **own)


async def compared(recorded: Completion, *answers: Completion) -> Replay:
    asked: list[GenerateRequest] = []

    async def complete(request: GenerateRequest) -> Completion:
        asked.append(request)
        return answers[len(asked) - 1]

    result = await replay(complete, recorded)
    assert len(asked) == len(answers)
    return result


async def test_each_span_is_compared_with_its_own_version() -> None:
    recorded = made(5, 6, 7, 8, versions=((3, 0), (4, 2)))
    scored = made(1, prompt_logprobs=(None, -1.0, -5.0, -6.5, -7.0, -8.0))
    result = await compared(recorded, made(5, 9, 9, 9), scored)
    (sample,) = result.samples
    assert [
        (each.weight_version, each.comparable, each.equal_logprobs) for each in sample.spans
    ] == [
        (3, False, 1),
        (4, True, 2),
    ]
    assert result.differences == (Difference(name="weight_version", recorded=3, present=4),)
    assert any("in_flight: retract" in reason for reason in result.reasons)


async def test_a_request_that_was_cut_short_is_compared_as_far_as_it_came() -> None:
    recorded = made(5, 6, finish_reason="abort", status="cancelled")
    assert (await compared(recorded, made(5, 6))).verdict == "equal"
    longer = await compared(made(5, 6), made(5, 6, 7))
    assert longer.summary == "parts at sample 0, token 2: recorded its end, computed 7 (-7.0)"


async def test_a_replay_that_fails_has_the_code_of_its_error() -> None:
    error = ErrorInfo(code="unknown_image", message="it is gone")
    failed = Completion(request_id="r", entry_id="", status="error", error=error)
    with raises("unknown_image", "it is gone"):
        await compared(made(5), failed)
    result = await compared(made(5, 6), made(5, 7), failed)
    assert (result.verdict, result.logprobs) == ("different", 1)
    assert "were not compared: it is gone" in result.reasons[0]
