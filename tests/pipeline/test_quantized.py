"""Engines and pipelines with quantised weights: updates, samples and scores say which weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from nano_inference import EngineConfig, FolderWeights, InferenceEngine, Pipeline, SamplingParams
from nano_inference.config import Config, ConfigError, ModelError, RequestError, WeightsError
from nano_inference.pipeline.exact_forward import ExactForward
from nano_inference.stages.executor import load_model

from . import reference, short_model

SHORT_MODEL = True
PROMPT = [60, 61, 62]
PARAMS = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
KEPT = "unquantized"


def config(folder: Path | str = "", **more: Any) -> EngineConfig:
    options = {"quantization": "int4", "quantization_group": 32, "kv_cache_bytes": 1 << 22}
    return EngineConfig(model_path=str(folder or short_model.folder()), **{**options, **more})


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with other weights, as after some steps of training."""
    folder: Path = tmp_path_factory.mktemp("trained") / reference.FOLDER.name
    source = short_model.folder()
    folder.mkdir()
    for file in source.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    generator = torch.Generator().manual_seed(0)
    tensors = load_file(source / "model.safetensors")
    noise: dict[str, Tensor] = {
        name: each + 0.02 * torch.randn(each.shape, generator=generator)
        for name, each in tensors.items()
    }
    save_file(noise, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_an_updated_engine_has_the_bits_of_one_that_was_started_with_the_weights(
    trained: Path,
) -> None:
    """By a folder and a state dict; samples say which weights they are of, and scores are exact."""
    with InferenceEngine(config(trained)) as engine:
        (wanted,) = engine.generate([PROMPT], PARAMS)
        scores = engine.score([PROMPT], [wanted.completion_tokens], PARAMS)
    with InferenceEngine(config()) as engine:
        (before,) = engine.generate([PROMPT], PARAMS)
        engine.update_weights(FolderWeights(str(trained)))
        (after,) = engine.generate([PROMPT], PARAMS)
        assert engine.score([PROMPT], [wanted.completion_tokens], PARAMS) == scores
        assert before.logprobs != after.logprobs == wanted.logprobs
        assert after.completion_tokens == wanted.completion_tokens
        assert after.quantization == "int4-32+int8-32"
        assert after.recipe is not None
        assert {each.quantization for each in after.recipe.executors} == {after.quantization}
        engine.update_weights(load_file(short_model.folder() / "model.safetensors"), blocking=True)
        (back,) = engine.generate([PROMPT], PARAMS)
        assert (back.logprobs, back.weight_version) == (before.logprobs, 2)
        engine.release_memory(["weights"])
        engine.resume_memory(["weights"])
        with pytest.raises(WeightsError, match="memory was released"):
            engine.update_weights({"model.norm.weight": torch.ones(128)}, partial=True)
        engine.update_weights(FolderWeights(str(trained)), version=9)
        (restored,) = engine.generate([PROMPT], PARAMS)
        assert (restored.logprobs, restored.weight_version) == (wanted.logprobs, 9)
        assert engine.replay(restored).verdict == "equal"
        with pytest.raises(RequestError, match="no reference model"):
            engine.score([PROMPT], [[1]], by_reference=True)


def plain_scores(folder: Path | str, completion: tuple[int, ...]) -> tuple[float, ...]:
    with InferenceEngine(config(folder, quantization="auto", quantization_group=0)) as engine:
        (scores,) = engine.score([PROMPT], [completion], PARAMS)
    return scores


def test_the_unquantised_weights_score_and_are_updated(trained: Path) -> None:
    with InferenceEngine(config(reference_model_path=KEPT)) as engine:
        (sample,) = engine.generate([PROMPT], PARAMS)
        assert sample.ref_logprobs == plain_scores("", sample.completion_tokens)
        assert sample.ref_logprobs != sample.logprobs
        engine.update_weights(FolderWeights(str(trained)))
        (sample,) = engine.generate([PROMPT], PARAMS)
        wanted = plain_scores(trained, sample.completion_tokens)
        assert sample.ref_logprobs == wanted
        completion = [sample.completion_tokens]
        assert engine.score([PROMPT], completion, PARAMS, by_reference=True) == [wanted]
        state, tensors = engine.state_dict(), load_file(trained / "model.safetensors")
        assert all(torch.equal(state[name], each) for name, each in tensors.items())


def test_speculation_keeps_the_bits_of_codes() -> None:
    """Of a target and a draft model with codes."""
    prompt = "Once upon a time, once upon a time, once"
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    found = []
    for more in ({}, {"speculation": "auto", "draft_model_path": str(short_model.folder())}):
        with InferenceEngine(config(deterministic=True, **more)) as engine:
            found.append(engine.generate([prompt], params)[0])
    assert found[0].logprobs == found[1].logprobs
    assert found[1].num_accepted_draft_tokens > 0


def test_codes_have_no_exact_training_pass() -> None:
    model = load_model(config())
    with pytest.raises(ModelError, match=r"codes .*, which have no gradients"):
        ExactForward(model.module)


async def test_a_pipeline_scores_by_the_unquantised_weights(trained: Path) -> None:
    settings = Config(engine=config(reference_model_path=KEPT))
    async with Pipeline(settings) as pipeline:
        await pipeline.client.update_weights(FolderWeights(str(trained)))
        request = {"prompt_token_ids": PROMPT, "sampling": PARAMS}
        (sample,) = (await pipeline.complete(request)).samples
        wanted = plain_scores(trained, sample.token_ids)
        assert sample.ref_logprobs == wanted
        (score,) = await pipeline.score([PROMPT], [sample.token_ids], PARAMS)
        assert (score.ref_logprobs, score.weight_version) == (wanted, 1)
        assert score.logprobs == sample.logprobs


def test_plain_weights_have_no_others_beside_them() -> None:
    with pytest.raises(ConfigError, match="reference_model_path"):
        config(reference_model_path=KEPT, quantization="auto").check()
