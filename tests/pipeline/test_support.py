"""The support of each position: log S, sampling masks, and tokens that are forced."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from nano_inference import (
    EngineConfig,
    GenerateRequest,
    InferenceEngine,
    Pipeline,
    SamplingParams,
    TrainingSample,
)
from nano_inference.bus.public import CompletionChunk
from nano_inference.config import Constraint
from nano_inference.stages.executor.core import ExecutorCore

from ..soaking import in_soak
from . import short_model
from .builders import break_once, raises
from .conftest import MakeConfig

SHORT_MODEL = True

PROMPT = [5, 6, 7, 8]
FREE = SamplingParams(max_tokens=12, ignore_eos=True, temperature=1.0, seed=3)
LIMITED = replace(FREE, top_p=0.9, top_k=200, min_p=0.001, return_sampling_mask=True, logprobs=2)
LOWEST = float(np.finfo(np.float32).min)
DRAFTED = ("num_draft_tokens", "num_accepted_draft_tokens")


@pytest.fixture(scope="module", params=[in_soak("off"), "auto"])
def engine(request: pytest.FixtureRequest) -> Iterator[InferenceEngine]:
    config = EngineConfig(
        model_path=str(short_model.folder()),
        dtype="float32",
        deterministic=True,
        speculation=request.param,
        response_cache_bytes=1 << 20,
    )
    with InferenceEngine(config) as made:
        yield made


def numbers(sample: TrainingSample) -> TrainingSample:
    """All of a sample that depends on its tokens."""
    plain: Any = dict.fromkeys(DRAFTED, 0) | {"recipe": None, "time": None, "billed_ns": None}
    return replace(sample, **plain)


def ids_of(masks: tuple[bytes, ...] | None) -> list[list[int]]:
    return [np.frombuffer(mask, "<i4").tolist() for mask in masks or ()]


def test_each_token_has_its_support_and_its_mass(engine: InferenceEngine) -> None:
    """As the likeliest tokens show them, beside requests without limits."""
    tops = replace(LIMITED, top_p=1.0, min_p=0.0, top_k=20, logprobs=20)
    sample, other = engine.generate([PROMPT, PROMPT], [tops, replace(FREE, seed=4)])
    assert (other.support_logprobs, other.sampling_masks) == (None, None)
    assert sample.support_logprobs is not None
    assert sample.top_logprobs is not None
    masks = ids_of(sample.sampling_masks)
    assert len(masks) == len(sample.support_logprobs) == len(sample.completion_tokens) == 12
    columns = sample.completion_tokens, masks, sample.top_logprobs, sample.support_logprobs
    for token, mask, top, log_s in zip(*columns, strict=True):
        assert token in mask
        assert mask == sorted(each.token_id for each in top)
        mass = np.exp(np.array([each.logprob for each in top], np.float64)).sum()
        assert log_s == pytest.approx(np.log(mass), abs=1e-6)


def test_a_support_that_is_too_large_has_an_empty_mask() -> None:
    config = EngineConfig(
        model_path=str(short_model.folder()), dtype="float32", max_sampling_mask=3
    )
    with InferenceEngine(config) as engine:
        params = replace(LIMITED, temperature=0.5)
        free = replace(FREE, return_sampling_mask=True)
        sample, other = engine.generate([PROMPT, PROMPT], [params, free])
    assert ids_of(other.sampling_masks) == [[]] * 12, "without limits it is the whole vocabulary"
    assert sample.support_logprobs is not None
    lengths = [len(mask) for mask in ids_of(sample.sampling_masks)]
    assert {0} < set(lengths) <= {0, 1, 2, 3}
    assert len(sample.support_logprobs) == len(lengths)


# --- masks given for scoring ------------------------------------------------------------------


def test_a_mask_replayed_has_the_bits_of_the_logprob_less_log_s(engine: InferenceEngine) -> None:
    """So the importance ratio of an unchanged policy is exactly 1; without log S it isn't."""
    params = replace(LIMITED, top_p=0.8, temperature=0.9)
    samples = engine.generate([PROMPT], params, 4)
    masked = [replace(params, prompt_sampling_masks=each.sampling_masks) for each in samples]
    prompts, completions = zip(
        *((each.prompt_tokens, each.completion_tokens) for each in samples), strict=True
    )
    scored = engine.score(prompts, completions, masked)
    trained, logprobs, log_s = (
        np.concatenate([np.array(row, np.float32) for row in rows])
        for rows in (
            scored,
            [each.logprobs for each in samples],
            [each.support_logprobs for each in samples],
        )
    )
    assert np.array_equal(trained, logprobs - log_s)
    assert np.exp(trained - (logprobs - log_s)).mean() == 1.0
    assert np.exp(trained - logprobs).mean() > 1.02


def test_all_logprobs_of_a_position_are_of_its_mask(engine: InferenceEngine) -> None:
    """Of the likeliest tokens and of targets, too; an empty mask and earlier positions have the
    whole vocabulary, and a token outside is impossible."""
    prompt = [5, 6, 7, 8, 9]
    params = SamplingParams(
        max_tokens=1, ignore_eos=True, prompt_logprobs=4, prompt_logprob_token_ids=[[20, 9]] * 4
    )
    masks = [[20, 30, 40], [], [20, 30]]
    (whole,) = engine.generate([prompt], params)
    (found,) = engine.generate([prompt], replace(params, prompt_sampling_masks=masks))
    (packed,) = engine.generate(
        [prompt],
        replace(params, prompt_sampling_masks=[np.array(each, "<i4").tobytes() for each in masks]),
    )
    assert packed.prompt_top_logprobs == found.prompt_top_logprobs
    assert packed.prompt_logprobs == found.prompt_logprobs is not None
    assert whole.prompt_logprobs is not None
    assert found.prompt_top_logprobs is not None
    for place in (1, 3):
        assert found.prompt_logprobs[place] == whole.prompt_logprobs[place]
    assert found.prompt_logprobs[2] == found.prompt_logprobs[4] == LOWEST
    for place, mask in ((2, masks[0]), (4, masks[2])):
        tops = found.prompt_top_logprobs[place]
        assert sorted(top.token_id for top in tops) == mask
        assert sum(np.exp(top.logprob) for top in tops) == pytest.approx(1, abs=1e-6)
        targets = found.prompt_token_id_logprobs
        assert targets is not None
        assert targets[place - 1][0] == next(top.logprob for top in tops if top.token_id == 20)
        assert targets[place - 1][1] == LOWEST


@pytest.mark.parametrize(
    ("masks", "scored", "why"),
    [
        ([[1]] * 4, True, "has 4 masks, and a prompt of 4 tokens"),
        ([[1]], False, "give prompt_logprobs as well"),
        ([b"abc"], True, "4 bytes for each id"),
        ([[1], [-1, 2]], True, "holds token id -1"),
    ],
    ids=["too many", "no logprobs", "packed", "unknown"],
)
def test_masks_that_do_not_fit_the_prompt_are_refused(
    engine: InferenceEngine, masks: Any, scored: bool, why: str
) -> None:
    params = SamplingParams(prompt_sampling_masks=masks, prompt_logprobs=0 if scored else None)
    with raises("invalid_prompt_sampling_masks", why):
        engine.generate([PROMPT], params)


# --- forced tokens ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "params",
    [
        in_soak(FREE),
        in_soak(LIMITED),
        replace(LIMITED, temperature=0.0),
        replace(LIMITED, presence_penalty=0.5, repetition_penalty=1.2, temperature=1.4),
        replace(
            LIMITED, constraint=Constraint(regex="[a-z ]{8,20}"), ignore_eos=False, max_tokens=40
        ),
    ],
    ids=["free", "limited", "greedy", "penalties", "constraint"],
)
def test_forced_tokens_have_the_bits_of_sampled_ones(
    engine: InferenceEngine, params: SamplingParams
) -> None:
    """For each of several samples; and what is sampled after them is the same."""
    sampled = engine.generate([PROMPT], params, 2)
    for forced in (5, len(sampled[0].completion_tokens)):
        own = replace(params, forced_tokens=sampled[0].completion_tokens[:forced])
        first, second = engine.generate([PROMPT], own, 2)
        assert numbers(first) == numbers(sampled[0])
        assert second.completion_tokens[:forced] == own.forced_tokens
        assert second.logprobs[:forced] == first.logprobs[:forced]
    assert second.completion_tokens == first.completion_tokens


def test_a_forced_stop_token_ends_the_sample(engine: InferenceEngine) -> None:
    params = replace(FREE, stop_token_ids=frozenset({9}), forced_tokens=(8, 7, 9))
    (sample,) = engine.generate([PROMPT], params)
    assert (sample.completion_tokens, sample.finish_reason) == ((8, 7, 9), "stop")


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"forced_tokens": (7, 999_999)}, "999999"),
        ({"forced_tokens": (7,) * 13}, "they are 13, and at most max_tokens"),
        ({"forced_tokens": (9, 7), "stop_token_ids": {9}}, "token 9 at position 0 is a stop token"),
        ({"forced_tokens": (9,), "stop_token_ids": {9}, "min_tokens": 2}, "min_tokens"),
        (
            {"forced_tokens": (7,), "ignore_eos": False, "constraint": Constraint(regex="[0-9]")},
            "the constraint forbids token 7 at position 0",
        ),
    ],
    ids=["unknown", "too many", "stop", "min_tokens", "constraint"],
)
def test_forced_tokens_that_can_not_be_sampled_are_refused(
    engine: InferenceEngine, changes: dict[str, Any], why: str
) -> None:
    with raises("invalid_forced_tokens", why):
        engine.generate([PROMPT], replace(FREE, **changes))


# --- what becomes of them on their way ----------------------------------------------------------


def test_a_replay_and_a_cached_response_have_the_columns(engine: InferenceEngine) -> None:
    params = replace(LIMITED, seed=11)
    (first,) = engine.generate([PROMPT], params)
    (again,) = engine.generate([PROMPT], params)
    assert again.from_response_cache
    assert (again.support_logprobs, again.sampling_masks) == (
        first.support_logprobs,
        first.sampling_masks,
    )
    assert first.support_logprobs is not None
    assert engine.replay(first).verdict == "equal"
    wrong = replace(first, support_logprobs=(-9.0, *first.support_logprobs[1:]))
    found = engine.replay(wrong)
    assert (found.verdict, found.samples[0].different) == ("different", ("support_logprobs",))
    (plain,) = engine.generate([PROMPT], replace(params, return_sampling_mask=False))
    assert plain.sampling_masks is None, "that of another request"


async def test_no_column_is_lost_by_a_failure_or_a_preemption(
    engine: InferenceEngine, make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Streams of two samples, over a cache that holds two of four sequences, and an executor that
    breaks; chunks and samples have the columns of a run alone."""
    params = replace(LIMITED, max_tokens=28, temperature=1.2, seed=5)
    prompts = [[20 + number, *PROMPT] for number in range(2)]
    wanted = engine.generate(prompts, params, 2)
    requests = [
        GenerateRequest(prompt_token_ids=tuple(prompt), n=2, sampling=params) for prompt in prompts
    ]
    break_once(monkeypatch, ExecutorCore, "execute", 9)
    rough = make_config(
        engine__deterministic=True,
        engine__kv_cache_bytes=5 * 16 * 512,
        engine__max_model_len=48,
        engine__max_batch_size=4,
        pipeline__restart_backoff_s=0.01,
    )
    async with Pipeline(rough) as pipeline:
        streams = [pipeline.submit(request) for request in requests]
        found: list[tuple[Any, ...]] = []
        for stream in streams:
            *chunks, end = [output async for output in stream]
            for sample in end.samples:
                own = [each for each in chunks if each.sample_index == sample.sample_index]
                found.append((sample.token_ids, sample.support_logprobs, sample.sampling_masks))
                assert joined(own) == found[-1]
    columns = [(each.support_logprobs, each.sampling_masks) for each in wanted]
    assert found == [(w.completion_tokens, *c) for w, c in zip(wanted, columns, strict=True)]


def joined(chunks: list[CompletionChunk]) -> tuple[Any, ...]:
    return (
        tuple(each for chunk in chunks for each in chunk.token_ids),
        tuple(each for chunk in chunks for each in chunk.support_logprobs or ()),
        tuple(each for chunk in chunks for each in chunk.sampling_masks or ()),
    )
