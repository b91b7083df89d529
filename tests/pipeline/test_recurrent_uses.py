"""Models with recurrent state: replay, digest, scores, embeddings, requests in flight during an
update, and speculation."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from nano_inference import InferenceEngine, SamplingParams, TrainingSample
from nano_inference.config import ModelError
from nano_inference.pipeline.digest import digest
from nano_inference.stages.batching import SequenceStatus

from ..soaking import in_soak
from ..stages.executor.encoders import vector_of
from ..stages.executor.models import RECURRENT, make_model, save
from .builders import finish
from .test_recurrent_state import GREEDY, PROMPT, bits, cold, run, settings
from .test_speculation import Prophet, Repeat, speculate

SAMPLED = SamplingParams(max_tokens=10, ignore_eos=True, temperature=0.9, seed=3)
WHOLE = ("lfm2", "qwen3_5_text")
KINDS = [*WHOLE, *(in_soak(each) for each in RECURRENT if each not in WHOLE)]
PROMPTS = [list(PROMPT), list(PROMPT[:7]), [*PROMPT[:20], 9, 9]]


def make(kind: str) -> Any:
    """A model; the kernels take those of `WHOLE` as a whole, as far as they can."""
    return make_model(kind, **({"head_dim": 32} if kind in WHOLE else {}))


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def folder(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(make(kind), tmp_path_factory.mktemp(kind))


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
    base = make(kind).base_model
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


def run_speculating(engine: InferenceEngine, preempt_every: int = 0) -> list[TrainingSample]:
    """Run the prompts, and one of them twice; sequences may have to make room for others."""
    ids = [engine.add_request(list(prompt), GREEDY) for prompt in (*PROMPTS, PROMPT)]
    samples: list[TrainingSample] = []
    for step in count(1):
        if not engine.has_pending():
            return sorted(samples, key=lambda sample: ids.index(sample.request_id))
        samples += engine.step()
        if preempt_every and not step % preempt_every and (running := engine._batching.running):
            engine._batching._leave([*running][-1], SequenceStatus.WAITING, "preemption")
    raise AssertionError


def check_drafts(samples: list[TrainingSample], wanted: object) -> None:
    assert bits(samples) == wanted
    drafted = sum(each.num_draft_tokens for each in samples)
    assert 0 < sum(each.num_accepted_draft_tokens for each in samples) < drafted


def test_drafted_tokens_change_no_bit(
    engine: InferenceEngine, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Accepted or not, in several sequences of a step, which has not memory for the states of all;
    cold, warm, and after preemptions."""
    wanted = cold(engine, *PROMPTS, PROMPT)
    answers = {
        tuple(prompt): [tuple(tokens)] for prompt, (tokens, _) in zip(PROMPTS, wanted, strict=False)
    }
    speculate(monkeypatch, Prophet(answers))
    with InferenceEngine(settings(folder, speculation="auto", max_draft_tokens=5)) as speculating:
        for preempt_every in (0, 0, 2):
            check_drafts(run_speculating(speculating, preempt_every), wanted)
            speculating._batching.check()
        # Of tokens before drafts there are snapshots.
        more = [[*PROMPT, *wanted[0][0][:places], 9] for places in (4, 8, 10)]
        assert bits(run(speculating, *more)) == cold(engine, *more)


def test_a_draft_model_of_attention_drafts_for_it_and_it_is_refused_as_one(
    engine: InferenceEngine, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = str(save(make_model("llama"), tmp_path / "plain"))
    wanted = cold(engine, *PROMPTS, PROMPT)
    speculate(monkeypatch, Repeat())
    config = settings(folder, speculation="auto", draft_model_path=plain)
    with InferenceEngine(config) as speculating:
        samples = run_speculating(speculating)
        assert bits(samples) == wanted
        assert sum(each.num_draft_tokens for each in samples)
    config = replace(config, model_path=plain, draft_model_path=str(folder))
    with pytest.raises(ModelError, match="the draft model has recurrent state"):
        InferenceEngine(config)
