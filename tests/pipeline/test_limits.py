"""At and beyond the limits: of lengths, of the cache, of the queue."""

from __future__ import annotations

import gc
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import pytest

from nano_inference import (
    EngineConfig,
    InferenceEngine,
    RequestError,
    SamplingParams,
)
from nano_inference.stages.batching import Sequence

from ..soaking import in_soak
from ..stages.batching.index import check_index
from . import short_model
from .builders import raises
from .watch import Watch, watch

CacheType = Literal["radix", "paged"]

VOCAB = 700
"""Ids below this are no special ones."""
BYTES_PER_TOKEN = 512
"""KV of the short model in float32."""


def config_for(num_tokens: int, **settings: Any) -> EngineConfig:
    """A lane whose cache holds so many tokens."""
    return EngineConfig(
        model_path=str(short_model.folder()),
        dtype="float32",
        kv_cache_bytes=num_tokens * BYTES_PER_TOKEN,
        **settings,
    )


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)


def prompts_of(lengths: list[int], seed: int = 0) -> list[list[int]]:
    """Token ids at random: no two prompts begin alike."""
    rng = random.Random(seed)
    rest = [[rng.randrange(4, VOCAB) for _ in range(length - 1)] for length in lengths]
    return [[4 + number, *tokens] for number, tokens in enumerate(rest)]


def sequences() -> list[Sequence]:
    """Return all sequences that are alive."""
    return [it for it in gc.get_objects() if type(it) is Sequence]


@contextmanager
def empty_at_the_end(config: EngineConfig) -> Iterator[InferenceEngine]:
    """An engine that must hold nothing of any request when the test is over."""
    others = sequences()
    before = {id(it) for it in others}
    with InferenceEngine(config) as engine:
        yield engine
        while not engine._batching.idle:
            engine.step()
        assert not engine.has_pending()
        engine._batching.check()
        check_index(engine._batching.cache)
        assert engine._batching.cache.num_free_blocks() == engine._batching.cache.num_blocks
        assert len(engine._streaming) == 0
        assert not [it for it in sequences() if id(it) not in before]


# --- lengths ------------------------------------------------------------------------------------


def test_a_prompt_must_leave_room_for_one_token() -> None:
    with empty_at_the_end(config_for(256, max_model_len=128)) as engine:
        fits, too_long = prompts_of([127, 128])
        (sample,) = engine.generate([fits], greedy(50))
        assert (len(sample.completion_tokens), sample.finish_reason) == (1, "length")
        with raises("prompt_too_long", "shorten it to 127 or fewer"):
            engine.generate([fits, too_long], greedy(50))


def test_a_completion_ends_where_the_models_length_does() -> None:
    with empty_at_the_end(config_for(256, max_model_len=128)) as engine:
        for length in (1, 15, 16, 17, 100):
            (prompt,) = prompts_of([length])
            (sample,) = engine.generate([prompt], greedy(10**6))
            assert (len(sample.completion_tokens), sample.finish_reason) == (128 - length, "length")


def test_a_prompt_longer_than_the_cache_is_refused_alone() -> None:
    with empty_at_the_end(config_for(128, max_model_len=128)) as engine:
        for length in (129, 5000):
            with pytest.raises(RequestError, match=f"the prompt has {length}, so"):
                engine.add_request(*prompts_of([length]), greedy(4))
        assert len(engine.generate(prompts_of([120]), greedy(4))) == 1


# --- preemption ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("cache_type", "seed"), [("radix", 0), in_soak("paged", 1)])
def test_preemptions_cost_no_more_steps_than_running_one_by_one(
    cache_type: CacheType, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cache for one long sequence; sixteen that want to run, of all lengths, come at random.

    The bound: no more steps than the same sequences would take one after the other. It can't be
    kept by a scheduler that lets two sequences push each other out without getting on.
    """
    rng = random.Random(seed)
    lengths = [rng.choice([1, 8, 30, 70]) for _ in range(16)]
    prompts = prompts_of(lengths, seed)
    max_tokens = [rng.randrange(1, 112 - length) for length in lengths]
    config = config_for(
        112,
        max_model_len=112,
        max_batch_size=8,
        max_tokens_per_batch=16,
        block_size=rng.choice([1, 4, 16]),
        cache_type=cache_type,
    )
    one_by_one = sum(
        -(-length // 16) + number - 1 for length, number in zip(lengths, max_tokens, strict=True)
    )
    with empty_at_the_end(config) as engine:
        seen = watch(engine, monkeypatch)
        queue = list(zip(prompts, max_tokens, strict=True))
        found: dict[tuple[int, ...], tuple[int, ...]] = {}
        while queue or engine.has_pending():
            while queue and rng.random() < 0.3:
                prompt, number = queue.pop()
                engine.add_request(prompt, greedy(number))
            before = seen.steps
            waiting = engine.has_pending()
            for sample in engine.step():
                assert sample.finish_reason == "length"
                found[sample.prompt_tokens] = sample.completion_tokens
            assert seen.steps == before + waiting, "a step without any row"
            assert seen.steps <= one_by_one
        assert seen.preempted > 5, "there was to be a storm"
        assert seen.longest_loop <= 2, "the same victim again and again, and no token in between"
        monkeypatch.undo()
    with InferenceEngine(config_for(8192, max_model_len=112)) as roomy:
        expected = roomy.generate(prompts, list(map(greedy, max_tokens)))
    assert found == {s.prompt_tokens: s.completion_tokens for s in expected}


# --- the queue ----------------------------------------------------------------------------------


def work_of_a_queue(prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch) -> Watch:
    """Queues all prompts at once and runs them."""
    config = config_for(8192, max_model_len=64, max_batch_size=BATCH)
    with empty_at_the_end(config) as engine, monkeypatch.context() as patched:
        seen = watch(engine, patched)
        samples = engine.generate(prompts, greedy(2))
    assert [list(sample.prompt_tokens) for sample in samples] == prompts
    assert {len(sample.completion_tokens) for sample in samples} == {2}
    assert list(seen.starts) == sorted(seen.starts), "first come, first served"
    # Within a batch one may take a step more than another.
    assert all(abs(seq_id - place) <= BATCH for place, seq_id in enumerate(seen.order, start=1))
    assert len(seen.order) == len(prompts)
    return seen


BATCH = 64
QUEUES = {
    "different": lambda number: [[4 + i % VOCAB, 4 + i // VOCAB, 9] for i in range(number)],
    "alike": lambda number: [list(range(50))] * number,
}


@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.parametrize("kind", ["different", in_soak("alike")])
def test_planning_a_step_is_no_more_work_however_many_wait(
    kind: str, monkeypatch: pytest.MonkeyPatch, soak: bool
) -> None:
    """10,000 (every day 1,000) against 200, all queued at once: as many looks at waiting sequences
    in a step."""
    number = 10_000 if soak else 1_000
    few = work_of_a_queue(QUEUES[kind](200), monkeypatch)
    many = work_of_a_queue(QUEUES[kind](number), monkeypatch)
    assert many.steps >= number // BATCH
    assert max(few.looks) <= max(many.looks) <= 2 * BATCH
