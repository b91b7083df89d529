"""Models with recurrent state: replay, digest, scores, embeddings, requests in flight during an
update; and no speculation."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace

from nano_inference import InferenceEngine, SamplingParams
from nano_inference.config import ModelError
from nano_inference.pipeline.digest import digest

from ..stages.executor.encoders import vector_of
from ..stages.executor.models import make_model, save
from .builders import finish
from .test_recurrent_state import GREEDY, PROMPT, bits, cold, settings

SAMPLED = SamplingParams(max_tokens=10, ignore_eos=True, temperature=0.9, seed=3)
KINDS = ("lfm2", "qwen3_5_text")
PROMPTS = [list(PROMPT), list(PROMPT[:7]), [*PROMPT[:20], 9, 9]]


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def folder(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(make_model(kind, head_dim=32), tmp_path_factory.mktemp(kind))


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[InferenceEngine]:
    with InferenceEngine(settings(folder)) as engine:
        yield engine


def test_a_replay_is_equal_to_the_bit(engine: InferenceEngine) -> None:
    """From snapshots, and without."""
    (sample,) = engine.generate([PROMPT], SAMPLED)
    assert engine.replay(sample).verdict == "equal"
    engine._batching.cache.flush()
    assert engine.replay(sample).verdict == "equal"


def test_a_digest_is_the_same_alone_and_in_a_crowd(engine: InferenceEngine) -> None:
    alone = []
    for number, prompt in enumerate(PROMPTS):
        engine._batching.cache.flush()
        engine.add_request(prompt, SAMPLED, request_id=str(number))
        alone += finish(engine)
    for number, prompt in reversed([*enumerate(PROMPTS)]):
        engine.add_request(prompt, SAMPLED, request_id=str(number))
    crowd = finish(engine)
    assert digest(crowd) == digest(alone)


def test_scores_are_the_sampled_logprobs(engine: InferenceEngine) -> None:
    samples = engine.generate(PROMPTS, SAMPLED)
    completions = [each.completion_tokens for each in samples]
    scores = engine.score(PROMPTS, completions, SAMPLED)
    assert scores == [each.logprobs for each in samples]


def test_vectors_are_those_of_transformers_and_have_the_same_bits_in_a_batch(
    engine: InferenceEngine, kind: str
) -> None:
    base = make_model(kind, head_dim=32).base_model
    together = engine.embed(PROMPTS, pooling="mean")
    for prompt, vector in zip(PROMPTS, together, strict=True):
        assert torch.equal(engine.embed([prompt], pooling="mean")[0], vector)
        torch.testing.assert_close(vector, vector_of(base, prompt, "mean"), rtol=0, atol=1e-5)


def test_a_retracted_request_goes_on_as_one_of_the_new_weights(folder: Path) -> None:
    with InferenceEngine(settings(folder)) as engine:
        engine.add_request(list(PROMPT), GREEDY)
        for _ in range(5):
            assert not engine.step()
        new = {name: each * 1.05 for name, each in engine.state_dict().items()}
        engine.update_weights(new, in_flight="retract")
        (sample,) = finish(engine)
        (_, before), (_, place) = sample.weight_versions
        assert 0 == before < place
        ((tokens, logprobs),) = cold(engine, [*PROMPT, *sample.completion_tokens[:place]])
    rest = len(sample.completion_tokens) - place
    assert list(sample.completion_tokens[place:]) == tokens[:rest]
    assert list(sample.logprobs[place:]) == logprobs[:rest]


def test_nothing_is_drafted(engine: InferenceEngine, folder: Path) -> None:
    """Neither from a prompt that repeats itself, nor from a prediction."""
    prompt = list(PROMPT[:6]) * 4
    wanted = cold(engine, prompt)
    with InferenceEngine(settings(folder, speculation="auto")) as speculating:
        (sample,) = speculating.generate([prompt], GREEDY, predictions=[[*wanted[0][0]]])
        assert speculating._executor.off["speculation"] == "the model has recurrent state"
    assert bits([sample]) == wanted
    assert sample.num_draft_tokens == 0


def test_a_draft_model_is_refused_beside_it_and_it_is_refused_as_one(
    folder: Path, tmp_path: Path
) -> None:
    plain = str(save(make_model("llama"), tmp_path / "plain"))
    for target, draft, why in (
        (str(folder), plain, "the model has recurrent state, which excludes a draft model"),
        (plain, str(folder), "the draft model has recurrent state"),
    ):
        config = settings(folder, speculation="auto", draft_model_path=draft)
        with pytest.raises(ModelError, match=why):
            InferenceEngine(replace(config, model_path=target))
