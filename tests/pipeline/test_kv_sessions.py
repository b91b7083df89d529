"""Sessions through the interfaces of a client: requests, calls, and what their answers say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from nano_inference import EngineConfig, InferenceEngine, Pipeline, SamplingParams
from nano_inference.bus.public import Completion, KVSession, KVSessionResult
from nano_inference.config import RequestError
from nano_inference.stages.batching import BatchingCore
from nano_inference.stages.executor.core import ExecutorCore
from nano_inference.stages.streaming.core import StreamingCore

from . import short_model
from .builders import asking, break_once, end_of, error_code
from .conftest import MakeConfig, both_buses

SHORT_MODEL = True
GREEDY = SamplingParams(temperature=0, max_tokens=17, ignore_eos=True)
SMALL = {"max_model_len": 256, "max_batch_size": 4, "kv_cache_bytes": 400_000}
PROMPT = [40 + i % 60 for i in range(64)]
OTHERS = [[41 + (i * n) % 70 for i in range(200)] for n in range(2, 8)]


def engine(**settings: Any) -> InferenceEngine:
    folder = str(short_model.folder())
    return InferenceEngine(EngineConfig(model_path=folder, dtype="float32", **SMALL | settings))


def turn(made: InferenceEngine, prompt: list[int], **session: Any) -> list[int]:
    wish = KVSession(id="agent", **session)
    (sample,) = made.generate([prompt], GREEDY, kv_sessions=[wish])
    assert sample.kv_session is not None
    assert sample.kv_session.outcome == "accepted"
    return [*prompt, *sample.completion_tokens]


def cached(made: InferenceEngine) -> int:
    return made._batching.take_counters().cached


@pytest.mark.parametrize("cache_type", ["paged", "radix"])
def test_turns_of_a_session_give_the_same_tokens_and_find_their_kv(cache_type: str) -> None:
    with engine(cache_type=cache_type) as made:
        first = turn(made, PROMPT)
        made.generate(OTHERS, GREEDY)
        cached(made)
        second = turn(made, first)
        assert cached(made) == 80
        assert made.kv_session("agent", "release").num_tokens == 96
        made.generate(OTHERS, GREEDY)
        cached(made)
        assert made.kv_session("agent", "pin").outcome == "missing"
    with engine() as made:
        (plain,) = made.generate([PROMPT], GREEDY)
        assert first == [*PROMPT, *plain.completion_tokens]
        (plain,) = made.generate([first], GREEDY)
        assert second == [*first, *plain.completion_tokens]


def test_a_demoted_session_is_prefetched_from_host_memory_and_disk(tmp_path: Path) -> None:
    with engine(kv_host_bytes=1 << 20) as made:
        expected = turn(made, turn(made, PROMPT))
    for settings in ({"kv_host_bytes": 4 << 20}, {"kv_disk_path": str(tmp_path)}):
        with engine(**settings) as made:
            first = turn(made, PROMPT)
            result = made.kv_session("agent", "demote")
            assert (result.outcome, result.tier, result.num_tokens) == ("accepted", "host", 80)
            made.generate(OTHERS, GREEDY)
            if "kv_disk_path" in settings:
                tiers = made._tiers
                assert tiers is not None
                made._batching.change_tiers(tiers.on_disk())
                made._batching.cache.tiers.forget_host()  # type: ignore[union-attr]
            result = made.kv_session("agent", "prefetch")
            assert (result.outcome, result.tier, result.num_tokens) == ("accepted", "device", 80)
            cached(made)
            assert turn(made, first) == expected
            assert cached(made) == 80


def test_calls_and_fields_of_the_engine_are_checked() -> None:
    with engine() as made:
        with pytest.raises(RequestError, match="pin, release, demote, prefetch") as refused:
            made.kv_session("agent", "keep")  # type: ignore[arg-type]
        assert refused.value.code == "invalid_kv_session"
        for wrong in (KVSession(id="a", after="keep"), KVSession(id=""), "a"):  # type: ignore[arg-type]
            with pytest.raises(RequestError) as refused:
                made.generate([PROMPT], GREEDY, kv_sessions=[wrong])  # type: ignore[list-item]
            assert refused.value.code == "invalid_kv_session"
        with pytest.raises(RequestError, match="one sample"):
            made.generate([PROMPT], GREEDY, 2, kv_sessions=[KVSession(id="a")])
        with pytest.raises(RequestError, match="1 prompts and 2 kv_sessions"):
            made.generate([PROMPT], GREEDY, kv_sessions=[None, None])
        assert made.kv_session("a", "pin").outcome == "missing"


def session(id: str = "agent", **fields: Any) -> dict[str, Any]:
    given = asking(prompt_token_ids=PROMPT, tokens=17, kv_session={"id": id, **fields})
    del given["prompt"]
    return given


async def answer(pipeline: Pipeline, request: dict[str, Any]) -> Completion:
    return await end_of(pipeline.submit(request))


def what(result: KVSessionResult | None) -> tuple[str, int]:
    assert result is not None
    return result.outcome, result.num_tokens


@both_buses()
async def test_the_completion_and_the_call_say_what_became_of_it(pipeline: Pipeline) -> None:
    completion = await answer(pipeline, session())
    assert what(completion.kv_session) == ("accepted", 80)
    assert what(await pipeline.client.kv_session("agent", "release")) == ("accepted", 80)
    assert what(await pipeline.client.kv_session("agent", "prefetch", ttl_s=9)) == ("accepted", 80)
    assert what(await pipeline.client.kv_session("agent", "demote")) == ("accepted", 80)
    assert what(await pipeline.client.kv_session("agent", "pin", tenant="other")) == ("missing", 0)
    assert what(await pipeline.client.kv_session("agent", "pin", ttl_s=1e9)) == ("rejected", 0)
    await pipeline.client.flush_cache()
    assert what(await pipeline.client.kv_session("agent", "prefetch")) == ("missing", 0)
    plain = await answer(pipeline, asking())
    assert plain.kv_session is None
    refused = await answer(pipeline, session("\n"))
    assert error_code(refused) == "invalid_kv_session"


@pytest.mark.parametrize(
    ("owner", "method", "keeps"),
    [
        (StreamingCore, "absorb", True),
        (BatchingCore, "absorb", False),
        (ExecutorCore, "execute", False),
    ],
)
async def test_a_turn_that_is_replayed_is_kept_like_any_other(
    owner: type,
    method: str,
    keeps: bool,
    make_config: MakeConfig,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A session without a turn outlives a failure only where its KV and its table do."""
    async with Pipeline(make_config(pipeline__restart_backoff_s=0.01)) as pipeline:
        before = await answer(pipeline, session("before"))
        break_once(monkeypatch, owner, method, after=9)
        completion = await answer(pipeline, session())
        assert completion.samples[0].token_ids == before.samples[0].token_ids
        assert what(completion.kv_session) == ("accepted", 80)
        client = pipeline.client
        assert what(await client.kv_session("agent", "pin")) == ("accepted", 80)
        expected = ("accepted", 80) if keeps else ("missing", 0)
        assert what(await client.kv_session("before", "pin")) == expected


async def test_a_session_is_found_in_any_replica(make_config: MakeConfig) -> None:
    config = make_config(**{"pipeline.replicas": 2})
    async with Pipeline(config) as pipeline:
        for number in range(4):
            completion = await answer(pipeline, session(str(number)))
            assert what(completion.kv_session) == ("accepted", 80)
        for number in range(4):
            assert what(await pipeline.client.kv_session(str(number), "pin")) == ("accepted", 80)
        assert what(await pipeline.client.kv_session("5", "pin")) == ("missing", 0)


async def test_a_turn_that_is_handed_over_is_kept_where_it_ended(make_config: MakeConfig) -> None:
    roles = {"pipeline.replicas": 2, "pipeline.roles": ["prefill", "decode"]}
    async with Pipeline(make_config(**roles)) as pipeline:
        completion = await answer(pipeline, session())
        assert what(completion.kv_session) == ("accepted", 80)
        assert what(await pipeline.client.kv_session("agent", "pin")) == ("accepted", 80)
        assert what(await pipeline.client.kv_session("agent", "release")) == ("accepted", 80)
